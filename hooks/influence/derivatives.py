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
            if not _wait_for(0):
                raise DisturbedError("another thread differentiates by forward mode")
            eager_transforms.JVP_NESTING += 1  # so that torch.func.jvp makes no level of its own
            try:
                forward_ad.enter_dual_level()
            except RuntimeError as error:
                eager_transforms.JVP_NESTING -= 1
                raise DisturbedError("another thread has made a level of forward mode") from error
            _is_ours = True
        try:
            yield
        finally:
            if _wait_for(1):  # else the level stays for those inside, and for the next block
                eager_transforms.JVP_NESTING -= 1
                forward_ad.exit_dual_level()
                _is_ours = False


def _wait_for(n_inside: int) -> bool:
    """Wait until so many calls are inside of forward mode; whether that has come."""
    end = time.monotonic() + _PATIENCE
    while (eager_transforms.JVP_NESTING, forward_ad._current_level) != (n_inside, n_inside - 1):
        if time.monotonic() > end:
            return False
        time.sleep(1e-4)
    return True
