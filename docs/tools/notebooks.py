"""Run the notebooks in examples/notebooks, and show them as pages of the site.

``python docs/tools/notebooks.py`` runs each from its start, as a reader would, and writes it with
its output to build/notebooks. The site shows that where it is newer than the notebook.
"""

import base64
import sys
import time
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "examples" / "notebooks"
RUN = ROOT / "build" / "notebooks"
TIMEOUT = 300  # seconds for one cell


def run(source: Path, out: Path) -> float:
    """Run a notebook and write it with its output; the seconds that it took.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell fails.
    """
    from nbclient import NotebookClient

    notebook = nbformat.read(source, as_version=4)
    start = time.perf_counter()
    client = NotebookClient(
        notebook, timeout=TIMEOUT, kernel_name="python3", resources={"metadata": {"path": SOURCES}}
    )
    client.execute()
    took = time.perf_counter() - start
    out.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, out)
    return took


def _shown(output: nbformat.NotebookNode, name: str, pieces: dict[str, str | bytes]) -> str:
    """One output in Markdown; pictures and interactive pages become files of their own."""
    if output.output_type == "stream":
        return f"```text\n{output.text.rstrip()}\n```" if output.name == "stdout" else ""
    data = output.get("data", {})
    if "text/html" in data:
        html = "".join(data["text/html"])
        if "<script" not in html:  # a table
            return f'<div class="output">\n{html}\n</div>'
        pieces[f"{name}.html"] = f'<!doctype html><meta charset="utf-8">{html}'
        return f'<iframe class="flow" src="{name}.html" height="760" title="The picture"></iframe>'
    if "image/png" in data:
        pieces[f"{name}.png"] = base64.b64decode(data["image/png"])
        return f"![]({name}.png)"
    return f"```text\n{''.join(data.get('text/plain', '')).rstrip()}\n```"


def as_page(source: Path) -> tuple[str, str, dict[str, str | bytes]]:
    """Title and Markdown of a notebook, and the files that it shows, by name."""
    ran = RUN / source.name
    fresh = ran.exists() and ran.stat().st_mtime >= source.stat().st_mtime
    notebook = nbformat.read(ran if fresh else source, as_version=4)
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
    title = parts[0].splitlines()[0].lstrip("# ")
    heading, _, rest = parts[0].partition("\n")
    link = f'<a href="{source.name}" download>Download this notebook</a>'
    parts[0] = f"{heading}\n\n{link}\n{rest}"
    pieces[source.name] = source.read_text("utf-8")
    return title, "\n\n".join(part for part in parts if part) + "\n", pieces


if __name__ == "__main__":
    for path in sorted(SOURCES.glob("*.ipynb")):
        print(f"{path.name}: ", end="", flush=True)
        print(f"{run(path, RUN / path.name):.0f} seconds")
    sys.exit(0)
