"""What every task over token ids offers: names to read, splits that share no sequence."""

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import datasets
from infoflow_lens.foundation.sequences import check_id_range, check_token_ids
from infoflow_lens.tasks.task import (
    SHARES,
    Split,
    Task,
    cuts_by_count,
    cuts_by_share,
    hash_sequences,
    key_range,
)
from infoflow_lens.theory.comparison import ComparisonProfile, Component, context_profile

SIGN = "->"
WORD, RESPONSE, ANSWER = "w", ">", "a"  # what stands at a position, in a layout
_LARGEST_LISTED = 20_000  # spaces up to this size are split sequence by sequence
_MOST_DRAWS_IN_VAIN = 100_000


def letters(index: int) -> str:
    """List a, b, .., z, aa, ab, ..: names for words and questions."""
    name = ""
    # the digits are 1 to 26, without a zero, so that z is followed by aa
    index += 1
    while index:
        index, digit = divmod(index - 1, 26)
        name = chr(ord("a") + digit) + name
    return name


def numbers(n: int) -> tuple[str, ...]:
    """List 1, 2, ..: names for answers and labels."""
    return tuple(str(index + 1) for index in range(n))


@dataclass(frozen=True, kw_only=True)
class TokenTask(Task):
    """A label for every sequence of token ids that ends in the response sign.

    The task is read at that last position, as a classifier over `n_labels` labels. Ids are those of
    words, then the response sign, then answers. Sequences of the three splits differ: by default
    each sequence of the sample space belongs to one split, 8 of 10 to training, drawn from `seed`.
    """

    input_kind: ClassVar[str] = "tokens"

    # What a task is

    @property
    @abstractmethod
    def layout(self) -> str:
        """The kind of every position: "w" a word, ">" the response sign, "a" an answer."""

    @property
    @abstractmethod
    def alphabet_size(self) -> int:
        """The number of words; their ids come first."""

    @property
    @abstractmethod
    def label_names(self) -> tuple[str, ...]:
        """A readable name for every label."""

    @property
    @abstractmethod
    def space_size(self) -> int:
        """The exact number of different sequences."""

    @abstractmethod
    def _space(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Yield the words and answers of all sequences."""

    @abstractmethod
    def _draw(
        self, n: int, generator: torch.Generator, split: Split | None
    ) -> Int[Tensor, "batch pos"]:
        """Draw `n` sequences from the paper's distribution."""

    @abstractmethod
    def target(self, x: Int[Tensor, "batch pos"]) -> Int[Tensor, " batch"]:
        """Return the label of every sequence."""

    @abstractmethod
    def active_index_set(self, x: Int[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
        """Return the positions that the label depends on: a minimal sufficient set [chosen].

        Tokens cannot be differentiated. In place of dF/dx(t) != 0 (eq 4) stands: every sequence
        of the sample space with the same tokens at these positions has the same label, and no
        position can be left out of the set.
        """

    # What follows

    @property
    def n_tokens(self) -> int:
        """n, the number of tokens in a sequence with the response sign."""
        return len(self.layout)

    @property
    def token_names(self) -> tuple[str, ...]:
        """A readable name for every token id: letters, the response sign, the answers' names."""
        answers = self.label_names if ANSWER in self.layout else ()
        return (*map(letters, range(self.alphabet_size)), SIGN, *answers)

    @property
    def d_vocab(self) -> int:
        """Number of token ids."""
        return self.alphabet_size + 1 + (self.n_labels if ANSWER in self.layout else 0)

    @property
    def n_labels(self) -> int:
        """C, the number of labels."""
        return len(self.label_names)

    @property
    def splits_by_sequence(self) -> bool:
        """Say whether the splits divide the sequences themselves, and not words or templates."""
        return True

    def places(self, kind: str) -> Int[Tensor, " place"]:
        """Return the positions at which the layout has `kind`."""
        return torch.tensor([i for i, found in enumerate(self.layout) if found == kind])

    def sequences(
        self, words: Int[Tensor, "batch word"], answers: Int[Tensor, "batch answer"] | None = None
    ) -> Int[Tensor, "batch pos"]:
        """Return the token ids with words and answers, both counted from 0, at their places."""
        # every position begins as the sign, whose id comes right behind the words'
        x = torch.full((len(words), self.n_tokens), self.alphabet_size)
        x[:, self.places(WORD)] = words
        if answers is not None:
            x[:, self.places(ANSWER)] = answers + self.alphabet_size + 1
        return x

    def check_input(self, x: Tensor) -> None:
        """Refuse what is no batch of token ids of this task.

        Raises:
            InfoFlowError: for a wrong shape, dtype or token.
        """
        owner, n = f"task {self.name!r}", self.alphabet_size
        check_token_ids(x, owner, exactly=self.n_tokens)
        ranges = {WORD: (0, n), RESPONSE: (n, n + 1), ANSWER: (n + 1, self.d_vocab)}
        check_id_range(
            x, [ranges[kind] for kind in self.layout], owner, lambda i: self.token_names[i]
        )

    def all_sequences(
        self, limit: int = 1_000_000
    ) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, " batch"]]:
        """List every sequence of the sample space once, with its label.

        Raises:
            InfoFlowError: if there are more than `limit`.
        """
        if self.space_size > limit:
            raise InfoFlowError(
                f"task {self.name!r} has {self.space_size} sequences, more than {limit}: expected "
                "a smaller vocabulary, or a higher limit; sample() draws at random"
            )
        words, answers = zip(*self._space(), strict=True)
        x = self.sequences(torch.tensor(words), torch.tensor(answers) if answers[0] else None)
        return x, self.target(x)

    def draw(
        self, n: int, generator: torch.Generator, split: Split | None = None
    ) -> Int[Tensor, "batch pos"]:
        """Draw `n` sequences from the paper's distribution, or from its part that is the split's.

        Uniform over the sample space; for templates, over templates and then over substitutions.

        Raises:
            InfoFlowError: for a split that has no sequences.
        """
        if split is None or not self.splits_by_sequence:
            return self._draw(n, generator, split)
        small = self.space_size <= _LARGEST_LISTED
        # cut by shares of all keys, a split of a small space could be empty
        low, high = key_range(split, _cuts(self) if small else cuts_by_share())
        found: list[Tensor] = []
        missing, in_vain = n, 0
        while missing:
            # a tenth more than the split's share asks for, so that one round is mostly enough
            drawn = self._draw(max(64, math.ceil(1.1 * missing / SHARES[split])), generator, split)
            # a hash of its tokens says whose a sequence is, without a list of the space
            keys = hash_sequences(drawn, self.seed)
            kept = drawn[torch.from_numpy((keys >= low) & (keys <= high))][:missing]
            in_vain = 0 if len(kept) else in_vain + len(drawn)
            if in_vain > _MOST_DRAWS_IN_VAIN:
                raise InfoFlowError(
                    f"{in_vain} sequences of task {self.name!r} were drawn and none belongs to "
                    f"{split!r}: expected a larger sample space; raise the sizes"
                )
            found.append(kept)
            missing -= len(kept)
        return torch.cat(found)

    def features(self) -> "datasets.Features":
        """Return ``x``, the tokens of a sequence by name, and ``y``, the label by name."""
        return datasets.Features(
            {
                "x": datasets.Sequence(
                    datasets.ClassLabel(names=list(self.token_names)), length=self.n_tokens
                ),
                "y": datasets.ClassLabel(names=list(self.label_names)),
            }
        )

    def render(self, x: Int[Tensor, "batch pos"], answer: bool = False) -> list[str]:
        """Return sequences to read, such as ``a -> 1  b -> 2  a -> ?``.

        Args:
            x: token ids.
            answer: put the label in the place of the question mark.
        """
        self.check_input(x)
        ends = [self.label_names[y] for y in self.target(x).tolist()] if answer else ["?"] * len(x)
        step = self.layout.index(RESPONSE) + 2  # words, the sign, and what it is answered with
        lines = []
        for sequence, end in zip(x.tolist(), ends, strict=True):
            names = [self.token_names[token] for token in sequence]
            parts = [" ".join(names[start : start + step]) for start in range(0, len(names), step)]
            lines.append("  ".join(parts) + f" {end}")
        return lines


@lru_cache(maxsize=64)
def _cuts(task: TokenTask) -> list[int]:
    keys = hash_sequences(task.all_sequences()[0], task.seed)
    return cuts_by_count(keys, f"sequences of task {task.name!r}")


class InContextTask(TokenTask):
    """What tasks in context share: k blocks of l words with an answer each, then words that ask.

    One of the blocks is like the words that ask, in a sense of the task's own; its answer is the
    label.
    """

    n_answers: int
    n_pairs: int

    @property
    @abstractmethod
    def block_length(self) -> int:
        """l, the words of a block."""

    @abstractmethod
    def _alike(
        self, block: Float[Tensor, "*batch word"], asked: Float[Tensor, "*batch word"]
    ) -> Bool[Tensor, "*batch"]:
        """Say whether the asked words match those of a block."""

    @abstractmethod
    def _matching_pair(self, x: Int[Tensor, "batch pos"]) -> Int[Tensor, " batch"]:
        """Return the pair that the last words ask for."""

    def _distinguishing_words(self, x: Int[Tensor, "batch pos"]) -> Bool[Tensor, "batch word"]:
        """Return the words of a block that tell it from others: all."""
        return torch.ones(len(x), self.block_length, dtype=torch.bool, device=x.device)

    @property
    def layout(self) -> str:
        """The blocks with their answers, and the words that ask."""
        block = WORD * self.block_length + RESPONSE
        return (block + ANSWER) * self.n_pairs + block

    @property
    def label_names(self) -> tuple[str, ...]:
        """The answers."""
        return numbers(self.n_answers)

    def word_places(self) -> Int[Tensor, "block word"]:
        """Return the positions of the words of each block; the last block asks."""
        return self.places(WORD).view(self.n_pairs + 1, self.block_length)

    @property
    def comparison(self) -> ComparisonProfile:
        """k - 1 comparisons of (block, answer, query)."""
        words = self.block_length
        return context_profile(self.name, words + 2, words + 1, 2 * words + 1)

    @property
    def components(self) -> tuple[Component, ...]:
        """The block that is asked for, its answer, and the words that ask."""
        *blocks, query = self.word_places().tolist()
        answers, words = self.places(ANSWER).tolist(), self.block_length
        tuples = tuple((*b, a, *query) for b, a in zip(blocks, answers, strict=True))

        def matches(x: Float[Tensor, "*batch arity one"]) -> Float[Tensor, "*batch"]:
            # a tuple holds the words of a block, its answer, and the words that ask
            return self._alike(x[..., :words, 0], x[..., words + 1 :, 0]).to(x.dtype)

        return (Component(arity=2 * words + 1, score=matches, tuples=tuples),)

    def target(self, x: Int[Tensor, "batch pos"]) -> Int[Tensor, " batch"]:
        """Return the answer to what is asked, counted from 0.

        Raises:
            InfoFlowError: if what is asked for does not stand exactly once in the context.
        """
        where = self.places(ANSWER).to(x.device)[self._matching_pair(x)]
        return x.gather(1, where[:, None])[:, 0] - self.alphabet_size - 1

    def active_index_set(self, x: Int[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
        """Mark the words that tell the matching block, the same of the query, and the answer.

        With one pair, the answer alone; with one answer, nothing.
        """
        pair = self._matching_pair(x)
        active = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
        if self.n_answers == 1:
            return active
        active.scatter_(1, self.places(ANSWER).to(x.device)[pair][:, None], True)
        if self.n_pairs > 1:
            distinct, places = self._distinguishing_words(x), self.word_places().to(x.device)
            active.scatter_(1, places[pair], distinct)
            active.scatter_(1, places[-1:].expand(len(x), -1), distinct)
        return active


# Draws and matches


def draw_distinct(
    n: int, k: int, choices: int, generator: torch.Generator
) -> Int[Tensor, "batch k"]:
    """Draw `n` times `k` different numbers below `choices`, in uniformly random order."""
    # the places of the k largest of random numbers, some rows at a time
    rows = max(1, 2**24 // choices)
    parts = [
        torch.rand(min(rows, n - start), choices, generator=generator, dtype=torch.float32)
        .topk(k, dim=1)
        .indices
        for start in range(0, n, rows)
    ]
    return torch.cat(parts)


def only_match(matches: Bool[Tensor, "batch pair"], what: str) -> Int[Tensor, " batch"]:
    """Return the pair of each sequence that matches its query.

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
    # argmax takes no booleans
    return matches.to(torch.int64).argmax(dim=1)
