"""Probes over many sequences, shard by shard, behind those that a run before has measured.

A shard is some sequences in a row. Each is measured by probes that have seen nothing else, and the
shards are put together in their order, so that numbers do not depend on who has measured which.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.interrupts import between_steps
from infoflow_lens.foundation.progress import Advance, progress_bar
from infoflow_lens.foundation.record import model_fingerprint
from infoflow_lens.foundation.state import state_from_bytes
from infoflow_lens.hooks import Probe
from infoflow_lens.hooks.model.inputs import Batches, Extent
from infoflow_lens.hooks.passes.run import run_shard
from infoflow_lens.probing.checkpoint import Checkpoint
from infoflow_lens.probing.growing import Growing, told_of
from infoflow_lens.probing.part import Say, Setting
from infoflow_lens.probing.room import Watch
from infoflow_lens.probing.spread import Measured, Task, measure_shard, rows_for

Probes = Mapping[str, Probe[Any]]
States = Mapping[str, Mapping[str, Any]]


@dataclass
class Gathered:
    """What the shards so far have measured.

    Attributes:
        fresh: the probes as they were given, which have seen nothing.
        extent: of all sequences.
        size: sequences of a shard; the last may have fewer.
        growing: where results are written that grow with the sequences; None keeps them in memory.
        checkpoint: where this is kept.
        merged: the probes of all shards so far, but for what is on disk.
        told: by probe whose result grows, what is known of its shards.
        n_shards: how many are in it.
        is_whole: whether all of it is of the same shards, so that it may be kept.
    """

    fresh: Probes
    extent: Extent
    size: int
    growing: Growing | None
    checkpoint: Checkpoint
    merged: dict[str, Probe[Any]] = field(default_factory=dict)
    told: dict[str, list[Any]] = field(default_factory=dict)
    n_shards: int = 0
    is_whole: bool = True

    def __post_init__(self) -> None:
        self.merged = copy.deepcopy(dict(self.fresh))

    @classmethod
    def of(
        cls, fresh: Probes, extent: Extent, size: int, out: Path | None, checkpoint: Checkpoint
    ) -> "Gathered":
        """Nothing so far; with a folder and several shards, what grows is written there."""
        names = frozenset(name for name, probe in fresh.items() if probe.sharded is not None)
        growing = None
        if out is not None and names and extent.n_sequences > size:
            growing = Growing(out, names)
        return cls(fresh, extent, size, growing, checkpoint)

    @property
    def n_seen(self) -> int:
        """The sequences of its shards."""
        return min(self.n_shards * self.size, self.extent.n_sequences)

    @property
    def n_left(self) -> int:
        """The sequences behind them."""
        return self.extent.n_sequences - self.n_seen

    def remaining(self, batches: Batches) -> Iterator[tuple[int, Batches]]:
        """The shards behind those that are gathered, with their numbers."""
        first, n = self.n_shards, self.extent.n_sequences
        for index, start in enumerate(range(first * self.size, n, self.size), first):
            yield index, batches.part(start, min(start + self.size, n))

    def take(self, probes: Probes, told: Mapping[str, Any] | None = None) -> None:
        """Add the next shard.

        Args:
            probes: that have measured it, by name; those in `told` may be missing.
            told: of what grows, where a worker has written it.

        Raises:
            InfoFlowError: if it is of another model, or cannot be written.
        """
        if not told:
            told = {} if self.growing is None else self.growing.write(probes, self.n_shards)
        # from here on a second Ctrl-C leaves sums that nobody may go on from
        self.is_whole = False
        for name in self.fresh:
            if name in told:
                self.told.setdefault(name, []).append(told[name])
            else:
                self.merged[name].merge(probes[name])
        self.n_shards += 1
        self.is_whole = True

    def take_measured(self, measured: Measured) -> None:
        """Add the next shard, which a worker has measured; see :meth:`take`."""
        if self.fresh.keys() != measured.told.keys() | measured.states.keys():
            raise InfoFlowError(
                f"a shard holds {', '.join([*measured.told, *measured.states])}: expected "
                f"{', '.join(self.fresh)}; delete {self.checkpoint.path.stem}.* to begin again"
            )
        probes = {name: copy.deepcopy(self.fresh[name]) for name in measured.states}
        for name, probe in probes.items():
            probe.load_state_dict(measured.states[name])
        self.take(probes, measured.told)

    def result(self, name: str) -> Any:
        """The result of a probe.

        Raises:
            NothingMeasuredError: if it saw nothing that it could measure.
            InfoFlowError: for what the probe refuses.
        """
        kind = self.fresh[name].sharded
        if kind is None or self.growing is None or name not in self.told:
            return self.merged[name].result()
        path = self.growing.path_of(name)
        return kind.of_shards(path, self.told[name], kind.of.load(path / "000000").record)

    def results(self) -> dict[str, Any]:
        """The results of all probes; see :meth:`result`."""
        return {name: self.result(name) for name in self.fresh}

    def state(self) -> dict[str, Any]:
        """All of it, for :meth:`load`."""
        return {
            "n_shards": self.n_shards,
            "n_seen": self.n_seen,  # for who looks at the file
            "told": self.told,
            "merged": {name: probe.state_dict() for name, probe in self.merged.items()},
        }

    def load(self, state: Any) -> States | None:
        """Go on from what a run before had kept.

        Returns:
            The states of the shard that was not finished, by probe; None if there was none.

        Raises:
            InfoFlowError: if it is of other probes, or cannot be read.
        """
        again = f"expected the same; delete {self.checkpoint.path.name} to begin again"
        folder = str(self.checkpoint.path.parent)
        try:
            merged, current, told = dict(state["merged"]), state["current"], dict(state["told"])
            if not all(self.fresh.keys() == part.keys() for part in (merged, current or merged)):
                raise InfoFlowError(
                    f"the unfinished run in {folder!r} is of other probes than "
                    f"{', '.join(self.fresh)}: {again}"
                )
            for name, probe in self.merged.items():
                probe.load_state_dict(merged[name])
            self.told = {
                name: [told_of(part) for part in parts]
                for name, parts in told.items()
                if self.growing is not None and name in self.growing.names
            }
            self.n_shards = int(state["n_shards"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InfoFlowError(
                f"the unfinished run in {folder!r} cannot be read ({type(error).__name__}: "
                f"{error}): {again}"
            ) from error
        for name, parts in self.told.items():
            assert self.growing is not None
            for index in range(len(parts)):
                path = self.growing.path_of(name) / f"{index:06d}.json"
                if not path.is_file():
                    raise InfoFlowError(f"{str(path)!r} is gone: {again}")
        return current


def run_in_shards(
    setting: Setting,
    batches: Batches,
    probes: Probes,
    checkpoint: Checkpoint,
    say: Say = lambda line: None,
    out: Path | None = None,
) -> Gathered:
    """Run probes together over sequences, behind the last that the checkpoint holds.

    Args:
        setting: model, sizes, bar, and who measures.
        batches: all sequences, those seen before too.
        probes: by name; they have seen nothing.
        checkpoint: where it stands; it is not removed.
        say: called with the probes' names and from where they go on.
        out: folder for results that grow with the sequences, where there are several shards; None
            keeps all in memory.

    Raises:
        InfoFlowError: for a checkpoint of other probes, for results that will not fit in memory or
            on the disk, for workers that are gone, and for what probes refuse.
        KeyboardInterrupt: behind the batch in which it was asked for; the state is on disk.
    """
    extent, size = batches.extent, setting.config.shard
    assert extent is not None  # as they are not of a loader
    gathered = Gathered.of(probes, extent, size, out, checkpoint)
    state, current = checkpoint.load(), None
    if state is not None:
        current = gathered.load(state)
    else:  # what a run has left that was not kept
        _Waiting(checkpoint).forget()
        if gathered.growing is not None:
            gathered.growing.clear()
    begun = [int(part.get("n_sequences", 0)) for part in (current or {}).values()]
    seen = gathered.n_seen + max(begun, default=0)
    say(f"{', '.join(probes)}" + (f": going on behind {seen} sequences" if seen else ""))
    alone = setting.crew.is_alone or gathered.n_left <= size
    with progress_bar(
        "probing", extent.n_sequences, setting.progress, done=seen if alone else gathered.n_seen
    ) as advance:
        if alone:
            _here(setting, batches, gathered, current, advance)
        else:
            _elsewhere(setting, batches, gathered, advance)
    return gathered


def _here(
    setting: Setting,
    batches: Batches,
    gathered: Gathered,
    current: States | None,
    advance: Advance,
) -> None:
    """Measure what is left in this process."""
    checkpoint, config = gathered.checkpoint, setting.config
    probes: dict[str, Probe[Any]] = {}
    waiting = _Waiting(checkpoint)

    def now() -> dict[str, Any]:
        counts = {probe.n_sequences for probe in probes.values()}
        whole = len(counts) == 1 and counts != {0}  # each has taken in the same batches
        states = {name: probe.state_dict() for name, probe in probes.items()} if whole else None
        return {**gathered.state(), "current": states}

    with between_steps() as stop_if_asked:
        watch = Watch(gathered.n_left, config.shard, gathered.growing)
        try:
            for index, part in gathered.remaining(batches):
                if waiting.has(index):  # a run with workers has measured it
                    gathered.take_measured(waiting.load(index))
                    advance(part.n_sequences or 0)
                    current = None
                    continue
                probes = copy.deepcopy(dict(gathered.fresh))
                if current is not None:
                    for name, probe in probes.items():
                        probe.load_state_dict(current.get(name, {}))
                    current = None

                def after_batch(n: int, probes: Probes = probes) -> None:
                    advance(n)
                    stop_if_asked()
                    watch.look(probes, n)
                    checkpoint.keep(now)

                run_shard(
                    setting.model,
                    part,
                    list(probes.values()),
                    extent=gathered.extent,
                    first_index=index * config.shard,
                    batch_size=config.batch_size,
                    skip=next(iter(probes.values())).n_sequences,
                    after_batch=after_batch,
                )
                gathered.take(probes)
                probes = {}
                checkpoint.keep(now)
        except BaseException:
            if gathered.is_whole:
                checkpoint.save(now())
            raise
    waiting.forget(gathered.n_shards)


def _elsewhere(setting: Setting, batches: Batches, gathered: Gathered, advance: Advance) -> None:
    """Measure what is left in workers; what comes before its turn waits on disk."""
    checkpoint, config = gathered.checkpoint, setting.config
    fingerprint = model_fingerprint(setting.model)
    waiting = _Waiting(checkpoint)

    def tasks(places: str) -> Iterator[Task]:
        here = setting.crew.scheduler is None
        at_once = setting.crew.jobs if here else 1
        for index, part in gathered.remaining(batches):
            if not waiting.has(index):
                # what the shards before it take is no longer free
                n_left = gathered.extent.n_sequences - index * config.shard
                yield Task(
                    index=index,
                    rows=rows_for(part, here),
                    extent=gathered.extent,
                    probes=gathered.fresh,
                    config=config,
                    fingerprint=fingerprint,
                    watch=Watch(n_left, config.shard, gathered.growing, here, at_once),
                    growing=gathered.growing if here else None,
                    places=places,
                )

    def take(measured: Measured) -> None:
        before = gathered.n_seen
        gathered.take_measured(measured)
        advance(gathered.n_seen - before)

    def take_waiting() -> None:
        while waiting.has(gathered.n_shards):
            take(waiting.load(gathered.n_shards))

    def now() -> dict[str, Any]:
        return {**gathered.state(), "current": None}

    try:
        with between_steps() as stop_if_asked, setting.crew.at_work() as (spread, places):
            for index, sent in spread(measure_shard, tasks(places)):
                measured = Measured.of_plain(state_from_bytes(sent))
                if index == gathered.n_shards:
                    take(measured)
                else:
                    waiting.save(index, measured)
                take_waiting()
                checkpoint.keep(now)
                stop_if_asked()
            take_waiting()
    except BaseException:
        if gathered.is_whole:
            checkpoint.save(now())
            waiting.forget(gathered.n_shards)
        raise
    waiting.forget(gathered.n_shards)


class _Waiting:
    """Shards that are measured before their turn, on disk."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def _of(self, index: int) -> Checkpoint:
        path = self._checkpoint.path
        name = f"{path.stem}.{index:06d}{path.suffix}"
        return Checkpoint(self._checkpoint.folder, name)

    def has(self, index: int) -> bool:
        return self._of(index).path.is_file()

    def save(self, index: int, measured: Measured) -> None:
        self._of(index).save(measured.to_plain())

    def load(self, index: int) -> Measured:
        try:
            return Measured.of_plain(self._of(index).load())
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            path = self._of(index).path
            raise InfoFlowError(
                f"{str(path)!r} is no shard of this version ({type(error).__name__}: {error}): "
                "expected what this version wrote; delete it to measure the shard again"
            ) from error

    def forget(self, stop: float = math.inf) -> None:
        """Remove those before `stop`, which are in what was kept."""
        path = self._checkpoint.path
        for found in path.parent.glob(f"{path.stem}.*{path.suffix}"):
            number = found.name[len(path.stem) + 1 : -len(path.suffix)]
            if number.isdigit() and int(number) < stop:
                self._checkpoint.folder.remove(found.name)
