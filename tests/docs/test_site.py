"""Pages of the site that are made from other files, and what the site is refused for."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

import infoflow_lens

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "tools"))

import notebooks  # noqa: E402
import site_pages  # noqa: E402

TERMS = re.findall(r"^### (.+)$", (ROOT / "docs" / "glossary.md").read_text("utf-8"), re.M)


def moved(markdown, uri, origin=None):
    page = SimpleNamespace(file=SimpleNamespace(src_uri=uri))
    config = SimpleNamespace(extra={"origins": {uri: origin} if origin else {}})
    return site_pages.on_page_markdown(markdown, page, config, None)


@pytest.mark.parametrize(
    ("link", "uri", "origin", "place"),
    [
        ("docs/theory.md", "index.md", "README.md", "theory.md"),
        ("docs/theory.md#x", "index.md", "README.md", "theory.md#x"),
        ("examples/head_mechanisms.py", "index.md", "README.md", "examples/head_mechanisms.md"),
        ("../../README.md", "tutorials/index.md", None, "../index.md"),
        ("../measures.md", "tutorials/index.md", None, "../measures.md"),
        ("LICENSE", "index.md", "README.md", f"{site_pages.HOME}/blob/main/LICENSE"),
        ("https://example.org/a.md", "index.md", "README.md", "https://example.org/a.md"),
    ],
)
def test_links_between_files_become_links_between_pages(link, uri, origin, place):
    assert moved(f"see [this]({link}) and", uri, origin) == f"see [this]({place}) and"


def test_every_public_name_is_in_the_reference_once():
    text = "\n".join(page for _, _, page in site_pages.reference())
    listed = re.findall(r"^::: (\S+)$", text, re.M)
    assert len(listed) == len(set(listed))
    ours = {getattr(infoflow_lens, name) for name in infoflow_lens.__all__}
    ours = {value for value in ours if callable(value)}
    assert {f"{value.__module__}.{value.__qualname__}" for value in ours} <= set(listed)


@pytest.mark.parametrize(
    ("html", "refused"),
    [
        ('<script src="https://example.org/a.js"></script>', True),
        ('<link rel="stylesheet" href="//example.org/a.css">', True),
        ("<style>@import 'https://example.org/a.css';</style>", True),
        ('<img src="https://example.org/a.png">', True),
        ('<a href="https://example.org">a link</a>', False),
        ('<img src="figures/a.png"><script src="a.js"></script>', False),
    ],
)
def test_a_page_that_asks_others_is_refused(html, refused, tmp_path, monkeypatch):
    monkeypatch.setattr(site_pages, "public_names", dict)
    (tmp_path / "page.html").write_text(html)
    assert bool(site_pages.problems(tmp_path)) == refused


def test_a_public_name_without_an_entry_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(site_pages, "public_names", lambda: {"infoflow_lens.flow.flow": ""})
    (found,) = site_pages.problems(tmp_path)
    assert "lacks infoflow_lens.flow.flow" in found


def test_a_notebook_becomes_a_page_with_its_pictures_beside_it(tmp_path):
    cells = [
        nbformat.v4.new_markdown_cell("# A look\n\nat something"),
        nbformat.v4.new_code_cell(
            "flow",
            outputs=[
                nbformat.v4.new_output("stream", name="stdout", text="said\n"),
                nbformat.v4.new_output("display_data", {"text/html": "<script>1</script>"}),
                nbformat.v4.new_output("display_data", {"image/png": "AAAA"}),
                nbformat.v4.new_output("execute_result", {"text/plain": "Flow()"}),
            ],
        ),
    ]
    path = tmp_path / "a-look.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    title, text, pieces = notebooks.as_page(path)
    assert title == "A look"
    assert text.index("```python\nflow") < text.index("said") < text.index("Flow()")
    assert set(pieces) == {"a-look.ipynb", "a-look-1-1.html", "a-look-1-2.png"}
    assert all(name in text for name in pieces)


@pytest.mark.parametrize(
    "term",
    ["Information set", "Order of comparison", "Mechanism", "max_position", "global",
     "specific_position", "Recovery", "Influence", "Damage", "AUROC", "Influence inside", "Rank",
     "Margin", "Own token", "CLS", "Max-position rule", "Top-k rule", "Control", "Baseline"],
)  # fmt: skip
def test_the_glossary_has_the_words_of_the_reports(term):
    assert TERMS.count(term) == 1


def test_both_runs_of_a_study_have_their_place():
    names = ("README", "a_b/earlier/table", "a_b/full/table", "a_b/statement", "a_b/table",
             "other/README")  # fmt: skip
    pages = [SimpleNamespace(src_uri=f"results/{name}.md") for name in names]
    files = SimpleNamespace(documentation_pages=lambda: pages)
    assert list(site_pages._filled(["<results>"], {}, files)) == [
        {"a b": "results/a_b/table.md"},
        {"a b, full": "results/a_b/full/table.md"},
        {"other": "results/other/README.md"},
    ]
