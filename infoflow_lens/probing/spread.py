"""Shards of a probe run measured by workers, each of which loads the model itself."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from infoflow_lens.foundation.progress import no_bars_of_libraries
from infoflow_lens.foundation.state import state_to_bytes
from infoflow_lens.foundation.workers import Spread, workers
from infoflow_lens.hooks import Probe
from infoflow_lens.hooks.model.inputs import Batches, Extent
from infoflow_lens.hooks.passes.run import run_shard
from infoflow_lens.models.loading import LoadedModel, load_any
from infoflow_lens.probing.config import ProbingConfig
from infoflow_lens.probing.growing import Growing, told_of
from infoflow_lens.probing.room import Watch
from infoflow_lens.probing.store import StoredSequences


@dataclass(frozen=True)
class Crew:
    """Who measures.

    Attributes:
        jobs: processes at a time; 1 is this one alone.
        scheduler: address of a dask scheduler, whose workers measure in place of own processes.
        n_threads: of each worker.
        again: the command or the call that goes on after a loss.
    """

    jobs: int = 1
    scheduler: str | None = None
    n_threads: int = 1
    again: str = ""

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody but this process."""
        return self.jobs == 1 and self.scheduler is None

    @contextmanager
    def at_work(self) -> Iterator[tuple[Spread, str]]:
        """What spreads shards over the workers, and a folder in which those here choose devices."""
        with (
            tempfile.TemporaryDirectory(prefix="infoflow-workers-") as places,
            workers(
                self.jobs,
                self.scheduler,
                finished="finished shards are kept",
                again=self.again,
                n_threads=self.n_threads,
            ) as spread,
        ):
            yield spread, places if self.scheduler is None else ""


@dataclass(frozen=True)
class Packed:
    """Sequences one behind the other: one tensor is sent much faster than many.

    Attributes:
        together: [pos of all] or [pos of all, d_token].
        lengths: of the sequences.
    """

    together: Tensor
    lengths: list[int]

    def unpacked(self) -> list[Tensor]:
        """The sequences."""
        return list(self.together.split(self.lengths))


def rows_for(batches: Batches, here: bool) -> StoredSequences | Packed:
    """Sequences as they are sent to a worker: those in files of this machine it reads itself."""
    rows = batches.sequences()
    if here and isinstance(rows, StoredSequences):
        return rows
    rows = list(rows)
    return Packed(torch.cat(rows), [len(row) for row in rows])


@dataclass(frozen=True)
class Task:
    """What a worker needs to measure one shard.

    Attributes:
        index: of the shard.
        rows: its sequences, as :func:`rows_for` gives them.
        extent: of all sequences.
        probes: which have seen nothing, by name.
        config: of the run: model, sizes.
        fingerprint: of the weights of the model.
        watch: looks whether what is measured fits.
        growing: where the worker writes what grows; None on machines that may not see the folder.
        places: a folder in which workers of one machine choose devices; empty elsewhere.
    """

    index: int
    rows: StoredSequences | Packed
    extent: Extent
    probes: Mapping[str, Probe[Any]]
    config: ProbingConfig
    fingerprint: str
    watch: Watch
    growing: Growing | None = None
    places: str = ""


@dataclass(frozen=True)
class Measured:
    """What a worker has measured of a shard.

    Attributes:
        told: by probe whose part of the result lies on the disk, what :class:`Growing` says of it.
        states: of the other probes.
    """

    told: Mapping[str, Any]
    states: Mapping[str, Any]

    def to_plain(self) -> dict[str, Any]:
        """Tensors and plain values, for :meth:`of_plain`."""
        return {"told": dict(self.told), "states": dict(self.states)}

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> "Measured":
        """What :meth:`to_plain` gave; KeyError, TypeError or ValueError for what it did not."""
        told = {name: told_of(part) for name, part in plain["told"].items()}
        return cls(told, dict(plain["states"]))


def measure_shard(task: Task) -> tuple[int, bytes]:
    """What is measured of one shard, as it is sent between processes (:class:`Measured`)."""
    config, rows = task.config, task.rows
    device = _device(config.device, task.places)
    loaded = _loaded(config.model, device, config.dtype, config.backend)
    run_shard(
        loaded.model,
        Batches(loaded.model, rows.unpacked() if isinstance(rows, Packed) else rows),
        list(task.probes.values()),
        extent=task.extent,
        first_index=task.index * config.shard,
        batch_size=config.batch_size,
        after_batch=lambda n: task.watch.look(task.probes, n),
    )
    for probe in task.probes.values():
        probe.check_model(task.fingerprint)
    told = {} if task.growing is None else task.growing.write(task.probes, task.index)
    states = {name: probe.state_dict() for name, probe in task.probes.items() if name not in told}
    return task.index, state_to_bytes(Measured(told, states).to_plain())


@lru_cache(maxsize=1)
def _loaded(model: str, device: str, dtype: str | None, backend: Any) -> LoadedModel:
    """The model, loaded once in a process."""
    with no_bars_of_libraries():
        return load_any(model, device=device, dtype=dtype, backend=backend)


_place: list[FileLock] = []  # held as long as this process lives


def _device(device: str, places: str) -> str:
    """One GPU for each worker of a machine, in turn, where "cuda" leaves it open."""
    if device != "cuda" or not places or torch.cuda.device_count() < 2:
        return device
    if not _place:
        for number in range(os.cpu_count() or 1):
            lock = FileLock(Path(places) / f"{number}.lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            _place.append(lock)
            break
    number = int(Path(_place[0].lock_file).stem) if _place else 0
    return f"cuda:{number % torch.cuda.device_count()}"
