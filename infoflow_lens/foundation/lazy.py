"""Libraries that load where they are first used, since a second of pandas is long for a command."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["datasets", "mpl", "pd"]


class _LazyModule(ModuleType):
    """A module that is imported when something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # who only looks at what this is needs no library
            raise AttributeError(name)
        return getattr(import_module(self.__name__), name)


if TYPE_CHECKING:
    import datasets
    import matplotlib.figure as mpl
    import pandas as pd
else:
    datasets, mpl, pd = map(_LazyModule, ("datasets", "matplotlib.figure", "pandas"))
