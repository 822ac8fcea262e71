"""Forward passes that a probe makes for itself, and that no probe looks at."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class AllSeenError(Exception):
    """All that is wanted of a forward pass has been seen: the rest of it need not be run."""


_inside_own_pass: ContextVar[bool] = ContextVar("inside_own_pass", default=False)


@contextmanager
def own_pass() -> Iterator[None]:
    """Forward passes in this block are a probe's own: no probe looks at them."""
    token = _inside_own_pass.set(True)
    try:
        yield
    finally:
        _inside_own_pass.reset(token)


def inside_own_pass() -> bool:
    """Whether a probe runs a forward pass of its own."""
    return _inside_own_pass.get()
