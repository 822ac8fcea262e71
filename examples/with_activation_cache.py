"""Probe forward passes that you have already made, from their ActivationCache.

Run: python examples/with_activation_cache.py   (seconds)
"""

import torch
from transformer_lens import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge

from infoflow_lens import PositionsProbe, RecoveryProbe, probe_cache, propagate

torch.manual_seed(0)
model = TransformerBridge.boot_native(  # with TransformerLens 3, HookedTransformer(...) as well
    TransformerBridgeConfig(
        n_layers=2, n_heads=4, d_model=32, d_head=8, n_ctx=24, d_vocab=50, act_fn="gelu"
    )
)
tokens = torch.randint(50, (400, 24))

# Your own analysis makes a cache for its own reasons ...
probes = [PositionsProbe((1, 2)), RecoveryProbe((1, 2))]
for batch in tokens.split(100):
    logits, cache = model.run_with_cache(batch)
    last = cache["blocks.1.hook_resid_post"][:, -1]
    print(f"norm of the last states {last.norm(dim=-1).mean():.3f}")
    # ... and the probes go on with it: no second pass, in batches as they come.
    positions, recovery = probe_cache(model, cache, probes, tokens=batch)

print(recovery.to_frame().to_string(index=False, float_format="{:.3f}".format))
sizes = propagate(positions.argmax).sizes().double().mean(dim=(1, 2))
print("mean size of predicted sets:", [f"{size:.1f}" for size in sizes])
