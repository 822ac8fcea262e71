"""Figures over layers and heads."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.subplots import make_subplots

if TYPE_CHECKING:
    import pandas as pd


def _grid(frame: "pd.DataFrame", column: str) -> list[list[float | None]]:
    """A column by layer and head; None where a layer has fewer heads."""
    n_layers, n_heads = int(frame["layer"].max()) + 1, int(frame["head"].max()) + 1
    grid: list[list[float | None]] = [[None] * n_heads for _ in range(n_layers)]
    for layer, head, value in zip(frame["layer"], frame["head"], frame[column], strict=True):
        grid[int(layer)][int(head)] = None if math.isnan(value) else float(value)
    return grid


def _axes(figure: go.Figure, n_layers: int, n_heads: int) -> go.Figure:
    step = max(1, n_heads // 6)
    figure.update_xaxes(
        title="head", dtick=step, constrain="domain", showgrid=False, zeroline=False
    )
    figure.update_yaxes(
        title="layer", dtick=1, autorange="reversed", showgrid=False, zeroline=False
    )
    figure.update_layout(
        height=150 + 34 * max(n_layers, 3), margin={"l": 50, "r": 20, "t": 50, "b": 45}
    )
    return figure


def by_head(
    frame: "pd.DataFrame", columns: Mapping[str, str], most: float | None = None
) -> go.Figure:
    """Heat maps over layers and heads, one for each column, up to `most` or the largest value."""
    figure = make_subplots(cols=len(columns), subplot_titles=list(columns.values()))
    width = 1 / len(columns)
    for place, column in enumerate(columns):
        figure.add_trace(
            go.Heatmap(
                z=_grid(frame, column),
                colorscale="Blues",
                zmin=0,
                zmax=most or max(float(frame[column].max()), 1e-9),
                colorbar={"x": (place + 1) * width - 0.12, "len": 1.0, "thickness": 10},
                hovertemplate="layer %{y}, head %{x}: %{z:.3f}<extra></extra>",
            ),
            row=1,
            col=place + 1,
        )
        axis = "xaxis" if place == 0 else f"xaxis{place + 1}"
        domain = [place * width, (place + 1) * width - 0.13]  # room for the colour bar
        figure.layout[axis].domain = domain
        figure.layout.annotations[place].x = sum(domain) / 2
    return _axes(figure, int(frame["layer"].max()) + 1, int(frame["head"].max()) + 1)


def by_head_in_colours(
    frame: "pd.DataFrame", column: str, colours: Mapping[str, str], hover: Sequence[str]
) -> go.Figure:
    """A name for every head, in its colour.

    Args:
        frame: a row for each layer and head.
        column: with the names.
        colours: by name, in the order of the legend.
        hover: what is shown on hover, for each row.
    """
    names, n = list(colours), len(colours)
    frame = frame.assign(code=frame[column].map(names.index).astype(float))
    scale = []
    for index, colour in enumerate(colours.values()):
        scale += [[index / n, colour], [(index + 1) / n, colour]]
    grid = _grid(frame, "code")
    texts = [["" for _ in row] for row in grid]
    for row, text in zip(frame.to_dict("records"), hover, strict=True):
        texts[int(row["layer"])][int(row["head"])] = (
            f"layer {row['layer']}, head {row['head']}: <b>{row[column]}</b><br>{text}"
        )
    figure = go.Figure(
        go.Heatmap(
            z=grid,
            zmin=-0.5,
            zmax=n - 0.5,
            colorscale=scale,
            text=texts,
            hovertemplate="%{text}<extra></extra>",
            xgap=2,
            ygap=2,
            colorbar={"tickvals": list(range(n)), "ticktext": names, "len": 1.0},
        )
    )
    return _axes(figure, len(grid), len(grid[0]))
