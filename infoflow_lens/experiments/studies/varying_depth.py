"""What one to four attention layers learn, on four tasks (Chen & Zou 2024, Fig. 2)."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from infoflow_lens.experiments.study import Row, Settings, Study, Verdict, spread
from infoflow_lens.foundation.seeds import derived_seed
from infoflow_lens.models.constructions import build_construction, with_scores_of
from infoflow_lens.models.host import TokenTransformer, build_token_model
from infoflow_lens.tasks import Task, load_task
from infoflow_lens.tasks.memorization import Memorization
from infoflow_lens.tasks.templates import TemplateMatching
from infoflow_lens.tasks.tokens import TokenTask
from infoflow_lens.training import TrainingConfig, evaluate_labels, train

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TASKS: Mapping[str, str] = {
    "memorization": "memorization",
    "in_context_qa": "reasoning",
    "template_matching": "generalization",
    "in_context_template_matching": "contextual generalization",
}
# The number of layers from which on Fig. 2 shows a task solved.
_ENOUGH: Mapping[str, int] = {
    "memorization": 1,
    "in_context_qa": 2,
    "template_matching": 2,
    "in_context_template_matching": 3,
}
_SOLVED, _ABOVE_CHANCE = 0.95, 0.1
_PAPER, _RANDOM, _SOFTMAX = "paper", "random", "softmax"
_STARTS: Mapping[str, str] = {
    _PAPER: "the paper's start",
    _RANDOM: "random start",
    _SOFTMAX: "softmax, many heads, random start",
}

_SIZES: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    "smoke": {
        "in_context_qa": {"n_questions": 8, "n_answers": 8, "n_pairs": 3},
        "template_matching": {"n_words": 16, "length": 3},
    },
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
    "full": {  # Sec. 9.1; what it leaves open (N, k, l of template matching) is chosen
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


class VaryingDepth(Study):
    """Accuracy and loss over epochs by the number of layers, from several starts.

    "paper" starts as Sec. 9.1 does and trains by SGD: one ReLU head a layer, one-hot tokens and
    positions, W_V = I, the classifier uniform on [0, 1), W_QK of the first layer as constructed;
    for memorization uniform on [0, 1). What W_QK of the deeper layers starts from is not said: here
    uniform on [0, a), with a small `a` [chosen: on [0, 1) ReLU attention grows with every layer
    until no unit is left that learns]. "random" starts from Gaussian weights, "softmax" the same
    with softmax attention and many heads, for which the theorems on one layer are not stated; both
    train by AdamW.

    Learning rates, epochs and `a` were chosen on validation sequences. The curves are of training
    and validation sequences; the model of the least validation loss is then tested once, on
    sequences that neither training nor choice has seen.

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
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 3, "full": 5}

    def cases(self, preset: str) -> Sequence[Settings]:
        """By start, task and layers."""
        layers: Mapping[str, tuple[int, ...]] = {"smoke": (1, 2)}
        cases = [
            {"start": _PAPER, "task": task, "layers": n, **sizes, **_training(preset, task)}
            for task, sizes in _SIZES[preset].items()
            for n in layers.get(preset, (1, 2, 3, 4))
        ]
        if preset == "smoke":
            return cases
        adamw = {"optimizer": "adamw", "lr": 3e-3, "scale": None}
        for task, sizes in _SIZES[preset].items():
            for n in range(max(1, _ENOUGH[task] - 1), _ENOUGH[task] + 2):
                settings = {**sizes, **_training(preset, task), **adamw}
                cases.append({"start": _RANDOM, "task": task, "layers": n, **settings})
        # one layer can answer with a head for every pair and question; does training find that?
        small = {"n_questions": 6, "n_answers": 6, "n_pairs": 2}
        settings = {**small, **_training(preset, "in_context_qa"), **adamw}
        for heads in (1, 12):
            for n in (1, 2):
                more = {"start": _SOFTMAX, "task": "in_context_qa", "layers": n}
                cases.append({**more, **settings, "heads": heads, "attention": "softmax"})
        return cases

    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """A row for each epoch, with the test scores of the run."""
        model, task = _start(settings, derived_seed(self.name, "weights", seed))
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
        data = task.dataset("test", settings["n_test"], seed=derived_seed(self.name, "test", seed))
        test = evaluate_labels(model, data)
        whole: Row = {
            "chance": _chance(task, torch.as_tensor(data["y"])),
            "floor": 1 / task.n_labels,
            "best_epoch": training.best_epoch,
            "best_validation_loss": training.loss,
            "test_accuracy": test.accuracy,
            "test_loss": test.loss,
        }
        return [{**whole, **epoch} for epoch in training.history]

    def table(self, results: "pd.DataFrame") -> str:
        """Test accuracies by task and layers, beside what Fig. 2 shows."""
        lines = [
            "| start | task | layers | heads | chance (floor) | train accuracy | test accuracy | "
            "seeds >= .95 | Fig. 2 |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        runs = _last_epochs(results)
        by = ["start", "task", "layers", "heads"]
        for _, rows in runs.groupby(by, sort=False):
            start, task, layers, heads = (rows[name].iloc[0] for name in by)
            solved = int((rows["test_accuracy"] >= _SOLVED).sum())
            shown = "solved" if layers >= _ENOUGH[task] else "chance"
            lines.append(
                f"| {_STARTS[start]} | {_TASKS[task]} | {layers} | {heads} | "
                f"{rows['chance'].mean():.3g} ({rows['floor'].mean():.3g}) | "
                f"{spread(rows['train_accuracy'])} | "
                f"{spread(rows['test_accuracy'])} | {solved} of {len(rows)} | "
                f"{shown if start == _PAPER else '-'} |"
            )
        return "\n".join(
            [
                *lines,
                "",
                "Accuracies over seeds, mean (least to largest); train: of the last epoch; test: "
                "of the epoch of the least validation loss. Chance: any of the answers in the "
                "context (1/k), the most frequent template, one of N; floor: one of all labels. "
                "Fig. 2 is curves without numbers.",
            ]
        )

    def figure(self, results: "pd.DataFrame") -> "Figure":
        """Accuracy (above) and loss over epochs from the paper's start, a column for each task.

        Solid: validation sequences; dotted: training sequences; a line for each seed.
        """
        from matplotlib.figure import Figure

        results = results[results["start"] == _PAPER]
        tasks = [task for task in _TASKS if (results["task"] == task).any()]
        figure = Figure(figsize=(3.2 * max(1, len(tasks)), 5), layout="constrained")
        axes = figure.subplots(2, max(1, len(tasks)), squeeze=False)
        for column, task in enumerate(tasks):
            of_task = results[results["task"] == task]
            for row, what in enumerate(("accuracy", "loss")):
                _curves(axes[row, column], of_task, what)
            axes[0, column].axhline(
                of_task["chance"].mean(), color="#444444", linestyle="--", linewidth=0.8
            )
            axes[0, column].set_title(_TASKS[task])
            axes[0, column].set_ylim(-0.03, 1.03)
            axes[1, column].set_yscale("log")
            axes[1, column].set_xlabel("epoch")
        axes[0, 0].set_ylabel("accuracy (dashed: chance)")
        axes[1, 0].set_ylabel("loss (dotted: training)")
        axes[0, 0].legend(frameon=False, fontsize="small")
        return figure

    def verdict(self, results: "pd.DataFrame") -> Verdict:
        """By test accuracy with too few layers, and with just enough."""
        runs = _last_epochs(results[results["start"] == _PAPER])
        passed, reasons = True, []
        for task in dict.fromkeys(runs["task"]):
            of_task = runs[runs["task"] == task]
            for layers in sorted(of_task["layers"].unique()):
                rows = of_task[of_task["layers"] == layers]
                label = f"{_TASKS[task]}, {layers} layer{'s' if layers > 1 else ''}"
                if layers < _ENOUGH[task]:
                    above = rows["test_accuracy"] - rows["chance"]
                    highest = rows.loc[above.idxmax()]
                    seen = bool((above <= _ABOVE_CHANCE).all())
                    reason = (
                        f"highest test accuracy over seeds {highest['test_accuracy']:.3f}, "
                        f"chance {highest['chance']:.3f}"
                    )
                elif layers == _ENOUGH[task]:
                    chosen = float(rows.loc[rows["best_validation_loss"].idxmin(), "test_accuracy"])
                    solved = int((rows["test_accuracy"] >= _SOLVED).sum())
                    seen = chosen >= _SOLVED
                    reason = (
                        f"test accuracy {chosen:.3f} of the seed that validation chooses; "
                        f"{solved} of {len(rows)} seeds reach {_SOLVED}"
                    )
                else:
                    continue
                passed &= seen
                reasons.append(f"{label}: {reason}: {'as' if seen else 'not as'} published")
            if not (of_task["layers"] == _ENOUGH[task]).any():
                passed = False
                reasons.append(f"{_TASKS[task]}: no finished run with {_ENOUGH[task]} layers")
        return Verdict(passed and bool(reasons), tuple(reasons))


def _training(preset: str, task: str) -> dict[str, Any]:
    """How the runs of a task are trained from the paper's start."""
    common: dict[str, Any] = {
        "preset": preset,
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
            "lr": 0.35,
            "warmup_steps": 100,
            "scale": 0.005,
            "epochs": 32,
        },
    }
    changes: Mapping[str, Mapping[str, Any]] = {
        "smoke": {"n_test": 500, "epochs": 10},
        "full": {"epochs": 10 * of_task[task]["epochs"], "n_train": 16384},
    }
    return {**common, **of_task[task], **changes.get(preset, {})}


def _start(settings: Settings, seed: int) -> tuple[TokenTransformer, TokenTask]:
    """An untrained model and its task."""
    name = settings["task"]
    known = [field.name for field in fields(load_task(name)) if field.name != "seed"]
    parameters = {key: settings[key] for key in known if key in settings}
    task: Any = load_task(name, **parameters)
    layers, paper = settings["layers"], settings["start"] == _PAPER
    construction = None
    d_model = task.d_vocab + task.n_tokens
    if paper and not isinstance(task, Memorization):
        construction, _ = build_construction(name, **parameters)
        d_model = max(d_model, construction.cfg.d_model)
    model = build_token_model(
        n_layers=layers,
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
    return model, task


def _chance(task: Task, labels: torch.Tensor) -> float:
    """The accuracy without what the task asks for."""
    if isinstance(task, Memorization):
        return 1 / task.n_sequences
    if isinstance(task, TemplateMatching):
        return float(labels.bincount().max()) / len(labels)
    return 1 / int(task.parameters()["n_pairs"])


def _last_epochs(results: "pd.DataFrame") -> "pd.DataFrame":
    """A row for each run."""
    return results.sort_values(["run", "epoch"]).groupby("run", sort=True).tail(1)


def _curves(axes: "Axes", results: "pd.DataFrame", what: str) -> None:
    for layers in sorted(results["layers"].unique()):
        of_layers = results[results["layers"] == layers]
        colour = f"C{int(layers) - 1}"
        for index, (_, run) in enumerate(of_layers.groupby("run")):
            label = f"{layers} layer{'s' if layers > 1 else ''}" if index == 0 else None
            axes.plot(run["epoch"], run[f"validation_{what}"], color=colour, label=label)
            axes.plot(run["epoch"], run[f"train_{what}"], ":", color=colour, alpha=0.6)
