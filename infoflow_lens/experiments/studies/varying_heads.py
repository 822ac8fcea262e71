"""What more heads change, on four tasks (Chen & Zou 2024, Sec. 9.2 and 9.3, Fig. 4 to 7)."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from infoflow_lens.experiments.studies.token_models import (
    ADAMW,
    PAPER,
    RANDOM,
    SIZES,
    SOLVED,
    STARTS,
    SUMMED,
    TASKS,
    TokenStudy,
    chosen_accuracy,
    counted,
    curves_figure,
    epochs_until,
    last_epochs,
    paper_training,
)
from infoflow_lens.experiments.study import Settings, Statement, Verdict
from infoflow_lens.experiments.tables import markdown_table, spread

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_MEMORY, _CONTEXTUAL = "memorization", "in_context_template_matching"
# Heads of each layer, the first of a task with one head a layer. The paper's are not readable.
_HEADS: Mapping[str, tuple[tuple[int, ...], ...]] = {
    _MEMORY: ((1,), (2,), (4,), (8,)),
    "in_context_qa": ((1, 1), (2, 2), (4, 4)),
    "template_matching": ((1, 1), (2, 2), (4, 4)),
    _CONTEXTUAL: ((1, 1, 1), (1, 1, 4), (1, 1, 1, 1)),
}
_FASTER, _LIKE = 0.8, 2.0
_QUICK: Mapping[str, Mapping[str, int]] = {
    **SIZES["quick"],
    "in_context_qa": {"n_questions": 10, "n_answers": 10, "n_pairs": 3},
}
_SMOKE: Mapping[str, Mapping[str, int]] = {
    _MEMORY: {"n_words": 10, "length": 4, "n_sequences": 20},
    "in_context_qa": {"n_questions": 6, "n_answers": 6, "n_pairs": 2},
}


class VaryingHeads(TokenStudy):
    """Accuracy and loss over epochs by the heads of each layer, and epochs to an accuracy of .95.

    Runs start and train as in `varying_depth` from the paper's start. The heads of a layer are
    averaged (eq 2), and in the first layer they start alike, from the one head of the construction
    (for memorization, each from scores of its own). Of each task, all head counts have the same
    learning rate and schedule [chosen]. Memorization runs with its heads summed, too, and from a
    random start by AdamW, where the output of every head is trained whole.

    Fig. 4 to 7 are curves without numbers, and the head counts in them are not readable; those here
    are [chosen].
    """

    name: ClassVar[str] = "varying_heads"
    title: ClassVar[str] = "What do more attention heads change?"
    source: ClassVar[str] = "Chen & Zou 2024, Sec. 9.2 and 9.3, Fig. 4 to 7"
    acceptance: ClassVar[str] = (
        "from the paper's start, by epochs to a validation accuracy of .95. Memorization: the mean "
        "over seeds with the most heads is at most .8 of that with one head. Reasoning and "
        "generalization: with every head count the seed of the least validation loss reaches a "
        "test accuracy of .95, and the fastest seed takes within a factor of 2 of the fastest with "
        "one head. Contextual generalization: four layers of one head reach .95 in fewer epochs "
        "than three layers with any heads, by the fastest seed of each, and some three-layer model "
        "reaches it"
    )
    statement: ClassVar[Statement] = Statement(
        written="2026-11-22",
        after_run=True,
        in_short=("nothing: that more heads speed memorization up is an observation of the paper"),
        prediction=(
            "As published: more heads memorize sooner, and change little on the other "
            "tasks but for a fourth layer, which helps contextual generalization."
        ),
        controls={
            "one head": ("the runs of one head in the place of those of the most, on memorization"),
        },
        refuted_by=(
            "memorization as slow or slower with more heads at a learning rate chosen for "
            "each head count. Heads that are averaged divide the gradient, so one rate for "
            "all, as here, punishes more heads: what is not seen here does not refute the "
            "paper."
        ),
    )
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 2, "full": 5}

    def cases(self, preset: str) -> Sequence[Settings]:
        """By task and heads; memorization from three starts."""
        sizes_of = {"smoke": _SMOKE, "quick": _QUICK}.get(preset, SIZES["full"])
        cases: list[Settings] = []
        for task, sizes in sizes_of.items():
            for heads in _HEADS[task][: 2 if preset == "smoke" else None]:
                about = {"task": task, "layers": len(heads), **sizes}
                settings = {**_training(preset, task), "heads": list(heads)}
                cases.append({"start": PAPER, **about, **settings})
                if task == _MEMORY and preset != "smoke":
                    cases.append({"start": SUMMED, **about, **settings})
                    cases.append({"start": RANDOM, **about, **settings, **ADAMW})
        return cases

    def table(self, results: "pd.DataFrame") -> str:
        """Epochs to .95 and test accuracies by heads."""
        cells = []
        published = {
            _MEMORY: "more heads, faster",
            "in_context_qa": "no significant effect",
            "template_matching": "no significant effect",
            _CONTEXTUAL: "four layers faster than three; one head in the last faster (4 pairs)",
        }
        for (start, task, heads), runs in _groups(results):
            reached = runs["until"].dropna()
            cells.append(
                (
                    STARTS[start],
                    TASKS[task],
                    heads,
                    spread(reached),
                    f"{len(reached)} of {len(runs)}",
                    spread(runs["test_accuracy"]),
                    published[task],
                )
            )
        return "\n\n".join(
            [
                markdown_table(
                    [
                        "start",
                        "task",
                        "heads of each layer",
                        "epochs to .95",
                        "seeds that reach it",
                        "test accuracy",
                        "published",
                    ],
                    cells,
                ),
                "Over seeds, mean (least to largest); epochs to .95: the first epoch after which "
                "the validation accuracy is at least .95, of the seeds that reach it. Fig. 4 to 7 "
                "are curves without numbers.",
            ]
        )

    def figure(self, results: "pd.DataFrame") -> "Figure":
        """Accuracy and loss over epochs from the paper's start, a line for each seed."""
        figure = curves_figure(
            results, "heads", lambda heads: f"[{str(heads).replace(' ', ', ')}]", lambda _: SOLVED
        )
        figure.axes[0].set_ylabel("accuracy (dashed: .95)")
        return figure

    def verdict(self, results: "pd.DataFrame") -> Verdict:
        """By epochs to .95, and test accuracies."""
        others, results = results[results["start"] != PAPER], results[results["start"] == PAPER]
        checks = {_MEMORY: _more_is_faster, _CONTEXTUAL: _deeper_is_faster}
        passed, reasons = True, []
        for task in dict.fromkeys(results["task"]):
            runs = {
                str(heads): of_heads
                for (_, _, heads), of_heads in _groups(results[results["task"] == task])
            }
            for seen, reason in checks.get(task, _like_one_head)(runs):
                passed &= seen
                reasons.append(f"{TASKS[task]}, {reason}: {'as' if seen else 'not as'} published")
        passed &= bool(reasons)
        for start in dict.fromkeys(others["start"]):
            groups = _groups(others[others["start"] == start])
            of_memory = {heads: runs for (_, task, heads), runs in groups if task == _MEMORY}
            one, most = min(of_memory, key=int), max(of_memory, key=int)
            means = [_mean_epochs(of_memory[heads]) for heads in (one, most)]
            reasons.append(
                f"not judged, memorization, {STARTS[start]}: {_shown(means[0])} with "
                f"{counted(int(one), 'head')}, {_shown(means[1])} with {most}"
            )
        return Verdict(passed, tuple(reasons))

    def controlled(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Memorization with one head in the place of that with the most."""
        import pandas as pd

        memory = (results["task"] == _MEMORY) & (results["start"] == PAPER)
        one = results[memory & (results["heads"].astype(str) == "1")]
        others = results[~memory]
        most = max(results.loc[memory, "heads"].astype(str), key=int)
        twin = one.assign(heads=most, run=one["run"] + results["run"].max() + 1)
        return {"one head": pd.concat([one, twin, others])}


Runs = Mapping[str, "pd.DataFrame"]


def _groups(results: "pd.DataFrame") -> list[tuple[tuple[str, str, str], "pd.DataFrame"]]:
    """The runs of each start, task and head counts, a row each, with epochs to .95."""
    runs = last_epochs(results).set_index("run")
    runs["until"] = epochs_until(results, SOLVED)
    runs["heads"] = runs["heads"].astype(str)
    groups: Any = runs.groupby(["start", "task", "heads"], sort=False)
    return list(groups)


def _fastest(runs: "pd.DataFrame") -> float:
    """Epochs of the fastest seed; infinite where none reaches .95."""
    least = float(runs["until"].min())
    return math.inf if math.isnan(least) else least


def _mean_epochs(runs: "pd.DataFrame") -> float:
    """Mean epochs over seeds; infinite where one does not reach .95."""
    return math.inf if runs["until"].isna().any() else float(runs["until"].mean())


def _shown(epochs: float) -> str:
    return "never" if math.isinf(epochs) else f"{epochs:.3g}"


def _more_is_faster(runs: Runs) -> list[tuple[bool, str]]:
    by_count = sorted(runs, key=int)
    one, most = (_mean_epochs(runs[heads]) for heads in (by_count[0], by_count[-1]))
    return [
        (
            by_count[0] == "1" and len(by_count) > 1 and most <= _FASTER * one < math.inf,
            f"mean epochs to .95: {_shown(one)} with {counted(int(by_count[0]), 'head')}, "
            f"{_shown(most)} with {by_count[-1]}",
        )
    ]


def _like_one_head(runs: Runs) -> list[tuple[bool, str]]:
    singles = [heads for heads in runs if set(heads.split()) == {"1"}]
    if not singles:
        return [(False, "no finished run with one head a layer")]
    one = _fastest(runs[singles[0]])
    checks = []
    for heads, of_heads in runs.items():
        fastest, accuracy = _fastest(of_heads), chosen_accuracy(of_heads)
        alike = one / _LIKE <= fastest <= _LIKE * one < math.inf
        checks.append(
            (
                alike and accuracy >= SOLVED,
                f"heads {heads}: epochs to .95 of the fastest seed {_shown(fastest)} (one head: "
                f"{_shown(one)}), "
                f"test accuracy {accuracy:.3f} of the seed that validation chooses",
            )
        )
    return checks


def _deeper_is_faster(runs: Runs) -> list[tuple[bool, str]]:
    three = {heads: _fastest(rows) for heads, rows in runs.items() if len(heads.split()) == 3}
    four = _fastest(runs["1 1 1 1"]) if "1 1 1 1" in runs else math.inf
    shown = ", ".join(f"{_shown(least)} with heads {heads}" for heads, least in three.items())
    return [
        (
            bool(three) and four < min(three.values()) < math.inf,
            f"fastest seed, epochs to .95: three layers {shown or '-'}; four layers {_shown(four)}",
        )
    ]


def _training(preset: str, task: str) -> dict[str, Any]:
    """As for `varying_depth`, in shorter epochs, and slower where one would be enough."""
    short: Mapping[str, Mapping[str, Any]] = {
        _MEMORY: {"lr": 0.3, "n_train": 512, "epochs": 60, "n_test": 500},
        "in_context_qa": {"n_train": 4096, "epochs": 40},
        "template_matching": {"lr": 0.25, "n_train": 4096, "epochs": 20},
    }
    settings = {"preset": preset, **paper_training(task), **short.get(task, {})}
    changes: Mapping[str, Mapping[str, Any]] = {
        "smoke": {"n_test": 300, "epochs": 6, "n_train": 1024},
        "full": {"epochs": (1 if task == _MEMORY else 10) * settings["epochs"]},
    }
    return {**settings, **changes.get(preset, {})}
