"""What probes return: named tensors and the run's record, saved as safetensors and JSON."""

import hashlib
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from infoflow_lens.foundation.display import Displayed, panel
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import (
    atomic_path,
    read_signed,
    writable_folder,
    write_signed,
)
from infoflow_lens.foundation.record import RunRecord, fingerprint

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


_SCHEMA = "infoflow-lens result 1"

ResultT = TypeVar("ResultT", bound="Result")


@dataclass(frozen=True, eq=False, kw_only=True)
class Result(Displayed, ABC):
    """Measured numbers, with what is needed to reproduce them.

    Attributes:
        record: config, seed, versions, model fingerprint, weight processing.
        notes: what a reader must know about these numbers, in words.
    """

    kinds: ClassVar[dict[str, type["Result"]]] = {}
    small: ClassVar[bool] = False  # whether its frame has few rows, whatever was measured

    record: RunRecord = field(repr=False)
    notes: tuple[str, ...] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Result.kinds[cls.__name__] = cls

    @abstractmethod
    def to_frame(self) -> "pd.DataFrame":
        """The measurements, one row each."""

    @abstractmethod
    def plot(self) -> "go.Figure":
        """The measurements as an interactive figure."""

    def _repr_html_(self) -> str:
        head = self.to_frame() if self.small else None
        facts = {name: value for name, value in self._facts().items() if name != "notes"}
        more = "more: .to_frame(), .plot(), .save(path)"
        return panel(type(self).__name__, facts, self.notes, more, head)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``<path>.safetensors`` and ``<path>.json``, each whole or not at all.

        Args:
            path: of both files, without the ends of their names.

        Raises:
            InfoFlowError: if they cannot be written.
        """
        writable_folder(Path(path).parent)
        tensors: dict[str, Tensor] = {}
        plain: dict[str, Any] = {"kind": type(self).__name__, "record": self.record.to_dict()}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                tensors[item.name] = value.contiguous()
            elif isinstance(value, tuple) and value and isinstance(value[0], Tensor):
                for index, tensor in enumerate(value):
                    tensors[f"{item.name}.{index}"] = tensor.contiguous()
            elif item.name != "record":
                plain[item.name] = value
        with atomic_path(f"{os.fspath(path)}.safetensors") as temporary:
            save_file(tensors, temporary)
        plain["tensors"] = fingerprint(tensors)
        write_signed(f"{os.fspath(path)}.json", _SCHEMA, plain)

    @classmethod
    def load(cls: type[ResultT], path: str | os.PathLike[str]) -> ResultT:
        """The result that :meth:`save` wrote. Nothing that the files name is called.

        Raises:
            InfoFlowError: if there is none, it is of another kind or version, or a file is spoiled.
        """
        plain, hint = _described(path), _hint(path)
        tensors = Path(f"{os.fspath(path)}.safetensors")
        kind = Result.kinds.get(str(plain.pop("kind", "")))
        if kind is None or not issubclass(kind, cls):
            raise InfoFlowError(
                f"{tensors.stem}.json holds a {kind.__name__ if kind else 'foreign file'}: "
                f"expected a {cls.__name__}"
            )
        try:
            found = load_file(tensors)
            if fingerprint(found) != plain.pop("tensors", None):
                raise ValueError(f"it has changed since {tensors.stem}.json was written")
            grouped: dict[str, Any] = {}
            for name, tensor in found.items():
                stem, _, index = name.partition(".")
                if index:
                    grouped.setdefault(stem, {})[int(index)] = tensor
                else:
                    grouped[stem] = tensor
            for name, value in grouped.items():
                if isinstance(value, dict):
                    grouped[name] = tuple(value[index] for index in sorted(value))
            record = RunRecord.from_dict(plain.pop("record", None))
            values = {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}
            result = kind(record=record, **values, **grouped)
        except (OSError, SafetensorError, ValueError, TypeError, RuntimeError) as error:
            raise InfoFlowError(f"{str(tensors)!r} cannot be read ({error}): {hint}") from error
        return result._located(path)

    def _located(self: ResultT, path: str | os.PathLike[str]) -> ResultT:
        """The result, knowing from where it was loaded, if it must."""
        return self


def digest_of_result(path: str | os.PathLike[str]) -> str:
    """A digest of a saved result: that of its json file, which holds one of the tensors.

    Raises:
        InfoFlowError: if the file cannot be read.
    """
    described = Path(f"{os.fspath(path)}.json")
    try:
        return hashlib.sha256(described.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise InfoFlowError(
            f"{str(described)!r} cannot be read ({error.strerror}): {_hint(path)}"
        ) from error


def _described(path: str | os.PathLike[str]) -> dict[str, Any]:
    described = Path(f"{os.fspath(path)}.json")
    if not described.is_file():
        raise InfoFlowError(f"no result at {os.fspath(path)!r}: expected {described.name}")
    return read_signed(described, _SCHEMA, "result", _hint(path))


def _hint(path: str | os.PathLike[str]) -> str:
    name = Path(path).name
    return (
        f"expected what save() wrote; delete {name}.json and {name}.safetensors to measure it again"
    )
