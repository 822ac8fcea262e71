"""Training that starts from weights set by hand, as Chen & Zou 2024 do (Sec. 9.1)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.foundation.settings import NonNegative, Seed, checked
from infoflow_lens.models.hooked import HookedModel
from infoflow_lens.models.host import TokenTransformer
from infoflow_lens.studies.constructions.registry import build_construction
from infoflow_lens.tasks import Task


@checked
def perturbed_construction(
    name: str, scale: NonNegative, seed: Seed = 0, **parameters: Any
) -> tuple[TokenTransformer, Task]:
    """Build a construction over token ids, away from its weights, and its task.

    Every weight of the attention layers and of the classifier gets Gaussian noise of deviation
    `scale`, heads of zeros included, and can be trained; the one-hot embeddings are fixed.

    Args:
        name: one of :func:`list_constructions`.
        scale: deviation of the noise; 0 gives the construction.
        seed: of the noise.
        parameters: as for :func:`build_construction`.

    Raises:
        InfoFlowError: for a construction over vector tokens, a scale that is no number of at least
            0, and what `build_construction` refuses.
    """
    model, task = build_construction(name, **parameters)
    token_model = _over_token_ids(model, name)
    for embedding in (token_model.embed.W_E, token_model.pos_embed.W_pos):
        embedding.requires_grad_(False)
    for parameter_name, parameter in token_model.named_parameters():
        if parameter.requires_grad:
            # a generator for each, so that the noise of one does not hang on the size of others
            generator = torch.Generator().manual_seed(derive_seed("noise", seed, parameter_name))
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            with torch.no_grad():
                parameter.add_(scale * noise)
    return token_model, task


def with_scores_of(
    model: TokenTransformer, construction: HookedModel, layers: Sequence[int] = (0,)
) -> TokenTransformer:
    """Copy `model` with heads that score, in `layers`, as those of a construction do.

    This is the paper's start for all tasks but memorization: W_QK of the first layer as
    constructed, the rest as ``build_token_model(..., init="chen_zou")`` makes it. Where the model
    has more heads, they begin again with the construction's first. Factors of the construction that
    are smaller than the model's are filled up with zeros.

    Args:
        model: with ``one_hot`` tokens and positions, which lie as in the construction.
        construction: of the same vocabulary and length, as :func:`build_construction` makes it.
        layers: which layers to take over.

    Raises:
        InfoFlowError: for models of different vocabulary, length or attention, a construction that
            is wider, or a layer that one of them has not.
    """
    constructed, started = _over_token_ids(construction, "construction"), copy.deepcopy(model)
    for size in ("d_vocab", "n_tokens", "attention"):
        wanted, given = getattr(constructed.architecture, size), getattr(started.architecture, size)
        if wanted != given:
            raise InfoFlowError(
                f"the model has {size} {given!r}, the construction {wanted!r}: build them for the "
                "same task, with the same attention"
            )
    if constructed.architecture.d_model > started.architecture.d_model:
        raise InfoFlowError(
            f"the model's d_model is {started.architecture.d_model}, the construction's "
            f"{constructed.architecture.d_model}: build the model with at least that"
        )
    n_layers = min(constructed.architecture.n_layers, started.architecture.n_layers)
    for layer in layers:
        if not 0 <= layer < n_layers:
            raise InfoFlowError(f"layer {layer} is asked for: expected layers 0 to {n_layers - 1}")
    with torch.no_grad():
        for layer in layers:
            _copy_scores(started.blocks[layer].attn, constructed.blocks[layer].attn)
    return started


def _copy_scores(attention: Any, constructed: Any) -> None:
    """Make query and key matrices with the same products W_Q W_K^T."""
    d_head = attention.W_Q.shape[2]
    whole = not attention.W_K.requires_grad  # W_K is the identity, and W_Q holds W_QK^T
    if not whole and constructed.W_Q.shape[2] > d_head:
        raise InfoFlowError(
            f"the model's d_head is {d_head}, the construction's {constructed.W_Q.shape[2]}: build "
            "the model with at least that"
        )
    for head in range(len(attention.W_Q)):
        query, key = (
            w[head % len(w)].to(attention.W_Q.dtype) for w in (constructed.W_Q, constructed.W_K)
        )
        width, rank = query.shape
        # what the construction leaves open must not add to its scores
        attention.W_Q[head].zero_()
        if whole:
            attention.W_Q[head, :width, :width] = query @ key.T
            continue
        attention.W_K[head].zero_()
        attention.W_Q[head, :width, :rank] = query
        attention.W_K[head, :width, :rank] = key


def _over_token_ids(model: HookedModel, name: str) -> TokenTransformer:
    if not isinstance(model, TokenTransformer):
        raise InfoFlowError(
            f"{name!r} is a {type(model).__name__}: expected a construction over token ids, such "
            "as in_context_qa"
        )
    return model
