"""Put probes on a model while your own loop runs it, and look at what they found.

Run: python examples/attach_in_your_own_loop.py   (seconds)
"""

import torch
from transformer_lens import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge

from infoflow_lens import PositionsProbe, RecoveryProbe, attach

torch.manual_seed(0)
model = TransformerBridge.boot_native(  # with TransformerLens 3, HookedTransformer(...) as well
    TransformerBridgeConfig(
        n_layers=2, n_heads=4, d_model=32, d_head=8, n_ctx=24, d_vocab=50, act_fn="gelu"
    )
)
loader = torch.utils.data.DataLoader(torch.randint(50, (400, 24)), batch_size=64)

# Every fifth sequence is held out for the recovery errors, whatever the batch size.
with attach(model, PositionsProbe((1, 2)), RecoveryProbe((1, 2))) as probes, torch.no_grad():
    for batch in loader:
        model(batch)  # your own work goes on as usual
positions, recovery = probes.results()

print(recovery.to_frame().to_string(index=False, float_format="{:.3f}".format))
first = positions.positions[0][0, 0, -1].tolist()
print(f"\nlayer 0, head 0 looks from the last token of sequence 0 at positions {first}")

# Or say yourself which sequences fit and which evaluate.
probe = RecoveryProbe((1,))
with attach(model, probe) as probes, torch.no_grad():
    with probes.fitting():
        model(torch.randint(50, (256, 24)))
    with probes.evaluating():
        model(torch.randint(50, (64, 24)))
result = probe.result()
print(f"fitted on {result.n_fit[0]} rows, evaluated on {result.n_eval[0]}")
