"""Whether results will fit in memory and on the disk, by their growth in the first batches."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.memory import format_bytes, free_memory
from infoflow_lens.hooks import Probe


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
