"""Templates: which words of a sequence are equal, whatever they are."""

import itertools
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import MinLen
from jaxtyping import Bool, Float, Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import Count, Remedy
from infoflow_lens.tasks.task import Split, dealt_out, split_sizes
from infoflow_lens.tasks.tokens import (
    RESPONSE,
    WORD,
    InContextTask,
    TokenTask,
    draw_distinct,
    letters,
    only_match,
)

Pattern = tuple[int, ...]

_LONGEST = 10  # of templates that are listed: Bell's number, 115,975; of length 11, 678,570


def pattern_of(wildcards: Sequence[object]) -> Pattern:
    """Number entries in the order of appearance, equal ones alike: "xyx" becomes (0, 1, 0)."""
    first: dict[object, int] = {}
    return tuple(first.setdefault(wildcard, len(first)) for wildcard in wildcards)


@lru_cache(maxsize=16)
def all_patterns(length: int) -> tuple[Pattern, ...]:
    """List every template of a length, in lexicographic order: its positions' set partitions."""
    if length == 0:
        return ((),)
    # the next word is equal to one of those so far, or the first of a new kind
    return tuple(
        (*head, last)
        for head in all_patterns(length - 1)
        for last in range(max(head, default=-1) + 2)
    )


def patterns_of(words: Int[Tensor, "*batch pos"]) -> Int[Tensor, "*batch pos"]:
    """Number the words of many sequences, each as :func:`pattern_of` does."""
    # [*batch, pos, other pos]; of equal maxima argmax gives the first
    equal = words.unsqueeze(-1) == words.unsqueeze(-2)
    first = equal.to(torch.int8).argmax(dim=-1)  # the first position with the same word
    is_new = first == torch.arange(words.shape[-1], device=words.device)
    # new words are counted through; a repeated one has the number of its first place
    return (is_new.cumsum(dim=-1) - 1).gather(-1, first)


@dataclass(frozen=True, kw_only=True)
class TemplateTask(TokenTask):
    """What tasks over templates share: templates, words, and what is held out.

    Attributes:
        n_words: size of the alphabet that wildcards are substituted from.
        length: l, words in a template.
        templates: templates as strings of wildcards, such as ("aab", "aba"); None for all of that
            length.
        holdout: what validation and test do not share with training: "sequences"; or "words", so
            that all their substitutions are new.

    Raises:
        InfoFlowError: for sizes below 1, templates of another length or twice the same one,
            templates with more wildcards than there are words, or a holdout that leaves a split
            without templates or with too few words.
    """

    n_words: Count
    length: Count
    templates: Annotated[
        Annotated[tuple[str, ...], MinLen(1)] | None, Remedy("such as ('aab', 'aba')")
    ] = None
    holdout: Literal["sequences", "words"] = "sequences"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.templates is not None:
            self._check_templates(self.templates)
        elif self.length > self.n_words:
            raise InfoFlowError(
                f"length is {self.length}, longer than the alphabet of {self.n_words} words "
                "allows: the template of all different words needs as many; raise n_words, or "
                "name the templates"
            )
        elif self.length > _LONGEST:
            raise InfoFlowError(
                f"length is {self.length}: there are too many templates of that length to list, "
                f"expected at most {_LONGEST}; name some in `templates`"
            )
        # each split must have words enough for the template of most wildcards
        if self.holdout == "words":
            split_sizes(self.n_words, self._most_wildcards, "words")

    @property
    def _most_wildcards(self) -> int:
        return max(max(pattern) + 1 for pattern in self.patterns)

    def _check_templates(self, templates: tuple[str, ...]) -> None:
        known: dict[Pattern, str] = {}
        for template in templates:
            if len(template) != self.length:
                raise InfoFlowError(
                    f"template {template!r} has length {len(template)}: expected {self.length}, "
                    "the task's length"
                )
            if len(set(template)) > self.n_words:
                raise InfoFlowError(
                    f"template {template!r} has {len(set(template))} wildcards, more than the "
                    f"{self.n_words} words that substitute them: raise n_words"
                )
            pattern = pattern_of(template)
            if pattern in known:
                raise InfoFlowError(
                    f"templates {known[pattern]!r} and {template!r} are the same up to the "
                    "wildcards' names: expected different ones; leave one of them out"
                )
            known[pattern] = template

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """The templates, each as the numbers of its wildcards in the order of appearance."""
        if self.templates is None:
            return all_patterns(self.length)
        return tuple(map(pattern_of, self.templates))

    @property
    def template_names(self) -> tuple[str, ...]:
        """The templates as strings, such as "aab"."""
        return tuple("".join(map(letters, pattern)) for pattern in self.patterns)

    @property
    def splits_by_sequence(self) -> bool:
        """Say whether the splits divide the sequences themselves, and not words or templates."""
        return self.holdout == "sequences"

    def _distinguishing_positions(self) -> Bool[Tensor, "template pos"]:
        """Find for every template a minimal set of positions that tells it from the others."""
        if self.templates is None and self.length > 1:
            # of two templates that differ at one position only, both are there
            return torch.ones(len(self.patterns), self.length, dtype=torch.bool)
        return _distinguishing(self.patterns)

    @property
    def alphabet_size(self) -> int:
        """The words."""
        return self.n_words

    @abstractmethod
    def word_places(self) -> Int[Tensor, "block word"]:
        """Return the positions of the words, a row for each stretch that follows a template."""

    def _which(self, x: Int[Tensor, "batch pos"]) -> Int[Tensor, "batch block"]:
        """Return the template of every stretch.

        Raises:
            InfoFlowError: for a stretch of words that follows none.
        """
        self.check_input(x)
        found = patterns_of(x[:, self.word_places().to(x.device)])
        # rows are compared whole: a template as one number would pass 2^63 at length 18
        rows, index = found.flatten(0, 1).unique(dim=0, return_inverse=True)
        known = {pattern: number for number, pattern in enumerate(self.patterns)}
        numbers = [known.get(tuple(row), -1) for row in rows.tolist()]
        which = torch.tensor(numbers, dtype=torch.int64, device=x.device)[index]
        which = which.view(found.shape[:2])
        if (which < 0).any():
            row, block = (int(i) for i in (which < 0).nonzero()[0])
            name = "".join(map(letters, found[row, block].tolist()))
            raise InfoFlowError(
                f"the words of sequence {row} follow template {name!r}: expected one of "
                f"{', '.join(self.template_names[:20])}; draw sequences with sample()"
            )
        return which

    def _alphabet(self, split: Split | None) -> Int[Tensor, " word"]:
        """Return the words that a split may use."""
        if split is None or self.holdout != "words":
            return torch.arange(self.n_words)
        return dealt_out(self.n_words, self._most_wildcards, "words", self.seed)[split]

    def _substitute(
        self,
        templates: Int[Tensor, "batch block"],
        generator: torch.Generator,
        split: Split | None,
    ) -> Int[Tensor, "batch block pos"]:
        """Put different random words in the place of every template's wildcards."""
        alphabet = self._alphabet(split)
        n, blocks = templates.shape
        # different words for different wildcards; templates of fewer leave some unused
        drawn = draw_distinct(n * blocks, self._most_wildcards, len(alphabet), generator)
        # wildcard i of a template becomes the i-th of the words that are drawn for it
        pattern = torch.tensor(self.patterns)[templates.flatten()]
        return alphabet[drawn.gather(1, pattern)].view(n, blocks, self.length)

    def _all_substitutions(self, pattern: Pattern) -> Iterator[tuple[int, ...]]:
        for words in itertools.permutations(range(self.n_words), max(pattern) + 1):
            yield tuple(words[wildcard] for wildcard in pattern)


@lru_cache(maxsize=64)
def _distinguishing(patterns: tuple[Pattern, ...]) -> Bool[Tensor, "template pos"]:
    """Find for every template a minimal set of positions that no other template agrees with.

    Later positions are left out first.
    """
    kept = torch.ones(len(patterns), len(patterns[0]), dtype=torch.bool)
    for row, pattern in enumerate(patterns):
        for position in reversed(range(len(pattern))):
            kept[row, position] = False
            some = kept[row].nonzero()[:, 0].tolist()
            # two templates agree on some positions if the same of them are equal to each other
            rest = pattern_of([pattern[i] for i in some])
            kept[row, position] = any(
                pattern_of([other[i] for i in some]) == rest
                for other in patterns
                if other is not pattern
            )
    return kept


@dataclass(frozen=True, kw_only=True)
class TemplateMatching(TemplateTask):
    """Template matching: ``a b b -> ?`` asks which words are equal, not which words they are.

    The label of a sequence is its template (Chen & Zou 2024, Sec. 4.3, Definition 1). Uniform over
    templates and over injective substitutions. One attention layer fails on all substitutions
    (Theorem 4), two are enough (Theorem 5). The paper's alphabet has 210 words; the length is
    chosen. Attributes and errors: see :class:`TemplateTask`.
    """

    name: ClassVar[str] = "template_matching"
    source: ClassVar[str] = "Chen & Zou 2024, Sec. 4.3 and 9.1"

    n_words: Count = 210
    length: Count = 3

    @property
    def layout(self) -> str:
        """The words and the sign."""
        return WORD * self.length + RESPONSE

    @property
    def reads(self) -> range:
        """Every word."""
        return range(self.length)

    @property
    def label_names(self) -> tuple[str, ...]:
        """The templates."""
        return self.template_names

    @property
    def space_size(self) -> int:
        """The number of substitutions of all templates."""
        return sum(math.perm(self.n_words, max(pattern) + 1) for pattern in self.patterns)

    def word_places(self) -> Int[Tensor, "block word"]:
        """Return all positions but the last, as the one stretch."""
        return self.places(WORD)[None]

    def _space(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        for pattern in self.patterns:
            for words in self._all_substitutions(pattern):
                yield words, ()

    def _draw(
        self, n: int, generator: torch.Generator, split: Split | None
    ) -> Int[Tensor, "batch pos"]:
        templates = torch.randint(len(self.patterns), (n, 1), generator=generator)
        return self.sequences(self._substitute(templates, generator, split)[:, 0])

    def target(self, x: Int[Tensor, "batch pos"]) -> Int[Tensor, " batch"]:
        """Return the template of every sequence.

        Raises:
            InfoFlowError: for words that follow no template of the task.
        """
        return self._which(x)[:, 0]

    def active_index_set(self, x: Int[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
        """Return positions that tell the template from all others; all words if all count."""
        distinct = self._distinguishing_positions().to(x.device)[self.target(x)]
        # the sign is the same in all sequences and tells nothing
        return torch.cat([distinct, torch.zeros_like(distinct[:, :1])], dim=1)


@dataclass(frozen=True, kw_only=True)
class InContextTemplateMatching(InContextTask, TemplateTask):
    """In-context template matching: ``a a -> 1  a b -> 2  c c -> ?``.

    k templates with k answers, each with words of its own, then one of the templates again with
    other words (Chen & Zou 2024, Sec. 4.4). Templates are drawn uniformly without repetition,
    substitutions uniformly. Two layers were not found to be enough, three are (Theorem 6). The
    paper has 100 words, 100 answers and templates of length 5; k is chosen.

    Attributes:
        n_answers: number of answer tokens and labels.
        n_pairs: k, the number of pairs in the context.
        holdout: "sequences"; "words"; or "templates", so that all templates of validation and
            test are new. The other attributes and errors: see :class:`TemplateTask`.
    """

    name: ClassVar[str] = "in_context_template_matching"
    source: ClassVar[str] = "Chen & Zou 2024, Sec. 4.4 and 9.1"

    n_words: Count = 100
    length: Count = 5
    n_answers: Count = 100
    n_pairs: Count = 2
    holdout: Literal["sequences", "words", "templates"] = "sequences"  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_answers < self.n_pairs:
            raise InfoFlowError(
                f"n_answers is {self.n_answers}, too few for n_pairs {self.n_pairs} different "
                "answers: raise n_answers, or lower n_pairs"
            )
        if len(self.patterns) < self.n_pairs:
            raise InfoFlowError(
                f"there are {len(self.patterns)} templates of length {self.length}, too few for "
                f"n_pairs {self.n_pairs} different ones: raise length, or lower n_pairs"
            )
        if self.holdout == "templates":
            split_sizes(len(self.patterns), self.n_pairs, "templates")

    @property
    def block_length(self) -> int:
        """The length of the templates."""
        return self.length

    @property
    def space_size(self) -> int:
        """Ordered choices of templates and answers, their substitutions, and the query's."""
        # over subsets of templates: products of their counts of substitutions, and those
        # products times the sum of the counts, which the query may choose from
        products = [1] + [0] * self.n_pairs
        asked = [0] * (self.n_pairs + 1)
        for pattern in self.patterns:
            count = math.perm(self.n_words, max(pattern) + 1)
            # from large sets to small ones, so that a template enters each set once
            for size in reversed(range(self.n_pairs)):
                # the query has a template of the set so far, or the one that is added
                asked[size + 1] += count * (asked[size] + count * products[size])
                products[size + 1] += count * products[size]
        orders = math.factorial(self.n_pairs) * math.perm(self.n_answers, self.n_pairs)
        return orders * asked[self.n_pairs]

    def _alike(
        self, block: Float[Tensor, "*batch word"], asked: Float[Tensor, "*batch word"]
    ) -> Bool[Tensor, "*batch"]:
        return (patterns_of(block) == patterns_of(asked)).all(dim=-1)

    def _space(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        for chosen in itertools.permutations(self.patterns, self.n_pairs):
            for answers in itertools.permutations(range(self.n_answers), self.n_pairs):
                for asked in chosen:
                    for blocks in itertools.product(
                        *map(self._all_substitutions, (*chosen, asked))
                    ):
                        yield tuple(itertools.chain(*blocks)), answers

    def _draw(
        self, n: int, generator: torch.Generator, split: Split | None
    ) -> Int[Tensor, "batch pos"]:
        k = self.n_pairs
        pool = torch.arange(len(self.patterns))
        if split is not None and self.holdout == "templates":
            pool = dealt_out(len(pool), k, "templates", self.seed)[split]
        chosen = pool[draw_distinct(n, k, len(pool), generator)]
        asked = chosen.gather(1, torch.randint(k, (n, 1), generator=generator))
        words = self._substitute(torch.cat([chosen, asked], dim=1), generator, split)
        return self.sequences(words.flatten(1), draw_distinct(n, k, self.n_answers, generator))

    def _matching_pair(self, x: Int[Tensor, "batch pos"]) -> Int[Tensor, " batch"]:
        which = self._which(x)
        return only_match(which[:, :-1] == which[:, -1:], "templates")

    def _distinguishing_words(self, x: Int[Tensor, "batch pos"]) -> Bool[Tensor, "batch word"]:
        return self._distinguishing_positions().to(x.device)[self._which(x)[:, -1]]
