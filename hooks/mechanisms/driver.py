"""What all measurements of edited models share: inputs read again, and what is kept."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxtyping import Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.hooks.interventions.kept import KeptNumbers
from infoflow_lens.hooks.interventions.patterns import MeanPatterns, MeanPatternsProbe
from infoflow_lens.hooks.interventions.probe import Intervention, InterventionResult
from infoflow_lens.hooks.model.inputs import Batches, Inputs, read_inputs
from infoflow_lens.hooks.model.points import layer_count
from infoflow_lens.hooks.passes.run import run_probes
from infoflow_lens.hooks.result import Result


def read_again(
    model: nn.Module,
    inputs: Inputs,
    attention_mask: Tensor | None,
    column: str | None,
    max_length: int | None,
) -> Batches:
    """Read inputs that several passes go over, as `run_probes` does.

    Raises:
        InfoFlowError: for inputs that can be read once only, or no TransformerLens model.
    """
    layer_count(model)
    batches = read_inputs(
        model, inputs, attention_mask=attention_mask, column=column, max_length=max_length
    )
    if batches.longest is None:
        raise InfoFlowError(
            f"inputs is {type(inputs).__name__}, which may be read once only: several passes "
            "go over the inputs; give a tensor, a list or a datasets.Dataset"
        )
    return batches


def read_calibration(
    model: nn.Module, given: Inputs, inputs: Batches, column: str | None, max_length: int | None
) -> Batches:
    """Read the sequences over which mean patterns are taken.

    Raises:
        InfoFlowError: as for :func:`read_again`, and for shorter ones than the inputs.
    """
    others = read_again(model, given, None, column, max_length)
    if (others.longest or 0) < (inputs.longest or 0):
        raise InfoFlowError(
            f"calibration has sequences of at most {others.longest} positions, the inputs "
            f"have {inputs.longest}: expected mean patterns as long; give longer ones, or cut "
            f"the inputs with max_length={others.longest}"
        )
    return others


@dataclass(frozen=True)
class Rounds:
    """Rounds of interventions on the same sequences, each of them measured once.

    Attributes:
        model: the model.
        batches: the sequences.
        calibration: those of mean patterns; None where they are the same.
        kept: what all rounds have measured so far, also in a run before.
        batch_size: sequences in a pass.
        progress: show a bar.
    """

    model: nn.Module
    batches: Batches
    calibration: Batches | None
    kept: KeptNumbers
    batch_size: int
    progress: bool

    def measure(self, name: str, probe: Intervention) -> InterventionResult:
        """Measure what is not measured yet of an intervention, which is kept by that name.

        Raises:
            InfoFlowError: as the probe says.
        """
        self.kept.take_up(name, probe)
        result: InterventionResult
        (result,) = run_probes(
            self.model, self.batches, [probe], batch_size=self.batch_size,
            skip=probe.n_sequences, progress=self.progress,
            after_batch=lambda n: self.kept.keep(**{name: probe.state_dict()}),
        )  # fmt: skip
        return result

    def find_means(self, what: Literal["patterns", "outputs"]) -> MeanPatterns:
        """Find mean patterns, or outputs, of the calibration."""
        return run_probes(
            self.model, self.calibration or self.batches, [MeanPatternsProbe(what)],
            batch_size=self.batch_size, progress=False,
        )[0]  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class NextTokenResult(Result):
    """The base of results that tell by how much an edited model's loss rises.

    Attributes:
        bare: float [sequence], summed next-token loss of the model as it is, in nats.
        n_tokens: int [sequence], predictions that count.
    """

    makes_small_table: ClassVar[bool] = True

    bare: Float[Tensor, " sequence"]
    n_tokens: Int[Tensor, " sequence"]

    @property
    def loss(self) -> float:
        """Compute the loss of the model as it is, in nats a token."""
        return float(self.bare.sum() / self.n_tokens.sum())
