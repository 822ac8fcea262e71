"""One propagation, against all paths followed one by one, and the limits of its semirings."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infoflow_lens import InfoFlowError, propagate
from infoflow_lens.theory.propagation import propagate_back, propagate_edges, rows_to_power

WEIGHED = ("sum-product", "max-product", "max-min")


@st.composite
def layers_of_edges(draw, largest=5):
    """Edges [layer, 1, query, key], causal or not, some of them 0, with the residual connection."""
    n, n_layers = draw(st.integers(1, largest)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    edges = torch.rand(n_layers, 1, n, n, generator=generator, dtype=torch.float64)
    edges = edges * (torch.rand(edges.shape, generator=generator) < 0.6)
    edges = edges.tril() if draw(st.booleans()) else edges
    own = torch.rand(n_layers, 1, n, generator=generator, dtype=torch.float64) + 0.1
    return edges + torch.diag_embed(own)


def by_hand(edges, state, source, join, unite):
    """What all paths from a state of the top layer down to a source come to."""
    n_layers, n = len(edges), edges.shape[-1]
    total = 0.0
    for between in itertools.product(range(n), repeat=n_layers - 1):
        places = (state, *between, source)
        strength = math.inf if join is min else 1.0
        for (query, key), layer in zip(itertools.pairwise(places), reversed(edges), strict=True):
            strength = join(strength, float(layer[0, query, key]))
        total = unite(total, strength)
    return total


def add(one, other):
    return one + other


def multiply(one, other):
    return one * other


RULES = {"sum-product": (multiply, add), "max-product": (multiply, max), "max-min": (min, max)}


def close(one, other, atol=1e-10):
    torch.testing.assert_close(one, other, atol=atol, rtol=0)


@pytest.mark.parametrize("semiring", WEIGHED)
@settings(max_examples=40)
@given(edges=layers_of_edges(largest=3))
def test_it_is_what_all_paths_come_to(semiring, edges):
    found = propagate_edges(edges, semiring)
    n = edges.shape[-1]
    for layer, state, source in itertools.product(range(len(edges)), range(n), range(n)):
        expected = by_hand(edges[: layer + 1], state, source, *RULES[semiring])
        assert math.isclose(found[layer, 0, state, source], expected, abs_tol=1e-12)


@settings(max_examples=40)
@given(edges=layers_of_edges())
def test_there_is_a_path_where_any_semiring_finds_one(edges):
    """The support of each, also of every finite power, is the Boolean set: InfoFlow's rule."""
    sets = propagate_edges(edges, "boolean") > 0
    for semiring in WEIGHED:
        assert (propagate_edges(edges, semiring) > 0).equal(sets)
    for p in (0.3, 1, 1.2, 3):
        found = propagate_edges(edges, "power", p)
        assert (found > 0).equal(sets)
        close(found.sum(dim=-1), torch.ones(found.shape[:-1], dtype=found.dtype))
    weights = (edges / edges.max()).float()
    assert propagate(strength=list(weights)).at().members.equal(sets)


@settings(max_examples=40)
@given(edges=layers_of_edges())
def test_the_power_1_is_rollout_and_a_power_near_0_asks_only_what_is_seen(edges):
    shares = edges / edges.sum(dim=-1, keepdim=True)
    close(propagate_edges(edges, "power", 1), propagate_edges(shares, "sum-product"))
    seen = (edges > 0).double()
    seen = seen / seen.sum(dim=-1, keepdim=True)
    close(propagate_edges(edges, "power", 1e-9), propagate_edges(seen, "sum-product"), 1e-6)


@settings(max_examples=40)
@given(edges=layers_of_edges())
def test_large_powers_are_the_best_path(edges):
    """The root of a sum over paths is within the root of their number of the best of them."""
    p = 60.0
    found, best = (
        propagate_edges(edges**p, "sum-product") ** (1 / p),
        propagate_edges(edges, "max-product"),
    )
    number = float(propagate_edges((edges > 0).double(), "sum-product").max())
    there = best > 1e-4  # a smaller one to the power is below the smallest number
    assert (found[there] >= best[there] * (1 - 1e-9)).all()
    assert (found[there] <= best[there] * number ** (1 / p) * (1 + 1e-9)).all()
    largest = edges / edges.amax(dim=-1, keepdim=True)
    root = propagate_edges(edges, "power", p) ** (1 / p)
    assert (root - propagate_edges(largest, "max-product")).abs().max() < 0.15


def test_an_infinite_power_is_hard_attention():
    """Half of each step to the first choice, half to the state itself: InfoFlow's sets exactly."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(5, 1, 9, 9, generator=generator, dtype=torch.float64)
    patterns = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf).softmax(dim=-1)
    choices = [layer.argmax(dim=-1)[:, None] for layer in patterns]
    half = torch.eye(9, dtype=torch.float64) / 2
    for p, least in ((math.inf, 0.0), (1e7, 1e-4)):
        hard = half + rows_to_power(patterns, p) / 2
        found = propagate_edges(hard, "sum-product") > least
        assert found.equal(propagate(choices).members)
    first = (patterns == patterns.amax(dim=-1, keepdim=True)).double()
    firsts = propagate_edges(first, "boolean")
    assert (propagate_edges(patterns, "power", math.inf) > 0).equal(firsts > 0)


@settings(max_examples=40)
@given(edges=layers_of_edges())
def test_more_is_held_through_stronger_edges(edges):
    more = edges + 0.1 * (edges > 0)
    for semiring in WEIGHED:
        raised = propagate_edges(more, semiring)
        assert (raised >= propagate_edges(edges, semiring) - 1e-12).all()
    whole = edges / edges.max()
    wide, best = propagate_edges(whole, "max-min"), propagate_edges(whole, "max-product")
    assert (wide >= best - 1e-12).all()


@settings(max_examples=40)
@given(edges=layers_of_edges(), seed=st.integers(0, 99))
def test_what_rescales_a_position_drops_out_of_powers_and_telescopes_elsewhere(edges, seed):
    """So an MLP that only makes a state longer or shorter changes no share."""
    generator = torch.Generator().manual_seed(seed)
    n_layers, _, n, _ = edges.shape
    scale = torch.rand(n_layers, 1, n, 1, generator=generator, dtype=torch.float64) + 0.1
    close(propagate_edges(edges * scale, "power", 1.3), propagate_edges(edges, "power", 1.3))
    before = torch.rand(n_layers + 1, n, generator=generator, dtype=torch.float64) + 0.5
    middle = torch.rand(n_layers, n, generator=generator, dtype=torch.float64) + 0.5
    gains = edges[:, 0] / before[:-1, None, :] * (before[1:] / middle)[:, :, None]
    shares = propagate_edges((edges[:, 0] / middle[:, :, None])[:, None], "sum-product")[-1, 0]
    expected = shares * before[-1][:, None] / before[0][None, :]
    close(propagate_edges(gains[:, None], "sum-product")[-1, 0], expected, 1e-8)


@settings(max_examples=40)
@given(edges=layers_of_edges())
def test_a_state_alone_is_its_row_from_below_and_from_above(edges):
    n, edges = edges.shape[-1], edges / edges.max()  # so that 1 weakens nothing
    queries = torch.tensor([[n - 1, n // 2]])
    for semiring in (*WEIGHED, "boolean", "power"):
        whole = propagate_edges(edges, semiring, 1.1)
        rows = propagate_edges(edges, semiring, 1.1, queries=queries)
        assert rows.equal(whole[:, :, queries[0]])
        for layer in range(len(edges)):
            # a layer below all that gives each state its own token shows the bottom
            longer = torch.cat([torch.eye(n, dtype=edges.dtype)[None, None], edges])
            above = propagate_back(longer, semiring, 1.1, queries=queries, layer=layer + 1)
            close(above[0], rows[layer])


def test_no_layer_gives_nothing_and_a_row_without_edges_keeps_its_own_state():
    assert propagate_edges(torch.zeros(0, 1, 3, 3), "power").shape == (0, 1, 3, 3)
    assert rows_to_power(torch.zeros(1, 3, 3), 2).equal(torch.eye(3)[None])
    huge = torch.tensor([[[1e-30, 2e-30], [0, 1e30]]])
    close(rows_to_power(huge, 60)[0], torch.tensor([[2**-60.0, 1.0], [0.0, 1.0]]))


EDGES = torch.ones(2, 1, 3, 3)


@pytest.mark.parametrize(
    ("edges", "semiring", "p", "message"),
    [
        (EDGES[0], "power", 1, r"expected floats \[layer, batch, query, key\]"),
        (EDGES.int(), "power", 1, "torch.int32"),
        (-EDGES, "power", 1, "expected at least 0"),
        (EDGES * math.nan, "boolean", 1, "negative or NaN"),
        (EDGES, "widest", 1, "semiring is 'widest'"),
        (EDGES, "power", 0, "p is 0"),
        (EDGES, "power", math.nan, "p is nan"),
    ],
)
def test_what_is_no_edge_is_named(edges, semiring, p, message):
    with pytest.raises(InfoFlowError, match=message):
        propagate_edges(edges, semiring, p)
