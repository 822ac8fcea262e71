"""Trying out a probe of one's own on what its protocol must survive."""

import copy
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import temporary_folder
from infoflow_lens.foundation.saving import state_from_bytes, state_to_bytes
from infoflow_lens.foundation.settings import Positive, checked
from infoflow_lens.hooks.model.inputs import Batches, Inputs, read_inputs
from infoflow_lens.hooks.model.points import takes_model
from infoflow_lens.hooks.passes.run import run_shard
from infoflow_lens.hooks.probe import Probe
from infoflow_lens.hooks.result import OF_SEQUENCES, Result

_ROUNDED = 1e-7


@takes_model
@checked
def check_probe(
    probe: Probe[Any], model: nn.Module, inputs: Inputs, *, tolerance: Positive = 1e-4
) -> Result:
    """Refuse a probe that does not measure what it should.

    The same sequences must give the same numbers twice; several in a batch must give what each
    gives alone, first of one length and then of different ones; probes of some texts must merge to
    that of all, in any grouping; a probe that goes on from a stored state must end where one does
    that was not interrupted; another order of the sequences must change nothing, unless the probe
    says ``by_index = True``; a text of one token, which has no earlier key, must spoil no number;
    and the result must be the same once it is saved and loaded.

    Args:
        probe: as it was made; it is copied, and measures nothing itself.
        model: any Transformer.
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
    if rows[0].is_floating_point():  # vectors, all of one length
        trial = _Trial(probe, model, torch.stack(rows), tolerance)
        _check_one_length(trial)
    else:
        shortest = min(map(len, rows))
        trial = _Trial(probe, model, [row[:shortest] for row in rows], tolerance)
        _check_one_length(trial)
        # texts of one length are never padded: shorten every other one, so that padding is tried
        if len({len(row) for row in rows}) == 1:
            rows = [row[: len(row) - index % 2] for index, row in enumerate(rows)]
        trial = trial.try_on(rows)
        trial.compare(
            _merge(trial.alone()),
            trial.whole,
            f"a batch of texts with {', '.join(str(len(row)) for row in rows[:8])} tokens does not "
            "give what each gives alone: padding may enter, as in a mean over all rows of a "
            "pattern; use seen.sum_over_queries, seen.sum_over_positions, or seen.is_real",
        )
    _check_states(trial)
    # a probe may say that the place of a text in the corpus decides something
    if not probe.by_index:
        given = trial.given
        flipped = given.flip(0) if isinstance(given, Tensor) else given[::-1]
        trial.compare(
            trial.try_on(flipped).measure(0, trial.n),
            trial.whole,
            "another order of the texts gives other numbers: expected none, or by_index = True "
            "in the class, where the place of a text decides something",
            flipped=True,
        )
    if not isinstance(trial.given, Tensor):
        _check_one_token(trial)
    _check_files(trial)
    return trial.whole


def _check_one_length(trial: "_Trial") -> None:
    """Refuse a probe that is random, or that counts passes and not sequences."""
    trial.compare(
        trial.measure(0, trial.n),
        trial.whole,
        "the same texts give other numbers a second time: it is random; draw from a generator with "
        "a seed that is a setting, made anew in each update",
    )
    # a result that is asked for twice must be the same twice
    asked = trial.measure(0, trial.n)
    trial.compare(
        asked,
        asked.result(),
        "its result is another when it is asked for again: compute() changes what is kept; let it "
        "make new tensors",
    )
    trial.compare(
        _merge(trial.alone()),
        trial.whole,
        "a batch of texts of one length does not give what each gives alone: it may count passes, "
        "keep the last one, or take a mean over a batch; return sums over the sequences of a pass, "
        "and divide in compute()",
    )


def _check_states(trial: "_Trial") -> None:
    """Refuse a probe whose states do not merge, or do not hold all that it knows."""
    half = trial.n // 2
    alone = trial.alone()
    first, second = trial.measure(0, half), trial.measure(half, trial.n)
    # merging must leave the probe alone from which it takes
    before = state_to_bytes(second.state_dict())
    whole = trial.whole
    trial.compare(_merge([first, second]), whole, "two halves do not merge to the whole")
    trial.compare(
        _merge([alone[0], _merge(alone[1:])]), whole, "merging depends on what is merged first"
    )
    if state_to_bytes(second.state_dict()) != before:
        raise InfoFlowError(f"{trial.name}: merging changes the probe that is merged into another")
    # as after an interruption: through bytes, into a new probe
    again = copy.deepcopy(trial.probe)
    again.load_state_dict(state_from_bytes(state_to_bytes(first.state_dict())))
    trial.compare(
        trial.measure(half, trial.n, again),
        whole,
        "a probe that goes on from a stored state ends elsewhere: what update() keeps in "
        "attributes of its own is lost; return it as a state",
    )


def _check_one_token(trial: "_Trial") -> None:
    """Refuse a probe of which a text of one token, without a second query, spoils the numbers."""
    more = trial.try_on([*trial.given, trial.given[0][:1]])
    found = _attempt(trial.name, "a text of one token among others", lambda: more.whole)
    # arrays of sequences have a row more now, and cannot be compared place by place
    for name, array in trial.whole.arrays.items():
        if name not in found.arrays or set(array.dims) & set(OF_SEQUENCES):
            continue
        pairs = zip(_parts(array.values), _parts(found.arrays[name].values), strict=False)
        for before, after in pairs:
            if before.shape != after.shape or not (before.isfinite() & ~after.isfinite()).any():
                continue
            raise InfoFlowError(
                f"{trial.name}: a text of one token among others turns {name} into NaN or "
                "infinity: a mean over no query is NaN, and so is a sum with it; sum over "
                "queries, count them (seen.count_queries), and divide in compute()"
            )
    _attempt(trial.name, "a text of one token alone", lambda: more.measure(trial.n, trial.n + 1))


def _check_files(trial: "_Trial") -> None:
    """Refuse a result that its files do not hold."""
    with temporary_folder() as folder:
        path = folder / "result"

        def store() -> Result:
            trial.whole.save(path)
            return Result.load(path)

        found = _attempt(trial.name, "saving the result, and loading it", store)
    for name, array in trial.whole.arrays.items():
        pairs = zip(_parts(array.values), _parts(found.arrays[name].values), strict=True)
        if not all(torch.allclose(a, b, 0, 0, equal_nan=True) for a, b in pairs):
            raise InfoFlowError(
                f"{trial.name}: {name} has other values after the result was saved and loaded: "
                "expected the same; look at what compute() returns for it"
            )


def _attempt(name: str, what: str, call: Callable[[], Any]) -> Any:
    """Call a function of a probe, and say in its error what the probe was tried on."""
    try:
        return call()
    except InfoFlowError as error:
        raise InfoFlowError(f"{name}: {what} is refused ({error})") from error
    except Exception as error:  # of code that somebody else has written
        raise InfoFlowError(
            f"{name}: {what} ends in {type(error).__name__} ({error}): expected a result, NaN "
            "where nothing can be measured, or an InfoFlowError that says why not"
        ) from error


class _Trial:
    """Runs of a probe on some sequences.

    Attributes:
        probe: as it was made.
        given: the sequences.
        n: how many.
    """

    def __init__(self, probe: Probe[Any], model: nn.Module, given: Any, tolerance: float) -> None:
        self.name, self.probe, self.given, self.n = type(probe).__name__, probe, given, len(given)
        self._model, self._tolerance = model, tolerance
        self._batches: Batches = read_inputs(model, given)

    def try_on(self, given: Any) -> "_Trial":
        """Try the same probe on other sequences."""
        return _Trial(self.probe, self._model, given, self._tolerance)

    @cached_property
    def whole(self) -> Result:
        """The result of all sequences in one batch."""
        return self.measure(0, self.n).result()

    def alone(self) -> list[Probe[Any]]:
        """Return a probe of each sequence."""
        return [self.measure(index, index + 1) for index in range(self.n)]

    def measure(self, start: int, end: int, probe: Probe[Any] | None = None) -> Probe[Any]:
        """Return a probe that has seen these sequences in one batch, too."""
        probe = copy.deepcopy(self.probe) if probe is None else probe
        extent = self._batches.extent
        assert extent is not None
        run_shard(
            self._model,
            self._batches.part(start, end),
            [probe],
            extent=extent,
            first_index=start - probe.n_sequences,
            batch_size=self.n,
        )
        return probe

    def compare(
        self, probe: Probe[Any], expected: Result, problem: str, *, flipped: bool = False
    ) -> None:
        """Refuse other numbers than expected ones.

        Args:
            probe: which has measured.
            expected: what it should give.
            problem: what it means if it does not.
            flipped: whether it has seen the sequences in the opposite order.

        Raises:
            InfoFlowError: with the first that differs.
        """
        found = probe.result()
        if more := found.arrays.keys() ^ expected.arrays.keys():
            raise InfoFlowError(
                f"{self.name}: {problem} (only one of the two results has the array {min(more)})"
            )
        for name, array in expected.arrays.items():
            other = found.arrays.get(name)
            pairs = zip(_parts(array.values), _parts(other.values if other else ()), strict=False)
            dims = array.dims[isinstance(array.values, tuple) :]
            for wanted, given in pairs:
                if wanted.shape != given.shape:
                    raise InfoFlowError(
                        f"{self.name}: {problem} ({name} has shape {list(given.shape)}, expected "
                        f"{list(wanted.shape)})"
                    )
                if flipped:
                    given = given.flip([i for i, dim in enumerate(dims) if dim in OF_SEQUENCES])
                one, two = wanted.double(), given.double()
                # small numbers count by the size of those beside them, down to what float32 rounds
                finite = one[one.isfinite()].abs()
                largest = min(1.0, float(finite.max())) if len(finite) else 1.0
                least = max(self._tolerance * largest, _ROUNDED)
                near = one.isclose(two, rtol=self._tolerance, atol=least, equal_nan=True)
                if not near.all():
                    place = (~near).flatten().nonzero()[0]
                    raise InfoFlowError(
                        f"{self.name}: {problem} ({name} is {float(two.flatten()[place]):.4g}, "
                        f"expected {float(one.flatten()[place]):.4g})"
                    )


def _parts(values: Any) -> Sequence[Tensor]:
    return (values,) if isinstance(values, torch.Tensor) else tuple(values)


def _merge(probes: Sequence[Probe[Any]]) -> Probe[Any]:
    """Return a probe that has seen what these have, which stay as they are."""
    whole = copy.deepcopy(probes[0])
    for probe in probes[1:]:
        whole.merge(probe)
    return whole
