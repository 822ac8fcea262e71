"""docs/coverage.md lists what the papers state, and every link in it leads somewhere."""

import importlib
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "coverage.md").read_text(encoding="utf-8")
INFOFLOW, HEADS, CHEN_ZOU = PAGE.split("\n## ")[1:]
LINKS = sorted(set(re.findall(r"`((?:infoflow_lens|tests\.reference)[\w.]*):(\w+)`", PAGE)))


@pytest.mark.parametrize(("module", "name"), LINKS, ids=lambda part: part)
def test_a_link_leads_to_code(module, name):
    assert hasattr(importlib.import_module(module), name)


def named(text, kind):
    """The numbers of a kind of statement, ranges included."""
    numbers = set()
    for first, last in re.findall(rf"{kind} (\d+)(?:\([ab]\))?(?: to {kind} (\d+))?", text):
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


@pytest.mark.parametrize(
    ("section", "kind", "numbers"),
    [
        (INFOFLOW, "Theorem", {1, 2, 3}),
        (INFOFLOW, "Proposition", {1, 2}),
        (INFOFLOW, "Lemma", {1, 4}),
        (INFOFLOW, "Definition", {1, 2}),
        (INFOFLOW, "Table", {*range(1, 13)}),
        (INFOFLOW, "Figure", {1, 2, 3, 4, 5}),
        (HEADS, "Table", {2, 3, 5}),
        (CHEN_ZOU, "Theorem", {1, 2, 3, 4, 5, 6}),
        (CHEN_ZOU, "Proposition", {7, 8, 9, 10}),
        (CHEN_ZOU, "Lemma", {1, 2, 3, 4, 5, 6, 7}),
        (CHEN_ZOU, "Definition", {1, 2, 3}),
        (CHEN_ZOU, "Table", {1}),
        (CHEN_ZOU, "Figure", {1, 2, 3, 4, 5, 6, 7}),
    ],
)
def test_every_statement_of_the_papers_is_listed(section, kind, numbers):
    assert named(section, kind) == numbers


def test_every_table_and_figure_says_whether_it_was_run():
    rows = [line for line in PAGE.splitlines() if re.match(r"\| (Table|Figure) ", line)]
    assert len(rows) == 7 + 1 + 4
    for row in rows:
        complete = row.strip("|").split("|")[-1]
        assert re.search(r"\brun\b|the four tasks|^ yes $", complete), row


def test_every_row_says_whether_it_is_complete():
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and "---" not in line]
    for row in rows:
        assert len([cell for cell in row.strip("|").split("|") if cell.strip()]) == 3, row


@pytest.mark.parametrize("page", ["theory.md", "known-results.md", "routing.md", "coverage.md"])
def test_links_between_pages_lead_to_files(page):
    folder = Path(__file__).parent.parent / "docs"
    for target in re.findall(r"\]\(([^)#:]+)\)", (folder / page).read_text(encoding="utf-8")):
        assert (folder / target).exists(), target
