"""The errors and warnings of the project."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar, cast

from infoflow_lens.foundation.display import printable

KindT = TypeVar("KindT", bound=type)


class InfoFlowError(ValueError):
    """Bad input, or a model that cannot give what a call needs.

    The message names the value, what was expected and what to do. It is raised before work starts.
    What a terminal would take for a command, such as an escape in a name, is shown and not sent.
    """

    def __init__(self, *parts: object) -> None:
        super().__init__(*(printable(part) if isinstance(part, str) else part for part in parts))


class InfoFlowWarning(UserWarning):
    """A result is valid, but not what its reader may assume (from a rank-deficient fit, say)."""


class _EarlierName:
    """An attribute that has another name now, and says it."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(self._message)


def refuse_names(**present: str) -> Callable[[KindT], KindT]:
    """Refuse earlier names of a class's attributes with an error that says what is there now.

    A subclass that defines one, which nobody would call, is warned of where it is made.

    Args:
        present: by earlier name, the present one, or what does the same.
    """

    def decorate(kind: KindT) -> KindT:
        own = vars(kind).get("__init_subclass__")
        words = {old: f"{old} was removed in 0.4: expected {name}" for old, name in present.items()}

        def warn(below: type, /, **options: Any) -> None:
            above = super(cast(Any, kind), below)
            inherited = own.__get__(None, below) if own else above.__init_subclass__
            inherited(**options)
            for earlier in words.keys() & vars(below).keys():
                if not isinstance(vars(below)[earlier], _EarlierName):
                    message = f"{below.__name__}.{earlier} is never called: {kind.__name__}."
                    warnings.warn(message + words[earlier], InfoFlowWarning, stacklevel=2)

        for earlier, said in words.items():
            setattr(kind, earlier, _EarlierName(f"{kind.__name__}.{said}"))
        setattr(kind, "__init_subclass__", classmethod(warn))  # noqa: B010
        return kind

    return decorate


@contextmanager
def panics_as_errors(what: str) -> Iterator[None]:
    """Turn a panic of a library in Rust, which ``except Exception`` lets through, into an error.

    Args:
        what: what was read meanwhile, such as "the tokenizer of 'gpt2'".

    Raises:
        InfoFlowError: in the place of the panic.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise InfoFlowError(
            f"{what} cannot be used (a library in Rust gave up: {first_line(error)}): expected "
            "files that it can read; take another model or tokenizer"
        ) from error


class NothingMeasuredError(InfoFlowError):
    """A probe was asked for its result before any complete forward pass reached it."""


def first_line(error: BaseException) -> str:
    """Return the first line of a package's error, at most 300 characters; else its class name."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".:")[:300] if lines else type(error).__name__


def explain_error(error: BaseException) -> str:
    """Return what the system, or else the error itself, says; or the name of its class."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error means that memory ran out, on the host or on a device."""
    words = ("not enough memory", "allocate memory", "out of memory")
    kinds = [kind.__name__ for kind in type(error).__mro__]  # torch is not imported here
    return not {"MemoryError", "OutOfMemoryError"}.isdisjoint(kinds) or (
        isinstance(error, (RuntimeError, OSError, ImportError))
        and any(word in str(error) for word in words)
    )
