"""Routes as functions of edges: what the paths between positions of all layers say of a state.

Edges are float [layer, batch, query, key], float32 on the CPU, at least 0 and 0 where there is
nothing to follow: patterns, or what is made of them. Asked places are int [batch, asked], -1 where
a sequence has none. Scores are [layer, batch, asked, position].
"""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infoflow_lens.theory.graded import Path, best_through

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


def within_one(pattern: Float[Tensor, "*batch query key"]) -> Float[Tensor, "*batch query key"]:
    """Weights as strengths: rows that sum to more than 1 (ReLU) are divided by their sum."""
    return pattern / pattern.sum(dim=-1, keepdim=True).clamp(min=1)


def rows_at(
    values: Float[Tensor, "*layer batch query key"], place: Places
) -> Float[Tensor, "*layer batch asked key"]:
    """The rows of these queries; anything where they are negative."""
    index = place.clamp(min=0)[..., None].to(values.device)
    return values.take_along_dim(index.expand(*values.shape[:-2], -1, -1), dim=-2)


def followed(edges: Edges, step: Callable[[Tensor, Tensor], Tensor], place: Places) -> Scores:
    """The asked rows of ``step(edges of a layer, paths below it)``, layer by layer."""
    paths, rows = edges[0], [rows_at(edges[0], place)]
    for weights in edges[1:]:
        paths = step(weights, paths)
        rows.append(rows_at(paths, place))
    return torch.stack(rows)


def rolled_out(edges: Edges, place: Places) -> Scores:
    """The sum over all paths of the products of their edges."""
    return followed(edges, torch.matmul, place)


def widest(edges: Edges, place: Places) -> Scores:
    """Of all paths the widest, each as wide as its narrowest edge."""
    return followed(edges, partial(best_through, path="weakest"), place)


def best_paths(edges: Edges, place: Places, path: Path) -> Scores:
    """Of all paths the best, where the residual connection is an edge of strength 1.

    Args:
        edges: strengths from 0 to 1, of each query and key the strongest head's.
        place: the asked states, of every layer.
        path: a path is as strong as the "product" of its edges, or as the "weakest" of them.
    """
    kept = edges.clone()
    kept.diagonal(dim1=2, dim2=3).fill_(1)
    return followed(kept, partial(best_through, path=path), place)


def best_onwards(
    edges: Edges, place: Places, path: Path, layer: int = -1
) -> Float[Tensor, "layer batch asked position"]:
    """The best path from every state of a model up to the asked states of one layer.

    Args:
        edges: strengths as of :func:`best_paths`.
        place: the positions of the asked states.
        path: as of :func:`best_paths`.
        layer: of the asked states.

    Returns:
        Entry [l, b, a, q] belongs to the state of position q behind layer l of sequence b. Layers
        above the asked one have 0, and so have states that a sequence does not have.
    """
    found = edges.new_zeros(len(edges), *place.shape, edges.shape[2])
    top = range(len(edges))[layer]
    exists = (place >= 0)[..., None].to(edges)
    found[top] = found[top].scatter(2, place.clamp(min=0)[..., None], exists)
    for below in range(top - 1, -1, -1):
        onwards = best_through(found[below + 1], edges[below + 1], path)
        found[below] = torch.maximum(found[below + 1], onwards)
    return found


def best_so_far(edges: Edges, n_sources: int, path: Path) -> Float[Tensor, "layer batch position"]:
    """The best path from any input token up to what enters each layer.

    1 for tokens, whose residual stream holds them. A position beyond the sources (CLS) holds
    nothing until a layer brings it something.
    """
    held = edges.new_zeros(*edges.shape[1:3])
    held[:, :n_sources] = 1
    found = [held]
    for weights in edges[:-1]:
        held = torch.maximum(held, best_through(weights, held[:, :, None], path)[..., 0])
        found.append(held)
    return torch.stack(found)
