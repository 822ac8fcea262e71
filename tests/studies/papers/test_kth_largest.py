"""The study of Theorem 2: its rule, and what a row says of a model."""

import pandas as pd
import pytest

from infoflow_lens.studies.papers import find_study

STUDY = find_study("kth_largest")


def frame(errors, picks=1.0):
    return pd.DataFrame(
        [
            {"run": i, "seed": seed, "n_tokens": 8, "k": k, "nmse": nmse * (1 + seed),
             "chooses_largest": picks, "chooses_kth": 0.1, "chooses_smallest": 0.0}
            for i, (k, nmse) in enumerate(errors.items())
            for seed in (0, 1)
        ]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("errors", "picks", "passed"),
    [
        ({1: 1e-3, 2: 0.1, 4: 0.2, 8: 1e-3}, 1.0, True),
        ({1: 1e-3, 2: 4e-3, 4: 0.2, 8: 1e-3}, 1.0, False),  # k = 2 is learned, too
        ({1: 1e-3, 2: 0.1, 4: 0.2, 8: 0.1}, 1.0, False),  # the smallest is not
        ({1: 1e-3, 2: 0.1, 4: 0.2, 8: 1e-3}, 0.9, False),  # by another mechanism
    ],
)
def test_the_verdict_follows_the_stated_rule(errors, picks, passed):
    assert STUDY.verdict(frame(errors, picks)).passed is passed


def test_a_row_counts_what_the_head_attends_to():
    settings = {"k": 1, "n_tokens": 4, "n_train": 500, "epochs": 1}
    (row,) = STUDY.measure(settings, 2, "cpu")
    assert row["chooses_kth"] == row["chooses_largest"]  # the first is the largest
    assert 0 <= row["chooses_largest"] + row["chooses_smallest"] <= 1
    (last,) = STUDY.measure({**settings, "k": 4}, 2, "cpu")
    assert last["chooses_kth"] == last["chooses_smallest"]
    assert [case["k"] for case in STUDY.cases("quick")] == [1, 2, 4, 8, 16]
