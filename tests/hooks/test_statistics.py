"""Streaming regression is ordinary least squares, however the rows arrive."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from infoflow_lens.hooks.statistics import RegressionStatistics
from sklearn.linear_model import LinearRegression


def data(seed, n, n_features, n_groups=2, n_targets=3, offset=0.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, n_features, generator=generator, dtype=torch.float64) + offset
    mixing = torch.randn(n_features, n_groups * n_targets, generator=generator).double()
    noise = torch.randn(n, n_groups * n_targets, generator=generator).double()
    return x, (x @ mixing + noise + offset).view(n, n_groups, n_targets)


def streamed(x, y, sizes):
    """Statistics of consecutive batches, each in an accumulator of its own."""
    parts = []
    for rows_x, rows_y in zip(x.split(sizes), y.split(sizes), strict=True):
        part = RegressionStatistics()
        part.update(rows_x, rows_y)
        parts.append(part)
    return parts


@pytest.mark.parametrize("offset", [0.0, 30.0])
@pytest.mark.parametrize("n_features", [1, 5, 17])
def test_coefficients_and_errors_equal_scikit_learn(n_features, offset):
    x, y = data(0, 400, n_features, offset=offset)
    test_x, test_y = data(1, 150, n_features, offset=offset)
    fitted, held_out = RegressionStatistics(), RegressionStatistics()
    fitted.update(x, y)
    held_out.update(test_x, test_y)
    fit = fitted.fit()
    assert fit.rank == n_features
    for group in range(y.shape[1]):
        expected = LinearRegression().fit(x.numpy(), y[:, group].numpy())
        np.testing.assert_allclose(fit.weight[group].T, expected.coef_, atol=1e-8)
        np.testing.assert_allclose(fit.bias[group], expected.intercept_, atol=1e-6)
        residual = expected.predict(test_x.numpy()) - test_y[:, group].numpy()
        np.testing.assert_allclose(
            held_out.squared_error(fit)[group], (residual**2).sum(1).mean(), rtol=1e-8
        )
        target = test_y[:, group].numpy()
        np.testing.assert_allclose(held_out.second_moment()[group], (target**2).sum(1).mean())
        np.testing.assert_allclose(held_out.variance()[group], target.var(0).sum(), rtol=1e-8)


@pytest.mark.parametrize(("n", "n_features"), [(6, 11), (2, 5)])
def test_too_few_rows_give_the_map_of_least_norm(n, n_features):
    """scikit-learn centres and takes LAPACK's minimum-norm solution."""
    x, y = data(2, n, n_features)
    statistics = RegressionStatistics()
    statistics.update(x, y)
    fit = statistics.fit()
    assert fit.rank == n - 1
    expected = LinearRegression().fit(x.numpy(), y.flatten(1).numpy())
    np.testing.assert_allclose(
        fit.weight.transpose(0, 1).flatten(1).T, expected.coef_, rtol=1e-6, atol=1e-8
    )


def test_dependent_features_give_the_map_of_least_norm():
    x, y = data(3, 200, 4)
    x = torch.cat([x, x[:, :2] - 3 * x[:, 2:]], dim=1)
    statistics = RegressionStatistics()
    statistics.update(x, y)
    fit = statistics.fit()
    assert fit.rank == 4
    centred = (x - x.mean(0)).numpy()
    expected = np.linalg.pinv(centred) @ (y - y.mean(0)).flatten(1).numpy()
    np.testing.assert_allclose(fit.weight.transpose(0, 1).flatten(1), expected, atol=1e-8)


def test_features_of_very_different_scales():
    """A Gram matrix in the features' own units would lose the small ones in rounding."""
    x, y = data(7, 500, 4)
    x = x * torch.tensor([1.0, 1e-4, 1e-4, 1e-4]) + torch.tensor([1e3, 0, 0, 0])
    statistics = RegressionStatistics()
    statistics.update(x, y)
    fit = statistics.fit()
    assert fit.rank == 4
    flat = y.flatten(1).numpy()
    expected = LinearRegression().fit(x.numpy(), flat)
    error = ((expected.predict(x.numpy()) - flat) ** 2).sum(1).mean()
    assert float(statistics.squared_error(fit).sum()) == pytest.approx(error, rel=1e-6)


def test_constant_features_predict_the_mean():
    _, y = data(4, 50, 3)
    statistics = RegressionStatistics()
    statistics.update(torch.ones(50, 3), y)
    fit = statistics.fit()
    assert fit.rank == 0
    np.testing.assert_allclose(statistics.squared_error(fit), statistics.variance(), rtol=1e-9)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    order=st.randoms(use_true_random=False),
)
def test_any_batches_merged_in_any_order_give_the_same(seed, sizes, order):
    n = sum(sizes) + 4
    x, y = data(seed, n, 3)
    parts = streamed(x, y, [*sizes, 4])
    order.shuffle(parts)
    merged = RegressionStatistics()
    for part in parts:
        merged.merge(part)
    whole = RegressionStatistics()
    whole.update(x, y)
    assert merged.n == n
    fit, expected = merged.fit(), whole.fit()
    assert fit.rank == expected.rank
    torch.testing.assert_close(fit.weight, expected.weight, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(
        merged.squared_error(fit), whole.squared_error(expected), rtol=1e-9, atol=1e-9
    )


def test_merging_does_not_touch_what_was_merged():
    x, y = data(5, 10, 2)
    first, second = streamed(x, y, [6, 4])
    total = RegressionStatistics()
    total.merge(first)
    total.merge(second)
    total.update(x, y)
    again = RegressionStatistics()
    again.update(x[:6], y[:6])
    torch.testing.assert_close(first.fit().weight, again.fit().weight)
