"""Lists of components that serve a target: transforms under a maximum, minima of maxima, diameters.

Each target comes with the network that computes it, run against all tuples.
"""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from infoflow_lens.tasks import Target
from infoflow_lens.theory.comparison import Component
from infoflow_lens.theory.equivalence import readings
from infoflow_lens.theory.estimate import estimate
from infoflow_lens.theory.shapes import ModelShape
from tests.conftest import some_of
from tests.reference.networks import (
    Heads,
    Made,
    farthest,
    least,
    one_head,
    pair,
    single,
    transformed,
)

T = 12


def asked(made, d, heads, **settings):
    outer = lambda z: made.outer(z)[:, None]  # noqa: E731
    task = Target(components=tuple(made.components), n_tokens=T, d_token=d, outer=outer, **settings)
    shape = ModelShape(tuple(heads), (64,) * len(heads), T)
    return task, estimate(shape, task, verify=30)


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


@pytest.mark.parametrize(("kind", "d", "ends"), some_of(FARTHEST, FARTHEST[0]))
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


def direction(index):
    """A random direction of four coordinates as a score."""
    a = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))[index]
    return lambda x: x @ a.to(x)


def test_places_that_must_differ_may_still_be_one():
    """The largest max(f(x), g(y)) of two different tokens is one token's."""
    f, g = direction(0), direction(1)
    best = lambda x: torch.maximum(f(x), g(x))  # noqa: E731
    either = lambda z: torch.maximum(f(z[..., 0, :]), g(z[..., 1, :]))  # noqa: E731
    made = Made([Component(2, either, distinct=True)], lambda z: z[:, 0], one_head(best, best), 2)
    found = check(made, 4, (1,))
    assert found.verdict == "allowed by construction", found.why
    # of a sum both must differ: the best token by both cannot stand twice
    both = Component(2, lambda z: f(z[..., 0, :]) + g(z[..., 1, :]), distinct=True)
    tokens = torch.randn(4000, 4, generator=torch.Generator().manual_seed(0))
    assert [r.notes for r in readings([both], tokens)] == [()]
    # nor can the best of the nearest pair, which is no token and itself
    near = Component(2, lambda z: -z.diff(dim=-2).square().sum(dim=(-2, -1)), distinct=True)
    assert [r.notes for r in readings([near], tokens)] == [()]


def test_the_largest_size_is_one_of_both_ends():
    """max |x0| + max x0 + min x0 by two heads; of three directions each counts."""
    first = lambda x: x[..., 0]  # noqa: E731
    parts = [single(lambda x: x[..., 0].abs()), single(first), single(first, extremum="min")]

    def network(heads, x):
        ends = [heads.read(0, "CLS", s * x[:, None, :, 0], x)[:, 0, 0] for s in (1, -1)]
        return torch.maximum(ends[0], -ends[1]) + sum(ends)

    found = check(Made(parts, lambda z: z.sum(dim=1), network, 1), 4, (2,))
    assert found.verdict == "allowed by construction", found.why
    three = [single(direction(index)) for index in range(3)]
    made = Made(three, lambda z: z.sum(dim=1), None, 1)
    assert asked(made, 4, (2,))[1].verdict == "excluded, proved"


def test_two_tokens_are_the_ends_of_any_order():
    """Of T = 2 two heads of one layer hold all; of three tokens they do not."""
    g = lambda x, y: (x * y.roll(1, -1)).sum(dim=-1)  # noqa: E731
    for n_tokens, verdict in ((2, "allowed by construction"), (3, "open")):
        task = Target(components=(pair(g),), n_tokens=n_tokens, d_token=4, tokens="normal")
        found = estimate(ModelShape((2,), (16,), n_tokens), task)
        assert found.verdict == verdict, found.why
    x, y = replace(task, n_tokens=2).sample(50, 0)
    a, b = (Heads().read(0, "CLS", s * x[:, None, :, 0], x)[:, 0] for s in (1, -1))
    every = torch.stack([g(*both) for both in itertools.product((a, b), repeat=2)])
    assert torch.allclose(every.amax(dim=0), y[:, 0])


def test_places_of_five_are_seen_to_be_turned():
    """Of 120 orders 24 were tried, and a target and itself again were two."""
    forms = torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(2))

    def star(z):
        return sum(((z[..., 0, :] @ a) * z[..., i + 1, :]).sum(-1) for i, a in enumerate(forms))

    turned = lambda z: 2 * star(z[..., [3, 4, 2, 1, 0], :])  # noqa: E731
    tokens = torch.randn(4000, 4, generator=torch.Generator().manual_seed(0))
    lists = readings([Component(5, star), Component(5, turned)], tokens)
    assert [len(r.components) for r in lists] == [2, 1]
    assert lists[1].notes == ("several scores put the tuples in the same order",)


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
    forms, tokens = (torch.randn(n, 4, 4, generator=generator) for n in (16, 150))
    found = readings([Component(arity, form(a)) for a in forms], tokens.flatten(0, 1))
    assert len(found[0].components) == 16
    assert asked_of[0] <= most * 16
