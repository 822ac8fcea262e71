"""Named edits of hook points, as functions of what stands there in the edited pass."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import check
from infoflow_lens.hooks.model.call import NamedHook, first_layer
from infoflow_lens.hooks.model.points import hook_name, pattern_hook
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

    def __post_init__(self) -> None:
        is_table = isinstance(self.at, Mapping) and all(
            isinstance(point, str) and callable(change) for point, change in self.at.items()
        )
        if not isinstance(self.name, str) or not is_table:
            raise InfoFlowError(
                f"an edit is {self.name!r}, {self.at!r:.100}: expected a name, and functions by "
                "hook point"
            )
        for point, change in self.at.items():
            _check_takes_one(self.name, point, change)

    @classmethod
    def join(cls, name: str, edits: Sequence["Edit"]) -> "Edit":
        """Make one edit of several, which act one after the other where they meet."""
        changes: dict[str, list[Change]] = {}
        for edit in edits:
            for point, change in edit.at.items():
                changes.setdefault(point, []).append(change)
        return cls(name, {point: _chain(several) for point, several in changes.items()})

    def above(self, layer: int) -> "Edit":
        """Make the same edit without what it changes below a layer."""
        layers = {point: first_layer([point]) for point in self.at}  # None behind the blocks
        kept = [point for point, at in layers.items() if at is None or at >= layer]
        return Edit(self.name, {point: self.at[point] for point in kept})

    @property
    def first_layer(self) -> int:
        """Find the lowest layer that is edited; -1 for what stands before the blocks."""
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

    Raises:
        InfoFlowError: for a head that is not there; in the pass for what is no pattern.
    """
    check_head(plain, layer, head)
    point, name = pattern_hook(plain.model, layer), name or _name(layer, head, change)

    def change_pattern(pattern: Tensor) -> Tensor:
        made = change(pattern[:, head])
        check_shape(made, pattern[:, head], name, point)
        pattern = pattern.clone()
        pattern[:, head] = made.to(pattern)
        return pattern

    return Edit(name, {point: change_pattern})


def edit_head_output(plain: Pass, layer: int, head: int, change: OfHead, name: str = "") -> Edit:
    """Make an edit of what one head writes before its output matrix, ``hook_z``.

    Args:
        plain: the plain pass; its patterns are read, for the number of heads.
        layer, head: which.
        change: from z [batch, pos, d_head] to another.
        name: default, "layer.head" and the name of the function.

    Raises:
        InfoFlowError: for a head that is not there; in the pass for what is no z.
    """
    check_head(plain, layer, head)
    name = name or _name(layer, head, change)
    point = hook_name(plain.model, f"blocks.{layer}.attn.hook_z")
    n_heads = plain.pattern(layer).shape[1]

    def change_output(z: Tensor) -> Tensor:
        by_head = split_heads(z, n_heads)
        made = change(by_head[:, :, head])
        check_shape(made, by_head[:, :, head], name, point)
        by_head = by_head.clone()
        by_head[:, :, head] = made.to(by_head)
        return by_head.view(z.shape)

    return Edit(name, {point: change_output})


def check_head(plain: Pass, layer: int, head: int) -> None:
    """Refuse a head that the model does not have.

    Raises:
        InfoFlowError: with those that it has.
    """
    check(layer, int, "layer")
    check(head, int, "head")
    n_heads = [plain.pattern(i).shape[1] for i in range(plain.n_layers)]
    if not (0 <= layer < plain.n_layers and 0 <= head < n_heads[layer]):
        raise InfoFlowError(
            f"there is no head {head} in layer {layer}: expected layers 0 to {plain.n_layers - 1} "
            f"with {', '.join(map(str, n_heads))} heads"
        )


def check_shape(made: Any, part: Tensor, name: str, point: str) -> None:
    """Refuse what an edit makes of an activation, if it is none of its shape.

    Raises:
        InfoFlowError: naming the edit.
    """
    if not isinstance(made, Tensor) or made.shape != part.shape:
        shape = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
        raise InfoFlowError(
            f"the edit {name!r} gives {shape} at {point}: expected {tuple(part.shape)}, the shape "
            "of what stands there"
        )


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
            if len(activation) != len(edits) * n_sequences:
                raise InfoFlowError(
                    f"{point} shows {len(activation)} rows in a pass of "
                    f"{len(edits) * n_sequences} sequences: expected one for each; edit another "
                    "hook point"
                )
            made = []
            # copies of the batch stand one behind the other, one for each edit
            for edit, part in zip(edits, activation.split(n_sequences), strict=True):
                made.append(edit.at[point](part) if point in edit.at else part)
                check_shape(made[-1], part, edit.name, point)
            return torch.cat([one.to(activation.dtype) for one in made])

        return hook_fn

    return [(point, hook_of(point)) for point in points]


def _check_takes_one(name: str, point: str, change: Change) -> None:
    """Refuse a function that cannot be called with an activation alone.

    Raises:
        InfoFlowError: naming the edit and its hook point.
    """
    try:
        parameters = inspect.signature(change)
    except (TypeError, ValueError):  # functions of C say nothing
        return
    try:
        parameters.bind(None)
    except TypeError as error:
        raise InfoFlowError(
            f"the function of edit {name!r} at {point} takes {parameters} ({error}): expected one "
            "of the activation alone, not a hook of two arguments; lambda activation: ..."
        ) from None


def _chain(changes: Sequence[Change]) -> Change:
    def change_all(activation: Tensor) -> Tensor:
        for change in changes:
            activation = change(activation)
        return activation

    return change_all


def _name(layer: int, head: int, change: OfHead) -> str:
    return f"{layer}.{head} {getattr(change, '__name__', 'edited')}"
