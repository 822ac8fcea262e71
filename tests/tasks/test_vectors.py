"""Tasks over vector tokens: formula, active tokens, samples and datasets, errors."""

import html
import inspect
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infoflow_lens import InfoFlowError, load_task
from infoflow_lens.tasks import DRetrieval
from infoflow_lens.tasks.tuples import largest_overlap

THREE = {"n_components": 3, "d_token": 5}
CASES = [
    ("d_retrieval", THREE),
    ("d_retrieval", THREE | {"extremum": "min"}),
    ("d_retrieval", THREE | {"extremum": ("max", "min", "max")}),
    ("d_retrieval", THREE | {"subsets": ((0, 1), (2, 3, 4), (6,))}),
    ("d_retrieval", THREE | {"outer": "product", "directions": "orthonormal"}),
    ("d_retrieval", THREE | {"outer": "square_sum", "tokens": "uniform"}),
    (
        "d_retrieval",
        THREE
        | {
            "outer": "identity",
            "extremum": ("min", "min", "max"),
            "subsets": ((5, 1), (0,), (3, 2)),
        },
    ),
    ("depth_separation", {}),
    ("depth_separation", {"d_token": 2, "tokens": "normal"}),
    ("intrinsic_dimension", {"n_components": 3}),
    ("intrinsic_dimension", {"matrix_kind": "rotoreflection", "d_token": 3, "n_draws": 5}),
    ("triangle_center", {"d_token": 3}),
    ("best_tree", {}),
    ("best_tree", {"edges": ((0, 1), (2, 0), (0, 3)), "matrix_kind": "gaussian", "d_token": 2}),
    ("position_sum", {}),
    ("position_sum", {"positions": (4, 1), "d_token": 3}),
    ("global_mean", {}),
    ("kth_largest", {"k": 1}),
    ("kth_largest", {"k": 3}),
    ("kth_largest", {"k": 7}),
]
EACH = pytest.mark.parametrize(("name", "parameters"), CASES)
JOINS = {
    "sum": lambda z: [sum(z)],
    "product": lambda z: [z[0] * z[1] * z[2]],
    "square_sum": lambda z: [sum(v * v for v in z)],
    "identity": list,
}


def by_loops(task, x):
    """The target of one sequence, as the paper writes it."""
    positions = range(len(x))
    if task.name == "d_retrieval":
        extrema = task.extremum if isinstance(task.extremum, tuple) else (task.extremum,) * 3
        sets = task.subsets or (positions,) * 3
        retrieved = [
            (max if extremum == "max" else min)(float(a @ x[t]) for t in subset)
            for a, extremum, subset in zip(task.vectors, extrema, sets, strict=True)
        ]
        return JOINS[task.outer](retrieved)
    if task.name == "depth_separation":
        return [min(float((x[s] + x[t]).square().sum()) for s in positions for t in positions)]
    if task.name == "intrinsic_dimension":
        pairs = list(itertools.product(positions, repeat=2))
        return [sum(max(float(x[s] @ a @ x[t]) for s, t in pairs) for a in task.matrices)]
    if task.name == "triangle_center":
        triples = itertools.product(positions, repeat=3)
        return [min(float((x[a] + x[b] + x[c]).square().sum()) for a, b, c in triples)]
    if task.name == "best_tree":
        places = itertools.product(positions, repeat=task.arity)
        edges = list(zip(task.edges, task.matrices, strict=True))
        return [max(sum(float(x[p[i]] @ a @ x[p[j]]) for (i, j), a in edges) for p in places)]
    if task.name == "kth_largest":
        return sorted(x[:, 0].tolist())[-task.k : len(x) - task.k + 1]
    chosen = task.positions if task.name == "position_sum" else positions
    total = [sum(float(x[t, i]) for t in chosen) for i in range(x.shape[1])]
    return [value / len(x) for value in total] if task.name == "global_mean" else total


@EACH
def test_the_target_is_its_formula(name, parameters):
    task = load_task(name, n_tokens=7, seed=4, **parameters)
    x, y = task.sample(15, seed=0)
    assert y.shape == (15, task.d_output)
    expected = torch.tensor([by_loops(task, sequence) for sequence in x])
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


@given(seed=st.integers(0, 10**6), case=st.sampled_from(CASES))
def test_the_active_index_set_is_where_the_gradient_is_not_zero(seed, case):
    name, parameters = case
    task = load_task(name, n_tokens=7, seed=seed, **parameters)
    x, _ = task.sample(5, seed=seed + 1)
    jacobian = torch.autograd.functional.jacobian(lambda z: task.target(z).sum(0), x)
    moved = (jacobian != 0).any(dim=-1).any(dim=0)  # [output, batch, pos, d] -> [batch, pos]
    assert task.active_index_set(x).equal(moved)


@EACH
def test_the_gradient_is_the_targets(name, parameters):
    task = load_task(name, n_tokens=7, **parameters)
    x = task.sample(2, seed=2)[0].double().requires_grad_(True)
    assert torch.autograd.gradcheck(task.target, x, eps=1e-7, atol=1e-4)


@pytest.mark.parametrize("d_token", [3, 4, 5])
def test_rotoreflections_have_one_law_and_no_token_is_its_own_best_pair(d_token):
    task = load_task(
        "intrinsic_dimension", n_components=3, d_token=d_token, matrix_kind="rotoreflection"
    )
    turns = torch.tensor([1j, -1j] * (d_token // 2) + [-1.0] * (d_token % 2))
    for matrix in task.matrices:
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(d_token))
        values = torch.linalg.eigvals(matrix)
        for value in turns:  # those of S, so that matrices differ by a change of basis alone
            assert (values - value).abs().min() < 1e-5
        x = torch.randn(1000, d_token, generator=torch.Generator().manual_seed(0))
        assert ((x @ matrix) * x).sum(dim=1).max() < 1e-5
    with pytest.raises(InfoFlowError, match="d_token is 2 with matrix_kind 'rotoreflection'"):
        load_task("intrinsic_dimension", d_token=2, matrix_kind="rotoreflection")


@pytest.mark.parametrize("name", ["intrinsic_dimension", "best_tree"])
def test_matrices_that_are_changed_stay_those_of_other_tasks(name):
    """They were the ones that all tasks of these settings share: targets changed with them."""
    x, y = load_task(name, n_tokens=5).sample(3, seed=0)
    load_task(name, n_tokens=5).matrices.mul_(2)
    assert load_task(name, n_tokens=5).target(x).equal(y)


@pytest.mark.parametrize("kind", ["gaussian", "orthogonal", "rotoreflection"])
def test_of_many_draws_the_one_of_least_overlap_is_taken(kind):
    def overlap(n_draws):
        """By the definition, pair by pair."""
        matrices = load_task(
            "intrinsic_dimension", n_components=3, d_token=3, matrix_kind=kind, n_draws=n_draws
        ).matrices
        found = [
            abs(float((a * b).sum() / (a.norm() * b.norm())))
            for one, other in itertools.combinations(matrices, 2)
            for a, b in ((one, other), (one, other.T))
        ]
        assert float(largest_overlap(matrices)) == pytest.approx(max(found), rel=1e-5)
        return max(found)

    assert overlap(4096) < 0.2 < overlap(1)


def test_the_worked_example_of_appendix_e():
    task = load_task("depth_separation", n_tokens=4, d_token=2)
    x = torch.tensor([[[1.0, 0.0], [0.6, 0.8], [-0.8, -0.6], [0.0, -1.0]]])
    assert float(task.target(x)) == pytest.approx(0.08)
    assert task.active_index_set(x).tolist() == [[False, True, True, False]]


def test_equal_numbers_count_one_by_one_from_the_lowest_position():
    x = torch.tensor([[[0.5], [0.9], [0.5], [0.1]]])
    active = [
        load_task("kth_largest", n_tokens=4, k=k).active_index_set(x).nonzero()[0, 1].item()
        for k in (1, 2, 3, 4)
    ]
    assert active == [1, 0, 2, 3]


@pytest.mark.parametrize("extremum", ["max", "min"])
def test_a_component_that_the_outer_function_ignores_is_not_active(extremum):
    """Whether it does may hang on the sign of a value, so that a minimum must come as it is."""
    for outer, expected in (
        (lambda z: z[:, :1], 1),
        (lambda z: z.relu().sum(-1, True), None),
    ):
        task = DRetrieval(n_tokens=7, n_components=2, outer=outer, extremum=extremum)
        x, y = task.sample(50, seed=0)
        found = task.active_index_set(x).sum(dim=1)
        assert found.eq(1).all() if expected else found.eq(0).equal(y[:, 0] == 0)


def test_triples_of_128_tokens_need_no_cube():
    """A [4, 128, 128, 128, 3, 3] tensor of floats would take 300 MB for a batch of four."""
    task = load_task("triangle_center", n_tokens=128, d_token=3)
    x, _ = task.sample(1, seed=0)
    tracker = torch.profiler.profile(profile_memory=True)
    with tracker:
        task.active_index_set(x)
    largest = max(event.self_cpu_memory_usage for event in tracker.key_averages())
    assert largest < 2**31


def test_directions_are_unit_vectors_and_orthonormal_on_request():
    random = load_task("d_retrieval", d_token=4, n_components=4, seed=3)
    torch.testing.assert_close(random.vectors.norm(dim=1), torch.ones(4))
    square = load_task("d_retrieval", d_token=4, n_components=3, seed=3, directions="orthonormal")
    torch.testing.assert_close(square.vectors @ square.vectors.T, torch.eye(3))


# Samples and datasets


@pytest.mark.parametrize(
    ("tokens", "mean", "variance", "largest"),
    [("normal", 0, 1, torch.inf), ("uniform", 0, 1 / 3, 1), ("unit", 1 / 2, 1 / 12, 1)],
)
def test_tokens_follow_their_distribution(tokens, mean, variance, largest):
    x, _ = load_task("d_retrieval", tokens=tokens).sample(4000, seed=0)
    assert abs(x.mean() - mean) < 0.01
    assert abs(x.var() - variance) < 0.01
    assert x.abs().max() <= largest


def test_tokens_lie_on_the_sphere_or_between_the_norms_that_were_asked():
    sphere, _ = load_task("depth_separation", n_tokens=9).sample(50, seed=0)
    torch.testing.assert_close(sphere.norm(dim=-1), torch.ones(50, 9))
    clamped, _ = load_task("triangle_center", min_norm=0.7, max_norm=1.1).sample(500, seed=0)
    assert clamped.norm(dim=-1).min() >= 0.7 - 1e-6
    assert clamped.norm(dim=-1).max() <= 1.1 + 1e-6


def test_samples_depend_on_their_seed_and_on_nothing_else():
    task = load_task("d_retrieval", n_components=4, seed=3)
    torch.manual_seed(0)
    first, state = task.sample(5, seed=1), torch.get_rng_state()
    torch.manual_seed(99)
    second = task.sample(5, seed=1)
    assert first[0].equal(second[0])
    assert not first[0].equal(task.sample(5, seed=2)[0])
    torch.manual_seed(0)
    assert torch.get_rng_state().equal(state)
    x, _ = task.sample(1, seed=3)  # the seed of the directions, too
    cosines = torch.nn.functional.cosine_similarity(x[0, :4], task.vectors)
    assert cosines.abs().max() < 0.99


def test_a_dataset_holds_inputs_and_targets_as_features():
    task = load_task("d_retrieval", n_tokens=5, d_token=3, n_components=2)
    data = task.dataset("validation", 11, seed=7)
    assert data.column_names == ["x", "y"]
    assert data.features["x"].shape == (5, 3)
    assert str(data.split) == "validation"
    assert "2510.06662" in data.info.description
    rows = data.with_format("torch")[:]
    assert rows["x"].shape == (11, 5, 3)
    torch.testing.assert_close(task.target(rows["x"]), rows["y"])


def test_other_arguments_give_other_fingerprints():
    task = load_task("d_retrieval")
    sets = [
        task.dataset("train", 9),
        task.dataset("test", 9),
        task.dataset("train", 10),
        task.dataset("train", 9, seed=1),
        load_task("d_retrieval", seed=1).dataset("train", 9),
        load_task("d_retrieval", extremum="min").dataset("train", 9),
    ]
    assert len({data._fingerprint for data in sets}) == len(sets)


def test_splits_share_no_sequence():
    task = load_task("d_retrieval", n_tokens=2, d_token=1)
    parts = [
        task.dataset(s, 300).with_format("numpy")["x"] for s in ("train", "validation", "test")
    ]
    keys = [{row.tobytes() for row in part[:]} for part in parts]
    assert all(not a & b for a, b in itertools.combinations(keys, 2))


# What is refused; types and ranges of parameters are in tests/test_settings.py


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("d_retrieval", {"extremum": ("max",)}, "extremum has 1 entries for 4 components"),
        ("d_retrieval", {"outer": "mean"}, "outer is 'mean'"),
        ("d_retrieval", {"subsets": ((0,),)}, "subsets has 1 entries"),
        ("d_retrieval", {"subsets": ((0,), (1,), (), (2,))}, r"a subset is \(\)"),
        ("d_retrieval", {"subsets": ((0,), (1,), (16,), (2,))}, r"a subset is \(16,\)"),
        (
            "d_retrieval",
            {"directions": "orthonormal", "d_token": 3},
            "at most that many directions",
        ),
        ("triangle_center", {"min_norm": 2.0, "max_norm": 1.0}, "min_norm <= max_norm"),
        ("position_sum", {"positions": (0, 16)}, r"positions are \(0, 16\): .* from 0 to 15"),
        ("position_sum", {"positions": (1, 1)}, "different integers"),
        ("position_sum", {"positions": ()}, "at least one"),
        ("kth_largest", {"k": 17}, "k is 17 for 16 tokens"),
        ("kth_largest", {"d_token": 2}, "d_token is 2"),
    ],
)
def test_parameters_that_do_not_fit_each_other_are_named(name, parameters, message):
    with pytest.raises(InfoFlowError, match=message):
        load_task(name, **parameters)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x: x[..., :0], "has shape"),
        (lambda x: x.tolist(), "is a list"),
        (lambda x: x.long(), r"x\.float"),
        (lambda x: torch.full_like(x, torch.nan), "values that are NaN"),
    ],
)
@pytest.mark.parametrize("name", sorted({name for name, _ in CASES}))
def test_bad_inputs_are_named(name, spoil, message):
    task = load_task(name)
    x, _ = task.sample(2, seed=0)
    for call in (task.target, task.active_index_set):
        with pytest.raises(InfoFlowError, match=message):
            call(spoil(x))


@EACH
def test_notebooks_show_a_task_by_its_first_words_and_sizes(name, parameters):
    task = load_task(name, n_tokens=7, **parameters)
    shown = task._repr_html_()
    assert html.escape(inspect.getdoc(type(task)).split("\n\n")[0].split("\n")[0]) in shown
    assert "n_tokens" in shown


def test_a_subset_for_each_component_is_counted_by_its_size():
    """Scores of 2, 3 and 1 tokens are compared in the place of 3 T."""
    whole, some = (
        load_task("d_retrieval", n_tokens=7, n_components=3, subsets=subsets)
        for subsets in (None, ((0, 1), (2, 3, 4), (6,)))
    )
    numbers = [task.comparison.number(7, "proved") for task in (whole, some)]
    assert numbers[1] < numbers[0]


def test_bad_sample_requests_are_named():
    task = load_task("d_retrieval")
    with pytest.raises(InfoFlowError, match="n is 0"):
        task.dataset("train", 0)
    with pytest.raises(InfoFlowError, match=r"n is 2\.5"):
        task.sample(2.5, 0)
    with pytest.raises(InfoFlowError, match="seed is -1"):
        task.sample(2, -1)
    with pytest.raises(InfoFlowError, match="split is 'dev'"):
        task.dataset("dev", 3)


def test_an_edge_that_stands_twice_makes_no_tree():
    """Its last matrix alone was retrieved by, where the score had both."""
    for edges in (((0, 1), (0, 1), (1, 2)), ((0, 1), (1, 0))):
        with pytest.raises(InfoFlowError, match="expected those of a tree"):
            load_task("best_tree", edges=edges)
