"""Weights in files: their shapes, read without taking memory for them."""

from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open


def stored_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors of safetensors files, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
    return shapes
