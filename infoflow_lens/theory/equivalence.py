"""Components that can be retrieved together: Definition 2 asks for the least number of trees.

What a target lists is not what it needs: its outer function may leave components out or read their
maximum alone, scores may put tuples in the same order, and a score of pairs may split into scores
of single tokens. All is decided on sampled tokens [measured], so a schedule that rests on it is run
on samples before it is believed, and no exclusion rests on it.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from infoflow_lens.theory.comparison import Component, Part, Score, best_tuples
from infoflow_lens.theory.score_graph import (
    ASKED,
    collapse,
    graph_of,
    order_of,
    permute,
    reverses,
)
from infoflow_lens.theory.trees import Plan, plans

Outer = Callable[[Float[Tensor, "batch component"]], Tensor]

_FILLINGS = 12  # other tokens of a tuple under which the order of one place is compared
_ENDS = 40  # tokens that are put in order
_RESTS = 6  # values of the other components, over which an outer function is averaged
_MOST_ORDERS = 24  # of the places of a tuple
_FEW = 8  # single tokens that serve a tuple, at most
_FAR = 10
_EXTREME = (64, 32)  # sequences and tokens, whose best tuples are extreme
_TRIED = ((50, 16), (1000, 16), (1000, 64), (100, 256))  # on which they must serve, in turn
_MOST_TRIED = 10**7  # scores of one of these


@dataclass(frozen=True)
class Reading:
    """A list of components that serves a target.

    Attributes:
        components: what is retrieved.
        notes: how it follows from the target's own list, in words; none for that list itself.
        tokens: some tokens, on which scores are asked; None where they are not.
    """

    components: tuple[Component, ...]
    notes: tuple[str, ...] = ()
    tokens: Float[Tensor, "sample d_token"] | None = field(default=None, compare=False)

    def plans(self) -> Iterator[Plan]:
        """Plans for those of its components whose scores' graphs are trees."""
        return iter(()) if self.tokens is None else plans(self.components, self.tokens)


def readings(
    components: Sequence[Component],
    tokens: Float[Tensor, "sample d_token"],
    outer: Outer | None = None,
    values: Float[Tensor, "batch component"] | None = None,
) -> list[Reading]:
    """Return the target's own list, and those that serve it as well.

    Args:
        components: the target's list.
        tokens: some tokens.
        outer: its outer function, of the components' preferences; None where all are needed.
        values: preferences of the components on some inputs, for `outer`.

    Raises:
        InfoFlowError: for declared parts that a score does not have.
    """
    found = [Reading(tuple(components), tokens=tokens)]
    if any(c.tuples is not None for c in components):
        return found
    # rows of tokens of other rows: inputs that a few samples do not have
    if values is not None:  # also such as no sampled input has: which one is largest varies
        generator = torch.Generator().manual_seed(0)
        pool = torch.randint(
            values.numel(), (4 * len(values), values.shape[1]), generator=generator
        )
        values = torch.cat([values, values.flatten()[pool]])
    # what a component splits into is dear to find, and the same with and without joins
    known: dict[int, tuple[Component, list[Component], list[str]]] = {}

    def split(component: Component, notes: list[str]) -> list[Component]:
        if id(component) not in known:
            said = list[str]()
            known[id(component)] = component, _split(component, tokens, said), said
        _, parts, said = known[id(component)]
        notes += said
        return parts

    # with and without either of two changes, as each may make the search harder
    for joins in (False, True):
        for splits in (False, True):
            kept, notes = list(components), list[str]()
            if outer is not None and values is not None:
                used = _list_inputs(outer, values)
                if len(used) < len(kept):
                    notes.append("the outer function reads some components only")
                kept = [components[i] for i in used]
                if joins:
                    kept = _join_components(outer, values, components, used, tokens, notes)
            if splits:
                kept = [part for c in kept for part in split(c, notes)]
            kept = _different(kept, tokens, notes)
            other = Reading(tuple(kept), tuple(dict.fromkeys(notes)), tokens)
            if notes and other.notes not in [reading.notes for reading in found]:
                found.append(other)
    return found


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=1e-4, atol=1e-6)


def _list_inputs(outer: Outer, values: Float[Tensor, "batch component"]) -> list[int]:
    """List the components that the outer function depends on; the first if on none."""
    whole = outer(values)
    used = []
    for index in range(values.shape[1]):
        changed = values.clone()
        # exchange the values of this component alone among the samples
        changed[:, index] = values[:, index].roll(1)
        if not _same(outer(changed), whole):
            used.append(index)
    return used or [0]


def _join_components(
    outer: Outer,
    values: Float[Tensor, "batch component"],
    components: Sequence[Component],
    used: Sequence[int],
    tokens: Float[Tensor, "sample d_token"],
    notes: list[str],
) -> list[Component]:
    """Join components that one tuple serves, whatever the others are: the largest of several.

    It does where the outer function of values at two tuples, some of each, is never above that of
    one tuple alone. Components with shorter tuples look at their first tokens.
    """
    # several outputs may need one component each
    if outer(values[:2]).shape[1] > 1:
        return [components[i] for i in used]
    groups: list[list[int]] = []
    # in a group if one tuple is best for all of it, whatever the others hold
    for index in used:
        for group in groups:
            together = [components[i] for i in (*group, index)]
            alike = {(c.positions, c.distinct) for c in together}
            single = all(c.rank == 1 for c in together)
            if len(alike) == 1 and single and _one_serves(
                outer, values, components, (*group, index), tokens
            ):  # fmt: skip
                group.append(index)
                break
        else:
            groups.append([index])
    if len(groups) < len(used):
        notes.append("one tuple is best for several scores together")
    return [
        components[group[0]]
        if len(group) == 1
        else _best_of(outer, values, components, group, tokens)
        for group in groups
    ]


def _joint(
    outer: Outer,
    rests: Float[Tensor, "rest component"],
    components: Sequence[Component],
    group: Sequence[int],
    sign: float,
    x: Float[Tensor, "*batch member arity d_token"],
) -> Float[Tensor, "*batch rest"]:
    """The outer function, up to a sign, of a tuple for each member of a group, others at rest."""
    z = rests.to(x).expand(*x.shape[:-3], *rests.shape).clone()
    for member, index in enumerate(group):
        component = components[index]
        tuples = x[..., member, : component.arity, :]
        # the tuple's value takes the place of this component's own in every state of rest
        z[..., index] = component.preference(tuples).to(z).unsqueeze(-1)
    return sign * outer(z.flatten(0, -2))[..., 0].view(z.shape[:-1])


def _one_serves(
    outer: Outer,
    values: Float[Tensor, "batch component"],
    components: Sequence[Component],
    group: Sequence[int],
    tokens: Float[Tensor, "sample d_token"],
) -> float:
    """1 or -1 if the outer function, times this, is largest at one tuple for all of a group; or 0.

    It must grow with each of them, and which of two tuples is better may not change with the rest.
    Seen on a few tuples first, then on 20,000.
    """

    def holds(sign: float, n: int) -> bool:
        # larger values of the newest member may never lower the outer function
        raised = values.clone()
        raised[:, group[-1]] = values[:, group[-1]].roll(1).maximum(values[:, group[-1]])
        if not bool((sign * (outer(raised) - outer(values)) >= -1e-6).all()):
            return False
        generator = torch.Generator().manual_seed(n)
        shape = (n, 1, max(components[i].arity for i in group))
        # two tuples a draw, [draw, member, arity, d_token], each the same for all members
        first, second = (
            tokens[torch.randint(len(tokens), shape, generator=generator)].expand(
                -1, len(group), -1, -1
            )
            for _ in range(2)
        )
        # a mixture gives each member one of the two tuples
        which = torch.randint(2, (n, len(group), 1, 1), generator=generator).bool()
        rows = torch.randint(len(values), (2, values.shape[1]), generator=generator)
        # two states of the other components, each value from its own column
        rests = values.gather(0, rows)
        # [tuple, draw, rest]: the outer function at the first, at the second and at the mixture
        ends = torch.stack(
            [
                _joint(outer, rests, components, group, sign, x)
                for x in (first, second, torch.where(which, first, second))
            ]
        )
        slack = 1e-5 * ends.abs().amax(dim=0) + 1e-9
        # the sign of the gap must be the same for all rests, and mixtures no better than both
        gap = ends[0] - ends[1]
        gap = torch.where(gap.abs() > slack, gap.sign(), torch.zeros_like(gap))
        return bool((gap.prod(dim=1) >= 0).all()) and bool(
            (ends[2] <= ends[:2].amax(0) + slack).all()
        )

    signs = (s for s in (1.0, -1.0) if all(holds(s, n) for n in (200, 50 * ASKED)))
    return next(signs, 0.0)


def _best_of(
    outer: Outer,
    values: Float[Tensor, "batch component"],
    components: Sequence[Component],
    group: Sequence[int],
    tokens: Float[Tensor, "sample d_token"],
) -> Component:
    """A component whose score is the outer function of one tuple for a group, others at rest."""
    sign, rests = _one_serves(outer, values, components, group, tokens), values[:_RESTS]

    def score(x: Tensor) -> Tensor:
        each = x.unsqueeze(-3).expand(*x.shape[:-2], len(group), *x.shape[-2:])
        return _joint(outer, rests, components, group, sign, each).mean(dim=-1)

    members = [components[i] for i in group]
    arity = max(c.arity for c in members)
    symmetric = all(c.symmetric and c.arity == arity for c in members)
    return replace(
        members[0], arity=arity, score=score, symmetric=symmetric, extremum="max", parts=None
    )


def _split(
    component: Component, tokens: Float[Tensor, "sample d_token"], notes: list[str]
) -> list[Component]:
    """Places that one token may fill left out, and a component for each part of the score's graph.

    A part in which the order at every place is one order or its reverse, as in products of numbers,
    is single tokens: the best tuple has the largest or the smallest at each place.
    """
    # places that must differ are joined whatever the score is, so nothing splits
    if component.arity == 1 or component.distinct:
        return [component]
    fewer = collapse(component, tokens)
    if fewer.arity < component.arity:
        notes.append("places of a tuple may hold the same token")
    graph, parts = graph_of(fewer, tokens), list[Component]()
    for places in graph.parts:
        part = _part(fewer, places, tokens) if len(graph.parts) > 1 else fewer
        ends = _ends(fewer, places, tokens) if len(places) > 1 else None
        few = _few(part, tokens) if ends is None and part is fewer else None
        if ends is not None:
            notes.append("a score of tuples is best at ends of an order of single tokens")
        elif few is not None:
            notes.append("the best tuple has the best tokens by a few scores of single tokens")
        elif len(graph.parts) > 1:
            notes.append("a score of tuples splits into scores of fewer tokens")
        parts += ends or few or [part]
    return parts


def _part(component: Component, places: Sequence[int], tokens: Tensor) -> Component:
    """Return a component of its own for a part of a score's graph."""
    inside = [p for p in component.parts or () if set(p.places) <= set(places)]
    return replace(
        component,
        arity=len(places),
        score=order_of(component, places, len(places), tokens),
        symmetric=len(places) == 1,
        extremum="max",
        parts=tuple(Part(tuple(places.index(k) for k in p.places), p.score) for p in inside)
        or None,
    )


def _ends(
    component: Component, places: Sequence[int], tokens: Float[Tensor, "sample d_token"]
) -> list[Component] | None:
    """Find both ends of an order of single tokens for each place; None if one has several."""
    parts = []
    for place in places:
        others = tokens[: _FILLINGS * component.arity].view(_FILLINGS, component.arity, -1)
        # [token, filling]
        scores = _score_at(component.preference, others, place, tokens[-_ENDS:, None])
        # for every filling of the other places, how each pair of tokens is ordered at this place
        signs = [
            (s[:, None] - s).sign() * ((s[:, None] - s).abs() > 1e-4 * s.std()) for s in scores.T
        ]
        # the filling that tells most pairs apart; every other must agree with it or its reverse
        most = max(signs, key=lambda each: int((each != 0).sum()))
        if not all((each * most >= 0).all() or (each * most <= 0).all() for each in signs):
            return None
        # the filling under which the order shows most clearly stands for all
        row = int(scores.std(dim=0).argmax())
        for sign in (1.0, -1.0):
            score = partial(_end, component.preference, others[[row]], place, sign)
            parts.append(
                replace(component, arity=1, score=score, symmetric=True, extremum="max", parts=None)
            )
    return parts


def _few(component: Component, tokens: Float[Tensor, "sample d_token"]) -> list[Component] | None:
    """Find a few scores of single tokens by which the best tuple's tokens are best; None if none.

    The farthest pair by the sum or the largest of coordinates' distances has the ends of a few
    directions. The scores are the component's own at one place beside extreme tokens, and beside
    such as lie farther out. They must serve every sequence that is tried, of four lengths: where
    more tokens are best as T grows, as for the farthest pair in a plane, some fail.
    """
    generator = torch.Generator().manual_seed(5)

    def draw(n: int, n_tokens: int) -> Tensor:
        return tokens[torch.randint(len(tokens), (n, n_tokens), generator=generator)]

    if component.arity == 1 or any(
        n * size**component.arity > _MOST_TRIED for n, size in (_EXTREME, *_TRIED)
    ):
        return None
    extreme = draw(*_EXTREME)
    best = best_tuples(extreme, component)[0]
    beside = extreme[torch.arange(len(extreme))[:, None], best]
    # seen from far outside, a distance is an order along a direction
    beside = torch.cat([_FAR * beside, beside])
    kept = [
        partial(_end, component.preference, row[None], place, 1.0)
        for row in beside
        for place in range(component.arity)
    ]
    for number, (n, n_tokens) in enumerate(_TRIED):
        x = draw(n, n_tokens)
        best = best_tuples(x, component)[0]
        found = torch.stack([score(x[:, :, None]).argmax(dim=1) for score in kept])
        # [score, sequence, place]: whether the token at the place is the best by the score
        serves = found[:, :, None] == best
        if not bool(serves.any(dim=0).all()):
            return None
        # the first trial refuses fast, the second chooses, the others test the choice at larger T
        if number != 1:
            continue
        # as few as serve these sequences, each time the one that serves most of what is left
        chosen, left = list[int](), torch.ones_like(best, dtype=torch.bool)
        while bool(left.any()) and len(chosen) < _FEW:
            chosen.append(int((serves & left).sum(dim=(1, 2)).argmax()))
            left = left & ~serves[chosen[-1]]
        if bool(left.any()):
            return None
        # what was chosen first may be served by those chosen later
        for index in list(chosen):
            others = [each for each in chosen if each != index]
            if bool(serves[others].any(dim=0).all()):
                chosen = others
        kept = [kept[index] for index in chosen]
    return [
        replace(component, arity=1, score=score, symmetric=True, extremum="max", parts=None)
        for score in kept
    ]


def _score_at(
    score: Score, others: Tensor, place: int, x: Tensor
) -> Float[Tensor, "*batch filling"]:
    """Score single tokens x [..., 1, d_token] at a place, by fillings of the other places."""
    filled = others.to(x).expand(*x.shape[:-2], *others.shape).clone()
    filled[..., place, :] = x
    return score(filled)


def _end(score: Score, others: Tensor, place: int, sign: float, x: Tensor) -> Tensor:
    return sign * _score_at(score, others, place, x)[..., 0]


def _different(
    components: Sequence[Component], tokens: Float[Tensor, "sample d_token"], notes: list[str]
) -> list[Component]:
    """Keep one component of all that order tuples alike; of ranks the one farthest in."""
    kept: list[Component] = []
    for component in components:
        for number, other in enumerate(kept):
            if _same_order(component, other, tokens):
                farthest = max(component, other, key=lambda c: c.rank)
                kept[number] = farthest
                notes.append(
                    "several ranks by one score are found one below the other"
                    if component.rank != other.rank
                    else "several scores put the tuples in the same order"
                )
                break
        else:
            kept.append(component)
    return kept


def _same_order(one: Component, other: Component, tokens: Float[Tensor, "sample d_token"]) -> bool:
    known = ("arity", "positions", "distinct")
    if any(getattr(one, name) != getattr(other, name) for name in known):
        return False
    everywhere = range(one.arity)
    orders = itertools.islice(itertools.permutations(everywhere), _MOST_ORDERS)
    return any(
        not reverses(one.preference, one.arity, everywhere, (), tokens, 50 * ASKED, turned)
        for turned in (partial(permute, other.preference, order) for order in orders)
    )
