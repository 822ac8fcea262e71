"""Run the notebooks in examples/notebooks, and show them as pages of the site.

``python docs/tools/notebooks.py`` runs each from its start, as a reader would, writes it with its
output to build/notebooks, from which the site is made, and ends with an error where the output
that is committed says something else. With ``--write`` that is replaced (needs chromium: in a
committed notebook an interactive picture is a still one), with ``--part 1`` a third of them is run.
Where NOTEBOOKS is "committed" in the environment, the site shows committed output, and runs alone
the first, whose picture stands on other pages.
"""

import argparse
import base64
import io
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "examples" / "notebooks"
RUN = ROOT / "build" / "notebooks"
FIRST = "first_look"  # its picture stands on other pages
TIMEOUT = 300  # seconds for one cell
WIDTH, HEIGHT = 820, 700  # of the still picture of a page
RELATIVE, ABSOLUTE = 0.05, 0.02  # how far numbers may differ between processors


def run(source: Path, out: Path) -> NotebookNode:
    """Run a notebook, and write it with its output.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell fails.
    """
    from nbclient import NotebookClient

    notebook = nbformat.read(source, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT,
        kernel_name="python3",
        resources={"metadata": {"path": SOURCES}},
        coalesce_streams=True,
    )
    client.execute()
    out.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, out)
    return notebook


def live(source: Path) -> NotebookNode:
    """The notebook with interactive output: of its last run, if its cells are the same since."""
    committed, ran = nbformat.read(source, as_version=4), RUN / source.name
    if os.environ.get("NOTEBOOKS") == "committed" and source.stem != FIRST:
        return committed
    if ran.exists():
        notebook = nbformat.read(ran, as_version=4)
        if _cells(notebook) == _cells(committed):
            return notebook
    return run(source, ran)


def _cells(notebook: NotebookNode) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def is_interactive(output: NotebookNode) -> bool:
    """Whether it is HTML that a script moves."""
    return "<script" in "".join(output.get("data", {}).get("text/html", ""))


# What is committed


def still(notebook: NotebookNode) -> NotebookNode:
    """A copy with small output: interactive pictures are still, and pictures compressed."""
    copy = nbformat.from_dict(notebook)
    copy.metadata.pop("widgets", None)
    copy.metadata["language_info"] = {"name": "python"}
    for cell in copy.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
        for output in cell.outputs:
            data = output.get("data", {})
            if is_interactive(output):
                data["image/png"] = _compressed(_photographed(data.pop("text/html")))
            elif "image/png" in data:
                data["image/png"] = _compressed(base64.b64decode(data["image/png"]))
    return copy


def _photographed(html: str) -> bytes:
    """The first screen of a page, as PNG."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "page.html"
        path.write_text(f'<!doctype html><meta charset="utf-8">{html}', "utf-8")
        found = os.environ.get("CHROMIUM") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(path.as_uri())
        picture = page.screenshot()
        browser.close()
    return picture


def _compressed(png: bytes) -> str:
    """PNG with a palette, in base64."""
    from PIL import Image

    small = io.BytesIO()
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    picture.quantize(64).save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode("ascii") + "\n"


_NUMBER = re.compile(r"-?\d*\.?\d+(?:e[+-]?\d+)?")


def differences(committed: NotebookNode, ran: NotebookNode) -> list[str]:
    """Where committed output is not what a run gives: other words, or numbers that are not near.

    Pictures must be there, and are not compared.
    """
    found = []
    for number, (old, new) in enumerate(zip(committed.cells, ran.cells, strict=True)):
        if old.cell_type != "code":
            continue
        # joined, for where one print ends and the next begins depends on when they arrive
        said, says = (" ".join(" ".join(map(_said, _kept(c))).split()) for c in (old, new))
        if _NUMBER.sub("#", said) != _NUMBER.sub("#", says):
            found.append(f"cell {number}: {said!r} is committed, and a run gives {says!r}")
            continue
        pairs = zip(_NUMBER.findall(said), _NUMBER.findall(says), strict=True)
        far = [f"{a} and not {b}" for a, b in pairs if not _near(float(a), float(b))]
        if far:
            found.append(f"cell {number}: a run gives {', '.join(b for b in far[:3])}")
    return found


def _kept(cell: NotebookNode) -> list[NotebookNode]:
    return [output for output in cell.outputs if output.get("name") != "stderr"]


def _said(output: NotebookNode) -> str:
    """An output as words: its text, a table without its tags, or that it is a picture."""
    data = output.get("data", {})
    if "image/png" in data or is_interactive(output):
        return "a picture"
    if "text/html" in data:
        html = re.sub(r"<style.*?</style>", "", "".join(data["text/html"]), flags=re.S)
        return " ".join(re.sub(r"<[^>]+>", " ", html).split())
    return "".join(output.get("text", "") or data.get("text/plain", ""))


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= max(ABSOLUTE, RELATIVE * max(abs(a), abs(b)))


# Pages of the site


def _shown(output: NotebookNode, name: str, pieces: dict[str, str | bytes]) -> str:
    """One output in Markdown; pictures and interactive pages become files of their own."""
    if output.output_type == "stream":
        return f"```text\n{output.text.rstrip()}\n```" if output.name == "stdout" else ""
    data = output.get("data", {})
    if is_interactive(output):
        html = "".join(data["text/html"])
        pieces[f"{name}.html"] = f'<!doctype html><meta charset="utf-8">{html}'
        return frame(f"{name}.html")
    if "text/html" in data:
        return f'<div class="output">\n{"".join(data["text/html"])}\n</div>'
    if "image/png" in data:
        pieces[f"{name}.png"] = base64.b64decode(data["image/png"])
        return f"![]({name}.png)"
    return f"```text\n{''.join(data.get('text/plain', '')).rstrip()}\n```"


def frame(address: str) -> str:
    """A live page inside another."""
    return f'<iframe class="flow" src="{address}" title="The interactive picture"></iframe>'


def as_page(source: Path, notebook: NotebookNode) -> tuple[str, str, dict[str, str | bytes]]:
    """Title and Markdown of a notebook that was run, and the files that it shows, by name."""
    parts: list[str] = []
    pieces: dict[str, str | bytes] = {}
    for i, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        parts += [
            _shown(output, f"{source.stem}-{i}-{k}", pieces)
            for k, output in enumerate(cell.get("outputs", []))
        ]
    heading, _, rest = parts[0].partition("\n")
    download = f'<a href="{source.name}" download>Download this notebook</a>'
    parts[0] = f"{heading}\n\n{download}\n{rest}"
    pieces[source.name] = source.read_text("utf-8")
    return heading.lstrip("# "), "\n\n".join(part for part in parts if part) + "\n", pieces


def main(write: bool, part: int | None = None) -> int:
    """Run all, or a third of them; the status of the process."""
    wrong, sources = 0, sorted(SOURCES.glob("*.ipynb"))
    for source in sources if part is None else sources[part % 3 :: 3]:
        print(f"{source.name}: ", end="", flush=True)
        start = time.perf_counter()
        ran = run(source, RUN / source.name)
        print(f"{time.perf_counter() - start:.0f} seconds")
        if write:
            nbformat.write(still(ran), source)
        for difference in differences(nbformat.read(source, as_version=4), ran):
            wrong += 1
            print(f"  {difference}")
    if wrong:
        print("run `make notebooks WRITE=1`, and look at what changes in examples/notebooks")
    return int(wrong > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace the committed output")
    parser.add_argument("--part", type=int, help="a third of them, by a number")
    asked = parser.parse_args()
    sys.exit(main(asked.write, asked.part))
