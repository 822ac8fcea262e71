"""Sequences learnt by heart, and answers looked up in the context: in one step, or hop by hop."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar

import torch
from annotated_types import Le
from jaxtyping import Bool, Float, Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.foundation.settings import Count, Remedy
from infoflow_lens.tasks.task import Split
from infoflow_lens.tasks.tokens import (
    RESPONSE,
    WORD,
    InContextTask,
    TokenTask,
    draw_distinct,
    letters,
    numbers,
    only_match,
)


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


@dataclass(frozen=True, kw_only=True)
class InContextQA(InContextTask):
    """In-context question answering: ``a -> 1  b -> 2  a -> ?``.

    k different questions and k different answers are paired in the context, then one of the
    questions is asked again (Chen & Zou 2024, Sec. 4.2). Uniform over the A(n_q, k) A(n_a, k) k
    sequences. One attention layer fails (Theorem 2), two are enough (Theorem 3). The paper has 100
    questions and 100 answers; k is chosen.

    Attributes:
        n_questions: n_q, the number of question tokens; ids 0 .. n_q - 1, then the sign.
        n_answers: n_a, the number of answer tokens and labels; ids behind the sign.
        n_pairs: k, the number of pairs in the context.

    Raises:
        InfoFlowError: for sizes below 1, or vocabularies too small for k different tokens.
    """

    name: ClassVar[str] = "in_context_qa"
    source: ClassVar[str] = "Chen & Zou 2024, Sec. 4.2 and 9.1"

    n_questions: Count = 100
    n_answers: Count = 100
    n_pairs: Count = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in (("n_questions", "questions"), ("n_answers", "answers")):
            if getattr(self, name) < self.n_pairs:
                raise InfoFlowError(
                    f"{name} is {getattr(self, name)}, too few for n_pairs {self.n_pairs} "
                    f"different {kind}: raise {name}, or lower n_pairs"
                )

    @property
    def alphabet_size(self) -> int:
        """The questions."""
        return self.n_questions

    @property
    def block_length(self) -> int:
        """A question is one token."""
        return 1

    @property
    def space_size(self) -> int:
        """A(n_q, k) A(n_a, k) k."""
        k = self.n_pairs
        return math.perm(self.n_questions, k) * math.perm(self.n_answers, k) * k

    def _alike(
        self, block: Float[Tensor, "*batch word"], asked: Float[Tensor, "*batch word"]
    ) -> Bool[Tensor, "*batch"]:
        return (block == asked).all(dim=-1)

    def _space(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        for questions in itertools.permutations(range(self.n_questions), self.n_pairs):
            for answers in itertools.permutations(range(self.n_answers), self.n_pairs):
                for asked in questions:
                    yield (*questions, asked), answers

    def _draw(
        self, n: int, generator: torch.Generator, split: Split | None
    ) -> Int[Tensor, "batch pos"]:
        k = self.n_pairs
        questions = draw_distinct(n, k, self.n_questions, generator)
        answers = draw_distinct(n, k, self.n_answers, generator)
        asked = torch.randint(k, (n, 1), generator=generator)
        return self.sequences(torch.cat([questions, questions.gather(1, asked)], dim=1), answers)

    def _matching_pair(self, x: Int[Tensor, "batch pos"]) -> Int[Tensor, " batch"]:
        self.check_input(x)
        questions = x[:, self.places(WORD).to(x.device)]
        return only_match(questions[:, :-1] == questions[:, -1:], "questions")


@dataclass(frozen=True, kw_only=True)
class NestedQA(TokenTask):
    """Nested question answering: ``a -> b  b -> c  a -> ?`` asks for what `hops` steps lead to.

    The extension that Chen & Zou 2024 propose in Sec. 7 (their example has 3 hops; two layers a
    hop are enough). Facts form chains of `hops` steps over different entities and come in random
    order [chosen]; the query is the start of one chain. With a single chain its end is the one
    answer that is never asked, which two layers can find without hops; so there are two by
    default [chosen].

    Attributes:
        n_entities: number of entity tokens and labels.
        hops: facts to follow from the query to the answer.
        n_chains: chains in the context.

    Raises:
        InfoFlowError: for sizes below 1, or too few entities.
    """

    name: ClassVar[str] = "nested_qa"
    source: ClassVar[str] = "Chen & Zou 2024, Sec. 7"

    n_entities: Count = 100
    hops: Count = 3
    n_chains: Count = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        needed = (self.hops + 1) * self.n_chains
        if self.n_entities < needed:
            raise InfoFlowError(
                f"n_entities is {self.n_entities}, too few for {self.n_chains} chains of "
                f"{self.hops + 1} different entities: expected at least {needed}"
            )

    @property
    def n_facts(self) -> int:
        """Facts in the context."""
        return self.hops * self.n_chains

    @property
    def alphabet_size(self) -> int:
        """The entities."""
        return self.n_entities

    @property
    def layout(self) -> str:
        """Three tokens a fact, the query and the sign."""
        return (WORD + RESPONSE + WORD) * self.n_facts + WORD + RESPONSE

    @property
    def label_names(self) -> tuple[str, ...]:
        """The entities."""
        return tuple(map(letters, range(self.n_entities)))

    @property
    def space_size(self) -> int:
        """Chains of different entities, the orders of their facts, and the chain that is asked."""
        chains = math.perm(self.n_entities, (self.hops + 1) * self.n_chains)
        # chains in another order are the same facts
        alike = math.factorial(self.n_chains)
        return chains // alike * math.factorial(self.n_facts) * self.n_chains

    @property
    def reads(self) -> range:
        """Every position: which facts matter is found hop by hop, and no schedule is known here."""
        return range(self.n_tokens - 1)

    def _space(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        length = self.hops + 1
        for entities in itertools.permutations(range(self.n_entities), length * self.n_chains):
            chains = [entities[i : i + length] for i in range(0, len(entities), length)]
            if chains != sorted(chains):  # the same facts in another order
                continue
            facts = [pair for chain in chains for pair in itertools.pairwise(chain)]
            for order in itertools.permutations(facts):
                for chain in chains:
                    yield (*itertools.chain(*order), chain[0]), ()

    def _draw(
        self, n: int, generator: torch.Generator, split: Split | None
    ) -> Int[Tensor, "batch pos"]:
        length = self.hops + 1
        drawn = draw_distinct(n, length * self.n_chains, self.n_entities, generator)
        chains = drawn.view(n, self.n_chains, length)
        # one order of the facts, for their starts and their ends alike
        order = draw_distinct(n, self.n_facts, self.n_facts, generator)
        asked = torch.randint(self.n_chains, (n,), generator=generator)
        ends = [part.flatten(1).gather(1, order) for part in (chains[..., :-1], chains[..., 1:])]
        query = chains[torch.arange(n), asked, :1]
        return self.sequences(torch.cat([torch.stack(ends, dim=2).flatten(1), query], dim=1))

    def _follow(self, x: Int[Tensor, "batch pos"]) -> tuple[Tensor, list[Tensor]]:
        """Follow the hops; return the token at the end [batch], and the fact of each hop."""
        self.check_input(x)
        # a fact is start, sign, end; behind all facts come the query and a sign
        sources, targets = x[:, 0:-2:3], x[:, 2::3]
        here, facts = x[:, -2:-1], []
        for _ in range(self.hops):
            fact = only_match(sources == here, "facts")
            facts.append(fact)
            here = targets.gather(1, fact[:, None])
        return here[:, 0], facts

    def target(self, x: Int[Tensor, "batch pos"]) -> Int[Tensor, " batch"]:
        """Return the entity at the end of the chain.

        Raises:
            InfoFlowError: if the chain breaks off or branches.
        """
        return self._follow(x)[0]

    def active_index_set(self, x: Int[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
        """Mark both entities of every fact on the way, and the query.

        A single chain ends in the entity that no fact starts from, whatever is asked: then the end
        and the starts of all other facts are enough.
        """
        active = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
        rows = torch.arange(len(x), device=x.device)
        facts = self._follow(x)[1]
        if self.n_chains == 1:
            active[:, 0:-2:3] = True
            active[rows, 3 * facts[-1]] = False
            active[rows, 3 * facts[-1] + 2] = True
            return active
        for fact in facts:
            active[rows, 3 * fact] = True
            active[rows, 3 * fact + 2] = True
        active[:, -2] = True
        return active
