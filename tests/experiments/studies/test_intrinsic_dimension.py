"""The study of D best pairs: its configurations, its rule, what stands beside what."""

import pandas as pd
import pytest

from infoflow_lens.experiments.studies.intrinsic_dimension import IntrinsicDimensionStudy
from infoflow_lens.tasks import IntrinsicDimension
from infoflow_lens.theory.estimate import min_heads

STUDY = IntrinsicDimensionStudy()


def frame(errors):
    return pd.DataFrame(
        [
            {"run": i, "seed": seed, "D": d, "heads": heads, "n_tokens": 8, "nmse": nmse * factor}
            for i, ((d, heads), nmse) in enumerate(errors.items())
            for seed, factor in ((0, 0.5), (1, 1.5))
        ]
    )


SEEN = {(2, "2 2"): 1e-4, (2, "1 3"): 2e-3, (3, "3 3"): 1e-4, (3, "2 4"): 1e-3, (3, "1 5"): 1e-2}


@pytest.mark.parametrize(
    ("changed", "passed"),
    [
        ({}, True),
        ({(2, "1 3"): 9e-4}, False),
        ({(3, "2 4"): 9e-4}, False),  # one head fewer counts, too
        ({(3, "1 5"): 9e-4}, False),
    ],
)
def test_the_rule(changed, passed):
    verdict = STUDY.verdict(frame({**SEEN, **changed}))
    assert verdict.passed is passed
    assert len(verdict.reasons) == 3


def test_nothing_to_judge_is_not_seen():
    assert not STUDY.verdict(frame({(4, "4 4"): 1e-4, (4, "3 5"): 1e-2})).passed


@pytest.mark.parametrize("preset", ["smoke", "quick", "full"])
def test_for_every_d_the_heads_go_around_it_and_number_2d(preset):
    cases = STUDY.cases(preset)
    for d in {case["D"] for case in cases}:
        heads = [case["heads"] for case in cases if case["D"] == d]
        assert heads[0] == [d, d]
        assert all(sum(pair) == 2 * d and pair[0] < d for pair in heads[1:])
        assert len({tuple(pair) for pair in heads}) == len(heads) == (2 if d == 2 else 3)


def test_the_column_of_theory_is_what_counting_says():
    table = STUDY.table(frame(SEEN))
    for (d, heads), nmse in SEEN.items():
        pair = tuple(map(int, heads.split()))
        needed = min_heads(IntrinsicDimension(n_components=d).comparison, pair, "paper")
        says = "allowed" if pair[0] >= needed else "excluded"
        (line,) = [row for row in table.splitlines() if row.startswith(f"| {d} | {pair} ")]
        assert f"| {says} |" in line
        assert f"| {nmse / 1e-4:.3g} |" in line


def test_the_figure_has_a_line_for_each_kind_of_heads_and_the_phase_diagram():
    errors, phases = STUDY.figure(frame(SEEN)).axes
    assert [text.get_text() for text in errors.get_legend().get_texts()] == [
        "(D, D)",
        "(D - 1, D + 1)",
        "(1, 2D - 1)",
    ]
    assert [label.get_text() for label in phases.get_yticklabels()] == ["1", "2", "3", "4"]
    assert "8" in [label.get_text() for label in phases.get_xticklabels()]


def test_a_row_is_a_model_trained_on_the_target():
    (settings, *_) = STUDY.cases("smoke")
    one, again = (STUDY.measure({**settings, "epochs": 6}, 3, "cpu") for _ in range(2))
    assert one == again
    assert 0 < one[0]["nmse"] < 0.9  # a constant predictor has 1
