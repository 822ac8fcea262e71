"""Answers looked up in the context: in one step, or hop by hop."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.tasks.task import Split
from infoflow_lens.tasks.tokens import (
    SIGN,
    TokenTask,
    check_sizes,
    check_some_match,
    draw_distinct,
    letters,
    numbers,
)
from infoflow_lens.theory.comparison import ComparisonProfile, Component, in_context_profile


def _same_question(x: Float[Tensor, "*batch arity one"]) -> Float[Tensor, "*batch"]:
    """1 for (question, answer, query) in which the question is the query."""
    return (x[..., 0, 0] == x[..., 2, 0]).to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class InContextQA(TokenTask):
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

    n_questions: int = 100
    n_answers: int = 100
    n_pairs: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, ("n_questions", "n_answers", "n_pairs"))
        for name, kind in (("n_questions", "questions"), ("n_answers", "answers")):
            if getattr(self, name) < self.n_pairs:
                raise InfoFlowError(
                    f"{name} is {getattr(self, name)}, too few for n_pairs {self.n_pairs} "
                    f"different {kind}: raise {name}, or lower n_pairs"
                )

    @property
    def n_tokens(self) -> int:
        """n = 3k + 2."""
        return 3 * self.n_pairs + 2

    @property
    def token_names(self) -> tuple[str, ...]:
        """Questions as letters, the sign, answers as numbers from 1."""
        return (*map(letters, range(self.n_questions)), SIGN, *self.label_names)

    @property
    def label_names(self) -> tuple[str, ...]:
        """The answers."""
        return numbers(self.n_answers)

    @property
    def space_size(self) -> int:
        """A(n_q, k) A(n_a, k) k."""
        k = self.n_pairs
        return math.perm(self.n_questions, k) * math.perm(self.n_answers, k) * k

    @property
    def comparison(self) -> ComparisonProfile:
        """k - 1 comparisons of (question, answer, query)."""
        return in_context_profile(self.name, 3, 2, 3)

    @property
    def components(self) -> tuple[Component, ...]:
        """The pair whose question is the query, with the query."""
        asked = 3 * self.n_pairs
        pairs = tuple((start, start + 2, asked) for start in range(0, asked, 3))
        return (Component(arity=3, score=_same_question, tuples=pairs),)

    def _kinds(self) -> list[tuple[int, int]]:
        n = self.n_questions
        question, sign, answer = (0, n), (n, n + 1), (n + 1, n + 1 + self.n_answers)
        return [question, sign, answer] * self.n_pairs + [question, sign]

    @property
    def _block_length(self) -> int:
        return 3

    def _space(self) -> Iterator[tuple[int, ...]]:
        sign, k = self.n_questions, self.n_pairs
        for questions in itertools.permutations(range(self.n_questions), k):
            for answers in itertools.permutations(range(self.n_answers), k):
                context = [
                    token
                    for question, answer in zip(questions, answers, strict=True)
                    for token in (question, sign, sign + 1 + answer)
                ]
                for question in questions:
                    yield (*context, question, sign)

    def _draw(
        self, n: int, generator: torch.Generator, split: Split | None
    ) -> Int[Tensor, "batch pos"]:
        sign, k = self.n_questions, self.n_pairs
        questions = draw_distinct(n, k, self.n_questions, generator)
        answers = draw_distinct(n, k, self.n_answers, generator)
        asked = torch.randint(k, (n, 1), generator=generator)
        x = torch.full((n, self.n_tokens), sign)
        x[:, 0 : 3 * k : 3] = questions
        x[:, 2 : 3 * k : 3] = answers + sign + 1
        x[:, 3 * k] = questions.gather(1, asked)[:, 0]
        return x

    def _pair(self, x: Int[Tensor, "batch pos"]) -> Int[Tensor, " batch"]:
        """The pair that holds the query."""
        self.check_input(x)
        end = 3 * self.n_pairs
        return check_some_match(x[:, 0:end:3] == x[:, end, None], "questions")

    def target(self, x: Int[Tensor, "batch pos"]) -> Int[Tensor, " batch"]:
        """The answer behind the question that is asked, counted from 0.

        Raises:
            InfoFlowError: if the query does not stand exactly once in the context.
        """
        where = 3 * self._pair(x) + 2
        return x.gather(1, where[:, None])[:, 0] - self.n_questions - 1

    def active_index_set(self, x: Int[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
        """The matching question, its answer and the query.

        With one pair, the answer alone; with one answer, nothing.
        """
        question = 3 * self._pair(x)
        active = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
        if self.n_answers == 1:
            return active
        rows = torch.arange(len(x), device=x.device)
        active[rows, question + 2] = True
        if self.n_pairs > 1:
            active[rows, question] = True
            active[:, 3 * self.n_pairs] = True
        return active


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

    n_entities: int = 100
    hops: int = 3
    n_chains: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, ("n_entities", "hops", "n_chains"))
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
    def n_tokens(self) -> int:
        """Three tokens a fact, the query and the sign."""
        return 3 * self.n_facts + 2

    @property
    def token_names(self) -> tuple[str, ...]:
        """Entities as letters, then the sign."""
        return (*self.label_names, SIGN)

    @property
    def label_names(self) -> tuple[str, ...]:
        """The entities."""
        return tuple(map(letters, range(self.n_entities)))

    @property
    def space_size(self) -> int:
        """Chains of different entities, the orders of their facts, and the chain that is asked."""
        chains = math.perm(self.n_entities, (self.hops + 1) * self.n_chains)
        alike = math.factorial(self.n_chains)
        return chains // alike * math.factorial(self.n_facts) * self.n_chains

    @property
    def reads(self) -> range:
        """Every position: which facts matter is found hop by hop, and no schedule is known here."""
        return range(self.n_tokens - 1)

    def _kinds(self) -> list[tuple[int, int]]:
        entity, sign = (0, self.n_entities), (self.n_entities, self.n_entities + 1)
        return [entity, sign, entity] * self.n_facts + [entity, sign]

    @property
    def _block_length(self) -> int:
        return 3

    def _space(self) -> Iterator[tuple[int, ...]]:
        length = self.hops + 1
        for entities in itertools.permutations(range(self.n_entities), length * self.n_chains):
            chains = [entities[i : i + length] for i in range(0, len(entities), length)]
            if chains != sorted(chains):  # the same facts in another order
                continue
            facts = [pair for chain in chains for pair in itertools.pairwise(chain)]
            for order in itertools.permutations(facts):
                context = [t for a, b in order for t in (a, self.n_entities, b)]
                for chain in chains:
                    yield (*context, chain[0], self.n_entities)

    def _draw(
        self, n: int, generator: torch.Generator, split: Split | None
    ) -> Int[Tensor, "batch pos"]:
        length = self.hops + 1
        drawn = draw_distinct(n, length * self.n_chains, self.n_entities, generator)
        chains = drawn.view(n, self.n_chains, length)
        order = draw_distinct(n, self.n_facts, self.n_facts, generator)
        asked = torch.randint(self.n_chains, (n,), generator=generator)
        x = torch.full((n, self.n_tokens), self.n_entities)
        x[:, 0:-2:3] = chains[:, :, :-1].flatten(1).gather(1, order)
        x[:, 2::3] = chains[:, :, 1:].flatten(1).gather(1, order)
        x[:, -2] = chains[torch.arange(n), asked, 0]
        return x

    def _follow(self, x: Int[Tensor, "batch pos"]) -> tuple[Tensor, list[Tensor]]:
        """Where the hops lead, and the facts on the way."""
        self.check_input(x)
        sources, targets = x[:, 0:-2:3], x[:, 2::3]
        here, facts = x[:, -2:-1], []
        for _ in range(self.hops):
            fact = check_some_match(sources == here, "facts")
            facts.append(fact)
            here = targets.gather(1, fact[:, None])
        return here[:, 0], facts

    def target(self, x: Int[Tensor, "batch pos"]) -> Int[Tensor, " batch"]:
        """The entity at the end of the chain.

        Raises:
            InfoFlowError: if the chain breaks off or branches.
        """
        return self._follow(x)[0]

    def active_index_set(self, x: Int[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
        """Both entities of every fact on the way, and the query.

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
