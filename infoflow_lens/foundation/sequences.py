"""Batches of sequences, as tasks give and models take them: vectors, token ids, labels."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError

_PLAIN = frozenset({
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex32, torch.complex64, torch.complex128,
})  # fmt: skip


def check_is_plain(x: Tensor, name: str) -> None:
    """Refuse a tensor of a kind that holds no ordinary numbers in rows.

    Raises:
        InfoFlowError: for one without numbers, and for nested, sparse, quantized and packed ones.
    """
    kind = remedy = ""
    if x.is_nested:
        kind, remedy = "nested", "give a list of sequences, x.unbind()"
    elif x.is_meta:
        kind, remedy = "on the device 'meta', without numbers", "load them first"
    elif x.is_quantized:
        kind, remedy = f"quantized ({x.dtype})", "give x.dequantize()"
    elif x.layout is not torch.strided:
        kind, remedy = str(x.layout), "give x.to_dense()"
    elif x.dtype not in _PLAIN:
        kind, remedy = f"of {x.dtype}", "convert it, as with x.float() or x.long()"
    if kind:
        raise InfoFlowError(f"{name} is a tensor {kind}: expected ordinary numbers; {remedy}")


def check_vectors(
    x: Any, n_tokens: int, d_token: int, owner: str, dtype: torch.dtype | None = None
) -> None:
    """Refuse what is no batch of vector tokens.

    Args:
        x: what should be float [batch, n_tokens, d_token].
        n_tokens: T, without CLS.
        d_token: d.
        owner: whose sequences they are, such as "task 'd_retrieval'".
        dtype: the precision of the model; None for floats of any, finite.

    Raises:
        InfoFlowError: for another type, shape or precision, or values that are not finite.
    """
    if isinstance(x, Tensor):
        check_is_plain(x, "input")
    fits = isinstance(x, Tensor) and x.ndim == 3 and x.shape[1:] == (n_tokens, d_token)
    # an empty batch is fine for a task, not for a model
    if not fits or (dtype is not None and len(x) == 0):
        raise InfoFlowError(
            f"input {_describe(x)}: {owner} expects vector tokens [batch, {n_tokens}, {d_token}] "
            "(without CLS, which a model appends); use the same n_tokens and d_token for model and "
            "data"
        )
    if dtype is None:
        if not x.is_floating_point():
            raise InfoFlowError(f"input is {x.dtype}: expected floats; convert with x.float()")
        if not x.isfinite().all():
            raise InfoFlowError(
                f"input has {int((~x.isfinite()).sum())} values that are NaN or infinite: "
                "expected finite tokens; clean the data first"
            )
    elif x.dtype != dtype:
        raise InfoFlowError(
            f"input is {x.dtype}, the weights of {owner} {dtype}: convert with x.to({dtype})"
        )


def check_token_ids(x: Any, owner: str, *, exactly: int | None = None, longest: int = 0) -> None:
    """Refuse what is no batch of token ids [batch, pos]; their values are not looked at.

    Args:
        x: what should be such a batch.
        owner: whose sequences they are.
        exactly: the number of tokens of every sequence; None for at most `longest`.
        longest: the largest number of tokens.

    Raises:
        InfoFlowError: for text, floats, truth values, or another shape.
    """
    if isinstance(x, Tensor):
        check_is_plain(x, "input")
    shape = f"[batch, {'pos' if exactly is None else exactly}]"
    if not isinstance(x, Tensor) or x.ndim != 2:
        raise InfoFlowError(
            f"input {_describe(x)}: {owner} expects integer token ids {shape}, no text; convert "
            "with torch.tensor"
        )
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise InfoFlowError(f"input is {x.dtype}: {owner} expects integer token ids {shape}")
    if exactly not in (None, x.shape[1]) or (exactly is None and x.shape[1] > longest):
        wanted = f"{exactly}" if exactly is not None else f"at most {longest}"
        raise InfoFlowError(
            f"sequences have {x.shape[1]} tokens, {owner} takes {wanted}: use the same n_tokens "
            "for model and data"
        )


def check_id_range(
    x: Tensor,
    ranges: Sequence[tuple[int, int]],
    owner: str,
    name_of: Callable[[int], str] | None = None,
) -> None:
    """Refuse token ids that do not belong where they stand.

    Args:
        x: token ids [batch, pos].
        ranges: for each position, or once for all of them, the first id and the one after the last.
        owner: whose sequences they are.
        name_of: the readable name of an id.

    Raises:
        InfoFlowError: with the first that does not belong there.
    """
    bounds = torch.tensor(ranges, device=x.device).reshape(-1, 2)
    wrong = (x < bounds[:, 0]) | (x >= bounds[:, 1])
    if not wrong.any():
        return
    row, position = (int(index) for index in wrong.nonzero()[0])
    # one range stands for all positions
    low, high = ranges[position % len(ranges)]
    named = f" ({name_of(low)} .. {name_of(high - 1)})" if name_of else ""
    raise InfoFlowError(
        f"sequence {row} has token {int(x[row, position])} at position {position}: {owner} expects "
        f"ids from {low} to {high - 1} there{named}; use the same d_vocab for model and data"
    )


def _describe(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"has shape {tuple(x.shape)}"
    return f"is a {type(x).__name__}"
