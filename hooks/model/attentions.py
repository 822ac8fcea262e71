"""One attention of a block: its heads, its product, and the matrix that reads z."""

import torch
from torch import Tensor, nn

from infoflow_lens.hooks.model.log import ModuleCall, Operation, PassLog, is_among, share_memory
from infoflow_lens.hooks.model.parts import Attention, Projection, is_linear
from infoflow_lens.hooks.model.products import PRODUCTS
from infoflow_lens.hooks.model.states import UNCHANGED
from infoflow_lens.hooks.model.tap import AttentionCall, split_heads


def read_attention(log: PassLog, call: ModuleCall, seen: AttentionCall, batch: int) -> Attention:
    """Read what an attention is from the log of its pass.

    Args:
        log: of the pass.
        call: of its block.
        seen: the attention.
        batch: sequences in the pattern.
    """
    operations = log.operations[call.start : call.end]
    pattern, v = (split_heads(seen.seen[site], batch) for site in ("pattern", "v"))
    n_heads, n_kv_heads = pattern.shape[1], v.shape[1]
    q = seen.seen.get("q")
    made = [out for op in operations if op.name in ("linear", "addmm") for out in op.outputs]
    # queries that no linear map has given were changed on the way: rotated, normed or scaled
    is_rotated = q is None or not any(_contains(out, split_heads(q, batch)) for out in made)
    is_single = seen.n_products == 1 and q is not None and _count_products(operations, q) == 1
    product = seen.product
    # products are counted from the beginning of a pass; a block that runs alone counts its own
    if seen.how == "softmax" and product is not None:
        product = product - call.n_products if is_single else None
    # keys behind the query; seen by none, the attention is causal
    later = torch.ones(pattern.shape[-2:], dtype=torch.bool, device=pattern.device).triu(1)
    return Attention(
        number=seen.number - call.n_attentions,
        how=seen.how,
        n_heads=n_heads,
        n_kv_heads=_count_distinct_heads(v) if n_kv_heads == n_heads else n_kv_heads,
        d_head=v.shape[-1],
        sinks=seen.sinks,
        product=product,
        is_rotated=is_rotated,
        is_causal=not bool((seen.visible() & later).any()),
        distance=seen.distance,
        output=_output(operations, seen, call),
    )


def _count_products(operations: list[Operation], q: Tensor) -> int:
    """Count the products that read q's memory; with several, an edit at one is half an edit."""
    return sum(
        op.name in PRODUCTS and any(share_memory(t, q) for t in op.inputs) for op in operations
    )


def _contains(out: Tensor, q: Tensor) -> bool:
    """Say whether q's numbers at the last position, where a rotation shows, stand in a tensor."""
    return bool(torch.isin(q[0, :, -1], out).all())


def _count_distinct_heads(v: Tensor) -> int:
    """Count the heads whose values differ, where each is repeated for a group."""
    n_heads = v.shape[1]
    for n in range(1, n_heads):
        repeat = n_heads // n
        if n_heads % n == 0 and torch.equal(v[:, ::repeat].repeat_interleave(repeat, 1), v):
            return n
    return n_heads


def _output(
    operations: list[Operation], seen: AttentionCall, block: ModuleCall
) -> Projection | None:
    """Find the matrix that reads z, and nothing else."""
    # tensors with the numbers of z: the matrix reads one of them
    same = [seen.seen["z"]]
    start = next(i for i, op in enumerate(operations) if op.attention is seen)
    same += operations[start].outputs
    for op in operations[start + 1 :]:
        if not any(is_among(t, same) for t in op.inputs):
            continue
        # the innermost module that reads z alone, and linearly, is the output matrix
        for call in reversed(list(op.call.enclosing()) if op.call else []):
            read = [t for t in call.inputs if t.is_floating_point()]
            reads_z = call.start > block.start + start and len(read) == 1
            if reads_z and is_among(read[0], same) and is_linear(call.module, read[0]):
                return Projection(call.path, read[0].shape[-1])
        weight = next((t for t in op.inputs if isinstance(t, nn.Parameter)), None)
        if weight is not None:  # read past its module, as nn.MultiheadAttention does
            return _projection_of(block, weight)
        if op.name in UNCHANGED:
            same += op.outputs
        elif any(is_among(t, same) for t in op.outputs):
            return None  # written in place: more than z is read
    return None


def _projection_of(block: ModuleCall, weight: Tensor) -> Projection | None:
    """Find the module of a matrix."""
    for path, module in block.module.named_modules():
        if getattr(module, "weight", None) is weight and weight.ndim == 2:
            width = weight.shape[1]
            if is_linear(module, torch.zeros(1, width).to(weight)):
                return Projection(f"{block.path}.{path}", width)
    return None
