"""The study of D heads on separated matrices: its cells, its rule, what stands beside what."""

import pandas as pd
import pytest

from infoflow_lens.studies.papers.separated_pairs import SeparatedPairs
from infoflow_lens.tasks.tuples import largest_overlap
from tests.conftest import some_of
from tests.studies.papers.test_every_study import measured

STUDY = SeparatedPairs()
BOTH = ("rotoreflection", "linear")
SEEN = {
    (2, 4, *BOTH, "2 2"): 1e-4,
    (2, 4, *BOTH, "1 3"): 0.1,
    (3, 4, *BOTH, "3 3"): 9e-4,
    (3, 4, *BOTH, "2 4"): 0.05,
    (3, 4, *BOTH, "1 5"): 0.2,
    (3, 4, "orthogonal", "linear", "3 3"): 0.05,
    (4, 4, *BOTH, "4 4"): 0.1,
}


def frame(errors, first=0.05, second=1.1):
    """Two draws, one ten times worse and one ten times better, of two seeds, the second worse."""
    rows = []
    for i, ((d, length, matrices, encoder, heads), nmse) in enumerate(errors.items()):
        rows += [
            {
                "run": 4 * i + 2 * draw + seed, "seed": seed, "D": d, "n_tokens": length,
                "matrices": matrices, "encoder": encoder, "draw": draw, "heads": heads,
                "nmse": nmse * (0.1, 10)[draw] * (1 + 2 * seed), "head": head, "floor": 0.6,
                "lost_without": 0.001 if head == 2 else 0.5,
                "first_choice": 5 if head == 2 else first,
                "second_choice": second,
                **{f"first_{c + 1}": 0.9 if c == head else 0.2 for c in range(d)},
                **{f"second_{c + 1}": 0.1 for c in range(d)},
            }
            for draw in (0, 1) for seed in (0, 1) for head in range(int(heads.split()[0]))
        ]  # fmt: skip
    return pd.DataFrame(rows)


def passing():
    return frame(SEEN)


@pytest.mark.parametrize(
    ("changed", "recovered", "broken"),
    [
        ({}, {}, []),
        ({(3, 4, *BOTH, "3 3"): 1.1e-3}, {}, [0, 1]),  # 45 times
        ({(3, 4, *BOTH, "2 4"): 0.04}, {}, [1]),  # one head fewer counts, too
        ({(3, 4, "orthogonal", "linear", "3 3"): 1e-6, (4, 4, *BOTH, "4 4"): 1.0}, {}, []),
        ({}, {"first": 0.11}, [2]),
        ({}, {"second": 0.7}, [3]),
        ({}, {"second": 7.0}, []),  # worse than before is in the theory's favour
    ],
)
def test_the_verdict_follows_the_stated_rule(changed, recovered, broken):
    results = frame({**SEEN, **changed}, **recovered)
    assert [i for i, c in enumerate(STUDY.claims()) if not c.judge(results).passed] == broken
    assert STUDY.verdict(results).passed is (not broken)


def test_ablations_and_larger_d_are_told_and_judge_nothing():
    verdict = STUDY.verdict(frame(SEEN))
    assert verdict.remarks == (
        "D = 3, T = 4, (3, 3), orthogonal, linear: 5.00e-02, with both 9.00e-04",
        "D = 4, T = 4, (4, 4): 1.00e-01",
    )
    judged = [case for case in STUDY.cases("full") if STUDY.judges(case)]
    assert {(c["D"], c["n_tokens"]) for c in judged} == {(2, 6), (2, 8), (3, 6), (3, 8)}


@pytest.mark.parametrize("preset", some_of(["smoke", "quick", "full"], "smoke"))
def test_matrices_are_far_apart_and_training_is_at_full_length(preset):
    for case in STUDY.cases(preset):
        overlap = largest_overlap(STUDY.task(case).matrices)
        assert overlap < (0.1 if case["D"] < 4 else 0.4)
        config = STUDY.training(case)
        assert config.epochs * case["n_train"] == case["steps"] * 256
        draw, _ = STUDY.data(case, 0)
        if preset == "smoke":
            assert draw(1)[0].shape[1] == case["n_tokens"]
            assert not draw(1)[0].equal(draw(2)[0])
            assert draw(1)[1].std().item() == pytest.approx(1, rel=0.05)


def test_seeds_together_have_the_rows_of_seeds_one_by_one():
    """In float32, where ten steps blow rounding up a little."""
    (settings, *_) = STUDY.cases("smoke")
    together = STUDY.measure_together(settings, (0, 1), "cpu")
    assert together[0] != together[1]
    for seed, rows in zip((0, 1), together, strict=True):
        assert [row["head"] for row in rows] == [0, 1]
        for row, alone in zip(rows, measured(STUDY.name, seed), strict=True):
            assert row == pytest.approx({name: alone[name] for name in row}, rel=1e-2)
