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
from infoflow_lens.probing.part import Part, lack_of_heads, where_lacking
from infoflow_lens.theory import InformationSets, propagate


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


@dataclass(frozen=True, repr=False)
class Findings:
    """What a probe run found.

    Attributes:
        out: the folder with all of it; None where nothing was to be kept.
        config: the settings.
        capabilities: what can be measured on the model, layer by layer.
        parts: the parts that were measured, by name.
        found: results by name; those of the parts, and what predictions are made from.
        texts: the tokens of the shown sequences, as strings.
        record: of the run.
    """

    out: Path | None
    config: ProbingConfig
    capabilities: ModelCapabilities
    parts: Mapping[str, Part]
    found: Mapping[str, Result]
    texts: tuple[tuple[str, ...], ...]
    record: RunRecord

    @cached_property
    def predicted(self) -> dict[str, InformationSets]:
        """The sets of the sequences whose influence was measured, by rule.

        Empty without influence, and where it is :attr:`lack_of_sets`.

        By "max_position" every head passes the key of its largest score; by "mechanisms", where
        heads have labels, what its label says.
        """
        chosen = self._find("influence_positions", PositionsResult)
        if self.influence is None or chosen is None:
            return {}
        n_source = self.influence.influence.shape[-1]
        sets = {"max_position": propagate(chosen.argmax, n_source)}
        if self.labels is not None:
            attended = self._find("influence_attended", AttendedResult)
            rules = self.labels.rules(attended, chosen)
            sets["mechanisms"] = propagate(rules, n_source)
        return sets

    @property
    def lack_of_sets(self) -> str:
        """Why influence was measured and no sets are predicted, in words; empty else."""
        if self.influence is None or self.predicted:
            return ""
        where = where_lacking(self.capabilities, lack_of_heads)
        return (
            "influence is measured alone, as sets are predicted from heads of every layer, and "
            f"there are none {where}"
        )

    @cached_property
    def agreement(self) -> dict[str, Agreement]:
        """Predicted against measured sets, by rule; empty without predictions."""
        influence, without = self.influence, self.config.without
        if influence is None:
            return {}
        return {r: compare(sets, influence, without=without) for r, sets in self.predicted.items()}

    @cached_property
    def curve(self) -> CoverageCurve | None:
        """Influence inside the sets when heads pass their k largest positions; None without it."""
        chosen = self._find("influence_positions", PositionsResult)
        if self.influence is None or chosen is None:
            return None
        return coverage_curve(chosen.positions, self.influence, without=self.config.without)

    @cached_property
    def explained(self) -> Rows:
        """The share of influence inside the sets, by (states, rule); empty without predictions.

        The last state comes first, then every layer. Tables, page and sentences show these rows.
        """
        rows: dict[tuple[str, str], Explained] = {}
        influence, without = self.influence, self.config.without
        if influence is None:
            return rows
        # the first row comes again where the last state alone was measured
        layers = range(len(influence.layers))
        for layer, last in ((-1, True), *((index, False) for index in layers)):
            for rule, sets in self.predicted.items():
                row = explained(sets, influence, layer, last=last, without=without)
                rows[row.states, rule] = row
        return rows

    @property
    def last(self) -> dict[str, Explained]:
        """The share of influence inside the sets of the last position, last layer, by rule."""
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
        of_parts = [
            sentence
            for name, part in self.parts.items()
            for sentence in part.sentences(self.found[name])
        ]
        return [self.lack_of_sets, *of_parts] if self.lack_of_sets else of_parts
