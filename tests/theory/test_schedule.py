"""Schedules: covers by position, running, learning, and the search for the smallest sets."""

import itertools
import math

import pytest
import torch

from infoflow_lens import InfoFlowError, load_task
from infoflow_lens.theory.comparison import Component, growth_sizes, model_comparisons
from infoflow_lens.theory.jobs import Global, Max, Specific, cover, cover_groups, cover_size
from infoflow_lens.theory.schedule import LayerSchedule, Schedule, learns, run_schedule
from infoflow_lens.theory.search import find
from tests.conftest import some_of


def search(*args, **options):
    """The schedule that the search finds, or None."""
    return find(*args, **options).schedule


def proposition_1(n_components, first=None):
    """(D, D) heads: every token finds its best partner, CLS the best pair (or `first` of them)."""
    first = n_components if first is None else first
    return Schedule(
        (
            LayerSchedule(token=tuple(Max(i) for i in range(first))),
            LayerSchedule(cls=tuple(Max(i) for i in range(n_components))),
        )
    )


@pytest.mark.parametrize("arity", [1, 2, 3])
@pytest.mark.parametrize("n_tokens", [3, 4, 8, 13, 16, 32])
def test_a_cover_holds_every_tuple(arity, n_tokens):
    reads = cover(n_tokens, arity)[:n_tokens, :n_tokens]
    for members in itertools.combinations(range(n_tokens), arity):
        assert reads[:, members].all(dim=1).any(), members
    assert reads.sum(dim=1).max() <= cover_size(n_tokens, arity)
    assert not cover(n_tokens, arity)[n_tokens].any()  # CLS reads nothing


@pytest.mark.parametrize(
    ("n_tokens", "size"), [(8, 6), (16, 12), (32, 18), (48, 21), (64, 24), (256, 66)]
)
def test_example_3_covers_of_triples(n_tokens, size):
    assert cover_size(n_tokens, 3) == size
    groups = cover_groups(n_tokens, 3)
    assert math.comb(groups, 3) <= n_tokens < math.comb(groups + 1, 3)


def test_holders_of_a_cover_lie_in_their_blocks_where_they_can():
    reads = cover(64, 2)[:64, :64]
    used = reads.any(dim=1)
    assert used.sum() == math.comb(11, 2)
    assert reads[used, used.nonzero().flatten()].all()


@pytest.mark.parametrize("n_components", some_of([2, 3, 4, 5], 2, 5))
def test_proposition_1_learns_on_the_sphere(n_components):
    task = load_task(
        "intrinsic_dimension", n_tokens=64, d_token=8, n_components=n_components, tokens="sphere"
    )
    assert learns(task, proposition_1(n_components), n=60) == 1.0
    fewer = learns(task, proposition_1(n_components, first=n_components - 1), n=60)
    assert fewer < 0.6


@pytest.mark.parametrize("n_tokens", [8, 16, 32])
@pytest.mark.parametrize("n_components", [2, 3, 4, 5])
def test_proposition_1_learns_on_gaussian_tokens(n_tokens, n_components):
    task = load_task("intrinsic_dimension", n_tokens=n_tokens, n_components=n_components)
    # with fewer heads Gaussian tokens often succeed by luck: norm outliers win for every matrix
    assert learns(task, proposition_1(n_components), n=50) == 1.0


def test_proposition_1_has_sets_constant_in_t():
    for n_tokens in (16, 48):
        task = load_task("intrinsic_dimension", n_tokens=n_tokens, n_components=3)
        sizes = run_schedule(proposition_1(3), task.components, task.sample(20, 0)[0]).sizes()
        assert sizes[0, :, :-1].max() <= 4
        assert sizes[1, :, -1].max() <= 12


@pytest.mark.parametrize("n_tokens", [16, 64])
def test_d_retrieval_takes_d_heads(n_tokens):
    task = load_task("d_retrieval", n_tokens=n_tokens, n_components=4, d_token=8, tokens="sphere")
    heads = tuple(Max(i) for i in range(4))
    assert learns(task, Schedule((LayerSchedule(cls=heads),)), n=100) == 1.0
    assert learns(task, Schedule((LayerSchedule(cls=heads[:3]),)), n=100) < 0.6


@pytest.mark.parametrize("n_tokens", [8, 16, 32])
def test_a_cover_and_one_head_learn_the_triangle(n_tokens):
    task = load_task("triangle_center", n_tokens=n_tokens, d_token=3)
    schedule = Schedule((LayerSchedule(token=(Specific(3),)), LayerSchedule(cls=(Max(0),))))
    assert learns(task, schedule, n=30, positional=True) == 1.0
    with pytest.raises(InfoFlowError, match="takes a positional encoding"):
        learns(task, schedule)


def test_one_cover_serves_all_components():
    task = load_task("intrinsic_dimension", n_tokens=32, n_components=6)
    cls = tuple(Max(i) for i in range(6))
    schedule = Schedule((LayerSchedule(token=(Specific(2),)), LayerSchedule(cls=cls)))
    assert learns(task, schedule, n=40, positional=True) == 1.0


def test_global_aggregation_learns_everything():
    """Universality: one head that holds all positions (Yun et al. 2020a; Yu et al. Thm 2.3)."""
    for name in ("d_retrieval", "depth_separation", "triangle_center", "intrinsic_dimension"):
        task = load_task(name, n_tokens=9)
        assert learns(task, Schedule((LayerSchedule(cls=(Global(),)),)), n=30) == 1.0


def test_appendix_e_by_score_functions():
    """The worked example: tokens pair up, then CLS finds the pair with the smallest sum."""
    task = load_task("depth_separation", n_tokens=4, d_token=2)
    x = torch.tensor([[[1.0, 0.0], [0.6, 0.8], [-0.8, -0.6], [0.0, -1.0]]])
    sets = run_schedule(proposition_1(1), task.components, x)
    assert [sets.of(0, 0, t) for t in range(4)] == [{0, 2}, {1, 2}, {1, 2}, {1, 3}]
    assert sets.of(1, 0, 4) == {1, 2}
    assert float(task.target(x)) == pytest.approx(0.08)


def brute_force_size(n, arity, heads, n_tokens, positional):
    """The smallest largest |I| over all schedules, by trying every job list."""
    best = math.inf
    token_jobs = ["pair"] * (arity == 2) + ["cover"] * positional

    def layers(layer, prepared, covered, solved, token, cls, worst):
        nonlocal best
        if worst >= best:
            return
        if layer == len(heads):
            if solved >= n:
                best = worst
            return
        last = layer == len(heads) - 1
        choices = [()]
        if not last:
            choices = [
                c
                for size in range(heads[layer] + 1)
                for c in itertools.combinations_with_replacement(token_jobs, size)
                if c.count("cover") <= 1 and not (covered and "cover" in c)
            ]
        ready = n if arity == 1 or covered else prepared
        for jobs in choices:
            pairs = jobs.count("pair")
            if prepared + pairs > n:
                continue
            block = cover_size(n_tokens, arity) if "cover" in jobs else 1
            grown = min(n_tokens, token * (block + pairs))
            for solve in range(min(heads[layer], max(0, ready - solved)) + 1):
                new_cls = min(n_tokens, cls + solve * token)
                layers(
                    layer + 1, prepared + pairs, covered or "cover" in jobs, solved + solve,
                    grown, new_cls, max(worst, new_cls, 0 if last else grown),
                )  # fmt: skip
            layers(
                layer + 1, prepared + pairs, covered or "cover" in jobs, n,
                grown, n_tokens, max(worst, n_tokens),
            )  # fmt: skip

    layers(0, 0, False, 0, 1, 0, 0)
    return best


@pytest.mark.parametrize("arity", [1, 2, 3])
@pytest.mark.parametrize("positional", [False, True])
@pytest.mark.parametrize("heads", [(1,), (3,), (1, 2), (3, 2), (2, 3), (2, 1, 2), (1, 1, 3)])
def test_the_search_is_exact(arity, positional, heads):
    components = [Component(arity, lambda x: x.sum((-1, -2)), symmetric=True)] * 3
    found = search(components, heads, 32, positional)
    assert found.size == brute_force_size(3, arity, heads, 32, positional)


@pytest.mark.parametrize(
    ("name", "n_components", "heads", "positional", "size"),
    [
        ("d_retrieval", 4, (4,), False, 4),
        ("d_retrieval", 4, (3,), False, 64),
        ("intrinsic_dimension", 4, (4, 4), False, 20),
        ("intrinsic_dimension", 4, (2, 4), False, 64),
        ("intrinsic_dimension", 4, (2, 4), True, 48),
        ("triangle_center", None, (4, 4), False, 64),
        pytest.param("triangle_center", None, (4, 4), True, 24, marks=pytest.mark.slow),
        ("depth_separation", None, (1, 1), False, 2),
    ],
)
def test_examples_their_winner_learns_and_meets_the_count(
    name, n_components, heads, positional, size
):
    extra = {} if n_components is None else {"n_components": n_components}
    task = load_task(name, n_tokens=64, **extra)
    found = search(task.components, heads, 64, positional)
    assert found.size == size
    assert found.needs_positions <= positional
    assert learns(task, found, n=20, positional=positional) == 1.0
    sets = run_schedule(found, task.components, task.sample(20, 0)[0])
    hidden = sets.sizes()[:-1].flatten().tolist()
    assert max([*hidden, int(sets.sizes()[-1, :, -1].max())]) <= size
    # consistency of the two steps: what learns must be able to make the comparisons
    profile = task.comparison
    made = model_comparisons(heads, 64, found.size, profile.dimension, profile.n_trees)
    assert made >= profile.number(64, "proved")


def test_no_max_position_schedule_is_said():
    task = load_task("triangle_center", n_tokens=16)
    assert search(task.components, (4, 4), 16, max_position_only=True) is None


def test_growth_bounds_the_sizes_of_max_position_schedules():
    task = load_task("intrinsic_dimension", n_tokens=32, n_components=3)
    found = search(task.components, (3, 3), 32, max_position_only=True)
    assert found.size <= growth_sizes((3, 3), 32)[-1][1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: search(c[2:], (1,), 1), "tuples of 2 tokens, but T is 1"),
        (lambda c: cover(2, 3), "tuples of 3 tokens, but T is 2"),
        (lambda c: run_schedule(Schedule(()), c, torch.zeros(1, 4, 2)), "has no layer"),
        (lambda c: search(c[:1] * 300, (1,), 8), "has 300 components"),
        (lambda c: search([], (1,), 8), "retrieves no component"),
        (lambda c: search(c[:1], (), 8), r"n_heads are \(\)"),
        (
            lambda c: run_schedule(
                Schedule((LayerSchedule(cls=(Max(3),)),)), c, torch.zeros(1, 4, 2)
            ),
            "retrieves component 3",
        ),
        (
            lambda c: run_schedule(
                Schedule((LayerSchedule(cls=(Specific(2),)),)), c, torch.zeros(1, 4, 2)
            ),
            "gives CLS a fixed-position job",
        ),
    ],
)
def test_bad_values_are_named(call, message):
    one = Component(1, lambda x: x.sum((-1, -2)))
    two = Component(2, lambda x: x.sum((-1, -2)))
    with pytest.raises(InfoFlowError, match=message):
        call([one, one, two])
