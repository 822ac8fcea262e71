"""Constructions are ground truth: what their attention predicts, their Jacobians measure."""

import math

import pytest
import torch

from infoflow_lens import JacobianInfluence, PositionsProbe, compare, propagate, run_probes
from infoflow_lens.hooks import AttendedProbe
from infoflow_lens.studies.constructions import build_construction, list_constructions

# every construction, with hard attention or scores far apart
CASES = {
    "depth_separation": {"attention": "hardmax", "ffn": "exact", "n_tokens": 9},
    "d_retrieval": {"attention": "hardmax"},
    "intrinsic_dimension": {"attention": "hardmax", "n_tokens": 9},
    "best_tree": {"attention": "hardmax", "n_tokens": 8},
    "position_sum": {},
    "global_mean": {},
    "kth_largest": {"n_tokens": 7, "k": 3},
    "memorization": {"n_words": 4, "length": 3, "n_sequences": 20},
    "in_context_qa": {"n_questions": 4, "n_answers": 4, "n_pairs": 3},
    "in_context_qa_softmax": {"n_questions": 4, "n_answers": 4, "n_pairs": 3},
    "in_context_qa_one_layer": {"n_questions": 4, "n_answers": 4, "n_pairs": 3},
    "nested_qa": {"n_entities": 6, "hops": 2, "n_chains": 2},
    "template_matching": {"n_words": 5, "length": 3},
    "template_matching_one_layer": {"n_words": 5, "length": 3},
    "in_context_template_matching": {
        "n_words": 3,
        "length": 3,
        "n_answers": 3,
        "n_pairs": 2,
        "read_all": True,
    },
}
ONLY_ATTENTION = {"instructive_attention", "constrained_attention"}  # they solve no task


def test_every_construction_is_among_the_cases():
    assert set(CASES) | ONLY_ATTENTION == set(list_constructions())


def measured(name, **parameters):
    model, task = build_construction(name, **parameters)
    x, _ = task.sample(6, seed=0)
    attended, influence = run_probes(
        model, x, [AttendedProbe(), JacobianInfluence("resid_post")], progress=False
    )
    n_sources = task.n_tokens
    predicted = propagate(attended.positions, n_sources)
    agreement = compare(
        predicted, influence.influence[..., :n_sources], active=task.active_index_set(x)
    )
    return task, x, predicted, influence, agreement


@pytest.fixture(scope="module", params=CASES)
def case(request):
    """Each construction is measured once; its tests run one after the other."""
    return measured(request.param, **CASES[request.param])


def test_influence_lies_in_the_predicted_sets_and_ranks_them_first(case):
    *_, agreement = case
    for states in (*agreement.layers, *agreement.layers_with_self, agreement.cls):
        # a state that holds everything, or itself alone, leaves nothing to rank
        assert math.isnan(states.auroc) or states.auroc >= 0.99
    for states in (*agreement.layers_with_self, agreement.cls):
        assert states.influence_inside >= 0.9999


def test_the_predicted_set_contains_the_active_index_set(case):
    task, x, predicted, _, agreement = case
    assert agreement.coverage == 1
    read = predicted.members[-1, :, -1]
    assert not (task.active_index_set(x) & ~read).any()


def test_theorem_6_finds_the_answer_by_elimination():
    """As in the paper, its last state holds the other block in place of the matching one, and that
    is enough: all sequences of the space that agree on the predicted set have the same label."""
    name = "in_context_template_matching"
    task, x, predicted, _, agreement = measured(name, **(CASES[name] | {"read_all": False}))
    assert agreement.cls.auroc >= 0.99
    assert agreement.coverage < 1
    space, labels = task.all_sequences()
    for sequence, held in zip(x, predicted.members[-1, :, -1], strict=True):
        agree = (space[:, held] == sequence[held]).all(dim=1)
        assert len(labels[agree].unique()) == 1


@pytest.mark.parametrize("name", ["d_retrieval", "intrinsic_dimension", "depth_separation"])
def test_with_a_hard_maximum_the_argmax_is_all_that_is_attended(name):
    model, task = build_construction(name, **CASES[name])
    x, _ = task.sample(10, seed=0)
    attended, positions = run_probes(model, x, [AttendedProbe(), PositionsProbe()], progress=False)
    by_argmax = propagate(positions.argmax, task.n_tokens)
    assert propagate(attended.positions, task.n_tokens).members.equal(by_argmax.members)


def test_soft_retrieval_is_hard_enough_to_be_predicted_by_the_argmax():
    model, task = build_construction("d_retrieval", n_components=3, beta=300.0)
    x, _ = task.sample(200, seed=0)
    positions, influence = run_probes(
        model, x, [PositionsProbe(), JacobianInfluence()], progress=False
    )
    predicted = propagate(positions.argmax, 16)
    agreement = compare(predicted, influence.influence[..., :16], active=task.active_index_set(x))
    assert agreement.coverage == 1
    assert agreement.cls.auroc >= 0.99


def test_constructions_are_left_without_gradients_or_hooks():
    model, task = build_construction("in_context_qa")
    model(task.sample(2, seed=0)[0]).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert not any(point.fwd_hooks for point in model.hook_dict.values())
