"""Shards: the same numbers whoever measures them, and whatever stops them."""

import os
import pickle
import shutil
import signal
from contextlib import nullcontext

import pandas as pd
import pytest
import torch

from infoflow_lens import (
    InfoFlowError,
    PositionsProbe,
    RecoveryProbe,
    load_any,
    probe,
    propagate,
    run_probes,
)
from infoflow_lens.agreement import coverage_curve
from infoflow_lens.foundation.files import let_own
from infoflow_lens.foundation.memory import bytes_in
from infoflow_lens.foundation.saving import write_state
from infoflow_lens.hooks import Result, ShardedPositions
from infoflow_lens.probing import shard, shards
from infoflow_lens.probing.config import ProbingConfig
from infoflow_lens.probing.run import run_probing
from infoflow_lens.runs import executor
from infoflow_lens.runs.executor import Executor
from infoflow_lens.runs.folder import RunFolder
from tests.conftest import some_of
from tests.processes import losing_a_worker
from tests.reference import zoo
from tests.reference.data import read_data

pytestmark = pytest.mark.filterwarnings("ignore::infoflow_lens.foundation.errors.InfoFlowWarning")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = zoo.save("gpt2", tmp_path_factory.mktemp("gpt2"))
    data = tmp_path_factory.mktemp("data") / "texts.txt"
    lines = [" ".join(f"w{(7 * i + j * j) % 30 + 4}" for j in range(2 + i % 9)) for i in range(43)]
    data.write_text("\n".join(lines))
    return ProbingConfig(
        str(folder), str(data), probes=("positions", "recovery"), ranks=(1, 2), batch_size=3,
        shard=10, n_detail=4,
    )  # fmt: skip


def run(out, config, **arguments):
    return run_probing(out, config, progress=False, n_threads=1, **arguments)


def contents(out):
    """All files of a folder; what stands there unfinished too."""
    paths = sorted(path for path in out.rglob("*") if path.is_file())
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"), config)


def test_shards_together_are_one_pass_over_all(whole, config):
    """Held-out sequences, padding and ranks are those of the whole, not of a shard."""
    model = load_any(config.model).model
    data = read_data(model, config.data)
    probes = [PositionsProbe((1, 2), spread=True), RecoveryProbe((1, 2))]
    positions, recovery = run_probes(model, data, probes, batch_size=3, progress=False)
    found = whole.positions
    assert isinstance(found, ShardedPositions)
    assert (found.n_sequences, found.n_shards) == (43, 5)
    pd.testing.assert_frame_equal(found.to_frame(), positions.to_frame(), rtol=1e-4, atol=1e-6)
    pd.testing.assert_frame_equal(found.summary(skip=1), positions.summary(skip=1), rtol=1e-6)
    sets, expected = propagate(found), propagate(positions)
    assert sets.members.equal(expected.members)
    assert sets.lengths.equal(expected.lengths)  # without which padding would count as states
    influence = torch.rand(sets.members.shape, generator=torch.Generator().manual_seed(0)).tril()
    curves = (coverage_curve(each, influence + 0.1) for each in (found, positions))
    assert len({curve.last for curve in curves}) == 1
    pd.testing.assert_frame_equal(whole.recovery.to_frame(), recovery.to_frame(), rtol=1e-4)


def test_a_part_of_the_sequences_is_read_from_few_files(whole, monkeypatch):
    read, load = [], whole.positions.of.load.__func__
    monkeypatch.setattr(
        whole.positions.of,
        "load",
        classmethod(lambda kind, path: read.append(path.name) or load(kind, path)),
    )
    first = whole.positions.first(12)
    assert read == ["000000", "000001"]
    assert first.argmax[1][11, :, :3].equal(whole.positions.whole().argmax[1][11, :, :3])


def test_it_is_loaded_saved_and_plotted_as_any_result(whole, tmp_path):
    again = Result.load(whole.out / "positions")
    again.save(tmp_path / "copy")
    copy = ShardedPositions.load(tmp_path / "copy")
    assert copy.to_frame().equals(whole.positions.to_frame())
    assert copy.plot().axes
    (tmp_path / "copy" / "000003.json").unlink()
    with pytest.raises(InfoFlowError, match=r"000003' is gone \(1 of 5 .* delete that file"):
        ShardedPositions.load(tmp_path / "copy")


def test_what_does_not_fit_in_memory_is_not_read(whole, monkeypatch):
    monkeypatch.setattr("infoflow_lens.hooks.sharded.free_memory", lambda: 1000)
    with pytest.raises(InfoFlowError, match=r"of 43 sequences take .* take the .first\(n\)"):
        whole.positions.argmax  # noqa: B018
    assert len(whole.positions.summary()) == 2 * 4


@pytest.mark.parametrize("stop", some_of([1, 4, 5, 9, 14], 4))
def test_a_stopped_run_goes_on_to_the_same_bytes(whole, config, tmp_path, monkeypatch, stop):
    """Within a shard, at its end, and within the last; one that was killed loses half a minute."""
    passes = []

    def stopping(model, batches, probes, *, after_batch, **settings):
        def after(n):
            after_batch(n)
            passes.append(n)
            if len(passes) == stop:
                raise KeyboardInterrupt

        return original(model, batches, probes, after_batch=after, **settings)

    original = shard.run_shard
    with monkeypatch.context() as patch:
        patch.setattr(shard, "run_shard", stopping)
        with pytest.raises(KeyboardInterrupt, match="go on with the same call"):
            run(tmp_path, config)
        run(tmp_path, config)
    assert len(passes) == 4 * 4 + 1  # of four shards of ten and one of three; none twice
    assert contents(tmp_path) == contents(whole.out)


@pytest.fixture
def in_stretches(config, tmp_path_factory, monkeypatch):
    """A run of five shards in three stretches: two, two and one."""
    monkeypatch.setattr(shards, "_MOST_STRETCHES", 3)
    return run(tmp_path_factory.mktemp("stretches"), config)


def test_stretches_of_shards_give_the_numbers_of_shards(whole, in_stretches):
    pd.testing.assert_frame_equal(in_stretches.positions.to_frame(), whole.positions.to_frame())
    pd.testing.assert_frame_equal(
        in_stretches.recovery.to_frame(), whole.recovery.to_frame(), rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("stop", some_of([2, 4, 6, 8, 11, 16], 11))
def test_who_measures_which_part_of_a_stretch_is_in_no_byte(
    in_stretches, config, tmp_path, monkeypatch, stop
):
    """Begun here, gone on with by workers who come back in turn or backwards, ended here."""
    passes = []

    def counted(self, *args):
        passes.append(None)
        if len(passes) == stop:
            raise KeyboardInterrupt
        look(self, *args)

    def two_units(function, units, each_second):
        order = list(units)
        for unit in (order if stop % 4 else order[::-1])[:2]:
            yield function(pickle.loads(pickle.dumps(unit.value)))
        raise KeyboardInterrupt

    look = shard.SpaceCheck.check
    monkeypatch.setattr(shard.SpaceCheck, "check", counted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, config)
    with monkeypatch.context() as patch:
        patch.setattr(Executor, "start_workers", lambda self, kept: nullcontext(two_units))
        if stop < 14:  # else one shard is left, which no worker is asked for
            with pytest.raises(KeyboardInterrupt):
                run(tmp_path, config, jobs=2)
    run(tmp_path, config)
    assert len(passes) == 4 * 4 + 1  # no batch is measured twice
    assert contents(tmp_path) == contents(in_stretches.out)


def test_a_file_of_an_unfinished_run_that_is_gone_is_named(config, tmp_path, monkeypatch):
    def stopping(*args, first_index, **settings):
        if first_index == 20:
            raise KeyboardInterrupt
        return original(*args, first_index=first_index, **settings)

    original = shard.run_shard
    with monkeypatch.context() as patch:
        patch.setattr(shard, "run_shard", stopping)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, config)
    (tmp_path / "positions" / "000001.json").unlink()
    with pytest.raises(InfoFlowError, match=r"000001.json' is gone.*delete .all.safetensors"):
        run(tmp_path, config)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_workers_go_on_where_one_process_was_stopped(whole, config, tmp_path, monkeypatch):
    take = shards.ShardSums.add_shard

    def stopping(self, *args):
        if self.n_shards == 1:
            raise KeyboardInterrupt
        take(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(shards.ShardSums, "add_shard", stopping)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, config)
    assert (tmp_path / ".all.safetensors").is_file()
    run(tmp_path, config, jobs=2)
    assert contents(tmp_path) == contents(whole.out)


@pytest.fixture
def three_from_the_end(config, tmp_path, monkeypatch):
    """A stopped run whose worker has measured the last three shards, and nothing before."""

    def backwards(function, units, each_second):
        for unit in list(units)[:1:-1]:
            yield function(pickle.loads(pickle.dumps(unit.value)))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Executor, "start_workers", lambda self, kept: nullcontext(backwards))
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, config, jobs=2)
    return tmp_path


def test_shards_before_their_turn_are_not_measured_again(
    whole, config, three_from_the_end, monkeypatch
):
    measured, measure = [], shard.run_shard
    monkeypatch.setattr(
        shard, "run_shard", lambda *a, **s: measured.append(s["first_index"]) or measure(*a, **s)
    )
    run(three_from_the_end, config)
    assert measured == [0, 10]
    assert contents(three_from_the_end) == contents(whole.out)


def test_shards_whose_turn_came_as_the_run_ended_are_added(
    whole, config, three_from_the_end, monkeypatch
):
    """Nothing is left to measure, and the last three are not yet in the sums."""

    def stop_before_them(self):
        if self.n_shards == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shards.ShardSums, "_add_waiting", stop_before_them)
        with pytest.raises(KeyboardInterrupt):
            run(three_from_the_end, config)
    monkeypatch.setattr(shard, "run_shard", lambda *_, **__: pytest.fail("measured again"))
    run(three_from_the_end, config)
    assert contents(three_from_the_end) == contents(whole.out)


def test_shards_before_their_turn_are_worth_nothing_alone(whole, config, three_from_the_end):
    """Without what says up to where the run is whole, all begins again."""
    (three_from_the_end / ".all.safetensors").unlink()
    run(three_from_the_end, config)
    assert contents(three_from_the_end) == contents(whole.out)


def test_a_spoiled_shard_before_its_turn_is_named(config, three_from_the_end):
    path = three_from_the_end / ".all.000003.safetensors"
    whole = path.read_bytes()
    path.write_bytes((three_from_the_end / ".all.000002.safetensors").read_bytes())
    with pytest.raises(InfoFlowError, match=r"000003.safetensors' is not what this run.* delete"):
        run(three_from_the_end, config)
    path.write_bytes(whole)
    for spoiled in ({}, {"told": 3, "states": {}}, {"told": {}, "states": {}}):
        with let_own(RunFolder(three_from_the_end)):
            write_state(path, spoiled)
        with pytest.raises(InfoFlowError, match=r"delete"):
            run(three_from_the_end, config)


def test_a_model_that_changes_between_shards_is_refused(config, tmp_path, monkeypatch):
    loaded = load_any(config.model)

    def meddling(model, *args, first_index, **settings):
        if first_index == 20:
            with torch.no_grad():
                next(iter(model.parameters())).mul_(2)
        return original(model, *args, first_index=first_index, **settings)

    original = shard.run_shard
    monkeypatch.setattr(shard, "run_shard", meddling)
    with pytest.raises(InfoFlowError, match="weights"):
        run(tmp_path, config, loaded=loaded)


def test_what_will_not_fit_is_refused_after_two_batches(config, tmp_path, monkeypatch):
    passes = []

    def counting(*args, after_batch, **settings):
        def after(n):
            passes.append(n)
            after_batch(n)

        return original(*args, after_batch=after, **settings)

    original = shard.run_shard
    monkeypatch.setattr(shard, "run_shard", counting)
    with monkeypatch.context() as patch:
        patch.setattr(shard, "free_memory", lambda: 5000)
        with pytest.raises(InfoFlowError, match=r"of 43 sequences needs about .* is free"):
            run(tmp_path / "memory", config)
    assert len(passes) == 2
    usage = shutil.disk_usage(tmp_path)._replace(free=5000)
    monkeypatch.setattr(shard.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(InfoFlowError, match=r"of 43 sequences need about .* on the disk"):
        run(tmp_path / "disk", config)


def test_what_is_written_already_is_not_asked_of_the_disk_again(config, tmp_path, monkeypatch):
    """A disk with room for all but little more is enough for workers, too."""

    def in_turn(function, units, each_second):
        for unit in units:
            yield function(pickle.loads(pickle.dumps(unit.value)))

    def usage(path):
        taken = sum(file.stat().st_size for file in (tmp_path / "positions").glob("*"))
        return real._replace(free=130_000 - taken)

    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shard.shutil, "disk_usage", usage)
    monkeypatch.setattr(Executor, "start_workers", lambda self, kept: nullcontext(in_turn))
    assert run(tmp_path, config, jobs=2).positions.n_sequences == 43


def test_rows_that_wait_are_not_taken_for_ever_more_of_them(config, tmp_path, monkeypatch):
    """Recovery holds sums; how much of its rows wait after two batches says nothing of all."""
    model = load_any(config.model).model
    data = read_data(model, config.data)
    recovery, space = (
        RecoveryProbe((1, 2)),
        shard.SpaceCheck(10**9, 512, frozenset(), tmp_path, n_processes=64),
    )
    monkeypatch.setattr(shard, "free_memory", lambda: 2**20)
    run_probes(
        model, data, [recovery], batch_size=3, progress=False,
        after_batch=lambda n: space.check({"recovery": recovery}, n),
    )  # fmt: skip
    positions, space = PositionsProbe(), shard.SpaceCheck(10**9, 512, frozenset(), tmp_path)
    with pytest.raises(InfoFlowError, match="of 1000000000 sequences needs about"):
        run_probes(
            model, data, [positions], batch_size=3, progress=False,
            after_batch=lambda n: space.check({"positions": positions}, n),
        )  # fmt: skip


def test_of_what_grows_with_the_sequences_nothing_stays_in_memory(config, tmp_path, monkeypatch):
    sizes, take = [], shards.ShardSums.add_shard

    def watched(self, *args):
        take(self, *args)
        sizes.append(bytes_in(self._state()))

    monkeypatch.setattr(shards.ShardSums, "add_shard", watched)
    run(tmp_path, ProbingConfig(**{**vars(config), "probes": ("positions",), "shard": 5}))
    assert sizes == [0] * 9


def test_without_a_folder_all_comes_back_in_memory(config):
    settings = {name: getattr(config, name) for name in ("probes", "ranks", "batch_size", "shard")}
    found = probe(config.model, config.data, progress=False, n_threads=1, **settings)
    assert found.positions.positions[0].shape[0] == 43
    with pytest.raises(InfoFlowError, match=r"in memory, and jobs is 2.* workers load it"):
        probe(load_any(config.model), config.data, progress=False, jobs=2)


NO_WORKERS = [
    ({"jobs": 0}, "jobs is 0: expected"),
    ({"jobs": 10**6}, "jobs is 1000000"),
    ({"n_threads": 0}, "threads is 0"),
    ({"scheduler": "tcp://127.0.0.1:1"}, "there is no dask scheduler at 'tcp://127.0.0.1:1'"),
    ({"scheduler": "nonsense"}, "there is no dask scheduler at 'nonsense'"),
]


def test_workers_that_cannot_be_had(config, tmp_path):
    for arguments, message in NO_WORKERS:
        with pytest.raises(InfoFlowError, match=message):
            run_probing(tmp_path, config, progress=False, **arguments)
    run_probing(tmp_path, config, progress=False)  # nothing in the folder is in its way


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_run_whose_worker_process_is_killed_gives_the_same_bytes(
    whole, config, tmp_path, monkeypatch
):
    """It ends by itself, behind the shard that is measured again."""
    out, results = tmp_path / "out", []

    def killing(workers, future):
        """The result of one shard; behind the first, a worker that measures is killed."""
        try:
            results.append(result(workers, future))
        except BaseException as error:
            results.append(error)
            raise
        if len(results) == 1:
            for pool in workers._busy.values():
                for process in pool._processes.values():
                    os.kill(process.pid, signal.SIGKILL)
        return results[-1]

    result = executor._Processes.result
    monkeypatch.setattr(executor._Processes, "result", killing)
    run(out, config, jobs=2)
    assert sum(isinstance(found, BaseException) for found in results) == 1
    assert sum(not isinstance(found, BaseException) for found in results) == 5
    assert contents(out) == contents(whole.out)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the cluster's own
def test_a_cluster_whose_worker_is_killed_gives_the_same_bytes(whole, config, tmp_path):
    """A scheduler and two workers on loopback; one is killed in the middle."""
    pytest.importorskip("distributed")
    out = tmp_path / "out"
    begun = out / "positions" / "000000.json"
    with losing_a_worker(begun.is_file) as scheduler:
        run(out, config, scheduler=scheduler)
    assert contents(out) == contents(whole.out)
