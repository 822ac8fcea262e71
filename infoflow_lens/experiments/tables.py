"""Tables of studies in Markdown, and numbers as they stand in them."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from infoflow_lens.foundation.errors import InfoFlowError

if TYPE_CHECKING:
    import pandas as pd


def markdown_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: bool = False
) -> str:
    """A table in Markdown.

    Args:
        columns: the names at the top; ``|`` inside a name or cell is escaped.
        rows: cells, as many in each row as there are columns; None is shown as ``-``.
        numbers: whether all columns but the first stand on the right.

    Raises:
        InfoFlowError: for a row of another length.
    """
    others = "---:|" if numbers else "---|"
    lines = [_line(columns), "|---|" + others * (len(columns) - 1)]
    for row in rows:
        if len(row) != len(columns):
            raise InfoFlowError(
                f"a row has {len(row)} cells: expected {len(columns)}, one for each of "
                f"{', '.join(columns)}"
            )
        lines.append(_line(row))
    return "\n".join(lines)


def _line(cells: Sequence[object]) -> str:
    shown = ("-" if cell is None else str(cell) for cell in cells)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in shown)} |"


def spread(values: "pd.Series[float]") -> str:
    """A mean and the range over seeds; one number alone, and ``-`` for none."""
    if not len(values):
        return "-"
    if len(values) == 1:
        return f"{values.iloc[0]:.3g}"
    return f"{values.mean():.3g} ({values.min():.3g} to {values.max():.3g})"
