"""Texts joined, and cut into windows of one length."""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge
from jaxtyping import Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import naming_file
from infoflow_lens.foundation.settings import check
from infoflow_lens.hooks.model.inputs import tokenized

_PIECE = 2**20  # characters that are tokenised at a time, about; each takes hundreds of bytes


def token_stream(
    model: nn.Module, texts: Sequence[str]
) -> tuple[Int[Tensor, " prefix"], Int[Tensor, " pos"]]:
    """All texts as ids, one behind the other, and what the model's tokenizer puts before a text.

    Args:
        model: with a tokenizer.
        texts: at least one; the ids of each begin with what the tokenizer puts before a text. Those
            of more than a million characters are tokenised in pieces that end with a line.

    Returns:
        The prefix, such as BOS, which may be empty; and the stream.

    Raises:
        InfoFlowError: for no text, or a model without a tokenizer.
    """
    if not texts:
        raise InfoFlowError("there are no texts: expected at least one")
    prefix = _prefix(model, texts[0])
    parts = [
        ids for text in texts for ids in (prefix, *(_bare(model, part) for part in _pieces(text)))
    ]
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
    # the stream's own first prefix is cut off: each window brings its own
    stream = stream[len(prefix) :]
    starts, own = _starts(len(prefix), len(stream), length, n, name)
    rows = stream[starts[:, None] + torch.arange(own)]
    return torch.cat([prefix.expand(len(rows), -1), rows], dim=1)


def windows(
    model: nn.Module,
    texts: Iterable[str],
    length: int,
    n: int | None,
    name: str,
    *,
    one_text: bool = False,
    scratch: Path | None = None,
) -> Iterator[Int[Tensor, " length"]]:
    """What :func:`evenly_spread` gives of a :func:`token_stream`, which stays on disk meanwhile.

    Args:
        model: with a tokenizer.
        texts: as they are read.
        length, n, name: as there.
        one_text: whether these are pieces of one text.
        scratch: a folder for the stream, of four bytes a token; default, the system's.

    Raises:
        InfoFlowError: as there, and where the stream cannot be written.
    """
    prefix = torch.tensor([], dtype=torch.long)
    n_stream = 0
    with ExitStack() as stack:
        with naming_file(scratch or Path(tempfile.gettempdir())):
            file = stack.enter_context(tempfile.TemporaryFile(dir=scratch))
        for index, text in enumerate(texts):
            if not index:
                prefix = _prefix(model, text)
            for place, piece in enumerate(_pieces(text)):
                ids = _bare(model, piece)
                if index and not place and not one_text:
                    ids = torch.cat([prefix, ids])
                with naming_file(scratch or Path(tempfile.gettempdir())):
                    file.write(ids.to(torch.int32).numpy().tobytes())
                n_stream += len(ids)
        starts, own = _starts(len(prefix), n_stream, length, n, name)
        for start in starts.tolist():
            file.seek(4 * start)
            ids = torch.from_numpy(np.frombuffer(file.read(4 * own), np.int32).astype(np.int64))
            yield torch.cat([prefix, ids])


def _starts(
    n_prefix: int, n_stream: int, length: int, n: int | None, name: str
) -> tuple[Int[Tensor, " window"], int]:
    """Where windows begin, and how many tokens of the stream each holds."""
    own: int = check(length, Annotated[int, Ge(n_prefix + 1)], "window") - n_prefix
    most = n_stream // own
    if most < 1:
        raise InfoFlowError(
            f"{name} has {n_stream} tokens: expected at least {own}, one window; give more text "
            "or a shorter window"
        )
    chosen = min(most, n or most)
    return torch.linspace(0, n_stream - own, chosen, dtype=torch.float64).long(), own


def _pieces(text: str) -> Iterator[str]:
    """A text in pieces that end with a line, or with a word where lines are very long."""
    start = 0
    while len(text) - start > _PIECE:
        stop = text.rfind("\n", start, start + _PIECE) + 1
        stop = stop if stop > start else text.rfind(" ", start + 1, start + _PIECE)
        stop = stop if stop > start else start + _PIECE
        yield text[start:stop]
        start = stop
    yield text[start:]


def _bare(model: nn.Module, text: str) -> Int[Tensor, " pos"]:
    """The ids of a text without what the tokenizer puts before it."""
    ids: Tensor = model.to_tokens(text, truncate=False, prepend_bos=False)  # type: ignore[operator]
    return ids[0].cpu()


def _prefix(model: nn.Module, text: str) -> Int[Tensor, " prefix"]:
    """What the model's tokenizer puts before a text.

    Raises:
        InfoFlowError: for an empty text, or a model without a tokenizer.
    """
    beginning = text[:256]
    whole = tokenized(model, beginning, "the first text")
    return whole[: len(whole) - len(_bare(model, beginning))]
