"""Modules draw from a generator of their own, the numbers that the global one would give."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from infoflow_lens import InfoFlowError
from infoflow_lens.foundation.modules import SeededRandom

X = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))
DRAWS = {
    "initial weights": lambda: nn.Linear(3, 4).weight,
    "orthogonal": lambda: nn.init.orthogonal_(torch.empty(4, 5)),
    "dropout": lambda: functional.dropout(X, 0.3),
    "dropout of channels": lambda: functional.dropout1d(X, 0.3),
    "alpha dropout": lambda: functional.alpha_dropout(X, 0.3, training=True),
    "attention": lambda: functional.scaled_dot_product_attention(X, X, X, dropout_p=0.3),
    "attention without dropout": lambda: functional.scaled_dot_product_attention(X, X, X),
    "gumbel": lambda: functional.gumbel_softmax(X),
    "rrelu": lambda: functional.rrelu(X, training=True),
    "rand": lambda: torch.rand(4),
    "randint": lambda: torch.randint(9, (4,)),
    "randperm": lambda: torch.randperm(9),
    "like": lambda: torch.rand_like(X) + torch.randn_like(X),
    "normal": lambda: torch.normal(X, 1.0),
    "multinomial": lambda: torch.multinomial(X[0].abs(), 3),
    "bernoulli": lambda: torch.bernoulli(X.sigmoid()),
    "an encoder": lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)(X),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_own_generators_give_the_numbers_of_the_global_one(draw):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        expected = draw()
    state = torch.get_rng_state()
    with SeededRandom(7) as drawing:
        assert draw().equal(expected)
    assert torch.get_rng_state().equal(state)
    assert (drawing.n_drawn > 0) or draw is DRAWS["attention without dropout"]


def test_what_takes_no_generator_is_refused():
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with SeededRandom(0):
        attention(X[None], X[None], X[None])
        with pytest.raises(InfoFlowError, match="takes no generator"):
            attention(X[None], X[None], X[None], 0.5)


def test_nothing_is_drawn_where_there_are_no_numbers():
    with SeededRandom(0) as drawing, torch.device("meta"):
        assert nn.Linear(3, 4).weight.is_meta
    assert drawing.n_drawn == 0
