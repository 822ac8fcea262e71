"""Forward passes that a probe makes for itself, and that no probe looks at."""

import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from infoflow_lens.foundation.interrupts import insist
from infoflow_lens.foundation.modules import turn


class AllSeenError(Exception):
    """Raised to end a forward pass once every probe has the activations that it reads."""


_inside_own_pass: ContextVar[bool] = ContextVar("inside_own_pass", default=False)


@contextmanager
def own_pass(model: nn.Module) -> Iterator[None]:
    """Forward passes in this block are a probe's own: no probe looks at them.

    Measured calls of the model in other threads wait until the block has ended.
    """
    with turn(model):
        token = _inside_own_pass.set(True)
        try:
            yield
        finally:
            _inside_own_pass.reset(token)


def inside_own_pass() -> bool:
    """Whether a probe runs a forward pass of its own."""
    return _inside_own_pass.get()


@contextmanager
def without_user_hooks(model: nn.Module) -> Iterator[None]:
    """The model with its permanent hooks only (those that belong to it), for the block's length."""
    saved: list[tuple[Any, str, Any]] = []

    def put_back() -> None:
        for point, name, hooks in saved:
            setattr(point, name, hooks)

    try:
        for point in set(model.hook_dict.values()):  # type: ignore[operator]
            for name, handles in (
                ("_forward_hooks", point.fwd_hooks),
                ("_backward_hooks", point.bwd_hooks),
                ("_backward_pre_hooks", ()),
            ):
                hooks = getattr(point, name)
                permanent = [handle.hook.id for handle in handles if handle.is_permanent]
                kept = OrderedDict((key, hooks[key]) for key in permanent if key in hooks)
                saved.append((point, name, hooks))
                setattr(point, name, kept)
        yield
    finally:
        insist(put_back)


@contextmanager
def edits_tried() -> Iterator[None]:
    """Edits in this block find out whether they reach the output.

    TransformerLens 4 warns of one that a bridge discards; who tries that sees it in the output.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore",
            message=r"A hook on [\s\S]* returned a modified tensor, but this attention delegates",
            category=UserWarning,
        )
        yield


@contextmanager
def stashes_kept(model: nn.Module) -> Iterator[None]:
    """Tensors that modules keep between passes are after the block what they were before.

    Bridges keep the last pattern; one that is part of a derivative cannot be copied.
    """
    before = [
        (vars(module), {k: v for k, v in vars(module).items() if v is None or _is_tensor(v)})
        for module in model.modules()
    ]

    def put_back() -> None:
        for values, kept in before:
            for name in [k for k, v in values.items() if _is_tensor(v) and k not in kept]:
                del values[name]
            values.update(kept)

    try:
        yield
    finally:
        insist(put_back)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)
