"""Attention as an answer: the weights of a layer, and attention rollout."""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infoflow_lens.hooks.passes.view import Pass
from infoflow_lens.hooks.routes.base import RoutesProbe, rolled_out, rows_at, with_residual

OverHeads = Literal["mean", "max"]


class OverHeadsProbe(RoutesProbe):
    """The base of measures that put the heads of a layer together first.

    Args:
        heads: "mean" of the heads' weights, or "max", the largest of them.
        positions: as for :class:`RoutesProbe`.

    Raises:
        InfoFlowError: for another way to put heads together.
    """

    heads: OverHeads = "mean"

    def over_heads(self, seen: Pass, layer: int) -> Float[Tensor, "batch query key"]:
        """The pattern of a layer, its heads put together."""
        pattern = seen.pattern(layer).float()
        return pattern.mean(dim=1) if self.heads == "mean" else pattern.amax(dim=1)


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

    def edges(self, seen: Pass, layer: int) -> Float[Tensor, "batch query key"]:
        """The weights."""
        return self.over_heads(seen, layer)

    def follow(
        self, edges: Sequence[Float[Tensor, "batch query key"]], place: Int[Tensor, "batch asked"]
    ) -> Float[Tensor, "layer batch asked position"]:
        """Each layer for itself."""
        return torch.stack([rows_at(weights, place) for weights in edges])


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

    def edges(self, seen: Pass, layer: int) -> Float[Tensor, "batch query key"]:
        """The weights, and the residual connection."""
        return with_residual(self.over_heads(seen, layer))

    def follow(
        self, edges: Sequence[Float[Tensor, "batch query key"]], place: Int[Tensor, "batch asked"]
    ) -> Float[Tensor, "layer batch asked position"]:
        """Products of matrices."""
        return rolled_out(edges, place)
