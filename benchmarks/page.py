"""What one step of a drag costs on the page of `flow`, and a press on that of `ask`, in a browser.

Run: python -m benchmarks.page [--tokens 300] [--layers 12] [--heads 12] [--answer]

Random weights and influence of a text as long and a model as deep as that; each slider of the page
is dragged through its values. The time is that of the page's main thread (script, style, layout and
painting), which other processes on the machine do not lengthen much; beside it stands what a
watcher waits for the next frame. A step of at most 50 ms is the target. With --answer, pages of
an answer of a small random model are opened, and their lines and folds pressed, beside opening the
page of `flow` for as many tokens and pressing its tokens. Needs playwright and
chromium (the variable CHROMIUM says where that is, if not on the path).
"""

import argparse
import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.table import Table

from infoflow_lens import ask
from infoflow_lens.report.flow_view import FlowView, ViewedInput
from infoflow_lens.report.pages import write_flow
from tests.reference import zoo

_TARGET = 50
_STEPS = """async ([slider, values]) => {
  const root = document.querySelector("[data-infoflow]").shadowRoot, waits = [];
  const input = root.querySelector(`${slider} input`);
  for (const value of values) {
    const start = performance.now();
    input.value = value;
    input.dispatchEvent(new Event("input", { bubbles: true }));
    await new Promise(requestAnimationFrame);
    await new Promise((done) => setTimeout(done, 0));
    waits.push(performance.now() - start);
  }
  return waits.sort((a, b) => a - b)[waits.length >> 1];
}"""

_PRESSES = """async (what) => {
  const root = document.querySelector("[data-infoflow]")?.shadowRoot ?? document, waits = [];
  for (const part of root.querySelectorAll(what)) {
    const start = performance.now();
    part.dispatchEvent(new MouseEvent("click", { bubbles: true, cancelable: true }));
    await new Promise(requestAnimationFrame);
    await new Promise((done) => setTimeout(done, 0));
    waits.push(performance.now() - start);
  }
  return waits.sort((a, b) => a - b)[waits.length >> 1];
}"""


def view(n_tokens: int, n_layers: int, n_heads: int) -> FlowView:
    """Random attention and influence."""
    generator = torch.Generator().manual_seed(0)
    allowed = torch.ones(n_tokens, n_tokens).tril().bool()
    ranked, weights = [], []
    for _ in range(n_layers):
        scores = 2 * torch.randn(n_heads, n_tokens, n_tokens, generator=generator)
        top = scores.masked_fill(~allowed, -torch.inf).softmax(-1).topk(8)
        ranked.append(top.indices.masked_fill(top.values == 0, -1))
        weights.append(top.values)
    influence = torch.rand(n_layers, n_tokens, n_tokens, generator=generator) ** 3 * allowed
    tokens = [f"word{i % 37}" for i in range(n_tokens)]
    shown = ViewedInput(tokens, n_tokens, ranked, weights, influence=influence)
    return FlowView("Random", [shown])


def step(page: Any, slider: str, values: list[int]) -> tuple[float, float]:
    """Milliseconds of a step: of the page's main thread, and until the next frame."""
    devtools = page.context.new_cdp_session(page)
    devtools.send("Performance.enable", {"timeDomain": "threadTicks"})

    def spent() -> float:
        metrics = devtools.send("Performance.getMetrics")["metrics"]
        return 1000 * next(m["value"] for m in metrics if m["name"] == "TaskDuration")

    page.evaluate(_STEPS, [slider, values[:4]])  # compiled before it is measured
    before = spent()
    wait = page.evaluate(_STEPS, [slider, values])
    return (spent() - before) / len(values), wait


def press(page: Any, path: Path, what: str) -> tuple[float, float]:
    """Milliseconds until a page has drawn, and until the next frame behind a press on its parts."""
    opened = []
    for _ in range(5):
        page.goto(path.as_uri())
        page.locator(what).first.wait_for(state="attached")
        opened.append(page.evaluate("new Promise(requestAnimationFrame)"))
    page.evaluate(_PRESSES, what)
    return sorted(opened)[2], page.evaluate(_PRESSES, what)


def compare_answers(page: Any, scratch: Path) -> Table:
    """Open and press pages of answers of 8, 15 and 60 tokens, and of flow for as many."""
    table = Table("tokens", "page", "lines", "ms to the first frame", "ms of a press")
    for n_tokens in (8, 15, 60):
        ids = zoo.tokens(1, n_tokens, seed=5)[0]
        model = zoo.build("llama", max_position_embeddings=64)
        answer = ask(model, ids, progress=False, tokenizer=zoo.tokenizer())
        pages = {
            "flow": (write_flow(view(n_tokens, 2, 4), scratch / f"f{n_tokens}.html"), ".token"),
            "answer": (
                answer.to_html(scratch / f"a{n_tokens}.html"),
                'svg a[href^="#line-"], summary',
            ),
        }
        for name, (path, what) in pages.items():
            times = press(page, path, what)
            lines = str(len(answer.bundles())) if name == "answer" else ""
            table.add_row(str(n_tokens), name, lines, *(f"{ms:.0f}" for ms in times))
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tokens", 300), ("layers", 12), ("heads", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--answer", action="store_true", help="pages of answers, beside flow's")
    asked = parser.parse_args()
    title = (
        f"{asked.tokens} tokens, {asked.layers} layers of {asked.heads} heads; {os.cpu_count()} "
        f"cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}"
    )
    table = Table("drag of", "ms of the page", "ms to the next frame", "target", title=title)
    layers = [layer % asked.layers for layer in range(2 * asked.layers)]
    drags = (
        ("state after layer", ".layer", layers),
        ("lines drawn, 5 to 395", ".lines", list(range(5, 400, 15))),
        ("k of the k largest scores, 1 to 8", ".k", [k % 8 + 1 for k in range(16)]),
    )
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        path = os.environ.get("CHROMIUM") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        if asked.answer:
            table = compare_answers(page, Path(scratch))
            drags = ()
        else:
            written = write_flow(
                view(asked.tokens, asked.layers, asked.heads), Path(scratch) / "f.html"
            )
            page.goto(written.as_uri())
            page.locator(".token").first.wait_for()
        for what, slider, values in drags:
            if slider == ".k":
                page.get_by_label("rule").select_option("top_k")
            spent, wait = step(page, slider, values)
            table.add_row(what, f"{spent:.0f}", f"{wait:.0f}", str(_TARGET))
        browser.close()
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
