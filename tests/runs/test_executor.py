"""Units of work: their results, and what becomes of them when workers die."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import joblib
import psutil
import pytest
import torch
from joblib.externals.loky import process_executor
from tqdm import auto, tqdm

from infoflow_lens import InfoFlowError
from infoflow_lens.foundation.progress import progress_bar
from infoflow_lens.runs import executor as module
from infoflow_lens.runs.executor import Executor, Unit, choose_device
from tests.conftest import some_of
from tests.processes import started

pytestmark = pytest.mark.usefixtures("forked_workers")


def units(values):
    return (Unit(f"unit {value}", value) for value in values)


def start_workers(jobs=2, scheduler=None, n_threads=1):
    return Executor(jobs, scheduler, n_threads, "lens go").start_workers("runs are kept")


@pytest.mark.parametrize(("jobs", "n_threads"), [(1, 1), (2, 2)])
def test_every_call_is_made_once_with_so_many_threads(jobs, n_threads):
    before = torch.get_num_threads()
    with start_workers(jobs, n_threads=n_threads) as run:
        found = sorted(run(abs, units(range(-5, 1))))
        assert found == list(range(6))
        assert set(run(_threads, units(range(4)))) == {n_threads}
    assert torch.get_num_threads() == before


def _threads(value):
    return torch.get_num_threads()


def test_processes_are_kept_from_one_block_to_the_next_and_their_bars_hold_no_lock_between_them():
    """Killed by Ctrl-C, a worker that had shown a bar said that semaphores had leaked."""
    with Executor(2).keep_processes() as executor:
        found = []
        for _ in range(2):
            with executor.start_workers("runs are kept") as run:
                found.append(set(run(_process, units(range(4)))))
                assert list(run(_kinds_of_locks, units(range(1)))) == [{"_thread"}]
    assert found[0] | found[1] == found[0]
    assert os.getpid() not in found[0]
    assert not any(psutil.pid_exists(pid) for pid in found[0])


def _process(value):
    return os.getpid()


@pytest.mark.slow
def test_workers_work_in_the_folder_of_the_call(tmp_path, monkeypatch):
    joblib.Parallel(n_jobs=2)(joblib.delayed(os.getcwd)() for _ in range(4))
    monkeypatch.chdir(tmp_path)
    with start_workers() as run:
        assert set(run(_folder, units(range(4)))) == {str(tmp_path)}


def _folder(value):
    return os.getcwd()


_LOCKS = """
from tests.runs.test_executor import start_workers, hold_a_lock, units
with start_workers() as run:
    print(sorted(run(hold_a_lock, units(range(4)))))
"""


@pytest.mark.slow
def test_workers_that_hold_locks_end_without_a_word():
    """Progress bars hold one; of a worker that is killed the system says that it has leaked."""
    ended = subprocess.run([sys.executable, "-c", _LOCKS], capture_output=True, text=True)
    assert (ended.stdout.strip(), ended.stderr) == ("[0, 1, 2, 3]", "")


def _kinds_of_locks(value):
    with progress_bar("some", 2, show=False):
        return {type(lock).__module__ for lock in (tqdm.get_lock(), auto.tqdm.get_lock())}


def hold_a_lock(value, held=[]):  # noqa: B006  # for as long as the process lives
    held.append(multiprocessing.RLock())
    return value


@pytest.mark.parametrize("n", some_of([0, 7]))
def test_units_that_cannot_be_drawn_are_an_error_and_no_wait(n):
    def some():
        yield from units(range(n))
        raise InfoFlowError("inputs are gone")

    with start_workers() as run, pytest.raises(InfoFlowError, match="inputs are gone"):
        list(run(abs, some()))


def test_units_may_end_before_a_pool_has_looked_at_its_own(monkeypatch):
    """On a busy machine its thread comes late; an error there fails this test as a warning."""
    thread = process_executor._ExecutorManagerThread
    look = thread.wait_result_broken_or_wakeup

    def look_late(self):
        found = look(self)
        time.sleep(0.3)
        return found

    monkeypatch.setattr(thread, "wait_result_broken_or_wakeup", look_late)
    test_units_that_cannot_be_drawn_are_an_error_and_no_wait(3)


@pytest.mark.parametrize("jobs", some_of([1, 2], 1))
def test_what_a_unit_raises_is_raised_as_it_is(jobs):
    with pytest.raises(FileNotFoundError, match="no-such"), start_workers(jobs) as run:
        list(run(_opened, units(["no-such"])))


def _opened(path):
    return Path(path).read_text()


@pytest.mark.slow
def test_a_unit_whose_worker_is_killed_runs_again(tmp_path):
    """Twice; the others are not touched, and each gives its result once."""
    with start_workers() as run:
        found = sorted(run(_killed_at_first, units((tmp_path, value) for value in range(5))))
    assert found == list(range(5))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.0", "2.1"]


def _killed_at_first(task):
    folder, value = task
    for attempt in range(2):
        if value == 2 and not (folder / f"2.{attempt}").exists():
            (folder / f"2.{attempt}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return value


@pytest.mark.slow
def test_a_unit_that_kills_every_worker_is_an_error_with_its_name_and_what_to_do():
    message = r"unit 3 has lost every worker that took it \(SIGKILL.*fewer jobs.*go on with lens go"
    with pytest.raises(InfoFlowError, match=message), start_workers() as run:
        list(run(_killed, units([3])))


def _killed(value):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_unit_that_a_scheduler_gives_up_is_named(monkeypatch):
    distributed = pytest.importorskip("distributed")
    lost = Future()
    lost.set_exception(distributed.KilledWorker("task", None, 3))
    monkeypatch.setattr(module._Cluster, "__init__", lambda *args: None)
    monkeypatch.setattr(module._Cluster, "_scheduler", "tcp://x", raising=False)
    monkeypatch.setattr(module._Cluster, "room", lambda self: 1)
    monkeypatch.setattr(module._Cluster, "submit", lambda *args: lost)
    monkeypatch.setattr(module._Cluster, "close", lambda self: None)
    message = "unit 3 has lost every worker .*Killed.*more memory.*go on with lens go"
    with pytest.raises(InfoFlowError, match=message), start_workers(1, "tcp://x") as run:
        list(run(abs, units([3])))


@pytest.mark.parametrize("rooms", [[1], [0, 0, 1], [1, 1, 0, 0, 0], [2, 0, 0, 1, 0, 0]])
def test_workers_that_join_later_are_used_and_none_for_a_while_lose_nothing(monkeypatch, rooms):
    """There is room for so many units, look by look, and for four from then on."""

    class Changing:
        most, under_way = 0, 0

        def room(self):
            return rooms.pop(0) if rooms else 4

        def submit(self, function, value):
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            future = Future()
            future.set_result(function(value))
            return future

        def result(self, future):
            self.under_way -= 1
            return future.result()

    monkeypatch.setattr(module, "_PAUSE", 0.01)
    changing = Changing()
    assert sorted(module.run_in_workers(changing, abs, units(range(20)))) == list(range(20))
    assert changing.most == 4


def test_ctrl_c_tells_how_to_go_on():
    with (
        pytest.raises(KeyboardInterrupt, match="runs are kept; go on with lens go"),
        start_workers(1),
    ):
        raise KeyboardInterrupt


def test_what_is_asked_each_second_ends_a_wait_for_workers():
    def stop():
        raise KeyboardInterrupt

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), start_workers() as run:
        list(run(time.sleep, units([60]), stop))
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize("visible", [None, "5,3", "GPU-a,GPU-b", "0,1,2"])
def test_processes_share_the_gpus_of_a_machine(tmp_path, monkeypatch, visible):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    held = []
    for place in (0, 1, 0):  # as three processes would
        monkeypatch.setattr(module, "_gpu_locks", [])
        assert [choose_device("cuda") for _ in range(2)] == [f"cuda:{place}"] * 2
        held.append(module._gpu_locks)
    assert choose_device("cuda:1") == "cuda:1"  # as it was asked
    assert choose_device("cpu") == "cpu"


def test_workers_to_each_of_which_a_scheduler_gives_another_first_gpu_take_it(
    tmp_path, monkeypatch
):
    """As dask-cuda does it, which rotates the list; and one that sees its own alone."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    held = []
    for visible in ("0,1,2", "1,2,0", "2,0,1", "7"):
        n = visible.count(",") + 1
        monkeypatch.setattr(torch.cuda, "device_count", lambda n=n: n)
        monkeypatch.setattr(module, "_gpu_locks", [])
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert choose_device("cuda") == ("cuda" if visible == "7" else "cuda:0")
        held.append(module._gpu_locks)


@pytest.fixture
def scheduler(tmp_path):
    """A dask scheduler in a process of its own, with its address."""
    pytest.importorskip("distributed")
    file = tmp_path / "scheduler.json"
    with started(
        "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0",
        "--no-dashboard", "--scheduler-file", str(file), folder=tmp_path,
    ) as program:  # fmt: skip
        # the scheduler makes the file first, and writes into it afterwards
        program.wait_until(lambda: file.is_file() and file.read_text().endswith("}"))
        yield program, json.loads(file.read_text())["address"]


@pytest.mark.slow
def test_a_scheduler_that_dies_in_mid_run_is_one_error_with_the_command(scheduler, tmp_path):
    program, address = scheduler

    def some():
        with start_workers(1, address) as run:
            for index, _ in enumerate(run(time.sleep, units([0.1] * 200))):
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


@pytest.mark.slow
def test_a_scheduler_without_workers_is_named(scheduler, monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE", 0.5)
    with (
        pytest.raises(InfoFlowError, match=r"has no workers: expected .* `dask worker tcp://"),
        start_workers(1, scheduler[1]),
    ):
        pass
