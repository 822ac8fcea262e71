"""Tables in Markdown, and numbers over seeds."""

import pandas as pd
import pytest

from infoflow_lens import InfoFlowError
from infoflow_lens.experiments.tables import markdown_table, spread


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
