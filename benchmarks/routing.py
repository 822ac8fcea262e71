"""What fewer heads than best pairs were found to reach, for the tables of docs/routing.md.

Run: python -m benchmarks.routing [--published]   (minutes)

With ``--published``, for the settings of which ``intrinsic_dimension`` has rows in docs/results,
beside their floors and what was trained.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

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
LONGER_SEARCH = {"budget": 3000, "n": 1500}
RESULTS = Path(__file__).parents[1] / "docs/results/intrinsic_dimension"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--published", action="store_true")
    of_rows = parser.parse_args().published
    columns = [
        *("D", "matrices", "draw", "h_1", "T", "floor in the rows", "found"),
        "trained, least over seeds",
    ] if of_rows else [
        *("matrices", "d", "D", "h_1", "T", "own scores, one role", "own scores, roles"),
        *("one score found", "scores and roles found"),
    ]  # fmt: skip
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for cells in _published_settings() if of_rows else _settings():
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


def published() -> pd.DataFrame:
    """The rows' floor and least error where the first layer has fewer heads than best pairs."""
    rows = pd.concat([pd.read_csv(RESULTS / name / "results.csv") for name in (".", "full")])
    rows["h_1"] = rows["heads"].str.split().str[0].astype(int)
    by = ["n_tokens", "D", "matrices", "draw", "h_1", "d_token"]
    found = rows[rows["h_1"] < rows["D"]].groupby(by, as_index=False, sort=False)
    return found.agg(floor=("floor", "first"), trained=("nmse", "min"))


def _published_settings() -> Iterator[list[object]]:
    for row in published().itertuples():
        kind, _, encoder = row.matrices.partition(", ")
        task = load_task(
            "intrinsic_dimension", n_tokens=row.n_tokens, d_token=row.d_token, tokens="sphere",
            n_components=row.D, seed=1000 + row.draw, matrix_kind=kind,
        )  # fmt: skip
        best = best_heads(task, row.h_1, roles=1 if encoder else 2 * row.D, **LONGER_SEARCH)
        yield [
            row.D, row.matrices, row.draw + 1, row.h_1, row.n_tokens, f"{row.floor:.3g}",
            f"{best.nmse:.3g} ({best.low:.3g} to {best.high:.3g})", f"{row.trained:.3g}",
        ]  # fmt: skip


def _settings() -> Iterator[list[object]]:
    """For each setting the error of each draw of the matrices."""
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
        yield [kind, d, n, heads, length, *cells]


if __name__ == "__main__":
    main()
