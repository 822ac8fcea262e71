"""Results on disk: a safetensors file for tensors, a JSON file for the rest, typed when loaded.

Whatever is saved is a dataclass. The annotations of its fields are the schema of its files: a value
of another type, a missing tensor, or axes of different sizes are refused when the files are read,
and not where somebody uses them later. Reading calls nothing that the files name.
"""

import dataclasses
import json
import math
import os
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from io import BytesIO
from pathlib import Path
from typing import (
    Annotated,
    Any,
    BinaryIO,
    ClassVar,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from safetensors.torch import save_file
from torch import Tensor

from infoflow_lens.foundation.documents import NUMBERS, RESULT, header_of_tensors
from infoflow_lens.foundation.errors import InfoFlowError, explain_error
from infoflow_lens.foundation.files import (
    atomic_path,
    atomic_paths,
    digest_of,
    has_digest,
    name_file_in_errors,
    open_regular,
    read_json,
    read_signed,
    read_tensors,
    sign,
    user_path,
)
from infoflow_lens.foundation.record import fingerprint
from infoflow_lens.foundation.settings import check

_ENTRY = "infoflow-lens"  # of the metadata
_SCHEMA = "infoflow-lens state 3"
# what reading raises where a file is not as it was written
SPOILED = (
    OSError, SafetensorError, ValueError, TypeError, KeyError, AttributeError, IndexError,
    RuntimeError, ArithmeticError,
)  # fmt: skip


def write_state(path: Path, value: Any) -> None:
    """Write nested tensors and plain values to one file, whole or not at all.

    Args:
        path: of the file, safetensors.
        value: tensors, numbers, strings, booleans and None in dicts, lists and tuples.

    Raises:
        InfoFlowError: if the file cannot be written, and for values of other kinds.
    """
    tensors, header = _pack_state(value)
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
        tensors = read_tensors(path)
        with open_regular(path) as file:
            return _unpack_state(tensors, file)
    except SPOILED as error:
        raise InfoFlowError(f"{what} {str(path)!r} cannot be read ({error}): {hint}") from error


def state_to_bytes(value: Any) -> bytes:
    """Turn nested tensors and plain values into bytes, for another process."""
    tensors, header = _pack_state(value)
    return bytes(to_bytes(tensors, metadata=header))


def state_from_bytes(data: bytes) -> Any:
    """Read the value that :func:`state_to_bytes` has packed.

    Raises:
        InfoFlowError: for other bytes.
    """
    try:
        return _unpack_state(from_bytes(data), BytesIO(data))
    except SPOILED as error:
        raise InfoFlowError(f"what another process sent is no state ({error})") from error


def _pack_state(value: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a value, and a header with all else."""
    tensors: dict[str, Tensor] = {}
    content = _encode(value, "", tensors, tuples=True)
    _part_storages(tensors)
    # one entry: safetensors writes several in an order that changes
    text = sign(_SCHEMA, {"content": content, "tensors": fingerprint(tensors)})
    return tensors, {_ENTRY: text}


def _unpack_state(tensors: Mapping[str, Tensor], file: BinaryIO) -> Any:
    """Return the value of these tensors and of the header of their file.

    Raises:
        ValueError: for a file that is no state, or has changed.
    """
    # safetensors begins with eight bytes that say how long its header is
    length = int.from_bytes(file.read(8), "little")
    metadata = json.loads(file.read(length)).get("__metadata__", {})
    # a file from elsewhere: nothing of it is believed before its digests fit
    held = json.loads(metadata.get(_ENTRY, "{}"))
    if held.get("schema") != _SCHEMA:
        raise ValueError("it is no state of infoflow-lens of this version")
    if not has_digest(held) or held["tensors"] != fingerprint(tensors):
        raise ValueError("it has changed since it was written")
    return _decode(held["content"], tensors)


def _part_storages(tensors: dict[str, Tensor]) -> None:
    """Copy tensors that lie in others, as a file holds no number under two names."""
    written: set[int] = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if storage.data_ptr() in written or storage.nbytes() > tensor.numel() * tensor.itemsize:
            tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
        written.add(storage.data_ptr())


SavableT = TypeVar("SavableT", bound="Savable")
# the metadata of a field that is computed when its owner is loaded
NOT_SAVED: Any = {"saved": False}


class Savable:
    """A base of dataclasses that can be saved, and loaded again as they were.

    Attributes:
        schema: the name and the version of the files.
        kinds: all that can be saved, by the name of the class.
    """

    schema: ClassVar[str] = "infoflow-lens saved 2"
    kinds: ClassVar[dict[str, type["Savable"]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Savable.kinds[cls.__name__] = cls

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write ``<path>.safetensors`` and ``<path>.json``, each whole or not at all.

        Args:
            path: of both files, without the ends of their names.
            overwrite: whether files that are no saved result may be replaced, too.

        Raises:
            InfoFlowError: if they cannot be written, or other files stand in their places.
        """
        write_parts(path, self.schema, *self.to_parts(), overwrite=overwrite)

    def to_parts(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what is written: values for JSON, and tensors by name."""
        tensors: dict[str, Tensor] = {}
        plain = _encode(self, "", tensors)
        _part_storages(tensors)
        return plain, tensors

    @classmethod
    def load(cls: type[SavableT], path: str | os.PathLike[str]) -> SavableT:
        """Read what :meth:`save` wrote. Nothing that the files name is called.

        Raises:
            InfoFlowError: if there is none, it is of another kind or version, or a file is spoiled.
        """
        with read_parts(path, cls.schema, cls.__name__) as (plain, tensors):
            found = cls.from_parts(plain, tensors)
        return found._locate(path)

    @classmethod
    def from_parts(
        cls: type[SavableT], plain: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> SavableT:
        """Build what :meth:`to_parts` has taken apart.

        Raises:
            InfoFlowError: if it is of another kind.
            ValueError, TypeError, KeyError: if these are not its parts.
        """
        return cls._from_values(_decode(dict(plain), tensors))

    @classmethod
    def _from_values(cls: type[SavableT], values: Mapping[str, Any]) -> SavableT:
        """Build it of its fields and the name of its class, and check it."""
        kind = Savable.kinds.get(str(values.get("kind")))
        if kind is None or not issubclass(kind, cls):
            raise InfoFlowError(
                f"the saved file holds a {kind.__name__ if kind else 'foreign result'}: expected a "
                f"{cls.__name__}"
            )
        found = kind._build(convert_fields(kind, {n: v for n, v in values.items() if n != "kind"}))
        found._check_fields()
        return found

    @classmethod
    def _build(cls: type[SavableT], values: Mapping[str, Any]) -> SavableT:
        """Build it of the fields that are saved."""
        return cls(**values)

    def _check_fields(self) -> None:
        """Refuse what cannot be shown, where it is loaded."""
        if hasattr(self, "to_frame"):
            self.to_frame()

    def _locate(self: SavableT, path: str | os.PathLike[str]) -> SavableT:
        """Return it, knowing from where it was loaded, if it must."""
        return self


def write_parts(
    path: str | os.PathLike[str],
    schema: str,
    plain: Mapping[str, Any],
    tensors: dict[str, Tensor],
    *,
    overwrite: bool = False,
) -> None:
    """Write ``<path>.safetensors`` and ``<path>.json``, each whole or not at all.

    Args:
        path: of both files, without the ends of their names.
        schema: the name and the version of what they hold.
        plain: values for JSON.
        tensors: by name.
        overwrite: whether files that are no saved result may be replaced, too.

    Raises:
        InfoFlowError: if they cannot be written, or other files stand in their places.
    """
    with open_parts([path], schema, overwrite=overwrite) as (write,):
        write(plain, tensors)


# Writes values for JSON, and tensors by name, at one path; returns the digest of the description
Write: TypeAlias = Callable[[Mapping[str, Any], dict[str, Tensor]], str]


@contextmanager
def open_parts(
    paths: Sequence[str | os.PathLike[str]],
    schema: str,
    *,
    n_parts: int = 0,
    overwrite: bool = False,
) -> Iterator[list[Write]]:
    """Yield what writes a result of several parts; what was there stays until all are whole.

    Args:
        paths: of the parts, if they are written, and of the result itself, without ends.
        schema, overwrite: as for :func:`write_parts`.
        n_parts: how many parts the result has; those that an earlier one had more are removed.

    Raises:
        InfoFlowError: as :func:`write_parts`.
    """
    # all files are looked at before the first is written
    for path in reversed(paths):
        check_parts(path, overwrite=overwrite)
    # descriptions come last, so that none names tensors that are not in their place yet
    targets = [file for path in paths for file in reversed(files_of(path))]
    with atomic_paths(targets, _earlier_parts(paths[-1], n_parts)) as places:

        def write(index: int, fields: Mapping[str, Any], tensors: dict[str, Tensor]) -> str:
            """Write the tensors of a part, and its text; return a short digest of the text."""
            # the text names the digest of its tensors, so that files of two parts cannot be mixed
            digest = fingerprint(tensors)
            text = sign(schema, {**fields, "tensors": digest})
            held, described = places[2 * index : 2 * index + 2]
            with name_file_in_errors(targets[2 * index]):
                save_file(tensors, held, metadata=header_of_tensors(schema, digest))
                described.write_bytes(text.encode())
                return digest_of(described)[:16]

        yield [partial(write, index) for index in range(len(paths))]


def part_of(path: str | os.PathLike[str], index: int) -> Path:
    """Return the path of a part of a saved result: in the folder that has the result's name."""
    return user_path(path) / f"{index:06d}"


def _earlier_parts(path: str | os.PathLike[str], n_parts: int) -> list[Path]:
    """Return the files of the result at a path that are of its parts from one on, and still are."""
    description, _ = files_of(path)
    if user_path(path).is_symlink() or not RESULT.recognises(description):
        return []
    digests = read_json(description, "saved result", "").get("digests")
    found = []
    for index, digest in enumerate(digests if isinstance(digests, list) else ()):
        described, held = files_of(part_of(path, index))
        with suppress(OSError):  # of a part that is gone
            if index >= n_parts and digest_of(described)[:16] == digest:
                found += [described, *([held] if NUMBERS.recognises(held) else [])]
    return found


def check_parts(path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Check that :func:`write_parts` may write; arguments and errors as there."""
    if not isinstance(path, (str, os.PathLike)):
        user_path(path)  # refuses what is no path
    name = os.path.basename(os.fspath(path))
    if name in ("", ".", "..", "~") or not name.isprintable():
        raise InfoFlowError(
            f"a result cannot be saved as {os.fspath(path)!r}: expected the beginning of a file's "
            "name, such as 'results/positions'"
        )
    description, numbers = files_of(path)
    NUMBERS.check(numbers, overwrite=overwrite)
    RESULT.check(description, overwrite=overwrite)


def files_of(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Return the files of a saved result: what describes it, and its tensors."""
    place = user_path(path)
    return Path(f"{place}.json"), Path(f"{place}.safetensors")


@contextmanager
def read_parts(
    path: str | os.PathLike[str], schema: str, what: str
) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
    """Read what :func:`write_parts` wrote, for use in the block, whose errors speak of these files.

    Raises:
        InfoFlowError: if there are none, they are of another kind or version, or spoiled.
    """
    text, held = files_of(path)
    if not os.path.lexists(text):
        raise InfoFlowError(f"no {what} at {os.fspath(path)!r}: expected {text.name}")
    plain = read_signed(text, schema, what, describe_remedy(path))
    try:
        found = read_tensors(held)
        if fingerprint(found) != plain.pop("tensors", None):
            raise ValueError(f"it has changed since {text.name} was written")
        yield plain, found
    except SPOILED as error:
        reason = explain_error(error)
        # an error that names the other file already says what to do
        if isinstance(error, InfoFlowError) and str(text) in reason:
            raise
        raise InfoFlowError(
            f"{str(held)!r} cannot be read ({reason}): {describe_remedy(path)}"
        ) from error


def describe_remedy(path: str | os.PathLike[str]) -> str:
    """Return the end of an error about a saved result: what was expected, and what to do."""
    name = Path(path).name
    return (
        f"expected what save() wrote; delete {name}.json and {name}.safetensors to measure it again"
    )


# The types of fields


def convert_fields(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Check values that were read against the fields of a dataclass.

    Args:
        kind: the dataclass.
        values: by the names of its fields; lists stand for tuples, and None for a NaN.

    Returns:
        The values, in the types that the annotations say.

    Raises:
        InfoFlowError: for a field that is missing, unknown or of another type, and for tensors
            whose axes of the same name have different sizes.
    """
    hints = _hints(kind)
    known = {item.name: item for item in _fields_to_save(kind) if item.init}
    odd = sorted(values.keys() - known.keys()) or sorted(known.keys() - values.keys())
    if odd:
        problem = "has no field" if odd[0] not in known else "lacks the field"
        raise InfoFlowError(f"a {kind.__name__} {problem} {odd[0]!r}: expected {', '.join(known)}")
    found = {name: convert(value, hints[name], name) for name, value in values.items()}
    # axes of one name have one size in all fields
    sizes: dict[Any, tuple[int, str]] = {}
    for name, value in found.items():
        for axis, size in _axes(value, hints[name]):
            before = sizes.setdefault(axis, (size, name))
            if before[0] != size:
                raise InfoFlowError(
                    f"{name} of a {kind.__name__} has {size} places on the axis {axis!r}, "
                    f"{before[1]} has {before[0]}: expected as many"
                )
    return found


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind, include_extras=True)


def convert(value: Any, hint: Any, name: str) -> Any:
    """Return a value that was read in the type of an annotation.

    Args:
        value: lists stand for tuples, and None for a NaN.
        hint: the annotation.
        name: what errors call it.

    Raises:
        InfoFlowError: if it is of another one.
    """
    origin, parts = get_origin(hint), get_args(hint)
    # annotations in the order: anything, one of several, checked types, tensors, containers
    if hint is Any or isinstance(hint, TypeVar):
        return value
    if origin in (Union, types.UnionType):
        return _convert_to_first(value, parts, name)
    if origin is Annotated and not _is_plain(parts[0]):
        return convert(value, parts[0], name)
    if hasattr(hint, "dim_str") or hint is Tensor:
        if not isinstance(value, hint):
            raise InfoFlowError(
                f"{name} is {_describe_value(value)}: expected {_describe_hint(hint)}"
            )
        return value
    if origin is tuple and isinstance(value, (list, tuple)):
        # tuple[X, ...] holds any number, tuple[X, Y] two
        several = len(parts) == 2 and parts[1] is Ellipsis
        if not several and len(value) != len(parts):
            raise InfoFlowError(f"{name} has {len(value)} values: expected {len(parts)}")
        each = [parts[0]] * len(value) if several else parts
        return tuple(convert(item, of, name) for item, of in zip(value, each, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {
            convert(key, parts[0], f"a key of {name}"): convert(item, parts[1], f"{name}[{key!r}]")
            for key, item in value.items()
        }
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if isinstance(value, Mapping):
            if issubclass(hint, Savable):
                return hint._from_values(value)
            return hint(**convert_fields(hint, value))
    if hint is float and value is None:  # JSON has no NaN
        return math.nan
    if hint is float and isinstance(value, float):
        return value
    return check(value, hint, name)


def _convert_to_first(value: Any, options: tuple[Any, ...], name: str) -> Any:
    """Return a value in the first type of several that it has."""
    if value is None and type(None) in options:
        return None
    errors = []
    for option in options:
        try:
            return convert(value, option, name)
        except InfoFlowError as error:
            errors.append(error)
    raise errors[0]


def _is_plain(hint: Any) -> bool:
    """Return whether :func:`~infoflow_lens.foundation.settings.check` knows a type."""
    return hint in (int, float, str, bool) or get_origin(hint) is not None


def _axes(value: Any, hint: Any) -> Iterator[tuple[Any, int]]:
    """Return the axes of the tensors of a field, with their sizes; those of layers apart.

    An axis whose name begins with "_" may differ from layer to layer.
    """
    dims = getattr(hint, "dim_str", None)
    if get_origin(hint) in (Union, types.UnionType) and value is not None:
        for option in get_args(hint):
            yield from _axes(value, option)
    elif isinstance(value, Mapping) and get_args(hint):
        for item in value.values():
            yield from _axes(item, get_args(hint)[1])
    elif dims is not None and isinstance(value, Tensor):
        # axes of any number cannot be compared by name
        names = dims.split()
        if not any(name.startswith("*") for name in names):
            yield from zip(names, value.shape, strict=True)
    elif get_origin(hint) is tuple and isinstance(value, tuple) and value:
        inner = get_args(hint)[0]
        if hasattr(inner, "dim_str"):
            yield "layers with tensors", len(value)
            for layer, part in enumerate(value):
                # layers may differ in axes whose name begins with an underscore
                for name, size in _axes(part, inner):
                    yield ((name, layer) if name.startswith("_") else name), size


def _describe_value(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a {type(value).__name__}"


def _describe_hint(hint: Any) -> str:
    kind = getattr(hint, "__name__", str(hint)).split("[")[0].lower()
    return f"{kind} [{', '.join(hint.dim_str.split())}]" if hasattr(hint, "dim_str") else kind


# Values of any depth


def _fields_to_save(of: Any) -> Iterator["dataclasses.Field[Any]"]:
    """Yield the fields of a dataclass that are in files."""
    yield from (item for item in dataclasses.fields(of) if item.metadata.get("saved", True))


# keys of what stands for a value that JSON does not have
_KINDS = {"tensor", "pairs", "float", "tuple"}


def _encode(value: Any, name: str, tensors: dict[str, Tensor], tuples: bool = False) -> Any:
    """Return a value for JSON; its tensors go to `tensors`, under names.

    Names are made of those of fields and keys, and of numbers, so that no two are the same. Without
    `tuples` they become lists, as the annotations of fields tell them apart.
    """
    if isinstance(value, Tensor):
        dense = value if value.layout is torch.strided else value.to_dense()
        tensors[name] = dense.detach().cpu().contiguous()
        return {"tensor": name}
    inside = f"{name}." if name else ""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = {"kind": type(value).__name__} if isinstance(value, Savable) else {}
        return kind | {
            item.name: _encode(getattr(value, item.name), inside + item.name, tensors)
            for item in _fields_to_save(value)
        }
    if isinstance(value, Mapping):
        # a key with a dot, say, could make the name of another tensor: its place stands for it
        names = [k if isinstance(k, str) and k.isidentifier() else i for i, k in enumerate(value)]
        parts = [
            _encode(item, f"{inside}{key}", tensors, tuples)
            for key, item in zip(names, value.values(), strict=True)
        ]
        # a mapping with such a key alone would be read as the value that the key stands for
        if all(isinstance(key, str) for key in value) and not value.keys() <= _KINDS:
            return dict(zip(value, parts, strict=True))
        return {"pairs": [list(pair) for pair in zip(value, parts, strict=True)]}
    if isinstance(value, (list, tuple)):
        parts = [
            _encode(item, f"{inside}{place}", tensors, tuples) for place, item in enumerate(value)
        ]
        return {"tuple": parts} if tuples and isinstance(value, tuple) else parts
    # JSON has no infinity, and None is another answer than NaN
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(float(value))}
    return value


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that :func:`_encode` was given."""
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"tensor"}:
        return tensors[value["tensor"]]
    if set(value) == {"float"}:
        return float(value["float"])
    if set(value) == {"tuple"}:
        return tuple(_decode(value["tuple"], tensors))
    if set(value) == {"pairs"}:
        return {
            # JSON gives tuples back as lists, which cannot be keys
            tuple(key) if isinstance(key, list) else key: _decode(item, tensors)
            for key, item in value["pairs"]
        }
    return {name: _decode(item, tensors) for name, item in value.items()}
