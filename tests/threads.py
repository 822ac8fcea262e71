"""Calls of a model in another thread, held where a test wants them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_LIMIT = 60  # seconds


class OtherCall:
    """A call in another thread, which stands at hook points until it is told to go on.

    Attributes:
        output: what it has returned; None before its end.
        error: what it has raised.
    """

    def __init__(self, model: nn.Module, call: Callable[[], Any], stops: tuple[str, ...]) -> None:
        self.output: Any = None
        self.error: BaseException | None = None
        self._call = call
        self._ended = False
        self._may_go_on = threading.Semaphore(0)
        self._stands = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run)
        for name in stops:
            model.hook_dict[name].add_hook(self._stop)

    def _run(self) -> None:
        try:
            self.output = self._call()
        except BaseException as error:
            self.error = error
        finally:
            self._ended = True
            self._stands.release()

    def _stop(self, activation: Any, hook: Any) -> None:
        if threading.current_thread() is self._thread:
            self._stands.release()
            assert self._may_go_on.acquire(timeout=_LIMIT)

    def start(self) -> None:
        """To the first stop."""
        self._thread.start()
        assert self._stands.acquire(timeout=_LIMIT)

    def go_on(self) -> None:
        """To the next stop or the end; does nothing behind the end, or in the other thread."""
        if not self._ended and threading.current_thread() is not self._thread:
            self._may_go_on.release()
            assert self._stands.acquire(timeout=_LIMIT)

    def let_go(self) -> None:
        """To the next stop or the end, without waiting until it is there."""
        self._may_go_on.release()

    def end(self) -> None:
        """To its end."""
        while self._thread.is_alive():
            self._may_go_on.release()
            self._thread.join(0.01)


@contextmanager
def other_call(model: nn.Module, call: Callable[[], Any], *stops: str) -> Iterator[OtherCall]:
    """`call` in another thread, at the first of the hook points `stops` when the block begins."""
    other = OtherCall(model, call, stops)
    other.start()
    try:
        yield other
    finally:
        other.end()
