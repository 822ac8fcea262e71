"""Lemmas 1 and 2 of Chen & Zou 2024: attention told, or restricted, by positions."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.studies.constructions.attention_only import (
    AttentionOnly,
    Head,
    Rows,
    nearest_code_classifier,
)
from infoflow_lens.studies.constructions.registry import construction
from infoflow_lens.tasks.templates import TemplateMatching


@construction("Chen & Zou 2024, Lemma 1")
def instructive_attention(
    task: TemplateMatching, *, alpha: Float[Tensor, "source destination"] | None = None
) -> AttentionOnly:
    """A ReLU head whose pattern is `alpha` for every sequence (Lemma 1, W_pp = alpha).

    Exact while position rows are one-hot, so in a first layer; not where an earlier layer has
    written to them. It moves tokens by position and so cannot match templates: the task provides
    sequences and shows the failure.

    Corrected: the zero blocks of the printed W_QK have width d' - d - n.

    Args:
        task: its sequences are what the layer runs on.
        alpha: non-negative, a row for each source and a column for each destination; default, every
            position attends to the one before it.

    Raises:
        InfoFlowError: for another shape or negative entries.
    """
    n = task.n_tokens
    if alpha is None:
        alpha = torch.diag(torch.ones(n - 1), diagonal=1)
    alpha = _square(alpha, "alpha", n)
    if alpha.dtype == torch.bool or (alpha < 0).any():
        raise InfoFlowError(
            f"alpha is {alpha.dtype} with least entry {float(alpha.min())}: expected non-negative "
            "scores"
        )
    alpha = alpha.float()
    rows = Rows(task.d_vocab, n)
    everything = rows.units(range(rows.d_model))
    key, query = rows.score_positions(alpha)
    return AttentionOnly(rows, ((Head(key, query, everything, everything),),), _blind(task, rows))


@construction("Chen & Zou 2024, Lemma 2")
def constrained_attention(
    task: TemplateMatching, *, allowed: Bool[Tensor, "source destination"] | None = None
) -> AttentionOnly:
    """A ReLU head that attends to equal tokens, but only between allowed positions (Lemma 2).

    W_QK is the identity on token rows and -1 on the position pairs that are not allowed. Since the
    tokens are one-hot, equal ones score 1, and -1 is enough.

    Corrected: the printed W_pp tends to plus infinity; it must be negative. A literal -inf gives
    NaN (times the zeros of other position rows).

    Args:
        task: its sequences are what the layer runs on.
        allowed: bool, a row for each source and a column for each destination; default, sources
            not after the destination.

    Raises:
        InfoFlowError: for another shape.
    """
    n = task.n_tokens
    if allowed is None:
        allowed = torch.ones(n, n, dtype=torch.bool).triu()
    allowed = _square(allowed, "allowed", n)
    if allowed.dtype != torch.bool:
        raise InfoFlowError(f"allowed is {allowed.dtype}: expected bool")
    rows = Rows(task.d_vocab, n)
    everything = rows.units(range(rows.d_model))
    head = match_head(rows, rows.tokens, allowed, everything, everything)
    return AttentionOnly(rows, ((head,),), _blind(task, rows))


def _square(value: Any, name: str, n: int) -> Tensor:
    """Turn a tensor, an array or nested lists into a tensor [n, n].

    Raises:
        InfoFlowError: for what is none, or another shape.
    """
    try:
        found = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        found = None
    if found is None or found.shape != (n, n):
        given = repr(value)[:100] if found is None else f"of shape {tuple(found.shape)}"
        raise InfoFlowError(f"{name} is {given}: expected [{n}, {n}], source by destination")
    return found


def match_head(
    rows: Rows,
    matched: range,
    allowed: Bool[Tensor, "source destination"],
    read: Float[Tensor, "d_model rank"],
    write: Float[Tensor, "d_model rank"],
) -> Head:
    """Make a head that attends to equal tokens of the `matched` rows between allowed positions."""
    content = rows.units(matched)
    # one-hot tokens that are equal score 1, from which -1 leaves ReLU nothing
    key, query = rows.score_positions(-(~allowed).float())
    return Head(
        key=torch.cat([content, key], dim=1),
        query=torch.cat([content, query], dim=1),
        read=read,
        write=write,
    )


def _blind(task: TemplateMatching, rows: Rows) -> Float[Tensor, "label d_model"]:
    """Make a classifier that has nothing to read."""
    return nearest_code_classifier(rows, torch.zeros(task.n_labels, 1), [rows.last_position])
