"""The graph of a score: which places of a tuple it compares together; plans of messages on trees.

Places i and j of a score s(x_1, .., x_a) are joined if the order of two fillings of one can change
with what stands at the other, all else fixed. A sum of parts joins places that share a part, and so
does every increasing function of it. The largest score of T tokens can be found by eliminating
places one by one: about ``T^(w + 1)`` comparisons with w the treewidth of the graph, in the place
of ``T^a`` [derived]. Whether that is the least is open.

Graphs are asked on samples: what happens in a share p of n samples is missed with probability
``(1 - p)^n``, so that what was never seen happens less than 3/n of the time (95%). Nothing is
excluded by an edge that was missed, and a plan that rests on one is run before it is believed.

A tree of any number of places is served by attention: every place but the root is a message, one
head of tokens in a layer after those below it, and the root is read by one head of CLS in a later
layer [proved, where a subtree's order does not change with the rest: what is held is best whatever
stands outside]. Messages that put candidates in one order are one.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from jaxtyping import Float
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.theory.comparison import Component, Score, sum_of_parts
from infoflow_lens.theory.jobs import Message

ASKED = 400  # pairs of fillings for each question
_COLLAPSED = 10_000
_ANCHORS = 6  # fillings of the other places, over which scores of some places are averaged
_POOL = 2000  # from which extreme ones are taken, where some of them hide the order
_BEST = 40
_EXTREME = 4
_ROUNDING = 1e-5  # relative, of numbers of 32 bits
_FIRST = 40  # draws, for a first look
_MOST_PLACES = 12  # the treewidth is exact, by subsets


@dataclass(frozen=True)
class ScoreGraph:
    """Which places of a score are joined.

    Attributes:
        n_places: a, the length of the tuples.
        edges: pairs (i, j) with i < j.
    """

    n_places: int
    edges: frozenset[tuple[int, int]]

    def neighbours(self, place: int) -> list[int]:
        """List the places that are joined with a place, in order."""
        return sorted(i + j - place for i, j in self.edges if place in (i, j))

    @cached_property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """Its connected parts, each in order."""
        return tuple(
            sorted({self._reach(place, range(self.n_places)) for place in range(self.n_places)})
        )

    @property
    def is_forest(self) -> bool:
        """Say whether no places stand in a circle."""
        return len(self.edges) == self.n_places - len(self.parts)

    def _reach(self, start: int, through: Iterable[int]) -> tuple[int, ...]:
        """List the places to which paths from a place lead that go through these alone."""
        found, left, inside = {start}, [start], set(through)
        while left:
            for place in self.neighbours(left.pop()):
                if place in inside - found:
                    found.add(place)
                    left.append(place)
        return tuple(sorted(found))

    @cached_property
    def width(self) -> int:
        """The treewidth: the most places beside one when it is eliminated, in the best order.

        By the best order of every subset [Bodlaender et al. 2012, dynamic programming].

        Raises:
            InfoFlowError: for more than 12 places.
        """
        if self.n_places > _MOST_PLACES:
            raise InfoFlowError(
                f"the score has {self.n_places} places: expected at most {_MOST_PLACES}, whose "
                "subsets can be tried"
            )
        best: dict[frozenset[int], int] = {frozenset(): 0}
        for size in range(1, self.n_places + 1):
            for left in map(frozenset, itertools.combinations(range(self.n_places), size)):
                best[left] = min(
                    max(best[left - {last}], len(self._outside(last, left))) for last in left
                )
        return best[frozenset(range(self.n_places))]

    def _outside(self, place: int, gone: frozenset[int]) -> set[int]:
        """Return the neighbours of a place once others are eliminated."""
        reached = self._reach(place, gone)
        return {other for p in reached for other in self.neighbours(p)} - gone


def graph_of(
    component: Component, tokens: Float[Tensor, "sample d_token"], n: int = ASKED
) -> ScoreGraph:
    """Find the graph of a component's score: as declared, or asked by the order of fillings.

    Args:
        component: its `parts` declare the graph; positions that must differ join all places.
        tokens: tokens that stand at places.
        n: pairs of fillings for each ordered pair of places, at four scores each.

    Raises:
        InfoFlowError: if the order at one place was seen to change with another, and no declared
            part has both.
    """
    pairs = list(itertools.combinations(range(component.arity), 2))
    # distinct places are compared with each other, whatever the score
    if component.distinct:
        return ScoreGraph(component.arity, frozenset(pairs))
    rest = lambda i, j: [k for k in range(component.arity) if k not in (i, j)]  # noqa: E731
    # two places belong together if what is better at one changes with the token at the other
    asked = frozenset(
        (i, j)
        for i, j in pairs
        if any(
            reverses(component.preference, component.arity, [one], rest(i, j), tokens, n)
            for one in (i, j)
        )
    )
    if component.parts is None:
        return ScoreGraph(component.arity, asked)
    declared = {pair for part in component.parts for pair in itertools.combinations(part.places, 2)}
    # what is declared may say more than what was seen, and never less
    unsaid = asked - declared
    if unsaid:
        i, j = min(unsaid)
        raise InfoFlowError(
            f"parts has none with places {i} and {j}, but which token is better at one of them "
            "changes with the token at the other: expected a part of the score with both, "
            f"Part(({i}, {j}))"
        )
    return ScoreGraph(component.arity, frozenset(declared))


def reversals(
    score: Score,
    arity: int,
    places: Sequence[int],
    fixed: Sequence[int],
    tokens: Float[Tensor, "sample d_token"],
    n: int = ASKED,
    seed: int = 0,
    other: Score | None = None,
) -> float:
    """Return how often two fillings of some places change their order with the rest's tokens.

    Sees through every increasing function of a score, but no noise: differences below the rounding
    of 32-bit numbers count as ties.

    Args:
        score: from tokens [..., arity, d_token].
        arity: its places.
        places: those that are filled in two ways.
        fixed: those whose tokens stay.
        tokens: tokens to draw from.
        n: draws.
        seed: of the draws.
        other: a score whose order is compared, in the place of the rest's other tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    first, second, changed = (_fillings(tokens, n, arity, generator) for _ in range(3))
    filled = torch.tensor([place in places for place in range(arity)])[:, None]
    rest = torch.tensor([place not in (*places, *fixed) for place in range(arity)])[:, None]
    # the same rest beside both fillings, and then another rest beside both
    both = first, torch.where(filled, second, first)
    before = _step(score, *both)
    after = (
        _step(score, *(torch.where(rest, changed, x) for x in both))
        if other is None
        else _step(other, *both)
    )
    return float((before * after < 0).double().mean())


def reverses(
    score: Score,
    arity: int,
    places: Sequence[int],
    fixed: Sequence[int],
    tokens: Float[Tensor, "sample d_token"],
    n: int,
    other: Score | None = None,
) -> bool:
    """Say whether :func:`reversals` sees any, in a few draws or else in all."""
    draws = (_FIRST, n)
    return any(reversals(score, arity, places, fixed, tokens, m, m, other) > 0 for m in draws)


@dataclass(frozen=True, eq=False)
class Order:
    """How a score puts fillings of its first places in order, beside given tokens at the others.

    Attributes:
        score: from tokens [..., arity, d_token].
        arity: its places.
        n_filled: how many of them are filled.
        tokens: tokens to draw from.
    """

    score: Score
    arity: int
    n_filled: int
    tokens: Float[Tensor, "sample d_token"] = field(repr=False)

    @cached_property
    def look(self) -> Float[Tensor, " draw"]:
        """The signs of a few of its steps, which tell most orders apart and are taken once."""
        generator = torch.Generator().manual_seed(_FIRST)
        first, second = (_fillings(self.tokens, _FIRST, self.arity, generator) for _ in range(2))
        second[:, self.n_filled :] = first[:, self.n_filled :]
        return _step(self.score, first, second)

    def agrees(self, other: "Order", n: int) -> bool:
        """Say whether no filling is better than another one by this and worse by the other.

        Args:
            other: an order of as many places.
            n: draws in which none must be seen.
        """
        if bool((self.look * other.look < 0).any()):
            return False
        filled, given = range(self.n_filled), range(self.n_filled, self.arity)
        return reversals(self.score, self.arity, filled, given, self.tokens, n, n, other.score) == 0


def _step(score: Score, one: Tensor, two: Tensor) -> Tensor:
    """Return the sign of a difference, 0 within rounding of its terms."""
    a, b = score(one).double(), score(two).double()
    rounding = _ROUNDING * (a.abs() + b.abs() + a.abs().median() / 10)
    return torch.where((a - b).abs() > rounding, (a - b).sign(), torch.zeros_like(a))


def _fillings(tokens: Tensor, n: int, arity: int, generator: torch.Generator) -> Tensor:
    return tokens[torch.randint(len(tokens), (n, arity), generator=generator)]


def collapse(component: Component, tokens: Float[Tensor, "sample d_token"]) -> Component:
    """Leave out places of a component that may hold the same token as another.

    They may where ``s(.. p .. q ..) <= max(s(.. p .. p ..), s(.. q .. q ..))`` for all tokens, as
    for ``x'P y`` with P positive semidefinite; the largest score is then reached with one token at
    both. Where they must differ, as in ``max(f(x), g(y))``, any other token at one of them must do
    as well: ``s(.. p .. p ..) <= max(s(.. p .. q ..), s(.. q .. p ..))``. Seen on 10,000 fillings.
    """
    if component.rank > 1 or component.tuples is not None:
        return component
    x = _fillings(tokens, _COLLAPSED, component.arity, torch.Generator().manual_seed(3))
    scores = component.preference(x)
    slack = _ROUNDING * (scores.std() + 1e-9)
    for i, j in itertools.combinations(range(component.arity), 2):
        first, second, turned = x.clone(), x.clone(), x.clone()
        # the token of i at both places, that of j at both, and each at the other's place
        first[:, j], second[:, i] = x[:, i], x[:, j]
        turned[:, [i, j]] = x[:, [j, i]]
        one, other = component.preference(first), component.preference(second)
        one_serves = bool((scores <= torch.maximum(one, other) + slack).all())
        if one_serves and component.distinct:
            apart = torch.maximum(scores, component.preference(turned))
            one_serves = bool((torch.maximum(one, other) <= apart + slack).all())
        if one_serves:
            kept = [place for place in range(component.arity) if place != j]
            # the place that is left out takes the token of the one that stands for it
            at = [kept.index(i if place == j else place) for place in range(component.arity)]
            preference = partial(permute, component.preference, at)
            n = len(kept)
            fewer = replace(
                component, arity=n, score=preference, symmetric=n == 1, extremum="max", parts=None,
                distinct=component.distinct and n > 1,
            )  # fmt: skip
            return collapse(fewer, tokens)
    return component


def permute(score: Score, at: Sequence[int], x: Tensor) -> Tensor:
    """Score the tokens at some places, in another order."""
    return score(x[..., list(at), :])


def order_of(component: Component, places: Sequence[int], n_filled: int, tokens: Tensor) -> Score:
    """Make a score that puts fillings of some places in the component's order, others fixed.

    Args:
        component: whose order it is.
        places: those that are filled in different ways, then those whose tokens are given.
        n_filled: how many are filled.
        tokens: tokens to draw from.

    Returns:
        From tokens [..., len(places), d_token] to numbers [...]: the sum of declared parts inside
        these places, where their order was seen to be the component's; else the component's
        preference, averaged over a few fillings of the rest.
    """
    if len(places) == component.arity:
        return partial(permute, component.preference, [places.index(p) for p in range(len(places))])
    inside = [part for part in component.parts or () if set(part.places) <= set(places)]
    if inside and all(part.score for part in inside):
        # declared parts are exact and cheap; they serve where their order is the component's
        said = partial(sum_of_parts, inside, places)
        whole = partial(permute, said, places)
        filled, given = places[:n_filled], places[n_filled:]
        score, n = component.preference, 5 * ASKED
        if not reverses(score, component.arity, filled, given, tokens, n, whole):
            return said
    anchors = _choose_anchors(component.preference, component.arity, places, n_filled, tokens)
    return partial(_average, component.preference, places, anchors)


def _average(score: Score, places: Sequence[int], anchors: Tensor, x: Tensor) -> Tensor:
    return score_beside(score, places, anchors, x).double().mean(dim=-1)


def score_beside(
    score: Score, places: Sequence[int], anchors: Tensor, x: Tensor
) -> Float[Tensor, "*batch anchor"]:
    """Score tokens at some places beside each of several fillings of the rest."""
    filled = anchors.to(x).expand(*x.shape[:-2], *anchors.shape).clone()
    filled[..., list(places), :] = x.unsqueeze(-3)
    return score(filled)


def _choose_anchors(
    score: Score,
    arity: int,
    places: Sequence[int],
    n_filled: int,
    tokens: Float[Tensor, "sample d_token"],
) -> Float[Tensor, "anchor arity d_token"]:
    """Choose fillings of the rest beside which fillings of some places show their order.

    A few are enough where each shows the whole order, as for sums. The least of two parts shows
    the order of one only where the other is larger, and the largest where it is smaller: there the
    fillings of the rest that make scores largest and smallest are taken, too.
    """
    generator = torch.Generator().manual_seed(4)
    anchors = _fillings(tokens, _ANCHORS, arity, generator)
    first, second = (_fillings(tokens, ASKED, arity, generator)[:, list(places)] for _ in range(2))
    # places whose tokens are given hold the same ones in both fillings
    second[:, n_filled:] = first[:, n_filled:]
    beside = partial(score_beside, score, places)
    # differences that some filling of the rest shows, and others hide
    shown = _step(partial(beside, anchors), first, second) != 0
    if bool((shown.any(dim=1) == shown.all(dim=1)).all()):
        return anchors
    # beside fillings that are best under these, as it is the best that must be told apart
    best = first[beside(anchors, first).double().mean(dim=1).argsort()[-_BEST:]]
    pool = _fillings(tokens, _POOL, arity, generator)
    order = beside(pool, best).double().mean(dim=0).argsort()
    return torch.cat([anchors, pool[order[:_EXTREME]], pool[order[-_EXTREME:]]])


def partners_grow(component: Component, tokens: Float[Tensor, "sample d_token"]) -> bool:
    """Say whether more tokens are some query's best partner among 256 keys than among 16.

    Where they do not, a few single tokens serve as partners, as the farthest ones do for convex
    scores, and no head has to look up pairs.
    """
    generator = torch.Generator().manual_seed(7)
    queries = tokens[torch.randint(len(tokens), (256,), generator=generator)]
    counts = []
    for n_keys in (16, 256):
        keys = tokens[torch.randint(len(tokens), (n_keys,), generator=generator)]
        pairs = torch.stack(torch.broadcast_tensors(queries[:, None], keys[None]), dim=-2)
        # the best first token for every second one, too; the side with fewer partners counts
        sides = [component.preference(x).argmax(dim=1) for x in (pairs, pairs.flip(-2))]
        counts.append(min(len(keys[side].unique(dim=0)) for side in sides))
    return counts[1] > counts[0]


_MOST_ROOTS = 64  # choices of roots that are tried
_MOST_PLACEMENTS = 200


@dataclass(frozen=True)
class Plan:
    """What heads must do for some components, whatever the layers are.

    Attributes:
        components: the indices of those that are served.
        messages: heads of tokens, those that are needed first.
        reads: heads of CLS.
    """

    components: frozenset[int]
    messages: tuple[Message, ...]
    reads: tuple[Message, ...]

    def placements(self, n_heads: Sequence[int]) -> Iterator[Mapping[Message, int]]:
        """Find layers for all messages and reads in which none has more of them than heads."""
        last = len(n_heads) - 1
        left = {False: list(n_heads), True: list(n_heads)}
        at: dict[Message, int] = {}

        def fill(rest: Sequence[Message]) -> Iterator[Mapping[Message, int]]:
            if not rest:
                yield dict(at)
                return
            job, read = rest[0], rest[0].parent is None
            first = max([at[need] + 1 for need, _ in job.needs], default=0)
            # a message stands above those that it needs; where heads run out, an earlier one moves
            # reads may stand in the last layer, messages may not: tokens are not read after it
            for layer in range(first, last + read):
                if left[read][layer]:
                    left[read][layer] -= 1
                    at[job] = layer
                    yield from fill(rest[1:])
                    del at[job]
                    left[read][layer] += 1

        return itertools.islice(fill((*self.messages, *self.reads)), _MOST_PLACEMENTS)


def plans(
    components: Sequence[Component], tokens: Float[Tensor, "sample d_token"]
) -> Iterator[Plan]:
    """Plan all components whose graphs are trees of two or more places, for each choice of roots.

    Args:
        components: what is retrieved.
        tokens: tokens on which graphs and orders are asked.
    """
    asked: dict[int, ScoreGraph] = {}
    for index, component in enumerate(components):
        if component.arity > 1 and component.tuples is None:
            graph = graph_of(component, tokens)
            if graph.is_forest and len(graph.parts) == 1:
                asked[index] = graph
    if not asked:
        return
    makers = _Maker(components, tokens)
    choices = itertools.product(*(range(graph.n_places) for graph in asked.values()))
    for roots in itertools.islice(choices, _MOST_ROOTS):
        messages: list[Message] = []
        reads = [
            makers.make(index, graph, root, None, messages)[0]
            for (index, graph), root in zip(asked.items(), roots, strict=True)
        ]
        yield Plan(frozenset(asked), tuple(messages), tuple(reads))


@dataclass
class _Maker:
    """Messages of trees, each order made once."""

    components: Sequence[Component]
    tokens: Tensor

    def __post_init__(self) -> None:
        self._made: dict[tuple[int, int, int | None], Message] = {}
        self._alike: dict[tuple[Message, Message], tuple[int, ...] | None] = {}
        self._turned: dict[Message, dict[tuple[int, ...], Order]] = {}

    def make(
        self, index: int, graph: ScoreGraph, place: int, parent: int | None, known: list[Message]
    ) -> tuple[Message, tuple[int, ...]]:
        """Make the message of a place, and the order in which it carries the places below.

        Those that it needs, and itself if it is no read, are added to the known ones; one of them
        that puts candidates in the same order stands for it.
        """
        below = [p for p in graph.neighbours(place) if p != parent]
        needs = tuple(self.make(index, graph, child, place, known) for child in below)
        key = (index, place, parent)
        # other roots may know other messages, and then this one needs those
        if key not in self._made or self._made[key].needs != needs:
            component = self.components[index]
            filled = _subtree(graph, place, parent)
            places = filled if parent is None else [*filled, parent]
            score = order_of(component, places, len(filled), self.tokens)
            self._made[key] = Message(index, place, parent, score, needs)
        message = self._made[key]
        own = tuple(range(message.size))
        if parent is None:
            return message, own
        # a message that puts candidates in the same order does the same work
        for other in known:
            order = own if other is message else self._order(other, message)
            if order is not None:
                return other, order
        known.append(message)
        return message, own

    def _order(self, one: Message, two: Message) -> tuple[int, ...] | None:
        """Find the order in which the second asks for what the first carries; None if unlike."""
        if (one, two) not in self._alike:
            self._alike[one, two] = self._find_order(one, two)
        return self._alike[one, two]

    def _find_order(self, one: Message, two: Message) -> tuple[int, ...] | None:
        alike = ("positions", "distinct")
        first, second = (self.components[job.component] for job in (one, two))
        if one.size != two.size or any(getattr(first, n) != getattr(second, n) for n in alike):
            return None
        own, others = self._orders(one)[tuple(range(one.size))], self._orders(two)
        return next((at for at, turned in others.items() if own.agrees(turned, 5 * ASKED)), None)

    def _orders(self, message: Message) -> dict[tuple[int, ...], Order]:
        """Return the orders of a message, by how the places below it are taken, as is first."""
        if message not in self._turned:
            n = message.size
            # the place itself stays first and the parent last
            turned = ((0, *rest) for rest in itertools.permutations(range(1, n)))
            self._turned[message] = {
                at: Order(partial(permute, message.score, [*at, n]), n + 1, n, self.tokens)
                for at in turned
            }
        return self._turned[message]


def _subtree(graph: ScoreGraph, place: int, parent: int | None) -> list[int]:
    """Return a place and all below it, in the order in which messages carry them."""
    below = [p for p in graph.neighbours(place) if p != parent]
    return [place, *(p for child in below for p in _subtree(graph, child, place))]
