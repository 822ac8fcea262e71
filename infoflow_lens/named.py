"""The theory's questions with names in the place of tasks, and sizes in that of architectures."""

from functools import wraps
from numbers import Integral, Real
from typing import Any

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import check, plain
from infoflow_lens.tasks.registry import resolve_task
from infoflow_lens.theory import design as _design
from infoflow_lens.theory import estimate as _estimate
from infoflow_lens.theory import schedule as _schedule
from infoflow_lens.theory.comparison import Heads
from infoflow_lens.theory.shapes import ModelShape

__all__ = ["design", "estimate", "learns"]

_WIDTH = 32  # of every layer, where head counts alone are given, as in the command


@wraps(_estimate.estimate)
def estimate(architecture: Any, task: Any, **settings: Any) -> _estimate.Estimate:  # noqa: D103
    # heads and tasks cannot be taken for one another, so either order is right
    if _is_heads(task) and not _is_heads(architecture):
        architecture, task = task, architecture
    target = resolve_task(task)
    if _is_heads(architecture):
        given = plain(architecture)
        counts = check(given if isinstance(given, tuple) else (given,), Heads, "heads")
        width = (_WIDTH,) * len(counts)
        architecture = ModelShape(n_heads=counts, d_model=width, n_tokens=target.n_tokens)
    return _estimate.estimate(architecture, target, **settings)


@wraps(_design.design)
def design(task: Any, n_tokens: Any, *args: Any, **settings: Any) -> _design.Design:  # noqa: D103
    lengths: Any = [n_tokens] if isinstance(n_tokens, Integral) else n_tokens
    return _design.design(resolve_task(task), lengths, *args, **settings)


@wraps(_schedule.learns)
def learns(task: Any, schedule: Any, *args: Any, **settings: Any) -> float:  # noqa: D103
    if not isinstance(schedule, _schedule.Schedule):
        raise InfoFlowError(
            f"schedule is a {type(schedule).__name__}: expected a Schedule, such as "
            "estimate(architecture, task).schedule"
        )
    return _schedule.learns(resolve_task(task), schedule, *args, **settings)


def _is_heads(value: Any) -> bool:
    """Say whether these are numbers, which `check` then takes for counts of heads or refuses."""
    given = plain(value)
    return isinstance(given, Real) or (
        isinstance(given, tuple) and all(isinstance(count, Real) for count in given)
    )
