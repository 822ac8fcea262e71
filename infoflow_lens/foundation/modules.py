"""Run a module of the user's and leave it unchanged."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from infoflow_lens.foundation.errors import InfoFlowError

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
    """Evaluation without gradients; afterwards every module has its own mode again.

    ``model.eval()`` is not called: in some adapters it writes weights.

    Raises:
        InfoFlowError: if another thread measures or evaluates the model now.
    """
    with one_thread(model), keep_modes(model) as modes, torch.no_grad():
        for module in modes:
            vars(module)["training"] = False
        yield


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Leave an inference mode of the user's for a block: derivatives in it are 0, or fail."""
    if torch.is_inference_mode_enabled():
        # to leave it switches gradients on, which it had switched off
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


@contextmanager
def part_in_eval_mode(part: nn.Module) -> Iterator[None]:
    """Evaluation of a part of a model without gradients, which other threads may run meanwhile.

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
    """``model.modules()`` in another order, and several times as fast: every pass asks for it."""
    seen, waiting = {model}, [model]
    while waiting:
        module = waiting.pop()
        yield module
        for part in module._modules.values():
            if part is not None and part not in seen:
                seen.add(part)
                waiting.append(part)
