"""What commands share: printing errors, options, lists of numbers, tasks by name."""

import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer


def folder(text: str) -> Path:
    """Parse the name of a folder.

    Raises:
        typer.BadParameter: for an empty name, which would be the current folder.
    """
    if not text.strip():
        raise typer.BadParameter("it is empty: expected a name; '.' is the current folder")
    return Path(text)


def check_document_place(out: Path, kind: str, what: str) -> None:
    """Refuse, before work starts, a place that cannot be written or holds another document.

    Args:
        out: the file.
        kind: what stands in the "format" of documents that may be replaced.
        what: what errors call them.

    Raises:
        InfoFlowError: for a link, or a file that is none.
    """
    import json

    def is_ours(text: bytes) -> bool:
        held = json.loads(text)
        return isinstance(held, dict) and kind in str(held.get("format"))

    check_place(out, what, is_ours)


def check_place(out: Path, what: str, is_ours: Callable[[bytes], bool]) -> None:
    """Refuse, before work starts, a place that cannot be written or holds something else.

    Args:
        out: the file.
        what: what errors call files that may be replaced.
        is_ours: whether a file with these contents may be; a ValueError means that it may not.

    Raises:
        InfoFlowError: for a link, or a file that may not be replaced.
    """
    from infoflow_lens.foundation.errors import InfoFlowError
    from infoflow_lens.foundation.files import writable_folder

    writable_folder(out.parent)
    if not os.path.lexists(out):
        return
    try:
        ours = not out.is_symlink() and is_ours(out.read_bytes())
    except (OSError, ValueError, RecursionError):
        ours = False
    if not ours:
        raise InfoFlowError(
            f"{str(out)!r} is there and is no {what}: expected a new file or an earlier {what}; "
            "choose another name"
        )


# Options that several commands have
Device = Annotated[str, typer.Option(help="Device of the model: cpu, cuda:0, ...")]
Dtype = Annotated[
    str | None, typer.Option(help="Number format: float32 (default), bfloat16, float16 or float64.")
]
Backend = Annotated[
    str, typer.Option(help="How to host it: hooked (TransformerLens 3), bridge or auto.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress bars.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def report_errors() -> Iterator[None]:
    """Print errors of a block as one line, and exit: with status 2, or 130 after Ctrl-C.

    Raises:
        typer.Exit: after the message.
    """
    from infoflow_lens.foundation.errors import InfoFlowError, is_out_of_memory

    try:
        yield
    except InfoFlowError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt as interrupt:
        reason = str(interrupt) or "interrupted"
        typer.echo(f"stopped: {reason}", err=True)
        raise typer.Exit(130) from None
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        typer.echo(
            f"error: memory ran out ({type(error).__name__}): expected room for the libraries, the "
            "model and a batch; allow more (ulimit -v), or give smaller batches or shorter "
            "sequences",
            err=True,
        )
        raise typer.Exit(2) from None


def own_command(context: typer.Context, *more: str) -> str:
    """The command line of a command, so that it can be run again.

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
                words.append((parameter.opts if item else parameter.secondary_opts)[0])
            else:
                words += [parameter.opts[0], str(item)]
    return shlex.join([*words, *(option for option in more if option not in words)])


def integers(text: str, name: str) -> tuple[int, ...]:
    """Parse integers that are separated by commas.

    Raises:
        InfoFlowError: for anything else.
    """
    from infoflow_lens.foundation.errors import InfoFlowError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InfoFlowError(
            f"{name} is {text!r}: expected integers separated by commas, such as 4,1"
        ) from None


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


def console() -> Any:
    """Rich's console without highlighting."""
    from rich.console import Console

    return Console(highlight=False)


def print_lines(heading: str, lines: Any) -> None:
    """A heading and a list below it; nothing for an empty list."""
    if not lines:
        return
    out = console()
    out.print(f"[bold]{heading}[/bold]")
    for line in lines:
        out.print(f"  - {line}", markup=False)
