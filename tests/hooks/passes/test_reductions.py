"""Reductions leave padding out, whatever it holds."""

import pytest
import torch

from infoflow_lens.hooks.passes.view import mean_over, sum_over


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("junk", [0.0, 7.0, torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_each_sequence_is_reduced_as_if_alone(axis, junk, dtype):
    lengths = (5, 3, 1)
    values = torch.randn(3, 5, 5, 2, generator=torch.Generator().manual_seed(0)).mul(3).to(dtype)
    real = torch.arange(5) < torch.tensor(lengths)[:, None]
    padded = values.clone()
    for row, n in zip(padded, lengths, strict=True):
        row.narrow(axis - 1, n, 5 - n)[:] = junk if values.is_floating_point() else 1
    for index, n in enumerate(lengths):
        alone = values[index].narrow(axis - 1, 0, n).double()
        kwargs = {"rtol": 1e-5, "atol": 1e-6, "check_dtype": False}
        torch.testing.assert_close(
            sum_over(padded, real, axis)[index], alone.sum(axis - 1), **kwargs
        )
        torch.testing.assert_close(
            mean_over(padded, real, axis)[index], alone.mean(axis - 1), **kwargs
        )


def test_no_position_has_no_mean():
    values, none = torch.ones(1, 4), torch.zeros(1, 4, dtype=torch.bool)
    assert mean_over(values, none, 1).isnan().all()
    assert sum_over(values, none, 1).tolist() == [0.0]
