"""The probe report in a browser: what it leads with, what it leaves out, and where it leads."""

import math
import re
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from infoflow_lens.agreement import explained
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.hooks import InfluenceResult
from infoflow_lens.probing.page import overview_table
from infoflow_lens.report.charts import HeatMap, Lines, NameMap, Table, render_chart
from infoflow_lens.report.flow_view import FlowView
from infoflow_lens.report.pages import ProbingReport, Section, fit_into_page, render_probing
from infoflow_lens.theory import InformationSets, propagate
from tests.report.test_flow_page import EVIL, make_input

RECORD = RunRecord(config={"model": EVIL}, seed=0, model_fingerprint="f", weight_processing={})


def make_report(inputs, heads=(4, 2, 3), title="A model", n_examples=1):
    rows = [
        [layer, head, "global" if head else EVIL, 0.1 * (head + layer), math.nan]
        for layer, n in enumerate(heads)
        for head in range(n)
    ]
    examples = {
        f"{layer}.{head}": [[i % len(inputs), 5, 2, 0.75] for i in range(n_examples)]
        for layer, n in enumerate(heads)
        for head in range(n)
    }
    rules = propagate(inputs[0].layers_of("max_position"), len(inputs[0].tokens))
    influence = result_of(torch.rand(len(heads), 1, inputs[0].n_queries, len(inputs[0].tokens)))
    found = {
        ("last", "max_position"): explained(rules, influence, 0, last=True),
        ("last", "mechanisms"): explained(
            InformationSets(torch.ones_like(rules.members)), influence, 0, last=True
        ),
    }
    columns = dict.fromkeys(("layer", "head", "mechanism", "damage", "control"), "what it is")
    return ProbingReport(
        title=title,
        headline="What it does.",
        facts=[("layers", "3")],
        problems=[],
        capabilities=Table({"layer": ""}, [[0]]),
        maps=None,
        sections=[
            Section(
                "Charts of all kinds",
                "Each beside each.",
                [
                    HeatMap("heat", [[0.5, math.nan], [1.0]]),
                    NameMap("names", [["global", EVIL]], {"global": "#56b4e9", EVIL: "#222"}),
                    Lines("lines", [1, 2, 3], {"a": [0.1, 0.2, math.nan], EVIL: [1, 1, 1]}),
                ],
            )
        ],
        agreement={},
        explained=overview_table(found),
        heads=Table(columns, rows),
        examples=examples,
        places=[HeatMap("places", [[0.1] * 64] * 3, 1.0, "layer", "position")],
        flow=FlowView("", inputs),
        record=RECORD,
    )


def result_of(influence, lengths=None):
    _, n_batch, n_pos, n_source = influence.shape
    return InfluenceResult(
        layers=tuple(range(len(influence))),
        influence=influence,
        positions=torch.arange(n_pos).expand(n_batch, n_pos).clone(),
        lengths=torch.tensor(lengths or [n_source] * n_batch),
        n_positions=n_pos,
        record=RECORD,
    )


@pytest.fixture(scope="module")
def inputs():
    return [make_input(seed=0), make_input(seed=1)]


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
def test_the_dashboard_fits_and_leads_from_a_head_to_its_pattern(show, inputs, width, scheme):
    page = show(render_probing(make_report(inputs, n_examples=2)), width=width, scheme=scheme)
    page.locator(".token.in").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator(".pick th button", has_text="damage").click()
    page.locator(".pick th button", has_text="damage").click()  # the largest first
    first = page.locator(".pick tbody tr").first
    assert first.inner_text().split()[:2] == ["2", "2"]
    first.press("Enter")
    examples = page.locator(".evidence li")
    assert examples.count() == 2
    assert "position 5 reads 2 with 0.75" in examples.nth(1).inner_text()
    examples.nth(1).get_by_role("button").click()
    page.locator(".pattern figcaption", has_text="layer 2, head 2").wait_for()
    lit = page.locator("#sequences .token.in").evaluate_all(
        "all => all.map(e => +e.dataset.position)"
    )
    assert set(lit) == propagate(inputs[1].layers_of("max_position"), 9).of(2, 0, 5)


def test_words_are_explained_on_focus(show, inputs):
    page = show(render_probing(make_report(inputs)))
    word = page.locator(".term", has_text="max-position rule").first
    word.focus()
    assert word.locator("[role=tooltip]").is_visible()
    assert "token of its largest score" in word.inner_text()


def test_what_says_nothing_is_a_dash_with_the_reason():
    # two sequences of 3 tokens; the second is as long as 1
    influence = torch.zeros(1, 2, 3, 3)
    influence[0, 0] = torch.tensor([[1.0, 0, 0], [3, 1, 0], [4, 0, 1]])
    influence[0, 1, 0, 0] = 1.0
    sets = torch.eye(3, dtype=torch.bool).expand(1, 2, 3, 3).clone()
    found = result_of(influence, [3, 1])
    found.positions[1, 1:] = -1
    row = explained(InformationSets(sets), found, 0)
    assert (row.n_states, row.no_other, row.empty, row.everything) == (4, 2, 2, 0)
    assert row.reason() == "no other tokens (2), empty set (2)"
    sets[0, 0, 2, 0] = sets[0, 0, 1, 0] = True
    row = explained(InformationSets(sets), found, 0)
    assert row.everything == 2  # token 1 never reaches position 2, in any sequence
    influence[0, 0, 2, 1] = 3.0
    row = explained(InformationSets(sets), found, 0)
    assert row.n_informative == 1
    assert row.inside == pytest.approx(4 / 7)
    assert row.chance == pytest.approx(1 / 2)
    assert row.auroc == 1.0
    everything = InformationSets(torch.ones_like(sets))
    table = overview_table({("last", "max_position"): explained(everything, found, 0, last=True)})
    html = str(render_chart(table))
    assert "no other tokens (1), set holds everything (1)" in html
    assert "nan" not in html


def test_rows_that_say_nothing_are_counted_and_not_shown():
    sets = torch.eye(3, dtype=torch.bool).expand(1, 2, 3, 3)
    influence = result_of(torch.rand(1, 2, 3, 3).tril() + 0.1)
    nothing = explained(InformationSets(sets.clone()), influence, 0)
    rows = {(f"layer {i}", "max_position"): nothing for i in range(12)}
    table = overview_table(rows)
    assert [row[0] for row in table.rows] == ["layer 0"]
    assert "11 more rows" in table.caption


def test_twelve_lines_have_twelve_colours_and_headers_are_words():
    lines = Lines("lines", [1, 2], {f"layer {i}": [0.1 * i, 0.2] for i in range(12)})
    html = str(render_chart(lines))
    assert len(set(re.findall(r'stroke="(hsl[^"]+)"', html))) == 12
    frame = pd.DataFrame({"kv_heads": [1]})
    assert list(Table.from_frame(frame).columns) == ["kv heads"]


def test_texts_of_charts_are_texts():
    for chart in (
        HeatMap(EVIL, [[1.0]], hover=[[EVIL]]),
        NameMap(EVIL, [[EVIL]], {EVIL: EVIL}, [[EVIL]]),
        Lines(EVIL, [1], {EVIL: [1.0]}),
        Table({EVIL: EVIL}, [[EVIL]], {(0, 0): EVIL}, EVIL),
    ):
        assert "<script" not in render_chart(chart)
    with pytest.raises(Exception, match="expected a HeatMap"):
        render_chart(SimpleNamespace())


def test_the_page_of_a_large_model_stays_below_its_size():
    words = [f"word{i}" for i in range(64)]
    view = [
        make_input(64, (12,) * 12, seed=seed, k=4, patterns=None, scores=None, tokens=words)
        for seed in range(3)
    ]
    report = make_report([view[i % 3] for i in range(32)], heads=(12,) * 12, n_examples=3)
    html = render_probing(report)
    assert len(html.encode()) < 1_500_000
    kept = fit_into_page(report.flow, 900_000)
    assert 1 <= len(kept.inputs) < 32
    assert f"{32 - len(kept.inputs)} more sequences" in html


def test_a_heat_map_without_columns_is_drawn():
    """It ended in a ZeroDivisionError."""
    assert "<svg" in render_chart(HeatMap("empty", [[], []]))
