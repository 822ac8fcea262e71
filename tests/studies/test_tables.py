"""Tables as data and in Markdown, and numbers over seeds."""

import numpy as np
import pandas as pd
import pytest

from infoflow_lens import InfoFlowError
from infoflow_lens.studies.tables import Column, TableSpec, markdown_table, render, spread


def test_a_table_has_a_line_for_each_row():
    table = markdown_table(["T", "|I|"], [(8, "0.5"), (16, None)])
    assert table.splitlines() == ["| T | \\|I\\| |", "|---|---|", "| 8 | 0.5 |", "| 16 | - |"]


def test_numbers_stand_on_the_right():
    assert markdown_table(["", "T"], [("a", 1)], numbers=True).splitlines()[1] == "|---|---:|"


def test_a_row_of_another_length_is_refused():
    with pytest.raises(InfoFlowError, match="a row has 1 cells: expected 2, one for each of a, b"):
        markdown_table(["a", "b"], [(1,)])


def test_the_mean_stands_before_the_range():
    assert spread(pd.Series([1.0, 3.0])) == "2 (1 to 3)"
    assert spread(pd.Series([0.12345])) == "0.123"
    assert spread(pd.Series([], dtype=float)) == "-"
    assert spread(pd.Series([np.nan, 2.0])) == "2"


ROWS = pd.DataFrame(
    {
        "seed": [0, 1, 0, 1, 0],
        "heads": ["2 2", "2 2", "1 3", "1 3", "1 3"],
        "n_tokens": [8, 8, 8, 8, 16],
        "model": ["ours", "theirs", "ours", "theirs", "ours"],
        "nmse": [0.25, 0.75, 2.0, 4.0, np.nan],
    }
)


def cells(spec, rows=ROWS):
    lines = spec.render(rows).splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in (lines[0], *lines[2:])]


def test_a_table_has_a_line_for_each_group_in_the_order_of_the_rows():
    assert cells(TableSpec(("heads", "n_tokens"), ("nmse",))) == [
        ["heads", "T", "NMSE"],
        ["2 2", "8", "0.5 (0.25 to 0.75)"],
        ["1 3", "8", "3 (2 to 4)"],
        ["1 3", "16", "-"],
    ]
    by_value = cells(TableSpec(("heads", "n_tokens"), ("nmse",), sort=True))
    assert [line[:2] for line in by_value[1:]] == [["1 3", "8"], ["1 3", "16"], ["2 2", "8"]]


def test_numbers_are_taken_as_they_are_asked_for():
    columns = [
        Column("mean", "nmse", "mean", ".2f"),
        Column("least", "nmse", "least", ".1e"),
        Column("most", "nmse", "most"),
        Column("median", "nmse", "median"),
        Column("of the first row", "nmse", "first"),
        Column("how many", len),
        Column("few", lambda rows: len(rows) < 3),
        Column("nothing", lambda rows: None),
    ]
    _, two, three = cells(TableSpec(("heads",), columns))
    assert two == ["2 2", "0.50", "2.5e-01", "0.75", "0.5", "0.25", "2", "yes", "-"]
    assert three == ["1 3", "3.00", "2.0e+00", "4", "3", "2", "3", "no", "-"]


def test_a_column_for_each_value_of_another():
    """Models beside each other; a line that one of them lacks has no number there."""
    spec = TableSpec(
        ("n_tokens",),
        (Column("", "nmse", "mean", across="model"), Column("seeds of", len, across="model")),
        words={"model": {"ours": "us", "theirs": "them"}, "n_tokens": "T = {}".format},
    )
    assert cells(spec) == [
        ["T", "us", "them", "seeds of us", "seeds of them"],
        ["T = 8", "1.12", "2.38", "2", "2"],
        ["T = 16", "-", "-", "1", "-"],
    ]


def test_lines_are_made_of_the_rows_that_are_asked_for():
    spec = TableSpec(("heads",), ("nmse",), rows=lambda rows: rows[rows["model"] == "theirs"])
    assert cells(spec)[1:] == [["2 2", "0.75"], ["1 3", "4"]]


def test_a_page_has_tables_and_texts_in_their_order():
    spec = TableSpec(("heads",), ("seed",))
    page = render(["Before.", spec, lambda rows: f"{len(rows)} rows."], ROWS)
    assert page == f"Before.\n\n{spec.render(ROWS)}\n\n5 rows."
