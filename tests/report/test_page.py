"""The report is one file that needs nothing else."""

import re
from html.parser import HTMLParser

import pytest

from infoflow_lens.studies.demo import DemoConfig, run_demo


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    config = DemoConfig(
        n_tokens=6, d_model=8, d_mlp=8, half_epochs=1, epochs=2, n_train=128, n_validation=64,
        n_recovery=60, n_influence=20, n_shown=3,
    )  # fmt: skip
    return run_demo(tmp_path_factory.mktemp("report"), config, progress=False)


class References(HTMLParser):
    """Collects what a browser would fetch."""

    def __init__(self):
        super().__init__()
        self.found, self.ids = [], set()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids.add(attrs.get("id"))
        source = attrs.get("src") or attrs.get("href")
        if tag in ("script", "img", "iframe", "link") and source and source[:5] != "data:":
            self.found.append((tag, attrs))


def test_nothing_is_fetched_from_outside(demo):
    html = (demo.out / "report.html").read_text()
    parser = References()
    parser.feed(html)
    assert parser.found == []
    assert "default-src 'none'" in html
    assert "plotly" not in html.lower()


def test_the_page_opens_on_the_picture_of_the_trained_model(demo, show):
    page = show((demo.out / "report.html").read_text())
    stage = demo.stages[-1]
    for shown in range(3):
        page.locator("select.input").select_option(str(shown))
        page.locator(".state.selected[data-position='6'][data-layer='1']").first.wait_for()
        lit = page.locator(".token.in").evaluate_all("all => all.map(e => +e.dataset.position)")
        assert set(lit) == stage.predicted.of(1, shown, 6)
    page.get_by_role("button", name="initial").click()
    page.locator("button[aria-pressed=true]", has_text="initial").wait_for()
    lit = page.locator(".token.in").evaluate_all("all => all.map(e => +e.dataset.position)")
    assert set(lit) == demo.stages[0].predicted.of(1, 2, 6)
    assert page.locator(".edges .state.lit").count() > 1


def test_the_numbers_of_the_table_are_those_of_the_summary(demo):
    html = (demo.out / "report.html").read_text()
    for stage in ("initial", "trained"):
        cls = demo.summary["agreement"][stage]["cls"]
        row = re.search(
            rf"<td>CLS, last layer</td><td>{stage}</td>(.*?)</tr>", html, flags=re.S
        ).group(1)
        cells = re.findall(r"<td>(.*?)</td>", row)
        assert cells[0] == f"{cls['auroc']:.3f}"
        assert cells[6] == f"{cls['influence_inside']:.3f}"
