"""Families of transformers, opened: some of the table that ``python -m tests.families`` makes."""

import re

import pytest

from tests import families
from tests.conftest import some_of
from tests.reference.families import KINDS

# sinks and experts; norms on both sides, grouped keys and a window; rotated keys behind one matrix;
# an encoder with a window; positions that are looked up in scores; a shared block
CASES = [("gpt_oss", "eager"), ("gemma3_text", "sdpa"), ("falcon", "sdpa"), ("modernbert", "sdpa")]
CASES += [("deberta", "eager"), ("albert", "sdpa")]


@pytest.mark.parametrize(("kind", "how"), some_of(CASES, CASES[0], CASES[1], CASES[4]))
def test_an_opened_model_shows_what_transformers_gives(kind, how):
    row = families.compare(kind, how)
    assert not row.wrong
    assert row.counts["patterns"] == row.counts["visible keys"] == 6
    assert row.counts["edits by hand"] == 6


def test_the_page_has_every_type_and_nothing_wrong():
    page = families.PAGE.read_text()
    rows = re.findall(r"^\| ([\w-]+) \| ([^|]*) \| ([^|]*) \|", page, re.M)[1:]
    assert [kind for kind, *_ in rows] == KINDS
    assert {verdict for _, *both in rows for verdict in both if "refused" not in verdict} == {
        "right", ""}  # fmt: skip
    assert [kind for kind, eager, _ in rows if eager != "right"] == ["longformer", "fnet"]
