"""The two products of attention, queries with keys and pattern with values, whoever writes them.

Models write ``matmul``, ``bmm``, ``baddbmm`` or ``einsum``, with their axes in any order.
:class:`Operands` has the two tensors of a call and makes it again with others; :class:`Layout`
shows them as [..., pos, d], and puts them back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

PRODUCTS = frozenset(
    ("matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "baddbmm_", "einsum")
)
_SECOND_NAMES = ("batch1", "mat1", "other", "mat2", "batch2")  # of operands that are given by name

Move: TypeAlias = Callable[[Tensor], Tensor]


class Operands:
    """The operands of a product, wherever its call has them.

    Args:
        name: of the function.
        args, kwargs: of the call.

    Attributes:
        pair: the two operands; None where there are fewer. Others may be put in their place.
        equation: of an einsum, without blanks.
        base: what baddbmm adds to the product.
    """

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.equation: str | None = None
        self.base: Tensor | None = None
        self._is_list = False
        # operands come as a list, one by one, or by name; an einsum begins with its equation
        rest = list(args)
        if rest and isinstance(rest[0], str):
            self.equation = _name_output(rest.pop(0).replace(" ", ""))
            self._is_list = bool(rest) and isinstance(rest[0], (tuple, list))
            rest = list(rest[0]) if self._is_list else rest
        elif name.startswith("baddbmm"):
            self.base = rest.pop(0) if rest else kwargs["input"]
        self._names = [name for name in _SECOND_NAMES if name in kwargs]
        rest += [kwargs[name] for name in self._names]
        known = [*self._names, *(["input"] if self.base is not None else [])]
        self._kwargs = {name: v for name, v in kwargs.items() if name not in known}
        self._more = rest[2:]
        self.pair: tuple[Any, Any] = (rest[0], rest[1]) if len(rest) >= 2 else (None, None)
        self._given = self.pair, args, kwargs

    def run(self, func: Callable[..., Any]) -> Any:
        """Make the call, with the operands that `pair` has now."""
        pair, args, kwargs = self._given
        # with its own operands the call is made as the model has written it
        if self.pair is pair:
            return func(*args, **kwargs)
        if self.equation is not None:
            return func(self.equation, *([self.pair] if self._is_list else self.pair))
        if self._names == ["batch1", "batch2"]:
            return func(self.base, **dict(zip(self._names, self.pair)), **self._kwargs)
        before = () if self.base is None else (self.base,)
        return func(*before, *self.pair, *self._more, **self._kwargs)


def _name_output(equation: str) -> str:
    """Name the output's axes where an einsum leaves them out: those named once, by the alphabet."""
    if "->" in equation or "." in equation:
        return equation
    axes = equation.replace(",", "")
    return f"{equation}->{''.join(sorted(axis for axis in set(axes) if axes.count(axis) == 1))}"


def _keep(tensor: Tensor) -> Tensor:
    return tensor


def _turn(tensor: Tensor) -> Tensor:
    return tensor.transpose(-1, -2)


@dataclass(frozen=True)
class Layout:
    """How the operands and the output of a product are read as [..., pos, d], and put back."""

    left: Move = _keep
    left_back: Move = _keep
    right: Move = _keep
    right_back: Move = _keep
    out: Move = _keep
    out_back: Move = _keep

    @classmethod
    def parse_scores(cls, equation: str | None) -> "Layout | None":
        """Find the layout of queries and keys; None for an einsum that is a projection."""
        if equation is None:
            return cls(right=_turn, right_back=_turn)
        # dots stand for axes without names; of scores the last two axes are queries and keys
        given, _, out = equation.partition("->")
        if "." in equation or len(out) < 2:
            return None
        q, k = given.split(",")
        inner = "".join(axis for axis in q if axis in k and axis not in out)
        heads = out[:-2]
        # keys may lack axes of heads, where several heads share them; queries have every axis
        fits = set(q) == {*heads, out[-2], *inner} and set(k) <= {*heads, out[-1], *inner}
        if not fits:
            return None
        return cls(*_mover(q, heads + out[-2] + inner), *_mover(k, heads + out[-1] + inner))

    @classmethod
    def parse_values(cls, equation: str | None, swapped: bool) -> "Layout":
        """Find the layout of values and z; `swapped` where the pattern stands on the right."""
        if equation is None or "." in equation:
            return cls()
        given, out = equation.split("->")
        pattern, values = reversed(given.split(",")) if swapped else given.split(",")
        heads, d = pattern[:-2], "".join(axis for axis in out if axis not in pattern)
        right, right_back = _mover(values, heads + pattern[-1] + d)
        out_move, out_back = _mover(out, heads + pattern[-2] + d)
        return cls(right=right, right_back=right_back, out=out_move, out_back=out_back)


def _mover(have: str, want: str) -> tuple[Move, Move]:
    """Make functions that bring axes named `have` into the order `want`, and back."""
    # axes that are missing have length 1
    order = [have.index(axis) for axis in want if axis in have]
    missing = [place for place, axis in enumerate(want) if axis not in have]

    def move(tensor: Tensor) -> Tensor:
        tensor = tensor.permute(order)
        for axis in missing:
            tensor = tensor.unsqueeze(axis)
        return tensor

    def back(tensor: Tensor) -> Tensor:
        for axis in reversed(missing):
            tensor = tensor.select(axis, 0)
        return tensor.permute([order.index(place) for place in range(len(order))])

    return move, back
