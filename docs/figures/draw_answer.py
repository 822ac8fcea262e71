"""Draw the picture of the page of `ask` that README.md begins with.

It is of the real page in a browser, with SmolLM2 (`make models`), without what explains signs, and
with the first four words of the table. It needs playwright and chromium
(the variable CHROMIUM says where that is, if not on the path).

Run: python docs/figures/draw_answer.py   (half a minute)
"""

import os
import shutil
import tempfile
from pathlib import Path

from draw_page import save
from playwright.sync_api import sync_playwright

from infoflow_lens import ask

HERE = Path(__file__).parent
TEXT = "When Mary and John went to the store, {} gave a drink to"
_SHORTER = "p.soft, .words tbody tr:nth-child(n+5) { display: none }"


def main() -> None:
    """Ask, and take the picture down to the states with what decides drawn on them."""
    model = HERE.parents[1] / "build" / "models" / "smollm2"
    found = ask(model, TEXT.format("John"), " Mary", " John", TEXT.format("Mary"))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = found.to_html(Path(folder) / "answer.html")
        browser = playwright.chromium.launch(
            executable_path=os.environ.get("CHROMIUM") or shutil.which("chromium"),
            args=["--no-sandbox"],
        )
        page = browser.new_page(
            viewport={"width": 900, "height": 1080}, device_scale_factor=2, bypass_csp=True
        )
        page.goto(page_file.as_uri())
        page.add_style_tag(content=_SHORTER)
        box = page.locator(".keys").bounding_box()
        assert box is not None  # the legend of the picture
        clip = {"x": 0, "y": 0, "width": 900, "height": box["y"] + box["height"] + 12}
        save(page.screenshot(full_page=True, clip=clip), HERE / "answer.webp")
        browser.close()


if __name__ == "__main__":
    main()
