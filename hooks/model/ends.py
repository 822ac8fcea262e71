"""What stands before the first block of a model, and behind the last."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infoflow_lens.hooks.model.log import ModuleCall, PassLog, is_among
from infoflow_lens.hooks.model.parts import Norm, Place, Projection, is_linear, is_plain_norm
from infoflow_lens.hooks.model.states import SAME, UNCHANGED
from infoflow_lens.hooks.model.tap import ADDITIONS


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
                return Start(call.path, within, d_vocab, place, _table_length(log, added))
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


def _table_length(log: PassLog, added: Tensor) -> int | None:
    """Count the positions of the table that a summand was looked up in, if it was."""
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
    call = _reader(log, state, last.end, lambda call: is_plain_norm(call.module, call.inputs[0]))
    start = last.end
    if call is not None:
        norm = Norm(call.path, state.shape[-1])
        state, start = call.outputs[0], call.end
    # what reads the norm, or the state itself, and gives an output is the unembedding
    call = _reader(log, state, start, lambda call: is_linear(call.module, call.inputs[0]))
    if call is None or not any(t.shape == call.outputs[0].shape for t in output):
        return End(norm)  # a head of several layers
    same = list(call.outputs)
    # casts and shifts by a constant do not change which matrix it is
    for op in log.operations[call.end :]:
        if op.name in UNCHANGED and any(is_among(t, same) for t in op.inputs):
            same += op.outputs
    gives_output = any(is_among(t, same) for t in output)
    return End(norm, Projection(call.path, state.shape[-1]), gives_output)


def _reader(
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
