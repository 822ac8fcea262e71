"""What several studies read of their rows: runs, least errors, and heads."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from infoflow_lens.foundation.lazy import pd
from infoflow_lens.studies.claims import Numbers
from infoflow_lens.studies.tables import groups


def numbers_of(
    results: "pd.DataFrame",
    by: Sequence[str],
    number: "str | Callable[[pd.DataFrame], Any]",
    label: Callable[..., str] = "{}".format,
) -> Numbers:
    """Compute what a claim judges: a number of each group of rows.

    Args:
        results: the rows.
        by: columns; a group for each of their values together.
        number: of the rows of a group; the name of a column stands for its largest number.
        label: the name of a group, from its values.
    """
    return {
        label(*key): float(number(rows) if callable(number) else rows[number].max())
        for key, rows in groups(results, by)
    }


def heads_shown(heads: Any) -> str:
    """Return heads of all layers, from the cell of a row: "2 1" is (2, 1)."""
    return f"({', '.join(str(heads).split())})"


def first_heads(heads: Any) -> int:
    """Return h_1, from the cell of a row."""
    return int(str(heads).split()[0])


def runs_of(results: "pd.DataFrame") -> "pd.DataFrame":
    """Return a row for each run, the first, of studies whose runs have several."""
    return results.drop_duplicates("run")


def best_runs(results: "pd.DataFrame", by: Sequence[str]) -> "pd.DataFrame":
    """Give the rows of the runs of least error, one run for each of the values of some columns."""
    runs = runs_of(results).set_index("run")
    return results[results["run"].isin(runs.groupby(list(by), sort=False)["nmse"].idxmin())]


def least_over_seeds(results: "pd.DataFrame", by: Sequence[str]) -> "pd.Series[float]":
    """Return the least NMSE by the values of some columns, in the order of the rows."""
    return results.groupby(list(by), sort=False)["nmse"].min()


def least_over_draws(results: "pd.DataFrame", by: Sequence[str]) -> "pd.Series[float]":
    """Give the least NMSE over seeds of each draw of the target; the geometric mean over draws."""
    of_draws = least_over_seeds(results, [*by, "draw"])
    logs: Any = np.log(of_draws)
    return np.exp(logs.groupby(level=list(by), sort=False).mean())


def compare_with_enough(results: "pd.DataFrame", by: Sequence[str]) -> "pd.DataFrame":
    """Set beside each run the least error of its cell, and how many times that of D heads it is.

    Args:
        results: rows of a study of D best pairs.
        by: the columns of a cell; ``D`` is the first, ``heads`` the last.

    Returns:
        runs with ``least``, the least error of the cell (:func:`least_over_draws`), and ``times``,
        how many times that of (D, D) it is; NaN where this was not run.
    """
    runs, least = runs_of(results), least_over_draws(results, by)
    cells: Any = list(zip(*(runs[name] for name in by), strict=True))
    own = np.array([least[cell] for cell in cells])
    # the cell of (D, D) differs in the last column alone
    enough = np.array([least.get((*cell[:-1], f"{cell[0]} {cell[0]}"), np.nan) for cell in cells])
    return runs.assign(least=own, times=own / enough)


def exchange_heads(results: "pd.DataFrame", by: Sequence[str]) -> "pd.DataFrame":
    """Put the least errors of (1, 2D - 1) in the place of those of (D, D)."""
    least, changed = least_over_draws(results, by), results.copy()
    cells: Any = least.index
    for cell in cells:
        d, *between, heads = cell
        if heads == f"1 {2 * d - 1}":
            here = (changed[list(by)] == [d, *between, f"{d} {d}"]).all(axis=1)
            changed.loc[here, "nmse"] = least[cell]
    return changed


def has_enough_heads(results: "pd.DataFrame") -> "pd.Series[bool]":
    """Return rows of models with at least D heads in the first layer."""
    return results["heads"].map(first_heads) >= results["D"]
