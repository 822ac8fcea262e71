"""How far predicted sets explain what states depend on, with what chance would give."""

from collections.abc import Mapping

from infoflow_lens.agreement import Explained, explained
from infoflow_lens.hooks import InfluenceResult
from infoflow_lens.report.charts import Table
from infoflow_lens.theory import InformationSets

Rows = Mapping[tuple[str, str], Explained]  # by (states, rule)


def explain_layers(
    predicted: Mapping[str, InformationSets],
    influence: InfluenceResult,
    without: tuple[int, ...] = (),
) -> Rows:
    """Measure how much of the influence lies inside the sets, by (states, rule).

    The last state comes first, then every layer; within each the max-position rule comes first.
    """
    rules = sorted(predicted, key=lambda name: name != "max_position")
    rows = {}
    for rule in rules:
        row = explained(predicted[rule], influence, last=True, without=without)
        rows[row.states, rule] = row
    for index in range(len(influence.layers)):
        for rule in rules:
            row = explained(predicted[rule], influence, index, without=without)
            rows[row.states, rule] = row  # the first one again where the last alone was measured
    return rows


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
