"""Attention as an answer: the weights of a layer, and attention rollout."""

from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from infoflow_lens.hooks.passes.view import Pass
from infoflow_lens.hooks.routes.base import RoutesProbe
from infoflow_lens.hooks.routes.paths import Edges, Places, Scores, add_residual
from infoflow_lens.theory.propagation import propagate_edges, rows_at

OverHeads = Literal["mean", "max"]


class OverHeadsProbe(RoutesProbe):
    """The base of measures that put the heads of a layer together first.

    Args:
        heads: "mean" of the heads' weights, or "max", the largest of them.
        positions: as for :class:`RoutesProbe`.

    Raises:
        InfoFlowError: for another way to put heads together.
    """

    residual: ClassVar[bool] = True  # whether the residual connection is an edge

    heads: OverHeads = "mean"

    def edges(self, seen: Pass, layer: int) -> Float[Tensor, "batch query key"]:
        """Return the pattern of a layer, its heads put together."""
        pattern = seen.pattern(layer).float()
        weights = pattern.mean(dim=1) if self.heads == "mean" else pattern.amax(dim=1)
        return add_residual(weights) if self.residual else weights


class AttentionWeight(OverHeadsProbe):
    """Scores [layer, batch, pos, source]: the attention weights of that layer alone.

    The mean over heads of the pattern, "raw attention" in Abnar & Zuidema (2020). It knows neither
    the layers below nor the residual connection: the key's position stands for the token that
    entered there. Rows of a softmax sum to 1.

    Args:
        heads: "mean" of the heads' weights, or "max", the largest of them.
        positions: whose states; default all. Negative ones count from the end of each sequence.

    Raises:
        InfoFlowError: for another way to put heads together, positions that no sequence has, or a
            model that does not show its patterns.
    """

    residual = False

    def follow(self, edges: Edges, place: Places) -> Scores:
        """Return each layer for itself."""
        return rows_at(edges, place)


class AttentionRollout(OverHeadsProbe):
    """Scores [layer, batch, pos, source]: attention rollout (Abnar & Zuidema 2020, Sec. 3, eq 1).

    With A_l = 0.5 W_l + 0.5 I, where W_l is the mean pattern of the heads, the scores of layer l
    are the rows of A_l A_{l-1} .. A_0: attention weights as shares of what is mixed, and the
    residual connection as one half. Where the rows of W_l do not sum to 1, (W_l + I) is divided by
    its row sums. Rows sum to 1; what CLS keeps of itself is no source and is left out.

    MLPs, values, output matrices and norms are left out.

    Args:
        heads: "mean" of the heads' weights, or "max", the largest of them.
        positions: whose states; default all. Negative ones count from the end of each sequence.

    Raises:
        InfoFlowError: for another way to put heads together, positions that no sequence has, or a
            model that does not show its patterns.
    """

    def follow(self, edges: Edges, place: Places) -> Scores:
        """Return the sum over all paths."""
        return propagate_edges(edges, "sum-product", queries=place)
