"""The command line. Commands import what they need when they run, so that --help is quick."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, cast

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


@app.command(short_help="The tasks, their parameters and sources; or the card of one.")
def tasks(
    name: Annotated[str | None, typer.Argument(help="A task, for its card.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """List the tasks, or print the dataset card of one."""
    import json

    with _reported():
        from infoflow_lens.tasks import dataset_card, list_tasks, load_task

        if name is not None:
            typer.echo(str(dataset_card(load_task(name))))
            return
        known = [load_task(each) for each in list_tasks()]
    rows: list[dict[str, Any]] = [
        {
            "name": task.name,
            "input": task.input_kind,
            "source": task.source,
            "parameters": task.parameters(),
            "dimension": task.comparison.dimension if task.comparison else None,
            "order": task.comparison.order if task.comparison else None,
        }
        for task in known
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_lines=True)
    table.add_column("task and source", min_width=28)
    table.add_column("input", no_wrap=True)
    table.add_column("parameters", no_wrap=True)
    table.add_column("dim, order", justify="center")
    for row in rows:
        parameters = "\n".join(f"{key}={value!r}" for key, value in row["parameters"].items())
        compared = f"{row['dimension']}, {row['order']}" if row["order"] is not None else "-"
        table.add_row(
            f"[bold]{row['name']}[/bold]\n{row['source']}", row["input"], parameters, compared
        )
    Console(highlight=False).print(table)


@app.command(short_help="The hand-made models, their parameters and sources.")
def constructions() -> None:
    """List the models whose weights are set by hand, for build_construction."""
    from rich.console import Console
    from rich.table import Table

    with _reported():
        from infoflow_lens.models.constructions import CONSTRUCTIONS

    table = Table(show_lines=True)
    table.add_column("construction", no_wrap=True)
    table.add_column("task and parameters of its own")
    table.add_column("what it is, and source")
    for name, construction in CONSTRUCTIONS.items():
        own = [f"{key}={value!r}" for key, value in construction.parameters.items()]
        table.add_row(
            name,
            "\n".join([f"task {construction.task}", *own]),
            f"{construction.summary}\n{construction.source}",
        )
    Console(highlight=False, markup=False).print(table)


def _integers(text: str, name: str) -> tuple[int, ...]:
    """Comma-separated integers."""
    from infoflow_lens.foundation.errors import InfoFlowError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InfoFlowError(
            f"{name} is {text!r}: expected integers separated by commas, such as 4,1"
        ) from None


@app.command(short_help="What an architecture must pay for a task, before training.")
def estimate(
    task: Annotated[str, typer.Argument(help="A task, such as d_retrieval.")],
    heads: Annotated[str, typer.Option(help="Heads of each layer, such as 4,1.")],
    tokens: Annotated[int, typer.Option(help="Tokens in a sequence, T.")] = 64,
    d_model: Annotated[int, typer.Option(help="Width of the residual stream, E.")] = 32,
    d_token: Annotated[int | None, typer.Option(help="Dimension of a token, d.")] = None,
    components: Annotated[int | None, typer.Option(help="Retrieved components, D.")] = None,
    positions: Annotated[
        bool, typer.Option("--positions", help="The model has a positional encoding.")
    ] = False,
    count: Annotated[
        str, typer.Option(help="The target's number of comparisons: paper, unordered or proved.")
    ] = "paper",
    trees: Annotated[int, typer.Option(help="K in eq (5).")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the task and of the check.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    sweep: Annotated[
        str | None,
        typer.Option(
            help="'heads,tokens': the phase diagram for heads and T up to the given ones."
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="With --sweep: draw it to this png, svg or pdf file.")
    ] = None,
) -> None:
    """Estimate, before any training, what an architecture must pay to learn a task (Sec. 5.3)."""
    import json

    with _reported():
        from infoflow_lens.foundation.errors import InfoFlowError
        from infoflow_lens.models.architecture import Architecture
        from infoflow_lens.tasks import VectorTask, load_task
        from infoflow_lens.theory import estimate as estimates

        n_heads = _integers(heads, "--heads")
        asked = {"d_token": d_token, "n_components": components}
        chosen = {name: value for name, value in asked.items() if value is not None}
        if not isinstance(load_task(task), VectorTask):
            raise InfoFlowError(
                f"task {task!r} has token ids: the estimate is for tasks over vector tokens that "
                "retrieve tuples; ask one_layer_certificate what one layer can fit"
            )
        target = cast(VectorTask, load_task(task, n_tokens=tokens, seed=seed, **chosen))
        if sweep is None and plot is not None:
            raise InfoFlowError("--plot draws a phase diagram: expected --sweep heads,tokens too")
        if sweep is not None:
            if sweep != "heads,tokens":
                raise InfoFlowError(f"--sweep is {sweep!r}: expected heads,tokens")
            _sweep(target, n_heads, tokens, count, trees, as_json, plot)
            return
        architecture = Architecture(
            n_heads=n_heads,
            # only E enters the estimate, so heads need not divide it
            d_head=tuple(max(1, d_model // h) for h in n_heads if h > 0) or None,
            d_model=d_model,
            d_token=target.d_token,
            n_tokens=tokens,
            positional_embedding="learned" if positions else "none",
        )
        result = estimates.estimate(
            architecture, target, count=cast(Any, count), trees=trees, seed=seed
        )
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2))
        return
    _print_estimate(result)


def _print_estimate(result: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    heads = ", ".join(map(str, result.n_heads))
    console.print(
        f"[bold]{result.target}[/bold], T = {result.n_tokens}, heads ({heads}), "
        f"E = {result.d_model}: max-position retrieval alone is [bold]{result.verdict}[/bold]"
    )
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    saturated = " (saturated)" if result.saturated else ""
    rows = [
        (f"comparisons needed ({result.count})", f"{result.needed}"),
        (f"comparisons made, K = {result.trees}", f"{result.capacity}"),
        ("least h_1 for large T", str(result.min_heads or "none is enough")),
        ("least h_1 at this T", str(result.min_heads_here)),
        ("least |I| by counting", f"{result.min_information}{saturated}"),
        ("|I| of the best schedule", str(result.upper_information)),
        ("lower exponent (law, effective, certified)", _exponents(result.lower)),
        ("upper exponent (law, effective, certified)", _exponents(result.upper)),
    ]
    if result.verified is not None:
        rows.append(("inputs on which the schedule learns", f"{result.verified:.0%}"))
    for label, value in rows:
        table.add_row(label, value)
    console.print(table)
    for heading, lines in (("Because", result.reasons), ("Mind", result.flags)):
        console.print(f"[bold]{heading}[/bold]")
        for line in lines:
            console.print(f"  - {line}", markup=False)


def _exponents(by_mode: dict[str, float]) -> str:
    return ", ".join(f"{value:.3g}" for value in by_mode.values()) or "none"


def _sweep(
    target: Any,
    n_heads: tuple[int, ...],
    tokens: int,
    count: Any,
    trees: int,
    as_json: bool,
    plot: Path | None,
) -> None:
    import itertools
    import json

    from rich.console import Console
    from rich.table import Table

    from infoflow_lens.theory.comparison import check_sizes
    from infoflow_lens.theory.estimate import flags_of, phase_diagram

    check_sizes(n_heads, tokens)
    if plot is not None:
        from infoflow_lens.report.phase import check_picture_path, draw_phase_diagram

        check_picture_path(plot)
    lengths = sorted({2**k for k in range(3, tokens.bit_length()) if 2**k <= tokens} | {tokens})
    heads = list(itertools.product(*(range(1, most + 1) for most in n_heads)))
    rows = phase_diagram(target, heads, lengths, count, trees)
    flags = flags_of(target.comparison, n_heads, count, trees)
    title = f"{target.name}: max-position retrieval alone, count={count}, K={trees}"
    if plot is not None:
        draw_phase_diagram(rows, title, plot)
    if as_json:
        summary = {"target": target.name, "count": count, "trees": trees, "flags": flags}
        typer.echo(json.dumps({**summary, "rows": rows}, indent=2))
        return
    table = Table()
    table.add_column("heads", justify="right")
    for length in lengths:
        table.add_column(f"{length:.0e}" if length > 9999 else str(length), justify="center")
    signs = {"excluded": "[red]x[/]", "allowed": "[green]o[/]", "undecided": "."}
    for some in heads:
        found = [row["verdict"] for row in rows if row["heads"] == list(some)]
        table.add_row(", ".join(map(str, some)), *(signs[verdict] for verdict in found))
    console = Console(highlight=False)
    console.print(f"[bold]{title}[/bold]")
    console.print("x excluded, o allowed, . undecided; columns are T")
    console.print(table)
    console.print("[bold]Mind[/bold]")
    for flag in flags:
        console.print(f"  - {flag}", markup=False)


def main() -> None:
    """The entry point of ``infoflow-lens``."""
    app()


if __name__ == "__main__":
    main()
