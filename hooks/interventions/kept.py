"""Going on with a measurement that was stopped: what it has reached, by name, and of what run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from infoflow_lens.foundation.display import brief
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.record import is_same
from infoflow_lens.foundation.versions import versions_identity
from infoflow_lens.hooks.interventions.damage import Damage
from infoflow_lens.hooks.interventions.probe import Intervention
from infoflow_lens.hooks.model.identity import HOOKS, model_identity
from infoflow_lens.hooks.model.inputs import Batches

Reached = Mapping[str, Any]
"""What was measured so far: of what run it is, and the state of each round by its name."""
_IDENTITY = "identity"


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

    def take_up_estimates(self, damage: Damage, n: int) -> int:
        """Let a metric go on from what it had seen; return on how many sequences estimates are.

        Args:
            damage: the metric, kept as "seen" beside "n_estimated".
            n: the sequences of all.

        Raises:
            InfoFlowError: for what no run of this kind has kept.
        """
        fresh = damage.state()
        count, seen = self._found.get("n_estimated", 0), self._found.get("seen", fresh)
        # not isinstance, as True and False are of type int, too
        if not (type(count) is int and 0 <= count <= n) or not (
            isinstance(seen, dict)
            and seen.keys() == fresh.keys()
            and all(isinstance(value, (int, float, Tensor)) for value in seen.values())
            and all(torch.as_tensor(value).isfinite().all() for value in seen.values())
        ):
            raise InfoFlowError(
                f"resume holds n_estimated {count} of {n} sequences, and as seen "
                f"{seen!r:.100}: expected what after gave; leave resume out to measure anew"
            )
        damage.load_state(seen)
        return count

    def take_up(self, name: str, probe: Intervention) -> None:
        """Let a probe go on from the state of that name, if there is one.

        Raises:
            InfoFlowError: if what is there is no state of this probe.
        """
        if name in self._found:
            probe.load_state_dict(self._found[name])
            _check_table(probe)

    def check_together(self, names: Sequence[str]) -> None:
        """Refuse numbers of which some are there, and not all, though a run keeps them together.

        Raises:
            InfoFlowError: naming the first that is missing.
        """
        missing = [name for name in names if name not in self._found]
        if 0 < len(missing) < len(names):
            raise InfoFlowError(
                f"resume lacks {missing[0]!r}: expected all that after was given; leave resume out "
                "to measure anew"
            )

    def keep(self, **values: Any) -> None:
        """Keep values by name, and give `after` all so far: the run's own tensors, no copies."""
        self._found |= values
        if self._after is not None:
            self._after(dict(self._found))


def _check_table(probe: Intervention) -> None:
    """Refuse a table to go on with that no run has kept.

    Raises:
        InfoFlowError: naming what is wrong.
    """
    n, table = probe.n_sequences, probe.table
    check_kept(table.sequences, [n], torch.int64, "sequences")
    for name in ("n_rows", "n_tokens"):
        check_kept(getattr(table, name), [n], torch.int64, name)
    shape = [n, len(table.edits)]
    for name, expected in (("bare", [n]), ("lost", shape), ("rise", shape)):
        value = getattr(table, name)
        # without next tokens there is neither, as of an output that is a vector
        is_none = name != "lost" and isinstance(value, Tensor) and not table.n_tokens.any()
        value = value.nan_to_num() if is_none and value.isnan().all() else value
        check_kept(value, expected, torch.float64, name)
