"""Put probes on a model while your own loop runs it, and look at what they found.

Run: python examples/attach_in_your_own_loop.py   (seconds)
"""

import torch

from infoflow_lens import PositionsProbe, RecoveryProbe, attach
from infoflow_lens.studies.constructions import build_construction

# Answers a question from its context by copying and matching. Your own model goes here.
model, task = build_construction("in_context_qa_softmax", n_questions=8, n_answers=8, n_pairs=3)
tokens, _ = task.sample(400, seed=0)
loader = torch.utils.data.DataLoader(tokens, batch_size=64)

# Every fifth sequence is held out for the recovery errors, whatever the batch size.
with attach(model, PositionsProbe((1, 2)), RecoveryProbe((1, 2))) as probes, torch.no_grad():
    for batch in loader:
        model(batch)  # your own work goes on as usual
positions, recovery = probes.results()

# fvu near 0: the head of the first layer passes on the token that it looks at most, and no other
print(recovery.to_frame().to_string(index=False, float_format="{:.3f}".format))
first = positions.positions[0][0, 0, -1].tolist()
print(f"\nsequence 0 is {task.render(tokens[:1])[0]}")
print(f"layer 0, head 0 looks from the last token at positions {first}")

# Or say yourself which sequences fit and which evaluate.
probe = RecoveryProbe((1,))
with attach(model, probe) as probes, torch.no_grad():
    with probes.fitting():
        model(task.sample(256, seed=1)[0])
    with probes.evaluating():
        model(task.sample(64, seed=2)[0])
result = probe.result()
print(f"fitted on {result.n_fit[0]} rows, evaluated on {result.n_eval[0]}")
