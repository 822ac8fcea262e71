"""What a language model says next, at every position of a few texts."""

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor, nn

from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.hooks.model.inputs import readable_tokens
from infoflow_lens.hooks.model.points import reads_vectors
from infoflow_lens.hooks.passes.run import run

NextTokens: TypeAlias = tuple[tuple[tuple[str, float], ...], ...]
_MOST = 5  # that are named [chosen]


def next_tokens(model: nn.Module, rows: Sequence[Tensor]) -> tuple[NextTokens, ...] | None:
    """The most probable next tokens of every position, as pairs of token and probability.

    Returns:
        For each sequence and position the first five; None where the model gives no logits of its
        vocabulary at every position.
    """
    if reads_vectors(model):
        return None
    found = []
    for row in rows:
        with eval_mode(model):
            output = run(model, row[None], output=True).output
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor) or logits.shape[:2] != (1, len(row)) or logits.ndim != 3:
            return None
        if logits.shape[2] != getattr(getattr(model, "cfg", None), "d_vocab", None):
            return None
        likely = logits[0].float().softmax(dim=-1).topk(min(_MOST, logits.shape[2]))
        names = readable_tokens(model, likely.indices.cpu())
        chances = likely.values.tolist()
        found.append(
            tuple(tuple(zip(*each, strict=True)) for each in zip(names, chances, strict=True))
        )
    return tuple(found)
