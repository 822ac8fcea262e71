"""Sums and means over the positions that are no padding: what is right on texts of any length."""

import torch
from jaxtyping import Bool
from torch import Tensor


def sum_over(values: Tensor, real: Bool[Tensor, "batch pos"], axis: int) -> Tensor:
    """The sum over the real positions of each sequence, in float32 or more.

    Args:
        values: [batch, ...] with positions on `axis`; padding may hold anything, also NaN.
        real: which positions are no padding.
        axis: that of positions, counted from 0.
    """
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    shape = [1] * values.ndim
    shape[0], shape[axis] = real.shape
    return torch.where(real.to(values.device).view(shape), wide, 0).sum(dim=axis)


def mean_over(values: Tensor, real: Bool[Tensor, "batch pos"], axis: int) -> Tensor:
    """The mean over the real positions of each sequence; NaN where it has none."""
    total = sum_over(values, real, axis)
    count = real.sum(dim=1).to(values.device)
    return total / count.view(-1, *[1] * (total.ndim - 1))
