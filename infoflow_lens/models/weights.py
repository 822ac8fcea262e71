"""Weights in files: their shapes, read without taking memory for them."""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open

from infoflow_lens.foundation.files import check_regular


def _load_shapes(path: Path) -> dict[str, torch.Tensor]:
    """Load the tensors of a bin file without their numbers."""
    try:
        return torch.load(path, weights_only=True, mmap=True, map_location="meta")
    except RuntimeError:  # a file from before PyTorch 1.6 cannot be mapped
        return torch.load(path, weights_only=True, map_location="meta")


def read_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Read the shapes of all tensors of safetensors and bin files, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        check_regular(path)  # whoever opens a pipe waits for its other end
        if path.suffix == ".bin":  # tensors alone, and their numbers stay on the disk
            held = _load_shapes(path)
            shapes |= {name: tuple(t.shape) for name, t in held.items() if hasattr(t, "shape")}
            continue
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
    return shapes
