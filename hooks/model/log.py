"""The log of a pass: every operation and every call of a module, with their tensors."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from infoflow_lens.hooks.model.tap import AttentionCall, Site, Tap, suspend_compiler


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
    def watching(self, model: nn.Module) -> Iterator[None]:
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
