"""Which inputs a state does depend on: the result, the sets it gives, and what its probes share."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.hooks.influence.rerun import Rerun, start_point, without_user_hooks
from infoflow_lens.hooks.model.inputs import Batch, may_be_padded
from infoflow_lens.hooks.model.points import (
    check_finite,
    layer_count,
    run_catching,
    state_hooks,
    state_sum,
)
from infoflow_lens.hooks.passes.own import own_pass
from infoflow_lens.hooks.passes.view import Pass, padded_together
from infoflow_lens.hooks.probe import Probe
from infoflow_lens.hooks.result import Result
from infoflow_lens.theory.information_sets import InformationSets

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

_RERUN_TOLERANCE = 1e-3
_RERUN_TOLERANCE_HALF = 5e-2  # bfloat16 has 8 bits, and batched kernels round differently


@dataclass(frozen=True, eq=False, kw_only=True)
class InfluenceResult(Result):
    """Influence of every source on every state.

    Attributes:
        layers: the layers, in the order of the first axis.
        influence: float [layer, batch, pos, source]: the Frobenius norm of d state(layer, pos) /
            d source, or how far the state moves when the source is replaced by another sample's,
            depending on the probe (``record.config["probe"]``). With chosen positions the axis
            `pos` holds these only. 0 where a sequence has no such state or source.
        positions: int [batch, pos], the position of each of these states in its own sequence; -1
            where the sequence has none.
        lengths: int [batch], the number of sources of each sequence.
        n_positions: positions of the longest sequence: as many as sources, and CLS if there is one.
        relative_error: of an estimate, for each layer, the standard error of the influence over
            the influence, both as root mean squares over states and sources, as seen in the spread
            over the directions; None where the influence is exact.
    """

    layers: tuple[int, ...]
    influence: Float[Tensor, "layer batch pos source"]
    positions: Int[Tensor, "batch pos"]
    lengths: Int[Tensor, " batch"]
    n_positions: int
    relative_error: tuple[float, ...] | None = None

    def full(self) -> Float[Tensor, "layer batch position source"]:
        """The influence on every position, 0 where a position was not asked for."""
        return self._scattered(self.influence)

    def sets(self, threshold: float = 0.1) -> InformationSets:
        """Measured information sets: the sources of at least `threshold` times the largest
        influence on that state. Sets of positions that were not asked for are empty.

        Raises:
            InfoFlowError: unless ``0 < threshold <= 1``.
        """
        return InformationSets(self._scattered(_above(self.influence, threshold)))

    def sets_by_share(self, share: float = 0.9) -> InformationSets:
        """Measured information sets: the fewest sources that hold at least this share of the
        squared influence on that state. Sets of positions that were not asked for are empty.

        Raises:
            InfoFlowError: unless ``0 < share <= 1``.
        """
        return InformationSets(self._scattered(_holding(self.influence, share)))

    def _scattered(self, values: Tensor) -> Tensor:
        everything = torch.arange(self.n_positions)
        exists = self.positions >= 0
        if self.positions.shape[1] == self.n_positions and bool(
            ((self.positions == everything) | ~exists).all()
        ):
            return values
        n_layers, _, _, n_source = values.shape
        full = values.new_zeros(n_layers, len(self.positions), self.n_positions, n_source)
        sequence, row = exists.nonzero(as_tuple=True)
        full[:, sequence, self.positions[sequence, row]] = values[:, sequence, row]
        return full

    def to_frame(self) -> "pd.DataFrame":
        """One row for each layer, sample, position and source that exist."""
        import pandas as pd

        real = torch.arange(self.influence.shape[3]) < self.lengths[:, None]
        exists = (self.positions >= 0)[:, :, None] & real[:, None]
        layer, sample, row, source = exists.expand_as(self.influence).nonzero(
            as_tuple=True
        )  # in the order of the axes
        return pd.DataFrame(
            {
                "layer": torch.tensor(self.layers)[layer].numpy(),
                "sample": sample.numpy(),
                "position": self.positions[sample, row].numpy(),
                "source": source.numpy(),
                "influence": self.influence[layer, sample, row, source].numpy(),
            }
        )

    def plot(self, sample: int = 0) -> "go.Figure":
        """Heat maps of one sequence, a panel for each layer."""
        import plotly.express as px

        n_source = int(self.lengths[sample])
        rows = self.positions[sample] >= 0
        figure = px.imshow(
            self.influence[:, sample, rows, :n_source].numpy(),
            facet_col=0,
            y=[str(position) for position in self.positions[sample, rows].tolist()],
            labels={"x": "source", "y": "position", "color": "influence", "facet_col": "layer"},
            title=f"{self.record.config.get('probe', 'Influence')}, sequence {sample}",
        )
        for panel, layer in zip(figure.layout.annotations, self.layers, strict=False):
            panel.text = f"layer {layer}"
        return figure


def check_threshold(threshold: float) -> None:
    """Refuse thresholds that are no share of the largest influence.

    Raises:
        InfoFlowError: unless ``0 < threshold <= 1``.
    """
    if not 0 < threshold <= 1:
        raise InfoFlowError(
            f"threshold is {threshold}: expected a share of the largest influence, 0 < t <= 1"
        )


def influence_sets(
    influence: Float[Tensor, "layer batch pos source"], threshold: float
) -> InformationSets:
    """The sources of at least `threshold` times the largest influence on each state.

    A state without any influence has the empty set.

    Raises:
        InfoFlowError: unless ``0 < threshold <= 1``.
    """
    return InformationSets(_above(influence, threshold))


def share_sets(
    influence: Float[Tensor, "layer batch pos source"], share: float = 0.9
) -> InformationSets:
    """The fewest sources that hold at least `share` of the squared influence on each state.

    Among equals the lowest index comes first. A state without any influence has the empty set.

    Raises:
        InfoFlowError: unless ``0 < share <= 1``.
    """
    return InformationSets(_holding(influence, share))


def _above(influence: Float[Tensor, "*state source"], threshold: float) -> Tensor:
    check_threshold(threshold)
    largest = influence.amax(dim=-1, keepdim=True)
    return (influence >= threshold * largest) & (influence > 0)


def _holding(influence: Float[Tensor, "*state source"], share: float) -> Tensor:
    if not 0 < share <= 1:
        raise InfoFlowError(
            f"share is {share}: expected a share of the squared influence, 0 < share <= 1"
        )
    energy = influence.double().square()
    energy, order = energy.sort(dim=-1, descending=True, stable=True)
    held = energy.cumsum(dim=-1)
    # a source enters while those before it do not hold enough; sums of equals round
    needed = (held - energy < share * (1 - 1e-9) * held[..., -1:]) & (energy > 0)
    return torch.zeros_like(needed).scatter(-1, order, needed)


class StateInfluence(Probe[InfluenceResult]):
    """What measures of influence share: states as a function of the tokens, in passes of their own.

    These passes run without your hooks, so that hooks which store or count see nothing of them, and
    must reproduce the states of the pass that you made: if a hook of yours changes them, this is
    refused, unless `through_hooks` lets your hooks take part. Sequences of a batch run together,
    which is right as long as they do not read one another, and hooks may break that.

    A HookedTransformer starts at the layer where sources enter; other models run whole, with what
    enters there replaced. Padding has no influence and receives none.

    What it keeps grows with the sequences, since every one has its own result.
    """

    def __init__(
        self,
        state: str,
        source_layer: int | None,
        layers: Sequence[int] | None,
        positions: Sequence[int] | None,
        chunk_size: int | None,
        through_hooks: bool,
    ) -> None:
        super().__init__()
        if state not in ("post_attention", "resid_post"):
            raise InfoFlowError(f"state is {state!r}: expected 'post_attention' or 'resid_post'")
        self._state = state
        self.source_layer = source_layer
        self.layers = _different_integers(layers, "layers")
        self.positions = _different_integers(positions, "positions")
        if chunk_size is not None and chunk_size < 1:
            raise InfoFlowError(f"chunk_size is {chunk_size}: expected at least 1, or None")
        self.chunk_size = chunk_size
        self.through_hooks = through_hooks
        self._layers: tuple[int, ...] = ()
        self._influence: list[Tensor] = []  # [batch, layer, pos, source]
        self._places: list[Tensor] = []
        self._lengths: list[Tensor] = []
        self._n_positions = 0
        self._may_be_edited = False  # where the sources enter

    def config(self) -> Mapping[str, Any]:
        """The settings, as JSON-compatible values."""
        return {
            "state": self._state,
            "source_layer": self.source_layer,
            "layers": None if self.layers is None else list(self.layers),
            "positions": None if self.positions is None else list(self.positions),
            "through_hooks": self.through_hooks,
        }

    def state(self) -> dict[str, Any]:
        """Everything measured so far, for :meth:`load_state` of a probe with the same settings."""
        found = super().state()  # lists of its own, as this probe may go on
        return {k: list(v) if isinstance(v, list) else v for k, v in found.items()}

    @abstractmethod
    def _measure(
        self,
        model: nn.Module,
        rerun: Rerun,
        start: Float[Tensor, "batch position d_source"],
        expected: list[Float[Tensor, "batch pos d_model"]],
        place: Int[Tensor, "batch asked"],
        lengths: Int[Tensor, " batch"],
    ) -> Float[Tensor, "layer batch asked source"]:
        """The influence of every source on the asked states of a batch.

        Args:
            model: the model.
            rerun: states as a function of `start`.
            start: what entered at the sources.
            expected: the states of the pass that was made, for each layer.
            place: the positions that are asked for, -1 where a sequence has none.
            lengths: the sources of each sequence.
        """

    def _hook_points(self, model: nn.Module) -> tuple[str, ...]:
        n_layers = layer_count(model)
        if self.source_layer is not None and not 0 <= self.source_layer < n_layers:
            raise InfoFlowError(
                f"source_layer is {self.source_layer}: expected 0 to {n_layers - 1}, or None"
            )
        first = self.source_layer or 0
        layers = tuple(range(first, n_layers)) if self.layers is None else self.layers
        if not all(first <= layer < n_layers for layer in layers):
            raise InfoFlowError(
                f"layers are {list(layers)}: expected layers from {first} to {n_layers - 1}, which "
                "the sources reach"
            )
        n_ctx = getattr(getattr(model, "cfg", None), "n_ctx", None)
        if n_ctx and self.positions and not all(-n_ctx <= p < n_ctx for p in self.positions):
            raise InfoFlowError(
                f"positions are {list(self.positions)}: the model has at most {n_ctx} positions; "
                "count from 0, or from -1 backwards"
            )
        self._layers = layers
        names = [start_point(model, self.source_layer)]
        points: Mapping[str, Any] = model.hook_dict  # type: ignore[assignment]
        hooks = points[names[0]].fwd_hooks
        self._may_be_edited = any(not hook.is_permanent for hook in hooks)
        for layer in self._layers:
            names += state_hooks(model, layer, self._state)
        return tuple(names)

    def _update(self, model: nn.Module, seen: Pass) -> None:
        activations = seen.activations
        if seen.lengths is not None and not may_be_padded(model):
            raise InfoFlowError(
                f"{type(model).__name__} takes no attention_mask into account: expected sequences "
                "without padding; run those of one length together"
            )
        start = activations[start_point(model, self.source_layer)]
        expected = [
            state_sum(activations, state_hooks(model, layer, self._state)) for layer in self._layers
        ]
        n_source, n_pos = start.shape[1], expected[0].shape[1]
        lengths = seen.lengths
        if lengths is None:
            lengths = torch.full((len(start),), n_source)
        n_states = lengths + n_pos - n_source  # CLS has no source
        real = None if seen.lengths is None else torch.arange(n_pos) < n_states[:, None]
        for layer, state in zip(self._layers, expected, strict=True):
            numbers = state if real is None else state[real.to(state.device)]
            check_finite(numbers, f"the {self._state} state of layer {layer}", seen.first)
        if self._may_be_edited and not self.through_hooks:
            self._check_start(model, seen, start)
        place = self._place(n_states, n_pos)
        rerun = Rerun(model, self.source_layer, self._layers, self._state, seen.tokens, real)
        hidden = nullcontext() if self.through_hooks else without_user_hooks(model)
        with own_pass(), hidden:
            influence = self._measure(model, rerun, start.clone(), expected, place, lengths).cpu()
        is_source = torch.arange(n_source) < lengths[:, None]
        exists = (place >= 0)[:, :, None] & is_source[:, None]
        self._influence.append(torch.where(exists, influence, 0).transpose(0, 1))
        self._places.append(place)
        self._lengths.append(lengths)
        self._n_positions = max(self._n_positions, n_pos)

    def _check_start(self, model: nn.Module, seen: Pass, start: Tensor) -> None:
        """Repeated passes begin with what was seen at the start, so they would hide an edit there.

        Raises:
            InfoFlowError: naming the hook point.
        """
        point = start_point(model, self.source_layer)
        same = False
        if seen.tokens is not None:
            with own_pass(), without_user_hooks(model):
                plain = run_catching(model, Batch(seen.tokens, seen.lengths), [point])[1][point]
            real = seen.is_real(start.shape[1]).to(start.device)
            gap = (plain[:, : start.shape[1]] - start)[real].float().norm(dim=-1)
            same = bool((gap <= tolerance(start) * start[real].float().norm(dim=-1) + _TINY).all())
        if not same:
            raise InfoFlowError(
                f"a hook of yours stands at {point}, where the sources enter, and changes what "
                "enters: influence would be that of the changed sources. Take it off and make the "
                "change in the inputs; one that does nothing when repeated can take part with "
                "through_hooks=True"
            )

    def _place(self, n_states: Int[Tensor, " batch"], n_pos: int) -> Int[Tensor, "batch asked"]:
        """The positions of the asked states in each sequence; -1 where it has none."""
        asked = torch.arange(n_pos) if self.positions is None else torch.tensor(self.positions)
        ends = n_states[:, None]
        place = torch.where(asked < 0, ends + asked, asked)
        return torch.where((place >= 0) & (place < ends), place, -1)

    def _check_rerun(
        self,
        values: Sequence[Tensor],
        expected: Sequence[Tensor],
        real: Bool[Tensor, "batch pos"] | None,
        first: int = 0,
    ) -> None:
        """Every state of every sequence must come out again, not only the large ones."""
        for layer, value, state in zip(self._layers, values, expected, strict=True):
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
                    "through_hooks=True; dropout, a key-value cache, or an attention_mask given to "
                    "run_with_hooks cannot: run in eval mode, whole sequences, and padded ones "
                    "with attach or run_probes"
                )

    def _merge(self, other: "StateInfluence") -> None:
        self._layers = other._layers
        self._influence.extend(other._influence)
        self._places.extend(other._places)
        self._lengths.extend(other._lengths)
        self._n_positions = max(self._n_positions, other._n_positions)

    def _result(self) -> InfluenceResult:
        influence = padded_together(self._influence, (2, 3), 0)
        return InfluenceResult(
            layers=self._layers,
            influence=influence.transpose(0, 1).contiguous(),
            positions=padded_together(self._places, (1,), -1),
            lengths=torch.cat(self._lengths),
            n_positions=self._n_positions,
            relative_error=self._relative_error(),
            record=self._run_record(),
            notes=self._notes(),
        )

    def _relative_error(self) -> tuple[float, ...] | None:
        return None

    def _notes(self) -> tuple[str, ...]:
        notes = super()._notes()
        if self.positions is None or not self._places:
            return notes
        lacking = (torch.cat(self._places) < 0).sum(dim=0).tolist()
        return notes + tuple(
            f"{count} of {self.n_sequences} sequences have no position {position}"
            for position, count in zip(self.positions, lacking, strict=True)
            if count
        )


_TINY = torch.finfo(torch.float32).tiny


def tolerance(state: Tensor) -> float:
    """How far a state may differ between two passes, relative to its norm."""
    half = state.dtype in (torch.float16, torch.bfloat16)
    return _RERUN_TOLERANCE_HALF if half else _RERUN_TOLERANCE


def _different_integers(values: Sequence[int] | None, name: str) -> tuple[int, ...] | None:
    if values is None:
        return None
    if isinstance(values, (int, str)) or not all(
        isinstance(value, int) and not isinstance(value, bool) for value in values
    ):
        raise InfoFlowError(f"{name} is {values!r}: expected integers, as in (0, 1), or None")
    chosen = tuple(values)
    if not chosen or len(set(chosen)) < len(chosen):
        raise InfoFlowError(f"{name} is {values!r}: expected at least one, each of them once")
    return chosen
