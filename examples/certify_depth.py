"""Ask, for a set of labelled sequences, whether one attention layer can fit it, and see the proof.

Run: python examples/certify_depth.py   (seconds)
"""

import torch

from infoflow_lens import load_task
from infoflow_lens.studies.certificates.separability import (
    check_witness,
    dependence,
    one_layer_certificate,
)
from infoflow_lens.studies.constructions import build_construction, certified_model

# Two questions, two answers: the eight sequences of the smallest reasoning task.
task = load_task("in_context_qa", n_questions=2, n_answers=2, n_pairs=2)
x, y = task.all_sequences()
certificate = one_layer_certificate((x, y))
print(certificate.describe(), "\n")

print("The witness: these sequences cannot all be right, for their logits cancel.")
for row in certificate.witness.support:
    weights = certificate.witness.dense()[row].tolist()
    print(f"  {task.render(x[row : row + 1], answer=True)[0]:<28} times {weights}")
print(f"  checked in integers: {check_witness(x, y, certificate.witness)}\n")

# More heads of softmax attention do what no number of ReLU heads does.
model, _ = build_construction("in_context_qa_one_layer", n_questions=2, n_answers=2, n_pairs=2)
right = (model(x)[:, -1].argmax(dim=1) == y).float().mean()
print(f"one softmax layer with {model.cfg.n_heads} heads: {right:.0%} right\n")

# Dependence alone (Prop 7) is no obstruction: memorized sequences are dependent, and fitted.
task = load_task("memorization", n_words=3, length=3, n_sequences=20)
x, y = task.all_sequences()
found = dependence(x)
certificate = one_layer_certificate(task.dataset("train", 500))
print(f"20 stored sequences: rank {found.rank}, {found.n_dependences} dependences")
print(certificate.describe())
logits = certified_model(certificate)(x)[:, -1]
labels = torch.tensor(certificate.classes)
right = (labels[logits.argmax(dim=1)] == y).float().mean()
print(f"hosted: {right:.0%} right")
combined = found.combine(logits.detach())
print(f"the dependence holds for its logits (Prop 8): {float(combined.abs().max()):.1e}\n")

# Templates need two layers for all substitutions, not for a few of them.
task = load_task("template_matching", n_words=20, length=3)
x, y = task.sample(2000, seed=0)
few = torch.cat([(y == label).nonzero()[:10, 0] for label in range(task.n_labels)])
for name, rows in (("10 substitutions a template", few), ("2000 sequences", slice(None))):
    verdict = one_layer_certificate((x[rows], y[rows])).feasible
    print(f"templates of three words, {name}: one layer {'fits' if verdict else 'cannot fit'}")
