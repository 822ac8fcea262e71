"""Derivatives in many directions, by forward mode, which PyTorch has once for all threads."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

_PATIENCE = 1.0  # seconds
_one_at_a_time = threading.RLock()
_is_ours = False  # the level of forward mode


class DisturbedError(RuntimeError):
    """Another thread of the program does forward-mode differentiation."""


def forward_derivatives(
    function: Callable[[Tensor], tuple[Tensor, ...]],
    start: Float[Tensor, "..."],
    towards: Callable[[Tensor], Float[Tensor, "..."]],
    directions: Float[Tensor, "direction ..."],
) -> tuple[tuple[Tensor, ...], tuple[Float[Tensor, "direction ..."], ...]]:
    """Return the values of a function at `start`, and its derivatives in many directions.

    A number goes along whose derivative is 1. It is read last, so where it is right no thread has
    taken tangents away, which PyTorch would count as zeros.

    Args:
        function: gives several tensors.
        start: where.
        towards: makes a direction in the space of `start` from a row of `directions`.
        directions: one for each derivative.

    Raises:
        DisturbedError: if other threads differentiate by forward mode.
        RuntimeError: as from PyTorch, where the function has no forward mode, or memory is short.
    """

    def along(direction: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        # a constant whose derivative must be 1: another thread may take the tangents away
        witness = start.new_ones(())
        values, tangents = torch.func.jvp(
            lambda start, witness: (*function(start), witness),
            (start, witness),
            (towards(direction), witness),
        )[:2]
        return values, tangents

    with _level():
        values, tangents = torch.func.vmap(along, out_dims=(None, 0))(directions)  # type: ignore[arg-type]
    if not bool((tangents[-1] == 1).all()):
        raise DisturbedError("another thread has taken the tangents away")
    return values[:-1], tangents[:-1]


@contextmanager
def _level() -> Iterator[None]:
    """The level of PyTorch's forward mode, held by this thread until nobody uses it.

    The level belongs to the process. Where two threads are inside ``torch.func.jvp``, the first to
    come makes it for both, and takes all tangents away when it leaves, also while the other reads
    them. So nobody is inside when this block makes it, and nobody when it takes it away.

    Raises:
        DisturbedError: if other threads stay inside.
    """
    global _is_ours
    with _one_at_a_time:
        if not _is_ours:
            _make()
            _is_ours = True
        try:
            yield
        finally:
            if _take_away():  # else the level stays for those inside, and for the next block
                _is_ours = False


# Between a look at the two numbers and torch's own level no other thread may come in. Python gives
# way at calls and at jumps back, so what is to be one step calls nothing but the last function.


def _make() -> None:
    """Make the level as soon as nobody is inside, so that torch.func.jvp makes none of its own."""
    end = time.monotonic() + _PATIENCE
    while True:
        # nobody differentiates by forward mode now, so this level is the outermost
        if eager_transforms.JVP_NESTING == 0 and forward_ad._current_level == -1:
            eager_transforms.JVP_NESTING = 1
            forward_ad._current_level = 0
            try:
                torch._C._enter_dual_level()
                return
            except RuntimeError:  # made by a thread that has not said so yet
                eager_transforms.JVP_NESTING = 0
                forward_ad._current_level = -1
        if time.monotonic() > end:
            raise DisturbedError("another thread differentiates by forward mode")
        time.sleep(1e-4)


def _take_away() -> bool:
    """Take the level away as soon as this thread alone is inside; whether that has come."""
    end = time.monotonic() + _PATIENCE
    while True:
        if eager_transforms.JVP_NESTING == 1 and forward_ad._current_level == 0:
            eager_transforms.JVP_NESTING = 0
            forward_ad._current_level = -1
            torch._C._exit_dual_level(level=0)
            return True
        if time.monotonic() > end:
            return False
        time.sleep(1e-4)
