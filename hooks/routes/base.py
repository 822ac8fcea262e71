"""What measures of routes share: they follow a graph of edges between positions, layer by layer."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.hooks.influence.rerun import start_point
from infoflow_lens.hooks.passes.view import Needs, Pass
from infoflow_lens.hooks.scores import StateScores, StateScoresProbe, existing


@dataclass(frozen=True, eq=False, kw_only=True)
class RoutesResult(StateScores):
    """How much of every source a measure of routes says that every state holds.

    Attributes:
        scores: float [layer, batch, pos, source], at least 0; which measure it is stands in
            ``record.config["probe"]``. With chosen positions the axis `pos` holds these only. 0
            where a sequence has no such state or source.
    """

    column: ClassVar[str] = "scores"

    scores: Float[Tensor, "layer batch pos source"]


class RoutesProbe(StateScoresProbe[RoutesResult]):
    """The base of measures that follow edges between positions from layer to layer.

    Edges come from one pass of the model, which is shared with other probes; none is run again.
    Between attention layers every position keeps to itself, as MLPs and norms do, so the scores are
    the same for the post-attention state of a layer and for what leaves it. Sources are the tokens,
    with their positions.

    Args:
        positions: whose states; default all. Negative ones count from the end of each sequence, so
            (-1,) is the last token, or CLS.
    """

    def needs(self, model: nn.Module) -> Needs:
        """Patterns, and the sources, which are counted.

        Raises:
            InfoFlowError: if the model does not show its patterns.
        """
        self.check_positions(model)
        return Needs.of(model, pattern=True, points=[start_point(model, None)])

    @abstractmethod
    def edges(self, seen: Pass, layer: int) -> Float[Tensor, "batch query key"]:
        """The weights of the edges into a layer's states, at least 0, of all positions."""

    @abstractmethod
    def follow(
        self, edges: Sequence[Float[Tensor, "batch query key"]], place: Int[Tensor, "batch asked"]
    ) -> Float[Tensor, "layer batch asked position"]:
        """The scores of all positions for the asked states of every layer.

        Args:
            edges: for every layer, on the CPU, float32, 0 where there is nothing to follow.
            place: the asked positions, -1 where a sequence has none.
        """

    def update(self, seen: Pass) -> Mapping[str, Any]:
        """The routes of a pass."""
        layers = range(seen.n_layers)
        n_pos = seen.pattern(0).shape[2]
        n_source = seen.activation(start_point(seen.model, None)).shape[1]
        edges = [self.edges(seen, layer).float().cpu() for layer in layers]
        for layer, weights in enumerate(edges):
            if (weights < 0).any():
                raise InfoFlowError(
                    f"the pattern of layer {layer} has negative weights: expected none, as of "
                    f"softmax, ReLU or a hard maximum; {type(self).__name__} cannot follow them"
                )
        lengths = torch.full((len(seen),), n_source) if seen.lengths is None else seen.lengths
        place = self.place(lengths + n_pos - n_source, n_pos)  # CLS has no source
        scores = self.follow(edges, place)[..., :n_source]
        scores = torch.where(existing(place, lengths, n_source), scores, 0)
        return self.parts(scores, place, lengths, layers, n_pos)

    def compute(self) -> RoutesResult:
        """All batches together."""
        return self.scored_by(RoutesResult)


def with_residual(
    pattern: Float[Tensor, "batch query key"],
) -> Float[Tensor, "batch query key"]:
    """(W + I) with rows that sum to 1: the residual connection weighs as much as a whole row.

    For rows that sum to 1 this is 0.5 W + 0.5 I (Abnar & Zuidema 2020, Sec. 3). Rows that sum to
    something else (ReLU, sinks, a query without keys) keep that proportion to the residual.
    """
    weights = pattern + torch.eye(pattern.shape[-1], device=pattern.device)
    return weights / weights.sum(dim=-1, keepdim=True)


def rolled_out(
    edges: Sequence[Float[Tensor, "batch query key"]], place: Int[Tensor, "batch asked"]
) -> Float[Tensor, "layer batch asked position"]:
    """For every layer the asked rows of the product of its edges with those below it."""
    scores, product = [], None
    for weights in edges:
        product = weights if product is None else weights @ product
        scores.append(rows_at(product, place))
    return torch.stack(scores)


def rows_at(
    values: Float[Tensor, "batch query key"], place: Int[Tensor, "batch asked"]
) -> Float[Tensor, "batch asked key"]:
    """The rows of these queries; anything where they are negative."""
    index = place.clamp(min=0)[:, :, None].to(values.device)
    return values.gather(1, index.expand(-1, -1, values.shape[2]))
