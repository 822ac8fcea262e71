"""Many heads replaced by their mechanisms at once."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import MinLen
from torch import Tensor, nn

from infoflow_lens.foundation.display import Displayed
from infoflow_lens.foundation.saving import Savable
from infoflow_lens.foundation.settings import Count, Distinct, NonNegative, checked
from infoflow_lens.hooks.mechanisms.damage import Read, metric_of
from infoflow_lens.hooks.mechanisms.driver import Reading
from infoflow_lens.hooks.mechanisms.ideals import IDEALS, Ideal, substituted
from infoflow_lens.hooks.mechanisms.result import MechanismsResult
from infoflow_lens.hooks.model.call import output_of
from infoflow_lens.hooks.model.inputs import Inputs
from infoflow_lens.hooks.model.points import takes_model

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
    batch_size: Count = 64,
    progress: bool = True,
) -> JointReplacement:
    """As many heads as can be replaced at once within a budget, greedily.

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
    reading = Reading(attention_mask, column, max_length, batch_size, progress)
    batches = reading.batches(model, inputs)
    candidates = []
    for layer, names in enumerate(mechanisms.mechanisms()):
        for head, name in enumerate(names):
            tried = ideals or tuple(ideal for ideal in IDEALS if ideal == name)
            damage = mechanisms.damage[layer][head]
            if tried:
                least = min(float(damage[IDEALS.index(ideal)]) for ideal in tried)
                candidates.append((least, layer, head, tried))
    taken: dict[tuple[int, int], Ideal] = {}
    reached = 0.0
    with reading.measuring(model, batches, "joining", len(candidates)) as step:
        for _, layer, head, tried in sorted(candidates):
            metric = metric_of(model, mechanisms.metric, read, batches.shortest)  # type: ignore[arg-type]
            trials = [{**taken, (layer, head): ideal} for ideal in tried]
            lost = [0.0 for _ in trials]
            for batch in batches.batches(batch_size):
                output = output_of(model, batch)
                metric.see(output, batch)
                before = metric.reference(output, batch)
                for index, trial in enumerate(trials):
                    with substituted(model, trial, mechanisms.mean_patterns, mechanisms.k):
                        after = output_of(model, batch)
                    lost[index] += float(metric.lost(before, after, batch).sum())
            joint = min(lost) / (metric.per_row() * metric.n_rows)
            if joint <= budget:
                taken, reached = trials[lost.index(min(lost))], joint
            step()
    n_heads = sum(len(layer) for layer in mechanisms.damage)
    return JointReplacement(taken, reached, len(taken) / n_heads)
