"""Results that grow with the sequences, written shard by shard by whoever has measured them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infoflow_lens.foundation.files import owned_by
from infoflow_lens.hooks import Probe
from infoflow_lens.runs.folder import RunFolder


@dataclass(frozen=True)
class Growing:
    """Where the shards of results that grow with the sequences are written.

    Writing a shard once more, such as after a stop, gives the same files.

    Attributes:
        out: folder of the run.
        names: the probes whose results these are.
    """

    out: Path
    names: frozenset[str]

    def path_of(self, name: str) -> Path:
        """The path of a probe's result, without an end."""
        return self.out / name

    def clear(self) -> None:
        """Remove what is there."""
        folder = RunFolder(self.out)
        for name in self.names:
            folder.remove(*folder.names(name))

    def write(self, probes: Mapping[str, Probe[Any]], index: int) -> dict[str, Any]:
        """Write what grows of a shard.

        Args:
            probes: which have measured it, by name.
            index: of the shard.

        Returns:
            By probe, what the result of all must know of it, as plain values.

        Raises:
            InfoFlowError: if it cannot be written, or a probe has no result.
        """
        told = {}
        with owned_by(RunFolder(self.out)):
            for name in sorted(self.names):
                probe = probes[name]
                assert probe.sharded is not None
                told[name] = probe.sharded.save_shard(self.path_of(name), index, probe.result())
        return told


def told_of(part: Mapping[str, Any]) -> dict[str, Any]:
    """What a shard has told, read again; KeyError, TypeError or ValueError for anything else."""
    return {
        "n_sequences": int(part["n_sequences"]),
        "notes": list(part["notes"]),
        "digest": str(part["digest"]),
    }
