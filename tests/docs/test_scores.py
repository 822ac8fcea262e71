"""Tables of scores on docs/known-results.md are those of their rows, which come again."""

import json
from pathlib import Path

import pytest

from benchmarks.scores import ASKED, asked, code_rows, rank_rows, tables, tree_rows

ROOT = Path(__file__).parents[2]
ROWS = json.loads((ROOT / "benchmarks" / "scores.json").read_text(encoding="utf-8"))


def test_the_page_has_the_tables_of_the_rows():
    page = (ROOT / "docs" / "known-results.md").read_text(encoding="utf-8")
    for table in tables(ROWS).split("\n\n"):
        assert table in page


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ASKED)))
def test_rates_of_asking_come_again(number):
    row = ROWS["rates"][number]
    assert asked(*ASKED[number]) == {name: row[name] for name in list(row)[4:]}


@pytest.mark.slow
def test_trees_ranks_and_codes_come_again():
    for found, row in zip(tree_rows(), ROWS["trees"], strict=True):
        assert [found["width"], list(found["heads"])] == [row["width"], row["heads"]]
        assert found["asked as declared"] is row["asked as declared"] is True
        assert max(*found["hard"], *row["hard"]) < 1e-12
        for n, pairs in found["soft"].items():
            for (error, bound), before in zip(pairs, row["soft"][n], strict=True):
                assert error <= bound
                assert [error, bound] == pytest.approx(before, rel=1e-3, abs=1e-12)
    assert list(rank_rows()) == ROWS["ranks"]
    for found, row in zip(code_rows(), ROWS["codes"], strict=True):
        assert found["measured"] == pytest.approx(found["decoder"], abs=0.01)
        assert found == pytest.approx(row)
