"""Python programs in processes of their own, without loading the libraries again for each.

Loading TransformerLens takes seconds. A server loads the libraries below this package once, and
nothing of this package; each program is forked from it, imports infoflow_lens afresh, and can be
interrupted or killed like any other. What is about imports of libraries, or about hash seeds,
needs an interpreter of its own (subprocess).
"""

import multiprocessing
import os
import runpy
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path

LIBRARIES = [
    "transformer_lens",
    "transformers.models.gpt2.modeling_gpt2",  # and with it what models of all families need
    "torch._dynamo",
    "datasets",
    "pandas",
    "matplotlib.backends.backend_agg",
    "scipy.stats",
    "joblib",
    "jinja2",
    "rich.table",
    "typer.testing",
    "beartype",
    "distributed",
]


def server() -> multiprocessing.context.BaseContext:
    """Started once in each process that asks; macOS cannot fork what has loaded torch."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"  # what needs a network must do without
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["HF_HUB_OFFLINE"]
        if before is not None:
            os.environ["HF_HUB_OFFLINE"] = before
    return context


def _main(arguments: list[str], folder: Path, output: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    # a server started in the background ignores SIGINT, and so would this
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        with (output / name).open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    warnings.simplefilter("ignore")
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")


class Program:
    """A running program, and what it has printed so far."""

    def __init__(self, arguments: list[str], folder: Path, output: Path) -> None:
        self._output = output
        self.process = server().Process(target=_main, args=(arguments, folder, output))
        self.process.start()

    @property
    def stdout(self) -> str:
        return self._read("stdout")

    @property
    def stderr(self) -> str:
        return self._read("stderr")

    def _read(self, name: str) -> str:
        path = self._output / name
        return path.read_text() if path.exists() else ""

    def wait(self, timeout: float) -> int:
        """The exit status: negative if a signal ended it."""
        self.process.join(timeout)
        status = self.process.exitcode
        assert status is not None, f"still running after {timeout} seconds; {self.stderr[-2000:]}"
        return status

    def wait_until(self, seen: Callable[[], bool], timeout: float = 120) -> None:
        """Fails if the program ends, or time is up, before something is seen."""
        deadline = time.monotonic() + timeout
        while not seen():
            assert self.process.is_alive(), f"ended too early; {self.stderr[-2000:]}"
            assert time.monotonic() < deadline, f"nothing yet; {self.stderr[-2000:]}"
            time.sleep(0.02)

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@contextmanager
def started(*arguments: str | Path, folder: Path) -> Iterator[Program]:
    """Start ``python *arguments``, a path or ``-m module``, in a folder; kill it at the end."""
    output = Path(tempfile.mkdtemp())
    program = Program([str(argument) for argument in arguments], folder, output)
    try:
        yield program
    finally:
        program.process.kill()
        program.process.join()
        shutil.rmtree(output)


def printed_by(*arguments: str | Path, folder: Path, timeout: float = 600) -> str:
    """What ``python *arguments`` prints; it must end without an error."""
    with started(*arguments, folder=folder) as program:
        assert program.wait(timeout) == 0, program.stderr[-3000:]
        return program.stdout


@contextmanager
def losing_a_worker(seen: Callable[[], bool]) -> Iterator[str]:
    """The address of a scheduler with two workers on loopback; one is killed once `seen`.

    Fails at the end if none was killed.
    """
    import dask
    import distributed

    over, killed = threading.Event(), threading.Event()
    with (
        dask.config.set({"distributed.worker.multiprocessing-method": server().get_start_method()}),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None
        ) as cluster,
    ):

        def kill() -> None:
            while not seen() and not over.wait(0.01):
                pass
            if not seen():
                return
            next(iter(cluster.workers.values())).process.process._process.kill()
            killed.set()

        thread = threading.Thread(target=kill, daemon=True)
        thread.start()
        try:
            yield cluster.scheduler_address
        finally:
            over.set()
            thread.join(timeout=10)
    assert killed.is_set(), "no worker was killed"
