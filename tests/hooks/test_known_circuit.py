"""An induction circuit, known from the weights up, as every probe sees it.

Layer 0 copies the token before; layer 1 finds the place behind the earlier occurrence of the
present token, and copies the token there. Built by hand in `tests/reference/induction.py`.
"""

import pytest
import torch

from infoflow_lens import (
    JacobianInfluence,
    PositionsProbe,
    RecoveryProbe,
    compare,
    propagate,
    run_probes,
)
from infoflow_lens.agreement import coverage_curve
from infoflow_lens.hooks import ResampleInfluence, measure_mechanisms
from tests.reference.induction import induction_model, repeated_segments

N_VOCAB, N_CTX, AGAIN = 11, 9, 6  # six tokens, then three of them again


@pytest.fixture(scope="module")
def model():
    return induction_model(N_VOCAB, N_CTX)


@pytest.fixture(scope="module")
def data():
    return repeated_segments(N_VOCAB, 400)


def test_mechanisms_with_damage_figures(model, data):
    """Read where a repeated token stands: there alone induction has an answer."""
    found = measure_mechanisms(model, data[0][:100], read=(-1, -2, -3), progress=False)
    frame = found.to_frame().set_index("layer")
    assert frame["mechanism"].to_dict() == {0: "specific_position", 1: "max_position"}
    assert frame.loc[0, "specific_position"] < 1e-3
    assert frame.loc[1, "max_position"] < 1e-3
    others = frame.loc[:, ["own_position", "global"]].to_numpy()
    assert others.min() > 1  # nats
    assert frame.loc[1, "specific_position"] > 1


def test_positions_are_the_previous_one_and_the_one_behind_the_earlier_occurrence(model, data):
    tokens, starts = data
    (found,) = run_probes(model, tokens, [PositionsProbe()], progress=False)
    queries = torch.arange(AGAIN, N_CTX)
    assert (found.argmax[0][:, 0, 1:] == torch.arange(N_CTX - 1)).all()
    expected = starts[:, None] + (queries - AGAIN) + 1
    assert found.argmax[1][:, 0, queries].long().equal(expected)


def test_recovery_finds_the_previous_token_then_the_induction_target(model, data):
    """By the identity of the token that the head attends to, among all of the vocabulary.

    Where a token is new, layer 1 has no match and spreads its attention, so variance remains there;
    the second choice is never passed on.
    """
    probe = RecoveryProbe((1, 2), target="identity")
    (found,) = run_probes(model, data[0], [probe], progress=False)
    errors = found.to_frame().set_index(["layer", "rank"])
    assert errors.loc[(0, 1), "fvu"] < 1e-3
    assert errors.loc[(0, 1), "accuracy"] > 0.99
    assert errors.loc[(1, 1), "fvu"] < 0.3
    assert errors.loc[(1, 1), "accuracy"] > 0.99
    for layer in (0, 1):
        assert errors.loc[(layer, 2), "fvu"] > 0.6
        assert errors.loc[(layer, 2), "accuracy"] < 0.5


def test_before_the_layer_that_brings_it_the_target_is_not_there(model, data):
    """A linear map on the state behind layer 0 knows the target of layer 1 no better than chance.

    The place where the target stands is known to the test, not to the probe: the map is fitted
    with plain least squares.
    """
    tokens, starts = data
    _, cache = model.run_with_cache(tokens)
    target = tokens.gather(1, (starts + 3)[:, None])[:, 0]  # behind the last occurrence
    identity = torch.nn.functional.one_hot(target, N_VOCAB).double()
    errors = []
    for layer in (0, 1):
        state = cache[f"blocks.{layer}.hook_resid_post"][:, -1].double()
        state = torch.cat([state, torch.ones(len(state), 1)], dim=1)
        fit = torch.linalg.lstsq(state[:300], identity[:300], driver="gelsd").solution
        gap = (state[300:] @ fit - identity[300:]).square().sum()
        errors.append(float(gap / (identity[300:] - identity[300:].mean(0)).square().sum()))
    assert errors[0] > 0.7
    assert errors[1] < 1e-3


def test_the_last_state_depends_on_what_theory_allows(model, data):
    """Coverage is complete at k = 1: each head passes the position of its largest score."""
    tokens, starts = data[0][:30], data[1][:30]
    donors = data[0][30:38]
    positions, jacobian, resampled = run_probes(
        model,
        tokens,
        [
            PositionsProbe((1, 2, 3)),
            JacobianInfluence("resid_post"),
            ResampleInfluence(donors, state="resid_post"),
        ],
        progress=False,
    )
    sets = propagate(positions.argmax)
    last = N_CTX - 1
    for sequence, start in enumerate(starts.tolist()):
        # its own token and the one before; the target behind the earlier occurrence, with its
        # previous token, by which it was found
        assert sets.of(1, sequence, last) == {last, last - 1, start + 3, start + 2}
    assert compare(sets, resampled).cls.auroc > 0.95
    # the softmax is saturated, so the derivative by the token that only draws attention is rounding
    found = jacobian.influence[-1, torch.arange(30), -1, starts + 2]
    assert (found == 0).all()
    assert compare(sets, jacobian).cls.recall == 1
    for influence in (jacobian, resampled):
        agreement = compare(sets, influence)
        assert agreement.cls.influence_inside > 0.99
        curve = coverage_curve(positions.positions, influence)
        assert curve.last[0] > 0.95
        assert list(curve.last) == sorted(curve.last)
