"""Propagation of information sets is rule (1) of the paper, for any attended positions."""

import doctest
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infoflow_lens import InfoFlowError, propagate
from infoflow_lens.theory import (
    GlobalAggregation,
    InformationSets,
    MaxPosition,
    SpecificPositions,
    information_sets,
)
from infoflow_lens.theory.information_sets import update
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


@settings(max_examples=60)
@given(attended())
def test_equals_the_set_based_reference(case):
    positions, n_sources = case
    sets = propagate(positions, n_sources)
    for sequence in range(len(positions[0])):
        expected = reference.propagate(as_reference(positions, sequence), n_sources)
        for layer, row in enumerate(expected):
            assert [sets.of(layer, sequence, t) for t in range(len(row))] == row


@st.composite
def mixed_layers(draw):
    """Random layers that mix the three rules over heads and positions."""
    n_sources = draw(st.integers(1, 9))
    n_pos = n_sources + draw(st.integers(0, 2))
    batch = draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    layers = []
    for _ in range(draw(st.integers(1, 4))):
        rules = []
        for kind in draw(st.lists(st.sampled_from("msg"), min_size=0, max_size=4)):
            if kind == "m":
                shape = (batch, draw(st.integers(1, 3)), n_pos)
                rules.append(MaxPosition(torch.randint(-1, n_pos, shape, generator=generator)))
            elif kind == "s":
                rules.append(SpecificPositions(torch.rand(n_pos, n_pos, generator=generator) < 0.3))
            else:
                rules.append(GlobalAggregation(torch.rand(n_pos, generator=generator) < 0.2))
        layers.append(rules)
    # one rule that tells the batch
    layers[0].append(MaxPosition(torch.full((batch, 1, n_pos), -1)))
    return layers, n_sources, batch, n_pos


@settings(max_examples=60)
@given(mixed_layers())
def test_mixed_rules_equal_the_set_based_reference(case):
    layers, n_sources, batch, n_pos = case
    sets = propagate(layers, n_sources)
    for sequence in range(batch):
        current = [{t} if t < n_sources else set() for t in range(n_pos)]
        for layer, rules in enumerate(layers):
            following = [set(held) for held in current]
            for t in range(n_pos):
                for rule in rules:
                    if isinstance(rule, MaxPosition):
                        for head in rule.positions[sequence].tolist():
                            following[t] |= current[head[t]] if head[t] >= 0 else set()
                    elif isinstance(rule, SpecificPositions):
                        for s in rule.reads[t].nonzero().flatten().tolist():
                            following[t] |= current[s]
                    elif rule.queries[t]:
                        following[t] = set(range(n_sources))
            current = following
            assert [sets.of(layer, sequence, t) for t in range(n_pos)] == current


@given(mixed_layers())
def test_a_rule_says_which_keys_it_moves(case):
    """A page that draws the sets moves them by that alone."""
    layers, n_sources, batch, n_pos = case
    nothing = MaxPosition(torch.full((batch, 1, n_pos), -1))
    for rule in itertools.chain.from_iterable(layers):
        sets = propagate([[rule, nothing]], n_sources)
        for sequence in range(batch):
            for t, keys in enumerate(rule.describe(sequence).tolist()):
                moved = {key for key in (t, *keys) if 0 <= key < n_sources}
                assert sets.of(0, sequence, t) == moved


@pytest.mark.parametrize("n_sources", [1, 7, 8, 63, 64, 65, 130])
def test_any_number_of_sources_survives_packing(n_sources):
    generator = torch.Generator().manual_seed(n_sources)
    sets = torch.rand(2, n_sources + 1, n_sources, generator=generator) < 0.5
    assert update(sets, []).equal(sets)


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


@pytest.mark.parametrize("given", [2, None])
def test_a_rule_of_ones_own_needs_a_tensor(given):
    """It was a TypeError of `len`."""

    class Window(SpecificPositions):
        pass

    with pytest.raises(InfoFlowError, match=f"Window is made of {given}: expected a rule whose"):
        propagate([Window(given)])


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_positions_of_any_integer_type(dtype):
    sets = propagate([torch.tensor([[[1, -1, 0]]], dtype=dtype)], n_sources=2)
    assert [sets.of(0, 0, t) for t in range(3)] == [{0, 1}, {1}, {0}]


@pytest.mark.parametrize(
    ("positions", "n_sources", "message"),
    [
        ([], None, "no layer"),
        ([torch.zeros(1, 1, 3)], None, "expected integers"),
        ([[]], None, "no layer"),
        ([SpecificPositions(torch.zeros(3, 2, dtype=torch.bool))], None, "queries by keys"),
        ([GlobalAggregation(torch.zeros(3))], None, r"expected bool \[3\]"),
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
