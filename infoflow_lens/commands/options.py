"""Make the options of a command from the fields of a dataclass."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import Repeated


def options_of(
    config: type[Any], arguments: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each field of a dataclass, with its type, default and help.

    The command takes the dataclass as its first parameter, ``config``; a tuple is written with
    commas, or one by one in a repeated option where the field says `Repeated`. What is False by
    default is a switch.

    Args:
        config: a dataclass whose fields are ``Annotated[type, ..., "help"]``; it checks ranges.
        arguments: the fields that are arguments without a name.
    """
    kinds, texts = get_type_hints(config), help_texts(config)
    repeated = [name for name, parts in _read_annotations(config).items() if Repeated() in parts]
    option_kinds = {name: list[str] if name in repeated else kind for name, kind in kinds.items()}
    parameters = [
        _make_parameter(item, option_kinds[item.name], texts[item.name], item.name in arguments)
        for item in fields(config)
    ]

    # the command gets a function that makes its settings, so that errors are reported by it
    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [
            p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for p in inspect.signature(command).parameters.values()
            if p.name != "config"
        ]

        def fill_config(**given: Any) -> None:
            of_config = {p.name: given.pop(p.name) for p in parameters}
            command(
                lambda: config(**{k: _parse(kinds[k], v, k) for k, v in of_config.items()}),
                **given,
            )

        # typer takes arguments without a default first
        required = [p for p in (*parameters, *own) if p.default is inspect.Parameter.empty]
        optional = [p for p in (*parameters, *own) if p.default is not inspect.Parameter.empty]
        fill_config.__signature__ = inspect.Signature([*required, *optional])  # type: ignore[attr-defined]
        fill_config.__annotations__ = {p.name: p.annotation for p in (*required, *optional)}
        fill_config.__name__, fill_config.__doc__ = command.__name__, command.__doc__
        return fill_config

    return decorate


def help_texts(config: type[Any]) -> dict[str, str]:
    """Give the help of each field of a dataclass: the text among its annotations, beside ranges."""
    return {
        name: next(part for part in parts if isinstance(part, str))
        for name, parts in _read_annotations(config).items()
    }


def _read_annotations(config: type[Any]) -> dict[str, tuple[Any, ...]]:
    hints = get_type_hints(config, include_extras=True)
    return {item.name: get_args(hints[item.name]) for item in fields(config)}


def _make_parameter(item: Any, kind: Any, text: str, is_argument: bool) -> inspect.Parameter:
    default: Any = inspect.Parameter.empty if item.default is MISSING else item.default
    if _is_tuple(kind):
        kind = str | None if default is None else str
        default = None if default is None else ",".join(map(str, default))
    # typer takes the default of a repeated option as a list
    if kind == list[str] and default is not inspect.Parameter.empty:
        default = list(default)
    choices = _list_choices(kind)
    if choices:  # checked by the dataclass, which knows what was meant
        kind = str | None if type(None) in get_args(kind) else str
    metavar = "|".join(choices) or None
    # without a name of its own, a switch would have a second one that turns it off
    names = [option_name(item.name)] if default is False else []
    info: Any = typer.Option(*names, help=text, metavar=metavar)
    info = typer.Argument(help=text) if is_argument else info
    return inspect.Parameter(
        item.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, info],
    )


def _list_choices(kind: Any) -> tuple[str, ...]:
    literals = [part for part in (kind, *get_args(kind)) if get_origin(part) is Literal]
    return get_args(literals[0]) if literals else ()


def _is_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple or any(get_origin(part) is tuple for part in get_args(kind))


def _parse(kind: Any, value: Any, name: str) -> Any:
    if isinstance(value, list):
        return tuple(value)
    if value is None or not _is_tuple(kind):
        return value
    parts = [part.strip() for part in value.split(",")] if value.strip() else []
    tuples = kind if get_origin(kind) is tuple else get_args(kind)[0]
    if get_args(tuples)[0] is str:
        return tuple(parts)
    return read_integers(parts, option_name(name))


def option_name(name: str) -> str:
    """Name the option of a field."""
    return "--" + name.replace("_", "-")


def refuse_needless(config: Any, names: Sequence[str], reason: str) -> None:
    """Refuse options that would change nothing, where they are not as by default.

    Raises:
        InfoFlowError: naming them.
    """
    defaults = {item.name: item.default for item in fields(config)}
    given = [option_name(name) for name in names if getattr(config, name) != defaults[name]]
    if given:
        raise InfoFlowError(f"{reason}: expected no {' and no '.join(given)}; leave it out")


def read_integers(parts: Sequence[str], option: str) -> tuple[int, ...]:
    """Read the integers of an option.

    Raises:
        InfoFlowError: for anything else, naming the option.
    """
    try:
        return tuple(int(part) for part in parts)
    except ValueError:
        raise InfoFlowError(
            f"{option} is {','.join(parts)!r}: expected integers with commas, such as 1,2"
        ) from None
