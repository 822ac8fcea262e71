"""What probes return: named tensors and the run's record, saved as safetensors and JSON."""

import json
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from safetensors.torch import load_file, save_file
from torch import Tensor

from infoflow_lens.foundation.display import Displayed, panel
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import atomic_path, writable_folder, write_json
from infoflow_lens.foundation.record import RunRecord

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


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

        Raises:
            InfoFlowError: if the folder cannot be made or written.
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
        write_json(f"{os.fspath(path)}.json", plain)

    @classmethod
    def load(cls: type[ResultT], path: str | os.PathLike[str]) -> ResultT:
        """The result that :meth:`save` wrote.

        Raises:
            InfoFlowError: if there is none, or it is of another kind.
        """
        described = Path(f"{os.fspath(path)}.json")
        if not described.is_file():
            raise InfoFlowError(f"no result at {os.fspath(path)!r}: expected {described.name}")
        try:
            plain = json.loads(described.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise InfoFlowError(f"{described} is no JSON ({error}): expected a result") from error
        kind = Result.kinds.get(plain.pop("kind", ""))
        if kind is None or not issubclass(kind, cls):
            raise InfoFlowError(
                f"{described.name} holds a {kind.__name__ if kind else 'foreign file'}: "
                f"expected a {cls.__name__}"
            )
        grouped: dict[str, Any] = {}
        for name, tensor in load_file(f"{os.fspath(path)}.safetensors").items():
            stem, _, index = name.partition(".")
            if index:
                grouped.setdefault(stem, {})[int(index)] = tensor
            else:
                grouped[stem] = tensor
        for name, value in grouped.items():
            if isinstance(value, dict):
                grouped[name] = tuple(value[index] for index in sorted(value))
        record = RunRecord(**plain.pop("record"))
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}
        return kind(record=record, **values, **grouped)
