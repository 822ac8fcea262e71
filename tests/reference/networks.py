"""Targets made from small networks of hard attention, each with the network that computes it.

Nothing of the theory's jobs, searches or counts is used: a network is a function of the tokens that
calls `Heads.read`, which counts how many heads each layer uses.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from infoflow_lens.theory.comparison import Component


@dataclass
class Heads:
    """Counts heads: of tokens and of CLS in every layer, as a layer's heads serve both."""

    used: dict = field(default_factory=dict)

    def read(self, layer, by, scores, states):
        """What one head reads: the state of the position with the largest score."""
        self.used[layer, by] = self.used.get((layer, by), 0) + 1
        index = scores.argmax(dim=-1)[..., None].expand(*scores.shape[:-1], states.shape[-1])
        return states.gather(1, index)

    @property
    def by_layer(self):
        """Heads of every layer, from the first."""
        layers = 1 + max(layer for layer, _ in self.used)
        return [
            max(1, *(self.used.get((layer, by), 0) for by in ("tokens", "CLS")))
            for layer in range(layers)
        ]


@dataclass
class Made:
    """A target's components and outer function, and the network that computes it.

    Attributes:
        components: as `Target` takes them.
        outer: from values [batch, component] to [batch].
        network: from Heads and tokens to [batch].
    """

    components: list
    outer: Callable
    network: Callable


def linear(rng, d):
    """A random direction as a score of tokens [..., d]."""
    a = torch.tensor([rng.gauss(0, 1) for _ in range(d)])
    return lambda x: x @ a


def bilinear(rng, d):
    """A random form as a score of two tokens."""
    a = torch.tensor([[rng.gauss(0, 1) for _ in range(d)] for _ in range(d)])
    return lambda x, y: ((x @ a) * y).sum(dim=-1)


def single(score, **settings):
    """A component over single tokens."""
    return Component(1, lambda x: score(x[..., 0, :]), **settings)


def pair(score, **settings):
    """A component over ordered pairs."""
    return Component(2, lambda x: score(x[..., 0, :], x[..., 1, :]), **settings)


def one_head(score, value):
    """CLS reads the best token by one score; `value` [..., d] -> [...] of what it read."""

    def network(heads, x, layer=0):
        return value(heads.read(layer, "CLS", score(x)[:, None], x)[:, 0])

    return network


def best_pair(score, value):
    """Tokens read their best partner, CLS the token with the best pair."""

    def network(heads, x, layer=1):
        both = score(x[:, :, None], x[:, None])
        partner = heads.read(layer - 1, "tokens", both, x)
        held = torch.cat([x, partner], dim=-1)
        a, b = heads.read(layer, "CLS", score(x, partner)[:, None], held)[:, 0].chunk(2, dim=-1)
        return value(a, b)

    return network


GROWING = {
    "multiple": lambda z: 2.5 * z,
    "cube": lambda z: z**3,
    "tanh": lambda z: torch.tanh(z / 2),
    "exp": lambda z: torch.exp(z / 4),
    "same": lambda z: z,
}


def largest(rng, d):
    """The maximum of several maxima: one score does."""
    scores = [linear(rng, d) for _ in range(rng.randint(2, 5))]
    best = lambda x: torch.stack([s(x) for s in scores]).amax(dim=0)  # noqa: E731
    return Made([single(s) for s in scores], lambda z: z.amax(dim=1), one_head(best, best))


def smallest(rng, d):
    """The minimum of several minima."""
    scores = [linear(rng, d) for _ in range(rng.randint(2, 5))]
    least = lambda x: torch.stack([s(x) for s in scores]).amin(dim=0)  # noqa: E731
    return Made(
        [single(s, extremum="min") for s in scores],
        lambda z: z.amin(dim=1),
        one_head(lambda x: -least(x), least),
    )


def one_of_many(rng, d):
    """A target that lists several components and reads one."""
    scores = [linear(rng, d) for _ in range(rng.randint(2, 5))]
    k = rng.randrange(len(scores))
    return Made([single(s) for s in scores], lambda z: z[:, k], one_head(scores[k], scores[k]))


def alike(rng, d):
    """Several growing functions of one score: equal, multiples, monotone."""
    score = linear(rng, d)
    kinds = [GROWING[rng.choice(list(GROWING))] for _ in range(rng.randint(2, 5))]
    total = lambda x: sum(g(score(x)) for g in kinds)  # noqa: E731
    parts = [single(lambda x, g=g: g(score(x))) for g in kinds]
    return Made(parts, lambda z: z.sum(dim=1), one_head(score, total))


def alike_pairs(rng, d):
    """The same for pairs, with either order of the tokens: transposes, duplicates, multiples."""
    score = bilinear(rng, d)
    parts, values = [], []
    for _ in range(rng.randint(2, 4)):
        g, turned = GROWING[rng.choice(list(GROWING))], rng.random() < 0.5
        s = (lambda x, y, g=g: g(score(y, x))) if turned else (lambda x, y, g=g: g(score(x, y)))
        parts.append(pair(s))
        values.append(g)
    total = lambda a, b: sum(g(score(a, b)) for g in values)  # noqa: E731
    return Made(parts, lambda z: z.sum(dim=1), best_pair(score, total))


def largest_pair(rng, d):
    """The maximum over several best pairs."""
    scores = [bilinear(rng, d) for _ in range(rng.randint(2, 3))]
    best = lambda x, y: torch.stack([s(x, y) for s in scores]).amax(dim=0)  # noqa: E731
    return Made([pair(s) for s in scores], lambda z: z.amax(dim=1), best_pair(best, best))


def separable(rng, d):
    """A pair whose score is a sum, or a growing function of one: two heads of one layer."""
    u, v, g = linear(rng, d), linear(rng, d), GROWING[rng.choice(list(GROWING))]

    def network(heads, x, layer=0):
        a = heads.read(layer, "CLS", u(x)[:, None], x)[:, 0]
        b = heads.read(layer, "CLS", v(x)[:, None], x)[:, 0]
        return g(u(a) + v(b))

    return Made([pair(lambda x, y: g(u(x) + v(y)))], lambda z: z[:, 0], network)


def repeated(rng, d):
    """A pair whose best has the same token twice."""
    u = linear(rng, d)
    return Made(
        [pair(lambda x, y: u(x) + u(y))], lambda z: z[:, 0], one_head(u, lambda x: 2 * u(x))
    )


def top_k(rng, d):
    """The sum of the three largest: what is looked for depends on what was found."""
    score = linear(rng, d)

    def below(x, bound):
        return torch.where(score(x) < bound, score(x), -torch.inf)

    def network(heads, x, layer=1):
        first = heads.read(layer - 1, "CLS", score(x)[:, None], x)[:, 0]
        under = below(x[:, None], score(x)[:, :, None])
        held = torch.cat([x, heads.read(layer - 1, "tokens", under, x)], dim=-1)
        second = below(x, score(first)[:, None])
        a, b = heads.read(layer, "CLS", second[:, None], held)[:, 0].chunk(2, dim=-1)
        return score(first) + score(a) + score(b)

    return Made([single(score, rank=r) for r in (1, 2, 3)], lambda z: z.sum(dim=1), network)


FAMILIES = [
    largest, smallest, one_of_many, alike, alike_pairs, largest_pair, separable, repeated, top_k,
]  # fmt: skip


def composed(rng, d):
    """The sum of two such targets, each by heads of its own in the last layers."""
    one, other = (rng.choice(FAMILIES)(rng, d) for _ in range(2))
    n = len(one.components)

    def network(heads, x):
        return one.network(heads, x, layer=1) + other.network(heads, x, layer=1)

    return Made(
        [*one.components, *other.components],
        lambda z: one.outer(z[:, :n]) + other.outer(z[:, n:]),
        network,
    )


def functioned(rng, d):
    """A growing function of such a target."""
    inner, g = rng.choice(FAMILIES)(rng, d), GROWING[rng.choice(list(GROWING))]
    return Made(inner.components, lambda z: g(inner.outer(z)), lambda h, x: g(inner.network(h, x)))


def make(seed):
    """A target and its network, of some family."""
    rng = random.Random(seed)
    family = [*FAMILIES, composed, composed, functioned][seed % (len(FAMILIES) + 3)]
    return family.__name__, family(rng, rng.randint(3, 5)), rng
