"""Many heads replaced by their mechanisms at once."""

from dataclasses import dataclass

from torch import Tensor, nn

from infoflow_lens.foundation.display import Displayed
from infoflow_lens.foundation.settings import Count, NonNegative, checked
from infoflow_lens.hooks.mechanisms.damage import Read, metric_of
from infoflow_lens.hooks.mechanisms.driver import Reading
from infoflow_lens.hooks.mechanisms.ideals import IDEALS, Ideal, substituted
from infoflow_lens.hooks.mechanisms.result import MechanismsResult
from infoflow_lens.hooks.model.call import output_of
from infoflow_lens.hooks.model.inputs import Inputs


@dataclass(frozen=True)
class JointReplacement(Displayed):
    """Heads that are replaced at once.

    Attributes:
        heads: (layer, head) and its ideal, in the order in which they were taken.
        damage: what the output loses with all of them replaced.
        share: their share of all heads.
    """

    heads: dict[tuple[int, int], Ideal]
    damage: float
    share: float


@checked
def replace_greedily(
    model: nn.Module,
    inputs: Inputs,
    mechanisms: MechanismsResult,
    *,
    budget: NonNegative,
    read: Read | None = None,
    attention_mask: Tensor | None = None,
    column: str | None = None,
    max_length: Count | None = None,
    batch_size: Count = 64,
    progress: bool = True,
) -> JointReplacement:
    """As many heads as can be replaced at once by their mechanisms within a budget, greedily.

    Heads come in the order of their own damage; each is taken if all taken ones together stay
    within the budget. Heads without a mechanism stay as they are. As everywhere, what the output
    gains at one position does not make up for what it loses at another.

    Args:
        model: the model that was measured.
        inputs: sequences, as for :func:`measure_mechanisms`.
        mechanisms: of these heads.
        budget: the largest joint damage, in the units of ``mechanisms.metric``.
        read, attention_mask, column, max_length: as for :func:`measure_mechanisms`.
        batch_size: sequences in a pass.
        progress: show a bar.

    Raises:
        InfoFlowError: for a negative budget or bad inputs.
    """
    reading = Reading(attention_mask, column, max_length, batch_size, progress)
    batches = reading.batches(model, inputs)
    candidates = sorted(
        (float(mechanisms.damage[layer][head][IDEALS.index(name)]), layer, head, name)
        for layer, names in enumerate(mechanisms.mechanisms())
        for head, name in enumerate(names)
        if name in IDEALS
    )
    taken: dict[tuple[int, int], Ideal] = {}
    reached = 0.0
    with reading.measuring(model, batches, "joining", len(candidates)) as step:
        for _, layer, head, name in candidates:
            trial: dict[tuple[int, int], Ideal] = {**taken, (layer, head): name}
            metric = metric_of(model, mechanisms.metric, read, batches)  # type: ignore[arg-type]
            lost = 0.0
            for batch in batches.batches(batch_size):
                output = output_of(model, batch)
                metric.see(output, batch)
                with substituted(model, trial, mechanisms.mean_patterns, mechanisms.k):
                    before = metric.reference(output, batch)
                    lost += float(metric.lost(before, output_of(model, batch), batch).sum())
            damage = lost / (metric.per_row() * metric.n_rows)
            if damage <= budget:
                taken, reached = trial, damage
            step()
    n_heads = sum(len(layer) for layer in mechanisms.damage)
    return JointReplacement(taken, reached, len(taken) / n_heads)
