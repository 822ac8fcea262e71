"""Training in stages: short sequences first, then until nothing is gained, then a falling rate."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import VectorTransformer, build_model
from infoflow_lens.objectives import Data
from infoflow_lens.studies.study import Pair, Row, Settings, TogetherStudy
from infoflow_lens.studies.together import train_together
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
    def read(cls, settings: Settings) -> "Stages":
        """Read the stages that the settings of a study name."""
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

    def train_stage(runs: Sequence[_Run], length: int, settings: TrainingConfig) -> list[_Trained]:
        (run,) = runs
        settings = replace(settings, seed=run.order)
        # stages that have ended are counted by their epochs
        folder = checkpoint_dir / str(len(run.epochs) + 1) if checkpoint_dir else None
        return [train(run.model, *data(length), settings, checkpoint_dir=folder, progress=progress)]

    run = _Run(build_model(architecture, seed=model_seed, device=device), config.seed)
    _through_stages([run], architecture, stages, config, train_stage)
    return run.result()


def train_in_stages_together(
    architecture: Architecture,
    data: Callable[[int, int], tuple[Data, Data]],
    stages: Stages,
    config: TrainingConfig,
    seeds: Sequence[int],
    *,
    device: str = "cpu",
) -> list[StagedResult | None]:
    """Train a model for each seed through all stages, together (`train_together`).

    Args:
        architecture, stages, config, device: as in :func:`train_in_stages`.
        data: training and validation data of a seed and a length.
        seeds: of the weights and of the order of the sequences.

    Returns:
        What `train_in_stages` gives for each seed, to rounding; None for one that diverged.

    Raises:
        InfoFlowError: as there.
    """

    def train_stage(runs: Sequence[_Run], length: int, settings: TrainingConfig) -> list[_Trained]:
        seed_of = {run.order: run.seed for run in runs}
        together = train_together(
            [run.model for run in runs],
            lambda order: data(seed_of[order], length),
            list(seed_of),
            settings,
            compiled=device != "cpu",
            progress=False,
        )
        results = [one.result for one in together]
        return [None if result.stopped == "diverged" else result for result in results]

    runs = [_Run(build_model(architecture, seed=seed, device=device), seed) for seed in seeds]
    _through_stages(runs, architecture, stages, config, train_stage)
    return [None if run.last is None else run.result() for run in runs]


_Trained: TypeAlias = TrainingResult | None  # None where it diverged


class _Run:
    """The state of one seed between the stages."""

    def __init__(self, model: VectorTransformer, seed: int) -> None:
        self.model = model
        self.seed = seed
        self.order = seed  # of the sequences in a stage
        self.initial = {name: value.detach().clone() for name, value in model.named_parameters()}
        self.last: _Trained = None
        self.epochs: dict[str, int] = {}
        self.history: list[Mapping[str, float | int]] = []

    def result(self) -> StagedResult:
        assert self.last is not None
        # masks are of the full length, weights of the beginning
        initial = {**self.model.state_dict(), **self.initial}
        return StagedResult(self.model, self.last, initial, self.epochs, tuple(self.history))


def _through_stages(
    runs: Sequence[_Run],
    architecture: Architecture,
    stages: Stages,
    config: TrainingConfig,
    trained: Callable[[Sequence[_Run], int, TrainingConfig], list[_Trained]],
) -> None:
    """Train runs through all stages.

    Args:
        runs: one for each seed; they are changed.
        architecture: with the final number of tokens.
        stages: which stages there are.
        config: of each training.
        trained: trains all runs for one stage, at a number of tokens, with the settings of the
            stage.

    Raises:
        InfoFlowError: for lengths that reach the final one, or a model with positions.
    """
    full = architecture.n_tokens
    if stages.lengths and stages.lengths[-1] >= full:
        raise InfoFlowError(
            f"the lengths {stages.lengths} reach n_tokens {full}: expected shorter ones"
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
    plan = [
        (f"T = {n}", n, replace(config, epochs=stages.epochs_each, lr_end=config.lr))
        for n in stages.lengths
    ]
    if stages.epochs:
        plan += [("constant", full, replace(config, epochs=stages.epochs, **constant))]
    # without patience, for the rate must come to its end
    cosine = replace(config, epochs=stages.last_epochs, lr_end=0.0, patience=None)
    plan += [("cosine", full, cosine)]
    for index, (name, length, settings) in enumerate(plan):
        for run in runs:
            run.model = _resize(run.model, length)
            # another order of the sequences in each stage
            run.order = derive_seed("stage", run.seed, name)
        # the rate warms up at the first stage alone
        warmup_steps = config.warmup_steps if not index else 0
        results = trained(runs, length, replace(settings, warmup_steps=warmup_steps))
        for run, result in zip(runs, results, strict=True):
            run.last = result
            if result is not None:
                run.epochs[name], before = result.epochs_run, len(run.history)
                run.history += [
                    {**row, "epoch": before + int(row["epoch"]), "n_tokens": length}
                    for row in result.history
                ]
        runs = [run for run in runs if run.last is not None]
        if not runs:
            return


class StagedStudy(TogetherStudy):
    """A study whose runs are trained in the stages that its settings name."""

    @abstractmethod
    def data_at(self, settings: Settings, seed: int, n_tokens: int) -> tuple[Pair, Pair]:
        """Return what the model of a seed is trained on and validated with at a length."""

    @abstractmethod
    def training(self, settings: Settings) -> TrainingConfig:
        """Say how models are trained; epochs are the stages', the seed is the run's."""

    @abstractmethod
    def rows(self, settings: Settings, seed: int, trained: StagedResult) -> list[Row]:
        """Measure a trained model."""

    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """Train one model, and measure it."""
        trained = train_in_stages(
            self.architecture(settings),
            partial(self.data_at, settings, seed),
            Stages.read(settings),
            replace(self.training(settings), seed=seed),
            model_seed=seed,
            device=device,
        )
        return self.rows(settings, seed, trained)

    def measure_together(
        self, settings: Settings, seeds: Sequence[int], device: str
    ) -> list[list[Row] | None]:
        """Train all seeds through the stages together, and measure them."""
        trained = train_in_stages_together(
            self.architecture(settings),
            partial(self.data_at, settings),
            Stages.read(settings),
            self.training(settings),
            seeds,
            device=device,
        )
        return [
            None if one is None else self.rows(settings, seed, one)
            for seed, one in zip(seeds, trained, strict=True)
        ]


def _resize(before: VectorTransformer, n_tokens: int) -> VectorTransformer:
    """Put the same weights in a model for another number of tokens, on which only masks depend."""
    if before.architecture.n_tokens == n_tokens:
        return before
    architecture = replace(before.architecture, n_tokens=n_tokens)
    model = build_model(architecture, device=before.unembed.W_U.device)
    smaller = dict(before.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(smaller[name])
    return model
