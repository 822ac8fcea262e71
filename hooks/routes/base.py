"""What measures of routes share: edges between positions are read off a pass and followed."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.hooks.influence.rerun import start_point
from infoflow_lens.hooks.passes.view import Needs, Pass
from infoflow_lens.hooks.routes.paths import Edges, Places, Scores
from infoflow_lens.hooks.scores import StateScores, StateScoresProbe, mark_existing


@dataclass(frozen=True, eq=False, kw_only=True)
class RoutesResult(StateScores):
    """How much of every source each state holds, by a measure of routes.

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
    def follow(self, edges: Edges, place: Places) -> Scores:
        """The scores of all positions for the asked states of every layer."""

    def refusal(self, layer: int) -> str:
        """Say what is wrong with edges that are negative or NaN."""
        return (
            f"the pattern of layer {layer} has negative weights: expected none, as of softmax, "
            f"ReLU or a hard maximum; {type(self).__name__} cannot follow them"
        )

    def update(self, seen: Pass) -> Mapping[str, Any]:
        """Return the routes of a pass."""
        layers = range(seen.n_layers)
        n_source = seen.activation(start_point(seen.model, None)).shape[1]
        edges = torch.stack([self.edges(seen, layer) for layer in layers]).float().cpu()
        # NaN as well, for which no comparison holds, and which says that parts do not add up
        for layer in (~(edges >= 0)).flatten(1).any(dim=1).nonzero().flatten().tolist():
            raise InfoFlowError(self.refusal(layer))
        n_pos = edges.shape[2]
        lengths = seen.lengths_of(n_source)
        place = self.place(lengths + n_pos - n_source, n_pos)  # CLS has no source
        scores = self.follow(edges, place)[..., :n_source]
        scores = torch.where(mark_existing(place, lengths, n_source), scores, 0)
        return self.parts(scores, place, lengths, layers, n_pos)

    def compute(self) -> RoutesResult:
        """Join all batches."""
        return self.make_scores(RoutesResult)
