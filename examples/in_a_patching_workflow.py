"""Beside TransformerLens's patching tools: which patches can matter at all?

Run: python examples/in_a_patching_workflow.py   (seconds)

Activation patching tries every position of every layer. The information set of the last state
says beforehand which positions can reach it, so patches elsewhere should do nothing; and the
mechanisms say what each head contributes.
"""

import torch
from transformer_lens import patching

from infoflow_lens import PositionsProbe, propagate, run_probes
from infoflow_lens.hooks import measure_mechanisms
from infoflow_lens.studies.constructions import build_construction

# A model that answers a question from context: the same questions with other answers.
model, task = build_construction("in_context_qa_softmax", n_questions=8, n_answers=8, n_pairs=3)
model.eval()  # TransformerLens's patching asks for it
x, y = task.sample(64, seed=0)
clean, answer = x[:1], int(y[0])
other, _ = task.sample(1, seed=3)
corrupted = clean.clone()
corrupted[:, 2:9:3] = other[:, 2:9:3]
print("clean:    ", task.render(clean)[0])
print("corrupted:", task.render(corrupted)[0])

# What the last state of the corrupted run can hold, from the model's own attention.
(positions,) = run_probes(model, corrupted, [PositionsProbe()], progress=False)
sets = propagate(positions.argmax)
print(f"\nthe last state can hold positions {sorted(sets.of(1, 0, corrupted.shape[1] - 1))}")

# Patch what enters the first layer, position by position, from the clean run.
_, clean_cache = model.run_with_cache(clean)


def answer_logit(logits):
    """How far the clean answer is above the others' mean."""
    return logits[0, -1, answer] - logits[0, -1].mean()


with torch.no_grad():
    effect = patching.get_act_patch_resid_pre(model, corrupted, clean_cache, answer_logit)
    base = answer_logit(model(corrupted))
moved = (effect[0] - base).abs().tolist()
changed = [position for position, value in enumerate(moved) if value > 1e-3]
print(
    f"patching changes the answer at positions {changed}, by {[f'{moved[i]:.2f}' for i in changed]}"
)
differ = (clean != corrupted)[0].nonzero().flatten().tolist()
print(f"though the prompts differ at positions {differ}\n")

# And what each head needs, over many prompts.
mechanisms = measure_mechanisms(model, x, read=(-1,), progress=False)
print(mechanisms.to_frame().iloc[:, :8].to_string(index=False, float_format="{:.3f}".format))
