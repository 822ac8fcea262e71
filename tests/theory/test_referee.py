"""No verdict excludes what a network does: targets made from networks, not from our jobs."""

from collections import Counter

import pytest
import torch

from infoflow_lens.tasks import Target
from infoflow_lens.theory.estimate import estimate
from infoflow_lens.theory.exclusion import excluding
from infoflow_lens.theory.shapes import ModelShape
from tests.reference.networks import Heads, make

BLOCK = 20


def built(seed):
    """The target, its network's heads, and the network's largest error on samples."""
    family, made, rng = make(seed)
    d = next(d for d in (3, 4, 5) if _fits(made, d))
    task = Target(
        components=tuple(made.components),
        outer=lambda z: made.outer(z)[:, None],
        n_tokens=rng.randint(6, 20),
        d_token=d,
        tokens=rng.choice(["sphere", "normal"]),
    )
    x, y = task.sample(200, seed)
    heads = Heads()
    error = (made.network(heads, x) - y[:, 0]).abs().max() / y.std()
    return family, task, tuple(heads.by_layer), float(error)


def _fits(made, d):
    try:
        made.components[0].score(torch.zeros(2, made.components[0].arity, d))
    except RuntimeError:
        return False
    return True


LONG = [[], [], *[[pytest.mark.slow]] * 4, *[[pytest.mark.acceptance]] * 24]
BLOCKS = [pytest.param(block, marks=marks) for block, marks in enumerate(LONG)]


@pytest.mark.parametrize("block", BLOCKS)
def test_nothing_that_a_network_does_is_excluded(block):
    """40 targets; 80 more with the marker slow, 480 with acceptance, any number by hunt."""
    referee(block)


def referee(block):
    """Judge the targets of one block of seeds."""
    said = Counter()
    for seed in range(BLOCK * block, BLOCK * (block + 1)):
        family, task, heads, error = built(seed)
        assert error < 1e-4, (family, seed)
        shape = ModelShape(heads, (16,) * len(heads), task.n_tokens, positional=seed % 4 == 0)
        found = estimate(shape, task, verify=20, seed=seed)
        assert not found.verdict.startswith("excluded"), (family, seed, heads, found.why)
        assert excluding(task, shape, seed) is None, (family, seed, heads)
        said[found.verdict] += 1
    assert said["allowed by construction"] >= 0.8 * BLOCK, said
