"""Going on with a measurement that was stopped: what it has reached, by name, and of what run."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from infoflow_lens.foundation.display import brief
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.packages import versions_identity
from infoflow_lens.foundation.record import hash_values, is_same
from infoflow_lens.hooks.interventions.damage import Damage
from infoflow_lens.hooks.interventions.probe import Intervention
from infoflow_lens.hooks.model.inputs import Batches
from infoflow_lens.hooks.model.semantics import HOOKS, model_identity

Reached = Mapping[str, Any]
"""What was measured so far: of what run it is, the state of each round by its name, and a digest of
each."""
_IDENTITY, _DIGESTS = "identity", "digests"


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
            "that a run before gave to after=; leave resume out to measure anew"
        )
    found = resume.get(_IDENTITY)
    before = found if isinstance(found, Mapping) else {}
    differs = [name for name in expected if not is_same(before.get(name), expected[name])]
    if HOOKS in differs and expected[HOOKS]:
        raise InfoFlowError(
            "resume is given, but the model has hooks of your own that it did not have in the run "
            "before: expected the same hooks; take them off, or leave resume out to measure anew"
        )
    if differs:
        name = differs[0]
        raise InfoFlowError(
            f"resume is of another run: {name} = {brief(before.get(name))} there, "
            f"{brief(expected[name])} here; expected the same inputs, settings and model; leave "
            "resume out to measure anew"
        )


def _check_entries(resume: Mapping[str, Any]) -> None:
    """Refuse to go on with other entries than a run kept, by what each was then.

    Raises:
        InfoFlowError: naming the first that is missing, changed or added.
    """
    found = resume.get(_DIGESTS)
    digests = found if isinstance(found, Mapping) else {}
    for name in {**digests, **resume}:
        if name in (_IDENTITY, _DIGESTS):
            continue
        if name not in resume:
            raise InfoFlowError(
                f"resume lacks {name!r}: expected all entries that the run before gave to after=; "
                "leave resume out to measure anew"
            )
        if _digest(resume[name]) != digests.get(name, ""):
            raise InfoFlowError(
                f"resume holds {brief(resume[name])} as {name}: expected the numbers that a run "
                "kept there; leave resume out to measure anew"
            )


def _digest(value: Any) -> str | None:
    """Digest an entry; None for one that no run keeps."""
    with suppress(TypeError, ValueError, RecursionError):
        return hash_values(value)
    return None


class KeptNumbers:
    """Numbers by name, each measured once, also by a run that was stopped and goes on.

    Args:
        identity: what the numbers depend on (:func:`identify`).
        resume: those of the run before.
        after: called after each that is measured, with all so far.

    Raises:
        InfoFlowError: if those of the run before depend on something else, or are not as it left
            them.
    """

    def __init__(
        self,
        identity: Mapping[str, Any],
        resume: Mapping[str, Any] | None,
        after: Callable[[Mapping[str, Any]], None] | None,
    ) -> None:
        check_resume(resume, identity)
        before = resume or {}
        _check_entries(before)
        self._found = {**before, _IDENTITY: dict(identity)}
        self._found[_DIGESTS] = dict(before.get(_DIGESTS, {}))
        self._after = after

    def measure_once(self, name: str, measured: Callable[[], Tensor]) -> Tensor:
        """Return the numbers of that name, measured unless they are there."""
        if name not in self._found:
            self.keep(**{name: measured()})
        found: Tensor = self._found[name]
        return found

    def take_up_estimates(self, fresh: Tensor, damage: Damage) -> tuple[Tensor, int]:
        """Let a metric go on from what it had seen.

        Args:
            fresh: estimates of a run that begins.
            damage: the metric.

        Returns:
            The estimates where the run before left them, and of how many sequences they are.
        """
        damage.load_state(self._found.get("seen", {}))
        return self._found.get("estimates", fresh), self._found.get("n_estimated", 0)

    def take_up(self, name: str, probe: Intervention) -> None:
        """Let a probe go on from the state of that name, if there is one."""
        if name in self._found:
            probe.load_state_dict(self._found[name])

    def keep(self, **values: Any) -> None:
        """Keep values by name, and give `after` all so far: the run's own tensors, no copies."""
        self._found |= values
        if self._after is not None:  # else nobody goes on from them
            digests = {name: _digest(value) for name, value in values.items()}
            self._found[_DIGESTS] = {**self._found[_DIGESTS], **digests}
            self._after(dict(self._found))
