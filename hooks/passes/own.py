"""Forward passes that a probe makes for itself, and that no probe looks at."""

import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, nn


class AllSeenError(Exception):
    """Raised to end a forward pass once every probe has the activations that it reads."""


_inside_own_pass: ContextVar[bool] = ContextVar("inside_own_pass", default=False)


@contextmanager
def own_pass() -> Iterator[None]:
    """Forward passes in this block are a probe's own: no probe looks at them."""
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
    points = list(model.hook_dict.values())  # type: ignore[operator]
    saved = [point._forward_hooks for point in points]
    for point, hooks in zip(points, saved, strict=True):
        permanent = [handle.hook.id for handle in point.fwd_hooks if handle.is_permanent]
        point._forward_hooks = OrderedDict((key, hooks[key]) for key in permanent if key in hooks)
    try:
        yield
    finally:
        for point, hooks in zip(points, saved, strict=True):
            point._forward_hooks = hooks


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
    try:
        yield
    finally:
        for values, kept in before:
            for name in [k for k, v in values.items() if _is_tensor(v) and k not in kept]:
                del values[name]
            values.update(kept)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)
