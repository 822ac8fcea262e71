"""The command line. Commands import what they need when they run, so that --help is quick."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from infoflow_lens.options import options_of
from infoflow_lens.probing.config import ProbingConfig

app = typer.Typer(
    name="infoflow-lens",
    help="Which input tokens can a hidden state depend on, which does it depend on, and is that "
    "what theory allows?",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


# Options that several commands have.
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars.")]
AsJson = Annotated[bool, typer.Option("--json", help="For machines.")]
Device = Annotated[str, typer.Option(help="Where to run it: cpu, cuda:0, ...")]
Dtype = Annotated[str | None, typer.Option(help="float32 (default), bfloat16, float16 or float64.")]
Backend = Annotated[
    str, typer.Option(help="hooked (TransformerLens 3's HookedTransformer), bridge or auto.")
]


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
    quiet: Quiet = False,
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


@app.command(short_help="Reproduce a table or figure of the papers.")
def experiment(
    name: Annotated[str | None, typer.Argument(help="A study; see --list.")] = None,
    list_all: Annotated[bool, typer.Option("--list", help="The studies and their rules.")] = False,
    preset: Annotated[str, typer.Option(help="smoke, quick or full.")] = "quick",
    seeds: Annotated[int | None, typer.Option(help="How many; default, the preset's.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes at a time, of one thread each.")] = 1,
    device: Device = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="Folder for results; default results/NAME-PRESET.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Run only what the folder lacks.")
    ] = False,
    scheduler: Annotated[
        str | None, typer.Option(help="Address of a dask scheduler, to run on its workers.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Train, probe, compare with the prediction, and print our numbers beside the published."""
    with _reported():
        from infoflow_lens.experiments.studies import STUDIES, find_study
        from infoflow_lens.experiments.sweep import run_study
        from infoflow_lens.foundation.errors import InfoFlowError

        if list_all:
            for study in STUDIES.values():
                typer.echo(f"{study.name}: {study.title}\n  {study.source}\n  {study.acceptance}")
            return
        if name is None:
            raise InfoFlowError(f"no study is named: expected one of {', '.join(STUDIES)}")
        study = find_study(name)
        result = run_study(
            study,
            out or Path("results") / f"{study.name}-{preset}",
            preset=preset,
            seeds=seeds,
            jobs=jobs,
            device=device,
            resume=resume,
            scheduler=scheduler,
            progress=not quiet,
        )
        table = (result.out / "table.md").read_text(encoding="utf-8")
    typer.echo(table)
    typer.echo(f"numbers: {result.out}")


@app.command("inspect", short_help="What a model is, and what can be measured on it.")
def inspect_command(
    model: Annotated[
        str,
        typer.Argument(
            help="An official name such as gpt2, owner/name of the Hugging Face hub, or a folder."
        ),
    ],
    device: Device = "cpu",
    dtype: Dtype = None,
    backend: Backend = "auto",
    as_json: AsJson = False,
) -> None:
    """Find out by running a model what it is and what can be measured on it."""
    import json

    with _reported():
        from infoflow_lens.hooks.model.capabilities import inspect_model
        from infoflow_lens.hooks.model.inputs import example_input, local_window
        from infoflow_lens.models.loading import load_any

        loaded = load_any(model, device=device, dtype=dtype, backend=backend)
        example = example_input(loaded.model)
        found = inspect_model(loaded.model, example)
    if as_json:
        about = {"source": loaded.source, "description": loaded.description}
        typer.echo(json.dumps({**about, **found.to_dict()}, indent=2, default=str))
        return
    notes = []
    if loaded.tokenizer is None and not found.reads_vectors:
        notes.append("it has no tokenizer: give token ids, not text")
    if local_window(loaded.model) > example.shape[1]:
        notes.append(
            f"its window of {local_window(loaded.model)} positions is longer than the "
            f"{example.shape[1]} tokens that it was run on, and does not show"
        )
    if not found.starts_at_layers:
        notes.append("a pass cannot start at a layer: influence runs all layers, and takes longer")
    _print_inspection(loaded.description, found, notes)


def _print_inspection(description: str, found: Any, notes: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(description, markup=False, soft_wrap=True)
    kinds = found.kinds()
    table = Table()
    table.add_column("layers", no_wrap=True)
    for label in kinds:
        table.add_column(label)
    mlp = {True: "beside attention", False: "behind attention", None: "-"}
    rows = {
        "heads": [layer.n_heads for layer in kinds.values()],
        "heads of keys and values": [layer.n_key_value_heads for layer in kinds.values()],
        "attention": [layer.attends for layer in kinds.values()],
        "pattern": [layer.pattern for layer in kinds.values()],
        "hook_attn_scores carries": [
            "nothing" if layer.scores == "missing" else f"the {layer.scores}"
            for layer in kinds.values()
        ],
        "MLP": [mlp[layer.parallel] for layer in kinds.values()],
        "hooks that do not fire": ["\n".join(layer.missing) for layer in kinds.values()],
        "edits lost, or in part": ["\n".join(layer.edits_lost) for layer in kinds.values()],
    }
    for label, values in rows.items():
        table.add_row(label, *("-" if value in (None, "") else str(value) for value in values))
    console.print(table)
    problems = found.problems()
    for heading, lines in (("Problems", problems), ("Mind", notes)):
        if lines:
            console.print(f"[bold]{heading}[/bold]")
        for line in lines:
            console.print(f"  - {line}", markup=False, soft_wrap=True)
    if not problems:
        console.print("No problems found.")


@app.command(short_help="Probe any model on any data: measure, predict, compare.")
@options_of(ProbingConfig, arguments=("model",))
def probe(
    config: Callable[[], ProbingConfig],
    out: Annotated[Path, typer.Option(help="Folder for results and the report.")],
    quiet: Quiet = False,
) -> None:
    """Measure what a model's states depend on, predict it, and compare; run again to go on."""
    with _reported():
        settings = config()
        from infoflow_lens.probing.run import run_probing

        result = run_probing(
            out, settings, progress=not quiet, say=lambda line: typer.echo(line, err=True)
        )
    _print_probing(result)


def _print_probing(result: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    for sentence in result.sentences():
        console.print(sentence)
    if result.agreement:
        table = Table(
            "sets predicted by", "AUROC", "influence inside", "tokens in the set",
            title="The last state: measured against predicted",
        )  # fmt: skip
        for rule, agreement in result.agreement.items():
            last = agreement.cls
            table.add_row(
                rule,
                f"{last.auroc:.3f}",
                f"{last.influence_inside:.3f}",
                f"{last.predicted_size:.1f}",
            )
        console.print(table)
    console.print(f"report: {result.out / 'report.html'}", soft_wrap=True)
    console.print(f"numbers: {result.out}", soft_wrap=True)


@app.command(short_help="The tasks, their parameters and sources; or the card of one.")
def tasks(
    name: Annotated[str | None, typer.Argument(help="A task, for its card.")] = None,
    as_json: AsJson = False,
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
    as_json: AsJson = False,
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
