"""First light: train a model, probe it, predict it, and show where the two agree."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge
from torch import Tensor

from infoflow_lens.agreement import Agreement, SetAgreement, compare
from infoflow_lens.foundation.display import Displayed
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import write_json, write_text
from infoflow_lens.foundation.memory import check_device
from infoflow_lens.foundation.packages import versions_identity
from infoflow_lens.foundation.processes import threads
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.foundation.settings import (
    Count,
    Index,
    NonNegative,
    Positive,
    Remedy,
    Seed,
    settings,
)
from infoflow_lens.hooks import (
    JacobianInfluence,
    PositionsProbe,
    RecoveryProbe,
    RecoveryResult,
    run_probes,
)
from infoflow_lens.hooks.influence.base import Threshold
from infoflow_lens.models.architecture import ActivationName, Architecture
from infoflow_lens.models.host import VectorTransformer, save_model
from infoflow_lens.objectives import Data
from infoflow_lens.runs.folder import RunFolder
from infoflow_lens.studies.demo_page import Stage, render_demo
from infoflow_lens.studies.stages import StagedResult, Stages, train_in_stages
from infoflow_lens.tasks import DRetrieval, VectorTask
from infoflow_lens.theory import propagate
from infoflow_lens.training import TrainingConfig, restored

RANKS = (1, 2)
STAGES = ("initial", "trained")


@settings
class DemoConfig:
    """Settings of the demo.

    Attributes:
        seed: of the target's directions, the initial weights, the data and their order.
        n_tokens, d_token, n_components: T, d and D of the task.
        n_heads, d_model, d_mlp, act_fn: of the model; see `Architecture`.
        half_epochs: epochs on sequences of half as many tokens, where steps are cheap, before
            `epochs` on those of `n_tokens`.
        epochs, batch_size, lr, weight_decay: see `TrainingConfig`.
        n_train, n_validation: sequences to train on and to choose the best epoch on.
        n_recovery: sequences for the recovery maps, a fifth of them held out.
        n_influence: sequences for influence and agreement.
        n_shown: of these, the ones that the report steps through.
        threshold: see :func:`infoflow_lens.agreement.compare`.
    """

    seed: Seed = 0
    n_tokens: Count = 16
    d_token: Count = 4
    n_components: Count = 4
    n_heads: Annotated[
        tuple[Count, Count], Remedy("one for each of two layers, such as (4, 1)")
    ] = (4, 1)
    d_model: Count = 32
    d_mlp: Index = 64
    act_fn: ActivationName = "relu"
    half_epochs: Index = 24
    epochs: Count = 20
    batch_size: Count = 256
    lr: Positive = 8e-3
    weight_decay: NonNegative = 0.0
    n_train: Count = 16000
    n_validation: Count = 2000
    n_recovery: Annotated[int, Ge(5), Remedy("of which one is held out")] = 4000
    n_influence: Count = 512
    n_shown: Count = 8
    threshold: Threshold = 0.1

    def __post_init__(self) -> None:
        if self.n_shown > self.n_influence:
            raise InfoFlowError(
                f"n_shown is {self.n_shown}: expected 1 to n_influence ({self.n_influence})"
            )

    def task(self, n_tokens: int | None = None) -> VectorTask:
        """Return the target and its inputs, of `n_tokens` or another length."""
        return DRetrieval(
            n_tokens=n_tokens or self.n_tokens,
            d_token=self.d_token,
            n_components=self.n_components,
            # at right angles, so that no two heads are asked for nearly the same token
            directions="orthonormal",
            seed=self.seed,
        )

    def architecture(self) -> Architecture:
        """Return the model's config."""
        return Architecture(
            n_heads=self.n_heads,
            d_model=self.d_model,
            d_token=self.d_token,
            n_tokens=self.n_tokens,
            d_mlp=self.d_mlp,
            act_fn=self.act_fn,
        )

    def stages(self) -> Stages:
        """Return training at half the length, then at the full one."""
        half = self.n_tokens // 2 if self.half_epochs else 0
        return Stages(
            lengths=(half,) if half else (),
            epochs_each=self.half_epochs,
            # no stage at a constant rate: the full length has the cosine alone
            epochs=0,
            last_epochs=self.epochs,
        )

    def training(self) -> TrainingConfig:
        """Return the training settings."""
        return TrainingConfig(
            epochs=self.epochs,
            batch_size=self.batch_size,
            lr=self.lr,
            weight_decay=self.weight_decay,
            seed=self.seed,
        )


@dataclass(frozen=True)
class DemoResult(Displayed):
    """What the demo found.

    Attributes:
        summary: the content of ``summary.json``.
        stages: the model at initialisation and trained, for the first `n_shown` inputs.
        training: the training run, in stages.
        out: the folder with ``summary.json``, ``report.html`` and the trained model.
    """

    summary: Mapping[str, Any]
    stages: tuple[Stage, ...] = field(repr=False)
    training: StagedResult = field(repr=False)
    out: Path


def _stage(
    name: str,
    model: VectorTransformer,
    config: DemoConfig,
    recovery_inputs: Tensor,
    inputs: Tensor,
    active: Tensor,
    progress: bool,
) -> Stage:
    """Probe and predict the model as it is."""
    some = inputs[: config.n_shown]
    recovery, *_ = run_probes(model, recovery_inputs, [RecoveryProbe(RANKS)], progress=progress)
    positions, influence = run_probes(
        model, inputs, [PositionsProbe(), JacobianInfluence()], progress=progress
    )
    edge_probes = [
        JacobianInfluence(state="resid_post", source_layer=layer)
        for layer in range(len(config.n_heads))
    ]
    edges = run_probes(model, some, edge_probes, progress=False)
    # from the model's attention: rule (1) with its own argmax
    predicted = propagate(positions.argmax, n_sources=config.n_tokens)
    return Stage(
        name=name,
        recovery=recovery,
        agreement=compare(predicted, influence, threshold=config.threshold, active=active),
        positions=tuple(chosen[: config.n_shown] for chosen in positions.argmax),
        predicted=predicted.part(n=config.n_shown),
        influence=influence.influence[:, : config.n_shown],
        edges=tuple(result.influence[0] for result in edges),
    )


def _recovery_summary(recovery: RecoveryResult, rank: int) -> list[dict[str, float]]:
    """Return first-layer errors of one rank, head by head."""
    column = recovery.ranks.index(rank)
    return [
        {
            "second_moment": float(recovery.second_moment[0][head, column]),
            "fvu": float(recovery.fvu[0][head, column]),
        }
        for head in range(len(recovery.fvu[0]))
    ]


def _agreement_summary(agreement: Agreement) -> dict[str, Any]:
    return {
        "threshold": agreement.threshold,
        "layers": [asdict(layer) for layer in agreement.layers],
        "layers_with_self": [asdict(layer) for layer in agreement.layers_with_self],
        "cls": asdict(agreement.cls),
    }


def _summary(
    config: DemoConfig, task: VectorTask, training: StagedResult, stages: tuple[Stage, ...]
) -> dict[str, Any]:
    return {
        "task": {"name": task.name, **task.parameters()},
        "architecture": config.architecture().to_dict(),
        "training": asdict(config.training())
        | {"n_train": config.n_train, "epochs_run": dict(training.epochs)},
        "seed": config.seed,
        "versions": dict(training.last.record.versions),
        "environment": dict(training.last.record.environment),
        "nmse": training.last.nmse,
        # counted through all stages, as epochs of the history are
        "best_epoch": len(training.history) - training.last.epochs_run + training.last.best_epoch,
        "recovery": {
            f"rank{rank}": {s.name: _recovery_summary(s.recovery, rank) for s in stages}
            for rank in RANKS
        },
        "agreement": {stage.name: _agreement_summary(stage.agreement) for stage in stages},
        "coverage": {stage.name: stage.agreement.coverage for stage in stages},
        "notes": {stage.name: list(stage.recovery.notes) for stage in stages},
    }


def _mean_error(summary: Mapping[str, Any], rank: int, stage: str) -> float:
    errors = [head["second_moment"] for head in summary["recovery"][f"rank{rank}"][stage]]
    return sum(errors) / len(errors)


def _page(
    config: DemoConfig,
    summary: Mapping[str, Any],
    training: StagedResult,
    stages: tuple[Stage, ...],
    active: Tensor,
) -> str:
    before: SetAgreement = stages[0].agreement.cls
    after: SetAgreement = stages[-1].agreement.cls
    # how far training has lowered the recovery error, by rank
    ratios = {
        rank: _mean_error(summary, rank, "trained") / _mean_error(summary, rank, "initial")
        for rank in RANKS
    }
    headline = (
        f"A two-layer Transformer with {config.n_heads[0]} and {config.n_heads[1]} heads learned "
        f"{config.n_components}-retrieval to a normalised error of {training.last.nmse:.2e}. "
        "From its attention alone, InfoFlow predicts which tokens the CLS state holds. The "
        f"measured influence of the tokens agrees with AUROC {after.auroc:.3f}; before training it "
        f"was {before.auroc:.3f}."
    )
    facts = [
        ("validation NMSE", f"{training.last.nmse:.2e}"),
        ("CLS AUROC, initial → trained", f"{before.auroc:.3f} → {after.auroc:.3f}"),
        (
            "active tokens in the predicted CLS set",
            f"{stages[0].agreement.coverage:.1%} → {stages[-1].agreement.coverage:.1%}",
        ),
        ("rank-1 recovery error, trained / initial", f"{ratios[1]:.2f}"),
        ("rank-2 recovery error, trained / initial", f"{ratios[2]:.2f}"),
    ]
    record = RunRecord(
        config={"demo": asdict(config), "checkpoint": training.last.record.config},
        seed=config.seed,
        versions=training.last.record.versions,
        model_fingerprint=stages[-1].recovery.record.model_fingerprint,
        weight_processing=stages[-1].recovery.record.weight_processing,
    )
    return render_demo(
        stages,
        active,
        training.history,
        record,
        title="Predicted and measured information flow in a trained two-layer Transformer",
        headline=headline,
        facts=facts,
    )


def run_demo(
    out: str | os.PathLike[str],
    config: DemoConfig | None = None,
    *,
    device: str = "cpu",
    progress: bool = True,
) -> DemoResult:
    """Train a two-layer model on D-retrieval, probe it before and after, compare, report.

    Writes ``summary.json``, ``report.html`` and the trained model (``model/``) to `out`; the
    training checkpoint in ``training/`` lets an interrupted demo go on.

    It computes with one thread: with others sums are rounded otherwise, and training leads to other
    weights. So the same seed gives the same numbers on the same processor with the same versions;
    ``summary.json`` holds all of these.

    Args:
        out: the folder.
        config: the settings.
        device: where the model is trained and probed, such as "cuda"; other devices round
            otherwise.
        progress: whether to show bars.

    Raises:
        InfoFlowError: if `out` cannot be written, another run writes to it, it holds the
            checkpoint of other settings, or the device does not answer.
        TrainingInterrupted: on Ctrl-C while training.
    """
    config, device = config or DemoConfig(), check_device(device)
    writes = ("summary.json", "report.html")
    with RunFolder.open(out, "infoflow-lens demo", writes) as folder, threads(1):
        folder.claim({"the demo's settings": asdict(config), **versions_identity()})
        return _run_demo(folder, config, device, progress)


def _run_demo(out: RunFolder, config: DemoConfig, device: str, progress: bool) -> DemoResult:
    folder = out.path
    task = config.task()
    n_test = config.n_recovery + config.n_influence
    # other sequences than the model was trained on, some for each kind of measurement
    test = task.dataset("test", n_test, seed=config.seed).with_format("torch")[:]["x"]
    recovery_inputs, inputs = test.split((config.n_recovery, config.n_influence))
    active = task.active_index_set(inputs)

    # stages of training grow the sequences
    def data(n_tokens: int) -> tuple[Data, Data]:
        here = config.task(n_tokens)
        return (
            here.dataset("train", config.n_train, seed=config.seed),
            here.dataset("validation", config.n_validation, seed=config.seed),
        )

    training = train_in_stages(
        config.architecture(),
        data,
        config.stages(),
        config.training(),
        model_seed=config.seed,
        device=device,
        checkpoint_dir=out.subfolder("training"),
        progress=progress,
    )
    model = training.model
    moments = {
        "initial": restored(model, training.initial_state),
        "trained": restored(model, training.last.best_state),
    }
    stages = tuple(
        _stage(name, moments[name], config, recovery_inputs, inputs, active, progress)
        for name in STAGES
    )
    summary = _summary(config, task, training, stages)
    page = _page(config, summary, training, stages, active[: config.n_shown])
    save_model(moments["trained"], folder / "model")
    write_json(folder / "summary.json", summary)
    write_text(folder / "report.html", page)
    return DemoResult(summary=summary, stages=stages, training=training, out=folder)


def verdict(summary: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return initial and trained values of the demo's findings, for a table."""
    agreement, coverage = summary["agreement"], summary["coverage"]
    return {
        "CLS AUROC": (agreement["initial"]["cls"]["auroc"], agreement["trained"]["cls"]["auroc"]),
        "coverage of the active set": (coverage["initial"], coverage["trained"]),
        "rank-1 recovery error": (
            _mean_error(summary, 1, "initial"),
            _mean_error(summary, 1, "trained"),
        ),
        "rank-2 recovery error": (
            _mean_error(summary, 2, "initial"),
            _mean_error(summary, 2, "trained"),
        ),
    }
