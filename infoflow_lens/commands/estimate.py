"""``infoflow-lens estimate``: what an architecture must pay for a task, before training."""

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from infoflow_lens.commands.common import (
    AsJson,
    Overwrite,
    console,
    integers,
    print_lines,
    report_errors,
    say,
    say_json,
    task_by_options,
)

_SIGNS = {
    "excluded, proved": "[red]X[/]",
    "excluded by the paper's count": "[red]x[/]",
    "allowed by construction": "[green]o[/]",
    "open": ".",
}
_MOST_ROWS = 20_000
_WORDS = (  # what `estimate` prints last
    "comparison: which of two tuples of tokens has the larger score; to find the largest of T "
    "scores takes T - 1 of them",
    "K: how many trees of such comparisons a position runs at once (eq 5)",
    "h_1: heads of the first layer; a head of one role serves one component of the target",
    "|I|: tokens that the fullest state must hold at once",
    "exponent k: a precision eps costs about eps^-k parameters, 0 where the state has room; lower, "
    "by counting, and upper, by the schedule. Law: k = |I| d / E as printed. Decoder: "
    "|I| d / E - 1, which is reached, and proved to be needed with weights of at most 1. Total: "
    "with the encoder, at least 1 where |I| d > E. Certified: the decoder's by the proved count",
    "schedule: a job for each head, layer by layer, by which the last state holds what it needs",
)


def estimate(
    task: Annotated[
        str,
        typer.Argument(
            help="The task, such as d_retrieval; module:name or file.py:name for one of your own; "
            "'all' with --like: what this configuration can learn."
        ),
    ],
    heads: Annotated[str | None, typer.Option(help="Heads of each layer, such as 4,1.")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens in a sequence, T; default, 64.")
    ] = None,
    d_model: Annotated[
        str, typer.Option(help="Width of the residual stream, E, or one for each layer.")
    ] = "32",
    d_token: Annotated[int | None, typer.Option(help="Dimension of a token, d.")] = None,
    components: Annotated[
        int | None, typer.Option(help="Number of retrieved components, D.")
    ] = None,
    positions: Annotated[
        bool, typer.Option("--positions", help="The model has a positional encoding.")
    ] = False,
    encoder: Annotated[
        bool,
        typer.Option(
            "--encoder",
            help="Tokens are encoded by a network, so that a first-layer head can have several "
            "roles.",
        ),
    ] = False,
    like: Annotated[
        str | None,
        typer.Option(
            help="A model's configuration in place of --heads: a folder or config.json, a "
            "checkpoint of ours, or a name such as gpt2; nothing but its config is read."
        ),
    ] = None,
    count: Annotated[
        str, typer.Option(help="The target's number of comparisons: paper, unordered or proved.")
    ] = "paper",
    trees: Annotated[int, typer.Option(help="Comparison trees of a position, K in eq (5).")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the task and of the check.")] = 0,
    as_json: AsJson = False,
    witness: Annotated[
        bool, typer.Option("--witness", help="Print the proof of the verdict, as JSON.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Save the proof of the verdict to this file, as JSON.")
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            help="'heads,tokens': the phase diagram for heads and T up to the given ones."
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="With --sweep: draw it to this png, svg or pdf file.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Estimate, before any training, what an architecture must pay to learn a task (Sec. 5.3)."""
    import json

    with report_errors():
        from infoflow_lens.foundation.documents import WITNESS
        from infoflow_lens.foundation.errors import InfoFlowError
        from infoflow_lens.foundation.files import add_digest
        from infoflow_lens.theory import estimate as estimates

        # options that exclude each other, before any work
        if (heads is None) == (like is None):
            raise InfoFlowError("expected either --heads, such as 4,1, or --like, such as gpt2")
        if sweep is None and plot is not None:
            raise InfoFlowError("--plot draws a phase diagram: expected --sweep heads,tokens too")
        if (task == "all" or sweep is not None) and (witness or out is not None):
            raise InfoFlowError(
                "--witness and --out give the proof of one verdict: expected one task and no "
                "--sweep; leave them out, or ask for one architecture"
            )
        if task == "all":
            _survey(like, heads, tokens, d_model, positions, encoder, count, seed, as_json)
            return
        if out is not None:
            WITNESS.check(out, overwrite=overwrite)
        target = _load(task, tokens, d_token, components, seed)
        if sweep is not None:
            if sweep != "heads,tokens" or heads is None:
                raise InfoFlowError(f"--sweep is {sweep!r}: expected heads,tokens, and --heads")
            n_heads = integers(heads, "--heads")
            _sweep(target, n_heads, target.n_tokens, count, trees, as_json, plot, overwrite)
            return
        # one architecture: by its heads, or like a model
        architecture = _architecture(like, heads, d_model, target.n_tokens, positions, encoder)
        result = estimates.estimate(
            architecture, target, count=cast(Any, count), trees=trees, seed=seed
        )
        proof = result.witness
        if (witness or out is not None) and proof is None:
            raise InfoFlowError(
                f"the verdict is {result.verdict!r}, which rests on no witness: expected a verdict "
                "'excluded, proved'; leave out --witness and --out"
            )
        if out is not None and proof is not None:
            WITNESS.write(out, add_digest(proof), overwrite=overwrite)
    if as_json:
        say_json(result.to_dict())
        return
    if witness:
        say(json.dumps(result.witness))
        return
    console().print(architecture.describe(), markup=False, soft_wrap=True)
    _print_estimate(result)


def _load(
    task: str, tokens: int | None, d_token: int | None, components: int | None, seed: int
) -> Any:
    """The task; vector tasks of ours have 64 tokens unless another T is asked."""
    from infoflow_lens.tasks import VectorTask, list_tasks, load_task

    ours = task in list_tasks()
    if tokens is None and ours and isinstance(load_task(task), VectorTask):
        tokens = 64
    return task_by_options(task, tokens, d_token, components, seed if ours else None)


def _architecture(
    like: str | None,
    heads: str | None,
    d_model: str,
    tokens: int,
    positions: bool,
    encoder: bool,
) -> Any:
    from infoflow_lens.foundation.errors import InfoFlowError
    from infoflow_lens.models.configs import read_shape
    from infoflow_lens.theory.shapes import ModelShape

    if like is not None:
        return read_shape(like).set_length(tokens)
    n_heads = integers(heads or "", "--heads")
    if len(n_heads) > 200 or max(n_heads, default=0) > 10**6:
        raise InfoFlowError(f"--heads is {heads!r}: expected at most 200 layers of 10^6 heads")
    widths = integers(d_model, "--d-model")
    return ModelShape(
        n_heads=n_heads,
        d_model=widths * len(n_heads) if len(widths) == 1 else widths,
        n_tokens=tokens,
        positional=positions,
        routes=encoder,
    )


def _print_estimate(result: Any) -> None:
    from rich.table import Table

    out = console()
    heads = ", ".join(map(str, result.n_heads))
    out.print(
        f"[bold]{result.target}[/bold], T = {result.n_tokens}, heads ({heads}), "
        f"E = {result.d_model}: {result.mechanisms}: [bold]{result.verdict}[/bold]",
        soft_wrap=True,
    )
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    saturated = " (saturated)" if result.saturated else ""
    rows = [
        (f"comparisons needed ({result.count})", f"{result.needed}"),
        (f"comparisons made, K = {result.trees}", f"{result.capacity}"),
        ("least h_1 for large T, one role", str(result.min_heads or "none is enough by the count")),
        ("least h_1 at this T, one role", str(result.min_heads_here)),
        ("least |I| by counting", f"{result.min_information}{saturated}"),
        ("|I| of the best schedule", str(result.upper_information)),
        ("lower exponent (counted, certified)", _exponents(result.lower)),
        ("upper exponent (law, decoder, total)", _exponents(result.upper)),
    ]
    if result.verified is not None:
        rows.append(
            (
                "inputs on which the schedules learn",
                f"{result.verified:.0%} of {result.verified_on}",
            )
        )
    if result.routed is not None:
        r = result.routed
        rows.append(("NMSE that routed heads leave", f"{r.nmse:.2g} [{r.low:.2g}, {r.high:.2g}]"))
    for label, value in rows:
        table.add_row(label, value)
    out.print(table)
    print_lines("Because", result.reasons)
    print_lines("Notes", result.flags)
    print_lines("Words", _WORDS)


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
    overwrite: bool,
) -> None:
    import itertools
    import math

    from rich.table import Table

    from infoflow_lens.foundation.errors import InfoFlowError
    from infoflow_lens.foundation.settings import check
    from infoflow_lens.theory.comparison import Heads
    from infoflow_lens.theory.estimate import flags_of, phase_diagram

    check(n_heads, Heads, "--heads")
    if plot is not None:
        from infoflow_lens.report.phase import check_picture_path, draw_phase_diagram

        check_picture_path(plot, overwrite=overwrite)
    lengths = sorted({2**k for k in range(3, tokens.bit_length()) if 2**k <= tokens} | {tokens})
    if (rows_asked := math.prod(n_heads) * len(lengths)) > _MOST_ROWS:
        raise InfoFlowError(
            f"--sweep over {n_heads} and {len(lengths)} lengths has {rows_asked} entries: expected "
            f"at most {_MOST_ROWS}; ask for fewer heads"
        )
    heads = tuple(itertools.product(*(range(1, most + 1) for most in n_heads)))
    rows = phase_diagram(target, heads, tuple(lengths), count, trees)
    flags = () if target.comparison is None else flags_of(target.comparison, n_heads, count, trees)
    title = f"{target.name}: max-position retrieval alone, count={count}, K={trees}"
    if plot is not None:
        draw_phase_diagram(rows, title, plot, overwrite=overwrite)
    if as_json:
        summary = {"target": target.name, "count": count, "trees": trees, "flags": flags}
        say_json({**summary, "rows": rows})
        return
    table = Table()
    table.add_column("heads", justify="right")
    for length in lengths:
        table.add_column(f"{length:.0e}" if length > 9999 else str(length), justify="center")
    for some in heads:
        found = [row["verdict"] for row in rows if row["heads"] == list(some)]
        table.add_row(", ".join(map(str, some)), *(_SIGNS[verdict] for verdict in found))
    out = console()
    out.print(f"[bold]{title}[/bold]")
    out.print(
        "X excluded, proved; x excluded by the paper's count; o allowed by construction; . open; "
        "columns are T"
    )
    out.print(table)
    print_lines("Notes", flags)


def _survey(
    like: str | None,
    heads: str | None,
    tokens: int | None,
    d_model: str,
    positions: bool,
    encoder: bool,
    count: str,
    seed: int,
    as_json: bool,
) -> None:
    """Print what a configuration can learn: a table over all tasks, D and T."""

    from rich.table import Table

    from infoflow_lens.foundation.progress import progress_bar
    from infoflow_lens.theory.survey import survey, survey_cases

    shape = _architecture(like, heads, d_model, tokens or 2**31 - 1, positions, encoder) if (
        like is None
    ) else _read_shape(like)  # fmt: skip
    lengths = (16, 64, 256) if tokens is None else (tokens,)
    cases = survey_cases(_all_tasks(seed), lengths)
    with progress_bar("tasks", len(cases), show=not as_json) as advance:
        rows = survey(shape, cases, count=cast(Any, count), advance=advance)
    if as_json:
        say_json({"model": shape.to_dict(), "rows": rows})
        return
    out = console()
    out.print(shape.describe(), markup=False, soft_wrap=True)
    table = Table("task", "T", "D", "verdict", "|I|", "exponent", "why", show_lines=False)
    for row in rows:
        size = "-" if row["information"] is None else str(row["information"])
        cost = "-" if row["exponent"] is None else f"{row['exponent']:.3g}"
        table.add_row(
            row["task"], str(row["n_tokens"]), str(row["components"]), row["verdict"], size, cost,
            row["why"],
        )  # fmt: skip
    out.print(table)
    out.print("exponent: of eps^-k parameters for the costliest state (0: it fits)")


def _read_shape(like: str) -> Any:
    from infoflow_lens.models.configs import read_shape

    return read_shape(like)


def _all_tasks(seed: int) -> list[Any]:
    from infoflow_lens.tasks import list_tasks, load_task

    return [load_task(name, seed=seed) for name in list_tasks()]
