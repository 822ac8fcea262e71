"""The page of a run."""

import math
from collections.abc import Iterator
from typing import Any

from infoflow_lens.agreement import CoverageCurve, Explained, explained_by_position
from infoflow_lens.probing.heads import examples, heads_table
from infoflow_lens.probing.overview import overview_table
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
    rows = result.explained
    headline = f"{found.kind}, probed on {config.data}."
    if "max_position" in result.last:
        headline += _headline(result.last["max_position"])
    sections = {
        name: Section(
            part.title or name,
            f"{part.text} {part.remarks(result.found[name])}".strip(),
            list(_charts(part, result.found[name])),
        )
        for name, part in result.parts.items()
    }
    first = next((name for name in ("mechanisms", "positions") if name in sections), None)
    return ProbingReport(
        title=f"What the states of {config.model} can depend on, and do",
        headline=headline,
        facts=facts,
        problems=found.problems(),
        capabilities=Table.of_frame(found.to_frame()),
        maps=sections.pop(first) if first else None,
        sections=list(sections.values()),
        agreement=result.agreement,
        explained=overview_table(rows) if rows else None,
        heads=heads_table(result),
        examples=examples(result),
        places=[*_by_place(result), *([_curve(result.curve)] if result.curve else [])],
        flow=flow_of(result),
        record=result.record,
    )


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
    if (
        influence is None
        or "max_position" not in result.predicted
        or len(influence.positions[0]) < 2
    ):
        return
    sets = result.predicted["max_position"].part(influence.layers)
    rows = explained_by_position(sets, influence)
    for values, title in (
        (
            [[each.inside for each in row] for row in rows],
            "Influence of other tokens inside the predicted set",
        ),
        (
            [[each.auroc for each in row] for row in rows],
            "AUROC of influence for the predicted set, .5 is chance",
        ),
    ):
        yield HeatMap(title, values, 1.0, "layer", "position")


def _curve(curve: CoverageCurve) -> Lines:
    """Influence inside the sets as heads pass more keys."""
    series = {}
    if any(not math.isnan(value) for shares in curve.layers for value in shares):
        for layer in range(len(curve.layers[0])):
            series[f"layer {layer}"] = [shares[layer] for shares in curve.layers]
    series = {name: v for name, v in series.items() if any(not math.isnan(each) for each in v)}
    series["last state"] = list(curve.last)
    series["last state, by chance"] = list(curve.chance)
    return Lines(
        "Influence inside the sets if every head passes on its k largest (own token left out)",
        range(1, len(curve.last) + 1),
        series,
        "k (the max-position rule is k = 1)",
        "share of influence",
        1.0,
    )
