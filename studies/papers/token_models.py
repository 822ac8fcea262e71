"""What the studies of Chen & Zou 2024 share: starts, training settings, chance, and runs."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import pd
from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.models.host import TokenTransformer, build_token_model
from infoflow_lens.studies.constructions import (
    build_construction,
    perturbed_construction,
    with_scores_of,
)
from infoflow_lens.studies.study import Pair, Row, Settings, Study, run_bytes
from infoflow_lens.tasks import Task, load_task
from infoflow_lens.tasks.questions import Memorization, NestedQA
from infoflow_lens.tasks.templates import TemplateMatching
from infoflow_lens.tasks.tokens import TokenTask
from infoflow_lens.training import TrainingConfig, TrainingResult, evaluate_labels, train

TASKS: Mapping[str, str] = {
    "memorization": "memorization",
    "in_context_qa": "reasoning",
    "template_matching": "generalization",
    "in_context_template_matching": "contextual generalization",
}
MEMORIZATION = "memorization"
SOLVED, ABOVE_CHANCE = 0.95, 0.1
PAPER, SUMMED, NOISY, NOISY_SUMMED = "paper", "summed", "noisy", "noisy summed"
RANDOM, SOFTMAX, WHOLE, CONSTRUCTED = "random", "softmax", "whole", "constructed"
STARTS: Mapping[str, str] = {
    PAPER: "the paper's start",
    SUMMED: "the paper's start, heads summed",
    NOISY: "the paper's start plus noise",
    NOISY_SUMMED: "the paper's start plus noise, heads summed",
    RANDOM: "random start",
    SOFTMAX: "softmax, random start",
    WHOLE: "random start, whole matrices",
    CONSTRUCTED: "construction plus noise",
}
WORDS: Mapping[str, Mapping[str, str]] = {"start": STARTS, "task": TASKS}  # of tables
# What replaces the paper's SGD for random starts [chosen].
ADAMW: Mapping[str, Any] = {"optimizer": "adamw", "lr": 3e-3, "scale": None}
# Every step on sequences that no step has seen; epochs of 50 steps [chosen].
FRESH: Mapping[str, Any] = {
    "fresh": True,
    "optimizer": "adamw",
    "lr": 3e-3,
    "warmup_steps": 100,
    "batch_size": 128,
    "n_train": 6400,
    "n_test": 2000,
    "heads": 1,
    "attention": "relu",
}

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
    """Say how the runs of a task are trained from the paper's start, at the sizes of "quick".

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
        """Return a row for each epoch, with the run's test scores and what to compare them with."""
        run = self.train(settings, seed, device)
        test = evaluate_labels(run.model, (run.x, run.y))
        whole: Row = {
            "chance": chance_of(run.task, run.y),
            "floor": 1 / run.task.n_labels,
            "best_epoch": run.training.best_epoch,
            "best_validation_loss": run.training.loss,
            "test_accuracy": test.accuracy,
            "test_loss": test.loss,
            **self.extra_columns(settings, seed, run),
        }
        return [{**whole, **epoch} for epoch in run.training.history]

    def train(self, settings: Settings, seed: int, device: str) -> "TokenRun":
        """Train one model."""
        return train_run(self.name, settings, seed, device)

    def extra_columns(self, settings: Settings, seed: int, run: "TokenRun") -> Row:
        """Measure what a study wants of a run beside its test scores."""
        return {}

    def memory(self, settings: Settings) -> int:
        """Give bytes that a run takes at its peak, about: its data, and a step or an evaluation."""
        task = load_settings_task(settings)
        d_model = task.d_vocab + task.n_tokens + settings.get("padding", 0)
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
    """Return the task of a run, with those of its settings that are the task's."""
    task: Any = load_task(settings["task"], **_parameters(settings))
    return task


def _parameters(settings: Settings) -> dict[str, Any]:
    # the task keeps its default seed, so that all runs share its labels and splits
    known = [field.name for field in fields(load_task(settings["task"])) if field.name != "seed"]
    return {key: settings[key] for key in known if key in settings}


def start_model(settings: Settings, seed: int) -> tuple[TokenTransformer, TokenTask]:
    """Return an untrained model and its task.

    "paper" is Sec. 9.1: ReLU heads, one-hot tokens and positions, W_V = I, the classifier uniform
    on [0, 1), W_QK of the first layer as constructed; for memorization uniform on [0, 1). What W_QK
    of the deeper layers starts from is not said: here uniform on [0, a) with a = `scale` [chosen:
    on [0, 1) ReLU attention grows with every layer until no unit is left that learns]. Heads are
    averaged (eq 2); "summed" leaves the factor 1 / m out. "noisy", and "noisy summed", add Gaussian
    noise of deviation `noise` to W_QK, W_V and the classifier.

    "whole" has the matrices of the paper, W_QK and W_V whole, and Gaussian: deviation
    1 / sqrt(d_model). `padding` rows stand below tokens and positions. "constructed" is the
    construction itself, of the form `form`, with noise on all of its weights
    (:func:`~infoflow_lens.studies.constructions.perturbed_construction`). Other starts are
    TransformerLens's, Gaussian factors of W_QK and W_V.
    """
    task: Any = load_settings_task(settings)
    if settings["start"] == CONSTRUCTED:
        return _perturb(task, settings, seed)
    # the paper's start: the first layer's scores as constructed, the others scaled down
    paper = settings["start"] in (PAPER, SUMMED, NOISY, NOISY_SUMMED)
    construction = _first_layer(task, _parameters(settings)) if paper else None
    d_model = task.d_vocab + task.n_tokens + settings.get("padding", 0)
    if construction is not None:
        # the construction's padding needs room, too
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
        init="chen_zou" if paper or settings["start"] == WHOLE else "random",
        one_hot=True,
        seed=seed,
    )
    if construction is not None:
        model = with_scores_of(model, construction)
    if paper:
        with torch.no_grad():
            for block in model.blocks[1:]:
                block.attn.W_Q.mul_(settings["scale"])
            # heads are summed and not averaged
            for block in model.blocks if settings["start"] in (SUMMED, NOISY_SUMMED) else ():
                block.attn.W_O.mul_(len(block.attn.W_O))
    if settings["start"] in (NOISY, NOISY_SUMMED):
        _add_noise(model, 1.0, settings["noise"], seed)
    elif settings["start"] == WHOLE:
        # times 0: of these weights only the shape is left
        _add_noise(model, 0.0, d_model**-0.5, seed)
    return model, task


def _perturb(task: TokenTask, settings: Settings, seed: int) -> tuple[TokenTransformer, TokenTask]:
    """Add noise to a construction, which must have the layers that the settings ask for."""
    form = {"form": settings["form"]} if "form" in settings else {}
    model, _ = perturbed_construction(
        task.name, settings["noise"], seed, **_parameters(settings), **form
    )
    if model.architecture.n_layers != settings["layers"]:
        raise InfoFlowError(
            f"layers is {settings['layers']}: expected {model.architecture.n_layers}, as the "
            "construction has"
        )
    return model, task


def _add_noise(model: TokenTransformer, share: float, deviation: float, seed: int) -> None:
    """Multiply what is trained by `share`, and add Gaussian noise."""
    for name, weights in model.named_parameters():
        if weights.requires_grad:
            generator = torch.Generator().manual_seed(derive_seed("noise", seed, name))
            noise = torch.randn(weights.shape, generator=generator, dtype=torch.float32)
            with torch.no_grad():
                weights.mul_(share).add_(deviation * noise)


def _first_layer(task: Task, parameters: Mapping[str, Any]) -> Any:
    """Return the construction whose first layer a model starts from; none for memorization."""
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
    """Return what a model reaches that has not solved the task.

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
    model, task = start_model(settings, derive_seed(study, "weights", seed))
    model = model.to(device, print_details=False) if device != "cpu" else model
    training = train(
        model,
        data_of(task, settings, seed),
        task.dataset("validation", settings["n_test"], seed),
        training_config(settings, seed),
        progress=False,
    )
    return TokenRun(model, task, training, *draw_test(study, task, settings, seed))


def training_config(settings: Settings, seed: int) -> TrainingConfig:
    """Say how a run is trained."""
    return TrainingConfig(
        epochs=settings["epochs"],
        batch_size=settings["batch_size"],
        lr=settings["lr"],
        warmup_steps=settings["warmup_steps"],
        weight_decay=0.0,
        optimizer=settings["optimizer"],
        stop_below=settings.get("stop_below"),
        seed=seed,
    )


def draw_test(study: str, task: TokenTask, settings: Settings, seed: int) -> Pair:
    """Draw the test sequences of a run and their labels."""
    data = task.dataset("test", settings["n_test"], derive_seed(study, "held out", seed))
    rows = data.with_format("torch")[:]
    return rows["x"], rows["y"]


def data_of(task: TokenTask, settings: Settings, seed: int) -> Any:
    """Return what a model is trained on: a dataset, or, with ``fresh``, a draw for each epoch."""
    if not settings.get("fresh"):
        return task.dataset("train", settings["n_train"], seed)

    def draw(epoch: int) -> Pair:
        generator = torch.Generator().manual_seed(derive_seed("fresh", seed, epoch))
        x = task.draw(settings["n_train"], generator, "train")
        return x, task.target(x)

    return draw


# Results


def last_epochs(results: "pd.DataFrame") -> "pd.DataFrame":
    """Return a row for each run."""
    last = results.sort_values(["run", "epoch"]).groupby("run", sort=True).tail(1)
    return last.reset_index(drop=True)


def chosen_accuracy(runs: "pd.DataFrame") -> float:
    """Return the test accuracy of the run of the least validation loss."""
    return float(runs.sort_values("best_validation_loss")["test_accuracy"].iloc[0])


def chance_to_see(n_seeds: int, n_cells: int) -> str:
    """Return the power of a rule that asks each of several cells for one seed that solves its task.

    Args:
        n_seeds: judged seeds of a cell.
        n_cells: cells that must all be solved.

    Returns:
        a sentence with the chance that the rule is passed where half of all seeds solve.
    """
    chance = (1 - 0.5**n_seeds) ** n_cells
    return (
        f"if half of all seeds solved each of these {n_cells} cells, {n_seeds} of them would show "
        f"it in {chance:.0%} of such studies"
    )


def epochs_until(results: "pd.DataFrame", accuracy: float) -> "pd.Series[float]":
    """Find, by run, the first epoch with that validation accuracy; NaN for runs without."""
    reached = results[results["validation_accuracy"] >= accuracy].groupby("run")["epoch"].min()
    return reached.astype(float).reindex(results["run"].unique())


def solving(runs: "pd.DataFrame") -> str:
    """Say how many of some runs solve their task."""
    return f"{int((runs['test_accuracy'] >= SOLVED).sum())} of {len(runs)}"


def task_shown(results: "pd.DataFrame") -> str:
    """Return the name of the task of some rows."""
    return TASKS[results["task"].iloc[0]]


def count_noun(n: int, what: str) -> str:
    """Say a number of things: "1 layer", "2 layers"."""
    return f"{n} {what}{'' if n == 1 else 's'}"
