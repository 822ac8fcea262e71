"""Threads, worker processes, and Ctrl-C that waits for the end of a step."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from infoflow_lens.foundation.streams import note

_lock = threading.Lock()
_inside, _before = 0, 1
_own = threading.local()  # the count of the innermost block of this thread
_watched: set[int] = set()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let PyTorch compute with `count` threads in a block; the last digits of numbers depend on it.

    Blocks in several threads of a program may overlap if their counts are equal. The last block
    that ends restores the number of threads; a block inside another one that of the outer one.
    """
    global _inside, _before
    outer = getattr(_own, "count", None)
    with _lock:
        if not _inside:
            _before = torch.get_num_threads()
        _inside += 1
    torch.set_num_threads(count)  # which OpenMP keeps for each thread
    _own.count = count
    try:
        yield
    finally:
        _own.count = outer
        with _lock:
            _inside -= 1
            if not _inside:
                torch.set_num_threads(_before)
            elif outer is not None:
                torch.set_num_threads(outer)


def exit_with_parent(parent: int) -> None:
    """End this process soon after `parent`, which has started it, is gone, even by kill -9."""
    if os.getpid() == parent or parent in _watched:
        return
    _watched.add(parent)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    if os.getppid() == parent:
        threading.Thread(target=watch, daemon=True).start()
    # it ended before this process looked, and left it to the first process or another one; a
    # process that a server has started for a parent that lives is left alone
    elif os.name == "posix" and (os.getppid() == 1 or not _exists(parent)):
        os._exit(1)


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)  # sends nothing
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        pass
    return True


@contextmanager
def defer_interrupts() -> Iterator[Callable[[], None]]:
    """Hold back the first Ctrl-C (SIGINT) or SIGTERM of a block until the yielded check is called.

    The check raises KeyboardInterrupt if there was a signal. A second signal raises it at once.
    Nothing changes outside the main thread, which alone receives signals, and where the program has
    its own handler for SIGINT. Signals that are ignored stay ignored, such as SIGINT of a command
    that a shell starts with ``nohup`` or ``&``.
    """
    asked = False

    def check() -> None:
        if asked:
            raise KeyboardInterrupt

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        note("stopping after this batch; press Ctrl-C again to stop at once")

    # what a process does without us: only then the signals are ours to take
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    handled = signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, signal.SIG_IGN)
    # a notebook or a server handles signals itself, and threads get none
    if handled or threading.current_thread() is not threading.main_thread():
        yield check
        return
    numbers = [number for number, usual in defaults.items() if signal.getsignal(number) == usual]
    before = [signal.signal(number, hold) for number in numbers]
    try:
        yield check
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    check()  # of one that came behind the last step
