"""Training of one model, interruptible at any moment and resumed to the same numbers."""

import copy
import math
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import torch
from annotated_types import Interval
from jaxtyping import Int
from torch import Tensor, nn

from infoflow_lens.foundation.display import Displayed
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import SeededRandom, derive_seed, keep_modes
from infoflow_lens.foundation.packages import versions_identity
from infoflow_lens.foundation.progress import progress_bar
from infoflow_lens.foundation.record import (
    RunRecord,
    attention_kinds,
    configuration_fingerprint,
    fingerprint,
)
from infoflow_lens.foundation.saving import read_state, write_state
from infoflow_lens.foundation.settings import (
    Count,
    Index,
    NonNegative,
    Positive,
    Seed,
    checked,
    settings,
)
from infoflow_lens.objectives import (
    Data,
    LabelScores,
    Objective,
    check_module,
    evaluate,
    evaluate_labels,
    is_finite,
    nmse,
    objective_for,
    outputs_of,
    tensors_of,
)
from infoflow_lens.runs.folder import RunFolder
from infoflow_lens.tasks import Task
from infoflow_lens.tasks.registry import load_task_for

__all__ = [
    "Data",
    "LabelScores",
    "TrainingConfig",
    "TrainingDivergedError",
    "TrainingInterrupted",
    "TrainingResult",
    "evaluate",
    "evaluate_labels",
    "nmse",
    "restored",
    "train",
]

_CHECKPOINT = "training.safetensors"
_N_TRAIN, _N_VALIDATION = 8192, 2048

BelowOne = Annotated[float, Interval(ge=0, lt=1)]
OptimizerName = Literal["adamw", "sgd"]
State = dict[str, Tensor]
Draw: TypeAlias = Callable[[int], Data]  # from the number of an epoch
ModuleT = TypeVar("ModuleT", bound=nn.Module)


class TrainingInterrupted(KeyboardInterrupt):
    """Training was stopped by Ctrl-C; `result` holds what was reached.

    The model carries the best weights so far, as at an ordinary end.
    """

    def __init__(self, result: "TrainingResult", checkpoint: Path | None) -> None:
        self.result = result
        self.checkpoint = checkpoint
        if checkpoint is None:
            where = "pass checkpoint_dir to be able to resume"
        elif checkpoint.exists():
            where = f"the same call goes on from {checkpoint}"
        else:
            where = "no checkpoint was written yet"
        super().__init__(f"training stopped after epoch {result.epochs_run}; {where}")


class TrainingDivergedError(InfoFlowError):
    """The loss became NaN or infinite; the best weights before are in `result`."""

    def __init__(self, result: "TrainingResult", lr: float) -> None:
        self.result = result
        self.lr = lr
        super().__init__(
            f"the loss is no longer finite in epoch {result.epochs_run + 1} (learning rate "
            f"{lr:.2e}): expected a finite loss; lower lr or grad_clip. "
            "The model holds the best weights before that"
        )


@settings
class TrainingConfig:
    """Settings of :func:`train`.

    Attributes:
        epochs: passes over the training data.
        batch_size: sequences in a step.
        lr: peak learning rate; it falls to `lr_end` along a cosine, step by step.
        lr_end: final learning rate.
        warmup_steps: steps in which the learning rate rises linearly from 0.
        weight_decay: AdamW's; for SGD, the factor of the weights in the gradient (PyTorch's).
        grad_clip: largest gradient norm; None for no clipping.
        patience: epochs without a better validation error after which to stop; None for never.
        improvement: by which share of itself the error must fall to count as better for
            `patience`, so that a slow drift on a plateau does not; the best weights are kept by
            the plain error.
        stop_below: validation error (NMSE, or cross-entropy for labels) below which to stop; None
            for never.
        seed: of the order of the training sequences (the model's own seed is `build_model`'s), and
            of the sequences that are drawn from a task.
        optimizer: "adamw" or "sgd".
        momentum: SGD's, at least 0 and below 1.
        betas: AdamW's, how much of the mean gradient and of the mean square is kept at each step.

    Raises:
        InfoFlowError: for values out of range.
    """

    epochs: Count = 60
    batch_size: Count = 256
    lr: Positive = 3e-3
    lr_end: NonNegative = 0.0
    warmup_steps: Index = 0
    weight_decay: NonNegative = 1e-4
    grad_clip: Positive | None = 1.0
    patience: Count | None = None
    improvement: BelowOne = 0.0
    stop_below: Positive | None = None
    seed: Seed = 0
    optimizer: OptimizerName = "adamw"
    momentum: BelowOne = 0.0
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)

    def __post_init__(self) -> None:
        if self.momentum and self.optimizer != "sgd":
            raise InfoFlowError(
                f"momentum is {self.momentum!r} with optimizer {self.optimizer!r}: expected "
                "optimizer 'sgd', or momentum 0"
            )

    def learning_rate(self, step: int, n_steps: int) -> float:
        """Return the learning rate at `step` of `n_steps`."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, n_steps - self.warmup_steps)
        return self.lr_end + (self.lr - self.lr_end) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class TrainingResult(Displayed):
    """What a training run gave.

    Attributes:
        nmse: best validation error, mean squared error over the variance of the targets, so that
            the best constant predictor scores 1; NaN for labels.
        loss: best validation cross-entropy; NaN for target vectors.
        accuracy: share of validation labels that the model of the best epoch predicts; NaN for
            target vectors.
        best_epoch: epoch (from 1) of the best error; the model holds its weights.
        epochs_run: epochs that were run.
        stopped: "finished", "early" (patience or stop_below), "interrupted" or "diverged".
        history: a row an epoch: ``epoch, lr, train_loss``, and ``validation_nmse`` or, for labels,
            ``train_accuracy, validation_loss, validation_accuracy``. What is said of training is
            the mean over the epoch's steps, each before its update.
        initial_state: the weights before training, for init-versus-trained comparisons.
        best_state: the weights at `best_epoch`.
        record: config, seed, versions.
    """

    nmse: float
    loss: float
    accuracy: float
    best_epoch: int
    epochs_run: int
    stopped: str
    history: tuple[Mapping[str, float | int], ...]
    initial_state: State = field(repr=False)
    best_state: State = field(repr=False)
    record: RunRecord = field(repr=False)


def _copy_state(model: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


class Ledger:
    """What is known of a training run: its errors, its best weights, whether it has ended."""

    def __init__(
        self,
        model: nn.Module,
        config: TrainingConfig,
        objective: Objective,
        identity: Mapping[str, Any],
    ) -> None:
        self.model = model
        self.config = config
        self.objective = objective
        self.record = RunRecord.from_model(model, dict(identity), config.seed)
        self.initial_state = _copy_state(model)
        self.best_state = self.initial_state
        self.best_score, self.best_epoch = math.inf, 0
        self.history: list[dict[str, float | int]] = []

    def order(self, n: int) -> Int[Tensor, " n"]:
        """Return the sequences of the next epoch, by the seed and the number of the epoch alone."""
        seed = derive_seed("epoch", self.config.seed, len(self.history))
        return torch.randperm(n, generator=torch.Generator().manual_seed(seed))

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate at a step of the next epoch, which has so many."""
        done = len(self.history)
        return self.config.learning_rate(done * steps + step, self.config.epochs * steps)

    def note_training(self, means: Mapping[str, float], lr: float) -> None:
        """Note an epoch; `means` are over its sequences.

        Raises:
            TrainingDivergedError: if they are not finite.
        """
        if not is_finite(means):
            raise TrainingDivergedError(self.finish("diverged"), lr)
        self.history.append({"epoch": len(self.history) + 1, "lr": lr, **means})

    def note_validation(self, output: Tensor, y: Tensor) -> bool:
        """Note the validation errors of the epoch; say whether they are the best so far.

        Raises:
            TrainingDivergedError: if they are not finite.
        """
        errors = self.objective.validation(output, y)
        if not is_finite(errors):
            # an epoch that diverged does not count as one that was run
            lr = self.history.pop()["lr"]
            raise TrainingDivergedError(self.finish("diverged"), lr)
        self.history[-1].update(errors)
        better = errors[self.objective.score] < self.best_score
        if better:
            self.best_score, self.best_epoch = errors[self.objective.score], len(self.history)
        return better

    def status(self) -> str:
        return self.objective.status(self.history[-1], self.best_score)

    def is_over(self) -> bool:
        """Say whether no epoch is left, the error is low enough, or patience has run out."""
        config, done = self.config, len(self.history)
        if done == config.epochs:
            return True
        if config.stop_below is not None and self.best_score < config.stop_below:
            return True
        return config.patience is not None and done - self._last_better() >= config.patience

    def _last_better(self) -> int:
        """Return the last epoch whose error fell by the share that `patience` asks for."""
        least, last = math.inf, 0
        for epoch, row in enumerate(self.history, start=1):
            error = row[self.objective.score]
            if error < least * (1 - self.config.improvement):
                least, last = error, epoch
        return last

    def finish(self, stopped: str | None = None) -> TrainingResult:
        """Put the best weights into the model and report; by default, of an ordinary end."""
        # an interruption between training and validation leaves a last row without a score
        complete = [row for row in self.history if self.objective.score in row]
        best = complete[self.best_epoch - 1] if self.best_epoch else {}
        self.model.load_state_dict(self.best_state)
        at_the_end = "finished" if len(self.history) == self.config.epochs else "early"
        return TrainingResult(
            nmse=best.get("validation_nmse", math.nan),
            loss=best.get("validation_loss", math.nan),
            accuracy=best.get("validation_accuracy", math.nan),
            best_epoch=self.best_epoch,
            epochs_run=len(complete),
            stopped=stopped or at_the_end,
            history=tuple(complete),
            initial_state=self.initial_state,
            best_state=self.best_state,
            record=self.record,
        )


class _Run(Ledger):
    """A training run that can be written to disk and taken up again between epochs."""

    def __init__(
        self,
        model: nn.Module,
        config: TrainingConfig,
        objective: Objective,
        identity: Mapping[str, Any],
    ) -> None:
        super().__init__(model, config, objective, identity)
        self.optimizer = optimizer_of(list(model.parameters()), config)

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "initial_state": self.initial_state,
            "best_state": self.best_state,
            "best": (self.best_score, self.best_epoch),
            "history": self.history,
        }
        write_state(path, state)

    def load(self, path: Path) -> None:
        device = next(self.model.parameters()).device
        hint = (
            "expected one that train() wrote; delete it, or use another checkpoint_dir (--out on "
            "the command line)"
        )
        state = read_state(path, "the checkpoint", hint)
        # A notebook that was interrupted calls again with the model that holds the best weights.
        initial = fingerprint(state["initial_state"])
        known = {initial, fingerprint(state["best_state"])}
        if self.record.model_fingerprint not in known:
            raise InfoFlowError(
                f"the checkpoint {str(path)!r} belongs to a run with other initial weights: "
                "expected the same; use another folder (checkpoint_dir, --out "
                "on the command line), or delete it"
            )
        # the record is of the weights that the run began with
        self.record = replace(self.record, model_fingerprint=initial)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name in ("initial_state", "best_state"):
            setattr(self, name, {key: value.to(device) for key, value in state[name].items()})
        self.best_score, self.best_epoch = state["best"]
        self.history = state["history"]

    def epoch(self, x: Tensor, y: Tensor) -> None:
        """Pass over the data once, in an order that depends on the seed and the epoch alone."""
        config = self.config
        batches = self.order(len(x)).to(x.device).split(config.batch_size)
        predict, lr = self.objective.predict(self.model), config.lr
        # sums stay tensors: to read one as a number in every step would make a GPU wait
        totals: dict[str, Tensor] = {}
        drawing = SeededRandom(derive_seed("noise", config.seed, len(self.history)))
        self.model.train()
        for step, rows in enumerate(batches):
            lr = self.rate(step, len(batches))
            set_rate(self.optimizer, lr)
            # a model that draws does so in every batch; others need not be watched
            with drawing if step == 0 or drawing.n_drawn else nullcontext():
                measures = self.objective.measures(predict(x[rows]), y[rows])
            self.optimizer.zero_grad(set_to_none=True)
            measures["train_loss"].backward()
            if config.grad_clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), config.grad_clip)
            self.optimizer.step()
            for name, mean in measures.items():
                # weighed by the sequences, as the last batch may be smaller
                part = mean.detach() * len(rows)
                totals[name] = totals[name] + part if name in totals else part
        self.note_training({name: float(total) / len(x) for name, total in totals.items()}, lr)

    def validate(self, x: Tensor, y: Tensor) -> None:
        if self.note_validation(outputs_of(self.model, self.objective.predict(self.model), x), y):
            self.best_state = _copy_state(self.model)


def optimizer_of(
    parameters: list[nn.Parameter],
    config: TrainingConfig,
    *,
    fused: bool = False,
    in_graph: bool = False,
) -> torch.optim.Optimizer:
    """Make the optimiser of the settings; on a GPU or with `fused`, a step is one operation.

    With `in_graph` a CUDA graph can hold the step: the learning rate is a tensor on the GPU.

    Raises:
        InfoFlowError: if no parameter asks for a gradient.
    """
    if not any(parameter.requires_grad for parameter in parameters):
        raise InfoFlowError(
            "every parameter of the model is fixed: expected one to train; set its "
            "requires_grad_(True)"
        )
    common: dict[str, Any] = {
        "lr": torch.tensor(config.lr, device=parameters[0].device) if in_graph else config.lr,
        "weight_decay": config.weight_decay,
        # None lets PyTorch update many tensors at a time, where False would take them one by one
        "fused": fused or parameters[0].is_cuda or None,
    }
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=config.momentum, **common)
    return torch.optim.AdamW(parameters, betas=config.betas, capturable=in_graph, **common)


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give an optimiser of `optimizer_of` the learning rate of its next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)  # a CUDA graph reads it where it lies
        else:
            group["lr"] = lr


def _describe_model(model: nn.Module) -> dict[str, Any]:
    """Describe what a run depends on that no state_dict holds."""
    return {
        "attention": attention_kinds(model),
        "configuration": configuration_fingerprint(model),
        "fixed": [name for name, p in model.named_parameters() if not p.requires_grad],
    }


@dataclass
class TrainingData:
    """Checked data of a run.

    Attributes:
        x, y: of the first epoch, and of all others unless they are drawn anew.
        validation_x, validation_y: what chooses the best epoch.
        objective: what targets of this kind are for.
        draw: what draws every epoch anew.
    """

    x: Tensor
    y: Tensor
    validation_x: Tensor
    validation_y: Tensor
    objective: Objective
    draw: Draw | None

    @classmethod
    def check(
        cls, model: nn.Module, train_data: Data | Draw, validation_data: Any
    ) -> "TrainingData":
        """Check and split data as :func:`train` takes them.

        Raises:
            InfoFlowError: for data that no model can learn from, or that are not this model's.
        """
        draw = train_data if callable(train_data) else None
        # of data that are drawn, the first epoch stands for all
        x, y = tensors_of(draw(1) if draw else train_data, "training")
        validation_x, validation_y = tensors_of(validation_data, "validation")
        objective = objective_for(y)
        if type(objective_for(validation_y)) is not type(objective):
            raise InfoFlowError(
                f"the training targets are {y.dtype} {tuple(y.shape)}, the validation targets "
                f"{validation_y.dtype} {tuple(validation_y.shape)}: expected the same kind, "
                "vectors [batch, d_output] or integer labels [batch]"
            )
        objective.check_variance(validation_y, "validation")
        objective.check_fit(model, x, y, "training")
        objective.check_fit(model, validation_x, validation_y, "validation")
        # errors are computed on the CPU, wherever the data are
        return cls(x, y, validation_x, validation_y.cpu(), objective, draw)

    def describe_run(self, model: nn.Module, config: TrainingConfig) -> dict[str, Any]:
        """Describe all that the numbers of a run depend on beside the initial weights.

        A checkpoint goes on only where this is the same.
        """
        names = ("x", "y", "validation_x", "validation_y")
        return {
            "training": asdict(config),
            "data": fingerprint({name: getattr(self, name) for name in names}),
            "model": _describe_model(model),
            **({"data_of_epochs": "drawn anew"} if self.draw else {}),
        }

    def draw_epoch(self, epoch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return sequences and targets of an epoch (from 1), on a device, where fixed ones stay."""
        if self.draw is None:
            self.x, self.y = self.x.to(device), self.y.to(device)
            return self.x, self.y
        x, y = tensors_of(self.draw(epoch), f"training (epoch {epoch})")
        if type(objective_for(y)) is not type(self.objective):
            raise InfoFlowError(
                f"the training targets of epoch {epoch} are {y.dtype} {tuple(y.shape)}: expected "
                "the kind of epoch 1"
            )
        return x.to(device), y.to(device)


@checked
def train(
    model: nn.Module,
    train_data: Data | Task | str | Draw,
    validation_data: Data | TrainingConfig | None = None,
    config: TrainingConfig | None = None,
    *,
    n_train: Count | None = None,
    n_validation: Count | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every: Count = 1,
    after_epoch: Callable[[int, nn.Module], None] | None = None,
    progress: bool = True,
) -> TrainingResult:
    """Train `model`, and leave the best weights in it.

    ``train(model, train_data, validation_data, config)``, or ``train(model, task, config)``, which
    draws from the training and the validation split of the task. Target vectors are learned by mean
    squared error, by any module from [batch, ...] to [batch, d_output]; labels by cross-entropy, by
    any TransformerLens model over token ids, read at the last position, or by any module to
    [batch, label]. Hosted models run by their faster `forward_readout`. Parameters that ask for no
    gradient stay as they are.

    Randomness inside a module (dropout) follows the seed of the config, and the global random state
    is left as it was. With `checkpoint_dir` the run is written there, whole or not at all, every
    `checkpoint_every` epochs; calling again with the same arguments goes on from there and ends
    with the numbers of an undisturbed run, also after ``kill -9``.

    Args:
        model: the module, at its initial weights.
        train_data: a dataset with columns x and y; or the pair of tensors ([batch, ...],
            [batch, d_output]), or ([batch, ...], integers [batch]) for labels; or a task, or the
            name of one; or, for data drawn anew in every epoch, a function from the number of the
            epoch (from 1) to such a dataset or pair, the same for the same number.
        validation_data: the same, left out for a task; it chooses the best epoch, so report
            numbers on other data if that choice matters.
        config: settings; default, ``TrainingConfig()``.
        n_train: sequences to draw from the training split of a task; default, 8192.
        n_validation: sequences to draw from its validation split; default, 2048.
        checkpoint_dir: folder for the checkpoint; None keeps the run in memory.
        checkpoint_every: epochs between checkpoints.
        after_epoch: called with the number of each epoch (from 1) and a copy of the model as it is
            then, in eval mode, so that whatever it does leaves the training as it was. A resumed
            run calls it for the epochs that it runs, those that were lost with the interruption
            once more.
        progress: show a bar with loss and validation error.

    Returns:
        The result, with the weights before training kept.

    Raises:
        InfoFlowError: for bad data, a folder that can't be written or belongs to another run; all
            before the first step.
        TrainingDivergedError: when the loss is no longer finite.
        TrainingInterrupted: on Ctrl-C, with the result so far.
    """
    # train(model, data, config) is what one writes without validation data
    if isinstance(validation_data, TrainingConfig) and config is None:
        validation_data, config = None, validation_data
    config = TrainingConfig() if config is None else config
    if not isinstance(config, TrainingConfig):
        raise InfoFlowError(
            f"config is a {type(config).__name__}: expected a TrainingConfig, such as "
            "TrainingConfig(epochs=10)"
        )
    check_module(model)
    if isinstance(train_data, str):
        train_data = load_task_for(model, train_data)
    train_data, validation_data = _draw_both(
        train_data, validation_data, n_train, n_validation, config.seed
    )
    data = TrainingData.check(model, train_data, validation_data)
    identity = data.describe_run(model, config)
    run = _Run(model, config, data.objective, identity)
    with ExitStack() as stack:
        checkpoint = None
        if checkpoint_dir is not None:
            writes = RunFolder.open(checkpoint_dir, "train()", (_CHECKPOINT,))
            folder = stack.enter_context(writes)
            # a checkpoint goes on only where all of this is the same
            folder.claim(
                {
                    "settings": identity["training"],
                    "the data": identity["data"],
                    "the model's settings": identity["model"],
                    "the data of epochs": identity.get("data_of_epochs", "the same"),
                    **versions_identity(),
                }
            )
            checkpoint = folder.path / _CHECKPOINT
            if folder.holds(_CHECKPOINT):
                run.load(checkpoint)
        stack.enter_context(keep_modes(model))
        return _run_epochs(run, data, checkpoint, checkpoint_every, after_epoch, progress)


def _draw_both(
    train_data: Data | Task | Draw,
    validation_data: Data | TrainingConfig | None,
    n_train: int | None,
    n_validation: int | None,
    seed: int,
) -> tuple[Data | Draw, Any]:
    """Return training and validation data, drawn where a task was given."""
    if not isinstance(train_data, Task):
        if n_train is not None or n_validation is not None:
            raise InfoFlowError(
                "n_train and n_validation say how much to draw from a task, but data were given: "
                "expected a task, or neither"
            )
        return train_data, validation_data
    if validation_data is not None:
        raise InfoFlowError(
            f"validation data were given with task {train_data.name!r}, whose validation split is "
            "used: expected train(model, task, config), or data for both"
        )
    return (
        train_data.dataset("train", n_train or _N_TRAIN, seed),
        train_data.dataset("validation", n_validation or _N_VALIDATION, seed),
    )


def _run_epochs(
    run: _Run,
    data: TrainingData,
    checkpoint: Path | None,
    checkpoint_every: int,
    after_epoch: Callable[[int, nn.Module], None] | None,
    progress: bool,
) -> TrainingResult:
    config = run.config
    done, device = len(run.history), next(run.model.parameters()).device
    try:
        with progress_bar("training", config.epochs, progress, done) as advance:
            while not run.is_over():
                run.epoch(*data.draw_epoch(len(run.history) + 1, device))
                run.validate(data.validation_x, data.validation_y)
                advance(status=run.status())
                if after_epoch is not None:
                    # before the checkpoint, so that no epoch is passed over
                    after_epoch(len(run.history), copy.deepcopy(run.model).eval())
                if checkpoint and (run.is_over() or len(run.history) % checkpoint_every == 0):
                    run.save(checkpoint)
    except KeyboardInterrupt:
        raise TrainingInterrupted(run.finish("interrupted"), checkpoint) from None
    return run.finish()


def restored(model: ModuleT, state: State) -> ModuleT:
    """Copy `model` and load `state` into the copy, for comparing weights side by side."""
    twin = copy.deepcopy(model)
    twin.load_state_dict(state)
    return twin
