"""Probes over many sequences, shard by shard, behind those that a run before has measured.

A shard is some sequences in a row. Each is measured by probes that have seen nothing else. Shards
are added up in their order, in stretches of as many as the length of the data says, and these
stretches in theirs, so that numbers do not depend on who has measured which. A worker adds up a
stretch by itself: of a run with many shards few sums are sent.
"""

import copy
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import name_file_in_errors
from infoflow_lens.foundation.processes import defer_interrupts
from infoflow_lens.foundation.progress import progress_bar
from infoflow_lens.foundation.saving import read_state
from infoflow_lens.hooks import Probe
from infoflow_lens.hooks.model.inputs import Batches
from infoflow_lens.probing.part import RunContext, Say
from infoflow_lens.probing.shard import (
    SUMS,
    MeasuredStretch,
    Probes,
    SpaceCheck,
    StretchTask,
    measure,
    measure_in_worker,
    pack_rows,
    states_of,
    write_growing,
)
from infoflow_lens.runs.checkpoint import Checkpoint
from infoflow_lens.runs.executor import Unit

_SOON = 60.0  # seconds until the message
_LONG = 300.0  # seconds that must be left at that time


@contextmanager
def warn_if_long(say: Say, what: str, n: int, longest: int) -> Iterator[Callable[[int], None]]:
    """Say once, after a minute of the block, how much time is left, if it is over five minutes.

    Args:
        say: called with the line, from another thread.
        what: the name of what is measured.
        n: the number of sequences that are left.
        longest: the tokens of the longest of them.

    Yields:
        A function to call with the number of sequences of each finished batch.
    """
    begun, done = time.monotonic(), 0

    def advance(more: int) -> None:
        nonlocal done
        done += more

    def warn() -> None:
        left = (time.monotonic() - begun) / done * (n - done) if done else None
        if left is None or left > _LONG:
            how = "no batch has ended" if left is None else f"about {_duration(left)} left"
            say(
                f"{what}: {n} sequences of up to {longest} tokens, {how} after "
                f"{_duration(_SOON)}; fewer (n, n_detail) or shorter sequences (max_length) take "
                "less time, a smaller batch_size shows progress more often, and probes= names the "
                "parts to measure"
            )

    timer = threading.Timer(_SOON, warn)
    timer.daemon = True
    # the message is a courtesy: a run goes on without it
    with suppress(RuntimeError):  # no room for a thread, and so no message
        timer.start()
    try:
        yield advance
    finally:
        timer.cancel()


def _duration(seconds: float) -> str:
    for unit, length in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} seconds"


_MOST_STRETCHES = 128


class ShardSums:
    """The sums of all shards that are measured, in memory and on disk.

    The folder holds three kinds of files: the checkpoint, with the sum of the first shards; the
    stretches that workers have measured before their turn, ``<checkpoint>.NNNNNN.safetensors``; and
    for results that grow with the sequences a file for each shard. Files of an earlier start are
    read.

    Args:
        fresh: the probes, which have seen nothing.
        batches: all sequences, also those of an earlier start.
        size: sequences of a shard; the last may have fewer.
        checkpoint: where the sums are kept.
        to_disk: whether results that grow are written shard by shard, not kept in memory.

    Attributes:
        growing: the names of the probes whose results are written shard by shard.
        n_shards: how many shards are in the sums.
        begun: the probes of the next shard, which may have measured a part of it.

    Raises:
        InfoFlowError: if the files are of other probes, or cannot be read.
    """

    def __init__(
        self, fresh: Probes, batches: Batches, size: int, checkpoint: Checkpoint, to_disk: bool
    ) -> None:
        assert batches.extent is not None  # as they are not of a loader
        self.fresh, self.batches, self.size = fresh, batches, size
        self.extent, self.checkpoint = batches.extent, checkpoint
        self.folder = checkpoint.folder
        to_disk = to_disk and self.extent.n_sequences > size
        self.growing = frozenset(n for n, p in fresh.items() if to_disk and p.sharded is not None)
        self._n_in_all = -(-self.extent.n_sequences // size)
        self.stride = 1  # shards of a stretch
        # stretches double, so that their number stays below a bound for any corpus
        while self._n_in_all > self.stride * _MOST_STRETCHES:
            self.stride *= 2
        self.n_shards = 0
        self.begun: Probes = {}
        self._whole, self._stretch = self._new(), self._new()  # sums of stretches; of the last one
        self._manifests: dict[str, list[Any]] = {name: [] for name in self.growing}
        self._is_whole = True  # whether all of it is of the same shards, so that it may be kept
        if self.folder.holds(checkpoint.name):
            self._load_checkpoint()
        self._add_waiting()

    @property
    def n_seen(self) -> int:
        """The number of sequences in the sums."""
        return min(self.n_shards * self.size, self.extent.n_sequences)

    @property
    def n_left(self) -> int:
        """The number of sequences after them."""
        return self.extent.n_sequences - self.n_seen

    def missing_shards(self) -> Iterator[int]:
        """Yield the numbers of the shards that are not measured."""
        for index in range(self._n_in_all):
            if index >= self.n_shards and not self._waits(index // self.stride):
                yield index

    def part(self, shards: range) -> Batches:
        """Return the sequences of shards in a row."""
        stop = min(shards.stop * self.size, self.extent.n_sequences)
        return self.batches.part(shards.start * self.size, stop)

    def begin(self) -> Probes:
        """Return the probes for the next shard: those that have begun it, or new ones."""
        self.begun = self.begun or self._new()
        return self.begun

    def add_shard(self) -> None:
        """Add the next shard, which its probes have measured to the end."""
        manifests = write_growing(self.begun, self.growing, self.n_shards, self.folder.path)
        with self._change():
            for name, probe in self.begun.items():
                if name in manifests:
                    self._manifests[name].append(manifests[name])
                else:
                    self._stretch[name].merge(probe)
            self.n_shards, self.begun = self.n_shards + 1, {}
            if not self.n_shards % self.stride or self.n_shards == self._n_in_all:
                self._close_stretch()
        self._add_waiting()

    def missing_stretches(self) -> Iterator[tuple[int, range, Probes, Probes]]:
        """Yield the stretches that are still to be measured.

        Yields:
            Number, shards, begun probes, and the sum so far, as in :class:`StretchTask`.
        """
        for number, found in groupby(self.missing_shards(), lambda index: index // self.stride):
            left = list(found)
            shards = range(left[0], left[-1] + 1)
            # the stretch that was begun here goes on from its sum and the probes of its begun shard
            if shards.start == self.n_shards:
                yield number, shards, self.begun, self._stretch
            else:
                yield number, shards, {}, self._new()

    def add_stretch(self, measured: MeasuredStretch) -> None:
        """Add a stretch that a worker has measured, or keep it until its turn.

        Raises:
            InfoFlowError: if it is of another model, or cannot be written.
        """
        folder = measured.write_contents()
        # files of what grows are in place before the sums that count their shards
        for name, digest in measured.digests.items():
            target = self.folder.path / name
            with name_file_in_errors(target):
                target.parent.mkdir(exist_ok=True)
            self.folder.replace(folder / name, target, digest)
        if measured.stretch == self.n_shards // self.stride:
            self._add_sums(folder / SUMS)
            self._add_waiting()
        else:
            self.folder.replace(folder / SUMS, self.folder.path / self._name(measured.stretch))
        shutil.rmtree(folder, ignore_errors=True)

    def keep(self, now: bool = False) -> None:
        """Write the checkpoint, if the last one is old or `now` is set."""
        if self._is_whole and self.checkpoint.keep(self._state, now):
            self.clean_up()

    def result(self, name: str) -> Any:
        """Return the result of a probe.

        Raises:
            NothingMeasuredError: if it saw nothing that it could measure.
            InfoFlowError: for what the probe refuses.
        """
        kind, manifests = self.fresh[name].sharded, self._manifests.get(name)
        if kind is None or not manifests:
            return self._whole[name].result()
        # all shards have the record of the run, so that of the first stands for the whole
        path = self.folder.path / name
        return kind.from_shards(path, manifests, kind.of.load(path / "000000").record)

    def results(self) -> dict[str, Any]:
        """Return the results of all probes; see :meth:`result`."""
        return {name: self.result(name) for name in self.fresh}

    # How it is kept

    def _new(self) -> dict[str, Probe[Any]]:
        return copy.deepcopy(dict(self.fresh))

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Mark the sums as incomplete in a block: after a second Ctrl-C they must not be kept."""
        self._is_whole = False
        yield
        self._is_whole = True

    def _close_stretch(self) -> None:
        for name, probe in self._whole.items():
            probe.merge(self._stretch[name])
        self._stretch = self._new()

    def _name(self, stretch: int) -> str:
        path = self.checkpoint.path
        return f"{path.stem}.{stretch:06d}{path.suffix}"

    def _waits(self, stretch: int) -> bool:
        return os.path.lexists(self.folder.path / self._name(stretch))

    def _add_waiting(self) -> None:
        while self.n_left and self._waits(self.n_shards // self.stride):
            name = self._name(self.n_shards // self.stride)
            # asked for its error: a file that is not the run's own must not be added
            self.folder.holds(name)
            self._add_sums(self.folder.path / name)

    def _add_sums(self, path: Path) -> None:
        """Add a stretch from the file that a worker has written; it includes shards begun here."""
        sums = self._new()
        with _read(path, "measure it again") as state:
            _load(sums, state["sums"])
            manifests = self._manifests_in(state)
        with self._change():
            for name, parts in manifests.items():
                self._manifests[name] += parts
            self._stretch = sums
            self._close_stretch()
            # the sums are of a whole stretch, up to its end
            ended = (self.n_shards // self.stride + 1) * self.stride
            self.n_shards, self.begun = min(ended, self._n_in_all), {}

    def _manifests_in(self, state: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Take the manifests from a state; KeyError, TypeError or ValueError for anything else."""
        return {
            name: [
                {
                    "n_sequences": int(part["n_sequences"]),
                    "notes": list(part["notes"]),
                    "digest": str(part["digest"]),
                }
                for part in state["told"][name]
            ]
            for name in self.growing
        }

    def _state(self) -> dict[str, Any]:
        # where all have taken in the same batches
        begun = self.begun if len({p.n_sequences for p in self.begun.values()}) == 1 else {}
        sums = {"whole": self._whole, "stretch": self._stretch, "begun": begun}
        return {
            "n_shards": self.n_shards,
            "n_seen": self.n_seen,  # for who looks at the file
            "told": self._manifests,
            **{which: states_of(probes) for which, probes in sums.items()},
        }

    def _load_checkpoint(self) -> None:
        """Go on from the checkpoint."""
        with _read(self.checkpoint.path, "begin again") as state:
            _load(self._whole, state["whole"])
            _load(self._stretch, state["stretch"])
            if state["begun"]:
                _load(self.begin(), state["begun"])
            self._manifests = self._manifests_in(state)
            self.n_shards = int(state["n_shards"])
            # results that grow lie in files of their own
            for name in self.growing:
                for index in range(self.n_shards):
                    path = self.folder.path / name / f"{index:06d}.json"
                    if not path.is_file():
                        raise ValueError(f"{str(path)!r} is gone")

    def clean_up(self) -> None:
        """Remove the files of stretches that are in the sums."""
        names = {self._name(number) for number in range(-(-self.n_shards // self.stride))}
        self.folder.remove(*names.intersection(self.folder.names()))


@contextmanager
def _read(path: Path, what: str) -> Iterator[Any]:
    """Yield a state on disk to a block in which what is wrong with it is an error that names it."""
    again = f"expected what this run wrote; delete {path.name} to {what}"
    try:
        yield read_state(path, "the unfinished run", again)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InfoFlowError):
            raise
        raise InfoFlowError(
            f"{str(path)!r} cannot be used ({type(error).__name__}: {error}): {again}"
        ) from error


def _load(probes: Probes, states: Mapping[str, Any]) -> None:
    """Let probes go on from states; ValueError for those of others."""
    if probes.keys() != states.keys():
        raise ValueError(f"it is of {', '.join(states)}, not {', '.join(probes)}")
    for name, probe in probes.items():
        probe.load_state_dict(states[name])


def run_in_shards(
    context: RunContext,
    batches: Batches,
    probes: Probes,
    checkpoint: Checkpoint,
    say: Say = lambda line: None,
    to_disk: bool = False,
) -> ShardSums:
    """Run probes together over sequences, behind the last that the checkpoint holds.

    Args:
        context: model, sizes, bar, and where to measure.
        batches: all sequences, also those of an earlier start.
        probes: by name; they have seen nothing.
        checkpoint: keeps the unfinished state; it is not removed.
        say: called with the probes' names and from where they go on.
        to_disk: write results that grow with the sequences where there are several shards.

    Raises:
        InfoFlowError: for a checkpoint of other probes, for results that will not fit in memory or
            on the disk, for workers that are gone, and for what probes refuse.
        KeyboardInterrupt: after the batch in which Ctrl-C came; the state is on disk.
    """
    gathered = ShardSums(probes, batches, context.config.shard, checkpoint, to_disk)
    begun = max((probe.n_sequences for probe in gathered.begun.values()), default=0)
    seen = gathered.n_seen + begun
    say(f"{', '.join(probes)}" + (f": going on after {seen} sequences" if seen else ""))
    # processes that take a shard each are not worth starting for one
    alone = context.executor.is_one_process or gathered.n_left <= context.config.shard
    # workers report whole stretches, so a begun shard counts as done with its stretch only
    total, done = gathered.extent.n_sequences, seen if alone else gathered.n_seen
    with (
        progress_bar("probing", total, context.progress, done=done) as show,
        warn_if_long(say, ", ".join(probes), total - done, gathered.extent.longest) as count,
    ):

        def advance(n: int) -> None:
            show(n)
            count(n)

        try:
            if alone:
                _run_locally(context, gathered, advance)
            else:
                _run_in_workers(context, gathered, advance)
        except BaseException:
            gathered.keep(now=True)
            raise
    assert not gathered.n_left  # else sums of a part would pass for those of all
    gathered.clean_up()
    return gathered


def _run_locally(context: RunContext, gathered: ShardSums, advance: Callable[[int], None]) -> None:
    """Measure what is left in this process."""
    config, folder = context.config, gathered.folder.path
    n_left, n_processes = gathered.n_left, context.n_processes
    space = SpaceCheck(n_left, config.shard, gathered.growing, folder, n_processes)
    with defer_interrupts() as stop_if_asked:

        def after_batch(n: int) -> None:
            advance(n)
            stop_if_asked()
            space.check(gathered.begun, n)
            gathered.keep()

        for index in gathered.missing_shards():
            probes, before = gathered.begin(), gathered.n_seen
            part = gathered.part(range(index, index + 1))
            measure(context.model, part, probes, index, gathered.extent, config, after_batch)
            gathered.add_shard()
            gathered.keep()
            advance(gathered.n_seen - before - len(part.rows))  # what had waited


def _run_in_workers(
    context: RunContext, gathered: ShardSums, advance: Callable[[int], None]
) -> None:
    """Measure what is left in workers."""
    config, executor = context.config, context.executor
    here = executor.scheduler is None
    scratch = gathered.folder.scratch.absolute() / uuid.uuid4().hex
    scratch.mkdir()

    def units() -> Iterator[Unit]:
        for number, shards, begun, so_far in gathered.missing_stretches():
            first = shards.start * config.shard
            # what the shards before take is no longer free
            n_left, n_processes = gathered.extent.n_sequences - first, executor.jobs if here else 1
            task = StretchTask(
                stretch=number,
                shards=shards,
                rows=pack_rows(gathered.part(shards), here),
                extent=gathered.extent,
                fresh=gathered.fresh,
                begun=begun,
                so_far=so_far,
                config=config,
                fingerprint=context.fingerprint,
                space=SpaceCheck(n_left, config.shard, gathered.growing, scratch, n_processes),
                scratch=scratch,
            )
            yield Unit(f"shard {shards.start} (from sequence {first})", task)

    with (
        defer_interrupts() as stop_if_asked,
        executor.start_workers("finished shards are kept") as run,
    ):
        for measured in run(measure_in_worker, units(), stop_if_asked):
            before = gathered.n_seen
            gathered.add_stretch(measured)
            advance(gathered.n_seen - before)
            gathered.keep()
