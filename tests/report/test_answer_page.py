"""The page of an answer in a browser: it fits a screen and a phone, and a press on a line works."""

import math
import re
from dataclasses import replace
from itertools import combinations

import pytest
import torch

from infoflow_lens import ask
from infoflow_lens.hooks.answer.result import KINDS
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
    boxes = [page.locator(f".strips svg >> nth={n}").bounding_box() for n in (0, 1)]
    assert boxes[1]["x"] + boxes[1]["width"] - boxes[0]["x"] <= strips._SCREEN
    if width == 1280:
        assert page.evaluate("[...document.querySelectorAll('.scroll:has(svg)')].every("
                             "box => box.scrollWidth <= box.clientWidth)")  # fmt: skip


def test_the_page_has_one_sign_and_one_name_for_the_score(show, found):
    """The warning is red, MLPs stand beside the lines, and kinds of lines are explained."""
    weak = torch.tensor([[0.3, 0.02], [0.01, 0.04]]).double()
    page = show(render_answer(replace(found, answer_chances=weak)))
    said = page.locator(".warning")
    assert said.text_content().startswith("In the other text neither answer is likely")
    red, *others = map(int, re.findall(r"\d+", said.evaluate("e => getComputedStyle(e).color")))
    assert red > 2 * max(others)
    text = page.locator("main").text_content()
    record = page.locator("details pre").text_content()
    assert "readout" not in text.replace(record, "")
    assert found.describe_units() in text
    decides = page.locator("section:has(> h2:text-is('What decides'))")
    assert "MLP" in decides.locator(".narrow").text_content()
    assert "Lines: what decides, numbered as below" in text
    for kind in {KINDS[kind] for kind in found.places[:, 6].tolist()}:
        assert strips._MEANINGS[kind] in page.locator(".keys").text_content()
    assert page.locator(".warning").count() == 1
    likely = torch.tensor([[0.3, 0.02], [0.01, 0.4]]).double()
    page = show(render_answer(replace(found, answer_chances=likely)))
    assert page.locator(".warning").count() == 0


def test_a_page_of_a_score_without_answers_speaks_of_none(found):
    """Such as that of a cosine; what predicts an order of words is explained, where it is shown."""
    none = {"answers": (), "answer_chances": torch.zeros(2, 0).double(), "guess": "", "notes": ()}
    page = render_answer(replace(found, **none, readout="a cosine"))
    said = re.sub("<style>.*?</style>|<pre>.*?</pre>|<[^>]*>", " ", page, flags=re.DOTALL)
    assert "the answer" not in said  # a kind of input of a path is called so
    assert "writes the score" in said
    assert "for a high score" in said
    assert "Contributions in squares, and best paths, are predicted" in said
    unsaid = torch.full_like(found.token_predicted, math.nan)
    assert "best paths" not in render_answer(replace(found, token_predicted=unsaid))


def test_a_press_on_a_line_leads_to_its_row(show, found):
    page = show(render_answer(found))
    number = len(found.bundles())
    assert number
    page.locator(f'svg a[href="#line-{number}"] circle').click()
    said = page.locator("tr:target").text_content()
    assert said.startswith(f"{number}. {found.bundles()[-1][0]}")


def test_no_number_of_a_line_hides_another(show, found):
    """Lines with the same ends had their numbers in one place."""
    group = found.bundles()[0][1][:1]
    places = found.places[group].repeat(8, 1)
    places[:, 6] = torch.arange(8) % 3
    places[:, 0] = torch.arange(8) // 3
    columns = {name: getattr(found, name)[group].repeat(8) for name in PATHS[1:]}
    page = show(render_answer(replace(found, places=places, **columns)))
    at = page.evaluate(
        "[...document.querySelectorAll('.strips circle')].map(c => "
        "[c.cx.baseVal.value, c.cy.baseVal.value, c.r.baseVal.value])"
    )
    assert len(at) == len(replace(found, places=places, **columns).bundles()) > 2
    for one, other in combinations(at, 2):
        assert math.dist(one[:2], other[:2]) >= one[2] + other[2]


def test_names_of_layers_stay_when_the_picture_is_moved_on_a_phone(show, found):
    page = show(render_answer(found), 390, 800)
    box = page.locator(".strips")
    end = "box => box.scrollLeft = -box.scrollWidth"  # it begins at the end of the text
    moved = "box => box.querySelector('svg:not(.names)').getBoundingClientRect().right"
    last = box.evaluate(moved)
    assert last <= box.bounding_box()["x"] + box.bounding_box()["width"] + 1
    box.evaluate(end)
    assert box.evaluate(moved) > last
    assert page.locator(".strips .names").bounding_box()["x"] == box.bounding_box()["x"]


def test_what_a_word_might_have_been_stands_with_the_score_then(show, found):
    """What decides stands first, where heads look behind it, and all heads in a fold."""
    rows = tuple(("w1", "w2 <b>") if len(words) else () for words in found.replacements)
    effects = torch.tensor([[-1.5, 0.25]] * len(rows)).double()
    found = replace(found, replacements=rows, replacement_effects=effects)
    page = show(render_answer(found))
    place = found.changed[0]
    row = page.locator(f"table.words tr:has(small:text-is('@{place}'))").first
    said = row.text_content()
    assert f"w1 {found.value - 1.5:+.2f}w2 <b> {found.value + 0.25:+.2f}" in said
    assert f"the other text's {found.other_tokens[place]}" in said
    titles = page.locator("h2, summary").all_text_contents()
    order = [
        "Which words matter, and what if they were others?", "Where it is decided", "What decides",
        "Where heads look", "How sure is this?", "Heads and MLPs",
    ]  # fmt: skip
    assert [title for title in titles if title in order] == order
    for sentence in (found.describe_readout(), *found.describe_certainty()):
        assert sentence in page.locator("main").inner_text()


@pytest.mark.parametrize("width", [1280, 390])
def test_units_are_the_columns_of_the_picture_and_the_ends_of_lines(show, width):
    ids = torch.cat([zoo.tokens(1, 6, seed=5)[0], torch.tensor([7, 34, 29, 47, 30, 5])])
    spans = [(0, 2), (2, 6), (6, 8), (8, 12)]
    answer = ask(
        zoo.build("llama"), ids, units=spans, progress=False, tokenizer=zoo.tokenizer()
    )  # fmt: skip
    lines = answer.bundles()
    assert lines
    page = show(render_answer(answer), width, 800)
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    picture = page.locator(".strips svg:not(.names)")
    assert picture.locator(".cell").count() == 4 * len(answer.strip_layers)
    words = [node.text_content() for node in picture.locator("text.tick[y='16']").all()]
    assert words == [answer.unit_names[unit].strip() for unit in range(4)]
    said = picture.locator(".cell title").first.text_content()
    assert said.startswith(f"{answer.span_words[0]} (0), layer 0: ")
    picture.locator('a[href="#line-1"] circle').click()
    assert page.locator("tr:target").text_content().startswith(f"1. {lines[0][0]}")


def test_no_line_ends_between_a_quotation_mark_and_its_word(show, found):
    """A word that begins with a blank stood without its mark; what is copied keeps the blank."""
    asked = replace(found, answers=("' Laura'", '" it\'s"'), guess=" Laura")
    page = show(render_answer(asked, Form("to ' Laura'", answer="' Laura'")), 390, 800)
    apart = """() => { const found = [];
      const walk = document.createTreeWalker(document.querySelector("main"), 4);
      while (walk.nextNode()) {
        const node = walk.currentNode, range = document.createRange();
        if (node.parentNode.closest("textarea, pre")) continue;
        for (const at of node.data.matchAll(/(?<![^\\s(])['"] \\S/g)) {
          const tops = [at.index, at.index + 2].map(place => { range.setStart(node, place);
            range.setEnd(node, place + 1); return range.getBoundingClientRect().top; });
          found.push(tops[0] !== tops[1]); } }
      return found; }"""
    seen = []
    for width in range(320, 520, 10):
        page.set_viewport_size({"width": width, "height": 800})
        seen += page.evaluate(apart)
    assert seen
    assert not any(seen)
    assert page.locator("textarea").first.input_value() == "to ' Laura'"
    assert "' Laura' has" in page.locator(".headline").text_content()


def test_places_stand_behind_words_that_are_written_from_right_to_left(show, found):
    """3@ and the numbers behind stood before the word."""
    word = "\u05e9\u05dc\u05d5\u05dd"
    turned = replace(found, tokens=(word,) * len(found.tokens))
    form = Form(f"{word}@3", answer=f"{word}@4")
    page = show(render_answer(turned, form), 1280, 800)
    lefts = page.evaluate(
        """word => { const walk = document.createTreeWalker(document.querySelector("main"), 4);
          const found = [];
          while (walk.nextNode()) {
            const text = walk.currentNode.data, at = text.search(word + "\u2069?@");
            if (at < 0 || walk.currentNode.parentNode.closest("textarea")) continue;
            const box = place => { const range = document.createRange();
              range.setStart(walk.currentNode, place); range.setEnd(walk.currentNode, place + 1);
              return range.getBoundingClientRect(); };
            const [end, sign] = [box(at + word.length - 1), box(text.indexOf("@", at))];
            if (end.width && end.top === sign.top) found.push([end.left, sign.left]); }
          return found; }""",
        word,
    )
    assert lefts
    assert all(letter < at for letter, at in lefts)
    assert page.locator("textarea").first.input_value() == form.text
    assert page.locator("input[name=answer]").input_value() == form.answer
