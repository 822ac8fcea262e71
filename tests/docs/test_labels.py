"""The table of labels is that of the rows of its run, and its sentences are true of them."""

import json
from pathlib import Path

from benchmarks.labels import KNOWN, SINGLE, table

ROOT = Path(__file__).parents[2]


def test_the_table_and_the_sentences_are_those_of_the_rows():
    document = json.loads((ROOT / "benchmarks" / "labels.json").read_text())
    page = (ROOT / "docs" / "measures.md").read_text()
    assert table(document) in page
    same, decided = document["agree"]["all"], document["agree"]["decided"]
    assert f"to {same[0]} of {same[1]} heads" in page
    assert f"to {decided[0]} of {decided[1]} where both decide" in page
    for row in document["rows"]:
        damage = row["damage"]
        labels, single = (
            damage["each head by its label"],
            min(damage[f"every head {i}"] for i in SINGLE),
        )
        assert 0.35 < labels / single < 0.55  # two fifths to a half
        assert labels < damage["every head top 2"]
        assert 0.15 < damage["every head top 4"] / labels < 0.35  # a quarter
        assert {head: row["known"][head].split(":")[0] for head in row["known"]} == {
            f"{layer}.{head}": label for (layer, head), label in KNOWN.items()
        }
