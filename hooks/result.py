"""What probes return: named tensors and the run's record, saved as safetensors and JSON."""

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar, cast, get_args, get_type_hints

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from infoflow_lens.foundation.display import Displayed, brief, panel, plain_label
from infoflow_lens.foundation.errors import InfoFlowError, refuse_names
from infoflow_lens.foundation.files import digest_of
from infoflow_lens.foundation.lazy import mpl, pd
from infoflow_lens.foundation.naming import nearest
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.foundation.saving import Savable, describe_remedy, files_of

_COLUMNS = 4  # of panels
_TICKS = 40  # at most, that have names
OF_SEQUENCES = ("sample", "batch", "sequence")  # axes with a place for each sequence


@refuse_names(filled="to_tensor", of_layer="take_layer")
@dataclass(frozen=True, eq=False)
class LabelledArray:
    """A tensor, or a tensor for each layer, with names on the axes.

    Attributes:
        name: what it is.
        values: a tensor; or a tuple of tensors, one for each layer.
        dims: the names of all axes; "layer" is the first where there is a tensor for each.
        coords: what stands at the places of an axis, by its name; default, 0 and so on.
    """

    name: str
    values: Tensor | tuple[Tensor, ...]
    dims: tuple[str, ...]
    coords: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        by_layer = isinstance(self.values, tuple)
        found = {part.ndim for part in self.values} if by_layer else {self.values.ndim}  # type: ignore[union-attr]
        if found != {len(self.dims) - by_layer} or (by_layer and self.dims[0] != "layer"):
            shapes = [list(part.shape) for part in self._parts()]
            raise InfoFlowError(
                f"{self.name} has axes {', '.join(self.dims) or 'without names'}, and its "
                f"{'tensors, one a layer, have' if by_layer else 'tensor has'} shape {shapes[0]}: "
                f"expected a name for each axis{', layer first' if by_layer else ''}"
            )

    def _parts(self) -> tuple[Tensor, ...]:
        return self.values if isinstance(self.values, tuple) else (self.values,)

    def places(self, dim: str) -> Sequence[Any]:
        """Return the names of the places of an axis, or their numbers."""
        return self.coords[dim] if dim in self.coords else range(self.size_of(dim))

    def size_of(self, dim: str) -> int:
        """Return how many places an axis has; the most, where layers differ."""
        axis = self.dims.index(dim)
        if not isinstance(self.values, tuple):
            return self.values.shape[axis]
        if axis == 0:
            return len(self.values)
        return max(part.shape[axis - 1] for part in self.values)

    def select(self, **where: Any) -> "LabelledArray":
        """Return the array at one place of some axes, which it then no longer has.

        Args:
            where: places by the names of axes, such as ``layer=0, rank=2``.

        Raises:
            InfoFlowError: for an axis or a place that it does not have.
        """
        found = self
        for dim, place in where.items():
            places = list(found.places(dim)) if dim in found.dims else []
            if place not in places:
                raise InfoFlowError(
                    f"{self.name} has no {dim} {place!r}: expected one of "
                    f"{', '.join(map(str, places[:20])) or ', '.join(found.dims)}"
                )
            index, axis = places.index(place), found.dims.index(dim)
            left = tuple(name for name in found.dims if name != dim)
            values: Any = found.values
            # layers that differ in shape stand in a tuple, whose place is the layer
            if not isinstance(values, tuple):
                values = values.select(axis, index)
            elif axis == 0:
                values = values[index]
            else:
                values = tuple(part.select(axis - 1, index) for part in values)
            found = replace(found, values=values, dims=left)
        return found

    def take_layer(self, layer: int | None) -> tuple[Tensor, tuple[str, ...]]:
        """Return the tensor of a layer, by its number, and its axes; the whole for None."""
        if layer is None or "layer" not in self.dims:
            assert isinstance(self.values, Tensor)
            return self.values, self.dims
        return self.values[layer], self.dims[1:]

    def to_tensor(self) -> Tensor:
        """Return one tensor, NaN where layers have fewer heads than others."""
        if isinstance(self.values, Tensor):
            return self.values
        shape = [max(sizes) for sizes in zip(*(part.shape for part in self.values), strict=True)]
        whole = torch.full((len(self.values), *shape), torch.nan)
        for layer, part in zip(whole, self.values, strict=True):
            layer[tuple(slice(size) for size in part.shape)] = part
        return whole

    def to_frame(self) -> "pd.DataFrame":
        """Return a table with one row for each number."""
        return frame_of([self])

    def plot(self, title: str = "") -> "mpl.Figure":
        """Draw bars over one axis, a heat map over two, a panel for each place of a third.

        Of further axes the first place is shown.

        Raises:
            InfoFlowError: where there are no numbers, as of a layer without attention.
        """
        array = self
        while len(array.dims) > 3:
            array = array.select(**{array.dims[0]: array.places(array.dims[0])[0]})
        values = array.to_tensor().detach().float().cpu().numpy()
        if not values.size:
            raise InfoFlowError(
                f"{self.name} has nothing to draw here: expected a layer with heads, as one "
                "without attention has none"
            )
        if values.ndim < 3:
            return _panels([(title or self.name, values)], array.dims, array, "")
        facets = [(f"{array.dims[0]} {at}", part) for at, part in zip(
            array.places(array.dims[0]), values, strict=True
        )]  # fmt: skip
        return _panels(facets, array.dims[1:], array, title or self.name)


def note_layers_without_heads(layers: Sequence[Shaped[Tensor, "sample _head *_"]]) -> list[str]:
    """Say which layers have no attention, and so no heads; nothing where all have it."""
    without = [str(number) for number, layer in enumerate(layers) if not layer.shape[1]]
    names = f"layer{'s' * (len(without) > 1)} {', '.join(without)}"
    return [f"{names}: no attention, so no heads"] if without else []


def frame_of(columns: Sequence[LabelledArray], rows: LabelledArray | None = None) -> "pd.DataFrame":
    """Return a table with a column for each axis and for each array.

    Args:
        columns: the first has all axes; those with fewer are repeated. If there are others, each
            has rows of its own.
        rows: bool, which numbers of the first have a row; default, all.
    """
    main = columns[0]
    if any(not set(column.dims) <= set(main.dims) for column in columns):
        return pd.concat([column.to_frame() for column in columns], ignore_index=True)
    layers = range(len(main.values)) if isinstance(main.values, tuple) else (None,)
    frames = [pd.DataFrame(dict(_columns(columns, rows, layer))) for layer in layers]
    return pd.concat(frames, ignore_index=True) if len(frames) > 1 else frames[0]


def _columns(
    columns: Sequence[LabelledArray], rows: LabelledArray | None, layer: int | None
) -> Iterator[tuple[str, Any]]:
    main = columns[0]
    values, dims = main.take_layer(layer)
    # all places of the main column, or those that the mask of rows has
    kept = torch.ones_like(values, dtype=torch.bool)
    if rows is not None:
        kept &= _align(rows, layer, dims)
    index = torch.atleast_1d(kept).nonzero(as_tuple=True)  # a number of a layer has no axis
    if layer is not None:
        yield "layer", np.full(len(index[0]), main.places("layer")[layer])
    for axis, dim in zip(index, dims, strict=bool(dims)):
        yield dim, np.asarray(main.places(dim))[axis.cpu().numpy()]
    # other columns may lack an axis, and stand for all its places
    for column in columns:
        found = _align(column, layer, dims).expand_as(values)
        found = torch.atleast_1d(found)[index].detach().cpu()
        yield column.name, (found.float() if found.dtype == torch.bfloat16 else found).numpy()


def _align(array: LabelledArray, layer: int | None, dims: Sequence[str]) -> Tensor:
    """Return values with an axis for each of `dims`, of size 1 where the array has none."""
    values, own = array.take_layer(layer)
    for axis, dim in enumerate(dims):
        if dim not in own:
            values = values.unsqueeze(axis)
    return values


def _panels(
    facets: Sequence[tuple[str, Any]], dims: Sequence[str], array: LabelledArray, title: str
) -> "mpl.Figure":
    n_columns = min(_COLUMNS, len(facets))
    n_rows = -(-len(facets) // n_columns)
    figure = mpl.Figure(figsize=(1.5 + 2.6 * n_columns, 0.6 + 2.4 * n_rows), layout="constrained")
    figure.suptitle(plain_label(title))
    grid = figure.subplots(n_rows, n_columns, squeeze=False).flatten()
    # one scale for all panels, so that their colours can be compared
    known = np.concatenate([part.ravel() for _, part in facets])
    known = known[np.isfinite(known)]
    low, high = (known.min(), known.max()) if len(known) else (0.0, 1.0)
    for axes, (name, part) in zip(grid, facets, strict=False):
        axes.set_title(plain_label(name), fontsize="small")
        labels = [plain_label(dim) for dim in dims]
        if part.ndim < 2:
            axes.bar([*map(plain_label, array.places(dims[0]))] if dims else [""], part.reshape(-1))
            axes.set(xlabel=labels[0] if dims else "", ylabel=plain_label(array.name))
        else:
            image = axes.imshow(part, vmin=low, vmax=high, aspect="auto", interpolation="nearest")
            axes.set(xlabel=labels[1], ylabel=labels[0])
            for dim, set_ticks in ((dims[1], axes.set_xticks), (dims[0], axes.set_yticks)):
                if dim in array.coords and len(array.coords[dim]) <= _TICKS:
                    set_ticks(range(len(array.coords[dim])), map(plain_label, array.coords[dim]))
    # the last row of the grid may have room for more
    for axes in grid[len(facets) :]:
        axes.set_axis_off()
    if facets[0][1].ndim == 2:
        figure.colorbar(image, ax=list(grid[: len(facets)]), label=plain_label(array.name))
    return figure


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
        """Draw heat maps or bars of an array; the arguments are those of :meth:`array`."""
        array = self.array(*args, **where)
        title = str(self.record.config.get("probe", type(self).__name__))
        return array.plot(f"{title}: {array.name}")

    def _repr_html_(self) -> str:
        head = self.to_frame() if self.small else None
        more = "more: .to_frame(), .plot(), .save(path)"
        said = self.sentences() if self.small else []
        return panel(type(self).__name__, self._facts(), (*said, *self.notes), more, head)

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
                if dim in OF_SEQUENCES and not array.size_of(dim):
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
