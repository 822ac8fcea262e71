"""What fewer heads than best pairs were found to reach, for the table of docs/routing.md.

Run: python -m benchmarks.routing   (minutes)
"""

from infoflow_lens import load_task
from infoflow_lens.theory.best_heads import best_heads
from infoflow_lens.theory.routing import routed_error

CASES = [  # matrices, d, D, h_1, T
    *(("orthogonal", 3, 2, 1, length) for length in (4, 8, 16, 32, 64)),
    ("orthogonal", 3, 3, 2, 8),
    ("orthogonal", 8, 2, 1, 16),
    *(("gaussian", 3, 2, 1, length) for length in (8, 16, 64)),
    ("gaussian", 3, 3, 2, 8),
    ("gaussian", 8, 2, 1, 16),
]
DRAWS = (1000, 1001)
SEARCH = {"budget": 1000, "n": 1000}


def main() -> None:
    """One row for each setting, with the error of each draw of the matrices."""
    columns = [
        *("matrices", "d", "D", "h_1", "T", "own scores, one role", "own scores, roles"),
        *("one score found", "scores and roles found"),
    ]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for kind, d, n, heads, length in CASES:
        errors = []
        for draw in DRAWS:
            task = load_task(
                "intrinsic_dimension", n_tokens=length, d_token=d, tokens="sphere",
                n_components=n, seed=draw, matrix_kind=kind,
            )  # fmt: skip
            found = [
                *(routed_error(task, heads, one_role=one) for one in (True, False)),
                *(best_heads(task, heads, roles=roles, **SEARCH) for roles in (1, 2 * n)),
            ]
            errors.append([result.nmse for result in found])
        cells = [
            ", ".join(f"{error:.2g}" for error in draws) for draws in zip(*errors, strict=True)
        ]
        print(f"| {kind} | {d} | {n} | {heads} | {length} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
