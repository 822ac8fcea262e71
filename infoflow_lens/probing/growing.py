"""Results that grow with the sequences, written shard by shard by whoever has measured them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infoflow_lens.foundation.files import no_links, writing_in
from infoflow_lens.hooks import Probe


@dataclass(frozen=True)
class Growing:
    """Where the shards of results that grow with the sequences are written.

    Writing a shard once more, such as after a stop, gives the same files.

    Attributes:
        out: folder of the run.
        names: the probes whose results these are.
        of_run: the record of the run, as JSON-compatible values.
    """

    out: Path
    names: frozenset[str]
    of_run: Mapping[str, Any]

    def path_of(self, name: str) -> Path:
        """The path of a probe's result, without an end."""
        return self.out / name

    def clear(self) -> None:
        """Remove what is there."""
        for name in self.names:
            no_links(self.out, self.path_of(name))
            for ending in ("json", "safetensors"):
                for path in self.path_of(name).glob(f"{'[0-9]' * 6}.{ending}"):
                    path.unlink()

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
        with writing_in(self.out):
            for name in sorted(self.names):
                probe = probes[name]
                assert probe.sharded is not None
                told[name] = probe.sharded.save_shard(
                    self.path_of(name), index, probe.result(), self.of_run
                )
        return told


def told_of(part: Mapping[str, Any]) -> dict[str, Any]:
    """What a shard has told, read again; KeyError, TypeError or ValueError for anything else."""
    return {
        "n_sequences": int(part["n_sequences"]),
        "notes": list(part["notes"]),
        "digest": str(part["digest"]),
    }
