"""The command line. Commands import what they need when they run, so that --help is quick."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="infoflow-lens",
    help="Which input tokens can a hidden state depend on, which does it depend on, and is that "
    "what theory allows?",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@contextmanager
def _reported() -> Iterator[None]:
    """Errors as one line and exit status 2; Ctrl-C as a clean stop and exit status 130."""
    from infoflow_lens.foundation.errors import InfoFlowError

    try:
        yield
    except InfoFlowError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt as interrupt:
        reason = str(interrupt) or "interrupted"
        typer.echo(f"stopped: {reason}", err=True)
        raise typer.Exit(130) from None


def _show_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"infoflow-lens {version('infoflow-lens')}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


@app.command(short_help="Train a small model, probe it, predict it, compare.")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report and the numbers.")],
    seed: Annotated[int, typer.Option(help="Seed of target, weights and data.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bars.")] = False,
) -> None:
    """Train a small model, probe it, predict it, and show where the two agree (a few minutes)."""
    from rich.console import Console
    from rich.table import Table

    with _reported():
        from infoflow_lens.experiments.demo import DemoConfig, run_demo, verdict

        result = run_demo(out, DemoConfig(seed=seed), progress=not quiet)

    table = Table(title=f"validation NMSE {result.summary['nmse']:.2e}", title_justify="left")
    table.add_column("")
    table.add_column("initial", justify="right")
    table.add_column("trained", justify="right")
    for label, (initial, trained) in verdict(result.summary).items():
        table.add_row(label, f"{initial:.3f}", f"{trained:.3f}")
    console = Console()
    console.print(table)
    console.print(f"report: {result.out / 'report.html'}", soft_wrap=True)
    console.print(f"numbers: {result.out / 'summary.json'}", soft_wrap=True)


def main() -> None:
    """The entry point of ``infoflow-lens``."""
    app()


if __name__ == "__main__":
    main()
