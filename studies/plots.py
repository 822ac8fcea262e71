"""Figures of studies as data: panels, the layers drawn in them, and their axes.

A layer draws rows into a panel. The kinds here cover most of what studies show: curves, points by
group, bars and heat maps; a study's own function of axes and rows is a layer, too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from infoflow_lens.foundation.lazy import mpl, pd
from infoflow_lens.studies.tables import groups

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Scale: TypeAlias = Literal["linear", "log", "log2", "symlog"]
Legend: TypeAlias = Literal["inside", "above", ""]
Layer: TypeAlias = "Callable[[Axes, pd.DataFrame], None]"
Rows: TypeAlias = "Callable[[pd.DataFrame], pd.DataFrame]"

GREY, GREEN, ORANGE, BLUE = "#444444", "#009e73", "#d55e00", "#0072b2"


def _all(results: "pd.DataFrame") -> "pd.DataFrame":
    return results


def _text(*values: object) -> str:
    return ", ".join(map(str, values))


@dataclass(frozen=True)
class Axis:
    """An axis of a panel.

    Attributes:
        label: beside it.
        scale: of its numbers; "symlog" has 0 and is logarithmic to the base 2 from 1 on.
        limits: of its numbers; None for an end that the numbers decide.
        levels: numbers at which a dotted line runs through the panel.
    """

    label: str = ""
    scale: Scale = "linear"
    limits: tuple[float | None, float | None] | None = None
    levels: Sequence[float] = ()


@dataclass(frozen=True)
class Curves:
    """A line over a number for each group of rows.

    Attributes:
        x, y: columns of the rows.
        by: columns; a line and a colour for each of their values together, in the order of the
            rows. None for one line.
        take: which of several numbers at one place: their mean, the least, or each as a point.
        band: whether the range of these numbers is shaded.
        label: the name of a line, from the values of `by`, or of all lines; "" for no name. Lines
            of one name share it.
        rows: which rows, or what is made of them first.
        style: of line and points.
        colour: of the lines; from the values of `by`, or one for all. By default in turn.
        alpha: how opaque lines and points are.
    """

    x: str
    y: str
    by: Sequence[str] = ()
    take: Literal["mean", "least", "each"] = "mean"
    band: bool = False
    label: str | Callable[..., str] = _text
    rows: Rows = _all
    style: str = "o-"
    colour: str | Callable[..., str] = ""
    alpha: float = 1.0

    def __call__(self, axes: "Axes", results: "pd.DataFrame") -> None:
        """Draw the lines."""
        for index, (key, rows) in enumerate(groups(self.rows(results), self.by)):
            label = self.label(*key) if callable(self.label) else self.label
            given = self.colour(*key) if callable(self.colour) else self.colour
            style: Any = {
                "color": given or f"C{index}",
                "alpha": self.alpha,
                "label": label or None,
            }
            if self.take == "each":
                axes.plot(rows[self.x], rows[self.y], self.style, **style)
                continue
            by_x = rows.groupby(self.x)[self.y]
            line = by_x.min() if self.take == "least" else by_x.mean()
            axes.plot(line.index, line, self.style, **style)
            if self.band:
                axes.fill_between(
                    line.index, by_x.min(), by_x.max(), color=style["color"], alpha=0.2
                )


@dataclass(frozen=True)
class Points:
    """Numbers by group: a place for each group, a point for each row.

    Attributes:
        by: columns; a place for each of their values together, in the order of the rows.
        y: a column of the rows.
        label: the name of a place, from the values of `by`.
        colour: of a place.
        beside: a column whose values stand a little beside each other, by marker.
        bar: a column whose number is a dash at each place, where it is no NaN.
        rows: which rows, or what is made of them first.
    """

    by: Sequence[str]
    y: str
    label: Callable[..., str] = _text
    colour: Callable[..., str] = lambda *key: "C0"
    beside: str = ""
    bar: str = ""
    rows: Rows = _all

    def __call__(self, axes: "Axes", results: "pd.DataFrame") -> None:
        """Draw the points, and name their places."""
        labels = []
        for place, (key, rows) in enumerate(groups(self.rows(results), self.by)):
            labels.append(self.label(*key))
            for index, (_, some) in enumerate(groups(rows, [self.beside] if self.beside else [])):
                at = [place + 0.25 * index] * len(some)
                style: Any = {"color": self.colour(*key), "alpha": 0.6}
                axes.plot(at, some[self.y], "os"[index % 2], **style)
            if self.bar:
                dashes = rows[self.bar].dropna()
                axes.plot([place] * len(dashes), dashes, "_", color=GREY, markersize=16)
        axes.set_xticks(
            range(len(labels)), labels, rotation=90 if len(labels) > 4 else 0, fontsize="small"
        )


@dataclass(frozen=True)
class Bars:
    """A bar for each value of a column.

    Attributes:
        x, y: columns of the rows; the bar is the mean of the latter.
        error: the column whose mean is the length of the error bar, to either side.
        label: of the bars.
    """

    x: str
    y: str
    error: str
    label: str = ""

    def __call__(self, axes: "Axes", results: "pd.DataFrame") -> None:
        """Draw the bars."""
        means = results.groupby(self.x)[[self.y, self.error]].mean()
        axes.bar(
            means.index, means[self.y], yerr=means[self.error], color=GREEN, capsize=3,
            label=self.label,
        )  # fmt: skip


@dataclass(frozen=True)
class HeatMap:
    """A matrix of numbers, as shares of the largest.

    Attributes:
        row, column, value: columns of the rows; rows of the matrix go downwards.
        names: a column whose words name the rows of the matrix and its columns.
    """

    row: str
    column: str
    value: str
    names: str = ""

    def __call__(self, axes: "Axes", results: "pd.DataFrame") -> None:
        """Draw the matrix."""
        grid = results.pivot(index=self.row, columns=self.column, values=self.value)
        axes.imshow(grid / max(float(grid.max().max()), 1e-30), cmap="Blues", vmin=0)
        if self.names:
            words = str(results[self.names].iloc[0]).split()
            axes.set_xticks(range(len(words)), words)
            axes.set_yticks(range(len(words)), words)


@dataclass(frozen=True)
class Panel:
    """One coordinate system.

    Attributes:
        layers: what is drawn.
        x, y: its axes.
        title: above it; may be made of the rows.
        rows: which rows, or what is made of them first.
        legend: where the names of lines stand; "" for nowhere.
        width: beside other panels.
    """

    layers: Sequence[Layer]
    x: Axis = Axis()
    y: Axis = Axis()
    title: "str | Callable[[pd.DataFrame], str]" = ""
    rows: Rows = _all
    legend: Legend = "inside"
    width: float = 1.0

    def draw(self, axes: "Axes", results: "pd.DataFrame") -> None:
        """Draw the layers, and set title, labels, scales and legend."""
        rows = self.rows(results)
        for layer in self.layers:
            layer(axes, rows)
        for name, axis, line in (("x", self.x, axes.axvline), ("y", self.y, axes.axhline)):
            for level in axis.levels:
                line(level, color=GREY, linewidth=0.8, linestyle=":")
            scale = getattr(axes, f"set_{name}scale")
            # a logarithm near 0 is a line
            if axis.scale == "symlog":
                scale("symlog", base=2, linthresh=1)
                getattr(axes, f"{name}axis").set_major_formatter("{x:g}")
            elif axis.scale != "linear":
                scale("log", base=2 if axis.scale == "log2" else 10)
                if name == "x":
                    axes.tick_params("x", which="minor", labelsize="xx-small", labelrotation=90)
            if axis.limits:
                getattr(axes, f"set_{name}lim")(*axis.limits)
            if axis.label:
                getattr(axes, f"set_{name}label")(axis.label)
        title = self.title(rows) if callable(self.title) else self.title
        if title:
            axes.set_title(title, fontsize="medium")
        # several layers may have a name in common, which the legend says once
        lines, names = axes.get_legend_handles_labels()
        if self.legend and names:
            by_name = dict(zip(reversed(names), reversed(lines), strict=True))  # each name once
            place: Any = {"loc": "lower center", "bbox_to_anchor": (0.5, 1)}
            above = place if self.legend == "above" else {}
            handles = [by_name[name] for name in dict.fromkeys(names)]
            axes.legend(handles=handles, frameon=False, fontsize="small", **above)


@dataclass(frozen=True)
class FigureSpec:
    """A figure of a study: its panels beside each other, once, or for each value of a column.

    Attributes:
        panels: beside each other; below each other with `per`.
        per: a column; all panels are drawn for each of its values, beside each other.
        size: of a panel, in inches: width, height.
        share: axes that panels share: "x", "y", "xy", or "" for none.
        rows: which rows, or what is made of them first.
    """

    panels: Sequence[Panel]
    per: str = ""
    size: tuple[float, float] = (4.0, 3.6)
    share: Literal["", "x", "y", "xy"] = ""
    rows: Rows = _all

    def draw(self, results: "pd.DataFrame") -> "mpl.Figure":
        """Return the figure of some rows."""
        rows = self.rows(results)
        if self.per:
            parts = [some for _, some in groups(rows, [self.per])] or [rows]
            grid = [[(panel, part) for part in parts] for panel in self.panels]
        else:
            grid = [[(panel, rows) for panel in self.panels]]
        widths = [panel.width for panel, _ in grid[0]]
        figure = mpl.Figure(
            figsize=(self.size[0] * sum(widths), self.size[1] * len(grid)), layout="constrained"
        )
        axes = figure.subplots(
            len(grid), len(widths), squeeze=False, width_ratios=widths,
            sharex="x" in self.share, sharey="y" in self.share,
        )  # fmt: skip
        for row, line in zip(grid, axes, strict=True):
            for index, ((panel, part), ax) in enumerate(zip(row, line, strict=True)):
                panel.draw(ax, part)
                # panels beside each other have one y axis, which the first one names
                if index and (self.per or "y" in self.share):
                    ax.set_ylabel("")
        return figure
