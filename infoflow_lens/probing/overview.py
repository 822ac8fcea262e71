"""How far predicted sets explain what states depend on, with what chance would give."""

import math
from dataclasses import dataclass

import torch

from infoflow_lens.agreement import auroc, influence_inside
from infoflow_lens.hooks import InfluenceResult
from infoflow_lens.report.charts import Table
from infoflow_lens.theory import InformationSets


@dataclass(frozen=True)
class Explained:
    """The states of one layer, under one rule, without own tokens.

    Attributes:
        n_states: how many were measured.
        no_other: of these, how many can read no other token, or have no influence from one.
        empty: how many have an empty predicted set.
        everything: how many have a set that holds all that they can read.
        inside: the mean share of squared influence inside the set over the rest; NaN without any.
        chance: what a random set of the same size would hold on average.
        auroc: over the rest.
        size, others: the mean size of the set, and the tokens that could be in it, over all.
    """

    n_states: int
    no_other: int
    empty: int
    everything: int
    inside: float
    chance: float
    auroc: float
    size: float
    others: float

    @property
    def n_informative(self) -> int:
        """States of which the prediction could be wrong."""
        return self.n_states - self.no_other - self.empty - self.everything

    def reason(self) -> str:
        """Why nothing can be said; empty if something can."""
        if self.n_informative:
            return ""
        if not self.n_states:
            return "not measured"
        counts = {
            "no other tokens": self.no_other,
            "empty set": self.empty,
            "set holds everything": self.everything,
        }
        found = {words: n for words, n in counts.items() if n}
        if len(found) == 1:
            return next(iter(found))
        return ", ".join(f"{words} ({n})" for words, n in found.items())


def explained(
    sets: InformationSets, influence: InfluenceResult, layer: int, last: bool = False
) -> Explained:
    """Of all measured states of a layer, or of the last position of each sequence."""
    scores = influence.full()[layer]
    members = sets.members[influence.layers[layer]]
    n_batch, n_pos, n_source = scores.shape
    asked = torch.zeros(n_batch, n_pos, dtype=torch.bool)
    sequence, row = (influence.positions >= 0).nonzero(as_tuple=True)
    asked[sequence, influence.positions[sequence, row]] = True
    if last:
        asked &= torch.arange(n_pos) == (influence.lengths + n_pos - n_source - 1)[:, None]
    reachable = ((influence.full() > 0) | sets.members[list(influence.layers)]).flatten(0, 1).any(0)
    own = torch.eye(n_pos, n_source, dtype=torch.bool)
    real = torch.arange(n_source) < influence.lengths[:, None]
    candidate = ((reachable & ~own) & real[:, None])[asked]
    chosen, value = members[asked] & candidate, scores[asked] * candidate
    others, size = candidate.sum(1), chosen.sum(1)
    silent = (others == 0) | (value.sum(1) == 0)
    empty, full = ~silent & (size == 0), ~silent & (size == others) & (size > 0)
    rest = ~(silent | empty | full)

    def mean(values: torch.Tensor) -> float:
        values = values.double()[~values.isnan()]
        return float(values.mean()) if len(values) else math.nan

    return Explained(
        n_states=len(size),
        no_other=int(silent.sum()),
        empty=int(empty.sum()),
        everything=int(full.sum()),
        inside=mean(influence_inside(value[rest], chosen[rest], candidate[rest])),
        chance=mean(size[rest] / others[rest]),
        auroc=mean(auroc(value[rest], chosen[rest], candidate[rest])),
        size=mean(size.double()),
        others=mean(others.double()),
    )


_COLUMNS = {
    "states": "which states",
    "rule": "what each head is taken to pass on",
    "measured": "states whose influence was measured",
    "could be wrong": "of these, states whose predicted set is neither empty nor everything",
    "tokens in the set": "the mean size of the predicted set, of the other tokens",
    "influence inside": "share of the squared influence of other tokens inside the predicted set",
    "chance": "what a random set of the same size would hold",
    "AUROC": "does influence rank predicted tokens above the others? .5 is chance",
}


def overview_table(
    rows: dict[tuple[str, str], Explained],
) -> Table:
    """Every rule beside every other, by (states, rule)."""
    shown: list[list[object]] = []
    reasons: dict[tuple[int, int], str] = {}
    for index, ((states, rule), row) in enumerate(rows.items()):
        size = f"{row.size:.1f} of {row.others:.1f}" if row.n_states else ""
        shown.append(
            [states, rule, row.n_states, row.n_informative, size, row.inside, row.chance, row.auroc]
        )
        if row.reason():
            reasons |= {(index, column): row.reason() for column in (5, 6, 7)}
    return Table(_COLUMNS, shown, reasons)
