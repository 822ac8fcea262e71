"""Models that tests ask for again and again are made once; each test gets a copy of its own."""

import copy
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_SIMPLE = (str, bool, int, float, torch.dtype, type(None))
P, T = ParamSpec("P"), TypeVar("T")


def copied(make: Callable[P, T]) -> Callable[P, T]:
    """Make a model once for equal arguments, and give copies, which share nothing with it.

    A copy takes a third of the time. Arguments that are no numbers, names or lists of these, and
    models of inference mode, are not kept.
    """
    made: dict[str, T] = {}

    @wraps(make)
    def give(*args: P.args, **settings: P.kwargs) -> T:
        if torch.is_inference_mode_enabled() or not _is_simple([*args, settings]):
            return make(*args, **settings)
        defaults = torch.get_default_dtype(), torch.get_default_device()
        key = repr((args, sorted(settings.items()), defaults))
        if key not in made:
            made[key] = make(*args, **settings)
        return copy.deepcopy(made[key])

    return give


def _is_simple(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_simple(each) for each in (*value, *value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_simple, value))
    return type(value) in _SIMPLE
