"""What the hook points of a model carry, found out once, and what is read from which of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from infoflow_lens.foundation.checks import check_choice
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.hooks.model.inputs import example_input
from infoflow_lens.hooks.model.points import (
    hook_name,
    is_bridge,
    layer_count,
    pattern_hook,
    run_catching,
    scores_hook,
)
from infoflow_lens.hooks.passes.own import own_pass, without_user_hooks

Carried = Literal["scores", "pattern", "missing"]

STATES = ("post_attention", "resid_post")
_SUMMED = ("hook_resid_pre", "hook_attn_out", "hook_mlp_out", "hook_resid_post")


@dataclass(frozen=True)
class Shown:
    """What the hook points of a model carry.

    Attributes:
        scores: for each layer what ``hook_attn_scores`` carries: the "scores" before the softmax;
            the "pattern" in their place, as many bridges do; or nothing, "missing".
        pattern: for each layer whether ``hook_pattern`` fires; it does not with fused attention.
        adds: whether what leaves a block is the sum of what enters it and of its parts; not so in
            BERT, whose norms stand behind the sums. None where a part does not fire.
    """

    scores: tuple[Carried, ...]
    pattern: tuple[bool, ...]
    adds: bool | None


_known: WeakKeyDictionary[nn.Module, tuple[Any, Shown]] = WeakKeyDictionary()


def shown(model: nn.Module) -> Shown:
    """What the hook points of `model` carry.

    TransformerLens's own attention shows its scores. A bridge shows what the module that it wraps
    gives, so it is run once on a few tokens. The values of other passes never decide.
    """
    points: Mapping[str, Any] = model.hook_dict  # type: ignore[assignment]
    n_layers = layer_count(model)
    if not is_bridge(model):
        scores, pattern = (
            [f"blocks.{layer}.attn.{name}" in points for layer in range(n_layers)]
            for name in ("hook_attn_scores", "hook_pattern")
        )
        carried: list[Carried] = ["scores" if has else "missing" for has in scores]
        return Shown(tuple(carried), tuple(pattern), adds=True)
    state = (len(points), getattr(model, "compatibility_mode", None))  # users may switch the mode
    if model not in _known or _known[model][0] != state:
        _known[model] = (state, _found(model, points, n_layers))
    return _known[model][1]


def _found(model: nn.Module, points: Mapping[str, Any], n_layers: int) -> Shown:
    attention = [
        (f"blocks.{layer}.attn.hook_attn_scores", f"blocks.{layer}.attn.hook_pattern")
        for layer in range(n_layers)
    ]
    parts = [f"blocks.0.{point}" for point in _SUMMED if f"blocks.0.{point}" in points]
    wanted = [name for pair in attention for name in pair if name in points] + parts
    tokens = example_input(model, n_sequences=2)[:, :8].to(next(model.parameters()).device)
    with eval_mode(model), own_pass(model), without_user_hooks(model):
        caught = run_catching(model, tokens, wanted)[1]
    scores = tuple(_carried(caught.get(one), caught.get(other)) for one, other in attention)
    pattern = tuple(other in caught for _, other in attention)
    adds = None
    if f"blocks.0.{_SUMMED[1]}" in parts and all(name in caught for name in parts):
        *added, leaving = (caught[name].float() for name in parts)
        gap = torch.stack(added).sum(dim=0) - leaving
        adds = bool(gap.norm() <= 0.05 * leaving.norm())  # bfloat16 rounds every part
    return Shown(scores, pattern, adds)


def _carried(scores: Tensor | None, pattern: Tensor | None) -> Carried:
    if scores is None:
        return "missing"
    if pattern is None or scores.shape != pattern.shape:
        return "scores"
    same = torch.allclose(scores.float(), pattern.float(), atol=1e-3)
    return "pattern" if same else "scores"


def attention_hook(model: nn.Module, layer: int) -> str:
    """The hook point that the ranks of a layer's keys are read from: its scores, or its pattern.

    Raises:
        InfoFlowError: if it shows neither.
    """
    found = shown(model)
    if found.scores[layer] == "scores":
        return scores_hook(model, layer)
    if not found.pattern[layer]:
        raise InfoFlowError(
            f"neither hook_attn_scores nor hook_pattern fires in layer {layer}: expected a model "
            "that shows its attention; load it with eager attention (attn_implementation='eager')"
        )
    return pattern_hook(model, layer)


def post_attention_hooks(model: nn.Module, layer: int) -> tuple[str, ...]:
    """Hook points whose sum is the post-attention state x'_l (eq 1) of a layer.

    Attention-only and parallel blocks have no ``hook_resid_mid``; there the state is the sum of
    what enters the block and what attention adds. On bridges ``hook_resid_mid`` is the input of
    the second norm, which is another state where norms come after the sums, as in BERT; there
    ``hook_attn_out`` is the state itself.

    Raises:
        InfoFlowError: if the model lacks a hook point, or has no residual stream.
    """
    known: Mapping[str, Any] = getattr(model, "hook_dict", {})
    middle = f"blocks.{layer}.hook_resid_mid"
    if not is_bridge(model) and middle in known:
        return (middle,)
    attention = hook_name(model, f"blocks.{layer}.hook_attn_out")
    adds = shown(model).adds
    if adds is None:
        raise InfoFlowError(
            f"a hook point of {', '.join(_SUMMED)} did not fire in layer 0: expected a transformer "
            "block that adds attention and MLP to a residual stream; this architecture cannot be "
            "probed"
        )
    return (hook_name(model, f"blocks.{layer}.hook_resid_pre"), attention) if adds else (attention,)


def state_hooks(model: nn.Module, layer: int, state: str) -> tuple[str, ...]:
    """Hook points whose sum is a layer's state: "post_attention" or "resid_post".

    Raises:
        InfoFlowError: for another name, or a model without the hook points.
    """
    if check_choice(state, "state", STATES) == "post_attention":
        return post_attention_hooks(model, layer)
    return (hook_name(model, f"blocks.{layer}.hook_resid_post"),)


def state_sum(activations: Mapping[str, Tensor], names: tuple[str, ...]) -> Tensor:
    """The state that :func:`state_hooks` resolved, from the activations of a forward pass."""
    state = activations[names[0]]
    for name in names[1:]:
        state = state + activations[name]
    return state
