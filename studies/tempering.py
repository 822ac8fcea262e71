"""The effect of soft attention on recovery: patterns of a given entropy, errors of linear maps."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from infoflow_lens.hooks.recovery.statistics import RegressionStatistics

_HALVINGS, _WIDEST = 24, 1e4


class MapErrors(NamedTuple):
    """Mean squared errors of a linear map on held-out sequences.

    Attributes:
        second_moment: over the mean squared norm of the target (InfoFlow 2026, eq 56).
        fvu: over the variance of the target; NaN where that is 0.
    """

    second_moment: float
    fvu: float


def map_errors(
    state: Float[Tensor, "n query feature"],
    target: Float[Tensor, "n query target"],
    held_out: Bool[Tensor, " n"],
) -> MapErrors:
    """Return errors of the least-squares map, with intercept, from states to targets.

    Args:
        state: the input of the map.
        target: the output that the map should give.
        held_out: the sequences on which errors are measured; the map is fitted on the others.
    """
    fit, evaluation = RegressionStatistics(), RegressionStatistics()
    for statistics, chosen in ((fit, ~held_out), (evaluation, held_out)):
        x, y = (part[chosen].flatten(0, 1).double() for part in (state, target))
        # one group of targets: [row, 1, target]
        statistics.update(x, y[:, None])
    error = float(evaluation.error_sums(fit.fit()).sum()) / evaluation.n
    moment, variance = float(evaluation.second_moment()[0]), float(evaluation.variance()[0])
    return MapErrors(
        *(error / of if of > 0 else float("nan") for of in (moment, variance)),
    )


def mean_entropy(
    pattern: Float[Tensor, "n query key"], allowed: Bool[Tensor, "query key"]
) -> float:
    """Return the mean entropy of rows with a choice, in nats.

    Args:
        pattern: attention of one head; rows need not sum to 1.
        allowed: keys that each query may attend to.
    """
    rows = pattern[:, allowed.sum(dim=1) > 1]
    # rows of ReLU attention may be all 0, which counts as no entropy
    shares = rows / rows.sum(dim=2, keepdim=True).clamp(min=1e-30)
    return float(torch.special.entr(shares).sum(dim=2).mean())


def temper(
    scores: Float[Tensor, "n query key"], allowed: Bool[Tensor, "query key"], entropy: float
) -> Float[Tensor, "n query key"]:
    """Scale scores by the number that gives their softmax a mean entropy, and return that softmax.

    Args:
        scores: of one head, finite where allowed.
        allowed: keys that each query may attend to.
        entropy: in nats, as `mean_entropy` gives it.
    """
    masked = scores.masked_fill(~allowed, -torch.inf)
    low, high = 0.0, 1.0
    # keys that tie keep an entropy that no factor lowers, hence an end
    while mean_entropy(_softmax(masked, high), allowed) > entropy and high < _WIDEST:
        low, high = high, 2 * high
    # entropy falls as the factor grows, so halving finds where it meets the one that is asked
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if mean_entropy(_softmax(masked, middle), allowed) > entropy:
            low = middle
        else:
            high = middle
    return _softmax(masked, high)


def _softmax(masked: Tensor, sharpness: float) -> Tensor:
    largest = masked.amax(dim=-1, keepdim=True)
    # masked keys are at -inf, which a factor of 0 would make NaN
    return ((masked - largest) * max(sharpness, 1e-30)).softmax(dim=-1)
