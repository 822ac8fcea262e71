"""The next tokens that a language model predicts for a few texts, also with tokens replaced."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.hooks.model.points import config_value, reads_vectors
from infoflow_lens.hooks.model.texts import readable_tokens
from infoflow_lens.hooks.passes.run import run
from infoflow_lens.report.flow_view import NextTokens, Replaced

SaidT = TypeVar("SaidT")
_MOST = 5  # next tokens of a position [chosen]
_TOGETHER = 16  # texts in a pass
_TWO_SECONDS = 6e10  # multiplications of all passes with a token replaced [chosen]
_MOST_SAID = 60_000  # tokens with their probabilities, of all passes together [chosen]


def next_tokens(model: nn.Module, rows: Sequence[Tensor]) -> tuple[NextTokens, ...] | None:
    """Return the most probable next tokens of every position, as pairs of token and probability.

    Returns:
        For each sequence and position the first five; None where the model gives no logits of its
        vocabulary at every position.
    """
    return _call_each(model, rows, lambda row, chances: _likeliest(model, chances))


def predict_replacements(model: nn.Module, rows: Sequence[Tensor]) -> tuple[Replaced, ...] | None:
    """Predict next tokens with each token replaced in turn; one pass for each token.

    For causal models alone, in which states before a replaced token do not change.

    Returns:
        For each sequence; None where it would take more than a few seconds or a big page, or the
        model gives no logits.
    """
    lengths = [len(row) for row in rows]
    weights = sum(parameter.numel() for parameter in model.parameters())
    too_long = weights * sum(n * n for n in lengths) > _TWO_SECONDS
    if too_long or _MOST * sum(n * (n + 1) // 2 for n in lengths) > _MOST_SAID:
        return None
    return _call_each(model, rows, partial(_replace_each, model))


def _replace_each(
    model: nn.Module, row: Int[Tensor, " pos"], chances: Float[Tensor, "pos token"]
) -> Replaced:
    """Predict next tokens of one text with each token replaced in turn."""
    put = _choose_others(row, chances)
    # [replaced, pos]: the text once for each token, with that token replaced
    changed = row.repeat(len(row), 1)
    changed.fill_diagonal_(0)
    changed += torch.diag(put.to(row))
    predicted: list[NextTokens] = []
    for start in range(0, len(row), _TOGETHER):
        after = _chances(model, changed[start : start + _TOGETHER])
        assert after is not None  # as for the text itself
        predicted += [_likeliest(model, each[start + index :]) for index, each in enumerate(after)]
    (names,) = readable_tokens(model, put[None].cpu())
    return Replaced(tuple(names), tuple(predicted))


def _call_each(
    model: nn.Module, rows: Sequence[Tensor], say: Callable[[Tensor, Tensor], SaidT]
) -> tuple[SaidT, ...] | None:
    """Call a function with each text and its probabilities; None if the model gives none."""
    if reads_vectors(model):
        return None
    found = []
    for row in rows:
        chances = _chances(model, row[None])
        if chances is None:
            return None
        found.append(say(row, chances[0]))
    return tuple(found)


def _chances(
    model: nn.Module, batch: Int[Tensor, "batch pos"]
) -> Float[Tensor, "batch pos token"] | None:
    """Return the probabilities of all next tokens; None where the model gives none."""
    with eval_mode(model), torch.no_grad():
        output = run(model, batch, output=True).output
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.shape[:2] != batch.shape or logits.ndim != 3:
        return None
    if logits.shape[2] != config_value(model, "d_vocab"):
        return None
    return logits.float().softmax(dim=-1)


def _likeliest(model: nn.Module, chances: Float[Tensor, "pos token"]) -> NextTokens:
    likely = chances.topk(min(_MOST, chances.shape[1]))
    names = readable_tokens(model, likely.indices.cpu())
    pairs = zip(names, likely.values.tolist(), strict=True)
    return tuple(tuple(zip(*each, strict=True)) for each in pairs)


def _choose_others(
    row: Int[Tensor, " pos"], chances: Float[Tensor, "pos token"]
) -> Int[Tensor, " pos"]:
    """Choose for each token the most probable other one in its place, by the text before it."""
    # row p then says what the text before p predicts at p
    before = chances.roll(1, dims=0)
    before[0] = chances[0]
    return before.scatter(1, row[:, None].to(before.device), -1).argmax(dim=-1)
