"""Errors of fitted maps on held-out rows: how large, and how far to be trusted."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from infoflow_lens.hooks.recovery.regression import LinearFit
from infoflow_lens.hooks.recovery.statistics import CONSTANT, RegressionStatistics


@dataclass(frozen=True)
class Ratio:
    """An error over a scale, for some groups; NaN where the scale is 0.

    Attributes:
        value: over all held-out rows.
        half_width: of the 95% interval; NaN with fewer than two blocks.
        sketch_error: standard error that comes from looking at some directions of the target.
    """

    value: Float[Tensor, " group"]
    half_width: Float[Tensor, " group"]
    sketch_error: Float[Tensor, " group"]


def measure_errors(
    blocks: Sequence[RegressionStatistics], fit: LinearFit, groups: slice, d_target: int
) -> tuple[Ratio, Ratio]:
    """Divide the held-out squared error by the targets' second moment, and by their variance.

    Args:
        blocks: statistics of the held-out rows, of different sequences in each block.
        fit: the maps of these groups.
        groups: which groups.
        d_target: dimensions of the targets before they were sketched.
    """
    present = [block for block in blocks if block.n]
    n = torch.tensor([float(block.n) for block in present], dtype=torch.float64)[:, None, None]
    error = torch.stack([block.error_sums(fit, groups).cpu() for block in present])
    moment = torch.stack([block.moment_sums(groups).cpu() for block in present])
    # every block has sums about a point of its own; move them to that of the first block
    point = present[0].shift_y.cpu()
    sums, squares = [], []
    for block in present:
        move = block.shift_y.cpu() - point
        sum_y = block.sum_y[groups].cpu()
        sums.append(sum_y + block.n * move)
        squares.append(block.squares[groups].cpu() + move * (2 * sum_y + block.n * move))
    sum_y, square = torch.stack(sums), torch.stack(squares)

    def scales(pick: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        second = pick(moment)
        variance = pick(square) - pick(sum_y).square() / pick(n)
        # a difference this small beside the two sums is a rounding error, not a variance
        constant = variance.sum(-1) <= CONSTANT * second.sum(-1)
        return second, variance.masked_fill(constant[..., None], 0)

    ratios = []
    for which in (0, 1):
        whole = scales(_whole)[which]
        value = _over(_whole(error), whole)
        without_one = _over(_without_each(error), scales(_without_each)[which])
        ratios.append(
            Ratio(
                value,
                _half_width(without_one) if len(present) > 1 else torch.full_like(value, math.nan),
                _sketch_error(_whole(error), whole, value, d_target),
            )
        )
    return ratios[0], ratios[1]


def _whole(blocks: Float[Tensor, "block group target"]) -> Float[Tensor, "group target"]:
    return blocks.sum(dim=0)


def _without_each(
    blocks: Float[Tensor, "block group target"],
) -> Float[Tensor, "block group target"]:
    return blocks.sum(dim=0) - blocks


def _over(error: Tensor, scale: Tensor) -> Tensor:
    total = scale.sum(dim=-1)
    return torch.where(total > 0, error.sum(dim=-1) / total, math.nan)


def _half_width(without_one: Float[Tensor, "block group"]) -> Float[Tensor, " group"]:
    """Delete-one-block jackknife, by Student's t: scipy.stats takes a second to import."""
    from scipy.special import stdtrit

    n_blocks = len(without_one)
    spread = (without_one - without_one.mean(dim=0)).square().sum(dim=0)
    return float(stdtrit(n_blocks - 1, 0.975)) * ((n_blocks - 1) / n_blocks * spread).sqrt()


def _sketch_error(
    error: Float[Tensor, "group target"],
    scale: Float[Tensor, "group target"],
    ratio: Float[Tensor, " group"],
    d_target: int,
) -> Float[Tensor, " group"]:
    """Standard error of a ratio that is estimated from some random directions of the target.

    The directions are orthonormal, like a sample without replacement, which is exact when it is
    whole.
    """
    seen = error.shape[-1]
    if seen >= d_target:
        return torch.zeros_like(ratio)
    off = (error - ratio[..., None] * scale).square().sum(dim=-1)
    whole = scale.sum(dim=-1)
    share = seen / (seen - 1) * (1 - seen / d_target) if seen > 1 else math.inf
    return torch.where(whole > 0, (share * off).sqrt() / whole, math.nan)
