"""Attention of other kinds than softmax, on hosted models and on any HookedTransformer."""

import copy

import pytest
import torch

from infoflow_lens import Architecture, InfoFlowError, PositionsProbe, build_model, run_probes
from infoflow_lens.models.attention import hardmax_pattern, set_attention
from infoflow_lens.models.hooked import HAS_HOOKED_TRANSFORMER

from ..conftest import make_token_model

SCORES = "blocks.1.attn.hook_attn_scores"
PATTERN = "blocks.1.attn.hook_pattern"


def by_hand(kind, scores):
    if kind == "relu":
        return scores.clamp(min=0)
    pattern = torch.zeros_like(scores)
    for index in torch.cartesian_prod(*map(torch.arange, scores.shape[:-1])).tolist():
        row = scores[tuple(index)].tolist()
        if max(row) > -torch.inf:
            pattern[(*index, row.index(max(row)))] = 1
    return pattern


@pytest.fixture(params=["relu", "hardmax"])
def kind(request):
    return request.param


def with_softmax(host):
    """Two layers of four heads over nine positions, some of which are no keys."""
    if host == "HookedTransformer":
        return make_token_model()
    return build_model(
        Architecture(n_heads=(4, 4), d_head=(5, 5), d_model=12, d_token=3, n_tokens=8), seed=2
    )


@pytest.fixture(params=["hosted", *(["HookedTransformer"] if HAS_HOOKED_TRANSFORMER else [])])
def host(request):
    return request.param


@pytest.fixture
def model(kind, host):
    model = with_softmax(host)
    set_attention(model, kind)
    return model


@pytest.fixture
def x(host, token_inputs):
    if host == "HookedTransformer":
        return token_inputs
    return torch.randn(19, 8, 3, generator=torch.Generator().manual_seed(4))


def test_the_cached_pattern_is_made_of_the_cached_scores(model, kind, x):
    _, cache = model.run_with_cache(x)
    for layer in range(2):
        scores = cache[f"blocks.{layer}.attn.hook_attn_scores"]
        assert scores.isinf().any()
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"]
        torch.testing.assert_close(pattern, by_hand(kind, scores))


def test_the_pattern_is_what_moves_values(model, x):
    _, cache = model.run_with_cache(x)
    moved = torch.einsum("bhqk,bkhd->bqhd", cache[PATTERN], cache["blocks.1.attn.hook_v"])
    torch.testing.assert_close(cache["blocks.1.attn.hook_z"], moved)


def test_it_survives_reset_hooks(model, x):
    before = model(x)
    model.reset_hooks(including_permanent=True)
    assert model(x).equal(before)


@pytest.mark.parametrize("prepend", [False, True])
def test_an_edit_of_the_scores_counts_whenever_it_was_registered(model, x, prepend):
    def edit(scores, hook):
        return scores - 0.5 * torch.arange(scores.shape[-1])

    by_prefix = model.run_with_hooks(x, fwd_hooks=[(SCORES, edit)])
    model.add_hook(SCORES, edit, prepend=prepend)
    patterns = []
    model.add_hook(SCORES, lambda scores, hook: patterns.append(scores))
    edited = model(x)
    assert edited.equal(by_prefix)
    model.reset_hooks()
    assert not edited.allclose(model(x))


def test_an_edit_of_the_pattern_counts(model, x):
    silent = model.run_with_hooks(
        x, fwd_hooks=[(PATTERN, lambda pattern, hook: torch.zeros_like(pattern))]
    )
    assert not silent.allclose(model(x))


def test_gradients_flow_through_relu_scores_and_not_through_a_hard_maximum(model, kind, x):
    model(x).square().sum().backward()
    attn = model.blocks[1].attn
    assert attn.W_V.grad.abs().sum() > 0
    assert (attn.W_Q.grad is not None and bool(attn.W_Q.grad.any())) == (kind == "relu")


def test_backward_hooks_see_and_change_the_gradient_of_the_pattern(model, kind, x):
    seen = []

    def silence(gradient, hook):
        seen.append(gradient)
        return (torch.zeros_like(gradient),)

    model.add_hook(PATTERN, silence, dir="bwd")
    model(x).square().sum().backward()
    assert seen[0].shape == (19, 4, 9, 9)
    assert seen[0].any()
    queries = model.blocks[1].attn.W_Q.grad
    assert queries is None or not queries.any()


def test_a_copy_after_a_pass_that_ended_early_is_whole(model, x):
    model(x, stop_at_layer=1)
    with pytest.raises(ZeroDivisionError):
        model.run_with_hooks(x, fwd_hooks=[(SCORES, lambda scores, hook: 1 / 0)])
    model.blocks[0].attn.hook_attn_scores(torch.zeros(1, requires_grad=True) * 1)  # leaves scores
    copied = copy.deepcopy(model)
    assert copied(x).equal(model(x))


def test_positions_of_relu_attention_come_with_a_warning(model, kind, x):
    (result,) = run_probes(model, x, [PositionsProbe()], progress=False)
    assert any("use AttendedProbe" in note for note in result.notes) == (kind == "relu")


def test_softmax_is_restored(model, host, x):
    set_attention(model, "softmax")
    assert model(x).equal(with_softmax(host)(x))


def test_hard_maxima_go_to_the_lowest_of_equals_and_skip_rows_without_keys():
    scores = torch.tensor([[[[1.0, 2.0, 2.0], [-torch.inf] * 3, [-torch.inf, -5.0, -6.0]]]])
    expected = torch.tensor([[[[0.0, 1.0, 0.0], [0.0] * 3, [0.0, 1.0, 0.0]]]])
    assert hardmax_pattern(scores).equal(expected)


def test_a_hosted_model_takes_its_attention_from_the_architecture(architecture, inputs, kind):
    import dataclasses

    model = build_model(dataclasses.replace(architecture, attention=kind), seed=5)
    _, cache = model.run_with_cache(inputs)
    scores, pattern = cache["attn_scores", 0], cache["pattern", 0]
    torch.testing.assert_close(pattern, by_hand(kind, scores))
    torch.testing.assert_close(model(inputs), model.forward_readout(inputs))


def test_what_cannot_be_changed_is_refused(host):
    model = with_softmax(host)
    with pytest.raises(InfoFlowError, match="kind is 'sparsemax'"):
        set_attention(model, "sparsemax")
    with pytest.raises(InfoFlowError, match="Linear has no attention layers"):
        set_attention(torch.nn.Linear(2, 2), "relu")
    model.add_hook(PATTERN, lambda pattern, hook: None)
    with pytest.raises(InfoFlowError, match=r"blocks\.1\.attn\.hook_pattern has hooks"):
        set_attention(model, "relu")
    assert len(model.hook_dict[PATTERN].fwd_hooks) == 1


def test_a_bridge_makes_its_pattern_itself():
    from transformer_lens import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge

    cfg = TransformerBridgeConfig(
        n_layers=1, d_model=8, n_ctx=4, d_head=4, n_heads=2, d_vocab=5, act_fn="gelu"
    )
    with pytest.raises(InfoFlowError, match="TransformerBridge makes its patterns itself"):
        set_attention(TransformerBridge.boot_native(cfg), "relu")
