"""The page of an answer in a browser: it fits a screen and a phone, and a press on a line works."""

from dataclasses import replace

import pytest
import torch

from infoflow_lens import ask
from infoflow_lens.report import strips
from infoflow_lens.report.answer import Form, render_answer
from tests.reference import zoo

PATHS = ("places", "path_worth", "path_cost", "path_effect")
LENGTHS = [60, *(pytest.param(n, marks=pytest.mark.slow) for n in (8, 15))]


@pytest.fixture(scope="module", params=LENGTHS)
def found(request):
    """The states of the changed word and of the last one carry all, with some between."""
    length = request.param
    ids = torch.cat([zoo.tokens(1, length - 6, seed=5)[0], torch.tensor([7, 34, 29, 47, 30, 5])])
    model = zoo.build("llama", max_position_embeddings=64)
    answer = ask(model, ids, quick=True, progress=False, tokenizer=zoo.tokenizer())
    keep = [path for _, group in answer.bundles()[:3] for path in group]
    columns = {name: getattr(answer, name)[keep] for name in PATHS}
    rows = torch.zeros(3, length, dtype=torch.float64)
    rows[0, answer.changed[0]] = rows[2, -1] = -answer.gap
    rows[1, [answer.changed[0], -3, -1]] = -answer.gap / 3
    return replace(answer, **columns, strip_layers=(0, 1, 2), strips=rows)


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_page_has_nothing_beside_the_screen(show, found, width, scheme, served):
    """Of sixty words those that carry nothing are thin, so that the picture fits."""
    form = Form(" ".join(found.tokens)) if served else None
    page = show(render_answer(found, form, can_cut=served), width, 800, scheme)
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    picture = page.locator("svg").first
    assert picture.bounding_box()["width"] <= strips._SCREEN
    if width == 1280:
        assert page.evaluate("[...document.querySelectorAll('.scroll:has(svg)')].every("
                             "box => box.scrollWidth <= box.clientWidth)")  # fmt: skip


def test_a_press_on_a_line_leads_to_its_row(show, found):
    page = show(render_answer(found))
    number = len(found.bundles())
    assert number
    page.locator(f'svg a[href="#line-{number}"] circle').click()
    said = page.locator("tr:target").text_content()
    assert said.startswith(f"{number}. {found.bundles()[-1][0]}")
