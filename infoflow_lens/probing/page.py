"""The page of a run."""

import math
from collections.abc import Iterator
from typing import Any

import torch

from infoflow_lens.agreement import CoverageCurve, Explained, explain_positions
from infoflow_lens.hooks import PositionsResult
from infoflow_lens.hooks.passes.ranking import mark_sources
from infoflow_lens.probing.findings import Findings, Rows
from infoflow_lens.probing.heads import examples, heads_table
from infoflow_lens.probing.part import Part
from infoflow_lens.probing.parts.tokens import RoutesComparison
from infoflow_lens.probing.picture import build_flow_view, find_reached
from infoflow_lens.report.charts import HeatMap, Lines, NameMap, Table
from infoflow_lens.report.probing import ProbingReport, Section
from infoflow_lens.theory import propagate

_MOST = 0.9  # of the influence, for which the strongest tokens are counted [chosen]


def build_report(result: Findings) -> ProbingReport:
    """Collect all that the page of a run shows."""
    config, found = result.config, result.capabilities
    facts = [("layers", str(len(found.layers))), ("weights", f"{found.dtype} on {found.device}")]
    for name, part in result.parts.items():
        facts += part.facts(result.found[name])
    rows = result.explained
    facts.insert(0, ("model", found.kind))
    headline = [f"Probed on {config.data}."]
    if "max_position" in result.last:
        headline = [
            _headline(result.last["max_position"]),
            _say_strength(result),
            _compare_baselines(result),
        ]
    sections = {
        name: Section(
            part.title or name,
            f"{part.text} {part.remarks(result.found[name])}".strip(),
            list(_charts(part, result.found[name])),
        )
        for name, part in result.parts.items()
    }
    # maps over heads come first on the page; the other sections below
    first = next((name for name in ("labels", "positions") if name in sections), None)
    return ProbingReport(
        title=f"What the states of {config.model} can depend on, and do",
        headline=" ".join(filter(None, headline)),
        facts=facts,
        problems=found.problems(),
        capabilities=Table.from_frame(found.to_frame()),
        maps=sections.pop(first) if first else None,
        sections=list(sections.values()),
        agreement=result.agreement,
        explained=overview_table(rows) if rows else None,
        heads=heads_table(result),
        examples=examples(result),
        places=[*_map_places(result), *([_curve(result.curve)] if result.curve else [])],
        flow=build_flow_view(result),
        record=result.record,
    )


def _headline(row: Explained) -> str:
    if row.reason():
        return (
            "From each head's largest score alone, nothing can be said of the last state "
            f"({row.reason()})."
        )
    size = (
        "If each head passes on the token of its largest score, the last state can hold "
        f"{row.size:.1f} of {row.others:.1f} other tokens"
    )
    inside = f"{row.inside:.0%} of their measured influence lies inside, where"
    chance = f"would hold {row.chance:.0%}."
    if row.n_informative == row.n_states:
        return f"{size}; {inside} a random set of that size {chance}"
    # the size is of all last states, and would contradict shares of some
    return (
        f"{size} on average. At the {row.n_informative} of {row.n_states} sequences where the set "
        f"could be wrong, {inside} random sets of their sizes {chance}"
    )


def _say_strength(result: Findings) -> str:
    """Say how much of the influence on the last states their strongest tokens have, in the mean.

    The strength of a token is that of its best path, of the first keys of all heads; as many count
    as hold 90% of the influence of other tokens.
    """
    influence, chosen = result.influence, result.found.get("influence_positions")
    if influence is None or not isinstance(chosen, PositionsResult) or not chosen.concentration:
        return ""
    n_source, full = influence.influence.shape[-1], influence.full()
    weights = [layer.float().nan_to_num(0).clamp(0, 1) for layer in chosen.concentration]
    graded = propagate(chosen.argmax, n_source, strength=weights).strengths
    # what no head passes on is no candidate, as in the sentences and tables of sets
    left_out = mark_sources(
        result.config.without, influence.lengths, influence.n_positions, n_source
    )
    reached, rows = find_reached(result), []
    for index, length in enumerate(influence.lengths.tolist()):
        # the last state of each text; CLS stands behind the tokens
        last = length - 1 + influence.n_positions - n_source
        others = (torch.arange(length) != last) & ~left_out[index, :length]
        others &= reached[last, :length]
        found = full[-1, index, last, :length].double()[others]
        if not float(found.sum()) > 0:
            continue
        # as many tokens as hold most of the influence, whichever they are
        held = found.sort(descending=True).values.cumsum(0)
        n = min(len(found), int((held < _MOST * found.sum()).sum()) + 1)
        strength = graded[influence.layers[-1], index, last, :length][others]
        strongest = strength.argsort(descending=True, stable=True)[:n]
        rows.append((n, float(found[strongest].sum() / found.sum()), n / len(found)))
    if not rows:
        return ""
    n, inside, chance = (sum(column) / len(rows) for column in zip(*rows, strict=True))
    return (
        f"Ranked by the strength of its best path, the {n:.1f} strongest tokens, as many as hold "
        f"{_MOST:.0%} of the influence, have {inside:.0%} of it, where as many at random would "
        f"have {chance:.0%}."
    )


def _compare_baselines(result: Findings) -> str:
    """Say whether a baseline tells better than the set what the last states depend on."""
    found = result.found.get("routes")
    if not isinstance(found, RoutesComparison):
        return ""
    rank = next(iter(found.ranks()), None)
    if rank is None:
        return ""
    if rank.best == rank.size_of:
        return f"No baseline of the same size is nearer to influence (AUROC {rank.own:.3f})."
    return (
        f"Of all measures at the same set size, {rank.best} is nearest to influence (AUROC "
        f"{rank.most:.3f}; the set {rank.own:.3f})."
    )


_COLUMNS = {
    "states": "which states",
    "rule": "what each head is taken to pass on",
    "measured": "states whose influence was measured",
    "could be wrong": "of these, states whose predicted set is neither empty nor everything",
    "tokens in the set": "the mean size of the predicted set, of the other tokens",
    "influence inside": "share of the influence of other tokens inside the predicted set",
    "chance": "what a random set of the same size would hold",
    "AUROC": "does influence rank predicted tokens above the others? .5 is chance",
}


def overview_table(rows: Rows) -> Table:
    """Return the table of all rules: the first row, and the rows that have a meaning."""
    cells: list[list[object]] = []
    reasons: dict[tuple[int, int], str] = {}
    first = next(iter(rows), None)
    # the first row stays, so that the reader sees why it says nothing
    kept = {at: row for at, row in rows.items() if not row.reason() or at == first}
    for index, ((states, rule), row) in enumerate(kept.items()):
        size = f"{row.size:.1f} of {row.others:.1f}" if row.n_states else ""
        cells.append(
            [states, rule, row.n_states, row.n_informative, size, row.inside, row.chance, row.auroc]
        )
        if row.reason():
            reasons |= {(index, column): row.reason() for column in (5, 6, 7)}
    left = [f"{states} by {rule}" for states, rule in rows if (states, rule) not in kept]
    caption = ""
    if left:
        some = ", ".join(left[:3]) + (", ..." if len(left) > 3 else "")
        caption = (
            f"{len(left)} more rows are left out, as nothing can be said where every set is empty "
            f"or holds everything: {some}; explained.csv has them"
        )
    return Table(_COLUMNS, cells, reasons, caption)


def _charts(part: Part, result: Any) -> Iterator[Any]:
    """Yield the charts of a part; its table in the place of what a page cannot draw."""
    for figure in part.figures(result):
        if isinstance(figure, (list, tuple)):
            yield from figure
        elif isinstance(figure, (HeatMap, NameMap, Lines, Table)) or hasattr(figure, "savefig"):
            yield figure
        else:
            yield Table.from_frame(part.table(result))


def _map_places(result: Findings) -> Iterator[HeatMap]:
    """Draw influence inside the sets of the model's own rule, by layer and position."""
    influence = result.influence
    if (
        influence is None
        or "max_position" not in result.predicted
        or len(influence.positions[0]) < 2
    ):
        return
    rows = explain_positions(result.predicted["max_position"], influence, result.config.without)
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
    ks = range(1, len(curve.last) + 1)
    of_k = [curve.take_k(k) for k in ks]
    series = {f"layer {layer}": [shares[layer] for shares in of_k] for layer in sorted(of_k[0])}
    # layers that nothing was measured in have no line
    series = {name: v for name, v in series.items() if any(not math.isnan(each) for each in v)}
    series["last state"] = list(curve.last)
    series["last state, by chance"] = list(curve.chance)
    return Lines(
        "Influence inside the sets if every head passes on its k largest (own token left out)",
        ks,
        series,
        "k (the max-position rule is k = 1)",
        "share of influence",
        1.0,
    )
