"""Many heads replaced by their mechanisms at once."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import MinLen
from torch import Tensor, nn

from infoflow_lens.foundation.display import Displayed
from infoflow_lens.foundation.progress import progress_bar
from infoflow_lens.foundation.saving import Savable
from infoflow_lens.foundation.settings import Count, Distinct, NonNegative, check, checked
from infoflow_lens.hooks.interventions.damage import Metric, Read
from infoflow_lens.hooks.interventions.ideals import AllHeads, Head
from infoflow_lens.hooks.interventions.patterns import IDEALS, Ideal, name_ideal
from infoflow_lens.hooks.interventions.probe import InterventionResult
from infoflow_lens.hooks.mechanisms.driver import read_again
from infoflow_lens.hooks.mechanisms.result import MechanismsResult
from infoflow_lens.hooks.model.inputs import Inputs
from infoflow_lens.hooks.model.points import takes_model
from infoflow_lens.hooks.passes.run import run_probes

Ideals = Annotated[tuple[Ideal, ...], MinLen(1), Distinct()]


@dataclass(frozen=True)
class JointReplacement(Displayed, Savable):
    """Heads that are replaced at once.

    Attributes:
        heads: (layer, head) and its ideal, in the order in which they were taken.
        damage: what the output loses with all of them replaced.
        share: their share of all heads.
    """

    heads: dict[tuple[int, int], Ideal]
    damage: float
    share: float


@takes_model
@checked
def replace_greedily(
    model: nn.Module,
    inputs: Inputs,
    mechanisms: MechanismsResult,
    *,
    budget: NonNegative,
    ideals: Ideals | None = None,
    read: Read | None = None,
    attention_mask: Tensor | None = None,
    column: str | None = None,
    max_length: Count | None = None,
    batch_size: Count = 16,
    progress: bool = True,
) -> JointReplacement:
    """Replace as many heads at once as a budget allows, greedily.

    Heads come in the order of their own damage; each is taken if all taken ones together stay
    within the budget. As everywhere, what the output gains at one position does not make up for
    what it loses at another. What is chosen here on some sequences is to be judged on others
    (:func:`~infoflow_lens.hooks.measure_sufficiency`).

    Args:
        model: the model that was measured.
        inputs: sequences other than those of the mean patterns.
        mechanisms: of these heads.
        budget: the largest joint damage, in the units of ``mechanisms.metric``.
        ideals: those that are tried at every head, of which it gets the one with which the output
            loses least beside the heads that are taken; default, its own mechanism alone, and heads
            without one stay as they are.
        read, attention_mask, column, max_length: as for :func:`measure_mechanisms`.
        batch_size: sequences in a pass.
        progress: show a bar.

    Raises:
        InfoFlowError: for a negative budget or bad inputs.
    """
    batches = read_again(model, inputs, attention_mask, column, max_length)
    candidates = []
    for layer, names in enumerate(mechanisms.mechanisms()):
        for head, name in enumerate(names):
            tried = ideals or tuple(ideal for ideal in IDEALS if ideal == name)
            damage = mechanisms.damage[layer][head]
            if tried:
                least = min(float(damage[IDEALS.index(ideal)]) for ideal in tried)
                candidates.append((least, layer, head, tried))
    taken: dict[Head, Ideal] = {}
    reached = 0.0
    means, metric = mechanisms.means(), check(mechanisms.metric, Metric, "metric")
    with progress_bar("joining", len(candidates), progress) as step:
        for _, layer, head, tried in sorted(candidates):
            trials = {ideal: {**taken, (layer, head): ideal} for ideal in tried}
            named: dict[str, dict[Head, str]] = {
                ideal: {at: name_ideal(i, mechanisms.k) for at, i in trial.items()}
                for ideal, trial in trials.items()
            }
            probe = AllHeads(means, named, metric=metric, read=read, through_hooks=True)
            result: InterventionResult
            (result,) = run_probes(model, batches, [probe], batch_size=batch_size, progress=False)
            lost = dict(zip(result.edits, result.damage().tolist(), strict=True))
            best = min(tried, key=lambda ideal: lost[ideal])
            # a head that does not fit is left out for good, and the next one is tried
            if lost[best] <= budget:
                taken, reached = trials[best], lost[best]
            step(1)
    n_heads = sum(len(layer) for layer in mechanisms.damage)
    return JointReplacement(taken, reached, len(taken) / n_heads)
