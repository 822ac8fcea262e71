"""What SECURITY.md says has the test that it names."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text("utf-8")


def test_each_sentence_about_what_is_done_has_its_test():
    """Of the lists, each entry but the one on digests, which is a limit."""
    entries = [
        entry for section in TEXT.split("\n## ")[1:] for entry in re.split(r"\n- ", section)[1:]
    ]
    assert len(entries) > 12
    without = [entry for entry in entries if "](tests/" not in entry]
    assert [entry.partition(" ")[0] for entry in without] == ["Digests"]


def test_each_test_that_it_names_is_there():
    named = re.findall(r"\[`(test_\w+)`\]\((tests/[\w/]+\.py)\)", TEXT)
    assert len(named) > 15
    for name, place in named:
        assert f"\ndef {name}(" in (ROOT / place).read_text("utf-8"), f"{place}::{name}"


def test_it_is_one_screen():
    assert len(TEXT.splitlines()) < 90
