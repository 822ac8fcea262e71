"""Passes that begin at a position: keys and values of the positions before it are kept.

The model itself reads them, as it does when it generates (``past_key_values`` of transformers).
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from infoflow_lens.hooks.model.call import call
from infoflow_lens.hooks.model.inputs import Batch

_CACHE = "past_key_values"


@dataclass(frozen=True)
class Continuation(Batch):
    """The last tokens of some sequences, of which the model knows the first by keys and values.

    Attributes:
        cache: of the first tokens, in as many rows; the model adds to it.
    """

    cache: Any = None

    def run(self, model: nn.Module, device: torch.device | None = None) -> Any:
        """Run the model on these tokens, which see those before."""
        device = device or next(model.parameters()).device
        return model(self.tokens.to(device), **{_CACHE: self.cache}, use_cache=True)


class Prefix:
    """Keys and values of a text, of which any first part may stand before other tokens.

    Args:
        layers: keys and values [1, head, pos, d_head] of each attention.
    """

    def __init__(self, layers: list[tuple[Tensor, Tensor]]) -> None:
        self._layers = layers

    @classmethod
    @torch.no_grad()
    def find(cls, model: nn.Module, tokens: Int[Tensor, "1 pos"]) -> "Prefix | None":
        """Run a text and keep its keys and values; None of a model that does not give them."""
        original = getattr(model, "original_model", None)
        if original is None or _CACHE not in inspect.signature(original.forward).parameters:
            return None
        from transformers import DynamicCache

        cache = DynamicCache()
        try:
            # an empty cache, which the model fills
            call(model, Continuation(tokens, cache=cache), output=True)
            layers: list[Any] = [(layer.keys, layer.values) for layer in list[Any](cache.layers)]
        except (RuntimeError, TypeError, AttributeError, LookupError, ValueError):
            return None  # it wants a cache of another kind
        n_pos = tokens.shape[1]
        # layers that keep a window of keys alone have too few for all first parts
        if not layers or any(not isinstance(k, Tensor) or k.shape[2] != n_pos for k, _ in layers):
            return None
        return cls(layers)

    def continue_with(self, tokens: Int[Tensor, "row rest"], first: int) -> Continuation:
        """Put tokens behind the first ones of the text.

        Args:
            tokens: those from position `first` on.
            first: how many stand before.
        """
        from transformers import DynamicCache

        cache = DynamicCache(
            [
                tuple(part[:, :, :first].expand(len(tokens), -1, -1, -1) for part in layer)
                for layer in self._layers
            ]
        )
        return Continuation(tokens, cache=cache)
