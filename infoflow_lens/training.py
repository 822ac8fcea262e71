"""Training of one model, interruptible at any moment and resumed to the same numbers."""

import copy
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import datasets
import torch
from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import atomic_path, writable_folder
from infoflow_lens.foundation.modules import eval_mode, modes_kept
from infoflow_lens.foundation.progress import progress_bar
from infoflow_lens.foundation.record import RunRecord, fingerprint
from infoflow_lens.foundation.seeds import check_seed, derived_seed

_CHECKPOINT = "training.pt"
_CHECKPOINT_FORMAT = 1

Data: TypeAlias = datasets.Dataset | tuple[Tensor, Tensor]
State = dict[str, Tensor]
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
        super().__init__(
            f"the loss is no longer finite in epoch {result.epochs_run + 1} (learning rate "
            f"{lr:.2e}): expected a finite loss; lower lr or grad_clip. "
            "The model holds the best weights before that"
        )


@dataclass(frozen=True)
class TrainingConfig:
    """Settings of :func:`train`.

    Attributes:
        epochs: passes over the training data.
        batch_size: sequences in a step.
        lr: peak learning rate of AdamW; it falls to `lr_end` along a cosine, step by step.
        lr_end: final learning rate.
        warmup_steps: steps in which the learning rate rises linearly from 0.
        weight_decay: AdamW's.
        grad_clip: largest gradient norm; None for no clipping.
        patience: epochs without a better validation NMSE after which to stop; None for never.
        seed: of the order of the training sequences (the model's own seed is `build_model`'s).

    Raises:
        InfoFlowError: for values out of range.
    """

    epochs: int = 60
    batch_size: int = 256
    lr: float = 3e-3
    lr_end: float = 0.0
    warmup_steps: int = 0
    weight_decay: float = 1e-4
    grad_clip: float | None = 1.0
    patience: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        least: Mapping[str, float] = {"epochs": 1, "batch_size": 1, "warmup_steps": 0}
        for name, minimum in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < minimum:
                raise InfoFlowError(f"{name} is {value!r}: expected an integer >= {minimum}")
        check_seed(self.seed)
        for name in ("lr", "lr_end", "weight_decay"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0) or (name == "lr" and value == 0):
                expected = "a positive number" if name == "lr" else "a number of at least 0"
                raise InfoFlowError(f"{name} is {value!r}: expected {expected}")
        if self.grad_clip is not None and not self.grad_clip > 0:
            raise InfoFlowError(f"grad_clip is {self.grad_clip!r}: expected > 0, or None")
        if self.patience is not None and self.patience < 1:
            raise InfoFlowError(f"patience is {self.patience!r}: expected >= 1, or None")

    def learning_rate(self, step: int, n_steps: int) -> float:
        """The learning rate at `step` of `n_steps`."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, n_steps - self.warmup_steps)
        return self.lr_end + (self.lr - self.lr_end) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class TrainingResult:
    """What a training run gave.

    Attributes:
        nmse: best validation error, mean squared error over the variance of the targets, so that
            the best constant predictor scores 1.
        best_epoch: epoch (from 1) of that error; the model holds its weights.
        epochs_run: epochs that were run.
        stopped: "finished", "early" (patience), "interrupted" or "diverged".
        history: a row an epoch: ``epoch, lr, train_loss, validation_nmse``.
        initial_state: the weights before training, for init-versus-trained comparisons.
        best_state: the weights at `best_epoch`.
        record: config, seed, versions.
    """

    nmse: float
    best_epoch: int
    epochs_run: int
    stopped: str
    history: tuple[Mapping[str, float | int], ...]
    initial_state: State = field(repr=False)
    best_state: State = field(repr=False)
    record: RunRecord = field(repr=False)


def nmse(
    prediction: Float[Tensor, "batch d_output"], target: Float[Tensor, "batch d_output"]
) -> float:
    """Mean squared error over the variance of the target; 1 for the best constant (App. C)."""
    error = (prediction - target).double().square().mean()
    spread = (target - target.mean(dim=0)).double().square().mean()
    return float(error / spread)


def _tensors(data: Data, name: str) -> tuple[Tensor, Tensor]:
    """The x and y of a dataset or pair, checked."""
    if isinstance(data, datasets.Dataset):
        if missing := {"x", "y"} - set(data.column_names):
            raise InfoFlowError(
                f"the {name} dataset has columns {data.column_names}, without "
                f"{' and '.join(sorted(missing))}: rename its columns to x and y"
            )
        if len(data) == 0:
            raise InfoFlowError(f"the {name} data are empty: expected at least one sequence")
        rows = data.with_format("torch")[:]
        x, y = rows["x"], rows["y"]
    else:
        if not isinstance(data, (tuple, list)) or not all(isinstance(d, Tensor) for d in data):
            raise InfoFlowError(
                f"the {name} data are {type(data).__name__}: expected a datasets.Dataset with "
                "columns x and y, or a pair of tensors (x, y)"
            )
        x, y = data
    if len(x) == 0:
        raise InfoFlowError(f"the {name} data are empty: expected at least one sequence")
    if len(x) != len(y):
        raise InfoFlowError(f"the {name} data have {len(x)} inputs but {len(y)} targets")
    if y.ndim != 2:
        raise InfoFlowError(
            f"the {name} targets have shape {tuple(y.shape)}: expected [batch, d_output]; for "
            "scalars add an axis with y[:, None]"
        )
    if not y.is_floating_point():
        raise InfoFlowError(f"the {name} targets are {y.dtype}: convert them with y.float()")
    for part, values in (("inputs", x), ("targets", y)):
        if values.is_floating_point() and not values.isfinite().all():
            raise InfoFlowError(
                f"the {name} {part} have NaN or infinite values: clean the data first"
            )
    return x, y


def _copy_state(model: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def evaluate(model: nn.Module, data: Data, batch_size: int = 2048) -> float:
    """NMSE of the model on `data`, without touching its mode or gradients.

    Raises:
        InfoFlowError: for empty data, or targets that are constant (NMSE is undefined).
    """
    x, y = _tensors(data, "evaluation")
    _check_fit(model, x, y, "evaluation")
    _check_spread(y, "evaluation")
    return _evaluate(model, x, y, batch_size)


def _predict(model: nn.Module) -> Any:
    """The fastest way to the model's output with the same numbers."""
    return getattr(model, "forward_readout", model)


def _evaluate(model: nn.Module, x: Tensor, y: Tensor, batch_size: int = 2048) -> float:
    device = next(model.parameters()).device
    predict = _predict(model)
    with eval_mode(model):
        outputs = [predict(part.to(device)).cpu() for part in x.split(batch_size)]
    return nmse(torch.cat(outputs), y)


def _check_fit(model: nn.Module, x: Tensor, y: Tensor, name: str) -> None:
    """A wrong shape or dtype shows on one sequence, before any work.

    Raises:
        InfoFlowError: where output and targets differ in width; and what the model refuses.
    """
    with eval_mode(model):
        output = _predict(model)(x[:1].to(next(model.parameters()).device))
    if output.shape[1:] != y.shape[1:]:
        raise InfoFlowError(
            f"the model's output has shape {tuple(output.shape[1:])} a sequence, the {name} "
            f"targets {tuple(y.shape[1:])}: build the model with d_output {y.shape[1]}"
        )


def _check_spread(y: Tensor, name: str) -> None:
    """Refuse targets without variance, for which NMSE is undefined.

    Raises:
        InfoFlowError: if they do not vary.
    """
    if len(y) < 2 or float(y.double().var(dim=0).sum()) == 0:
        raise InfoFlowError(
            f"the {name} targets ({len(y)} sequences) do not vary, so NMSE is undefined: expected "
            "at least two different targets"
        )


class _Run:
    """A training run that can be written to disk and taken up again between epochs."""

    def __init__(
        self, model: nn.Module, config: TrainingConfig, identity: Mapping[str, Any]
    ) -> None:
        self.model = model
        self.config = config
        self.identity = dict(identity)
        self.record = RunRecord.of_model(model, self.identity, config.seed)
        on_cuda = next(model.parameters()).is_cuda
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.lr,
            weight_decay=config.weight_decay,
            fused=on_cuda or None,
        )
        self.initial_state = _copy_state(model)
        self.best_state = self.initial_state
        self.best_nmse, self.best_epoch = math.inf, 0
        self.history: list[dict[str, float | int]] = []

    def save(self, path: Path) -> None:
        state = {
            "format": _CHECKPOINT_FORMAT,
            "identity": self.identity,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "initial_state": self.initial_state,
            "best_state": self.best_state,
            "best": (self.best_nmse, self.best_epoch),
            "history": self.history,
        }
        with atomic_path(path) as temporary:
            torch.save(state, temporary)

    def load(self, path: Path) -> None:
        device = next(self.model.parameters()).device
        try:
            state = torch.load(path, map_location=device, weights_only=True)
        except Exception as error:  # whatever unpickling makes of bytes that are no checkpoint
            raise InfoFlowError(
                f"the checkpoint {str(path)!r} cannot be read ({error}): expected one that train() "
                "wrote; delete it, or use another checkpoint_dir"
            ) from error
        if not isinstance(state, dict) or state.get("format") != _CHECKPOINT_FORMAT:
            raise InfoFlowError(
                f"{str(path)!r} is no checkpoint of this version: expected one that train() wrote; "
                "delete it, or use another folder"
            )
        # A notebook that was interrupted calls again with the model that holds the best weights.
        known = {fingerprint(state["initial_state"]), fingerprint(state["best_state"])}
        if state["identity"] != self.identity or self.record.model_fingerprint not in known:
            raise InfoFlowError(
                f"the checkpoint {str(path)!r} belongs to a run with other settings: expected the "
                "same config, initial weights and data; use another folder (checkpoint_dir, --out "
                "on the command line), or delete it"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.initial_state, self.best_state = state["initial_state"], state["best_state"]
        self.best_nmse, self.best_epoch = state["best"]
        self.history = state["history"]

    def epoch(self, x: Tensor, y: Tensor) -> None:
        """One pass over the data, in an order that depends on the seed and the epoch alone."""
        config, done = self.config, len(self.history)
        steps = math.ceil(len(x) / config.batch_size)
        seed = derived_seed("epoch", config.seed, done)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(x.device)
        predict, total, lr = _predict(self.model), torch.zeros((), device=x.device), config.lr
        self.model.train()
        for step, rows in enumerate(order.split(config.batch_size)):
            lr = config.learning_rate(done * steps + step, config.epochs * steps)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            loss = nn.functional.mse_loss(predict(x[rows]), y[rows])
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            if config.grad_clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), config.grad_clip)
            self.optimizer.step()
            total += loss.detach() * len(rows)
        train_loss = float(total) / len(x)
        if not math.isfinite(train_loss):
            raise TrainingDivergedError(self.finish("diverged"), lr)
        self.history.append({"epoch": done + 1, "lr": lr, "train_loss": train_loss})

    def validate(self, x: Tensor, y: Tensor) -> float:
        error = _evaluate(self.model, x, y)
        if not math.isfinite(error):
            lr = self.history.pop()["lr"]
            raise TrainingDivergedError(self.finish("diverged"), lr)
        self.history[-1]["validation_nmse"] = error
        if error < self.best_nmse:
            self.best_nmse, self.best_epoch = error, len(self.history)
            self.best_state = _copy_state(self.model)
        return error

    def out_of_patience(self) -> bool:
        patience = self.config.patience
        return patience is not None and len(self.history) - self.best_epoch >= patience

    def finish(self, stopped: str) -> TrainingResult:
        """Put the best weights into the model and report."""
        complete = [row for row in self.history if "validation_nmse" in row]
        self.model.load_state_dict(self.best_state)
        return TrainingResult(
            nmse=self.best_nmse if self.best_epoch else math.nan,
            best_epoch=self.best_epoch,
            epochs_run=len(complete),
            stopped=stopped,
            history=tuple(complete),
            initial_state=self.initial_state,
            best_state=self.best_state,
            record=self.record,
        )


def train(
    model: nn.Module,
    train_data: Data,
    validation_data: Data,
    config: TrainingConfig | None = None,
    *,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 1,
    progress: bool = True,
) -> TrainingResult:
    """Train `model` by AdamW on the mean squared error, and leave the best weights in it.

    Any module from [batch, ...] to [batch, d_output] can be trained, a hosted model by its faster
    `forward_readout`; randomness inside a module (dropout) follows the seed of the config, and the
    global random state is left as it was. With `checkpoint_dir` the run is written there, whole or
    not at all, every `checkpoint_every` epochs; calling again with the same arguments goes on from
    there and ends with the numbers of an undisturbed run, also after ``kill -9``.

    Args:
        model: the module, at its initial weights.
        train_data: a dataset with columns x and y, or the pair of tensors ([batch, ...],
            [batch, d_output]).
        validation_data: the same; it chooses the best epoch, so report numbers on other data if
            that choice matters.
        config: settings; default, ``TrainingConfig()``.
        checkpoint_dir: folder for the checkpoint; None keeps the run in memory.
        checkpoint_every: epochs between checkpoints.
        progress: show a bar with loss and validation NMSE.

    Returns:
        The result, with the weights before training kept.

    Raises:
        InfoFlowError: for bad data, a folder that can't be written or belongs to another run; all
            before the first step.
        TrainingDivergedError: when the loss is no longer finite.
        TrainingInterrupted: on Ctrl-C, with the result so far.
    """
    config = config or TrainingConfig()
    x, y = _tensors(train_data, "training")
    validation_x, validation_y = _tensors(validation_data, "validation")
    if not isinstance(checkpoint_every, int) or checkpoint_every < 1:
        raise InfoFlowError(f"checkpoint_every is {checkpoint_every!r}: expected an integer >= 1")
    _check_spread(validation_y, "validation")
    _check_fit(model, x, y, "training")
    _check_fit(model, validation_x, validation_y, "validation")
    device = next(model.parameters()).device
    data = {"x": x, "y": y, "validation_x": validation_x, "validation_y": validation_y}
    identity = {"training": asdict(config), "data": fingerprint(data)}
    run = _Run(model, config, identity)
    checkpoint = None
    if checkpoint_dir is not None:
        checkpoint = writable_folder(checkpoint_dir) / _CHECKPOINT
        if checkpoint.exists():
            run.load(checkpoint)
    x, y = x.to(device), y.to(device)
    with modes_kept(model):
        return _epochs(
            run, x, y, validation_x, validation_y, checkpoint, checkpoint_every, progress
        )


def _epochs(
    run: _Run,
    x: Tensor,
    y: Tensor,
    validation_x: Tensor,
    validation_y: Tensor,
    checkpoint: Path | None,
    checkpoint_every: int,
    progress: bool,
) -> TrainingResult:
    config = run.config
    done = len(run.history)
    try:
        with progress_bar("training", config.epochs, progress, done) as advance:
            while len(run.history) < config.epochs and not run.out_of_patience():
                with _seeded(derived_seed("noise", config.seed, len(run.history)), x.device):
                    run.epoch(x, y)
                error = run.validate(validation_x, validation_y)
                loss = run.history[-1]["train_loss"]
                advance(status=f"loss {loss:.2e}  NMSE {error:.2e}  best {run.best_nmse:.2e}")
                last = len(run.history) == config.epochs or run.out_of_patience()
                if checkpoint and (last or len(run.history) % checkpoint_every == 0):
                    run.save(checkpoint)
    except KeyboardInterrupt:
        raise TrainingInterrupted(run.finish("interrupted"), checkpoint) from None
    return run.finish("finished" if len(run.history) == config.epochs else "early")


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """The global random state seeded for a block, and put back after it."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def restored(model: ModuleT, state: State) -> ModuleT:
    """A copy of `model` that holds `state`, for comparing weights side by side."""
    twin = copy.deepcopy(model)
    twin.load_state_dict(state)
    return twin
