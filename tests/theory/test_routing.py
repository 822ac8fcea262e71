"""Routed heads: what they hold, what they leave, and where they cannot choose."""

import pytest

from infoflow_lens import InfoFlowError, load_task
from infoflow_lens.theory.comparison import model_comparisons
from infoflow_lens.theory.jobs import Max, Routed, choose_roles, roles_of
from infoflow_lens.theory.routing import measure_routing
from infoflow_lens.theory.schedule import LayerSchedule, Schedule, learns


def intrinsic(n_tokens, n=2, seed=0, kind="gaussian"):
    return load_task(
        "intrinsic_dimension", n_tokens=n_tokens, d_token=3, tokens="sphere", n_components=n,
        seed=seed, matrix_kind=kind,
    )  # fmt: skip


def rotations(n_tokens, n=2):
    """Best pairs of rotations of the sphere, for which every token is as good as any other."""
    return intrinsic(n_tokens, n, seed=1, kind="orthogonal")


def test_one_routed_head_holds_two_best_pairs_in_long_sequences():
    task = intrinsic(64)
    routed = Schedule((LayerSchedule(token=(Routed((0, 1)),)), LayerSchedule(cls=(Max(0), Max(1)))))
    one_role = Schedule((LayerSchedule(token=(Max(0),)), LayerSchedule(cls=(Max(0), Max(1)))))
    assert learns(task, routed, 30) == 1.0
    assert learns(task, one_role, 30) < 0.5


def test_the_error_that_is_left_falls_with_length():
    short, long = (
        measure_routing(intrinsic(16), 1, n=100),
        measure_routing(intrinsic(64), 1, n=50),
    )
    assert short.low <= short.nmse <= short.high
    assert long.nmse < 0.1 * short.nmse or long.nmse < 1e-9
    assert 0 < short.nmse < 0.2
    assert short.roles == 4


def test_as_many_heads_as_roles_leave_nothing():
    found = measure_routing(intrinsic(12, n=3), 6, n=60)
    assert found.nmse < 1e-9
    assert found.held == 1


def test_a_head_of_one_role_finds_the_other_pair_by_luck_alone():
    task = intrinsic(16)
    routed, alone = (
        measure_routing(task, 1, n=100),
        measure_routing(task, 1, n=100, one_role=True),
    )
    assert alone.roles == 1
    assert alone.nmse > 5 * routed.nmse
    assert alone.held < 0.7 < routed.held
    assert measure_routing(task, 2, n=50, one_role=True).nmse < 1e-9
    assert measure_routing(task, 5, n=50, one_role=True).n_heads == 2  # one for each pair


def test_rotations_cannot_be_routed():
    """Every token reaches the same score under a rotation, so none tells its role."""
    found = measure_routing(rotations(16), 1, n=100)
    assert 0.3 < found.low < found.high <= 1.1
    assert found.held < 0.7


@pytest.mark.slow
def test_the_interval_covers_what_many_samples_give():
    task = intrinsic(10, seed=3)
    exact = measure_routing(task, 1, n=500, seed=99).nmse
    inside = [
        found.low <= exact <= found.high
        for found in (measure_routing(task, 1, n=50, seed=s) for s in range(8))
    ]
    assert sum(inside) >= 6


def test_a_role_is_a_function_of_the_token_alone():
    task = intrinsic(10)
    x, _ = task.sample(4, 0)
    reference = task.sample(60, 1)[0].flatten(0, 1)
    roles = roles_of(task.components, (0, 1))
    together = choose_roles(task.components, roles, x, reference)
    moved = choose_roles(task.components, roles, x.flip(1), reference)
    assert together.equal(moved.flip(1))
    assert together.shape == (4, 10, 4)


def test_a_symmetric_score_has_one_side():
    assert roles_of(load_task("depth_separation").components, (0,)) == [(0, False)]
    with pytest.raises(InfoFlowError, match="arity 1: expected 2"):
        roles_of(load_task("d_retrieval").components, (0,))


def test_eq_5_counts_heads_times_roles():
    plain = model_comparisons((6, 2), 64, 3, 2)
    assert model_comparisons((3, 2), 64, 3, 2, roles=(2, 1)) == plain
    with pytest.raises(InfoFlowError, match=r"roles is \(1,\)"):
        model_comparisons((3, 2), 64, 3, 2, roles=(1,))
