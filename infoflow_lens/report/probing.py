"""The report of a probe run on any model: one HTML file that holds everything it shows."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from jaxtyping import Bool, Float
from plotly.offline import get_plotlyjs
from torch import Tensor

from infoflow_lens.agreement import Agreement, CoverageCurve
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.report.page import METRICS, agreement_rows, figure_json
from infoflow_lens.report.templating import templates


@dataclass(frozen=True)
class ShownSequence:
    """A sequence, and what its last state depends on.

    Attributes:
        texts: its tokens.
        influence: float [source], on the last state of the last layer.
        inside: bool [source], the predicted set of that state.
    """

    texts: Sequence[str]
    influence: Float[Tensor, " source"]
    inside: Bool[Tensor, " source"]


@dataclass(frozen=True)
class Section:
    """What one probe found.

    Attributes:
        title: of the section.
        text: under it.
        figures: what it shows.
    """

    title: str
    text: str
    figures: Sequence[go.Figure]


@dataclass(frozen=True)
class ProbingReport:
    """What a report on a probe run shows; what is None or empty was not asked for.

    Attributes:
        title, headline: of the page.
        facts: short statements, as (label, value).
        problems: what the model cannot be asked.
        capabilities: the model's layers, as an HTML table.
        sections: one for each probe.
        agreement: by the rule that predicted.
        rule: the rule of the shown sets, in words.
        curve: influence inside the sets as heads pass more positions.
        shown: sequences.
        record: of the run.
    """

    title: str
    headline: str
    facts: Sequence[tuple[str, str]]
    problems: Sequence[str]
    capabilities: str
    sections: Sequence[Section]
    agreement: Mapping[str, Agreement]
    rule: str
    curve: CoverageCurve | None
    shown: Sequence[ShownSequence]
    record: RunRecord


def render_probing(report: ProbingReport) -> str:
    """The report as one HTML page without references to anything outside."""
    figures: dict[str, Any] = {
        f"section-{place}-{index}": figure_json(figure)
        for place, section in enumerate(report.sections)
        for index, figure in enumerate(section.figures)
    }
    if report.curve is not None:
        figures["curve"] = figure_json(coverage(report.curve))
    return (
        templates()
        .get_template("probing.html.j2")
        .render(
            report=report,
            plotly_js=get_plotlyjs(),
            figures=figures,
            shown=[_tokens(sequence) for sequence in report.shown],
            metrics=METRICS,
            rows=agreement_rows(report.agreement, "last position", first_layer=0),
            record=json.dumps(report.record.to_dict(), indent=2),
        )
    )


def _tokens(sequence: ShownSequence) -> list[dict[str, Any]]:
    """Tokens with their share of the largest influence; the last one's own is left out."""
    last = len(sequence.texts) - 1
    others = sequence.influence[:last]
    largest = float(others.max()) if last else 0.0
    rows = []
    for index, text in enumerate(sequence.texts):
        value = float(sequence.influence[index])
        share = min(value / largest, 1.0) if largest > 0 and index != last else 0.0
        rows.append(
            {
                "text": text,
                "share": share,
                "inside": bool(sequence.inside[index]),
                "last": index == last,
                "title": f"position {index}, influence {value:.3g}",
            }
        )
    return rows


def coverage(curve: CoverageCurve) -> go.Figure:
    """Influence inside the sets when every head passes its k largest positions."""
    k = list(range(1, len(curve.last) + 1))
    figure = go.Figure()
    if any(not math.isnan(value) for shares in curve.layers for value in shares):
        for layer in range(len(curve.layers[0])):
            figure.add_scatter(
                x=k,
                y=[shares[layer] for shares in curve.layers],
                name=f"layer {layer}",
                opacity=0.5,
            )
    figure.add_scatter(x=k, y=list(curve.last), name="last state", line={"width": 4})
    figure.update_layout(
        height=360,
        title="Influence inside the sets if every head passes its k largest positions"
        " (a state's own token included)",
        margin={"l": 60, "r": 20, "t": 60, "b": 50},
    )
    figure.update_xaxes(title="k (the paper's claim is k = 1)", dtick=1)
    figure.update_yaxes(title="share of squared influence", range=[0, 1.02])
    return figure
