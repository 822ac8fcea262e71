"""What can this configuration learn? One table over targets, D and T."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.progress import Advance
from infoflow_lens.theory.comparison import Count
from infoflow_lens.theory.estimate import estimate
from infoflow_lens.theory.shapes import ModelShape, shape_of

_COMPONENTS = (2, 8)
_RANKS = (2, 8)


def survey_cases(tasks: Sequence[Any], n_tokens: Sequence[int]) -> list[Any]:
    """Make tasks of every T and D; those whose T follows from other sizes stay as they are."""
    cases = []
    for task in tasks:
        known = {field.name for field in fields(task)}
        if "n_tokens" not in known:
            cases.append(task)
            continue
        varied: list[dict[str, int]] = [{}]
        if "n_components" in known:
            varied = [{"n_components": d} for d in _COMPONENTS]
        elif "k" in known:
            varied = [{"k": k} for k in _RANKS]
        for tokens in n_tokens:
            for changed in varied:
                if max([1, *changed.values()]) <= tokens:
                    cases.append(replace(task, n_tokens=tokens, **changed))
    return cases


def survey(
    model: Any,
    cases: Sequence[Any],
    *,
    count: Count = "paper",
    verify: int = 10,
    advance: Advance | None = None,
) -> list[dict[str, Any]]:
    """Return the estimate of one model for many targets.

    Args:
        model: what :func:`infoflow_lens.theory.shapes.shape_of` takes.
        cases: the targets.
        count: as in :func:`infoflow_lens.theory.estimate.estimate`.
        verify: sampled inputs on which schedules are run.
        advance: called after each target.

    Returns:
        Rows ``task, n_tokens, components, verdict, information, exponent, why``: |I| and the
        total exponent of the best schedule by any mechanism, None where there is none.
    """
    shape = shape_of(model)
    rows = []
    for task in cases:
        rows.append(_row(shape, task, count, verify))
        if advance is not None:
            advance(1, str(task.name))
    return rows


def _row(shape: ModelShape, task: Any, count: Count, verify: int) -> dict[str, Any]:
    parts = len(getattr(task, "components", ())) or "-"
    if hasattr(task, "k"):
        parts = f"k={task.k}"
    row: dict[str, Any] = {"task": task.name, "n_tokens": task.n_tokens, "components": parts}
    try:
        found = estimate(shape.set_length(task.n_tokens), task, count=count, verify=verify)
    except InfoFlowError as error:
        return {**row, "verdict": "not asked", "information": None, "exponent": None,
                "why": str(error)}  # fmt: skip
    return {
        **row,
        "verdict": found.verdict,
        "information": found.upper_information,
        "exponent": found.upper.get("total"),
        "why": found.why,
    }
