"""What more heads change, on four tasks (Chen & Zou 2024, Sec. 9.2 and 9.3, Fig. 4 to 7)."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from infoflow_lens.foundation.lazy import pd
from infoflow_lens.studies.claims import Claim, Numbers
from infoflow_lens.studies.papers import token_models as tokens
from infoflow_lens.studies.plots import Axis, Curves, FigureSpec, Panel
from infoflow_lens.studies.study import Settings, Statement
from infoflow_lens.studies.tables import Column, Part, TableSpec, groups

_MEMORY, _CONTEXTUAL = tokens.MEMORIZATION, "in_context_template_matching"
# Heads of each layer, the first of a task with one head a layer. The paper's are not readable.
_HEADS: Mapping[str, tuple[tuple[int, ...], ...]] = {
    _MEMORY: ((1,), (2,), (4,), (8,)),
    "in_context_qa": ((1, 1), (2, 2), (4, 4)),
    "template_matching": ((1, 1), (2, 2), (4, 4)),
    _CONTEXTUAL: ((1, 1, 1), (1, 1, 4), (1, 1, 1, 1)),
}
_PUBLISHED: Mapping[str, str] = {
    _MEMORY: "more heads, faster",
    "in_context_qa": "no significant effect",
    "template_matching": "no significant effect",
    _CONTEXTUAL: "four layers faster than three; one head in the last faster (4 pairs)",
}
# One grid for all head counts of a task; at the paper's sizes memorization takes higher ones.
_RATES: Mapping[str, tuple[float, ...]] = {
    _MEMORY: (0.3, 0.6, 1.2, 2.4, 4.8, 9.6),
    "in_context_qa": (1e-3, 3e-3, 1e-2),
    "template_matching": (0.5, 1.0, 2.0),
    _CONTEXTUAL: (1e-3, 3e-3),
}
# Heads averaged and summed, of memorization and of the others.
_STARTS = {True: (tokens.PAPER, tokens.SUMMED), False: (tokens.NOISY, tokens.NOISY_SUMMED)}
_AVERAGED = (tokens.PAPER, tokens.NOISY)
_QUICK: Mapping[str, Mapping[str, int]] = {
    **tokens.SIZES["quick"],
    "in_context_qa": {"n_questions": 10, "n_answers": 10, "n_pairs": 3},
}
_FULL_RATES = {**_RATES, _MEMORY: (0.6, 1.2, 2.4, 4.8, 9.6, 19.2)}
_FULL: Mapping[str, Mapping[str, int]] = {
    **tokens.SIZES["full"],
    _CONTEXTUAL: tokens.SIZES["quick"][_CONTEXTUAL],
}
_SMOKE: Mapping[str, Mapping[str, int]] = {
    _MEMORY: {"n_words": 10, "length": 4, "n_sequences": 20},
    "in_context_qa": {"n_questions": 6, "n_answers": 6, "n_pairs": 2},
}


class VaryingHeads(tokens.TokenStudy):
    """Epochs to an accuracy of .95 by the heads of each layer, at a learning rate for each.

    Memorization starts and trains by SGD as Sec. 9.1 does. The other tasks start from there plus
    noise and train on sequences that no step has seen, as in `varying_depth`: generalization by
    SGD, the tasks in context by AdamW, for by SGD it is luck whether a seed leaves the plateau at
    all. The heads of a layer are averaged (eq 2), and in the first layer they start from the one
    head of the construction (for memorization, each from scores of its own). Under SGD averaged
    heads divide the gradient among them, so that one rate for all head counts punishes more heads.
    Every task, head count and way of combining heads therefore
    runs with the same grid of rates; the first half of the seeds chooses its rate, by the mean
    epochs to a validation accuracy of .95, then by validation loss, and the other half is judged.
    Models with more than one head run with heads summed, too: the same without the factor 1 / m.

    Preset "full" has the sizes of Sec. 9.1, but for contextual generalization, which is not learnt
    there in the epochs that can be paid; runs end with a validation loss below .05, and by then
    have the accuracy that is asked for.

    Fig. 4 to 7 are curves without numbers, and the head counts in them are not readable; those here
    are [chosen], as are rates, epochs and sizes.
    """

    name: ClassVar[str] = "varying_heads"
    title: ClassVar[str] = "What do more attention heads change?"
    finding: ClassVar[str] = (
        "accuracy {1} with any number of heads; the most heads memorize in {0} of the epochs of one"
    )
    source: ClassVar[str] = "Chen & Zou 2024, Sec. 9.2 and 9.3, Fig. 4 to 7"
    statement: ClassVar[Statement] = Statement.read("varying_heads")
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 4, "full": 6}

    def cases(self, preset: str) -> Sequence[Settings]:
        """Vary the task, heads, how they are combined, and the learning rate."""
        sizes_of = {"smoke": _SMOKE, "quick": _QUICK}.get(preset, _FULL)
        rates_of = _FULL_RATES if preset == "full" else _RATES
        few = 2 if preset == "smoke" else None
        return [
            {
                **_training(preset, task),
                "start": start,
                "task": task,
                "layers": len(heads),
                **sizes,
                "heads": list(heads),
                "lr": rate,
                "rate": rate,  # rows have the rate of their epoch as lr
            }
            for task, sizes in sizes_of.items()
            for heads in _HEADS[task][:few]
            # of one head the mean is the sum
            for start in _STARTS[task == _MEMORY][: 2 if max(heads) > 1 else 1]
            for rate in rates_of[task][:few]
        ]

    def tables(self) -> Sequence[Part]:
        """Return the rate that was chosen, epochs to .95 and test accuracies by heads."""
        columns = (
            Column("learning rate", "rate", "first", "g"),
            Column("epochs to .95", "until"),
            Column("seeds that reach it", lambda r: f"{r['until'].count()} of {len(r)}"),
            "test_accuracy",
            Column("published", lambda runs: _PUBLISHED[runs["task"].iloc[0]]),
        )
        return (
            TableSpec(_CELL, columns, _select_runs, tokens.WORDS, {"heads": "heads of each layer"}),
            "The rate of each row was chosen on other seeds. Over seeds, mean (least to "
            "largest); epochs to .95: the first epoch after which the validation accuracy is "
            "at least .95, of the seeds that reach it. Fig. 4 to 7 are curves without numbers.",
        )

    def plots(self) -> FigureSpec:
        """Give epochs to .95 over the rate, and over the rate per head, a column for each task."""

        def curves(rate: str) -> list[Curves]:
            """Return curves of heads that are averaged (solid) and summed (dotted).

            Each summed head has the whole rate.
            """
            return [
                Curves(
                    rate, "until", ["heads"], style=style, alpha=0.8,
                    label=(lambda heads: f"[{heads.replace(' ', ', ')}]") if averaged else "",
                    colour=lambda heads: f"C{sum(map(int, heads.split()))}",
                    rows=partial(_select_starts, averaged=averaged),
                )
                for averaged, style in ((True, "o-"), (False, "s:"))
            ]  # fmt: skip

        epochs = Axis("epochs to .95\n(dotted: heads summed)")
        per_head = Axis("learning rate / heads if averaged", "log")
        panels = [
            Panel(curves("rate"), Axis("learning rate", "log"), epochs, tokens.task_shown),
            Panel(curves("rate_per_head"), per_head, epochs, legend=""),
        ]
        return FigureSpec(panels, "task", (3.2, 2.5), rows=_runs)

    def claims(self) -> Sequence[Claim]:
        """Judge epochs to .95 at the chosen rates, and test accuracies; heads averaged."""
        epochs = f"epochs to {tokens.SOLVED} (at the rate that other seeds choose)"
        alike = "with every head count, on reasoning and generalization, the"
        return (
            Claim(
                "memorization with the most heads takes {bound} of the mean " + f"{epochs} of one",
                _more_heads,
                "<=",
                0.8,
                name="epochs of the most heads over those of one",
            ),
            Claim(
                f"{alike} seed of the least validation loss has a test accuracy of " + "{bound}",
                lambda r: _like_one_head(r, lambda one, rows: tokens.chosen_accuracy(rows)),
                ">=",
                tokens.SOLVED,
                name="test accuracy",
            ),
            Claim(
                f"{alike} fastest seed takes " + "{bound}" + f" times the {epochs} of one head",
                # nothing can be said of heads by one head that never gets there
                lambda r: _like_one_head(
                    r, lambda one, rows: math.nan if math.isinf(one) else _fastest(rows) / one
                ),
                "within",
                (0.5, 2),
                name="epochs over those of one head",
            ),
            Claim(
                "on contextual generalization four layers of one head take {bound} times the "
                f"{epochs} of three layers, by the fastest seed of each",
                _deeper,
                "<",
                1,
                name="epochs of four layers over those of three",
            ),
        )

    def remarks(self, results: "pd.DataFrame") -> Sequence[str]:
        """Return epochs of the judged runs, and of those with summed heads."""
        alike = _like_one_head(results, lambda one, rows: float(len(rows)))
        n_judged = int(min(alike.values(), default=0))
        power = tokens.chance_to_see(n_judged, len(alike))
        return [
            f"power of the rule on reasoning and generalization: {power}",
            *(
                f"{tokens.TASKS[task]}, {tokens.STARTS[start]}, heads {heads}: "
                f"epochs to {tokens.SOLVED} of the fastest seed "
                f"{_format(_fastest(rows))}, mean {_format(_mean_epochs(rows))}"
                for (start, task, heads), rows in groups(_select_runs(results), _CELL)
            ),
        ]

    def control_results(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Put memorization with one head, or its rate, in the place of that with the most."""
        heads = results["heads"].astype(str)
        memory = (results["task"] == _MEMORY) & (results["start"] == tokens.PAPER)
        one = results[memory & (heads == "1")]
        most = max(heads[memory], key=int)
        of_most = memory & (heads == most)
        # with numbers that no run has, so that runs stay apart
        twin = one.assign(heads=most, run=one["run"] + results["run"].max() + 1)
        rate = _select_runs(one)["rate"].iloc[0]
        return {
            "one head": pd.concat([results[~of_most], twin]),
            "one rate for all": results[~of_most | (results["rate"] == rate)],
        }


_CELL = ("start", "task", "heads")


def _runs(results: "pd.DataFrame") -> "pd.DataFrame":
    """Return a row for each run, with its epochs to .95 and its learning rate for each head."""
    runs = tokens.last_epochs(results).set_index("run", drop=False)
    averaged = runs["start"].isin(_AVERAGED)
    most = runs["heads"].map(lambda heads: max(map(int, str(heads).split())))
    return runs.assign(
        until=tokens.epochs_until(results, tokens.SOLVED),
        heads=runs["heads"].astype(str),
        # averaged heads share out the gradient; each summed head has all of it
        rate_per_head=runs["rate"] / most.where(averaged, 1),
    )


def _select_starts(runs: "pd.DataFrame", averaged: bool) -> "pd.DataFrame":
    return runs[(runs["start"].isin(_AVERAGED) == averaged) & runs["until"].notna()]


def _select_runs(results: "pd.DataFrame") -> "pd.DataFrame":
    """Select the judged runs of each start, task and heads, at the rate that the others choose."""
    runs = _runs(results)
    seeds = sorted(runs["seed"].unique())
    half = len(seeds) // 2
    # one half of the seeds chooses the rate, at which the other half is judged
    choosing, judged = seeds[:half] or seeds, seeds[half:]
    chosen = _best_rates(runs[runs["seed"].isin(choosing)])
    cells = zip(*(runs[name] for name in _CELL), strict=True)
    at_best = runs["rate"] == [chosen.get(cell) for cell in cells]
    return runs[runs["seed"].isin(judged) & at_best]


def _best_rates(runs: "pd.DataFrame") -> dict[tuple[str, str, str], float]:
    """Find the rate of each cell with the fewest mean epochs to .95, of several the least loss."""
    # a seed that never gets there makes the mean of its rate infinite
    known = runs.assign(until=runs["until"].fillna(math.inf))
    by_rate = known.groupby([*_CELL, "rate"], sort=False)[["until", "best_validation_loss"]].mean()
    best = by_rate.sort_values(["until", "best_validation_loss"], kind="stable").reset_index("rate")
    return best[~best.index.duplicated()]["rate"].to_dict()


def _fastest(runs: "pd.DataFrame") -> float:
    """Return epochs of the fastest seed; infinite where none reaches .95."""
    least = float(runs["until"].min())
    return math.inf if math.isnan(least) else least


def _mean_epochs(runs: "pd.DataFrame") -> float:
    """Average epochs over seeds; infinite where one does not reach .95."""
    return math.inf if runs["until"].isna().any() else float(runs["until"].mean())


def _format(epochs: float) -> str:
    return "never" if math.isinf(epochs) else f"{epochs:.3g}"


def _group_by_heads(results: "pd.DataFrame", task: str) -> Mapping[str, "pd.DataFrame"]:
    """Group the judged runs of a task with averaged heads, by heads."""
    averaged = results[results["start"].isin(_AVERAGED) & (results["task"] == task)]
    if averaged.empty:
        return {}
    return {heads: rows for (heads,), rows in groups(_select_runs(averaged), ["heads"])}


def _more_heads(results: "pd.DataFrame") -> Numbers:
    """Divide the mean epochs with the most heads by those with one; NaN where one head fails."""
    runs = _group_by_heads(results, _MEMORY)
    if not runs:
        return {}
    counts = sorted(runs, key=int)
    one, most = (_mean_epochs(runs[heads]) for heads in (counts[0], counts[-1]))
    if counts[0] != "1" or len(counts) == 1 or math.isinf(one):
        return {f"{counts[-1]} heads": math.nan}
    return {f"{counts[-1]} heads": most / one}


def _like_one_head(
    results: "pd.DataFrame", number: Callable[[float, "pd.DataFrame"], float]
) -> Numbers:
    """Return a number of each model from the epochs of one head a layer and its runs, else NaN."""
    found = {}
    for task in dict.fromkeys(results["task"]):
        if task in (_MEMORY, _CONTEXTUAL):
            continue
        runs = _group_by_heads(results, task)
        single = next((rows for heads, rows in runs.items() if set(heads.split()) == {"1"}), None)
        if single is None:
            found[f"{tokens.TASKS[task]}, one head"] = math.nan
            continue
        one = _fastest(single)
        for heads, rows in runs.items():
            found[f"{tokens.TASKS[task]}, heads {heads}"] = number(one, rows)
    return found


def _deeper(results: "pd.DataFrame") -> Numbers:
    """Give epochs of the fastest seed of four layers over those of three; NaN where these fail."""
    runs = _group_by_heads(results, _CONTEXTUAL)
    if not runs:
        return {}
    three = [_fastest(rows) for heads, rows in runs.items() if len(heads.split()) == 3]
    four = _fastest(runs["1 1 1 1"]) if "1 1 1 1" in runs else math.inf
    least = min(three, default=math.inf)
    return {"": math.nan if math.isinf(least) else four / least}


def _training(preset: str, task: str) -> dict[str, Any]:
    """Say how the runs of a task are trained; the rate comes from the grid."""
    paper = tokens.paper_training(task)
    noisy = {
        "preset": preset,
        **tokens.FRESH,
        "scale": paper["scale"],
        "noise": 0.02,
        "n_test": 1000,
    }
    of_task: Mapping[str, Mapping[str, Any]] = {
        _MEMORY: {"preset": preset, **paper, "n_train": 512, "epochs": 24, "n_test": 500},
        "in_context_qa": {**noisy, "epochs": 8},
        "template_matching": {**noisy, "noise": 0.01, "optimizer": "sgd", "epochs": 12},
        _CONTEXTUAL: {**noisy, "epochs": 40},
    }
    changes: Mapping[str, Mapping[str, Any]] = {
        "smoke": {"n_test": 300, "epochs": 6, "n_train": 1024},
        "full": {"stop_below": 0.05, **({"epochs": 16} if task == _MEMORY else {})},
    }
    return {**of_task[task], **changes.get(preset, {})}
