"""What every task over token ids offers: names to read, splits that share no sequence."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import datasets
import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.seeds import derived_seed
from infoflow_lens.tasks.task import Split, Task, check_count

SIGN = "->"
SHARES: dict[Split, float] = {"train": 0.8, "validation": 0.1, "test": 0.1}
_LARGEST_LISTED = 20_000  # spaces up to this size are split sequence by sequence
_MOST_DRAWS_IN_VAIN = 100_000


def letters(index: int) -> str:
    """a, b, .., z, aa, ab, ..: names for words and questions."""
    name = ""
    index += 1
    while index:
        index, digit = divmod(index - 1, 26)
        name = chr(ord("a") + digit) + name
    return name


def numbers(n: int) -> tuple[str, ...]:
    """1, 2, ..: names for answers and labels."""
    return tuple(str(index + 1) for index in range(n))


@dataclass(frozen=True, kw_only=True)
class TokenTask(Task):
    """A label for every sequence of token ids that ends in the response sign.

    The task is read at that last position, as a classifier over `n_labels` labels. Sequences of
    the three splits differ: by default each sequence of the sample space belongs to one split, 8
    of 10 to training, drawn from `seed`.

    Raises:
        InfoFlowError: for sizes that are no integers of at least 1.
    """

    input_kind: ClassVar[str] = "tokens"

    # What a task is

    @property
    @abstractmethod
    def n_tokens(self) -> int:
        """n, the number of tokens in a sequence with the response sign."""

    @property
    @abstractmethod
    def token_names(self) -> tuple[str, ...]:
        """A readable name for every token id."""

    @property
    @abstractmethod
    def label_names(self) -> tuple[str, ...]:
        """A readable name for every label."""

    @property
    @abstractmethod
    def space_size(self) -> int:
        """How many different sequences there are, exactly."""

    @abstractmethod
    def _kinds(self) -> list[tuple[int, int]]:
        """For every position the range of token ids that may stand there."""

    @abstractmethod
    def _space(self) -> Iterator[tuple[int, ...]]:
        """All sequences."""

    @abstractmethod
    def _draw(
        self, n: int, generator: torch.Generator, split: Split | None
    ) -> Int[Tensor, "batch pos"]:
        """`n` sequences from the paper's distribution."""

    @abstractmethod
    def target(self, x: Int[Tensor, "batch pos"]) -> Int[Tensor, " batch"]:
        """The label of every sequence."""

    @abstractmethod
    def active_index_set(self, x: Int[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
        """The positions that the label depends on: a minimal sufficient set [chosen].

        Tokens cannot be differentiated. In place of dF/dx(t) != 0 (eq 4) stands: every sequence
        of the sample space with the same tokens at these positions has the same label, and no
        position can be left out of the set.
        """

    # What follows

    @property
    def d_vocab(self) -> int:
        """Number of token ids."""
        return len(self.token_names)

    @property
    def n_labels(self) -> int:
        """C, the number of labels."""
        return len(self.label_names)

    @property
    def splits_by_sequence(self) -> bool:
        """Whether the splits divide the sequences themselves, and not words or templates."""
        return True

    def check_input(self, x: Tensor) -> None:
        """Refuse what is no batch of token ids of this task.

        Raises:
            InfoFlowError: for a wrong shape, dtype or token.
        """
        if not isinstance(x, Tensor):
            raise InfoFlowError(
                f"input is {type(x).__name__}: expected a tensor of token ids [batch, "
                f"{self.n_tokens}]; convert with torch.tensor"
            )
        if x.ndim != 2 or x.shape[1] != self.n_tokens:
            raise InfoFlowError(
                f"input has shape {tuple(x.shape)}: task {self.name!r} expects "
                f"[batch, {self.n_tokens}]; load the task with your sizes, or reshape"
            )
        if x.is_floating_point() or x.dtype == torch.bool or x.is_complex():
            raise InfoFlowError(f"input is {x.dtype}: expected integer token ids")
        kinds = torch.tensor(self._kinds(), device=x.device)
        wrong = (x < kinds[:, 0]) | (x >= kinds[:, 1])
        if wrong.any():
            row, position = (int(index) for index in wrong.nonzero()[0])
            low, high = self._kinds()[position]
            raise InfoFlowError(
                f"sequence {row} has token {int(x[row, position])} at position {position}: task "
                f"{self.name!r} expects ids from {low} to {high - 1} there "
                f"({self.token_names[low]} .. {self.token_names[high - 1]})"
            )

    def all_sequences(
        self, limit: int = 1_000_000
    ) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, " batch"]]:
        """Every sequence of the sample space once, with its label.

        Raises:
            InfoFlowError: if there are more than `limit`.
        """
        if self.space_size > limit:
            raise InfoFlowError(
                f"task {self.name!r} has {self.space_size} sequences, more than {limit}: expected "
                "a smaller vocabulary, or a higher limit; sample() draws at random"
            )
        x = torch.tensor(list(self._space()))
        return x, self.target(x)

    def draw(
        self, n: int, generator: torch.Generator, split: Split | None = None
    ) -> Int[Tensor, "batch pos"]:
        """`n` sequences from the paper's distribution, or from its part that is the split's.

        Uniform over the sample space; for templates, over templates and then over substitutions.

        Raises:
            InfoFlowError: for a split that has no sequences.
        """
        if split is None or not self.splits_by_sequence:
            return self._draw(n, generator, split)
        low, high = _bounds(self, split)
        found: list[Tensor] = []
        missing, in_vain = n, 0
        while missing:
            drawn = self._draw(max(64, math.ceil(1.1 * missing / SHARES[split])), generator, split)
            ranks = _keys(drawn, self.seed)
            kept = drawn[torch.from_numpy((ranks >= low) & (ranks <= high))][:missing]
            in_vain = 0 if len(kept) else in_vain + len(drawn)
            if in_vain > _MOST_DRAWS_IN_VAIN:
                raise InfoFlowError(
                    f"{in_vain} sequences of task {self.name!r} were drawn and none belongs to "
                    f"{split!r}: expected a larger sample space; raise the sizes"
                )
            found.append(kept)
            missing -= len(kept)
        return torch.cat(found)

    def features(self) -> datasets.Features:
        """``x``, the tokens of a sequence by name, and ``y``, the label by name."""
        return datasets.Features(
            {
                "x": datasets.Sequence(
                    datasets.ClassLabel(names=list(self.token_names)), length=self.n_tokens
                ),
                "y": datasets.ClassLabel(names=list(self.label_names)),
            }
        )

    def render(self, x: Int[Tensor, "batch pos"], answer: bool = False) -> list[str]:
        """Sequences to read, such as ``a -> 1  b -> 2  a -> ?``.

        Args:
            x: token ids.
            answer: put the label in the place of the question mark.
        """
        self.check_input(x)
        labels = self.target(x).tolist() if answer else None
        lines = []
        for row, sequence in enumerate(x.tolist()):
            names = [self.token_names[token] for token in sequence]
            parts = [" ".join(names[start:end]) for start, end in self._blocks()]
            end = "?" if labels is None else self.label_names[labels[row]]
            lines.append("  ".join(parts) + f" {end}")
        return lines

    @property
    def _block_length(self) -> int:
        """How many tokens belong together: a pair of the context, say."""
        return self.n_tokens

    def _blocks(self) -> list[tuple[int, int]]:
        step, end = self._block_length, self.n_tokens
        return [(start, min(start + step, end)) for start in range(0, end, step)]


# Splits by sequence


def _keys(x: Int[Tensor, "batch pos"], seed: int) -> np.ndarray:
    """A number from 0 to 2^64 - 1 for every sequence: equal ones alike, others as if at random."""
    salt = derived_seed("split", seed)
    keys = np.full(len(x), salt, dtype=np.uint64)
    for column in x.numpy().astype(np.uint64).T:
        # splitmix64 (Steele, Lea, Flood 2014), one round a token
        keys = (keys ^ column) + np.uint64(0x9E3779B97F4A7C15)
        keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        keys ^= keys >> np.uint64(31)
    return keys


def split_sizes(n: int, least: int, what: str) -> dict[Split, int]:
    """How many of `n` things each split has: the shares, but `least` everywhere.

    Raises:
        InfoFlowError: if there are too few.
    """
    sizes: dict[Split, int] = {}
    for split in ("validation", "test"):
        sizes[split] = max(least, int(SHARES[split] * n))
    sizes["train"] = n - sum(sizes.values())
    if sizes["train"] < least:
        raise InfoFlowError(
            f"{n} {what} cannot be split: each of train, validation and test needs {least}, so "
            f"expected at least {3 * least}; raise the sizes, or draw with sample()"
        )
    return sizes


def _bounds(task: TokenTask, split: Split) -> tuple[np.uint64, np.uint64]:
    """The lowest and the highest key of a split's sequences."""
    cuts = _cuts(task) if task.space_size <= _LARGEST_LISTED else _far_cuts()
    start = list(SHARES).index(split)
    return np.uint64(cuts[start]), np.uint64(cuts[start + 1] - 1)


def _far_cuts() -> list[int]:
    ends = np.cumsum(list(SHARES.values()))
    return [0, *(int(end * 2**60) << 4 for end in ends[:-1]), 2**64]


@lru_cache(maxsize=64)
def _cuts(task: TokenTask) -> list[int]:
    """Cuts between the sorted keys of a small space, so that no split is empty."""
    sizes = split_sizes(task.space_size, 1, f"sequences of task {task.name!r}")
    keys = np.unique(_keys(task.all_sequences()[0], task.seed))
    ends = np.cumsum([sizes[split] for split in SHARES])
    return [0, *(int(keys[end]) for end in ends[:-1]), 2**64]


# Draws and checks


def draw_distinct(
    n: int, k: int, choices: int, generator: torch.Generator
) -> Int[Tensor, "batch k"]:
    """`n` times `k` different numbers below `choices`, in uniformly random order."""
    rows = max(1, 2**24 // choices)
    parts = [
        torch.rand(min(rows, n - start), choices, generator=generator).topk(k, dim=1).indices
        for start in range(0, n, rows)
    ]
    return torch.cat(parts)


def check_some_match(matches: Bool[Tensor, "batch pair"], what: str) -> Int[Tensor, " batch"]:
    """The pair of each sequence that matches its query.

    Raises:
        InfoFlowError: if not exactly one does.
    """
    counts = matches.sum(dim=1)
    if (counts != 1).any():
        row = int((counts != 1).nonzero()[0])
        raise InfoFlowError(
            f"sequence {row} has {int(counts[row])} {what} that match its query: expected exactly "
            "one; draw sequences with sample()"
        )
    return matches.to(torch.int64).argmax(dim=1)


def check_sizes(task: Any, names: Sequence[str]) -> None:
    """Refuse sizes of a task that are no integers of at least 1.

    Raises:
        InfoFlowError: naming the first.
    """
    for name in names:
        check_count(getattr(task, name), name)
