"""How many positions must a head pass on until the sets hold what the states depend on?

Run: python examples/coverage_curve.py   (seconds)

Two models of the same size: one built to retrieve four tokens by four heads, where one position a
head is all there is (the paper's claim), and one with random weights, where attention is spread.
"""

from infoflow_lens import JacobianInfluence, PositionsProbe, build_model, run_probes
from infoflow_lens.agreement import coverage_curve
from infoflow_lens.studies.constructions import build_construction

built, task = build_construction("d_retrieval", n_tokens=12, seed=0)
random = build_model(built.architecture, seed=0)
x, _ = task.sample(64, seed=1)

for name, model in (("built", built), ("random", random)):
    positions, influence = run_probes(
        model, x, [PositionsProbe(range(1, 7)), JacobianInfluence()], progress=False
    )
    curve = coverage_curve(positions.positions, influence)
    print(f"\n{name}: share of influence inside the sets if heads pass their k largest positions")
    print(curve.to_frame().to_string(index=False, float_format="{:.3f}".format))
