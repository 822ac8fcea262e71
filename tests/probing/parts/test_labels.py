"""Labels in a probe run: a part that was stopped goes on where it was, to the same bytes."""

import signal
import sys
from dataclasses import replace

import pytest

from infoflow_lens.probing import parts as heads
from infoflow_lens.probing.config import ProbingConfig
from infoflow_lens.probing.run import run_probing
from infoflow_lens.runs.checkpoint import Checkpoint
from infoflow_lens.runs.folder import RunFolder
from tests.conftest import some_of
from tests.processes import started
from tests.reference import zoo


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    paths = zoo.save_with_text("gpt2", tmp_path_factory.mktemp("labels"), 140)
    return ProbingConfig(*paths, probes=("labels",), window=10, n=9, n_detail=8, batch_size=3)


def files_in(folder):
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    run_probing(out, config, progress=False, n_threads=1)
    return files_in(out)


@pytest.mark.parametrize("stop", some_of([1, 7], 7))
def test_after_a_stop_it_goes_on_inside_a_batch(config, whole, tmp_path, monkeypatch, stop):
    resumed, taken = [], []

    def take(self, state, take=Checkpoint.take):
        take(self, state)
        taken.append(state)
        if len(taken) == stop:
            raise KeyboardInterrupt

    def watched(*given, label_heads=heads.label_heads, **options):
        resumed.append(options["resume"])
        return label_heads(*given, **options)

    monkeypatch.setattr(Checkpoint, "take", take)
    monkeypatch.setattr(heads, "label_heads", watched)
    with pytest.raises(KeyboardInterrupt):
        run_probing(tmp_path, config, progress=False, n_threads=1)
    run_probing(tmp_path, config, progress=False, n_threads=1)
    assert resumed[0] is None
    assert resumed[1].keys() == taken[stop - 1].keys()
    assert files_in(tmp_path) == whole
    monkeypatch.setattr(heads, "label_heads", None)  # all is finished: nothing is measured
    run_probing(tmp_path, config, progress=False, n_threads=1)


HALTING = """
import sys, time
from pathlib import Path
from infoflow_lens.probing.config import ProbingConfig
from infoflow_lens.probing.run import run_probing
from infoflow_lens.runs.checkpoint import Checkpoint

def take(self, state):
    self.save(state)  # at every batch, as if each took long
    states.append(self.name)
    if states.count(part) == int(n_states):
        print("here", flush=True)
        time.sleep(1e6)  # until it is killed

Checkpoint.take = take
states = []
model, data, out, part, n_states = sys.argv[1:]
probes = ("top_k", "labels")
config = ProbingConfig(model, data, probes=probes, window=10, n=9, n_detail=6, batch_size=3)
run_probing(out, config, progress=False, n_threads=1)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize(("part", "n_states"), [("top_k", 1), ("labels", 1), ("labels", 9)])
def test_killed_while_a_part_measures_it_goes_on_to_the_same_bytes(
    config, tmp_path, part, n_states
):
    probes = ("top_k", "labels")
    config = replace(config, probes=probes, n_detail=6)
    run_probing(tmp_path / "whole", config, progress=False, n_threads=1)
    script, out, name = tmp_path / "halting.py", tmp_path / "out", f".{part}.safetensors"
    script.write_text(HALTING)
    arguments = (config.model, config.data, out, name, str(n_states))
    with started(script, *arguments, folder=tmp_path) as program:
        program.wait_until(lambda: "here" in program.stdout)
        program.send_signal(signal.SIGKILL)
        assert program.wait(60) == -signal.SIGKILL
    assert not (out / f"{part}.json").exists()
    assert "identity" in Checkpoint(RunFolder(out), name).load()
    run_probing(out, config, progress=False, n_threads=1)
    assert files_in(out) == files_in(tmp_path / "whole")
