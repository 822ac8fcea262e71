"""Targets made from small networks of hard attention, each with the network that computes it.

Nothing of the theory's jobs, searches, graphs or counts is used: a network is a function of the
tokens that calls `Heads.read`, which counts how many heads each layer uses.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from infoflow_lens.theory import Component


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
        arity: the longest tuple, which says how long sequences may be.
        subset: positions that all components look at; None for all.
        rare: a token [d] of rare inputs on which more tokens matter; None for none.
    """

    components: list
    outer: Callable
    network: Callable
    arity: int = 2
    subset: Sequence[int] | None = None
    rare: object = None


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


def random_pair(rng, d):
    """A score of two tokens: bilinear, a small network, or how near they come to lying opposite."""
    kind = rng.randrange(3)
    if kind == 0:
        return bilinear(rng, d)
    draw = lambda *shape: torch.tensor(  # noqa: E731
        [rng.gauss(0, 1) for _ in range(torch.Size(shape).numel())]
    ).view(shape)
    u, v, w = draw(d, 5), draw(d, 5), draw(5)
    if kind == 1:
        return lambda x, y: torch.tanh(x @ u + y @ v) @ w
    return lambda x, y: -((x + y) @ u).square().sum(dim=-1) / d


def random_single(rng, d):
    """A score of one token: linear, quadratic, bent, or the larger of two."""
    a, b, kind = linear(rng, d), linear(rng, d), rng.randrange(4)
    return [
        a,
        lambda x: a(x) * b(x),
        lambda x: torch.tanh(a(x)) + 0.3 * b(x),
        lambda x: torch.maximum(a(x), b(x)),
    ][kind]


SCORES = {**GROWING, "arctan": torch.atan}


def tree(rng, d, parents, alone=0):
    """The best tuple of a tree of places, and of single ones, in one score, places in any order.

    Places are eliminated from the last on: tokens find the best for a place and what it holds.
    """
    n = len(parents) + 1
    edges = {place: random_pair(rng, d) for place in range(1, n)}
    own = [random_single(rng, d) for _ in range(n + alone)]
    weight = [rng.choice([0.0, 1.0]) if place < n else 1.0 for place in range(n + alone)]
    g, at = SCORES[rng.choice(list(SCORES))], rng.sample(range(n + alone), n + alone)

    def score(x):
        tokens = [x[..., at[place], :] for place in range(n + alone)]
        pairs = sum(edges[p](tokens[p], tokens[parents[p - 1]]) for p in edges)
        return g(pairs / 2 + sum(w * s(t) for w, s, t in zip(weight, own, tokens, strict=True)) / 2)

    height = [0] * n
    for place in reversed(range(1, n)):
        height[parents[place - 1]] = max(height[parents[place - 1]], height[place] + 1)

    def network(heads, x, layer=None):
        last = height[0] if layer is None else max(layer, height[0])
        held = dict.fromkeys(range(n), x)  # each token with what it carries for a place
        worth = {place: weight[place] * own[place](x) for place in range(n)}
        order = {place: [place] for place in range(n)}
        for place in reversed(range(1, n)):
            parent = parents[place - 1]
            both = edges[place](x[:, None], x[:, :, None])  # [batch, query as parent, key]
            found = heads.read(
                height[place], "tokens", both + worth[place][:, None],
                torch.cat([held[place], worth[place][..., None]], dim=-1),
            )  # fmt: skip
            carried, value = found[..., :-1], found[..., -1]
            held[parent] = torch.cat([held[parent], carried], dim=-1)
            worth[parent] = worth[parent] + value + edges[place](carried[..., :d], x)
            order[parent] = order[parent] + order[place]
        best = heads.read(last, "CLS", worth[0][:, None], held[0])[:, 0]
        tokens = dict(zip(order[0], best.split(d, dim=-1), strict=True))
        for place in range(n, n + alone):
            tokens[place] = heads.read(last, "CLS", own[place](x)[:, None], x)[:, 0]
        return score(torch.stack([tokens[at.index(p)] for p in range(n + alone)], dim=-2))

    component = Component(n + alone, score)
    return Made([component], lambda z: z[:, 0], network, n + alone)


def pairs_of_any_kind(rng, d):
    """A best pair by any score."""
    return tree(rng, d, [0])


def star(rng, d):
    """Two or three arms around one token."""
    return tree(rng, d, [0] * rng.choice([2, 2, 3]))


def path(rng, d):
    """A chain of four or five places, or one with a side arm: three layers."""
    return tree(rng, d, rng.choice([[0, 0, 1], [0, 0, 1], [0, 0, 1, 2], [0, 1]]))


def pair_and_single(rng, d):
    """A pair and a single token, or two, in one score."""
    return tree(rng, d, [0], alone=rng.choice([1, 1, 2]))


def star_and_single(rng, d):
    """A chain of three and a single token in one score."""
    return tree(rng, d, [0, 0], alone=1)


def definite(rng, d):
    """Best pairs by positive semidefinite forms: single tokens."""
    roots = [torch.tensor([[rng.gauss(0, 1) for _ in range(d)] for _ in range(d)]) for _ in "123"]
    roots = roots[: rng.randint(1, 3)]
    scores = [lambda x, r=r: (x @ r).square().sum(dim=-1) for r in roots]

    def network(heads, x, layer=0):
        found = [heads.read(layer, "CLS", s(x)[:, None], x)[:, 0] for s in scores]
        return sum(s(token) for s, token in zip(scores, found, strict=True))

    parts = [pair(lambda x, y, r=r: ((x @ r) * (y @ r)).sum(dim=-1)) for r in roots]
    return Made(parts, lambda z: z.sum(dim=1), network)


def twice(rng, d):
    """A target and itself again, by a growing function, its places in another order."""
    inner = rng.choice([star, path, pairs_of_any_kind])(rng, d)
    (component,), growing = inner.components, SCORES[rng.choice(list(SCORES))]
    turned = rng.sample(range(component.arity), component.arity)
    # where the function neither overflows nor is level
    some = torch.randn(256, component.arity, d, generator=torch.Generator().manual_seed(0))
    size = float(component.score(some).abs().max())
    g = lambda y: growing(y / size)  # noqa: E731
    other = Component(component.arity, lambda x: g(component.score(x[..., turned, :])))
    return Made(
        [component, other],
        lambda z: z[:, 0] + 2 * z[:, 1],
        lambda h, x, **layer: (y := inner.network(h, x, **layer)) + 2 * g(y),
        inner.arity,
    )


def rare(rng, d):
    """A score with a large value where a coordinate of a token is rare, and one without it."""
    score, bound, outer = linear(rng, d), rng.uniform(2.0, 3.0), rng.randrange(2)
    bump = lambda x: 5 * torch.relu(x[..., 0] - bound)  # noqa: E731
    high = lambda x: score(x) + bump(x)  # noqa: E731

    def network(heads, x, layer=0):
        found = [heads.read(layer, "CLS", s(x)[:, None], x)[:, 0] for s in (score, high)]
        return score(found[0]) + (1 + outer) * high(found[1])

    made = Made(
        [single(score), single(high)], lambda z: z[:, 0] + (1 + outer) * z[:, 1], network, 1
    )
    made.rare = torch.eye(d)[0] * (bound + 20)
    return made


def masked(rng, d):
    """A target that looks at some positions only, by scores that know where a token stands."""
    inner = rng.choice([pairs_of_any_kind, alike, star])(rng, d)
    made = Made(inner.components, inner.outer, None, inner.arity)
    made.subset = sorted(rng.sample(range(6), rng.randint(3, 5)))
    made.network = lambda h, x, **layer: inner.network(h, x[:, made.subset], **layer)
    return made


def transformed(rng, d):
    """The largest of growing functions of several maxima, of single tokens or pairs: one score."""
    pairs = rng.random() < 0.5
    scores = [(bilinear if pairs else linear)(rng, d) for _ in range(rng.randint(2, 3))]
    kinds = [GROWING[rng.choice(list(GROWING))] for _ in scores]
    parts = [(pair if pairs else single)(s) for s in scores]

    def best(*tokens):
        return torch.stack([g(s(*tokens)) for g, s in zip(kinds, scores, strict=True)]).amax(dim=0)

    def outer(z):
        return torch.stack([g(z[:, i]) for i, g in enumerate(kinds)]).amax(dim=0)

    return Made(parts, outer, (best_pair if pairs else one_head)(best, best), 2 if pairs else 1)


def least(rng, d):
    """The largest of the lower of a single's score and a pair's: each is looked up apart."""
    f, g = linear(rng, d), bilinear(rng, d)
    score = lambda x: torch.minimum(f(x[..., 0, :]), g(x[..., 1, :], x[..., 2, :]))  # noqa: E731

    def network(heads, x, layer=1):
        alone = one_head(f, f)(heads, x, layer)
        return torch.minimum(alone, best_pair(g, g)(heads, x, layer))

    return Made([Component(3, score)], lambda z: z[:, 0], network, 3)


DISTANCES = {
    "line": lambda x, a: (x @ a).square(),
    "sum": lambda x, a: x.abs().sum(dim=-1),
    "largest": lambda x, a: x.abs().amax(dim=-1),
}


def farthest(rng, d, kind="line"):
    """The largest distance of two tokens, by the ends of a few directions: one layer."""
    a = torch.tensor([rng.gauss(0, 1) for _ in range(d)])
    signs = torch.cartesian_prod(*[torch.tensor([1.0, -1.0])] * d).view(-1, d)
    ends = {"line": torch.stack([a, -a]), "sum": signs, "largest": torch.eye(d)}[kind]
    ends = torch.cat([ends, -ends]) if kind == "largest" else ends

    def network(heads, x, layer=0):
        found = [heads.read(layer, "CLS", (x @ way)[:, None], x)[:, 0] for way in ends]
        both = torch.stack([DISTANCES[kind](y - z, a) for y in found for z in found])
        return both.amax(dim=0)

    made = pair(lambda x, y: DISTANCES[kind](x - y, a), symmetric=True)
    return Made([made], lambda z: z[:, 0], network)


FAMILIES = [
    largest, smallest, one_of_many, alike, alike_pairs, largest_pair, separable, repeated, top_k,
    pairs_of_any_kind, star, path, pair_and_single, star_and_single, definite, twice, transformed,
    least, farthest, rare,
]  # fmt: skip


def composed(rng, d):
    """The sum of two such targets, each by heads of its own in the last layers."""
    families = [f for f in FAMILIES if f not in (path, rare, star_and_single)]
    one, other = (rng.choice(families)(rng, d) for _ in range(2))
    n = len(one.components)

    def network(heads, x):
        return one.network(heads, x, layer=1) + other.network(heads, x, layer=1)

    return Made(
        [*one.components, *other.components],
        lambda z: one.outer(z[:, :n]) + other.outer(z[:, n:]),
        network,
        max(one.arity, other.arity),
    )


def functioned(rng, d):
    """A growing function of such a target."""
    inner, g = rng.choice(FAMILIES[:-1])(rng, d), GROWING[rng.choice(list(GROWING))]
    network = lambda h, x: g(inner.network(h, x))  # noqa: E731
    return Made(inner.components, lambda z: g(inner.outer(z)), network, inner.arity)


def either(rng, d):
    """The larger of two scores at two different tokens: one token's, whatever the other is."""
    f, g, grown = linear(rng, d), linear(rng, d), GROWING[rng.choice(list(GROWING))]
    either = pair(lambda x, y: torch.maximum(grown(f(x)), g(y)), distinct=True)
    best = lambda x: torch.maximum(grown(f(x)), g(x))  # noqa: E731
    return Made([either], lambda z: z[:, 0], one_head(best, best))


def sizes(rng, d):
    """The largest size along a direction, and what is largest and smallest: two tokens."""
    f, weights = linear(rng, d), [rng.uniform(0.5, 2) for _ in range(3)]
    parts = [single(lambda x: f(x).abs()), single(f), single(f, extremum="min")]

    def network(heads, x):
        high, low = (f(heads.read(0, "CLS", s * f(x)[:, None], x)[:, 0]) for s in (1, -1))
        return sum(w * v for w, v in zip(weights, (torch.maximum(high, -low), high, low)))

    return Made(parts, lambda z: (z * torch.tensor(weights)).sum(dim=1), network, 1)


KINDS = [*FAMILIES, masked, composed, composed, functioned, either, sizes]


def make(seed):
    """A target and its network, of some family, its tokens' dimension and what draws on."""
    rng = random.Random(seed)
    family, d = KINDS[seed % len(KINDS)], rng.randint(3, 5)
    return family.__name__, family(rng, d), d, rng
