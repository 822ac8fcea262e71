"""Named edits of hook points, as functions of what stands there in the edited pass."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.hooks.model.call import NamedHook
from infoflow_lens.hooks.model.points import hook_name, pattern_hook
from infoflow_lens.hooks.model.starts import first_layer
from infoflow_lens.hooks.passes.view import Pass

Change: TypeAlias = Callable[[Tensor], Tensor]
OfHead: TypeAlias = Callable[[Float[Tensor, "batch row column"]], Float[Tensor, "batch row column"]]


@dataclass(frozen=True)
class Edit:
    """A named edit of a pass: hook points, and what takes the place of what stands there.

    Args:
        name: of the edit, unique within an intervention; it stands in tables and saved runs, so it
            says all that the functions hold.
        at: by hook point a function from the activation in the edited pass, [batch, ...] with the
            sequences of the plain pass in their order, to one of the same shape. It must not write
            into what it is given.
    """

    name: str
    at: Mapping[str, Change]

    @classmethod
    def join(cls, name: str, edits: Sequence["Edit"]) -> "Edit":
        """Make one edit of several, which act one after the other where they meet."""
        changes: dict[str, list[Change]] = {}
        for edit in edits:
            for point, change in edit.at.items():
                changes.setdefault(point, []).append(change)
        return cls(name, {point: _chain(several) for point, several in changes.items()})

    @property
    def first_layer(self) -> int:
        """The lowest layer that is edited; 0 for what stands before the blocks."""
        return first_layer(self.at) or 0


def heads_of(plain: Pass) -> Iterator[tuple[int, int]]:
    """List (layer, head) of all heads whose pattern a pass has."""
    for layer in range(plain.n_layers):
        for head in range(plain.pattern(layer).shape[1]):
            yield layer, head


def edit_head(plain: Pass, layer: int, head: int, change: OfHead, name: str = "") -> Edit:
    """Make an edit of one head's attention pattern.

    Args:
        plain: the plain pass.
        layer, head: which.
        change: from the pattern [batch, query, key] to another.
        name: default, "layer.head" and the name of the function.
    """
    point = pattern_hook(plain.model, layer)

    def change_pattern(pattern: Tensor) -> Tensor:
        pattern = pattern.clone()
        pattern[:, head] = change(pattern[:, head]).to(pattern)
        return pattern

    return Edit(name or _name(layer, head, change), {point: change_pattern})


def edit_head_output(plain: Pass, layer: int, head: int, change: OfHead, name: str = "") -> Edit:
    """Make an edit of what one head writes before its output matrix, ``hook_z``.

    Args:
        plain: the plain pass; its patterns are read, for the number of heads.
        layer, head: which.
        change: from z [batch, pos, d_head] to another.
        name: default, "layer.head" and the name of the function.
    """
    point = hook_name(plain.model, f"blocks.{layer}.attn.hook_z")
    n_heads = plain.pattern(layer).shape[1]

    def change_output(z: Tensor) -> Tensor:
        by_head = split_heads(z, n_heads).clone()
        by_head[:, :, head] = change(by_head[:, :, head]).to(by_head)
        return by_head.view(z.shape)

    return Edit(name or _name(layer, head, change), {point: change_output})


def split_heads(z: Tensor, n_heads: int) -> Float[Tensor, "batch pos head d_head"]:
    """Give z an axis of heads, which bridges leave out."""
    return z if z.ndim == 4 else z.unflatten(-1, (n_heads, -1))


def stack_edits(edits: Sequence[Edit], n_sequences: int) -> list[NamedHook]:
    """Make hooks of a pass over as many copies of a batch as there are edits, each of its own.

    Raises:
        InfoFlowError: for an edit that changes the shape of an activation.
    """
    points = dict.fromkeys(point for edit in edits for point in edit.at)

    def hook_of(point: str) -> Any:
        def hook_fn(activation: Tensor, hook: Any) -> Tensor:
            parts = activation.split(n_sequences)
            made = [
                edit.at[point](part) if point in edit.at else part
                for edit, part in zip(edits, parts, strict=True)
            ]
            for edit, one, part in zip(edits, made, parts, strict=True):
                if not isinstance(one, Tensor) or one.shape != part.shape:
                    shape = tuple(one.shape) if isinstance(one, Tensor) else type(one).__name__
                    raise InfoFlowError(
                        f"the edit {edit.name!r} gives {shape} at {point}: expected "
                        f"{tuple(part.shape)}, the shape of what stands there"
                    )
            return torch.cat([one.to(activation.dtype) for one in made])

        return hook_fn

    return [(point, hook_of(point)) for point in points]


def _chain(changes: Sequence[Change]) -> Change:
    def change_all(activation: Tensor) -> Tensor:
        for change in changes:
            activation = change(activation)
        return activation

    return change_all


def _name(layer: int, head: int, change: OfHead) -> str:
    return f"{layer}.{head} {getattr(change, '__name__', 'edited')}"
