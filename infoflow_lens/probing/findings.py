"""What a probe run found, for its tables, its pictures and its page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from infoflow_lens.agreement import (
    Agreement,
    CoverageCurve,
    Explained,
    compare,
    coverage_curve,
    explained,
)
from infoflow_lens.foundation.display import begin_sentence
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.hooks import (
    AttendedResult,
    HeadLabels,
    InfluenceResult,
    ModelCapabilities,
    PositionsResult,
    RecoveryResult,
    Result,
    ShardedPositions,
)
from infoflow_lens.probing.config import ProbingConfig
from infoflow_lens.probing.part import Part
from infoflow_lens.theory import InformationSets, propagate


def compare_with_influence(
    found: Mapping[str, Any],
    without: Sequence[int] = (),
) -> tuple[dict[str, Agreement], dict[str, InformationSets], CoverageCurve | None]:
    """Predict sets, and compare them with measured influence on the same sequences.

    Args:
        found: the results of a run by name.
        without: positions that are no keys of first choices, and no candidates.

    Returns:
        The agreement by rule, the predicted sets by rule, and the coverage curve; empty and None
        without influence.
    """
    if "influence" not in found:
        return {}, {}, None
    influence: InfluenceResult = found["influence"]
    attended: AttendedResult = found["influence_attended"]
    chosen: PositionsResult = found["influence_positions"]
    n_source = influence.influence.shape[-1]
    # the rule of the paper, and each head by its label, where heads have labels
    predicted = {"max_position": propagate(chosen.argmax, n_source)}
    if "labels" in found:
        labels: HeadLabels = found["labels"]
        predicted["mechanisms"] = propagate(labels.rules(attended, chosen), n_source)
    left_out = tuple(without)
    agreement = {n: compare(sets, influence, without=left_out) for n, sets in predicted.items()}
    return agreement, predicted, coverage_curve(chosen.positions, influence, without=left_out)


def predict_by_top_k(
    chosen: PositionsResult, n_source: int, most: Sequence[int] = (1, 2, 4)
) -> dict[str, InformationSets]:
    """Predict sets under the rule that each head passes on its k largest keys.

    Args:
        chosen: the ranked keys.
        n_source: the number of source positions.
        most: the values of k; those that were not ranked are left out.

    Returns:
        The sets by name: "k=1", ...
    """
    ranked = [k for k in most if k <= len(chosen.ranks)]
    return {
        f"k={k}": propagate([layer[..., :k] for layer in chosen.positions], n_source)
        for k in ranked
    }


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


@dataclass(frozen=True, repr=False)
class Findings:
    """What a probe run found.

    Attributes:
        out: the folder with all of it; None where nothing was to be kept.
        config: the settings.
        capabilities: what can be measured on the model, layer by layer.
        parts: the parts that were measured, by name.
        found: results by name; those of the parts, and what predictions are made from.
        agreement: predicted against measured sets, by the rule that made the prediction:
            "max_position", every head passes the key of its largest score, and "mechanisms", every
            head by its label.
        curve: influence inside the sets when heads pass their k largest positions.
        texts: the tokens of the shown sequences, as strings.
        predicted: sets by the same rules, for the sequences whose influence was measured.
        record: of the run.
    """

    out: Path | None
    config: ProbingConfig
    capabilities: ModelCapabilities
    parts: Mapping[str, Part]
    found: Mapping[str, Result]
    agreement: Mapping[str, Agreement]
    curve: CoverageCurve | None
    texts: tuple[tuple[str, ...], ...]
    predicted: Mapping[str, InformationSets]
    record: RunRecord

    @cached_property
    def explained(self) -> Rows:
        """The share of influence inside the sets, by (states, rule): the one object that
        tables, page and sentences show. Empty without influence.
        """
        if self.influence is None:
            return {}
        return explain_layers(self.predicted, self.influence, self.config.without)

    @property
    def last(self) -> dict[str, Explained]:
        """The share of influence inside the sets of the last position in the last layer, by
        rule.
        """
        states = next((states for states, _ in self.explained), None)
        return {rule: found for (at, rule), found in self.explained.items() if at == states}

    @property
    def positions(self) -> PositionsResult | ShardedPositions | None:
        """The positions to which heads attend; None if they were not measured."""
        return self._find("positions", (PositionsResult, ShardedPositions))

    @property
    def recovery(self) -> RecoveryResult | None:
        """The errors of recovery maps; None if they were not measured."""
        return self._find("recovery", RecoveryResult)

    @property
    def influence(self) -> InfluenceResult | None:
        """The influence of tokens on states; None if it was not measured."""
        return self._find("influence", InfluenceResult)

    @property
    def labels(self) -> HeadLabels | None:
        """The labels of heads; None if they were not measured."""
        return self._find("labels", HeadLabels)

    def _find(self, name: str, kind: type[Any] | tuple[type[Any], ...]) -> Any:
        result = self.found.get(name)
        return result if isinstance(result, kind) else None

    def findings(self) -> list[str]:
        """Say how far the sets of each rule explain the states, and what the parts found."""
        lines = [f"by the rule {rule!r}, {found}" for rule, found in self.last.items()]
        return [*lines, *self.sentences()]

    def to_output(self) -> dict[str, Any]:
        """Return what the command prints, as JSON values: "sentences", "title" and "rows"."""
        rows = []
        for rule, found in self.last.items():
            numbers = (found.inside, found.chance, found.auroc)
            cells = (
                [f"{x:.3f}" for x in numbers] if not found.reason() else [found.reason(), "", ""]
            )
            size = f"{found.size:.1f} of {found.others:.1f}"
            if 0 < found.n_informative < found.n_states:  # the other cells are of these alone
                size += f"; {found.n_informative} of {found.n_states} sets could be wrong"
            rows.append([rule, *cells, size])
        states = next((str(found.states) for found in self.last.values()), "")
        title = f"{begin_sentence(states)}: measured against predicted"
        return {"sentences": self.sentences(), "title": title, "rows": rows}

    def sentences(self) -> list[str]:
        """Say what the parts found, in words."""
        return [
            sentence
            for name, part in self.parts.items()
            for sentence in part.sentences(self.found[name])
        ]
