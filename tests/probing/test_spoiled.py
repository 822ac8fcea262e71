"""Folders of runs that somebody has spoiled, shares, or fills: nothing wrong, nothing let in."""

import errno
import json
import os
import shlex
import shutil
import signal
import threading
import time

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file

from infoflow_lens import InfoFlowError
from infoflow_lens.foundation import files
from infoflow_lens.foundation.files import let_own
from infoflow_lens.foundation.saving import read_state, write_state
from infoflow_lens.hooks.model.inputs import Batches
from infoflow_lens.probing import run as run_module
from infoflow_lens.probing import shard
from infoflow_lens.probing.config import ProbingConfig
from infoflow_lens.probing.run import run_probing
from infoflow_lens.probing.store import store_sequences
from infoflow_lens.runs.checkpoint import Checkpoint
from infoflow_lens.runs.folder import MANIFEST, PRIVATE, RunFolder
from tests.conftest import some_of
from tests.fuzz import OF_A_RUN, SPOILS, spoiled
from tests.processes import started
from tests.reference import zoo

ALWAYS = ("manifest.jsonl", "influence.safetensors", "inputs/sequences.arrow")
TABLES = ("positions.csv", "influence.csv", "agreement.csv", "coverage_curve.csv")


pytestmark = pytest.mark.filterwarnings(  # few rows are told of
    "ignore::infoflow_lens.foundation.errors.InfoFlowWarning"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpt2")
    zoo.save("gpt2", path)
    return path


def settings(folder, **changes):
    given = {
        "data": "repeated", "n": 6, "max_length": 8, "ranks": (1,), "n_detail": 2, "batch_size": 2,
        "shard": 4, "probes": ("positions", "influence"),
    }  # fmt: skip
    return ProbingConfig(str(folder), **{**given, **changes})


def run(out, config):
    return run_probing(out, config, progress=False)


def attempted(out, config):
    """What a run is refused with; nothing if it ends well."""
    try:
        run(out, config)
    except InfoFlowError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    run(out, settings(folder))
    return out


@pytest.fixture
def out(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "out")
    return tmp_path / "out"


def same_tables(out, finished):
    return all((out / name).read_bytes() == (finished / name).read_bytes() for name in TABLES)


@pytest.fixture(scope="module")
def measured(folder):
    """What the model shows; loaded once for all spoiled folders."""
    from infoflow_lens.models.loading import load_any

    return load_any(str(folder))


@pytest.mark.parametrize("name", some_of(OF_A_RUN, *ALWAYS))
def test_a_spoiled_file_is_named_or_made_anew(name, out, finished, folder, monkeypatch, measured):
    monkeypatch.setattr(run_module, "load_any", lambda *args, **kwargs: measured)
    if name.startswith("."):
        with let_own(RunFolder(out)):
            Checkpoint(RunFolder(out), name).save({"begun": torch.zeros(3)})
        (out / "influence.json").unlink()
    whole = (out / name).read_bytes()
    for how in SPOILS:
        spoiled(out / name, how, 0.5, b"\x80\x04N.")
        said = attempted(out, settings(folder))
        if said:
            # a line of the manifest that is spoiled makes the file that it named another's
            names = [name.removesuffix(".json").removesuffix(".safetensors"), "influence.json"]
            assert any(each in said for each in names[: 1 + (name == MANIFEST)])
        else:
            assert same_tables(out, finished), how
        shutil.rmtree(out / name) if (out / name).is_dir() else (out / name).unlink(missing_ok=True)
        (out / name).write_bytes(whole)


class Calls:
    """What a pickle would call when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return files.write_text, (str(self.path), "written")


@pytest.mark.parametrize("name", [".all.safetensors", ".all.pt", "positions.safetensors"])
def test_a_pickle_in_a_folder_calls_nothing(out, folder, tmp_path, name):
    """The unfinished run of earlier versions wrote a file of an attacker's choice."""
    for finished in out.glob("positions.*"):
        if name.startswith("."):
            finished.unlink()
    torch.save({"positions": Calls(tmp_path / "target")}, out / name)
    said = attempted(out, settings(folder))
    assert (name in said) is (name != ".all.pt")  # which nothing reads any more
    assert not (tmp_path / "target").exists()


def test_data_that_are_a_pickle_call_nothing(folder, tmp_path):
    torch.save(Calls(tmp_path / "target"), tmp_path / "data.pt")
    with pytest.raises(InfoFlowError, match=r"data.pt.* cannot be read as a tensor"):
        run(tmp_path / "out", settings(folder, data=str(tmp_path / "data.pt")))
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("what", ["weights", "configuration", "tokenizer", "versions", "settings"])
def test_nothing_is_taken_from_another_run(out, folder, tmp_path, monkeypatch, what):
    changed, changes = tmp_path / "model", {}
    shutil.copytree(folder, changed)
    (changed / "x").touch()
    if what == "weights":
        weights = load_file(changed / "model.safetensors")
        first = next(iter(weights))
        weights[first] = weights[first] + 1e-3
        save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
    elif what == "configuration":
        config = json.loads((changed / "config.json").read_text())
        config["activation_function"] = "relu"
        (changed / "config.json").write_text(json.dumps(config))
    elif what == "tokenizer":
        words = (changed / "tokenizer.json").read_text()
        (changed / "tokenizer.json").write_text(words.replace('"w7"', '"other"'))
    elif what == "versions":
        from infoflow_lens.foundation import packages as module

        now = {**module.package_versions(), "torch": "1.0"}
        monkeypatch.setattr(module, "package_versions", lambda: now)
    else:
        changes["metric"] = "nmse"
    shutil.rmtree(folder.with_name("kept"), ignore_errors=True)
    folder.rename(folder.with_name("kept"))  # the model's name is a setting, too
    changed.rename(folder)
    try:
        with pytest.raises(InfoFlowError, match=what):
            run(out, settings(folder, **changes))
    finally:
        shutil.rmtree(folder)
        folder.with_name("kept").rename(folder)


def test_a_hostile_folder_does_not_speak_to_the_terminal(out, folder):
    with RunFolder.open(out, "a run") as hostile:
        hostile.identity["versions (torch)"] = "\x1b]0;owned\x07"
    said = attempted(out, settings(folder))
    assert "torch" in said
    assert said.isprintable()


@pytest.mark.parametrize("change", ["weights elsewhere", "data elsewhere", "what is shown"])
def test_a_run_goes_on_with_the_same_contents_elsewhere(
    out, finished, folder, tmp_path, monkeypatch, change
):
    """A requeued job has its model and its data in another folder, and the page may change."""
    monkeypatch.setattr(shard, "run_shard", None)  # nothing is measured again
    changes = {}
    if change == "weights elsewhere":
        folder = shutil.copytree(folder, tmp_path / "moved")
    elif change == "data elsewhere":
        table = Dataset.from_file(str(out / "inputs" / "sequences.arrow"))
        ids = torch.tensor(list(table["input_ids"]))
        save_file({"ids": ids}, tmp_path / "ids.safetensors")
        changes = {"data": str(tmp_path / "ids.safetensors"), "n": None, "max_length": 100}
    else:
        changes = {"n_shown": 1, "device": "cpu:0"}
    shutil.move(out, tmp_path / "elsewhere")
    run(tmp_path / "elsewhere", settings(folder, **changes))
    assert same_tables(tmp_path / "elsewhere", finished)


def test_two_runs_at_once_in_one_folder(out, folder):
    with (
        RunFolder.open(out, "infoflow-lens probe"),
        pytest.raises(
            InfoFlowError, match=rf"written by infoflow-lens probe, process {os.getpid()}"
        ),
    ):
        run(out, settings(folder))


def test_a_folder_keeps_what_others_put_there(out, folder):
    """What they download, and what lies beside files of the run."""
    theirs = [".movie.mkv.part", "downloads/.rsync.part/x", "inputs/notes.txt", "positions/notes"]
    for name in theirs:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(name)
    for name in ("positions.json", "influence.json"):  # measured again
        (out / name).unlink()
    run(out, settings(folder))
    assert [(out / name).read_text() for name in theirs] == theirs


@pytest.fixture(scope="module")
def other_weights(folder, finished, tmp_path_factory):
    """A run of the same settings on other weights, which has the same name."""
    out = tmp_path_factory.mktemp("other")
    path = folder / "model.safetensors"
    before = path.read_bytes()
    save_file({k: v * 1.5 for k, v in load_file(path).items()}, path, metadata={"format": "pt"})
    try:
        run(out, settings(folder))
    finally:
        path.write_bytes(before)
    return out


MIXES = {
    "all but the manifest": [
        ("other", f"positions/{i:06d}", f"positions/{i:06d}") for i in range(2)
    ]
    + [("other", name, name) for name in ("positions", "influence")],
    "a part of another run": [("other", "positions/000001", "positions/000001")],
    "every part of another run": [
        ("other", f"positions/{i:06d}", f"positions/{i:06d}") for i in range(2)
    ],
    "one part over the next": [("out", "positions/000000", "positions/000001")],
    "parts and what tells of them": [
        *(("other", f"positions/{i:06d}", f"positions/{i:06d}") for i in range(2)),
        ("other", "positions", "positions"),
    ],
}


@pytest.mark.parametrize("mix", MIXES)
def test_parts_of_another_run_never_enter_the_numbers(mix, out, other_weights, folder):
    places = {"other": other_weights, "out": out}
    for source, name, target in MIXES[mix]:
        for end in ("json", "safetensors"):
            shutil.copy(places[source] / f"{name}.{end}", out / f"{target}.{end}")
    with pytest.raises(InfoFlowError, match="positions"):
        run(out, settings(folder))


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
@pytest.mark.parametrize("name", ["positions", "inputs"])
def test_a_link_to_the_folder_of_another_run_is_refused(name, other_weights, folder, tmp_path):
    before = {p: p.read_bytes() for p in other_weights.rglob("*") if p.is_file()}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(other_weights / name)
    with pytest.raises(InfoFlowError, match=rf"{name}' is a link"):
        run(tmp_path / "out", settings(folder))
    assert {p: p.read_bytes() for p in other_weights.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "No space left on device.*is kept"), (errno.EXDEV, "cross-device.*one disk")],
)
def test_a_full_disk_or_another_one_is_one_error_and_what_was_finished_stays(
    tmp_path, folder, monkeypatch, number, remedy
):
    """A part of the folder may be mounted from elsewhere."""
    finished = []
    replace = os.replace

    def full(source, target):
        if "influence" in target.name:
            raise OSError(number, os.strerror(number))
        finished.append(target.name)
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(InfoFlowError, match=rf"cannot write .*{remedy}"):
            run(tmp_path / "out", settings(folder))
    assert "positions.json" in finished
    assert (tmp_path / "out" / "positions.json").is_file()
    run(tmp_path / "out", settings(folder))


def store_zeros(folder):
    store_sequences([Batches(None, torch.zeros(4, 2000))], folder, "the data")


@pytest.mark.skipif(os.name == "nt", reason="POSIX limits")
@pytest.mark.parametrize(
    "write", [lambda folder: write_state(folder / "x", {"x": torch.zeros(10_000)}),
              store_zeros],
)  # fmt: skip
def test_a_write_that_the_system_refuses(tmp_path, write):
    """The system's own answer, from inside of safetensors and of Arrow."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(InfoFlowError, match=r"cannot write .*File too large"):
            write(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.glob("x*"))


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_every_finished_batch(tmp_path, folder, number):
    """However short ago the state was written: behind the batch that runs."""
    config = settings(folder, probes=("positions",), n=4000)
    arguments = ["--data", "repeated", "--n", "4000", "--max-length", "8", "--ranks", "1",
                 "--n-detail", "2", "--batch-size", "2", "--probes", "positions"]  # fmt: skip
    arguments = ["probe", str(folder), "--out", "out", "--quiet", *arguments]
    with started("-m", "infoflow_lens.cli", *arguments, folder=tmp_path) as program:
        program.wait_until(lambda: "positions" in program.stderr)
        time.sleep(0.5)
        program.send_signal(number)
        assert program.wait(60) == 130
        assert "stopping after this batch" in program.stderr
        hint = program.stderr.partition("go on with python -m infoflow_lens.cli ")[2]
        assert sorted(shlex.split(hint)) == sorted(arguments)
        assert "Traceback" not in program.stderr
    state = Checkpoint(RunFolder(tmp_path / "out"), ".all.safetensors").load()
    assert 0 < state["n_seen"] + state["begun"]["positions"]["n_sequences"] < config.n
    assert not (tmp_path / "out" / PRIVATE).exists()


def test_a_signal_to_a_run_in_a_thread_is_left_alone(out, folder):
    """Handlers are put up in the main thread alone, and taken down again."""
    before = signal.getsignal(signal.SIGINT)
    (out / "positions.json").unlink()
    thread = threading.Thread(target=lambda: run(out, settings(folder)))
    thread.start()
    thread.join()
    assert (out / "positions.json").is_file()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_state_that_was_taken_is_written_when_the_run_is_stopped(tmp_path):
    """In time, or at the end of a run that was stopped: what came last is on disk."""
    folder = RunFolder(tmp_path)
    rare = Checkpoint(folder, ".part.safetensors", seconds=1e9)
    rare.flush()
    rare.take({"n": 1})
    rare.take({"n": 2})
    assert not rare.path.exists()
    rare.flush()
    assert read_state(rare.path, "a state", "") == {"n": 2}
    often = Checkpoint(folder, ".part.safetensors", seconds=0)
    often.take({"n": 3})
    assert read_state(rare.path, "a state", "") == {"n": 3}
