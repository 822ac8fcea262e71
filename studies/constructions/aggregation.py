"""Mechanisms II and III by hand: all positions, or fixed ones, aggregated by one head."""

from typing import Any

import torch

from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import VectorTransformer, zero_model
from infoflow_lens.studies.constructions.parameters import Beta
from infoflow_lens.studies.constructions.registry import construction
from infoflow_lens.tasks.single import GlobalMean, PositionSum


@construction("InfoFlow 2026, C.3")
def position_sum(task: PositionSum, *, beta: Beta = 40.0) -> VectorTransformer:
    """A layer of one head that attends to fixed positions alone (InfoFlow 2026, App. C.3).

    Coordinates: x in 0 .. d-1, a positional mark in d, 1 at CLS in d + 1, the result behind. CLS
    scores beta at the marked positions and 0 elsewhere, so its weights are 1/m on the m positions,
    up to e^-beta; the readout multiplies by m. There is no hard maximum of it: the m scores are
    equal.

    Args:
        task: the task.
        beta: score of the marked positions; weights elsewhere are about e^-beta.

    Raises:
        InfoFlowError: for beta <= 0.
    """
    d, mark = task.d_token, task.d_token
    model: Any = _one_head(d, task.n_tokens, beta, positions=True)
    with torch.no_grad():
        model.pos_embed.W_pos[list(task.positions), mark] = 1
        model.blocks[0].attn.W_Q[0, d + 1, 0] = 1
        model.blocks[0].attn.W_K[0, mark, 0] = 1
        model.unembed.W_U[d + 2 :] = len(task.positions) * torch.eye(d)
    return model


@construction("InfoFlow 2026, mechanism II")
def global_mean(task: GlobalMean) -> VectorTransformer:
    """A layer of one head without scores: the mean of all tokens (mechanism II)."""
    d = task.d_token
    model: Any = _one_head(d, task.n_tokens, 1.0, positions=False)
    with torch.no_grad():
        model.unembed.W_U[d + 2 :] = torch.eye(d)
    return model


def _one_head(d: int, n_tokens: int, beta: float, positions: bool) -> VectorTransformer:
    """Make a head that copies tokens to the last d coordinates, wherever it looks."""
    model: Any = zero_model(
        Architecture(
            n_heads=(1,),
            d_head=(d,),
            d_model=2 * d + 2,
            d_token=d,
            n_tokens=n_tokens,
            d_mlp=0,
            d_output=d,
            positional_embedding="learned" if positions else "none",
            attn_scale=beta,
        )
    )
    identity = torch.eye(d)
    with torch.no_grad():
        model.embed.W_E[:, :d] = identity
        model.embed.W_cls[:, d + 1] = 1
        model.blocks[0].attn.W_V[0, :d] = identity
        model.blocks[0].attn.W_O[0, :, d + 2 :] = identity
    return model
