"""Which inputs a state does depend on: the result, the sets it gives, and what its probes share."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from annotated_types import Gt, Le, MinLen
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import Count, Distinct, Index, checked
from infoflow_lens.hooks.influence.derivatives import (
    differentiate_along,
    find_missing_derivatives,
)
from infoflow_lens.hooks.influence.rerun import Rerun, start_point
from infoflow_lens.hooks.model.call import call, restore_module_tensors, without_user_hooks
from infoflow_lens.hooks.model.inputs import check_accepts_padding, has_positions_first
from infoflow_lens.hooks.model.points import hook_points, kind_of, layer_count, layer_of
from infoflow_lens.hooks.model.semantics import state_hooks
from infoflow_lens.hooks.passes.view import Needs, Pass
from infoflow_lens.hooks.scores import StateScores, StateScoresProbe, mark_existing
from infoflow_lens.theory.information_sets import InformationSets

_RERUN_TOLERANCE = 1e-3
_RERUN_TOLERANCE_HALF = 5e-2  # bfloat16 has 8 bits, and batched kernels round differently
StateName = Literal["post_attention", "resid_post"]
Layers = Annotated[tuple[Index, ...], MinLen(1), Distinct()]
Threshold = Annotated[float, Gt(0), Le(1)]  # of the largest influence, or of the squared one

_STEPS = 0.1, 0.002  # changes of sources, relative to them, that derivatives foresee [chosen]
_HIDDEN = 0.2  # of a change, that they may not foresee [chosen]
_ROUNDING = 4.0  # times the precision of the dtype: smaller influence is rounding [chosen]


@dataclass(frozen=True, eq=False, kw_only=True)
class InfluenceResult(StateScores):
    """Influence of every source on every state.

    Attributes:
        influence: float [layer, batch, pos, source]: the Frobenius norm of d state(layer, pos) /
            d source, or how far the state moves when the source is replaced by another sample's,
            depending on the probe (``record.config["probe"]``). With chosen positions the axis
            `pos` holds these only. 0 where a sequence has no such state or source.
        relative_error: of an estimate, for each layer, what the error over the influence, both as
            root mean squares over states and sources, stays below in 95% of draws, as seen in the
            spread over the directions; None where the influence is exact.
    """

    column: ClassVar[str] = "influence"

    influence: Float[Tensor, "layer batch pos source"]
    relative_error: tuple[float, ...] | None = None

    @checked
    def sets(self, threshold: Threshold = 0.1) -> InformationSets:
        """Measured information sets: the sources of at least `threshold` times the largest
        influence on that state. Sets of positions that were not asked for are empty.

        Raises:
            InfoFlowError: unless ``0 < threshold <= 1``.
        """
        return InformationSets(self.scatter(_select_above(self.influence, threshold)), self.lengths)

    @checked
    def sets_by_share(self, share: Threshold = 0.9) -> InformationSets:
        """Measured information sets: the fewest sources that hold at least this share of the
        squared influence on that state. Sets of positions that were not asked for are empty.

        Raises:
            InfoFlowError: unless ``0 < share <= 1``.
        """
        return InformationSets(self.scatter(holding(self.influence, share)), self.lengths)


@checked
def influence_sets(
    influence: Float[Tensor, "layer batch pos source"], threshold: Threshold
) -> InformationSets:
    """Return the sources of at least `threshold` times the largest influence on each state.

    A state without any influence has the empty set.

    Raises:
        InfoFlowError: unless ``0 < threshold <= 1``.
    """
    return InformationSets(_select_above(influence, threshold))


def _select_above(influence: Float[Tensor, "*state source"], threshold: float) -> Tensor:
    largest = influence.amax(dim=-1, keepdim=True)
    return (influence >= threshold * largest) & (influence > 0)


@checked
def holding(influence: Float[Tensor, "*state source"], share: Threshold) -> Tensor:
    """The fewest sources with this share of the squared influence, the lowest first of equals."""
    energy = influence.double().square()
    energy, order = energy.sort(dim=-1, descending=True, stable=True)
    held = energy.cumsum(dim=-1)
    # take sources until their energy is enough; the factor allows for rounding in sums of equals
    needed = (held - energy < share * (1 - 1e-9) * held[..., -1:]) & (energy > 0)
    return torch.zeros_like(needed).scatter(-1, order, needed)


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
    _by_forward = True  # where it differentiates

    _: KW_ONLY
    state: StateName = "post_attention"
    source_layer: Index | None = None
    chunk_size: Count | None = field(default=None, compare=False)
    through_hooks: bool = False
    layers: Layers | None = None

    _work, _worked = 0, 0
    _is_checked = False  # whether derivatives foresee what this model does

    @abstractmethod
    def _measure(self, rerun: Rerun, states: AskedStates) -> MeasuredInfluence:
        """The influence of every source on the asked states of a batch; and what else is kept.

        Args:
            rerun: states as a function of what enters at the sources.
            states: what the pass that was made showed of them.
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
        """Get ready; another model is looked at anew."""
        self._is_checked = False
        return super().prepare(model, fingerprint)

    def _expect(self, work: int) -> None:
        """Set how much work this batch is, in any unit, for `watch`."""
        self._work, self._worked = work, 0

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
        n_states = lengths + n_pos - n_source  # CLS has no source
        if not self.through_hooks:
            self._check_start(seen, start)
        place = self.place(n_states, n_pos)
        rerun = Rerun(model, self.source_layer, layers, self.state, seen.batch)
        # unless they take part, hooks of the user would edit each repeated pass once more
        hidden = nullcontext() if self.through_hooks else without_user_hooks(model)
        with restore_module_tensors(model), hidden:
            states = AskedStates(start.clone(), expected, place)
            influence, more = self._measure(rerun, states)
            if self.differentiates and not self._is_checked:
                self._is_checked = self._check_derivatives(rerun, states, influence)
        # rows of padding, and positions that a sequence lacks, have no influence
        exists = mark_existing(place, lengths, n_source)
        influence = _drop_rounding(torch.where(exists, influence.cpu(), 0), expected)
        return self.parts(influence, place, lengths, layers, n_pos) | more

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
        batch = seen.batch
        if batch is not None:
            with without_user_hooks(model):
                plain = call(model, batch, [point], may_end=True).activations[point]
            real = seen.is_real(start.shape[1]).to(start.device)
            gap = (plain[:, : start.shape[1]] - start)[real].float().norm(dim=-1)
            same = bool((gap <= tolerance(start) * start[real].float().norm(dim=-1) + _TINY).all())
        if not same:
            raise InfoFlowError(
                f"a hook of yours changes what enters at {point}, where the sources enter: "
                "influence would be that of the changed sources. Take it off and make the change "
                "in the inputs; one that does nothing when repeated can take part with "
                "through_hooks=True"
            )

    def _stands_below(self, name: str) -> bool:
        """Say whether a hook point is on the way to the sources."""
        layer = layer_of(name)
        if layer is None:
            return not name.startswith(("ln_final", "unembed"))
        return layer < (self.source_layer or 0)

    def _check_rerun(
        self,
        layers: Sequence[int],
        values: Sequence[Tensor],
        expected: Sequence[Tensor],
        real: Bool[Tensor, "batch pos"] | None,
        first: int = 0,
    ) -> None:
        """Every state of every sequence must come out again, not only the large ones."""
        for layer, value, state in zip(layers, values, expected, strict=True):
            # small states count, too: each against its own norm
            gap = (value - state).float().norm(dim=-1)
            allowed = tolerance(state) * state.float().norm(dim=-1) + _TINY
            fits = gap <= allowed
            if real is not None:
                fits |= ~real.to(fits.device)
            if not fits.all():
                sequence, position = (~fits).nonzero()[0].tolist()
                raise InfoFlowError(
                    f"repeating the forward pass changes the state of layer {layer} at position "
                    f"{position} of sequence {self.n_sequences + first + sequence}: expected the "
                    "same states. A hook of yours that changes activations can take part with "
                    "through_hooks=True; dropout, a key-value cache, an attention_mask given to "
                    "run_with_hooks, or states of another model that a call gives "
                    "(encoder_hidden_states) cannot: run in eval mode, whole sequences, and padded "
                    "ones with attach or run_probes; or open a module of your own whose forward "
                    "takes the tokens alone and gives the rest itself"
                )

    @torch.no_grad()
    def _check_derivatives(
        self,
        rerun: Rerun,
        states: AskedStates,
        influence: Float[Tensor, "layer batch asked source"],
    ) -> bool:
        """Refuse a model that other tokens move otherwise than its derivatives say.

        One state of each layer of one sequence is looked at, along two directions of all other
        tokens. Of a function with derivatives, what these do not foresee of a change goes with the
        change; what an operation without derivatives hides stays the same. At a kink, as of a ReLU
        of 0 in weights that are set by hand, it stays as well, and is another one backwards.

        Returns:
            Whether other tokens move it, so that one look has said enough of the model.

        Raises:
            InfoFlowError: naming what lacks derivatives.
        """
        start, _, place = states
        last = place.amax(dim=1).cpu()
        sequence = last.argmax()[None]  # the one in which most stands before a state
        at, chosen = int(last[sequence]), sequence.to(start.device)
        if at < 0:
            return False
        only, sources = start[chosen], torch.arange(start.shape[1])
        others = (sources != at)[:, None].to(start.device)
        directions = torch.stack([only.roll(k, dims=-1) * others for k in (1, 2)])
        changed = [only + sign * h * d for h in _STEPS for sign in (1, -1) for d in directions]
        values = rerun(torch.cat([only, *changed]), chosen.expand(1 + len(changed)))
        if influence.masked_fill(sources == place[..., None].cpu(), 0).any():
            try:
                foreseen = differentiate_along(
                    lambda moved: rerun(moved, chosen),
                    only,
                    directions,
                    by_forward=self._by_forward,
                )
            except RuntimeError:  # what has no second derivative
                return True
        else:
            foreseen = tuple(value.new_zeros(2, *value.shape) for value in values)
        moves = False
        for value, derivative in zip(values, foreseen, strict=True):
            along = derivative[:, 0, at].float().flatten()
            plain, each = value[0, at].float(), value[1:, at].float().view(2, 2, 2, -1)
            large, small = (
                ((up - down) / (2 * h)).flatten() - along
                for h, (up, down) in zip(_STEPS, each, strict=True)
            )
            moves |= bool((small + along).any())
            if small.norm() <= _HIDDEN * (small + along).norm():
                continue
            stays = 0.8 < small.norm() / large.norm() < 1.25
            stays = stays and bool(torch.cosine_similarity(small, large, dim=0) > 0.9)
            up, down = each[1]
            stays = stays and bool((up + down - 2 * plain).norm() <= _HIDDEN * (up - down).norm())
            named = find_missing_derivatives(lambda moved: rerun(moved, chosen), only)
            if named or stays:
                raise InfoFlowError(
                    f"other tokens move the states of the {kind_of(rerun.model)} otherwise than "
                    "derivatives say: expected operations that have them, which "
                    f"{named or 'detach() or torch.no_grad() in the model'} takes away; load it in "
                    "float32 without that, or take ResampleInfluence"
                )
        return moves

    def compute(self) -> InfluenceResult:
        """Join all batches."""
        return self.make_scores(InfluenceResult, relative_error=self._relative_error())

    def _relative_error(self) -> tuple[float, ...] | None:
        return None


_TINY = torch.finfo(torch.float32).tiny


def tolerance(state: Tensor) -> float:
    """Return how far a state may differ between two passes, relative to its norm."""
    half = state.dtype in (torch.float16, torch.bfloat16)
    return _RERUN_TOLERANCE_HALF if half else _RERUN_TOLERANCE


def _drop_rounding(
    influence: Float[Tensor, "layer batch asked source"], states: Sequence[Tensor]
) -> Float[Tensor, "layer batch asked source"]:
    """Set influence to 0 where it is rounding beside the largest on the same state."""
    floors = torch.tensor([_ROUNDING * torch.finfo(state.dtype).eps for state in states])
    largest = influence.amax(dim=-1, keepdim=True)
    return influence.masked_fill(influence <= floors[:, None, None, None] * largest, 0)
