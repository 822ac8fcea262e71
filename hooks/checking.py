"""Trying out a probe of one's own: is it right on texts of different length, and when merged?"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import Positive, checked
from infoflow_lens.foundation.state import state_from_bytes, state_to_bytes
from infoflow_lens.hooks.model.inputs import Batches, Inputs, read_inputs
from infoflow_lens.hooks.model.points import takes_model
from infoflow_lens.hooks.passes.run import run_shard
from infoflow_lens.hooks.probe import Probe
from infoflow_lens.hooks.result import Result


@takes_model
@checked
def check_probe(
    probe: Probe[Any], model: nn.Module, inputs: Inputs, *, tolerance: Positive = 1e-4
) -> Result:
    """Refuse a probe that does not measure what it should.

    A batch of texts of different length must give what each gives alone; probes of some texts must
    merge to that of all, in any grouping; and a probe that goes on from a stored state must end
    where one does that was not interrupted.

    Args:
        probe: as it was made; it is copied, and measures nothing itself.
        model: a TransformerLens model.
        inputs: at least two texts or sequences, as for `run_probes`. Sequences of ids of one length
            are cut, so that there are two lengths; vectors cannot be padded.
        tolerance: how far numbers may differ, relative and absolute.

    Returns:
        The result of all inputs.

    Raises:
        InfoFlowError: saying what differs, by how much, and what the reason may be.
    """
    rows = list(read_inputs(model, inputs).sequences())
    if len(rows) < 2:
        raise InfoFlowError(f"there is {len(rows)} sequence: expected at least two to compare")
    given: Inputs = torch.stack(rows) if rows[0].is_floating_point() else rows
    if len({len(row) for row in rows}) == 1 and given is rows:
        given = rows = [row[: len(row) - index % 2] for index, row in enumerate(rows)]
    trial = _Trial(probe, model, read_inputs(model, given), len(rows), tolerance)
    together = trial.measured(0, len(rows))
    whole = together.result()
    alone = [trial.measured(index, index + 1) for index in range(len(rows))]
    trial.compare(
        _merged(alone),
        whole,
        f"a batch of texts with {', '.join(str(len(row)) for row in rows[:8])} tokens does not "
        "give what each gives alone: padding may enter, as in a mean over all rows of a pattern; "
        "use seen.mean_over_queries, seen.mean_over_positions, or seen.is_real",
    )
    half = len(rows) // 2
    first, second = trial.measured(0, half), trial.measured(half, len(rows))
    before = state_to_bytes(second.state_dict())
    trial.compare(_merged([first, second]), whole, "two halves do not merge to the whole")
    trial.compare(
        _merged([alone[0], _merged(alone[1:])]), whole, "merging depends on what is merged first"
    )
    if state_to_bytes(second.state_dict()) != before:
        raise InfoFlowError(f"{trial.name}: merging changes the probe that is merged into another")
    again = copy.deepcopy(probe)
    again.load_state_dict(state_from_bytes(state_to_bytes(first.state_dict())))
    trial.compare(
        trial.measured(half, len(rows), again),
        whole,
        "a probe that goes on from a stored state ends elsewhere: what update() keeps in "
        "attributes of its own is lost; return it as a state",
    )
    return whole


class _Trial:
    def __init__(
        self, probe: Probe[Any], model: nn.Module, batches: Batches, n: int, tolerance: float
    ) -> None:
        self.name = type(probe).__name__
        self._probe, self._model, self._batches, self._n = probe, model, batches, n
        self._tolerance = tolerance

    def measured(self, start: int, end: int, probe: Probe[Any] | None = None) -> Probe[Any]:
        """A probe that has seen these sequences in one batch, too."""
        probe = copy.deepcopy(self._probe) if probe is None else probe
        extent = self._batches.extent
        assert extent is not None
        run_shard(
            self._model,
            self._batches.part(start, end),
            [probe],
            extent=extent,
            first_index=start - probe.n_sequences,
            batch_size=self._n,
        )
        return probe

    def compare(self, probe: Probe[Any], expected: Result, problem: str) -> None:
        """Refuse other numbers than expected ones.

        Raises:
            InfoFlowError: with the first that differs.
        """
        found = probe.result()
        for name, array in expected.arrays.items():
            other = found.arrays.get(name)
            pairs = zip(_parts(array.values), _parts(other.values if other else ()), strict=False)
            for wanted, given in pairs:
                if wanted.shape != given.shape:
                    raise InfoFlowError(
                        f"{self.name}: {problem} ({name} has shape {list(given.shape)} there, "
                        f"{list(wanted.shape)} here)"
                    )
                one, two = wanted.double(), given.double()
                near = one.isclose(two, rtol=self._tolerance, atol=self._tolerance, equal_nan=True)
                if not near.all():
                    place = (~near).flatten().nonzero()[0]
                    raise InfoFlowError(
                        f"{self.name}: {problem} ({name} is {float(one.flatten()[place]):.4g} "
                        f"together, and {float(two.flatten()[place]):.4g} so)"
                    )


def _parts(values: Any) -> Sequence[Tensor]:
    return (values,) if isinstance(values, torch.Tensor) else tuple(values)


def _merged(probes: Sequence[Probe[Any]]) -> Probe[Any]:
    """A probe that has seen what these have, which stay as they are."""
    whole = copy.deepcopy(probes[0])
    for probe in probes[1:]:
        whole.merge(probe)
    return whole
