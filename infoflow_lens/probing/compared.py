"""Predicted sets compared with measured influence, on the sequences of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from infoflow_lens.agreement import Agreement, CoverageCurve, compare, coverage_curve
from infoflow_lens.hooks import AttendedResult, HeadLabels, InfluenceResult, PositionsResult
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
