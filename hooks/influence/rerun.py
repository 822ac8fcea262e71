"""A forward pass again, from where sources enter: on changed sources, and only as far as needed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from infoflow_lens.hooks.model.inputs import mask_argument
from infoflow_lens.hooks.model.points import (
    TOKENS,
    hook_name,
    is_bridge,
    layer_count,
    reads_vectors,
    starts_at_layers,
    token_hook,
    unmasked,
)
from infoflow_lens.hooks.model.shown import state_hooks, state_sum
from infoflow_lens.hooks.passes.own import AllSeenError

# numbers in the largest tensor of a pass: on a CPU, larger passes leave the caches and are slower
_ROOM_CPU, _ROOM_GPU = 2**21, 2**26


def rows_at_once(model: nn.Module, n_pos: int, d_model: int, device: torch.device) -> int:
    """How many sequences of this length a pass should hold, by the size of its largest tensor."""
    heads = getattr(getattr(model, "cfg", None), "n_heads", None) or 8
    room = _ROOM_CPU if device.type == "cpu" else _ROOM_GPU
    return max(1, room // (n_pos * max(4 * d_model, int(heads) * n_pos)))


class KeysAndValues:
    """Keys and values of a pass, with the interface of TransformerLens's key-value cache.

    A new one records what a pass computes; :meth:`before` gives a fixed one that holds the first
    positions of some sequences.
    """

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._layers: dict[int, _Layer] = {}
        self._prefix: tuple[Tensor, int] | None = None

    def __getitem__(self, layer: int) -> "_Layer":
        if self._prefix is None:
            return self._layers.setdefault(layer, _Layer(self._batch))
        sequences, length = self._prefix
        return self._layers[layer].before(sequences, length)

    def before(self, sequences: Int[Tensor, " row"], length: int) -> "KeysAndValues":
        """What these sequences have before position `length`."""
        part = KeysAndValues(len(sequences))
        part._layers, part._prefix = self._layers, (sequences, length)
        return part


class _Layer:
    def __init__(
        self, batch: int, keys: Tensor | None = None, values: Tensor | None = None
    ) -> None:
        self.past_keys = torch.empty(batch, 0) if keys is None else keys
        self.past_values = values
        self._records = keys is None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of all positions, as the attention asks for them."""
        if self._records:
            self._keys, self._values = keys, values
            return keys, values
        assert self.past_values is not None
        return (
            torch.cat([self.past_keys, keys], dim=1),
            torch.cat([self.past_values, values], dim=1),
        )

    def before(self, sequences: Tensor, length: int) -> "_Layer":
        rows = sequences.to(self._keys.device)
        return _Layer(len(rows), self._keys[rows, :length], self._values[rows, :length])


def start_point(model: nn.Module, source_layer: int | None) -> str:
    """The hook point where sources enter."""
    if source_layer is None and reads_vectors(model):
        return token_hook(model)
    return hook_name(model, f"blocks.{source_layer or 0}.hook_resid_pre")


@dataclass(frozen=True, eq=False)
class Rerun:
    """States as a function of what enters at the sources.

    A HookedTransformer starts at a layer; what cannot (bridges, encoders, shortformer, whose
    positions enter every layer) runs whole, with the activation at the start replaced.

    Attributes:
        model: the model.
        source_layer: None for the tokens, else the layer whose resid_pre is the source.
        layers: whose states are wanted.
        state: "post_attention" or "resid_post".
        tokens: the ids of the sequences, for passes that run whole; None if unknown.
        real: which positions are no padding; None where nothing is padded.
    """

    model: nn.Module
    source_layer: int | None
    layers: tuple[int, ...]
    state: str
    tokens: Tensor | None = None
    real: Bool[Tensor, "batch pos"] | None = None

    @property
    def runs_whole(self) -> bool:
        """Whether passes cannot start where the sources enter."""
        return not starts_at_layers(self.model) or is_shortformer(self.model)

    def __call__(
        self,
        start: Float[Tensor, "row position d_source"],
        sequences: Int[Tensor, " row"] | None = None,
        cache: KeysAndValues | None = None,
        also: Sequence[tuple[str, Callable[..., None]]] = (),
    ) -> tuple[Tensor, ...]:
        """The states of all wanted layers.

        Args:
            start: what enters at the sources.
            sequences: of which sequence each row is a copy; default, all in their order.
            cache: what earlier positions left, or what records it.
            also: further hooks.
        """
        wanted = [state_hooks(self.model, layer, self.state) for layer in self.layers]
        missing = {name for names in wanted for name in names}
        caught: dict[str, Tensor] = {}
        stops = not is_bridge(self.model)  # bridges have contexts of their own to leave

        def catch(name: str) -> Callable[..., None]:
            def hook_fn(activation: Tensor, hook: Any) -> None:
                caught[name] = activation
                missing.discard(name)
                if stops and not missing:
                    raise AllSeenError

            return hook_fn

        hooks = [(name, catch(name)) for name in tuple(missing)]
        with (
            self._entering(start),
            self.model.hooks(fwd_hooks=[*hooks, *also]),  # type: ignore[operator]
            suppress(AllSeenError),
        ):
            self._run(start, sequences, cache)
        return tuple(state_sum(caught, names) for names in wanted)

    @contextmanager
    def _entering(self, start: Tensor) -> Iterator[None]:
        """Passes that run whole have this at the start, before hooks of the user's act on it."""
        if not self.runs_whole:
            yield
            return
        points: Mapping[str, nn.Module] = self.model.hook_dict  # type: ignore[assignment]
        handle = points[start_point(self.model, self.source_layer)].register_forward_pre_hook(
            lambda module, inputs: (start,), prepend=True
        )
        try:
            yield
        finally:
            handle.remove()

    def _run(self, start: Tensor, sequences: Tensor | None, cache: KeysAndValues | None) -> None:
        if self.runs_whole:
            self.model(self._ids(start, sequences), **self._arguments(start, sequences))
        elif start_point(self.model, self.source_layer) == TOKENS:
            self.model(start)
        else:
            given = {} if cache is None else {"past_kv_cache": cache}
            self.model(start, start_at_layer=self.source_layer or 0, return_type=None, **given)

    def _ids(self, start: Tensor, sequences: Tensor | None) -> Tensor:
        if self.tokens is None:
            return torch.zeros(start.shape[:2], dtype=torch.long, device=start.device)
        tokens = self.tokens.to(start.device)
        return tokens if sequences is None else tokens[sequences]

    def _arguments(self, start: Tensor, sequences: Tensor | None) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if self.real is not None:
            real = self.real.to(device=start.device, dtype=torch.long)
            arguments[mask_argument(self.model)] = real if sequences is None else real[sequences]
        after = max(self.layers) + 1
        if is_bridge(self.model) and after < layer_count(self.model):
            arguments["stop_at_layer"] = after
        return arguments

    def recording(
        self, start: Float[Tensor, "batch position d_source"]
    ) -> tuple[tuple[Tensor, ...], KeysAndValues | None]:
        """The states, and the keys and values that later passes can share, or None.

        In a causal model the positions before a replaced source need not be computed again. The
        scores show whether the model is causal; one that is bidirectional by its config is not.
        """
        direction = getattr(getattr(self.model, "cfg", None), "attention_dir", "causal")
        if direction == "bidirectional":
            return self(start), None
        if self.runs_whole or start_point(self.model, self.source_layer) == TOKENS:
            return self(start), None
        masked: list[bool] = []

        def look(activation: Tensor, hook: Any) -> None:
            square = activation.shape[-1] == activation.shape[-2]
            masked.append(square and not bool(unmasked(activation).triu(1).any()))

        n_layers = max(self.layers) + 1
        layers = range(self.source_layer or 0, n_layers)
        known = self.model.hook_dict
        names = [f"blocks.{layer}.attn.hook_attn_scores" for layer in layers]
        if any(name not in known for name in names):  # type: ignore[operator]
            return self(start), None
        cache = KeysAndValues(len(start))
        values = self(start, cache=cache, also=[(name, look) for name in names])
        return values, cache if len(masked) == len(names) and all(masked) else None


def is_shortformer(model: nn.Module) -> bool:
    """Whether positions enter every layer aside of the residual stream."""
    cfg = getattr(model, "cfg", None)
    return getattr(cfg, "positional_embedding_type", None) == "shortformer"


def at_places(
    values: Float[Tensor, "batch pos d"], place: Int[Tensor, "batch asked"]
) -> Float[Tensor, "batch asked d"]:
    """What stands at these positions; anything where they are negative."""
    index = place.clamp(min=0).to(values.device)[:, :, None]
    return values.gather(1, index.expand(-1, -1, values.shape[2]))
