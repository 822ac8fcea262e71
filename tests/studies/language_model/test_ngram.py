"""Against a model of dictionaries and fractions, written from Chen & Goodman's formula."""

from collections import Counter
from fractions import Fraction
from math import log

import pytest
import torch

from infoflow_lens import InfoFlowError
from infoflow_lens.studies.language_model.ngram import NGram

V = 4
TRAIN = [1, 2, 3, 1, 2, 2, 3, 1, 1, 2, 3, 3, 0, 2, 1, 2, 3, 1, 2, 2, 1]


def grams(tokens, n):
    padded = (0,) * (n - 1) + tuple(tokens)
    return [padded[i : i + n] for i in range(len(tokens))]


def by_hand(tokens, order, history, token):
    """p(token | history) of the interpolated Kneser-Ney model of an order."""

    def p(n, context):
        if n == 0:
            return Fraction(1, V)
        if n == order:
            counts = Counter(grams(tokens, n))
        else:  # in how many types of the next length a gram is the end
            counts = Counter(gram[1:] for gram in set(grams(tokens, n + 1)))
        once = sum(c == 1 for c in counts.values())
        twice = sum(c == 2 for c in counts.values())
        discount = Fraction(once, once + 2 * twice) if once else Fraction(1, 2)
        following = {g[-1]: c for g, c in counts.items() if g[:-1] == context}
        lower = p(n - 1, context[1:])
        if not following:
            return lower
        kept = max(following.get(token, 0) - discount, 0)
        return (kept + discount * len(following) * lower) / sum(following.values())

    return p(order, tuple(history))


@pytest.mark.parametrize("order", [1, 2, 3])
def test_each_order_is_the_formula(order):
    text = [2, 3, 1, 0, 0, 2, 2, 1, 3]
    losses = NGram(torch.tensor(TRAIN), V, 3).losses(torch.tensor(text))
    padded = [0] * (order - 1) + text
    expected = [
        -log(by_hand(TRAIN, order, padded[i : i + order - 1], token))
        for i, token in enumerate(text)
    ]
    assert losses[order] == pytest.approx(sum(expected) / len(expected), rel=1e-12)


def test_probabilities_add_up_to_one_after_every_history():
    model = NGram(torch.tensor(TRAIN), V, 3)
    for a in range(V):
        for b in range(V):
            before = model.losses(torch.tensor([a, b]))
            for order in (1, 2, 3):
                total = 0.0
                for token in range(V):
                    with_it = model.losses(torch.tensor([a, b, token]))[order]
                    total += torch.tensor(2 * before[order] - 3 * with_it).exp().item()
                assert total == pytest.approx(1, abs=1e-6)


def test_on_text_without_order_no_order_helps():
    generator = torch.Generator().manual_seed(0)
    train, test = torch.randint(8, (2, 20_000), generator=generator)
    losses = NGram(train, 8, 3).losses(test)
    assert all(loss == pytest.approx(log(8), abs=0.05) for loss in losses.values())


def test_a_cycle_is_known_from_two_tokens():
    cycle = torch.tensor([1, 2, 1, 3]).repeat(500)
    losses = NGram(cycle, 4, 3).losses(cycle)
    assert losses[1] == pytest.approx(1.5 * log(2), abs=0.01)
    assert losses[2] == pytest.approx(0.5 * log(2), abs=0.01)
    assert losses[3] < 0.01


@pytest.mark.parametrize(
    ("stream", "vocabulary", "order", "words"),
    [
        ([], 4, 2, "stream is empty"),
        ([1], 4, 0, "order is 0"),
        ([1], 2**15, 5, "lower the order"),
    ],
)
def test_bad_input_is_refused(stream, vocabulary, order, words):
    with pytest.raises(InfoFlowError, match=words):
        NGram(torch.tensor(stream, dtype=torch.long), vocabulary, order)
