"""Keys in the order of their scores: ties, margins, and ranks that no key has."""

import importlib.util
import os
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError

_LONGEST_ROW = 2**14  # of registers; longer rows are left to torch


def can_run(scores: Tensor) -> bool:
    """Say whether the kernel takes these scores: on a GPU, or anywhere in Triton's interpreter."""
    if scores.shape[-1] > _LONGEST_ROW or not _has_triton():
        return False
    return scores.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def select_keys(
    scores: Float[Tensor, "*query key"], n: int, visible: Bool[Tensor, "*query key"] | None
) -> tuple[Float[Tensor, "*query n"], Int[Tensor, "*query n"], Int[Tensor, "*query n"]]:
    """Do what :func:`infoflow_lens.hooks.passes.ranking.select_keys` does, in one kernel."""
    *shape, n_keys = scores.shape
    rows = scores.reshape(-1, n_keys)
    # the kernel reads the keys of a row side by side, where a transposed view does not have them
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    made = (rows.shape[0], n)
    values = torch.empty(made, dtype=torch.float32, device=rows.device)
    places = torch.empty(made, dtype=torch.int32, device=rows.device)
    ties = torch.empty(made, dtype=torch.int32, device=rows.device)
    n_queries = shape[-1] if shape else 1
    per_sequence = rows.shape[0] // (shape[0] if len(shape) > 2 else 1)
    # one mask for all sequences, or one for each
    shared = visible is None or visible.shape[0] == 1
    keys = rows if visible is None else visible.contiguous().view(torch.uint8)
    # blocks of Triton are powers of two
    block = max(16, 1 << (n_keys - 1).bit_length())
    ranking_kernel()[(rows.shape[0],)](
        rows,
        keys,
        values,
        places,
        ties,
        n_keys,
        n_queries,
        per_sequence,
        rows.stride(0),
        N=n,
        BLOCK=block,
        HAS_VISIBLE=visible is not None,
        SHARED=shared,
    )
    return (
        values.view(*shape, n),
        places.view(*shape, n).long(),
        ties.view(*shape, n).long(),
    )


@cache
def ranking_kernel() -> Any:
    """Return the kernel, compiled by Triton when it is first called."""
    import triton
    import triton.language as tl

    # The compiler evaluates annotations, and knows its own names alone: the others have none.
    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def kernel(  # type: ignore[no-untyped-def]
        scores,
        visible,
        values,
        places,
        ties,
        n_keys,
        n_queries,
        per_sequence,
        stride,
        N: tl.constexpr,  # noqa: N803
        BLOCK: tl.constexpr,  # noqa: N803
        HAS_VISIBLE: tl.constexpr,  # noqa: N803
        SHARED: tl.constexpr,  # noqa: N803
    ):
        row = tl.program_id(0).to(tl.int64)
        key = tl.arange(0, BLOCK)
        inside = key < n_keys
        lowest = float("-inf")
        whole = tl.load(scores + row * stride + key, mask=inside, other=lowest).to(tl.float32)
        if HAS_VISIBLE:
            # the row of the mask: of this query, and of this sequence where they differ
            query = row % n_queries
            if not SHARED:
                query += (row // per_sequence) * n_queries
            seen = tl.load(visible + query * n_keys + key, mask=inside, other=0)
            whole = tl.where(seen != 0, whole, lowest)
        left, free = whole, inside
        # one round for each rank: the largest that is left, the first of equals
        for index in tl.static_range(N):
            best = tl.max(left, axis=0)
            place = tl.min(tl.where((left == best) & free, key, BLOCK), axis=0)
            # others that equal it, which have no order
            equal = tl.sum(((whole == best) & inside).to(tl.int32), axis=0) - 1
            tl.store(values + row * N + index, best)
            tl.store(places + row * N + index, tl.minimum(place, n_keys - 1))
            tl.store(ties + row * N + index, tl.maximum(equal, 0))
            # it has -inf from here on, as closed keys have, and must not be chosen again
            free = free & (key != place)
            left = tl.where(key == place, lowest, left)

    return kernel


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


def rank_keys(
    scores: Float[Tensor, "*query key"],
    ranks: Sequence[int],
    visible: Bool[Tensor, "*query key"] | None = None,
    *,
    are_weights: bool = False,
) -> Ranked:
    """Return the keys of the k-th largest scores, for each k in `ranks` (1 is the argmax).

    Scores are compared in float32; ties go to the lowest position. Keys that are not visible, or
    whose score is -inf, are never chosen: a rank beyond the visible keys is undefined.

    Args:
        scores: attention scores, [batch, head, query, key] where `visible` is given.
        ranks: which k.
        visible: [batch or 1, query, key], the keys that a query may see; None for all.
        are_weights: whether `scores` are weights of the pattern. Keys of weight 0 are never chosen,
            and margins are those of the weights' logarithms, which differ from the scores by a
            constant in each row.
    """
    ranks, deepest, n_keys = tuple(ranks), max(ranks), scores.shape[-1]
    # as small as positions allow, since results keep them for every query
    dtype = torch.int16 if n_keys < 2**15 else torch.int32
    n = min(deepest + 1, n_keys)  # one more than asked for, for the last margin
    values, places, ties = largest_keys(
        scores.detach(), n, visible, 0 if are_weights else -torch.inf
    )
    if are_weights:  # of the chosen ones alone: logarithms of thousands of zeros are slow
        values = values.log()
    # where there are fewer keys than ranks, the others are missing
    missing = (0, deepest + 1 - n)
    values = torch.nn.functional.pad(values, missing, value=-torch.inf)
    places, ties = (
        torch.nn.functional.pad(part, missing)[..., :deepest] for part in (places, ties)
    )
    # keys that a mask closes have no rank
    masked = values[..., :-1] == -torch.inf
    positions = places.to(dtype).masked_fill_(masked, -1)
    margins = (values[..., :-1] - values[..., 1:]).masked_fill_(masked, torch.nan)
    counts = ties.to(dtype).masked_fill_(masked, 0)
    if ranks == tuple(range(1, deepest + 1)):
        return Ranked(positions, margins, counts)
    columns = [rank - 1 for rank in ranks]
    return Ranked(*(part[..., columns] for part in (positions, margins, counts)))


def largest_keys(
    scores: Float[Tensor, "*query key"],
    n: int,
    visible: Bool[Tensor, "*query key"] | None = None,
    closed: float = -torch.inf,
) -> tuple[Float[Tensor, "*query n"], Int[Tensor, "*query n"], Int[Tensor, "*query n"]]:
    """Return the `n` largest scores of each row, their positions, and how many others equal each.

    The largest comes first, the lowest position among equals; keys that are not visible count as
    -inf. Others that equal `closed`, the score of keys that nobody may see, are not counted; nor
    are, of the last one, others outside the `n`. On a GPU it is one kernel, which never waits for
    the device.
    """
    if can_run(scores):
        return select_keys(scores, n, visible)
    scores = scores.float()
    if visible is not None:
        scores = scores.masked_fill(~visible.unsqueeze(-3), -torch.inf)
    values, places = scores.topk(n, dim=-1)
    ties = torch.zeros_like(places)
    # equal scores among the largest; keys that are closed are equal, too, and do not count
    equal = (values[..., :-1] == values[..., 1:]) & (values[..., 1:] > closed)
    tied = equal.any(dim=-1)
    if tied.any():  # topk breaks ties as it likes
        # sorted anew where it matters: the first of equals comes first
        rows = scores[tied]
        order = rows.sort(dim=-1, descending=True, stable=True).indices[:, :n]
        places[tied] = order
        others = [(rows == value[:, None]).sum(dim=-1) - 1 for value in values[tied].unbind(dim=-1)]
        ties[tied] = torch.stack(others, dim=-1)
    return values, places, ties


def mark_places(
    places: Sequence[int], lengths: Int[Tensor, " batch"], n_pos: int
) -> Bool[Tensor, "batch pos"]:
    """Mark positions of sequences: from 0 on, or from -1 backwards from the end of each."""
    index = torch.tensor(places, dtype=torch.int64).expand(len(lengths), -1)
    index = torch.where(index < 0, index + lengths.cpu()[:, None], index)
    return (index[:, :, None] == torch.arange(n_pos)).any(dim=1)


def mark_sources(
    places: Sequence[int], lengths: Int[Tensor, " batch"], n_pos: int, n_source: int
) -> Bool[Tensor, "batch source"]:
    """Mark tokens by their places among the keys, where CLS, for one, may stand behind them.

    Args:
        places: as :func:`mark_places` counts them, with what stands behind the tokens.
        lengths: in tokens.
        n_pos: the number of keys of the longest sequence.
        n_source: the number of its tokens.
    """
    return mark_places(places, lengths.cpu() + n_pos - n_source, n_pos)[:, :n_source]


def check_rank_support(ranks: Sequence[int], without: Sequence[int], n_keys: int) -> None:
    """Refuse ranks that no query can have.

    Raises:
        InfoFlowError: if a rank exceeds the number of keys that are not left out.
    """
    left = n_keys - sum(-n_keys <= position < n_keys for position in without)
    if max(ranks) > left:
        raise InfoFlowError(
            f"rank {max(ranks)} is beyond the number of keys: the longest row of attention has "
            f"{left} keys; ask for ranks up to {left}"
        )
