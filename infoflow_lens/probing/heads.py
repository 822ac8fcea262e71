"""The table of all heads of a run, and sequences in which each attends most."""

import math
from typing import Any

import torch

from infoflow_lens.foundation.lazy import pd
from infoflow_lens.hooks import PositionsResult
from infoflow_lens.hooks.mechanisms.top_k import TopKResult
from infoflow_lens.probing.findings import Findings
from infoflow_lens.report.charts import Table

_EXAMPLES = 3
_COLUMNS = {
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

    # left joins on layer and head: heads that a part did not measure have NaN
    def add_columns(frame: "pd.DataFrame") -> None:
        nonlocal table
        table = table.merge(frame, on=_HEAD, how="left", validate="one_to_one")

    if result.labels is not None:
        add_columns(result.labels.to_frame())
    if result.positions is not None:
        add_columns(result.positions.summary())
    if result.recovery is not None:
        frame = result.recovery.to_frame().pivot(index=_HEAD, columns="rank", values="fvu")
        add_columns(frame.rename(columns=lambda rank: f"fvu_{rank}").reset_index())
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
    empty = [all(_is_missing(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    columns = {n: m for (n, m), gone in zip(_COLUMNS.items(), empty, strict=True) if not gone}
    kept = [[v for v, gone in zip(row, empty, strict=True) if not gone] for row in rows]
    return Table(columns, kept, caption=f"{len(kept)} heads")


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def examples(result: Findings) -> dict[str, list[list[float]]]:
    """Find for each head, "layer.head", the queries of the shown sequences that attend most to one
    key: (sequence, query, key, share of the weight), where keys are not the query itself."""
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
            order = share[:, head].flatten().argsort(descending=True, stable=True)[:_EXAMPLES]
            rows = []
            for flat in order.tolist():
                sequence, query = divmod(flat, keys.shape[2])
                value = float(share[sequence, head, query])
                if value > 0:
                    key = int(keys[sequence, head, query])
                    rows.append([sequence, query, key, round(value, 3)])
            found[f"{layer}.{head}"] = rows
    return found
