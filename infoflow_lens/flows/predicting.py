"""What a rule predicts from measured keys, and how that agrees with measured influence."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from infoflow_lens.agreement import compare
from infoflow_lens.flows.settings import RuleName
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.hooks import (
    AttendedResult,
    HeadLabels,
    InfluenceResult,
    JacobianInfluence,
    PositionsResult,
    PowerRollout,
    PowerRolloutResult,
    run_probes,
)
from infoflow_lens.hooks.influence.base import StateInfluence
from infoflow_lens.hooks.model.inputs import Batches
from infoflow_lens.hooks.routes.powers import Question
from infoflow_lens.hooks.scores import Asked
from infoflow_lens.theory.information_sets import propagate
from infoflow_lens.theory.rules import Rule


def measure_contributions(
    model: nn.Module, inputs: Batches, measure: StateInfluence | None, positions: Asked | None
) -> PowerRolloutResult | None:
    """Contributions to a power, set for the kind of influence that is measured.

    None for models whose states cannot be decomposed, or not while hooks of the user's edit them.
    """
    is_small = isinstance(measure, JacobianInfluence)
    question: Question = "small changes" if is_small else "replacing a token"
    probe = PowerRollout(question, positions=positions)
    try:
        (found,) = run_probes(model, inputs, [probe], batch_size=1, progress=False)
    except InfoFlowError:
        return None
    return found


def predict(
    rule: RuleName,
    k: int,
    positions: PositionsResult,
    attended: AttendedResult | None,
    mechanisms: HeadLabels | None,
    longest: int,
    influence: InfluenceResult | None,
    threshold: float,
    without: Sequence[int],
) -> dict[str, Any]:
    """Return the sets of a flow, the rules by mechanisms, and the agreement with influence.

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
        rules = mechanisms.rules(attended, positions)
    by_rank = [layer[..., :k] for layer in positions.positions]
    sets = propagate(by_rank if rules is None else rules, longest)
    agreement = None
    if influence is not None:
        agreement = compare(sets, influence, threshold=threshold, without=tuple(without))
    return {"sets": sets, "rules": rules, "agreement": agreement}
