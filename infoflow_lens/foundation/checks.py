"""Checks of what users give, in one place: integers, choices, seeds, devices."""

import operator
from collections.abc import Iterable
from typing import Any

from infoflow_lens.foundation.devices import check_device as check_device
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.names import nearest

LARGEST_SEED = 2**63 - 1


def check_integer(value: Any, name: str, least: int = 0, what: str = "") -> int:
    """`value` as an int; integers of numpy count, booleans do not.

    Args:
        value: what the user gave.
        name: what errors call it.
        least: the smallest value allowed.
        what: the end of the error, such as "; rank 1 is the argmax".

    Raises:
        InfoFlowError: unless it is an integer of at least `least`.
    """
    number = _integer(value)
    if number is None or number < least:
        raise InfoFlowError(f"{name} is {value!r}: expected an integer of at least {least}{what}")
    return number


def check_integers(
    values: Any, name: str, least: int | None = 0, what: str = "", empty: bool = False
) -> tuple[int, ...]:
    """`values` as a tuple of different ints; see :func:`check_integer`.

    Args:
        values: a sequence or an array.
        name: what errors call them.
        least: the smallest value allowed; None for any.
        what: the end of the error.
        empty: whether there may be none.

    Raises:
        InfoFlowError: unless they are different integers from `least` on.
    """
    given = list(values) if isinstance(values, Iterable) and not isinstance(values, str) else [None]
    numbers = [number for number in map(_integer, given) if number is not None]
    whole = len(numbers) == len(given) == len(set(numbers))
    if (
        not whole
        or not (numbers or empty)
        or (least is not None and min(numbers, default=0) < least)
    ):
        of = "" if least is None else f" of at least {least}"
        verb = "are" if name.endswith("s") else "is"
        raise InfoFlowError(f"{name} {verb} {values!r}: expected different integers{of}{what}")
    return tuple(numbers)


def check_by_layer(values: Any, name: str, n_layers: int) -> tuple[int, ...]:
    """One integer of at least 1 for each layer, from one for all or one for each.

    Raises:
        InfoFlowError: for numbers below 1, or another number of layers.
    """
    one = _integer(values)
    given = [values] * n_layers if one is not None else values
    each = [_integer(value) for value in given] if isinstance(given, Iterable) else [None]
    numbers = [number for number in each if number is not None and number >= 1]
    if not len(numbers) == len(each) == n_layers:
        raise InfoFlowError(
            f"{name} is {values!r}: expected an integer of at least 1, or one for each of "
            f"{n_layers} layers"
        )
    return tuple(numbers)


def _integer(value: Any) -> int | None:
    if isinstance(value, bool) or (getattr(value, "dtype", None) is not None and value.ndim):
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):
        return None


def check_choice(value: Any, name: str, choices: Iterable[str]) -> str:
    """`value`, if it is one of the choices.

    Raises:
        InfoFlowError: with the choices, and the one that was meant.
    """
    known = list(choices)
    if not isinstance(value, str) or value not in known:
        raise InfoFlowError(f"{name} is {value!r}{nearest(value, known)}")
    return value


def check_seed(seed: Any, name: str = "seed") -> int:
    """`seed`, if it is an integer that every generator takes.

    Raises:
        InfoFlowError: if it is not.
    """
    number = _integer(seed)
    if number is None or not 0 <= number <= LARGEST_SEED:
        raise InfoFlowError(f"{name} is {seed!r}: expected an integer from 0 to 2^63 - 1")
    return number
