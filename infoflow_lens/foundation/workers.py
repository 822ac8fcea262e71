"""Calls spread over worker processes, here (joblib) or on a dask cluster."""

import asyncio
import concurrent.futures
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Annotated, Any, Protocol

from annotated_types import Interval

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.extras import optional
from infoflow_lens.foundation.processes import end_with, threads
from infoflow_lens.foundation.settings import checked

Jobs = Annotated[int, Interval(ge=1, le=4096)]
_PATIENCE = 30  # seconds until a scheduler must have a worker


class Spread(Protocol):
    """Calls a function with each of some values; results come as they are ready."""

    def __call__(self, function: Callable[[Any], Any], values: Iterable[Any]) -> Iterator[Any]:
        """Values are drawn as workers become free, so they may be many."""
        ...


@checked
def check_workers(jobs: Jobs, scheduler: str | None, what: str) -> None:
    """Refuse workers that cannot be had, before work starts.

    Args:
        jobs: processes at a time.
        scheduler: address of a dask scheduler, whose workers are used in place of own processes.
        what: what shall be spread, as errors call it.

    Raises:
        InfoFlowError: for a number of jobs that makes no sense, and without the packages that
            several processes (extra ``studies``) or a scheduler (``cluster``) need.
    """
    if scheduler is not None:
        optional("distributed", "cluster", f"the scheduler {scheduler!r}")
    if scheduler is not None or jobs > 1:
        optional("joblib", "studies", f"{what} in several processes")


@contextmanager
def workers(
    jobs: int,
    scheduler: str | None,
    *,
    finished: str,
    again: str,
    n_threads: int = 1,
) -> Iterator[Spread]:
    """What spreads calls over workers, each of which computes with so many threads.

    With one job and no scheduler, calls are made here. Worker processes end with this one, even
    by kill -9.

    Args:
        jobs, scheduler: see :func:`check_workers`.
        finished: what is kept when all ends early, such as "finished runs are kept".
        again: what goes on after a loss or Ctrl-C: a command or a call.
        n_threads: of each call.

    Raises:
        InfoFlowError: if the scheduler does not answer, or it or a worker is gone.
        KeyboardInterrupt: when it is stopped, with how to go on.
    """
    try:
        with _started(jobs, scheduler, n_threads) as spread:
            yield spread
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{finished}; go on with {again}") from None
    except Exception as error:
        if not _is_of_workers(error, scheduler):
            raise
        what = "a worker process" if scheduler is None else f"the dask scheduler at {scheduler!r}"
        raise InfoFlowError(
            f"{what} is gone ({type(error).__name__}): {finished}; go on with {again}"
        ) from error


def _is_of_workers(error: BaseException, scheduler: str | None) -> bool:
    """Whether an error tells of processes that are gone, not of a call."""
    if isinstance(error, InfoFlowError):
        return False
    module = type(error).__module__
    if scheduler is None:
        return "process_executor" in module  # loky's
    lost = (OSError, asyncio.CancelledError, concurrent.futures.CancelledError)
    return isinstance(error, lost) or module.startswith(("distributed", "tornado"))


@contextmanager
def _started(jobs: int, scheduler: str | None, n_threads: int) -> Iterator[Spread]:
    if scheduler is None and jobs == 1:
        yield lambda function, values: (_called(function, value, n_threads) for value in values)
        return
    if scheduler is not None:
        with _dask(scheduler) as client:
            yield lambda function, values: _on_cluster(client, function, values, n_threads)
        return
    import joblib

    parent, folder = os.getpid(), os.getcwd()

    def spread(function: Callable[[Any], Any], values: Iterable[Any]) -> Iterator[Any]:
        failed: list[Exception] = []

        def drawn() -> Iterator[Any]:
            # joblib draws in a thread of its own, and waits for ever where that raises
            try:
                yield from values
            except Exception as error:
                failed.append(error)

        calls = (
            joblib.delayed(_called)(function, value, n_threads, parent, folder) for value in drawn()
        )
        parallel = joblib.Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1)
        results = parallel(calls)
        try:
            for result in results:  # noqa: UP028 - `yield from` would close it first
                yield result
            if failed:
                raise failed[0]
        finally:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of calls that are given up, as an error has said
                results.close()

    from joblib.externals.loky import get_reusable_executor

    try:
        with joblib.parallel_config("loky", inner_max_num_threads=n_threads):
            yield spread
    finally:
        # joblib keeps them for later, and a process that multiprocessing has started waits for them
        get_reusable_executor().shutdown(wait=True, kill_workers=True)


def _on_cluster(
    client: Any, function: Callable[[Any], Any], values: Iterable[Any], n_threads: int
) -> Iterator[Any]:
    """The calls' results, with two calls at a time for each thread of the cluster's workers."""
    from distributed import as_completed

    coming = iter(values)
    at_once = 2 * max(1, sum(client.nthreads().values()))
    running = as_completed(
        [
            client.submit(_called, function, v, n_threads, pure=False)
            for v in islice(coming, at_once)
        ]
    )
    for future in running:
        yield future.result()
        for value in islice(coming, 1):
            running.add(client.submit(_called, function, value, n_threads, pure=False))


def _called(
    function: Callable[[Any], Any],
    value: Any,
    n_threads: int,
    parent: int | None = None,
    folder: str = "",
) -> Any:
    """A call, here or in a worker of the process `parent`, which works in a folder."""
    if parent is not None:
        end_with(parent)
        os.chdir(folder)  # joblib may have started the worker for another call, elsewhere
    with threads(n_threads):
        return function(value)


@contextmanager
def _dask(scheduler: str) -> Iterator[Any]:
    from distributed import Client

    try:
        client = Client(scheduler, timeout="3s")
    except Exception as error:  # an address that is none raises errors of many kinds
        raise InfoFlowError(
            f"there is no dask scheduler at {scheduler!r} ({type(error).__name__}: {error}): "
            "expected the address of a running one, such as tcp://127.0.0.1:8786"
        ) from error
    try:
        try:
            client.wait_for_workers(1, timeout=_PATIENCE)
        except TimeoutError as error:
            raise InfoFlowError(
                f"the dask scheduler at {scheduler!r} has no workers: expected at least one within "
                f"{_PATIENCE} seconds; start some, such as `dask worker {scheduler}`"
            ) from error
        yield client
    finally:
        client.close(timeout=1)
