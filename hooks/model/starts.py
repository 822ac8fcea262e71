"""Passes that begin at a block: those before it give states that are known, and do not run."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.foundation.modules import bind_to_thread
from infoflow_lens.hooks.model.points import layer_of

AXES = (0, 1, 2)  # of batch, position and width in the states of blocks that may be left out
_BEHIND = ("ln_final", "unembed")  # hook points behind the blocks

_turns = threading.RLock()  # the forward of a block is replaced by one thread at a time


class BlockStarts:
    """The blocks of a model, and how each gives the states that leave it.

    Args:
        blocks: the modules, one a layer; a module that several layers share stands as often.

    Attributes:
        blocks: the same; empty where no pass may begin at any.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = list(blocks)
        self._sizes: list[int | None] = []  # of the tuples that they give; 0 for states alone

    @classmethod
    def find(cls, model: nn.Module) -> "BlockStarts":
        """Find the blocks of an opened model; other models have none here."""
        anatomy: Any = getattr(model, "anatomy", None)
        blocks = [] if anatomy is None else anatomy.blocks
        is_usual = all(block.axes == AXES for block in blocks)
        return cls([block.module for block in blocks] if is_usual else [])

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note in a pass how each block gives its states: alone, or first in a tuple of Nones.

        Where something else goes on beside the states, such as a bias of positions, no pass begins
        behind that block.
        """
        self._sizes = []

        def note(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            size = 0 if isinstance(out, Tensor) else None
            # other outputs, such as caches, would be wrong for a block that has not run
            if isinstance(out, tuple) and isinstance(out[0], Tensor):
                size = len(out) if all(part is None for part in out[1:]) else None
            self._sizes.append(size)

        with ExitStack() as stack:
            # a module that several layers share has one hook, which notes each of its calls
            for block in dict.fromkeys(self.blocks):
                stack.callback(block.register_forward_hook(bind_to_thread(note)).remove)
            yield
        if len(self._sizes) != len(self.blocks):  # some ran twice, or not at all
            self.blocks = []

    def can_start(self, layer: int) -> bool:
        """Say whether all blocks before a layer may be left out."""
        return layer <= len(self.blocks) and None not in self._sizes[:layer]

    @contextmanager
    def starting(
        self, layer: int, states: Sequence[Float[Tensor, "_row pos d_model"]]
    ) -> Iterator[None]:
        """Run passes of this thread from a layer on.

        Args:
            layer: the first block that runs; their number for none.
            states: what each block before it gives; a single row stands for all that enter.
        """
        given = [*zip(self._sizes[:layer], states, strict=True)]
        # by call and not by module: a shared one gives other states in each of its layers
        order = iter([*given, *[None] * (len(self.blocks) - layer)])
        with ExitStack() as stack:
            if layer:
                stack.enter_context(_turns)
            for module in dict.fromkeys(self.blocks) if layer else ():
                own = vars(module).get("forward")
                # in its dictionary, as modules of a bridge hand attributes on to others
                vars(module)["forward"] = _Skip(module.forward, order, own)
                stack.callback(_restore, module, own)
            yield


def first_layer(points: Iterable[str]) -> int | None:
    """Find the lowest layer of hook points: -1 for what stands before the blocks, None for none."""
    layers = [layer_of(name) for name in points if not name.startswith(_BEHIND)]
    return min((-1 if layer is None else layer for layer in layers), default=None)


class _Skip:
    """The forward of a block that gives known states in passes of this thread, or runs.

    Args:
        forward: of the block.
        order: for the calls of all blocks, in turn: the size of the tuple that it gives, and the
            states; None to run.
        stands_for: what the module itself has in this place; None for that of its class.
    """

    def __init__(self, forward: Callable[..., Any], order: Iterator[Any], stands_for: Any) -> None:
        self._forward, self._order, self.stands_for = forward, order, stands_for
        self._thread = threading.get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Give the states in as many rows as enter, or run."""
        # calls of other threads run as usual, and take no turn of this pass
        known = next(self._order, None) if threading.get_ident() == self._thread else None
        if known is None:
            return self._forward(*args, **kwargs)
        size, state = known
        if len(state) == 1:
            entered = next(t for t in (*args, *kwargs.values()) if is_stream(t))
            state = state[:, : entered.shape[1]].expand(len(entered), -1, -1)
        return (state, *[None] * (size - 1)) if size else state


def is_stream(value: Any) -> bool:
    """Say whether something that a block is called with may be its states."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 3


def _restore(module: nn.Module, own: Any) -> None:
    if own is None:
        vars(module).pop("forward", None)
    else:
        vars(module)["forward"] = own
