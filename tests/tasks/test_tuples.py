"""Targets over pairs and triples: formula, active tokens, memory."""

import itertools

import pytest
import torch

from infoflow_lens import InfoFlowError, load_task

CASES = [
    ("depth_separation", {}),
    ("depth_separation", {"d_token": 2, "tokens": "normal"}),
    ("intrinsic_dimension", {"n_components": 3}),
    ("triangle_center", {"d_token": 3}),
]


def by_loops(task, x):
    """The target of one sequence, as the paper writes it."""
    positions = range(len(x))
    if task.name == "depth_separation":
        return min(float((x[s] + x[t]).square().sum()) for s in positions for t in positions)
    if task.name == "intrinsic_dimension":
        return sum(
            max(float(x[s] @ a @ x[t]) for s in positions for t in positions) for a in task.matrices
        )
    triples = itertools.product(positions, repeat=3)
    return min(float((x[a] + x[b] + x[c]).square().sum()) for a, b, c in triples)


@pytest.mark.parametrize(("name", "parameters"), CASES)
def test_the_target_is_its_formula(name, parameters):
    task = load_task(name, n_tokens=6, **parameters)
    x, y = task.sample(15, seed=0)
    expected = torch.tensor([[by_loops(task, sequence)] for sequence in x])
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "parameters"), CASES)
def test_the_active_index_set_is_where_the_gradient_is_not_zero(name, parameters):
    task = load_task(name, n_tokens=7, **parameters)
    x, _ = task.sample(40, seed=1)
    x.requires_grad_(True)
    (gradient,) = torch.autograd.grad(task.target(x).sum(), x)
    assert task.active_index_set(x).equal((gradient != 0).any(dim=-1))


@pytest.mark.parametrize(("name", "parameters"), CASES)
def test_the_gradient_is_the_targets(name, parameters):
    task = load_task(name, n_tokens=5, **parameters)
    x = task.sample(3, seed=2)[0].double().requires_grad_(True)
    assert torch.autograd.gradcheck(task.target, x, eps=1e-7, atol=1e-4)


def test_the_worked_example_of_appendix_e():
    task = load_task("depth_separation", n_tokens=4, d_token=2)
    x = torch.tensor([[[1.0, 0.0], [0.6, 0.8], [-0.8, -0.6], [0.0, -1.0]]])
    assert float(task.target(x)) == pytest.approx(0.08)
    assert task.active_index_set(x).tolist() == [[False, True, True, False]]


def test_triples_of_128_tokens_need_no_cube():
    """A [4, 128, 128, 128, 3, 3] tensor of floats would take 300 MB for a batch of four."""
    task = load_task("triangle_center", n_tokens=128, d_token=3)
    x, _ = task.sample(1, seed=0)
    tracker = torch.profiler.profile(profile_memory=True)
    with tracker:
        task.active_index_set(x)
    largest = max(event.self_cpu_memory_usage for event in tracker.key_averages())
    assert largest < 2**31


def test_distributions():
    sphere, _ = load_task("depth_separation", n_tokens=9).sample(50, seed=0)
    torch.testing.assert_close(sphere.norm(dim=-1), torch.ones(50, 9))
    clamped, _ = load_task("triangle_center", min_norm=0.7, max_norm=1.1).sample(500, seed=0)
    assert clamped.norm(dim=-1).min() >= 0.7 - 1e-6
    assert clamped.norm(dim=-1).max() <= 1.1 + 1e-6


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("triangle_center", {"min_norm": 2.0, "max_norm": 1.0}, "min_norm <= max_norm"),
    ],
)
def test_bad_parameters_are_named(name, parameters, message):
    with pytest.raises(InfoFlowError, match=message):
        load_task(name, **parameters)
