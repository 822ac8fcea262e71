"""What a probe keeps: named tensors, each with the way in which two of them become one.

A probe declares them in its class, and its `update` returns what one pass adds to each. Merging,
snapshots, shards and files follow from the declarations.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, overload

import torch
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError, is_out_of_memory, refuse_names
from infoflow_lens.foundation.memory import bytes_in
from infoflow_lens.foundation.settings import check
from infoflow_lens.hooks.passes.view import pad_and_join

Reduction = Callable[[Any, Any], Any]


@refuse_names(added="add", merged="merge", rebuilt="rebuild")
class State:
    """A named part of what a probe has measured; read it as an attribute, return it from `update`.

    Use :func:`summed`, :func:`concatenated` or :func:`combined`.

    Attributes:
        name: of the attribute.
        grows: whether it grows with the sequences.
    """

    name = ""
    grows = False

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, probe: None, owner: type) -> "State": ...

    @overload
    def __get__(self, probe: object, owner: type) -> Any: ...

    def __get__(self, probe: Any, owner: type) -> Any:
        return self if probe is None else self.value(probe.kept.get(self.name))

    def __set__(self, probe: Any, value: Any) -> None:
        raise InfoFlowError(
            f"{type(probe).__name__}.{self.name} is set: expected update() to return what a pass "
            f"adds to it, as {{{self.name!r}: ...}}"
        )

    def add(self, kept: Any, part: Any) -> Any:
        """Add a part to what is kept.

        Args:
            kept: so far; None for nothing.
            part: what `update` has returned.
        """
        return self.merge(kept, part)

    def merge(self, first: Any, second: Any) -> Any:
        """Merge what is kept of two; either may be None for nothing."""
        raise NotImplementedError

    def value(self, kept: Any) -> Any:
        """Return what is kept as the probe reads it; None before the first pass."""
        return kept

    def bytes_of(self, kept: Any) -> int:
        """Return bytes of what grows with the sequences."""
        return bytes_in(kept) if self.grows else 0

    def rebuild(self, plain: Any) -> Any:
        """Rebuild what :func:`plainly` made plain."""
        return plain


class _Summed(State):
    def merge(self, first: Any, second: Any) -> Any:
        if second is None:
            return first
        if first is None:
            return copy_values(second)
        return _sum(first, second, self.name)


class _Concatenated(State):
    grows = True

    def __init__(self, axes: tuple[int, ...], fill: float | int) -> None:
        self._axes = check(axes, tuple[int, ...], "concatenated(axes)")
        self._fill = fill

    def add(self, kept: Any, part: Any) -> Any:
        # a list, joined when it is read: joining in each pass would copy all that is there
        return [*(kept or []), part]

    def merge(self, first: Any, second: Any) -> Any:
        return [*(first or []), *(second or [])] or None

    def value(self, kept: Any) -> Any:
        return None if kept is None else self._join(kept)

    def _join(self, parts: Sequence[Any]) -> Any:
        if isinstance(parts[0], Tensor):
            # parts of a state that was loaded may lie on another device than those of later passes
            device = parts[0].device
            try:
                return pad_and_join([part.to(device) for part in parts], self._axes, self._fill)
            except (IndexError, RuntimeError) as error:
                if is_out_of_memory(error):
                    raise
                shapes = ", ".join(map(str, dict.fromkeys(tuple(part.shape) for part in parts)))
                declared = f"concatenated({', '.join(map(str, self._axes))})"
                raise InfoFlowError(
                    f"{self.name} is declared {declared}, and passes add {shapes} to it: expected "
                    "rows of sequences on axis 0, and the number of each axis on which passes "
                    "differ in size, such as concatenated(2) for [sequence, head, query]"
                ) from error
        return tuple(self._join(of_layer) for of_layer in zip(*parts, strict=True))


class _Combined(State):
    def __init__(self, function: Reduction, of: type | None) -> None:
        self._function, self._of = function, of

    def merge(self, first: Any, second: Any) -> Any:
        if second is None:
            return first
        if first is None:  # a copy, as the function may write to what is kept
            return self.rebuild(copy_values(second))
        return self._function(first, second)

    def rebuild(self, plain: Any) -> Any:
        return plain if self._of is None else _rebuilt(self._of, plain)


def summed() -> Any:
    """Return a state that is the sum over all passes: of tensors, or of lists, one for each layer.

    Tensors take the shape of the first pass; where passes differ in length, smaller ones are filled
    up with zeros.
    """
    return _Summed()


def concatenated(*axes: int, fill: float | int = 0) -> Any:
    """Return a state with the rows of all sequences, one behind the other on axis 0.

    It is a tensor, or a list with one for each layer, and grows with the sequences.

    Args:
        axes: the numbers of the axes on which passes may differ in size, such as 2, that of
            positions in [sequence, head, pos]; of a list, those of one tensor.
        fill: what stands there where a pass has less.

    Raises:
        InfoFlowError: for axes that are no whole numbers; when it is read, for passes that differ
            in size on other axes.
    """
    return _Concatenated(axes, fill)


def combined(function: Reduction, of: type | None = None) -> Any:
    """Return a state of which a function makes one from two.

    Args:
        function: from what is kept and what comes next, in the order of the sequences, to what is
            kept then; with `of` it may write to the first.
        of: the dataclass of which it is, or of which it holds lists; None for tensors and plain
            values in lists and dicts. Its class attribute `made_of` names the dataclasses of its
            fields.
    """
    return _Combined(function, of)


def states_of(kind: type) -> dict[str, State]:
    """Return the states that a class declares, by name, those of its bases first."""
    return {
        name: part
        for place in reversed(kind.__mro__)
        for name, part in vars(place).items()
        if isinstance(part, State)
    }


def latest(first: Any, second: Any) -> Any:
    """Return a reduction: what came last."""
    return second


def either(first: Any, second: Any) -> Any:
    """Return a reduction: the first that is not empty."""
    return first or second


def _sum(first: Any, second: Any, name: str) -> Any:
    if isinstance(first, Mapping):
        # an entry that only one of them has is the sum's
        both = {k: _sum(part, second[k], name) for k, part in first.items() if k in second}
        return {**first, **{k: copy_values(v) for k, v in second.items() if k not in first}, **both}
    if isinstance(first, (list, tuple)):
        return [_sum(one, other, name) for one, other in zip(first, second, strict=True)]
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return first + second
    if first.ndim != second.ndim:
        raise InfoFlowError(
            f"{name} has {first.ndim} axes in one pass and {second.ndim} in another: expected the "
            "same axes in every pass"
        )
    return add_with_padding(first, second)


def add_with_padding(one: Tensor, other: Tensor) -> Tensor:
    """Add two tensors, the smaller one filled up with zeros on every axis."""
    other = other.to(one.device)
    if one.shape == other.shape:
        return one + other
    shape = [max(sizes) for sizes in zip(one.shape, other.shape, strict=True)]
    total = one.new_zeros(shape, dtype=torch.promote_types(one.dtype, other.dtype))
    for part in (one, other):
        total[tuple(slice(size) for size in part.shape)] += part
    return total


# Between objects and plain values, for files and other processes


def copy_values(value: Any) -> Any:
    """Copy nested tensors and plain values; of dataclasses their fields, by name."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: copy_values(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [copy_values(part) for part in value]
    if is_dataclass(value):
        return {item.name: copy_values(getattr(value, item.name)) for item in fields(value)}
    return value


def _rebuilt(kind: type, plain: Any) -> Any:
    """Return a dataclass of which :func:`copy_values` has given the fields; or lists of such."""
    if not isinstance(plain, Mapping):
        return [_rebuilt(kind, part) for part in plain]
    inner = getattr(kind, "made_of", {})
    made = {n: _rebuilt(inner[n], part) if n in inner else part for n, part in plain.items()}
    return kind(**made)
