"""What one to four attention layers learn, on four tasks (Chen & Zou 2024, Fig. 2)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from infoflow_lens.experiments.studies.token_models import (
    ABOVE_CHANCE,
    FRESH,
    MEMORIZATION,
    NOISY,
    PAPER,
    SIZES,
    SOFTMAX,
    SOLVED,
    STARTS,
    TASKS,
    WHOLE,
    TokenRun,
    TokenStudy,
    chosen_accuracy,
    counted,
    curves_figure,
    last_epochs,
    paper_training,
    start_model,
)
from infoflow_lens.experiments.study import Row, Settings, Statement, Verdict
from infoflow_lens.experiments.tables import markdown_table, spread
from infoflow_lens.foundation.seeds import derived_seed
from infoflow_lens.models.host import TokenTransformer
from infoflow_lens.tasks.question_answering import InContextQA
from infoflow_lens.tasks.templates import InContextTemplateMatching
from infoflow_lens.tasks.tokens import TokenTask

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# The layers of Theorems 1, 3, 5 and 6; the caption of Fig. 2 names the same depths.
_ENOUGH: Mapping[str, int] = {
    "memorization": 1,
    "in_context_qa": 2,
    "template_matching": 2,
    "in_context_template_matching": 3,
}
_JUDGED = (NOISY, WHOLE)
_SMOKE: Mapping[str, Mapping[str, int]] = {
    "in_context_qa": {"n_questions": 8, "n_answers": 8, "n_pairs": 3},
    "template_matching": {"n_words": 16, "length": 3},
}


class VaryingDepth(TokenStudy):
    """Accuracy and loss over epochs by the number of layers, from several starts.

    - "noisy" starts as Sec. 9.1 does, with one head a layer, and with Gaussian noise on W_QK, W_V
      and the classifier, so that one layer can move, too, unless a mask of -1 forbids it.
    - "paper" is the same without noise, with one layer on the tasks in context and over templates:
      the first layer leaves the last position no score above 0 on the context, ReLU passes no
      gradient, and training does not come to read the context. `context_gradient` tells.
    - "whole" starts from Gaussian W_QK and W_V, from which every model can move.
    - "softmax" (preset "full") has Gaussian factors and one or many heads; the theorems on one
      layer are not stated for it.

    Training is on sequences that no step has seen, by AdamW; from the noisy start generalization is
    trained by the paper's SGD, as AdamW fits the training words and fails on new ones. Memorization
    sees its sequences again and again. Noise, rates, epochs and sizes are [chosen], on other seeds.

    `chance` is what a model reaches that has not solved the task: 1/N for memorization; 1/k for the
    tasks in context, by naming any of the k answers that the sequence shows; the largest share of a
    label for template matching. A model that does not read the context either has `floor`, one over
    the number of labels. `context_gradient` is the largest gradient of the loss
    at the columns of the context before training.
    """

    name: ClassVar[str] = "varying_depth"
    title: ClassVar[str] = "How many attention layers does a task need?"
    source: ClassVar[str] = "Chen & Zou 2024, Fig. 2; Theorems 1 to 6"
    acceptance: ClassVar[str] = (
        "by test accuracy: with fewer layers than the theorems build (two for reasoning and "
        "generalization, three for contextual generalization), no seed from the paper's start plus "
        "noise, nor from Gaussian matrices, is more than .1 above chance, and before training the "
        "latter have a gradient above 0 at the context; with just as many (one for memorization), "
        "from the paper's start plus noise, the seed of the least validation loss reaches .95. The "
        "start without noise, Gaussian matrices with enough layers, and softmax are reported, not "
        "judged"
    )
    statement: ClassVar[Statement] = Statement(
        written="2026-11-22",
        in_short=(
            "one layer memorises; reasoning and generalization need two, contextual "
            "generalization three"
        ),
        prediction=(
            "With fewer layers than the theorems build, test accuracy stays at chance, also from "
            "Gaussian matrices, whose context has a gradient; with as many it reaches .95. From "
            "the paper's start without noise the gradient of one layer at the context is exactly "
            "0; on contextual generalization noise of .02 leaves it there, for the mask between "
            "blocks is -1. Known before, from pilots on seeds 1000 and 1001: two layers on "
            "reasoning .95 after 3 epochs, two on generalization after 2 (by SGD; by AdamW .62), "
            "three on contextual generalization after 6, or .75 in 24; one layer on reasoning .24; "
            "Gaussian matrices fit generalization (.90 of training) and fail on new words (.19). "
            "Estimate: 6 core minutes, from 2 to 23 seconds a model."
        ),
        controls={
            "fewer layers": (
                "the accuracies of a layer less in the place of those of just enough layers"
            ),
            "more layers": "the accuracies of just enough layers in the place of those of fewer",
            "a start that cannot move": (
                "the gradients of one layer from the paper's start without noise in the place of "
                "those from Gaussian matrices"
            ),
        },
        refuted_by=(
            "a model with fewer layers above chance by more than .1: the theorems on one layer "
            "leave it no more. Enough layers that are not learnt refute nothing, for the "
            "constructions solve each task exactly."
        ),
    )
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 3, "full": 5}
    judges_every_run: ClassVar[bool] = True

    def cases(self, preset: str) -> Sequence[Settings]:
        """By start, task and layers."""
        sizes_of = SIZES.get(preset, _SMOKE)
        more = 1 if preset == "full" else 0
        cases: list[Settings] = []
        for start in (NOISY, WHOLE, PAPER):
            for task, sizes in sizes_of.items():
                enough = _ENOUGH[task]
                if start == PAPER and task == MEMORIZATION:
                    continue  # one layer is enough there
                least, most = (1, 1) if start == PAPER else (1, enough + more)
                settings = {"start": start, "task": task, **sizes, **_training(preset, start, task)}
                cases += [{**settings, "layers": n} for n in range(least, most + 1)]
        if preset != "full":
            return cases
        # one layer can answer with a head for every pair and question; does training find that?
        small = {"n_questions": 6, "n_answers": 6, "n_pairs": 2}
        settings = {**small, **_training(preset, WHOLE, "in_context_qa")}
        for heads in (1, 12):
            for n in (1, 2):
                case = {"start": SOFTMAX, "task": "in_context_qa", "layers": n}
                cases.append({**settings, **case, "heads": heads, "attention": "softmax"})
        return cases

    def also(self, settings: Settings, seed: int, run: TokenRun) -> Row:
        """The largest gradient at the context before training."""
        model, task = start_model(settings, derived_seed(self.name, "weights", seed))
        x, y = task.sample(512, seed=seed)
        return {"context_gradient": context_gradient(model, x, y, context_length(task))}

    def table(self, results: "pd.DataFrame") -> str:
        """Test accuracies by task and layers, and whether the start could move."""
        cells = []
        runs = last_epochs(results)
        by = ["start", "task", "layers", "heads"]
        for _, rows in runs.groupby(by, sort=False):
            start, task, layers, heads = (rows[name].iloc[0] for name in by)
            solved = int((rows["test_accuracy"] >= SOLVED).sum())
            cells.append(
                (
                    STARTS[start],
                    TASKS[task],
                    layers,
                    heads,
                    f"{rows['chance'].mean():.3g} ({rows['floor'].mean():.3g})",
                    _gradients(rows["context_gradient"]),
                    spread(rows["train_accuracy"]),
                    spread(rows["test_accuracy"]),
                    f"{solved} of {len(rows)}",
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
                        "gradient at the context",
                        "train accuracy",
                        "test accuracy",
                        "seeds >= .95",
                    ],
                    cells,
                ),
                "Accuracies over seeds, mean (least to largest); train: of the last epoch; test: "
                "of the epoch of the least validation loss. Chance: any of the answers in the "
                "context (1/k), the most frequent template, one of N; floor: one of all labels. "
                "Gradient: the largest of the loss at the columns of the context before training, "
                "the least over seeds; where it is 0 no step learns to read the context, so that "
                "the start forces the result by itself. Of Fig. 2 the caption "
                "survives, which says which depths fail and which do not, and no number.",
            ]
        )

    def figure(self, results: "pd.DataFrame") -> "Figure":
        """Accuracy and loss over epochs from the paper's start plus noise, a line for each seed."""
        figure = curves_figure(
            results,
            "layers",
            lambda layers: counted(int(layers), "layer"),
            lambda rows: float(rows["chance"].mean()),
            start=NOISY,
        )
        figure.axes[0].set_ylabel("accuracy (dashed: chance)")
        return figure

    def verdict(self, results: "pd.DataFrame") -> Verdict:
        """By test accuracy and gradients with too few layers, and accuracy with just enough."""
        runs = last_epochs(results[results["start"].isin(_JUDGED)])
        passed, reasons = True, []
        for task in dict.fromkeys(runs["task"]):
            of_task = runs[runs["task"] == task]
            for layers in range(1, _ENOUGH[task] + 1):
                rows = of_task[of_task["layers"] == layers]
                label = f"{TASKS[task]}, {counted(layers, 'layer')}"
                if layers == _ENOUGH[task]:
                    rows = rows[rows["start"] == NOISY]
                if not len(rows):
                    passed = False
                    reasons.append(f"{label}: no finished run")
                    continue
                if layers < _ENOUGH[task]:
                    above = rows["test_accuracy"] - rows["chance"]
                    highest = rows.loc[above.idxmax()]
                    whole = rows[rows["start"] == WHOLE]
                    least = float(whole["context_gradient"].min()) if len(whole) else 0.0
                    seen = bool((above <= ABOVE_CHANCE).all()) and least > 0
                    reason = (
                        f"highest test accuracy {highest['test_accuracy']:.3f} "
                        f"({STARTS[highest['start']]}), chance {highest['chance']:.3f}; least "
                        f"gradient at the context from Gaussian matrices {least:.1e}"
                    )
                else:
                    chosen = chosen_accuracy(rows)
                    solved = int((rows["test_accuracy"] >= SOLVED).sum())
                    seen = chosen >= SOLVED
                    reason = (
                        f"test accuracy {chosen:.3f} of the seed that validation chooses; "
                        f"{solved} of {len(rows)} seeds reach {SOLVED}"
                    )
                passed &= seen
                reasons.append(f"{label}: {reason}: {'as' if seen else 'not as'} published")
        still = results[(results["start"] == PAPER) & (results["layers"] == 1)]
        if len(still):
            reasons.append(
                "not judged, one layer from the paper's start: largest gradient at the context "
                f"{still['context_gradient'].max():.1e}"
            )
        return Verdict(passed and bool(reasons), tuple(reasons))

    def controlled(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Accuracies with too few and with enough layers exchanged; a start that cannot move."""
        enough = results["layers"] == results["task"].map(_ENOUGH)
        few = results["layers"] < results["task"].map(_ENOUGH)
        here, chance = results["test_accuracy"], results["chance"]
        still = results[(results["start"] == PAPER) & (results["layers"] == 1)]
        gradient = results["context_gradient"]
        return {
            "fewer layers": results.assign(test_accuracy=here.mask(enough, chance)),
            "more layers": results.assign(test_accuracy=here.mask(few, here[enough].max())),
            "a start that cannot move": results.assign(
                context_gradient=gradient.mask(few, still["context_gradient"].max())
            ),
        }


def _gradients(values: "pd.Series[float]") -> str:
    least = float(values.min())
    return "0" if least == 0 else f"{least:.1e}"


def context_gradient(model: TokenTransformer, x: Tensor, y: Tensor, n_context: int) -> float:
    """The largest gradient, with respect to the columns of the context, of the loss.

    Where ReLU leaves all that leads from the context to the answer at a score of 0 or below, it is
    exactly 0, and so is every step of W_QK and W_V that would read the context.

    Args:
        model: the model.
        x: sequences [sample, pos].
        y: labels [sample].
        n_context: how many positions, from the first, are the context.
    """
    columns: list[Tensor] = []

    def keep(value: Tensor, hook: Any) -> Tensor:
        columns.append(value.detach().requires_grad_())
        return columns[0]

    logits = model.run_with_hooks(x, fwd_hooks=[("blocks.0.hook_resid_pre", keep)])[:, -1]
    loss = torch.nn.functional.cross_entropy(logits, y)
    (gradient,) = torch.autograd.grad(loss, columns)
    return float(gradient[:, :n_context].abs().max())


def context_length(task: TokenTask) -> int:
    """Positions before the query, or, without one, before the sign."""
    if isinstance(task, InContextQA):
        return 3 * task.n_pairs
    if isinstance(task, InContextTemplateMatching):
        return task.n_pairs * (task.length + 2)
    return task.n_tokens - 1


def _training(preset: str, start: str, task: str) -> dict[str, Any]:
    """How the runs of a task are trained from a start."""
    paper = paper_training(task)
    settings: dict[str, Any] = {"preset": preset, **FRESH, "scale": paper["scale"], "epochs": 10}
    if start != WHOLE:
        settings["noise"] = 0.02 if start == NOISY else 0.0
        if task in ("memorization", "template_matching"):
            settings |= {"noise": settings["noise"] / 2, "optimizer": "sgd", "lr": paper["lr"]}
    elif task == "in_context_qa":
        settings["epochs"] = 40
    if start == NOISY and task == "in_context_template_matching":
        settings["epochs"] = 40
    if task == MEMORIZATION:
        settings |= {"fresh": False, "warmup_steps": paper["warmup_steps"]}
    if start == PAPER:
        settings["epochs"] = 2  # where nothing moves
    changes: Mapping[str, Mapping[str, Any]] = {
        "smoke": {"n_test": 500, "epochs": 2, "n_train": 1024},
        "full": {"epochs": 8 * settings["epochs"]},
    }
    return {**settings, **changes.get(preset, {})}
