"""The anatomy of a model: its blocks, their attentions and states, found by running it once.

:func:`find_anatomy` runs the model on a few tokens under a tap that logs every operation and every
call of a module, and reads from that log, by the identity of tensors:

- blocks: for each attention the innermost call that is an element of a list, maps the stream to its
  own shape and adds attention and something more; elements of the same list without attention
  (Mamba, convolution) are blocks, too; a module that runs twice is two blocks;
- the states of each block (:class:`StateFinder`);
- what stands before the first and behind the last: embedding, positions, final norm, unembedding.

No name of an architecture and no field of a config is read. What is not there has a sentence in
``Block.lacks``.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import SeededRandom, eval_mode, modules_of, on_user_device
from infoflow_lens.hooks.model.log import (
    SAME,
    UNCHANGED,
    ModuleCall,
    Operation,
    PassLog,
    StateFinder,
    count_sums,
    first_tensor,
    is_among,
    share_memory,
    tensors_in,
)
from infoflow_lens.hooks.model.parts import (
    Attention,
    Block,
    Norm,
    Place,
    Projection,
    is_linear,
    is_norm,
    is_plain_norm,
)
from infoflow_lens.hooks.model.points import check_gives_numbers, check_one_device
from infoflow_lens.hooks.model.tap import ADDITIONS, PRODUCTS, AttentionCall, split_heads


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
        output=_find_output(operations, seen, call),
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


def _find_output(
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
            return _find_projection(block, weight)
        if op.name in UNCHANGED:
            same += op.outputs
        elif any(is_among(t, same) for t in op.outputs):
            return None  # written in place: more than z is read
    return None


def _find_projection(block: ModuleCall, weight: Tensor) -> Projection | None:
    """Find the module of a matrix."""
    for path, module in block.module.named_modules():
        if getattr(module, "weight", None) is weight and weight.ndim == 2:
            width = weight.shape[1]
            if is_linear(module, torch.zeros(1, width).to(weight)):
                return Projection(f"{block.path}.{path}", width)
    return None


@dataclass(frozen=True)
class Start:
    """What stands before the first block.

    Attributes:
        embed: the path of the module that reads token ids.
        within: the path of the module that calls it for them; it may be called for others, too.
        d_vocab: so many of them it knows.
        pos_embed: where positions are added to what it gives, if they are.
        n_ctx: positions that have a vector, where those are looked up in a table.
        is_turned: whether it gives [pos, batch, width], as in XLNet.
    """

    embed: str | None = None
    within: str = ""
    d_vocab: int | None = None
    pos_embed: Place | None = None
    n_ctx: int | None = None
    is_turned: bool = False


@dataclass(frozen=True)
class End:
    """What stands behind the last block.

    Attributes:
        norm: what reads the last state, if that is a norm.
        unembed: the matrix that reads the norm, or the last state.
        gives_output: whether the model's output is what that gives, neither scaled nor capped.
    """

    norm: Norm | None = None
    unembed: Projection | None = None
    gives_output: bool = False


def read_start(log: PassLog, given: Sequence[Tensor], since: int, first: int) -> Start:
    """Find the embedding, which reads the ids that were given, and what adds positions to it.

    Args:
        log: of the pass.
        given: tensors of its example.
        since: operations before the end of another stack, whose embedding is another.
        first: operations before the first block.
    """
    # token ids are the only integers [batch, pos] among what was given
    ids = next((t for t in given if not t.is_floating_point() and t.ndim == 2), None)
    calls = [call for call in log.module_calls() if call.start >= since]
    call = next((c for c in calls if ids is not None and _embeds(c, ids)), None)
    if ids is None or call is None:
        return Start()
    within = call.parent.path if call.parent else ""
    weight = getattr(call.module, "weight", None)
    d_vocab = len(weight) if isinstance(weight, Tensor) else None
    stream = call.outputs[0]
    # the embedding, and what is the same with other axes or precision, up to the sum with positions
    same, number = [stream], 0
    for op in log.operations[call.end : first]:
        if not any(is_among(t, same) for t in op.inputs):
            continue
        if op.name in SAME:
            same += op.outputs
        # other summands, such as token types, may come before positions do
        elif op.name in ADDITIONS and op.outputs[0].shape == stream.shape and len(op.inputs) == 2:
            added = op.inputs[1 if is_among(op.inputs[0], same) else 0]
            if _is_of_positions(added, stream):
                place = Place("sum", number=number)
                return Start(call.path, within, d_vocab, place, _count_table_rows(log, added))
            same, number = [*same, *op.outputs], number + 1
    # some models turn ids to [pos, batch] first
    is_turned = call.inputs[0].equal(ids.T) and not call.inputs[0].equal(ids)
    return Start(call.path, within, d_vocab, is_turned=is_turned)


def _embeds(call: ModuleCall, ids: Tensor) -> bool:
    """Say whether a call is the innermost that reads the ids, known by value, and gives vectors."""
    if call.children or not call.inputs or not call.outputs:
        return False
    reads, gives = call.inputs[0], call.outputs[0]
    return (
        not reads.is_floating_point()
        and gives.is_floating_point()
        and gives.ndim == 3
        and torch.equal(reads.flatten().sort().values, ids.flatten().sort().values)
    )


def _is_of_positions(added: Tensor, stream: Tensor) -> bool:
    """Say whether a summand is the same in all sequences, and differs between positions."""
    try:
        vectors = added.expand(stream.shape)
    except RuntimeError:
        return False
    return torch.equal(vectors[0], vectors[-1]) and not torch.equal(vectors[:, 0], vectors[:, -1])


def _count_table_rows(log: PassLog, added: Tensor) -> int | None:
    """Count the positions of the table in which a summand was looked up, if it was."""
    for op in reversed(log.operations):
        if is_among(added, op.outputs):
            if op.name == "embedding":
                indices, table = op.inputs[:2]
                # some tables, as OPT's, have rows in front of that of position 0
                return len(table) - int(indices.min())
            if op.name not in UNCHANGED:
                return None
            added = op.inputs[0]  # the same, where nothing had to be moved
    return None


def read_end(log: PassLog, output: Sequence[Tensor], last: ModuleCall) -> End:
    """Find the norm that reads the last state, and the matrix that reads that norm.

    Args:
        log: of the pass.
        output: tensors that the model gave.
        last: the call of the last block.
    """
    stream = last.stream()
    assert stream is not None  # the block has states
    state, norm = stream[1], None
    # a norm behind the last block is the final norm; some models have none
    call = _find_reader(
        log, state, last.end, lambda call: is_plain_norm(call.module, call.inputs[0])
    )
    start = last.end
    if call is not None:
        norm = Norm(call.path, state.shape[-1])
        state, start = call.outputs[0], call.end
    # what reads the norm, or the state itself, and gives an output is the unembedding
    call = _find_reader(log, state, start, lambda call: is_linear(call.module, call.inputs[0]))
    if call is None or not any(t.shape == call.outputs[0].shape for t in output):
        return End(norm)  # a head of several layers
    same = list(call.outputs)
    # casts and shifts by a constant do not change which matrix it is
    for op in log.operations[call.end :]:
        if op.name in UNCHANGED and any(is_among(t, same) for t in op.inputs):
            same += op.outputs
    gives_output = any(is_among(t, same) for t in output)
    return End(norm, Projection(call.path, state.shape[-1]), gives_output)


def _find_reader(
    log: PassLog, tensor: Tensor, start: int, fits: Callable[[ModuleCall], bool]
) -> ModuleCall | None:
    """Find the first call of a module that reads a tensor, moved perhaps, and fits."""
    same = [tensor]
    calls = [call for call in log.module_calls() if call.start >= start]
    # one step more than operations: a call may begin behind the last of them
    for number, op in enumerate([*log.operations[start:], None], start):
        for call in (c for c in calls if c.start == number):
            read = [t for t in call.inputs if t.is_floating_point()]
            if len(read) == 1 and is_among(read[0], same) and fits(call):
                return call
        if op is not None and op.inputs and is_among(op.inputs[0], same):
            # transformers cuts positions out (logits_to_keep) before the unembedding reads them
            same += op.outputs if op.name in {*UNCHANGED, "__getitem__"} else []
    return None


@dataclass(eq=False)
class Anatomy:
    """What one run of a model showed.

    Attributes:
        blocks: of one stack, in the order of the pass.
        stacks: the blocks of all stacks, by the path of their list.
        d_model: the width of the stream; None where no block has one.
        start: what stands before the first block.
        end: what stands behind the last.
        distance: of the output under the log from the bare one, as a share of its range.
    """

    blocks: list[Block]
    stacks: dict[str, list[Block]]
    d_model: int | None = None
    start: Start = field(default_factory=Start)
    end: End = field(default_factory=End)
    distance: float = 0.0
    _state: tuple[Any, ...] = field(default=(), repr=False)

    def holds(self, model: nn.Module) -> bool:
        """Say whether the model is what it was: modules, their functions, precision and sizes."""
        state = _describe_state(model)
        return len(state) == len(self._state) and all(
            one is other or (not isinstance(one, nn.Module) and one == other)
            for one, other in zip(state, self._state)
        )


def _describe_state(model: nn.Module) -> tuple[Any, ...]:
    """List what an anatomy depends on: modules, their functions, kinds of attention, sizes."""
    modules = list(modules_of(model))
    own = []
    for values in map(vars, modules):
        # what `attach` puts on a model runs the model's own function
        forward = _under_ours(values["forward"]) if "forward" in values else None
        compiled = values.get("_compiled_call_impl")
        if forward is not None or compiled is not None:  # few modules have one
            own.append((forward, compiled))
    # a module may be the same and its weights of another size, as after resizing in place
    sizes = sum(p.numel() for m in modules for p in m._parameters.values() if p is not None)
    precision = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    return (*modules, own, *_list_kinds_of_attention(modules), precision, sizes)


def _list_kinds_of_attention(modules: list[nn.Module]) -> list[str | None]:
    """List the attention functions that configs of transformers name, each config once."""
    configs = {id(c): c for m in modules if (c := vars(m).get("config")) is not None}
    return [getattr(config, "_attn_implementation", None) for config in configs.values()]


def _under_ours(forward: Any) -> Any:
    """Look through an object of this package to the forward of the module's own below it."""
    if type(forward).__module__.startswith("infoflow_lens."):
        return getattr(forward, "stands_for", None)
    return forward


def find_anatomy(model: nn.Module, example: Mapping[str, Any], stack: str | None = None) -> Anatomy:
    """Find the anatomy of a model by two runs on an example, one logged and one not.

    The second says how far logging moves the outputs (`distance`).

    The model runs in evaluation mode and without gradients, and is left as it was found.

    Args:
        model: any module.
        example: what its ``forward`` takes, by name: two sequences of a few tokens, equally long.
        stack: where a model has several lists of blocks, the path of the one that is meant, or the
            end of that path.

    Raises:
        InfoFlowError: for a compiled model or compiled attention, before anything runs; for weights
            on several devices; and for a model in which no attention is seen, or several stacks.
    """
    _check_is_visible(model)
    check_one_device(model)
    given = list(tensors_in(example))
    log = PassLog(batch=given[0].shape[0])
    with eval_mode(model):
        # the same random numbers in both runs: a model may draw some in evaluation, too
        with SeededRandom(0), log.watch(model):
            watched = _run(model, example)
        check_gives_numbers(model, first_tensor(watched))
        with SeededRandom(0):
            bare = _run(model, example)
        anatomy = _read(model, log, given, stack, list(tensors_in(watched)))
    anatomy.distance = _measure_distance(list(tensors_in(bare)), list(tensors_in(watched)))
    anatomy._state = _describe_state(model)
    return anatomy


def _check_is_visible(model: nn.Module) -> None:
    """Refuse compiled code, into which no tap can look.

    Raises:
        InfoFlowError: naming the module, or the attention function.
    """
    for path, module in model.named_modules():
        if hasattr(module, "_orig_mod") or vars(module).get("_compiled_call_impl") is not None:
            raise InfoFlowError(
                f"{path or 'the model'} ({type(module).__name__}) is compiled, and compiled code "
                "cannot be watched: expected the model itself; give what was given to torch.compile"
            )
    # flex attention compiles only when it is called
    kinds = [kind for kind in _list_kinds_of_attention(list(modules_of(model))) if kind is not None]
    flex = next((kind for kind in kinds if "flex" in str(kind)), None)
    if flex is not None:
        raise InfoFlowError(
            f"{type(model).__name__} has attention {flex!r}, which compiles its own code, so that "
            'no softmax can be seen: expected set_attn_implementation("eager") or "sdpa"'
        )


def _run(model: nn.Module, example: Mapping[str, Any]) -> Any:
    try:
        with on_user_device():
            return model(**example)
    except InfoFlowError:
        raise
    except Exception as error:
        takes = ", ".join(list(inspect.signature(model.forward).parameters)[:6])
        remedy = (
            f"expected what its forward takes ({takes}); give open_model example={{name: two "
            "sequences of a few tokens}, or a part of the model that reads tokens"
        )
        if "no padding token" in str(error):  # by which a classifier finds the end of each text
            remedy = "expected one; set model.config.pad_token_id, such as the tokenizer's"
        raise InfoFlowError(
            f"{type(model).__name__} does not run on an example with {', '.join(example)} "
            f"({type(error).__name__}: {error}): {remedy}"
        ) from error


def _read(
    model: nn.Module, log: PassLog, given: list[Tensor], stack: str | None, output: list[Tensor]
) -> Anatomy:
    """Read an anatomy from a log."""
    attentions = _list_attentions(log, given, type(model).__name__)
    calls = _find_block_calls(log, attentions)
    blocks = [_read_block(log, call, attentions) for call in calls]
    # blocks of one list, such as those of an encoder, make a stack; a model may have several
    stacks: dict[str, list[Block]] = {}
    for call, block in zip(calls, blocks):
        within = call.parent.path if call.parent else ""
        inside = re.match(r"(.*?)\.\d+\.", call.path + ".")
        # a block within a module of a listed element belongs to the list, not to the element
        if not call.is_list_item and inside:
            within = inside[1].rpartition(".")[0]
        stacks.setdefault(within, []).append(block)
    stacks = {path: some for path, some in stacks.items() if any(b.attentions for b in some)}
    # by its path, or by the end of one: "decoder" is "model.decoder", where no other ends so
    ends = [path for path in stacks if stack is None or path.endswith(f".{stack}")]
    meant = [stack] if stack in stacks else ends
    if len(meant) != 1:
        raise InfoFlowError(
            f"stack is {stack!r}, and {type(model).__name__} has "
            f"{'several stacks' if len(stacks) > 1 else 'one stack'} of blocks: expected one of "
            f"{', '.join(map(repr, stacks))}"
        )
    chosen = stacks[meant[0]]
    anatomy = Anatomy(chosen, stacks)
    # the calls of the chosen blocks, as streams and ends are read off the log of calls
    own = [call for call, block in zip(calls, blocks) if block in chosen]
    streams = [(call.stream(), block.axes) for call, block in zip(own, chosen)]
    anatomy.d_model = next((s[0].shape[axes[2]] for s, axes in streams if s and axes), None)
    # behind the stack before, which may share the embedding
    since = max((c.end for c in calls if c not in own and c.end <= own[0].start), default=0)
    anatomy.start = read_start(log, given, since, own[0].start)
    if chosen[-1].axes is not None:
        anatomy.end = read_end(log, output, own[-1])
    return anatomy


def _list_attentions(log: PassLog, given: list[Tensor], kind: str) -> list[AttentionCall]:
    """List the attentions of a pass.

    Raises:
        InfoFlowError: if there is none.
    """
    # softmaxes that a product reads: others are of experts, or of the vocabulary
    ids = next((t for t in given if not t.is_floating_point() and t.ndim == 2), None)
    calls = [
        call
        for call in log.calls
        if call.is_read and id(call) in log.places and not _mixes_streams(call, ids)
    ]
    if calls:
        return calls
    if log.calls:
        raise InfoFlowError(
            f"{kind} takes softmaxes, but none is multiplied by values as a pattern [..., query, "
            "key]: expected a pattern over all keys; attention with a layout of its own (windows "
            "in chunks, blocks) cannot be shown"
        )
    raise InfoFlowError(
        f"no attention was seen in {kind}: expected a softmax over keys that a product reads, or "
        "scaled_dot_product_attention. Attention in a compiled function or a kernel (flash, flex) "
        'cannot be watched: call set_attn_implementation("eager") or "sdpa"; or give a model that '
        "has attention"
    )


def _mixes_streams(call: AttentionCall, ids: Tensor | None) -> bool:
    """Say whether a softmax weighs several streams of each position (hyper-connections)."""
    if ids is None or call.product is not None:  # which has queries and keys
        return False
    shape = call.seen["pattern"].shape
    return shape[1] == ids.shape[1] and ids.shape[1] not in shape[2:]


# Blocks


def _find_block_calls(log: PassLog, attentions: list[AttentionCall]) -> list[ModuleCall]:
    """Find the call that is each attention's block, and its fellows in the same list."""
    found: list[ModuleCall] = []
    for attention in attentions:
        around = log.calls_around(attention)
        streams = [call for call in around if call.stream() is not None]
        listed = [call for call in streams if call.is_list_item]
        alone = [call for call in reversed(streams) if len(call.attentions) == 1]
        # by preference: elements of lists, then calls of this attention alone from the outside in,
        # then any call that maps a stream
        sums = {c: _count_sums(log, c, attention) for c in (*listed, *alone, *streams)}
        # with a sum behind that of attention, as a list of sublayers within a block is no block
        whole = [c for c in listed if sums[c] > 1] or [c for c in sums if sums[c]]
        call = (whole or [c for c in around if c.is_list_item] or around)[0]
        if call not in found:
            found.append(call)
    lists = {_list_of(call) for call in found if call.is_list_item}
    others = [
        call
        for call in log.module_calls()
        if _list_of(call) in lists and call not in found and call.stream() is not None
    ]
    return sorted(found + others, key=lambda call: call.start)


def _list_of(call: ModuleCall) -> tuple[int, str]:
    return id(call.parent), call.path.rpartition(".")[0]


def _count_sums(log: PassLog, call: ModuleCall, attention: AttentionCall) -> int:
    stream = call.stream()
    assert stream is not None
    return count_sums(log.operations[call.start : call.end], stream[0].shape, attention)


def _read_block(log: PassLog, call: ModuleCall, known: list[AttentionCall]) -> Block:
    attentions = [one for one in dict.fromkeys(call.attentions) if one in known]
    batch = log.batch or 1
    # some models run with the batch folded into another axis; the pattern has it for sure
    if attentions and attentions[0].seen["pattern"].ndim == 4:  # wherever the stream has its batch
        batch = attentions[0].seen["pattern"].shape[0]
    block = Block(call.path, call.module, None)
    block.attentions = tuple(read_attention(log, call, one, batch) for one in attentions)
    block.n_attentions = call.n_own_attentions
    stream = call.stream()
    # without a sum inside of the module, nothing between attention and MLP can be told apart
    if stream is None or (attentions and not _count_sums(log, call, attentions[0])):
        why = (
            "no module around this attention maps [batch, pos, width] to its own shape and adds "
            "attention to it: the sums stand outside of modules, or the stream has another form"
        )
        names = ("resid_pre", "attn_out", "mid", "mlp_out", "neurons", "resid_post")
        block.lacks = dict.fromkeys(names, why)
        return block
    seen = split_heads(attentions[0].seen["pattern"], batch).shape if attentions else None
    n_pos = seen[-2] if seen else None
    block.axes = _find_axes(stream[0], batch, n_pos)
    if seen and max(seen[-2:]) < stream[0].shape[block.axes[1]]:
        raise InfoFlowError(
            f"block {call.path} takes softmaxes of {seen[-2]} queries over {seen[-1]} keys where "
            f"its stream has {stream[0].shape[block.axes[1]]} positions: expected a pattern over "
            "all of them; a block with keys of its own, such as means of tokens or one of several "
            "streams, cannot be shown"
        )
    parts = ("attn_out", "mid", "mlp_out", "neurons")
    # a block of another mixer (convolution, state space) has the same states around that
    if not attentions:
        mixer = next((c for c in call.children if c.inputs and not _is_norm_call(c)), None)
        runs = call.children if mixer is None else [mixer]
        inner = [c.path.removeprefix(call.path + ".") for c in runs]
        kinds = [f"{p} ({type(c.module).__name__})" for p, c in zip(inner, runs)]
        block.mixer = ", ".join(kinds)
        why = f"no attention in this block; it runs {block.mixer}"
        block.lacks = {"attention": why}
        if mixer is None:
            block.lacks |= dict.fromkeys(parts, why)
        else:
            _find_states(log, call, log.operations[mixer.start : mixer.end], block)
    # positions that are merged or split within the block would be named wrongly
    elif stream[0].shape[block.axes[1]] != n_pos:
        why = (
            f"{n_pos} queries, and {stream[0].shape[block.axes[1]]} positions in the stream: "
            "attention of a layout of its own"
        )
        block.lacks = dict.fromkeys(parts, why)
    else:
        own = [op for op in log.operations[call.start : call.end] if op.attention is attentions[0]]
        _find_states(log, call, own, block)
    return block


def _is_norm_call(call: ModuleCall) -> bool:
    return call.inputs[0].is_floating_point() and is_norm(call.module, call.inputs[0])


def _find_states(log: PassLog, call: ModuleCall, mixing: Sequence[Operation], block: Block) -> None:
    """Find the states of a block around what moves information between positions in it."""
    StateFinder(call, log.operations[call.start : call.end], mixing, block).find()
    if block.neurons is None:
        block.lacks.setdefault("neurons", block.lacks.get("mlp_out", "no MLP was found"))


def _find_axes(stream: Tensor, batch: int, n_pos: int | None) -> tuple[int, int, int]:
    """Find the axes of batch, position and width."""
    shape = list(stream.shape)
    first = shape.index(batch) if batch in shape else 0
    rest = [axis for axis in range(3) if axis != first]
    second = next((axis for axis in rest if shape[axis] == n_pos), rest[0])
    # the axes are 0, 1 and 2, so what is left of 3 is that of the width
    return first, second, 3 - first - second


def _measure_distance(bare: list[Tensor], watched: list[Tensor]) -> float:
    """Measure how far outputs are apart, as a share of their range."""
    pairs = [
        (x, y)
        for x, y in zip(bare, watched)
        if x.is_floating_point() and x.shape == y.shape and x.numel()
    ]
    return max(
        # the bound keeps outputs that are all alike from dividing by 0
        (float((x - y).abs().max() / (x.max() - x.min()).clamp_min(1e-9)) for x, y in pairs),
        default=0.0,
    )
