"""``infoflow-lens design``: the smallest architectures that the theory allows for a task."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from infoflow_lens.commands.common import (
    AsJson,
    Components,
    Counting,
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


@dataclass(frozen=True)
class Question:
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


@options_of(Question, arguments=("task",))
def design(config: Callable[[], Question], as_json: AsJson = False, quiet: Quiet = False) -> None:
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


def _verify(result: Any, target: Any, asked: Question, quiet: bool) -> Any:
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
