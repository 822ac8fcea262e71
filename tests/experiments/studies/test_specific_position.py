"""The study of C.3: its table, its rule, and a small run of it."""

import pandas as pd
import pytest

from infoflow_lens.experiments.studies import find_study
from infoflow_lens.experiments.sweep import run_study

STUDY = find_study("specific_position")


def frame(weights, mse=1e-4):
    return pd.DataFrame(
        [
            {"run": run, "seed": run, "mse": mse, "validation_nmse": mse, "position": t + 1,
             "weight": weight, "weight_deviation": 0.001}
            for run in (0, 1)
            for t, weight in enumerate(weights)
        ]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("weights", "mse", "passed"),
    [
        ((0.33, 0.34, 0.33, 0.0), 1e-4, True),
        ((0.33, 0.34, 0.33, 0.0), 2e-3, False),  # it does not fit the target
        ((0.40, 0.30, 0.30, 0.0), 1e-4, False),  # not even
        ((0.32, 0.32, 0.32, 0.04), 1e-4, False),  # looks elsewhere
    ],
)
def test_the_rule(weights, mse, passed):
    verdict = STUDY.verdict(frame(weights, mse))
    assert verdict.passed is passed
    assert len(verdict.reasons) == 3


def test_the_table_stands_beside_the_published_numbers():
    table = STUDY.table(frame((0.33, 0.34, 0.33, 0.01)))
    assert "| 2 | 0.34 (0.34 to 0.34) | 0.001 (0.001 to 0.001) | 1/3 |" in table
    assert "| 4 | 0.01 (0.01 to 0.01) | 0.001 (0.001 to 0.001) | 0 |" in table
    assert len(STUDY.figure(frame((0.3, 0.3, 0.3, 0.1))).axes[0].patches) == 4


def test_a_small_run_shows_the_effect(tmp_path):
    """Weights of a trained model: even on the summed positions whatever the sample."""
    result = run_study(STUDY, tmp_path, preset="smoke", progress=False)
    assert result.verdict.passed
    summed = result.rows[result.rows["position"] <= 3]
    assert summed["weight"].between(0.3, 0.36).all()
    assert (summed["weight_deviation"] < 0.02).all()
    assert result.rows.groupby("run")["weight"].sum().sub(1).abs().max() < 1e-6
