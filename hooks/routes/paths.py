"""Edges between positions of all layers, made of patterns; `propagate_edges` follows them.

Edges are float [layer, batch, query, key], float32 on the CPU, at least 0 and 0 where there is
nothing to follow: patterns, or what is made of them. Asked places are int [batch, asked], -1 where
a sequence has none. Scores are [layer, batch, asked, position].
"""

from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

Edges: TypeAlias = Float[Tensor, "layer batch query key"]
Places: TypeAlias = Int[Tensor, "batch asked"]
Scores: TypeAlias = Float[Tensor, "layer batch asked position"]


def add_residual(pattern: Float[Tensor, "*batch query key"]) -> Float[Tensor, "*batch query key"]:
    """Add the residual connection, W + I with rows that sum to 1: it weighs as much as a row.

    For rows that sum to 1 this is 0.5 W + 0.5 I (Abnar & Zuidema 2020, Sec. 3). Rows that sum to
    something else (ReLU, sinks, a query without keys) keep that proportion to the residual.
    """
    weights = pattern + torch.eye(pattern.shape[-1], device=pattern.device)
    return weights / weights.sum(dim=-1, keepdim=True)


def within_one(pattern: Float[Tensor, "*batch query key"]) -> Float[Tensor, "*batch query key"]:
    """Weights as strengths: rows that sum to more than 1 (ReLU) are divided by their sum."""
    return pattern / pattern.sum(dim=-1, keepdim=True).clamp(min=1)
