"""The study of D best pairs: its configurations, its rule, what stands beside what."""

import itertools

import pandas as pd
import pytest
import torch

from infoflow_lens.studies.papers.intrinsic_dimension import IntrinsicDimensionStudy, routes
from infoflow_lens.tasks import IntrinsicDimension

STUDY = IntrinsicDimensionStudy()
ROTATED, PLAIN, LINEAR = "orthogonal", "gaussian", "gaussian, linear encoder"


def frame(errors, floor=0.6):
    """Two seeds by (D, matrices, heads), the second three times worse, of one draw."""
    rows = []
    for i, ((d, kind, heads), nmse) in enumerate(errors.items()):
        h1 = int(heads.split()[0])
        reached = 0.0 if h1 >= d else 0.01 if kind == PLAIN else floor
        rows += [
            {
                "run": 2 * i + seed, "seed": seed, "D": d, "matrices": kind, "draw": 0,
                "heads": heads, "n_tokens": 8, "nmse": nmse * (1 + 2 * seed), "head": head,
                "floor": reached, "floor_low": 0.9 * reached, "floor_high": 1.1 * reached,
                **{f"first_{c + 1}": 0.9 if c == head else 0.2 for c in range(d)},
                **{f"second_{c + 1}": 0.1 for c in range(d)},
            }
            for seed in (0, 1)
            for head in range(h1)
        ]  # fmt: skip
    return pd.DataFrame(rows)


SEEN = {
    (2, ROTATED, "2 2"): 1e-3,
    (2, ROTATED, "1 3"): 0.5,
    (3, LINEAR, "3 3"): 1e-3,
    (3, LINEAR, "2 4"): 1.1e-2,
    (3, LINEAR, "1 5"): 0.5,
    (2, PLAIN, "2 2"): 1e-3,
    (2, PLAIN, "1 3"): 2e-3,
}


def best_pair(tokens, matrix):
    """By looking at all pairs, a token with itself included."""

    def score(pair):
        x, y = tokens[pair[0]], tokens[pair[1]]
        return sum(x[i] * matrix[i][j] * y[j] for i in range(len(x)) for j in range(len(y)))

    return max(itertools.product(range(len(tokens)), repeat=2), key=score)


def passing():
    return frame(SEEN)


@pytest.mark.parametrize(
    ("changed", "passed"),
    [
        ({}, True),
        ({(2, ROTATED, "1 3"): 9e-3}, False),
        ({(3, LINEAR, "2 4"): 9e-3}, False),  # one head fewer counts, too
        ({(2, PLAIN, "1 3"): 1e-3}, True),  # routed heads come close: no gap is owed
    ],
)
def test_the_verdict_follows_the_stated_rule(changed, passed):
    verdict = STUDY.verdict(frame({**SEEN, **changed}))
    assert verdict.passed is passed
    assert len(verdict.remarks) == 4


def test_a_gap_that_is_owed_nowhere_is_not_seen():
    verdict = STUDY.verdict(frame(SEEN, floor=0.05))
    assert not verdict.passed
    assert all("no gap is owed" in remark for remark in verdict.remarks)


@pytest.mark.parametrize("preset", ["smoke", "quick", "full"])
def test_for_every_d_the_heads_go_around_it_and_number_2d(preset):
    cases = STUDY.cases(preset)
    for key in {(case["D"], case["matrices"], case["draw"]) for case in cases}:
        heads = [c["heads"] for c in cases if (c["D"], c["matrices"], c["draw"]) == key]
        d = key[0]
        assert heads[0] == [d, d]
        assert all(sum(pair) == 2 * d and pair[0] < d for pair in heads[1:])
        assert len({tuple(pair) for pair in heads}) == len(heads) == (2 if d == 2 else 3)


@pytest.mark.parametrize("kind", ["gaussian", "orthogonal"])
def test_routes_count_the_partners_that_heads_attend_to(kind):
    task = IntrinsicDimension(n_tokens=6, d_token=3, matrix_kind=kind, tokens="sphere", seed=4)
    x, _ = task.sample(40, 0)
    chosen = torch.zeros(40, 2, 7, dtype=torch.long)
    for sample, matrix in ((s, m) for s in range(40) for m in range(2)):
        first, second = best_pair(x[sample].tolist(), task.matrices[matrix].tolist())
        # head 0 finds the partner of the first matrix from its first token; head 1 never does
        if matrix == 0:
            chosen[sample, 0, first] = second
            chosen[sample, 1] = (second + 1) % 6
    first, second = routes(task, x, chosen)
    assert first.shape == second.shape == (2, 2)
    assert first[0, 0] == 1.0
    assert first[1, 0] == 0.0
