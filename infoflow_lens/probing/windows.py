"""Texts joined, and cut into windows of one length."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import name_file_in_errors
from infoflow_lens.foundation.settings import check
from infoflow_lens.hooks.model.texts import group_by_size, ids_of_texts, tokenize

_PIECE = 2**20  # characters that are tokenised at a time, about; each takes hundreds of bytes
_AT_ONCE = 1000  # windows


def token_stream(
    model: nn.Module, texts: Sequence[str]
) -> tuple[Int[Tensor, " prefix"], Int[Tensor, " pos"]]:
    """Join all texts as ids, and find what the model's tokenizer puts before a text.

    Args:
        model: with a tokenizer.
        texts: at least one; the ids of each begin with what the tokenizer puts before a text. Those
            of more than a million characters are tokenised in pieces that end with a line.

    Returns:
        The prefix, such as BOS, which may be empty; and the stream.

    Raises:
        InfoFlowError: for no text, or a model without a tokenizer.
    """
    prefix, *parts = _prefix_and_stream(model, texts)
    return prefix, torch.cat(parts)


def spread_windows(
    prefix: Int[Tensor, " prefix"],
    stream: Int[Tensor, " pos"],
    length: int,
    n: int | None,
    name: str = "the text",
) -> Int[Tensor, "window length"]:
    """Cut windows that share no token, spread evenly over the stream, each behind the prefix.

    Args:
        prefix, stream: as :func:`token_stream` gives them.
        length: tokens of a window, prefix included.
        n: at most so many windows; None for all.
        name: what errors call the stream.

    Raises:
        InfoFlowError: for a length without room, or a stream shorter than one window.
    """
    return torch.cat(list(_spread(prefix, stream.numpy().take, len(stream), length, n, name)))


def windows(
    model: nn.Module,
    texts: Iterable[str],
    length: int,
    n: int | None,
    name: str,
    *,
    one_text: bool = False,
    scratch: Path | None = None,
) -> Iterator[Int[Tensor, "window length"]]:
    """Yield the windows of :func:`spread_windows` over a :func:`token_stream`, some at a time.

    Args:
        model: with a tokenizer.
        texts: as they are read.
        length, n, name: as for :func:`spread_windows`.
        one_text: whether these are pieces of one text.
        scratch: a folder for the stream, of four bytes a token; None keeps it in memory.

    Raises:
        InfoFlowError: as for :func:`token_stream` and :func:`spread_windows`, and if the stream
            cannot be written to `scratch`.
    """
    parts = _prefix_and_stream(model, texts, one_text)
    prefix = next(parts)
    if scratch is None:
        yield spread_windows(prefix, torch.cat(list(parts)), length, n, name)
        return
    n_stream = 0
    with ExitStack() as stack:
        with name_file_in_errors(scratch):
            file = stack.enter_context(tempfile.TemporaryFile(dir=scratch))
        for ids in parts:
            n_stream += len(ids)
            with name_file_in_errors(scratch):
                file.write(ids.to(torch.int32).numpy().tobytes())
        with name_file_in_errors(scratch):
            file.flush()
        # mapped anew for every part, so that what was read does not stay in memory
        yield from _spread(
            prefix, lambda places: np.memmap(file, np.int32, "r")[places], n_stream, length, n, name
        )


def _spread(
    prefix: Tensor,
    read: Callable[[NDArray[np.int64]], NDArray[np.integer]],
    n_stream: int,
    length: int,
    n: int | None,
    name: str,
) -> Iterator[Tensor]:
    """Yield the windows of a stream that is read by places; see :func:`spread_windows`."""
    own: int = check(length, Annotated[int, Ge(len(prefix) + 1)], "window") - len(prefix)
    n_stream -= len(prefix)  # the stream begins with one, and each window brings its own
    most = n_stream // own
    if most < 1:
        raise InfoFlowError(
            f"{name} has {n_stream} tokens: expected at least {own}, one window; give more text "
            "or a shorter window"
        )
    # no more windows than fit side by side, so none overlap; float64 is exact for these places
    chosen = torch.linspace(0, n_stream - own, min(most, n or most), dtype=torch.float64).long()
    for starts in (chosen + len(prefix)).split(_AT_ONCE):
        rows = torch.from_numpy(np.array(read(starts.numpy()[:, None] + np.arange(own)))).long()
        yield torch.cat([prefix.expand(len(rows), -1), rows], dim=1)


def _prefix_and_stream(
    model: nn.Module, texts: Iterable[str], one_text: bool = False
) -> Iterator[Tensor]:
    """Yield the prefix that the tokenizer puts before a text, then the ids of all texts.

    The ids of each text begin with the prefix.

    Args:
        model: with a tokenizer.
        texts: as they are read.
        one_text: whether these are pieces of one text; then only the first has the prefix.

    Raises:
        InfoFlowError: for no text, or a model without a tokenizer.
    """
    coming = iter(texts)
    first = next(coming, None)
    if first is None:
        raise InfoFlowError("there are no texts: expected at least one")
    # the start of a text is enough to see what the tokenizer puts before it
    beginning = [first[:256]]
    (whole,), (bare,) = (
        tokenize(model, beginning, "the texts"), ids_of_texts(model, beginning, bare=True)
    )  # fmt: skip
    prefix = whole[: len(whole) - len(bare)]
    yield prefix
    # only the first piece of a text begins with the prefix; a file is one text
    pieces = (
        (piece, place == 0 and not (one_text and index))
        for index, text in enumerate(chain([first], coming))
        for place, piece in enumerate(_pieces(text))
    )
    for group in group_by_size(pieces, size=lambda pair: len(pair[0])):
        rows = ids_of_texts(model, [piece for piece, _ in group], bare=True)
        yield torch.cat(
            [torch.cat([prefix, row]) if begins else row for row, (_, begins) in zip(rows, group)]
        )


def _pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces that end with a line, or with a word where lines are very long."""
    start = 0
    while len(text) - start > _PIECE:
        stop = text.rfind("\n", start, start + _PIECE) + 1
        stop = stop if stop > start else text.rfind(" ", start + 1, start + _PIECE)
        stop = stop if stop > start else start + _PIECE
        yield text[start:stop]
        start = stop
    yield text[start:]
