"""The unfinished state of a long run on disk, from which it can go on."""

import time
from collections.abc import Callable
from typing import Any

from infoflow_lens.foundation.saving import read_state, write_state
from infoflow_lens.runs.folder import RunFolder


class Checkpoint:
    """One state on disk, tensors and plain values, written whole or not at all.

    Args:
        folder: of the run.
        name: of the file, safetensors.
        seconds: least time between two writes of :meth:`keep`.
    """

    def __init__(self, folder: RunFolder, name: str, seconds: float = 30.0) -> None:
        self.folder, self.name = folder, name
        self.path = folder.path / name
        self.seconds = seconds
        self._written = time.monotonic()
        self._latest: Any = None

    def load(self) -> Any:
        """Read the state; None if there is none. Reading runs no code from the file.

        Raises:
            InfoFlowError: if the file is spoiled, or belongs to another run.
        """
        if not self.folder.holds(self.name):
            return None
        hint = f"expected what this version wrote; delete {self.path.name} to begin again"
        return read_state(self.path, "the unfinished run", hint)

    def save(self, state: Any) -> None:
        """Write the state now.

        Raises:
            InfoFlowError: if it cannot be written, such as on a full disk.
        """
        write_state(self.path, state)
        self._written = time.monotonic()

    def keep(self, state: Callable[[], Any], now: bool = False) -> bool:
        """Write the state if the last write is old or `now` is set; return whether it was written.

        Args:
            state: makes the state; it is called only for a write.
            now: write in any case.

        Raises:
            InfoFlowError: as for :meth:`save`.
        """
        if now or time.monotonic() - self._written >= self.seconds:
            self.save(state())
            return True
        return False

    def take(self, state: Any) -> None:
        """Remember a state that nobody changes, and write it if the last write is old."""
        self._latest = None if self.keep(lambda: state) else state

    def flush(self) -> None:
        """Write the state that was last taken, where that is not done, as when a run is stopped."""
        if self._latest is not None:
            self.save(self._latest)

    def remove(self) -> None:
        """Remove the file of a finished run."""
        self.folder.remove(self.name)
