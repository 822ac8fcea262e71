"""What a schedule asks of an architecture beside heads and width: rank, and products.

A head scores keys by q.k, a matrix of rank d_head at most, and what depends on the query alone
changes no choice. So a job needs d_head of at least the rank of its scores [query, key] after each
row's mean is taken off; that is enough [derived], and below it the job is open. What a token then
holds of two others must be joined by the feed-forward network: as many products as the rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from infoflow_lens.theory.comparison import Component
from infoflow_lens.theory.jobs import Job, Max, Message
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
    """What each layer of a schedule asks for, seen on samples of tokens.

    Args:
        schedule: the jobs.
        components: what they retrieve.
        tokens: tokens to draw from.
    """
    found = []
    for layer in schedule.layers:
        ranks = [_rank(job, components, tokens) for job in layer.token]
        known = [1 if isinstance(job, (Max, Message)) else None for job in layer.cls]
        needed = [*ranks, *known]
        d_head = None if None in needed else max([1, *(n for n in needed if n is not None)])
        joined = [r for job, r in zip(layer.token, ranks, strict=True) if _joins(job, components)]
        found.append(Demand(d_head, sum(r for r in joined if r is not None)))
    return tuple(found)


def _joins(job: Job, components: Sequence[Component]) -> bool:
    """Whether a token needs a number of what it is and of what the head gave it, together."""
    return isinstance(job, Message) or (
        isinstance(job, Max) and components[job.component].arity > 1
    )


def _rank(
    job: Job, components: Sequence[Component], tokens: Float[Tensor, "sample d_token"]
) -> int | None:
    """The rank of a token head's scores; None where it is not known."""
    generator = torch.Generator().manual_seed(6)

    def drawn(n: int) -> Tensor:
        return tokens[torch.randint(len(tokens), (_SAMPLES, n), generator=generator)].double()

    if isinstance(job, Message):
        keys, queries = drawn(job.size), drawn(1)
        score = job.score
    elif isinstance(job, Max) and components[job.component].arity == 1:
        return 1
    elif isinstance(job, Max) and components[job.component].arity == 2:
        keys, queries = drawn(1), drawn(1)
        first = components[job.component].preference
        score = first if job.reverse else lambda x: first(x.flip(-2))
    else:
        return None
    shape = (_SAMPLES, _SAMPLES, -1, -1)
    pairs = torch.cat([keys[None].expand(shape), queries[:, None].expand(shape)], dim=-2)
    return rank_of(score(pairs.to(tokens)))


def rank_of(scores: Float[Tensor, "query key"]) -> int:
    """The rank of scores up to what depends on the query alone, to a thousandth of the largest."""
    values = torch.linalg.svdvals((scores - scores.mean(dim=1, keepdim=True)).double())
    return int((values > _SMALLEST * values[0].clamp(min=1e-9)).sum())
