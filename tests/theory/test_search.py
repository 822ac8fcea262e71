"""The search against brute force over schedules that run, on random small targets."""

import random

import pytest
import torch

from infoflow_lens.tasks import Target
from infoflow_lens.theory.comparison import Component
from infoflow_lens.theory.estimate import estimate
from infoflow_lens.theory.schedule import learns, run_schedule
from infoflow_lens.theory.search import find
from infoflow_lens.theory.shapes import ModelShape
from tests.reference.schedules import Case, all_schedules

N_TOKENS, D_TOKEN = 6, 5


def random_component(arity, generator):
    if arity == 1:
        vector = torch.randn(D_TOKEN, generator=generator)
        return Component(1, lambda x: x[..., 0, :] @ vector, symmetric=True)
    matrix = torch.randn(D_TOKEN, D_TOKEN, generator=generator)
    return Component(2, lambda x: ((x[..., 0, :] @ matrix) * x[..., 1, :]).sum(dim=-1))


def random_case(seed):
    """A target of one to three components of arities 1 and 2, and one to three small layers."""
    chooser = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    n_layers = chooser.choice((1, 2, 2, 2, 3))
    most = {1: 3, 2: 2, 3: 1}[n_layers]
    heads = tuple(chooser.randint(1, most) for _ in range(n_layers))
    arities = [chooser.choice((1, 1, 2)) for _ in range(chooser.randint(1, 3))]
    components = tuple(random_component(arity, generator) for arity in arities)
    task = Target(components=components, n_tokens=N_TOKENS, d_token=D_TOKEN, tokens="sphere")
    return task, heads


MARKS = [(), *[pytest.mark.slow] * 4, *[pytest.mark.acceptance] * 45]
BLOCKS = [pytest.param(block, marks=marks) for block, marks in enumerate(MARKS)]


@pytest.mark.parametrize("block", BLOCKS)
def test_the_search_finds_a_schedule_where_brute_force_does_and_nowhere_else(block):
    """Random targets and architectures; "excluded, proved" never contradicts a schedule.

    40 of them, 200 with slow; 1800 more with the marker acceptance, any number by make hunt.
    """
    by_brute_force(block)


def by_brute_force(block):
    """Compare the search with all schedules, for one block of seeds."""
    for seed in range(40 * block, 40 * (block + 1)):
        task, heads = random_case(seed)
        x, _ = task.sample(24, seed)
        case = Case(task.components, x, task.active_index_set(x))
        runs = any(case.learned_by(layers) for layers in all_schedules(task.components, heads))
        found = find(task.components, heads, N_TOKENS, max_position_only=True)
        assert not found.left_out
        assert (found.schedule is not None) == runs, (seed, heads)
        if seed % 4 == 0:
            shape = ModelShape(heads, (16,) * len(heads), N_TOKENS)
            verdict = estimate(shape, task, verify=24, seed=seed, count="proved").verdict
            assert (verdict == "allowed by construction") == runs
            assert not (runs and verdict.startswith("excluded"))
        if found.schedule is not None:
            assert learns(task, found.schedule, 24, seed) == 1.0
            sizes = run_schedule(found.schedule, task.components, x).sizes()
            largest = max([int(sizes[-1, :, -1].max()), *sizes[:-1].flatten().tolist()])
            assert largest <= found.schedule.size


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("heads", [(1,), (1, 1), (1, 1, 1), (1, 1, 1, 1)])
def test_ranks_double_with_every_layer_of_token_heads(k, heads):
    """CLS climbs by what a token holds, which doubles: at most 2^L - 1 after L layers."""
    number = Component(1, lambda x: x[..., 0, 0], symmetric=True, rank=k)
    task = Target(components=(number,), n_tokens=24, d_token=1, tokens="unit")
    found = find(task.components, heads, 24, max_position_only=True).schedule
    assert (found is not None) == (k <= 2 ** len(heads) - 1)
    if found is not None:
        assert learns(task, found, 40) == 1.0


def test_ranks_are_counted_from_the_nearer_end():
    number = Component(1, lambda x: x[..., 0, 0], symmetric=True, rank=14)
    task = Target(components=(number,), n_tokens=16, d_token=1, tokens="unit")
    found = find(task.components, (1, 1), 16, max_position_only=True).schedule
    assert found.size <= 4
    assert learns(task, found, 40) == 1.0


@pytest.mark.parametrize("symmetric", [True, False])
def test_causal_tokens_see_the_past_only(symmetric):
    """An ordered pair is found from its later token, which takes a head for either order."""
    matrix = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    if symmetric:
        matrix = matrix + matrix.T
    pair = Component(2, lambda x: ((x[..., 0, :] @ matrix) * x[..., 1, :]).sum(-1), symmetric)
    task = Target(components=(pair,), n_tokens=12, d_token=4, tokens="sphere")
    one = find(task.components, (1, 1), 12, max_position_only=True, causal=True).schedule
    two = find(task.components, (2, 1), 12, max_position_only=True, causal=True).schedule
    assert (one is not None) == symmetric
    assert learns(task, two, 60, causal=True) == 1.0


def test_wide_layers_take_the_large_sets():
    """|I| is weighed by the width of its layer."""
    task = Target(
        components=tuple(random_component(2, torch.Generator().manual_seed(i)) for i in range(3)),
        n_tokens=64,
        d_token=D_TOKEN,
    )
    sizes = find(task.components, (3, 3, 3), 64, d_model=(8, 8, 8)).schedule.sizes
    wide = find(task.components, (3, 3, 3), 64, d_model=(8, 8, 64)).schedule.sizes
    assert max(wide[:2]) <= max(sizes)
    assert max(s / e for s, e in zip(wide, (8, 8, 64), strict=True)) <= max(sizes) / 8
