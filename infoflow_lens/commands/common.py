"""What commands share: printing, errors, tasks by name, options from the fields of a dataclass."""

import inspect
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
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


def folder(text: str) -> Path:
    """Parse the name of a folder.

    Raises:
        typer.BadParameter: for an empty name, which would be the current folder, and for no path.
    """
    from infoflow_lens.foundation.errors import InfoFlowError
    from infoflow_lens.foundation.files import user_path

    if not text.strip():
        raise typer.BadParameter("it is empty: expected a name; '.' is the current folder")
    try:
        return user_path(text)
    except InfoFlowError as error:
        raise typer.BadParameter(str(error)) from error


# Options that several commands have; the first ones with a text as help, for classes of options
Text = Annotated[str, "The text that the model reads."]
SecondText = Annotated[str | None, "The second text, where the model reads pairs of texts."]
DrawingSeed = Annotated[int, "Seed of all random draws."]
TokenSize = Annotated[int | None, "Dimension of a token, d."]
Components = Annotated[int | None, "Number of retrieved components, D."]
Counting = Literal["paper", "unordered", "proved"]  # of comparisons; theory's own loads torch
Device = Annotated[str, typer.Option(help="Device of the model: cpu, cuda:0, ...")]
Dtype = Annotated[
    str | None, typer.Option(help="Number format: float32 (default), bfloat16, float16 or float64.")
]
Backend = Annotated[
    str,
    typer.Option(
        help="How to load it: auto (as transformers does), hooked (TransformerLens 3) or opened."
    ),
]
Jobs = Annotated[int, typer.Option(help="Processes that run at once.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress bars.")]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace a file of another kind, or one that was edited."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def report_errors() -> Iterator[None]:
    """Print errors of a block as one line, and exit: with status 2, or 130 after Ctrl-C.

    Raises:
        typer.Exit: after the message.
    """
    from infoflow_lens.foundation.errors import InfoFlowError, is_out_of_memory, panics_as_errors

    # panics of libraries in Rust are no exceptions of Python
    try:
        with panics_as_errors("a model, a tokenizer or a file"):
            yield
    except InfoFlowError as error:
        say(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt as interrupt:
        reason = str(interrupt) or "interrupted"
        say(f"stopped: {reason}", err=True)
        raise typer.Exit(130) from None
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        say(
            f"error: memory ran out ({type(error).__name__}): expected room for the libraries, the "
            "model and a batch; allow more (ulimit -v), or give smaller batches or shorter "
            "sequences",
            err=True,
        )
        raise typer.Exit(2) from None


def repeat_command(context: typer.Context, *more: str) -> str:
    """Return the command line of a command, so that it can be run again.

    Args:
        context: of the command that runs.
        more: options to add where the command line lacks them.
    """
    words = context.command_path.split()
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[str(parameter.name)]
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if parameter.param_type_name == "argument":
                words.append(str(item))
            elif isinstance(item, bool):
                # a switch has no value: its name says on or off
                words.append((parameter.opts if item else parameter.secondary_opts)[0])
            else:
                words += [parameter.opts[0], str(item)]
    return shlex.join([*words, *(option for option in more if option not in words)])


def pair_of(text: str, second: str | None) -> str | tuple[str, str]:
    """Pair a text with a second one, where there is one."""
    return text if second is None else (text, second)


def task_by_options(
    name: str,
    tokens: int | None = None,
    d_token: int | None = None,
    components: int | None = None,
    seed: int | None = None,
) -> Any:
    """Load the task that a user names, with the options that are not None.

    Raises:
        InfoFlowError: for an unknown task, an option that it does not have, or absurd sizes.
    """
    from infoflow_lens.foundation.errors import InfoFlowError
    from infoflow_lens.tasks import load_task

    limits = {"--tokens": (tokens, 10**12), "--components": (components, 256),
              "--d-token": (d_token, 10**6)}  # fmt: skip
    for option, (value, most) in limits.items():
        if value is not None and not 1 <= value <= most:
            raise InfoFlowError(f"{option} is {value}: expected 1 to {most}")
    asked = {"n_tokens": tokens, "d_token": d_token, "n_components": components, "seed": seed}
    return load_task(name, **{key: value for key, value in asked.items() if value is not None})


def say(text: str, err: bool = False) -> None:
    """Print a text, without what a terminal would take for a command."""
    from infoflow_lens.foundation.display import printable

    typer.echo(printable(text), err=err)


def say_json(value: Any) -> None:
    """Print a value as JSON, with null for what is no number."""
    from infoflow_lens.foundation.files import json_text

    say(json_text(value))


def console(markup: bool = True) -> Any:
    """Make Rich's console, which shows control characters of texts as :func:`say` does.

    Args:
        markup: whether ``[bold]`` and the like are styles.
    """
    from rich.console import Console

    from infoflow_lens.foundation.display import printable

    class EscapingConsole(Console):
        """A console that prints control characters in the place of obeying them."""

        def render_str(self, text: str, **settings: Any) -> Any:
            # Rich puts the codes of its styles in behind this, so that they stay
            return super().render_str(printable(text), **settings)

    # with COLUMNS=0, which some terminals set, Rich would print nothing
    width = 80 if os.environ.get("COLUMNS") == "0" else None
    return EscapingConsole(highlight=False, markup=markup, width=width)


def print_lines(heading: str, lines: Any) -> None:
    """Print a heading and a list below it; nothing for an empty list."""
    if not lines:
        return
    out = console()
    out.print(f"[bold]{heading}[/bold]")
    for line in lines:
        out.print(f"  - {line}", markup=False, soft_wrap=True)
