"""What the studies of Chen & Zou 2024 share: starts, training settings, chance, and runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from infoflow_lens.experiments.memory import run_bytes
from infoflow_lens.experiments.study import Row, Settings, Study
from infoflow_lens.foundation.seeds import derived_seed
from infoflow_lens.models.constructions import build_construction, with_scores_of
from infoflow_lens.models.host import TokenTransformer, build_token_model
from infoflow_lens.tasks import Task, load_task
from infoflow_lens.tasks.memorization import Memorization
from infoflow_lens.tasks.question_answering import NestedQA
from infoflow_lens.tasks.templates import TemplateMatching
from infoflow_lens.tasks.tokens import TokenTask
from infoflow_lens.training import TrainingConfig, TrainingResult, evaluate_labels, train

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TASKS: Mapping[str, str] = {
    "memorization": "memorization",
    "in_context_qa": "reasoning",
    "template_matching": "generalization",
    "in_context_template_matching": "contextual generalization",
}
SOLVED, ABOVE_CHANCE = 0.95, 0.1
PAPER, SUMMED, RANDOM, SOFTMAX = "paper", "summed", "random", "softmax"
STARTS: Mapping[str, str] = {
    PAPER: "the paper's start",
    SUMMED: "the paper's start, heads summed",
    RANDOM: "random start",
    SOFTMAX: "softmax, random start",
}
# What replaces the paper's SGD for random starts [chosen].
ADAMW: Mapping[str, Any] = {"optimizer": "adamw", "lr": 3e-3, "scale": None}

# Sec. 9.1 gives the sizes of "full"; what it leaves open (N, k, l of template matching) is chosen,
# as all of "quick" is.
SIZES: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    "quick": {
        "memorization": {"n_words": 50, "length": 6, "n_sequences": 100},
        "in_context_qa": {"n_questions": 20, "n_answers": 20, "n_pairs": 4},
        "template_matching": {"n_words": 100, "length": 3},
        "in_context_template_matching": {
            "n_words": 12,
            "length": 2,
            "n_answers": 8,
            "n_pairs": 2,
        },
    },
    "full": {
        "memorization": {"n_words": 500, "length": 6, "n_sequences": 100},
        "in_context_qa": {"n_questions": 100, "n_answers": 100, "n_pairs": 4},
        "template_matching": {"n_words": 210, "length": 3},
        "in_context_template_matching": {
            "n_words": 100,
            "length": 5,
            "n_answers": 100,
            "n_pairs": 4,
        },
    },
}


def paper_training(task: str) -> dict[str, Any]:
    """How the runs of a task are trained from the paper's start, at the sizes of "quick".

    SGD is the paper's; its numbers are not said and are chosen, on validation sequences.
    """
    common: dict[str, Any] = {
        "heads": 1,
        "attention": "relu",
        "optimizer": "sgd",
        "batch_size": 128,
        "warmup_steps": 50,
        "scale": 0.002,
        "n_train": 8192,
        "n_test": 2000,
    }
    of_task: Mapping[str, Mapping[str, Any]] = {
        "memorization": {"lr": 1.0, "warmup_steps": 0, "epochs": 8},
        "in_context_qa": {"lr": 0.1, "epochs": 24},
        "template_matching": {"lr": 0.5, "epochs": 8},
        "in_context_template_matching": {
            "lr": 0.5,
            "warmup_steps": 200,
            "scale": 0.005,
            "epochs": 64,
            # fewer sequences, seen more often, leave the plateau at 1/k sooner
            "n_train": 4096,
        },
    }
    return {**common, **of_task[task]}


class TokenStudy(Study):
    """A study that trains models over token ids, on ``n_train`` sequences."""

    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """A row for each epoch, with the run's test scores and what to compare them with."""
        run = train_run(self.name, settings, seed, device)
        test = evaluate_labels(run.model, (run.x, run.y))
        whole: Row = {
            "chance": chance_of(run.task, run.y),
            "floor": 1 / run.task.n_labels,
            "best_epoch": run.training.best_epoch,
            "best_validation_loss": run.training.loss,
            "test_accuracy": test.accuracy,
            "test_loss": test.loss,
        }
        return [{**whole, **epoch} for epoch in run.training.history]

    def memory(self, settings: Settings) -> int:
        """Bytes that a run takes at its peak, about: its data, and a step or an evaluation."""
        task = load_settings_task(settings)
        d_model = task.d_vocab + task.n_tokens
        heads, layers = settings["heads"], settings["layers"]
        return run_bytes(
            n_train=settings["n_train"],
            n_tokens=task.n_tokens,
            d_token=2,  # ids are long integers
            batch_size=settings["batch_size"],
            d_model=d_model,
            heads=[heads] * layers if isinstance(heads, int) else heads,
            d_head=d_model,
        )


def load_settings_task(settings: Settings) -> TokenTask:
    """The task of a run, with those of its settings that are the task's."""
    task: Any = load_task(settings["task"], **_parameters(settings))
    return task


def _parameters(settings: Settings) -> dict[str, Any]:
    known = [field.name for field in fields(load_task(settings["task"])) if field.name != "seed"]
    return {key: settings[key] for key in known if key in settings}


def start_model(settings: Settings, seed: int) -> tuple[TokenTransformer, TokenTask]:
    """An untrained model and its task.

    "paper" is Sec. 9.1: ReLU heads, one-hot tokens and positions, W_V = I, the classifier uniform
    on [0, 1), W_QK of the first layer as constructed; for memorization uniform on [0, 1). What W_QK
    of the deeper layers starts from is not said: here uniform on [0, a) with a = `scale` [chosen:
    on [0, 1) ReLU attention grows with every layer until no unit is left that learns]. Heads are
    averaged (eq 2); "summed" leaves the factor 1 / m out. Other starts are Gaussian.
    """
    task: Any = load_settings_task(settings)
    paper = settings["start"] in (PAPER, SUMMED)
    construction = _first_layer(task, _parameters(settings)) if paper else None
    d_model = task.d_vocab + task.n_tokens
    if construction is not None:
        d_model = max(d_model, construction.cfg.d_model)
    model = build_token_model(
        n_layers=settings["layers"],
        n_heads=settings["heads"],
        d_head=d_model,
        d_model=d_model,
        n_tokens=task.n_tokens,
        d_vocab=task.d_vocab,
        d_output=task.n_labels,
        attention=settings["attention"],
        init="chen_zou" if paper else "random",
        one_hot=True,
        seed=seed,
    )
    if construction is not None:
        model = with_scores_of(model, construction)
    if paper:
        with torch.no_grad():
            for block in model.blocks[1:]:
                block.attn.W_Q.mul_(settings["scale"])
            for block in model.blocks if settings["start"] == SUMMED else ():
                block.attn.W_O.mul_(len(block.attn.W_O))
    return model, task


def _first_layer(task: Task, parameters: Mapping[str, Any]) -> Any:
    """The construction whose first layer a model starts from; none for memorization."""
    if isinstance(task, Memorization):
        return None
    if isinstance(task, NestedQA):
        # Theorem 3's first layer looks at positions alone, and facts stand where pairs do: so it
        # is the same for as many pairs over a vocabulary of the same size.
        pairs = task.n_facts
        sizes = {"n_questions": task.n_entities - pairs, "n_answers": pairs, "n_pairs": pairs}
        return build_construction("in_context_qa", **sizes)[0]
    return build_construction(task.name, **parameters)[0]


def chance_of(task: Task, labels: Tensor) -> float:
    """What a model reaches that has not solved the task.

    1/N for memorization; the largest share of a label for template matching; for tasks in context
    what naming any candidate of the context gives: 1/k of the k answers, one over the number of
    chains for nested questions.
    """
    if isinstance(task, Memorization):
        return 1 / task.n_sequences
    if isinstance(task, TemplateMatching):
        return float(labels.bincount().max()) / len(labels)
    if isinstance(task, NestedQA):
        return 1 / task.n_chains
    return 1 / int(task.parameters()["n_pairs"])


@dataclass(frozen=True, eq=False)
class TokenRun:
    """A trained model, with what it was trained on.

    Attributes:
        model: with the weights of the least validation loss.
        task: the task.
        training: what training gave; it holds the initial weights.
        x: test sequences [sample, pos], that neither training nor choice has seen.
        y: their labels [sample].
    """

    model: TokenTransformer
    task: TokenTask
    training: TrainingResult
    x: Tensor
    y: Tensor


def train_run(study: str, settings: Settings, seed: int, device: str) -> TokenRun:
    """Train one model on the training split, choose by the validation split, draw test sequences.

    Args:
        study: name of the study; seeds of weights and test sequences hang on it.
        settings: of the task, the start, the model and its training.
        seed: of everything that is drawn.
        device: where to train.
    """
    model, task = start_model(settings, derived_seed(study, "weights", seed))
    config = TrainingConfig(
        epochs=settings["epochs"],
        batch_size=settings["batch_size"],
        lr=settings["lr"],
        warmup_steps=settings["warmup_steps"],
        weight_decay=0.0,
        optimizer=settings["optimizer"],
        seed=seed,
    )
    model = model.to(device, print_details=False) if device != "cpu" else model
    training = train(
        model,
        task,
        config,
        n_train=settings["n_train"],
        n_validation=settings["n_test"],
        progress=False,
    )
    held_out = task.dataset("test", settings["n_test"], derived_seed(study, "held out", seed))
    rows = held_out.with_format("torch")[:]
    return TokenRun(model, task, training, rows["x"], rows["y"])


# Results


def last_epochs(results: "pd.DataFrame") -> "pd.DataFrame":
    """A row for each run."""
    last = results.sort_values(["run", "epoch"]).groupby("run", sort=True).tail(1)
    return last.reset_index(drop=True)


def chosen_accuracy(runs: "pd.DataFrame") -> float:
    """The test accuracy of the run of the least validation loss."""
    return float(runs.sort_values("best_validation_loss")["test_accuracy"].iloc[0])


def epochs_until(results: "pd.DataFrame", accuracy: float) -> "pd.Series[float]":
    """By run, the first epoch with that validation accuracy; NaN for runs without."""
    reached = results[results["validation_accuracy"] >= accuracy].groupby("run")["epoch"].min()
    return reached.astype(float).reindex(results["run"].unique())


def curves_figure(
    results: "pd.DataFrame", by: str, label: Callable[[Any], str], dashed: Callable[..., float]
) -> "Figure":
    """Accuracy (above) and loss over epochs from the paper's start, a column for each task.

    Solid: validation sequences; dotted: training sequences; a line for each run.

    Args:
        results: a row for each epoch.
        by: the column that has a colour for each value.
        label: its values in words.
        dashed: the accuracy, from the rows of a task, to draw a line at.
    """
    from matplotlib.figure import Figure

    results = results[results["start"] == PAPER]
    tasks = [task for task in TASKS if (results["task"] == task).any()]
    figure = Figure(figsize=(3.2 * max(1, len(tasks)), 5), layout="constrained")
    axes = figure.subplots(2, max(1, len(tasks)), squeeze=False)
    for column, task in enumerate(tasks):
        of_task = results[results["task"] == task]
        for row, what in enumerate(("accuracy", "loss")):
            for index, (value, runs) in enumerate(of_task.groupby(by, sort=False)):
                _draw_curves(axes[row, column], runs, what, f"C{index}", label(value))
        axes[0, column].axhline(dashed(of_task), color="#444444", linestyle="--", linewidth=0.8)
        axes[0, column].set_title(TASKS[task])
        axes[0, column].set_ylim(-0.03, 1.03)
        axes[0, column].legend(frameon=False, fontsize="small")
        axes[1, column].set_yscale("log")
        axes[1, column].set_xlabel("epoch")
    axes[1, 0].set_ylabel("loss (dotted: training)")
    return figure


def _draw_curves(axes: "Axes", results: "pd.DataFrame", what: str, colour: str, label: str) -> None:
    for index, (_, run) in enumerate(results.groupby("run")):
        name = label if index == 0 else None
        axes.plot(run["epoch"], run[f"validation_{what}"], color=colour, label=name)
        axes.plot(run["epoch"], run[f"train_{what}"], ":", color=colour, alpha=0.6)


def counted(n: int, what: str) -> str:
    """ "1 layer", "2 layers"."""
    return f"{n} {what}{'' if n == 1 else 's'}"
