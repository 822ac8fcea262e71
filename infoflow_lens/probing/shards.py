"""Probes over many sequences, shard by shard, behind those that a run before has measured.

A shard is some sequences in a row. Each is measured by probes that have seen nothing else, and the
shards are put together in their order, so that numbers do not depend on who has measured which.
"""

import copy
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.interrupts import between_steps
from infoflow_lens.foundation.progress import Advance, progress_bar
from infoflow_lens.foundation.record import model_fingerprint
from infoflow_lens.foundation.state import read_state
from infoflow_lens.hooks.model.inputs import Batches
from infoflow_lens.probing.checkpoint import Checkpoint
from infoflow_lens.probing.part import Say, Setting
from infoflow_lens.probing.room import Watch
from infoflow_lens.probing.shard import (
    STATE,
    Delivered,
    Probes,
    Task,
    measure,
    measure_in_worker,
    rows_for,
    write_growing,
)
from infoflow_lens.runs.executor import Unit


class Gathered:
    """What is measured already, on disk and in memory.

    In the folder lie the sum of the shards up to one, in the checkpoint; the shards behind it that
    workers have measured before their turn, ``<checkpoint>.NNNNNN.safetensors``; and of results
    that grow with the sequences a file for each shard. What is there when this is made is read.

    Args:
        fresh: the probes as they were given, which have seen nothing.
        batches: all sequences, those seen before too.
        size: sequences of a shard; the last may have fewer.
        checkpoint: where this is kept.
        to_disk: whether results that grow are written shard by shard, not kept in memory.

    Attributes:
        growing: the names of the probes whose results are written shard by shard.
        n_shards: how many shards are in the sum.
        begun: the probes of the shard behind them, of which a part may be measured.

    Raises:
        InfoFlowError: if what is there is of other probes, or cannot be read.
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
        self.n_shards = 0
        self.begun: Probes = {}
        self._merged = copy.deepcopy(dict(fresh))
        self._told: dict[str, list[Any]] = {name: [] for name in self.growing}
        self._is_whole = True  # whether all of it is of the same shards, so that it may be kept
        state = checkpoint.load()
        if state is not None:
            self._load(state)
        self._take_waiting()

    @property
    def n_seen(self) -> int:
        """The sequences of the sum."""
        return min(self.n_shards * self.size, self.extent.n_sequences)

    @property
    def n_left(self) -> int:
        """The sequences behind them."""
        return self.extent.n_sequences - self.n_seen

    def left(self) -> Iterator[tuple[int, Batches]]:
        """The shards that are not measured, with their numbers."""
        for index, start in enumerate(range(0, self.extent.n_sequences, self.size)):
            if index >= self.n_shards and not self._waits(index):
                stop = min(start + self.size, self.extent.n_sequences)
                yield index, self.batches.part(start, stop)

    def probes_for(self, index: int) -> Probes:
        """The probes for a shard that is left: those that have begun it, or new ones."""
        if index > self.n_shards:
            return copy.deepcopy(dict(self.fresh))
        self.begun = self.begun or copy.deepcopy(dict(self.fresh))
        return self.begun

    def take(self) -> None:
        """Add the next shard, whose probes have now measured all of it."""
        probes = self.begun
        told = write_growing(probes, self.growing, self.n_shards, self.folder.path)
        self._add(probes, told)
        self._take_waiting()

    def receive(self, delivered: Delivered) -> None:
        """Add a shard that a worker has measured, or keep it until its turn.

        Raises:
            InfoFlowError: if it is of another model, or cannot be written.
        """
        came, index = delivered.received(), delivered.index
        for name, digest in delivered.digests.items():
            if name != STATE:
                target = self.folder.path / name
                target.parent.mkdir(exist_ok=True)
                self.folder.replace(came / name, target, digest)
        if index == self.n_shards:
            self._add_state(came / STATE)
            self._take_waiting()
        else:
            waiting = self.folder.path / self._name(index)
            self.folder.replace(came / STATE, waiting, delivered.digests[STATE])
        shutil.rmtree(came, ignore_errors=True)

    def keep(self, now: bool = False) -> None:
        """Write where it stands, if the last time is long ago or it must be now."""
        if self._is_whole and self.checkpoint.keep(self._state, now):
            self.forget_waiting()

    def result(self, name: str) -> Any:
        """The result of a probe.

        Raises:
            NothingMeasuredError: if it saw nothing that it could measure.
            InfoFlowError: for what the probe refuses.
        """
        kind, told = self.fresh[name].sharded, self._told.get(name)
        if kind is None or not told:
            return self._merged[name].result()
        path = self.folder.path / name
        return kind.of_shards(path, told, kind.of.load(path / "000000").record)

    def results(self) -> dict[str, Any]:
        """The results of all probes; see :meth:`result`."""
        return {name: self.result(name) for name in self.fresh}

    # How it is kept

    def _name(self, index: int) -> str:
        path = self.checkpoint.path
        return f"{path.stem}.{index:06d}{path.suffix}"

    def _waits(self, index: int) -> bool:
        return os.path.lexists(self.folder.path / self._name(index))

    def _take_waiting(self) -> None:
        while self._waits(self.n_shards):
            name = self._name(self.n_shards)
            self.folder.holds(name)
            self._add_state(self.folder.path / name)

    def _add_state(self, path: Path) -> None:
        again = f"expected what this version wrote; delete {path.name} to measure the shard again"
        state: Any = read_state(path, "the shard", again)[0]
        try:
            told = {name: told_of(part) for name, part in state["told"].items()}
            states = dict(state["states"])
            if self.fresh.keys() != told.keys() | states.keys():
                raise ValueError(f"it holds {', '.join([*told, *states])}")
            probes = {name: copy.deepcopy(self.fresh[name]) for name in states}
            for name, probe in probes.items():
                probe.load_state_dict(states[name])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InfoFlowError(
                f"{str(path)!r} is no shard of this run ({type(error).__name__}: {error}): {again}"
            ) from error
        self._add(probes, told)

    def _add(self, probes: Probes, told: Mapping[str, Any]) -> None:
        # from here on a second Ctrl-C leaves sums that nobody may go on from
        self._is_whole = False
        for name in self.fresh:
            if name in told:
                self._told[name].append(told[name])
            else:
                self._merged[name].merge(probes[name])
        self.n_shards += 1
        self.begun = {}
        self._is_whole = True

    def _state(self) -> dict[str, Any]:
        # where all have taken in the same batches
        begun = self.begun if len({p.n_sequences for p in self.begun.values()}) == 1 else {}
        return {
            "n_shards": self.n_shards,
            "n_seen": self.n_seen,  # for who looks at the file
            "told": self._told,
            "merged": {name: probe.state_dict() for name, probe in self._merged.items()},
            "begun": {name: probe.state_dict() for name, probe in begun.items()},
        }

    def _load(self, state: Any) -> None:
        again = f"expected the same; delete {self.checkpoint.path.name} to begin again"
        folder = str(self.folder.path)
        try:
            merged, begun, told = dict(state["merged"]), dict(state["begun"]), dict(state["told"])
            if not all(self.fresh.keys() == part.keys() for part in (merged, begun or merged)):
                raise InfoFlowError(
                    f"the unfinished run in {folder!r} is of other probes than "
                    f"{', '.join(self.fresh)}: {again}"
                )
            for name, probe in self._merged.items():
                probe.load_state_dict(merged[name])
            self._told = {name: [told_of(part) for part in told[name]] for name in self.growing}
            self.n_shards = int(state["n_shards"])
            if begun:
                for name, probe in self.probes_for(self.n_shards).items():
                    probe.load_state_dict(begun[name])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InfoFlowError(
                f"the unfinished run in {folder!r} cannot be read ({type(error).__name__}: "
                f"{error}): {again}"
            ) from error
        for name in self.growing:
            for index in range(self.n_shards):
                path = self.folder.path / name / f"{index:06d}.json"
                if not path.is_file():
                    raise InfoFlowError(f"{str(path)!r} is gone: {again}")

    def forget_waiting(self) -> None:
        """Remove the files of shards that are in the sum."""
        names = {self._name(index) for index in range(self.n_shards)}
        self.folder.remove(*names.intersection(self.folder.names()))


def told_of(part: Mapping[str, Any]) -> dict[str, Any]:
    """What a shard has told, read again; KeyError, TypeError or ValueError for anything else."""
    return {
        "n_sequences": int(part["n_sequences"]),
        "notes": list(part["notes"]),
        "digest": str(part["digest"]),
    }


def run_in_shards(
    setting: Setting,
    batches: Batches,
    probes: Probes,
    checkpoint: Checkpoint,
    say: Say = lambda line: None,
    to_disk: bool = False,
) -> Gathered:
    """Run probes together over sequences, behind the last that the checkpoint holds.

    Args:
        setting: model, sizes, bar, and who measures.
        batches: all sequences, those seen before too.
        probes: by name; they have seen nothing.
        checkpoint: where it stands; it is not removed.
        say: called with the probes' names and from where they go on.
        to_disk: write results that grow with the sequences where there are several shards.

    Raises:
        InfoFlowError: for a checkpoint of other probes, for results that will not fit in memory or
            on the disk, for workers that are gone, and for what probes refuse.
        KeyboardInterrupt: behind the batch in which it was asked for; the state is on disk.
    """
    gathered = Gathered(probes, batches, setting.config.shard, checkpoint, to_disk)
    begun = max((probe.n_sequences for probe in gathered.begun.values()), default=0)
    seen = gathered.n_seen + begun
    say(f"{', '.join(probes)}" + (f": going on behind {seen} sequences" if seen else ""))
    alone = setting.executor.is_alone or gathered.n_left <= setting.config.shard
    total, done = gathered.extent.n_sequences, seen if alone else gathered.n_seen
    with progress_bar("probing", total, setting.progress, done=done) as advance:
        try:
            if alone:
                _here(setting, gathered, advance)
            else:
                _elsewhere(setting, gathered, advance)
        except BaseException:
            gathered.keep(now=True)
            raise
    gathered.forget_waiting()
    return gathered


def _here(setting: Setting, gathered: Gathered, advance: Advance) -> None:
    """Measure what is left in this process."""
    config, folder = setting.config, gathered.folder.path
    watch = Watch(gathered.n_left, config.shard, gathered.growing, folder)
    with between_steps() as stop_if_asked:
        for index, part in gathered.left():
            probes, before = gathered.probes_for(index), gathered.n_seen

            def after_batch(n: int, probes: Probes = probes) -> None:
                advance(n)
                stop_if_asked()
                watch.look(probes, n)
                gathered.keep()

            measure(setting.model, part, probes, index, gathered.extent, config, after_batch)
            gathered.take()
            gathered.keep()
            advance(gathered.n_seen - before - len(part.sequences()))  # what had waited


def _elsewhere(setting: Setting, gathered: Gathered, advance: Advance) -> None:
    """Measure what is left in workers."""
    config, executor = setting.config, setting.executor
    here = executor.scheduler is None
    fingerprint = model_fingerprint(setting.model)
    scratch = gathered.folder.scratch.absolute() / uuid.uuid4().hex
    scratch.mkdir()

    def units() -> Iterator[Unit]:
        for index, part in gathered.left():
            first = index * config.shard
            # what the shards before it take is no longer free
            n_left, at_once = gathered.extent.n_sequences - first, executor.jobs if here else 1
            task = Task(
                index=index,
                rows=rows_for(part, here),
                extent=gathered.extent,
                probes=gathered.probes_for(index),
                config=config,
                fingerprint=fingerprint,
                watch=Watch(n_left, config.shard, gathered.growing, scratch, at_once),
                scratch=scratch,
            )
            yield Unit(f"shard {index} (from sequence {first})", task)

    with (
        between_steps() as stop_if_asked,
        executor.at_work("finished shards are kept") as run,
    ):
        for delivered in run(measure_in_worker, units(), stop_if_asked):
            before = gathered.n_seen
            gathered.receive(delivered)
            advance(gathered.n_seen - before)
            gathered.keep()
