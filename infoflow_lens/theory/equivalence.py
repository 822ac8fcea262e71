"""Components that can be retrieved together: Definition 2 asks for the least number of trees.

What a target lists is not what it needs: its outer function may leave components out or read their
maximum alone, scores may put tuples in the same order, and a score of pairs may split into scores
of single tokens. All is decided on sampled tokens [measured], so a schedule that rests on it is run
on samples before it is believed, and no exclusion rests on it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from infoflow_lens.theory.comparison import Component

Outer = Callable[[Float[Tensor, "batch component"]], Tensor]

_FILLINGS = 12  # other tokens of a tuple under which the order of one place is compared
_TUPLES = 256


@dataclass(frozen=True)
class Reading:
    """A list of components that serves a target.

    Attributes:
        components: what is retrieved.
        notes: how it follows from the target's own list, in words; none for that list itself.
    """

    components: tuple[Component, ...]
    notes: tuple[str, ...] = ()


def readings(
    components: Sequence[Component],
    tokens: Float[Tensor, "sample d_token"],
    outer: Outer | None = None,
    values: Float[Tensor, "batch component"] | None = None,
) -> list[Reading]:
    """The target's own list, and those that serve it as well.

    Args:
        components: the target's list.
        tokens: some tokens.
        outer: its outer function, of the components' preferences; None where all are needed.
        values: preferences of the components on some inputs, for `outer`.
    """
    found = [Reading(tuple(components))]
    if any(c.tuples is not None for c in components):
        return found
    if values is not None:  # also such as no sampled input has: which one is largest varies
        generator = torch.Generator().manual_seed(0)
        pool = torch.randint(
            values.numel(), (4 * len(values), values.shape[1]), generator=generator
        )
        values = torch.cat([values, values.flatten()[pool]])
    for joins in (False, True):
        for splits in (False, True):
            kept, notes = list(components), list[str]()
            if outer is not None and values is not None:
                used = _used(outer, values)
                if len(used) < len(kept):
                    notes.append("the outer function reads some components only")
                kept = [components[i] for i in used]
                if joins:
                    kept = _joined(outer, values, components, used, notes)
            if splits:
                kept = [part for c in kept for part in _split(c, tokens, notes)]
            kept = _different(kept, tokens, notes)
            other = Reading(tuple(kept), tuple(dict.fromkeys(notes)))
            if notes and other.notes not in [reading.notes for reading in found]:
                found.append(other)
    return found


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=1e-4, atol=1e-6)


def _used(outer: Outer, values: Float[Tensor, "batch component"]) -> list[int]:
    """Components that the outer function depends on; the first if on none."""
    whole = outer(values)
    used = []
    for index in range(values.shape[1]):
        changed = values.clone()
        changed[:, index] = values[:, index].roll(1)
        if not _same(outer(changed), whole):
            used.append(index)
    return used or [0]


def _joined(
    outer: Outer,
    values: Float[Tensor, "batch component"],
    components: Sequence[Component],
    used: Sequence[int],
    notes: list[str],
) -> list[Component]:
    """Components of whose preferences the outer function reads the largest alone, as one."""
    # rows of different inputs, so that components vary apart
    mixed = torch.stack([values[:, i].roll(3 * i) for i in range(values.shape[1])], dim=1)
    whole = outer(mixed)
    groups: list[list[int]] = []
    for index in used:
        for group in groups:
            together = [*group, index]
            raised = mixed.clone()
            raised[:, together] = mixed[:, together].amax(dim=1, keepdim=True)
            alike = {(components[i].positions, components[i].distinct) for i in together}
            single = all(components[i].rank == 1 for i in together)
            if len(alike) == 1 and single and _same(outer(raised), whole):
                group.append(index)
                break
        else:
            groups.append([index])
    if len(groups) < len(used):
        notes.append("the outer function reads the best of several scores alone, so one score does")
    return [_best_of([components[i] for i in group]) for group in groups]


def _best_of(group: Sequence[Component]) -> Component:
    """A component whose score is the best of several; shorter tuples come first in longer ones."""
    if len(group) == 1:
        return group[0]

    def score(x: Tensor) -> Tensor:
        return torch.stack([c.preference(x[..., : c.arity, :]) for c in group]).amax(dim=0)

    arity = max(c.arity for c in group)
    symmetric = all(c.symmetric and c.arity == arity for c in group)
    return replace(group[0], arity=arity, score=score, symmetric=symmetric, extremum="max")


def _orders(scores: Float[Tensor, "filling token"]) -> int | None:
    """1 if all rows put the tokens in one order, 2 if in it or its reverse; None otherwise."""
    scale = scores.std(dim=1, keepdim=True).clamp(min=1e-12)
    gaps = (scores[:, :, None] - scores[:, None]) / scale[:, :, None]
    signs = torch.where(gaps.abs() < 1e-4, torch.zeros_like(gaps), gaps.sign())
    reference = signs[(signs != 0).sum(dim=(1, 2)).argmax()]
    agrees = [bool((row * reference >= 0).all()) for row in signs]
    reverses = [bool((row * reference <= 0).all()) for row in signs]
    if all(agrees):
        return 1
    return 2 if all(a or b for a, b in zip(agrees, reverses, strict=True)) else None


def _split(
    component: Component, tokens: Float[Tensor, "sample d_token"], notes: list[str]
) -> list[Component]:
    """Single tokens in the place of tuples, where the order at each place is always the same.

    The best tuple then has the best token at each place: the largest or, where the order can be
    reversed as in products of numbers, the smallest.
    """
    arity, n = component.arity, min(40, len(tokens))
    if arity == 1 or component.distinct:
        return [component]
    others = tokens[torch.arange(_FILLINGS * (arity - 1)) % len(tokens)].view(_FILLINGS, -1)
    others = others.view(_FILLINGS, arity - 1, tokens.shape[1])

    def at(place: int, x: Tensor) -> Tensor:
        """Scores [..., filling] of single tokens x [..., d_token] at a place."""
        shape = x.shape[:-1]
        rest = others.to(x).expand(*shape, -1, -1, -1)
        own = x[..., None, None, :].expand(*shape, _FILLINGS, 1, -1)
        return component.preference(
            torch.cat([rest[..., :place, :], own, rest[..., place:, :]], -2)
        )

    def score(x: Tensor, place: int, row: int | None, sign: float) -> Tensor:
        found = at(place, x[..., 0, :])
        return sign * (found.sum(dim=-1) if row is None else found[..., row])

    parts = []
    for place in range(arity):
        scores = at(place, tokens[-n:]).T
        orders = _orders(scores)
        if orders is None:
            return [component]
        # where the order can be reversed, both ends of it; else the sum breaks ties best
        row = None if orders == 1 else int(scores.std(dim=1).argmax())
        scored = [
            partial(score, place=place, row=row, sign=sign)
            for sign in ((1.0,) if orders == 1 else (1.0, -1.0))
        ]
        parts += [
            replace(component, arity=1, score=each, symmetric=True, extremum="max")
            for each in scored
        ]
    notes.append("a score of tuples splits into scores of single tokens")
    return parts


def _different(
    components: Sequence[Component], tokens: Float[Tensor, "sample d_token"], notes: list[str]
) -> list[Component]:
    """One component of all that put tuples in the same order; of ranks the one farthest in."""
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
    index = torch.arange(_TUPLES * one.arity) * 7919 % len(tokens)
    tuples = tokens[index].view(_TUPLES, one.arity, -1)
    scores = one.preference(tuples)
    return any(
        _orders(torch.stack([scores, other.preference(each)])) == 1
        for each in ([tuples, tuples.flip(-2)] if one.arity > 1 else [tuples])
    )
