"""Streaming regression is ordinary least squares, however the rows arrive."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LinearRegression, Ridge

from infoflow_lens.hooks.recovery.maps import measure_errors
from infoflow_lens.hooks.recovery.rows import RowBuffer, Rows
from infoflow_lens.hooks.recovery.statistics import ALL, RegressionStatistics


def mean_error(statistics, fit):
    """Mean over rows of the squared error, for every group."""
    return statistics.error_sums(fit).sum(dim=1) / statistics.n


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
            mean_error(held_out, fit)[group], (residual**2).sum(1).mean(), rtol=1e-8
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
    assert float(mean_error(statistics, fit).sum()) == pytest.approx(error, rel=1e-6)


def test_constant_features_predict_the_mean():
    _, y = data(4, 50, 3)
    statistics = RegressionStatistics()
    statistics.update(torch.ones(50, 3), y)
    fit = statistics.fit()
    assert fit.rank == 0
    np.testing.assert_allclose(mean_error(statistics, fit), statistics.variance(), rtol=1e-9)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    order=st.randoms(use_true_random=False),
    offset=st.sampled_from([0.0, 50.0]),
)
def test_any_batches_merged_in_any_order_give_the_same(seed, sizes, order, offset):
    n = sum(sizes) + 4
    x, y = data(seed, n, 3, offset=offset)
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
        mean_error(merged, fit), mean_error(whole, expected), rtol=1e-9, atol=1e-9
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


def chosen_data(n=900, n_values=400, n_features=40, n_groups=4, n_targets=130, dtype=torch.float32):
    """Targets that several rows share, with means far from 0."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(n_values, n_targets, generator=generator) + 20
    chosen = torch.randint(n_values // 2, (n, n_groups), generator=generator) * 2  # odd: by none
    x = torch.randn(n, n_features, generator=generator) + 50
    x[:, :n_targets] += values[chosen[:, 0], : x.shape[1]]
    return x.to(dtype), values.to(dtype), chosen.int()


@pytest.mark.parametrize("n_targets", [3, 130])  # by copying targets, and by adding up features
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-9)])
def test_chosen_targets_are_targets(n_targets, dtype, rtol):
    x, values, chosen = chosen_data(n_groups=200 if n_targets == 3 else 4, n_targets=n_targets,
                                    dtype=dtype)  # fmt: skip
    statistics = RegressionStatistics()
    for rows in (slice(0, 500), slice(500, None)):
        statistics.update_chosen(x[rows], values, chosen[rows])
    fit = statistics.fit()
    for group in (0, 3):
        target = values[chosen[:, group].long()].double().numpy()
        expected = LinearRegression().fit(x.double().numpy(), target)
        np.testing.assert_allclose(
            fit.weight[group].T, expected.coef_, atol=rtol * np.abs(expected.coef_).max()
        )
        error = ((expected.predict(x.double().numpy()) - target) ** 2).sum(1).mean()
        found = float(mean_error(statistics, fit)[group])
        assert found == pytest.approx(error, rel=min(rtol, 1e-6))


def test_classes_are_one_hot_targets():
    x, _, chosen = chosen_data(n_targets=1)
    classes = torch.arange(400) % 7 - 1  # -1 is no class
    by_class, one_hot = RegressionStatistics(), RegressionStatistics()
    by_class.update_classes(x, classes, chosen, 6)
    one_hot.update_chosen(x, (classes[:, None] == torch.arange(6)).double(), chosen)
    torch.testing.assert_close(by_class.fit().weight, one_hot.fit().weight, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(by_class.variance(), one_hot.variance())


@pytest.mark.parametrize("n_targets", [3, 130])
def test_rows_that_memory_ran_out_on_are_added_once(n_targets, monkeypatch):
    x, values, chosen = chosen_data(n_targets=n_targets, n_groups=5)
    whole, interrupted = RegressionStatistics(), RegressionStatistics()
    whole.update_chosen(x, values, chosen)
    left, select = [2], torch.Tensor.index_select

    def select_until(tensor, *args):
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError
        return select(tensor, *args)

    monkeypatch.setattr("infoflow_lens.hooks.recovery.statistics._GATHERED", len(x) * n_targets)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "index_select", select_until)
        with pytest.raises(torch.OutOfMemoryError):
            interrupted.update_chosen(x, values, chosen)
    assert interrupted.n == 0
    interrupted.update_chosen(x, values, chosen)
    assert interrupted.n == len(x)
    torch.testing.assert_close(interrupted.cross, whole.cross, rtol=1e-12, atol=1e-12)


def test_buffered_rows_are_added_in_the_same_portions_whatever_the_batches():
    x, values, chosen = chosen_data(n=120, n_targets=3)
    portions = []
    for batch in (1, 3, 40):  # sequences of three rows
        buffer, sizes = RowBuffer(10), []
        add = buffer.statistics.update_chosen
        buffer.statistics.update_chosen = lambda x, *rest, s=sizes, add=add: (
            s.append(len(x)), add(x, *rest)
        )  # fmt: skip
        for first in range(0, 40, batch):
            rows = slice(3 * first, 3 * (first + batch))
            n = len(x[rows])
            buffer.append(Rows(x[rows], chosen[rows], values, list(range(3, n + 1, 3))))
            buffer.settle()
        buffer.settle(everything=True)
        assert buffer.n == 120
        portions.append((sizes, buffer.statistics.cross))
    assert portions[0][0] == portions[1][0] == portions[2][0] == [12] * 10
    assert portions[0][1].equal(portions[1][1])
    assert portions[0][1].equal(portions[2][1])


@pytest.mark.parametrize("penalty", [1e-3, 40.0])
def test_ridge_equals_scikit_learn(penalty):
    x, y = data(8, 60, 7, offset=3.0)
    statistics = RegressionStatistics()
    statistics.update(x, y)
    fit = statistics.fit(ridge=penalty)
    expected = Ridge(penalty, solver="cholesky").fit(x.numpy(), y.flatten(1).numpy())
    found = fit.weight.transpose(1, 2).flatten(0, 1)
    np.testing.assert_allclose(found, expected.coef_, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(fit.bias.flatten(), expected.intercept_, rtol=1e-7)


@pytest.mark.parametrize(("n", "noise"), [(40, 3.0), (150, 1.0), (15, 1.0)])
def test_generalized_cross_validation_by_hat_matrices(n, noise):
    """n ||y - Hy||^2 / (n - tr H)^2, with an intercept, is nowhere smaller than where we stop."""
    x, y = data(9, n, 12)
    generator = torch.Generator().manual_seed(1)
    y = y + noise * 3 * torch.randn(y.shape, generator=generator, dtype=torch.float64)
    statistics = RegressionStatistics()
    statistics.update(x, y)
    fit = statistics.fit(ridge="gcv")
    centred = x - x.mean(0)

    def gcv(penalty, target):
        inner = centred.T @ centred + penalty * torch.eye(12, dtype=torch.float64)
        hat = centred @ torch.linalg.solve(inner, centred.T) + 1 / n
        return float(n * (target - hat @ target).square().sum() / (n - hat.trace()) ** 2)

    for group in range(2):
        chosen = float(fit.ridge[group])
        least = min(gcv(10.0**exponent, y[:, group]) for exponent in np.linspace(-6, 5, 221))
        assert gcv(chosen, y[:, group]) <= least * (1 + 1e-4)
        expected = Ridge(chosen).fit(x.numpy(), y[:, group].numpy())
        np.testing.assert_allclose(fit.weight[group].T, expected.coef_, rtol=1e-6, atol=1e-9)


def test_a_float32_mean_far_from_zero_costs_no_digits():
    """Products of float32 numbers of size 1000 would lose what varies by 1."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3000, 64, generator=generator) + 1000
    values = (torch.randn(3000, 150, generator=generator) + 1000).float()
    values[:, :64] += x - 1000
    statistics = RegressionStatistics()
    rows = torch.arange(3000).expand(3, -1).T
    for first in range(0, 3000, 1000):
        statistics.update_chosen(x[first : first + 1000], values, rows[first : first + 1000])
    expected = LinearRegression().fit(x.double().numpy(), values.double().numpy())
    np.testing.assert_allclose(statistics.fit().weight[1].T, expected.coef_, atol=1e-6)


def test_intervals_cover_the_error_that_the_map_has_on_all_data():
    """95% intervals over sequences whose rows are alike; the map itself is given."""
    generator = torch.Generator().manual_seed(0)

    def draw(n_sequences):
        common = torch.randn(n_sequences, 1, 1, generator=generator, dtype=torch.float64)
        own = torch.randn(n_sequences, 5, 3, generator=generator, dtype=torch.float64)
        x = own + common
        noise = torch.randn(n_sequences, 5, 2, generator=generator, dtype=torch.float64)
        y = x[..., :2] + noise * (1 + common.abs())  # errors differ from sequence to sequence
        return x, y

    def taken_in(x, y):
        statistics = RegressionStatistics()
        statistics.update(x.flatten(0, 1), y.flatten(0, 1)[:, None])
        return statistics

    fit = taken_in(*draw(200)).fit()
    (truth, _), covered = measure_errors([taken_in(*draw(30000))], fit, ALL, 2), []
    for _ in range(250):
        x, y = draw(64)
        blocks = [taken_in(x[index::8], y[index::8]) for index in range(8)]
        found, _ = measure_errors(blocks, fit, ALL, 2)
        off = (found.value - truth.value).abs()
        covered.append(bool(off <= found.half_width))
    assert 0.91 <= np.mean(covered) <= 0.98
