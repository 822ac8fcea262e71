"""Targets of one's own: everything follows from the components, against slow re-implementations."""

import itertools
import textwrap
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from infoflow_lens import Architecture, InfoFlowError, build_model, load_task, train
from infoflow_lens.cli import app
from infoflow_lens.studies.comparison_trees import trees_of
from infoflow_lens.tasks import Target, dataset_card
from infoflow_lens.tasks.registry import load_task_for
from infoflow_lens.theory.comparison import Component
from infoflow_lens.theory.estimate import estimate
from infoflow_lens.theory.shapes import ModelShape
from infoflow_lens.training import TrainingConfig
from tests.reference.data import read_data


def distance(x):
    return (x[..., 0, :] - x[..., 1, :]).norm(dim=-1)


def first(x):
    return x[..., 0, 0]


def apart(n):
    return tuple(itertools.combinations(range(n), 2))


def closest_and_largest(n=10, **settings):
    closest = Component(2, distance, symmetric=True, extremum="min", distinct=True)
    return Target(
        components=(closest, Component(1, first, symmetric=True)), n_tokens=n, d_token=3, **settings
    )


def test_the_value_is_that_of_the_definition():
    task = closest_and_largest()
    x, y = task.sample(50, seed=0)
    pairs = torch.tensor(apart(10))
    closest = (x[:, pairs[:, 0]] - x[:, pairs[:, 1]]).norm(dim=-1).amin(dim=1)
    assert torch.allclose(y[:, 0], closest + x[..., 0].amax(dim=1))
    assert task.dataset("train", 5).features["y"].length == 1


def test_the_active_set_is_where_the_gradient_is_not_zero():
    task = closest_and_largest(outer="product")
    x, _ = task.sample(40, seed=1)
    x.requires_grad_(True)
    gradient = torch.autograd.grad(task.target(x).sum(), x)[0]
    assert task.active_index_set(x).equal((gradient != 0).any(dim=-1))


def test_what_components_undo_of_one_another_is_not_active():
    """The largest of two tokens less that of two others: nothing, where they share their largest.

    Moved tokens say what counts, which is that one of no component for a third of the inputs.
    """
    task = Target(
        components=(Component(1, first), Component(1, first)),
        outer=lambda z: z[:, :1] - z[:, 1:],
        subsets=((0, 1), (1, 2)),
        n_tokens=3,
        d_token=1,
    )
    x = task.sample(60, seed=0)[0].double()
    moved = x[:, None] + 1e-6 * torch.eye(3, dtype=x.dtype)[..., None]
    change = (task.target(moved.flatten(0, 1)).view(60, 3) - task.target(x)).abs()
    assert task.active_index_set(x).equal(change > 1e-9)
    assert 10 < (change.amax(dim=1) == 0).sum() < 30


def test_a_score_that_ignores_a_token_leaves_it_out():
    lopsided = Component(2, lambda x: x[..., 0, 0] + 0 * x[..., 1, 0])
    task = Target(components=(lopsided,), n_tokens=5, d_token=2)
    x, _ = task.sample(20, seed=0)
    assert (task.active_index_set(x).sum(dim=1) == 1).all()


def test_counts_and_trees_follow_from_the_components():
    triple = Component(3, lambda x: x.sum((-1, -2)), symmetric=True)
    single = Component(1, first, symmetric=True)
    task = Target(components=(triple, single), n_tokens=6, d_token=2)
    profile = task.comparison
    assert (profile.dimension, profile.order, profile.n_trees) == (3, 3, 2)
    for t in (4, 7):
        assert profile.number(t, "paper") == t**3 - 1 + t - 1
        leaves = len(list(itertools.combinations_with_replacement(range(t), 3)))
        assert profile.number(t, "unordered") == leaves - 1 + t - 1
    assert profile.number(6, "proved") <= profile.number(6, "unordered")
    made = [tree.n_leaves - 1 for tree in trees_of(task)]
    assert made == [56 - 1, 6 - 1]
    x, _ = task.sample(20, seed=0)
    for tree, component in zip(trees_of(task, "chain"), task.components, strict=True):
        winner, _ = tree.evaluate(x)
        rows = torch.arange(20)[:, None]
        best = torch.stack(
            [
                component.score(x[:, list(p)])
                for p in itertools.product(range(6), repeat=component.arity)
            ]
        )
        assert torch.allclose(component.score(x[rows, winner]), best.amax(dim=0))


def test_subsets_restrict_what_is_looked_at():
    task = Target(
        components=(Component(1, first), Component(2, distance, True)),
        subsets=((1, 3), (0, 2, 4)),
        n_tokens=6,
        d_token=2,
    )
    x, y = task.sample(30, seed=0)
    pairs = [(x[:, s] - x[:, t]).norm(dim=-1) for s, t in itertools.product((0, 2, 4), repeat=2)]
    expected = x[:, [1, 3], 0].amax(dim=1) + torch.stack(pairs).amax(dim=0)
    assert torch.allclose(y[:, 0], expected)
    assert not task.active_index_set(x)[:, 5].any()
    assert task.comparison.order == 0


@pytest.mark.parametrize(
    "name",
    ["d_retrieval", "intrinsic_dimension", "depth_separation", "triangle_center", "best_tree"],
)
def test_built_in_tasks_are_such_targets(name):
    task = load_task(name, n_tokens=7)
    x, y = task.sample(30, seed=2)
    outer = getattr(task, "outer", "sum")
    same = Target(components=task.components, n_tokens=7, d_token=task.d_token, outer=outer)
    assert torch.allclose(same.target(x), y, atol=1e-5)
    assert same.active_index_set(x).equal(task.active_index_set(x))
    assert same.comparison.dimension == task.comparison.dimension
    assert same.comparison.order == task.comparison.order
    assert same.comparison.number(7, "proved") <= task.comparison.number(7, "unordered")


def test_a_target_is_trained_estimated_and_described():
    task = closest_and_largest(8)
    architecture = Architecture(
        n_heads=(2, 2), d_model=16, d_token=3, n_tokens=8, positional_embedding="learned"
    )
    assert estimate(architecture, task).verdict == "allowed by construction"
    model = build_model(architecture, seed=0)
    config = TrainingConfig(epochs=2, batch_size=64)
    trained = train(model, task, config, n_train=1000, n_validation=200, progress=False)
    assert trained.nmse < 1.5
    assert "module:name" in str(dataset_card(task))


class ModelOf:
    def __init__(self, **sizes):
        self.architecture = SimpleNamespace(**sizes)


def test_the_command_line_takes_module_and_name(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        textwrap.dedent(
            """
            from infoflow_lens.tasks import Target
            from infoflow_lens.theory import Component

            def largest(x):
                return x[..., 0, 0]

            task = Target(components=(Component(1, largest, True),), n_tokens=8, d_token=2)

            def sized(n_tokens=4):
                return Target(components=(Component(1, largest, True),) , n_tokens=n_tokens)

            def fixed():
                return task

            nothing = 3
            """
        )
    )
    monkeypatch.chdir(tmp_path)
    for name in ("mine:task", "mine.py:task", "mine:sized"):
        result = CliRunner().invoke(app, ["estimate", name, "--heads", "1", "--json"])
        assert result.exit_code == 0, result.stderr
        assert '"verdict": "allowed by construction"' in result.stdout
    assert load_task("mine:task", n_tokens=12).n_tokens == 12
    assert load_task("mine:sized", n_tokens=5).n_tokens == 5
    # in the sizes of a model, where it takes them; train() refused a maker without parameters
    assert load_task_for(ModelOf(n_tokens=12, d_token=2), "mine:task").n_tokens == 12
    assert load_task_for(ModelOf(n_tokens=8, d_token=2), "mine:fixed").n_tokens == 8
    with pytest.raises(InfoFlowError, match="parameter"):
        load_task_for(ModelOf(n_tokens=12, d_token=2), "mine:fixed")
    with pytest.raises(InfoFlowError, match="did you mean 'n_tokens'"):
        load_task("mine:sized", n_token=5)
    for name, message in {
        "mine:other": "has no 'other'",
        "mine:nothing": "is a int",
        "not_there:task": "cannot be imported",
        "mine.py:task2": "has no 'task2'",
    }.items():
        with pytest.raises(InfoFlowError, match=message):
            load_task(name)


ONE = Component(1, first)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "expected at least one Component"),
        ({"components": (first,)}, "expected Component"),
        ({"components": (Component(9, first),)}, "asks for 9 tokens of 4"),
        ({"components": (Component(1, lambda x: x),)}, "expected one number a tuple"),
        ({"components": (Component(1, lambda x: x.nope),)}, "the score of component 1 fails"),
        ({"components": (Component(1, lambda x: first(x) - first(x).mean()),)}, "alone and"),
        ({"components": (Component(1, lambda x: first(x) + torch.rand(())),)}, "draw nothing"),
        ({"components": (Component(1, lambda x: first(x).log()),)}, "is nan for tokens"),
        ({"components": (Component(1, lambda x: first(x).round()),)}, "has no derivative"),
        ({"components": (Component(1, lambda x: first(x).detach()),)}, "has no derivative"),
        ({"components": (ONE,), "outer": lambda z: (z > 0).float()}, "outer has no derivative"),
        ({"components": (ONE,), "tokens": lambda s, g: torch.randn(s)}, "drawn from it"),
        (
            {"components": (Component(2, lambda x: x[..., 0, 0], symmetric=True),)},
            "says symmetric=True",
        ),
        ({"components": (Component(1, first),), "outer": "mean"}, "outer is 'mean'"),
        ({"components": (Component(1, first),), "outer": lambda z: z.sum(-1)}, r"return \[2, 1\]"),
        ({"components": (Component(1, first),), "subsets": ((9,),)}, "positions of component 1 is"),
        (
            {"components": (Component(1, first),), "subsets": ((1,), (2,))},
            "is .* 1 entries",
        ),
        ({"components": (Component(1, first, positions=(7,)),)}, "positions of component 1"),
        ({"components": (Component(2, distance, tuples=((0, 9),)),)}, "expected 0 to 3"),
        ({"components": (Component(1, first),), "tokens": lambda s, g: torch.zeros(1)}, "shape"),
    ],
)
def test_what_is_no_target_is_refused(settings, message):
    with pytest.raises(InfoFlowError, match=message):
        Target(n_tokens=4, d_token=2, **settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"arity": 0, "score": first}, "arity is 0"),
        ({"arity": 1, "score": 3}, "score is 3"),
        ({"arity": 2, "score": distance, "rank": 2}, "rank is 2 for tuples"),
        ({"arity": 1, "score": first, "extremum": "top"}, "extremum is 'top'"),
        ({"arity": 2, "score": distance, "tuples": ((1,),)}, "expected the arity, 2"),
        ({"arity": 1, "score": first, "rank": 3, "positions": (0, 4)}, "rank is 3 .* 2 positions"),
        ({"arity": 1, "score": first, "rank": 2, "tuples": ((0,),)}, "rank is 2 .* listed tuples"),
        (
            {"arity": 3, "score": distance, "distinct": True, "positions": (0, 4)},
            "3 different tokens among 2 positions",
        ),
        ({"arity": 2, "score": distance, "tuples": ()}, "at least one tuple"),
        (
            {"arity": 2, "score": distance, "tuples": ((0, 1),), "positions": (0, 1)},
            "tuples and positions are both given",
        ),
        (
            {"arity": 2, "score": distance, "tuples": ((0, 0), (0, 1)), "distinct": True},
            r"tuples hold \(0, 0\)",
        ),
    ],
)
def test_what_is_no_component_is_refused(arguments, message):
    with pytest.raises(InfoFlowError, match=message):
        Component(**arguments)


def test_tuples_of_different_positions_or_of_listed_ones():
    """The closest pair has two tokens: either say distinct, or list the pairs."""
    listed = Component(2, distance, symmetric=True, extremum="min", tuples=apart(7))
    distinct = Component(2, distance, symmetric=True, extremum="min", distinct=True)
    tasks = [Target(components=(c,), n_tokens=7, d_token=2) for c in (listed, distinct)]
    x, y = tasks[0].sample(40, seed=0)
    assert tasks[1].target(x).equal(y)
    assert tasks[1].active_index_set(x).equal(tasks[0].active_index_set(x))
    assert tasks[1].comparison.number(7, "unordered") == len(apart(7)) - 1
    shape = ModelShape((1, 1), (16, 16), 7, positional=True)
    for task in tasks:
        found = estimate(shape, task)
        assert (found.verdict, found.verified) == ("allowed by construction", 1.0)


def test_probes_read_a_target_by_module_and_name(tmp_path, monkeypatch):
    (tmp_path / "probed.py").write_text(
        "from infoflow_lens.tasks import Target\n"
        "from infoflow_lens.theory import Component\n"
        "task = Target(components=(Component(1, lambda x: x[..., 0, 0]),), n_tokens=5, d_token=2)\n"
    )
    monkeypatch.chdir(tmp_path)
    model = build_model(Architecture(n_heads=(1,), d_model=8, d_token=2, n_tokens=5), seed=0)
    batches = read_data(model, "task:probed:task", n=7)
    assert batches.n_sequences == 7
