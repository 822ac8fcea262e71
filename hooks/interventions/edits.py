"""Named edits of hook points, as functions of what stands there in the edited pass."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.foundation.settings import check
from infoflow_lens.hooks.influence.base import tolerance
from infoflow_lens.hooks.model.call import (
    Caught,
    Edits,
    NamedHook,
    block_starts,
    call,
    can_start,
    first_layer,
    has_user_hooks,
    ignore_edit_warnings,
    output_of,
    without_user_hooks,
)
from infoflow_lens.hooks.model.inputs import Batch, Batches, example_input
from infoflow_lens.hooks.model.points import (
    INSTEAD_OF_A_BRIDGE,
    cache_by_mode,
    has_own_attention,
    hook_name,
    layer_count,
    pattern_hook,
)
from infoflow_lens.hooks.model.semantics import visibility
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
    for layer, n_heads in enumerate(count_heads(plain)):
        for head in range(n_heads):
            yield layer, head


def edit_head(plain: Pass, layer: int, head: int, change: OfHead, name: str = "") -> Edit:
    """Make an edit of one head's attention pattern.

    Args:
        plain: the plain pass.
        layer, head: whose pattern.
        change: makes of the pattern [batch, query, key] another one of the same shape.
        name: of the edit in results; by default "layer.head" and the name of `change`.

    Raises:
        InfoFlowError: if the model has no such head; while the pass runs, if `change` gives
            anything but a pattern of that shape.
    """
    check_head(count_heads(plain), layer, head)
    point, name = pattern_hook(plain.model, layer), name or _name_edit(layer, head, change)
    return Edit(name, {point: partial(_change_head, change, head, 1, name, point)})


def edit_head_output(plain: Pass, layer: int, head: int, change: OfHead, name: str = "") -> Edit:
    """Make an edit of what one head writes before its output matrix, ``hook_z``.

    Args:
        plain: the plain pass; its patterns are read, for the number of heads.
        layer, head: whose output.
        change: makes of z [batch, pos, d_head] another one of the same shape.
        name: of the edit in results; by default "layer.head" and the name of `change`.

    Raises:
        InfoFlowError: if the model has no such head; while the pass runs, if `change` gives
            anything but a z of that shape.
    """
    n_heads = count_heads(plain)
    check_head(n_heads, layer, head)
    name = name or _name_edit(layer, head, change)
    point = hook_name(plain.model, f"blocks.{layer}.attn.hook_z")

    def change_output(z: Tensor) -> Tensor:
        by_head = split_heads(z, n_heads[layer])
        return _change_head(change, head, 2, name, point, by_head).reshape(z.shape)

    return Edit(name, {point: change_output})


def _change_head(
    change: OfHead, head: int, axis: int, name: str, point: str, activation: Tensor
) -> Tensor:
    """Put what a function makes of a head's part of an activation in its place."""
    own = activation.select(axis, head)
    made = change(own)
    check_shape(made, own, name, point)
    return activation.select_scatter(made.to(activation), axis, head)


def count_heads(plain: Pass) -> list[int]:
    """Count the heads of each layer of a pass, by their patterns."""
    return [plain.pattern(layer).shape[1] for layer in range(plain.n_layers)]


def check_head(n_heads: Sequence[int], layer: int, head: int) -> None:
    """Refuse a head that the model does not have.

    Args:
        n_heads: of each layer.
        layer, head: which.

    Raises:
        InfoFlowError: with those that it has.
    """
    check(layer, int, "layer")
    check(head, int, "head")
    if not (0 <= layer < len(n_heads) and 0 <= head < n_heads[layer]):
        raise InfoFlowError(
            f"there is no head {head} in layer {layer}: expected layers 0 to {len(n_heads) - 1} "
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
            f"the function of edit {name!r} at {point} takes {parameters} ({error}): expected a "
            "function of the activation alone (lambda activation: ...), not a hook of two arguments"
        ) from None


def _chain(changes: Sequence[Change]) -> Change:
    return lambda activation: reduce(lambda found, change: change(found), changes, activation)


def _name_edit(layer: int, head: int, change: OfHead) -> str:
    return f"{layer}.{head} {getattr(change, '__name__', 'edited')}"


_ROOM = {"cpu": 2**25, "cuda": 2**28}  # numbers in the largest tensor of a pass
_EXAMPLE = 8  # tokens of a sequence that shows what edits and starts do


def mark_real_queries(
    batch: Batch, pattern: Float[Tensor, "batch head query key"]
) -> Float[Tensor, "batch query"]:
    """Mark queries that are no padding by 1, others by 0; float64."""
    real = pattern.new_ones(len(batch), pattern.shape[2], dtype=torch.float64)
    return real if batch.lengths is None else batch.mask().to(real)


def check_edits_reach(model: nn.Module, batch: Batch) -> None:
    """Refuse bridges in which an edited pattern changes nothing.

    Raises:
        InfoFlowError: naming the layer.
    """
    if has_own_attention(model):
        return
    some = batch.take(slice(0, 1)).cut(_EXAMPLE)
    output = output_of(model, some)

    def empty(activation: Tensor, hook: Any) -> Tensor:
        return torch.zeros_like(activation)

    for layer in range(layer_count(model)):
        name = pattern_hook(model, layer)
        with ignore_edit_warnings():
            # without any weight all heads write nothing, which shows in the output if they matter
            edited = call(model, some, edit=[(name, empty)], output=True).output
        if edited.equal(output):
            raise InfoFlowError(
                f"edits of the pattern of layer {layer} do not reach the output of this bridge: "
                "patterns cannot be replaced in it, or the heads of that layer write nothing, as "
                f"with an output matrix of 0; {INSTEAD_OF_A_BRIDGE}"
            )


def run_from(
    model: nn.Module,
    layer: int,
    entering: Tensor,
    example: Tensor,
    edit: Edits = (),
    want: Sequence[str] = (),
) -> Caught:
    """Run from what enters a layer; sequences without padding, or padded on the right.

    Where the model has to run whole, its lower layers run `example`, one other sequence, alone.

    Args:
        model: the model.
        layer: where the pass begins.
        entering: what enters there.
        example: another sequence.
        edit: hooks.
        want: hook points that are caught beside the output.
    """
    visibility(model, entering.shape[1])  # asked in the pass, it would start where this one does
    start = (name_entry(layer), entering)
    return call(model, Batch(example), want, edit=edit, start=start, output=True)


def name_entry(layer: int) -> str:
    """Name the hook point of what enters a layer."""
    return f"blocks.{layer}.hook_resid_pre"


def count_sequences_at_once(model: nn.Module, n_pos: int, n_heads: int) -> int:
    """Count the sequences that a pass may hold, by the size of its largest tensor."""
    cfg = getattr(model, "cfg", None)
    sizes = (getattr(cfg, "d_model", None), getattr(cfg, "d_vocab", None))
    # of neurons, which often are 4 times the stream, of logits, or of patterns
    width = max(4 * (sizes[0] or 1), sizes[1] or 1, n_pos * n_heads)
    room = _ROOM.get(next(model.parameters()).device.type, _ROOM["cpu"])
    return max(1, room // (n_pos * width))


def make_example(batch: Batch) -> Tensor:
    """Make a sequence that is none of the batch, which nothing else may depend on."""
    return batch.tokens[:1].flip(1)


def find_starts(model: nn.Module, batches: Batches) -> frozenset[int]:
    """Find the layers at which a pass can start: what enters there alone decides the output.

    For a HookedTransformer that is known. A bridge is asked, layer by layer: other tokens run below
    the layer, and the output must still come out. Models that share anything else between layers,
    or that let padding be seen, run whole. So do models with hooks of the user's (what enters a
    layer has met some of them already), and inputs that are more than ids.
    """
    if has_user_hooks(model) or batches.columns:
        return frozenset()
    layers = range(layer_count(model))
    if can_start(model):
        return frozenset(layers)
    names = [name_entry(layer) for layer in layers]
    if not set(names) <= set(model.hook_dict):  # type: ignore[arg-type]
        return frozenset()
    is_opened = hasattr(model, "anatomy")
    if batches.shortest < (batches.longest or 0) and find_later_keys(model) is not None:
        return frozenset()
    batch = next(batches.batches(2))
    n_pos = min(batches.shortest, _EXAMPLE)
    whole = Batch(batch.tokens[:, :n_pos].to(next(model.parameters()).device))
    # a text that reads the same from its end would show nothing
    if make_example(whole).equal(whole.tokens[:1]):
        return frozenset()
    caught = call(model, whole, names, output=True)
    most = tolerance(caught.output) * caught.output.abs().max()
    found = set()
    for layer, name in enumerate(names):
        if is_opened and not block_starts(model).can_start(layer):
            continue  # it would run whole
        with suppress(RuntimeError):  # shapes that do not fit
            again = run_from(model, layer, caught.activations[name], make_example(whole)).output
            if again.shape == caught.output.shape and (again - caught.output).abs().max() <= most:
                found.add(layer)
    return frozenset(found)


@cache_by_mode
def find_later_keys(model: nn.Module) -> int | None:
    """Find the first layer whose queries attend to keys behind them, as in encoders; or None.

    Found by running some random tokens.
    """
    names = [pattern_hook(model, layer) for layer in range(layer_count(model))]
    tokens = example_input(model, n_sequences=1)[:, :_EXAMPLE]
    with eval_mode(model), without_user_hooks(model):
        caught = call(model, tokens.to(next(model.parameters()).device), names).activations
    for layer, name in enumerate(names):
        if bool((caught[name].triu(1) > 0).any()):
            return layer
    return None
