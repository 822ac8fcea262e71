"""A survey of a language model: whole, killed and resumed to the same bytes, refused."""

import json
from contextlib import contextmanager

import pandas as pd
import pytest
import torch

from infoflow_lens import InfoFlowError, save_model
from infoflow_lens.foundation import memory
from infoflow_lens.probing import measuring, shard
from infoflow_lens.probing import run as run_module
from infoflow_lens.probing.config import SurveyConfig
from infoflow_lens.probing.parts import (
    LabelsPart,
    RoutesPart,
    TopKPart,
)
from infoflow_lens.probing.run import run_survey
from infoflow_lens.runs.checkpoint import Checkpoint
from infoflow_lens.runs.executor import Executor
from infoflow_lens.studies.constructions import build_construction
from tests.conftest import some_of
from tests.reference import zoo

N_HEADS = zoo.N_LAYERS * 2


pytestmark = pytest.mark.filterwarnings(  # few rows are told of
    "ignore::infoflow_lens.foundation.errors.InfoFlowWarning"
)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("survey")
    zoo.save("gpt2", folder / "gpt2", n_head=2)
    text = "\n".join(" ".join(f"w{(7 * i + j * j) % 30 + 4}" for j in range(11)) for i in range(20))
    (folder / "text.txt").write_text(text)
    return SurveyConfig(
        str(folder / "gpt2"), str(folder / "text.txt"), n=12, window=10, batch_size=3
    )


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    return run_survey(out, config, progress=False)


def test_a_survey_gives_a_row_for_each_head(whole):
    heads = pd.read_csv(whole.out / "heads.csv")
    assert len(heads) == N_HEADS
    found = whole.labels.to_frame()
    assert heads["label"].tolist() == found["label"].tolist()
    assert heads["worth"].to_numpy() == pytest.approx(found["worth"].to_numpy())
    recovered = whole.recovery.to_frame()
    first = recovered[recovered["rank"] == 1]["fvu"]
    assert heads["fvu_1"].to_numpy() == pytest.approx(first.to_numpy())
    least = whole.found["top_k"].least()
    assert heads["layer_k"].tolist() == [least[layer] for layer in heads["layer"]]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_several_processes_measure_the_same(whole, config, tmp_path):
    run_survey(tmp_path, config, progress=False, jobs=2, n_threads=1)
    numbers = [pd.read_csv(out / "heads.csv") for out in (whole.out, tmp_path)]
    pd.testing.assert_frame_equal(*numbers, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_parts_are_measured_by_workers_to_the_same_bytes(config, tmp_path, monkeypatch):
    """Nothing is measured in this process, and what workers leave is what one process leaves."""
    one, two = tmp_path / "one", tmp_path / "two"
    run_survey(one, config, progress=False, n_threads=1)

    def refuse(*args, **settings):
        pytest.fail("measured in this process")

    monkeypatch.setattr(measuring, "run_in_shards", refuse)
    for part in (LabelsPart, RoutesPart, TopKPart):
        monkeypatch.setattr(part, "measure", refuse)
    run_survey(two, config, progress=False, jobs=2)
    names = {path.name for path in one.iterdir() if path.suffix in (".safetensors", ".csv")}
    assert {"labels.safetensors", "routes.csv", "influence.safetensors"} <= names
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


def test_labels_are_judged_on_other_windows(whole):
    assert whole.labels.n_sequences == whole.labels.n_judged == 3


def test_the_page_tells_of_every_part(whole):
    page = (whole.out / "report.html").read_text()
    for name in ("labels", "top_k", "positions", "recovery"):
        assert whole.parts[name].title in page


class Killed(BaseException):
    """What nothing catches."""


@pytest.mark.parametrize("at", some_of([1, 6, 25]))
def test_killed_and_resumed_it_gives_the_same_bytes(whole, config, tmp_path, monkeypatch, at):
    """Killed at a state on disk: what a process leaves that is gone at that moment."""
    states = []

    def save(self, state, save=Checkpoint.save):
        save(self, state)
        states.append(self.path.name)
        if len(states) == at:
            raise Killed

    def keep(self, state, now=False):
        self.save(state())  # at every batch, as if each took long
        return True

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", save)
        patch.setattr(Checkpoint, "keep", keep)
        with pytest.raises(Killed):
            run_survey(tmp_path, config, progress=False)
    assert not (tmp_path / "heads.csv").exists()
    run_survey(tmp_path, config, progress=False)

    def files_in(folder):
        paths = folder.rglob("*")
        return sorted(path.relative_to(folder) for path in paths if path.is_file())

    names = files_in(whole.out)
    assert files_in(tmp_path) == names
    differing = [n for n in names if (tmp_path / n).read_bytes() != (whole.out / n).read_bytes()]
    assert differing == []


def test_short_windows_have_fewer_ranks(config):
    ranks = {w: SurveyConfig(**{**vars(config), "window": w}).probing().ranks for w in (3, 4, 9)}
    assert ranks == {3: (1, 2, 3), 4: (1, 2, 3, 4), 9: (1, 2, 3, 4)}


def test_the_hint_for_too_little_text_is_right(config, tmp_path):
    """What it names is the largest n that runs; where none runs, no n is named."""
    data = tmp_path / "short.txt"
    data.write_text(" ".join(f"w{i}" for i in range(5, 27)))

    def survey(n, window):
        changes = {"data": str(data), "window": window, "n": n, "batch_size": 12}
        return run_survey(tmp_path, SurveyConfig(**{**vars(config), **changes}), progress=False)

    with pytest.raises(
        InfoFlowError, match=r"hold 3 windows .*give more text, or a smaller window$"
    ):
        survey(7, 7)
    assert len(survey(40, 4).found["positions"].lengths) > 0


def test_bfloat16_is_measured(config, tmp_path):
    before = torch.random.get_rng_state()
    found = run_survey(
        tmp_path,
        SurveyConfig(**{**vars(config), "dtype": "bfloat16", "batch_size": 12}),
        progress=False,
    )
    assert torch.random.get_rng_state().equal(before)
    assert found.capabilities.dtype == "bfloat16"
    assert json.loads((tmp_path / "record.json").read_text())["config"]["dtype"] == "bfloat16"
    assert found.labels.damage.isfinite().all()


def test_memory_is_asked_before_work(config, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(memory, "free_on", lambda device: 2**20)
    with pytest.raises(InfoFlowError, match=r"need.* of memory on cpu"):
        run_survey(tmp_path, config, progress=False, say=asked.append)
    assert [line for line in asked if line.startswith("positions")] == []


class EndedError(Exception):
    """What a run ends with that has shown what is asked."""


def test_memory_is_asked_for_all_processes(whole, config, tmp_path, monkeypatch):
    """Each holds the libraries and a model; there are no more than parts. It was that of one."""

    def refuse(*args):
        raise EndedError

    monkeypatch.setattr(run_module, "measure_parts", refuse)
    monkeypatch.setattr(memory, "free_on", lambda device: 10**9)
    with pytest.raises(EndedError):
        run_survey(tmp_path / "one", config, progress=False)
    for jobs, n in ((2, 2), (64, len(whole.parts))):
        with pytest.raises(InfoFlowError, match=f"^{n} runs at a time need .* fewer jobs"):
            run_survey(tmp_path / "more", config, progress=False, jobs=jobs)


def test_results_that_grow_are_to_fit_beside_those_of_other_workers(config, tmp_path, monkeypatch):
    """Influence of the first sequences and positions of all grow at the same time."""
    tasks, counted = [], []

    @contextmanager
    def start_workers(self, kept):
        def run(function, units, each_second):
            tasks.extend(unit.value for unit in units if unit or refuse())
            yield from ()

        yield run

    def refuse():
        raise EndedError

    def count(self, probes, n):
        counted.append(self.n_processes)

    monkeypatch.setattr(Executor, "start_workers", start_workers)
    monkeypatch.setattr(shard.SpaceCheck, "check", count)
    for jobs in (2, 3):
        with pytest.raises(EndedError):
            run_survey(tmp_path / str(jobs), config, progress=False, jobs=jobs)
    for task in tasks:
        if "positions" in task.parts:
            measuring._measure_in_worker(task)
    assert counted
    assert set(counted) == {2}  # of three processes, too: the third has no probes


def test_what_a_model_cannot_give_is_left_out_and_told(tmp_path):
    model, _ = build_construction("d_retrieval", n_tokens=6)
    save_model(model, tmp_path / "model")
    said = []
    found = run_survey(
        tmp_path / "out",
        SurveyConfig(str(tmp_path / "model"), "d_retrieval", n=24),
        progress=False,
        say=said.append,
    )
    assert "top_k" not in found.parts
    assert sum("predicts no next token" in line for line in said) == 1
    assert len(pd.read_csv(tmp_path / "out" / "heads.csv")) == sum(
        layer.n_heads for layer in found.capabilities.layers
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 3}, "n is 3"),
        ({"window": 2}, "window is 2"),
        ({"window": 500}, "expected at least"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
    ],
)
def test_bad_settings_are_refused_before_work(config, tmp_path, changes, message):
    with pytest.raises(InfoFlowError, match=message):
        run_survey(tmp_path, SurveyConfig(**{**vars(config), **changes}), progress=False)
    assert not list(tmp_path.glob("*.safetensors"))
