"""What commands share: printing errors, options, tasks by name."""

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer


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
