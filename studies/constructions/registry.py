"""Constructions by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.naming import check_known, nearest
from infoflow_lens.foundation.settings import checked
from infoflow_lens.models.hooked import HookedModel
from infoflow_lens.studies.constructions.attention_only import AttentionOnly
from infoflow_lens.tasks import Task, load_task
from infoflow_lens.tasks.registry import parameter_names


@dataclass(frozen=True)
class Construction:
    """Weights set by hand, and the task that they solve.

    Attributes:
        task: name of the task.
        build: from the task, and parameters of its own, to the weights.
        source: paper and theorem.
    """

    task: str
    build: Callable[..., AttentionOnly | HookedModel]
    source: str

    @property
    def summary(self) -> str:
        """The construction in a sentence."""
        return inspect.cleandoc(self.build.__doc__ or "").splitlines()[0]

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The construction's own parameters with their defaults."""
        known = inspect.signature(self.build).parameters.values()
        return {p.name: p.default for p in known if p.kind is inspect.Parameter.KEYWORD_ONLY}


CONSTRUCTIONS: dict[str, Construction] = {}
BuilderT = TypeVar("BuilderT", bound=Callable[..., AttentionOnly | HookedModel])


def construction(source: str) -> Callable[[BuilderT], BuilderT]:
    """Register a function from a task to weights, under its name, with its settings checked.

    The task is that of the annotation of its first argument.

    Args:
        source: paper and theorem.
    """

    def register(build: BuilderT) -> BuilderT:
        # the class itself, as modules of constructions do not postpone annotations
        task: type[Task] = inspect.signature(build).parameters["task"].annotation
        build = checked(build)
        CONSTRUCTIONS[build.__name__] = Construction(task.name, build, source)
        return build

    return register


def list_constructions() -> tuple[str, ...]:
    """List the names that :func:`build_construction` knows."""
    return tuple(CONSTRUCTIONS)


def build_construction(name: str, **parameters: Any) -> tuple[HookedModel, Task]:
    """Build a hosted model with weights set by hand, and the task that it solves.

    Models over vector tokens answer as ``model(x)`` [batch, d_output]; models over token ids give
    logits [batch, pos, label], to be read at the last position, ``model(x)[:, -1]``. What a
    construction does, and what was corrected against the printed text, its own docstring says (see
    ``docs/constructions.md``).

    Args:
        name: one of :func:`list_constructions`.
        parameters: of the task and of the construction.

    Raises:
        InfoFlowError: for an unknown name or parameter, with the nearest known one, and for values
            that the task or the construction does not take.

    Example:
        >>> model, task = build_construction("in_context_qa", n_questions=5, n_answers=4, n_pairs=2)
        >>> x, y = task.sample(100, seed=0)
        >>> bool((model(x)[:, -1].argmax(dim=1) == y).all())
        True
    """
    if name not in CONSTRUCTIONS:
        raise InfoFlowError(f"unknown construction {name!r}{nearest(name, CONSTRUCTIONS)}")
    construction = CONSTRUCTIONS[name]
    own = {key: value for key, value in parameters.items() if key in construction.parameters}
    rest = {key: value for key, value in parameters.items() if key not in own}
    known = (*construction.parameters, *parameter_names(load_task(construction.task)))
    check_known(rest, known, f"construction {name!r}", "parameter")
    task = load_task(construction.task, **rest)
    weights = construction.build(task, **own)
    return (weights.host() if isinstance(weights, AttentionOnly) else weights), task
