"""Where a long run stands, on disk, so that it can go on."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import atomic_path


class Checkpoint:
    """One state on disk, tensors and plain values, written whole or not at all.

    Args:
        path: of the file.
        seconds: least time between two writes of :meth:`keep`.
    """

    def __init__(self, path: Path, seconds: float = 30.0) -> None:
        self.path = path
        self.seconds = seconds
        self._written = time.monotonic()

    def load(self) -> Any:
        """The state, or None if there is none. Nothing that the file names is called.

        Raises:
            InfoFlowError: if the file is broken, or holds more than tensors and plain values.
        """
        if not self.path.is_file():
            return None
        try:
            return torch.load(self.path, weights_only=True, map_location="cpu")
        except Exception as error:
            raise InfoFlowError(
                f"the unfinished run in {str(self.path.parent)!r} cannot be read ({error}): "
                f"expected what this version wrote; delete {self.path.name} to begin again"
            ) from error

    def save(self, state: Any) -> None:
        """Write the state now."""
        with atomic_path(self.path) as temporary:
            torch.save(state, temporary)
        self._written = time.monotonic()

    def keep(self, state: Callable[[], Any]) -> None:
        """Write the state if the last time is long ago."""
        if time.monotonic() - self._written >= self.seconds:
            self.save(state())

    def remove(self) -> None:
        """The run is finished."""
        self.path.unlink(missing_ok=True)
