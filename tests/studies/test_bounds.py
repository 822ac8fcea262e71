"""The theorems' exponents, where they say something, and the pairs on which a proof rests."""

import math

import pytest
import torch

from infoflow_lens import InfoFlowError
from infoflow_lens.studies.bounds import (
    depth_separation_bound,
    encoding_bound,
    find_cube,
    growing_information,
    kth_largest_bound,
    kth_largest_collision,
    softmin_gap,
    triangle_limit,
)
from infoflow_lens.theory.comparison import least_information, triangle_center_profile
from tests.reference.pigeonholes import (
    ball_centres,
    largest_radius,
)


def test_exponents_are_those_of_the_papers_formulas():
    assert depth_separation_bound(100, 1, 6).exponent == pytest.approx(98 / 8 - 1)
    assert depth_separation_bound(100, 1, 6, sharp=True).exponent == pytest.approx(98 / 7 - 1)
    assert kth_largest_bound(20, 3, 2).exponent == pytest.approx(18 / 3 - 1)
    assert encoding_bound(8, 4, 16).exponent == pytest.approx(1)


def test_exponents_grow_with_length():
    """Depth separation is linear in T; the k-th largest falls with k."""
    depth = [depth_separation_bound(t, 2, 4).exponent for t in (50, 100, 150)]
    assert depth[2] - depth[1] == pytest.approx(depth[1] - depth[0])
    assert depth[1] > depth[0]
    kth = [kth_largest_bound(50, k, 3).exponent for k in (2, 5, 9)]
    assert kth == sorted(kth, reverse=True)


@pytest.mark.parametrize(
    "bound",
    [
        depth_separation_bound(5, 1, 6),
        kth_largest_bound(4, 3, 2),
        encoding_bound(4, 4, 16),
    ],
)
def test_a_bound_that_says_nothing_says_so(bound):
    assert bound.vacuous
    assert bound.exponent == 0
    assert "vacuous here" in bound.reason


def heads(d_head, seed):
    """A random non-decreasing score and a random bounded value of a scalar."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.rand(3, generator=generator).double()
    phases = torch.randn(d_head, generator=generator).double()

    def score(x):
        return steps[0] * x + steps[1] * x**3 + steps[2] * torch.tanh(3 * x)

    def value(x):
        return torch.sin(5 * x.double().unsqueeze(-1) * phases + phases)

    return score, value


@pytest.mark.parametrize("d_head", [1, 2])
@pytest.mark.parametrize(
    ("n_tokens", "k", "points"),
    [(4, 2, 12), (5, 2, 10), (6, 2, 8), (6, 4, 20), (7, 4, 12), (8, 4, 8)],
)
def test_the_pigeonhole_pairs_of_theorem_2(d_head, n_tokens, k, points):
    """Twelve settings: the k-th largest differs by 4 eps, attention by less than the proof says."""
    free = n_tokens - k + 1
    eps = 1 / (4 * (free + 1) * points) * 0.999
    score, value = heads(d_head, seed=n_tokens)
    found = kth_largest_collision(score, value, n_tokens, k, eps)
    assert found.gap >= 4 * eps * (1 - 1e-9)
    assert found.distance <= found.distance_bound
    assert found.forced_width > 0
    kth = [s.sort(descending=True).values[k - 1] for s in (found.first, found.second)]
    assert abs(float(kth[0] - kth[1])) == pytest.approx(found.gap)


def test_theorem_2_speaks_of_scores_that_do_not_decrease():
    """Of others a pair came back whose outputs were further apart than the proof allows."""
    _, value = heads(1, seed=0)
    settings = (5, 2, 1 / 200)
    with pytest.raises(InfoFlowError, match=r"score falls by .* expected one that does not decr"):
        kth_largest_collision(lambda x: 20 * x * (1 - x), value, *settings)
    with pytest.raises(InfoFlowError, match="value reaches 30"):
        kth_largest_collision(lambda x: x, lambda x: 30 * torch.ones_like(x)[:, None], *settings)
    # a score that never changes meets it
    assert kth_largest_collision(torch.zeros_like, value, *settings).gap > 0


@pytest.mark.parametrize("k", [1, 3, 6])
def test_a_score_that_decreases_sees_the_values_from_below(k):
    """The k-th largest of x is the (T - k + 1)-th largest of 1 - x, whose score increases."""
    x = torch.rand(50, 7, generator=torch.Generator().manual_seed(k)).double()
    kth = x.sort(dim=1, descending=True).values[:, k - 1]
    mirrored = (1 - x).sort(dim=1, descending=True).values[:, 7 - k]
    assert torch.allclose(kth, 1 - mirrored)
    below = kth_largest_bound(7, k, 1, increasing=False)
    assert below.exponent == kth_largest_bound(7, 7 - k + 1, 1).exponent == max(0, k / 2 - 1)
    assert "do not increase" in below.source


def test_finer_precision_forces_wider_decoders():
    score, value = heads(1, seed=0)
    widths = [kth_largest_collision(score, value, 6, 2, eps).forced_width for eps in (0.02, 0.005)]
    assert widths[1] > widths[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kth_largest_bound(5, 1, 2), "the theorem needs k >= 2"),
        (lambda: kth_largest_bound(5, 6, 2), "k is 6"),
        (lambda: kth_largest_bound(5, 5, 2, increasing=False), "expected 1 to 4"),
        (lambda: growing_information(0, 3, 3, 4, 2, 1000), "coefficient is 0"),
        (lambda: kth_largest_collision(*heads(1, 0), 5, 2, 2.0), "eps is 2.0"),
        (lambda: kth_largest_collision(*heads(1, 0), 5, 2, 0.5), "choose another eps"),
    ],
)
def test_bad_values_are_named(call, message):
    with pytest.raises(InfoFlowError, match=message):
        call()


def test_proposition_2_grows_like_its_formula_and_is_weaker_than_counting():
    """C = 1/6 for the triangle centre: |I| grows like T^(2/3), from some T on."""
    sizes = [growing_information(1 / 6, 3, 3, 4, 2, t) for t in (100, 1000, 8000)]
    assert sizes[0] == 0  # T < 4 L h / C = 192
    assert sizes[1] == pytest.approx((1 / 48) ** (1 / 3) * 100)
    assert sizes[2] / sizes[1] == pytest.approx(4)
    profile = triangle_center_profile()
    for t in (1000, 8000):  # weaker than counting exactly
        exact, _ = least_information(profile, (4, 4), t, "proved")
        assert growing_information(1 / 6, 3, 3, 4, 2, t) <= exact
    with pytest.raises(InfoFlowError, match="order is 2"):
        growing_information(1.0, 2, 2, 1, 2, 100)


@pytest.mark.parametrize("n_heads", [1, 2, 5, 12, 40])
def test_the_balls_of_theorem_1_fit_on_the_sphere(n_heads):
    """h + 1 disjoint caps, and nothing in one near the antipode of another but its own centre."""
    radius, centres = largest_radius(n_heads), ball_centres(n_heads + 1)
    assert torch.allclose(centres.norm(dim=1), torch.ones(n_heads + 1, dtype=torch.float64))
    assert torch.pdist(centres).min() > 2 * radius
    assert (centres[:, None] + centres).norm(dim=-1).min() > 3 * radius
    # caps cannot cover more than the sphere: (h + 1) L^2 <= 4
    assert (n_heads + 1) * radius**2 <= 4


def test_the_gap_of_a_softmin_over_numbers_beyond_floats():
    assert softmin_gap(10**400, 1.0) == pytest.approx(
        400 * math.log(10) - 1 - math.log(913.2), rel=1e-4
    )
    assert softmin_gap(10**300, 2.0) == pytest.approx(softmin_gap(10**300 + 1, 2.0))
    # Lambert's equation w e^w = (n - 1) / e, in logarithms
    w = softmin_gap(10**400, 1.0)
    assert w + math.log(w) == pytest.approx(400 * math.log(10) - 1)


@pytest.mark.parametrize(("first", "second"), [(1, 1), (2, 1), (2, 2), (4, 4)])
def test_two_layers_lose_the_triangle_from_an_explicit_length_on(first, second):
    """Below it the bound on what heads see of planted triples is no bound."""
    limit = triangle_limit(first, second)
    m = (second * (1 + first) + first) // 3 + 1
    for n_tokens, excluded in ((limit, True), (10 * limit, True), (limit - 3, False)):
        n = (n_tokens - 3 * m) / 3
        cls = 3 * m * first * 2 / n
        own = 3 * m * first * 2 * 2 / n  # a planted token picks one of the two others
        two = n_tokens * m * first * (first - 1) * 3 * 2 / n**2  # by two heads of one state
        assert (cls + own + two < 1) == excluded


def test_planted_tokens_are_rarely_picked():
    """Heads that score tokens by how near they come to closing a triple, at growing T."""
    generator = torch.Generator().manual_seed(0)
    shares = []
    for n in (5, 20, 80):
        x, y = torch.rand(2, 400, n, generator=generator)
        z = -2 * torch.rand(400, n, generator=generator)
        z[:, 0] = -x[:, 0] - y[:, 0]  # planted among n of each law
        tokens = torch.cat([x, y, z], dim=1)
        for query, partner in ((x[:, :1], 2 * n), (z[:, :1], 0)):
            picked = (-(tokens + query).square()).argmax(dim=1) == partner
            assert float(picked.float().mean()) <= 2 / n + 0.05
            shares.append(float(picked.float().mean()))
    assert shares[-1] < 0.1


def test_the_largest_numbers_lie_in_the_last_cubes():
    """1 itself lay beyond them, so that five sequences in four cubes had no two that share one."""
    numbers = torch.tensor([[-1.0, -1], [-1, 0.5], [0.5, -1], [0.5, 0.5], [1, 1]])
    assert find_cube(numbers, 5) == (1.0, (3, 4))
