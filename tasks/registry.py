"""Tasks by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from infoflow_lens.foundation import plugins
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.names import nearest
from infoflow_lens.tasks.aggregation import GlobalMean, PositionSum
from infoflow_lens.tasks.d_retrieval import DRetrieval
from infoflow_lens.tasks.kth_largest import KthLargest
from infoflow_lens.tasks.memorization import Memorization
from infoflow_lens.tasks.question_answering import InContextQA, NestedQA
from infoflow_lens.tasks.task import Task
from infoflow_lens.tasks.templates import InContextTemplateMatching, TemplateMatching
from infoflow_lens.tasks.tuples import DepthSeparation, IntrinsicDimension, TriangleCenter

_TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (
        DRetrieval,
        DepthSeparation,
        KthLargest,
        IntrinsicDimension,
        TriangleCenter,
        PositionSum,
        GlobalMean,
        Memorization,
        InContextQA,
        TemplateMatching,
        InContextTemplateMatching,
        NestedQA,
    )
}


GROUP = "infoflow_lens.tasks"  # of entry points, by which other packages add tasks


def list_tasks() -> tuple[str, ...]:
    """The names that :func:`load_task` knows, with those that other packages add.

    Raises:
        InfoFlowError: if two packages add the same name.
    """
    return (*_TASKS, *plugins.found(GROUP, _TASKS))


def _task_of(name: str) -> type[Task]:
    if name in _TASKS:
        return _TASKS[name]
    others = plugins.found(GROUP, _TASKS)
    if name not in others:
        raise InfoFlowError(f"unknown task {name!r}{nearest(name, list_tasks())}")
    task: type[Task] = plugins.loaded(others[name], Task)
    return task


def load_task(name: str, **parameters: Any) -> Task:
    """The task of that name with those parameters.

    Example:
        >>> task = load_task("d_retrieval", n_tokens=16, d_token=4, n_components=4, seed=0)
        >>> x, y = task.sample(2, seed=1)
        >>> x.shape, y.shape
        (torch.Size([2, 16, 4]), torch.Size([2, 1]))

    Raises:
        InfoFlowError: for an unknown name or parameter, with the nearest known one.
    """
    task = _task_of(name)
    known = [field.name for field in fields(task)]
    for parameter in parameters:
        if parameter not in known:
            raise InfoFlowError(
                f"task {name!r} has no parameter {parameter!r}{nearest(parameter, known)}"
            )
    return task(**parameters)
