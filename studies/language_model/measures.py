"""What is measured of a language model: losses in nats a token, and scores of its heads."""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.modules import eval_mode

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

_BATCH = 64  # sequences in a pass


def token_losses(model: nn.Module, ids: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos-1"]:
    """Return cross-entropy in nats of each token from the second on, of a model of transformers."""
    losses = []
    with eval_mode(model):
        for rows in ids.to(next(model.parameters()).device).split(_BATCH):
            logits = model(rows).logits[:, :-1].float()
            flat = nn.functional.cross_entropy(
                logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none"
            )
            losses.append(flat.view(len(rows), -1).cpu())
    return torch.cat(losses)


def mean_loss(model: nn.Module, ids: Int[Tensor, "batch pos"]) -> float:
    """Return the mean cross-entropy of all tokens but the first of a sequence, nats a token."""
    return float(token_losses(model, ids).double().mean())


def loss_on_repeats(model: nn.Module, ids: Int[Tensor, "batch pos"]) -> float:
    """Average the cross-entropy where a repeat can be known, in nats a token.

    Args:
        model: a model of transformers.
        ids: of :func:`~infoflow_lens.studies.language_model.batches.repeat_random`: the
            first token of the second half is as random as those of the first, and does not count.
    """
    half = (ids.shape[1] - 1) // 2
    # losses begin with the second token: half + 1 is the second one of the second half
    return float(token_losses(model, ids)[:, half + 1 :].double().mean())


def patterns(
    model: "GPT2LMHeadModel", ids: Int[Tensor, "batch pos"]
) -> Float[Tensor, "layer batch head query key"]:
    """Return attention patterns of all heads."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")  # the only one that shows them
    try:
        with eval_mode(model):
            outputs = model(ids.to(model.device), output_attentions=True)
            return torch.stack(outputs.attentions).cpu()
    finally:
        model.set_attn_implementation(implementation)


def prefix_matching(
    pattern: Float[Tensor, "layer batch head query key"],
) -> Float[Tensor, "layer head"]:
    """Return attention from a token to the one that followed it before, on repeated random tokens.

    The mean over all queries of the second half (Olsson et al. 2022, "prefix matching score"); 1
    for an ideal induction head.

    Args:
        pattern: of sequences of `repeat_random`, which begin with <|endoftext|>.
    """
    half = (pattern.shape[-1] - 1) // 2
    queries = torch.arange(half + 1, 2 * half + 1)
    # a token's earlier copy is `half` positions back, and what followed it is one further
    return pattern[..., queries, queries - half + 1].mean(dim=(1, 3))


def previous_token(
    pattern: Float[Tensor, "layer batch head query key"],
) -> Float[Tensor, "layer head"]:
    """Return the mean attention from a token to the one before it, from the third token on.

    The second token is left out: before it stands <|endoftext|>, on which heads rest.
    """
    queries = torch.arange(2, pattern.shape[-1])
    return pattern[..., queries, queries - 1].mean(dim=(1, 3))
