"""Running somebody's module without leaving traces on it."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.interrupts import insist

_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_making = threading.Lock()
_PATIENCE = 600.0  # seconds, after which a thread that holds a model is taken to wait for us


@contextmanager
def turn(model: nn.Module) -> Iterator[None]:
    """Measured calls, own passes and evaluations of one model take turns between threads.

    Raises:
        InfoFlowError: if another thread does not let go of the model.
    """
    with _making:
        lock: Any = _locks.setdefault(model, threading.RLock())
    if not lock.acquire(timeout=_PATIENCE):
        raise InfoFlowError(
            f"another thread has held {type(model).__name__} for {_PATIENCE:.0f} seconds while it "
            "is measured: expected calls to take turns; a hook that waits for another thread's "
            "call of the same model waits for ever"
        )
    try:
        yield
    finally:
        lock.release()


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[Mapping[nn.Module, bool]]:
    """Whatever happens in the block, every module has its own train or eval mode after it.

    Yields:
        the modules, and whether each trains.
    """
    modes = {module: module.training for module in _modules_of(model)}

    def put_back() -> None:
        for module, training in modes.items():
            if module.training != training:
                module.training = training

    try:
        yield modes
    finally:
        insist(put_back)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation without gradients; afterwards every module has its own mode again.

    Threads share the mode of a model, so that they take turns. ``model.eval()`` is not called: in
    some adapters it writes weights.
    """
    with turn(model), modes_kept(model) as modes, torch.no_grad():
        for module, training in modes.items():
            if training:
                module.training = False
        yield


def _modules_of(model: nn.Module) -> Iterator[nn.Module]:
    """All modules, and those that a bridge of TransformerLens holds beside its own."""
    yield from model.modules()
    behind = getattr(model, "original_model", None)
    if isinstance(behind, nn.Module):
        yield from behind.modules()
