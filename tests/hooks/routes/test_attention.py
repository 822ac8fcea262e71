"""Attention weights and rollout against paths counted one by one, and cases known by hand."""

import numpy as np
import pytest
import torch

from infoflow_lens import (
    AttentionRollout,
    AttentionWeight,
    InfoFlowError,
    attach,
    run_probes,
)
from tests.conftest import make_token_model
from tests.reference import routes


def patterns(model, x):
    _, cache = model.run_with_cache(x)
    return [cache["pattern", layer].double() for layer in range(len(model.blocks))]


def edges(model, x, sequence):
    """The mean patterns of one sequence with the residual connection, by the reference."""
    found = (pattern[sequence].mean(0).numpy() for pattern in patterns(model, x))
    return [routes.residual_added(pattern) for pattern in found]


def with_patterns(model, x, layers, probe):
    """What a probe makes of patterns [query, key] of our own, the same for every head."""

    def hook(pattern):
        return lambda activation, hook: pattern.expand_as(activation).to(activation)

    fwd = [(f"blocks.{i}.attn.hook_pattern", hook(p)) for i, p in enumerate(layers)]
    with attach(model, probe), torch.no_grad():
        model.run_with_hooks(x, fwd_hooks=fwd)
    return probe.result().scores


def test_weights_are_the_mean_or_the_largest_of_the_heads(token_model, token_inputs):
    mean, largest = run_probes(
        token_model, token_inputs, [AttentionWeight(), AttentionWeight("max")], progress=False
    )
    for layer, pattern in enumerate(patterns(token_model, token_inputs)):
        torch.testing.assert_close(mean.scores[layer], pattern.mean(1).float())
        torch.testing.assert_close(largest.scores[layer], pattern.amax(1).float())


def test_rollout_sums_the_products_along_all_paths():
    model = make_token_model(n_layers=3)
    x = torch.randint(17, (2, 5), generator=torch.Generator().manual_seed(0))
    (found,) = run_probes(model, x, [AttentionRollout()], progress=False)
    for sequence in range(2):
        by_layer = edges(model, x, sequence)
        for layer in range(3):
            expected = routes.rollout(by_layer[: layer + 1])
            np.testing.assert_allclose(found.scores[layer, sequence], expected, atol=1e-6)


def test_positions_that_no_sequence_has_are_refused(token_model, token_inputs):
    with pytest.raises(InfoFlowError, match="at most 9 positions"):
        run_probes(token_model, token_inputs, [AttentionRollout(positions=(9,))], progress=False)


def test_negative_weights_are_refused(token_model, token_inputs):
    with pytest.raises(InfoFlowError, match="layer 1 has negative weights"):
        with_patterns(token_model, token_inputs, [torch.eye(9), -torch.eye(9)], AttentionWeight())
