"""What one to four attention layers learn, on four tasks (Chen & Zou 2024, Fig. 2)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from infoflow_lens.experiments.studies.token_models import (
    ABOVE_CHANCE,
    ADAMW,
    PAPER,
    RANDOM,
    SIZES,
    SOFTMAX,
    SOLVED,
    STARTS,
    TASKS,
    TokenStudy,
    chosen_accuracy,
    counted,
    curves_figure,
    last_epochs,
    paper_training,
)
from infoflow_lens.experiments.study import Settings, Statement, Verdict
from infoflow_lens.experiments.tables import markdown_table, spread

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# The number of layers from which on Fig. 2 shows a task solved.
_ENOUGH: Mapping[str, int] = {
    "memorization": 1,
    "in_context_qa": 2,
    "template_matching": 2,
    "in_context_template_matching": 3,
}
_SMOKE: Mapping[str, Mapping[str, int]] = {
    "in_context_qa": {"n_questions": 8, "n_answers": 8, "n_pairs": 3},
    "template_matching": {"n_words": 16, "length": 3},
}


class VaryingDepth(TokenStudy):
    """Accuracy and loss over epochs by the number of layers, from several starts.

    "paper" starts as Sec. 9.1 does, with one head a layer, and trains by SGD (see
    :func:`~infoflow_lens.experiments.studies.token_models.start_model`). "random" starts from
    Gaussian weights, "softmax" the same with softmax attention and one or many heads, for which the
    theorems on one layer are not stated; both train by AdamW.

    Learning rates, epochs, `scale` and the number of examples were chosen on validation sequences;
    those of contextual generalization on other seeds, after a first run in which three layers
    stayed near chance. The curves are of training and validation sequences; the model of the least
    validation loss is then tested once, on sequences that neither training nor choice has seen
    (memorization: on the stored ones).

    `chance` is what a model reaches that has not solved the task: 1/N for memorization; 1/k for the
    tasks in context, by naming any of the k answers that the sequence shows; the largest share of a
    label for template matching. A model that does not read the context either has `floor`, one over
    the number of labels; from the paper's start one layer stays there on reasoning: the mask of the
    first layer leaves the last position no score above 0 on the context, and ReLU no gradient.
    """

    name: ClassVar[str] = "varying_depth"
    title: ClassVar[str] = "How many attention layers does a task need?"
    source: ClassVar[str] = "Chen & Zou 2024, Fig. 2; Theorems 1 to 6"
    acceptance: ClassVar[str] = (
        "from the paper's start, by test accuracy: with fewer layers than Fig. 2 needs (two for "
        "reasoning and generalization, three for contextual generalization), no seed is more than "
        ".1 above chance; with just as many (one for memorization), the seed of the least "
        "validation loss reaches .95. Random starts and softmax are reported, not judged"
    )
    statement: ClassVar[Statement] = Statement(
        written="2026-11-22",
        after_run=True,
        in_short=(
            "one layer memorises; reasoning and generalization need two, contextual "
            "generalization three"
        ),
        prediction=(
            "With fewer layers than Fig. 2 needs test accuracy stays at chance; with as "
            "many it reaches .95."
        ),
        controls={
            "fewer layers": (
                "the accuracies of a layer less in the place of those of just enough layers"
            ),
            "more layers": ("the accuracies of just enough layers in the place of those of fewer"),
        },
        refuted_by=(
            "a model with fewer layers above chance by more than .1. That one layer fails "
            "from the start used proves little by itself: its gradients on the tasks in "
            "context are exactly 0 there, so it cannot move. Random starts, reported "
            "beside it, can."
        ),
    )
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 3, "full": 5}
    judges_every_run: ClassVar[bool] = True

    def cases(self, preset: str) -> Sequence[Settings]:
        """By start, task and layers."""
        sizes_of = SIZES.get(preset, _SMOKE)
        cases = [
            {"start": PAPER, "task": task, "layers": n, **sizes, **_training(preset, task)}
            for task, sizes in sizes_of.items()
            for n in _layers(preset, task)
        ]
        if preset == "smoke":
            return cases
        for task, sizes in sizes_of.items():
            # what fails and what is enough from the paper's start; "full": one layer more
            more = 1 if preset == "full" else 0
            for n in range(max(1, _ENOUGH[task] - 1), _ENOUGH[task] + 1 + more):
                settings = {**sizes, **_training(preset, task), **ADAMW}
                cases.append({"start": RANDOM, "task": task, "layers": n, **settings})
        # one layer can answer with a head for every pair and question; does training find that?
        small = {"n_questions": 6, "n_answers": 6, "n_pairs": 2}
        settings = {**small, **_training(preset, "in_context_qa"), **ADAMW}
        for heads in (1, 12):
            for n in (1, 2):
                case = {"start": SOFTMAX, "task": "in_context_qa", "layers": n}
                cases.append({**case, **settings, "heads": heads, "attention": "softmax"})
        return cases

    def table(self, results: "pd.DataFrame") -> str:
        """Test accuracies by task and layers, beside what Fig. 2 shows."""
        cells = []
        runs = last_epochs(results)
        by = ["start", "task", "layers", "heads"]
        for _, rows in runs.groupby(by, sort=False):
            start, task, layers, heads = (rows[name].iloc[0] for name in by)
            solved = int((rows["test_accuracy"] >= SOLVED).sum())
            shown = "solved" if layers >= _ENOUGH[task] else "chance"
            cells.append(
                (
                    STARTS[start],
                    TASKS[task],
                    layers,
                    heads,
                    f"{rows['chance'].mean():.3g} ({rows['floor'].mean():.3g})",
                    spread(rows["train_accuracy"]),
                    spread(rows["test_accuracy"]),
                    f"{solved} of {len(rows)}",
                    shown if start == PAPER else None,
                )
            )
        return "\n\n".join(
            [
                markdown_table(
                    [
                        "start",
                        "task",
                        "layers",
                        "heads",
                        "chance (floor)",
                        "train accuracy",
                        "test accuracy",
                        "seeds >= .95",
                        "Fig. 2",
                    ],
                    cells,
                ),
                "Accuracies over seeds, mean (least to largest); train: of the last epoch; test: "
                "of the epoch of the least validation loss. Chance: any of the answers in the "
                "context (1/k), the most frequent template, one of N; floor: one of all labels. "
                "Fig. 2 is curves without numbers.",
            ]
        )

    def figure(self, results: "pd.DataFrame") -> "Figure":
        """Accuracy and loss over epochs from the paper's start, a line for each seed."""
        figure = curves_figure(
            results,
            "layers",
            lambda layers: counted(int(layers), "layer"),
            lambda rows: float(rows["chance"].mean()),
        )
        figure.axes[0].set_ylabel("accuracy (dashed: chance)")
        return figure

    def verdict(self, results: "pd.DataFrame") -> Verdict:
        """By test accuracy with too few layers, and with just enough."""
        runs = last_epochs(results[results["start"] == PAPER])
        passed, reasons = True, []
        for task in dict.fromkeys(runs["task"]):
            of_task = runs[runs["task"] == task]
            for layers in sorted(of_task["layers"].unique()):
                rows = of_task[of_task["layers"] == layers]
                label = f"{TASKS[task]}, {counted(int(layers), 'layer')}"
                if layers < _ENOUGH[task]:
                    above = rows["test_accuracy"] - rows["chance"]
                    highest = rows.loc[above.idxmax()]
                    seen = bool((above <= ABOVE_CHANCE).all())
                    reason = (
                        f"highest test accuracy over seeds {highest['test_accuracy']:.3f}, "
                        f"chance {highest['chance']:.3f}"
                    )
                elif layers == _ENOUGH[task]:
                    chosen = chosen_accuracy(rows)
                    solved = int((rows["test_accuracy"] >= SOLVED).sum())
                    seen = chosen >= SOLVED
                    reason = (
                        f"test accuracy {chosen:.3f} of the seed that validation chooses; "
                        f"{solved} of {len(rows)} seeds reach {SOLVED}"
                    )
                else:
                    continue
                passed &= seen
                reasons.append(f"{label}: {reason}: {'as' if seen else 'not as'} published")
            if not (of_task["layers"] == _ENOUGH[task]).any():
                passed = False
                reasons.append(
                    f"{TASKS[task]}: no finished run with {counted(_ENOUGH[task], 'layer')}"
                )
        return Verdict(passed and bool(reasons), tuple(reasons))

    def controlled(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Accuracies with too few and with just enough layers, each in the other's place."""
        enough = results["layers"] == results["task"].map(_ENOUGH)
        few = results["layers"] < results["task"].map(_ENOUGH)
        here, chance = results["test_accuracy"], results["chance"]
        return {
            "fewer layers": results.assign(test_accuracy=here.mask(enough, chance)),
            "more layers": results.assign(test_accuracy=here.mask(few, here[enough].max())),
        }


def _training(preset: str, task: str) -> dict[str, Any]:
    """How the runs of a task are trained from the paper's start."""
    settings = {"preset": preset, **paper_training(task)}
    changes: Mapping[str, Mapping[str, Any]] = {
        "smoke": {"n_test": 500, "epochs": 4, "n_train": 1024},
        "full": {"epochs": 10 * settings["epochs"], "n_train": 16384},
    }
    return {**settings, **changes.get(preset, {})}


def _layers(preset: str, task: str) -> tuple[int, ...]:
    if preset == "smoke" or (preset == "quick" and task == "memorization"):
        return (1, 2)  # memorization: more layers tell nothing that is judged
    return (1, 2, 3, 4)
