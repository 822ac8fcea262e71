"""The page of a run."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from infoflow_lens.agreement import CoverageCurve, Explained, explain_positions
from infoflow_lens.foundation.display import begin_sentence
from infoflow_lens.foundation.lazy import pd
from infoflow_lens.hooks import AttendedResult, PositionsResult
from infoflow_lens.hooks.mechanisms.budgets import TopKResult
from infoflow_lens.hooks.passes.ranking import mark_sources
from infoflow_lens.probing.findings import Findings, Rows
from infoflow_lens.probing.part import Part
from infoflow_lens.probing.parts import RoutesComparison
from infoflow_lens.report.charts import HeatMap, Lines, NameMap, Table
from infoflow_lens.report.flow_view import FlowView, ViewedInput, view_mechanisms
from infoflow_lens.report.pages import ProbingReport, Section
from infoflow_lens.theory import propagate

_EXAMPLES = 3
_HEAD_COLUMNS = {
    "layer": "layers count from 0",
    "head": "heads count from 0",
    "label": "what describes the head on these texts; idle ones do next to nothing together",
    "fixed": "share of its worth that is lost with its mean pattern, by position or by distance",
    "max": "the same with all weight on the largest key, the first position's apart",
    "worth": "what the output loses when the head writes its mean alone",
    "recovery": "variance unexplained by a map from the state to its attended token; 1: nothing",
    "control": "the same for the control that comes closest; a dash where none was fitted",
    "by tokens": "share of first choices that no rule of positions explains",
    "offset": "the most frequent distance of the first choice, key minus query",
    "entropy": "of the attention rows, in nats",
}
_HEAD = ["layer", "head"]


def per_head(result: Findings) -> "pd.DataFrame":
    """Return a row for each layer and head, with the columns of the parts that were measured.

    Those of :meth:`~infoflow_lens.hooks.HeadLabels.to_frame`; those of
    :meth:`~infoflow_lens.hooks.PositionsResult.summary`; ``fvu_1``, ..., the fraction of
    variance unexplained at each rank; ``layer_k``, the keys that the head's layer needs.
    """
    layers = [layer.n_heads or 0 for layer in result.capabilities.layers]
    table = pd.DataFrame([(i, h) for i, n in enumerate(layers) for h in range(n)], columns=_HEAD)

    found = []
    if result.labels is not None:
        found.append(result.labels.to_frame())
    if result.positions is not None:
        found.append(result.positions.summary())
    if result.recovery is not None:
        frame = result.recovery.to_frame().pivot(index=_HEAD, columns="rank", values="fvu")
        found.append(frame.rename(columns=lambda rank: f"fvu_{rank}").reset_index())
    # left joins on layer and head: heads that a part did not measure have NaN
    for frame in found:
        table = table.merge(frame, on=_HEAD, how="left", validate="one_to_one")
    needed = result.found.get("top_k")
    if isinstance(needed, TopKResult):
        # the last number is of all layers at once
        least = dict(enumerate(needed.least()[:-1]))
        table = table.assign(layer_k=table["layer"].map(least))
    return table


def heads_table(result: Findings) -> Table | None:
    """Return a row for each head; None where nothing that concerns heads was measured."""
    recovery = result.recovery
    if result.positions is None and result.labels is None and recovery is None:
        return None
    rows, unknown = [], recovery.too_few_rows if recovery is not None else ()
    for head in per_head(result).to_dict("records"):
        label = None
        if result.labels is not None:
            label = result.labels.label_of(head["layer"], head["head"])
            label += ", idle" * bool(head["idle"])
        control = math.nan
        if recovery is not None and recovery.control_fvu:
            control = float(recovery.control_fvu[head["layer"]][:, head["head"], 0].min())
        # maps that were fitted on too few rows say nothing of a head
        if head["layer"] in unknown:
            control = head["fvu_1"] = math.nan
        rows.append(
            [
                *(head["layer"], head["head"], label),
                *(head.get(key, math.nan) for key in ("fixed", "max", "worth")),
                *(head.get("fvu_1", math.nan), control),
                *(head.get(key, math.nan) for key in ("by_content", "offset", "entropy")),
            ]
        )
    # columns of what was not measured are left out
    frame = pd.DataFrame(rows, columns=list(_HEAD_COLUMNS), dtype=object).dropna(axis=1, how="all")
    columns = {name: _HEAD_COLUMNS[name] for name in frame}
    return Table(columns, frame.to_numpy().tolist(), caption=f"{len(frame)} heads")


def examples(result: Findings) -> dict[str, list[list[float]]]:
    """Find the queries of the shown sequences that attend most to one key, by head "layer.head".

    Each is (sequence, query, key, share of the weight), where the key is not the query itself.
    """
    positions = result.found.get("influence_positions")
    if not isinstance(positions, PositionsResult) or not positions.concentration:
        return {}
    n = min(len(result.texts), len(positions.lengths))
    found = {}
    column = positions.ranks.index(1)
    for layer, (ranked, weights) in enumerate(
        zip(positions.positions, positions.concentration, strict=True)
    ):
        keys, share = ranked[:n, ..., column].long(), weights[:n].float()
        queries = torch.arange(keys.shape[2])
        # the first queries have little choice, and the own position says nothing of others
        share = share.masked_fill((keys < 0) | (keys == queries) | (queries < 2), -1).nan_to_num(-1)
        for head in range(keys.shape[1]):
            own = share[:, head]
            order = own.flatten().argsort(descending=True, stable=True)[:_EXAMPLES]
            found[f"{layer}.{head}"] = [
                [sequence, query, int(keys[sequence, head, query]), round(value, 3)]
                for sequence, query in (divmod(flat, keys.shape[2]) for flat in order.tolist())
                if (value := float(own[sequence, query])) > 0
            ]
    return found


_HOW = {
    "JacobianInfluence": "norm of the Jacobian of the state by the token",
    "ResampleInfluence": "how far the state moves when the token is another sequence's",
}


def build_flow_view(result: Findings) -> FlowView | None:
    """Return the picture of the first sequences of a run; None if influence was not measured."""
    positions, influence = result.found.get("influence_positions"), result.influence
    if influence is None or not isinstance(positions, PositionsResult):
        return None
    n = min(len(result.texts), len(influence.lengths))
    measured = _spread_influence(result)
    attended, labels = result.found.get("influence_attended"), result.labels
    rules = None
    if labels is not None and isinstance(attended, AttendedResult):
        rules = labels.rules(attended, positions)
    # weights of a softmax can be shown as shares; others and bare scores cannot
    softmax = [x.pattern == "softmax" and x.scores == "scores" for x in result.capabilities.layers]
    reached, measured_at = find_reached(result), influence.has_scores.any(dim=0)
    causal = not any(x.attends == "bidirectional" for x in result.capabilities.layers)
    # where nothing was measured, all that the order of positions lets a state hold
    order = torch.ones_like(reached).tril(-1) if causal else torch.ones_like(reached)
    reached = reached.where(measured_at[:, None], order)
    inputs = []
    for index in range(n):
        tokens = result.texts[index]
        n_source = len(tokens)
        n_pos = n_source + influence.n_positions - influence.influence.shape[-1]
        left_out = mark_sources(result.config.without, torch.tensor([n_source]), n_pos, n_source)
        other = ~torch.eye(n_pos, n_source, dtype=torch.bool) & ~left_out
        possible = (reached[:n_pos, :n_source] & other).sum(dim=-1)
        mechanisms = None
        if labels is not None and rules is not None:
            mechanisms = view_mechanisms(labels.mechanisms, rules, index, n_pos)
        inputs.append(
            ViewedInput(
                tokens=tokens,
                n_queries=n_pos,
                ranked=[p[index, :, :n_pos] for p in positions.positions],
                weights=_weights(positions, index, n_pos, softmax),
                mechanisms=mechanisms,
                influence=measured[:, index, :n_pos, :n_source],
                left_out=left_out[0].nonzero().flatten().tolist(),
                possible=possible.expand(len(measured), -1),
                causal=causal,
            )
        )
    kind = str(influence.record.config.get("probe", "influence"))
    how = _HOW.get(kind, kind)
    if influence.relative_error is not None:
        how += f", an estimate (relative error up to {max(influence.relative_error):.0%})"
    # opens at the text in which influence comes from farthest
    first = max(range(n), key=lambda i: _from_afar(inputs[i]), default=0)
    return FlowView(title="", inputs=inputs, influence_name=how, first=first)


def find_reached(result: Findings) -> Bool[Tensor, "pos source"]:
    """Mark the candidates of tables: what reaches a position in some sequence and layer.

    Some layers see a window of keys alone, and what lies behind it is no candidate.
    """
    assert result.influence is not None
    reached = (result.influence.full() > 0).flatten(0, 1).any(dim=0)
    for sets in result.predicted.values():
        reached = reached | sets.members.flatten(0, 1).any(dim=0)
    return reached


def _from_afar(viewed: ViewedInput) -> float:
    """Return the largest influence on the last state from beyond its neighbour, over the total."""
    assert viewed.influence is not None
    last = viewed.n_queries - 1
    found = viewed.influence[-1, last].nan_to_num(0)
    if last < len(found):
        found[last] = 0  # its own token
    far = found[: max(0, last - 1)]
    return float(far.max() / found.sum()) if len(far) and float(found.sum()) > 0 else 0.0


def _spread_influence(result: Findings) -> Tensor:
    """Return influence on every state [layer, sequence, pos, source]; NaN where not measured."""
    influence = result.influence
    assert influence is not None
    _, n_batch, _, n_source = influence.influence.shape
    asked = torch.zeros(n_batch, influence.n_positions, dtype=torch.bool)
    sequence, row = (influence.positions >= 0).nonzero(as_tuple=True)
    asked[sequence, influence.positions[sequence, row]] = True
    full = influence.full().float().masked_fill(~asked[None, :, :, None], torch.nan)
    size = (len(result.capabilities.layers), n_batch, influence.n_positions, n_source)
    whole = torch.full(size, torch.nan, dtype=torch.float32)
    whole[list(influence.layers)] = full
    return whole


def _weights(
    positions: PositionsResult, index: int, n_pos: int, softmax: Sequence[bool]
) -> list[Tensor] | None:
    """Return the weights of the ranked keys, NaN where that of the first was not measured.

    The scores of keys that follow each other differ by the margin, and so do, with a softmax, the
    logarithms of their weights.
    """
    if not positions.concentration:
        return None
    layers = []
    columns = [positions.ranks.index(1)]
    # ranks in a row from 1 on
    while (rank := len(columns) + 1) in positions.ranks:
        columns.append(positions.ranks.index(rank))
    for layer, (ranked, largest) in enumerate(
        zip(positions.positions, positions.concentration, strict=True)
    ):
        weights = torch.full(ranked[index, :, :n_pos].shape, torch.nan, dtype=torch.float32)
        weights[..., columns[0]] = largest[index, :, :n_pos].float()
        margins = positions.margins[layer][index, :, :n_pos].float()
        # of a softmax, the margin of two scores is the logarithm of the ratio of their weights
        for above, below in pairwise(columns if softmax[layer] else []):
            weights[..., below] = weights[..., above] * torch.exp(-margins[..., above])
        layers.append(weights)
    return layers


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
            f"{part.text}\n{part.remarks(result.found[name])}".strip(),
            list(_charts(part, result.found[name])),
        )
        for name, part in result.parts.items()
    }
    if result.influence is not None and result.lack_of_sets:
        text = f"{begin_sentence(result.lack_of_sets)}."
        sections["influence"] = replace(
            sections["influence"], text=text, figures=[result.influence.plot()]
        )
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
        f"could be wrong, being neither empty nor full, {inside} random sets of their sizes "
        f"{chance}"
    )


def _say_strength(result: Findings) -> str:
    """Say how much of the influence on the last states their strongest tokens have, on average.

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
        f"At least {n:.1f} tokens, on average, are needed to hold {_MOST:.0%} of the influence: as "
        f"many tokens with the strongest best paths hold {inside:.0%}, as many at random "
        f"{chance:.0%}."
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
    for measure, title in (
        ("inside", "Influence of other tokens inside the predicted set"),
        ("auroc", "AUROC of influence for the predicted set, .5 is chance"),
    ):
        values = [[getattr(each, measure) for each in row] for row in rows]
        yield HeatMap(title, values, 1.0, "layer", "position")


def _curve(curve: CoverageCurve) -> Lines:
    """Draw influence inside the sets as heads pass more keys."""
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
