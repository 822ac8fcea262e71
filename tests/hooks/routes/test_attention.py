"""Attention weights and rollout against paths counted one by one, and cases known by hand."""

import numpy as np
import pytest
import torch

from infoflow_lens import InfoFlowError, attach, build_model, run_probes
from infoflow_lens.hooks import AttentionRollout, AttentionWeight, RoutesResult, probe_cache
from infoflow_lens.models.architecture import Architecture
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


def test_one_uniform_head_rolls_out_as_computed_by_hand():
    """Two layers over two tokens: A = [[1, 0], [1/4, 3/4]], and its square."""
    model = make_token_model(n_heads=1)
    uniform = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    x = torch.tensor([[3, 5]])
    found = with_patterns(model, x, [uniform, uniform], AttentionRollout())
    torch.testing.assert_close(found[0, 0], torch.tensor([[1.0, 0.0], [0.25, 0.75]]))
    torch.testing.assert_close(found[1, 0], torch.tensor([[1.0, 0.0], [0.4375, 0.5625]]))


@pytest.mark.parametrize("probe", [AttentionRollout(), AttentionWeight()])
def test_attention_to_oneself_leads_nowhere(token_model, token_inputs, probe):
    identity = torch.eye(9)
    found = with_patterns(token_model, token_inputs, [identity, identity], probe)
    torch.testing.assert_close(found, identity.expand_as(found))


@pytest.mark.parametrize("attention", ["softmax", "relu", "hardmax"])
def test_rollout_has_rows_of_sum_one_whatever_the_rows_of_attention(attention):
    """CLS keeps a share that belongs to no source, one half of one half after two layers."""
    model = build_model(
        Architecture(n_heads=(2, 3), d_model=12, d_token=3, n_tokens=7, attention=attention), seed=0
    )
    x = torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(0))
    (found,) = run_probes(model, x, [AttentionRollout()], progress=False)
    sums = found.scores.sum(dim=-1)
    torch.testing.assert_close(sums[:, :, :7], torch.ones_like(sums[:, :, :7]))
    if attention == "softmax":
        torch.testing.assert_close(sums[:, :, 7], torch.tensor([[0.5], [0.75]]).expand(2, 5))


def test_chosen_positions_are_rows_of_the_whole(token_model, token_inputs):
    whole, chosen = run_probes(
        token_model,
        token_inputs,
        [AttentionRollout(), AttentionRollout(positions=(-1, 3))],
        progress=False,
    )
    assert chosen.scores.equal(whole.scores[:, :, [8, 3]])
    full = chosen.full()
    assert full[:, :, 8].equal(whole.scores[:, :, 8])
    assert not full[:, :, 4].any()
    assert chosen.has_scores.sum(dim=1).tolist() == [2] * 19


def test_a_cache_gives_the_same(token_model, token_inputs):
    _, cache = token_model.run_with_cache(token_inputs)
    (found,) = probe_cache(token_model, cache, [AttentionRollout()], tokens=token_inputs)
    (expected,) = run_probes(token_model, token_inputs, [AttentionRollout()], progress=False)
    torch.testing.assert_close(found.scores, expected.scores)


def test_its_result_is_saved_shown_and_tabled(token_model, token_inputs, tmp_path):
    (found,) = run_probes(token_model, token_inputs[:2], [AttentionRollout()], progress=False)
    found.save(tmp_path / "rollout")
    loaded = RoutesResult.load(tmp_path / "rollout")
    assert loaded.scores.equal(found.scores)
    assert loaded.record.config["probe"] == "AttentionRollout"
    frame = found.to_frame()
    assert list(frame) == ["layer", "sample", "position", "source", "scores"]
    assert len(frame) == 2 * 2 * 9 * 9
    assert [a.get_title() for a in found.plot().axes][:2] == ["layer 0", "layer 1"]


def test_positions_that_no_sequence_has_are_refused(token_model, token_inputs):
    with pytest.raises(InfoFlowError, match="longest sequence has 9 positions"):
        run_probes(token_model, token_inputs, [AttentionRollout(positions=(9,))], progress=False)


def test_negative_weights_are_refused(token_model, token_inputs):
    with pytest.raises(InfoFlowError, match="layer 1 has negative weights"):
        with_patterns(token_model, token_inputs, [torch.eye(9), -torch.eye(9)], AttentionWeight())
