"""Graded sets hold each token as strongly as the best path from it, found among all paths."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infoflow_lens import InfoFlowError, compare, propagate
from infoflow_lens.ranking import compare_rankings
from infoflow_lens.theory import GlobalAggregation, GradedSets, MaxPosition, SpecificPositions
from infoflow_lens.theory.propagation import best_through
from tests.reference import routes

PATHS = ("product", "weakest")


@st.composite
def graded_layers(draw):
    """Positions and strengths of a random model: several ranks, -1, and strengths of 0."""
    n_sources = draw(st.integers(1, 5))
    n_pos = n_sources + draw(st.integers(0, 2))
    batch = draw(st.integers(1, 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    positions, strengths = [], []
    for _ in range(draw(st.integers(1, 3))):
        shape = [batch, draw(st.integers(1, 2)), n_pos]
        if draw(st.booleans()):
            shape.append(draw(st.integers(1, 2)))
        positions.append(torch.randint(-1, n_pos, shape, generator=generator))
        strength = torch.rand(shape, generator=generator, dtype=torch.float64)
        strengths.append(strength * (torch.rand(shape, generator=generator) < 0.8))
    return positions, strengths, n_sources


def as_matrices(positions, strengths, sequence):
    """For every layer [head, query, key], the ranks of a head as heads of their own."""
    layers = []
    for chosen, strength in zip(positions, strengths, strict=True):
        n_pos = chosen.shape[2]
        chosen = chosen[sequence].reshape(chosen.shape[1], n_pos, -1)
        strength = strength[sequence].reshape(chosen.shape)
        heads = []
        for head, rank in itertools.product(range(chosen.shape[0]), range(chosen.shape[2])):
            matrix = torch.zeros(n_pos, n_pos, dtype=torch.float64)
            for query in range(n_pos):
                if chosen[head, query, rank] >= 0:
                    matrix[query, chosen[head, query, rank]] = strength[head, query, rank]
            heads.append(matrix.tolist())
        layers.append(heads)
    return layers


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=50)
@given(case=graded_layers())
def test_strengths_are_those_of_the_best_of_all_paths(path, case):
    positions, strengths, n_sources = case
    found = propagate(positions, n_sources, strength=strengths, path=path).strengths
    for sequence in range(found.shape[1]):
        layers = as_matrices(positions, strengths, sequence)
        for layer, state, source in itertools.product(
            *map(range, (found.shape[0], *found.shape[2:]))
        ):
            expected = routes.best_path(layers[: layer + 1], state, source, path)
            assert math.isclose(found[layer, sequence, state, source], expected, abs_tol=1e-12)


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=50)
@given(case=graded_layers())
def test_at_level_0_they_are_the_information_sets(path, case):
    """Of the edges that have a strength; with strengths of 1 each path has 1."""
    positions, strengths, n_sources = case
    there = [torch.where(s > 0, p, -1) for p, s in zip(positions, strengths, strict=True)]
    graded = propagate(positions, n_sources, strength=strengths, path=path)
    assert graded.at(0).members.equal(propagate(there, n_sources).members)
    alike = propagate(positions, n_sources, strength=[None] * len(positions), path=path)
    assert alike.strengths.equal(propagate(positions, n_sources).members.float())


@settings(max_examples=50)
@given(case=graded_layers(), levels=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_level_sets_are_nested_and_strengths_grow(case, levels):
    positions, strengths, n_sources = case
    product, weakest = (
        propagate(positions, n_sources, strength=strengths, path=path) for path in PATHS
    )
    for graded in (product, weakest):
        assert (graded.at(max(levels)).members <= graded.at(min(levels)).members).all()
        assert (graded.strengths[:-1] <= graded.strengths[1:]).all()  # from layer to layer
    assert (product.strengths <= weakest.strengths).all()
    more = [(s + 0.3).clamp(max=1) for s in strengths]
    for path, graded in zip(PATHS, (product, weakest), strict=True):
        raised = propagate(positions, n_sources, strength=more, path=path)
        assert (raised.strengths >= graded.strengths).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("causal", [True, False])
def test_all_keys_by_position_or_as_a_matrix_are_the_same(path, causal):
    """A head that passes on all its keys, ranked in any order, is the matrix of its weights."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.rand(2, heads, 7, 7, generator=generator) for heads in (3, 1, 2)]
    weights = [w.tril() if causal else w for w in weights]
    keys = torch.arange(7).expand(7, 7)
    by_position = propagate([keys.expand_as(w) for w in weights], strength=weights, path=path)
    assert propagate(strength=weights, path=path).strengths.equal(by_position.strengths)
    strongest = [w.amax(dim=1) for w in weights]
    assert propagate(strength=strongest, path=path).strengths.equal(by_position.strengths)


@pytest.mark.parametrize("path", PATHS)
def test_all_three_rules_have_strengths(path):
    """Each rule as the matrix that it stands for; the third brings tokens, not what keys hold."""
    generator = torch.Generator().manual_seed(1)
    n_pos, n_sources = 5, 4
    positions = torch.randint(-1, n_pos, (2, 2, n_pos), generator=generator)
    chosen = torch.rand(2, 2, n_pos, generator=generator)
    reads = torch.rand(n_pos, n_pos, generator=generator) < 0.4
    fixed = torch.rand(n_pos, n_pos, generator=generator)
    queries = torch.tensor([False, True, False, False, True])
    whole = torch.rand(2, n_pos, n_sources, generator=generator)
    first = torch.rand(2, n_pos, n_pos, generator=generator)
    rules = [MaxPosition(positions), SpecificPositions(reads), GlobalAggregation(queries)]
    everything = SpecificPositions(torch.ones(n_pos, n_pos).bool())
    found = propagate(
        [everything, rules], n_sources, strength=[first, [chosen, fixed, whole]], path=path
    )
    below = propagate(strength=[first], n_sources=n_sources, path=path).strengths[0]
    alone = propagate([[everything]], n_sources, strength=[[first]], path=path)
    assert alone.strengths[0].equal(below)
    for sequence in range(2):
        (matrices,) = as_matrices([positions], [chosen], sequence)
        heads = [torch.tensor(head) for head in matrices] + [torch.where(reads, fixed, 0)]
        for state, source in itertools.product(range(n_pos), range(n_sources)):
            held = below[sequence, :, source]
            ways = [held[state], *(whole[sequence, state, source] * queries[state],)]
            for head in heads:
                edges = head[state].float()
                joined = edges * held if path == "product" else torch.minimum(edges, held)
                ways.append(joined.max())
            expected = torch.stack([way.float() for way in ways]).max()
            torch.testing.assert_close(found.strengths[1, sequence, state, source], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_path_that_is_there_never_vanishes(dtype):
    """The product of many small strengths is below the smallest number that there is."""
    chain = torch.tensor([[[-1, 0, 1, 2]]])
    small = torch.full((1, 1, 4), 1e-200 if dtype == torch.float64 else 1e-30, dtype=dtype)
    graded = propagate([chain] * 3, strength=[small] * 3)
    assert graded.at().members.equal(propagate([chain] * 3).members)
    everywhere = torch.full((1, 4, 4), float(small[0, 0, 0]), dtype=dtype).tril()
    assert propagate(strength=[everywhere] * 3).at().of(2, 0, 3) == {0, 1, 2, 3}
    deep = best_through(everywhere, everywhere, "product")
    assert (deep > 0).equal(everywhere > 0)


@pytest.mark.parametrize("n_pos", [1, 3, 40])
def test_the_blocks_of_the_best_paths_do_not_matter(n_pos, monkeypatch):
    generator = torch.Generator().manual_seed(n_pos)
    above, below = torch.rand(2, 2, n_pos, n_pos, generator=generator)
    above = above * (torch.rand(above.shape, generator=generator) < 0.5)
    expected = (above[..., None] * below[:, None]).amax(dim=2)
    for room in (1, 50, 2**18):
        monkeypatch.setattr("infoflow_lens.theory.propagation._ROOM", room)
        assert best_through(above, below, "product").equal(expected)


def test_the_strengths_of_one_state_are_read_strongest_first():
    layer = torch.tensor([[[-1, 0, 0], [-1, -1, 1]]])
    strength = torch.tensor([[[0.0, 0.5, 0.25], [0.0, 0.0, 0.75]]])
    graded = propagate([layer], strength=[strength])
    assert list(graded.of(0, 0, 2).items()) == [(2, 1.0), (1, 0.75), (0, 0.25)]
    assert graded.at(0.5).of(0, 0, 2) == {1, 2}
    assert graded.part([0], 1).strengths.equal(graded.strengths)
    assert "1 layer, 1 sequence, 3 positions, 3 sources" in repr(graded)
    assert "GradedSets" in graded._repr_html_()


def test_they_are_ranked_as_they_are_and_compared_at_a_level():
    weights = torch.rand(2, 3, 5, 5, generator=torch.Generator().manual_seed(0)).tril()
    graded = propagate(strength=weights)
    influence = propagate(strength=weights.flip(0)).strengths
    ranked = compare_rankings({"half": graded.at(0.5)}, {"graded": graded}, influence)
    own = compare_rankings({"half": graded.at(0.5)}, {"graded": graded.strengths}, influence)
    assert ranked.to_frame().equals(own.to_frame())
    assert compare(graded.at(0.5), influence).layers
    with pytest.raises(InfoFlowError, match=r"predicted\.at\(0\.1\)"):
        compare(graded, influence)


ONE = torch.zeros(1, 1, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("layers", "strength", "message"),
    [
        (None, None, "no layer"),
        (None, [torch.rand(2, 3)], r"expected \[batch, head, query, key\]"),
        (None, [None], "where no positions are given"),
        ([ONE], [torch.rand(1, 1, 4)], r"expected \(1, 1, 3\)"),
        ([ONE], [], "strengths of 0 layers, and 1"),
        ([ONE], [torch.full((1, 1, 3), 1.5)], "divide by the largest"),
        ([ONE], [torch.full((1, 1, 3), math.nan)], "expected numbers from 0"),
        ([ONE], [torch.ones(1, 1, 3, dtype=torch.int64)], "tensor of floats"),
        ([[MaxPosition(ONE), MaxPosition(ONE)]], [[None]], "2 rules and strengths of 1"),
    ],
)
def test_bad_strengths_are_named(layers, strength, message):
    with pytest.raises(InfoFlowError, match=message):
        propagate(layers, strength=strength)


def test_an_unknown_path_and_bad_graded_sets_are_named():
    with pytest.raises(InfoFlowError, match="path is 'widest'"):
        propagate([ONE], strength=[None], path="widest")
    with pytest.raises(InfoFlowError, match=r"expected \[layer"):
        GradedSets(torch.rand(1, 2, 2))
    with pytest.raises(InfoFlowError, match="level is -1"):
        GradedSets(torch.rand(1, 1, 2, 2)).at(-1)
    with pytest.raises(InfoFlowError, match="3 sources but 2"):
        GradedSets(torch.rand(1, 1, 2, 3))
