"""The study of head counts: published numbers, its rule, and a small run of it."""

import pandas as pd
import pytest

from infoflow_lens.experiments.studies import find_study

STUDY = find_study("head_count")


def frame(errors, preset="quick", length=16):
    return pd.DataFrame(
        [
            {"run": i, "seed": seed, "n_tokens": length, "heads": h, "nmse": nmse * (1 + seed),
             "preset": preset}
            for i, (h, nmse) in enumerate(errors.items())
            for seed in (0, 1)
        ]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("errors", "preset", "passed"),
    [
        ({3: 1e-3, 4: 1e-5}, "quick", True),
        ({3: 1e-3, 4: 1e-4}, "quick", False),
        ({3: 1e-3, 4: 6e-7}, "full", True),
        ({3: 1e-3, 4: 1e-5}, "full", False),  # far from the published number
    ],
)
def test_the_rule(errors, preset, passed):
    assert STUDY.verdict(frame(errors, preset)).passed is passed


def test_the_least_over_seeds_stands_beside_table_3():
    table = STUDY.table(frame({3: 1e-3, 4: 1e-5}))
    assert "| 16 | 3 | 1.00e-03 | 0.0015 (0.001 to 0.002) | 2.17e-04 |" in table
    assert "| 16 | 4 | 1.00e-05 | 1.5e-05 (1e-05 to 2e-05) | 5.59e-07 |" in table


def test_a_row_is_a_model_with_as_many_heads():
    (settings, *_) = STUDY.cases("smoke")
    one, again = (STUDY.measure({**settings, "epochs": 1}, 3, "cpu") for _ in range(2))
    assert one == again
    assert 0 < one[0]["nmse"] < 2
    assert [case["heads"] for case in STUDY.cases("quick")] == [2, 3, 4, 5]
