"""Shards of a probe run measured by workers, each of which loads the model itself."""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
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
from infoflow_lens.hooks.passes.attach import run_shard
from infoflow_lens.hooks.passes.collector import Weights
from infoflow_lens.models.loading import LoadedModel, load_any
from infoflow_lens.probing.config import ProbingConfig
from infoflow_lens.probing.room import Watch


@dataclass(frozen=True)
class Crew:
    """Who measures.

    Attributes:
        jobs: processes at a time; 1 is this one alone.
        scheduler: address of a dask scheduler, whose workers measure in place of own processes.
        n_threads: of each worker.
        again: the command that goes on after a loss.
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
                go_on="finished shards are kept",
                n_threads=self.n_threads,
            ) as spread,
        ):
            yield spread, places if self.scheduler is None else ""


@dataclass(frozen=True)
class Task:
    """What a worker needs to measure one shard.

    Attributes:
        index: of the shard.
        rows: its sequences.
        extent: of all sequences.
        probes: which have seen nothing, by name.
        config: of the run: model, sizes.
        watch: looks whether what is measured fits.
        places: a folder in which workers of one machine choose devices; empty elsewhere.
    """

    index: int
    rows: Sequence[Tensor]
    extent: Extent
    probes: Mapping[str, Probe[Any]]
    config: ProbingConfig
    watch: Watch
    places: str = ""


def measure_shard(task: Task) -> tuple[int, bytes]:
    """The states of the probes of one shard, as they are sent between processes."""
    config = task.config
    device = _device(config.device, task.places)
    loaded, weights = _loaded(config.model, device, config.dtype, config.backend)
    run_shard(
        loaded.model,
        Batches(loaded.model, task.rows),
        list(task.probes.values()),
        extent=task.extent,
        first_index=task.index * config.shard,
        batch_size=config.batch_size,
        weights=weights,
        after_batch=lambda n: task.watch.look(task.probes, n),
    )
    return task.index, state_to_bytes({n: probe.state() for n, probe in task.probes.items()})


@lru_cache(maxsize=1)
def _loaded(
    model: str, device: str, dtype: str | None, backend: Any
) -> tuple[LoadedModel, Weights]:
    """The model, loaded once in a process."""
    with no_bars_of_libraries():
        loaded = load_any(model, device=device, dtype=dtype, backend=backend)
    return loaded, Weights(loaded.model)


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
