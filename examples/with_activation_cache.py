"""Probe forward passes that you have already made, from their ActivationCache.

Run: python examples/with_activation_cache.py   (seconds)
"""

from infoflow_lens import PositionsProbe, RecoveryProbe, propagate
from infoflow_lens.hooks import probe_cache
from infoflow_lens.studies.constructions import build_construction

# Answers a question from its context by copying and matching. Your own model goes here.
model, task = build_construction("in_context_qa_softmax", n_questions=8, n_answers=8, n_pairs=3)
tokens, _ = task.sample(400, seed=0)

# Your own analysis makes a cache for its own reasons ...
probes = [PositionsProbe((1, 2)), RecoveryProbe((1, 2))]
for batch in tokens.split(100):
    logits, cache = model.run_with_cache(batch)
    last = cache["blocks.1.hook_resid_post"][:, -1]
    print(f"norm of the last states {last.norm(dim=-1).mean():.3f}")
    # ... and the probes go on with it: no second pass, in batches as they come.
    positions, recovery = probe_cache(model, cache, probes, tokens=batch)

# fvu near 0: the head of the first layer passes on the token that it looks at most, and no other
print(recovery.to_frame().to_string(index=False, float_format="{:.3f}".format))
sizes = propagate(positions.argmax).sizes().double().mean(dim=(1, 2))
print("mean size of predicted sets:", [f"{size:.1f}" for size in sizes])
