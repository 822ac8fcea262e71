"""What one to four attention layers learn, on four tasks (Chen & Zou 2024, Fig. 2)."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from infoflow_lens.foundation.lazy import pd
from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.models.host import TokenTransformer
from infoflow_lens.studies.claims import Claim, Numbers
from infoflow_lens.studies.papers import token_models as tokens
from infoflow_lens.studies.plots import GREY, Axis, Curves, FigureSpec, Panel
from infoflow_lens.studies.study import Row, Settings, Statement
from infoflow_lens.studies.tables import Column, Part, TableSpec
from infoflow_lens.tasks.questions import InContextQA
from infoflow_lens.tasks.templates import InContextTemplateMatching
from infoflow_lens.tasks.tokens import TokenTask

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The layers of Theorems 1, 3, 5 and 6; the caption of Fig. 2 names the same depths.
_ENOUGH: Mapping[str, int] = {
    "memorization": 1,
    "in_context_qa": 2,
    "template_matching": 2,
    "in_context_template_matching": 3,
}
_JUDGED = (tokens.NOISY, tokens.WHOLE)
_LAST = "in_context_template_matching"
_CONTEXTUAL = {_LAST: tokens.SIZES["quick"][_LAST]}
_SMOKE: Mapping[str, Mapping[str, int]] = {
    "in_context_qa": {"n_questions": 8, "n_answers": 8, "n_pairs": 3},
    "template_matching": {"n_words": 16, "length": 3},
}


class VaryingDepth(tokens.TokenStudy):
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
    Preset "contextual" has contextual generalization alone, with seeds enough for the power of the
    rule, and three times smaller a rate from the paper's start plus noise.

    `chance` is what a model reaches that has not solved the task: 1/N for memorization; 1/k for the
    tasks in context, by naming any of the k answers that the sequence shows; the largest share of a
    label for template matching. A model that does not read the context either has `floor`, one over
    the number of labels. `context_gradient` is the largest gradient of the loss
    at the columns of the context before training.
    """

    name: ClassVar[str] = "varying_depth"
    title: ClassVar[str] = "How many attention layers does a task need?"
    finding: ClassVar[str] = "too few layers: {0} above chance; enough layers: accuracy {2}"
    source: ClassVar[str] = "Chen & Zou 2024, Fig. 2; Theorems 1 to 6"
    statement: ClassVar[Statement] = Statement.read("varying_depth")
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 3, "full": 5, "contextual": 12}
    judges_every_run: ClassVar[bool] = True

    def cases(self, preset: str) -> Sequence[Settings]:
        """Vary start, task and layers."""
        sizes_of = {"smoke": _SMOKE, **tokens.SIZES}.get(preset, _CONTEXTUAL)
        more = 1 if preset == "full" else 0
        cases: list[Settings] = []
        for start in (tokens.NOISY, tokens.WHOLE, tokens.PAPER):
            for task, sizes in sizes_of.items():
                enough = _ENOUGH[task]
                if start == tokens.PAPER and task == tokens.MEMORIZATION:
                    continue  # one layer is enough there
                least, most = (1, 1) if start == tokens.PAPER else (1, enough + more)
                settings = {"start": start, "task": task, **sizes, **_training(preset, start, task)}
                cases += [{**settings, "layers": n} for n in range(least, most + 1)]
        if preset != "full":
            return cases
        # one layer can answer with a head for every pair and question; does training find that?
        small = {"n_questions": 6, "n_answers": 6, "n_pairs": 2}
        settings = {**small, **_training(preset, tokens.WHOLE, "in_context_qa")}
        for heads in (1, 12):
            for n in (1, 2):
                case = {"start": tokens.SOFTMAX, "task": "in_context_qa", "layers": n}
                cases.append({**settings, **case, "heads": heads, "attention": "softmax"})
        return cases

    def extra_columns(self, settings: Settings, seed: int, run: tokens.TokenRun) -> Row:
        """Return the largest gradient at the context before training."""
        # the run's own weights before training, made anew
        model, task = tokens.start_model(settings, derive_seed(self.name, "weights", seed))
        x, y = task.sample(512, seed=seed)
        return {"context_gradient": context_gradient(model, x, y, context_length(task))}

    def tables(self) -> Sequence[Part]:
        """Test accuracies by task and layers, and whether the start could move."""
        columns = (
            Column("chance (floor)", _chance),
            Column("gradient at the context", _least_gradient_shown),
            "train_accuracy",
            "test_accuracy",
            Column("seeds >= .95", tokens.solving),
        )
        return (
            TableSpec(
                ("start", "task", "layers", "heads"), columns, tokens.last_epochs, tokens.WORDS
            ),
            "Accuracies over seeds, mean (least to largest); train: of the last epoch; test: "
            "of the epoch of the least validation loss. Chance: any of the answers in the "
            "context (1/k), the most frequent template, one of N; floor: one of all labels. "
            "Gradient: the largest of the loss at the columns of the context before training, "
            "the least over seeds; where it is 0 no step learns to read the context, so that "
            "the start forces the result by itself. Of Fig. 2 the caption "
            "survives, which says which depths fail and which do not, and no number.",
        )

    def plots(self) -> FigureSpec:
        """Plot accuracy and loss over epochs from the paper's start plus noise, a line a seed."""

        def curves(what: str) -> list[Curves]:
            """Return curves, solid for validation and dotted for training."""
            return [
                Curves(
                    "epoch", f"{split}_{what}", ["layers", "run"], "each", style=style,
                    label=lambda layers, run: tokens.count_noun(int(layers), "layer"),
                    colour=lambda layers, run: f"C{int(layers) - 1}",
                )
                for split, style in (("validation", "-"), ("train", ":"))
            ]  # fmt: skip

        accuracy = Axis("accuracy (dashed: chance)", limits=(-0.03, 1.03))
        loss = Axis("loss (dotted: training)", "log")
        panels = [
            Panel([*curves("accuracy"), _draw_chance], y=accuracy, title=tokens.task_shown),
            Panel(curves("loss"), Axis("epoch"), loss, legend=""),
        ]
        return FigureSpec(panels, "task", (3.2, 2.5), rows=lambda r: r[r["start"] == tokens.NOISY])

    def claims(self) -> Sequence[Claim]:
        """Judge accuracy and gradients with too few layers, and accuracy with just enough."""
        return (
            Claim(
                "with fewer layers than the theorems build, the largest test accuracy over seeds "
                "and starts (the paper's plus noise, Gaussian matrices) is {bound} above chance",
                lambda r: _read_layers(r, _most_above_chance, few=True),
                "<=",
                tokens.ABOVE_CHANCE,
                name="accuracy above chance",
            ),
            Claim(
                "there the least gradient at the context, from Gaussian matrices and before "
                "training, is {bound}",
                lambda r: _read_layers(r, _least_gradient, few=True),
                ">",
                0,
                name="least gradient at the context",
            ),
            Claim(
                "with just as many, from the paper's start plus noise, the seed of the least "
                "validation loss has a test accuracy of {bound}",
                lambda r: _read_layers(
                    r[r["start"] == tokens.NOISY], tokens.chosen_accuracy, few=False
                ),
                ">=",
                tokens.SOLVED,
                name="accuracy of enough layers",
            ),
        )

    def remarks(self, results: "pd.DataFrame") -> Sequence[str]:
        """Return seeds that solve, and a start that cannot move."""
        noisy = results[results["start"] == tokens.NOISY]
        solved = _read_layers(
            noisy, lambda rows: (rows["test_accuracy"] >= tokens.SOLVED).sum(), few=False
        )
        cells = "; ".join(f"{cell}: {n:g}" for cell, n in solved.items())
        seeds = results["seed"].nunique()
        remarks = [
            f"seeds that reach {tokens.SOLVED} with just enough layers: {cells}",
            f"power of the rule there: {tokens.chance_to_see(seeds, len(solved))}",
        ]
        still = results[(results["start"] == tokens.PAPER) & (results["layers"] == 1)]
        if len(still):
            remarks.append(
                "one layer from the paper's start: largest gradient at the context "
                f"{still['context_gradient'].max():.1e}"
            )
        return remarks

    def control_results(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Exchange accuracies with too few and enough layers; take a start that cannot move."""
        enough = results["layers"] == results["task"].map(_ENOUGH)
        few = results["layers"] < results["task"].map(_ENOUGH)
        here, chance = results["test_accuracy"], results["chance"]
        still = results[(results["start"] == tokens.PAPER) & (results["layers"] == 1)]
        gradient = results["context_gradient"]
        return {
            "fewer layers": results.assign(test_accuracy=here.mask(enough, chance)),
            "more layers": results.assign(test_accuracy=here.mask(few, here[enough].max())),
            "a start that cannot move": results.assign(
                context_gradient=gradient.mask(few, still["context_gradient"].max())
            ),
        }


def _chance(runs: "pd.DataFrame") -> str:
    return f"{runs['chance'].mean():.3g} ({runs['floor'].mean():.3g})"


def _least_gradient_shown(runs: "pd.DataFrame") -> str:
    least = float(runs["context_gradient"].min())
    return "0" if least == 0 else f"{least:.1e}"


def _draw_chance(axes: "Axes", results: "pd.DataFrame") -> None:
    axes.axhline(float(results["chance"].mean()), color=GREY, linestyle="--", linewidth=0.8)


def context_gradient(model: TokenTransformer, x: Tensor, y: Tensor, n_context: int) -> float:
    """Return the largest gradient, with respect to the columns of the context, of the loss.

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
        # a leaf in the place of what enters layer 1, for its gradient
        columns.append(value.detach().requires_grad_())
        return columns[0]

    logits = model.run_with_hooks(x, fwd_hooks=[("blocks.0.hook_resid_pre", keep)])[:, -1]
    loss = torch.nn.functional.cross_entropy(logits, y)
    (gradient,) = torch.autograd.grad(loss, columns)
    return float(gradient[:, :n_context].abs().max())


def context_length(task: TokenTask) -> int:
    """Return positions before the query, or, without one, before the sign."""
    if isinstance(task, InContextQA):
        return 3 * task.n_pairs
    if isinstance(task, InContextTemplateMatching):
        return task.n_pairs * (task.length + 2)
    return task.n_tokens - 1


def _training(preset: str, start: str, task: str) -> dict[str, Any]:
    """Say how the runs of a task are trained from a start."""
    paper = tokens.paper_training(task)
    settings: dict[str, Any] = {
        "preset": preset,
        **tokens.FRESH,
        "scale": paper["scale"],
        "epochs": 10,
    }
    # starts differ in noise, and some tasks in the optimiser that the paper names
    if start != tokens.WHOLE:
        settings["noise"] = 0.02 if start == tokens.NOISY else 0.0
        if task in ("memorization", "template_matching"):
            settings |= {"noise": settings["noise"] / 2, "optimizer": "sgd", "lr": paper["lr"]}
    elif task == "in_context_qa":
        settings["epochs"] = 40
    if start == tokens.NOISY and task == _LAST:
        settings["epochs"] = 40
        if preset == "contextual":
            settings["lr"] = 1e-3
    if task == tokens.MEMORIZATION:
        settings |= {"fresh": False, "warmup_steps": paper["warmup_steps"]}
    if start == tokens.PAPER:
        settings["epochs"] = 2  # where nothing moves
    changes: Mapping[str, Mapping[str, Any]] = {
        "smoke": {"n_test": 500, "epochs": 2, "n_train": 1024},
        "full": {"epochs": 8 * settings["epochs"]},
    }
    return {**settings, **changes.get(preset, {})}


def _read_layers(
    results: "pd.DataFrame", number: "Callable[[pd.DataFrame], float]", *, few: bool
) -> Numbers:
    """Read a number of each task and depth, too few layers or just enough; NaN without runs."""
    runs = tokens.last_epochs(results[results["start"].isin(_JUDGED)])
    found = {}
    for task in dict.fromkeys(results["task"]):
        enough = _ENOUGH[task]
        for layers in range(1, enough) if few else (enough,):
            rows = runs[(runs["task"] == task) & (runs["layers"] == layers)]
            label = f"{tokens.TASKS[task]}, {tokens.count_noun(layers, 'layer')}"
            found[label] = float(number(rows)) if len(rows) else math.nan
    return found


def _most_above_chance(rows: "pd.DataFrame") -> float:
    return float((rows["test_accuracy"] - rows["chance"]).max())


def _least_gradient(rows: "pd.DataFrame") -> float:
    whole = rows[rows["start"] == tokens.WHOLE]
    return float(whole["context_gradient"].min()) if len(whole) else math.nan
