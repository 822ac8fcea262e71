"""Models that tests ask for again and again are made once; each test gets a copy of its own."""

import copy
import io
import pickle
import types
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar

import torch

_SIMPLE = (str, bool, int, float, torch.dtype, type(None))
# what a deep copy shares, though pickle may not find it by its name
_SHARED = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, weakref.ref)
P, T = ParamSpec("P"), TypeVar("T")


def copied(make: Callable[P, T]) -> Callable[P, T]:
    """Make a model once for equal arguments, and give copies, which share nothing with it.

    A copy takes a tenth of the time. Arguments that are no numbers, names or lists of these, and
    models of inference mode, are not kept.
    """
    made: dict[str, _Copies[T]] = {}

    @wraps(make)
    def give(*args: P.args, **settings: P.kwargs) -> T:
        if torch.is_inference_mode_enabled() or not _is_simple([*args, settings]):
            return make(*args, **settings)
        defaults = torch.get_default_dtype(), torch.get_default_device()
        key = repr((args, sorted(settings.items()), defaults))
        if key not in made:
            made[key] = _Copies(make(*args, **settings))
        return made[key].give()

    return give


class _Copies(Generic[T]):
    """Copies of one model as `copy.deepcopy` makes them, by pickle in a fifth of the time.

    Tensors are copied one by one, with what they share; functions and classes are the same.
    """

    def __init__(self, model: T) -> None:
        self.model, buffer = model, io.BytesIO()
        self.parts: list[Any] = []
        try:
            _Pickler(buffer, self.parts).dump(model)
            self.pickled = buffer.getvalue()
            self.give()
        except (TypeError, AttributeError, pickle.PicklingError):  # deepcopy takes more kinds
            self.pickled = b""

    def give(self) -> T:
        if not self.pickled:
            return copy.deepcopy(self.model)
        return _Unpickler(io.BytesIO(self.pickled), self.parts).load()


class _Pickler(pickle.Pickler):
    """Leaves tensors and what is shared out, and keeps them in the order of their numbers."""

    def __init__(self, file: io.BytesIO, parts: list[Any]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.parts, self.places = parts, {}

    def persistent_id(self, part: object) -> int | None:
        if not isinstance(part, (torch.Tensor, *_SHARED)):
            return None
        if id(part) not in self.places:
            self.places[id(part)] = len(self.parts)
            self.parts.append(part)
        return self.places[id(part)]

    def reducer_override(self, part: object) -> Any:
        """Methods are of the copy, whatever it has under their name."""
        if isinstance(part, types.MethodType):
            return types.MethodType, (part.__func__, part.__self__)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, parts: list[Any]) -> None:
        super().__init__(file)
        self.parts, self.shared = parts, {}  # numbers of several tensors

    def persistent_load(self, place: int) -> Any:
        return copy.deepcopy(self.parts[place], self.shared)


def _is_simple(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_simple(each) for each in (*value, *value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_simple, value))
    return type(value) in _SIMPLE
