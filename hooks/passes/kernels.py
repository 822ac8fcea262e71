"""Selection of the largest keys in one GPU kernel, where Triton is installed.

A program reads a row of scores once and keeps it in registers: `n` rounds of the maximum, its first
position, and the number of keys that equal it.
"""

import importlib.util
import os
from functools import cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

_LONGEST_ROW = 2**14  # of registers; longer rows are left to torch


def can_run(scores: Tensor) -> bool:
    """Say whether the kernel takes these scores: on a GPU, or anywhere in Triton's interpreter."""
    if scores.shape[-1] > _LONGEST_ROW or not _has_triton():
        return False
    return scores.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def largest_keys(
    scores: Float[Tensor, "*query key"], n: int, visible: Bool[Tensor, "*query key"] | None
) -> tuple[Float[Tensor, "*query n"], Int[Tensor, "*query n"], Int[Tensor, "*query n"]]:
    """Do what :func:`infoflow_lens.hooks.passes.ranking.largest_keys` does, in one kernel."""
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
