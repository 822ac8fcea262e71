"""Draw the README's pictures: the flow to the last token of a line of code, in the shipped model.

The still picture, and the page with the reasons of a line, as a browser shows it: it needs
playwright and chromium (the variable CHROMIUM says where that is, if not on the path).

Run: python docs/figures/draw_flow.py   (seconds)
"""

import os
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from infoflow_lens import flow

TEXT = "if not isinstance(name, str):\n    raise TypeError(name)\nif not isinstance("
LINE = "[data-line='1.5.6.23']"  # layer, head, key, query


def draw_page(page: Path, picture: Path) -> None:
    """The upper part of a page, with one line pressed."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": 1180, "height": 900}, color_scheme="light")
        shown.goto(page.as_uri())
        shown.locator(LINE).focus()
        shown.keyboard.press("Enter")
        shown.locator(".why").wait_for()
        below = shown.locator("details.table").bounding_box()
        height = below["y"] if below else 900
        clip = {"x": 0, "y": 0, "width": 1180, "height": height}
        shown.screenshot(path=picture, clip=clip, full_page=True)
        browser.close()


found = flow("stdlib-2l", TEXT, progress=False)
still = found.plot()
still.set_size_inches(9, 4)
folder = Path(__file__).parent
still.savefig(folder / "flow.png", dpi=110, bbox_inches="tight", metadata={})
with tempfile.TemporaryDirectory() as scratch:
    draw_page(found.to_html(Path(scratch) / "flow.html"), folder / "flow_page.png")
