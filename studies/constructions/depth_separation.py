"""Theorem 1 of InfoFlow: two layers of one head find the closest pair on the sphere."""

from typing import Any

import torch

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import Positive
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import VectorTransformer, zero_model
from infoflow_lens.studies.bounds import softmin_gap
from infoflow_lens.studies.constructions.parameters import Beta, Limit
from infoflow_lens.studies.constructions.products import Product, ProductUnits, product_units
from infoflow_lens.studies.constructions.registry import construction
from infoflow_lens.tasks.task import Target
from infoflow_lens.tasks.tuples import DepthSeparation
from infoflow_lens.theory.comparison import Component


def _units(d: int, ffn: Product, eps: float) -> ProductUnits:
    """Make the first layer's FFN: x.v of a state (x / 3, v, a, 1/2), within eps / 54."""
    places = torch.eye(2 * d + 2)
    return product_units(places[:, :d], places[:, d : 2 * d], ffn, eps / 54, radius=1 / 3)


def ffn_error(task: DepthSeparation, *, eps: float = 0.1, ffn: Product = "tanh") -> float:
    """Bound on the error of the model's product, for `depth_separation_error`."""
    return _units(task.d_token, ffn, eps).error


@construction("InfoFlow 2026, Theorem 1")
def depth_separation(
    task: DepthSeparation,
    *,
    eps: Positive = 0.1,
    ffn: Product = "tanh",
    beta: Beta | None = None,
    attention: Limit = "softmax",
) -> VectorTransformer:
    """Two layers of one head within eps of min ||x(s) + x(t)||^2 (Theorem 1, upper bound).

    Coordinates: x / 3 in 0 .. d-1, v in d .. 2d-1, a in 2d, the constant 1/2 in 2d + 1. Layer 1:
    score -x(t).x(s)/9, so v(t) is the token nearest to -x(t), over 3. FFN: a(t) = x(t).v(t) / 3
    within eps / 54, by O(1/eps) tanh units with weights at most 1. Layer 2: CLS scores -a(t), so it
    holds the smallest a. Output 2 + 18 a. With beta = 54 W0((T - 1)/e) / eps each of the three
    errors is eps/3.

    Corrected or chosen: the 1/2 is a coordinate of the CLS state, not of the token; its -2 in W_Q^T
    W_K is a sum of two products of entries of size 1, so the second layer has d_head 2 [flag]; the
    output's 18 stands for 18 unit weights [flag]; a HookedTransformer adds its FFN to the residual
    stream, so a and 1/2 have coordinates of their own: d_model is 2d + 2 = 8, not the paper's 6
    [chosen].

    Args:
        task: with tokens on the sphere.
        eps: error to stay below, which fixes the width and beta.
        ffn: "tanh", or "exact" for a product by squares, 2d units.
        beta: factor on the scores in place of that from eps; see `depth_separation_error`.
        attention: "softmax", or "hardmax" for its limit.

    Raises:
        InfoFlowError: unless eps > 0, beta > 0 and tokens lie on the sphere; for ReLU attention;
            and for an eps that tanh units in float32 cannot keep (below about .004).
    """
    if task.tokens != "sphere":
        raise InfoFlowError(
            f"tokens is {task.tokens!r}: ||x + y||^2 is 2 + 2 x.y only for unit vectors; load the "
            "task with tokens='sphere'"
        )
    if beta is None:
        beta = max(1.0, 54 * softmin_gap(task.n_tokens, eps))
    d = task.d_token
    # units of the network that multiplies: exact, or of tanh
    units = _units(d, ffn, eps)
    rounding = 0 if ffn == "exact" else 18 * len(units.w_out) * torch.finfo(torch.float32).eps / 2
    if rounding > eps / 3:
        raise InfoFlowError(
            f"eps is {eps}: {len(units.w_out)} tanh units nearly cancel, and float32 rounds their "
            f"sum by up to {rounding:.1e}; expected a larger eps, or ffn='exact'"
        )
    # two dimensions behind the tokens: the product, and a constant
    product, half = 2 * d, 2 * d + 1
    model: Any = zero_model(
        Architecture(
            n_heads=(1, 1),
            d_head=(d, 2),
            d_model=2 * d + 2,
            d_token=d,
            n_tokens=task.n_tokens,
            d_mlp=len(units.w_out),
            act_fn=units.act_fn,
            attn_scale=beta,
            attention=attention,
        )
    )
    first, second = model.blocks
    identity = torch.eye(d)
    # layer 1 finds each token's nearest opposite, its network takes the product, layer 2 the least
    with torch.no_grad():
        model.embed.W_E[:, :d] = identity / 3
        first.attn.W_Q[0, :d] = -identity
        first.attn.W_K[0, :d] = identity
        first.attn.W_V[0, :d] = identity
        first.attn.W_O[0, :, d : 2 * d] = identity
        first.mlp.W_in.copy_(units.w_in)
        first.mlp.b_in.copy_(units.b_in)
        first.mlp.W_out[:, product] = units.w_out
        # a bias gives the constant to CLS, too, which asks by it in layer 2
        first.mlp.b_out[half] = 0.5
        # -1/2 in each of two dimensions, so that the score of a token is -a
        second.attn.W_Q[0, half] = -1
        second.attn.W_K[0, product] = 1
        second.attn.W_V[0, product, 0] = 1
        second.attn.W_O[0, 0, 0] = 1  # CLS has no token of its own: its x is free
        model.unembed.W_U[0] = 18
        model.unembed.b_U.fill_(2)
    return model


def depth_separation_on_cube(n_tokens: int) -> Target:
    """Theorem 1's target for tokens in [0, 1]^3, as its remark says there is one [chosen].

    ``min over s != t of ||x(s) + x(t) - (1, 1, 1)||^2``: the pair that is nearest to lying opposite
    about the centre. Positions differ, for a token near the centre would otherwise be its own pair.
    """

    def score(x: torch.Tensor) -> torch.Tensor:
        return (x.sum(dim=-2) - 1).square().sum(dim=-1)

    pair = Component(2, score, True, extremum="min", distinct=True)
    return Target(components=(pair,), n_tokens=n_tokens, d_token=3, tokens="unit",
                  name="depth_separation_on_cube")  # fmt: skip
