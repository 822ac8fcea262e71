"""The hosted models give what HookedTransformer of TransformerLens 3.9 gave.

Which numbers are held to which is said in :mod:`tests.reference.frozen`.
"""

from functools import cache

import pytest
import torch

from tests.conftest import some_of
from tests.reference import frozen


@cache
def arithmetic_is_the_same(kind):
    """Of "seeds", or of a precision, which is nothing without the seeds."""
    now, then = frozen.arithmetic(), frozen.record()["arithmetic"]
    return now["seeds"] == then["seeds"] and now[kind] == then[kind]


@pytest.fixture(scope="module", params=some_of(frozen.DTYPES, "float32"))
def precision(request):
    return request.param


@pytest.fixture(scope="module", params=frozen.CASES)
def case(request, precision):
    """A name and a precision, what it showed, and what it shows now."""
    name = request.param
    then = frozen.frozen(name, precision)
    start = None if arithmetic_is_the_same("seeds") else then.tensors["weights"]
    return name, precision, then, frozen.shown(name, precision, start)


def assert_equal(name, found, kept, exact, tolerance):
    """Bit by bit, or within a tolerance that is relative to the largest entry of them all."""
    assert list(found) == list(kept)
    allowed = 0 if exact else tolerance * max(float(value.abs().max()) for value in kept.values())
    for label, value in kept.items():
        text = frozen.difference(f"{name} {label}".strip(), found[label], value)
        assert found[label].shape == value.shape, text
        assert found[label].dtype == value.dtype, text
        assert (found[label] - value).abs().max() <= allowed, text


def test_names_and_their_order(case):
    """Of parameters (seeds and optimisers go by it), of the state, and of hook points."""
    _, _, then, now = case
    assert now.structure == then.structure


def test_weights_follow_from_the_seed_as_frozen(case):
    _, _, then, now = case
    exact = arithmetic_is_the_same("seeds")
    weights = now.tensors["weights"], then.tensors["weights"]
    assert_equal("weights", *weights, exact, frozen.WEIGHT_TOLERANCE)
    if exact:
        assert now.hashes["weights"] == then.hashes["weights"]


@pytest.mark.parametrize("part", ["output", "gradients", "trained", "trained output"])
def test_outputs_gradients_and_ten_steps_of_training(case, part):
    name, precision, then, now = case
    assert set(now.tensors) == set(then.tensors)
    exact = arithmetic_is_the_same(precision)
    if part in then.tensors and (exact or part != "trained"):
        tensors = now.tensors[part], then.tensors[part]
        assert_equal(part, *tensors, exact, frozen.TOLERANCES[precision])
    assert ("trained" in then.tensors) == (name in frozen.TRAINED)


def test_every_activation_is_the_frozen_one(case):
    """Hashes alone, where the arithmetic is that of the file; elsewhere outputs speak for them."""
    _, precision, then, now = case
    if arithmetic_is_the_same(precision):
        assert now.hashes == then.hashes


def test_losses_of_training_are_the_frozen_ones(case):
    name, precision, then, now = case
    assert len(then.losses) == (4 if name in frozen.TRAINED else 0)
    if arithmetic_is_the_same(precision):
        assert now.losses == then.losses
    else:
        assert now.losses == pytest.approx(then.losses, rel=frozen.TOLERANCES[precision])


def test_the_reference_is_of_hooked_transformer_in_3_9():
    written_with = frozen.record()["written_with"]
    assert written_with["transformer-lens"].startswith("3.9.")
    assert len(frozen.CASES) >= 12


def test_a_difference_is_described():
    found, kept = torch.tensor([1.0, 2.0, 3.5]), torch.tensor([1.0, 2.0, 3.0])
    assert frozen.difference("W_Q", found, kept) == (
        "W_Q: 1 of 3 entries differ, by at most 0.5; entry 2 is 3.5, was 3.0"
    )
    assert "was torch.float32 [3]" in frozen.difference("W_Q", found.double(), kept)
