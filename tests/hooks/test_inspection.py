"""What models are and can be asked, on one small model of each kind."""

import warnings

import pytest
import torch

from infoflow_lens import InfoFlowError, build_construction, inspect_model
from infoflow_lens.models.attention import set_attention
from tests.conftest import make_token_model

EDITED = (
    "attn.hook_attn_scores",
    "attn.hook_pattern",
    "hook_resid_pre",
    "hook_resid_mid",
    "hook_resid_post",
)

# config changes, and what must be found in the layers
KINDS = [
    ({}, {"attends": ("causal", "causal"), "n_key_value_heads": (4, 4)}),
    ({"n_key_value_heads": 2}, {"n_heads": (4, 4), "n_key_value_heads": (2, 2)}),
    ({"attention_dir": "bidirectional"}, {"attends": ("bidirectional", "bidirectional")}),
    (
        {"use_local_attn": True, "attn_types": ["local", "global"], "window_size": 3},
        {"attends": ("local(3)", "causal")},
    ),
    ({"use_attention_sinks": True}, {"pattern": ("softmax with sinks", "softmax with sinks")}),
    ({"positional_embedding_type": "rotary", "d_head": 6}, {"scores": ("scores", "scores")}),
    ({"positional_embedding_type": "alibi"}, {"pattern": ("softmax", "softmax")}),
    ({"normalization_type": None}, {"pattern": ("softmax", "softmax")}),
]


@pytest.mark.parametrize(("changes", "expected"), KINDS)
def test_layers_are_found_out_by_running(token_inputs, changes, expected):
    found = inspect_model(make_token_model(**changes), token_inputs)
    assert found.kind == "HookedTransformer"
    for name, values in expected.items():
        assert tuple(getattr(layer, name) for layer in found.layers) == values
    assert all(layer.edits_reach == EDITED for layer in found.layers)
    assert found.problems() == ()


@pytest.mark.parametrize("changes", [{"attn_only": True}, {"parallel_attn_mlp": True}])
def test_blocks_without_a_middle_are_told(token_inputs, changes):
    found = inspect_model(make_token_model(**changes), token_inputs)
    assert all("hook_resid_mid" not in layer.fires for layer in found.layers)
    assert all("hook_resid_mid" not in layer.edits_reach for layer in found.layers)
    assert ("hook_mlp_out" in found.layers[0].fires) == ("attn_only" not in changes)


@pytest.mark.parametrize("kind", ["relu", "hardmax"])
def test_other_attention_is_recognised(token_model, token_inputs, kind):
    set_attention(token_model, kind)
    assert inspect_model(token_model, token_inputs).layers[0].pattern == kind


def test_scores_that_are_their_own_relu_are_scores():
    model, task = build_construction("in_context_qa", n_pairs=2)
    found = inspect_model(model, task.sample(4, seed=0)[0])
    assert {(layer.pattern, layer.scores) for layer in found.layers} == {("relu", "scores")}


def test_hosted_models_have_heads_of_their_own_in_each_layer(model, inputs):
    found = inspect_model(model, inputs)
    assert found.reads_vectors
    assert [layer.n_heads for layer in found.layers] == [2, 5]
    assert {layer.attends for layer in found.layers} == {"bidirectional, last position is no key"}


def test_a_bridge_that_shows_the_pattern_as_scores_is_seen_through(token_inputs):
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = TransformerBridgeConfig(
            n_layers=2, d_model=12, n_ctx=9, d_head=3, n_heads=4, d_vocab=17, d_mlp=20,
            act_fn="gelu",
        )  # fmt: skip
        bridge = TransformerBridge.boot_native(config)
        found = inspect_model(bridge, token_inputs)
    assert found.kind == "TransformerBridge"
    for layer in found.layers:
        assert (layer.n_heads, layer.scores, layer.attends) == (4, "pattern", "causal")
        assert "attn.hook_pattern" not in layer.edits_reach
        assert "hook_resid_pre" in layer.edits_reach
    problems = " ".join(found.problems())
    assert "hook_attn_scores carries the pattern" in problems
    assert "patterns cannot be substituted" in problems


def test_state_dtype_and_dropout_are_told_and_left(token_inputs):
    model = make_token_model().to(torch.bfloat16, print_details=False).train()
    model.blocks[0].mlp.dropout = torch.nn.Dropout(0.1)
    model.add_hook("blocks.0.hook_resid_pre", lambda activation, hook: None)
    found = inspect_model(model, token_inputs)
    assert (found.dtype, found.device, found.training, found.dropout) == (
        "bfloat16",
        "cpu",
        True,
        True,
    )
    assert model.training
    assert [len(p.fwd_hooks) for p in model.hook_dict.values()].count(1) == 1
    assert found.layers[0].pattern == "softmax"


def test_it_is_shown_as_a_table(token_model, token_inputs):
    found = inspect_model(token_model, token_inputs)
    frame = found.to_frame()
    assert list(frame["heads"]) == [4, 4]
    assert "HookedTransformer" in found._repr_html_()


def test_what_cannot_be_inspected_is_named(token_model, token_inputs):
    with pytest.raises(InfoFlowError, match="no transformer blocks"):
        inspect_model(torch.nn.Linear(2, 2), token_inputs)
    with pytest.raises(InfoFlowError, match="example_input has token ids from"):
        inspect_model(token_model, token_inputs + 10)
    with torch.no_grad():
        token_model.W_E.fill_(torch.nan)
    with pytest.raises(InfoFlowError, match="output holds NaN"):
        inspect_model(token_model, token_inputs)
