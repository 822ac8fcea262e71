"""Name the mechanism of every head, and see how much influence the argmax alone explains.

Run: python examples/head_mechanisms.py   (seconds)
"""

from infoflow_lens import JacobianInfluence, PositionsProbe, compare, propagate, run_probes
from infoflow_lens.agreement import coverage_curve
from infoflow_lens.hooks import AttendedProbe, measure_mechanisms, replace_greedily
from infoflow_lens.studies.constructions import build_construction

# In-context question answering by copying and matching. Your own model goes here.
model, task = build_construction("in_context_qa_softmax", n_questions=8, n_answers=8, n_pairs=3)
x, _ = task.sample(200, seed=0)
print(task.render(x[:1], answer=True)[0], "\n")

# Each head's pattern is replaced by an ideal one; the answer is read at the last position.
mechanisms = measure_mechanisms(model, x, read=(-1,), progress=False)
print(mechanisms.to_frame().iloc[:, :8].to_string(index=False, float_format="{:.3f}".format))
joint = replace_greedily(model, x, mechanisms, budget=0.01, read=(-1,), progress=False)
print(f"\n{joint.share:.0%} of the heads replaced at once cost {joint.damage:.1e} nats")

# The sets that these mechanisms allow, against what the states depend on.
x = x[:40]
positions, attended, influence = run_probes(
    model,
    x,
    [PositionsProbe((1, 2, 3)), AttendedProbe(), JacobianInfluence("resid_post")],
    progress=False,
)
predicted = propagate(mechanisms.rules(attended.positions, positions.argmax))
agreement = compare(predicted, influence, active=task.active_index_set(x))
print(f"AUROC at the last position {agreement.cls.auroc:.3f}, coverage {agreement.coverage:.0%}")
print("\ninfluence inside the sets if every head passes its k largest positions")
curve = coverage_curve(positions, influence)
print(curve.to_frame().to_string(index=False, float_format="{:.3f}".format))
