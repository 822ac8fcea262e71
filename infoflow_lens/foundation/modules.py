"""Running somebody's module without leaving traces on it."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from infoflow_lens.foundation.errors import InfoFlowError

_locks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_making = threading.Lock()


@contextmanager
def one_thread(model: nn.Module) -> Iterator[None]:
    """A model is measured by one thread at a time, for the length of the block.

    Raises:
        InfoFlowError: if another thread measures or evaluates it now, or ends the block.
    """
    with _making:
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
        except RuntimeError as error:  # it is not this thread's: nobody else can release it
            with _making:
                _locks[model] = threading.RLock()
            raise InfoFlowError(
                f"a block that measures this {type(model).__name__} was entered in one thread and "
                "is left in another: expected one thread; leave it where it was entered"
            ) from error


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[Mapping[nn.Module, bool]]:
    """Whatever happens in the block, every module has its own train or eval mode after it.

    Yields:
        the modules, and whether each trains.
    """
    modes = {module: module.training for module in _modules_of(model)}
    try:
        yield modes
    finally:
        for module, training in modes.items():
            # not by the module's own setattr: Ctrl-C between its calls would leave modes behind
            vars(module)["training"] = training


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation without gradients; afterwards every module has its own mode again.

    ``model.eval()`` is not called: in some adapters it writes weights.

    Raises:
        InfoFlowError: if another thread measures or evaluates the model now.
    """
    with one_thread(model), modes_kept(model) as modes, torch.no_grad():
        for module in modes:
            vars(module)["training"] = False
        yield


def _modules_of(model: nn.Module) -> Iterator[nn.Module]:
    """All modules, and those that a bridge of TransformerLens holds beside its own."""
    yield from modules_of(model)
    behind = getattr(model, "original_model", None)
    if isinstance(behind, nn.Module):
        yield from modules_of(behind)


def modules_of(model: nn.Module) -> Iterator[nn.Module]:
    """``model.modules()`` in another order, and several times as fast: every pass asks for it."""
    seen, waiting = {model}, [model]
    while waiting:
        module = waiting.pop()
        yield module
        for part in module._modules.values():
            if part is not None and part not in seen:
                seen.add(part)
                waiting.append(part)
