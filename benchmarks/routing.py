"""What fewer heads than best pairs were found to reach, for the tables of docs/routing.md.

Run: python -m benchmarks.routing [--published]   (minutes)

With ``--published``, for the settings of which ``intrinsic_dimension`` has rows in docs/results,
beside what own scores leave and what was trained.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from infoflow_lens import load_task
from infoflow_lens.studies.best_heads import best_heads
from infoflow_lens.studies.papers import STUDIES
from infoflow_lens.studies.papers.rows import first_heads
from infoflow_lens.studies.summary import rows_of
from infoflow_lens.theory.routing import measure_routing

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
RESULTS = Path(__file__).parents[1] / "docs/results/intrinsic_dimension"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--published", action="store_true")
    of_rows = parser.parse_args().published
    columns = [
        *("D", "matrices", "draw", "h_1", "T", "own scores", "found"),
        "trained, least over seeds",
    ] if of_rows else [
        *("matrices", "d", "D", "h_1", "T", "own scores, one role", "own scores, roles"),
        *("one score found", "scores and roles found"),
    ]  # fmt: skip
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for cells in _published_settings() if of_rows else _settings():
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


def published() -> pd.DataFrame:
    """Read the rows with fewer heads than best pairs: their floor and least error."""
    rows = pd.concat([rows_of(RESULTS / name) for name in (".", "full")])
    rows["h_1"] = rows["heads"].map(first_heads)
    by = ["n_tokens", "D", "matrices", "draw", "h_1", "d_token"]
    found = rows[rows["h_1"] < rows["D"]].groupby(by, as_index=False, sort=False)
    floors = {name: (name, "first") for name in ("floor", "floor_low", "floor_high")}
    return found.agg(**floors, trained=("nmse", "min"))


def describe_floor(row: Any) -> str:
    """Say a row's floor, and its interval."""
    return f"{row.floor:.3g} ({row.floor_low:.3g} to {row.floor_high:.3g})"


def _published_settings() -> Iterator[list[object]]:
    for row in published().itertuples():
        task = STUDIES["intrinsic_dimension"].task(row._asdict())
        own = measure_routing(task, row.h_1, one_role="linear encoder" in row.matrices)
        yield [
            row.D, row.matrices, row.draw + 1, row.h_1, row.n_tokens, f"{own.nmse:.3g}",
            describe_floor(row), f"{row.trained:.3g}",
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
                *(measure_routing(task, heads, one_role=one) for one in (True, False)),
                *(best_heads(task, heads, roles=roles, **SEARCH) for roles in (1, 2 * n)),
            ]
            errors.append([result.nmse for result in found])
        cells = [
            ", ".join(f"{error:.2g}" for error in draws) for draws in zip(*errors, strict=True)
        ]
        yield [kind, d, n, heads, length, *cells]


if __name__ == "__main__":
    main()
