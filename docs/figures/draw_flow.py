"""Draw the README's pictures: the page of the flow to the last token of a line of code.

One shows the page with the reasons of a line, one moves: states, lines and the number of lines
are chosen one after the other. Both are of the real page, in a browser: they need playwright and
chromium (the variable CHROMIUM says where that is, if not on the path).

Run: python docs/figures/draw_flow.py   (seconds)
"""

import io
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from infoflow_lens import flow

TEXT = "if not isinstance(name, str):\n    raise TypeError(name)\nif not isinstance("
LINE = "[data-line='1.5.6.23']"  # layer, head, key, query
WIDTH, HEIGHT, SHOWN = 1180, 900, 860  # of the page, and of the moving picture's frames


def press(selector: str) -> Callable[[Any], None]:
    """A step that presses what a selector finds."""

    def step(page: Any) -> None:
        page.locator(selector).first.focus()
        page.keyboard.press("Enter")

    return step


def choose(layer: int, position: int) -> Callable[[Any], None]:
    """A step that chooses a state."""
    place = f"circle[data-layer='{layer}'][data-position='{position}']"
    return lambda page: page.locator(place).first.click(force=True)


def set_lines(n: int) -> Callable[[Any], None]:
    """A step that draws the strongest lines alone."""
    return lambda page: page.locator("input[type=range]").last.fill(str(n))


# what is done, and for how many milliseconds its outcome is seen
STEPS: tuple[tuple[Callable[[Any], None], int], ...] = (
    (lambda page: None, 2200),
    (set_lines(30), 1800),
    (choose(0, 6), 2200),
    (choose(1, 23), 800),
    (press(LINE), 3600),
)


def frames(page: Any) -> list[Image.Image]:
    """The page after each step."""
    found = []
    for step, _ in STEPS:
        step(page)
        page.wait_for_timeout(400)
        shot = Image.open(io.BytesIO(page.screenshot()))
        found.append(shot.convert("RGB").resize((SHOWN, SHOWN * HEIGHT // WIDTH), Image.LANCZOS))
    return found


if __name__ == "__main__":
    folder = Path(__file__).parent
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        written = flow("stdlib-2l", TEXT, progress=False).to_html(Path(scratch) / "flow.html")
        path = os.environ.get("CHROMIUM") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(written.as_uri())
        first, *others = frames(page)
        first.save(
            folder / "flow.webp",
            save_all=True,
            append_images=others,
            duration=[time for _, time in STEPS],
            loop=0,
            quality=80,
        )
        below = page.locator("details.table").bounding_box()
        height = below["y"] if below else HEIGHT
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": height}
        page.screenshot(path=folder / "flow_page.png", clip=clip, full_page=True)
        browser.close()
