"""Max-position retrieval by hand: a head for each retrieved token."""

from typing import Any

import torch

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import VectorTransformer, zero_model
from infoflow_lens.studies.constructions.parameters import Beta, Limit
from infoflow_lens.studies.constructions.products import product_units
from infoflow_lens.studies.constructions.registry import construction
from infoflow_lens.tasks.single import DRetrieval
from infoflow_lens.tasks.tuples import IntrinsicDimension

_FAR = 100.0  # below all scores of tokens, for positions outside a subset


@construction("Yu et al. 2026, Theorem 2 (1)")
def d_retrieval(
    task: DRetrieval, *, beta: Beta = 1000.0, attention: Limit = "softmax"
) -> VectorTransformer:
    """A layer of D heads that retrieves D tokens (Yu et al. 2026, Theorem 2 (1)).

    Coordinates: x in 0 .. d-1, 1 at CLS in d, the D retrieved values, and with subsets the one-hot
    positions. Head i of CLS scores a_i.x(s), minus a large number outside S_i, and writes the a_i.x
    that it finds; F0 is read off ("sum", "identity") or squared by the FFN ("square_sum"). One
    dimension a head is enough, two with subsets. The error of a value is at most
    W0((T - 1)/e) / beta.

    Args:
        task: with outer "sum", "identity" or "square_sum".
        beta: factor on the scores.
        attention: "softmax", or "hardmax" for its limit.

    Raises:
        InfoFlowError: for another outer function, which would need a trained network.
    """
    if task.outer not in ("sum", "identity", "square_sum"):
        raise InfoFlowError(
            f"outer is {task.outer!r}: expected 'sum', 'identity' or 'square_sum', which are "
            "linear or squares; others have no exact feed-forward network here"
        )
    d, n = task.d_token, task.n_components
    squares = task.outer == "square_sum"
    asks, values = d, d + 1
    squared = values + n
    places = squared + (n if squares else 0)
    model: Any = zero_model(
        Architecture(
            n_heads=(n,),
            d_head=(1 if task.subsets is None else 2,),
            d_model=places + (0 if task.subsets is None else task.n_tokens),
            d_token=d,
            n_tokens=task.n_tokens,
            d_mlp=n if squares else 0,
            d_output=task.d_output,
            act_fn="square",
            positional_embedding="none" if task.subsets is None else "learned",
            attn_scale=beta,
            attention=attention,
        )
    )
    (block,) = model.blocks
    with torch.no_grad():
        model.embed.W_E[:, :d] = torch.eye(d)
        model.embed.W_cls[:, asks] = 1
        for head, vector in enumerate(task.vectors):
            # CLS asks with 1, so that a token's score is its a_i.x, up to the sign of the extremum
            block.attn.W_Q[head, asks] = 1
            block.attn.W_K[head, :d, 0] = task.signs[head] * vector
            block.attn.W_V[head, :d, 0] = vector
            block.attn.W_O[head, 0, values + head] = 1
            if task.subsets is not None:
                outside = [t for t in range(task.n_tokens) if t not in task.subsets[head]]
                # the second dimension moves positions outside S_i below all scores
                block.attn.W_K[head, [places + t for t in outside], 1] = -_FAR
        if task.subsets is not None:
            model.pos_embed.W_pos[: task.n_tokens, places:] = torch.eye(task.n_tokens)
        read = values
        if squares:
            # the activation is x^2, so that squares are exact
            block.mlp.W_in[values:squared] = torch.eye(n)
            block.mlp.W_out[:, squared:places] = torch.eye(n)
            read = squared
        readout = torch.eye(n) if task.outer == "identity" else torch.ones(n, 1)
        model.unembed.W_U[read : read + n] = readout
    return model


@construction("InfoFlow 2026, Prop 1")
def intrinsic_dimension(
    task: IntrinsicDimension, *, beta: Beta = 1000.0, attention: Limit = "softmax"
) -> VectorTransformer:
    """Two layers of (D, D) heads for sum_i max x(s)^T A_i x(t) (InfoFlow 2026, Prop 1).

    Coordinates: x in 0 .. d-1, D retrieved tokens, D products, 1 at CLS, D results for each of D
    heads. Layer 1: head i of token t scores x(t)^T A_i x(s) and copies the best token. FFN:
    x(t)^T A_i x(s_i(t)), exactly, by 2 d D squares. Layer 2: head i of CLS looks for the largest
    i-th product and copies all products of that token; its own i-th is read. Error at most
    2 D W0((T - 1)/e) / beta.

    Args:
        task: the task.
        beta: factor on the scores of both layers.
        attention: "softmax", or "hardmax" for its limit.

    Raises:
        InfoFlowError: for beta <= 0, or ReLU attention.
    """
    d, n = task.d_token, task.n_components
    products = d + n * d
    asks, results = products + n, products + n + 1
    model: Any = zero_model(
        Architecture(
            n_heads=(n, n),
            d_head=(d, n),
            d_model=results + n * n,
            d_token=d,
            n_tokens=task.n_tokens,
            d_mlp=2 * d * n,
            act_fn="square",
            attn_scale=beta,
            attention=attention,
        )
    )
    first, second = model.blocks
    state = torch.eye(results + n * n)
    identity = torch.eye(d)
    with torch.no_grad():
        model.embed.W_E[:, :d] = identity
        model.embed.W_cls[:, asks] = 1
        for head, matrix in enumerate(task.matrices):
            copied = range(d + head * d, d + (head + 1) * d)
            # layer 1: the score x(t)^T A_i x(s), and a copy of x(s) beside x(t)
            first.attn.W_Q[head, :d] = matrix
            first.attn.W_K[head, :d] = identity
            first.attn.W_V[head, :d] = identity
            first.attn.W_O[head, :, list(copied)] = identity
            units = product_units(state[:, :d] @ matrix, state[:, list(copied)], "exact")
            hidden = range(head * 2 * d, (head + 1) * 2 * d)
            # x(t)^T A_i x(s) as a number, by squares of sums and differences
            first.mlp.W_in[:, list(hidden)] = units.w_in
            first.mlp.W_out[list(hidden), products + head] = units.w_out
            # layer 2: CLS looks for the largest i-th number, and copies all of that token
            second.attn.W_Q[head, asks, 0] = 1
            second.attn.W_K[head, products + head, 0] = 1
            second.attn.W_V[head, products:asks] = torch.eye(n)
            second.attn.W_O[head, :, results + n * head : results + n * (head + 1)] = torch.eye(n)
            model.unembed.W_U[results + n * head + head] = 1
    return model
