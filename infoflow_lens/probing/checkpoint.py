"""Where a long run stands, on disk, so that it can go on."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.state import read_state, write_state
from infoflow_lens.probing.folder import check_same_run


class Checkpoint:
    """One state on disk, tensors and plain values, written whole or not at all.

    Args:
        path: of the file, safetensors.
        of_run: the record of the run that it belongs to, as JSON-compatible values.
        seconds: least time between two writes of :meth:`keep`.
    """

    def __init__(self, path: Path, of_run: Mapping[str, Any], seconds: float = 30.0) -> None:
        self.path = path
        self.of_run = of_run
        self.seconds = seconds
        self._written = time.monotonic()

    def load(self) -> Any:
        """The state, or None if there is none. Nothing that the file names is called.

        Raises:
            InfoFlowError: if the file is spoiled, or belongs to another run.
        """
        if not self.path.is_file():
            return None
        hint = f"expected what this version wrote; delete {self.path.name} to begin again"
        state, of_run = read_state(self.path, "the unfinished run", hint)
        if of_run.pop("name", None) != self.path.name:
            raise InfoFlowError(f"{str(self.path)!r} is another state of a run: {hint}")
        check_same_run(of_run, self.of_run, self.path)
        return state

    def save(self, state: Any) -> None:
        """Write the state now.

        Raises:
            InfoFlowError: if it cannot be written, such as on a full disk.
        """
        write_state(self.path, state, {**self.of_run, "name": self.path.name})
        self._written = time.monotonic()

    def keep(self, state: Callable[[], Any]) -> None:
        """Write the state if the last time is long ago."""
        if time.monotonic() - self._written >= self.seconds:
            self.save(state())

    def remove(self) -> None:
        """The run is finished."""
        self.path.unlink(missing_ok=True)
