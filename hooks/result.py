"""What probes return: named tensors and the run's record, saved as safetensors and JSON."""

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, cast, get_args, get_type_hints

from torch import Tensor

from infoflow_lens.foundation.display import Displayed, brief, panel
from infoflow_lens.foundation.errors import InfoFlowError, refuse_names
from infoflow_lens.foundation.files import digest_of
from infoflow_lens.foundation.lazy import mpl, pd
from infoflow_lens.foundation.naming import nearest
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.foundation.saving import Savable, describe_remedy, files_of
from infoflow_lens.hooks.arrays import LabelledArray, frame_of

ResultT = TypeVar("ResultT", bound="Result")


@refuse_names(
    stored="to_parts", of_stored="from_parts",
    push_to_hub="save(), and upload_folder of huggingface_hub",
    from_hub="load(), behind snapshot_download of huggingface_hub",
)  # fmt: skip
@dataclass(frozen=True, eq=False, kw_only=True)
class Result(Displayed, Savable):
    """Measured numbers, with what is needed to reproduce them.

    Tensors, and tuples with one for each layer, have names on their axes: those of their
    annotations, ``tuple[Float[Tensor, "sample _head query"], ...]``.

    Attributes:
        record: config, seed, versions, model fingerprint, weight processing.
        notes: what a reader must know about these numbers, in words.
    """

    schema: ClassVar[str] = "infoflow-lens result 2"
    small: ClassVar[bool] = False  # whether its frame has few rows, whatever was measured
    makes_small_table: ClassVar[bool] = False  # the same, of a result that does not show it

    record: RunRecord = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def arrays(self) -> Mapping[str, LabelledArray]:
        """The measured arrays with names on their axes; empty ones are left out."""
        found, kind = {}, cast(Any, type(self))
        for name, dims in _axes_of(kind).items():
            values = getattr(self, name)
            if isinstance(values, Tensor):
                found[name] = LabelledArray(name, values, dims, self._coords())
            elif values:
                found[name] = LabelledArray(name, values, ("layer", *dims), self._coords())
        return found

    def _coords(self) -> Mapping[str, Sequence[Any]]:
        """Return the names of places on the axes, where they are not 0, 1 and so on."""
        given = {dim: getattr(self, name, None) for dim, name in _COORDINATES.items()}
        return {dim: places for dim, places in given.items() if isinstance(places, tuple)}

    def array(self, name: str | None = None, **where: Any) -> LabelledArray:
        """Return one of the arrays, with names on its axes, ``.to_frame()`` and ``.plot()``.

        Args:
            name: default, the first.
            where: places on its axes, such as ``layer=0``, at which to take it.

        Raises:
            InfoFlowError: if there is no such array or place.
        """
        name = next(iter(self.arrays)) if name is None else name
        if name not in self.arrays:
            raise InfoFlowError(f"there is no array {name!r}{nearest(name, list(self.arrays))}")
        return self.arrays[name].select(**where)

    def to_frame(self) -> "pd.DataFrame":
        """Return a table of all arrays: a row for each number, with its places on the axes."""
        # the first has all axes, on which the others stand
        return frame_of(sorted(self.arrays.values(), key=lambda array: -len(array.dims)))

    def sentences(self) -> list[str]:
        """Say what was found, in sentences; none of a class that has nothing to say."""
        return []

    def plot(self, *args: Any, **where: Any) -> "mpl.Figure":
        """Heat maps or bars of an array; the arguments are those of :meth:`array`."""
        array = self.array(*args, **where)
        title = str(self.record.config.get("probe", type(self).__name__))
        return array.plot(f"{title}: {array.name}")

    def _repr_html_(self) -> str:
        head = self.to_frame() if self.small else None
        facts = {name: value for name, value in self._facts().items() if name != "notes"}
        more = "more: .to_frame(), .plot(), .save(path)"
        said = self.sentences() if self.small else []
        return panel(type(self).__name__, facts, (*said, *self.notes), more, head)

    def _check_fields(self) -> None:
        self._check_places()
        if self.small or self.makes_small_table:
            super()._check_fields()

    def _check_places(self) -> None:
        """Check that each axis has as many places as names.

        Raises:
            InfoFlowError: naming the array.
        """
        for name, array in self.arrays.items():
            for dim in array.dims:
                names = getattr(self, _COORDINATES.get(dim, _PLACES.get(dim, "")), None)
                if dim in _OF_SEQUENCES and not array.size_of(dim):
                    raise InfoFlowError(f"{name} is of no sequence: expected at least one")
                if isinstance(names, tuple) and array.size_of(dim) != len(names):
                    raise InfoFlowError(
                        f"{name} has {array.size_of(dim)} places on the axis {dim!r}: expected "
                        f"{len(names)}, one for each of {brief(names)}"
                    )


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelledResult(Result):
    """The arrays that a probe of one's own computes.

    Attributes:
        values: by name, a tensor, or a tuple of tensors, one for each layer.
        axes: by name, the names of its axes.
    """

    values: Mapping[str, Tensor | tuple[Tensor, ...]]
    axes: Mapping[str, Sequence[str]]

    def __getitem__(self, name: str) -> Tensor | tuple[Tensor, ...]:
        """Return the values of an array."""
        return self.array(name).values

    @property
    def arrays(self) -> Mapping[str, LabelledArray]:
        """The arrays with names on their axes."""
        return {
            name: LabelledArray(name, values, tuple(self.axes[name]))
            for name, values in self.values.items()
        }


def label_arrays(
    name: str,
    found: Any,
    dims: Sequence[str] | Mapping[str, Sequence[str]],
    record: RunRecord,
    notes: tuple[str, ...],
) -> LabelledResult:
    """Make the result that a probe's `compute` means.

    Args:
        name: of the probe, for errors.
        found: a tensor, a list of tensors with one for each layer, or a dict of such by name.
        dims: names of the axes, of all arrays or by their names.
        record, notes: of the run.

    Raises:
        InfoFlowError: if it is something else, or its axes have other names.
    """
    several = found if isinstance(found, Mapping) else {"value": found}
    values: dict[str, Tensor | tuple[Tensor, ...]] = {}
    axes: dict[str, tuple[str, ...]] = {}
    # all that a probe may return: one array, one for each layer, or several by name
    for key, array in several.items():
        by_layer = isinstance(array, (list, tuple))
        parts = tuple(array) if isinstance(array, (list, tuple)) else (array,)
        right = isinstance(key, str) and key.isidentifier()
        if not right or not parts or not all(isinstance(part, Tensor) for part in parts):
            what = f"{key!r} of it is {brief(array)}" if found is several else brief(found)
            raise InfoFlowError(
                f"{name}.compute returned {type(found).__name__}: {what}. Expected a result, a "
                "tensor, a list of tensors with one for each layer, or a dict of these by name"
            )
        parts = tuple(part.detach().cpu() for part in parts)
        values[key] = parts if by_layer else parts[0]
        given = dims.get(key, ()) if isinstance(dims, Mapping) else dims
        n_axes = parts[0].ndim + by_layer
        default = (["layer"] if by_layer else []) + [f"axis_{i}" for i in range(by_layer, n_axes)]
        axes[key] = tuple(given) if len(given) else tuple(default)
    if not values:
        raise InfoFlowError(f"{name}.compute returned an empty dict: expected arrays by name")
    result = LabelledResult(values=values, axes=axes, record=record, notes=notes)
    # reading them checks names against axes
    try:
        result.arrays  # noqa: B018
    except InfoFlowError as error:
        raise InfoFlowError(f"{name}.compute and {name}.dims do not fit: {error}") from error
    return result


_COORDINATES = {
    "layer": "layers",
    "rank": "ranks",
    "control": "controls",
    "query_part": "query_parts",
    "key_part": "key_parts",
}


# Axes whose places have names, too, and that tables show by number.
_PLACES = {
    "edit": "edits",
    "ideal": "ideals",
    "method": "methods",
    "budget": "budgets",
    "assignment": "assignments",
    "share": "shares",
    "kept": "kept",
    "k": "ks",
}


_OF_SEQUENCES = ("sample", "batch", "sequence")


@functools.cache
def _axes_of(kind: Any) -> dict[str, tuple[str, ...]]:
    """Return the names of axes in the annotations of a result, by field; without that of layers."""
    found = {}
    for name, hint in get_type_hints(kind).items():
        for part in (hint, *get_args(hint)):
            words = getattr(part, "dim_str", None)
            if words is not None:
                found[name] = tuple(word.lstrip("_") for word in words.split())
    return found


def digest_of_result(path: str | os.PathLike[str]) -> str:
    """Return a digest of a saved result: that of its json file, which holds one of the tensors.

    Raises:
        InfoFlowError: if the file cannot be read.
    """
    described, _ = files_of(path)
    try:
        return digest_of(described)[:16]
    except OSError as error:
        raise InfoFlowError(
            f"{str(described)!r} cannot be read ({error.strerror}): {describe_remedy(path)}"
        ) from error
