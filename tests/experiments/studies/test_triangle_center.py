"""The study of C.5: its rule, its table, and small runs of it."""

import pandas as pd
import pytest
import torch

from infoflow_lens.experiments.studies.triangle_center import TriangleCenterStudy
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import build_model
from infoflow_lens.tasks import TriangleCenter

STUDY = TriangleCenterStudy()


def frame(means):
    """Two seeds around each mean, by T, of the sizes E = 16 and 64."""
    return pd.DataFrame(
        [
            {"seed": seed, "n_tokens": n_tokens, "heads": f"{d_model // 8} {d_model // 8}",
             "d_model": d_model, "nmse": mean + shift, "train_nmse": mean - 0.1,
             "information": 6, "information_proved": 0,
             "exponent_lower": 24 / d_model, "exponent_upper": 4 * n_tokens / d_model}
            for n_tokens, pair in means.items()
            for d_model, mean in zip((16, 64), pair, strict=True)
            for seed, shift in enumerate((-0.05, 0.05))
        ]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("means", "passed"),
    [
        ({8: (0.2, 0.22), 16: (0.8, 0.85), 32: (0.95, 1.0)}, True),
        ({8: (0.2, 0.22), 16: (0.955, 1.0), 32: (0.95, 1.0)}, True),  # level at the ceiling
        ({8: (0.2, 0.22), 16: (0.98, 1.0), 32: (0.95, 1.0)}, False),  # falls for one size
        ({8: (0.2, 0.22), 16: (0.7, 0.75), 32: (0.79, 0.85)}, False),  # one size learns T = 32
        ({8: (0.2, 0.25), 16: (0.8, 0.85), 32: (0.95, 1.0)}, False),  # sizes differ at T = 8
    ],
)
def test_the_rule(means, passed):
    verdict = STUDY.verdict(frame(means))
    assert verdict.passed is passed
    assert f"E = 64: {', '.join(f'{pair[1]:.3f}' for pair in means.values())}" in verdict.reasons[1]


def test_a_size_without_numbers_does_not_pass():
    """All runs of one length and size diverged."""
    rows = frame({8: (0.2, 0.2), 16: (0.8, 0.8), 32: (0.95, 0.95)})
    missing = (rows["n_tokens"] == 16) & (rows["d_model"] == 64)
    assert not STUDY.verdict(rows[~missing]).passed


def test_the_table_and_the_figure():
    rows = frame({8: (0.2, 0.22), 16: (0.8, 0.85)})
    table = STUDY.table(rows)
    assert ("| 8 | 2, 2 | 16 | 0.2 (0.15 to 0.25) | 0.1 (0.1 to 0.1) | 6, 0 | 1.5, 2 |") in table
    assert "Table 12 do not survive" in table
    errors, exponents = STUDY.figure(rows).axes
    assert list(errors.lines[0].get_ydata()) == pytest.approx([0.2, 0.8])
    assert list(exponents.lines[1].get_ydata()) == pytest.approx([0.5, 1])


def test_a_row_holds_the_errors_and_the_estimate():
    settings = {"n_tokens": 8, "heads": [4, 4], "d_model": 32, "n_train": 200, "epochs": 1}
    (row,), (again,) = (STUDY.measure(settings, 3, "cpu") for _ in range(2))
    assert row == again
    # T^3 - 1 comparisons ask for |I| = 3, C(8, 3) - 3 for none; all 8 tokens are enough; d/E = 1/8
    assert (row["information"], row["information_proved"]) == (3, 0)
    assert (row["exponent_lower"], row["exponent_upper"]) == (0.375, 1.0)
    # the only step saw all the data before its update: the error of the untrained model
    task = TriangleCenter(n_tokens=8)
    x, y = STUDY.drawn(task, "train", 200, 3)
    architecture = Architecture(n_heads=(4, 4), d_model=32, d_token=4, n_tokens=8, d_mlp=64)
    untrained = build_model(architecture, seed=3, device="cpu")
    with torch.no_grad():
        error = (untrained(x) - y).square().mean() / y.var(correction=0)
    assert row["train_nmse"] == pytest.approx(float(error), rel=1e-5)


def test_the_smallest_model_learns_short_sequences():
    """So that a large error at a large T is not that of a training that does nothing."""
    settings = {"n_tokens": 3, "heads": [2, 2], "d_model": 16, "n_train": 2000, "epochs": 8}
    (row,) = STUDY.measure(settings, 1, "cpu")
    assert row["nmse"] < 0.7
    assert {case["n_tokens"] for case in STUDY.cases("quick")} == {8, 16, 32}
