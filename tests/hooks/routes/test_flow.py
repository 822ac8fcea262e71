"""Attention flow against linear programs over all edges, and networks known by hand."""

import numpy as np
import pytest
import torch

from infoflow_lens import run_probes
from infoflow_lens.hooks import AttentionFlow, AttentionRollout
from tests.conftest import make_token_model, some_of
from tests.hooks.routes.test_attention import edges, with_patterns
from tests.reference import routes


@pytest.mark.parametrize("n_layers", some_of([1, 2, 3, 4], 1, 3))
def test_it_is_the_optimum_of_a_linear_program(n_layers):
    model = make_token_model(n_layers=n_layers)
    x = torch.randint(17, (1, 4), generator=torch.Generator().manual_seed(n_layers))
    (found,) = run_probes(model, x, [AttentionFlow()], progress=False)
    by_layer = edges(model, x, 0)
    for layer in range(n_layers):
        for state in range(4):
            for source in range(4):
                expected = routes.max_flow(by_layer[: layer + 1], state, source)
                assert float(found.scores[layer, 0, state, source]) == pytest.approx(
                    expected, abs=1e-6
                )


def test_a_narrow_pipe_lets_no_more_through_than_it_holds():
    """Three layers of one uniform head over two tokens, by hand.

    Edges are 1 from position 0 to itself, 1/4 and 3/4 from position 1. From the state at 1 down to
    token 0: 1/4 at once, then of the 3/4 that stay 1/4, and 1/4 again: 3/4 in three layers.
    """
    model = make_token_model(n_layers=3, n_heads=1)
    uniform = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    found = with_patterns(model, torch.tensor([[3, 5]]), [uniform] * 3, AttentionFlow())
    torch.testing.assert_close(found[:, 0, 1, 0], torch.tensor([0.25, 0.5, 0.75]))
    torch.testing.assert_close(found[:, 0, 1, 1], torch.full((3,), 0.75))
    torch.testing.assert_close(found[:, 0, 0], torch.tensor([[1.0, 0.0]] * 3))


def test_it_is_never_less_than_rollout():
    """The products along paths are themselves a flow, of all sources at once."""
    model = make_token_model(n_layers=3)
    x = torch.randint(17, (3, 6), generator=torch.Generator().manual_seed(1))
    flow, rollout = run_probes(model, x, [AttentionFlow(), AttentionRollout()], progress=False)
    assert (flow.scores >= rollout.scores - 1e-6).all()
    assert (flow.scores <= 1 + 1e-6).all()
    np.testing.assert_allclose(flow.scores[0], rollout.scores[0], atol=1e-6)


def test_chosen_positions_are_rows_of_the_whole():
    model = make_token_model(n_layers=3)
    x = torch.randint(17, (2, 6), generator=torch.Generator().manual_seed(1))
    whole, last = run_probes(
        model, x, [AttentionFlow(), AttentionFlow(positions=(-1,))], progress=False
    )
    assert last.scores.equal(whole.scores[:, :, 5:])
