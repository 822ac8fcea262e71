"""What heads with several roles leave, for the table of docs/routing.md.

Run: python -m benchmarks.routing   (minutes)
"""

import torch

from infoflow_lens import load_task
from infoflow_lens.tasks import Target
from infoflow_lens.theory.comparison import Component
from infoflow_lens.theory.routing import routed_error


def rotations(n_components: int, n_tokens: int, d_token: int, seed: int) -> Target:
    """Best pairs under rotations, for which every token can reach the same score."""
    generator = torch.Generator().manual_seed(seed)

    def form(matrix):
        return lambda x: ((x[..., 0, :] @ matrix) * x[..., 1, :]).sum(dim=-1)

    components = tuple(
        Component(2, form(torch.linalg.qr(torch.randn(d_token, d_token, generator=generator)).Q))
        for _ in range(n_components)
    )
    return Target(components=components, n_tokens=n_tokens, d_token=d_token, tokens="sphere")


def main() -> None:
    """One row for each setting: means over three draws of the matrices."""
    print("| matrices | tokens | d | D | h_1 | T | held | NMSE, three draws |")
    print("|---|---|---|---|---|---|---|---|")
    cases = [
        ("Gaussian", "sphere", 3, 2, 1),
        ("Gaussian", "sphere", 8, 2, 1),
        ("Gaussian", "normal", 4, 2, 1),
        ("Gaussian", "sphere", 3, 3, 2),
        ("rotations", "sphere", 3, 2, 1),
        ("rotations", "sphere", 8, 2, 1),
    ]
    for kind, tokens, d, n, heads in cases:
        for length in (16, 64):
            found = []
            for seed in range(3):
                if kind == "rotations":
                    task = rotations(n, length, d, seed)
                else:
                    task = load_task(
                        "intrinsic_dimension", n_tokens=length, d_token=d, tokens=tokens,
                        n_components=n, seed=seed,
                    )  # fmt: skip
                found.append(routed_error(task, heads, n=200, seed=seed))
            held = sum(f.held for f in found) / 3
            errors = ", ".join(f"{f.nmse:.2g}" for f in found)
            print(
                f"| {kind} | {tokens} | {d} | {n} | {heads} | {length} | {held:.0%} | {errors} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
