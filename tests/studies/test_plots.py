"""Figures as data: what is drawn is what the rows say."""

import pandas as pd
import pytest

from infoflow_lens.studies.plots import (
    Axis,
    Bars,
    Curves,
    FigureSpec,
    HeatMap,
    Panel,
    Points,
)

ROWS = pd.DataFrame(
    [
        {"model": model, "seed": seed, "epoch": epoch, "error": error * (1 + seed) / epoch}
        for model, error in (("small", 4.0), ("large", 1.0))
        for seed in (0, 1)
        for epoch in (1, 2)
    ]
)


def drawn(*layers, **panel):
    (axes,) = FigureSpec([Panel(layers, **panel)]).draw(ROWS).axes
    return axes


@pytest.mark.parametrize(("take", "small"), [("mean", [6, 3]), ("least", [4, 2])])
def test_a_curve_for_each_group(take, small):
    axes = drawn(Curves("epoch", "error", ["model"], take=take, band=True))
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines) == ["small", "large"]
    assert list(lines["small"].get_xdata()) == [1, 2]
    assert list(lines["small"].get_ydata()) == small
    low, high = (f(axes.collections[0].get_paths()[0].vertices[:, 1]) for f in (min, max))
    assert (low, high) == (2, 8)
    assert len({line.get_color() for line in lines.values()}) == 2


def test_each_run_may_have_a_line_of_the_colour_of_its_kind():
    colours = {"small": "#111111", "large": "#222222"}
    layer = Curves(
        "epoch", "error", ["model", "seed"], take="each",
        label=lambda model, seed: None if seed else model, colour=lambda model, _: colours[model],
    )  # fmt: skip
    axes = drawn(layer)
    assert [line.get_color() for line in axes.lines] == ["#111111"] * 2 + ["#222222"] * 2
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["small", "large"]


def test_points_stand_at_the_place_of_their_group():
    one = ROWS[ROWS["epoch"] == 1].assign(bar=0.5)
    axes = drawn(Points(["model"], "error", beside="seed", bar="bar", rows=lambda rows: one))
    assert [label.get_text() for label in axes.get_xticklabels()] == ["small", "large"]
    at = [(line.get_xdata()[0], line.get_ydata()[0], line.get_marker()) for line in axes.lines]
    assert at == [
        (0, 4, "o"), (0.25, 8, "s"), (0, 0.5, "_"), (1, 1, "o"), (1.25, 2, "s"), (1, 0.5, "_"),
    ]  # fmt: skip


def test_bars_are_means():
    axes = drawn(Bars("epoch", "error", error="seed"))
    assert [bar.get_height() for bar in axes.patches] == [3.75, 1.875]


def test_a_heat_map_has_shares_of_its_largest_number():
    axes = drawn(
        HeatMap("seed", "epoch", "error"), rows=lambda rows: rows[rows["model"] == "small"]
    )
    assert axes.images[0].get_array().tolist() == [[0.5, 0.25], [1, 0.5]]


def test_axes_have_what_their_panel_says():
    axes = drawn(
        Curves("epoch", "error"),
        x=Axis("epochs", "log2", (0.5, 4)),
        y=Axis("error", "log", levels=[1.5]),
        title=lambda rows: f"{len(rows)} rows",
        legend="",
    )
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("epochs", "error")
    assert (axes.get_title(), axes.get_xlim(), axes.get_legend()) == ("8 rows", (0.5, 4), None)
    assert list(axes.lines[-1].get_ydata()) == [1.5, 1.5]


def test_panels_stand_for_each_value_of_a_column():
    panels = [Panel([Curves("epoch", "error")], y=Axis(label)) for label in ("above", "below")]
    figure = FigureSpec(panels, per="model", size=(2, 3)).draw(ROWS)
    assert list(figure.get_size_inches()) == [4, 6]
    first, second, *_ = figure.axes
    assert [axes.get_ylabel() for axes in figure.axes] == ["above", "", "below", ""]
    assert list(first.lines[0].get_ydata()) == [6, 3]
    assert list(second.lines[0].get_ydata()) == [1.5, 0.75]


def test_a_function_of_axes_and_rows_is_a_layer():
    seen = []
    drawn(lambda axes, rows: seen.append(len(rows)))
    assert seen == [8]
