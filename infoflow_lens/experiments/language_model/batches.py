"""Sequences to train and to measure on; each begins with <|endoftext|>, as TransformerLens's do."""

import torch
from jaxtyping import Int
from torch import Tensor

from infoflow_lens.experiments.language_model.config import LanguageModelConfig
from infoflow_lens.experiments.language_model.tokens import END_OF_TEXT_ID
from infoflow_lens.foundation.seeds import derived_seed


def training_batch(
    stream: Int[Tensor, " tokens"], config: LanguageModelConfig, step: int
) -> Int[Tensor, "batch pos"]:
    """The batch of a step, a function of the seed and the step alone.

    Most sequences are windows of the text. A share of ``config.repeated`` repeats one stretch of
    tokens up to the end: of every two, one repeats text, one random ids. Repeats of text alone can
    be learnt from what usually follows; random ids can only be continued by looking back.
    """
    generator = torch.Generator().manual_seed(derived_seed("batch", config.seed, step))
    length = config.n_context - 1
    rows = _windows(stream, config.batch_size, length, generator)
    for row in range(round(config.repeated * config.batch_size)):
        low, high = config.shortest_repeat, config.longest_repeat
        n = int(torch.randint(low, high + 1, (), generator=generator))
        stretch = rows[row, :n]
        if row % 2:
            stretch = torch.randint(1, config.vocabulary, (n,), generator=generator)
        rows[row] = stretch.repeat(-(-length // n))[:length]
    return _begun(rows)


def text_windows(
    stream: Int[Tensor, " tokens"], n_context: int, n: int | None = None
) -> Int[Tensor, "batch pos"]:
    """Windows that cover a stream without overlap; `n` of them evenly spread, or all.

    What remains behind the last whole window is left out.
    """
    length = n_context - 1
    rows = stream[: len(stream) // length * length].long().view(-1, length)
    if n is not None and n < len(rows):
        rows = rows[torch.linspace(0, len(rows) - 1, n).round().long()]
    return _begun(rows)


def repeated_random(vocabulary: int, n: int, half: int, seed: int = 0) -> Int[Tensor, "batch pos"]:
    """Different random ids, then the same again (Olsson et al. 2022)."""
    generator = torch.Generator().manual_seed(derived_seed("repeated", seed))
    first = torch.rand(n, vocabulary - 1, generator=generator).argsort(dim=1)[:, :half] + 1
    return _begun(torch.cat([first, first], dim=1))


def _windows(stream: Tensor, n: int, length: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(stream) - length + 1, (n,), generator=generator)
    return stream[starts[:, None] + torch.arange(length)].long()


def _begun(rows: Tensor) -> Tensor:
    return torch.cat([torch.full((len(rows), 1), END_OF_TEXT_ID), rows], dim=1)
