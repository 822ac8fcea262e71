"""The study of head counts: published numbers, its rule, and a small run of it."""

import pandas as pd
import pytest

from infoflow_lens.experiments.studies import find_study

STUDY = find_study("head_count")


def frame(errors, preset="quick", length=16, table="3"):
    return pd.DataFrame(
        [
            {"run": i, "seed": seed, "table": table, "n_tokens": length, "heads": h,
             "nmse": nmse * (1 + seed), "relative": nmse * (1 + seed) / 32, "preset": preset}
            for i, (h, nmse) in enumerate(errors.items())
            for seed in (0, 1)
        ]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("errors", "preset", "passed"),
    [
        ({3: 1e-3, 4: 1e-5}, "quick", True),
        ({3: 1e-3, 4: 1e-4}, "quick", False),
        ({3: 1e-3, 4: 32 * 6e-7}, "full", True),
        ({3: 1e-3, 4: 32 * 1e-7}, "full", False),  # by second moment far below the published number
        ({3: 1e-2, 4: 32 * 3e-6}, "full", False),  # and far above
    ],
)
def test_the_rule(errors, preset, passed):
    assert STUDY.verdict(frame(errors, preset)).passed is passed


def test_the_rule_is_about_one_layer_of_shared_width():
    assert not STUDY.verdict(frame({3: 1e-3, 4: 1e-5}, table="5")).passed


def test_the_least_over_seeds_stands_beside_the_published_one():
    lines = STUDY.table(frame({3: 1e-3, 4: 1e-5})).splitlines()
    three, four = (
        "| 3 | 16 | 3 | 2.17e-04 | 3.13e-05 | 0.14 times | 1.00e-03 | 4.6 times "
        "| 0.0015 (0.001 to 0.002) |",
        "| 3 | 16 | 4 | 5.59e-07 | 3.13e-07 | 0.56 times | 1.00e-05 | 18 times "
        "| 1.5e-05 (1e-05 to 2e-05) |",
    )
    assert {three, four} <= set(lines)


def test_every_published_cell_stands_in_the_table():
    """Whether it was run or not, and whether ours agree."""
    table = STUDY.table(frame({3: 1e-3, 4: 1e-5}))
    assert table.count("| not run |") == 73
    assert "Run: 2 of 75 published cells" in table
    for cell in (
        "| 2 | 8 | 1 | 7.01e-02 |",
        "| 2 | 128 | 2 | 1.47e-02 |",
        "| 3 | 64 | 5 | 2.73e-07 |",
        "| 5 | 8 | 1 | 2.12e-04 |",
    ):
        assert f"{cell} not run |" in table


def test_no_normalisation_is_said_to_fit_where_factors_differ():
    """Ours are .14 and .56 of the published, so one factor for all cells cannot make both 1."""
    table = STUDY.table(frame({3: 1e-3, 4: 1e-5}))
    assert "1 of them lie within a factor of 2" in table
    assert "differ by factors that are themselves 3.9 times apart" in table


def test_a_row_is_a_model_with_as_many_heads():
    (settings, *_) = STUDY.cases("smoke")
    brief = {**settings, "n_train": 8000, "epochs": 1}
    one, again = (STUDY.measure(brief, 3, "cpu") for _ in range(2))
    assert one == again
    assert 0 < one[0]["relative"] < one[0]["nmse"] < 2
    assert {3, 4} <= {case["heads"] for case in STUDY.cases("quick")}


def test_the_whole_study_covers_the_three_tables():
    cases = STUDY.cases("full")
    assert {(c["table"], c["n_tokens"], c["heads"]) for c in cases} == {
        (table, length, heads)
        for table in ("2", "3", "5")
        for length in (8, 16, 32, 64, 128)
        for heads in range(1, 6)
    }


@pytest.mark.parametrize(
    ("table", "layers", "d_head", "d_model"), [("2", 1, 8, 24), ("3", 1, 10, 32), ("5", 2, 10, 32)]
)
def test_models_have_the_sizes_of_their_table(table, layers, d_head, d_model):
    sizes = STUDY.architecture({**STUDY.cases("smoke")[0], "table": table, "heads": 3})
    assert sizes.n_heads == (3,) * layers
    assert sizes.head_dimensions == (d_head,) * layers
    assert sizes.d_model == d_model
