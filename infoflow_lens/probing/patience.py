"""A message to the user when a measurement takes long, and how to make it shorter."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from infoflow_lens.probing.part import Say

_SOON = 60.0  # seconds until the message
_LONG = 300.0  # seconds that must be left at that time


@contextmanager
def warn_if_long(say: Say, what: str, n: int, longest: int) -> Iterator[Callable[[int], None]]:
    """After a minute of a block, say once how much time is left, if it is more than five minutes.

    Args:
        say: called with the line, from another thread.
        what: the name of what is measured.
        n: the number of sequences that are left.
        longest: the tokens of the longest of them.

    Yields:
        A function to call with the number of sequences of each finished batch.
    """
    begun, done = time.monotonic(), 0

    def advance(more: int) -> None:
        nonlocal done
        done += more

    def warn() -> None:
        left = (time.monotonic() - begun) / done * (n - done) if done else None
        if left is None or left > _LONG:
            how = "no batch of them has ended" if left is None else f"about {_duration(left)} left"
            say(
                f"{what}: {n} sequences of up to {longest} tokens, {how} after "
                f"{_duration(_SOON)}; fewer (n, n_detail) or shorter ones (max_length) take less, "
                "a smaller batch_size shows more often how far it is, and parts that are not named "
                "in probes are left out"
            )

    timer = threading.Timer(_SOON, warn)
    timer.daemon = True
    # the message is a courtesy: a run goes on without it
    with suppress(RuntimeError):  # no room for a thread, and so no message
        timer.start()
    try:
        yield advance
    finally:
        timer.cancel()


def _duration(seconds: float) -> str:
    for unit, length in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} seconds"
