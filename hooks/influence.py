"""Which inputs a state does depend on: Jacobians, resample ablation, and the sets they give."""

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from infoflow_lens.hooks.capabilities import (
    check_finite,
    check_inputs,
    hook_name,
    layer_count,
    reads_vectors,
    starts_at_layers,
    state_hooks,
    state_sum,
    token_hook,
)
from infoflow_lens.hooks.own import own_pass
from infoflow_lens.hooks.passes import Pass
from infoflow_lens.hooks.probe import Probe
from infoflow_lens.hooks.result import Result
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.record import fingerprint
from infoflow_lens.theory.information_sets import InformationSets

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

_RERUN_TOLERANCE = 1e-3
_RERUN_TOLERANCE_HALF = 5e-2  # bfloat16 has 8 bits, and batched kernels round differently


@contextmanager
def without_user_hooks(model: nn.Module) -> Iterator[None]:
    """The model with its permanent hooks only (those that belong to it), for the block's length."""
    points = list(model.hook_dict.values())  # type: ignore[operator]
    saved = [point._forward_hooks for point in points]
    for point, hooks in zip(points, saved, strict=True):
        permanent = [handle.hook.id for handle in point.fwd_hooks if handle.is_permanent]
        point._forward_hooks = OrderedDict((key, hooks[key]) for key in permanent if key in hooks)
    try:
        yield
    finally:
        for point, hooks in zip(points, saved, strict=True):
            point._forward_hooks = hooks


@dataclass(frozen=True, eq=False, kw_only=True)
class InfluenceResult(Result):
    """Influence of every source on every state.

    Attributes:
        layers: the layers, in the order of the first axis.
        influence: float [layer, batch, pos, source]: the Frobenius norm of d state(layer, pos) /
            d source, or how far the state moves when the source is replaced by another sample's,
            depending on the probe (``record.config["probe"]``).
    """

    layers: tuple[int, ...]
    influence: Float[Tensor, "layer batch pos source"]

    def sets(self, threshold: float = 0.1) -> InformationSets:
        """Measured information sets: the sources of at least `threshold` times the largest
        influence on that state.

        Raises:
            InfoFlowError: unless ``0 < threshold <= 1``.
        """
        return influence_sets(self.influence, threshold)

    def to_frame(self) -> "pd.DataFrame":
        """One row for each layer, sample, position and source."""
        import pandas as pd

        layer, sample, position, source = (
            index.flatten().numpy()
            for index in torch.unravel_index(
                torch.arange(self.influence.numel()), self.influence.shape
            )
        )
        return pd.DataFrame(
            {
                "layer": torch.tensor(self.layers)[layer].numpy(),
                "sample": sample,
                "position": position,
                "source": source,
                "influence": self.influence.flatten().numpy(),
            }
        )

    def plot(self, sample: int = 0) -> "go.Figure":
        """Heat maps of one sequence, a panel for each layer."""
        import plotly.express as px

        return px.imshow(
            self.influence[:, sample].numpy(),
            facet_col=0,
            labels={"x": "source", "y": "position", "color": "influence", "facet_col": "layer"},
            title=f"{self.record.config.get('probe', 'Influence')}, sequence {sample}",
        )


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
    check_threshold(threshold)
    largest = influence.amax(dim=-1, keepdim=True)
    return InformationSets((influence >= threshold * largest) & (influence > 0))


class StateInfluence(Probe[InfluenceResult]):
    """What measures of influence share: states as a function of the tokens, in passes of their own.

    These passes run without your hooks, so that hooks which store or count see nothing of them, and
    must reproduce the states of the pass that you made: if a hook of yours changes them, this is
    refused, unless `through_hooks` lets your hooks take part. Sequences of a batch run together,
    which is right as long as they do not read one another, and hooks may break that.

    What it keeps grows with the sequences, since every one has its own result.
    """

    def __init__(
        self, state: str, source_layer: int | None, chunk_size: int, through_hooks: bool
    ) -> None:
        super().__init__()
        if state not in ("post_attention", "resid_post"):
            raise InfoFlowError(f"state is {state!r}: expected 'post_attention' or 'resid_post'")
        self.state = state
        self.source_layer = source_layer
        if chunk_size < 1:
            raise InfoFlowError(f"chunk_size is {chunk_size}: expected at least 1")
        self.chunk_size = chunk_size
        self.through_hooks = through_hooks
        self._layers: tuple[int, ...] = ()
        self._influence: list[Tensor] = []

    def config(self) -> Mapping[str, Any]:
        """The settings, as JSON-compatible values."""
        return {
            "state": self.state,
            "source_layer": self.source_layer,
            "through_hooks": self.through_hooks,
        }

    @abstractmethod
    def _measure(
        self,
        model: nn.Module,
        states: Callable[[Tensor], tuple[Tensor, ...]],
        start: Float[Tensor, "batch position d_source"],
        expected: list[Float[Tensor, "batch pos d_model"]],
    ) -> Float[Tensor, "layer batch pos source"]:
        """The influence of every source on every state of a batch."""

    def _hook_points(self, model: nn.Module) -> tuple[str, ...]:
        n_layers = layer_count(model)
        if self.source_layer is not None and not 0 <= self.source_layer < n_layers:
            raise InfoFlowError(
                f"source_layer is {self.source_layer}: expected 0 to {n_layers - 1}, or None"
            )
        cfg = getattr(model, "cfg", None)
        if getattr(cfg, "positional_embedding_type", None) == "shortformer":
            raise InfoFlowError(
                "positional_embedding_type is 'shortformer', whose positions enter every layer "
                "aside of the residual stream: the forward pass cannot be repeated from it; "
                f"{type(self).__name__} does not support this model"
            )
        if not starts_at_layers(model):
            raise InfoFlowError(
                f"{type(model).__name__} cannot start at a layer: expected a HookedTransformer; "
                f"{type(self).__name__} does not support this model"
            )
        self._layers = tuple(range(self.source_layer or 0, n_layers))
        names = [self._start(model)]
        for layer in self._layers:
            names += state_hooks(model, layer, self.state)
        return tuple(names)

    def _start(self, model: nn.Module) -> str:
        """The hook point where repeated passes start from."""
        if self.source_layer is None and reads_vectors(model):
            return token_hook(model)
        return hook_name(model, f"blocks.{self.source_layer or 0}.hook_resid_pre")

    def _states(self, model: nn.Module) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """The states of all layers as a function of what flows through the start."""
        wanted = [state_hooks(model, layer, self.state) for layer in self._layers]
        from_tokens = self._start(model) == "hook_tokens"

        def states(start: Tensor) -> tuple[Tensor, ...]:
            caught: dict[str, Tensor] = {}

            def catch(activation: Tensor, hook: Any, *, name: str) -> None:
                caught[name] = activation

            hooks = [
                (name, lambda activation, hook, name=name: catch(activation, hook, name=name))
                for names in wanted
                for name in names
            ]
            with model.hooks(fwd_hooks=hooks):  # type: ignore[operator]
                if from_tokens:
                    model(start)
                else:
                    model(start, start_at_layer=self.source_layer or 0, return_type=None)
            return tuple(state_sum(caught, names) for names in wanted)

        return states

    def _update(self, model: nn.Module, seen: Pass) -> None:
        activations = seen.activations
        start = activations[self._start(model)]
        expected = [
            state_sum(activations, state_hooks(model, layer, self.state)) for layer in self._layers
        ]
        for layer, state in zip(self._layers, expected, strict=True):
            check_finite(state, f"the {self.state} state of layer {layer}", self.n_sequences)
        hidden = nullcontext() if self.through_hooks else without_user_hooks(model)
        with own_pass(), hidden:
            influence = self._measure(model, self._states(model), start.clone(), expected)
        self._influence.append(influence.cpu())

    def _check_rerun(self, values: tuple[Tensor, ...], expected: list[Tensor]) -> None:
        """Every state of every sequence must come out again, not only the large ones."""
        for layer, value, state in zip(self._layers, values, expected, strict=True):
            half = state.dtype in (torch.float16, torch.bfloat16)
            gap = (value - state).float().norm(dim=-1)
            allowed = (_RERUN_TOLERANCE_HALF if half else _RERUN_TOLERANCE) * state.float().norm(
                dim=-1
            ) + torch.finfo(torch.float32).tiny
            if not (gap <= allowed).all():
                worst = int((gap / allowed).flatten().argmax())
                sequence, position = divmod(worst, state.shape[1])
                raise InfoFlowError(
                    f"repeating the forward pass changes the state of layer {layer} at position "
                    f"{position} of sequence {self.n_sequences + sequence}: expected the same "
                    "states. A hook of yours that changes activations can take part with "
                    "through_hooks=True; an attention_mask, dropout or a key-value cache cannot: "
                    "run single unpadded sequences in eval mode"
                )

    def _merge(self, other: "StateInfluence") -> None:
        self._layers = other._layers
        self._influence.extend(other._influence)

    def _result(self) -> InfluenceResult:
        return InfluenceResult(
            layers=self._layers,
            influence=torch.cat(self._influence, dim=1),
            record=self._run_record(),
            notes=self._notes(),
        )


class JacobianInfluence(StateInfluence):
    """Influence [layer, batch, pos, source]: the Frobenius norm of d state / d token.

    The state is the post-attention or the outgoing residual stream of each layer; the source is
    the input vector or, for models over token ids, the token's embedding, and with
    `source_layer`, what enters that layer at each position. Exact, by forward-mode
    differentiation of all sequences of the batch and `chunk_size` input directions at a time.

    Its passes are its own; see :class:`StateInfluence`.

    Args:
        state: "post_attention" (x'_l of eq 1) or "resid_post".
        source_layer: None for the tokens; l for ``resid_pre`` of layer l, and then layers from l.
        chunk_size: input directions per pass. More is faster and takes more memory.
        through_hooks: differentiate through hooks of yours. They then fire in every pass of the
            probe's, on tensors of torch.func.

    Raises:
        InfoFlowError: for an unknown state or layer, or a model whose forward pass cannot be
            repeated from its hooks.
    """

    def __init__(
        self,
        state: str = "post_attention",
        source_layer: int | None = None,
        chunk_size: int = 16,
        through_hooks: bool = False,
    ) -> None:
        super().__init__(state, source_layer, chunk_size, through_hooks)

    def _measure(
        self,
        model: nn.Module,
        states: Callable[[Tensor], tuple[Tensor, ...]],
        start: Float[Tensor, "batch position d_source"],
        expected: list[Float[Tensor, "batch pos d_model"]],
    ) -> Float[Tensor, "layer batch pos source"]:
        batch, n_source, d_source = start.shape
        directions = torch.eye(n_source * d_source, dtype=start.dtype, device=start.device)
        squares = start.new_zeros(
            len(expected), batch, expected[0].shape[1], n_source, dtype=torch.float32
        )
        if start.dtype == torch.float64:
            squares = squares.double()

        def derivative(direction: Tensor) -> tuple[Any, Any]:
            tangent = direction.view(1, n_source, d_source).expand_as(start)
            values, tangents = torch.func.jvp(states, (start,), (tangent,))[:2]
            return values, tangents

        column = 0
        for chunk in directions.split(self.chunk_size):
            values, tangents = torch.func.vmap(derivative, out_dims=(None, 0))(chunk)  # type: ignore[arg-type]
            if column == 0:
                self._check_rerun(values, expected)
            sources = torch.arange(column, column + len(chunk), device=start.device) // d_source
            for layer, tangent in enumerate(tangents):  # [direction, batch, pos, d_model]
                energy = tangent.to(squares.dtype).square().sum(dim=-1).permute(1, 2, 0)
                squares[layer].index_add_(2, sources, energy)
            column += len(chunk)
        return squares.sqrt()


class ResampleInfluence(StateInfluence):
    """Influence [layer, batch, pos, source]: how far a state moves when a token is replaced.

    The token of one position is replaced by that of a donor sequence at the same position, for all
    donors, and the norm of the change of every state is put together over donors. The state is the
    post-attention or the outgoing residual stream of each layer; the source is the input vector or,
    for models over token ids, the embedding (with its position), and with `source_layer`, what
    enters that layer. Unlike a derivative it sees what attention would do with another token.

    A donor's token may itself draw attention, for instance become the largest where the original
    token did not matter; then every source seems to have influence. The median over donors, or a
    low quantile, leaves that out; the mean does not, and gets worse with more donors.

    Its passes are its own; see :class:`StateInfluence`.

    Args:
        donors: other inputs of the same length, [donor, pos, d_token] or token ids [donor, pos];
            the same for every sequence, so that batches do not change the result. aggregate:
            "median", "mean", or a quantile from 0 to 1. state: "post_attention" (x'_l of eq 1) or
            "resid_post". source_layer: None for the tokens; l for ``resid_pre`` of layer l, and
            then layers from l. chunk_size: sequences with a replaced token in a pass.
            through_hooks: run through hooks of yours.

    Raises:
        InfoFlowError: for no donors, donors of another shape, an unknown aggregate, state or layer,
            or a model whose forward pass cannot be repeated from its hooks.
    """

    def __init__(
        self,
        donors: Shaped[Tensor, "donor pos *token"],
        aggregate: str | float = "median",
        state: str = "post_attention",
        source_layer: int | None = None,
        chunk_size: int = 2048,
        through_hooks: bool = False,
    ) -> None:
        super().__init__(state, source_layer, chunk_size, through_hooks)
        if not isinstance(donors, Tensor) or donors.ndim < 2 or len(donors) == 0:
            shape = tuple(donors.shape) if isinstance(donors, Tensor) else type(donors).__name__
            raise InfoFlowError(
                f"donors is {shape}: expected at least one sequence, [donor, pos, d_token] or "
                "token ids [donor, pos]"
            )
        if isinstance(aggregate, bool) or not (
            aggregate in ("median", "mean")
            or (isinstance(aggregate, (int, float)) and 0 <= aggregate <= 1)
        ):
            raise InfoFlowError(
                f"aggregate is {aggregate!r}: expected 'median', 'mean', or a quantile from 0 to 1"
            )
        self.donors = donors
        self.aggregate = aggregate

    def config(self) -> Mapping[str, Any]:
        """The settings, as JSON-compatible values."""
        return {
            **super().config(),
            "aggregate": self.aggregate,
            "n_donors": len(self.donors),
            "donors": fingerprint({"donors": self.donors}),
        }

    def _hook_points(self, model: nn.Module) -> tuple[str, ...]:
        check_inputs(model, self.donors, "donors")
        return super()._hook_points(model)

    def _donated(self, model: nn.Module) -> Float[Tensor, "donor position d_source"]:
        """What the donors have in the place of the sources."""
        device = next(model.parameters()).device
        name = self._start(model)
        with torch.no_grad():
            _, cache = model.run_with_cache(  # type: ignore[operator]
                self.donors.to(device), names_filter=name, return_cache_object=False
            )
        donated: Tensor = cache[name]
        return donated

    def _measure(
        self,
        model: nn.Module,
        states: Callable[[Tensor], tuple[Tensor, ...]],
        start: Float[Tensor, "batch position d_source"],
        expected: list[Float[Tensor, "batch pos d_model"]],
    ) -> Float[Tensor, "layer batch pos source"]:
        batch, n_source, _ = start.shape
        donated = self._donated(model)
        if donated.shape[1:] != start.shape[1:]:
            raise InfoFlowError(
                f"donors have {donated.shape[1]} positions, the sequences {n_source}: expected "
                "donors of the same length"
            )
        self._check_rerun(states(start), expected)
        n_pos = expected[0].shape[1]
        moved = torch.empty(len(donated), len(expected), batch, n_pos, n_source)
        pairs = torch.cartesian_prod(torch.arange(n_source), torch.arange(batch))
        for donor, tokens in enumerate(donated):
            for part in pairs.split(self.chunk_size):
                source, sequence = part.to(start.device).unbind(dim=1)
                replaced = start[sequence].clone()
                replaced[torch.arange(len(part)), source] = tokens[source]
                for layer, state in enumerate(states(replaced)):
                    change = (state - expected[layer][sequence]).float().norm(dim=-1).cpu()
                    moved[donor, layer, sequence.cpu(), :, source.cpu()] = change
        if self.aggregate == "mean":
            return moved.mean(dim=0)
        quantile = 0.5 if self.aggregate == "median" else float(self.aggregate)
        return moved.quantile(quantile, dim=0)
