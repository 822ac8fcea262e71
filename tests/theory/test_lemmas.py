"""Lemmas 3 to 7 of Chen & Zou 2024, on random words and all substitutions."""

import pytest
import torch

from infoflow_lens import InfoFlowError, load_task
from tests.reference.lemmas import (
    combine,
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
