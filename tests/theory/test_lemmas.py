"""Lemmas 3 to 7 of Chen & Zou 2024, on random words and all substitutions."""

import pytest
import torch

from infoflow_lens import InfoFlowError, load_task
from tests.reference.lemmas import (
    combine,
    concatenated,
    multipliers,
    occurrences,
    projector,
    template_dependence,
)


@pytest.mark.parametrize("seed", range(5))
def test_lemma_3_a_projector_labels_vectors_of_which_no_two_are_parallel(seed):
    vectors = torch.randn(30, 3, generator=torch.Generator().manual_seed(seed)).double()
    scores = vectors @ projector(vectors)
    assert scores.argmax(dim=1).tolist() == list(range(30))
    with pytest.raises(InfoFlowError, match="vectors 0 and 2 are parallel"):
        projector(torch.tensor([[1.0, 2.0], [0.0, 1.0], [-2.0, -4.0]]))
    with pytest.raises(InfoFlowError, match="vector 1 is 0"):
        projector(torch.tensor([[1.0, 2.0], [0.0, 0.0]]))


def test_lemma_4_and_theorem_1_for_words_that_are_not_one_hot():
    """All sequences of words in two dimensions, told apart by one layer and a linear classifier."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randn(4, 2, generator=generator).double()
    grid = torch.cartesian_prod(*[torch.arange(3)] * 3)
    sequences = torch.cat([grid, torch.full((27, 1), 3)], dim=1)
    states = concatenated(words, sequences)
    assert states.shape == (27, 4 * 2)
    assert (states @ projector(states)).argmax(dim=1).tolist() == list(range(27))
    with pytest.raises(InfoFlowError, match="several words"):
        concatenated(words, grid)


def substitutions(template, n_words=4):
    task = load_task(
        "template_matching", n_words=n_words, length=len(template), templates=(template,)
    )
    return task.all_sequences()[0]


@pytest.mark.parametrize("template", ["aa", "ab", "aba", "abc"])
def test_lemma_5_every_word_occurs_equally_often(template):
    x = substitutions(template)
    counts = occurrences(x[:, :-1], 4)
    assert (counts == len(x) / 4).all()


def test_lemma_6_the_papers_example():
    """aa and ab over three words: 3 and 6 sequences balance 2 to 1 (the paper's 6 and 3)."""
    first, second = substitutions("aa", 3), substitutions("ab", 3)
    assert (len(first), len(second)) == (3, 6)
    assert multipliers(3, 6) == (2, 1)
    a, b = multipliers(len(first), len(second))
    balance = a * occurrences(first[:, :-1], 3) - b * occurrences(second[:, :-1], 3)
    assert not balance.any()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("one", "other"), [("aab", "aba"), ("aa", "ab"), ("aaa", "abc")])
def test_lemma_7_outputs_of_one_relu_layer_cancel(one, other, seed):
    x, coefficients = template_dependence(substitutions(one), substitutions(other))
    generator = torch.Generator().manual_seed(seed)
    n, d = x.shape[1], 5 + x.shape[1]
    columns = torch.cat(
        [torch.nn.functional.one_hot(x, 5), torch.eye(n).expand(len(x), -1, -1)], dim=-1
    ).double()
    out = columns[:, -1]
    for _ in range(3):
        qk = torch.randn(d, d, generator=generator).double()
        v = torch.randn(d, d, generator=generator).double()
        scores = torch.relu(columns @ qk @ columns[:, -1, :, None])[..., 0]
        out = out + (scores[..., None] * (columns @ v)).sum(dim=1)
    assert combine(out, coefficients).abs().max() < 1e-9 * out.abs().sum()
    assert combine(out[:1].expand_as(out), [1] + [0] * (len(x) - 1)).abs().max() > 0
