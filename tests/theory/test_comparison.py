"""Trees of comparison, the profiles of the paper's targets, and eq (5)."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infoflow_lens import InfoFlowError, load_task
from infoflow_lens.studies.comparison_trees import Branch, ComparisonTree, Leaf
from infoflow_lens.theory.comparison import (
    Component,
    best_inside,
    best_tuples,
    d_retrieval_profile,
    depth_separation_profile,
    growth_sizes,
    intrinsic_dimension_profile,
    kth_largest_profile,
    least_information,
    model_comparisons,
    pair_scores,
    root_ceiling,
    triangle_center_profile,
)


def polynomial(arity, seed):
    """A random score of a tuple; not symmetric."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(arity, 3, generator=generator)
    form = torch.randn(3, 3, generator=generator)

    def score(x):
        linear = (x * weights).sum((-1, -2))
        return linear + ((x[..., 0, :] @ form) * x[..., -1, :]).sum(-1)

    return score


def brute_force(x, component):
    indices = itertools.product(range(len(x)), repeat=component.arity)
    return max(indices, key=lambda t: float(component.score(x[list(t)])))


@settings(max_examples=50)
@given(
    arity=st.integers(1, 3),
    n_tokens=st.integers(3, 6),
    seed=st.integers(0, 10**6),
    shape=st.sampled_from(["balanced", "chain", "random"]),
)
def test_a_tree_of_any_shape_finds_the_best_tuple_in_leaves_minus_one(arity, n_tokens, seed, shape):
    component = Component(arity=arity, score=polynomial(arity, seed))
    x = torch.randn(3, n_tokens, 3, generator=torch.Generator().manual_seed(seed + 1))
    random = torch.Generator().manual_seed(seed + 2)
    tree = ComparisonTree.over(n_tokens, component, random if shape == "random" else shape)
    assert tree.n_leaves == n_tokens**arity
    assert tree.dimension == arity
    winners, made = tree.evaluate(x)
    assert made == tree.n_leaves - 1 == n_tokens**arity - 1
    assert [tuple(w) for w in winners.tolist()] == [brute_force(s, component) for s in x]
    assert best_tuples(x, component)[0].equal(winners)


@pytest.mark.parametrize(("arity", "leaves"), [(2, 21), (3, 56)])
def test_unordered_trees_of_a_symmetric_score_need_fewer_leaves(arity, leaves):
    component = Component(arity, lambda x: -x.sum(-2).square().sum(-1), symmetric=True)
    ordered = Component(arity, component.score)
    x = torch.randn(60, 6, 3, generator=torch.Generator().manual_seed(0))
    tree = ComparisonTree.over(6, component)
    assert tree.n_leaves == leaves == math.comb(6 + arity - 1, arity)
    small, _ = tree.evaluate(x)
    large, _ = ComparisonTree.over(6, ordered).evaluate(x)
    assert small.sort().values.equal(large.sort().values)


def test_best_tuples_in_chunks_equal_those_at_once(monkeypatch):
    component = Component(3, polynomial(3, 5))
    x = torch.randn(4, 7, 3, generator=torch.Generator().manual_seed(0))
    expected = best_tuples(x, component)
    monkeypatch.setattr("infoflow_lens.theory.comparison._MOST_SCORES_AT_ONCE", 40)
    assert best_tuples(x, component)[0].equal(expected[0])


@settings(max_examples=50)
@given(
    arity=st.integers(1, 3),
    distinct=st.booleans(),
    positions=st.none() | st.sets(st.integers(0, 5), min_size=3).map(tuple),
    extremum=st.sampled_from(["max", "min"]),
    seed=st.integers(0, 99),
)
def test_components_by_looking_at_every_tuple(arity, distinct, positions, extremum, seed):
    """What a component compares, how many that are, its best tuple, and the best inside a set."""
    score = polynomial(arity, seed)
    distinct = distinct and arity > 1
    component = Component(arity, score, distinct=distinct, positions=positions, extremum=extremum)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 6, 3, generator=generator)
    sets = torch.rand(3, 4, 6, generator=generator) < 0.6
    sets[:, 0] = False
    tuples = [
        indices
        for indices in itertools.product(range(6) if positions is None else positions, repeat=arity)
        if not distinct or len(set(indices)) == arity
    ]
    assert component.n_tuples(6, ordered=True) == len(tuples)
    unordered = {tuple(sorted(indices)) for indices in tuples}
    assert component.n_tuples(6, ordered=False) == len(unordered)
    sign = 1 if extremum == "max" else -1
    for row, holders, chosen, best, inside in zip(
        x, sets, *best_tuples(x, component), best_inside(x, sets, component), strict=True
    ):
        values = {indices: sign * float(score(row[list(indices)])) for indices in tuples}
        assert float(best) == pytest.approx(max(values.values()))
        assert values[tuple(chosen.tolist())] == pytest.approx(max(values.values()))
        for holder, found in zip(holders.tolist(), inside.tolist(), strict=True):
            held = [value for indices, value in values.items() if all(holder[i] for i in indices)]
            assert found == pytest.approx(max(held, default=-math.inf))


@pytest.mark.parametrize("positions", [None, (0, 2, 3)])
@pytest.mark.parametrize("distinct", [False, True])
def test_scores_of_all_pairs_one_by_one(positions, distinct):
    """For a query at i and a key at j; in reverse, the key is the pair's first."""
    score = polynomial(2, 3)
    component = Component(2, score, distinct=distinct, positions=positions)
    x = torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(5))
    for reverse, (i, j) in itertools.product((False, True), itertools.product(range(4), repeat=2)):
        allowed = {i, j} <= set(positions or range(4)) and not (distinct and i == j)
        pair = x[0, [j, i]] if reverse else x[0, [i, j]]
        expected = float(score(pair)) if allowed else -math.inf
        assert float(pair_scores(component, x, reverse)[0, i, j]) == pytest.approx(expected)


def test_a_component_can_look_at_some_positions_only():
    component = Component(1, lambda x: x[..., 0, 0], positions=(1, 3))
    x = torch.tensor([[[9.0], [1.0], [8.0], [2.0]]])
    assert best_tuples(x, component)[0].tolist() == [[3]]


def test_ties_go_to_the_left_and_a_leaf_is_not_empty():
    tree = ComparisonTree(Branch(Leaf((0,)), Leaf((1,)), lambda x: x[..., 0, 0]))
    assert tree.evaluate(torch.ones(1, 2, 1))[0].tolist() == [[0]]
    with pytest.raises(InfoFlowError, match="a leaf holds no position"):
        ComparisonTree(Leaf(()))
    with pytest.raises(InfoFlowError, match=r"tuples of lengths \[1, 2\]"):
        ComparisonTree(Branch(Leaf((0,)), Leaf((1, 2)), lambda x: x[..., 0, 0]))
    with pytest.raises(InfoFlowError, match="negative position"):
        ComparisonTree(Leaf((0, -1)))
    with pytest.raises(InfoFlowError, match="a leaf holds position 1, but sequences have 1"):
        tree.evaluate(torch.ones(1, 1, 1))


def test_a_tree_over_some_positions_has_leaves_there_only():
    component = Component(1, lambda x: x[..., 0, 0], positions=(1, 3))
    tree = ComparisonTree.over(6, component)
    assert tree.n_leaves == 2
    with pytest.raises(InfoFlowError, match="shape is 'star'"):
        ComparisonTree.over(6, component, "star")


def test_the_least_root_is_exact_for_any_integer():
    for value in (0, 1, 2, 26, 27, 28, 10**60, 10**60 + 1):
        root = root_ceiling(value, 3)
        assert root**3 >= value
        assert root == 0 or (root - 1) ** 3 < value


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        (d_retrieval_profile(4), (240, 252, 240)),
        (depth_separation_profile(), (4095, 2079, 2014)),
        (intrinsic_dimension_profile(4), (16380, 8316, 2008)),
        (triangle_center_profile(), (262143, 45759, 41661)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_numbers_of_comparison_at_64_tokens(profile, expected):
    """The table of targets; NoC in [240, 252] and 41661 .. 262143 are worked examples."""
    found = tuple(profile.number(64, count) for count in ("paper", "unordered", "proved"))
    assert found == expected
    assert profile.order <= profile.dimension


def test_upper_counts_are_those_of_trees():
    x = torch.randn(1, 7, 3)
    component = Component(2, polynomial(2, 0))
    symmetric = Component(2, polynomial(2, 0), symmetric=True)
    ordered = ComparisonTree.over(7, component).evaluate(x)[1]
    unordered = ComparisonTree.over(7, symmetric).evaluate(x)[1]
    assert intrinsic_dimension_profile(3).number(7, "paper") == 3 * ordered
    assert intrinsic_dimension_profile(3).number(7, "unordered") == 3 * unordered
    assert depth_separation_profile().number(7, "paper") == ordered


def test_growth_of_max_position_sets():
    assert growth_sizes((2, 4), 64) == [(3, 2), (15, 14)]
    assert growth_sizes((4, 4), 64) == [(5, 4), (25, 24)]
    assert growth_sizes((4, 4), 10) == [(5, 4), (10, 10)]


@pytest.mark.parametrize(
    ("heads", "capacities"), [(1, (65, 68)), (2, (130, 136)), (3, (195, 204)), (4, (260, 272))]
)
def test_example_1_capacity_of_one_layer(heads, capacities):
    sizes = growth_sizes((heads,), 64)
    assert tuple(model_comparisons((heads,), 64, sizes, 1, k) for k in (1, 4)) == capacities


@pytest.mark.parametrize(
    ("heads", "capacities", "needed"),
    [
        ((2, 4), (9352, 11680), (11, 6)),
        ((3, 5), (14362, 19048), (8, 4)),
        ((4, 4), (19088, 25664), (0, 0)),
    ],
)
def test_example_2_two_layers_on_pairs(heads, capacities, needed):
    sizes = growth_sizes(heads, 64)
    assert tuple(model_comparisons(heads, 64, sizes, 2, k) for k in (1, 4)) == capacities
    profile = intrinsic_dimension_profile(4)
    found = [least_information(profile, heads, 64, "paper", k) for k in (1, 4)]
    assert found == [(m, False) for m in needed]


@pytest.mark.parametrize(
    ("n_tokens", "proved", "paper"),
    [(8, 0, 3), (16, 0, 6), (32, 3, 10), (48, 6, 13), (64, 8, 16), (256, 22, 41)],
)
def test_example_3_information_for_triples(n_tokens, proved, paper):
    profile = triangle_center_profile()
    assert least_information(profile, (4, 4), n_tokens, "proved") == (proved, False)
    assert least_information(profile, (4, 4), n_tokens, "paper") == (paper, False)


def test_example_1_saturates_with_few_heads():
    profile = d_retrieval_profile(4)
    found = [least_information(profile, (h,), 64, "paper", k) for h in (1, 2, 3, 4) for k in (1, 4)]
    assert found == [
        (64, True), (44, False), (64, True), (28, False),
        (48, False), (12, False), (0, False), (0, False),
    ]  # fmt: skip


@given(
    heads=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    n_tokens=st.integers(3, 40),
    trees=st.integers(1, 4),
    d=st.integers(1, 4),
)
def test_the_information_needed_is_the_least_that_meets_eq_5(heads, n_tokens, trees, d):
    profile = intrinsic_dimension_profile(d)
    size, saturated = least_information(profile, heads, n_tokens, "paper", trees)
    needed = profile.number(n_tokens, "paper")

    def met(m):
        return model_comparisons(heads, n_tokens, m, 2, trees) >= needed

    if saturated:
        assert not met(n_tokens)
    else:
        assert met(size)
        assert size == 0 or not met(size - 1)


def test_comparisons_of_a_position_by_position_count():
    """Eq (5) written out: hidden layers count T + 1 positions, the last one CLS."""
    heads, sizes, n_tokens = (2, 3), [(3, 2), (12, 11)], 9
    total = sum(2 * 9 + 5 * 3**2 for _ in range(9)) + 2 * 9 + 5 * 2**2 + 3 * 9 + 5 * 11**2
    assert model_comparisons(heads, n_tokens, sizes, 2, trees=5) == total


def test_large_t_is_counted_without_large_memory():
    n = 10**6
    assert model_comparisons((4, 4), n, 5, 3) == n * (4 * n + 125) + 2 * (4 * n + 125)
    size, _ = least_information(triangle_center_profile(), (4, 4), n, "paper")
    assert size == 10**4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: d_retrieval_profile(2).number(0, "paper"), "n_tokens is 0"),
        (lambda: triangle_center_profile().number(2, "paper"), "T is 2: expected at least 3"),
        (lambda: d_retrieval_profile(2).number(5, "exact"), "count is 'exact'"),
        (
            lambda: kth_largest_profile(10**6).number(10**9, "paper"),
            "10.3434294 comparisons at T = 1000000000 and order 1000000: expected at most 10.4000",
        ),
        (lambda: growth_sizes((0,), 5), r"n_heads are \(0,\)"),
        (lambda: growth_sizes((), 5), r"n_heads are \(\)"),
        (lambda: model_comparisons((1, 1), 5, [(1, 1)], 1), "sizes has 1 entries for 2 layers"),
        (lambda: model_comparisons((1,), 5, 1, 1, trees=0), "trees is 0"),
    ],
)
def test_bad_values_are_named(call, message):
    with pytest.raises(InfoFlowError, match=message):
        call()


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_kth_largest_is_the_best_subset(k):
    """A tree over k-subsets by their minimum has C(T, k) leaves and keeps the k-th largest."""
    task = load_task("kth_largest", n_tokens=6, k=k)
    x, y = task.sample(40, seed=0)
    subsets = [Leaf(s) for s in itertools.combinations(range(6), k)]

    def smallest(tokens):
        return tokens[..., 0].amin(dim=-1)

    root = subsets[0]
    for leaf in subsets[1:]:
        root = Branch(root, leaf, smallest)
    tree = ComparisonTree(root)
    kept, made = tree.evaluate(x)
    rows = torch.arange(40)[:, None]
    assert x[rows, kept, 0].amin(dim=1, keepdim=True).equal(y)
    profile = task.comparison
    assert profile.dimension == profile.order == tree.dimension == k
    assert made == profile.number(6, "paper")
    assert made >= profile.number(6, "proved")


def test_ranks_are_counted_from_the_nearer_end():
    assert load_task("kth_largest", n_tokens=9, k=8).comparison.dimension == 2


def test_a_question_is_compared_with_every_pair_of_the_context():
    task = load_task("in_context_qa", n_pairs=5)
    assert task.comparison.number(task.n_tokens, "paper") == 4
    task = load_task("in_context_template_matching", n_pairs=3)
    assert task.comparison.number(task.n_tokens, "proved") == 2
    assert task.comparison.dimension == 11
