"""Tempered patterns and errors of linear maps, against brute force and scikit-learn."""

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression

from infoflow_lens.studies.tempering import map_errors, mean_entropy, temper

N, QUERIES, KEYS = 30, 4, 6
GENERATOR = torch.Generator().manual_seed(0)
SCORES = torch.randn(N, QUERIES, KEYS, generator=GENERATOR)
ALLOWED = torch.ones(QUERIES, KEYS, dtype=torch.bool).tril()


def entropy_by_hand(pattern):
    rows = [
        -sum(share * math.log(share) for share in row.tolist() if share > 0)
        for sequence in pattern
        for query, row in enumerate(sequence)
        if query > 0  # the first query has one key only
    ]
    return sum(rows) / len(rows)


@pytest.mark.parametrize("entropy", [0.05, 0.5, 0.9])
def test_a_tempered_pattern_has_the_entropy_the_choices_and_the_mask(entropy):
    pattern = temper(SCORES, ALLOWED, entropy)
    assert entropy_by_hand(pattern) == pytest.approx(entropy, abs=1e-4)
    assert mean_entropy(pattern, ALLOWED) == pytest.approx(entropy, abs=1e-4)
    assert not pattern[:, ~ALLOWED].any()
    masked = SCORES.masked_fill(~ALLOWED, -torch.inf)
    assert torch.equal(pattern.argmax(dim=2), masked.argmax(dim=2))


def test_tempering_is_a_softmax_of_scaled_scores():
    pattern = temper(SCORES, ALLOWED, 0.5)[:, -1, :QUERIES]
    slope = (pattern.log()[:, 1:] - pattern.log()[:, :1]) / (
        SCORES[:, -1, 1:QUERIES] - SCORES[:, -1, :1]
    )
    torch.testing.assert_close(slope, torch.full_like(slope, float(slope[0, 0])), rtol=1e-2, atol=0)


def test_the_most_entropy_is_that_of_even_attention():
    even = sum(math.log(n) for n in range(2, QUERIES + 1)) / (QUERIES - 1)
    assert mean_entropy(temper(SCORES, ALLOWED, 10.0), ALLOWED) == pytest.approx(even, abs=1e-5)


def test_errors_are_those_of_scikit_learn_by_either_normalisation():
    state = torch.randn(N, QUERIES, 5, generator=GENERATOR)
    target = state[..., :2] + 0.5 * torch.randn(N, QUERIES, 2, generator=GENERATOR) + 1
    held_out = torch.arange(N) % 3 == 0
    found = map_errors(state, target, held_out)
    x, y = (part[~held_out].flatten(0, 1).numpy() for part in (state, target))
    model = LinearRegression().fit(x, y)
    x, y = (part[held_out].flatten(0, 1).numpy() for part in (state, target))
    error = np.square(model.predict(x) - y).sum(axis=1).mean()
    assert found.second_moment == pytest.approx(error / np.square(y).sum(axis=1).mean(), rel=1e-4)
    spread = np.square(y - y.mean(axis=0)).sum(axis=1).mean()
    assert found.fvu == pytest.approx(error / spread, rel=1e-4)


def test_targets_that_do_not_vary_have_no_share_of_variance():
    state = torch.randn(N, QUERIES, 2, generator=GENERATOR)
    found = map_errors(state, torch.ones(N, QUERIES, 1), torch.arange(N) % 2 == 0)
    assert found.second_moment < 1e-12
    assert math.isnan(found.fvu)
