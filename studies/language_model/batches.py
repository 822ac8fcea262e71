"""Sequences to train and to measure on; each begins with <|endoftext|>, as TransformerLens's do."""

import torch
from jaxtyping import Int
from torch import Tensor

from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.studies.language_model.config import LanguageModelConfig
from infoflow_lens.studies.language_model.tokens import END_OF_TEXT_ID


def training_batch(
    stream: Int[Tensor, " tokens"], config: LanguageModelConfig, step: int
) -> Int[Tensor, "batch pos"]:
    """Return the batch of a step, a function of the seed and the step alone.

    Most sequences are windows of the text. A share of ``config.repeated`` repeats one stretch of
    tokens up to the end: of every two, one repeats text, one random ids. A model
    can learn repeats of text from frequent tokens alone; to continue random ids it must look back.
    """
    generator = torch.Generator().manual_seed(derive_seed("batch", config.seed, step))
    length = config.n_context - 1
    rows = _windows(stream, config.batch_size, length, generator)
    for row in range(round(config.repeated * config.batch_size)):
        low, high = config.shortest_repeat, config.longest_repeat
        n = int(torch.randint(low, high + 1, (), generator=generator))
        stretch = rows[row, :n]
        if row % 2:
            stretch = torch.randint(1, config.vocabulary, (n,), generator=generator)
        # as many copies as reach the end, by division rounded up
        rows[row] = stretch.repeat(-(-length // n))[:length]
    return _begun(rows)


def text_windows(
    stream: Int[Tensor, " tokens"], n_context: int, n: int | None = None
) -> Int[Tensor, "batch pos"]:
    """Return windows that cover a stream without overlap; `n` of them evenly spread, or all.

    Tokens after the last whole window are left out.
    """
    length = n_context - 1
    rows = stream[: len(stream) // length * length].long().view(-1, length)
    if n is not None and n < len(rows):
        rows = rows[torch.linspace(0, len(rows) - 1, n).round().long()]
    return _begun(rows)


def repeat_random(
    vocabulary: int, n: int, half: int, seed: int = 0, begin: int = END_OF_TEXT_ID
) -> Int[Tensor, "batch pos"]:
    """Draw different random ids, then repeat them (Olsson et al. 2022).

    Args:
        vocabulary: ids are below it.
        n: sequences.
        half: ids before they repeat, fewer than there are.
        seed: of the ids.
        begin: the id that every sequence begins with, which is none of the others.
    """
    first = _different(vocabulary, n, half, seed, begin)
    return _begun(torch.cat([first, first], dim=1), begin)


def repeat_stretches(
    vocabulary: int,
    n: int,
    length: int,
    shortest: int,
    longest: int,
    seed: int = 0,
    begin: int = END_OF_TEXT_ID,
) -> Int[Tensor, "batch pos"]:
    """Draw different random ids that repeat to the end, in each sequence another number of them.

    Args:
        vocabulary: ids are below it.
        n: sequences.
        length: ids of a sequence behind the first.
        shortest, longest: how many of them are different.
        seed: of the ids and of their number.
        begin: the id that every sequence begins with, which is none of the others.
    """  # fmt: skip
    different = _different(vocabulary, n, longest, seed, begin)
    generator = torch.Generator().manual_seed(derive_seed("stretches", seed))
    sizes = torch.randint(shortest, longest + 1, (n, 1), generator=generator)
    return _begun(different.gather(1, torch.arange(length) % sizes), begin)


def _different(vocabulary: int, n: int, count: int, seed: int, begin: int) -> Tensor:
    generator = torch.Generator().manual_seed(derive_seed("repeated", seed))
    ids = torch.rand(n, vocabulary - 1, generator=generator, dtype=torch.float32).argsort(dim=1)[
        :, :count
    ]
    # drawn among one id fewer, they step over the one that begins
    return ids + (ids >= begin)


def _windows(stream: Tensor, n: int, length: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(stream) - length + 1, (n,), generator=generator)
    return stream[starts[:, None] + torch.arange(length)].long()


def _begun(rows: Tensor, begin: int = END_OF_TEXT_ID) -> Tensor:
    return torch.cat([torch.full((len(rows), 1), begin), rows], dim=1)
