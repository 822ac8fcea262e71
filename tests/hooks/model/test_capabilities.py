"""What models are and can be asked, on one small model of each kind."""

import json
import warnings

import pytest
import torch

from infoflow_lens import (
    Architecture,
    InfoFlowError,
    build_construction,
    build_model,
    build_token_model,
    inspect_model,
)
from infoflow_lens.hooks.model.capabilities import _key_value_heads
from infoflow_lens.hooks.model.inputs import example_input, local_window
from infoflow_lens.models.hooked import HAS_HOOKED_TRANSFORMER
from infoflow_lens.models.loading import load_any
from tests.conftest import make_token_model
from tests.reference import zoo
from tests.versions import for_each, needs_hooked_transformer

EDITED = (
    "attn.hook_attn_scores",
    "attn.hook_pattern",
    "attn.hook_z",
    "hook_resid_pre",
    "hook_attn_out",
    "hook_resid_mid",
    "hook_resid_post",
)
ATTENTION = EDITED[:2]
STREAM = ("attn.hook_z", "hook_resid_pre", "hook_attn_out", "hook_resid_post")

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
    ({"positional_embedding_type": "rotary", "d_head": 6}, {"attends": ("causal", "causal")}),
    ({"positional_embedding_type": "alibi"}, {"pattern": ("softmax", "softmax")}),
    ({"normalization_type": None}, {"pattern": ("softmax", "softmax")}),
]


KIND = "HookedTransformer" if HAS_HOOKED_TRANSFORMER else "TransformerBridge"
# A native bridge shows the pattern as scores, behind its own use of them; the pattern itself may be
# edited there, and hook_resid_mid is what the MLP reads
SCORES = "scores" if HAS_HOOKED_TRANSFORMER else "pattern"
REACHED = set(EDITED) if HAS_HOOKED_TRANSFORMER else {*STREAM, "attn.hook_pattern"}


@pytest.mark.parametrize(("changes", "expected"), for_each(KINDS))
def test_layers_are_found_out_by_running(token_inputs, changes, expected):
    found = inspect_model(make_token_model(**changes), token_inputs)
    assert found.kind == KIND
    for name, values in expected.items():
        assert tuple(getattr(layer, name) for layer in found.layers) == values
    assert all(set(layer.edits_reach) == REACHED for layer in found.layers)
    assert {(layer.parallel, layer.scores) for layer in found.layers} == {(False, SCORES)}
    problems = found.problems()
    if HAS_HOOKED_TRANSFORMER:
        assert problems == ()
    else:
        (problem,) = problems
        assert problem.startswith("layers 0-1: hook_attn_scores carries the pattern, so ranks")


@pytest.mark.parametrize(
    "changes", for_each([({"attn_only": True},), ({"parallel_attn_mlp": True},)])
)
def test_blocks_without_a_middle_are_told(token_inputs, changes):
    found = inspect_model(make_token_model(**changes), token_inputs)
    assert all("hook_resid_mid" not in layer.fires for layer in found.layers)
    assert all("hook_resid_mid" not in layer.edits_reach for layer in found.layers)
    assert ("hook_mlp_out" in found.layers[0].fires) == ("attn_only" not in changes)
    expected = None if "attn_only" in changes else True
    assert [layer.parallel for layer in found.layers] == [expected, expected]
    assert all(set(STREAM) < set(layer.edits_reach) for layer in found.layers)


def test_an_mlp_that_reads_nothing_is_neither_parallel_nor_not(token_model, token_inputs):
    with torch.no_grad():
        token_model.blocks[0].mlp.W_in.zero_()
    found = inspect_model(token_model, token_inputs)
    assert [layer.parallel for layer in found.layers] == [None, False]


@pytest.mark.parametrize("kind", ["relu", "hardmax"])
def test_other_attention_is_recognised(token_inputs, kind):
    model = build_token_model(
        n_layers=2, n_heads=4, d_head=5, d_model=12, n_tokens=9, d_vocab=17, d_output=17,
        attention=kind,
    )  # fmt: skip
    assert inspect_model(model, token_inputs).layers[0].pattern == kind


def test_scores_that_are_their_own_relu_are_scores():
    model, task = build_construction("in_context_qa", n_pairs=2)
    found = inspect_model(model, task.sample(4, seed=0)[0])
    assert {(layer.pattern, layer.scores) for layer in found.layers} == {("relu", "scores")}


def test_hosted_models_have_heads_of_their_own_in_each_layer(model, inputs):
    found = inspect_model(model, inputs)
    assert found.reads_vectors
    assert [layer.n_heads for layer in found.layers] == [2, 5]
    assert {layer.attends for layer in found.layers} == {"bidirectional, last position is no key"}


# Bridges: what was measured of each against transformers itself, by architecture. All have 4 heads.
# n_key_value_heads, attends (both layers), pattern, scores, parallel
GLOBAL, WINDOW = "causal", f"local({zoo.WINDOW})"
BRIDGES = {
    "gpt2": (4, (GLOBAL, GLOBAL), "softmax", "scores", False),
    "gpt_neo": (4, (GLOBAL, WINDOW), "softmax", "pattern", False),
    "opt": (4, (GLOBAL, GLOBAL), "softmax", "pattern", False),
    "bloom": (4, (GLOBAL, GLOBAL), "softmax", "scores", False),
    "gptj": (4, (GLOBAL, GLOBAL), "softmax", "pattern", True),
    "gpt_neox": (4, (GLOBAL, GLOBAL), "softmax", "scores", True),
    "llama": (2, (GLOBAL, GLOBAL), "softmax", "scores", False),
    "mistral": (2, (WINDOW, WINDOW), "softmax", "scores", False),
    "qwen2": (2, (GLOBAL, GLOBAL), "softmax", "scores", False),
    "gemma2": (2, (WINDOW, GLOBAL), "softmax", "scores", False),
    "gpt_oss": (2, (WINDOW, GLOBAL), "softmax with sinks", "scores", False),
    "bert": (4, ("bidirectional", "bidirectional"), "softmax", "pattern", False),
    "gemma3": (2, (WINDOW, GLOBAL), "softmax", "scores", False),
    "qwen3": (2, (GLOBAL, GLOBAL), "softmax", "scores", False),
    "granite": (2, (GLOBAL, GLOBAL), "softmax", "scores", False),
    "olmo2": (2, (GLOBAL, GLOBAL), "softmax", "scores", False),
    "stablelm": (2, (GLOBAL, GLOBAL), "softmax", "scores", False),
    "falcon": (1, (GLOBAL, GLOBAL), "softmax", "scores", True),
    "phi3": (2, (GLOBAL, GLOBAL), "softmax", "scores", False),
    "cohere": (2, (GLOBAL, GLOBAL), "softmax", "scores", True),
    "cohere2": (2, (WINDOW, WINDOW), "softmax", "scores", True),
    "codegen": (4, (GLOBAL, GLOBAL), "softmax", "scores", True),
}
# Version 3 hosts Cohere wrongly, which is refused (tests/hooks/test_traps.py)
HOSTED = [name for name in zoo.FAMILIES if not (HAS_HOOKED_TRANSFORMER and "cohere" in name)]


@pytest.fixture(scope="module")
def bridge_of(tmp_path_factory):
    """Bridges by architecture and dtype, each loaded once."""
    loaded = {}

    def load(name, dtype="float32"):
        if (name, dtype) not in loaded:
            folder = zoo.save(name, tmp_path_factory.mktemp(name), with_tokenizer=False)
            loaded[name, dtype] = load_any(folder, dtype=dtype).model
        return loaded[name, dtype]

    return load


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in HOSTED), *((name, "bfloat16") for name in zoo.NAMES)],
)
def test_bridges_are_found_out_by_running(bridge_of, name, dtype):
    n_key_value_heads, attends, pattern, scores, parallel = BRIDGES[name]
    found = inspect_model(bridge_of(name, dtype), zoo.tokens(4, 12))
    assert (found.kind, found.dtype, found.starts_at_layers) == ("TransformerBridge", dtype, False)
    assert tuple(layer.attends for layer in found.layers) == attends
    for layer in found.layers:
        assert (layer.n_heads, layer.n_key_value_heads) == (4, n_key_value_heads)
        assert (layer.pattern, layer.scores, layer.parallel) == (pattern, scores, parallel)
        # what the MLP reads is no place to edit the stream, whatever its name
        assert "hook_resid_mid" not in layer.edits_reach
        assert ("hook_resid_mid" in layer.fires) == (not parallel)
        lost = set(ATTENTION) if scores == "pattern" else set()
        assert set(layer.edits_reach) == {*STREAM, *ATTENTION} - lost
        assert set(layer.edits_lost) == lost | ({"hook_resid_mid"} - set(layer.missing))


@pytest.mark.parametrize("name", ["gpt_neo", "bert"])
def test_a_bridge_that_shows_the_pattern_as_scores_is_told_with_what_follows(bridge_of, name):
    problems = inspect_model(bridge_of(name), zoo.tokens(2, 6)).problems()
    assert len(problems) == 2
    assert problems[0].startswith("layers 0-1: hook_attn_scores carries the pattern, so ranks")
    assert "patterns cannot be substituted" in problems[1]
    # what is possible on the version at hand
    advice = "load the model as a HookedTransformer" if HAS_HOOKED_TRANSFORMER else "Lens 3"
    assert all(advice in problem for problem in problems)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "gpt_oss"])
def test_a_bridge_that_shows_everything_has_no_problems(bridge_of, name):
    assert inspect_model(bridge_of(name), zoo.tokens(2, 6)).problems() == ()


def test_a_native_bridge_is_seen_through(token_inputs):
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge

    config = TransformerBridgeConfig(
        n_layers=2, d_model=12, n_ctx=9, d_head=3, n_heads=4, d_vocab=17, d_mlp=20, act_fn="gelu"
    )
    with torch.random.fork_rng():
        bridge = TransformerBridge.boot_native(config)
    found = inspect_model(bridge, token_inputs)
    assert {(layer.scores, layer.attends, layer.parallel) for layer in found.layers} == {
        ("pattern", "causal", False)
    }
    reached = set(ATTENTION) & set(found.layers[0].edits_reach)
    assert reached == (set() if HAS_HOOKED_TRANSFORMER else {"attn.hook_pattern"})


@needs_hooked_transformer  # 4 makes the attention eager
def test_a_bridge_without_eager_attention_shows_no_pattern(tmp_path):
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoModelForCausalLM

    folder = zoo.save("opt", tmp_path)
    fast = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    bridge = TransformerBridge.boot_transformers(str(folder), hf_model=fast, device="cpu")
    found = inspect_model(bridge, zoo.tokens(2, 6))
    assert {(layer.n_heads, layer.attends, layer.scores) for layer in found.layers} == {
        (None, "unknown", "missing")
    }
    assert len(found.problems()) == 1
    assert "layers 0-1: hook_pattern does not fire" in found.problems()[0]
    assert "attn_implementation='eager'" in found.problems()[0]


def test_compatibility_mode_is_found_out_too(tmp_path):
    bridge = load_any(zoo.save("llama", tmp_path)).model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bridge.enable_compatibility_mode(no_processing=True)
    found = inspect_model(bridge, zoo.tokens(4, 12))
    assert {(layer.n_key_value_heads, layer.attends, layer.scores) for layer in found.layers} == {
        (2, "causal", "scores")
    }


def test_a_bridge_is_left_as_it_was(bridge_of):
    bridge = bridge_of("gpt2")
    state = {name: value.clone() for name, value in bridge.state_dict().items()}
    seen = []
    with bridge.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda x, hook: seen.append(1))]):
        inspect_model(bridge, zoo.tokens(2, 6))
        seen.clear()
        bridge(zoo.tokens(2, 6))
        assert seen == [1]
    assert all(torch.equal(value, state[name]) for name, value in bridge.state_dict().items())
    assert not any(point.fwd_hooks for point in bridge.hook_dict.values())


@pytest.mark.parametrize(
    ("keys", "z", "expected"),
    [
        ((2, 5, 3, 4), (2, 5, 6, 4), 3),
        ((2, 5, 12), (2, 5, 6, 4), 3),  # flat keys
        ((2, 5, 12), (2, 5, 24), 3),  # flat keys and heads: the pattern has 6
        ((2, 5, 12), None, None),
    ],
)
def test_key_value_heads_are_counted_on_flat_keys_too(keys, z, expected):
    found = {"attn.hook_k": torch.zeros(keys), "attn.hook_pattern": torch.zeros(2, 6, 5, 5)}
    if z is not None:
        found["attn.hook_z"] = torch.zeros(z)
    assert _key_value_heads(found) == expected


def test_state_dtype_and_dropout_are_told_and_left(token_inputs):
    model = make_token_model().to(torch.bfloat16, print_details=False).train()
    model.add_module("dropout", torch.nn.Dropout(0.1))
    model.add_hook("blocks.0.hook_resid_pre", lambda activation, hook: None)
    found = inspect_model(model, token_inputs)
    assert (found.dtype, found.device, found.training, found.dropout) == (
        "bfloat16",
        "cpu",
        True,
        True,
    )
    assert model.training
    # a bridge has two names for a hook point
    assert [len(p.fwd_hooks) for p in set(model.hook_dict.values())].count(1) == 1
    assert found.layers[0].pattern == "softmax"


def test_it_is_shown_as_a_table(token_model, token_inputs):
    found = inspect_model(token_model, token_inputs)
    frame = found.to_frame()
    assert list(frame["heads"]) == [4, 4]
    assert KIND in found._repr_html_()


def test_everything_is_written_as_json(token_model, token_inputs):
    found = inspect_model(token_model, token_inputs)
    written = json.loads(json.dumps(found.to_dict()))
    assert written["layers"][1]["n_heads"] == 4
    assert written["problems"] == list(found.problems())


@pytest.mark.parametrize(
    ("heads", "labels"),
    [
        ((3, 3, 3, 3), ["0-3"]),
        ((3, 2, 3, 2), ["0, 2", "1, 3"]),
        ((3, 3, 3, 2), ["0-2", "3"]),
        ((2, 3, 3, 2), ["0, 3", "1-2"]),
    ],
)
def test_layers_that_are_alike_are_told_together(heads, labels):
    model = build_model(Architecture(n_heads=heads, d_model=12, d_token=3, n_tokens=5), seed=1)
    assert list(inspect_model(model, example_input(model)).kinds()) == labels


# The example input


@pytest.mark.parametrize("name", HOSTED)
def test_the_example_is_long_enough_to_show_a_window(bridge_of, name):
    # a window of 4; all take 32 tokens, and Bloom any number
    found = inspect_model(bridge_of(name), example_input(bridge_of(name)))
    assert tuple(layer.attends for layer in found.layers) == BRIDGES[name][1]


def check_length(model, window, length):
    assert local_window(model) == window
    example = example_input(model)
    assert example.shape == (4, length)
    if window < 40:
        expected = f"local({window})" if window else "causal"
        assert inspect_model(model, example).layers[0].attends == expected


LENGTHS = [(3, 16), (20, 22), (50, 40), (0, 16)]  # of a window, of the example


@pytest.mark.parametrize(("window", "length"), LENGTHS)
def test_the_length_of_the_example(tmp_path, window, length):
    changes = {"sliding_window": window or None, "max_position_embeddings": 40}
    check_length(load_any(zoo.save("mistral", tmp_path, **changes)).model, window, length)


@needs_hooked_transformer
def test_the_length_of_the_example_for_local_layers():
    for window, length in LENGTHS:
        local = {"use_local_attn": True, "attn_types": ["local", "global"], "window_size": window}
        check_length(make_token_model(n_ctx=40, **(local if window else {})), window, length)


def test_examples_are_the_same_for_a_seed_and_touch_no_random_state(token_model):
    before = torch.get_rng_state()
    first, again, other = (example_input(token_model, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_models_over_vectors_get_vectors_of_their_dtype(model):
    example = example_input(model.to(torch.float64, print_details=False), n_sequences=2)
    assert (example.shape, example.dtype) == ((2, 7, 3), torch.float64)
    assert inspect_model(model, example).dtype == "float64"


def test_what_cannot_be_inspected_is_named(token_model, token_inputs):
    with pytest.raises(InfoFlowError, match="no transformer blocks"):
        example_input(torch.nn.Linear(2, 2))
    with pytest.raises(InfoFlowError, match="no transformer blocks"):
        inspect_model(torch.nn.Linear(2, 2), token_inputs)
    with pytest.raises(InfoFlowError, match="example_input has token ids from"):
        inspect_model(token_model, token_inputs + 10)
    with torch.no_grad():
        token_model.embed.W_E.fill_(torch.nan)
    with pytest.raises(InfoFlowError, match="output holds NaN"):
        inspect_model(token_model, token_inputs)
