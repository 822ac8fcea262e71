"""Routes as functions of edges: what the paths between positions of all layers say of a state.

Edges are float [layer, batch, query, key], float32 on the CPU, at least 0 and 0 where there is
nothing to follow: patterns, or what is made of them. Asked places are int [batch, asked], -1 where
a sequence has none. Scores are [layer, batch, asked, position].
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

Edges: TypeAlias = Float[Tensor, "layer batch query key"]
Places: TypeAlias = Int[Tensor, "batch asked"]
Scores: TypeAlias = Float[Tensor, "layer batch asked position"]


def with_residual(pattern: Float[Tensor, "*batch query key"]) -> Float[Tensor, "*batch query key"]:
    """(W + I) with rows that sum to 1: the residual connection weighs as much as a whole row.

    For rows that sum to 1 this is 0.5 W + 0.5 I (Abnar & Zuidema 2020, Sec. 3). Rows that sum to
    something else (ReLU, sinks, a query without keys) keep that proportion to the residual.
    """
    weights = pattern + torch.eye(pattern.shape[-1], device=pattern.device)
    return weights / weights.sum(dim=-1, keepdim=True)


def rows_at(
    values: Float[Tensor, "*layer batch query key"], place: Places
) -> Float[Tensor, "*layer batch asked key"]:
    """The rows of these queries; anything where they are negative."""
    index = place.clamp(min=0)[..., None].to(values.device)
    return values.take_along_dim(index.expand(*values.shape[:-2], -1, -1), dim=-2)


def followed(edges: Edges, step: Callable[[Tensor, Tensor], Tensor], place: Places) -> Scores:
    """The asked rows of ``step(edges of a layer, paths below it)``, layer by layer."""
    paths = [edges[0]]
    for weights in edges[1:]:
        paths.append(step(weights, paths[-1]))
    return rows_at(torch.stack(paths), place)


def rolled_out(edges: Edges, place: Places) -> Scores:
    """The sum over all paths of the products of their edges."""
    return followed(edges, torch.matmul, place)


def widest(edges: Edges, place: Places) -> Scores:
    """Of all paths the widest, each as wide as its narrowest edge."""
    return followed(edges, _through_any, place)


def _through_any(
    above: Float[Tensor, "batch query middle"], below: Float[Tensor, "batch middle key"]
) -> Float[Tensor, "batch query key"]:
    """The widest of the paths through all middle positions."""
    found = torch.zeros_like(below[:, :1]).expand(-1, above.shape[1], -1)
    for middle in range(above.shape[2]):
        through = torch.minimum(above[:, :, middle, None], below[:, None, middle])
        found = torch.maximum(found, through)
    return found
