"""Targets that read fixed positions, all positions, or the k-th largest number."""

import pytest
import torch

from infoflow_lens import InfoFlowError, load_task

CASES = [
    ("position_sum", {}),
    ("position_sum", {"positions": (4, 1), "d_token": 3}),
    ("global_mean", {}),
    ("kth_largest", {"k": 1}),
    ("kth_largest", {"k": 3}),
    ("kth_largest", {"k": 6}),
]


def by_loops(task, x):
    if task.name == "kth_largest":
        return sorted(x[:, 0].tolist())[-task.k : len(x) - task.k + 1]
    chosen = task.positions if task.name == "position_sum" else range(len(x))
    total = [sum(float(x[t, i]) for t in chosen) for i in range(x.shape[1])]
    return [value / len(x) for value in total] if task.name == "global_mean" else total


@pytest.mark.parametrize(("name", "parameters"), CASES)
def test_the_target_is_its_formula(name, parameters):
    task = load_task(name, n_tokens=6, **parameters)
    x, y = task.sample(15, seed=0)
    assert y.shape == (15, task.d_output)
    torch.testing.assert_close(y, torch.tensor([by_loops(task, sequence) for sequence in x]))


@pytest.mark.parametrize(("name", "parameters"), CASES)
def test_the_active_index_set_is_where_the_gradient_is_not_zero(name, parameters):
    task = load_task(name, n_tokens=6, **parameters)
    x = task.sample(30, seed=1)[0].requires_grad_(True)
    (gradient,) = torch.autograd.grad(task.target(x).sum(), x)
    assert task.active_index_set(x).equal((gradient != 0).any(dim=-1))


def test_numbers_lie_between_0_and_1():
    x, _ = load_task("kth_largest").sample(2000, seed=0)
    assert 0 <= x.min() < 0.01 < 0.99 < x.max() <= 1


def test_equal_numbers_count_one_by_one_from_the_lowest_position():
    x = torch.tensor([[[0.5], [0.9], [0.5], [0.1]]])
    active = [
        load_task("kth_largest", n_tokens=4, k=k).active_index_set(x).nonzero()[0, 1].item()
        for k in (1, 2, 3, 4)
    ]
    assert active == [1, 0, 2, 3]


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("position_sum", {"positions": (0, 16)}, r"positions are \(0, 16\): .* from 0 to 15"),
        ("position_sum", {"positions": (1, 1)}, "different integers"),
        ("position_sum", {"positions": ()}, "at least one"),
        ("kth_largest", {"k": 17}, "k is 17 for 16 tokens"),
        ("kth_largest", {"d_token": 2}, "d_token is 2"),
    ],
)
def test_bad_parameters_are_named(name, parameters, message):
    with pytest.raises(InfoFlowError, match=message):
        load_task(name, **parameters)
