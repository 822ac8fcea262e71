"""Tasks by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from infoflow_lens.tasks.d_retrieval import DRetrieval
from infoflow_lens.tasks.task import VectorTask
from infoflow_lens.tasks.tuples import DepthSeparation, IntrinsicDimension, TriangleCenter

from infoflow_lens.foundation.errors import InfoFlowError

_TASKS: dict[str, type[VectorTask]] = {
    task.name: task for task in (DRetrieval, DepthSeparation, IntrinsicDimension, TriangleCenter)
}


def list_tasks() -> tuple[str, ...]:
    """The names that :func:`load_task` knows."""
    return tuple(_TASKS)


def load_task(name: str, **parameters: Any) -> VectorTask:
    """The task of that name with those parameters.

    Example:
        >>> task = load_task("d_retrieval", n_tokens=16, d_token=4, n_components=4, seed=0)
        >>> x, y = task.sample(2, seed=1)
        >>> x.shape, y.shape
        (torch.Size([2, 16, 4]), torch.Size([2, 1]))

    Raises:
        InfoFlowError: for an unknown name or parameter, with the nearest known one.
    """
    if name not in _TASKS:
        raise InfoFlowError(f"unknown task {name!r}{_nearest(name, _TASKS)}")
    task = _TASKS[name]
    known = [field.name for field in fields(task)]
    for parameter in parameters:
        if parameter not in known:
            raise InfoFlowError(
                f"task {name!r} has no parameter {parameter!r}{_nearest(parameter, known)}"
            )
    return task(**parameters)


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    return f": expected one of {', '.join(names)}{guess}"
