"""Plans for scores whose graphs are trees: which messages heads must carry, and in which order.

A tree of any number of places is served by attention: every place but the root is a message, one
head of tokens in a layer after those below it, and the root is read by one head of CLS in a later
layer [proved, where a subtree's order does not change with the rest: what is held is best whatever
stands outside]. Messages that put candidates in one order are one.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from jaxtyping import Float
from torch import Tensor

from infoflow_lens.theory.comparison import Component
from infoflow_lens.theory.jobs import Message
from infoflow_lens.theory.score_graph import (
    ASKED,
    Order,
    ScoreGraph,
    graph_of,
    order_of,
    permute,
)

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
