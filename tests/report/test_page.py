"""The report is one file that needs nothing else."""

import json
import re
from html.parser import HTMLParser

import pytest

from infoflow_lens.experiments.demo import DemoConfig, run_demo
from infoflow_lens.report.figures import _on_path, position_labels


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    config = DemoConfig(
        n_tokens=6, d_model=8, d_mlp=8, epochs=2, n_train=128, n_validation=64,
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
        if tag in ("script", "img", "iframe", "link") and (attrs.get("src") or attrs.get("href")):
            self.found.append((tag, attrs))


def without_library(html):
    """The page without plotly's own code."""
    return max(html.split("<script>"), key=len), re.sub(
        r"<script>.*?</script>", "", html, count=1, flags=re.S
    )


def test_nothing_is_fetched_from_outside(demo):
    html = (demo.out / "report.html").read_text()
    parser = References()
    parser.feed(html)
    assert parser.found == []
    assert {"flow", "maps", "recovery", "curve"} <= parser.ids
    _, page = without_library(html)
    assert "http://" not in page
    assert "https://" not in page


def test_every_shown_input_of_every_stage_has_its_figures(demo):
    _, page = without_library((demo.out / "report.html").read_text())
    stages = json.loads(re.search(r"const stages = (\[.*\]);", page).group(1))
    assert [stage["name"] for stage in stages] == ["initial", "trained"]
    for stage in stages:
        assert len(stage["flow"]) == len(stage["maps"]) == 3
        for figure in stage["flow"]:
            assert figure["data"]
            titles = [a["text"] for a in figure["layout"]["annotations"]]
            assert titles[0].startswith("Predicted")
            assert titles[1].startswith("Measured")


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


def test_the_path_to_the_read_out_follows_edges_backwards():
    edges = [(0, 3, 1), (0, 2, 0), (1, 1, 4), (0, 5, 4), (1, 0, 2)]
    # position 4 is read; layer 1 takes from 1, which took from 3
    by_attention, by_residual = _on_path(edges, 2, n_source=4, target=4)
    assert by_attention == {(1, 1, 4), (0, 3, 1)}  # position 5 is no token and knows nothing
    # CLS (4) knows nothing yet in layer 0, so its residual stream carries nothing there or after
    assert by_residual == {(0, 1, 1)}
    by_attention, by_residual = _on_path([(0, 2, 4)], 2, n_source=4, target=4)
    assert by_attention == {(0, 2, 4)}
    assert by_residual == {(1, 4, 4)}


def test_positions_after_the_tokens_are_cls():
    assert position_labels(3, 2) == ["0", "1", "CLS"]
