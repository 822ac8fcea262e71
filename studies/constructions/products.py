"""Feed-forward networks that multiply: x y = ((x + y)^2 - (x - y)^2) / 4 (Theorem 1, step 4)."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from infoflow_lens.foundation.settings import Positive, check

Product = Literal["tanh", "exact"]

# where tanh'' is largest, and its value there
_CENTRE = -math.atanh(1 / math.sqrt(3))
_CURVATURE = 4 / (3 * math.sqrt(3))
_FOURTH_DERIVATIVE = 4.0859  # the largest |tanh''''|, rounded up


@dataclass(frozen=True, eq=False)
class ProductUnits:
    """Hidden units whose outputs sum to an inner product x.y, for a two-layer network.

    Attributes:
        act_fn: "tanh" or "square".
        w_in: [d_model, unit], from the state to the units.
        b_in: [unit].
        w_out: [unit], from the units to the product.
        error: bound on |product - x.y| for |x|, |y| <= `radius` of :func:`product_units`.
    """

    act_fn: Literal["tanh", "square"]
    w_in: Float[Tensor, "d_model unit"]
    b_in: Float[Tensor, " unit"]
    w_out: Float[Tensor, " unit"]
    error: float


def product_units(
    x: Float[Tensor, "d_model d"],
    y: Float[Tensor, "d_model d"],
    kind: Product,
    eps: float = 0.0,
    radius: float = 1.0,
) -> ProductUnits:
    """Make units for sum_i (x_i . state) (y_i . state).

    "exact" takes the squares themselves, 2 units a coordinate. "tanh" takes z^2 from the second
    difference [tanh(b + h z) + tanh(b - h z) - 2 tanh(b)] / (h^2 tanh''(b)) at the b of largest
    curvature; the outer factor 1 / (4 h^2 tanh''(b)) is realised by that many copies with weights
    of size 1, so that all weights are at most 1 if those of x and y are. The width is 4 d copies,
    12 for d = 3, and width times error is bounded [derived].

    Args:
        x: one functional of the state for each coordinate.
        y: the other ones.
        kind: "tanh" or "exact".
        eps: the error that "tanh" may make.
        radius: bound on the norms of (x_i . state)_i and (y_i . state)_i, for the error.

    Raises:
        InfoFlowError: for an unknown kind, or "tanh" without a positive eps.
    """
    check(kind, Product, "ffn")
    sums = torch.cat([x + y, x - y], dim=1)
    signs = torch.cat([torch.ones(x.shape[1]), -torch.ones(y.shape[1])])
    if kind == "exact":
        return ProductUnits("square", sums, torch.zeros(len(signs)), signs / 4, 0.0)
    eps = check(eps, Positive, "eps")
    # sum_i [(x_i + y_i)^4 + (x_i - y_i)^4] <= 16 radius^4
    per_square = _FOURTH_DERIVATIVE / (12 * _CURVATURE) * 16 * radius**4 / 4
    copies = max(1, math.ceil(per_square / (4 * _CURVATURE * eps)))
    # h, such that 1 / (4 h^2 tanh''(b)) is the number of copies
    scale = 1 / math.sqrt(4 * _CURVATURE * copies)
    # the terms 2 tanh(b) cancel between x + y and x - y, and need no unit
    inner = scale * torch.cat([sums, -sums], dim=1)
    outer = torch.cat([signs, signs])
    return ProductUnits(
        "tanh",
        inner.repeat(1, copies),
        torch.full((copies * len(outer),), _CENTRE),
        outer.repeat(copies),
        per_square * scale**2,
    )
