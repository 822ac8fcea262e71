"""The report: one HTML file that holds everything it shows."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float, Int
from plotly.offline import get_plotlyjs
from torch import Tensor

from infoflow_lens.agreement import Agreement, SetAgreement, influence_inside
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.hooks import RecoveryResult
from infoflow_lens.report import figures
from infoflow_lens.report.templating import templates
from infoflow_lens.theory.information_sets import InformationSets


@dataclass(frozen=True)
class Stage:
    """A model at one moment, predicted and measured on the same inputs.

    Attributes:
        name: "initial", "trained", ...
        recovery: recovery errors.
        agreement: predicted against measured sets, over all probed inputs.
        positions: for every layer, the retrieved keys of the shown inputs [shown, head, pos].
        predicted: information sets of the shown inputs.
        influence: measured influence on the shown inputs [layer, shown, pos, source].
        edges: for every layer, the influence of its inputs on its outputs [shown, pos, pos].
    """

    name: str
    recovery: RecoveryResult
    agreement: Agreement
    positions: Sequence[Int[Tensor, "shown _head pos"]]
    predicted: InformationSets
    influence: Float[Tensor, "layer shown pos source"]
    edges: Sequence[Float[Tensor, "shown pos pos"]]


@dataclass(frozen=True)
class Report:
    """What a report shows.

    Attributes:
        title: of the page.
        headline: the finding, in a sentence or two.
        facts: short statements under it, as (label, value).
        stages: the model at different moments, in the order of time.
        active: the target's active index sets of the shown inputs [shown, source].
        history: the training history, as in `TrainingResult`.
        record: of the run.
    """

    title: str
    headline: str
    facts: Sequence[tuple[str, str]]
    stages: Sequence[Stage]
    active: Bool[Tensor, "shown source"]
    history: Sequence[Mapping[str, float | int]]
    record: RunRecord


METRICS = {
    "auroc": ("AUROC", "does influence rank predicted tokens above the others? .5 is chance"),
    "average_precision": ("avg. precision", "the same, as area under precision and recall"),
    "precision": ("precision", "share of the predicted set that is measured"),
    "recall": ("recall", "share of the measured set that is predicted"),
    "jaccard": ("Jaccard", "intersection over union of the two sets"),
    "exact_match": ("exact", "share of states whose two sets are equal"),
    "influence_inside": ("inside", "share of squared influence in the predicted set"),
    "predicted_size": ("predicted", "mean size of the predicted set"),
    "measured_size": ("measured", "mean size of the measured set"),
}


def agreement_rows(
    agreement: Mapping[str, Agreement], last: str, first_layer: int = 1
) -> list[dict[str, Any]]:
    """Rows of the table of agreement: by place, then by what the agreements are called.

    The paper counts layers from 1, TransformerLens from 0.
    """
    rows = []
    n_layers = max((len(each.layers) for each in agreement.values()), default=0)
    for index in range(n_layers + 1):
        place = (
            f"tokens, layer {index + first_layer}" if index < n_layers else f"{last}, last layer"
        )
        for name, each in agreement.items():
            values: SetAgreement = each.layers[index] if index < n_layers else each.cls
            if not values.n_states:
                continue
            rows.append(
                {
                    "place": place,
                    "stage": name,
                    "values": [_number(getattr(values, metric)) for metric in METRICS],
                }
            )
    return rows


def _number(value: float) -> str:
    return "\u2013" if math.isnan(value) else f"{value:.3f}"


def figure_json(figure: go.Figure) -> Any:
    """A figure as the page's script draws it."""
    # plotly's default template is long and the same in every figure
    figure.update_layout(template="none")
    return json.loads(figure.to_json(validate=False))


def render_report(report: Report) -> str:
    """The report as one HTML page without references to anything outside."""
    stages: list[dict[str, Any]] = []
    for stage in report.stages:
        n_source = stage.predicted.n_sources
        flows, maps = [], []
        for shown in range(len(report.active)):
            influence = stage.influence[:, shown]
            members = stage.predicted.members[:, shown]
            flows.append(
                figure_json(
                    figures.information_flow(
                        [chosen[shown] for chosen in stage.positions],
                        [edges[shown].clone() for edges in stage.edges],
                        n_source,
                        report.active[shown],
                        members[-1, -1],
                        influence[-1, -1],
                    )
                )
            )
            maps.append(figure_json(figures.influence_beside_sets(members, influence)))
        cls_influence = stage.influence[-1, :, -1]
        inside = influence_inside(
            cls_influence,
            stage.predicted.members[-1, :, -1],
            torch.ones_like(cls_influence, dtype=torch.bool),
        )
        stages.append({"name": stage.name, "flow": flows, "maps": maps, "inside": inside.tolist()})
    recovery = figures.recovery({stage.name: stage.recovery for stage in report.stages})
    return (
        templates()
        .get_template("report.html.j2")
        .render(
            report=report,
            plotly_js=get_plotlyjs(),
            stages=stages,
            recovery=figure_json(recovery),
            curve=figure_json(figures.training_curve(report.history)),
            metrics=METRICS,
            rows=agreement_rows({stage.name: stage.agreement for stage in report.stages}, "CLS"),
            threshold=report.stages[-1].agreement.threshold,
            record=json.dumps(report.record.to_dict(), indent=2),
            active=[row.nonzero().flatten().tolist() for row in report.active],
        )
    )
