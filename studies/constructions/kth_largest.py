"""The k-th largest number: what hard attention does in k layers, and does not do in one."""

from typing import Any

import torch

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import Count
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import VectorTransformer, zero_model
from infoflow_lens.studies.constructions.parameters import Beta, Limit
from infoflow_lens.studies.constructions.registry import construction
from infoflow_lens.tasks.single import KthLargest

_FAR = 4.0  # more than numbers in [-1, 1] differ


@construction("derived, beside InfoFlow 2026, Theorem 2")
def kth_largest(
    task: KthLargest,
    *,
    n_layers: Count | None = None,
    attention: Limit = "hardmax",
    beta: Beta = 1.0,
) -> VectorTransformer:
    """Hard attention that retrieves numbers one after another, a layer for each [derived].

    Coordinates: x in 0, 1 at CLS in 1, one-hot positions, the positions that CLS has seen, and a
    number for each layer. The head of CLS scores x(s), minus a large number at positions that were
    seen before, and writes down position and number; the last layer's is read. Tokens attend to
    themselves. Counted from the nearer end, min(k, T - k + 1) layers of one head are exact.

    What does not work: with fewer layers it gives the number of that rank, not of rank k. One layer
    reaches the largest and the smallest only, since a hard maximum of a monotone score is one of
    them; other ranks cost it eps^-((T-k+1)/(n+1) - 1) parameters (InfoFlow 2026, Theorem 2).

    Args:
        task: the task.
        n_layers: default, as many as are exact.
        attention: "hardmax"; "softmax" averages numbers that lie within about 1/beta.
        beta: factor on the scores.

    Raises:
        InfoFlowError: for fewer than 1 layer, or more than there are numbers; unbounded tokens; or
            ReLU attention.
    """
    if task.tokens == "normal":
        raise InfoFlowError(
            "tokens is 'normal': positions that were seen are told from others by a score that "
            "bounded numbers cannot reach; expected 'unit', 'uniform' or 'sphere'"
        )
    from_below = task.n_tokens - task.k + 1
    if n_layers is None:
        n_layers = min(task.k, from_below)
    if n_layers > task.n_tokens:
        raise InfoFlowError(f"n_layers is {n_layers}: expected 1 to {task.n_tokens}, one a number")
    sign = 1.0 if task.k <= from_below else -1.0
    t = task.n_tokens
    asks, places, seen, found = 1, 2, 2 + t, 2 + 2 * t
    model: Any = zero_model(
        Architecture(
            n_heads=(1,) * n_layers,
            d_head=(t + 1,) * n_layers,
            d_model=found + n_layers,
            d_token=1,
            n_tokens=t,
            d_mlp=0,
            positional_embedding="learned",
            attn_scale=beta,
            attention=attention,
        )
    )
    identity = torch.eye(t)
    with torch.no_grad():
        model.embed.W_E[0, 0] = 1
        model.embed.W_cls[:, asks] = 1
        model.pos_embed.W_pos[:t, places:seen] = identity
        for layer, block in enumerate(model.blocks):
            attn = block.attn
            attn.W_Q[0, asks, 0] = sign
            attn.W_K[0, 0, 0] = 1
            # a token has seen itself in every layer before, and still looks at itself
            attn.W_Q[0, places:seen, 1:] = (layer + 1) * _FAR * identity
            attn.W_Q[0, seen:found, 1:] = -_FAR * identity
            attn.W_K[0, places:seen, 1:] = identity
            attn.W_V[0, 0, 0] = 1
            # a number goes to its layer's coordinate, its position to those that are seen
            attn.W_O[0, 0, found + layer] = 1
            attn.W_V[0, places:seen, 1:] = identity
            attn.W_O[0, 1:, seen:found] = identity
        model.unembed.W_U[-1] = 1
    return model
