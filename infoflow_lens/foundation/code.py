"""Digests of functions and classes of the user's own, by what they do."""

import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor

from infoflow_lens.foundation.record import fingerprint

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib")})
_THIS = __name__.partition(".")[0]


def is_own(thing: Any, root: str = "") -> bool:
    """Say whether a function, class or module is the user's: of no package, Python or this one.

    Args:
        thing: the function, class or module.
        root: a package, whose code counts as the user's wherever it lies.
    """
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)
    top = (name or "builtins").partition(".")[0]
    if top == _THIS or top in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(name or ""), "__file__", None)
    return top == root or file is None or not str(Path(file)).startswith(_INSTALLED)


def code_digest(thing: Any) -> str:
    """SHA-256, as 16 hex digits, of what a function or class does, with all that it calls.

    That is the compiled code of the user's own functions and classes, with the constants, tensors
    and functions that they read; of an object also what it holds. Of packages the names count.
    Lists, dicts and objects that code reads elsewhere do not, as they may change while it runs;
    comments and names of variables do not, either.
    """
    root = (getattr(thing, "__module__", None) or "").partition(".")[0]
    text = json.dumps(_Reader(root).read(thing))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Reader:
    """What was read so far, so that nothing is read twice, and circles end."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._seen: dict[int, tuple[int, Any]] = {}

    def read(self, value: Any) -> Any:
        """Return a value for JSON that is another where `value` does something else."""
        # plain values by what they are
        if isinstance(value, _CONSTANTS):
            return repr(value)
        if isinstance(value, Tensor):
            return fingerprint({"": value})
        if isinstance(value, tuple):
            return [self.read(part) for part in value]
        if isinstance(value, (set, frozenset)):
            return sorted(map(repr, value))
        # functions of the user's own by their bytecode, so that comments change nothing
        if isinstance(value, CodeType):
            return [value.co_code.hex(), value.co_names, self.read(value.co_consts)]
        # what was met before is named by its number: values may hold themselves
        if id(value) in self._seen:
            return self._seen[id(value)][0]
        self._seen[id(value)] = len(self._seen), value  # kept, so that no other has its number
        if isinstance(value, list):
            return [self.read(part) for part in value]
        if isinstance(value, Mapping):
            return [[self.read(key), self.read(part)] for key, part in value.items()]
        if isinstance(value, (staticmethod, classmethod)):
            return self.read(value.__func__)
        if isinstance(value, property):
            return self.read((value.fget, value.fset))
        if isinstance(value, partial):
            return self.read((value.func, value.args, value.keywords))
        if isinstance(value, MethodType):
            return self.read((value.__func__, value.__self__))
        # of others' code the name is enough, as the version of the package is in the record
        if isinstance(value, FunctionType) and is_own(value, self.root):
            return [self.read(value.__code__), *map(self.read, self._read_by(value))]
        if isinstance(value, type) and is_own(value, self.root):
            parts = [(name, part) for name, part in vars(value).items() if _is_code(name, part)]
            return [self.read(sorted(parts)), self.read(value.__bases__)]
        if hasattr(value, "__wrapped__") and not isinstance(value, (type, FunctionType)):
            return self.read(value.__wrapped__)
        if isinstance(value, (type, FunctionType)) or not hasattr(value, "__dict__"):
            return getattr(value, "__qualname__", type(value).__qualname__)
        return [self.read(type(value)), self.read(vars(value))]

    def _read_by(self, function: FunctionType) -> Iterator[Any]:
        """Yield what a function reads beside its arguments, as far as it stays the same."""
        cells = [cell.cell_contents for cell in function.__closure__ or () if _has_value(cell)]
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        names = _names(function.__code__)
        found = [function.__globals__.get(name) for name in names]
        modules = [m for m in found if isinstance(m, ModuleType) and is_own(m, self.root)]
        # code reads module.name as two names: each is looked up in each module of the user's own
        found += [vars(module).get(name) for module in modules for name in names]
        return (value for value in (*defaults, *cells, *found) if _stays(value))


def _names(code: CodeType) -> tuple[str, ...]:
    """Return the names that code looks up, also in the functions inside of it."""
    inner = [part for part in code.co_consts if isinstance(part, CodeType)]
    return (*code.co_names, *(name for part in inner for name in _names(part)))


def _has_value(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _stays(value: Any) -> bool:
    kinds = (*_CONSTANTS, Tensor, FunctionType, MethodType, partial, type, tuple, frozenset)
    return isinstance(value, kinds) or hasattr(value, "__wrapped__")


def _is_code(name: str, part: Any) -> bool:
    """Say whether a part of a class does something: its text, say, does not."""
    descriptors = (FunctionType, staticmethod, classmethod, property)
    if isinstance(part, descriptors) or hasattr(type(part), "__set_name__"):
        return True
    return _stays(part) and not name.startswith("__")
