"""Propagation of information sets is rule (1) of the paper, for any attended positions."""

import doctest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infoflow_lens import InfoFlowError, InformationSets, propagate
from infoflow_lens.theory import information_sets
from tests.reference import sets as reference


@st.composite
def attended(draw):
    """Attended positions of a random model: some layers with several ranks, some with -1."""
    n_sources = draw(st.integers(1, 11))
    n_pos = n_sources + draw(st.integers(0, 2))
    batch = draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    layers = []
    for _ in range(draw(st.integers(1, 4))):
        shape = [batch, draw(st.integers(1, 4)), n_pos]
        if draw(st.booleans()):
            shape.append(draw(st.integers(1, 3)))
        layers.append(torch.randint(-1, n_pos, shape, generator=generator))
    return layers, n_sources


def as_reference(positions, sequence):
    return [(p if p.ndim == 4 else p.unsqueeze(-1))[sequence].tolist() for p in positions]


@settings(max_examples=300)
@given(attended())
def test_equals_the_set_based_reference(case):
    positions, n_sources = case
    sets = propagate(positions, n_sources)
    for sequence in range(len(positions[0])):
        expected = reference.propagate(as_reference(positions, sequence), n_sources)
        for layer, row in enumerate(expected):
            assert [sets.of(layer, sequence, t) for t in range(len(row))] == row


@given(attended())
def test_sets_grow_and_tokens_keep_themselves(case):
    positions, n_sources = case
    members = propagate(positions, n_sources).members
    assert (members[:-1] <= members[1:]).all()
    assert members[:, :, torch.arange(n_sources), torch.arange(n_sources)].all()


@given(attended())
def test_sizes_stay_below_the_growth_bound(case):
    """m_tok(l) <= (1 + h_l) m_tok(l-1): each head brings one set of the layer before."""
    positions, n_sources = case
    sizes = propagate(positions, n_sources).sizes()
    bound = 1
    for layer, chosen in enumerate(positions):
        heads = chosen.shape[1] * (chosen.shape[3] if chosen.ndim == 4 else 1)
        bound = min(n_sources, bound * (1 + heads))
        assert sizes[layer].max() <= bound


def test_the_worked_example_of_appendix_e():
    results = doctest.testmod(information_sets, extraglobs={"torch": torch})
    assert results.attempted > 0
    assert results.failed == 0


def test_a_head_passes_on_what_its_position_held_before_the_layer():
    """All positions update at once: a chain 0 <- 1 <- 2 moves one step a layer."""
    chain = torch.tensor([[[-1, 0, 1]]])
    sets = propagate([chain, chain])
    assert sets.of(0, 0, 2) == {1, 2}
    assert sets.of(1, 0, 2) == {0, 1, 2}


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_positions_of_any_integer_type(dtype):
    sets = propagate([torch.tensor([[[1, -1, 0]]], dtype=dtype)], n_sources=2)
    assert [sets.of(0, 0, t) for t in range(3)] == [{0, 1}, {1}, {0}]


@pytest.mark.parametrize(
    ("positions", "n_sources", "message"),
    [
        ([], None, "no layer"),
        ([torch.zeros(1, 1, 3)], None, "expected integers"),
        ([torch.full((1, 1, 3), 3)], None, r"lie in \[3, 3\]"),
        ([torch.full((1, 1, 3), -2)], None, "or -1 for none"),
        ([torch.zeros(1, 1, 3, dtype=torch.int64)], 4, "n_sources is 4"),
        ([torch.zeros(1, 1, 3, dtype=torch.int64)], 0, "n_sources is 0"),
        (
            [torch.zeros(1, 1, 3, dtype=torch.int64), torch.zeros(2, 1, 3, dtype=torch.int64)],
            None,
            "layer 1 have batch and pos",
        ),
    ],
)
def test_bad_positions_are_named(positions, n_sources, message):
    with pytest.raises(InfoFlowError, match=message):
        propagate(positions, n_sources)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (torch.zeros(1, 1, 2, 2), "threshold scores"),
        (torch.zeros(1, 2, 2, dtype=torch.bool), r"expected bool \[layer"),
        (torch.zeros(1, 1, 2, 3, dtype=torch.bool), "3 sources but 2"),
    ],
)
def test_bad_members_are_named(members, message):
    with pytest.raises(InfoFlowError, match=message):
        InformationSets(members)
