"""Draw the pictures of the page of `flow` that docs/how-to/read-the-page.md shows.

All are of the real page in a browser, with the model that comes with the package, and with a deep
one of random weights where it is about how much goes into a page. They need playwright and chromium
(the variable CHROMIUM says where that is, if not on the path).

Run: python docs/figures/draw_page.py   (a minute)
"""

import io
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from playwright.sync_api import sync_playwright
from transformer_lens import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge

from infoflow_lens import Flow, compare_flows, flow

SHORT = "for x in xs:"
CODE = """def read(path):
    with open(path) as file:
        text = file.read()
    return text.split()

def write(path, text):
    with open(path, "w") as file:
        file.write(text)

def copy(source, target):
    write(target, read(source))"""
CHECKED = "if not isinstance(name, str):\n    raise TypeError({})\nif not isinstance("
SHOWN = 1000  # pixels across, as saved
FEW_BYTES = 80_000


def deep(n_tokens: int) -> Flow:
    """A flow through twelve layers of a model with random weights, which look at few keys."""
    torch.manual_seed(0)
    config = TransformerBridgeConfig(
        n_layers=12, n_heads=8, d_model=64, d_head=8, n_ctx=300, d_vocab=500, act_fn="gelu"
    )
    model = TransformerBridge.boot_native(config)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if any(part in name for part in (".q.", ".k.", "W_Q", "W_K")):
                weights.mul_(8)
    ids = torch.randint(500, (1, n_tokens), generator=torch.Generator().manual_seed(0))
    return flow(model, ids, position=-1, influence="estimate", progress=False)


def save(shot: bytes, path: Path, most: int = SHOWN) -> None:
    """A screenshot as a file of few bytes."""
    image = Image.open(io.BytesIO(shot)).convert("RGB")
    for width, quality in ((most, 80), (most, 60), (most, 40), (0.8 * most, 40), (0.7 * most, 35)):
        across = min(round(width), image.width)
        small = image.resize((across, image.height * across // image.width), Image.LANCZOS)
        small.save(path, quality=quality, method=6)
        if path.stat().st_size <= FEW_BYTES:
            return
    raise SystemExit(f"{path.name} has {path.stat().st_size} bytes: expected at most {FEW_BYTES}")


def press_line(page: Any) -> None:
    """Asks why of the strongest line."""
    page.locator("g.line").first.focus()
    page.keyboard.press("Enter")


def replace_token(page: Any) -> None:
    """Chooses what to replace, and finds a token."""
    page.locator(".swap select").select_option("6")
    page.locator(".search input").fill("name")


if __name__ == "__main__":
    folder = Path(__file__).parent
    name, value = (flow("stdlib-2l", CHECKED.format(w), progress=False) for w in ("name", "value"))
    code = flow("stdlib-2l", CODE, max_length=64, progress=False)
    # what is shown, how wide and high the window is, light or dark, and what is done before
    pictures: dict[str, tuple[Any, int, int, str, Any]] = {
        "page_8": (flow("stdlib-2l", SHORT, progress=False), 1180, 900, "light", press_line),
        "page_24": (name, 1180, 800, "dark", replace_token),
        "page_64": (code, 1180, 900, "light", None),
        "page_deep_8": (deep(8), 1180, 1000, "light", None),
        "page_deep_64": (deep(64), 1180, 1000, "dark", None),
        "page_deep_300": (deep(300), 1180, 1150, "light", None),
        "page_phone": (code, 390, 1100, "light", None),
        "page_beside": (compare_flows(name, value), 1300, 1500, "light", None),
    }
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        path = os.environ.get("CHROMIUM") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for picture, (shown, width, height, scheme, before) in pictures.items():
            written = shown.to_html(Path(scratch) / f"{picture}.html")
            page = browser.new_page(
                viewport={"width": width, "height": height},
                color_scheme=scheme,
                has_touch=width < 500,
                is_mobile=width < 500,
            )
            page.goto(written.as_uri())
            page.locator("g.line").first.wait_for(state="attached")
            if before is not None:
                before(page)
            page.mouse.move(0, 0)
            page.wait_for_timeout(500)
            save(page.screenshot(), folder / f"{picture}.webp")
            page.close()
        browser.close()
