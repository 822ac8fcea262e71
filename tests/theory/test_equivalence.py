"""Lists of components that serve a target: transforms under a maximum, minima of maxima, diameters.

Each target comes with the network that computes it, run against all tuples.
"""

import itertools
import random

import pytest
import torch

from infoflow_lens.tasks import Target
from infoflow_lens.theory.comparison import Component
from infoflow_lens.theory.equivalence import readings
from infoflow_lens.theory.estimate import estimate
from infoflow_lens.theory.shapes import ModelShape
from tests.conftest import some_of
from tests.reference.networks import Heads, Made, farthest, least, transformed

T = 12


def asked(made, d, heads, **settings):
    outer = lambda z: made.outer(z)[:, None]  # noqa: E731
    task = Target(components=tuple(made.components), n_tokens=T, d_token=d, outer=outer, **settings)
    return task, estimate(ModelShape(tuple(heads), (64,) * len(heads), T), task)


def check(made, d, heads, **settings):
    """The verdict on a target and the heads of its network, which has no error."""
    task, found = asked(made, d, heads, **settings)
    x, y = task.sample(60, 1)
    used = Heads()
    assert torch.allclose(made.network(used, x), y[:, 0], atol=1e-4, rtol=1e-4)
    assert used.by_layer == list(heads)
    return found


@pytest.mark.parametrize("seed", some_of(range(4), 0, 1))
def test_one_score_serves_the_largest_of_transforms(seed):
    made = transformed(random.Random(seed), 4)
    found = check(made, 4, (1,) * made.arity)
    assert found.verdict == "allowed by construction", found.why


def test_what_never_decides_among_many_tokens_may_decide_among_few():
    """tanh of x0 is above the largest x1 in one of 8 sequences of 12 tokens, in none of 64."""

    def best(x):
        return torch.maximum(torch.tanh(2 * x[..., 0]), x[..., 1])

    def network(heads, x):
        alone = heads.read(0, "CLS", x[:, None, :, 2], x)[:, 0, 2]
        return best(heads.read(0, "CLS", best(x)[:, None], x)[:, 0]) + alone

    parts = [Component(1, lambda x, i=i: (2 - min(i, 1)) * x[..., 0, i]) for i in range(3)]
    outer = lambda z: torch.maximum(torch.tanh(z[:, 0]), z[:, 1]) + z[:, 2]  # noqa: E731
    found = check(Made(parts, outer, network, 1), 3, (2,))
    assert found.verdict == "allowed by construction", found.why


@pytest.mark.parametrize("tokens", ["normal", "sphere"])
@pytest.mark.parametrize("seed", some_of(range(2), 0))
def test_a_minimum_of_parts_splits_though_each_hides_the_other(seed, tokens):
    """The largest of min(f(x), g(y, z)) is min(max f, max g)."""
    found = check(least(random.Random(seed), 4), 4, (1, 2), tokens=tokens)
    assert found.verdict == "allowed by construction", found.why


FARTHEST = [("line", 3, 2), ("sum", 2, 4), ("largest", 2, 4), ("line", 1, 2)]


@pytest.mark.parametrize(("kind", "d", "ends"), some_of(FARTHEST, *FARTHEST[:2]))
def test_the_farthest_pair_has_the_ends_of_a_few_directions(kind, d, ends):
    """One layer of a head for each end, or two of one head; one layer of fewer is not allowed."""
    made = farthest(random.Random(0), d, kind)
    found = check(made, d, (ends,))
    assert found.verdict == "allowed by construction", found.why
    assert asked(made, d, (ends - 1,))[1].verdict in ("excluded, proved", "open")
    assert asked(made, d, (1, 1))[1].verdict == "allowed by construction"


@pytest.mark.parametrize(
    "score",
    [
        lambda x: x.diff(dim=-2).square().sum(dim=(-2, -1)),
        lambda x: (x[..., 0, :] * x[..., 1, :].flip(-1)).sum(dim=-1),
    ],
    ids=["distance", "form"],
)
def test_more_tokens_are_ends_in_a_plane_as_sequences_grow(score):
    """No few scores serve, whichever 8 of the plane's directions are taken."""
    tokens = torch.randn(8192, 2, generator=torch.Generator().manual_seed(0))
    (only,) = readings([Component(2, score)], tokens)
    assert only.notes == ()
    # independent: the best pairs of 300 sequences have more ends than 8 directions can hold
    turns = torch.arange(8) * torch.pi / 4
    directions = torch.stack([turns.cos(), turns.sin()])
    x = tokens[torch.randint(8192, (300, 64), generator=torch.Generator().manual_seed(1))]
    pairs = list(itertools.product(range(64), repeat=2))
    index = torch.tensor(pairs)
    best = index[score(x[:, index]).argmax(dim=1)]
    held = (x @ directions).argmax(dim=1)
    assert not (best[:, :, None] == held[:, None]).any(-1).all()


@pytest.mark.parametrize(("arity", "most"), [(1, 10), (2, 30)])
def test_a_score_is_asked_once_however_many_there_are(arity, most):
    """Each was asked beside each other one: 248 times of 32 single tokens, 981 times of pairs."""
    asked_of = [0]

    def form(a):
        def score(x):
            asked_of[0] += 1
            return ((x[..., 0, :] @ a) * x[..., -1, :]).sum(dim=-1)

        return score

    generator = torch.Generator().manual_seed(0)
    forms, tokens = (torch.randn(n, 4, 4, generator=generator) for n in (32, 500))
    found = readings([Component(arity, form(a)) for a in forms], tokens.flatten(0, 1))
    assert len(found[0].components) == 32
    assert asked_of[0] <= most * 32
