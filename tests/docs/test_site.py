"""Pages of the site that are made from other files, and what the site is refused for."""

import posixpath
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

import infoflow_lens
from benchmarks.routing import describe_floor, published
from infoflow_lens.report.pages import TERMS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "tools"))

import notebooks  # noqa: E402
import site_pages  # noqa: E402

GLOSSARY = re.findall(r"^### (.+)$", (ROOT / "docs" / "glossary.md").read_text("utf-8"), re.M)


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
        ("https://example.org/a.md", "index.md", "README.md", "https://example.org/a.md"),
    ],
)
def test_links_between_files_become_links_between_pages(link, uri, origin, place):
    assert moved(f"see [this]({link}) and", uri, origin) == f"see [this]({place}) and"


def test_of_a_link_to_a_file_without_a_page_the_text_stays():
    assert moved("see [the licence](LICENSE).", "index.md", "README.md") == "see the licence."


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
    title, text, pieces = notebooks.as_page(path, nbformat.read(path, as_version=4))
    assert title == "A look"
    assert text.index("```python\nflow") < text.index("said") < text.index("Flow()")
    assert set(pieces) == {"a-look.ipynb", "a-look-1-1.html", "a-look-1-2.png"}
    assert all(name in text for name in pieces)


def notebook(*outputs, source="run()"):
    cell = nbformat.v4.new_code_cell(source, outputs=list(outputs))
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# A look"), cell])


def said(text, name="stdout"):
    return nbformat.v4.new_output("stream", name=name, text=text)


def shown(**data):
    names = {"png": "image/png", "html": "text/html", "plain": "text/plain"}
    data = {names[name]: value for name, value in data.items()}
    return nbformat.v4.new_output("display_data", data)


INTERACTIVE = "<script>1</script>"


@pytest.mark.parametrize(
    ("committed", "ran", "differ"),
    [
        (said("loss 0.50 of 9\n"), said("loss 0.51 of 9\n"), False),
        (said("loss 0.50 of 9\n"), said("loss 0.60 of 9\n"), True),
        (said("loss 0.50\n"), said("error 0.50\n"), True),
        (said("1e-3 left\n"), said("2e-3 left\n"), False),
        (said("120 left\n"), said("130 left\n"), True),
        (shown(html="<b>2</b>", plain="at 0x1"), shown(html="<i>2</i>", plain="at 0x7"), False),
        (shown(html="<b>2</b>"), shown(html="<b>3</b>"), True),
        (shown(png="AAAA"), shown(png="BBBB"), False),
        (shown(png="AAAA"), shown(html=INTERACTIVE), False),
        (shown(plain="Flow()"), shown(html=INTERACTIVE), True),
    ],
)
def test_committed_output_must_say_what_a_run_says(committed, ran, differ):
    assert bool(notebooks.differences(notebook(committed), notebook(ran))) == differ


def test_where_a_print_ends_is_no_difference():
    together, apart = notebook(said("a\nb\n")), notebook(said("a\n"), said("b\n"))
    assert not notebooks.differences(together, apart)


def test_output_that_is_missing_or_new_is_a_difference_but_no_warnings():
    assert notebooks.differences(notebook(), notebook(said("1\n")))
    assert notebooks.differences(notebook(said("1\n")), notebook())
    assert not notebooks.differences(notebook(), notebook(said("careful", name="stderr")))


def test_a_run_is_shown_while_its_cells_are_those_of_the_notebook(tmp_path, monkeypatch):
    monkeypatch.setattr(notebooks, "RUN", tmp_path / "ran")
    monkeypatch.setattr(notebooks, "run", lambda source, out: "run anew")
    (tmp_path / "ran").mkdir()
    nbformat.write(notebook(said("1\n")), tmp_path / "ran" / "a.ipynb")
    nbformat.write(notebook(), tmp_path / "a.ipynb")
    assert notebooks.live(tmp_path / "a.ipynb").cells[1].outputs[0].text == "1\n"
    with monkeypatch.context() as patch:
        patch.setenv("NOTEBOOKS", "committed")
        assert notebooks.live(tmp_path / "a.ipynb").cells[1].outputs == []
        patch.setattr(notebooks, "FIRST", "a")
        assert notebooks.live(tmp_path / "a.ipynb").cells[1].outputs[0].text == "1\n"
    nbformat.write(notebook(source="run(2)"), tmp_path / "a.ipynb")
    assert notebooks.live(tmp_path / "a.ipynb") == "run anew"


SOURCES = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_committed_notebook_is_small_and_whole(path):
    assert path.stat().st_size < 120_000
    committed = nbformat.read(path, as_version=4)
    outputs = [output for cell in committed.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(notebooks.is_interactive(output) for output in outputs)


@pytest.mark.parametrize(
    ("link", "uri", "origin"),
    [
        ("docs/figures/flow.webp", "index.md", "README.md"),
        ("../figures/flow_page.png", "tutorials/index.md", None),
    ],
)
def test_a_picture_of_the_page_becomes_the_page(link, uri, origin):
    live = {"live": "notebooks/first_look-2-0.html"}
    page = SimpleNamespace(file=SimpleNamespace(src_uri=uri))
    config = SimpleNamespace(extra={"origins": {uri: origin} if origin else {}, **live})
    text = site_pages.on_page_markdown(f"![A picture]({link})", page, config, None)
    (place,) = re.findall(r'^<iframe class="flow" src="([^"]+)"', text)
    folder = posixpath.dirname(uri)
    assert posixpath.normpath(posixpath.join(folder, place)) == live["live"]


def test_search_works_on_a_page_from_disk(tmp_path, browser):
    """The theme's worker, which a browser would refuse to start from a file."""
    workers = tmp_path / "assets" / "javascripts" / "workers"
    workers.mkdir(parents=True)
    (tmp_path / "search").mkdir()
    (workers / "search.1.min.js").write_text('onmessage = e => postMessage("found " + e.data);')
    site_pages.write_search_worker(tmp_path)
    (tmp_path / "page.html").write_text(
        '<script src="search/instead-of-iframe-worker.js"></script><script>'
        'const worker = new Worker("assets/javascripts/workers/search.1.min.js");'
        "worker.onmessage = e => { document.title = e.data; };"
        'worker.postMessage("it");</script>'
    )
    page = browser.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    page.wait_for_function("document.title == 'found it'", timeout=10_000)
    page.close()


SITE = ROOT / "build" / "site"


@pytest.mark.skipif(not SITE.exists(), reason="the site is not built: make docs")
def test_the_built_site_has_the_live_page_and_can_be_searched_from_disk(browser):
    page = browser.new_page()
    asked = []
    page.on("request", lambda request: asked.append(request.url.partition(":")[0]))
    page.goto((SITE / "how-to" / "what-a-state-holds.html").as_uri())
    page.frame_locator("iframe.flow").first.locator("circle[data-layer]").first.wait_for()
    page.fill("input.md-search__input", "max-position")
    found = page.locator(".md-search-result__item a").first
    found.wait_for(state="attached", timeout=60_000)
    assert found.get_attribute("href").startswith(SITE.as_uri())
    assert set(asked) <= {"file", "blob", "data"}
    page.close()


@pytest.mark.parametrize("term", TERMS)
def test_the_glossary_has_the_words_of_the_reports(term):
    assert [entry.lower() for entry in GLOSSARY].count(term.lower()) == 1


def test_both_runs_of_a_study_have_their_place():
    names = ("README", "a_b/earlier/table", "a_b/full/table", "a_b/longer/table",
             "a_b/statement", "a_b/table", "language_model/reasons",
             "language_model/reasons/table", "other/README")  # fmt: skip
    pages = [SimpleNamespace(src_uri=f"results/{name}.md") for name in names]
    files = SimpleNamespace(documentation_pages=lambda: pages)
    assert list(site_pages.filled(["<results>"], {}, files)) == [
        {"a b": "results/a_b/table.md"},
        {"a b, full": "results/a_b/full/table.md"},
        {"a b, longer": "results/a_b/longer/table.md"},
        {"language model, reasons": "results/language_model/reasons.md"},
        {"other": "results/other/README.md"},
    ]


def test_what_routing_tells_of_published_rows_is_what_they_hold():
    page = (ROOT / "docs" / "routing.md").read_text("utf-8")
    table = page[page.index("| D | matrices | draw |") :].split("\n\n")[0].splitlines()[2:]
    told = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    rows = published().itertuples()
    held = [
        [*map(str, (row.D, row.matrices, row.draw + 1, row.h_1, row.n_tokens)),
         describe_floor(row), f"{row.trained:.3g}"]
        for row in rows
    ]  # fmt: skip
    assert [[*cells[:5], *cells[6:]] for cells in told] == held
