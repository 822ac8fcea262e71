"""The report of a probe run on any model: one HTML file that holds everything it shows."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go
from jaxtyping import Bool, Float
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots
from torch import Tensor

from infoflow_lens.agreement import Agreement, CoverageCurve
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.hooks import MechanismsResult, RecoveryResult
from infoflow_lens.report.page import METRICS, agreement_rows, figure_json, templates

if TYPE_CHECKING:
    import pandas as pd

# What needs nothing of the input first; the theory's own three in colours.
_COLOURS = {
    "own_position": "#d9d9d9",
    "global": "#56b4e9",
    "specific_position": "#009e73",
    "max_position": "#d55e00",
    "top_k": "#cc79a7",
    "soft": "#444444",
}


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
class ProbingReport:
    """What a report on a probe run shows; what is None or empty was not asked for.

    Attributes:
        title, headline: of the page.
        facts: short statements, as (label, value).
        problems: what the model cannot be asked.
        capabilities: the model's layers, as an HTML table.
        positions: ``PositionsResult.summary()``.
        recovery, mechanisms: results.
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
    positions: "pd.DataFrame | None"
    recovery: RecoveryResult | None
    mechanisms: MechanismsResult | None
    agreement: Mapping[str, Agreement]
    rule: str
    curve: CoverageCurve | None
    shown: Sequence[ShownSequence]
    record: RunRecord


def render_probing(report: ProbingReport) -> str:
    """The report as one HTML page without references to anything outside."""
    figures: dict[str, Any] = {}
    if report.mechanisms is not None:
        figures["mechanisms"] = figure_json(mechanisms_by_head(report.mechanisms))
    if report.positions is not None:
        figures["positions"] = figure_json(
            by_head(
                report.positions,
                {"by_content": "explained by tokens alone", "entropy": "entropy (nats)"},
            )
        )
    if report.recovery is not None:
        figures["recovery"] = figure_json(recovery_by_head(report.recovery))
    if report.curve is not None:
        figures["curve"] = figure_json(coverage(report.curve))
    return (
        templates()
        .get_template("probing.html.j2")
        .render(
            report=report,
            plotly_js=get_plotlyjs(),
            figures=figures,
            mechanisms=report.mechanisms is not None,
            positions=report.positions is not None,
            recovery=report.recovery is not None,
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


def _grid(frame: "pd.DataFrame", column: str) -> list[list[float | None]]:
    """A column by layer and head; None where a layer has fewer heads."""
    n_layers, n_heads = int(frame["layer"].max()) + 1, int(frame["head"].max()) + 1
    grid: list[list[float | None]] = [[None] * n_heads for _ in range(n_layers)]
    for layer, head, value in zip(frame["layer"], frame["head"], frame[column], strict=True):
        grid[int(layer)][int(head)] = None if math.isnan(value) else float(value)
    return grid


def _axes(figure: go.Figure, n_layers: int, n_heads: int) -> go.Figure:
    step = max(1, n_heads // 6)
    figure.update_xaxes(
        title="head", dtick=step, constrain="domain", showgrid=False, zeroline=False
    )
    figure.update_yaxes(
        title="layer", dtick=1, autorange="reversed", showgrid=False, zeroline=False
    )
    figure.update_layout(
        height=150 + 34 * max(n_layers, 3), margin={"l": 50, "r": 20, "t": 50, "b": 45}
    )
    return figure


def by_head(
    frame: "pd.DataFrame", columns: Mapping[str, str], most: float | None = None
) -> go.Figure:
    """Heat maps over layers and heads, one for each column, up to `most` or the largest value."""
    figure = make_subplots(cols=len(columns), subplot_titles=list(columns.values()))
    width = 1 / len(columns)
    for place, column in enumerate(columns):
        figure.add_trace(
            go.Heatmap(
                z=_grid(frame, column),
                colorscale="Blues",
                zmin=0,
                zmax=most or max(float(frame[column].max()), 1e-9),
                colorbar={"x": (place + 1) * width - 0.12, "len": 1.0, "thickness": 10},
                hovertemplate="layer %{y}, head %{x}: %{z:.3f}<extra></extra>",
            ),
            row=1,
            col=place + 1,
        )
        axis = "xaxis" if place == 0 else f"xaxis{place + 1}"
        domain = [place * width, (place + 1) * width - 0.13]  # room for the colour bar
        figure.layout[axis].domain = domain
        figure.layout.annotations[place].x = sum(domain) / 2
    return _axes(figure, int(frame["layer"].max()) + 1, int(frame["head"].max()) + 1)


def recovery_by_head(result: RecoveryResult) -> go.Figure:
    """Fraction of variance unexplained over layers and heads, a panel for each rank."""
    frame = result.to_frame()
    ranks = list(result.ranks)
    wide = frame.pivot_table(index=["layer", "head"], columns="rank", values="fvu", dropna=False)
    shown = ranks[:4]
    wide = wide.reset_index().rename(columns={rank: f"rank {rank}" for rank in ranks})
    labels = {f"rank {rank}": f"rank {rank}" for rank in shown}
    return by_head(wide, labels, most=1.0)


def mechanisms_by_head(result: MechanismsResult) -> go.Figure:
    """The mechanism of every head in its colour; the damages are in the hover text."""
    frame = result.to_frame()
    names = list(_COLOURS)
    frame["code"] = frame["mechanism"].map(names.index).astype(float)
    n = len(names)
    scale = []
    for index, colour in enumerate(_COLOURS.values()):
        scale += [[index / n, colour], [(index + 1) / n, colour]]
    grid = _grid(frame, "code")
    hover = [["" for _ in row] for row in grid]
    for row in frame.to_dict("records"):
        lost = "<br>".join(f"{ideal}: {row[ideal]:.2g}" for ideal in result.ideals)
        hover[int(row["layer"])][int(row["head"])] = (
            f"layer {row['layer']}, head {row['head']}: <b>{row['mechanism']}</b><br>{lost}"
        )
    figure = go.Figure(
        go.Heatmap(
            z=grid,
            zmin=-0.5,
            zmax=n - 0.5,
            colorscale=scale,
            text=hover,
            hovertemplate="%{text}<extra></extra>",
            xgap=2,
            ygap=2,
            colorbar={"tickvals": list(range(n)), "ticktext": names, "len": 1.0},
        )
    )
    return _axes(figure, len(grid), len(grid[0]))


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
