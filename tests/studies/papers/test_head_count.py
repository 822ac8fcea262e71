"""The study of head counts: published numbers, its rule, and a small run of it."""

import pandas as pd
import pytest

from infoflow_lens.studies.papers import find_study

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
def test_the_verdict_follows_the_stated_rule(errors, preset, passed):
    assert STUDY.verdict(frame(errors, preset)).passed is passed


def test_the_rule_is_about_one_layer_of_shared_width():
    assert not STUDY.verdict(frame({3: 1e-3, 4: 1e-5}, table="5")).passed


def test_three_presets_cover_the_three_tables():
    cases = [case for name in ("full", "longest", "largest") for case in STUDY.cases(name)]
    assert len(cases) == 75
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


def test_the_table_compares_cells_that_were_run():
    (row,) = [
        row for row in STUDY.table(frame({3: 1e-3})).splitlines() if row.startswith("| 3 | 16 | 3")
    ]
    assert row.count(" times") == 2  # by second moment and by variance
    assert "nan" not in STUDY.table(frame({3: 1e-3}))
