"""Texts joined, and cut into windows of one length."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor, nn

from infoflow_lens.foundation.checks import check_integer
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.hooks.model.inputs import tokenized


def token_stream(
    model: nn.Module, texts: Sequence[str]
) -> tuple[Int[Tensor, " prefix"], Int[Tensor, " pos"]]:
    """All texts as ids, one behind the other, and what the model's tokenizer puts before a text.

    Args:
        model: with a tokenizer.
        texts: at least one; the ids of each begin with what the tokenizer puts before a text.

    Returns:
        The prefix, such as BOS, which may be empty; and the stream.

    Raises:
        InfoFlowError: for no text, or a model without a tokenizer.
    """
    if not texts:
        raise InfoFlowError("there are no texts: expected at least one")
    parts = [tokenized(model, text, f"text {index}") for index, text in enumerate(texts)]
    bare: Tensor = model.to_tokens(texts[0], truncate=False, prepend_bos=False)  # type: ignore[operator]
    prefix = parts[0][: len(parts[0]) - bare.shape[1]]
    return prefix, torch.cat(parts)


def evenly_spread(
    prefix: Int[Tensor, " prefix"],
    stream: Int[Tensor, " pos"],
    length: int,
    n: int | None,
    name: str = "the text",
) -> Int[Tensor, "window length"]:
    """Windows that share no token, spread evenly over the stream, each with the prefix before it.

    Args:
        prefix, stream: as :func:`token_stream` gives them.
        length: tokens of a window, prefix included.
        n: at most so many windows; None for all.
        name: what errors call the stream.

    Raises:
        InfoFlowError: for a length without room, or a stream shorter than one window.
    """
    own = check_integer(length, "window", len(prefix) + 1) - len(prefix)
    # the stream's own first prefix is cut off: each window brings its own
    stream = stream[len(prefix) :]
    most = len(stream) // own
    if most < 1:
        raise InfoFlowError(
            f"{name} has {len(stream)} tokens: expected at least {own}, one window; give more text "
            "or a shorter window"
        )
    chosen = min(most, n or most)
    starts = torch.linspace(0, len(stream) - own, chosen, dtype=torch.float64).long()
    rows = stream[starts[:, None] + torch.arange(own)]
    return torch.cat([prefix.expand(chosen, -1), rows], dim=1)
