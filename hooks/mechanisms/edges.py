"""Which edges of attention matter? A score for every edge, by several methods.

An edge (layer, head, query, key) is one weight of one pattern. A path leads from a token to a
state: in each layer it goes by an edge from key to query, or stays by the residual connection.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.hooks.interventions.damage import Damage, NextTokenLoss
from infoflow_lens.hooks.interventions.estimate import (
    differentiate,
    draw_directions,
    run_with_leaves,
)
from infoflow_lens.hooks.model.inputs import Batch, Batches
from infoflow_lens.hooks.passes.run import run
from infoflow_lens.hooks.passes.view import Needs, Pass
from infoflow_lens.hooks.routes.contributions import Parts, gap_in, needs_of_parts, within_one
from infoflow_lens.theory.propagation import BEST, Path, Semiring, add_own, propagate_back

EdgeMethod = Literal[
    "product",
    "weakest",
    "product x norm",
    "rollout",
    "contributions",
    "attention weight",
    "weight x norm",
    "gradient",
    "gradient x change",
    "another window",
    "chance",
]
EDGE_METHODS: tuple[EdgeMethod, ...] = get_args(EdgeMethod)
CHANCE: EdgeMethod = "chance"
_OF_PARTS = ("product x norm", "contributions", "weight x norm")
_DRAWS = 8  # directions in which the divergence is differentiated
_TEMPERATURE = 1.5  # flattens it: F of a sure distribution hardly sees what overturns the choice

Scores: TypeAlias = list[Float[Tensor, "batch head query key"]]  # one tensor a layer
Open: TypeAlias = list[Bool[Tensor, "batch query key"]]
Judge: TypeAlias = NextTokenLoss | Damage


def methods_of(model: nn.Module) -> tuple[EdgeMethod, ...]:
    """List the methods that a model can give: without those by values where they do not add up."""
    try:
        needs_of_parts(model)
    except InfoFlowError:
        return tuple(method for method in EDGE_METHODS if method not in _OF_PARTS)
    return EDGE_METHODS


def open_edges(seen: Pass, states: Bool[Tensor, "batch pos"]) -> Open:
    """Mark the edges on paths to any of these states of the last layer that leave a choice.

    Where a query sees one key its row says nothing: the edge has the weight that it has anyway.
    """
    reached = states
    found: Open = []
    for layer in reversed(range(seen.n_layers)):
        visible = seen.visible(layer).cpu()
        keys = visible & reached[:, :, None]
        reached = reached | keys.any(dim=1)
        found.insert(0, keys & (visible.sum(dim=2, keepdim=True) > 1))
    return found


def rank_edges(
    scores: Scores, edges: Open, seeds: Sequence[int]
) -> tuple[list[Int[Tensor, "batch head query key"]], Int[Tensor, " batch"]]:
    """Return the place of each open edge in the order of falling scores, equal ones at random.

    Args:
        scores: of all edges.
        edges: which are open.
        seeds: of the order of equal scores, one for each sequence.

    Returns:
        The places from 0, -1 for edges that are not open; and the number of open edges.
    """
    places = [torch.full(score.shape, -1, dtype=torch.int32) for score in scores]
    counts = []
    for index, seed in enumerate(seeds):
        masks = [e[index].expand(s.shape[1:]) for s, e in zip(scores, edges, strict=True)]
        values = torch.cat([s[index][mask] for s, mask in zip(scores, masks, strict=True)])
        generator = torch.Generator().manual_seed(seed)
        # shuffled first: a stable sort then leaves equal scores in random order
        shuffled = torch.randperm(len(values), generator=generator)
        order = shuffled[values[shuffled].argsort(descending=True, stable=True)]
        rank = torch.empty(len(values), dtype=torch.int32)
        rank[order] = torch.arange(len(values), dtype=torch.int32)
        sizes = [int(mask.sum()) for mask in masks]
        for layer, (mask, part) in enumerate(zip(masks, rank.split(sizes), strict=True)):
            places[layer][index][mask] = part
        counts.append(len(values))
    return places, torch.tensor(counts)


@dataclass(frozen=True)
class EdgeScores:
    """Scores of the edges of some sequences, each method's when it is asked for.

    Attributes:
        plain: their pass as it is, with scores and patterns.
        judge: what the edited model is measured by; gradients are of it.
        means: for each layer the mean patterns.
        others: the sequences of which "another window" takes one each, in turn.
        seed: of the directions of gradients.
    """

    plain: Pass
    judge: Judge
    means: Sequence[Float[Tensor, "_head query key"]]
    others: Batches
    seed: int

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.plain.model

    @property
    def batch(self) -> Batch:
        """The sequences."""
        assert self.plain.batch is not None
        return self.plain.batch

    @cached_property
    def states(self) -> Bool[Tensor, "batch pos"]:
        """Mark the states of the last layer that are read."""
        return self.judge.states(self.batch)

    @cached_property
    def edges(self) -> Open:
        """The edges on paths to the states that are read."""
        return open_edges(self.plain, self.states)

    def compute(self, method: EdgeMethod) -> Scores:
        """Return the scores of all edges, at least 0; those of edges that are not open say nothing.

        For the methods by paths a score is the sum over the states that are read of what the paths
        to this state through the edge say:

        - "product": the strength of the best of them, the product of its attention weights, a
          residual connection counting 1. "weakest": its smallest weight. "product x norm": the
          product of the lengths that edges move. These are the strengths of graded sets (see
          :class:`~infoflow_lens.hooks.GradedSetsProbe`).
        - "rollout": the sum over paths of products, as attention rollout has it: half of each step
          is the residual connection, half the mean over heads.
        - "contributions": the same with the importances of contribution routes.
        - "attention weight", "weight x norm": of the edge alone, whatever lies above.
        - "gradient": the size of gradient x weight, of the loss; for the divergence, whose gradient
          is 0, the root of its second-order form (see `estimate`). It sees what is measured.
          "gradient x change": with the change of the weight to its mean in place of the weight.
        - "another window": "product" in another sequence, which knows positions alone.
        - "chance": all alike.
        """
        patterns = self._patterns
        if method == "chance":
            return [torch.zeros_like(pattern) for pattern in patterns]
        if method == "attention weight":
            return patterns
        if method in ("product", "weakest"):
            return sum_best_paths([within_one(p) for p in patterns], self.states, method)
        if method == "weight x norm":
            return self._norms()
        if method == "product x norm":
            return sum_best_paths(self._norms(), self.states, "product")
        if method == "rollout":
            shares = [p / p.shape[1] for p in patterns]
            # of a row of the mean over heads and the residual connection, which weighs 1
            totals = [1 + share.sum(dim=(1, 3)) for share in shares]
            own = [1 / total for total in totals]
            parts = [s / t[:, None, :, None] for s, t in zip(shares, totals, strict=True)]
            return sum_all_paths(parts, own, self.states)
        if method == "contributions":
            found = [part.shares() for part in self._parts()]
            return sum_all_paths(
                [p.cpu() for p, _ in found], [o.cpu() for _, o in found], self.states
            )
        if method == "another window":
            return self._score_others()
        return self._score_gradients(change=method == "gradient x change")

    @cached_property
    def _patterns(self) -> Scores:
        return [self.plain.pattern(i).float().cpu() for i in range(self.plain.n_layers)]

    def _parts(self) -> list[Parts]:
        """Find what heads bring, in every layer.

        Raises:
            InfoFlowError: if it does not add up to what attention adds.
        """
        needs = Needs.of(self.model, scores=True, pattern=True) | needs_of_parts(self.model)
        # a pass of its own, as the plain one shows no values
        seen, found = run(self.model, self.batch, needs), []
        for layer in range(seen.n_layers):
            parts = Parts.read(seen, layer)
            if not parts.add_up(seen, layer):
                raise InfoFlowError(gap_in(layer))
            found.append(parts)
        return found

    def _norms(self) -> Scores:
        return [part.strengths().cpu() for part in self._parts()]

    def _score_others(self) -> Scores:
        found = [torch.zeros_like(pattern) for pattern in self._patterns]
        sequences = self.others.sequences()
        lengths = self.plain.lengths_of(self.states.shape[1]).tolist()
        for index, number in enumerate(self.plain.indices.tolist()):
            # by the number of the sequence and as long, so that it is the same whatever the batch
            other = sequences[number % len(sequences)][None, : lengths[index]]
            seen = run(self.model, other, Needs.of(self.model, pattern=True))
            patterns = [seen.pattern(i).float().cpu() for i in range(seen.n_layers)]
            length = other.shape[1]
            states = self.states[index : index + 1, :length]
            scores = sum_best_paths([within_one(p) for p in patterns], states, "product")
            for layer, part in enumerate(scores):
                found[layer][index, :, :length, :length] = part[0]
        return found

    def _score_gradients(self, change: bool) -> Scores:
        moves = self._patterns
        if change:
            n_pos = moves[0].shape[-1]
            means = [mean[:, :n_pos, :n_pos].float().cpu() for mean in self.means]
            moves = [p - mean for p, mean in zip(moves, means, strict=True)]
        batch, judge = self.batch, self.judge
        with run_with_leaves(self.model, batch, range(len(moves))) as (output, leaves):
            if isinstance(judge, NextTokenLoss):
                total = judge.lost(output, batch).sum()
                return [
                    _size(g, m) for g, m in zip(differentiate(total, leaves), moves, strict=True)
                ]
            rows = judge.rows(output, batch)
            seeds = [derive_seed("edges", self.seed, i) for i in self.plain.indices.tolist()]
            squares = [torch.zeros_like(move) for move in moves]
            for towards in draw_directions(
                rows.detach(), judge, batch, _DRAWS, seeds, _TEMPERATURE
            ):
                found = differentiate(rows, leaves, towards)
                for square, gradient, move in zip(squares, found, moves, strict=True):
                    square += _size(gradient, move).square()
            return [(square / _DRAWS).sqrt() for square in squares]


def _size(gradient: Tensor | None, move: Tensor) -> Tensor:
    """Return the size of gradient x move, shaped as a pattern without the padding at its end."""
    if gradient is None:
        return torch.zeros_like(move)
    n_query, n_key = move.shape[-2:]
    return (gradient[..., :n_query, :n_key].float().cpu() * move).abs()


def sum_over_paths(
    parts: Scores,
    edges: Sequence[Float[Tensor, "batch query key"]],
    states: Bool[Tensor, "batch pos"],
    semiring: Semiring,
) -> Scores:
    """Sum over the states what all paths through each edge to each of them come to.

    From below to an edge's key the paths come to 1: the shares into a state sum to 1, and of best
    paths a residual connection weakens nothing.

    Args:
        parts: the strengths of the edges of heads.
        edges: those between positions, with the residual connections.
        states: those of the last layer that are read.
        semiring: how edges make a path, and paths a whole.
    """
    place = torch.where(states, torch.arange(states.shape[1]), -1)
    found: Scores = []
    every = propagate_back(torch.stack(list(edges)), semiring, queries=place)
    for part, onwards in zip(parts, every, strict=True):
        if semiring == "max-min":
            each = (torch.minimum(part, to[:, None, :, None]) for to in onwards.unbind(dim=1))
            found.append(sum(each, torch.zeros_like(part)))
        else:
            found.append(part * onwards.sum(dim=1)[:, None, :, None])
    return found


def sum_best_paths(strengths: Scores, states: Bool[Tensor, "batch pos"], path: Path) -> Scores:
    """Sum over the states the best path through each edge, by the product or the weakest edge."""
    edges = [add_own(part.amax(dim=1)) for part in strengths]
    return sum_over_paths(strengths, edges, states, BEST[path])


def sum_all_paths(
    parts: Scores, own: Sequence[Float[Tensor, "batch query"]], states: Bool[Tensor, "batch pos"]
) -> Scores:
    """Sum over the states all paths through each edge, with shares of the residual connections."""
    edges = [p.sum(dim=1) + o.diag_embed() for p, o in zip(parts, own, strict=True)]
    return sum_over_paths(parts, edges, states, "sum-product")
