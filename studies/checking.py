"""Check a user's study on short runs, before its full runs take hours."""

from typing import TYPE_CHECKING

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import mpl, pd
from infoflow_lens.studies.claims import Verdict
from infoflow_lens.studies.study import Study
from infoflow_lens.studies.sweep import Run, check_cases, measure_unit

if TYPE_CHECKING:
    from infoflow_lens.studies.study import Row


def check_study(study: Study, preset: str, *, device: str = "cpu") -> "pd.DataFrame":
    """Refuse a study that would fail late, or whose rows differ for the same settings and seed.

    Every configuration runs once, with seed 0, and the first one twice; then table, figure and
    verdict are made from the rows.

    Args:
        study: the study to check.
        preset: one whose runs are short.
        device: where to train.

    Returns:
        The rows.

    Raises:
        InfoFlowError: saying what is wrong, and where.
    """

    if preset not in study.presets:
        names = ", ".join(study.presets)
        has = f"one of its presets, {names}" if names else 'some, as in presets = {"smoke": 1}'
        raise InfoFlowError(f"preset is {preset!r} of {study.name}: expected {has}")
    # every case once, as a run fails late where a rare setting is wrong
    runs = [Run(index, case, 0) for index, case in enumerate(check_cases(study, preset))]
    rows = [_rows(study, run, device) for run in runs]
    again = _rows(study, runs[0], device)
    if not pd.DataFrame(rows[0]).equals(pd.DataFrame(again)):
        raise InfoFlowError(
            f"measure() of {study.name} gives {rows[0][0]} and then {again[0]} for the same "
            "settings and seed: expected the same rows; draw everything from `seed`"
        )
    results = pd.DataFrame([row for several in rows for row in several])
    # everything that is made of the rows, before hours of measuring
    for method, expected in (("table", str), ("figure", mpl.Figure), ("verdict", Verdict)):
        name = f"{method}() of {study.name}"
        try:
            made = getattr(study, method)(results)
        except InfoFlowError:
            raise
        except Exception as error:  # whatever a method of the user's raises
            raise InfoFlowError(
                f"{name} fails on rows with the columns {', '.join(results)} "
                f"({type(error).__name__}: {error})"
            ) from error
        if not isinstance(made, expected):
            raise InfoFlowError(f"{name} gives {made!r:.100}: expected a {expected.__name__}")
    return results


def _rows(study: Study, run: Run, device: str) -> "list[Row]":
    ((_, rows),) = measure_unit((study, [run], device))
    return rows
