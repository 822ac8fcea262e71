"""Ask what an architecture must pay for a target before you train it.

Run: python examples/estimate_before_training.py   (seconds)
"""

from infoflow_lens import Architecture, estimate, load_task
from infoflow_lens.theory.estimate import phase_diagram

# The best pair for each of four matrices; do (4, 4) heads do it, and what do (2, 4) cost?
task = load_task("intrinsic_dimension", n_tokens=64, d_token=4, n_components=4, seed=0)
for heads in ((4, 4), (2, 4)):
    architecture = Architecture(n_heads=heads, d_model=32, d_token=4, n_tokens=64)
    found = estimate(architecture, task)
    print(f"heads {heads}: max-position retrieval alone: {found.verdict}")
    print(f"  some |I| >= {found.min_information}; |I| <= {found.upper_information} is enough")
    least, enough = found.lower["certified"], found.upper["law"]
    print(f"  parameters between eps^-{least:g} and eps^-{enough:g}")
    print(f"  schedule: {found.schedule.describe()}")

# The same with the lower bound that is proved, instead of the paper's count: little is excluded.
proved = estimate(
    Architecture(n_heads=(2, 4), d_model=32, d_token=4, n_tokens=64), task, count="proved"
)
print(f"\nheads (2, 4) by the proved count: {proved.verdict}")
print("mind:", *proved.flags, sep="\n  - ")

print("\nwhich (h_1, 4) and T are excluded by the count (x), allowed (o), without schedule (.)")
rows = phase_diagram(task, [(first, 4) for first in range(1, 7)], [16, 32, 64, 128])
signs = {"excluded by the paper's count": "x", "allowed by construction": "o", "open": "."}
signs["excluded, proved"] = "X"
for first in range(1, 7):
    row = " ".join(signs[r["verdict"]] for r in rows if r["heads"][0] == first)
    print(f"  h_1 = {first}:  {row}")
