"""Models of others, for benchmarks."""

import warnings
from typing import Any

import torch
import transformer_lens

from infoflow_lens.models.hooked import HAS_HOOKED_TRANSFORMER


def causal(
    n_layers: int,
    d_model: int,
    n_heads: int,
    n_ctx: int,
    d_vocab: int = 1000,
    act_fn: str = "gelu",
    device: str | None = None,
) -> Any:
    """A causal model over token ids with random weights, in evaluation mode.

    A HookedTransformer where TransformerLens has it, else a native bridge.
    """
    sizes = {
        "n_layers": n_layers,
        "d_model": d_model,
        "n_heads": n_heads,
        "d_head": d_model // n_heads,
        "n_ctx": n_ctx,
        "d_vocab": d_vocab,
        "act_fn": act_fn,
        "device": device,
    }
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.manual_seed(0)
        if HAS_HOOKED_TRANSFORMER:
            config = transformer_lens.HookedTransformerConfig(**sizes)
            return transformer_lens.HookedTransformer(config).eval()
        config = transformer_lens.TransformerBridgeConfig(**sizes)
        return transformer_lens.TransformerBridge.boot_native(config).eval()
