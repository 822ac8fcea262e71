"""What a schedule asks of an architecture beside heads and width: rank, and products.

A head scores keys by q.k, a matrix of rank d_head at most, and what depends on the query alone
changes no choice. So a job needs d_head of at least the rank of its scores [query, key] after each
row's mean is taken off, or of a function that increases with them; that is enough [derived], and
below it the job is open. What a token then
holds of two others must be joined by the feed-forward network: as many products as the rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from infoflow_lens.theory.comparison import Component
from infoflow_lens.theory.jobs import Global, Job, Max, Message, Next, Specific
from infoflow_lens.theory.schedule import Schedule

_SAMPLES = 64  # queries and keys, so that ranks above 63 are seen as 63
_SMALLEST = 1e-3  # of the largest singular value: what is below changes scores by a thousandth


@dataclass(frozen=True)
class Demand:
    """What one layer's jobs ask for.

    Attributes:
        d_head: the least per-head dimension; None where a job's score is not known to have a rank
            (it reads positions, has several roles, or depends on what was found).
        products: of numbers that a token holds, which the feed-forward network makes.
    """

    d_head: int | None
    products: int


def demands(
    schedule: Schedule,
    components: Sequence[Component],
    tokens: Float[Tensor, "sample d_token"],
) -> tuple[Demand, ...]:
    """List what each layer of a schedule asks for, seen on samples of tokens.

    Args:
        schedule: the jobs.
        components: what they retrieve.
        tokens: tokens to draw from.
    """
    found = []
    for layer in schedule.layers:
        ranks = [_rank(job, components, tokens) for job in layer.token]
        # CLS is one query, so its row of scores has rank 1
        known = [1 if isinstance(job, (Max, Message)) else None for job in layer.cls]
        needed = [*ranks, *known]
        d_head = None if None in needed else max([1, *(n for n in needed if n is not None)])
        joined = [r for job, r in zip(layer.token, ranks, strict=True) if _joins(job, components)]
        found.append(Demand(d_head, sum(r for r in joined if r is not None)))
    return tuple(found)


def scores_inside(
    schedule: Schedule,
    components: Sequence[Component],
    tokens: Float[Tensor, "sample d_token"] | None,
    n_tokens: int,
    error: float,
) -> tuple[int, ...]:
    """Count the scores and products that a feed-forward network makes of one state, by layer.

    Where a state holds everything, or a block of positions, the network itself compares the tuples
    inside: all of them at CLS, those with the token itself at tokens. Where heads compare, it joins
    what was found, in as many products as the score has rank. A search below what was found asks
    for a step, 1 / error units [derived; orders of magnitude].

    Args:
        schedule: the jobs.
        components: what they retrieve.
        tokens: tokens to draw from; None where none are at hand, then ranks count as 1.
        n_tokens: T.
        error: eps.
    """
    joined = [0] * len(schedule.layers)
    if tokens is not None:
        joined = [demand.products for demand in demands(schedule, components, tokens)]
    found, begun = [], set[Job]()
    for layer, n in zip(schedule.layers, joined, strict=True):
        for job in (*layer.token, *layer.cls):
            if isinstance(job, (Global, Specific)):
                held = min(n_tokens, job.gain(n_tokens))
                n += sum(_inside(c, held, job in layer.token) for c in components)
            # the first step of a search is an ordinary maximum; each later one has a jump to make
            if isinstance(job, Next) and job in begun:
                n += round(1 / error)
            begun.add(job)
        found.append(n)
    return tuple(found)


def _inside(component: Component, held: int, with_own: bool) -> int:
    """Count the tuples that a state of `held` tokens compares, of a block those with its own."""
    if component.tuples is not None:
        return len(component.tuples)
    if component.rank > 1:  # sorted, by pairs
        return math.comb(held, 2)
    if component.positions is not None:
        held = min(held, len(component.positions))
    # positions only bound how many tokens there are to choose from
    n = replace(component, positions=None).n_tuples(held, ordered=not component.symmetric)
    return -(-n * component.arity // held) if with_own else n


def _joins(job: Job, components: Sequence[Component]) -> bool:
    """Say whether a token needs a number of what it is and what the head gave it, together."""
    return isinstance(job, Message) or (
        isinstance(job, Max) and components[job.component].arity > 1
    )


def _rank(
    job: Job, components: Sequence[Component], tokens: Float[Tensor, "sample d_token"]
) -> int | None:
    """Return the rank of a token head's scores; None where it is not known."""
    generator = torch.Generator().manual_seed(6)

    def draw(n: int) -> Tensor:
        return tokens[torch.randint(len(tokens), (_SAMPLES, n), generator=generator)].double()

    if isinstance(job, Message):
        keys, queries = draw(job.size), draw(1)
        score = job.score
    elif isinstance(job, Max) and components[job.component].arity == 1:
        return 1
    elif isinstance(job, Max) and components[job.component].arity == 2:
        keys, queries = draw(1), draw(1)
        first = components[job.component].preference
        score = first if job.reverse else lambda x: first(x.flip(-2))
    else:
        return None
    shape = (_SAMPLES, _SAMPLES, -1, -1)
    pairs = torch.cat([keys[None].expand(shape), queries[:, None].expand(shape)], dim=-2)
    scores = score(pairs.to(tokens)).double()
    # what increases with a score chooses alike: a distance by its square, an exponential by its log
    alike = [scores, scores * scores.abs(), scores.sign() * scores.abs().pow(1 / 3)]
    if (scores > 0).all():
        alike.append(scores.log())
    # a head may make whichever of them has the least rank
    ranks = [rank for rank in map(rank_of, alike) if rank is not None]
    return min(ranks, default=None)


def rank_of(scores: Float[Tensor, "query key"]) -> int | None:
    """The rank of scores up to what depends on the query alone, to a thousandth of the largest.

    None where a score is not finite: no product of queries and keys is it.
    """
    if not scores.isfinite().all():
        return None
    values = torch.linalg.svdvals((scores - scores.mean(dim=1, keepdim=True)).double())
    return int((values > _SMALLEST * values[0].clamp(min=1e-9)).sum())
