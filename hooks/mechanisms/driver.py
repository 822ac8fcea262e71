"""What all measurements of edited models share: inputs read again, and going on with a run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from infoflow_lens.foundation.display import brief
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.record import is_same
from infoflow_lens.foundation.versions import versions_identity
from infoflow_lens.hooks.interventions.probe import Intervention, InterventionResult
from infoflow_lens.hooks.model.identity import HOOKS, model_identity
from infoflow_lens.hooks.model.inputs import Batches, Inputs, read_inputs
from infoflow_lens.hooks.model.points import layer_count
from infoflow_lens.hooks.passes.run import run_probes

Reached = Mapping[str, Any]
"""What was measured so far: of what run it is, and the state of each round by its name."""
_IDENTITY = "identity"


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


def identify(
    model: nn.Module, settings: Mapping[str, Any], inputs: Batches, **more: Batches | None
) -> dict[str, Any]:
    """Return what the numbers of a measurement depend on, as JSON-compatible values.

    Args:
        model: the model.
        settings: of the measurement.
        inputs: the sequences.
        more: other sequences by what errors call them; None where there are none.
    """
    given = {"inputs": inputs, **more}
    digests = {name: None if of is None else of.fingerprint() for name, of in given.items()}
    return {**settings, **digests, **versions_identity(), **model_identity(model, inputs)}


def check_resume(resume: object, expected: Mapping[str, Any]) -> None:
    """Refuse to go on with what another run has measured, or with what no run gives.

    Args:
        resume: what a run gave that was stopped; None where there was none.
        expected: what :func:`identify` gives of this one.

    Raises:
        InfoFlowError: naming what differs.
    """
    if resume is None:
        return
    if not isinstance(resume, Mapping):
        raise InfoFlowError(
            f"resume is {brief(resume)}, of type {type(resume).__name__}: expected the Mapping "
            "that a run before gave as it went on; leave resume out to measure anew"
        )
    found = resume.get(_IDENTITY)
    before = found if isinstance(found, Mapping) else {}
    differs = [name for name in expected if not is_same(before.get(name), expected[name])]
    if HOOKS in differs and expected[HOOKS]:
        raise InfoFlowError(
            "resume is given, and hooks of your own stand on the model, others than in the run "
            "before: expected the same; take them off, or leave resume out to measure anew"
        )
    if differs:
        name = differs[0]
        raise InfoFlowError(
            f"resume is of another run: {name} = {brief(before.get(name))} there, "
            f"{brief(expected[name])} here; expected the same inputs, settings and model; leave "
            "resume out to measure anew"
        )


def check_kept(value: Any, shape: Sequence[int], dtype: torch.dtype, name: str) -> None:
    """Refuse a tensor to go on with that no run of this kind has kept.

    Raises:
        InfoFlowError: for another shape or type, and for NaN or infinity.
    """
    found = f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        found = f"{value.dtype} {list(value.shape)}"
        if value.dtype == dtype and list(value.shape) == list(shape):
            if value.isfinite().all():
                return
            found += " with NaN or infinity"
    raise InfoFlowError(
        f"resume holds {found} as {name}: expected {dtype} {list(shape)} of numbers, as a run kept "
        "them; leave resume out to measure anew"
    )


class KeptNumbers:
    """Numbers by name, each measured once, also by a run that was stopped and goes on.

    Args:
        identity: what the numbers depend on (:func:`identify`).
        resume: those of the run before.
        after: called after each that is measured, with all so far.

    Raises:
        InfoFlowError: if those of the run before depend on something else.
    """

    def __init__(
        self,
        identity: Mapping[str, Any],
        resume: Mapping[str, Any] | None,
        after: Callable[[Mapping[str, Any]], None] | None,
    ) -> None:
        check_resume(resume, identity)
        self._found = {**(resume or {}), _IDENTITY: dict(identity)}
        self._after = after

    def measure_once(self, name: str, measured: Callable[[], Tensor], *shape: int) -> Tensor:
        """The numbers of that name, float64 of a shape, measured unless they are there.

        Raises:
            InfoFlowError: if what is there are no such numbers.
        """
        if name in self._found:
            check_kept(self._found[name], shape, torch.float64, name)
        else:
            self.keep(**{name: measured()})
        found: Tensor = self._found[name]
        return found

    def begin(self, name: str, fresh: Tensor) -> Tensor:
        """Take up the tensor of that name where the run before left it, or begin with a fresh one.

        Raises:
            InfoFlowError: if what is there is no such tensor.
        """
        found: Tensor = self._found.get(name, fresh)
        check_kept(found, fresh.shape, fresh.dtype, name)
        return found

    def keep(self, **values: Any) -> None:
        """Keep values by name, and tell of all so far."""
        self._found |= values
        if self._after is not None:
            self._after(dict(self._found))


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
        if name in self._found:
            probe.load_state_dict(self._found[name])
            _check_table(probe)
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


def _check_table(probe: Intervention) -> None:
    """Refuse a table to go on with that no run has kept.

    Raises:
        InfoFlowError: naming what is wrong.
    """
    n, table = probe.n_sequences, probe.table
    check_kept(table.sequences, [n], torch.int64, "sequences")
    for name in ("n_rows", "n_tokens"):
        check_kept(getattr(table, name), [n], torch.int64, name)
    check_kept(table.bare, [n], torch.float64, "bare")
    for name in ("lost", "rise"):
        check_kept(getattr(table, name), [n, len(table.edits)], torch.float64, name)
