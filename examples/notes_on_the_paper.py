"""The counterexamples of the notes on InfoFlow, run: a chain, definite matrices, a tighter code.

Run: python examples/notes_on_the_paper.py   (less than a minute)
"""

import math

import torch

from infoflow_lens import build_construction, estimate, load_task
from infoflow_lens.studies.bounds import softmin_gap, triangle_limit
from infoflow_lens.tasks import Target
from infoflow_lens.theory import Component, DigitCode

print("1. Proposition 2: max x'Ay + y'Bz has order 3, and heads (2, 1) compute it for every T")
for n_tokens, n in ((24, 40), (64, 20), (256, 2)):
    errors = []
    for attention, beta in (("hardmax", 1.0), ("softmax", 1000.0)):
        model, task = build_construction(
            "best_tree", n_tokens=n_tokens, attention=attention, beta=beta
        )
        model.to(torch.float64, print_details=False)
        x = task.inputs(n, seed=0).double()
        first, last = (x @ a.double() @ x.mT for a in task.matrices)  # [x, y] and [y, z]
        triples = first.unsqueeze(-1) + last.unsqueeze(1)  # all T^3
        with torch.no_grad():
            errors.append(float((triples.flatten(1).amax(1) - model(x)[:, 0]).abs().max()))
    bound = 3 * softmin_gap(n_tokens, 1000.0)
    print(f"   T = {n_tokens}: hard {errors[0]:.0e}, beta 1000 {errors[1]:.1e} (bound {bound:.1e})")
chain = load_task("best_tree", n_tokens=24)
for heads in ((2, 1), (1, 8)):
    found = estimate(chain, heads)
    print(f"   heads {heads}: {found.verdict}")
print(f"   the triangle is proved out for two layers of (2, 1) from T = {triangle_limit(2, 1)}")

print("2. Proposition 1, lower half: D positive definite matrices need no pair")
roots = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0))


def form(a: torch.Tensor) -> Component:
    return Component(2, lambda x: ((x[..., 0, :] @ a) * x[..., 1, :]).sum(dim=-1))


definite = Target(components=tuple(form(r @ r.T) for r in roots), n_tokens=64, d_token=4)
alike = Target(components=(form(roots[0]), form(roots[0].T)), n_tokens=64, d_token=4)
print(f"   three definite ones, heads (3,): {estimate(definite, (3,)).verdict}")
print(f"   A and its transpose, heads (1, 1): {estimate(alike, (1, 1)).verdict}")

print("3. Theorem 3: one coordinate in each number stays analog")
x = torch.rand(2000, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
for n_latents in (3, 2, 1):
    bits = (3, 6) if n_latents == 3 else (1, 2)
    codes = [DigitCode(4, n_latents, b, analog=True) for b in bits]
    errors = [float((code.decode(code.encode(x)) - x).abs().max()) for code in codes]
    units = [code.decoder_units for code in codes]
    slope = math.log(units[1] / units[0]) / math.log(errors[0] / errors[1])
    print(f"   rd/E = {4 / n_latents:.3g}: decoder exponent {slope:.2f}")
