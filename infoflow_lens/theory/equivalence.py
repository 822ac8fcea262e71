"""Components that can be retrieved together: Definition 2 asks for the least number of trees.

What a target lists is not what it needs: its outer function may leave components out or read their
maximum alone, scores may put tuples in the same order, and a score of pairs may split into scores
of single tokens. All is decided on sampled tokens [measured], so a schedule that rests on it is run
on samples before it is believed, and no exclusion rests on it.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from infoflow_lens.theory.comparison import Component, Part, Score, best_tuples
from infoflow_lens.theory.score_graph import (
    ASKED,
    Order,
    Plan,
    collapse,
    graph_of,
    order_of,
    permute,
    plans,
    score_beside,
)

Outer = Callable[[Float[Tensor, "batch component"]], Tensor]

_FILLINGS = 12  # other tokens of a tuple under which the order of one place is compared
_ENDS = 40  # tokens that are put in order
_RESTS = 6  # values of the other components, over which an outer function is averaged
_MOST_ORDERS = 120  # of the places of a tuple
_FEW = 8  # single tokens that serve a tuple, at most
_LOOKED = 200  # sequences, of those by which they are chosen, that refuse most components
_FAR = 10
_EXTREME = (64, 32)  # sequences and tokens, whose best tuples are extreme
_TRIED = ((50, 16), (1000, 16), (1000, 64), (100, 256))  # on which they must serve, in turn
_MOST_TRIED = 10**7  # scores of one of these
_MOST_AT_ONCE = 2**22  # numbers of tokens beside which others are scored


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
        """Return plans for those of its components whose scores' graphs are trees."""
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
    lists = [(list(components), list[str]())]
    if outer is not None and values is not None:
        used, notes = _list_inputs(outer, values), list[str]()
        if len(used) < len(components):
            notes.append("the outer function reads some components only")
        joined = list(notes)
        lists = [
            ([components[i] for i in used], notes),
            (_join_components(outer, values, components, used, tokens, joined), joined),
        ]
    for chosen, before in lists:
        for splits in (False, True):
            notes = list(before)
            kept = [part for c in chosen for part in split(c, notes)] if splits else chosen
            kept = _drop_needless(_different(kept, tokens, notes), tokens, notes)
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
    signs = {index: _signs(outer, values, index) for index in used}
    # in a group if one tuple is best for all of it, whatever the others hold
    for index in used:
        for group in groups:
            together = [components[i] for i in (*group, index)]
            alike = {(c.positions, c.distinct) for c in together}
            single = all(c.rank == 1 for c in together)
            both = [sign for sign in signs[group[-1]] if sign in signs[index]]
            if len(alike) == 1 and single and (
                found := _one_serves(outer, values, components, (*group, index), tokens, both)
            ):  # fmt: skip
                group.append(index)
                signs[index] = [found]
                break
        else:
            groups.append([index])
    if len(groups) < len(used):
        notes.append("one tuple is best for several scores together")
    return [
        components[group[0]]
        if len(group) == 1
        else _best_of(outer, values, components, group, signs[group[-1]][0])
        for group in groups
    ]


def _signs(outer: Outer, values: Float[Tensor, "batch component"], index: int) -> list[float]:
    """List 1 if the outer function never falls, and -1 if it never grows, as a component grows."""
    raised = values.clone()
    raised[:, index] = values[:, index].roll(1).maximum(values[:, index])
    change = outer(raised) - outer(values)
    return [sign for sign in (1.0, -1.0) if bool((sign * change >= -1e-6).all())]


def _joint(
    outer: Outer,
    rests: Float[Tensor, "rest component"],
    components: Sequence[Component],
    group: Sequence[int],
    sign: float,
    x: Float[Tensor, "*batch member arity d_token"],
) -> Float[Tensor, "*batch rest"]:
    """Apply the outer function, up to a sign, to tuples of a group's members, others at rest."""
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
    signs: Sequence[float],
) -> float | None:
    """Find the first sign by which the outer function is largest at one tuple for a group.

    Which of two tuples is better may not change with the rest. Seen on a few tuples first, then on
    20,000.
    """

    def holds(sign: float, n: int) -> bool:
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

    found = (sign for sign in signs if all(holds(sign, n) for n in (200, 50 * ASKED)))
    return next(found, None)


def _best_of(
    outer: Outer,
    values: Float[Tensor, "batch component"],
    components: Sequence[Component],
    group: Sequence[int],
    sign: float,
) -> Component:
    """Make a component whose score is the outer function of one tuple for a group, others at rest.

    Args:
        outer, values, components: as in :func:`readings`.
        group: the indices of its members.
        sign: -1 where the outer function is least at the best tuple.
    """
    rests = values[:_RESTS]

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
    """Leave out places that one token may fill, and make a component of each part of the graph.

    A part in which the order at every place is one order or its reverse, as in products of numbers,
    is single tokens: the best tuple has the largest or the smallest at each place.
    """
    if component.arity == 1:
        return [component]
    fewer = collapse(component, tokens)
    if fewer.arity < component.arity:
        notes.append("places of a tuple may hold the same token")
    # places that must differ are joined whatever the score is, so nothing splits
    if fewer.arity == 1 or fewer.distinct:
        return [fewer]
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
    parts = list[Component]()
    for place in places:
        others = tokens[: _FILLINGS * component.arity].view(_FILLINGS, component.arity, -1)
        # [token, filling]
        scores = score_beside(component.preference, [place], others, tokens[-_ENDS:, None])
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
        parts += [_single(component, others[[row]], place, sign) for sign in (1.0, -1.0)]
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
    kept = list(itertools.product(range(len(beside)), range(component.arity)))

    def serves(x: Tensor) -> Bool[Tensor, "score sequence place"]:
        """Say whether the best token by each score is the one at each place of the best tuple."""
        return _best_ends(component, beside, kept, x)[:, :, None] == best_tuples(x, component)[0]

    for number, (n, n_tokens) in enumerate(_TRIED):
        x = draw(n, n_tokens)
        # the first trial refuses fast, the second chooses, the others test the choice at larger T
        if number == 1 and _cover(serves(x[:_LOOKED]), _FEW + _FEW // 2) is None:
            return None  # as few of them need more already, not only by an unlucky choice
        found = serves(x)
        if not bool(found.any(dim=0).all()):
            return None
        if number == 1:
            chosen = _cover(found, _FEW)
            if chosen is None:
                return None
            kept = [kept[index] for index in chosen]
    return [_single(component, beside[[row]], place, 1.0) for row, place in kept]


def _cover(serves: Bool[Tensor, "score sequence place"], most: int) -> list[int] | None:
    """Choose scores that serve all, each time the one that serves most of what is left."""
    chosen, left = list[int](), torch.ones_like(serves[0])
    while bool(left.any()) and len(chosen) < most:
        chosen.append(int((serves & left).sum(dim=(1, 2)).argmax()))
        left = left & ~serves[chosen[-1]]
    if bool(left.any()):
        return None
    # what was chosen first may be served by those chosen later
    for index in list(chosen):
        others = [each for each in chosen if each != index]
        if bool(serves[others].any(dim=0).all()):
            chosen = others
    return chosen


def _best_ends(
    component: Component,
    beside: Float[Tensor, "row arity d_token"],
    kept: Sequence[tuple[int, int]],
    x: Float[Tensor, "sequence pos d_token"],
) -> Int[Tensor, "score sequence"]:
    """Find the best token by each score of single tokens: at a place, beside a row of others."""
    found = torch.zeros(len(kept), len(x), dtype=torch.int64)
    for place in range(component.arity):
        numbers = torch.tensor([i for i, (_, own) in enumerate(kept) if own == place])
        for some in numbers.split(max(1, _MOST_AT_ONCE // (x.numel() * component.arity))):
            rows = beside[[kept[i][0] for i in some]]
            # [sequence, token, row]
            scores = score_beside(component.preference, [place], rows, x[:, :, None])
            found[some] = scores.argmax(dim=1).T
    return found


def _single(component: Component, others: Tensor, place: int, sign: float) -> Component:
    """Make a component of single tokens: by the score, up to a sign, at a place beside others."""
    score = partial(_end, component.preference, others, place, sign)
    return replace(component, arity=1, score=score, symmetric=True, extremum="max", parts=None)


def _end(score: Score, others: Tensor, place: int, sign: float, x: Tensor) -> Tensor:
    return sign * score_beside(score, [place], others, x)[..., 0]


def _different(
    components: Sequence[Component], tokens: Float[Tensor, "sample d_token"], notes: list[str]
) -> list[Component]:
    """Keep one component of all that order tuples alike; of ranks the one farthest in."""
    kept: list[tuple[Component, Sequence[Order]]] = []
    for component in components:
        orders = _orders(component, tokens)
        for number, (other, known) in enumerate(kept):
            if _same_order(other, known, component, orders):
                farthest = max(component, other, key=lambda c: c.rank)
                kept[number] = farthest, orders if farthest is component else known
                notes.append(
                    "several ranks by one score are found one below the other"
                    if component.rank != other.rank
                    else "several scores put the tuples in the same order"
                )
                break
        else:
            kept.append((component, orders))
    return [component for component, _ in kept]


def _drop_needless(
    components: Sequence[Component], tokens: Float[Tensor, "sample d_token"], notes: list[str]
) -> list[Component]:
    """Leave out scores of single tokens whose best token is always the best one by another score.

    The largest ``|x|`` is the largest or the smallest x. Seen on sequences of four lengths.
    """
    plain = [
        number
        for number, c in enumerate(components)
        if c.arity == 1 and c.rank == 1 and c.positions is None and c.tuples is None
    ]
    if len(plain) < 3:  # two scores that agree everywhere are one already
        return list(components)
    generator, asked, chosen = torch.Generator().manual_seed(8), plain, list[dict[int, Tensor]]()
    scores = [components[number].preference for number in plain]
    for n, n_tokens in _TRIED:
        x = tokens[torch.randint(len(tokens), (n, n_tokens), generator=generator)]
        best = dict(
            zip(plain, [score(x[:, :, None]).argmax(dim=1) for score in scores], strict=True)
        )
        asked = [number for number in asked if _another_serves(number, best)]
        if not asked:
            return list(components)
        chosen.append(best)
    found = {number: torch.cat([best[number] for best in chosen]) for number in plain}
    # one after the other, as some may serve each other
    for number in asked:
        if _another_serves(number, found):
            del found[number]
    notes.append("the best token by one score is always the best by one of the others")
    return [c for number, c in enumerate(components) if number in found or number not in plain]


def _another_serves(number: int, best: Mapping[int, Int[Tensor, " sequence"]]) -> bool:
    """Say whether each best token by a score is that by another one, too."""
    others = torch.stack([tokens for other, tokens in best.items() if other != number])
    return bool((others == best[number]).any(dim=0).all())


def _orders(component: Component, tokens: Float[Tensor, "sample d_token"]) -> list[Order]:
    """List the orders of tuples by a component, whose places are taken as they are and turned."""
    turned = itertools.islice(itertools.permutations(range(component.arity)), _MOST_ORDERS)
    return [
        Order(partial(permute, component.preference, at), component.arity, component.arity, tokens)
        for at in turned
    ]


def _same_order(
    one: Component, first: Sequence[Order], other: Component, second: Sequence[Order]
) -> bool:
    known = ("arity", "positions", "distinct")
    if any(getattr(one, name) != getattr(other, name) for name in known):
        return False
    return any(first[0].agrees(turned, 50 * ASKED) for turned in second)
