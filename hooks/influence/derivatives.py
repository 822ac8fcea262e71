"""Derivatives of states by what enters, forward and backward; forward mode beside other threads."""

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from jaxtyping import Float
from torch import Tensor
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

_PATIENCE = 1.0  # seconds
_UNKNOWN = ": an autograd kernel was not registered"  # what PyTorch says of an operation
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


def differentiate_along(
    function: Callable[[Tensor], tuple[Tensor, ...]],
    start: Float[Tensor, "batch position d"],
    directions: Float[Tensor, "direction batch position d"],
) -> tuple[Float[Tensor, "direction batch pos d_model"], ...]:
    """Differentiate states in some directions, by forward mode if there is one.

    Raises:
        RuntimeError: as from PyTorch, where memory is short, or there is no second derivative.
    """
    try:
        return forward_derivatives(function, start, lambda one: one, directions)[1]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # also NotImplementedError
        if "memory" in str(error):
            raise
        return _differentiate_in_reverse(function, start, directions)


def _differentiate_in_reverse(
    function: Callable[[Tensor], tuple[Tensor, ...]],
    start: Float[Tensor, "batch position d"],
    directions: Float[Tensor, "direction batch position d"],
) -> tuple[Float[Tensor, "direction batch pos d_model"], ...]:
    """Differentiate along directions by two backward passes.

    J^T u is linear in u, and its derivative by u is J.
    """
    # fused attention has no second derivative
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        source = start.detach().requires_grad_()
        states = function(source)
        towards = [torch.zeros_like(state, requires_grad=True) for state in states]
        # the derivative of what is linear in u is the same at u = 0
        reached = [(u * state).sum() for u, state in zip(towards, states, strict=True)]
        (back,) = torch.autograd.grad(
            reached, source, create_graph=True, allow_unused=True, materialize_grads=True
        )
        if not back.requires_grad:  # no state depends on the sources
            return tuple(u.new_zeros(len(directions), *u.shape) for u in towards)
        settings = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        moved = [torch.autograd.grad(back, towards, one, **settings) for one in directions]
    return tuple(torch.stack(column) for column in zip(*moved, strict=True))


def find_missing_derivatives(
    function: Callable[[Tensor], tuple[Tensor, ...]], start: Float[Tensor, "batch position d"]
) -> str:
    """Name operations without derivatives that a backward pass meets, as PyTorch warns of them."""
    # a pass that fails says nothing of them: that it does is for the measurement to say
    with (
        torch.enable_grad(),
        warnings.catch_warnings(record=True) as warned,
        suppress(RuntimeError),
    ):
        warnings.simplefilter("always")
        source = start.detach().requires_grad_()
        states = [state.sum() for state in function(source) if state.requires_grad]
        if states:
            torch.autograd.grad(states, source, allow_unused=True)
    said = [str(one.message) for one in warned]
    return ", ".join(dict.fromkeys(one.split(_UNKNOWN)[0] for one in said if _UNKNOWN in one))


@contextmanager
def _level() -> Iterator[None]:
    """Hold the level of PyTorch's forward mode in this thread until nobody uses it.

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
