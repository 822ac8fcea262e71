"""Graded information sets, measured: the strength of the best path from a token to a state."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, TypeAlias, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import NonNegative, check
from infoflow_lens.hooks.interventions.heads import HeadLabels
from infoflow_lens.hooks.mechanisms.result import MechanismsResult
from infoflow_lens.hooks.model.points import layer_count
from infoflow_lens.hooks.passes.view import Needs, Pass
from infoflow_lens.hooks.routes.base import (
    Edges,
    Places,
    RoutesProbe,
    RoutesResult,
    Scores,
    within_one,
)
from infoflow_lens.hooks.routes.contributions import Parts, gap_in, needs_of_parts
from infoflow_lens.hooks.scores import StateScores
from infoflow_lens.theory.information_sets import GradedSets
from infoflow_lens.theory.propagation import BEST, Path, add_own, propagate_edges

Strength: TypeAlias = Literal["weight", "norm", "damage"]
ByHead: TypeAlias = tuple[tuple[NonNegative, ...], ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class GradedSetsResult(RoutesResult):
    """How strongly every state may hold every source: the strength of the best path to it.

    Attributes:
        scores: float [layer, batch, pos, source], from 0 to 1; the rest as in
            :class:`RoutesResult`.
    """

    def graded(self) -> GradedSets:
        """Return the same as graded sets, of all positions; 0 for one that was not asked for."""
        return GradedSets(self.full(), self.lengths, self.notes)


class GradedSetsProbe(RoutesProbe):
    """Scores [layer, batch, pos, source]: graded information sets.

    The information set of a state holds the tokens from which a path of attention edges leads to it
    (Yu, Jiang, Bao, Li 2026, Sec. 5.1), and in a deep model that is every token. Here each edge has
    a strength from 0 to 1, of several heads that of the strongest, and the residual connection 1.
    A token's score is the strength of its best path. It is not in the paper.

    The strengths of an edge from key j to query t:

    - "weight": the attention weight. Rows that sum to more than 1, as with ReLU attention, are
      divided by their sum.
    - "norm": the length of what the head brings from the key, the weight times the value times the
      output matrix (Kobayashi et al. 2020), over the length of what stood at t before, whose edge
      has 1; 1 where it is longer.
    - "damage": the weight times what the output loses without the head, over the largest such loss.
      A head that the output does not need moves nothing.

    Args:
        strength: of an edge.
        path: a path is as strong as the "product" of its edges, or as the "weakest" of them.
        damage: for "damage": the labels of heads (:func:`~infoflow_lens.hooks.label_heads`), or for
            every layer what the output loses without each head.
        positions: whose states; default all. Negative ones count from the end of each sequence.

    Raises:
        InfoFlowError: for unknown settings, a damage that is lacking, superfluous or of another
            number of heads, positions that no sequence has, or a model that does not show what it
            needs, saying what.
    """

    kind: ClassVar[type[StateScores]] = GradedSetsResult

    strength: Strength = "weight"
    path: Path = "product"
    _: KW_ONLY
    damage: HeadLabels | MechanismsResult | Sequence[Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given: Any = self.damage
        if (given is not None) != (self.strength == "damage"):
            raise InfoFlowError(
                f"strength is {self.strength!r} and damage is "
                f'{"None" if given is None else "given"}: expected damage for "damage" alone, '
                "such as damage=label_heads(model, texts)"
            )
        if isinstance(given, (HeadLabels, MechanismsResult)):
            given = given.lost()
        self.damage = None if given is None else check(given, ByHead, "damage")

    def needs(self, model: nn.Module) -> Needs:
        """Name patterns, and for norms what contributions need.

        Raises:
            InfoFlowError: if the model does not show them, or has other layers than the damage.
        """
        needs = super().needs(model)
        n_layers = layer_count(model)
        if self.damage is not None and len(self._damages()) != n_layers:
            raise InfoFlowError(
                f"damage is of {len(self._damages())} layers: expected {n_layers}, as many as the "
                "model has"
            )
        return needs | needs_of_parts(model) if self.strength == "norm" else needs

    def _damages(self) -> ByHead:
        return cast(ByHead, self.damage)

    def edges(self, seen: Pass, layer: int) -> Float[Tensor, "batch query key"]:
        """Return the strengths of the strongest heads."""
        if self.strength == "norm":
            parts = Parts.read(seen, layer)
            return parts.strengths().amax(dim=1).where(parts.add_up(seen, layer), torch.nan)
        pattern = within_one(seen.pattern(layer).float())
        if self.strength == "damage":
            lost = self._damages()[layer]
            if len(lost) != pattern.shape[1]:
                raise InfoFlowError(
                    f"damage of layer {layer} is of {len(lost)} heads: expected "
                    f"{pattern.shape[1]}, as many as the layer has"
                )
            most = max((one for heads in self._damages() for one in heads), default=0.0)
            # where no head is needed all strengths are 0
            share = torch.tensor(lost, device=pattern.device) / (most or 1.0)
            pattern = pattern * share[:, None, None]
        return pattern.amax(dim=1)

    def refusal(self, layer: int) -> str:
        """Say what is wrong with strengths that are negative or NaN."""
        if self.strength != "norm":
            return super().refusal(layer)
        return gap_in(layer)

    def follow(self, edges: Edges, place: Places) -> Scores:
        """Return the best path."""
        return propagate_edges(add_own(edges), BEST[self.path], queries=place)
