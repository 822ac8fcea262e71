"""The page of a run."""

import math
from collections.abc import Iterator
from typing import Any

from infoflow_lens.agreement import CoverageCurve, compare_by_position
from infoflow_lens.probing.heads import examples, heads_table
from infoflow_lens.probing.overview import Explained, explained, overview_table
from infoflow_lens.probing.part import Part
from infoflow_lens.probing.picture import flow_of
from infoflow_lens.probing.result import ProbingResult
from infoflow_lens.report.charts import HeatMap, Lines, NameMap, Table
from infoflow_lens.report.probing import ProbingReport, Section


def report_of(result: ProbingResult) -> ProbingReport:
    """What the page shows of it."""
    config, found = result.config, result.capabilities
    facts = [("layers", str(len(found.layers))), ("weights", f"{found.dtype} on {found.device}")]
    for name, part in result.parts.items():
        facts += part.facts(result.found[name])
    rows = _explained(result)
    headline = f"{found.kind}, probed on {config.data}."
    if ("last position, last layer", "argmax") in rows:
        headline += _headline(rows["last position, last layer", "argmax"])
    return ProbingReport(
        title=f"What the states of {config.model} can depend on, and do",
        headline=headline,
        facts=facts,
        problems=found.problems(),
        capabilities=Table.of_frame(found.to_frame()),
        sections=[
            Section(part.title or name, part.text, list(_charts(part, result.found[name])))
            for name, part in result.parts.items()
        ],
        agreement=result.agreement,
        explained=overview_table(rows) if rows else None,
        heads=heads_table(result),
        examples=examples(result),
        places=[*_by_place(result), *([_curve(result.curve)] if result.curve else [])],
        flow=flow_of(result),
        record=result.record,
    )


def _explained(result: ProbingResult) -> dict[tuple[str, str], Explained]:
    """By states and rule: the last state first, then every layer; the model's own rule first."""
    influence = result.influence
    if influence is None:
        return {}
    rules = sorted(result.predicted, key=lambda name: name != "argmax")
    last = len(influence.layers) - 1
    rows = {
        ("last position, last layer", rule): explained(
            result.predicted[rule], influence, last, last=True
        )
        for rule in rules
    }
    for index, layer in enumerate(influence.layers):
        for rule in rules:
            row = explained(result.predicted[rule], influence, index)
            rows[f"all positions, layer {layer}", rule] = row
    return rows


def _headline(row: Explained) -> str:
    if row.reason():
        return (
            " From each head's largest score alone, nothing can be said of the last state: "
            f"{row.reason()}."
        )
    return (
        f" If each head passes on the token of its largest score, the last state can hold "
        f"{row.size:.1f} of {row.others:.1f} other tokens; {row.inside:.0%} of their measured "
        f"influence lies inside, where a random set of that size would hold {row.chance:.0%}."
    )


def _charts(part: Part, result: Any) -> Iterator[Any]:
    """What a part shows; its table in the place of what a page cannot draw."""
    for figure in part.figures(result):
        if isinstance(figure, (list, tuple)):
            yield from figure
        elif isinstance(figure, (HeatMap, NameMap, Lines, Table)) or hasattr(figure, "savefig"):
            yield figure
        else:
            yield Table.of_frame(part.table(result))


def _by_place(result: ProbingResult) -> Iterator[HeatMap]:
    """Influence inside the sets of the model's own rule, by layer and position."""
    influence = result.influence
    if influence is None or "argmax" not in result.predicted or len(influence.positions[0]) < 2:
        return
    frame = compare_by_position(result.predicted["argmax"], influence)
    n_pos = int(frame["position"].max()) + 1
    for column, title in (
        ("influence_inside", "Influence of other tokens inside the predicted set"),
        ("auroc", "AUROC of influence for the predicted set, .5 is chance"),
    ):
        values = [[math.nan] * n_pos for _ in range(int(frame["layer"].max()) + 1)]
        for row in frame.to_dict("records"):
            full = row["predicted_size"] >= max(1, row["position"]) - 1e-9
            vacuous = column == "influence_inside" and (row["predicted_size"] == 0 or full)
            values[int(row["layer"])][int(row["position"])] = (
                math.nan if vacuous else float(row[column])
            )
        yield HeatMap(title, values, 1.0, "layer", "position")


def _curve(curve: CoverageCurve) -> Lines:
    """Influence inside the sets as heads pass more keys."""
    series = {}
    if any(not math.isnan(value) for shares in curve.layers for value in shares):
        for layer in range(len(curve.layers[0])):
            series[f"layer {layer}"] = [shares[layer] for shares in curve.layers]
    series["last state"] = list(curve.last)
    return Lines(
        "Influence inside the sets if every head passes on its k largest (own token included)",
        range(1, len(curve.last) + 1),
        series,
        "k (the argmax rule is k = 1)",
        "share of squared influence",
        1.0,
    )
