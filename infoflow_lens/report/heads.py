"""Heat maps over layers and heads, from the frames that results give."""

from collections.abc import Mapping, Sequence
from typing import Any

from infoflow_lens.foundation.lazy import pd
from infoflow_lens.report.charts import HeatMap, NameMap


def _grid(frame: "pd.DataFrame", column: str, missing: Any) -> list[list[Any]]:
    """Return a column by layer and head; layers may have their own numbers of heads."""
    grid: list[list[Any]] = [[] for _ in range(int(frame["layer"].max()) + 1)]
    for layer, head, value in zip(frame["layer"], frame["head"], frame[column], strict=True):
        row = grid[int(layer)]
        row += [missing] * (int(head) + 1 - len(row))
        row[int(head)] = value
    return grid


def by_head(
    frame: "pd.DataFrame", columns: Mapping[Any, str], most: float | None = None
) -> list[HeatMap]:
    """Draw heat maps over layers and heads.

    Args:
        frame: a row for each layer and head.
        columns: the columns to show, each with the title of its map.
        most: the top of the scale, which begins at 0; default, the largest value of each map.
    """
    return [
        HeatMap(
            title, [[float(v) for v in row] for row in _grid(frame, column, float("nan"))], most
        )
        for column, title in columns.items()
    ]


def draw_names(
    frame: "pd.DataFrame", column: str, colours: Mapping[str, str], hover: Sequence[str]
) -> NameMap:
    """Draw a name for every head, in its colour.

    Args:
        frame: a row for each layer and head.
        column: with the names.
        colours: by name, in the order of the legend.
        hover: what is shown on hover, for each row.
    """
    said = frame.assign(_said=list(hover))
    return NameMap(
        column.replace("_", " "), _grid(frame, column, ""), colours, _grid(said, "_said", "")
    )
