"""Attention without softmax: ReLU (Chen & Zou 2024, eq 2) and hard maximum.

It is for hosted models and for any HookedTransformer. Both kinds are hook points of the model's
own, so `reset_hooks` leaves them alone, gradients flow through them, and caches show the pattern
that is used. They take the scores as every hook on ``hook_attn_scores`` has left them: an edit of
the scores counts, whenever it was registered. (A permanent hook that captures the scores would miss
the edits of later hooks.)
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import checked
from infoflow_lens.models.architecture import AttentionKind


def hardmax_pattern(
    scores: Float[Tensor, "batch head query key"],
) -> Float[Tensor, "batch head query key"]:
    """Put 1 at the largest score's key, the lowest of equals; 0 in rows without allowed keys.

    Its derivative by the scores is 0 wherever it has one.
    """
    keys = torch.arange(scores.shape[-1], device=scores.device)
    largest, chosen = scores.max(dim=-1, keepdim=True)
    return ((keys == chosen) & (largest > -torch.inf)).to(scores.dtype)


_PATTERNS = {"relu": torch.relu, "hardmax": hardmax_pattern}  # rows of ReLU need not sum to 1


class KeptScores(HookPoint):
    """``hook_attn_scores``, keeping the scores until the pattern is made of them."""

    kept: Tensor | None = None

    def __call__(self, scores: Tensor) -> Tensor:
        """Run the hooks, and keep what they leave."""
        after_hooks: Tensor = super().__call__(scores)
        self.kept = after_hooks
        return after_hooks

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the scores of a pass that ended early: they belong to its graph."""
        return {name: value for name, value in self.__dict__.items() if name != "kept"}

    def take(self) -> Tensor:
        """Return the scores of this pass, once."""
        if self.kept is None:
            raise InfoFlowError(
                f"{self.name} did not run before the pattern: expected a forward pass through the "
                "whole attention layer"
            )
        scores, self.kept = self.kept, None
        return scores


class PatternOfScores(HookPoint):
    """``hook_pattern``, which replaces the softmax by a pattern of another kind."""

    def __init__(self, kind: AttentionKind, scores: KeptScores) -> None:
        super().__init__()
        self.kind = kind
        self.pattern = _PATTERNS[kind]
        # in a tuple it is no submodule: it has its place in the attention layer
        self._scores = (scores,)

    def __call__(self, softmax: Tensor) -> Tensor:
        """Return the pattern, as the hooks on it leave it.

        It enters the hook point as its input, so that backward hooks see, and can change, its
        gradient.
        """
        pattern = self.pattern(self._scores[0].take())
        if softmax.requires_grad and not pattern.requires_grad:
            pattern = pattern + 0 * softmax  # a hard maximum has a gradient to look at, too
        after_hooks: Tensor = super().__call__(pattern)
        return after_hooks


@checked
def set_attention(model: nn.Module, kind: AttentionKind) -> None:
    """Make every attention layer of a model turn its scores into a pattern this way.

    It is part of the model's structure, not of its weights: a ``state_dict`` does not hold it, so
    set it again on the model that loads one. TransformerLens's weight processing assumes rows that
    sum to 1 (``fold_value_biases``): process weights before, not after, a change to "relu".

    Args:
        model: a hosted model or a HookedTransformer, without hooks on its scores and patterns.
        kind: "relu", "hardmax", or "softmax", which restores TransformerLens's own.

    Raises:
        InfoFlowError: for an unknown kind, a bridge, a model without TransformerLens's attention
            layers, one with attention sinks, or hooks on the hook points that are replaced.
    """
    if any("model_bridge" in base.__module__ for base in type(model).__mro__):
        raise InfoFlowError(
            "a TransformerBridge makes its patterns itself, and its hook points may show the "
            "pattern as scores: expected a hosted model, or a HookedTransformer"
        )
    layers: list[Any] = [getattr(block, "attn", None) for block in getattr(model, "blocks", ())]
    names = ("hook_attn_scores", "hook_pattern")
    if not layers or any(not hasattr(layer, name) for layer in layers for name in names):
        raise InfoFlowError(
            f"{type(model).__name__} has no attention layers with {' and '.join(names)}: expected "
            "a hosted model, or a HookedTransformer"
        )
    if getattr(getattr(model, "cfg", None), "use_attention_sinks", False):
        raise InfoFlowError(
            "the model has attention sinks, which only a softmax has: expected a model without "
            "them; leave the attention as it is"
        )
    # all layers are looked at before the first is changed
    for index, layer in enumerate(layers):
        for name in names:
            point = getattr(layer, name)
            if point.fwd_hooks or point.bwd_hooks:
                raise InfoFlowError(
                    f"blocks.{index}.attn.{name} has hooks, which would be lost: expected none; "
                    "set the attention first and add hooks afterwards"
                )
    # a softmax is what TransformerLens does between two plain hook points
    for layer in layers:
        if kind == "softmax":
            layer.hook_attn_scores, layer.hook_pattern = HookPoint(), HookPoint()
        else:
            layer.hook_attn_scores = KeptScores()
            layer.hook_pattern = PatternOfScores(kind, layer.hook_attn_scores)
    model.setup()  # type: ignore[operator]  # names the new hook points
