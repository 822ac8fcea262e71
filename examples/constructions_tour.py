"""Build every hand-made model, run it on its task, and compare its predicted and measured sets.

Run: python examples/constructions_tour.py   (seconds)
"""

import torch

from infoflow_lens import JacobianInfluence, compare, propagate, run_probes
from infoflow_lens.hooks import AttendedProbe
from infoflow_lens.studies.constructions import build_construction, list_constructions

# Small sizes, so that Jacobians take a moment only; hard maxima where the theorem takes a limit.
SIZES = {
    "depth_separation": {"attention": "hardmax", "ffn": "exact"},
    "d_retrieval": {"attention": "hardmax"},
    "intrinsic_dimension": {"attention": "hardmax"},
    "kth_largest": {"n_tokens": 8, "k": 3},
    "memorization": {"n_words": 6, "length": 4, "n_sequences": 50},
    "in_context_qa": {"n_questions": 5, "n_answers": 5, "n_pairs": 3},
    "in_context_qa_softmax": {"n_questions": 5, "n_answers": 5, "n_pairs": 3},
    "in_context_qa_one_layer": {"n_questions": 5, "n_answers": 5, "n_pairs": 3},
    "nested_qa": {"n_entities": 6, "hops": 2, "n_chains": 2},
    "template_matching": {"n_words": 6, "length": 3},
    "template_matching_one_layer": {"n_words": 6, "length": 3},
    "in_context_template_matching": {"n_words": 4, "length": 3, "n_answers": 4},
}

print(
    f"{'construction':<30}{'layers':>6}{'heads':>6}{'result':>22}{'AUROC':>7}{'active inside':>15}"
)
for name in list_constructions():
    if name in ("instructive_attention", "constrained_attention"):
        continue  # single layers that a theorem is put together from
    model, task = build_construction(name, **SIZES.get(name, {}))
    x, y = task.sample(200, seed=0)
    with torch.no_grad():
        output = model(x)
    if task.input_kind == "tokens":
        right = (output[:, -1].argmax(dim=1) == y).float().mean()
        result = f"{right:.0%} right"
    else:
        result = f"largest error {float((output - y).abs().max()):.1e}"

    attended, influence = run_probes(
        model, x[:30], [AttendedProbe(), JacobianInfluence("resid_post")], progress=False
    )
    predicted = propagate(attended.positions, task.n_tokens)
    agreement = compare(
        predicted,
        influence.influence[..., : task.n_tokens],
        active=task.active_index_set(x[:30]),
    )
    auroc = agreement.cls.auroc  # not a number where the last state holds everything
    print(
        f"{name:<30}{model.cfg.n_layers:>6}{max(len(b.attn.W_Q) for b in model.blocks):>6}"
        f"{result:>22}{'all' if auroc != auroc else f'{auroc:.3f}':>7}{agreement.coverage:>15.0%}"
    )

# Theorem 6 rules answers out: its last state holds every block but the matching one, which is
# enough to know the answer, but is not the set of the matching block that counts as active here.

model, task = build_construction("in_context_qa", **SIZES["in_context_qa"])
x, _ = task.sample(1, seed=1)
print("\n" + task.render(x, answer=True)[0])
_, cache = model.run_with_cache(x)
for layer in range(2):
    keys = cache["pattern", layer][0, 0, -1].nonzero()[:, 0].tolist()
    print(f"layer {layer}: the last position draws from positions {keys}")
