"""Settings: types and ranges are declared once, as annotations, and checked here alone.

A setting is an annotated field of a :func:`settings` class or an annotated argument of a
:func:`checked` function. pydantic validates strictly: no text becomes a number, no number a truth
value. NumPy numbers, arrays and tensors of numbers count as what they hold, and lists as tuples.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Interval, MaxLen, MinLen
from typing_extensions import dataclass_transform

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.naming import nearest

T = TypeVar("T")
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


@dataclass(frozen=True)
class Remedy:
    """The end of an error message: what to do; for ``Annotated[int, Ge(1), Remedy("...")]``."""

    text: str


@dataclass(frozen=True)
class Distinct:
    """Values of a tuple must differ; for ``Annotated[tuple[int, ...], Distinct()]``."""


@dataclass(frozen=True)
class Repeated:
    """A tuple of texts that a command takes one by one, in an option that may be repeated."""


LARGEST_SEED = 2**63 - 1

Count = Annotated[int, Ge(1)]
Index = Annotated[int, Ge(0)]
Seed = Annotated[int, Interval(ge=0, le=LARGEST_SEED)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Interval(ge=0, le=1)]
Ranks = Annotated[
    tuple[Count, ...],
    MinLen(1),
    Distinct(),
    Remedy("such as (1, 2); rank 1 is the argmax"),
]
Positions = Annotated[tuple[Index, ...], Distinct(), Remedy("such as (0,)")]
BothEnds = Annotated[
    tuple[int, ...],
    Distinct(),
    Remedy("such as (0,), or (-1,) for the last"),
]

_SCALARS: tuple[Any, ...] = (int, float, bool, str)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def settings(cls: type[T]) -> type[T]:
    """Return a frozen dataclass whose fields are checked against their annotations when it is made.

    A ``__post_init__`` of the class runs after the fields are checked, for what holds between them.

    Raises:
        InfoFlowError: from the class, for a value that its field does not allow.
    """
    then: Callable[[Any], None] | None = cls.__dict__.get("__post_init__")

    def post_init(self: Any) -> None:
        check_fields(self)
        if then is not None:
            then(self)

    cls.__post_init__ = post_init  # type: ignore[attr-defined]
    return dataclass(frozen=True)(cls)


def check_fields(instance: Any) -> None:
    """Check the fields of a new dataclass instance, and put plain values in their place.

    Raises:
        InfoFlowError: for a value that its field does not allow.
    """
    kind: Any = type(instance)
    hints = _hints(kind)
    for item in fields(instance):
        if item.init and item.name in hints:
            value = check(getattr(instance, item.name), hints[item.name], item.name)
            object.__setattr__(instance, item.name, value)


def check_field(kind: type, name: str, value: Any) -> None:
    """Check a value for a field of a class of settings, of which none is made yet.

    Raises:
        InfoFlowError: for a value that the field does not allow.
    """
    if (hint := _hints(kind).get(name)) is not None:
        check(value, hint, name)


def checked(function: FunctionT) -> FunctionT:
    """Wrap a function so that its annotated settings are checked when it is called.

    Arguments that are no settings (models, tensors, other objects) are left alone.

    Raises:
        InfoFlowError: from the function, for a value that its annotation does not allow.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        hints = _hints(function)
        for name, value in bound.arguments.items():
            kind = signature.parameters[name].kind
            # *args and **kwargs hold several values, which have no annotation of their own
            if name in hints and kind not in (
                inspect.Parameter.VAR_POSITIONAL,
                inspect.Parameter.VAR_KEYWORD,
            ):
                bound.arguments[name] = check(value, hints[name], name)
        return function(*bound.args, **bound.kwargs)

    return typing.cast(FunctionT, call)


def check(value: Any, annotation: Any, name: str) -> Any:
    """Check a value against its annotation, and return it as plain Python values.

    NumPy's numbers become Python's, and lists become tuples.

    Args:
        value: what the user gave.
        annotation: its type, with ranges; such as ``Annotated[int, Ge(1)]``.
        name: what the error calls it.

    Raises:
        InfoFlowError: with the value, what was expected, and what to do.
    """
    from pydantic import ValidationError

    given = plain(value)
    with suppress(ValidationError):
        found = _adapter(annotation).validate_python(given)
        if _is_distinct(found, annotation):
            return found
    # what was allowed is said in words, or by the nearest of some names
    choices = _choices(annotation)
    expected = nearest(given, choices) if choices else f": expected {_words(annotation)}"
    remedies = [part.text for part in _metadata(annotation) if isinstance(part, Remedy)]
    verb = "are" if name.endswith("s") and isinstance(given, tuple) else "is"
    raise InfoFlowError(f"{name} {verb} {value!r}{expected}{''.join(f', {r}' for r in remedies)}")


def check_by_layer(values: Any, name: str, n_layers: int) -> tuple[int, ...]:
    """Return one integer of at least 1 for each layer, from one for all or one for each.

    Raises:
        InfoFlowError: for numbers below 1, or another number of layers.
    """
    each = Annotated[tuple[Count, ...], MinLen(n_layers), MaxLen(n_layers)]
    try:
        found = check(values, Count | each, name)
    except InfoFlowError:
        raise InfoFlowError(
            f"{name} is {values!r}: expected an integer of at least 1, or one for each of "
            f"{n_layers} layers"
        ) from None
    return (found,) * n_layers if isinstance(found, int) else found


def plain(value: Any) -> Any:
    """Return numbers of NumPy and torch as Python's, small arrays, tensors and lists as tuples."""
    if hasattr(value, "dtype") and hasattr(value, "tolist") and hasattr(value, "ndim"):
        # what has more axes is data, and no setting
        return plain(value.tolist()) if value.ndim <= 2 else value
    if isinstance(value, (list, range)):
        return tuple(plain(part) for part in value)
    if type(value) is tuple:
        return tuple(plain(part) for part in value)
    return value


# What annotations say


@functools.cache
def _adapter(annotation: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    config = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)
    return TypeAdapter(annotation, config=config)


@functools.cache
def _hints(owner: Any) -> Mapping[str, Any]:
    """Return the annotations of a class or function that declare settings, by name."""
    found: dict[str, Any] = {}
    # base classes first, so that what a class itself says of a field counts
    for place in reversed(inspect.getmro(owner)) if isinstance(owner, type) else (owner,):
        module = inspect.getmodule(place)
        # names as they are known where the class or function stands
        names = {**vars(typing), **(vars(module) if module is not None else {})}
        names |= getattr(inspect.unwrap(place), "__globals__", {}) if callable(place) else {}
        for name, hint in inspect.get_annotations(place).items():
            if isinstance(hint, str):
                try:
                    # one at a time, so that a hint that cannot be read hides no other
                    alone = type("Alone", (), {"__annotations__": {name: hint}})
                    hint = typing.get_type_hints(alone, names, include_extras=True)[name]
                except (NameError, SyntaxError):  # a name that only type checkers know, or a shape
                    continue
            if _is_setting(hint):
                found[name] = hint
            else:
                found.pop(name, None)
    found.pop("return", None)
    return found


def _is_setting(hint: Any) -> bool:
    """Say whether all parts of an annotation are plain values, of checked types and ranges."""
    origin = get_origin(hint)
    if origin is Annotated:
        return _is_setting(get_args(hint)[0])
    if origin in (Literal, Callable) or hint in _SCALARS or hint is type(None):
        return True
    if origin in (Union, types.UnionType, tuple):
        return all(part is Ellipsis or _is_setting(part) for part in get_args(hint))
    return False


def _metadata(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()


def _options(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation itself."""
    inner = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    return get_args(inner) if get_origin(inner) in (Union, types.UnionType) else (annotation,)


def _choices(annotation: Any) -> list[str]:
    """Return the words that may be given, if only words may be."""
    options = [part for part in _options(annotation) if part is not type(None)]
    inner = get_args(options[0])[0] if get_origin(options[0]) is Annotated else options[0]
    if (
        len(options) == 1
        and get_origin(inner) is Literal
        and all(isinstance(part, str) for part in get_args(inner))
    ):
        return list(get_args(inner))
    return []


def _is_distinct(value: Any, annotation: Any) -> bool:
    marks = [part for each in (annotation, *_options(annotation)) for part in _metadata(each)]
    return not (isinstance(value, tuple) and Distinct() in marks) or len({*value}) == len(value)


def _words(annotation: Any) -> str:
    """Say in words what an annotation allows."""
    options = _options(annotation)
    # unions say each of their parts
    if len(options) > 1:
        return " or ".join(_words(option) for option in options)
    metadata, origin = _metadata(annotation), get_origin(annotation)
    inner = get_args(annotation)[0] if origin is Annotated else annotation
    bounds = _range(metadata)
    if inner is type(None) or inner is None:
        return "None"
    if get_origin(inner) is Literal:
        return " or ".join(repr(part) for part in get_args(inner))
    if get_origin(inner) is Callable:
        return "a function"
    if get_origin(inner) is tuple:
        # tuples say how many, and what each holds
        parts = get_args(inner)
        distinct = "different " if any(isinstance(part, Distinct) for part in metadata) else ""
        least = [part.min_length for part in metadata if isinstance(part, MinLen)]
        if len(parts) == 2 and parts[1] is Ellipsis:
            number = f"at least {least[0]} of " if least and least[0] > 1 else ""
            number = "one or more " if least == [1] else number
            return f"{number}{distinct}{_plural(_words(parts[0]))}"
        return f"{len(parts)} values: {', '.join(map(_words, parts))}"
    names = {int: "an integer", float: "a finite number", bool: "True or False", str: "a text"}
    return f"{names.get(inner, getattr(inner, '__name__', str(inner)))}{bounds}"


def _plural(words: str) -> str:
    for one, many in (("an integer", "integers"), ("a finite number", "finite numbers")):
        if words.startswith(one):
            return many + words.removeprefix(one)
    return "texts" if words == "a text" else f"values, each {words}"


def _range(metadata: Iterable[Any]) -> str:
    words = {"ge": "of at least", "gt": "above", "le": "at most", "lt": "below"}
    # annotated_types writes a range as one object, or each end as its own
    ends = {
        end: "2^63 - 1" if number == LARGEST_SEED else str(number)
        for end in words
        for part in metadata
        if (number := getattr(part, end, None)) is not None
    }
    if {"ge", "le"} <= ends.keys():
        return f" from {ends['ge']} to {ends['le']}"
    return " and".join(f" {words[end]} {number}" for end, number in ends.items())
