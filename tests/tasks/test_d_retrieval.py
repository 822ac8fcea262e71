"""The D-retrieval target, its active tokens and its datasets."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infoflow_lens import InfoFlowError, load_task
from infoflow_lens.tasks import DRetrieval


def by_loops(task, x):
    """The target as the paper writes it, one sequence at a time."""
    values = []
    extrema = task.extremum if isinstance(task.extremum, tuple) else (task.extremum,) * 9
    for a, extremum, component in zip(task.vectors, extrema, itertools.count()):
        positions = task.subsets[component] if task.subsets else range(task.n_tokens)
        scores = [float(a @ x[t]) for t in positions]
        values.append(max(scores) if extremum == "max" else min(scores))
    return values


VARIANTS = [
    {},
    {"extremum": "min"},
    {"extremum": ("max", "min", "max")},
    {"subsets": ((0, 1), (2, 3, 4), (6,))},
    {"outer": "product"},
    {"outer": "square_sum", "tokens": "uniform"},
    {"outer": "identity", "extremum": ("min", "min", "max"), "subsets": ((5, 1), (0,), (3, 2))},
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_target_is_its_formula(variant):
    task = load_task("d_retrieval", n_tokens=7, d_token=5, n_components=3, seed=4, **variant)
    x, y = task.sample(20, seed=1)
    joins = {
        "sum": lambda z: [sum(z)],
        "product": lambda z: [z[0] * z[1] * z[2]],
        "square_sum": lambda z: [sum(v * v for v in z)],
        "identity": list,
    }
    expected = [joins[task.outer](by_loops(task, sequence)) for sequence in x]
    torch.testing.assert_close(y, torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert y.shape == (20, task.d_output)


@given(seed=st.integers(0, 10**6), variant=st.sampled_from(VARIANTS))
def test_the_active_index_set_is_where_the_gradient_is_not_zero(seed, variant):
    task = load_task("d_retrieval", n_tokens=7, d_token=5, n_components=3, seed=seed, **variant)
    x, _ = task.sample(5, seed=seed + 1)
    jacobian = torch.autograd.functional.jacobian(lambda z: task.target(z).sum(0), x)
    moved = (jacobian != 0).any(dim=-1).any(dim=0)  # [output, batch, pos, d] -> [batch, pos]
    assert task.active_index_set(x).equal(moved)


def test_a_component_that_the_outer_function_ignores_is_not_active():
    task = DRetrieval(n_tokens=7, n_components=2, outer=lambda z: z[:, :1])
    x, _ = task.sample(50, seed=0)
    assert task.active_index_set(x).sum(dim=1).eq(1).all()


def test_directions_are_unit_vectors_and_orthonormal_on_request():
    random = load_task("d_retrieval", d_token=4, n_components=4, seed=3)
    torch.testing.assert_close(random.vectors.norm(dim=1), torch.ones(4))
    square = load_task("d_retrieval", d_token=4, n_components=3, seed=3, directions="orthonormal")
    torch.testing.assert_close(square.vectors @ square.vectors.T, torch.eye(3))


def test_tokens_follow_their_distribution():
    normal, _ = load_task("d_retrieval").sample(4000, seed=0)
    uniform, _ = load_task("d_retrieval", tokens="uniform").sample(4000, seed=0)
    assert abs(normal.mean()) < 0.01
    assert abs(normal.var() - 1) < 0.01
    assert uniform.abs().max() <= 1
    assert abs(uniform.var() - 1 / 3) < 0.01


def test_samples_depend_on_their_seed_and_on_nothing_else():
    task = load_task("d_retrieval")
    torch.manual_seed(0)
    first, state = task.sample(5, seed=1), torch.get_rng_state()
    torch.manual_seed(99)
    second = task.sample(5, seed=1)
    assert first[0].equal(second[0])
    assert not first[0].equal(task.sample(5, seed=2)[0])
    torch.manual_seed(0)
    assert torch.get_rng_state().equal(state)


def test_samples_are_independent_of_the_directions_for_equal_seeds():
    task = load_task("d_retrieval", n_components=4, seed=3)
    x, _ = task.sample(1, seed=3)
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


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"extremum": "median"}, "extremum is 'median'"),
        ({"extremum": ("max",)}, "extremum has 1 entries for 4 components"),
        ({"outer": "mean"}, "outer is 'mean'"),
        ({"subsets": ((0,),)}, "subsets has 1 entries"),
        ({"subsets": ((0,), (1,), (), (2,))}, r"a subset is \(\)"),
        ({"subsets": ((0,), (1,), (16,), (2,))}, r"a subset is \(16,\)"),
        ({"directions": "orthonormal", "d_token": 3}, "at most that many directions"),
    ],
)
def test_bad_parameters_are_named(parameters, message):
    with pytest.raises(InfoFlowError, match=message):
        load_task("d_retrieval", **parameters)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 16, 3), "has shape"),
        (torch.zeros(2, 16, 4, dtype=torch.int64), r"x\.float"),
        (torch.full((2, 16, 4), torch.nan), "128 values that are NaN"),
    ],
)
def test_bad_inputs_are_named(x, message):
    task = load_task("d_retrieval")
    for call in (task.target, task.active_index_set):
        with pytest.raises(InfoFlowError, match=message):
            call(x)


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
