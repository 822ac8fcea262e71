"""What holds of every study: its cases, what a run of it gives, and the page made of that."""

import json
from functools import cache

import pandas as pd
import pytest
import torch

from infoflow_lens.studies.papers import STUDIES
from infoflow_lens.studies.sweep import Run, measure_unit
from tests.conftest import some_of
from tests.studies.test_results import RESULTS, rows_of

of_every_study = pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
# what makes a run brief where smoke's is not
BRIEF = {
    "intrinsic_dimension": {"n_train": 256},
    "max_position_recovery": {"n_train": 256},
    "head_count": {"n_train": 256},
    "agreement_over_training": {"n_train": 200, "n_recovery": 60, "n_influence": 12},
    "nested_qa": {"n_train": 256, "n_test": 200},
    "attention_maps": {"n_train": 256, "epochs": 1},
    "varying_depth": {"n_train": 256, "n_test": 100},
    "varying_heads": {"n_train": 256, "n_test": 100, "epochs": 2},
    "specific_position": {"n_train": 256, "epochs": 1},
}


def measure(name, seed):
    """The rows of a brief run of the first smoke case that is judged."""
    study = STUDIES[name]
    case = next(case for case in study.cases("smoke") if study.judges(case))
    run = Run(0, {**case, **BRIEF.get(name, {})}, seed)
    ((_, rows),) = measure_unit((study, [run], "cpu"))
    return rows


measured = cache(measure)


@of_every_study
def test_cases_are_json_and_no_case_stands_twice(study):
    for preset in study.presets:
        cases = [json.dumps(case, sort_keys=True) for case in study.cases(preset)]
        assert len(set(cases)) == len(cases)
        assert [json.loads(case) for case in cases] == list(study.cases(preset))
        assert any(map(study.judges, study.cases(preset))) or preset == "full"


@pytest.mark.slow
@of_every_study
def test_a_seed_gives_the_same_rows_whatever_the_global_seed_and_another_gives_others(study):
    rows = measured(study.name, 0)
    torch.manual_seed(7)
    assert measure(study.name, 0) == rows
    assert measured(study.name, 1) != rows


# over vector tokens, token ids, and maps of attention
KINDS = [STUDIES[name] for name in ("head_count", "triangle_center", "attention_maps")]


@pytest.mark.parametrize("study", some_of(STUDIES.values(), *KINDS), ids=STUDIES)
def test_rows_of_a_run_make_a_page(study):
    measured_rows = measured(study.name, 0)
    rows = pd.DataFrame(json.loads(json.dumps(measured_rows)))
    others = set(rows_of(RESULTS / study.name)) - set(rows)  # which other cases have
    rows = rows.reindex(columns=[*rows, *others])
    assert "|---|" in study.table(rows)
    assert study.figure(rows).axes


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("head_count", ("| 2 | 8 | 1 | 7.01e-02 |", "| 2 | 128 | 2 | 1.47e-02 |")),
        ("head_count", ("| 3 | 64 | 5 | 2.73e-07 |", "| 3 | 16 | 4 | 5.59e-07 | 1.60e-06 |")),
        ("head_count", ("| 5 | 8 | 1 | 2.12e-04 |",)),
        ("max_position_recovery", ("| rank 1 | 5 | 0.519, 0.468, 0.662, 0.762, 0.613 |",)),
        ("max_position_recovery", ("| rank 2 | 6 | 0.994, 1.007, 1.086, 0.974, 0.777, 1.015 |",)),
    ],
)
def test_published_numbers_are_those_of_the_papers(name, cells):
    """Typed from the papers; the committed table is that of the rows, as another test says."""
    table = (RESULTS / name / "table.md").read_text()
    assert all(cell in table for cell in cells)
