"""Heads that a search finds: their error by hand, what they must reach, and what they cannot be."""

import itertools
import math

import numpy as np
import pytest

from infoflow_lens import InfoFlowError, load_task
from infoflow_lens.studies.best_heads import best_heads
from infoflow_lens.theory.routing import measure_routing
from tests.conftest import some_of

SHORT = {"budget": 320, "n": 400}


def pairs(n_tokens, n=2, seed=1000, kind="orthogonal", d=3):
    return load_task(
        "intrinsic_dimension", n_tokens=n_tokens, d_token=d, tokens="sphere", n_components=n,
        seed=seed, matrix_kind=kind,
    )  # fmt: skip


def left_by(task, forms, n=1000, seed=5):
    """The NMSE of hard heads with one score each, by loops and least squares of numpy.

    forms: for every head B and, below it, b.
    """
    x, y = (part.double().numpy() for part in task.sample(n, seed))
    matrices = task.matrices.double().numpy()
    reached = []
    for tokens in x:
        held = [
            {t, *(int(np.argmax(tokens @ (form.T @ np.append(tokens[t], 1)))) for form in forms)}
            for t in range(len(tokens))
        ]
        reached.append(
            [
                max(tokens[a] @ m @ tokens[b] for own in held for a in own for b in own)
                for m in matrices
            ]
        )
    parts = np.column_stack([reached, np.ones(n)])
    error = y - parts @ np.linalg.lstsq(parts, y, rcond=None)[0]
    return float((error**2).mean() / y.var())


@pytest.mark.parametrize(("n", "heads"), some_of([(2, 1), (3, 2)], (3, 2)))
def test_the_number_is_that_of_the_heads_by_hand(n, heads):
    task = pairs(5, n)
    found = best_heads(task, heads, **SHORT)
    forms = found.scores.forms[0, :, 0].double().numpy()
    assert left_by(task, forms) == pytest.approx(found.nmse, rel=0.2)
    assert found.low < found.nmse < found.high


def test_no_score_of_a_grid_is_better():
    """Tokens on a circle, so that a score is a matrix of four numbers: all of them, in steps."""
    task = pairs(3, d=2)
    angles = np.linspace(0, math.pi, 7)[:-1]
    around = np.linspace(0, 2 * math.pi, 9)[:-1]
    grid = [
        np.array([[math.cos(a), math.sin(a) * math.cos(b)],
                  [last * math.cos(c), last * math.sin(c)], [0, 0]])
        for a, b, c in itertools.product(angles, angles, around)
        for last in [math.sin(a) * math.sin(b)]
    ]  # fmt: skip
    best = min(grid, key=lambda form: left_by(task, [form], n=20))
    assert best_heads(task, 1, **SHORT).nmse <= 1.2 * left_by(task, [best])


KNOWN = [
    ("orthogonal", 2, 8, 1, 0.0855),
    ("orthogonal", 2, 16, 1, 0.363),
    ("gaussian", 2, 16, 1, 0.308),
    ("gaussian", 3, 8, 2, 0.0083),
    ("orthogonal", 3, 8, 2, 0.148),
]


@pytest.mark.parametrize(
    ("kind", "n", "n_tokens", "heads", "known"),
    some_of(KNOWN, KNOWN[3]),
)
def test_what_others_found_is_reached(kind, n, n_tokens, heads, known):
    """By another search, on few sequences, for the same matrices."""
    found = best_heads(pairs(n_tokens, n, kind=kind), heads, **SHORT)
    assert found.nmse <= 1.3 * known


def test_one_score_serves_two_matrices():
    task = pairs(8)
    first, second = task.matrices.numpy()
    zero = np.zeros((1, 3))
    both, alone = (left_by(task, [np.vstack([m, zero])]) for m in (first + second.T, first))
    found = best_heads(task, 1, **SHORT)
    assert both < 0.7 * alone
    assert found.nmse < 1.1 * both
    assert found.nmse < 0.5 * measure_routing(task, 1, n=300, one_role=True).nmse


def test_roles_help_where_tokens_tell_them():
    task = pairs(12, kind="gaussian")
    one, several = (best_heads(task, 1, roles=roles, budget=320, n=400) for roles in (1, 4))
    assert several.nmse < 0.2 * one.nmse
    assert several.held > 0.85 > 0.6 > one.held


@pytest.mark.parametrize("heads", some_of([2, 3], 2))
def test_as_many_heads_as_pairs_leave_nothing(heads):
    found = best_heads(pairs(8), heads, **SHORT)
    assert found.nmse < 1e-9
    assert found.held == 1


def test_a_single_pair_needs_one_head():
    """A symmetric score of which the least is sought, whose bilinear part is found first."""
    found = best_heads(load_task("depth_separation", n_tokens=6), 1, **SHORT)
    assert found.nmse < 1e-9


def test_the_budget_is_told_and_the_seed_decides():
    task = pairs(5)
    one, again, other = (best_heads(task, 1, budget=250, n=100, seed=s) for s in (0, 0, 1))
    assert one == again != other
    assert 200 < one.budget <= 250
    assert 400 < best_heads(task, 1, roles=2, budget=250, n=100).budget <= 500


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("memorization", "which has no components"),
        ("d_retrieval", "component 0 has arity 1: expected pairs"),
        ("triangle_center", "arity 3"),
    ],
)
def test_what_is_no_pair_is_refused(name, message):
    with pytest.raises(InfoFlowError, match=message):
        best_heads(load_task(name), 1)
