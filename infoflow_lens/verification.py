"""Train the architectures that a design recommends and excludes, to check its predictions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infoflow_lens.foundation.display import Displayed
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.foundation.progress import Advance
from infoflow_lens.foundation.settings import Count, Seed, checked
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import build_model
from infoflow_lens.objectives import Data, standardise
from infoflow_lens.tasks import VectorTask
from infoflow_lens.theory.design import N_VERIFIED, Candidate, Design, neighbours
from infoflow_lens.theory.question import Question
from infoflow_lens.theory.schedule import set_length
from infoflow_lens.training import Draw, TrainingConfig, train

_FALL = 10.0  # times that the recommended model should be better than an excluded one


@dataclass(frozen=True)
class Measured:
    """A model that was trained.

    Attributes:
        n_heads: its heads.
        predicted: "recommended", or the verdict on a neighbour below, at the T of the training.
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
        target: the NMSE that the recommended model should reach: the design's eps.
        models: the recommended one, then its neighbours.
        learnt: whether it does.
        confirmed: whether it is learnt, and every excluded neighbour at least 10 times worse; None
            where it is learnt and none is excluded.
        why_not: in words, where it is not.
    """

    n_tokens: int
    target: float
    models: tuple[Measured, ...]
    learnt: bool
    confirmed: bool | None
    why_not: str


@checked
def check_trainable(task: Any, *, epochs: Count = 40, seeds: Count = 1) -> None:
    """Refuse what :func:`verify_design` cannot train, before anything is designed.

    Raises:
        InfoFlowError: for numbers below 1, or a task over token ids.
    """
    if not isinstance(task, VectorTask):
        raise InfoFlowError(
            f"task {getattr(task, 'name', None)!r} has token ids: expected one over vector tokens; "
            "the studies varying_depth and varying_heads train models over token ids"
        )


@checked
def verify_design(
    design: Design,
    task: Any,
    *,
    n_tokens: Count | None = None,
    epochs: Count = 40,
    n_train: Count = 25_600,
    seeds: Count = 1,
    seed: Seed = 0,
    advance: Advance | None = None,
) -> Verification:
    """Train the recommended architecture and its neighbours below, with the same settings.

    All have the width that is recommended (at least 16), heads of the dimension that its scores ask
    for, an encoder of width 64, feed-forward networks of four units for each score inside a state
    (64 to 512), and targets standardised for training. No sequence is seen twice.

    Args:
        design: what was designed.
        task: the target, over vector tokens.
        n_tokens: T; default, the smallest that was asked.
        epochs, n_train: of the training, and the sequences that an epoch draws.
        seeds: models of each; the best counts.
        seed: of data and weights.
        advance: called after each model.

    Raises:
        InfoFlowError: for a design without recommendation, numbers below 1, a task over token ids,
            or another one than was designed for.
    """
    if design.recommended is None:
        raise InfoFlowError(
            "the design recommends no architecture, so there is no model to train: expected a "
            "design with a recommendation; allow more heads or layers"
        )
    name = getattr(task, "name", None)
    # a design keeps the name and the size of its target alone
    if name != design.target or getattr(task, "d_token", 1) != design.d_token:
        raise InfoFlowError(
            f"the design is for {design.target!r} with d_token {design.d_token}, and task is "
            f"{task!r}: expected the task that was designed for"
        )
    check_trainable(task, epochs=epochs, seeds=seeds)
    small = set_length(task, design.n_tokens[0] if n_tokens is None else n_tokens)
    # data of one scale for all models, so that their errors can be compared
    scale = small.sample(20_000, derive_seed("verify scale", seed))
    test = small.sample(4000, derive_seed("verify validation", seed))

    def draw(epoch: int) -> Data:
        part = small.sample(n_train, derive_seed("verify train", seed, epoch))
        return standardise(scale, part)[1]

    validation = standardise(scale, test)[1]
    cases: list[tuple[tuple[int, ...], str]] = [(design.recommended.n_heads, "recommended")]
    below = design.neighbours
    # the design's verdicts are at the largest T, and of fewer tokens less is excluded
    if small.n_tokens != design.n_tokens[-1]:
        positional = design.recommended.mechanisms == "fixed positions"
        asked = Question.read(small, seed)
        below = neighbours(design.recommended, asked, positional, design.count, N_VERIFIED, seed)
    cases += [(n.n_heads, n.verdict) for n in below]
    errors: list[float] = []
    for heads, _ in cases:
        architecture = _architecture(design.recommended, small, heads)
        # the best of several seeds: what is looked for is whether it can be learnt
        best = min(
            _train_model(architecture, draw, validation, epochs, seed + number)
            for number in range(seeds)
        )
        errors.append(best)
        if advance is not None:
            advance(1, f"{heads}: {best:.2e}")
    models = tuple(
        Measured(heads, predicted, error, error / errors[0])
        for (heads, predicted), error in zip(cases, errors, strict=True)
    )
    learnt = errors[0] <= design.error
    return Verification(small.n_tokens, design.error, models, learnt, *judge(models, design.error))


def judge(models: Sequence[Measured], target: float) -> tuple[bool | None, str]:
    """Say whether the models are as predicted, and why not.

    Args:
        models: the recommended one, then its neighbours.
        target: the NMSE that the first should reach.
    """
    ours = models[0].nmse
    excluded = [model for model in models[1:] if model.predicted.startswith("excluded")]
    close = [model for model in excluded if model.times < _FALL]
    reasons = [f"{model.n_heads} is {model.times:.1f} times worse" for model in close]
    if ours > target:
        own = (
            f"not learnt: the recommended model itself has an NMSE of {ours:.2g}, above {target:g}"
        )
        return False, ", ".join([own, *reasons])
    if not excluded:
        return None, f"learnt, NMSE {ours:.2g}; no neighbour is excluded, so none has to fail"
    if not close:
        return True, ""
    roles = any("paper's count" in model.predicted for model in close)
    routed = "; a head with several roles is not excluded" if roles else ""
    why = f"{', '.join(reasons)}{routed}"
    return False, f"{why}; exclusion is of exact retrieval, not of every small error"


def _architecture(recommended: Candidate, task: VectorTask, heads: tuple[int, ...]) -> Architecture:
    ranks = [n for n in recommended.d_head if n is not None]
    return Architecture(
        n_heads=heads,
        d_model=max(16, recommended.d_model),
        d_head=(max([4, task.d_token, *ranks]),) * len(heads),
        d_token=task.d_token,
        n_tokens=task.n_tokens,
        d_mlp=min(512, max(64, 4 * recommended.inside)),
        d_encoder=64,
        d_output=task.d_output,
        act_fn="gelu",
        positional_embedding="learned" if recommended.mechanisms == "fixed positions" else "none",
        init_mode="kaiming_uniform",
    )


def _train_model(
    architecture: Architecture, draw: Draw, validation: Data, epochs: int, seed: int
) -> float:
    config = TrainingConfig(
        epochs=epochs, batch_size=256, lr=5e-3, warmup_steps=100, weight_decay=0.0,
        betas=(0.9, 0.99), seed=seed,
    )  # fmt: skip
    model = build_model(architecture, seed=seed)
    return train(model, draw, validation, config, progress=False).nmse
