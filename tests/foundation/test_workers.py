"""Calls spread over processes: their results, and what is said when processes are gone."""

import json
import os
import signal
import time

import joblib
import pytest
import torch

from infoflow_lens import InfoFlowError
from infoflow_lens.foundation import workers as module
from infoflow_lens.foundation.workers import workers
from tests.processes import started

KEPT = {"finished": "runs are kept", "again": "lens go"}


@pytest.mark.parametrize(("jobs", "n_threads"), [(1, 1), (2, 2)])
def test_every_call_is_made_once_with_so_many_threads(jobs, n_threads):
    before = torch.get_num_threads()
    with workers(jobs, None, n_threads=n_threads, **KEPT) as spread:
        found = sorted(spread(abs, range(-5, 1)))
        assert found == list(range(6))
        assert set(spread(_threads, range(4))) == {n_threads}
    assert torch.get_num_threads() == before


def _threads(value):
    return torch.get_num_threads()


def test_workers_that_were_started_for_another_call_work_where_this_one_does(tmp_path, monkeypatch):
    joblib.Parallel(n_jobs=2)(joblib.delayed(os.getcwd)() for _ in range(4))
    monkeypatch.chdir(tmp_path)
    with workers(2, None, **KEPT) as spread:
        assert set(spread(_folder, range(4))) == {str(tmp_path)}


def _folder(value):
    return os.getcwd()


@pytest.mark.parametrize("n", [0, 7])
def test_values_that_cannot_be_drawn_are_an_error_and_no_wait(n):
    def values():
        yield from range(n)  # more than are drawn before the first result
        raise InfoFlowError("inputs are gone")

    with workers(2, None, **KEPT) as spread, pytest.raises(InfoFlowError, match="inputs are gone"):
        list(spread(abs, values()))


def test_a_worker_that_is_killed_is_one_error_with_the_command():
    with (
        pytest.raises(InfoFlowError, match=r"a worker process is gone .*: runs are kept; go on wi"),
        workers(2, None, **KEPT) as spread,
    ):
        list(spread(_killed, range(4)))


def _killed(value):
    os.kill(os.getpid(), signal.SIGKILL)


def test_ctrl_c_tells_how_to_go_on():
    with (
        pytest.raises(KeyboardInterrupt, match="go on with lens go"),
        workers(1, None, **KEPT),
    ):
        raise KeyboardInterrupt


@pytest.fixture
def scheduler(tmp_path):
    """A dask scheduler in a process of its own, with its address."""
    pytest.importorskip("distributed")
    file = tmp_path / "scheduler.json"
    with started(
        "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0",
        "--no-dashboard", "--scheduler-file", str(file), folder=tmp_path,
    ) as program:  # fmt: skip
        program.wait_until(file.is_file)
        yield program, json.loads(file.read_text())["address"]


@pytest.mark.slow
def test_a_scheduler_that_dies_in_mid_run_is_one_error_with_the_command(scheduler, tmp_path):
    program, address = scheduler

    def some():
        with workers(1, address, **KEPT) as spread:
            for index, _ in enumerate(spread(time.sleep, [0.1] * 200)):
                if index == 2:
                    program.send_signal(signal.SIGKILL)

    with started(
        "-m", "distributed.cli.dask_worker", address, "--no-nanny", "--no-dashboard",
        "--nthreads", "1", folder=tmp_path,
    ):  # fmt: skip
        begun = time.monotonic()
        said = rf"the dask scheduler at '{address}' is gone .* with lens go"
        with pytest.raises(InfoFlowError, match=said):
            some()
        assert time.monotonic() - begun < 60


def test_a_scheduler_without_workers_is_named(scheduler, monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE", 0.5)
    with (
        pytest.raises(InfoFlowError, match=r"has no workers: expected .* `dask worker tcp://"),
        workers(1, scheduler[1], **KEPT),
    ):
        pass
