"""Gradient times input, for states, which have many features."""

from typing import ClassVar

import torch

from infoflow_lens.hooks.influence.base import (
    AskedStates,
    MeasuredInfluence,
    StateInfluence,
    StateName,
)
from infoflow_lens.hooks.influence.derivatives import differentiate_along
from infoflow_lens.hooks.influence.rerun import Rerun, rows_at_once, take_places


class GradientTimesInput(StateInfluence):
    """Influence [layer, batch, pos, source]: the norm of gradient x input, |J x_source|.

    The derivative of a state in the direction of the token's own vector: for every feature of the
    state the gradient by the token times the token, summed over the token's features. For a single
    output this is the gradient x input of Shrikumar et al. (2016), in absolute value; a state has
    many features, so their norm is taken. To first order it is how far the state moves for each
    share of the token that is taken away. Like :class:`JacobianInfluence` it is a derivative, so it
    is no independent witness beside one; it takes one derivative a token in place of one a feature.

    For models over token ids the input is what enters the first block, the embedding with its
    position; with `source_layer`, what enters that layer.

    Its passes are its own; see :class:`StateInfluence`.

    Args:
        state: "post_attention" (x'_l of eq 1) or "resid_post".
        source_layer: None for the tokens; l for ``resid_pre`` of layer l, and then layers from l.
        chunk_size: sources per pass; default, by the sizes of the model and the batch.
        through_hooks: differentiate through hooks of yours.
        layers: whose states; default all that the sources reach.
        positions: whose states; default all. Negative ones count from the end of each sequence.

    Raises:
        InfoFlowError: for an unknown state, layer or position, a model whose forward pass cannot be
            repeated from its hooks, or one of which a part has no derivatives.
    """

    differentiates: ClassVar[bool] = True

    state: StateName = "post_attention"

    def _measure(self, rerun: Rerun, states: AskedStates) -> MeasuredInfluence:
        start, expected, place = states
        n_source = start.shape[1]
        self._check_rerun(rerun.layers, rerun(start), expected, rerun.real)
        rows = rows_at_once(rerun.model, expected[0].shape[1], expected[0].shape[2], start.device)
        chunk = self.chunk_size or max(1, rows // len(start))
        shape = (len(expected), len(start), place.shape[1], n_source)
        found = torch.zeros(shape, dtype=torch.float32)
        alone = torch.eye(n_source, dtype=torch.bool, device=start.device)
        for sources in torch.arange(n_source).split(chunk):
            directions = start[None] * alone[sources][:, None, :, None]
            moved = differentiate_along(rerun, start, directions)
            for layer, change in enumerate(moved):  # [source, batch, pos, d_model]
                norms = change.float().norm(dim=-1).permute(1, 2, 0)
                found[layer, :, :, sources] = take_places(norms, place).cpu()
        return found, {}
