"""The study of C.1 and C.2: its rule, and what a row says of a head."""

import pandas as pd
import pytest

from infoflow_lens.experiments.studies import find_study

STUDY = find_study("max_position_recovery")


def frame(first, second, heads="4 1"):
    return pd.DataFrame(
        [
            {"run": 0, "seed": 0, "heads": heads, "head": head, "rank": rank, "nmse": 1e-4,
             "ratio_second_moment": ratio, "ratio_fvu": ratio,
             **{f"{stage}_{error}": value
                for stage, value in (("initial", 0.4), ("trained", 0.4 * ratio))
                for error in ("second_moment", "fvu", "fvu_random", "fvu_self")}}
            for rank, ratios in ((1, first), (2, second))
            for head, ratio in enumerate(ratios)
        ]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "passed"),
    [
        ((0.1, 0.2, 0.1, 0.4), (0.9, 1.0, 1.0, 1.1), True),
        ((0.1, 0.2, 0.1, 0.6), (0.9, 1.0, 1.0, 1.1), False),  # a head that did not sharpen
        ((0.1, 0.2, 0.1, 0.4), (0.5, 0.6, 0.5, 0.6), False),  # the second token is read, too
    ],
)
def test_the_rule(first, second, passed):
    assert STUDY.verdict(frame(first, second)).passed is passed


def test_fewer_heads_than_tokens_are_not_judged():
    results = pd.concat([frame((0.1,) * 4, (1.0,) * 4), frame((0.9,) * 3, (1.0,) * 3, "3 1")])
    assert STUDY.verdict(results).passed


def test_both_normalisations_and_the_controls_stand_in_the_table():
    table = STUDY.table(frame((0.1,) * 4, (1.0,) * 4))
    assert table.count("| 4 1 | 1 |") == 1
    assert "random key" in table
    assert "own token" in table
    assert ".065-.096" in table


def test_a_row_is_a_head_before_and_after_training():
    settings = {"heads": [2, 1], "n_tokens": 4, "n_train": 300, "epochs": 1, "d_model": 20}
    one, again = (STUDY.measure(settings, 1, "cpu") for _ in range(2))
    assert one == again
    assert [(row["head"], row["rank"]) for row in one] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    for row in one:
        expected = row["trained_second_moment"] / row["initial_second_moment"]
        assert row["ratio_second_moment"] == pytest.approx(expected)
        assert row["trained_fvu_self"] < 0.05  # the residual stream holds a token's own
