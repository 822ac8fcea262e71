"""Shards of a probe run: measured here, or by a worker that loads the model itself."""

import copy
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import digest_of, make_temporary_folder
from infoflow_lens.foundation.memory import format_bytes, free_memory
from infoflow_lens.foundation.progress import hide_library_bars
from infoflow_lens.foundation.record import model_fingerprint
from infoflow_lens.foundation.saving import write_state
from infoflow_lens.hooks import Probe
from infoflow_lens.hooks.model.inputs import Batches, Extent
from infoflow_lens.hooks.passes.run import run_shard
from infoflow_lens.models.loading import LoadedModel, load_any
from infoflow_lens.probing.config import ProbingConfig
from infoflow_lens.probing.store import StoredSequences
from infoflow_lens.runs.executor import choose_device


@dataclass
class SpaceCheck:
    """Estimates the size of the results from the first two batches, and refuses what will not fit.

    Attributes:
        n_left: sequences that are still to be measured.
        shard: sequences that are measured together.
        on_disk: the probes whose results are written shard by shard.
        folder: where they are written; its disk is checked if this machine sees it.
        n_processes: processes of this machine that measure at the same time.
    """

    n_left: int
    shard: int
    on_disk: frozenset[str]
    folder: Path
    n_processes: int = 1
    _before: dict[str, int] | None = field(default=None, init=False)
    _is_done: bool = field(default=False, init=False)

    def check(self, probes: Mapping[str, Probe[Any]], n: int) -> None:
        """Compare the sizes after the second batch with those after the first.

        Later calls do nothing.

        Args:
            probes: by name.
            n: sequences of the last batch.

        Raises:
            InfoFlowError: for what will not fit in memory or on the disk.
        """
        if self._is_done:
            return
        now = {name: probe.growing_bytes() for name, probe in probes.items()}
        if self._before is None:
            self._before = now
            return
        self._is_done = True
        # a difference, as the first batch also brings what does not grow with the sequences
        grown = {name: max(now[name] - self._before[name], 0) / n for name in now}
        by_shard = sum(bytes_ for name, bytes_ in grown.items() if name in self.on_disk)
        in_all = sum(grown.values()) - by_shard
        # what probes hold, and once more when it is put together or kept
        needed = 2 * int(in_all * self.n_left + by_shard * min(self.n_left, self.shard))
        free = free_memory()
        if free is not None and needed * self.n_processes > free:
            raise InfoFlowError(
                f"what is measured of {self.n_left} sequences needs about "
                f"{format_bytes(needed * self.n_processes)} of memory, and {format_bytes(free)} is "
                "free: expected it to fit; give fewer sequences (n, n_detail), shorter ones "
                "(max_length) or smaller shards (shard)"
            )
        if not self.on_disk or not self.folder.is_dir():
            return
        free = shutil.disk_usage(self.folder).free
        if by_shard * self.n_left > free:
            raise InfoFlowError(
                f"results of {self.n_left} sequences need about "
                f"{format_bytes(int(by_shard * self.n_left))} on the disk, and "
                f"{format_bytes(free)} is free: expected it to fit; give fewer sequences (n), "
                "shorter ones (max_length) or fewer ranks"
            )


Probes = Mapping[str, Probe[Any]]
SUMS = "sums.safetensors"


def states_of(probes: Probes) -> dict[str, Any]:
    """Return what probes have measured, by name, as tensors and plain values."""
    return {name: probe.state_dict() for name, probe in probes.items()}


@dataclass(frozen=True)
class PackedSequences:
    """Sequences joined in one tensor, which is sent much faster than many tensors.

    Attributes:
        together: [pos of all] or [pos of all, d_token].
        lengths: of the sequences.
        columns: what stands beside the ids, by name, [pos of all].
    """

    together: Tensor
    lengths: list[int]
    columns: Mapping[str, Tensor]

    def unpack(self, model: nn.Module) -> Batches:
        """Return the sequences, for a model."""
        rows, columns = self.together.split(self.lengths), self.columns.items()
        beside = {name: list(joined.split(self.lengths)) for name, joined in columns}
        return Batches(model, list(rows), columns=beside)


def pack_rows(batches: Batches, here: bool) -> StoredSequences | PackedSequences:
    """Prepare sequences for a worker, which reads files of this machine by itself.

    Args:
        batches: the sequences.
        here: whether the worker runs on this machine.
    """
    if here and isinstance(batches.rows, StoredSequences):
        return batches.rows
    rows = list(batches.rows)
    columns = {name: torch.cat(list(column)) for name, column in batches.columns.items()}
    return PackedSequences(torch.cat(rows), [len(row) for row in rows], columns)


@dataclass(frozen=True)
class StretchTask:
    """All that a worker needs to measure a stretch: some shards in a row, whose sum it returns.

    Attributes:
        stretch: its number.
        shards: the numbers of the shards that are left of it.
        rows: their sequences, as :func:`pack_rows` gives them.
        extent: of all sequences.
        fresh: probes which have seen nothing, by name.
        begun: those that have seen a part of the first of these shards; empty where none have.
        so_far: the sum of the shards before these in the stretch.
        config: of the run: model, sizes.
        fingerprint: of the weights of the model.
        space: checks whether the results will fit.
        scratch: a folder for what the worker writes, if it sees it.
    """

    stretch: int
    shards: range
    rows: StoredSequences | PackedSequences
    extent: Extent
    fresh: Probes
    begun: Probes
    so_far: Probes
    config: ProbingConfig
    fingerprint: str
    space: SpaceCheck
    scratch: Path


@dataclass(frozen=True)
class MeasuredStretch:
    """A stretch that a worker has measured, as files: sums, and results that grow with the data.

    Attributes:
        stretch: its number.
        digests: by the names of the files of what grows, as
            :func:`~infoflow_lens.foundation.files.digest_of`.
        folder: where they lie.
        contents: the files themselves, by name, from a worker that does not see the folder.
    """

    stretch: int
    digests: Mapping[str, str]
    folder: Path
    contents: Mapping[str, bytes]

    def write_contents(self) -> Path:
        """Write the contents that were sent to files; return their folder on this machine."""
        for name, content in self.contents.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return self.folder


def measure(
    model: nn.Module,
    shard: Batches,
    probes: Probes,
    index: int,
    extent: Extent,
    config: ProbingConfig,
    after_batch: Callable[[int], None],
) -> None:
    """Measure what probes have not seen of a shard.

    Args:
        model: a TransformerLens model.
        shard: the sequences.
        probes: by name; they have seen the same sequences of it, or none.
        index: of the shard.
        extent: of all sequences.
        config: of the run: sizes.
        after_batch: called after each with the number of its sequences.
    """
    run_shard(
        model,
        shard,
        list(probes.values()),
        extent=extent,
        first_index=index * config.shard,
        batch_size=config.batch_size,
        skip=next(iter(probes.values())).n_sequences,
        after_batch=after_batch,
    )


def write_growing(
    probes: Probes, names: frozenset[str], index: int, out: Path
) -> dict[str, dict[str, Any]]:
    """Write the results of a shard that grow with the sequences, each to a file below a folder.

    A shard that is written again, such as after a stop, gives the same files.

    Args:
        probes: of the shard, by name.
        names: of the probes whose results grow.
        index: of the shard.
        out: the folder.

    Returns:
        For each name the manifest of the shard, from which the whole result is opened later.
    """
    manifests = {}
    for name in sorted(names):
        kind = probes[name].sharded
        assert kind is not None
        manifests[name] = kind.save_shard(out / name, index, probes[name].result())
    return manifests


def measure_in_worker(task: StretchTask) -> MeasuredStretch:
    """Measure a stretch in a process that may be on another machine."""
    sees_scratch = (
        task.scratch.is_dir()
    )  # the name is drawn, so that no other machine has one like it
    folder = make_temporary_folder("stretch-", task.scratch if sees_scratch else None)
    try:
        _measure_into(folder, task)
        paths = [path for path in folder.rglob("*") if path.is_file()]
        files = {path.relative_to(folder).as_posix(): path for path in paths}
        digests = {name: digest_of(path) for name, path in files.items() if name != SUMS}
        if sees_scratch:
            # the files are where the run reads them, else they travel with the answer
            return MeasuredStretch(task.stretch, digests, folder, {})
        contents = {name: path.read_bytes() for name, path in files.items()}
        return MeasuredStretch(task.stretch, digests, task.scratch / folder.name, contents)
    finally:
        if not sees_scratch:
            shutil.rmtree(folder, ignore_errors=True)


def _measure_into(folder: Path, task: StretchTask) -> None:
    config, growing = task.config, task.space.on_disk
    loaded = load_in_worker(config, task.fingerprint)
    if isinstance(task.rows, PackedSequences):
        batches = task.rows.unpack(loaded.model)
    else:
        batches = Batches(loaded.model, task.rows)
    n, check_space = config.shard, task.space.check
    manifests: dict[str, list[Any]] = {name: [] for name in growing}
    for place, index in enumerate(task.shards):
        # the first shard may have been begun elsewhere
        probes = task.begun if task.begun and not place else copy.deepcopy(dict(task.fresh))
        # rows begin with the first of these shards, whatever its number
        part = batches.part(place * n, min((place + 1) * n, len(batches.rows)))
        after_batch = partial(check_space, probes)
        measure(loaded.model, part, probes, index, task.extent, config, after_batch)
        for name, probe in probes.items():
            if name not in growing:
                task.so_far[name].merge(probe)
        for name, of_shard in write_growing(probes, growing, index, folder).items():
            manifests[name].append(of_shard)
    write_state(folder / SUMS, {"told": manifests, "sums": states_of(task.so_far)})


def load_in_worker(config: ProbingConfig, fingerprint: str) -> LoadedModel:
    """Load the model of a run, once in a process.

    Raises:
        InfoFlowError: for a model whose weights have changed since the run began.
    """
    device = choose_device(config.device)
    loaded = _load_model(config.model, device, config.dtype, config.backend)
    found = model_fingerprint(loaded.model)
    if found != fingerprint:
        raise InfoFlowError(
            f"the run began on model {fingerprint}, and {config.model} is now {found} (other "
            "weights): expected the same; leave its files as they are while a run goes on"
        )
    return loaded


@lru_cache(maxsize=1)
def _load_model(model: str, device: str, dtype: str | None, backend: Any) -> LoadedModel:
    with hide_library_bars():
        return load_any(model, device=device, dtype=dtype, backend=backend)
