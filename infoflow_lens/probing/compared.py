"""Predicted against measured, of a run's own sequences."""

from collections.abc import Mapping, Sequence
from typing import Any

from infoflow_lens.agreement import Agreement, CoverageCurve, compare, coverage_curve
from infoflow_lens.hooks import AttendedResult, InfluenceResult, MechanismsResult, PositionsResult
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
    n_source = influence.influence.shape[-1]
    predicted = {"max_position": propagate(chosen.argmax, n_source)}
    if "mechanisms" in found:
        predicted["mechanisms"] = by_mechanisms(found["mechanisms"], attended, chosen, n_source)
    agreement = {name: compare(sets, influence) for name, sets in predicted.items()}
    return agreement, predicted, coverage_curve(chosen.positions, influence)


def by_mechanisms(
    mechanisms: MechanismsResult,
    attended: AttendedResult,
    chosen: PositionsResult,
    n_source: int,
) -> InformationSets:
    """The sets if each head passes what its mechanism does."""
    return propagate(mechanisms.rules(attended.positions, chosen.argmax), n_source)


def by_largest(
    chosen: PositionsResult, n_source: int, most: Sequence[int] = (1, 2, 4)
) -> dict[str, InformationSets]:
    """The sets if each head passes its k largest keys, for each k that was ranked: "k=1", ..."""
    ranked = [k for k in most if k <= len(chosen.ranks)]
    return {
        f"k={k}": propagate([layer[..., :k] for layer in chosen.positions], n_source)
        for k in ranked
    }
