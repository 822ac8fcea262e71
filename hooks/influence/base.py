"""Which inputs a state does depend on: the result, its sets, and the base of its probes."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from annotated_types import Gt, Le, MinLen
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.foundation.settings import Count, Distinct, Index, checked
from infoflow_lens.hooks.influence.derivatives import find_missing_derivatives
from infoflow_lens.hooks.model.call import (
    block_starts,
    call,
    catch,
    restore_module_tensors,
    without_user_hooks,
)
from infoflow_lens.hooks.model.capabilities import note_neighbours, try_once
from infoflow_lens.hooks.model.inputs import Batch, check_accepts_padding, has_positions_first
from infoflow_lens.hooks.model.points import (
    config_value,
    hook_name,
    hook_points,
    kind_of,
    layer_count,
    layer_of,
    reads_vectors,
    token_hook,
)
from infoflow_lens.hooks.model.semantics import state_hooks, state_sum
from infoflow_lens.hooks.passes.view import Needs, Pass
from infoflow_lens.hooks.scores import StateScores, StateScoresProbe, mark_existing
from infoflow_lens.hooks.states import combined, either
from infoflow_lens.theory.information_sets import InformationSets

Threshold = Annotated[float, Gt(0), Le(1)]  # of the largest influence, or of the squared one


@dataclass(frozen=True, eq=False, kw_only=True)
class InfluenceResult(StateScores):
    """Influence of every source on every state.

    Attributes:
        influence: float [layer, batch, pos, source]: the Frobenius norm of d state(layer, pos) /
            d source, or how far the state moves when the source is replaced by another sample's,
            depending on the probe (``record.config["probe"]``). With chosen positions the axis
            `pos` holds these only. 0 where a sequence has no such state or source.
        relative_error: of an estimate, for each layer, what the error over the influence, both as
            root mean squares over states and sources, stays below in at least 95% of draws, as seen
            in the spread over the directions; None where the influence is exact.
    """

    column: ClassVar[str] = "influence"

    influence: Float[Tensor, "layer batch pos source"]
    relative_error: tuple[float, ...] | None = None

    @checked
    def sets(self, threshold: Threshold = 0.1) -> InformationSets:
        """Return the sources of at least `threshold` times the largest influence on each state.

        Sets of positions that were not asked for are empty.

        Raises:
            InfoFlowError: unless ``0 < threshold <= 1``.
        """
        return influence_sets(self.full(), threshold, self.lengths)

    @checked
    def sets_by_share(self, share: Threshold = 0.9) -> InformationSets:
        """Return the fewest sources that hold this share of the squared influence on each state.

        Sets of positions that were not asked for are empty.

        Raises:
            InfoFlowError: unless ``0 < share <= 1``.
        """
        return InformationSets(self.scatter(holding(self.influence, share)), self.lengths)


@checked
def influence_sets(
    influence: Float[Tensor, "layer batch pos source"],
    threshold: Threshold,
    lengths: Int[Tensor, " batch"] | None = None,
) -> InformationSets:
    """Return the sources of at least `threshold` times the largest influence on each state.

    A state without any influence has the empty set.

    Raises:
        InfoFlowError: unless ``0 < threshold <= 1``.
    """
    largest = influence.amax(dim=-1, keepdim=True)
    return InformationSets((influence >= threshold * largest) & (influence > 0), lengths)


@checked
def holding(influence: Float[Tensor, "*state source"], share: Threshold) -> Tensor:
    """Mark the fewest sources with this share of the squared influence, the lowest of equals."""
    energy = influence.double().square()
    energy, order = energy.sort(dim=-1, descending=True, stable=True)
    held = energy.cumsum(dim=-1)
    # take sources until their energy is enough; the factor allows for rounding in sums of equals
    needed = (held - energy < share * (1 - 1e-9) * held[..., -1:]) & (energy > 0)
    return torch.zeros_like(needed).scatter(-1, order, needed)


# Passes of their own, which begin at the sources

# numbers in the largest tensor of a pass: on a CPU, larger passes leave the caches and are slower
_ROOM_CPU, _ROOM_GPU = 2**21, 2**26


def rows_at_once(model: nn.Module, n_pos: int, d_model: int, device: torch.device) -> int:
    """Choose how many sequences of this length a pass has, by the size of its largest tensor."""
    heads = config_value(model, "n_heads") or 8
    room = _ROOM_CPU if device.type == "cpu" else _ROOM_GPU
    return max(1, room // (n_pos * max(4 * d_model, int(heads) * n_pos)))


def start_point(model: nn.Module, source_layer: int | None) -> str:
    """Return the hook point where sources enter."""
    if source_layer is None and reads_vectors(model):
        return token_hook(model)
    return hook_name(model, f"blocks.{source_layer or 0}.hook_resid_pre")


@dataclass(frozen=True, eq=False)
class Rerun:
    """States as a function of what enters at the sources.

    Attributes:
        model: the model.
        source_layer: None for the tokens, else the layer whose resid_pre is the source.
        layers: whose states are wanted.
        state: "post_attention" or "resid_post".
        batch: what the model read, for models that run whole; None if unknown.
        first: which of the sequences of a pass is the first one here.
    """

    model: nn.Module
    source_layer: int | None
    layers: tuple[int, ...]
    state: str
    batch: Batch | None = None
    first: int = 0

    def take(self, sequences: Int[Tensor, " sequence"]) -> "Rerun":
        """Return the same for some sequences that stand in a row."""
        batch = None if self.batch is None else self.batch.take(sequences)
        return replace(self, batch=batch, first=int(sequences[0]))

    @property
    def real(self) -> Bool[Tensor, "batch pos"] | None:
        """The mask of positions, False on padding; None where nothing is padded."""
        if self.batch is None or self.batch.lengths is None:
            return None
        return self.batch.mask()

    def __call__(
        self,
        start: Float[Tensor, "row position d_source"],
        sequences: Int[Tensor, " row"] | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the states of all wanted layers.

        Args:
            start: what enters at the sources.
            sequences: of which sequence each row is a copy; default, all in their order.
        """
        wanted = [state_hooks(self.model, layer, self.state) for layer in self.layers]
        names = dict.fromkeys(name for names in wanted for name in names)
        batch = self.batch
        # a model that starts at its residual stream looks at the tokens' shape alone
        if batch is None:
            batch = Batch(torch.zeros(start.shape[:2], dtype=torch.long))
        elif sequences is not None:
            batch = batch.take(sequences)
        caught = call(
            self.model,
            batch,
            tuple(names),
            start=(start_point(self.model, self.source_layer), start),
            keep_graph=True,
            may_end=True,
        ).activations
        return tuple(state_sum(caught, names) for names in wanted)


def take_places(
    values: Float[Tensor, "batch pos d"], place: Int[Tensor, "batch asked"]
) -> Float[Tensor, "batch asked d"]:
    """Take the rows at these positions; anything where they are negative."""
    index = place.clamp(min=0).to(values.device)[:, :, None]
    return values.gather(1, index.expand(-1, -1, values.shape[2]))


# what was measured, and what else a result keeps
MeasuredInfluence: TypeAlias = tuple[Float[Tensor, "layer batch asked source"], dict[str, Any]]


class AskedStates(NamedTuple):
    """The states of a batch whose influences are asked for.

    Attributes:
        start: what entered at the sources.
        expected: the states of the pass that was made, for each layer.
        place: the positions that are asked for, -1 where a sequence has none.
    """

    start: Float[Tensor, "batch position d_source"]
    expected: list[Float[Tensor, "batch pos d_model"]]
    place: Int[Tensor, "batch asked"]

    def take(self, sequences: Int[Tensor, " sequence"]) -> "AskedStates":
        """Return those of some sequences."""
        start, *expected = (x[sequences.to(x.device)] for x in (self.start, *self.expected))
        return AskedStates(start, expected, self.place[sequences])


_RERUN_TOLERANCE = 1e-3
_RERUN_TOLERANCE_HALF = 5e-2  # bfloat16 has 8 bits, and batched kernels round differently
StateName = Literal["post_attention", "resid_post"]
Layers = Annotated[tuple[Index, ...], MinLen(1), Distinct()]

_SMALL = 0.01  # change of a source, relative to it, that a derivative would foresee [chosen]
# what all layers compute from the sources, and so must have derivatives by them
_COMPUTED = (".hook_v", ".hook_z", ".hook_attn_out", ".hook_mixer_out", ".hook_mlp_out",
             ".hook_extra_out", ".hook_resid_post")  # fmt: skip
_HALF = (torch.float16, torch.bfloat16)
_ROUNDING = 4.0  # times the precision of the dtype: smaller influence is rounding [chosen]
_TINY = torch.finfo(torch.float32).tiny


class StateInfluence(StateScoresProbe[InfluenceResult]):
    """The base of influence probes: states as a function of the tokens, in passes of their own.

    These passes run without your hooks, so that hooks which store or count see nothing of them, and
    must reproduce the states of the pass that you made: if a hook of yours changes them, this is
    refused, unless `through_hooks` lets your hooks take part. Sequences of a batch run together,
    which is right as long as they do not read one another, and hooks may break that.

    A HookedTransformer starts at the layer where sources enter; other models run whole, with what
    enters there replaced. Padding has no influence and receives none.

    What it keeps grows with the sequences, since every one has its own result.

    Attributes:
        watch: called with the share of a batch's work that is done, from 0 to 1; for progress bars.
    """

    watch: Callable[[float], None] | None = field(default=None, init=False, compare=False)
    differentiates: ClassVar[bool] = False  # and so needs operations that have derivatives
    kind: ClassVar[type[StateScores]] = InfluenceResult
    rounding: ClassVar[float] = _ROUNDING
    floor_of: ClassVar[str] = "influence below {} of the largest on the same state"

    _: KW_ONLY
    state: StateName = "post_attention"
    source_layer: Index | None = None
    chunk_size: Count | None = field(default=None, compare=False)
    through_hooks: bool = False
    layers: Layers | None = None

    coarse = combined(either)  # the half precision of the states; empty in others
    mixed = combined(either)  # what is to be said of sources that hold several tokens, or not all

    _work, _worked = 0, 0
    _is_checked = False  # for operations of the model without derivatives

    @abstractmethod
    def _measure(self, rerun: Rerun, states: AskedStates) -> MeasuredInfluence:
        """Measure the influence of every source on the asked states of a batch.

        Args:
            rerun: states as a function of what enters at the sources.
            states: what the pass that was made showed of them.

        Returns:
            The influence, and what else is kept.
        """

    def needs(self, model: nn.Module) -> Needs:
        """Name what enters at the sources, and the states.

        Raises:
            InfoFlowError: for layers and positions that the model does not have.
        """
        layers = self._find_layers(model)
        names = [start_point(model, self.source_layer)]
        self.check_positions(model)
        for layer in layers:
            names += state_hooks(model, layer, self.state)
        return Needs.of(model, points=names)

    def prepare(self, model: nn.Module, fingerprint: str | None = None) -> Needs:
        """Get ready; what is known of another model is looked up anew."""
        self._is_checked = False
        return super().prepare(model, fingerprint)

    def _expect(self, work: int, done: int = 0) -> None:
        """Set how much work this batch is, in any unit, and how much of it is done, for `watch`."""
        self._work, self._worked = work, done

    def _work_done(self, work: int) -> None:
        self._worked += work
        if self.watch is not None:
            self.watch(min(1.0, self._worked / max(1, self._work)))

    def _find_layers(self, model: nn.Module) -> tuple[int, ...]:
        """Find the layers whose states are asked for."""
        first, n_layers = self.source_layer or 0, layer_count(model)
        if first >= n_layers:
            raise InfoFlowError(f"source_layer is {first}: expected 0 to {n_layers - 1}, or None")
        layers = tuple(range(first, n_layers)) if self.layers is None else self.layers
        if not all(first <= layer < n_layers for layer in layers):
            raise InfoFlowError(
                f"layers are {list(layers)}: expected layers from {first} to {n_layers - 1}, which "
                "the sources reach"
            )
        return layers

    def update(self, seen: Pass) -> Mapping[str, Any]:
        """Return the influence of every source of a pass."""
        model = seen.model
        check_accepts_padding(model, seen.lengths)
        if seen.batch is None and has_positions_first(model):
            raise InfoFlowError(
                "the model's blocks have positions first, then sequences, and a pass of its own "
                "cannot be made from such vectors: expected sequences first; build it with "
                "batch_first=True, and load the same state_dict"
            )
        layers = self._find_layers(model)
        start = seen.activation(start_point(model, self.source_layer))
        expected = [seen.state(layer, self.state) for layer in layers]
        n_source, n_pos = start.shape[1], expected[0].shape[1]
        lengths = seen.lengths_of(n_source)
        if not self.through_hooks:
            self._check_start(seen, start)
        place = self.place(lengths, n_source, n_pos)
        rerun = Rerun(model, self.source_layer, layers, self.state, seen.batch)
        if self.source_layer and hasattr(model, "anatomy"):
            block_starts(model)  # found by a pass that draws tokens, which forward mode refuses
        # hooks of the user would edit each repeated pass once more, unless they take part
        hidden = nullcontext() if self.through_hooks else without_user_hooks(model)
        with restore_module_tensors(model), hidden:
            states = AskedStates(start.clone(), expected, place)
            if self.differentiates and not self._is_checked:
                self._check_operations(rerun, start)
            influence, more = self._measure(rerun, states)
            if self.differentiates:
                self._check_derivatives(rerun, states, influence)
        # rows of padding, and positions that a sequence lacks, have no influence
        exists = mark_existing(place, lengths, n_source)
        influence = torch.where(exists, influence.cpu(), 0)
        # nor is rounding beside the largest influence on the same state an influence
        precisions = [find_precision(state) for state in expected]
        floors = torch.tensor([_ROUNDING * torch.finfo(each).eps for each in precisions])
        largest = influence.amax(dim=-1, keepdim=True)
        influence = influence.masked_fill(influence <= floors[:, None, None, None] * largest, 0)
        half = next((each for each in precisions if each in _HALF), None)
        more = {**more, "coarse": str(half or "").removeprefix("torch."), "mixed": ""}
        if self.source_layer is None and seen.batch is not None:
            notes = note_neighbours(model, seen.batch), note_other_ways(model, seen.batch)
            more["mixed"] = "; ".join(filter(None, notes))
        return self.parts(influence, place, lengths, layers, n_pos) | more

    def notes(self) -> tuple[str, ...]:
        """Say, in half precision, how large the influence is that counts as rounding."""
        notes = (*super().notes(), *filter(None, [self.mixed]))
        if not self.coarse:
            return notes
        floor = f"{self.rounding * torch.finfo(getattr(torch, self.coarse)).eps:.1%}"
        note = f"in {self.coarse}, {self.floor_of.format(floor)} is rounding, and counts as 0"
        return (*notes, f"{note}; measure in float32 to see smaller influence")

    def _check_start(self, seen: Pass, start: Tensor) -> None:
        """Refuse hooks that edit the sources: repeated passes begin with the edited values.

        Raises:
            InfoFlowError: naming the hook point.
        """
        model, point = seen.model, start_point(seen.model, self.source_layer)
        # hooks at the sources, or below them, would change what is put there
        hooks = [
            hook
            for name, at in hook_points(model).items()
            if name == point or self._stands_below(name)
            for hook in at.fwd_hooks
            if not hook.is_permanent
        ]
        if all(getattr(getattr(hook, "user_hook", None), "only_looks", False) for hook in hooks):
            return
        # a hook that does something must at least do nothing to what enters
        same = False
        if seen.batch is not None:
            with without_user_hooks(model):
                same = enters_again(model, seen.batch, point, start)
        if not same:
            raise InfoFlowError(
                f"a hook of yours changes what enters at {point}, where the sources enter: "
                "influence would be that of the changed sources. Take the hook off and make the "
                "change in the inputs; a hook that changes nothing when it runs a second time can "
                "take part with through_hooks=True"
            )

    def _stands_below(self, name: str) -> bool:
        """Say whether a hook point is on the way to the sources."""
        layer = layer_of(name)
        if layer is None:
            return not name.startswith(("ln_final", "unembed"))
        return layer < (self.source_layer or 0)

    def _check_rerun(
        self, rerun: Rerun, values: Sequence[Tensor], expected: Sequence[Tensor]
    ) -> None:
        """Refuse a pass that does not give every state again, also the small ones.

        Raises:
            InfoFlowError: naming the first state that differs.
        """
        for layer, value, state in zip(rerun.layers, values, expected, strict=True):
            # small states count, too: each against its own norm
            gap = (value - state).float().norm(dim=-1)
            allowed = tolerance(state) * state.float().norm(dim=-1) + _TINY
            fits = gap <= allowed
            if rerun.real is not None:
                fits |= ~rerun.real.to(fits.device)
            if not fits.all():
                sequence, position = (~fits).nonzero()[0].tolist()
                number = self.n_sequences + rerun.first + sequence
                raise InfoFlowError(
                    f"repeating the forward pass changes the state of layer {layer} at position "
                    f"{position} of sequence {number}: expected the same states. A hook of yours "
                    "that changes activations can take part with through_hooks=True; dropout, a "
                    "key-value cache, an attention_mask given to run_with_hooks, or states of "
                    "another model that a call gives (encoder_hidden_states) cannot: run in eval "
                    "mode, whole sequences, and padded ones with attach or run_probes; or open a "
                    "module of your own whose forward takes the tokens alone and gives the rest "
                    "itself"
                )

    def _check_operations(self, rerun: Rerun, start: Tensor) -> None:
        """Refuse operations without derivatives that PyTorch knows of, and parts cut off from them.

        Raises:
            InfoFlowError: naming them.
        """
        one = torch.zeros(1, dtype=torch.int64, device=start.device)
        parts = [
            name
            for name in hook_points(rerun.model)
            if name.endswith(_COMPUTED) and (layer_of(name) or 0) >= (self.source_layer or 0)
        ]
        with catch(rerun.model, parts, keep_graph=True) as caught:
            named = find_missing_derivatives(lambda moved: rerun(moved, one), start[:1])
        # all that a layer computes hangs on the sources, unless it is a constant, such as 0
        values = caught.activations
        cut = [name for name, value in values.items() if not value.requires_grad]
        if cut:
            with torch.no_grad(), catch(rerun.model, cut) as caught:
                rerun(start[:1].roll(1, dims=-1), one)
            moved = caught.activations
            cut = [name for name in cut if name in moved and not moved[name].equal(values[name])]
        if named or cut:
            lacks = f"computes with {named}" if named else f"cuts {', '.join(cut)} off (detach)"
            raise InfoFlowError(
                f"the {kind_of(rerun.model)} {lacks}, of which there are no "
                "derivatives, so that influence would be that of its other parts: expected "
                "operations with derivatives; load the model in float32, or use ResampleInfluence"
            )
        self._is_checked = True

    @torch.no_grad()
    def _check_derivatives(
        self,
        rerun: Rerun,
        states: AskedStates,
        influence: Float[Tensor, "layer batch asked source"],
    ) -> None:
        """Refuse a model that other tokens move although the derivative by all of them is 0.

        So it is behind steps such as ``round()``, whose derivative is 0. In a part of a model that
        cannot be told from a kink, as of a ReLU of 0 in weights that are set by hand.

        Raises:
            InfoFlowError: naming what lacks derivatives.
        """
        start, expected, place = states
        sources = torch.arange(start.shape[1])
        if influence.masked_fill(sources == place[..., None].cpu(), 0).any():
            return
        # a model that reads its own position alone is right: then a small change of all other
        # sources leaves one asked state of each sequence as it is
        at = place.amax(dim=1).cpu()
        others = (sources != at[:, None]).to(start.device)
        changed = start + _SMALL * start.roll(1, dims=-1)
        values = rerun(torch.where(others[..., None], changed, start))
        row = (at >= 0).nonzero().flatten()
        for value, state in zip(values, expected, strict=True):
            gap = (value - state)[row, at[row]].float().norm(dim=-1)
            if (gap > 0.1 * tolerance(state) * state[row, at[row]].float().norm(dim=-1)).any():
                raise InfoFlowError(
                    f"other tokens move the states of the {kind_of(rerun.model)}, and the "
                    "derivative by all of them is 0, as behind round(): expected operations whose "
                    "derivatives say how states move; load the model without rounding, or use "
                    "ResampleInfluence"
                )


_OTHER_WAYS = (
    "layers read tokens beside what enters layer 0, too (embeddings of their own, or the first "
    "ones again): influence is of what enters there, and leaves that way out"
)


def note_other_ways(model: nn.Module, batch: Batch) -> str:
    """Say whether layers read tokens beside what enters layer 0; empty if they do not."""
    return _OTHER_WAYS if try_once(model, batch, _reads_elsewhere) else ""


def _reads_elsewhere(model: nn.Module, batch: Batch) -> bool | None:
    """Say whether layers read tokens beside what enters layer 0; None where a batch cannot tell.

    A model over token ids that was opened is tried, with a sequence that reads otherwise from its
    end: what enters of that does not make its states of other tokens.
    """
    ids = batch.tokens
    if not hasattr(model, "anatomy") or ids.is_floating_point() or ids.ndim != 2:
        return None
    other = replace(batch, tokens=ids.flip(1))
    entry, last = "blocks.0.hook_resid_pre", f"blocks.{layer_count(model) - 1}.hook_resid_post"
    if other.tokens.equal(ids) or not {entry, last} <= hook_points(model).keys():
        return None
    with torch.no_grad(), eval_mode(model), without_user_hooks(model):
        whole = call(model, other, [entry, last]).activations
        again = call(model, batch, [last], start=(entry, whole[entry])).activations[last]
    gap, size = (x.float().norm() for x in (again - whole[last], whole[last]))
    return bool(gap > tolerance(again) * size)


def enters_again(
    model: nn.Module, batch: Batch, point: str, start: Float[Tensor, "batch position d_source"]
) -> bool:
    """Say whether sequences, run again, have the same where sources enter, up to rounding."""
    plain = call(model, batch, [point], may_end=True).activations[point]
    real = batch.mask()[:, : start.shape[1]].to(start.device)
    gap = (plain[:, : start.shape[1]] - start)[real].float().norm(dim=-1)
    return bool((gap <= tolerance(start) * start[real].float().norm(dim=-1) + _TINY).all())


def tolerance(state: Tensor) -> float:
    """Return how far a state may differ between two passes, relative to its norm."""
    half = find_precision(state) in _HALF
    return _RERUN_TOLERANCE_HALF if half else _RERUN_TOLERANCE


def find_precision(state: Tensor) -> torch.dtype:
    """Find the dtype a state was computed in: under autocast, sums of rounded parts are wide."""
    device = state.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        narrow = torch.get_autocast_dtype(device)
        return max(state.dtype, narrow, key=lambda dtype: torch.finfo(dtype).eps)
    return state.dtype
