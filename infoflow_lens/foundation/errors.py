"""The errors and warnings of the project."""

from __future__ import annotations


class InfoFlowError(ValueError):
    """Bad input, or a model that cannot give what a call needs.

    The message names the value, what was expected and what to do. It is raised before work starts.
    """


class InfoFlowWarning(UserWarning):
    """A result is valid, but not what its reader may assume (from a rank-deficient fit, say)."""


class NothingMeasuredError(InfoFlowError):
    """A probe was asked for its result before any complete forward pass reached it."""


def first_line(error: BaseException) -> str:
    """The first line of another package's error, at most 300 characters; else its class name."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".:")[:300] if lines else type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on the host or on a device."""
    words = ("not enough memory", "allocate memory", "out of memory")
    kinds = [kind.__name__ for kind in type(error).__mro__]  # torch is not imported here
    return not {"MemoryError", "OutOfMemoryError"}.isdisjoint(kinds) or (
        isinstance(error, (RuntimeError, OSError, ImportError))
        and any(word in str(error) for word in words)
    )
