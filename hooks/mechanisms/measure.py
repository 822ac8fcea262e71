"""Which mechanism does a head need? Its pattern replaced by an idealised one, and what that costs.

If the model's output stays as it is when a head's pattern is replaced by an ideal one, that
mechanism is all that the head needs on these inputs. What describes a head, and costs less to
find out, is a label (:func:`~infoflow_lens.hooks.label_heads`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import MinLen
from jaxtyping import Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.display import Displayed
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.foundation.progress import progress_bar
from infoflow_lens.foundation.record import RunRecord, model_fingerprint
from infoflow_lens.foundation.saving import Savable
from infoflow_lens.foundation.settings import Count, Distinct, NonNegative, check, checked
from infoflow_lens.hooks.interventions.damage import Metric, Read, metric_of
from infoflow_lens.hooks.interventions.ideals import AllHeads, Head
from infoflow_lens.hooks.interventions.kept import KeptNumbers, Reached, identify
from infoflow_lens.hooks.interventions.patterns import (
    IDEALS,
    Ideal,
    MeanPatterns,
    MeanPatternsProbe,
    name_ideal,
)
from infoflow_lens.hooks.interventions.probe import Intervention, InterventionResult
from infoflow_lens.hooks.mechanisms.result import MechanismsResult
from infoflow_lens.hooks.model.inputs import Batches, Inputs, read_inputs
from infoflow_lens.hooks.model.points import layer_count, takes_model
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


@takes_model
@checked
def measure_mechanisms(
    model: nn.Module,
    inputs: Inputs,
    *,
    calibration: Inputs | None = None,
    held_out: bool = True,
    metric: Metric | None = None,
    read: Read | None = None,
    threshold: NonNegative = 0.05,
    k: Count = 4,
    attention_mask: torch.Tensor | None = None,
    column: str | None = None,
    max_length: Count | None = None,
    batch_size: Count = 16,
    resume: Reached | None = None,
    after: Callable[[Reached], None] | None = None,
    progress: bool = True,
) -> MechanismsResult:
    """Measure the mechanism that each head needs: its pattern replaced by an ideal one.

    An intervention (:class:`~infoflow_lens.hooks.AllHeads`) with an edit for each head and ideal,
    on all sequences: five times as many edits as heads, of which several run in one pass, from the
    edited layer on where a pass can start there. The model is left as it was found.

    No sequence is judged by a mean pattern that it is in: damage measured so favours "specific
    position", the more the fewer sequences there are.

    Args:
        model: any Transformer in which an edited pattern reaches the output.
        inputs: sequences that are judged, in any of the forms that `run_probes` reads.
        calibration: other sequences, over which the mean patterns are, none shorter than the
            longest of `inputs`; default, `inputs` themselves, of which each is then judged by the
            mean pattern of all others.
        held_out: without a calibration: leave the sequence out. False gives the numbers of
            versions before 0.3.
        metric: "nmse", "kl" or "loss"; default "kl" for logits of one distribution, else "nmse".
        read: the positions of the logits that count, such as (-1,), the last of each sequence; None
            for all. Vector models have one output.
        threshold: the damage up to which an ideal is enough.
        k: for "top_k".
        attention_mask, column, max_length: as for `run_probes`.
        batch_size: sequences in a pass; several replacements of some of them may run together.
        resume: what `after` was last given.
        after: called after each batch with all that is measured so far.
        progress: show a bar.

    Raises:
        InfoFlowError: for bad inputs or settings, a calibration that is shorter than the inputs, a
            model whose patterns cannot be replaced, or progress of other settings or another model.
    """
    batches, others = read_again(model, inputs, attention_mask, column, max_length), None
    if calibration is not None:
        others = read_calibration(model, calibration, batches, column, max_length)
    damage = metric_of(model, metric, read, batches.shortest)
    settings: dict[str, Any] = {
        "metric": damage.name,
        "read": damage.read,
        "k": k,
        "n_sequences": batches.n_sequences,
        "held_out": held_out or others is not None,
        "n_calibration": None if others is None else others.n_sequences,
    }
    fingerprint = model_fingerprint(model)
    kept = KeptNumbers(identify(model, settings, inputs=batches, calibration=others), resume, after)
    rounds = Rounds(model, batches, others, kept, batch_size, progress)
    with eval_mode(model):
        means = rounds.find_means("patterns")
        counts = [len(mean) for mean in means.patterns]
        replacements = {
            f"{layer}.{head} {ideal}": {(layer, head): name_ideal(ideal, k)}
            for layer, n_heads in enumerate(counts)
            for head in range(n_heads)
            for ideal in IDEALS
        }
        probe = AllHeads(
            means, replacements, leaves_out=held_out and others is None, metric=damage.name,
            read=read, through_hooks=True,
        )  # fmt: skip
        found = rounds.measure("ideals", probe)
    return MechanismsResult(
        ideals=IDEALS,
        metric=damage.name,
        threshold=threshold,
        k=k,
        n_sequences=int(batches.n_sequences or 0),
        # edits stand by layer, head and ideal, as they were named
        damage=found.damage().float().view(-1, len(IDEALS)).split(counts),
        error=found.errors().float().view(-1, len(IDEALS)).split(counts),
        mean_patterns=tuple(mean.float().cpu() for mean in means.patterns),
        record=RunRecord.from_model(
            model, {"probe": "mechanisms", "threshold": threshold, **settings},
            fingerprint_of_model=fingerprint,
        ),
    )  # fmt: skip


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
