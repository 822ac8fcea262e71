"""The standard streams, which a daemon or a shell (``>&-``) may have closed."""

import os
import sys
from contextlib import suppress


def open_streams() -> None:
    """Open standard streams that are closed as the null device, so that what is printed is lost.

    Else the next file that is opened takes a stream's place, and what libraries print goes into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # which takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def note(text: str) -> None:
    """Write a line to standard error; where it cannot be written, work goes on without it."""
    with suppress(OSError):
        if sys.stderr is not None:
            sys.stderr.write(f"{text}\n")
