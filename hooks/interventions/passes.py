"""Passes of edited models: whether edits reach the output, and where a pass may begin."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.hooks.influence.base import tolerance
from infoflow_lens.hooks.model.call import (
    Caught,
    Edits,
    block_starts,
    call,
    can_start,
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
    layer_count,
    pattern_hook,
)
from infoflow_lens.hooks.model.semantics import visibility

_ROOM = {"cpu": 2**25, "cuda": 2**28}  # numbers in the largest tensor of a pass
_EXAMPLE = 8  # tokens of a sequence that shows what edits and starts do


def real_queries(
    batch: Batch, pattern: Float[Tensor, "batch head query key"]
) -> Float[Tensor, "batch query"]:
    """1 where a query is no padding, else 0; float64."""
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
    start = (entering_point(layer), entering)
    return call(model, Batch(example), want, edit=edit, start=start, output=True)


def entering_point(layer: int) -> str:
    """Name the hook point of what enters a layer."""
    return f"blocks.{layer}.hook_resid_pre"


def sequences_at_once(model: nn.Module, n_pos: int, n_heads: int) -> int:
    """Count the sequences that a pass may hold, by the size of its largest tensor."""
    cfg = getattr(model, "cfg", None)
    sizes = (getattr(cfg, "d_model", None), getattr(cfg, "d_vocab", None))
    # of neurons, which often are 4 times the stream, of logits, or of patterns
    width = max(4 * (sizes[0] or 1), sizes[1] or 1, n_pos * n_heads)
    room = _ROOM.get(next(model.parameters()).device.type, _ROOM["cpu"])
    return max(1, room // (n_pos * width))


def example_of(batch: Batch) -> Tensor:
    """A sequence that is none of the batch, which nothing else may depend on."""
    return batch.tokens[:1].flip(1)


def layers_to_start(model: nn.Module, batches: Batches) -> frozenset[int]:
    """The layers at which a pass can start: what enters there alone decides the output.

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
    names = [entering_point(layer) for layer in layers]
    if not set(names) <= set(model.hook_dict):  # type: ignore[arg-type]
        return frozenset()
    is_opened = hasattr(model, "anatomy")
    if batches.shortest < (batches.longest or 0) and layer_with_later_keys(model) is not None:
        return frozenset()
    batch = next(batches.batches(2))
    n_pos = min(batches.shortest, _EXAMPLE)
    whole = Batch(batch.tokens[:, :n_pos].to(next(model.parameters()).device))
    # a text that reads the same from its end would show nothing
    if example_of(whole).equal(whole.tokens[:1]):
        return frozenset()
    caught = call(model, whole, names, output=True)
    most = tolerance(caught.output) * caught.output.abs().max()
    found = set()
    for layer, name in enumerate(names):
        if is_opened and not block_starts(model).can_start(layer):
            continue  # it would run whole
        with suppress(RuntimeError):  # shapes that do not fit
            again = run_from(model, layer, caught.activations[name], example_of(whole)).output
            if again.shape == caught.output.shape and (again - caught.output).abs().max() <= most:
                found.add(layer)
    return frozenset(found)


@cache_by_mode
def layer_with_later_keys(model: nn.Module) -> int | None:
    """The first layer whose queries attend to keys behind them, as in encoders; None in no layer.

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
