"""One shard of a probe run: measured here, or by a worker that loads the model itself."""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infoflow_lens.foundation.files import digest_of
from infoflow_lens.foundation.progress import no_bars_of_libraries
from infoflow_lens.foundation.state import write_state
from infoflow_lens.hooks import Probe
from infoflow_lens.hooks.model.inputs import Batches, Extent
from infoflow_lens.hooks.passes.run import run_shard
from infoflow_lens.models.loading import LoadedModel, load_any
from infoflow_lens.probing.config import ProbingConfig
from infoflow_lens.probing.room import Watch
from infoflow_lens.probing.store import StoredSequences
from infoflow_lens.runs.executor import own_device

Probes = Mapping[str, Probe[Any]]
STATE = "state.safetensors"


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
    """What is needed to measure one shard.

    Attributes:
        index: of the shard.
        rows: its sequences, as :func:`rows_for` gives them.
        extent: of all sequences.
        probes: by name; they have seen nothing, or a part of the shard.
        config: of the run: model, sizes.
        fingerprint: of the weights of the model.
        watch: looks whether what is measured fits.
        scratch: a folder for what the worker writes, if it sees it.
    """

    index: int
    rows: StoredSequences | Packed
    extent: Extent
    probes: Probes
    config: ProbingConfig
    fingerprint: str
    watch: Watch
    scratch: Path


@dataclass(frozen=True)
class Delivered:
    """What a worker has measured of a shard, in files: states, and what grows with the sequences.

    Attributes:
        index: of the shard.
        digests: by the names of the files, as :func:`~infoflow_lens.foundation.files.digest_of`.
        folder: where they lie.
        contents: the files themselves, by name, from a worker that does not see the folder.
    """

    index: int
    digests: Mapping[str, str]
    folder: Path
    contents: Mapping[str, bytes]

    def received(self) -> Path:
        """The folder of the files on this machine."""
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


def write_growing(probes: Probes, names: frozenset[str], index: int, out: Path) -> dict[str, Any]:
    """Write what grows of a shard below a folder; by name, what the whole result must know of it.

    Writing a shard once more, such as after a stop, gives the same files.
    """
    told = {}
    for name in sorted(names):
        kind = probes[name].sharded
        assert kind is not None
        told[name] = kind.save_shard(out / name, index, probes[name].result())
    return told


def measure_in_worker(task: Task) -> Delivered:
    """Measure a shard in a process that may be on another machine."""
    config, rows = task.config, task.rows
    loaded = _loaded(config.model, own_device(config.device), config.dtype, config.backend)
    shard = Batches(loaded.model, rows.unpacked() if isinstance(rows, Packed) else rows)
    probes, look = task.probes, task.watch.look
    measure(loaded.model, shard, probes, task.index, task.extent, config, lambda n: look(probes, n))
    for probe in probes.values():
        probe.check_model(task.fingerprint)
    sees = task.scratch.is_dir()  # the name is drawn, so that no other machine has one like it
    folder = Path(tempfile.mkdtemp(prefix="shard-", dir=task.scratch if sees else None))
    try:
        told = write_growing(probes, task.watch.on_disk, task.index, folder)
        states = {name: probe.state_dict() for name, probe in probes.items() if name not in told}
        write_state(folder / STATE, {"told": told, "states": states}, {})
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        digests = {path.relative_to(folder).as_posix(): digest_of(path) for path in files}
        if sees:
            return Delivered(task.index, digests, folder, {})
        contents = {name: (folder / name).read_bytes() for name in digests}
        return Delivered(task.index, digests, task.scratch / folder.name, contents)
    finally:
        if not sees:
            shutil.rmtree(folder, ignore_errors=True)


@lru_cache(maxsize=1)
def _loaded(model: str, device: str, dtype: str | None, backend: Any) -> LoadedModel:
    """The model, loaded once in a process."""
    with no_bars_of_libraries():
        return load_any(model, device=device, dtype=dtype, backend=backend)
