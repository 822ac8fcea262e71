"""Train the architectures that a design recommends and excludes, to check its predictions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infoflow_lens.foundation.display import Displayed
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.progress import Advance
from infoflow_lens.foundation.seeds import derived_seed
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import build_model
from infoflow_lens.objectives import standardised
from infoflow_lens.tasks import VectorTask
from infoflow_lens.theory.design import Design, with_tokens
from infoflow_lens.training import TrainingConfig, train

_FALL = 10.0  # times that the recommended model should be better than an excluded one


@dataclass(frozen=True)
class Measured:
    """A model that was trained.

    Attributes:
        n_heads: its heads.
        predicted: "recommended", or the verdict on a neighbour below.
        nmse: the best validation error of its seeds, over the variance of the target.
        times: nmse over that of the recommended model.
    """

    n_heads: tuple[int, ...]
    predicted: str
    nmse: float
    times: float


@dataclass(frozen=True)
class Verification(Displayed):
    """The errors of trained architectures, compared with the predictions of a design.

    Attributes:
        n_tokens: T of the training.
        models: the recommended one, then its neighbours.
        confirmed: whether every excluded neighbour is at least 10 times worse; None where none is.
        why_not: in words, where it is not.
    """

    n_tokens: int
    models: tuple[Measured, ...]
    confirmed: bool | None
    why_not: str


def verify_design(
    design: Design,
    task: Any,
    *,
    n_tokens: int | None = None,
    epochs: int = 24,
    n_train: int = 16_000,
    seeds: int = 1,
    seed: int = 0,
    advance: Advance | None = None,
) -> Verification:
    """Train the recommended architecture and its neighbours below, with the same settings.

    All have the width that is recommended (at least 16), heads of one dimension, an encoder and
    feed-forward networks of width 64, and targets standardised for training.

    Args:
        design: what was designed.
        task: the target, over vector tokens.
        n_tokens: T; default, the smallest that was asked.
        epochs, n_train: of the training.
        seeds: models of each; the best counts.
        seed: of data and weights.
        advance: called after each model.

    Raises:
        InfoFlowError: for a design without recommendation, or a task over token ids.
    """
    if design.recommended is None:
        raise InfoFlowError("the design recommends nothing: there is no model to train")
    if not isinstance(task, VectorTask):
        raise InfoFlowError(
            f"task {task.name!r} has token ids: expected one over vector tokens; the experiments "
            "varying_depth and varying_heads train models over token ids"
        )
    small = with_tokens(task, n_tokens or design.n_tokens[0])
    train_seed = derived_seed("verify train", seed)
    test_seed = derived_seed("verify validation", seed)
    data = standardised(small.sample(n_train, train_seed), small.sample(4000, test_seed))
    cases: list[tuple[tuple[int, ...], str]] = [(design.recommended.n_heads, "recommended")]
    cases += [(n.n_heads, n.verdict) for n in design.neighbours]
    positional = design.recommended.mechanisms == "fixed positions"
    errors = []
    for heads, _ in cases:
        best = min(
            _trained(small, heads, design.recommended.d_model, positional, data, epochs, seed + i)
            for i in range(seeds)
        )
        errors.append(best)
        if advance is not None:
            advance(1, f"{heads}: {best:.2e}")
    models = tuple(
        Measured(heads, predicted, error, error / errors[0])
        for (heads, predicted), error in zip(cases, errors, strict=True)
    )
    return Verification(small.n_tokens, models, *judged(models))


def judged(models: Sequence[Measured]) -> tuple[bool | None, str]:
    """Whether the models are as predicted, and why not.

    Args:
        models: the recommended one, then its neighbours.
    """
    excluded = [model for model in models[1:] if model.predicted.startswith("excluded")]
    if not excluded:
        return None, "no neighbour is excluded: nothing is owed"
    close = [model for model in excluded if model.times < _FALL]
    if not close:
        return True, ""
    reasons = ", ".join(f"{model.n_heads} is {model.times:.1f} times worse" for model in close)
    ours = models[0].nmse
    if ours > 0.1:
        return False, f"{reasons}: the recommended model itself is not trained (NMSE {ours:.2g})"
    roles = any("paper's count" in model.predicted for model in close)
    routed = "; a head with several roles is not excluded" if roles else ""
    return False, f"{reasons}{routed}; exclusion is of exact retrieval, not of every small error"


def _trained(
    task: VectorTask,
    heads: tuple[int, ...],
    d_model: int,
    positional: bool,
    data: Any,
    epochs: int,
    seed: int,
) -> float:
    architecture = Architecture(
        n_heads=heads,
        d_model=max(16, d_model),
        d_head=(max(4, task.d_token),) * len(heads),
        d_token=task.d_token,
        n_tokens=task.n_tokens,
        d_mlp=64,
        d_encoder=64,
        d_output=task.d_output,
        act_fn="gelu",
        positional_embedding="learned" if positional else "none",
        init_mode="xavier_normal",
    )
    config = TrainingConfig(
        epochs=epochs, batch_size=256, lr=5e-3, warmup_steps=50, weight_decay=0.0, seed=seed
    )
    model = build_model(architecture, seed=seed)
    return train(model, data[0], data[1], config, progress=False).nmse
