"""Predicted against measured, of a run's own sequences."""

from collections.abc import Mapping
from typing import Any

from infoflow_lens.agreement import Agreement, CoverageCurve, compare, coverage_curve
from infoflow_lens.hooks import AttendedResult, InfluenceResult, PositionsResult
from infoflow_lens.theory import InformationSets, propagate


def compared(
    found: Mapping[str, Any],
) -> tuple[dict[str, Agreement], dict[str, InformationSets], CoverageCurve | None]:
    """Agreement and predicted sets by rule, and the coverage curve, of the same sequences."""
    if "influence" not in found:
        return {}, {}, None
    influence: InfluenceResult = found["influence"]
    attended: AttendedResult = found["influence_attended"]
    chosen: PositionsResult = found["influence_positions"]
    rules: dict[str, Any] = {"argmax": chosen.argmax}
    if "mechanisms" in found:
        rules["mechanisms"] = found["mechanisms"].rules(attended.positions, chosen.argmax)
    n_source = influence.influence.shape[-1]
    predicted = {name: propagate(rule, n_source) for name, rule in rules.items()}
    agreement = {name: compare(sets, influence) for name, sets in predicted.items()}
    return agreement, predicted, coverage_curve(chosen.positions, influence)
