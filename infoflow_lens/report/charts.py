"""What sections of a page show: heat maps over heads, lines, tables; and matplotlib's figures.

Each is drawn as SVG or HTML when the page is made, in the page's colours, light and dark, without a
library in the page.
"""

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from markupsafe import Markup, escape

from infoflow_lens.foundation.display import MISSING, number
from infoflow_lens.foundation.errors import InfoFlowError, refuse_names
from infoflow_lens.foundation.lazy import mpl, pd

_CELL, _LEFT = 30, 58


@dataclass(frozen=True)
class HeatMap:
    """Numbers over rows and columns, such as layers and heads.

    Attributes:
        title: above it, with the unit.
        values: a row for each layer; NaN where there is nothing. Rows may differ in length.
        most: the largest value of the scale, whose smallest is 0; default, the largest there is.
        row_name, column_name: what rows and columns are; both count from 0.
        hover: for each cell, what is said of it; default, its number.
    """

    title: str
    values: Sequence[Sequence[float]]
    most: float | None = None
    row_name: str = "layer"
    column_name: str = "head"
    hover: Sequence[Sequence[str]] | None = None


@dataclass(frozen=True)
class NameMap:
    """A name for every cell, in its colour.

    Attributes:
        title: above it.
        names: a row for each layer.
        colours: of the names, in the order of the legend: "#d55e00", ...
        hover: for each cell, what is said of it.
    """

    title: str
    names: Sequence[Sequence[str]]
    colours: Mapping[str, str]
    hover: Sequence[Sequence[str]] | None = None


@dataclass(frozen=True)
class Lines:
    """Lines over whole numbers.

    Attributes:
        title: above it.
        x: the numbers.
        series: by name; NaN where there is nothing. The last one is drawn strongest.
        x_title, y_title: of the axes.
        most: the top of the y axis, whose bottom is 0.
    """

    title: str
    x: Sequence[int]
    series: Mapping[str, Sequence[float]]
    x_title: str = ""
    y_title: str = ""
    most: float | None = None


@refuse_names(of_frame="from_frame")
@dataclass(frozen=True)
class Table:
    """A table; one press on a column's name sorts it.

    Attributes:
        columns: names, with what is said of each on hover ("" for nothing), in their order.
        rows: texts, numbers, or NaN and None, which are shown as a dash.
        reasons: (row, column) and why there is a dash.
        caption: above it.
        anchors: a name for each row, to which links lead.
    """

    columns: Mapping[str, str]
    rows: Sequence[Sequence[Any]]
    reasons: Mapping[tuple[int, int], str] = field(default_factory=dict)
    caption: str = ""
    anchors: Sequence[str] = ()

    @classmethod
    def from_frame(cls, frame: "pd.DataFrame", most: int = 300) -> "Table":
        """Take a frame's first rows; the caption says how many there are."""
        caption = f"The first {most} of {len(frame)} rows." if len(frame) > most else ""
        columns = {str(name).replace("_", " "): "" for name in frame.columns}
        return cls(columns, frame.head(most).to_numpy(dtype=object).tolist(), caption=caption)


Chart: TypeAlias = "HeatMap | NameMap | Lines | Table | mpl.Figure"


def render_chart(chart: Any) -> Markup:
    """Return a chart as HTML.

    Raises:
        InfoFlowError: for anything that is no chart.
    """
    if isinstance(chart, HeatMap):
        return _heat_map(chart)
    if isinstance(chart, NameMap):
        return _name_map(chart)
    if isinstance(chart, Lines):
        return _lines(chart)
    if isinstance(chart, Table):
        return _table(chart)
    if hasattr(chart, "savefig"):
        return _picture(chart)
    raise InfoFlowError(
        f"a section holds a {type(chart).__module__}.{type(chart).__name__}: expected a HeatMap, "
        "NameMap, Lines or Table of infoflow_lens.report.charts, or a matplotlib Figure"
    )


def _picture(figure: "mpl.Figure") -> Markup:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight", metadata={"Software": None})
    data = base64.b64encode(buffer.getvalue()).decode()
    title = figure.get_suptitle().replace(r"\$", "$") or "figure"  # as it is drawn
    return Markup(
        '<figure><img class="drawn" alt="{}" src="data:image/png;base64,{}"></figure>'
    ).format(title, data)


def _figure(title: str, width: float, height: float, inside: Sequence[str]) -> Markup:
    return Markup(
        '<figure class="chart"><figcaption>{}</figcaption><div class="scroll" tabindex="0" '
        'role="region" aria-label="{}"><svg role="img" aria-label="{}" width="{:.0f}" '
        'height="{:.0f}">{}</svg></div></figure>'
    ).format(title, title, title, width, height, Markup("".join(inside)))


def _text(x: float, y: float, text: object, anchor: str = "middle", kind: str = "tick") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _grid(
    rows: Sequence[Sequence[Any]],
    row_name: str,
    column_name: str,
    draw: Callable[[int, int], tuple[str, str]],
) -> tuple[list[str], int, int]:
    """Draw a square for every value; return also the width and the height.

    Args:
        rows: of values; they may differ in length.
        row_name, column_name: what rows and columns are.
        draw: takes row and column, and returns the attributes of a square and what it says.
    """
    n_columns = max(map(len, rows), default=0)
    # many columns get smaller cells, so that the picture fits a screen
    cell = _CELL if n_columns <= 24 else 16
    parts = []
    for i, row in enumerate(rows):
        parts.append(_text(_LEFT - 6, cell * (i + 0.5) + 4, f"{row_name} {i}", "end"))
        for j in range(len(row)):
            attributes, said = draw(i, j)
            parts.append(
                f'<rect {attributes} x="{_LEFT + cell * j + 1}" y="{cell * i + 1}" '
                f'width="{cell - 2}" height="{cell - 2}">'
                f"<title>{escape(f'{row_name} {i}, {column_name} {j}: {said}')}</title></rect>"
            )
    below = cell * len(rows) + 14
    # a number takes about 18 pixels, so that narrow cells show some numbers only
    for j in range(0, n_columns, max(1, -(-18 // cell))):
        parts.append(_text(_LEFT + cell * (j + 0.5), below, j))
    parts.append(_text(_LEFT + cell * n_columns / 2, below + 15, column_name))
    return parts, _LEFT + cell * n_columns + 2, below + 20


def _heat_map(chart: HeatMap) -> Markup:
    known = [v for row in chart.values for v in row if not math.isnan(v)]
    most = chart.most or max([*known, 1e-12])

    def draw(i: int, j: int) -> tuple[str, str]:
        value = chart.values[i][j]
        said = chart.hover[i][j] if chart.hover else number(float(value))
        if math.isnan(value):
            return 'class="cell missing"', f"{said} (no number: not measured, or of too few rows)"
        return f'class="cell" fill-opacity="{min(1.0, max(0.0, value / most)):.3f}"', said

    parts, width, height = _grid(chart.values, chart.row_name, chart.column_name, draw)
    return _figure(f"{chart.title} (shade: 0 to {most:.2g})", width, height, parts)


def _name_map(chart: NameMap) -> Markup:
    def draw(i: int, j: int) -> tuple[str, str]:
        name = chart.names[i][j]
        said = f"{name}\n{chart.hover[i][j]}" if chart.hover else name
        return f'fill="{escape(chart.colours.get(name, "#888"))}" rx="3"', said

    parts, width, height = _grid(chart.names, "layer", "head", draw)
    at = height + 14
    # only colours that are seen are in the legend
    used = [n for n in chart.colours if any(n in row for row in chart.names)]
    for index, name in enumerate(used):
        parts.append(
            f'<rect fill="{escape(chart.colours[name])}" x="{_LEFT}" y="{at + 20 * index}" '
            f'width="14" height="14" rx="3"/>'
            + _text(_LEFT + 20, at + 20 * index + 12, name.replace("_", " "), "start")
        )
    return _figure(chart.title, max(width, 240), at + 20 * len(used) + 4, parts)


_COLOURS = 8  # line colours in the style sheet


def _colour(index: int, n: int) -> str:
    """Return the class of a line's colour, where there are few lines."""
    return f" s{index}" if n <= _COLOURS else ""


def _ramp(index: int, n: int) -> str:
    """Return a colour of its own for each of many lines, from blue by way of green to red."""
    if n <= _COLOURS:
        return ""
    colour = f"hsl({220 - 220 * index / (n - 1):.0f}, 65%, {45 + 8 * (index % 2)}%)"
    return f' fill="{colour}" stroke="{colour}"'


def _lines(chart: Lines) -> Markup:
    width, height, left, top = 560.0, 260.0, 54.0, 10.0
    inner, tall = width - left - 16, height - top - 46
    known = [v for values in chart.series.values() for v in values if not math.isnan(v)]
    # from 0 on, to a top that may be given, so that charts can be compared
    most = chart.most or max([*known, 1e-12])
    first, last = chart.x[0], chart.x[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        share = (x - first) / (last - first) if last > first else 0.5
        return left + inner * share, top + tall * (1 - y / most)

    parts = []
    for step in range(5):
        _, y = place(first, most * step / 4)
        parts.append(f'<path class="rule" d="M{left:.0f},{y:.1f}H{width - 16:.0f}"/>')
        parts.append(_text(left - 6, y + 4, f"{most * step / 4:.2g}", "end"))
    # about ten ticks
    every = max(1, len(chart.x) // 10)
    parts += [_text(place(x, 0)[0], top + tall + 16, x) for x in chart.x[::every]]
    parts.append(_text(left + inner / 2, height - 6, chart.x_title))
    for index, (name, values) in enumerate(chart.series.items()):
        strong = " strong" if index == len(chart.series) - 1 else ""
        points = [place(x, v) for x, v in zip(chart.x, values, strict=True) if not math.isnan(v)]
        path = "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
        said = ", ".join(f"{x}: {number(float(v))}" for x, v in zip(chart.x, values, strict=True))
        parts.append(
            f'<g class="series{_colour(index, len(chart.series))}{strong}"'
            f"{_ramp(index, len(chart.series))}><title>{escape(f'{name}: {said}')}</title>"
            + (f'<path d="M{path}"/>' if points else "")
            + "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in points)
            + "</g>"
        )
    keys = Markup("").join(
        Markup(
            '<span class="item"><svg class="swatch" width="14" height="4"><g class="series{}"{}>'
            '<circle cx="7" cy="2" r="7"/></g></svg>{}</span>'
        ).format(_colour(index, len(chart.series)), Markup(_ramp(index, len(chart.series))), name)
        for index, name in enumerate(chart.series)
    )
    title = f"{chart.title}" + (f" ({chart.y_title})" if chart.y_title else "")
    return _figure(title, width, height, parts) + Markup('<p class="keys">{}</p>').format(keys)


def _table(chart: Table) -> Markup:
    heads = Markup("").join(
        Markup(
            '<th scope="col"><button type="button" class="sort" title="{}">{}</button></th>'
        ).format(meaning or "sort", name)
        for name, meaning in chart.columns.items()
    )
    rows = []
    for i, row in enumerate(chart.rows):
        cells = []
        for j, value in enumerate(row):
            # a reason for a missing value stands once for neighbours that share it
            reason = chart.reasons.get((i, j))
            repeated = reason is not None and chart.reasons.get((i, j - 1)) == reason
            text = (
                Markup('<span title="{}">{}<small>{}</small></span>').format(
                    reason, MISSING, "" if repeated else f" {reason}"
                )
                if reason
                else escape(number(value))
            )
            # the page sorts by this, and puts what is empty last
            key = "" if reason or number(value) == MISSING else value
            cells.append(Markup('<td data-value="{}">{}</td>').format(key, text))
        anchor = Markup(' id="{}"').format(chart.anchors[i]) if chart.anchors else ""
        rows.append(Markup("<tr{}>{}</tr>").format(anchor, Markup("").join(cells)))
    return Markup(
        '<div class="scroll" tabindex="0" role="region" aria-label="{}"><table class="sortable">'
        "<caption>{}</caption><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>"
    ).format(chart.caption or "table", chart.caption, heads, Markup("").join(rows))


def _by_layer(frame: "pd.DataFrame", column: str, missing: Any) -> list[list[Any]]:
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
            title, [[float(v) for v in row] for row in _by_layer(frame, column, float("nan"))], most
        )
        for column, title in columns.items()
    ]


def draw_names(
    frame: "pd.DataFrame", column: str, colours: Mapping[str, str], hover: str
) -> NameMap:
    """Draw a name for every head, in its colour.

    Args:
        frame: a row for each layer and head.
        column: with the names.
        colours: by name, in the order of the legend.
        hover: the column with what is shown on hover.
    """
    names, said = _by_layer(frame, column, ""), _by_layer(frame, hover, "")
    return NameMap(column.replace("_", " "), names, colours, said)
