"""What wrote the residual stream: parts that add up to it, of heads, MLPs, embeddings, biases."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.hooks.model.points import layer_count
from infoflow_lens.hooks.passes.view import Pass
from infoflow_lens.hooks.routes.contributions import factors_of
from infoflow_lens.hooks.why.reading import exact, refusal


def points_of_parts(model: nn.Module, last: int) -> tuple[str, ...]:
    """The hook points that show the parts of the stream that enters a layer.

    Args:
        model: the model.
        last: the layer.
    """
    known: Any = model.hook_dict
    names = ["hook_embed", "hook_pos_embed"]
    for layer in range(last):
        names += [f"blocks.{layer}.{name}" for name in ("attn.hook_z", "hook_mlp_out")]
    names += [f"blocks.{layer}.hook_resid_pre" for layer in range(last + 1)]
    return tuple(name for name in names if name in known)


def names_of_parts(model: nn.Module, seen: Pass) -> list[str]:
    """All names that parts of any layer's stream have, in the order in which they are written."""
    names = list(_embeddings(seen, None)[0])
    for layer in range(layer_count(model) - 1):
        names += _names_of_block(seen, layer)
    return names


def factors(model: nn.Module, last: int) -> tuple[float, ...]:
    """By what layers before the last multiply what their attention adds.

    Raises:
        InfoFlowError: if what the heads bring does not add up to it.
    """
    if last == 0:
        return ()
    try:
        return factors_of(model)
    except InfoFlowError as error:
        reason = f"the states that enter it cannot be split ({error})"
        raise refusal(model, last, reason) from error


def written(
    seen: Pass, last: int, at: Int[Tensor, " pos"] | None = None
) -> Iterator[tuple[list[str], Float[Tensor, "part pos d_model"]]]:
    """For each layer up to the last, the parts of the stream that enters it, with names.

    Args:
        seen: a pass of one sequence.
        last: the layer.
        at: positions; default, all.

    Raises:
        InfoFlowError: if they do not add up.
    """
    by_layer = factors(seen.model, last)
    names, embedded = _embeddings(seen, at)
    parts = list(embedded)
    yield list(names), torch.stack(parts)
    for layer in range(last):
        parts += _block(seen, layer, by_layer[layer], at)
        names = [*names, *_names_of_block(seen, layer)]
        yield list(names), torch.stack(parts)


def _embeddings(
    seen: Pass, at: Int[Tensor, " pos"] | None
) -> tuple[Sequence[str], Sequence[Float[Tensor, "pos d_model"]]]:
    """Tokens and positions; one part where a norm stands over their sum."""
    whole = _at(seen.state(0, "resid_pre"), at)
    if seen.lacks(["hook_pos_embed"]) or seen.lacks(["hook_embed"]):
        return ["token embedding"], [whole]
    shown = seen.activation("hook_pos_embed")
    if shown.shape[1:] != seen.state(0, "resid_pre").shape[1:]:  # rotary tables
        return ["token embedding"], [whole]
    tokens, positions = _at(seen.activation("hook_embed"), at), _at(shown, at)
    if not _near(tokens + positions, whole, whole, seen):
        return ["embedding"], [whole]
    return ["token embedding", "positional embedding"], [whole - positions, positions]


def _names_of_block(seen: Pass, layer: int) -> list[str]:
    blocks: Any = seen.model.blocks
    attn = blocks[layer].attn
    names = [f"head {layer}.{head}" for head in range(len(attn.W_O))]
    names += [f"attention bias {layer}"] if _has(attn, "b_O") else []
    return names + ([f"MLP {layer}"] if _has_mlp(seen, layer) else [])


def _block(
    seen: Pass, layer: int, factor: float, at: Int[Tensor, " pos"] | None
) -> list[Float[Tensor, "pos d_model"]]:
    """What each head, b_O and the MLP of a layer write."""
    blocks: Any = seen.model.blocks
    attn = blocks[layer].attn
    matrix = exact(attn.W_O)
    z = _at(seen.state(layer, "head"), at)
    z = z.reshape(len(z), *matrix.shape[:2])
    parts = list(factor * torch.einsum("phd,hdm->hpm", z, matrix.to(z.device)))
    if _has(attn, "b_O"):
        parts.append((factor * exact(attn.b_O)).to(z.device).expand_as(parts[0]))
    before, after = (_at(seen.state(place, "resid_pre"), at) for place in (layer, layer + 1))
    left = after - before - torch.stack(parts).sum(dim=0)
    adds = torch.zeros_like(left)
    if _has_mlp(seen, layer):
        shown = _at(seen.activation(f"blocks.{layer}.hook_mlp_out"), at)
        size = float(shown.square().sum())  # Granite multiplies what it adds
        adds = shown * (float((shown * left).sum()) / size if size else 0.0)
    if not _near(adds, left, after, seen):
        reason = f"what layer {layer} adds is not the sum of what its heads and its MLP write"
        raise refusal(seen.model, layer + 1, reason)
    return [*parts, left] if _has_mlp(seen, layer) else parts


def _has(attn: Any, name: str) -> bool:
    """Whether there is such a bias, and not of zeros alone."""
    bias = getattr(attn, name, None)
    return isinstance(bias, Tensor) and bool(bias.any())


def _has_mlp(seen: Pass, layer: int) -> bool:
    return not seen.lacks([f"blocks.{layer}.hook_mlp_out"])


def _at(activation: Tensor, at: Int[Tensor, " pos"] | None) -> Tensor:
    """An activation of the first sequence at some positions, in float64."""
    return exact(activation[0] if at is None else activation[0][at.to(activation.device)])


def _near(made: Tensor, shown: Tensor, stream: Tensor, seen: Pass) -> bool:
    """Whether two states are the same but for rounding, which is that of the whole stream."""
    eps = torch.finfo(next(seen.model.parameters()).dtype).eps
    gap, size = (made - shown).norm(dim=-1), shown.norm(dim=-1) + stream.norm(dim=-1)
    return bool((gap <= max(1e-5, 8 * eps) * (size + size.mean())).all())
