"""What all measurements of edited models share: inputs read again, and rounds over them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.hooks.interventions.kept import KeptNumbers, Reached
from infoflow_lens.hooks.interventions.probe import Intervention, InterventionResult
from infoflow_lens.hooks.model.inputs import Batches, Inputs, read_inputs
from infoflow_lens.hooks.model.points import layer_count
from infoflow_lens.hooks.passes.run import run_probes


@dataclass(frozen=True)
class Reading:
    """The options that every measurement has, as for `run_probes`."""

    attention_mask: Tensor | None
    column: str | None
    max_length: int | None
    batch_size: int
    progress: bool

    def batches(self, model: nn.Module, inputs: Inputs) -> Batches:
        """The inputs, which several passes go over.

        Raises:
            InfoFlowError: for inputs that can be read once only, or no TransformerLens model.
        """
        layer_count(model)
        batches = read_inputs(
            model,
            inputs,
            attention_mask=self.attention_mask,
            column=self.column,
            max_length=self.max_length,
        )
        if batches.longest is None:
            raise InfoFlowError(
                f"inputs is {type(inputs).__name__}, which may be read once only: several passes "
                "go over the inputs; give a tensor, a list or a datasets.Dataset"
            )
        return batches

    def calibration(self, model: nn.Module, given: Inputs, inputs: Batches) -> Batches:
        """Read the sequences over which mean patterns are taken.

        Raises:
            InfoFlowError: as for :meth:`batches`, and for shorter ones than the inputs.
        """
        others = replace(self, attention_mask=None).batches(model, given)
        if (others.longest or 0) < (inputs.longest or 0):
            raise InfoFlowError(
                f"calibration has sequences of at most {others.longest} positions, the inputs "
                f"have {inputs.longest}: expected mean patterns as long; give longer ones, or cut "
                f"the inputs with max_length={others.longest}"
            )
        return others


class Rounds(KeptNumbers):
    """Interventions over the same sequences, one after the other; what is measured is kept.

    Args:
        model: the model.
        batches: the sequences.
        reading: how they are read.
        identity: what the numbers depend on (:func:`identify`).
        resume: what `after` was last given.
        after: called after each batch of a round with all that is measured so far.

    Raises:
        InfoFlowError: if `resume` is of something else.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        reading: Reading,
        identity: Mapping[str, Any],
        resume: Reached | None = None,
        after: Callable[[Reached], None] | None = None,
    ) -> None:
        super().__init__(identity, resume, after)
        self.model, self.batches, self.reading = model, batches, reading

    def run(self, name: str, probe: Intervention) -> InterventionResult:
        """Measure what is not measured yet of a round.

        Args:
            name: of the round.
            probe: its edits.

        Raises:
            InfoFlowError: if what is there is no state of this round, and as the probe says.
        """
        self.take_up(name, probe)
        result: InterventionResult
        (result,) = run_probes(
            self.model,
            self.batches,
            [probe],
            batch_size=self.reading.batch_size,
            skip=probe.n_sequences,
            after_batch=lambda n: self.keep(**{name: probe.state_dict()}),
            progress=self.reading.progress,
        )
        return result
