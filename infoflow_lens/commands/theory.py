"""Commands of the theory: `estimate`, what a task takes; `design`, what is enough for it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from infoflow_lens.commands.common import (
    AsJson,
    Components,
    Counting,
    DrawingSeed,
    Overwrite,
    Quiet,
    TokenSize,
    console,
    options_of,
    print_lines,
    refuse_needless,
    report_errors,
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


@dataclass(frozen=True)
class EstimateOptions:
    """What `estimate` is asked."""

    task: Annotated[
        str,
        "The task, such as d_retrieval; module:name or file.py:name for one of your own; 'all' "
        "with --like: what this configuration can learn.",
    ]
    heads: Annotated[tuple[int, ...] | None, "Heads of each layer, such as 4,1."] = None
    tokens: Annotated[int | None, "Tokens in a sequence, T; default, 64."] = None
    d_model: Annotated[
        tuple[int, ...], "Width of the residual stream, E, or one for each layer."
    ] = (32,)
    d_token: TokenSize = None
    components: Components = None
    positions: Annotated[bool, "The model has a positional encoding."] = False
    encoder: Annotated[
        bool,
        "Tokens are encoded by a network, so that a first-layer head can have several roles.",
    ] = False
    like: Annotated[
        str | None,
        "A model's configuration in place of --heads: a folder or config.json, a checkpoint of "
        "ours, or a name such as gpt2; nothing but its config is read.",
    ] = None
    count: Annotated[Counting, "The target's number of comparisons."] = "paper"
    trees: Annotated[int, "Comparison trees of a position, K in eq (5)."] = 1
    seed: DrawingSeed = 0
    witness: Annotated[bool, "Print the proof of the verdict, as JSON."] = False
    out: Annotated[Path | None, "Save the proof of the verdict to this file, as JSON."] = None
    sweep: Annotated[
        str | None, "'heads,tokens': the phase diagram for heads and T up to the given ones."
    ] = None
    plot: Annotated[Path | None, "With --sweep: draw it to this png, svg or pdf file."] = None


@options_of(EstimateOptions, arguments=("task",))
def estimate(
    config: Callable[[], EstimateOptions], as_json: AsJson = False, overwrite: Overwrite = False
) -> None:
    """Estimate, before any training, what an architecture must pay to learn a task (Sec. 5.3)."""
    with report_errors():
        from infoflow_lens.foundation.documents import WITNESS
        from infoflow_lens.foundation.errors import InfoFlowError
        from infoflow_lens.foundation.files import add_digest
        from infoflow_lens.theory import estimate as estimates

        asked = config()
        wants_proof = asked.witness or asked.out is not None
        # options that exclude each other, before any work
        if (asked.heads is None) == (asked.like is None):
            raise InfoFlowError("expected either --heads, such as 4,1, or --like, such as gpt2")
        if asked.sweep is None and asked.plot is not None:
            raise InfoFlowError("--plot draws a phase diagram: expected --sweep heads,tokens too")
        if (asked.task == "all" or asked.sweep is not None) and wants_proof:
            raise InfoFlowError(
                "--witness and --out give the proof of one verdict: expected one task and no "
                "--sweep; leave them out, or ask for one architecture"
            )
        _refuse_needless(asked)
        if asked.task == "all":
            _survey(asked, as_json)
            return
        if asked.out is not None:
            WITNESS.check(asked.out, overwrite=overwrite)
        target = _load(asked)
        if asked.sweep is not None:
            _sweep(asked, target, as_json, overwrite)
            return
        # one architecture: by its heads, or like a model
        architecture = _architecture(asked, target.n_tokens)
        result = estimates.estimate(
            architecture, target, count=asked.count, trees=asked.trees, seed=asked.seed
        )
        proof = result.witness
        if wants_proof and proof is None:
            raise InfoFlowError(
                f"the verdict is {result.verdict!r}, which rests on no witness: expected a verdict "
                "'excluded, proved'; leave out --witness and --out"
            )
        if asked.out is not None and proof is not None:
            WITNESS.write(asked.out, add_digest(proof), overwrite=overwrite)
    if as_json:
        say_json(result.to_dict())
        return
    if asked.witness:
        say_json(result.witness)
        return
    console().print(architecture.describe(), markup=False, soft_wrap=True)
    _print_estimate(result)


def _refuse_needless(asked: EstimateOptions) -> None:
    by_all = ("sweep", "d_token", "components", "trees") if asked.task == "all" else ()
    by_like = ("d_model", "positions", "encoder") if asked.like is not None else ()
    refuse_needless(asked, by_all, "'all' asks every task, at several D and T")
    refuse_needless(asked, by_like, "--like takes it from the model")
    if asked.sweep is not None:
        refuse_needless(asked, ("encoder", "d_model"), "--sweep judges heads of one role, of any E")


def _load(asked: EstimateOptions) -> Any:
    """Load the task; vector tasks of ours have 64 tokens unless another T is asked."""
    from infoflow_lens.tasks import VectorTask, list_tasks, load_task

    tokens, ours = asked.tokens, asked.task in list_tasks()
    if tokens is None and ours and isinstance(load_task(asked.task), VectorTask):
        tokens = 64
    seed = asked.seed if ours else None
    return task_by_options(asked.task, tokens, asked.d_token, asked.components, seed)


def _architecture(asked: EstimateOptions, tokens: int | None = None) -> Any:
    """Read the shape of a model, or make one; without tokens, at the longest that it can have."""
    from infoflow_lens.foundation.errors import InfoFlowError
    from infoflow_lens.models.configs import read_shape
    from infoflow_lens.theory.shapes import ModelShape

    if asked.like is not None:
        shape = read_shape(asked.like)
        return shape if tokens is None else shape.set_length(tokens)
    heads, widths = asked.heads or (), asked.d_model
    if len(heads) > 200 or max(heads, default=0) > 10**6:
        raise InfoFlowError(
            f"--heads is {','.join(map(str, heads))!r}: expected at most 200 layers of 10^6 heads"
        )
    return ModelShape(
        n_heads=heads,
        d_model=widths * len(heads) if len(widths) == 1 else widths,
        # without a T there is no bound: a survey sets that of each task
        n_tokens=asked.tokens or 2**31 - 1 if tokens is None else tokens,
        positional=asked.positions,
        routes=asked.encoder,
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


def _sweep(asked: EstimateOptions, target: Any, as_json: bool, overwrite: bool) -> None:
    import itertools
    import math

    from rich.table import Table

    from infoflow_lens.foundation.errors import InfoFlowError
    from infoflow_lens.foundation.settings import check
    from infoflow_lens.theory.comparison import Heads
    from infoflow_lens.theory.estimate import list_flags, phase_diagram
    from infoflow_lens.theory.schedule import resize

    if asked.sweep != "heads,tokens" or asked.heads is None:
        raise InfoFlowError(f"--sweep is {asked.sweep!r}: expected heads,tokens, and --heads")
    n_heads, count, trees, plot = asked.heads, asked.count, asked.trees, asked.plot
    tokens = target.n_tokens
    check(n_heads, Heads, "--heads")
    if plot is not None:
        from infoflow_lens.report.phase import check_picture_path, draw_phase_diagram

        check_picture_path(plot, overwrite=overwrite)
    # powers of two from 8 on, where the target has that many tokens, and the T that is asked
    powers = {2**k for k in range(3, tokens.bit_length())}
    lengths = sorted({n for n in powers if resize(target, n) is not None} | {tokens})
    if (rows_asked := math.prod(n_heads) * len(lengths)) > _MOST_ROWS:
        raise InfoFlowError(
            f"--sweep over {n_heads} and {len(lengths)} lengths has {rows_asked} entries: expected "
            f"at most {_MOST_ROWS}; ask for fewer heads"
        )
    heads = tuple(itertools.product(*(range(1, most + 1) for most in n_heads)))
    lengths_asked, placed = tuple(lengths), asked.positions
    rows = phase_diagram(target, heads, lengths_asked, count, trees, positional=placed)
    flags = (
        () if target.comparison is None else list_flags(target.comparison, n_heads, count, trees)
    )
    title = f"{target.name}: max-position retrieval alone, count={count}, K={trees}"
    title += ", with positions" if placed else ""
    if plot is not None:
        draw_phase_diagram(rows, title, plot, overwrite=overwrite)
    if as_json:
        summary = {"target": target.name, "count": count, "trees": trees, "positions": placed}
        say_json({**summary, "flags": flags, "rows": rows})
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


def _survey(asked: EstimateOptions, as_json: bool) -> None:
    """Print what a configuration can learn: a table over all tasks, D and T."""

    from rich.table import Table

    from infoflow_lens.foundation.progress import progress_bar
    from infoflow_lens.tasks import list_tasks, load_task
    from infoflow_lens.theory.survey import survey, survey_cases

    shape = _architecture(asked)
    lengths = (16, 64, 256) if asked.tokens is None else (asked.tokens,)
    tasks = [load_task(name, seed=asked.seed) for name in list_tasks()]
    cases = survey_cases(tasks, lengths)
    with progress_bar("tasks", len(cases), show=not as_json) as advance:
        rows = survey(shape, cases, count=asked.count, advance=advance)
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


@dataclass(frozen=True)
class DesignOptions:
    """What `design` is asked."""

    task: Annotated[str, "The task; module:name or file.py:name for one of your own."]
    tokens: Annotated[tuple[int, ...] | None, "Tokens in a sequence, T, such as 16,64,256."] = None
    error: Annotated[float, "Precision eps that the models must reach."] = 1e-2
    max_layers: Annotated[int, "Largest number of layers."] = 3
    max_heads: Annotated[int, "Largest number of heads in a layer."] = 12
    parameters: Annotated[float | None, "Largest number of parameters."] = None
    d_token: TokenSize = None
    components: Components = None
    positions: Annotated[bool, "Models may have a positional encoding."] = False
    count: Annotated[Counting, "Count of comparisons by which to exclude."] = "paper"
    verify: Annotated[bool, "Train the recommended model and its neighbours (minutes)."] = False
    seeds: Annotated[int, "With --verify: models that are trained of each architecture."] = 1
    epochs: Annotated[int, "With --verify: epochs of training."] = 40
    seed: Annotated[int, "Seed of the task, the samples and the training."] = 0


@options_of(DesignOptions, arguments=("task",))
def design(
    config: Callable[[], DesignOptions], as_json: AsJson = False, quiet: Quiet = False
) -> None:
    """Find the smallest architectures that the theory allows, and what it excludes beside them."""
    with report_errors():
        from infoflow_lens.foundation.progress import progress_bar
        from infoflow_lens.tasks import list_tasks
        from infoflow_lens.theory import design as designs

        asked = config()
        if not asked.verify:
            refuse_needless(asked, ("seeds", "epochs"), "nothing is trained without --verify")
        # only tasks of ours take a seed
        seed = asked.seed if asked.task in list_tasks() else None
        target = task_by_options(asked.task, None, asked.d_token, asked.components, seed)
        if asked.verify:
            from infoflow_lens.verification import check_trainable

            check_trainable(target, epochs=asked.epochs, seeds=asked.seeds)
        components = tuple(getattr(target, "components", ()))
        # for the bar alone: what lies beyond is refused by the design itself
        most = min(asked.max_layers, 6), min(asked.max_heads, 64)
        choices, _ = designs.head_choices(components, *most)
        with progress_bar("heads", len(choices), show=not quiet) as advance:
            result = designs.design(
                target,
                (target.n_tokens,) if asked.tokens is None else asked.tokens,
                asked.error,
                max_layers=asked.max_layers,
                max_heads=asked.max_heads,
                parameters=asked.parameters,
                positional=asked.positions,
                count=asked.count,
                seed=asked.seed,
                advance=advance,
            )
        # trained afterwards: the design itself needs no model
        checked = _verify(result, target, asked, quiet) if asked.verify else None
    if as_json:
        from dataclasses import asdict

        values = result.to_dict()
        if checked is not None:
            values["verification"] = asdict(checked)
        say_json(values)
        return
    _print_design(result)
    if checked is not None:
        _print_verification(checked)


def _verify(result: Any, target: Any, asked: DesignOptions, quiet: bool) -> Any:
    from infoflow_lens.foundation.progress import progress_bar
    from infoflow_lens.verification import verify_design

    total = 1 + len(result.neighbours)
    with progress_bar("training", total, show=not quiet) as advance:
        sizes = {"epochs": asked.epochs, "seeds": asked.seeds, "seed": asked.seed}
        return verify_design(result, target, **sizes, advance=advance)


def _print_design(result: Any) -> None:
    from rich.table import Table

    out = console()
    lengths = ", ".join(map(str, result.n_tokens))
    out.print(
        f"[bold]{result.target}[/bold], T = {lengths}, d = {result.d_token}, "
        f"eps = {result.error:g}",
        soft_wrap=True,
    )
    if result.recommended is None:
        out.print("No architecture within these limits is known to do it.")
        return
    table = Table("", "heads", "E", "|I|", "exponent", "inside", "d_head", "parameters")
    schedules: dict[str, str] = {}  # of each choice of heads, in the order of the table
    for c in result.front:
        heads = ", ".join(map(str, c.n_heads))
        held = "" if c.verified is None else f" (right on {c.verified:.0%} of the samples)"
        schedules[heads] = f"({heads}), by {c.mechanisms}{held}: {c.schedule}"
        table.add_row(
            "*" if c == result.recommended else "",
            heads,
            str(c.d_model),
            ", ".join(map(str, c.information)),
            f"{c.exponent:.3g}",
            str(c.inside),
            ", ".join("?" if n is None else str(n) for n in c.d_head),
            f"{c.parameters:.1e}",
        )
    out.print(table)
    out.print(
        "* recommended: holds everything in its width, with the fewest scores that feed-forward "
        "networks make inside a state, then the fewest parameters, 12 L E^2 + 2 E inside + "
        "eps^-exponent; orders of magnitude, since exponents leave out constants",
    )
    print_lines("Schedules", list(schedules.values()))
    if result.neighbours:
        table = Table("just below", "heads", "verdict", "why", "|I| otherwise", "exponent")
        for n in result.neighbours:
            table.add_row(
                n.change,
                ", ".join(map(str, n.n_heads)),
                n.verdict,
                n.why,
                "-" if n.information is None else str(n.information),
                "-" if n.exponent is None else f"{n.exponent:.3g}",
            )
        out.print(table)
    else:
        out.print(
            "Just below: nothing has fewer heads or layers than one layer of one head; of less "
            "width nothing is excluded, it costs parameters."
        )
    print_lines("Not weighed", result.left_out)


def _print_verification(checked: Any) -> None:
    from rich.table import Table

    from infoflow_lens.foundation.display import begin_sentence

    out = console()
    table = Table(
        "heads", "predicted", "NMSE", "times", title=f"Trained, T = {checked.n_tokens}",
        title_justify="left",
    )  # fmt: skip
    for model in checked.models:
        heads = ", ".join(map(str, model.n_heads))
        table.add_row(heads, model.predicted, f"{model.nmse:.2e}", f"{model.times:.1f}")
    out.print(table)
    if checked.confirmed is None:
        out.print(f"{begin_sentence(checked.why_not)}.", soft_wrap=True)
    elif checked.confirmed:
        out.print(
            f"Confirmed: learnt to an NMSE of {checked.target:g}, and every excluded neighbour is "
            "at least 10 times worse.",
            soft_wrap=True,
        )
    else:
        out.print(f"Not confirmed: {checked.why_not}.", soft_wrap=True)
