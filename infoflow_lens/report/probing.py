"""The report of a probe run on any model: one HTML file that holds everything it shows."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from infoflow_lens.agreement import Agreement, SetAgreement
from infoflow_lens.foundation.display import MISSING
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.report.assets import add_policy, asset, templates
from infoflow_lens.report.charts import Table, render_chart
from infoflow_lens.report.flow import (
    fallback,
    fit_into_page,
    mounting_script,
    picture_data,
    picture_element,
)
from infoflow_lens.report.flow_view import FlowView

TERMS = {
    "information set": "the input positions that a state can still hold",
    "max-position rule": "each head passes on the token of its largest score",
    "top-k rule": "each head passes on the tokens of its k largest scores",
    "mechanisms rule": "each head passes on what describes it",
    "own token": "the token at the state's own position; the residual stream keeps it",
    "influence": "how much a state moves when an input token does",
    "influence inside": "share of the influence of other tokens that lies in the predicted set",
    "AUROC": "does influence rank predicted tokens above the others? .5 is chance",
    "label": "which ideal pattern describes a head: fixed, the largest key, several keys",
    "worth": "what the output loses when a head writes its mean alone",
    "recovery": "can a linear map read the attended token off the state?",
    "control": "the same map for a token that the head does not attend to",
    "entropy": "how spread the attention rows are, in nats",
    "layer": "layers count from 0, the first block",
}


def term(name: str, words: str | None = None) -> Markup:
    """Return a word with its meaning on hover and focus."""
    return Markup('<span class="term" tabindex="0">{}<span role="tooltip">{}</span></span>').format(
        words or name, TERMS[name]
    )


METRICS = {
    "auroc": ("AUROC", "does influence rank predicted tokens above the others? .5 is chance"),
    "average_precision": ("avg. precision", "the same, as area under precision and recall"),
    "precision": ("precision", "share of the predicted set that is measured"),
    "recall": ("recall", "share of the measured set that is predicted"),
    "jaccard": ("Jaccard", "intersection over union of the two sets"),
    "exact_match": ("exact", "share of states whose two sets are equal"),
    "influence_inside": ("inside (squared)", "share of squared influence in the predicted set"),
    "predicted_size": ("predicted", "mean size of the predicted set"),
    "measured_size": ("measured", "mean size of the measured set"),
}


def agreement_rows(agreement: Mapping[str, Agreement], last: str) -> list[dict[str, Any]]:
    """Return rows of the table of agreement: by place, then by what the agreements are called."""
    rows = []
    n_layers = max((len(each.layers) for each in agreement.values()), default=0)
    for index in range(n_layers + 1):
        place = f"tokens, layer {index}" if index < n_layers else f"{last}, last layer"
        for name, each in agreement.items():
            values: SetAgreement = each.layers[index] if index < n_layers else each.cls
            if not values.n_states:
                continue
            numbers = [getattr(values, metric) for metric in METRICS]
            said = [MISSING if math.isnan(number) else f"{number:.3f}" for number in numbers]
            rows.append({"place": place, "stage": name, "values": said})
    return rows


PICTURE_BYTES = 900_000


@dataclass(frozen=True)
class Section:
    """What one probe found.

    Attributes:
        title: of the section, which is also its name in the list at the top.
        text: under it, a line for each paragraph.
        figures: what it shows: charts of `infoflow_lens.report.charts` (HeatMap, NameMap, Lines,
            Table), or figures of matplotlib.
    """

    title: str
    text: str
    figures: Sequence[Any]


@dataclass(frozen=True)
class ProbingReport:
    """What a report on a probe run shows; what is None or empty was not asked for.

    Attributes:
        title, headline: of the page.
        facts: short statements, as (label, value).
        problems: what the model cannot be asked.
        capabilities: the model's layers.
        maps: the section that shows all heads at a glance, which leads.
        sections: one for each other probe.
        agreement: by the rule that predicted.
        explained: how far sets explain influence, with chance.
        heads: a row for each head, the first two columns of which are layer and head.
        examples: for "layer.head", (sequence of `flow`, query, key, weight).
        places: charts over layers and positions.
        flow: the picture.
        record: of the run.
    """

    title: str
    headline: str
    facts: Sequence[tuple[str, str]]
    problems: Sequence[str]
    capabilities: Table
    maps: Section | None
    sections: Sequence[Section]
    agreement: Mapping[str, Agreement]
    explained: Table | None
    heads: Table | None
    examples: Mapping[str, Sequence[Sequence[float]]]
    places: Sequence[Any]
    flow: FlowView | None
    record: RunRecord


def render_probing(report: ProbingReport) -> str:
    """Return the report as one HTML page without references to anything that it would fetch."""
    # a picture that is too large for a page is left out, and the page says so
    flow = None if report.flow is None else fit_into_page(report.flow, PICTURE_BYTES)
    data = None if flow is None else picture_data(flow)
    script = "" if data is None else mounting_script([data])
    page = (
        templates()
        .get_template("probing.html.j2")
        .render(
            report=report,
            term=term,
            chart=render_chart,
            anchor=_anchor,
            picture="" if flow is None or data is None else picture_element(data, fallback(flow)),
            script=script,
            dashboard=asset("dashboard.js"),
            heads_data=htmlsafe_json_dumps(
                {name: rows for name, rows in report.examples.items() if rows}
            ),
            metrics=METRICS,
            rows=agreement_rows(report.agreement, "last position"),
            record=json.dumps(report.record.to_dict(), indent=2),
        )
    )
    return add_policy(page)


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"
