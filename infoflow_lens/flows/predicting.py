"""What a rule predicts from measured keys, and how that agrees with measured influence."""

from collections.abc import Sequence
from typing import Any

from infoflow_lens.agreement import compare
from infoflow_lens.flows.settings import RuleName
from infoflow_lens.hooks import (
    AttendedResult,
    InfluenceResult,
    MechanismsResult,
    PositionsResult,
)
from infoflow_lens.theory.information_sets import propagate
from infoflow_lens.theory.rules import Rule


def predict(
    rule: RuleName,
    k: int,
    positions: PositionsResult,
    attended: AttendedResult | None,
    mechanisms: MechanismsResult | None,
    longest: int,
    influence: InfluenceResult | None,
    threshold: float,
    without: Sequence[int],
) -> dict[str, Any]:
    """The sets of a flow, the rules by mechanisms, and the agreement with influence.

    Args:
        rule: what heads pass on.
        k: how many keys of "top_k"; 1 for "max_position".
        positions: the ranked keys.
        attended, mechanisms: for "mechanisms".
        longest: how many tokens the longest input has.
        influence: measured; None for no agreement.
        threshold: see `compare`.
        without: positions that no head passes on, and that are no candidates.
    """
    rules: Sequence[Sequence[Rule]] | None = None
    if rule == "mechanisms" and mechanisms is not None and attended is not None:
        rules = mechanisms.rules(attended.positions, positions.argmax)
    by_rank = [layer[..., :k] for layer in positions.positions]
    sets = propagate(by_rank if rules is None else rules, longest)
    agreement = None
    if influence is not None:
        agreement = compare(sets, influence, threshold=threshold, without=tuple(without))
    return {"sets": sets, "rules": rules, "agreement": agreement}
