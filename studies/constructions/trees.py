"""The best tuple of a score whose graph is a tree, by messages (beyond the papers)."""

from typing import Any

import torch

from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import VectorTransformer, zero_model
from infoflow_lens.studies.constructions.parameters import Beta, Limit
from infoflow_lens.studies.constructions.products import product_units
from infoflow_lens.studies.constructions.registry import construction
from infoflow_lens.tasks.tuples import BestTree


@construction("beyond the papers; against InfoFlow 2026, Prop 2")
def best_tree(
    task: BestTree, *, beta: Beta = 1000.0, attention: Limit = "softmax"
) -> VectorTransformer:
    """A head for each edge and one layer more than the tree is high, for any T.

    The root is a place in the middle. Coordinates: x in 0 .. d-1, the constant 1, and for each
    place v but the root with parent u: A' x_v (d numbers), what the places below v add (one), and
    x_u'A' x_v (one). Layer by layer from the leaves, a head of token t, as the candidate for u,
    scores token s as the candidate for v by x_t'A' x_s + the sum of the messages that s holds, and
    copies A' x_s and that sum. FFN: the product, exactly, by 2 d squares. Token t then holds the
    message of v, the product and the sum. CLS reads the best token for the root. Each of the a
    softmaxes loses between 0 and W0((T - 1)/e) / beta, losses add, and so the error is at most
    ``a W0((T - 1)/e) / beta``.

    Args:
        task: the task.
        beta: factor on the scores of all layers.
        attention: "softmax", or "hardmax" for its limit.

    Raises:
        InfoFlowError: for beta <= 0, or ReLU attention.
    """
    d, graph = task.d_token, task.graph
    matrices = dict(zip(task.edges, task.matrices, strict=True))
    # a root may turn an edge round
    matrices |= {(j, i): a.T for (i, j), a in matrices.items()}

    def order(place: int, parent: int | None) -> tuple[int, list[tuple[int, int, int]]]:
        """Return the height of a place, and (height, place, parent) of those below it."""
        below = [order(child, place) for child in graph.neighbours(place) if child != parent]
        height = max([1 + high for high, _ in below], default=0)
        own = [] if parent is None else [(height, place, parent)]
        return height, [edge for _, found in below for edge in found] + own

    # a root in the middle of the tree takes the fewest layers
    _, root = min((order(place, None)[0], place) for place in range(task.arity))
    height, edges = order(root, None)
    one, size = d, d + 2
    # d + 2 coordinates for each place but the root: A' x, the sum below it, the product
    places = {place: d + 1 + size * number for number, (_, place, _) in enumerate(edges)}
    result = d + 1 + size * len(edges)
    # a place's height is the first layer that finds all messages below it
    heads = [[edge for edge in edges if edge[0] == layer] for layer in range(height)]
    model: Any = zero_model(
        Architecture(
            n_heads=(*map(len, heads), 1),
            d_head=(d + 1,) * (height + 1),
            d_model=result + 1,
            d_token=d,
            n_tokens=task.n_tokens,
            d_mlp=2 * d * max(map(len, heads)),
            act_fn="square",
            attn_scale=beta,
            attention=attention,
        )
    )
    state, identity = torch.eye(result + 1), torch.eye(d)

    def messages(place: int, parent: int | None) -> list[int]:
        """Return the coordinates that add up to the messages that a candidate for a place holds."""
        held = [places[child] + d for child in graph.neighbours(place) if child != parent]
        return [coordinate for first in held for coordinate in (first, first + 1)]

    with torch.no_grad():
        model.embed.W_E[:, :d] = identity
        # the last block is that of CLS, and has no edge
        for block, edges_here in zip(model.blocks, heads, strict=False):
            for head, (_, place, parent) in enumerate(edges_here):
                to = places[place]
                # the score of the edge, plus the messages that the candidate holds already
                block.attn.W_Q[head, :d, :d] = identity
                block.attn.W_K[head, :d, :d] = matrices[parent, place].T
                block.attn.W_Q[head, one, d] = 1
                block.attn.W_K[head, messages(place, parent), d] = 1
                block.attn.W_V[head] = block.attn.W_K[head]
                block.attn.W_O[head, :, to : to + d + 1] = torch.eye(d + 1)
                # what the head wrote times the token itself: the edge's part of the message
                units = product_units(state[:, :d], state[:, to : to + d], "exact")
                hidden = range(head * 2 * d, (head + 1) * 2 * d)
                block.mlp.W_in[:, list(hidden)] = units.w_in
                block.mlp.W_out[list(hidden), to + d + 1] = units.w_out
        # in layer 0 there is no message to add, so the constant may come behind it
        model.blocks[0].mlp.b_out[one] = 1
        last = model.blocks[-1].attn
        # CLS takes the best candidate for the root, and reads the sum of its messages
        last.W_Q[0, one, 0] = 1
        last.W_K[0, messages(root, None), 0] = 1
        last.W_V[0] = last.W_K[0]
        last.W_O[0, 0, result] = 1
        model.unembed.W_U[result] = 1
    return model
