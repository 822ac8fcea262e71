"""Templates: which words of a sequence are equal, whatever they are."""

import itertools
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.seeds import derived_seed
from infoflow_lens.tasks.task import SPLITS, Split
from infoflow_lens.tasks.tokens import (
    SIGN,
    TokenTask,
    check_sizes,
    check_some_match,
    draw_distinct,
    letters,
    numbers,
    split_sizes,
)
from infoflow_lens.theory.comparison import ComparisonProfile, Component, in_context_profile

Pattern = tuple[int, ...]

_MOST_TEMPLATES = 200_000
_LONGEST = 30


def pattern_of(wildcards: Sequence[object]) -> Pattern:
    """Which entries are equal, as numbers in the order of appearance: "xyx" is (0, 1, 0)."""
    first: dict[object, int] = {}
    return tuple(first.setdefault(wildcard, len(first)) for wildcard in wildcards)


def all_patterns(length: int) -> Iterator[Pattern]:
    """Every template of a length, in lexicographic order: the set partitions of its positions."""
    if length == 0:
        yield ()
        return
    for head in all_patterns(length - 1):
        for last in range(max(head, default=-1) + 2):
            yield (*head, last)


def patterns_of(words: Int[Tensor, "*batch pos"]) -> Int[Tensor, "*batch pos"]:
    """:func:`pattern_of` of many sequences."""
    equal = words.unsqueeze(-1) == words.unsqueeze(-2)
    first = equal.to(torch.int8).argmax(dim=-1)  # the first position with the same word
    is_new = first == torch.arange(words.shape[-1], device=words.device)
    return (is_new.cumsum(dim=-1) - 1).gather(-1, first)


@lru_cache(maxsize=16)
def _listed(length: int) -> tuple[Pattern, ...]:
    return tuple(all_patterns(length))


def count_patterns(length: int) -> int:
    """How many templates of a length there are: Bell's number."""
    row = [1]
    for _ in range(length - 1):
        following = [row[-1]]
        for value in row:
            following.append(following[-1] + value)
        row = following
    return row[-1]


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

    n_words: int
    length: int
    templates: tuple[str, ...] | None = None
    holdout: Literal["sequences", "words"] = "sequences"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, ("n_words", "length"))
        if self.templates is None:
            if self.length > self.n_words:
                raise InfoFlowError(
                    f"length is {self.length}, longer than the alphabet of {self.n_words} words "
                    "allows: the template of all different words needs as many; raise n_words, or "
                    "name the templates"
                )
            if self.length > _LONGEST or count_patterns(self.length) > _MOST_TEMPLATES:
                raise InfoFlowError(
                    f"length is {self.length}: there are too many templates of that length to list "
                    f"(expected at most {_MOST_TEMPLATES}); name some in `templates`"
                )
        else:
            if isinstance(self.templates, str) or not isinstance(self.templates, (tuple, list)):
                raise InfoFlowError(
                    f"templates is {self.templates!r}: expected strings such as ('aab', 'aba'), or "
                    "None for all"
                )
            object.__setattr__(self, "templates", tuple(self.templates))
            self._check_templates()
        if self.holdout not in self._holdouts():
            raise InfoFlowError(
                f"holdout is {self.holdout!r}: expected one of {', '.join(self._holdouts())}"
            )
        if self.holdout == "words":
            split_sizes(self.n_words, max(max(p) + 1 for p in self.patterns), "words")

    def _holdouts(self) -> tuple[str, ...]:
        return ("sequences", "words")

    def _check_templates(self) -> None:
        assert self.templates is not None
        if not self.templates:
            raise InfoFlowError("templates is empty: expected at least one, or None for all")
        known: dict[Pattern, str] = {}
        for template in self.templates:
            if not isinstance(template, str):
                raise InfoFlowError(f"template {template!r}: expected a string such as 'aab'")
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
                    "wildcards' names"
                )
            known[pattern] = template

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """The templates, each as the numbers of its wildcards in the order of appearance."""
        if self.templates is None:
            return _listed(self.length)
        return tuple(map(pattern_of, self.templates))

    @property
    def template_names(self) -> tuple[str, ...]:
        """The templates as strings, such as "aab"."""
        return tuple("".join(map(letters, pattern)) for pattern in self.patterns)

    @property
    def splits_by_sequence(self) -> bool:
        """Whether the splits divide the sequences themselves, and not words or templates."""
        return self.holdout == "sequences"

    def _telling_positions(self) -> Bool[Tensor, "template pos"]:
        """For every template a minimal set of positions that tells it from the others."""
        if self.templates is None and self.length > 1:
            # of two templates that differ at one position only, both are there
            return torch.ones(len(self.patterns), self.length, dtype=torch.bool)
        return _telling(self.patterns)

    @abstractmethod
    def _word_positions(self) -> Int[Tensor, "block pos"]:
        """Where the words of each templated stretch stand."""

    def _which(self, x: Int[Tensor, "batch pos"]) -> Int[Tensor, "batch block"]:
        """The template of every stretch.

        Raises:
            InfoFlowError: for a stretch of words that follows none.
        """
        self.check_input(x)
        found = patterns_of(x[:, self._word_positions().to(x.device)])
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
        """The words that a split may use."""
        if split is None or self.holdout != "words":
            return torch.arange(self.n_words)
        wildcards = max(max(pattern) + 1 for pattern in self.patterns)
        return _parts(self.n_words, wildcards, "words", self.seed)[split]

    def _substitute(
        self,
        templates: Int[Tensor, "batch block"],
        generator: torch.Generator,
        split: Split | None,
    ) -> Int[Tensor, "batch block pos"]:
        """Every template with different random words in the place of its wildcards."""
        alphabet = self._alphabet(split)
        wildcards = max(max(pattern) + 1 for pattern in self.patterns)
        n, blocks = templates.shape
        drawn = draw_distinct(n * blocks, wildcards, len(alphabet), generator)
        pattern = torch.tensor(self.patterns)[templates.flatten()]
        return alphabet[drawn.gather(1, pattern)].view(n, blocks, self.length)

    def _all_substitutions(self, pattern: Pattern) -> Iterator[tuple[int, ...]]:
        for words in itertools.permutations(range(self.n_words), max(pattern) + 1):
            yield tuple(words[wildcard] for wildcard in pattern)


@lru_cache(maxsize=64)
def _parts(n: int, least: int, what: str, seed: int) -> dict[Split, Int[Tensor, " part"]]:
    """`n` things dealt out to the splits."""
    sizes = split_sizes(n, least, what)
    generator = torch.Generator().manual_seed(derived_seed("holdout", what, seed))
    order = torch.randperm(n, generator=generator)
    parts = order.split([sizes[split] for split in SPLITS])
    return {split: part.sort().values for split, part in zip(SPLITS, parts, strict=True)}


@lru_cache(maxsize=64)
def _telling(patterns: tuple[Pattern, ...]) -> Bool[Tensor, "template pos"]:
    """For every template a minimal set of positions that no other one agrees with.

    Later positions are left out first.
    """
    kept = torch.ones(len(patterns), len(patterns[0]), dtype=torch.bool)
    for row, pattern in enumerate(patterns):
        for position in reversed(range(len(pattern))):
            kept[row, position] = False
            some = kept[row].nonzero()[:, 0].tolist()
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

    n_words: int = 210
    length: int = 3

    @property
    def n_tokens(self) -> int:
        """The words and the sign."""
        return self.length + 1

    @property
    def reads(self) -> range:
        """Every word."""
        return range(self.length)

    @property
    def token_names(self) -> tuple[str, ...]:
        """Words as letters, then the sign."""
        return (*map(letters, range(self.n_words)), SIGN)

    @property
    def label_names(self) -> tuple[str, ...]:
        """The templates."""
        return self.template_names

    @property
    def space_size(self) -> int:
        """All substitutions of all templates."""
        return sum(math.perm(self.n_words, max(pattern) + 1) for pattern in self.patterns)

    def _kinds(self) -> list[tuple[int, int]]:
        return [(0, self.n_words)] * self.length + [(self.n_words, self.n_words + 1)]

    def _word_positions(self) -> Int[Tensor, "block pos"]:
        return torch.arange(self.length)[None]

    def _space(self) -> Iterator[tuple[int, ...]]:
        for pattern in self.patterns:
            for words in self._all_substitutions(pattern):
                yield (*words, self.n_words)

    def _draw(
        self, n: int, generator: torch.Generator, split: Split | None
    ) -> Int[Tensor, "batch pos"]:
        templates = torch.randint(len(self.patterns), (n, 1), generator=generator)
        words = self._substitute(templates, generator, split)[:, 0]
        return torch.cat([words, torch.full((n, 1), self.n_words)], dim=1)

    def target(self, x: Int[Tensor, "batch pos"]) -> Int[Tensor, " batch"]:
        """The template of every sequence.

        Raises:
            InfoFlowError: for words that follow no template of the task.
        """
        return self._which(x)[:, 0]

    def active_index_set(self, x: Int[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
        """Positions that tell the template from all others: all words, if all templates count."""
        telling = self._telling_positions().to(x.device)[self.target(x)]
        return torch.cat([telling, torch.zeros_like(telling[:, :1])], dim=1)


@dataclass(frozen=True, kw_only=True)
class InContextTemplateMatching(TemplateTask):
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

    n_words: int = 100
    length: int = 5
    n_answers: int = 100
    n_pairs: int = 2
    holdout: Literal["sequences", "words", "templates"] = "sequences"  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, ("n_answers", "n_pairs"))
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

    def _holdouts(self) -> tuple[str, ...]:
        return ("sequences", "words", "templates")

    @property
    def n_tokens(self) -> int:
        """n = k (l + 2) + l + 1."""
        return self.n_pairs * (self.length + 2) + self.length + 1

    @property
    def token_names(self) -> tuple[str, ...]:
        """Words as letters, the sign, answers as numbers from 1."""
        return (*map(letters, range(self.n_words)), SIGN, *self.label_names)

    @property
    def label_names(self) -> tuple[str, ...]:
        """The answers."""
        return numbers(self.n_answers)

    @property
    def space_size(self) -> int:
        """Ordered choices of templates and answers, their substitutions, and the query's."""
        # over subsets of templates: products of their counts of substitutions, and those
        # products times the sum of the counts, which the query may choose from
        products = [1] + [0] * self.n_pairs
        asked = [0] * (self.n_pairs + 1)
        for pattern in self.patterns:
            count = math.perm(self.n_words, max(pattern) + 1)
            for size in reversed(range(self.n_pairs)):
                asked[size + 1] += count * (asked[size] + count * products[size])
                products[size + 1] += count * products[size]
        orders = math.factorial(self.n_pairs) * math.perm(self.n_answers, self.n_pairs)
        return orders * asked[self.n_pairs]

    @property
    def comparison(self) -> ComparisonProfile:
        """k - 1 comparisons of (block, answer, query)."""
        return in_context_profile(self.name, self.length + 2, self.length + 1, 2 * self.length + 1)

    @property
    def components(self) -> tuple[Component, ...]:
        """The block whose template is the query's, its answer, and the query."""
        *blocks, query = self._word_positions().tolist()
        answers = self._answer_positions().tolist()
        tuples = tuple((*b, a, *query) for b, a in zip(blocks, answers, strict=True))
        length = self.length

        def same_template(x: Float[Tensor, "*batch arity one"]) -> Float[Tensor, "*batch"]:
            block, asked = patterns_of(x[..., :length, 0]), patterns_of(x[..., length + 1 :, 0])
            return (block == asked).all(dim=-1).to(x.dtype)

        return (Component(arity=2 * length + 1, score=same_template, tuples=tuples),)

    def _kinds(self) -> list[tuple[int, int]]:
        n = self.n_words
        words, sign, answer = [(0, n)] * self.length, (n, n + 1), (n + 1, n + 1 + self.n_answers)
        return [*words, sign, answer] * self.n_pairs + [*words, sign]

    @property
    def _block_length(self) -> int:
        return self.length + 2

    def _word_positions(self) -> Int[Tensor, "block pos"]:
        starts = torch.arange(self.n_pairs + 1) * (self.length + 2)
        return starts[:, None] + torch.arange(self.length)

    def _answer_positions(self) -> Int[Tensor, " pair"]:
        return torch.arange(1, self.n_pairs + 1) * (self.length + 2) - 1

    def _space(self) -> Iterator[tuple[int, ...]]:
        sign, k = self.n_words, self.n_pairs
        for chosen in itertools.permutations(self.patterns, k):
            for answers in itertools.permutations(range(self.n_answers), k):
                for asked in chosen:
                    for *blocks, query in itertools.product(
                        *map(self._all_substitutions, (*chosen, asked))
                    ):
                        context = [
                            token
                            for words, answer in zip(blocks, answers, strict=True)
                            for token in (*words, sign, sign + 1 + answer)
                        ]
                        yield (*context, *query, sign)

    def _draw(
        self, n: int, generator: torch.Generator, split: Split | None
    ) -> Int[Tensor, "batch pos"]:
        k = self.n_pairs
        pool = torch.arange(len(self.patterns))
        if split is not None and self.holdout == "templates":
            pool = _parts(len(pool), k, "templates", self.seed)[split]
        chosen = pool[draw_distinct(n, k, len(pool), generator)]
        asked = chosen.gather(1, torch.randint(k, (n, 1), generator=generator))
        words = self._substitute(torch.cat([chosen, asked], dim=1), generator, split)
        x = torch.full((n, self.n_tokens), self.n_words)
        x[:, self._word_positions().flatten()] = words.flatten(1)
        answers = draw_distinct(n, k, self.n_answers, generator)
        x[:, self._answer_positions()] = answers + self.n_words + 1
        return x

    def _match(
        self, x: Int[Tensor, "batch pos"]
    ) -> tuple[Int[Tensor, " batch"], Int[Tensor, " batch"]]:
        """The pair whose template is the query's, and that template."""
        which = self._which(x)
        return check_some_match(which[:, :-1] == which[:, -1:], "templates"), which[:, -1]

    def target(self, x: Int[Tensor, "batch pos"]) -> Int[Tensor, " batch"]:
        """The answer to the query's template, counted from 0.

        Raises:
            InfoFlowError: for words that follow no template, or a query whose template does not
                stand exactly once in the context.
        """
        where = self._answer_positions().to(x.device)[self._match(x)[0]]
        return x.gather(1, where[:, None])[:, 0] - self.n_words - 1

    def active_index_set(self, x: Int[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
        """What tells the template in the matching block and in the query, and the answer.

        With one pair, the answer alone; with one answer, nothing.
        """
        pair, template = self._match(x)
        active = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
        if self.n_answers == 1:
            return active
        active.scatter_(1, self._answer_positions().to(x.device)[pair][:, None], True)
        if self.n_pairs > 1:
            telling = self._telling_positions().to(x.device)[template]
            positions = self._word_positions().to(x.device)
            active.scatter_(1, positions[pair], telling)
            active.scatter_(1, positions[-1:].expand(len(x), -1), telling)
        return active
