"""Tasks by name."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from infoflow_lens.foundation import packages
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import user_path
from infoflow_lens.foundation.naming import check_known, nearest
from infoflow_lens.tasks.questions import InContextQA, Memorization, NestedQA
from infoflow_lens.tasks.single import DRetrieval, GlobalMean, KthLargest, PositionSum
from infoflow_lens.tasks.task import Task
from infoflow_lens.tasks.templates import InContextTemplateMatching, TemplateMatching
from infoflow_lens.tasks.tuples import BestTree, DepthSeparation, IntrinsicDimension, TriangleCenter

_TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (
        DRetrieval,
        DepthSeparation,
        KthLargest,
        IntrinsicDimension,
        TriangleCenter,
        BestTree,
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
    """Return the names that :func:`load_task` knows, with those that other packages add.

    Raises:
        InfoFlowError: if two packages add the same name.
    """
    return (*_TASKS, *packages.find_entry_points(GROUP, _TASKS))


def parameter_names(task: Task | type[Task]) -> tuple[str, ...]:
    """Return the names of a task's parameters."""
    return tuple(field.name for field in fields(task))


def _task_of(name: str) -> type[Task]:
    if name in _TASKS:
        return _TASKS[name]
    others = packages.find_entry_points(GROUP, _TASKS)
    if name not in others:
        raise InfoFlowError(f"unknown task {name!r}{nearest(name, list_tasks())}")
    task: type[Task] = packages.load_class(others[name], Task)
    return task


@contextmanager
def _importable_from_here() -> Iterator[None]:
    """Let modules of the current folder be imported for a block, as with ``python -m``."""
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        if added and here in sys.path:
            sys.path.remove(here)


def _import(name: str) -> Any:
    """Import what ``module:name`` or ``file.py:name`` names.

    Raises:
        InfoFlowError: if there is none, or importing it fails.
    """
    where, _, attribute = name.rpartition(":")
    try:
        if where.endswith(".py"):
            path = user_path(where)
            spec = importlib.util.spec_from_file_location(path.stem, path)
            if spec is None or spec.loader is None or not path.is_file():
                raise FileNotFoundError(f"there is no file {where!r}")
            module = importlib.util.module_from_spec(spec)
            # pickle and dataclasses look up the module of a class there
            sys.modules.setdefault(spec.name, module)
            spec.loader.exec_module(module)
        else:
            with _importable_from_here():
                module = importlib.import_module(where)
    except InfoFlowError:
        raise
    except Exception as error:  # whatever code of the user's raises
        raise InfoFlowError(
            f"task {name!r}: {where!r} cannot be imported ({type(error).__name__}: {error}): "
            "expected a module that Python finds from here, or a file"
        ) from error
    if not hasattr(module, attribute):
        tasks = [key for key, value in vars(module).items() if isinstance(value, Task)]
        raise InfoFlowError(
            f"task {name!r}: {where!r} has no {attribute!r}{nearest(attribute, tasks or ['none'])}"
        )
    return getattr(module, attribute)


def _load_own_task(name: str, parameters: dict[str, Any]) -> Task:
    """Load a task of the user's: an instance with parameters replaced, or a call of its maker."""
    found = _import(name)
    if not isinstance(found, Task) and callable(found):
        known = inspect.signature(found).parameters
        if all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in known.values()):
            check_known(parameters, known, f"task {name!r}", "parameter")
        found = found(**parameters)
        # the maker has taken them: none is left to replace
        parameters = {}
    if not isinstance(found, Task):
        raise InfoFlowError(
            f"task {name!r} is a {type(found).__name__}: expected a Target or another task, or a "
            "function that makes one"
        )
    check_known(parameters, parameter_names(found), f"task {name!r}", "parameter")
    return replace(found, **parameters)


def load_task(name: str, **parameters: Any) -> Task:
    """Return the task of that name with those parameters.

    Besides the names of :func:`list_tasks`, ``module:name`` and ``file.py:name`` load a task of
    one's own: a task, whose fields the parameters replace, or a function of them that makes one.
    That runs the module or the file, with the modules of the current folder before others. Any
    name may have ``task:`` in front.

    Example:
        >>> task = load_task("d_retrieval", n_tokens=16, d_token=4, n_components=4, seed=0)
        >>> x, y = task.sample(2, seed=1)
        >>> x.shape, y.shape
        (torch.Size([2, 16, 4]), torch.Size([2, 1]))

    Raises:
        InfoFlowError: for an unknown name or parameter, with the nearest known one.
    """
    if not isinstance(name, str):
        raise InfoFlowError(
            f"name is a {type(name).__name__}: expected the name of a task, such as "
            f"{next(iter(_TASKS))!r}; a task itself is used as it is"
        )
    name = name.removeprefix("task:")
    if name not in _TASKS and ":" in name:
        return _load_own_task(name, parameters)
    task = _task_of(name)
    check_known(parameters, parameter_names(task), f"task {name!r}", "parameter")
    return task(**parameters)


def load_task_for(model: Any, name: str) -> Task:
    """Load the task of that name, in the sizes of a model of ours where it has others.

    Raises:
        InfoFlowError: as :func:`load_task`.
    """
    task, architecture = load_task(name), getattr(model, "architecture", None)
    sizes = {
        size: getattr(architecture, size)
        for size in ("n_tokens", "d_token")
        if size in parameter_names(task)
        and getattr(architecture, size, None) not in (None, getattr(task, size))
    }
    return load_task(name, **sizes) if sizes else task


def resolve_task(task: Any, kind: type = object) -> Any:
    """Load the task of that name with its own sizes; return what is no name as it is.

    Args:
        task: a task, its name, or for the theory another object with `n_tokens`.
        kind: that the task must be of.

    Raises:
        InfoFlowError: for an unknown name, for a class in the place of a task, and for what is
            neither.
    """
    task = load_task(task) if isinstance(task, str) else task
    if isinstance(task, type):
        raise InfoFlowError(
            f"task is the class {task.__name__}: expected a task; make one, {task.__name__}()"
        )
    if not hasattr(task, "n_tokens") or not isinstance(task, kind):
        raise InfoFlowError(
            f"task is {task!r}: expected a task, or the name of one: {', '.join(list_tasks())}; "
            "infoflow_lens.tasks.Target makes one of your own"
        )
    return task
