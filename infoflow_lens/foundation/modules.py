"""Run a module of the user's and leave it unchanged; seeds, and what modules draw from them."""

import functools
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import LARGEST_SEED, Seed, checked

_locks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_locks_guard = threading.Lock()


@contextmanager
def one_thread(model: nn.Module) -> Iterator[None]:
    """Reserve a model for the current thread for the length of a block.

    Raises:
        InfoFlowError: if another thread measures or evaluates the model now, or if another thread
            ends the block.
    """
    with _locks_guard:
        # a block may stand inside another of the same thread
        lock = _locks.setdefault(model, threading.RLock())
    if not lock.acquire(blocking=False):
        raise InfoFlowError(
            f"another thread measures or evaluates this {type(model).__name__} now: expected one "
            "thread for each model; give each thread a copy of the model, or let them take turns"
        )
    try:
        yield
    finally:
        try:
            lock.release()
        # the lock is lost with that thread: a new one, so that the model can be used again
        except RuntimeError as error:  # only the thread that owns the lock can release it
            with _locks_guard:
                _locks[model] = threading.RLock()
            raise InfoFlowError(
                f"a block that measures this {type(model).__name__} was entered in one thread and "
                "is left in another: expected one thread; leave it where it was entered"
            ) from error


@contextmanager
def keep_modes(model: nn.Module) -> Iterator[Mapping[nn.Module, bool]]:
    """Give every module its own train or eval mode back at the end of a block, also after errors.

    Yields:
        For each module, whether it was in train mode.
    """
    modes = {module: module.training for module in _all_modules(model)}
    try:
        yield modes
    finally:
        for module, training in modes.items():
            # past the module's own setattr, in which Ctrl-C could leave a wrong mode
            vars(module)["training"] = training


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluate without gradients; afterwards every module has its own mode again.

    ``model.eval()`` is not called: in some adapters it writes weights.

    Raises:
        InfoFlowError: if another thread measures or evaluates the model now.
    """
    with one_thread(model), keep_modes(model) as modes, torch.no_grad():
        for module in modes:
            vars(module)["training"] = False
        yield


_user = threading.local()  # holds the default device of the user's, while we have left it


@contextmanager
def outside_user_modes() -> Iterator[None]:
    """Leave an inference mode of the user's, in which derivatives are 0 or fail, and its device."""
    with outside_user_device():
        if torch.is_inference_mode_enabled():
            # to leave it switches gradients on, which it had switched off
            with torch.inference_mode(False), torch.no_grad():
                yield
        else:
            yield


@contextmanager
def outside_user_device() -> Iterator[None]:
    """Leave a default device of the user's for a block: what we count lies on the host.

    A device may be set in a notebook's first cell, ``torch.set_default_device("cuda")``.
    """
    device = torch.get_default_device()
    if device.type == "cpu":
        yield
        return
    # blocks may stand inside one another, as where the user's model calls what measures another
    before, _user.device = getattr(_user, "device", None), device
    try:
        with torch.device("cpu"):
            yield
    finally:
        _user.device = before


@contextmanager
def on_user_device() -> Iterator[None]:
    """Give a model of the user's the default device that it expects, for a block of its code."""
    device = getattr(_user, "device", None)
    with nullcontext() if device is None else torch.device(device):
        yield


@contextmanager
def part_in_eval_mode(part: nn.Module) -> Iterator[None]:
    """Evaluate a part of a model without gradients, which other threads may run meanwhile.

    Raises:
        InfoFlowError: if it is in train mode, and another thread evaluates it now.
    """
    if any(module.training for module in modules_of(part)):
        with eval_mode(part):
            yield
    else:
        with torch.no_grad():
            yield


def _all_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield all modules, and those that a bridge of TransformerLens holds beside its own."""
    held: Any = model
    while isinstance(held, nn.Module):  # of an opened bridge, too
        yield from modules_of(held)
        held = getattr(held, "original_model", None)


def modules_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield ``model.modules()`` in another order, several times as fast: every pass asks for it."""
    seen, waiting = {model}, [model]
    while waiting:
        module = waiting.pop()
        yield module
        for part in module._modules.values():
            if part is not None and part not in seen:
                seen.add(part)
                waiting.append(part)


_aten = torch.ops.aten


class SeededRandom(TorchDispatchMode):
    """What the operations of a block draw in this thread comes from a seed of its own.

    On a CPU the numbers are those that the global generator would give from the same seed; its
    state is left alone. A block costs time with every operation.

    Attributes:
        n_drawn: how many operations have drawn so far.

    Raises:
        InfoFlowError: from an operation that draws and takes no generator.
    """

    @checked
    def __init__(self, seed: Seed) -> None:
        super().__init__()
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self.n_drawn = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        # only operations that draw; those with a generator are in the caller's hands
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator"):
            return func(*args, **kwargs)
        if _device_of(args, kwargs).type == "meta":  # where there are no numbers
            return func(*args, **kwargs)
        self.n_drawn += 1
        if func in _WITHOUT_GENERATOR:
            return _WITHOUT_GENERATOR[func](self, *args, **kwargs)
        if not _draws_at_all(func, args, kwargs):
            return func(*args, **kwargs)
        # without such an argument: as smaller operations, or by another overload
        if not any(argument.name == "generator" for argument in func._schema.arguments):
            func_with = getattr(func.overloadpacket, "generator", None)
            with self:  # what is made of other operations
                made = func.decompose(*args, **kwargs) if func_with is None else NotImplemented
            if made is not NotImplemented:
                return made
            if func_with is None:
                raise InfoFlowError(
                    f"the model draws random numbers by {func}, which takes no generator: expected "
                    "one that does, so that a seed gives the same numbers; use other operations, "
                    "such as nn.Dropout"
                )
            func = func_with
        return func(*args, **{**kwargs, "generator": self.generator(_device_of(args, kwargs))})

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator of a device."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


def _device_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
    given = next((part for part in args if isinstance(part, Tensor)), None)
    device = given.device if given is not None else torch.device(kwargs.get("device") or "cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _draws_at_all(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Say whether a call draws numbers; PyTorch marks attention as random even if dropout is 0."""
    names = [argument.name for argument in func._schema.arguments]
    defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
    given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    return not any(name in given and not given[name] for name in ("dropout_p", "dropout"))


def _dropout(
    drawing: SeededRandom, x: Tensor, p: float, train: bool | None
) -> tuple[Tensor, Tensor]:
    """Apply nn.Dropout on accelerators; on a CPU, operations that take a generator."""
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = _fill_like(drawing, x, "bernoulli_", 1 - p).bool()
    return x * kept / (1 - p) if p < 1 else x * 0, kept


def _fill_like(
    drawing: SeededRandom, like: Tensor, method: str, *numbers: float, **kwargs: Any
) -> Tensor:
    empty = torch.empty_like(like, **kwargs)
    generator = drawing.generator(_device_of((empty,), {}))
    filled: Tensor = getattr(empty, method)(*numbers, generator=generator)
    return filled


def _like(how: str, *numbers: float) -> Any:
    def draw(drawing: SeededRandom, like: Tensor, **kwargs: Any) -> Tensor:
        return _fill_like(drawing, like, how, *numbers, **kwargs)

    return draw


_WITHOUT_GENERATOR = {
    _aten.native_dropout.default: _dropout,
    _aten.rand_like.default: _like("uniform_"),
    _aten.randn_like.default: _like("normal_"),
}


def derive_seed(*parts: str | int) -> int:
    """Derive a seed from 0 to 2^63 - 1: equal parts give equal seeds, others unrelated ones."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") & LARGEST_SEED


def bind_to_thread(hook_fn: Callable[..., Any], elsewhere: bool = False) -> Callable[..., Any]:
    """Make a hook act on passes of the current thread only; or on those of all others."""
    own_thread = threading.get_ident()

    @functools.wraps(hook_fn)
    def acts(*args: Any, **kwargs: Any) -> Any:
        if (threading.get_ident() == own_thread) == elsewhere:
            return None
        return hook_fn(*args, **kwargs)

    return acts


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors on the CPU; the host waits once for the device that they lie on."""
    flat = [tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors]
    parts = torch.cat(flat).cpu().split([len(part) for part in flat]) if flat else ()
    return [
        # a copy: a view may start at an address that its dtype does not allow
        part.clone().view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]
