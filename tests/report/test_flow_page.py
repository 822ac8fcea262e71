"""The interactive picture in a real browser: what lights up is what theory propagates."""

import json
import math
import re
from dataclasses import replace
from importlib.resources import files
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.report.flow_view import (
    FlowView,
    Replaced,
    ViewedInput,
    ViewedMechanism,
    ViewedReasons,
)
from infoflow_lens.report.pages import picture_data, render_flow
from infoflow_lens.theory import MaxPosition, propagate

HEADS = (4, 2, 3)
EVIL = "<script>alert(1)</script>"
WORDS = ("The", "cat", "日本", "שלום", EVIL, "</script>", "\\n", "&amp;", "“x”")


def make_input(n=9, heads=HEADS, extra=0, seed=0, k=3, **changes):
    random = torch.Generator().manual_seed(seed)
    n_pos, ranked, weights, scores, patterns = n + extra, [], [], [], []
    allowed = torch.arange(n) <= torch.arange(n_pos)[:, None]
    for n_heads in heads:
        score = torch.randn(n_heads, n_pos, n, generator=random).masked_fill(~allowed, -torch.inf)
        top = score.topk(min(k, n))
        none = top.values.isinf()
        ranked.append(top.indices.masked_fill(none, -1))
        scores.append(top.values.masked_fill(none, torch.nan))
        patterns.append(score.softmax(-1))
        weights.append(patterns[-1].gather(-1, top.indices))
    influence = torch.rand(len(heads), n_pos, n, generator=random) ** 3 * allowed
    influence[0] = torch.nan
    settings = {
        "tokens": [WORDS[i % len(WORDS)] for i in range(n)],
        "n_queries": n_pos,
        "ranked": ranked,
        "weights": weights,
        "scores": scores,
        "patterns": patterns,
        "influence": influence,
    }
    return ViewedInput(**(settings | changes))


def with_mechanisms(view):
    fixed = torch.tensor([[0, -1]]).expand(view.n_queries, 2).clone()
    fixed[:, 1] = torch.arange(view.n_queries) // 2
    every = torch.arange(len(view.tokens)).expand(view.n_queries, -1)
    kinds = [
        ViewedMechanism("max_position", view.ranked[0][0, :, :1]),
        ViewedMechanism("own_position", fixed[:, :0]),
        ViewedMechanism("specific_position", fixed),
        ViewedMechanism("global", every.where(every <= torch.arange(view.n_queries)[:, None], -1)),
    ]
    return [[kinds[(h + i) % 4] for h in range(len(r))] for i, r in enumerate(view.ranked)]


def with_reasons(view, n_parts=3):
    """Margins that are sums of named parts and a rest, for every head and query."""
    random = torch.Generator().manual_seed(5)
    names = ("token embedding", "head 0.0", EVIL, "head 1.1")
    keys, parts, values, rest = [], [], [], []
    for ranked in view.ranked:
        n_heads, n_pos, _ = ranked.shape
        keys.append(ranked[..., :2])
        order = torch.rand(n_heads, n_pos, len(names), generator=random).argsort(-1)
        parts.append(order[..., :n_parts])
        values.append(torch.randn(n_heads, n_pos, n_parts, generator=random))
        rest.append(torch.randn(n_heads, n_pos, generator=random))
    margins = [v.sum(-1) + r for v, r in zip(values, rest, strict=True)]
    return ViewedReasons(keys, margins, parts, values, rest, names)


@pytest.fixture(scope="module")
def inputs():
    made = []
    for seed, extra in ((0, 0), (1, 0), (2, 1)):
        view = make_input(seed=seed, extra=extra)
        made.append(make_input(seed=seed, extra=extra, mechanisms=with_mechanisms(view)))
    return made


@pytest.fixture(scope="module")
def html(inputs):
    return render_flow(FlowView("Three inputs", inputs, notes=["A note."]))


def test_a_page_holds_what_its_script_reads():
    """A field that is named otherwise is undefined in JavaScript, which says nothing."""
    packed = json.loads(picture_data(FlowView("one", [make_input()])))["inputs"][0]
    scripts = sorted((files("infoflow_lens.report") / "assets/flow").glob("*.js"))
    read = {
        name for script in scripts for name in re.findall(r"\binput\.(\w+)", script.read_text())
    }
    assert len(read) > 10
    assert read <= set(packed) | set(packed["arrays"])


def lit(page, nth=0):
    """The tokens that are framed, and those whose circle is filled."""
    root = page.locator("[data-infoflow]").nth(nth)
    root.locator(".token").first.wait_for()
    chips = root.locator(".token.in").evaluate_all("all => all.map(e => +e.dataset.position)")
    circles = root.locator(".flow .state.member").evaluate_all(
        "all => all.map(e => +e.dataset.position)"
    )
    return set(chips), set(circles)


def expected(view, layer, position, rule="max_position", k=1, off=()):
    layers = view.layers_of(rule, k)
    for which, head in off:
        kept = layers[which][0].positions.clone()
        kept[:, head] = -1
        layers[which] = [MaxPosition(kept)]
    return propagate(layers, len(view.tokens)).of(layer, 0, position)


def circle(page, layer, position, nth=0):
    root = page.locator("[data-infoflow]").nth(nth)
    return root.locator(f".flow .state[data-layer='{layer}'][data-position='{position}']")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_pressed_state_lights_up_its_set(show, html, inputs, scheme):
    page = show(html, scheme=scheme)
    assert lit(page) == (expected(inputs[0], 2, 8),) * 2  # the last state, at first
    for layer, position in ((2, 5), (1, 7), (0, 3)):
        circle(page, layer, position).click()
        assert lit(page) == (expected(inputs[0], layer, position),) * 2
    background = page.locator(".picture").evaluate("e => getComputedStyle(e).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")


def test_a_pressed_token_shows_its_state_and_its_circle_where_it_goes(show, html, inputs):
    page = show(html)
    page.locator(".token").nth(6).click()
    assert lit(page)[0] == expected(inputs[0], 2, 6)
    circle(page, -1, 1).click()
    sets = propagate(inputs[0].layers_of("max_position"), 9).members[:, 0, :, 1]
    for layer in range(3):
        reached = page.locator(f".flow .state.lit[data-layer='{layer}']").evaluate_all(
            "all => all.map(e => +e.dataset.position)"
        )
        assert set(reached) == set(sets[layer].nonzero().flatten().tolist())


def test_rule_layer_input_and_heads_are_switches(show, html, inputs):
    page = show(html)
    rule = page.get_by_label("rule")
    rule.select_option("top_k")
    for k in (2, 3):
        page.get_by_label("k ", exact=False).last.wait_for()
        page.locator(".k input").fill(str(k))
        assert lit(page)[0] == expected(inputs[0], 2, 8, "top_k", k)
    rule.select_option("mechanisms")
    for layer in (0, 1, 2):
        page.locator(".layer input").fill(str(layer))
        assert lit(page)[0] == expected(inputs[0], layer, 8, "mechanisms")
    rule.select_option("max_position")
    page.get_by_role("button", name="switch it on or off").click()
    for layer, head in ((2, 0), (1, 1)):
        page.locator(f"[data-head='{layer}.{head}']").click()
    assert lit(page)[0] == expected(inputs[0], 2, 8, off=[(2, 0), (1, 1)])
    page.get_by_role("button", name="all off").click()
    assert lit(page)[0] == {8}
    page.get_by_role("button", name="all on").click()
    page.locator("select.input").select_option("2")  # with a CLS, whose own set is empty at first
    page.locator(".token").nth(9).wait_for()
    assert page.locator(".token").nth(9).inner_text() == "CLS"
    assert lit(page)[0] == expected(inputs[2], 2, 9)


def test_the_table_says_what_lights_up_and_how_it_came(show, html, inputs):
    page = show(html)
    circle(page, 1, 7).click()
    rows = page.locator("details.table tbody tr").evaluate_all(
        "rows => rows.map(r => [...r.cells].map(c => c.textContent))"
    )
    held = {int(row[0]) for row in rows if row[2] in ("yes", "own token")}
    assert held == expected(inputs[0], 1, 7)
    influence = inputs[0].influence[1, 7]
    for position, token, _, _, measured, _, path in rows:
        assert token == inputs[0].tokens[int(position)]
        shown = float(measured.replace("\u2212", "-"))
        assert shown == pytest.approx(float(influence[int(position)]), rel=5e-3, abs=1e-6)
        for hop in path.split(", then ") if path.startswith("layer") else []:
            _, layer, _, head, _, key = hop.split()
            ranked = inputs[0].ranked[int(layer)][int(head)]
            assert int(key) in ranked[:, 0].tolist()
    live = page.locator(".status").inner_text()
    assert "layer 1 at position 7" in live
    assert f"{len(held) - 1} of 7 other tokens" in live


def test_what_is_left_out_is_counted_nowhere(show, inputs):
    """Of eight other tokens six are candidates; theirs are shares, counts and chance."""
    given = replace(inputs[0], left_out=(0, 2))
    page = show(render_flow(FlowView("left out", [given], influence_name="measured")))
    page.locator(".layer input").fill("1")
    said = page.locator(".status").inner_text()
    assert "position 8" in said
    others = [1, 3, 4, 5, 6, 7]
    held = [s for s in others if s in expected(given, 1, 8)]
    assert f"{len(held)} of 6 other tokens" in said
    influence = given.influence[1, 8]
    share = float(influence[held].sum() / influence[others].sum())
    assert f"All {len(held)} have {share:.0%} (at random: {len(held) / 6:.0%})" in said
    for source in range(8):
        chip = page.locator(f".token[data-position='{source}']")
        label, is_left_out = chip.get_attribute("aria-label"), source in (0, 2)
        assert ("of that of all other tokens" in label) is not is_left_out
        assert ("left out" in label) is is_left_out
        assert not (is_left_out and chip.evaluate("e => e.style.backgroundColor"))
    rows = page.locator("details.table tbody tr").evaluate_all(
        "all => all.map(row => [...row.children].map(cell => cell.textContent))"
    )
    assert not {row[0] for row in rows if row[2] != "yes"} & {"0", "2"}
    total = sum(float(row[5].strip("<%")) for row in rows if row[5].endswith("%"))
    assert 90 < total <= 100.5  # rows of less than a tenth of the largest are not shown
    # the weight on what is left out may be larger than any that is shown
    circle(page, 2, 5).hover()
    assert "most of those that are not left out" in page.locator(".tip").inner_text()


def test_what_the_mask_hides_is_no_other_token(show, inputs):
    """A window leaves two candidates to the state after layer 1 at position 8."""
    possible = torch.arange(9).repeat(3, 1)
    possible[1, 8] = 2
    page = show(render_flow(FlowView("window", [replace(inputs[0], possible=possible)])))
    for layer, others in ((1, 2), (2, 8)):
        page.locator(".layer input").fill(str(layer))
        assert f"of {others} other tokens" in page.locator(".status").inner_text()


def test_what_was_not_measured_is_said_and_not_shown_as_zero(show, html):
    page = show(html)
    page.locator(".layer input").fill("0")
    assert page.locator(".token.unmeasured").count() == 9
    assert "was not measured" in page.locator(".status").inner_text()
    assert "not measured" in page.locator("details.table tbody").inner_text()


def test_the_keyboard_alone_is_enough(show, html, inputs):
    page = show(html)
    lit(page)
    stage = page.locator(".flow .stage")
    stage.focus()
    for key in ("ArrowDown", "ArrowLeft", "ArrowLeft"):
        page.keyboard.press(key)
    assert "after layer 1 at position 6" in page.locator(".status").inner_text()
    assert lit(page)[0] == expected(inputs[0], 2, 8)  # not before Enter
    page.keyboard.press("Enter")
    assert lit(page)[0] == expected(inputs[0], 1, 6)
    page.keyboard.press("Home")
    page.keyboard.press("Escape")
    assert page.locator(".state.cursor").count() == 0
    page.locator(".head[tabindex='0']").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Space")
    assert page.locator("[data-head='1.0']").get_attribute("aria-pressed") == "false"
    assert lit(page)[0] == expected(inputs[0], 1, 6, off=[(1, 0)])
    page.keyboard.press("Enter")
    assert "layer 1, head 0" in page.locator(".pattern figcaption").inner_text()
    page.keyboard.press("Escape")
    assert page.locator(".pattern").is_hidden()


def test_pointing_shows_weights_scores_and_influence(show, html, inputs):
    page = show(html)
    lit(page)
    circle(page, 2, 5).hover()
    said = page.locator(".tip").inner_text()
    key, weight = int(inputs[0].ranked[2][0, 5, 0]), float(inputs[0].weights[2][0, 5, 0])
    assert f"head 0 reads {key} " in said
    assert "left out" not in said
    assert f"weight {weight:.3g}"[:10] in said
    page.locator(".token").nth(2).hover()
    assert (
        f"influence {float(inputs[0].influence[2, 8, 2]):.2g}"[:12]
        in page.locator(".tip").inner_text()
    )
    page.locator("[data-head='2.0']").click()
    canvas = page.locator(".pattern canvas")
    cell = canvas.evaluate("e => e.getBoundingClientRect().width") / 9
    canvas.hover(position={"x": cell * (key + 0.5), "y": cell * 5.5})
    said = page.locator(".tip").inner_text()
    assert "query 5" in said
    assert "rank 1, score" in said


@pytest.mark.parametrize("rule", ["max_position", "mechanisms"])
def test_a_press_leaves_no_word_of_the_state_before(show, html, rule):
    """The tip speaks of the state that was just chosen, or is gone."""
    page = show(html)
    lit(page)
    page.get_by_label("rule").select_option(rule)
    for pressed in (8, 3, 6):
        page.locator(".token").nth(pressed).click()
        assert "own token" in page.locator(".tip").inner_text()
    page.locator("[data-head='2.0']").click()
    assert page.locator(".tip").is_hidden()


def strengths(view, layer, position):
    """Of every source, of its best path to a state."""
    keys, weights = (
        [each[None, ..., 0] for each in given] for given in (view.ranked, view.weights)
    )
    graded = propagate(keys, len(view.tokens), strength=weights)
    return graded.strengths[layer, 0, position].tolist()


def test_the_sentence_counts_influence_as_it_is_shaded(show, html, inputs):
    """Of the strongest tokens, as many as hold 90%, and of the set: not squared; others alone."""
    page = show(html)
    lit(page)
    states = [(layer, t) for layer in (1, 2) for t in range(2, 9)]
    sets = {at: expected(inputs[0], *at) - {at[1]} for at in states}
    could_be_wrong = [(at, held) for at, held in sets.items() if 0 < len(held) < at[1]]
    assert could_be_wrong
    for (layer, t), held in could_be_wrong[:4]:
        circle(page, layer, t).click()
        amount = (
            inputs[0].influence[layer, t, :t].double() / inputs[0].influence[layer, t, :t].sum()
        )
        ranked = amount.sort(descending=True).values.cumsum(0)
        n = min(int((ranked < 0.9).sum()) + 1, len(held))
        best = strengths(inputs[0], layer, t)
        strongest = sorted(held, key=lambda s: -best[s])[:n]
        shares = [float(amount[strongest].sum()), n / t, float(ranked[n - 1])]
        if n < len(held):
            shares += [float(amount[sorted(held)].sum()), len(held) / t]
        said = re.sub(r"\d+ of \d+ lines.*", "", page.locator(".status").inner_text())
        found = [int(each) for each in re.findall(r"(\d+)%", said)]
        assert found == pytest.approx([100 * share for share in shares], abs=0.51)


def drawn(page):
    """(layer, head, key, query) and strength of every line, in their order."""
    lines = page.locator(".flow g.line").evaluate_all(
        "all => all.map(e => [e.dataset.line, e.getAttribute('aria-label')])"
    )
    return [
        (tuple(map(int, name.split("."))), float(re.search(r"through it ([\d.e-]+)", said)[1]))
        for name, said in lines
    ]


def reached(lines, view, layer, position):
    """The share of the influence inside the set of tokens whose best paths are among the lines."""
    best, held = strengths(view, layer, position), expected(view, layer, position) - {position}
    influence = view.influence[layer, position]
    ends = {at[2] for at, strength in lines if strength == pytest.approx(best[at[2]], rel=2e-2)}
    return float(influence[sorted(ends & held)].sum() / influence[sorted(held)].sum())


def test_lines_are_drawn_up_to_nine_tenths_of_the_influence_inside_the_set(show):
    view = make_input(12, (5, 5, 5), k=1)
    page = show(render_flow(FlowView("enough", [view])))
    for position in (11, 8):
        page.locator(".token").nth(position).click()
        lines = drawn(page)
        assert len(lines) < 30
        assert reached(lines, view, 2, position) >= 0.9
        assert reached(lines[:-1], view, 2, position) < 0.9
        assert "enough to reach 90%" in page.locator(".status").inner_text()
    page.locator(".lines input").fill("2")
    share = reached(lines[:2], view, 2, 8)
    assert f"they reach {share:.0%} of" in page.locator(".status").inner_text()
    page.get_by_role("button", name="up to 90%").click()
    assert drawn(page) == lines


def test_the_strongest_ways_are_drawn_first_and_the_rest_is_counted(show):
    """Of a deep picture that was not measured 30 lines; the slider has the others."""
    view = make_input(12, (5, 5, 5), k=1, influence=None)
    page = show(render_flow(FlowView("deep", [view])))
    lit(page)
    best = strengths(view, 2, 11)
    lines = drawn(page)
    assert len(lines) == 30
    total = int(page.locator(".lines output").inner_text().removeprefix("30 of "))
    assert total > 30
    assert f"30 of {total} lines are drawn" in page.locator(".status").inner_text()
    for (layer, head, key, query), _ in lines:
        assert int(view.ranked[layer][head, query, 0]) == key != query
    ends = {
        source: max((s for at, s in lines if at[2] == source), default=0) for source in range(11)
    }
    for source in expected(view, 2, 11) - {11}:
        assert ends[source] == pytest.approx(best[source], rel=2e-2)
    rows = page.locator("details.table tbody tr").evaluate_all(
        "rows => rows.map(r => [+r.cells[0].textContent, r.cells[3].textContent])"
    )
    shown = {source: float(said) for source, said in rows if said[0].isdigit()}
    assert shown == pytest.approx({s: best[s] for s in shown}, rel=1e-2)
    assert [s for s, _ in rows if s in shown] == sorted(shown, key=lambda s: -shown[s])
    page.locator(".lines input").fill("5")
    assert drawn(page) == lines[:5]
    page.locator(".lines input").fill(str(total))
    assert len(drawn(page)) == total


def test_heads_of_a_layer_have_colours_and_numbers_of_their_own(show):
    view = make_input(9, (16, 12), k=1)
    page = show(render_flow(FlowView("wide", [view])))
    lit(page)
    for layer, n in enumerate((16, 12)):
        colours = page.locator(f".head[data-head^='{layer}.']").evaluate_all(
            "all => all.map(e => getComputedStyle(e).backgroundColor)"
        )
        assert len(set(colours)) == n
    boxes = page.locator(".head").evaluate_all(
        "all => all.map(e => e.getBoundingClientRect().right)"
    )
    assert max(boxes) <= 1200  # none is cut
    assert page.locator(".flow .number").count() > 5


def test_a_line_is_pointed_at_pressed_and_reached_by_keyboard(show, html, inputs):
    page = show(html)
    lit(page)
    (layer, head, key, query), _ = drawn(page)[0]
    weight = float(inputs[0].weights[layer][head, query, 0])
    line = page.locator("g.line").first
    line.focus()
    assert f"weight {weight:.3g}"[:10] in page.locator(".tip").inner_text()
    page.keyboard.press("Enter")
    assert page.locator(".why figcaption").inner_text().startswith(f"Head {layer}.{head} at")
    page.keyboard.press("ArrowRight")
    assert page.locator(".why figcaption").inner_text().startswith(f"Head {layer}.{head} at")
    page.keyboard.press("Escape")
    assert page.locator(".why").is_hidden()
    middle = line.locator(".ink").evaluate(
        """path => { const at = path.getPointAtLength(path.getTotalLength() / 2);
        const on = at.matrixTransform(path.getScreenCTM()); return [on.x, on.y] }"""
    )
    page.mouse.click(*middle)
    bars = page.locator(".why .bars").first.locator("li")
    assert f"({key})" in bars.first.inner_text()
    assert float(bars.first.locator(".much").inner_text()) == pytest.approx(weight, rel=1e-2)
    assert "is not known" in page.locator(".why").inner_text()


def test_a_pressed_line_says_why_the_head_looks_there(show):
    view = make_input()
    reasons = with_reasons(view)
    page = show(render_flow(FlowView("why", [make_input(reasons=reasons)])))
    lit(page)
    page.locator("g.line").nth(2).focus()
    page.keyboard.press("Enter")
    (layer, head, key, query), _ = drawn(page)[2]
    first, second = view.ranked[layer][head, query, :2].tolist()
    assert first == key
    said = page.locator(".why figcaption").inner_text()
    assert re.findall(r"\((\d+)\)", said) == [str(query), str(first), str(second)]
    rows = page.locator(".why .bars.signed li").evaluate_all(
        "all => all.map(li => [li.children[0].textContent, li.children[2].textContent])"
    )
    names = [reasons.part_names[i] for i in reasons.parts[layer][head, query]]
    assert [name for name, _ in rows] == [*names, "all other parts"]
    numbers = [float(much.replace("\u2212", "-")) for _, much in rows]
    parts = [*reasons.values[layer][head, query].tolist(), float(reasons.rest[layer][head, query])]
    assert numbers == pytest.approx(parts, rel=1e-2, abs=1e-3)
    assert sum(numbers) == pytest.approx(float(reasons.margins[layer][head, query]), abs=2e-2)
    page.locator(".token").nth(5).click()  # another state leaves it where it is
    assert page.locator(".why figcaption").inner_text() == said
    page.locator(".flow .stage").focus()
    page.keyboard.press("Escape")
    assert page.locator(".why").is_hidden()


def test_the_next_tokens_follow_the_chosen_position(show):
    said = [[(f"t{t}", 0.5), (EVIL, 0.25), ("rare", 4e-5)] for t in range(9)]
    page = show(render_flow(FlowView("next", [make_input(next_tokens=said)])))
    lit(page)
    for position in (8, 3):
        page.locator(".token").nth(position).click()
        shown = [each.split("\n") for each in page.locator(".next .says").all_inner_texts()]
        # what is rare was said to be impossible, 0%
        assert shown == [[f"t{position}", "50%"], [EVIL, "25%"], ["rare", "<0.1%"]]
    circle(page, -1, 2).click()  # a token: what the state before it says
    assert page.locator(".next .says .word").all_inner_texts() == ["t3", EVIL, "rare"]


def says(page, line):
    words = page.locator(f".next .{line} .word").all_inner_texts()
    return list(zip(words, page.locator(f".next .{line} .chance").all_inner_texts(), strict=True))


def test_a_pressed_token_is_replaced_and_the_next_tokens_stand_beside_each_other(show):
    said = [[(f"t{t}", 0.5), (EVIL, 0.25)] for t in range(9)]
    other = tuple(
        tuple(((f"r{s}.{t}", 0.75), (EVIL, 0.125)) for t in range(s, 9)) for s in range(9)
    )
    by = (*(f"instead{s}" for s in range(8)), EVIL)
    view = make_input(next_tokens=said, replaced=Replaced(by, other))
    page = show(render_flow(FlowView("replaced", [view])))
    page.locator(".token").nth(6).click()
    assert page.locator(".next .instead").is_hidden()
    circle(page, -1, 2).click()
    assert says(page, "as-is") == [("t6", "50%"), (EVIL, "25%")]
    assert says(page, "instead") == [("r2.6", "75%"), (EVIL, "13%")]
    assert "replaced by “instead2”" in page.locator(".next .instead").inner_text()
    page.locator(".token").nth(4).click()
    assert says(page, "instead") == [("r2.4", "75%"), (EVIL, "13%")]
    page.locator(".swap select").select_option("8")  # comes later: nothing changes
    assert says(page, "instead") == says(page, "as-is")
    page.locator(".swap select").select_option("")
    assert page.locator(".next .instead").is_hidden()


def test_the_search_marks_what_it_finds_and_goes_from_one_to_the_next(show, inputs):
    tokens = ["a", "ban", "ana", " Na", "x", "an", "a", "na", EVIL]
    page = show(render_flow(FlowView("find", [make_input(tokens=tokens)])))
    lit(page)
    page.keyboard.press("/")
    page.keyboard.type("na")
    found = page.locator(".token.found").evaluate_all("all => all.map(e => +e.dataset.position)")
    assert found == [1, 2, 3, 5, 6, 7]  # also over the border of two tokens
    assert page.locator(".label.found").count() == 6
    assert page.locator(".search output").inner_text() == "5 found"
    for position, said in ((1, "1 of 5"), (2, "2 of 5"), (3, "3 of 5")):
        page.keyboard.press("Enter")
        assert page.locator(".token.own").get_attribute("data-position") == str(position)
        assert page.locator(".search output").inner_text() == said
    page.keyboard.press("Shift+Enter")
    assert page.locator(".token.own").get_attribute("data-position") == "2"
    page.keyboard.type("?")
    assert page.locator(".search output").inner_text() == "not there"
    page.keyboard.press("Escape")
    assert page.locator(".token.found").count() == 0


def hash_of(page):
    page.wait_for_timeout(350)  # the address changes a few times a second at most
    return page.evaluate("location.hash")


def test_the_link_keeps_the_view(show, html, inputs):
    page = show(html)
    lit(page)
    page.locator("select.input").select_option("1")
    page.get_by_label("rule").select_option("top_k")
    page.locator(".k input").fill("3")
    page.locator(".lines input").fill("7")
    page.get_by_role("button", name="switch it on or off").click()
    page.locator("[data-head='1.1']").click()
    circle(page, 1, 5).click()
    page.locator("g.line").first.focus()
    page.keyboard.press("Enter")
    page.locator(".search input").fill("日")
    kept = hash_of(page)
    before = (lit(page), drawn(page), page.locator(".why figcaption").inner_text())
    page.goto("about:blank")
    page.goto(show.url(page) + kept)
    page.locator(".why figcaption").wait_for()
    assert (lit(page), drawn(page), page.locator(".why figcaption").inner_text()) == before
    assert lit(page)[0] == expected(inputs[1], 1, 5, "top_k", 3, off=[(1, 1)])
    assert page.locator(".head.off").count() == 1
    assert page.locator(".token.found").count() == 1
    assert hash_of(page) == kept


@pytest.mark.parametrize(
    "fragment",
    [
        "#picture=0&layer=77&position=-5&rule=__proto__&k=1e9&lines=-1&head=9.9&why=0.0.0.99&off=5.5-x",
        f"#picture=0&input=99&find={EVIL}&layer=2%00&position=NaN&replace=99",
        "#picture=1&layer=0&position=0",
        "#%E0%A4%A&picture=0&picture=<svg onload=alert(1)>",
    ],
)
def test_a_link_that_does_not_fit_is_left_alone(show, html, inputs, fragment):
    page = show(html, fragment=fragment)
    assert lit(page)[0] == expected(inputs[0], 2, 8)
    assert page.locator(".why").is_hidden()
    assert page.locator(".head.off").count() == 0
    assert page.locator("script").count() == 2


def test_the_link_is_copied_and_notebooks_keep_their_address(show, html, inputs):
    page = show(html)
    lit(page)
    circle(page, 1, 4).click()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="copy link").click()
    page.get_by_role("button", name="copied").wait_for()
    assert "layer=1&position=4" in page.evaluate("navigator.clipboard.readText()")
    notebook = show("<!DOCTYPE html>" + render_flow(FlowView("one", inputs[:1]), fragment=True))
    lit(notebook)
    circle(notebook, 1, 4).click()
    assert hash_of(notebook) == ""
    assert notebook.get_by_role("button", name="copy link").is_hidden()
    notebook.keyboard.press("/")
    assert notebook.evaluate("document.activeElement.tagName") == "DIV"  # inside the picture alone


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures_are_saved_as_they_are_seen(show, html, scheme, tmp_path):
    page = show(html, scheme=scheme)
    lit(page)
    circle(page, 1, 6).click()
    saved = {}
    for kind in ("PNG", "SVG"):
        with page.expect_download() as download:
            page.get_by_role("button", name=kind).click()
        saved[kind] = tmp_path / download.value.suggested_filename
        download.value.save_as(saved[kind])
    root = ElementTree.parse(saved["SVG"]).getroot()
    names = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert names <= {
        "svg", "g", "rect", "path", "circle", "text", "defs", "pattern", "linearGradient", "stop",
    }  # fmt: skip
    assert not {name for element in root.iter() for name in element.attrib} & {"style", "class"}
    said = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    for seen in ("Three inputs", "layer 2", EVIL, "tokens"):
        assert seen in said
    lines = {path.get("stroke") for path in root.iter("{http://www.w3.org/2000/svg}path")}
    drawn_in = page.locator("g.line .ink").evaluate_all(
        "all => all.map(e => getComputedStyle(e).stroke)"
    )
    assert set(drawn_in) <= lines
    with Image.open(saved["PNG"]) as image:
        size = [float(root.get(name)) for name in ("width", "height")]
        assert image.size == tuple(math.floor(2 * side) for side in size)
        paper = (255, 255, 255) if scheme == "light" else (20, 24, 29)
        assert image.convert("RGB").getpixel((1, 1)) == paper
        assert len(image.convert("RGB").getcolors(1 << 20)) > 100


def test_another_width_leaves_what_the_pointer_may_be_on(show, html):
    from playwright.sync_api import expect  # `show` has skipped the test where it is missing

    page = show(html)
    lit(page)
    page.locator("[data-head='2.0']").click()
    for selector in (".pattern canvas", "[data-head='2.0']"):
        page.locator(selector).evaluate("e => e.dataset.kept = 'yes'")
    flow = page.locator(".flow canvas")
    before = flow.get_attribute("width")
    page.set_viewport_size({"width": 700, "height": 900})
    expect(flow).not_to_have_attribute("width", before)
    assert page.locator("[data-kept]").count() == 2


def test_tokens_are_text_whatever_they_hold(show, html):
    page = show(html)
    lit(page)
    assert page.locator(".token").nth(4).inner_text() == EVIL
    assert page.locator("script").count() == 2  # data and code, none of a token
    page.locator("select.input").wait_for()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "heads", "width"), [(64, (12,) * 12, 1200), (64, (12,) * 12, 390), (300, (4,) * 6, 1200)]
)
def test_long_inputs_fit_and_stay_quick(show, n, heads, width):
    view = make_input(n, heads, patterns=None, tokens=["word"] * (n - 1) + [EVIL])
    page = show(render_flow(FlowView("long", [view])), width=width, height=800)
    assert lit(page)[0] == expected(view, len(heads) - 1, n - 1)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    last = page.locator(".token").last
    last.scroll_into_view_if_needed()
    box = last.bounding_box()
    assert box["x"] + box["width"] <= width
    page.locator(".token").nth(n - 20).click()
    assert lit(page)[0] == expected(view, len(heads) - 1, n - 20)


def test_touch_chooses_a_state(show, html, inputs):
    page = show(html, width=390, height=800, has_touch=True, is_mobile=True)
    lit(page)
    circle(page, 1, 4).tap()
    assert lit(page)[0] == expected(inputs[0], 1, 4)


def test_two_pictures_in_one_page_leave_each_other_alone(show, inputs):
    one = render_flow(FlowView("one", inputs[:1]), fragment=True)
    other = render_flow(FlowView("other", inputs[1:2]), fragment=True)
    page = show(
        f"<!DOCTYPE html><meta charset='utf-8'><style>.token {{ display: none }}</style>{one}"
        f"<script>window.d3 = 'mine'; window.define = () => {{ throw 1 }}; define.amd = {{}}"
        f"</script>{other}{one}"
    )
    for nth, view in enumerate((inputs[0], inputs[1], inputs[0])):
        assert lit(page, nth)[0] == expected(view, 2, 8)
    circle(page, 1, 4, nth=2).click()
    assert lit(page, 2)[0] == expected(inputs[0], 1, 4)
    assert lit(page, 0)[0] == expected(inputs[0], 2, 8)
    assert lit(page, 1)[0] == expected(inputs[1], 2, 8)
    assert page.evaluate("window.d3") == "mine"


def test_groups_of_inputs_are_a_switch(show, inputs):
    view = FlowView("before and after", inputs[:2], groups=[("initial", 1), ("trained", 1)])
    page = show(render_flow(view))
    assert lit(page)[0] == expected(inputs[0], 2, 8)
    page.get_by_role("button", name="trained").click()
    page.locator("button[aria-pressed=true]", has_text="trained").wait_for()
    assert lit(page)[0] == expected(inputs[1], 2, 8)


@pytest.fixture(scope="module")
def pair():
    """Two inputs, of which the second lacks the fifth token and has another sixth."""
    tokens = [f"t{t}" for t in range(9)]
    others = [*tokens[:4], "new", *tokens[6:]]
    said = [[[(f"{side}{t}", 0.5)] for t in range(9 - side)] for side in (0, 1)]
    one = make_input(seed=0, tokens=tokens, next_tokens=said[0])
    other = make_input(8, seed=1, tokens=others, next_tokens=said[1])
    aligned = [(0, 0), (1, 1), (2, 2), (3, 3), (6, 5), (7, 6), (8, 7)]
    groups = [("before", 1), (EVIL, 1)]
    return FlowView("Two", [one, other], groups=groups, aligned=aligned)


def side_of(page, side):
    one = page.locator(".one").nth(side)
    one.locator(".token").first.wait_for()
    chips = one.locator(".token.in").evaluate_all("all => all.map(e => +e.dataset.position)")
    return set(chips), int(one.locator(".token.own").get_attribute("data-position"))


def test_two_inputs_stand_side_by_side_and_follow_each_other(show, pair):
    page = show(render_flow(pair))
    page.locator(".changed td").first.wait_for()
    there = dict(pair.aligned)
    for side, layer, position in ((0, 2, 7), (1, 1, 5), (0, 0, 3)):
        page.locator(".one").nth(side).locator(
            f".flow .state[data-layer='{layer}'][data-position='{position}']").click()  # fmt: skip
        one = position if side == 0 else next(a for a, b in pair.aligned if b == position)
        for view, place, which in ((pair.inputs[0], one, 0), (pair.inputs[1], there[one], 1)):
            assert side_of(page, which) == (expected(view, layer, place), place)
    page.get_by_label("rule").select_option("top_k")  # one set of controls for both
    assert page.locator(".controls").count() == 1
    for view, place, which in ((pair.inputs[0], 3, 0), (pair.inputs[1], 3, 1)):
        assert side_of(page, which)[0] == expected(view, 0, place, "top_k", 2)
    page.locator(".one").first.locator(".token").nth(4).click()  # it has no counterpart
    assert side_of(page, 1)[1] == 3
    assert "not matched with each other" in page.locator(".changed .caption").inner_text()


def test_each_of_two_inputs_opens_on_a_state_of_its_own(show, pair):
    """The last one of the first input has no counterpart, and the second input ends before."""
    page = show(render_flow(replace(pair, aligned=pair.aligned[:4], selected=(2, 8))))
    page.locator(".changed td").first.wait_for()
    assert [side_of(page, side)[1] for side in (0, 1)] == [8, 7]
    assert side_of(page, 1)[0] == expected(pair.inputs[1], 2, 7)


def test_the_table_says_what_changed(show, pair):
    page = show(render_flow(pair))
    page.locator(".changed td").first.wait_for()
    for nth, place in ((7, 6), (8, 7)):
        page.locator(".one").first.locator(".token").nth(nth).click()
        rows = page.locator(".changed tbody tr").evaluate_all(
            "rows => rows.map(r => [...r.cells].map(c => c.textContent))"
        )
        said = {row[0]: row[1:] for row in rows}
        sets = [
            expected(view, 2, at) - {at} for view, at in zip(pair.inputs, (nth, place), strict=True)
        ]
        assert said["other tokens in the set"] == [str(len(held)) for held in sets]
        shares = []
        for view, at, held in zip(pair.inputs, (nth, place), sets, strict=True):
            influence = view.influence[2, at].clone()
            influence[at] = 0
            shares.append(f"{float(influence[sorted(held)].sum() / influence.sum()):.0%}")
        assert said["share of the measured influence inside the set"] == shares
        there = dict(pair.aligned)
        alone = [s for s in sorted(sets[0]) if there.get(s) not in sets[1]]
        found = re.findall(r"(\d+) “", said["in this set alone"][0])
        assert [int(s) for s in found] == alone
        differ = sum(
            there.get(int(one[head, nth, 0])) != int(other[head, place, 0])
            for one, other in zip(pair.inputs[0].ranked, pair.inputs[1].ranked, strict=True)
            for head in range(len(one))
        )
        assert said["heads with another first choice"][0] == f"{differ} of {sum(HEADS)}"
        assert said["next tokens"] == [f"0{nth} 50%", f"1{place} 50%"]


def test_the_link_and_the_saved_picture_have_both_sides(show, pair, tmp_path):
    page = show(render_flow(pair), fragment="#picture=0&layer=1&position=6&lines=4")
    page.locator(".changed td").first.wait_for()
    assert [side_of(page, side)[1] for side in (0, 1)] == [6, 5]
    with page.expect_download() as download:
        page.get_by_role("button", name="SVG").click()
    download.value.save_as(tmp_path / "pair.svg")
    root = ElementTree.parse(tmp_path / "pair.svg").getroot()
    said = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"before", EVIL, "new"} <= set(said)
    assert said.count("layer 2") == 4  # in lattice and strips of both
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_without_scripts_the_first_set_is_still_there(show, html, inputs):
    page = show(html, java_script_enabled=False)
    said = page.locator("[data-infoflow]").inner_text()
    for source in expected(inputs[0], 2, 8):
        assert f"{source} “{inputs[0].tokens[source]}”" in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_queries": 4}, "a state for every token"),
        ({"influence": torch.zeros(3, 9, 8)}, "shapes of influence are"),
        ({"ranked": [torch.full((2, 9, 1), 9)]}, "expected 0 to 8"),
        ({"weights": [torch.zeros(1, 9, 1)]}, "shapes of weights are"),
        ({"edges": [torch.zeros(9, 9)] * 2}, "shapes of edges are"),
        ({"patterns": [torch.zeros(4, 8, 9)] * 3}, r"shapes of patterns .*\(4, 9, 'key'\)"),
        ({"mechanisms": [[]]}, "one for each head"),
        ({"marked": [9]}, "marked sources"),
        ({"replaced": Replaced(("a",), ((),))}, "expected 9, each with those of all positions"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(InfoFlowError, match=message):
        make_input(**changes)
    with pytest.raises(InfoFlowError, match="no input"):
        FlowView("none", [])
    with pytest.raises(InfoFlowError, match="expected two inputs, each in a group of its own"):
        FlowView("one", [make_input()], aligned=[])
    with pytest.raises(InfoFlowError, match="positions 0 and 9 are aligned: expected 0 to 8"):
        FlowView("two", [make_input()] * 2, groups=[("a", 1), ("b", 1)], aligned=[(0, 9)])
