"""Memorization: a label of its own for every stored sequence."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar

import torch
from annotated_types import Le
from jaxtyping import Bool, Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.foundation.settings import Count, Remedy
from infoflow_lens.tasks.splits import Split
from infoflow_lens.tasks.tokens import RESPONSE, WORD, TokenTask, numbers


@dataclass(frozen=True, kw_only=True)
class Memorization(TokenTask):
    """Sequence classification: N random sequences of words, each with a label of its own.

    One attention layer with a head for each position is enough (Chen & Zou 2024, Sec. 4.1 and
    Theorem 1). The paper's words number 500, its sequences have 6 of them and the sign; the number
    of sequences is chosen. What is measured is memory, so all splits draw from the same N
    sequences.

    Attributes:
        n_words: size of the alphabet.
        length: words in a sequence; the response sign comes on top.
        n_sequences: N, the number of stored sequences and of labels, drawn from `seed`.

    Raises:
        InfoFlowError: for sizes below 1, or more labels than there are sequences.
    """

    name: ClassVar[str] = "memorization"
    source: ClassVar[str] = "Chen & Zou 2024, Sec. 4.1 and 9.1"

    n_words: Count = 500
    length: Count = 6
    n_sequences: Annotated[Count, Le(1_000_000), Remedy("since all are kept")] = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        # a long product would take forever, and is large enough
        if math.log(self.n_sequences) > self.length * math.log(self.n_words) + 1e-9:
            raise InfoFlowError(
                f"n_sequences is {self.n_sequences}, but {self.n_words} words make only "
                f"{self.n_words**self.length} sequences of length {self.length}: every label needs "
                "a sequence; lower n_sequences, or raise n_words or length"
            )

    @property
    def layout(self) -> str:
        """The words and the sign."""
        return WORD * self.length + RESPONSE

    @property
    def alphabet_size(self) -> int:
        """The words."""
        return self.n_words

    @property
    def reads(self) -> range:
        """Every word; some of them can be enough for a given set of sequences."""
        return range(self.length)

    @property
    def label_names(self) -> tuple[str, ...]:
        """Labels as numbers from 1."""
        return numbers(self.n_sequences)

    @property
    def space_size(self) -> int:
        """N."""
        return self.n_sequences

    @property
    def splits_by_sequence(self) -> bool:
        """Say no: a task that is learned by heart has nothing to hold out."""
        return False

    def _space(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        return ((tuple(row), ()) for row in _draw_sequences(self)[:, :-1].tolist())

    def _draw(
        self, n: int, generator: torch.Generator, split: Split | None
    ) -> Int[Tensor, "batch pos"]:
        return _draw_sequences(self)[torch.randint(self.n_sequences, (n,), generator=generator)]

    def target(self, x: Int[Tensor, "batch pos"]) -> Int[Tensor, " batch"]:
        """Return the label of every sequence, which is its number among the stored ones.

        Raises:
            InfoFlowError: for a sequence that is not stored.
        """
        self.check_input(x)
        labels = _labels(self)
        found = [labels.get(tuple(row), -1) for row in x.tolist()]
        if -1 in found:
            row = found.index(-1)
            raise InfoFlowError(
                f"sequence {row}, {x[row].tolist()}, is none of the {self.n_sequences} stored "
                "ones and has no label: expected sequences from sample() or all_sequences()"
            )
        return torch.tensor(found, dtype=torch.int64, device=x.device)

    def active_index_set(self, x: Int[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
        """Return positions that tell the sequence from all other stored ones, none to spare.

        Later positions are left out first.
        """
        labels = self.target(x)
        return _distinguishing(self).to(x.device)[labels]


@lru_cache(maxsize=8)
def _draw_sequences(task: Memorization) -> Int[Tensor, "sequence pos"]:
    """Return the N different sequences, in random order; a sequence's row is its label."""
    generator = torch.Generator().manual_seed(derive_seed("memorization", task.seed))
    few = max(4 * task.n_sequences, 100_000)
    # a small space is shuffled whole; of a large one sequences are drawn until enough differ
    if task.length * math.log(task.n_words) <= math.log(few):
        space = task.n_words**task.length
        numbers = torch.randperm(space, generator=generator)[: task.n_sequences, None]
        places = task.n_words ** torch.arange(task.length)
        # the number of a sequence, to the base of n_words, has its words as digits
        words = numbers // places % task.n_words
    else:
        # a dict keeps the order of the draws and has each sequence once
        rows: dict[tuple[int, ...], None] = {}
        while len(rows) < task.n_sequences:
            missing = task.n_sequences - len(rows)
            drawn = torch.randint(task.n_words, (missing, task.length), generator=generator)
            rows.update(dict.fromkeys(map(tuple, drawn.tolist())))
        words = torch.tensor(list(rows))
    return task.sequences(words)


@lru_cache(maxsize=8)
def _labels(task: Memorization) -> dict[tuple[int, ...], int]:
    return {tuple(row): label for label, row in enumerate(_draw_sequences(task).tolist())}


@lru_cache(maxsize=8)
def _distinguishing(task: Memorization) -> Bool[Tensor, "sequence pos"]:
    """Find for every sequence a minimal set of positions that no other sequence agrees with."""
    stored = _draw_sequences(task)
    kept = torch.zeros(stored.shape, dtype=torch.bool)
    # some rows at a time: each is compared with all others, position by position
    rows = max(1, 2**24 // math.prod(stored.shape))
    for start in range(0, len(stored), rows):
        part = stored[start : start + rows]
        differs = part[:, None] != stored[None]  # [row, other, pos]
        own = torch.arange(start, start + len(part))
        needed = torch.ones(part.shape, dtype=torch.bool)
        # leave a position out unless another sequence then agrees with all the rest
        for position in reversed(range(stored.shape[1])):
            needed[:, position] = False
            distinct = (differs & needed[:, None]).any(dim=2)
            # a sequence never differs from itself, which must not count
            distinct[torch.arange(len(part)), own] = True
            needed[:, position] = ~distinct.all(dim=1)
        kept[start : start + rows] = needed
    return kept
