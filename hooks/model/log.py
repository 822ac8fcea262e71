"""The log of a pass: every operation and every call of a module, with their tensors.

The states of a block are found in it by the identity of tensors. ``attn_out`` is what the first sum
adds that has attention on one side and the block's input, or a copy of it, on the other. ``mid`` is
what the next sublayer reads of that sum: the first tensor behind it that two read, so the sum
itself (GPT-2) or the norm of it (BERT). ``mlp_out`` is what the next sum adds to ``mid``. Beside
each other, attention and MLP are the outputs of modules whose sum leaves the block.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from infoflow_lens.hooks.model.parts import Block, Place, Projection, is_linear, is_norm
from infoflow_lens.hooks.model.tap import (
    ADDITIONS,
    COPIES,
    MOVES,
    AttentionCall,
    Site,
    Tap,
    suspend_compiler,
)

# matrices, norms and copies that are looked at, from the sum with the MLP backwards
_MOST_STEPS_TO_NEURONS = 4


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of what a module takes or gives, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, tuple, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


def first_tensor(value: Any) -> Tensor | None:
    """Return the first tensor of what a module gives; None without any."""
    return next(tensors_in(value), None)


def find_output(value: Any) -> Tensor | None:
    """Return the logits of what a model gives, or its first tensor; None without any."""
    logits: Tensor | None = getattr(value, "logits", None)
    return first_tensor(value) if logits is None else logits


def is_among(tensor: Tensor, others: list[Tensor]) -> bool:
    """Say whether a tensor is one of these objects."""
    return any(other is tensor for other in others)


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Say whether two tensors begin at the same place, also where they are written in place."""
    try:
        return one.data_ptr() == other.data_ptr()
    except RuntimeError:  # within a transform of torch.func, where tensors have no place
        return one is other


@dataclass(eq=False)
class Operation:
    """One operation.

    Attributes:
        name: of the function.
        inputs, outputs: its tensors.
        call: the innermost call of a module around it.
        attention: the attention whose z it gave.
    """

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    call: "ModuleCall | None"
    attention: AttentionCall | None = None


@dataclass(eq=False)
class ModuleCall:
    """One call of a module.

    Attributes:
        path: of the module in the model.
        parent: the call around it.
        start, end: operations of the pass before it began, and before it ended.
        n_attentions, n_products: so many the tap had counted when it began.
        n_own_attentions: so many it counted in the call.
        attentions: those whose z came in it.
    """

    path: str
    module: nn.Module
    parent: "ModuleCall | None"
    start: int
    inputs: list[Tensor]
    n_attentions: int
    n_products: int
    end: int = 0
    n_own_attentions: int = 0
    outputs: list[Tensor] = field(default_factory=list)
    attentions: list[AttentionCall] = field(default_factory=list)
    children: list["ModuleCall"] = field(default_factory=list)

    @property
    def is_list_item(self) -> bool:
        """Say whether the module is an element of a list."""
        return self.path.rpartition(".")[2].isdigit()

    def enclosing(self) -> Iterator["ModuleCall"]:
        """Yield this call, and those around it."""
        call: ModuleCall | None = self
        while call is not None:
            yield call
            call = call.parent

    def inner(self) -> Iterator["ModuleCall"]:
        """Yield the calls within this one, in order."""
        for child in self.children:
            yield child
            yield from child.inner()

    def stream(self) -> tuple[Tensor, Tensor] | None:
        """Return what enters and what leaves, where a call maps three axes to their own shape."""
        for tensor in self.inputs:
            if tensor.is_floating_point() and tensor.ndim == 3:
                for out in self.outputs:
                    if out.shape == tensor.shape and out.is_floating_point():
                        return tensor, out
                return None
        return None


class PassLog(Tap):
    """A tap that logs one pass of a model; it keeps all tensors alive, so that they have identity.

    Attributes:
        operations: all of the pass, in order.
        places: by the id of an attention, the innermost call in which its z came.
        starts: by the id of an attention, the operations before its scores.
    """

    def __init__(self, batch: int) -> None:
        super().__init__(batch=batch, compare=True)
        self.operations: list[Operation] = []
        self.places: dict[int, ModuleCall] = {}
        self.starts: dict[int, int] = {}
        self._roots: list[ModuleCall] = []
        self._open: list[ModuleCall] = []
        self._last_read: AttentionCall | None = None

    def _keep(self, call: AttentionCall, site: Site, tensor: Tensor) -> None:
        super()._keep(call, site, tensor)
        self.starts.setdefault(id(call), len(self.operations))
        if site == "z":
            self._last_read = call

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # set by `_keep` while the operation runs, where that is the one that gives z
        self._last_read = None
        out = super().__torch_function__(func, types, args, kwargs)
        if self._is_aside or not (outputs := list(tensors_in(out))):
            return out
        inputs = [*tensors_in(args), *tensors_in(kwargs or {})]
        call = self._open[-1] if self._open else None
        attention = self._last_read
        name = getattr(func, "__name__", "")
        self.operations.append(Operation(name, inputs, outputs, call, attention))
        if attention is not None and call is not None:
            # the innermost module that runs the attention, and all around it
            self.places[id(attention)] = call
            for around in call.enclosing():
                around.attentions.append(attention)
        return out

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Log what runs while the block lasts."""
        handles = []
        try:
            for path, module in model.named_modules():
                handles.append(
                    module.register_forward_pre_hook(self._opener(path), with_kwargs=True)
                )
                handles.append(module.register_forward_hook(self._close))
            with suspend_compiler(), self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _opener(self, path: str) -> Any:
        def open_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs = [*tensors_in(args), *tensors_in(kwargs)]
            parent = self._open[-1] if self._open else None
            counts = self.n_attentions, self.n_products
            call = ModuleCall(path, module, parent, len(self.operations), inputs, *counts)
            (parent.children if parent else self._roots).append(call)
            self._open.append(call)

        return open_call

    def _close(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        call = self._open.pop()
        call.end, call.outputs = len(self.operations), list(tensors_in(out))
        call.n_own_attentions = self.n_attentions - call.n_attentions

    def module_calls(self) -> Iterator[ModuleCall]:
        """Yield all calls of modules, in order."""
        for root in self._roots:
            yield root
            yield from root.inner()

    def calls_around(self, attention: AttentionCall) -> list[ModuleCall]:
        """List the calls that hold an attention from its scores to z, innermost first."""
        start = self.starts[id(attention)]
        return [c for c in self.places[id(attention)].enclosing() if c.start <= start]


SAME = COPIES | {"detach", "requires_grad_"}  # what these give counts as what they were given
UNCHANGED = MOVES | SAME | {"__get__"}  # what these give has the same numbers


def has_shape(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    """Say whether a tensor is a stream of a shape, batch and positions perhaps in one axis."""
    return tensor.shape == shape or (
        tensor.ndim == 2 and tuple(tensor.shape) == (shape[0] * shape[1], shape[2])
    )


def count_sums(
    operations: list[Operation], shape: tuple[int, ...], attention: AttentionCall
) -> int:
    """Count sums of the stream's shape, from the one on that adds attention to something else."""
    from_attention: set[int] = set()
    n = 0
    for op in operations:
        has = {id(t) in from_attention for t in op.inputs}
        if op.name in ADDITIONS and all(has_shape(t, shape) for t in op.inputs[:2]):
            # the first has attention on one side alone; from then on each sum counts
            n += n > 0 or len(has) == 2
        if op.attention is attention or True in has:
            from_attention |= {id(t) for t in op.outputs}
    return n


class StateFinder:
    """Finds the states of one block and writes their places into it.

    Args:
        call: of the block's module.
        operations: of that call.
        mixing: those that move information between positions: the first attention, or, where a
            block has none, all of another mixer.
        block: gets the places, and for what is not there a sentence.
    """

    def __init__(
        self,
        call: ModuleCall,
        operations: list[Operation],
        mixing: Sequence[Operation],
        block: Block,
    ) -> None:
        stream = call.stream()
        assert stream is not None  # a block without one has no states
        self._enters, self._leaves = stream
        self._call, self._operations, self._block = call, operations, block
        self._mixing = {id(op) for op in mixing}
        self._inner = list(call.inner())
        self._input = {id(self._enters)}  # and its copies
        self._from_attention: set[int] = set()

    def find(self) -> None:
        """Find all of them."""
        block = self._block
        sums = self._list_sums()
        # the first sum that has attention on one side tells all else
        found = next((s for s in sums if s[1].count("attention") == 1), None)
        if found is None:
            self._note_lack(
                "attn_out", "mid", "mlp_out", why="no sum adds attention to something else"
            )
            return
        op, kinds = found
        # another mixer may stand beside attention: what both give is added to what enters at once
        both = next((s for s in sums if set(s[1]) == {"input", "attention"}), found)
        if both is not found and self._find_next_input(both[0])[0] is not None:
            op, kinds = both
            block.is_joined = True
            why = "another mixer's output is added to attention's first; hook_mixer_out is both"
            self._note_lack("attn_out", why=why)
        if not block.attentions and found is not next((s for s in sums if "input" in s[1]), found):
            why = f"what enters is added to something else before it is added to {block.mixer}"
            self._note_lack("attn_out", "mid", "mlp_out", why=why)
            return
        place = kinds.index("attention")
        contribution, other = op.inputs[place], op.inputs[1 - place]
        # what attention is added to is what enters the block: sublayers stand one behind the other
        if id(other) in self._input:
            mid, path = self._find_next_input(op)
            if mid is not None:
                block.attn_out = Place("sum")
                block.mid = Place("output", path) if path else Place("sum")
                self._find_norms(contribution, path is not None)
                self._find_mlp(op, mid)
                return
            # nothing reads the sum but the way out: a block of attention alone
            if self._is_output(op.outputs[0]):
                block.attn_out = Place("sum")
                block.adds = op.outputs[0] is self._leaves
                self._find_norms(contribution, False)
                self._note_lack(
                    "mid", "mlp_out", why="no MLP: the sum with attention leaves the block"
                )
                return
        # else the MLP may stand beside attention, and all is added at once
        self._find_parallel(contribution, sums)

    def _note_lack(self, *names: str, why: str) -> None:
        self._block.lacks |= dict.fromkeys(names, why)

    def _list_sums(self) -> list[tuple[Operation, list[str]]]:
        """List the sums of streams, and of what: "attention", the block's "input", or "other"."""
        sums = []
        for op in self._operations:
            if op.name in SAME and op.inputs and id(op.inputs[0]) in self._input:
                self._input |= {id(t) for t in op.outputs}
            if self._is_sum(op):
                sums.append((op, [self._name_kind(t) for t in op.inputs[:2]]))
            from_attention = any(id(t) in self._from_attention for t in op.inputs)
            if id(op) in self._mixing or from_attention:
                self._from_attention |= {id(t) for t in op.outputs}
        return sums

    def _is_sum(self, op: Operation) -> bool:
        shape = self._enters.shape
        return (
            op.name in ADDITIONS
            and len(op.inputs) == 2
            and all(has_shape(t, shape) for t in op.inputs)
        )

    def _name_kind(self, tensor: Tensor) -> str:
        if id(tensor) in self._from_attention:
            return "attention"
        return "input" if id(tensor) in self._input else "other"

    def _list_readers(
        self, tensor: Tensor, after: int, within: ModuleCall | None = None
    ) -> list[Operation | ModuleCall]:
        """List what reads a tensor: outermost calls of modules that began later, else operations.

        Args:
            tensor: which is read.
            after: operations of the block before it was made.
            within: a call, whose own inner calls are told apart.
        """
        around = set(within.enclosing()) if within else {self._call}
        start = self._call.start + after
        readers: list[Operation | ModuleCall] = []
        for op in self._operations[after:]:
            if op.name == "__get__" or not is_among(tensor, op.inputs):
                continue
            # a module that was entered after the tensor was made reads it as a whole
            calls = [
                call
                for call in (op.call.enclosing() if op.call else ())
                if call.start >= start and call not in around and is_among(tensor, call.inputs)
            ]
            reader = calls[-1] if calls else op
            if reader not in readers:
                readers.append(reader)
        return readers

    def _find_next_input(self, op: Operation) -> tuple[Tensor | None, str | None]:
        """Find what the next sublayer reads of a sum: itself, or what a module behind it gives."""
        tensor, path = op.outputs[0], None
        after = self._operations.index(op) + 1
        # norms, dropout and casts: more steps between a sum and its two readers are not known
        for _ in range(4):
            readers = self._list_readers(tensor, after)
            # two readers are the next sublayer and the residual connection
            if len(readers) >= 2:
                return tensor, path
            if len(readers) != 1:
                return None, None
            reader = readers[0]
            if isinstance(reader, ModuleCall):
                # one module alone reads it: it may hold the residual connection inside
                inner = self._list_readers(tensor, after, reader)
                if any(isinstance(r, Operation) and self._is_sum(r) for r in inner):
                    return tensor, path  # an MLP that adds by itself
                outputs = [out for out in reader.outputs if out.shape == tensor.shape]
                if not outputs or outputs[0] is tensor:
                    return None, None
                tensor, path = outputs[0], reader.path
                after = reader.end - self._call.start
            elif reader.name in SAME:
                tensor, after = reader.outputs[0], self._operations.index(reader) + 1
            else:
                return None, None
        return None, None

    def _find_mlp(self, op: Operation, mid: Tensor) -> None:
        block, same = self._block, {id(mid)}
        n_attentions = 0  # behind the sum: two that run before it are one sublayer (DiffLlama)
        for later in self._operations[self._operations.index(op) + 1 :]:
            n_attentions += later.attention is not None
            if later.name in SAME and later.inputs and id(later.inputs[0]) in same:
                same |= {id(t) for t in later.outputs}
            if self._is_sum(later) and any(id(t) in same for t in later.inputs):
                # with a second attention, the sum may be that of the other one
                if n_attentions:
                    why = "several attentions in this block: the next sum belongs to another one"
                    self._note_lack("mlp_out", why=why)
                    return
                block.mlp_out = Place("sum")
                total = later.outputs[0]
                block.adds = share_memory(total, self._leaves)
                self._find_neurons(next((t for t in later.inputs if id(t) not in same), None))
                if not block.adds and not self._is_output(total):
                    self._note_lack("adds", why="after the sum with the MLP the block does more")
                    self._find_extra(later)
                return
        self._note_lack("mlp_out", why="no sum adds anything to what is read after attention")

    def _find_extra(self, op: Operation) -> None:
        """Find a sum of what the MLP has left with a third sublayer's output (Gemma 4)."""
        same = {id(op.outputs[0])}
        for later in self._operations[self._operations.index(op) + 1 :]:
            if later.name in SAME and later.inputs and id(later.inputs[0]) in same:
                same |= {id(t) for t in later.outputs}
            if self._is_sum(later) and any(id(t) in same for t in later.inputs):
                self._block.extra_out = Place("sum")
                return

    def _find_neurons(self, contribution: Tensor | None) -> None:
        """Find the last matrix of an MLP, whose input are its neurons.

        What the MLP adds to the stream is the output of that matrix, perhaps normed or copied.
        """
        block, tensor = self._block, contribution
        for _ in range(_MOST_STEPS_TO_NEURONS):
            # from the sum backwards: the first matrix is the last of the MLP
            made = [c for c in self._inner if tensor is not None and is_among(tensor, c.outputs)]
            for call in made:
                read = [t for t in call.inputs if t.is_floating_point()]
                if len(read) == 1 and is_linear(call.module, read[0]):
                    block.neurons = Place("input", call.path)
                    block.mlp_output = Projection(call.path, read[0].shape[-1])
                    return
            norm = next((c for c in made if c.inputs and is_norm(c.module, c.inputs[0])), None)
            copy = next((op for op in self._operations if op.name in SAME and tensor is not None
                         and is_among(tensor, op.outputs)), None)  # fmt: skip
            made_of = norm or copy
            if made_of is None or made_of.inputs[0] is tensor:
                break
            tensor = made_of.inputs[0]
        self._note_lack("neurons", why="no single matrix makes what the MLP adds")

    def _is_output(self, tensor: Tensor) -> bool:
        """Say whether a tensor, or a norm of it, is what leaves the block."""
        if tensor is self._leaves:
            return True
        made = (i for i, op in enumerate(self._operations) if is_among(tensor, op.outputs))
        readers = self._list_readers(tensor, next(made) + 1)
        return (
            len(readers) == 1
            and isinstance(readers[0], ModuleCall)
            and is_among(self._leaves, readers[0].outputs)
        )

    def _find_norms(self, contribution: Tensor, is_behind: bool) -> None:
        """Find where the norms stand.

        Args:
            contribution: what attention adds.
            is_behind: whether the next sublayer reads what a module gives behind the sum.
        """
        reads_input = [c for c in self._inner if c.inputs and id(c.inputs[0]) in self._input]
        front = any(is_norm(c.module, self._enters) for c in reads_input)
        last = [c for c in self._inner if is_among(contribution, c.outputs)][-1:]
        back = is_behind or any(is_norm(c.module, contribution) for c in last if not c.attentions)
        pairs = {(True, True): "both", (True, False): "pre", (False, True): "post"}
        self._block.norms = pairs.get((front, back), "none")  # type: ignore[assignment]

    def _find_parallel(self, contribution: Tensor, sums: list[tuple[Operation, list[str]]]) -> None:
        """Find attention and MLP beside each other: outputs whose sum leaves the block."""
        block = self._block
        block.is_parallel = True
        # the summands of what leaves the block, however they were added up
        leaves = _list_addends(self._leaves, {id(op.outputs[0]): op for op, _ in sums})
        # besides the input and attention there is the MLP, and nothing more
        rest = [t for t in leaves if id(t) not in self._input and t is not contribution]
        keeps_input = any(id(t) in self._input for t in leaves)
        if not is_among(contribution, leaves) or not keeps_input or len(rest) > 1:
            why = "what leaves the block is no sum of what enters, attention and one part more"
            self._note_lack("attn_out", "mid", "mlp_out", why=why)
            return
        block.adds = True
        self._find_norms(contribution, False)
        self._note_lack("mid", why="the MLP stands beside attention and reads what attention reads")
        for name, tensor in (("attn_out", contribution), *(("mlp_out", t) for t in rest)):
            made = next((c for c in self._inner if is_among(tensor, c.outputs)), None)
            # sums written in place change what the module gave after it gave it
            is_written = any(
                op.name in ("__iadd__", "add_") and op.inputs[0] is tensor
                for op in self._operations
            )
            if made is None:
                self._note_lack(name, why="no module gives it: it is made between modules")
            else:
                setattr(block, name, Place("output", made.path, is_written))
        if not rest:
            self._note_lack("mlp_out", why="no MLP in this block")
        elif block.mlp_out is not None:
            self._find_neurons(rest[0])


def _list_addends(tensor: Tensor, made: dict[int, Operation], depth: int = 0) -> list[Tensor]:
    """List what a tensor is the sum of, through the sums that made it."""
    op = made.get(id(tensor))
    if op is None or depth > 4:
        return [tensor]
    return [
        part
        for t in op.inputs[:2]
        # a sum in place gives the tensor that it has read, which would be followed without end
        for part in ([t] if t is tensor else _list_addends(t, made, depth + 1))
    ]
