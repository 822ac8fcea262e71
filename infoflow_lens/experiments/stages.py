"""Training in stages: short sequences first, then until nothing is gained, then a falling rate."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from infoflow_lens.experiments.study import Settings
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.seeds import derived_seed
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import VectorTransformer, build_model
from infoflow_lens.objectives import Data
from infoflow_lens.training import State, TrainingConfig, TrainingResult, train


@dataclass(frozen=True)
class Stages:
    """How long models are trained, and at which lengths.

    Models without positions run at any length, and at a short one the plateau before they compare
    tokens is short and its steps are cheap. Then the full length: at a constant rate until
    `patience` epochs bring no improvement of `improvement`, which ends a plateau or finds that
    there is none to end, and last along a cosine to 0.

    Attributes:
        lengths: numbers of tokens before the full one, growing; none for training at once.
        epochs_each: epochs at each of these.
        epochs: the most epochs at the constant rate; 0 for none.
        last_epochs: epochs along the cosine.
        patience, improvement: as in `TrainingConfig`, of the constant rate.

    Raises:
        InfoFlowError: for lengths that do not grow.
    """

    lengths: tuple[int, ...] = ()
    epochs_each: int = 8
    epochs: int = 64
    last_epochs: int = 16
    patience: int = 16
    improvement: float = 0.1

    @classmethod
    def of(cls, settings: Settings) -> "Stages":
        """Those that the settings of a study name."""
        epochs = {name: settings[name] for name in ("epochs_each", "epochs", "last_epochs")}
        return cls(lengths=tuple(settings["lengths"]), **epochs)

    def __post_init__(self) -> None:
        if list(self.lengths) != sorted(set(self.lengths)):
            raise InfoFlowError(f"lengths is {self.lengths!r}: expected numbers that grow")


@dataclass(frozen=True)
class StagedResult:
    """A model that was trained in stages.

    Attributes:
        model: with the best weights of the last stage, at the full length.
        last: what the last stage gave, and with it the error.
        initial_state: the weights before the first stage, as `model` takes them.
        epochs: by stage, epochs that were run.
        history: a row an epoch of all stages, as in `TrainingResult`, and ``n_tokens``; epochs are
            counted through.
    """

    model: VectorTransformer
    last: TrainingResult
    initial_state: State
    epochs: Mapping[str, int]
    history: tuple[Mapping[str, float | int], ...]


def train_in_stages(
    architecture: Architecture,
    data: Callable[[int], tuple[Data, Data]],
    stages: Stages,
    config: TrainingConfig,
    *,
    model_seed: int,
    device: str = "cpu",
    checkpoint_dir: Path | None = None,
    progress: bool = False,
) -> StagedResult:
    """Train one model through all stages.

    Args:
        architecture: at the full length, without positions where there are shorter ones.
        data: training and validation data of a length.
        stages: lengths and epochs.
        config: batch size, peak learning rate, and the rest; its epochs, ends and patience are
            those of the stages, and no stage ends at an error (`stop_below`).
        model_seed: of the weights.
        device: where to train.
        checkpoint_dir: folder for a checkpoint of each stage, from which the same call goes on;
            None keeps the run in memory.
        progress: show a bar for each stage.

    Raises:
        InfoFlowError: for lengths that reach the full one, or positions that shorter ones lack.
    """
    if stages.lengths and stages.lengths[-1] >= architecture.n_tokens:
        raise InfoFlowError(
            f"the lengths {stages.lengths} reach n_tokens {architecture.n_tokens}: expected "
            "shorter ones"
        )
    if stages.lengths and architecture.positional_embedding != "none":
        raise InfoFlowError(
            "the model has positions, which shorter sequences would not train: expected no "
            "lengths, or a model without positions"
        )
    config = replace(config, stop_below=None)
    constant: dict[str, Any] = {
        "lr_end": config.lr,
        "patience": stages.patience,
        "improvement": stages.improvement,
    }
    initial: State = {}
    model: VectorTransformer | None = None
    epochs: dict[str, int] = {}
    history: list[Mapping[str, float | int]] = []
    full = architecture.n_tokens
    plan = [
        (f"T = {n}", n, replace(config, epochs=stages.epochs_each, lr_end=config.lr))
        for n in stages.lengths
    ]
    if stages.epochs:
        plan += [("constant", full, replace(config, epochs=stages.epochs, **constant))]
    cosine = replace(config, epochs=stages.last_epochs, lr_end=0.0, patience=None)
    plan += [("cosine", full, cosine)]
    for index, (name, length, settings) in enumerate(plan):
        model = _of_length(architecture, length, model, model_seed, device)
        if not index:
            initial = {name: value.detach().clone() for name, value in model.named_parameters()}
        # another order of the sequences, and the rate warms up at the first stage alone
        settings = replace(
            settings,
            seed=derived_seed("stage", config.seed, name),
            warmup_steps=config.warmup_steps if not index else 0,
        )
        folder = checkpoint_dir / str(index + 1) if checkpoint_dir else None
        training = train(model, *data(length), settings, checkpoint_dir=folder, progress=progress)
        epochs[name], before = training.epochs_run, len(history)
        history += [
            {**row, "epoch": before + int(row["epoch"]), "n_tokens": length}
            for row in training.history
        ]
    assert model is not None
    # masks are of the full length, weights of the beginning
    return StagedResult(model, training, {**model.state_dict(), **initial}, epochs, tuple(history))


def _of_length(
    architecture: Architecture,
    n_tokens: int,
    before: VectorTransformer | None,
    seed: int,
    device: str,
) -> VectorTransformer:
    """The model at a length; masks depend on it, weights do not."""
    if before is not None and before.architecture.n_tokens == n_tokens:
        return before
    model = build_model(replace(architecture, n_tokens=n_tokens), seed=seed, device=device)
    if before is not None:
        theirs = dict(before.named_parameters())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(theirs[name])
    return model
