"""Keys in the order of their scores: ties, margins, and ranks that no key has."""

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from infoflow_lens.hooks.capabilities import unmasked
from jaxtyping import Float, Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError


class Ranked(NamedTuple):
    """Keys ranked by score, for each query; undefined entries are -1 (positions) or NaN (margins).

    Attributes:
        positions: key positions.
        margins: score of the rank minus the score of the next rank; infinite where there is no
            next key.
        ties: how many other keys have exactly the score of this rank.
    """

    positions: Int[Tensor, "*query rank"]
    margins: Float[Tensor, "*query rank"]
    ties: Int[Tensor, "*query rank"]


def rank_keys(scores: Float[Tensor, "*query key"], ranks: Sequence[int]) -> Ranked:
    """The keys of the k-th largest scores, for each k in `ranks` (1 is the argmax).

    Scores are compared in float32; ties go to the lowest position. Masked keys (-inf, or the
    lowest finite value that some models use instead) are never chosen: a rank beyond the allowed
    keys is undefined. A mask of another value, -1e9 say, cannot be told from a score.
    """
    scores = scores.detach()
    may_attend = unmasked(scores)
    scores = scores.float().masked_fill(~may_attend, -torch.inf)
    remaining = scores.clone()
    allowed = may_attend.sum(dim=-1)
    n_keys = scores.shape[-1]
    positions, margins, ties = [], [], []
    value, where = remaining.max(dim=-1)
    for rank in range(1, max(ranks) + 1):
        remaining.scatter_(-1, where.unsqueeze(-1), -torch.inf)
        # max returns the first of equal values, so ties go to the lowest position
        next_value, next_where = remaining.max(dim=-1)
        if rank in ranks:
            defined = allowed >= rank
            positions.append(where.masked_fill(~defined, -1))
            margins.append((value - next_value).masked_fill(~defined, math.nan))
            equal = (scores == value.unsqueeze(-1)).sum(dim=-1) - 1
            ties.append(equal.masked_fill(~defined, 0))
        value, where = next_value, next_where
    order = [sorted(set(ranks)).index(rank) for rank in ranks]
    dtype = torch.int16 if n_keys < 2**15 else torch.int32
    return Ranked(
        torch.stack(positions, dim=-1)[..., order].to(dtype),
        torch.stack(margins, dim=-1)[..., order],
        torch.stack(ties, dim=-1)[..., order].to(dtype),
    )


def check_ranks(ranks: Sequence[int]) -> tuple[int, ...]:
    """`ranks` as a tuple.

    Raises:
        InfoFlowError: unless they are different integers from 1 on.
    """
    try:
        chosen = tuple(operator.index(rank) for rank in ranks)
    except TypeError:
        chosen = ()
    if not chosen or min(chosen) < 1 or len(set(chosen)) != len(chosen):
        raise InfoFlowError(
            f"ranks are {ranks!r}: expected different integers of at least 1, such as (1, 2); "
            "rank 1 is the argmax"
        )
    return chosen


def check_rank_support(ranks: Sequence[int], n_keys: int) -> None:
    """Refuse ranks that no query can have.

    Raises:
        InfoFlowError: if a rank exceeds the number of keys.
    """
    if max(ranks) > n_keys:
        raise InfoFlowError(
            f"rank {max(ranks)} is beyond the number of keys: the longest row of attention has "
            f"{n_keys} keys; ask for ranks up to {n_keys}"
        )


def check_positions(positions: Sequence[int]) -> tuple[int, ...]:
    """`positions` as a tuple.

    Raises:
        InfoFlowError: unless they are different integers from 0 on.
    """
    try:
        chosen = tuple(operator.index(position) for position in positions)
    except TypeError:
        chosen = (-1,)
    if any(position < 0 for position in chosen) or len(set(chosen)) != len(chosen):
        raise InfoFlowError(
            f"without is {positions!r}: expected different positions from 0 on, such as (0,)"
        )
    return chosen


def leaving_out(
    scores: Float[Tensor, "*query key"], positions: Sequence[int]
) -> Float[Tensor, "*query key"]:
    """The scores with some keys masked, which are then never ranked."""
    chosen = [position for position in positions if position < scores.shape[-1]]
    if not chosen:
        return scores
    keys = torch.tensor(chosen, device=scores.device)
    return scores.index_fill(-1, keys, -torch.inf)
