"""Where units of work run: here, in processes of this machine, or on a dask cluster.

One loop for all three: a unit whose worker died runs again, and workers that join later are used.
"""

import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import torch
from annotated_types import Interval
from filelock import FileLock, Timeout
from tqdm import tqdm

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import name_file_in_errors
from infoflow_lens.foundation.packages import import_optional
from infoflow_lens.foundation.processes import exit_with_parent, threads
from infoflow_lens.foundation.settings import Count, check

Jobs = Annotated[int, Interval(ge=1, le=4096)]
_PAUSE = 1.0  # seconds between two looks at who is there
_ANSWER = 5.0  # seconds until what a scheduler's address names must say something
_PATIENCE = 30.0  # seconds until a scheduler must have a worker
_PATIENCE_LATER = 600.0  # and for which it may lose all of them, as where jobs are queued again


@dataclass
class Unit:
    """A part of the work that runs in one call.

    Attributes:
        name: what errors call it.
        value: what the function is called with.
        n_losses: how many workers have died under it.
    """

    name: str
    value: Any
    n_losses: int = 0


_END = object()
Run = Callable[..., Iterator[Any]]


@dataclass(frozen=True)
class Executor:
    """Where units of work run.

    Attributes:
        jobs: processes at a time; 1 is this one alone.
        scheduler: address of a dask scheduler, whose workers are used in place of own processes.
        n_threads: with which each unit is computed.
        again: the command or the call that goes on after a loss or Ctrl-C.
    """

    jobs: int = 1
    scheduler: str | None = None
    n_threads: int = 1
    again: str = "the same call"
    _workers: "_Processes | None" = field(default=None, repr=False, compare=False)

    def check(self, what: str) -> None:
        """Refuse workers that cannot be had, before work starts.

        Args:
            what: what shall be spread over them, as errors call it.

        Raises:
            InfoFlowError: for numbers that make no sense, and without the packages that several
                processes (extra ``studies``) or a scheduler (``cluster``) need.
        """
        check(self.jobs, Jobs, "jobs")
        check(self.n_threads, Count, "n_threads")
        if self.scheduler is not None:
            import_optional("distributed", "cluster", f"the scheduler {self.scheduler!r}")
        elif self.jobs > 1:
            import_optional("joblib", "studies", f"{what} in several processes")

    @property
    def is_one_process(self) -> bool:
        """Say whether all units run in this process, without workers."""
        return self.jobs == 1 and self.scheduler is None

    @contextmanager
    def keep_processes(self) -> Iterator["Executor"]:
        """Yield an executor of which all calls of `start_workers` share their processes.

        A process takes seconds to start and to load a model, once for the length of this block.
        """
        if self.is_one_process or self.scheduler is not None:
            yield self
            return
        with closing(_Processes(self.jobs, self.n_threads)) as workers:
            yield replace(self, _workers=workers)

    @contextmanager
    def start_workers(self, kept: str) -> Iterator[Run]:
        """Start the workers for the length of a block; they end with this process, even by kill -9.

        Args:
            kept: what is kept after an early end, in words, such as "finished runs are kept".

        Yields:
            ``run(function, units, each_second)``. It calls the function with the value of each unit
            and yields results as they are ready. It takes the next unit when a worker is free, so
            that `units` may be a long iterator; None among them is for "none is ready yet", where
            units wait for what others give. While this process waits it calls `each_second`; an
            error from that call ends the run.

        Raises:
            InfoFlowError: if the scheduler does not answer or is gone, and for a unit under which
                three workers have died; what the function raises is raised as it is.
            KeyboardInterrupt: when it is stopped, with how to go on.
        """
        try:
            if self.is_one_process:
                yield partial(_run_locally, self.n_threads)
                return
            if self._workers is not None:
                yield partial(run_in_workers, self._workers)
                return
            with closing(
                _Processes(self.jobs, self.n_threads)
                if self.scheduler is None
                else _Cluster(self.scheduler, self.n_threads)
            ) as workers:
                yield partial(run_in_workers, workers)
        # whatever ends the run, its last line says how to go on
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"{kept}; go on with {self.again}") from None
        except _GoneError as error:
            raise InfoFlowError(f"{error}: {kept}; go on with {self.again}") from error.__cause__


class _GoneError(Exception):
    """Workers, or what leads to them, are gone for good."""


class _WorkerDiedError(Exception):
    """The worker of one unit is gone."""


def _run_locally(
    n_threads: int,
    function: Callable[[Any], Any],
    units: Iterable[Unit],
    each_second: Callable[[], None] = lambda: None,
) -> Iterator[Any]:
    for unit in units:
        yield _call_with_threads(function, unit.value, n_threads)
        each_second()


def run_in_workers(
    workers: "_Processes | _Cluster",
    function: Callable[[Any], Any],
    units: Iterable[Unit | None],
    each_second: Callable[[], None] = lambda: None,
) -> Iterator[Any]:
    """Yield what the workers return, as it comes; they get as many units as they have room for."""
    remaining: Iterator[Any] = iter(units)
    running: dict[Future[Any], Unit] = {}
    is_exhausted = False  # whether no unit remains

    # workers come and go, so their number is asked for again
    def fill() -> None:
        nonlocal is_exhausted
        for _ in range(workers.room() - len(running)):
            unit = next(remaining, _END)
            is_exhausted = unit is _END
            # None says that no unit is ready yet: the next look asks again
            if not isinstance(unit, Unit):
                return
            running[workers.submit(function, unit.value)] = unit

    fill()
    while running or not is_exhausted:
        if not running:
            time.sleep(_PAUSE)  # until there are workers again
        done, _ = wait(running, timeout=_PAUSE, return_when=FIRST_COMPLETED)
        each_second()
        for future in done:
            unit = running.pop(future)
            try:
                found = workers.result(future)
            except _WorkerDiedError as error:
                unit.n_losses += 1
                if unit.n_losses > workers.most_losses:
                    raise _GoneError(
                        f"{unit.name} has lost every worker that took it ({error}), mostly for "
                        "lack of memory; expected room for it: give fewer jobs or smaller batches, "
                        "or workers more memory"
                    ) from error
                # another worker takes it, before all that is new
                remaining, is_exhausted = chain([unit], remaining), False
                continue
            fill()  # first: workers go on while the caller takes the result in
            yield found
        fill()  # what was lost, and for workers that have joined


def _call_with_threads(function: Callable[[Any], Any], value: Any, n_threads: int) -> Any:
    with threads(n_threads):
        return function(value)


class _Processes:
    """Processes of this machine, each in a pool of its own, so that a kill loses one unit alone."""

    most_losses = 2  # workers that one unit may lose and still run again

    def __init__(self, jobs: int, n_threads: int) -> None:
        self._jobs, self._n_threads = jobs, n_threads
        self._idle: list[Any] = []
        self._busy: dict[Future[Any], Any] = {}

    def room(self) -> int:
        return self._jobs

    def submit(self, function: Callable[[Any], Any], value: Any) -> "Future[Any]":
        from joblib.externals.loky import ProcessPoolExecutor

        # libraries read these as they are loaded, so they are set before the process starts
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        pool = self._idle.pop() if self._idle else ProcessPoolExecutor(
            1,
            initializer=_initialize_worker,
            initargs=(os.getpid(),),
            env=dict.fromkeys(names, str(self._n_threads)),
        )  # fmt: skip
        future: Future[Any] = pool.submit(_call_with_threads, function, value, self._n_threads)
        self._busy[future] = pool
        return future

    def result(self, future: "Future[Any]") -> Any:
        pool = self._busy.pop(future)
        error = future.exception()
        if isinstance(error, BrokenProcessPool):
            pool.shutdown(wait=False, kill_workers=True)
            # loky says in its message alone how the worker ended
            how = str(error).rpartition("exit codes of the workers are {")[2].partition("}")[0]
            raise _WorkerDiedError(how or type(error).__name__) from error
        self._idle.append(pool)
        return future.result()

    def close(self) -> None:
        for future, pool in self._busy.items():
            # a pool that is told to drop a unit which its thread has not yet looked at fails in
            # that thread, and leaves its semaphores behind
            deadline = time.monotonic() + 5
            while not (future.running() or future.done()) and time.monotonic() < deadline:
                time.sleep(0.005)
            pool.shutdown(wait=True, kill_workers=True)
        for pool in self._idle:  # these put away what they hold, such as semaphores
            pool.shutdown(wait=True)


def _initialize_worker(parent: int) -> None:
    """Prepare a worker process: its parent handles Ctrl-C, and it ends together with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # bars take a lock between processes, of which the system says that it has leaked where a worker
    # is killed; nobody shares those of a worker
    tqdm.set_lock(threading.RLock())
    exit_with_parent(parent)


def _check_is_scheduler(scheduler: str) -> None:
    """Check that a dask scheduler listens at an address, within a few seconds.

    A client would wait a minute and a half for another server, which takes the connection and says
    nothing.

    Raises:
        TimeoutError: if nothing comes in `_ANSWER` seconds.
        OSError: if there is no connection, or it is closed at once.
    """
    where = urlsplit(scheduler if "://" in scheduler else f"tcp://{scheduler}")
    if where.scheme != "tcp" or not where.hostname or not where.port:
        return  # the client knows other protocols, and says what is wrong
    with socket.create_connection((where.hostname, where.port), timeout=_ANSWER) as connection:
        if not connection.recv(1):  # a scheduler begins the conversation
            raise ConnectionError("the connection was closed")


class _Cluster:
    """The workers of a dask scheduler, which itself runs units again whose workers died."""

    most_losses = 0

    def __init__(self, scheduler: str, n_threads: int) -> None:
        from distributed import Client
        from distributed import TimeoutError as NoWorkersError  # before Python 3.11 no builtin one

        self._scheduler, self._n_threads = scheduler, n_threads
        try:
            _check_is_scheduler(scheduler)
            self._client = Client(scheduler, timeout="3s")
        except Exception as error:  # an address that is none raises errors of many kinds
            raise InfoFlowError(
                f"there is no dask scheduler at {scheduler!r} ({type(error).__name__}: {error}): "
                "expected the address of a running one, such as tcp://127.0.0.1:8786"
            ) from error
        try:
            # workers of a queue may wait for machines
            self._client.wait_for_workers(1, timeout=_PATIENCE)
        except NoWorkersError as error:
            self.close()
            raise InfoFlowError(
                f"the dask scheduler at {scheduler!r} has no workers: expected at least one within "
                f"{_PATIENCE:.0f} seconds; start some, such as `dask worker {scheduler}`"
            ) from error
        self._executor = self._client.get_executor(pure=False)
        self._seen = time.monotonic()

    def room(self) -> int:
        """Count two units for each thread of the workers that are there now."""
        try:
            n_threads = sum(self._client.nthreads().values())
        except Exception as error:
            raise self._explain_loss(error) from error
        if n_threads:
            self._seen = time.monotonic()
        elif time.monotonic() - self._seen > _PATIENCE_LATER:
            raise _GoneError(
                f"the dask scheduler at {self._scheduler!r} has had no workers for "
                f"{_PATIENCE_LATER:.0f} seconds"
            )
        # the second unit lies ready at the worker, so that no thread waits for the network
        return 2 * n_threads

    def submit(self, function: Callable[[Any], Any], value: Any) -> "Future[Any]":
        try:
            future: Future[Any] = self._executor.submit(
                _call_with_threads, function, value, self._n_threads
            )
        except Exception as error:
            raise self._explain_loss(error) from error
        return future

    def result(self, future: "Future[Any]") -> Any:
        from distributed import KilledWorker

        try:
            return future.result()
        except KilledWorker as error:  # for as often as its setting allowed-failures says
            raise _WorkerDiedError(f"KilledWorker, by {self._scheduler!r}") from error
        except CancelledError as error:
            raise self._explain_loss(error) from error

    def _explain_loss(self, error: BaseException) -> _GoneError:
        return _GoneError(
            f"the dask scheduler at {self._scheduler!r} is gone ({type(error).__name__})"
        )

    def close(self) -> None:
        with suppress(Exception):  # it may be gone, which has been said
            self._client.close(timeout=1)


_gpu_locks: list[tuple[FileLock, int]] = []  # a GPU, for as long as this process lives


def choose_device(device: str) -> str:
    """Choose a GPU of its own for this process if the device is "cuda"; return others unchanged.

    It is the first visible GPU (in the order of ``CUDA_VISIBLE_DEVICES``) that no other process of
    this user holds. If there are more processes than GPUs, several processes share one.

    Args:
        device: as PyTorch names it.

    Returns:
        "cuda:N" where there are several GPUs, else `device`.
    """
    n = torch.cuda.device_count() if device == "cuda" else 0
    if n < 2:
        return device
    if not _gpu_locks:
        # processes with other visible GPUs must lock the same names for the same GPU
        named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        _gpu_locks.append(
            _acquire_gpu(named if len(named) == n else [str(number) for number in range(n)])
        )
    return f"cuda:{_gpu_locks[0][1]}"


def _acquire_gpu(names: list[str]) -> tuple[FileLock, int]:
    """Lock the GPU that the fewest of our processes hold, the first of several, without waiting.

    Returns:
        The lock, and the GPU's index among the names, of which there is at least one.
    """
    user = getattr(os, "getuid", lambda: os.environ.get("USERNAME", ""))()
    folder = Path(tempfile.gettempdir()) / f"infoflow-lens-gpus-{user}"
    with name_file_in_errors(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
    # a second process of a GPU takes its second lock, once all have a first one
    for n_others in count():
        for index, name in enumerate(names):
            lock = FileLock(folder / f"{name}.{n_others}.lock")
            with suppress(Timeout):
                lock.acquire(timeout=0)
                return lock, index
    raise AssertionError  # count() has no end
