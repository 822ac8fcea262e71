"""Keys are ranked by score: ties to the lowest position, masked keys never."""

import math
import os
import subprocess
import sys
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infoflow_lens.hooks.passes.ranking import largest_keys, rank_keys, ranking_kernel
from tests.conftest import some_of, spread
from tests.reference import ranking


@st.composite
def integer_scores(draw):
    """Few different integers, so ties are everywhere, with some keys masked."""
    n_keys = draw(st.integers(1, 9))
    value = st.integers(-2, 2).map(float) | st.just(-math.inf)
    rows = draw(st.lists(st.lists(value, min_size=n_keys, max_size=n_keys), min_size=1, max_size=6))
    ranks = draw(st.lists(st.integers(1, n_keys), min_size=1, max_size=4, unique=True))
    return torch.tensor(rows), ranks


@settings(max_examples=80)
@given(integer_scores())
def test_equals_sorting_with_ties_and_masks(case):
    scores, ranks = case
    ranked = rank_keys(scores, ranks)
    for row, positions, margins, ties in zip(scores.tolist(), *ranked, strict=True):
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


@pytest.mark.parametrize("sequences", [1, 3])
def test_keys_that_are_not_visible_are_never_ranked(sequences):
    """Whatever their scores are: the lowest finite value, or larger than all others."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 2, 5, 5, generator=generator)
    visible = torch.rand(sequences, 5, 5, generator=generator) < 0.6
    open_scores = scores.masked_fill(~visible[:, None], -math.inf)
    for closed in (torch.finfo(torch.float32).min, 1e9):
        shown = scores.masked_fill(~visible[:, None], closed)
        for one, other in zip(
            rank_keys(shown, (1, 2, 3), visible), rank_keys(open_scores, (1, 2, 3)), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


_KERNEL = """
import sys, torch
from infoflow_lens.hooks.passes import ranking
given = torch.load(sys.argv[1])
assert all(ranking.can_run(scores) for scores, visible in given.values())
found = {case: ranking.select_keys(scores, 5, seen) for case, (scores, seen) in given.items()}
torch.save(found, sys.argv[2])
"""


@pytest.mark.slow  # Triton's interpreter
def test_the_kernel_of_a_gpu_gives_what_torch_gives(tmp_path):
    """In Triton's interpreter, on rows with many ties, masked keys and rows without a key."""
    pytest.importorskip("triton")
    given = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        generator = torch.Generator().manual_seed(0)
        scores = (torch.randn(2, 3, 7, 37, generator=generator) * 2).round().to(dtype)
        scores[0, 0, :3] = -math.inf
        given[f"{dtype}, all visible"] = scores, None
        for sequences in (1, 2):
            visible = torch.rand(sequences, 7, 37, generator=generator) < 0.5
            given[f"{dtype}, {sequences} masks"] = scores, visible
    torch.save(given, tmp_path / "given")
    subprocess.run(
        [sys.executable, "-c", _KERNEL, tmp_path / "given", tmp_path / "found"],
        env={**os.environ, "TRITON_INTERPRET": "1"}, check=True, timeout=120,
    )  # fmt: skip
    found = torch.load(tmp_path / "found")
    for case, (scores, visible) in given.items():
        values, places, ties = found[case]
        expected = largest_keys(scores, 5, visible)
        defined = expected[0] > -math.inf
        assert values.equal(expected[0]), case
        defined[..., -1] = False  # others that equal the last one may not be counted
        assert places[defined].equal(expected[1][defined]), case
        assert ties[defined].equal(expected[2][defined]), case


# Triton's own, on Python 3.13
PRECISIONS, MASKED = ("fp32", "bf16", "fp16"), (False, True)


@pytest.mark.filterwarnings("ignore:AnnAssign.__init__ missing:DeprecationWarning")
@pytest.mark.parametrize(
    ("scores", "masked"), some_of(list(product(PRECISIONS, MASKED)), *spread(PRECISIONS, MASKED))
)
def test_the_kernel_compiles_for_a_gpu(scores, masked, tmp_path, monkeypatch):
    """The interpreter runs what the compiler refuses; the compiler needs no GPU."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # else Triton 3.9 warns of its default
    kernel = ranking_kernel()
    pointers = {"scores": f"*{scores}", "visible": "*u8" if masked else f"*{scores}"}
    pointers |= {"values": "*fp32", "places": "*i32", "ties": "*i32"}
    numbers = {name: "i32" for name in kernel.arg_names if name.islower()}
    constants = {"N": 4, "BLOCK": 64, "HAS_VISIBLE": masked, "SHARED": False}
    signature = {**numbers, **pointers, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(kernel, signature, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert "cubin" in compiled.asm


def test_weights_are_ranked_as_the_scores_they_come_from():
    scores = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    scores = scores.masked_fill(torch.ones(9, 9).tril() == 0, -torch.inf)
    by_score = rank_keys(scores, (1, 2, 3))
    by_weight = rank_keys(scores.softmax(dim=-1), (1, 2, 3), are_weights=True)
    assert torch.equal(by_weight.positions, by_score.positions)
    assert torch.equal(by_weight.ties, by_score.ties)
    torch.testing.assert_close(by_weight.margins, by_score.margins, equal_nan=True)


def test_weights_that_differ_by_less_than_their_logarithms_show_are_no_tie():
    weight = torch.tensor(0.01)
    weights = torch.stack([weight, torch.nextafter(weight, torch.tensor(1.0)), 1 - 2 * weight])
    assert weights[0].log() == weights[1].log()
    ranked = rank_keys(weights, (1, 2, 3), are_weights=True)
    assert ranked.positions.tolist() == [2, 1, 0]
    assert ranked.ties.tolist() == [0, 0, 0]
