"""The table of twenty texts is that of the rows of its run."""

import json
from pathlib import Path

from benchmarks.answers import PAIRS, table

ROOT = Path(__file__).parents[2]


def test_the_table_of_the_page_is_that_of_the_rows():
    rows = json.loads((ROOT / "benchmarks" / "answers.json").read_text())
    assert [row["text"] for row in rows] == [asked.text for asked in PAIRS]
    assert table(rows) in (ROOT / "docs" / "how-to" / "ask-why.md").read_text()
