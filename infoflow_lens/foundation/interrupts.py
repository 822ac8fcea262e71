"""Ctrl-C that waits for the end of a step, so that what a step changes is whole."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from infoflow_lens.foundation.streams import note


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
