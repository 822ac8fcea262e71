"""State on disk: nested tensors and plain values in one safetensors file.

The tensors are safetensors', the rest is JSON in its header, with the name and the version of this
format, and a digest of all of it. Reading calls nothing that the file names.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from safetensors.torch import save_file
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import atomic_path, open_regular, read_tensors
from infoflow_lens.foundation.record import fingerprint

_ENTRY = "infoflow-lens"  # of the metadata
_SCHEMA = "infoflow-lens state"
_VERSION = 2
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class _UnreadableError(Exception):
    """The content of a file is no state of this version."""


def write_state(path: Path, value: Any) -> None:
    """Write nested tensors and plain values to one file, whole or not at all.

    Args:
        path: of the file, safetensors.
        value: tensors, numbers, strings, booleans and None in dicts, lists and tuples.

    Raises:
        InfoFlowError: if the file cannot be written.
        TypeError: for values of other kinds, which are mistakes of the caller.
    """
    tensors, header = _encode(value)
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata=header)


def read_state(path: Path, what: str, hint: str) -> Any:
    """Read what :func:`write_state` wrote: the values, with tensors on the CPU.

    Args:
        path: of the file.
        what: what errors call it, such as "the unfinished run".
        hint: the end of errors: what to do.

    Raises:
        InfoFlowError: for a file that is spoiled, of another format or of another version of it.
    """
    try:
        return _decode(read_tensors(path), _header_of(path))
    except (OSError, SafetensorError, _UnreadableError, RuntimeError, ValueError) as error:
        raise InfoFlowError(f"{what} {str(path)!r} cannot be read ({error}): {hint}") from error


def _header_of(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file, which lie before its tensors."""
    with open_regular(path) as file:
        # safetensors begins with eight bytes that say how long its header is
        length = int.from_bytes(file.read(8), "little")
        found = json.loads(file.read(length)).get("__metadata__", {})
        return found if isinstance(found, dict) else {}


def state_to_bytes(value: Any) -> bytes:
    """Nested tensors and plain values as bytes, for another process."""
    tensors, header = _encode(value)
    return bytes(to_bytes(tensors, metadata=header))


def state_from_bytes(data: bytes) -> Any:
    """Read the value that :func:`state_to_bytes` has packed.

    Raises:
        InfoFlowError: for other bytes.
    """
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length]).get("__metadata__", {})
        return _decode(from_bytes(data), header)
    except (SafetensorError, _UnreadableError, ValueError, AttributeError) as error:
        raise InfoFlowError(f"what another process sent is no state ({error})") from error


def _encode(value: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    tensors: list[Tensor] = []
    places: dict[tuple[Any, ...], int] = {}
    stored: set[int] = set()
    alive: list[Tensor] = []  # so that no other tensor comes to lie at the same place

    def plain(part: Any) -> Any:
        if isinstance(part, Tensor):
            part = part.detach().cpu()
            key = (part.data_ptr(), tuple(part.shape), part.stride(), part.dtype)
            if not part.numel() or key not in places:  # the same tensor is written once
                alive.append(part)
                # safetensors holds no storage twice, and no strides
                storage = part.untyped_storage().data_ptr()
                if storage in stored or not part.is_contiguous():
                    part = part.clone(memory_format=torch.contiguous_format)
                stored.add(storage)
                places[key] = len(tensors)
                tensors.append(part)
            return {"tensor": places[key]}
        if isinstance(part, Mapping):
            return {"dict": [[plain(key), plain(item)] for key, item in part.items()]}
        if isinstance(part, tuple):
            return {"tuple": [plain(item) for item in part]}
        if isinstance(part, list):
            return [plain(item) for item in part]
        # JSON has no infinity, and no NaN
        if isinstance(part, float) and not math.isfinite(part):
            return {"float": "nan" if part != part else "inf" if part > 0 else "-inf"}
        if part is None or isinstance(part, (str, bool, int, float)):
            return part
        raise TypeError(f"a state holds a {type(part).__name__}: expected tensors and plain values")

    content = json.dumps(plain(value), allow_nan=False)
    named = {str(index): tensor for index, tensor in enumerate(tensors)}
    header = {"schema": _SCHEMA, "version": str(_VERSION), "content": content}
    header["digest"] = _digest(named, content)
    # one entry: safetensors writes several in an order that changes
    return named, {_ENTRY: json.dumps(header)}


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    return hashlib.sha256((text + fingerprint(tensors)).encode()).hexdigest()[:16]


def _decode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Any:
    # a file from elsewhere: nothing of it is believed before its digest fits
    try:
        header: Any = json.loads(metadata.get(_ENTRY, "{}"))
    except (TypeError, ValueError, RecursionError) as error:
        raise _UnreadableError(f"its header is spoiled: {error}") from error
    if not isinstance(header, dict) or header.get("schema") != _SCHEMA:
        raise _UnreadableError("it is no state of infoflow-lens")
    if header.get("version") != str(_VERSION):
        raise _UnreadableError(
            f"its format has version {header.get('version')}, this is {_VERSION}"
        )
    content = str(header.get("content", ""))
    if header.get("digest") != _digest(tensors, content):
        raise _UnreadableError("it has changed since it was written")

    def value(part: Any) -> Any:
        if isinstance(part, list):
            return [value(item) for item in part]
        if not isinstance(part, dict):
            return part
        # each object has one key, which says what it is
        ((kind, inner),) = part.items()
        if kind == "tensor":
            return tensors[str(inner)]
        if kind == "float":
            return _FLOATS[inner]
        if kind == "tuple":
            return tuple(value(item) for item in inner)
        if kind == "dict":
            return {value(key): value(item) for key, item in inner}
        raise _UnreadableError(f"it holds a {kind!r}")

    try:
        return value(json.loads(content))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise _UnreadableError(f"{type(error).__name__}: {error}") from error
