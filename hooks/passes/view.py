"""One forward pass as probes see it: activations by name, with padding moved out of the way."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError

_QUERY_BY_KEY = ("hook_attn_scores", "hook_pattern")  # [batch, head, query, key]


@dataclass(frozen=True)
class Pass:
    """One complete forward pass.

    Positions count the real tokens of each sequence from 0, wherever padding stood: what a padded
    batch shows of a sequence is what the sequence alone would.

    Attributes:
        activations: by hook point.
        held_out: bool [batch], which sequences are for evaluation.
        lengths: int [batch], real tokens of each sequence; None if nothing is padded. Beyond them
            scores are -inf and patterns 0; other activations hold what the model made of padding.
        tokens: the token ids [batch, pos], or vector tokens; None where the pass was made by hooks
            alone, which do not see them.
        first: the number of sequences seen before this pass.
    """

    activations: Mapping[str, Tensor]
    held_out: Bool[Tensor, " batch"]
    lengths: Int[Tensor, " batch"] | None = None
    tokens: Tensor | None = None
    first: int = 0

    def is_real(self, n_pos: int) -> Bool[Tensor, "batch pos"]:
        """Which of the first `n_pos` positions are real tokens."""
        if self.lengths is None:
            return torch.ones(len(self.held_out), n_pos, dtype=torch.bool)
        return torch.arange(n_pos) < self.lengths[:, None]


def check_mask_took_effect(
    activations: Mapping[str, Tensor], mask: Bool[Tensor, "batch pos"]
) -> None:
    """Refuse passes in which real queries attended to padding.

    Raises:
        InfoFlowError: naming the hook point.
    """
    for name, activation in activations.items():
        if not name.endswith(_QUERY_BY_KEY) or activation.shape[-1] != mask.shape[1]:
            continue
        if name.endswith("hook_pattern"):
            attended = activation > 0
        else:
            attended = activation > torch.finfo(activation.dtype).min
        mask = mask.to(activation.device)
        if (attended & mask[:, None, :, None] & ~mask[:, None, None, :]).any():
            if name.endswith("hook_attn_scores") and _is_pattern(activation):
                continue
            raise InfoFlowError(
                f"{name}: tokens attend to padding, so the model ignores the attention_mask (a "
                "bidirectional HookedTransformer does): expected masked keys; run sequences of one "
                "length together, without padding"
            )


def _is_pattern(scores: Tensor) -> bool:
    return bool(scores.min() >= 0)


def unpadded(
    activations: Mapping[str, Tensor], mask: Bool[Tensor, "batch pos"]
) -> tuple[dict[str, Tensor], Int[Tensor, " batch"]]:
    """Activations with the real tokens of each sequence first, and how many these are.

    Args:
        activations: by hook point; positions on axis 1, for scores and patterns on axes 2 and 3.
        mask: which positions are real.
    """
    lengths = mask.sum(dim=1)
    longest = int(lengths.max())
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, :longest]
    in_place = bool((order == torch.arange(longest, device=order.device)).all())
    moved = {}
    for name, activation in activations.items():
        index = order.to(activation.device)
        if name.endswith(_QUERY_BY_KEY):
            moved[name] = _unpadded_attention(name, activation, index, lengths, in_place)
        elif activation.ndim >= 2 and activation.shape[1] == mask.shape[1]:
            moved[name] = activation[:, :longest] if in_place else _along(activation, index, 1)
        else:
            moved[name] = activation
    return moved, lengths.cpu()


def _along(activation: Tensor, index: Tensor, axis: int) -> Tensor:
    """Gather positions along an axis, for every sequence its own."""
    shape = [1] * activation.ndim
    shape[0], shape[axis] = index.shape
    size = list(activation.shape)
    size[axis] = index.shape[1]
    return activation.gather(axis, index.view(shape).expand(size))


def _unpadded_attention(
    name: str,
    activation: Float[Tensor, "batch head query key"],
    index: Int[Tensor, "batch pos"],
    lengths: Int[Tensor, " batch"],
    in_place: bool,
) -> Float[Tensor, "batch head query key"]:
    longest = index.shape[1]
    if in_place:
        activation = activation[:, :, :longest, :longest]
    else:
        activation = _along(_along(activation, index, 2), index, 3)
    real = torch.arange(longest, device=activation.device) < lengths.to(activation.device)[:, None]
    both = real[:, None, :, None] & real[:, None, None, :]
    return activation.masked_fill(~both, 0 if name.endswith("hook_pattern") else -torch.inf)


def padded_together(parts: list[Tensor], axes: tuple[int, ...], value: float | int) -> Tensor:
    """Tensors put together on axis 0, those that are shorter on `axes` filled up with `value`."""
    sizes = [max(part.shape[axis] for part in parts) for axis in axes]
    filled = []
    for part in parts:
        missing = [size - part.shape[axis] for axis, size in zip(axes, sizes, strict=True)]
        if any(missing):
            padding = [0] * (2 * part.ndim)  # pairs, the last axis first
            for axis, amount in zip(axes, missing, strict=True):
                padding[2 * (part.ndim - 1 - axis % part.ndim) + 1] = amount
            part = torch.nn.functional.pad(part, padding, value=value)
        filled.append(part)
    return torch.cat(filled)
