"""Arrays with names on their axes: what results are made of, as tables and as pictures.

Layers may have different numbers of heads, so an array may have a tensor for each layer. xarray has
no such thing: it would fill up with NaN, which turns integers into floats, or stack the heads of
all layers on one axis. It would also copy torch tensors to NumPy, and add a dependency for what
takes this file.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infoflow_lens.foundation.display import plain_label
from infoflow_lens.foundation.errors import InfoFlowError, refuse_names
from infoflow_lens.foundation.lazy import mpl, pd

_COLUMNS = 4  # of panels
_TICKS = 40  # at most, that have names


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
        """Bars over one axis, a heat map over two, a panel of these for each place of the first.

        Of further axes the first place is shown.
        """
        array = self
        while len(array.dims) > 3:
            array = array.select(**{array.dims[0]: array.places(array.dims[0])[0]})
        values = array.to_tensor().detach().float().cpu().numpy()
        if values.ndim < 3:
            return _panels([(title or self.name, values)], array.dims, array, "")
        facets = [(f"{array.dims[0]} {at}", part) for at, part in zip(
            array.places(array.dims[0]), values, strict=True
        )]  # fmt: skip
        return _panels(facets, array.dims[1:], array, title or self.name)


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
    frames = [pd.DataFrame(dict(_columns(columns, rows, layer))) for layer in _layers(main)]
    return pd.concat(frames, ignore_index=True) if len(frames) > 1 else frames[0]


def _layers(array: LabelledArray) -> Sequence[int | None]:
    return range(len(array.values)) if isinstance(array.values, tuple) else (None,)


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
