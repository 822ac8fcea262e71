"""What all measurements of edited models share: inputs read again, the model checked, a bar."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.foundation.display import brief
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.foundation.progress import Advance, progress_bar
from infoflow_lens.foundation.record import is_same
from infoflow_lens.foundation.versions import versions_identity
from infoflow_lens.hooks.influence.base import tolerance
from infoflow_lens.hooks.model.call import (
    Edits,
    block_starts,
    call,
    can_start,
    has_user_hooks,
    ignore_edit_warnings,
    output_of,
    without_user_hooks,
)
from infoflow_lens.hooks.model.identity import HOOKS, model_identity
from infoflow_lens.hooks.model.inputs import Batch, Batches, Inputs, example_input, read_inputs
from infoflow_lens.hooks.model.points import (
    found_once,
    instead_of_a_bridge,
    is_bridge,
    layer_count,
    pattern_hook,
)
from infoflow_lens.hooks.model.semantics import visibility

_ROOM = {"cpu": 2**25, "cuda": 2**28}  # numbers in the largest tensor of a pass
_EXAMPLE = 8  # tokens of a sequence that shows what edits and starts do


@dataclass(frozen=True)
class Reading:
    """The options that every measurement has, as for `run_probes`."""

    attention_mask: Tensor | None
    column: str | None
    max_length: int | None
    batch_size: int
    progress: bool

    def batches(self, model: nn.Module, inputs: Inputs) -> Batches:
        """The inputs, which several passes go over.

        Raises:
            InfoFlowError: for inputs that can be read once only, or no TransformerLens model.
        """
        layer_count(model)
        batches = read_inputs(
            model,
            inputs,
            attention_mask=self.attention_mask,
            column=self.column,
            max_length=self.max_length,
        )
        if batches.longest is None:
            raise InfoFlowError(
                f"inputs is {type(inputs).__name__}, which may be read once only: several passes "
                "go over the inputs; give a tensor, a list or a datasets.Dataset"
            )
        return batches

    @contextmanager
    def measuring(
        self, model: nn.Module, batches: Batches, name: str, total: int | None
    ) -> Iterator[Advance]:
        """The model in evaluation mode, its patterns known to be editable, and a bar.

        Raises:
            InfoFlowError: for a bridge in which an edited pattern changes nothing.
        """
        with eval_mode(model), progress_bar(name, total, self.progress) as step:
            check_edits_reach(model, next(batches.batches(1)))
            yield step


def identify(
    model: nn.Module, settings: Mapping[str, Any], inputs: Batches, **more: Batches | None
) -> dict[str, Any]:
    """Return what the numbers of a measurement depend on, as JSON-compatible values.

    Args:
        model: the model.
        settings: of the measurement.
        inputs: the sequences.
        more: other sequences by what errors call them; None where there are none.
    """
    given = {"inputs": inputs, **more}
    digests = {name: None if of is None else of.fingerprint() for name, of in given.items()}
    return {**settings, **digests, **versions_identity(), **model_identity(model, inputs)}


def check_resumed(found: Any, expected: Mapping[str, Any]) -> None:
    """Refuse to go on with what another run has measured.

    Args:
        found: what :func:`identify` gave of the run that was stopped.
        expected: what it gives of this one.

    Raises:
        InfoFlowError: naming what differs.
    """
    before = found if isinstance(found, Mapping) else {}
    differs = [name for name in expected if not is_same(before.get(name), expected[name])]
    if HOOKS in differs and expected[HOOKS]:
        raise InfoFlowError(
            "resume is given, and hooks of your own stand on the model, others than in the run "
            "before: expected the same; take them off, or leave resume out to measure anew"
        )
    if differs:
        name = differs[0]
        raise InfoFlowError(
            f"resume is of another run: {name} = {brief(before.get(name))} there, "
            f"{brief(expected[name])} here; expected the same inputs, settings and model; leave "
            "resume out to measure anew"
        )


def check_kept(value: Any, shape: Sequence[int], dtype: torch.dtype, name: str) -> None:
    """Refuse a tensor to go on with that no run of this kind has kept.

    Raises:
        InfoFlowError: for another shape or type, and for NaN or infinity.
    """
    found = f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        found = f"{value.dtype} {list(value.shape)}"
        if value.dtype == dtype and list(value.shape) == list(shape):
            if value.isfinite().all():
                return
            found += " with NaN or infinity"
    raise InfoFlowError(
        f"resume holds {found} as {name}: expected {dtype} {list(shape)} of numbers, as a run kept "
        "them; leave resume out to measure anew"
    )


_IDENTITY = "identity"


class KeptNumbers:
    """Numbers by name, each measured once, also by a run that was stopped and goes on.

    Args:
        identity: what the numbers depend on (:func:`identify`).
        resume: those of the run before.
        after: called after each that is measured, with all so far.

    Raises:
        InfoFlowError: if those of the run before depend on something else.
    """

    def __init__(
        self,
        identity: Mapping[str, Any],
        resume: Mapping[str, Any] | None,
        after: Callable[[Mapping[str, Any]], None] | None,
    ) -> None:
        if resume is not None:
            check_resumed(resume.get(_IDENTITY) if isinstance(resume, Mapping) else None, identity)
        self._found = {_IDENTITY: dict(identity), **(resume or {})}
        self._after = after

    def once(self, name: str, measured: Callable[[], Tensor], *shape: int) -> Tensor:
        """The numbers of that name, float64 of a shape, measured unless they are there.

        Raises:
            InfoFlowError: if what is there are no such numbers.
        """
        if name in self._found:
            check_kept(self._found[name], shape, torch.float64, name)
        else:
            self._found[name] = measured()
            if self._after is not None:
                self._after(dict(self._found))
        found: Tensor = self._found[name]
        return found


def mean_patterns(
    model: nn.Module,
    batches: Batches,
    batch_size: int,
    see: Callable[[Tensor, Batch, int], None] | None = None,
) -> tuple[list[Float[Tensor, "_head query key"]], Float[Tensor, " query"]]:
    """The mean pattern of every head, each query's over the sequences that have it; float64.

    Also of how many sequences that is, for each query.

    Args:
        model: a TransformerLens model.
        batches: the sequences.
        batch_size: sequences in a pass.
        see: called after every pass with the output, the batch, and the index of its first
            sequence; without it a pass ends with the last pattern.
    """
    names = [pattern_hook(model, layer) for layer in range(layer_count(model))]
    sums: dict[str, Tensor] = {}
    n_real = torch.zeros(0)
    done = 0
    for batch in batches.batches(batch_size):
        caught = call(model, batch, names, output=see is not None)
        if see is not None:
            see(caught.output, batch, done)
        for name, pattern in caught.activations.items():
            _, n_head, n_query, n_key = pattern.shape
            real = real_queries(batch, pattern)
            if name not in sums:
                missing = (batches.longest or 0) - batch.tokens.shape[1]
                size = (n_head, n_query + missing, n_key + missing)
                sums[name] = real.new_zeros(size)
                n_real = n_real if len(n_real) else real.new_zeros(size[1])
            weighed = pattern.double() * real[:, None, :, None]
            sums[name][:, :n_query, :n_key] += weighed.sum(dim=0)
        n_real[:n_query] += real.sum(dim=0)
        done += len(batch)
    return [sums[name] / n_real[:, None].clamp(min=1) for name in names], n_real


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
    if not is_bridge(model):
        return
    some = batch.take(slice(0, 1)).cut(_EXAMPLE)
    output = output_of(model, some)

    def empty(activation: Tensor, hook: Any) -> Tensor:
        return torch.zeros_like(activation)

    for layer in range(layer_count(model)):
        name = pattern_hook(model, layer)
        with ignore_edit_warnings():
            edited = call(model, some, edit=[(name, empty)], output=True).output
        if edited.equal(output):
            raise InfoFlowError(
                f"edits of the pattern of layer {layer} do not reach the output of this bridge: "
                "patterns cannot be replaced in it, or the heads of that layer write nothing, as "
                f"with an output matrix of 0; {instead_of_a_bridge()}"
            )


def run_from(
    model: nn.Module, layer: int, entering: Tensor, example: Tensor, edit: Edits = ()
) -> Tensor:
    """The output from what enters a layer; sequences without padding, or padded on the right.

    Where the model has to run whole, its lower layers run `example`, one other sequence, alone.
    """
    visibility(model, entering.shape[1])  # asked in the pass, it would start where this one does
    start = (f"blocks.{layer}.hook_resid_pre", entering)
    output: Tensor = call(model, Batch(example), edit=edit, start=start, output=True).output
    return output


def sequences_at_once(model: nn.Module, n_pos: int, n_heads: int) -> int:
    """How many sequences a pass may hold, by the size of its largest tensor."""
    cfg = getattr(model, "cfg", None)
    sizes = (getattr(cfg, "d_model", None), getattr(cfg, "d_vocab", None))
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
    names = [f"blocks.{layer}.hook_resid_pre" for layer in layers]
    if not set(names) <= set(model.hook_dict):  # type: ignore[arg-type]
        return frozenset()
    is_opened = hasattr(model, "anatomy")
    if batches.shortest < (batches.longest or 0) and layer_with_later_keys(model) is not None:
        return frozenset()
    batch = next(batches.batches(2))
    n_pos = min(batches.shortest, _EXAMPLE)
    whole = Batch(batch.tokens[:, :n_pos].to(next(model.parameters()).device))
    caught = call(model, whole, names, output=True)
    most = tolerance(caught.output) * caught.output.abs().max()
    found = set()
    for layer, name in enumerate(names):
        if is_opened and not block_starts(model).can_start(layer):
            continue  # it would run whole
        with suppress(RuntimeError):  # shapes that do not fit
            again = run_from(model, layer, caught.activations[name], example_of(whole))
            if again.shape == caught.output.shape and (again - caught.output).abs().max() <= most:
                found.add(layer)
    return frozenset(found)


@found_once
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
