"""Keys are ranked by score: ties to the lowest position, masked keys never."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infoflow_lens import InfoFlowError, PositionsProbe
from infoflow_lens.hooks.passes.ranking import leaving_out, rank_keys
from tests.reference import ranking


@st.composite
def integer_scores(draw):
    """Few different integers, so ties are everywhere, with some keys masked."""
    n_keys = draw(st.integers(1, 9))
    mask = st.sampled_from([-math.inf, torch.finfo(torch.float32).min])
    value = st.integers(-2, 2).map(float) | mask
    rows = draw(st.lists(st.lists(value, min_size=n_keys, max_size=n_keys), min_size=1, max_size=6))
    ranks = draw(st.lists(st.integers(1, n_keys), min_size=1, max_size=4, unique=True))
    return torch.tensor(rows), ranks


@settings(max_examples=300)
@given(integer_scores())
def test_equals_sorting_with_ties_and_masks(case):
    scores, ranks = case
    ranked = rank_keys(scores, ranks)
    masked = scores.masked_fill(scores == torch.finfo(torch.float32).min, -math.inf)
    for row, positions, margins, ties in zip(masked.tolist(), *ranked, strict=True):
        expected = ranking.rank(row, ranks)
        assert positions.tolist() == [e[0] for e in expected]
        assert ties.tolist() == [e[2] for e in expected]
        for margin, (_, wanted, _) in zip(margins.tolist(), expected, strict=True):
            assert margin == wanted or (math.isnan(margin) and math.isnan(wanted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n_keys", [3, 64, 700])
def test_many_keys_of_few_values(n_keys, dtype):
    """Half precision ties are common; all of them count, and the lowest position comes first."""
    generator = torch.Generator().manual_seed(n_keys)
    scores = torch.randint(-20, 20, (5, 2, 7, n_keys), generator=generator).to(dtype) / 4
    scores = scores.masked_fill(torch.rand(scores.shape, generator=generator) < 0.3, -math.inf)
    ranks = (3, 1, 2)
    found = rank_keys(scores, ranks)
    for row, positions, ties in zip(
        scores.float().flatten(0, 2).tolist(),
        found.positions.flatten(0, 2).tolist(),
        found.ties.flatten(0, 2).tolist(),
        strict=True,
    ):
        expected = ranking.rank(row, ranks)
        assert positions == [e[0] for e in expected]
        assert ties == [e[2] for e in expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_finite_masks_count_as_masks(dtype):
    """Some models mask by the lowest finite value instead of -inf."""
    scores = torch.tensor([[1.0, 2.0, 0.0]], dtype=dtype)
    scores[0, 1] = torch.finfo(dtype).min
    ranked = rank_keys(scores, (1, 2, 3))
    assert ranked.positions.tolist() == [[0, 2, -1]]
    assert ranked.margins[0, 1] == math.inf
    assert ranked.margins[0, 2].isnan()


def test_ranking_leaves_the_scores_alone():
    scores = torch.tensor([[3.0, 1.0, 2.0, 2.0]])
    rank_keys(scores, (1, 2, 3))
    assert scores.tolist() == [[3.0, 1.0, 2.0, 2.0]]


def test_low_scores_in_half_precision_are_scores():
    scores = torch.tensor([[-40000.0, -50000.0, -60000.0]], dtype=torch.float16)
    assert rank_keys(scores, (1, 2, 3)).positions.tolist() == [[0, 1, 2]]


def test_scores_that_were_written_to_are_ranked_again():
    scores = torch.tensor([[3.0, 1.0, 2.0]])
    assert rank_keys(scores, (1,)).positions.tolist() == [[0]]
    scores[0, 1] = 9.0
    assert rank_keys(scores, (1,)).positions.tolist() == [[1]]


def test_scores_of_inference_mode_are_ranked():
    with torch.inference_mode():
        scores = torch.tensor([[3.0, 1.0, 2.0]])
        assert rank_keys(scores, (1, 2)).positions.tolist() == [[0, 2]]
        scores[0, 1] = 9.0
        assert rank_keys(scores, (1, 2)).positions.tolist() == [[1, 0]]


def test_keys_left_out_are_never_ranked():
    scores = torch.tensor([[3.0, 1.0, 2.0]])
    assert rank_keys(leaving_out(scores, (0, 7)), (1, 2, 3)).positions.tolist() == [[2, 1, -1]]


@pytest.mark.parametrize("ranks", [(), (0,), (1, 1), (1.5,), 2])
def test_bad_ranks_are_named(ranks):
    with pytest.raises(InfoFlowError, match="ranks "):
        PositionsProbe(ranks)
