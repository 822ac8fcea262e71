"""What models are and can be asked, on one small model of each kind."""

import json
import warnings

import pytest
import torch
from transformer_lens.hook_points import HookPoint

from infoflow_lens import Architecture, InfoFlowError, build_model, inspect_model, open_model
from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.hooks.model import capabilities
from infoflow_lens.hooks.model.inputs import example_input, local_window
from infoflow_lens.hooks.model.points import hook_points, layer_count
from infoflow_lens.models.hooked import HAS_HOOKED_TRANSFORMER
from infoflow_lens.models.host import build_token_model
from infoflow_lens.models.loading import load_any
from infoflow_lens.studies.constructions import build_construction
from tests.conftest import make_token_model, some_of
from tests.reference import zoo
from tests.versions import for_each, needs_hooked_transformer

ATTENTION = {"attn.hook_attn_scores", "attn.hook_pattern"}
STREAM = {"attn.hook_z", "hook_resid_pre", "hook_attn_out", "hook_resid_post"}
MIDDLE = "hook_resid_mid"
# A native bridge shows the pattern as scores, behind its own use of them; the pattern itself may be
# edited there, and hook_resid_mid is what the MLP reads
KIND, SCORES, REACHED = (
    ("HookedTransformer", "scores", STREAM | ATTENTION | {MIDDLE})
    if HAS_HOOKED_TRANSFORMER
    else ("TransformerBridge", "pattern", STREAM | {"attn.hook_pattern"})
)

# config changes, and what must be found in the layers
LOCAL = {"use_local_attn": True, "attn_types": ["local", "global"], "window_size": 3}
KINDS = [
    ({}, "attends", ("causal", "causal")),
    ({}, "n_key_value_heads", (4, 4)),
    ({"n_key_value_heads": 2}, "n_heads", (4, 4)),
    ({"n_key_value_heads": 2}, "n_key_value_heads", (2, 2)),
    ({"attention_dir": "bidirectional"}, "attends", ("bidirectional", "bidirectional")),
    (LOCAL, "attends", ("local(3)", "causal")),
    ({"use_attention_sinks": True}, "pattern", ("softmax with sinks", "softmax with sinks")),
    ({"positional_embedding_type": "rotary", "d_head": 6}, "attends", ("causal", "causal")),
    ({"positional_embedding_type": "alibi"}, "pattern", ("softmax", "softmax")),
    ({"normalization_type": None}, "pattern", ("softmax", "softmax")),
    ({"attn_only": True}, "parallel", (None, None)),
    ({"parallel_attn_mlp": True}, "parallel", (True, True)),
]


@pytest.mark.parametrize(("changes", "name", "expected"), for_each(KINDS))
def test_layers_are_found_out_by_running(token_inputs, changes, name, expected):
    found = inspect_model(make_token_model(**changes), token_inputs)
    assert found.kind == KIND
    assert tuple(getattr(layer, name) for layer in found.layers) == expected
    has_middle = not {"attn_only", "parallel_attn_mlp"} & set(changes)
    for layer in found.layers:
        assert layer.scores == SCORES
        assert (MIDDLE in layer.fires) == has_middle
        assert ("hook_mlp_out" in layer.fires) == ("attn_only" not in changes)
        assert set(layer.edits_reach) == (REACHED if has_middle else REACHED - {MIDDLE})
        assert not has_middle or layer.parallel is False
    assert len(found.problems()) == (0 if HAS_HOOKED_TRANSFORMER else 1)
    for problem in found.problems():
        assert problem.startswith("layers 0-1: hook_attn_scores carries the pattern, so ranks")


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
GLOBAL, WINDOW = "causal", f"local({zoo.WINDOW})"
ATTENDS = {
    **dict.fromkeys(["gpt_neo"], (GLOBAL, WINDOW)),
    **dict.fromkeys(["mistral", "cohere2"], (WINDOW, WINDOW)),
    **dict.fromkeys(["gemma2", "gpt_oss", "gemma3"], (WINDOW, GLOBAL)),
    "bert": ("bidirectional", "bidirectional"),
}
KEY_VALUE_HEADS = {
    **dict.fromkeys(["gpt2", "gpt_neo", "opt", "bloom", "gptj", "gpt_neox", "bert", "codegen"], 4),
    "falcon": 1,
}  # all others have 2
WITHOUT_SCORES = {"gpt_neo", "opt", "gptj", "bert"}
PARALLEL = {"gptj", "gpt_neox", "falcon", "cohere", "cohere2", "codegen"}
# Version 3 hosts Cohere wrongly, which is refused (tests/hooks/test_traps.py)
HOSTED = [name for name in zoo.FAMILIES if not (HAS_HOOKED_TRANSFORMER and "cohere" in name)]


@pytest.fixture(scope="module")
def bridge_of():
    """Bridges by architecture and dtype, each loaded once."""
    loaded = {}

    def load(name, dtype="float32"):
        if (name, dtype) not in loaded:
            loaded[name, dtype] = zoo.bridge(name, getattr(torch, dtype))
        return loaded[name, dtype]

    return load


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *zoo.some_families([(name, "float32") for name in HOSTED], zoo.FEW),
        *some_of([(name, "bfloat16") for name in zoo.NAMES], ("gpt2", "bfloat16")),
    ],
)
def test_bridges_are_found_out_by_running(bridge_of, name, dtype):
    found = inspect_model(bridge_of(name, dtype), zoo.tokens(4, 12))
    assert (found.kind, found.dtype, found.starts_at_layers) == ("TransformerBridge", dtype, False)
    assert tuple(layer.attends for layer in found.layers) == ATTENDS.get(name, (GLOBAL, GLOBAL))
    for layer in found.layers:
        assert (layer.n_heads, layer.n_key_value_heads) == (4, KEY_VALUE_HEADS.get(name, 2))
        assert layer.pattern == ("softmax with sinks" if name == "gpt_oss" else "softmax")
        assert layer.scores == ("pattern" if name in WITHOUT_SCORES else "scores")
        assert layer.parallel == (name in PARALLEL)
        # what the MLP reads is no place to edit the stream, whatever its name
        assert (MIDDLE in layer.fires) == (name not in PARALLEL)
        lost = ATTENTION if name in WITHOUT_SCORES else set()
        assert set(layer.edits_reach) == (STREAM | ATTENTION) - lost
        assert set(layer.edits_lost) == lost | ({MIDDLE} - set(layer.missing))


@pytest.mark.parametrize("name", zoo.some_families(zoo.FAMILIES, zoo.FEW))
def test_of_opened_models_the_anatomy_says_what_edits_find(name, monkeypatch):
    """In one pass: an edit of every point of every layer once took minutes."""
    model, ids, passes = open_model(zoo.build(name)), zoo.tokens(4, 12), []
    run = capabilities._run_pass
    monkeypatch.setattr(capabilities, "_run_pass", lambda *a, **s: passes.append(s) or run(*a, **s))
    found = inspect_model(model, ids)
    assert passes == [{}]
    with eval_mode(model):
        plain = run(model, ids, range(zoo.N_LAYERS), capabilities._POINTS)
        for number, layer in enumerate(found.layers):
            reached, parallel = capabilities._find_reach_by_edits(model, ids, number, plain)
            assert (layer.edits_reach, layer.parallel) == (tuple(reached), parallel)
    assert found.problems() == ()
    assert tuple(layer.attends for layer in found.layers) == ATTENDS.get(name, (GLOBAL, GLOBAL))
    kv_heads = {layer.n_key_value_heads for layer in found.layers}
    assert kv_heads == {KEY_VALUE_HEADS.get(name, 2)}


@pytest.mark.parametrize("name", ["gpt_neo", "bert", "gpt2", "gpt_neox", "gpt_oss"])
def test_a_bridge_that_shows_the_pattern_as_scores_is_told_with_what_follows(bridge_of, name):
    problems = inspect_model(bridge_of(name), zoo.tokens(2, 6)).problems()
    expected = (
        "layers 0-1: hook_attn_scores carries the pattern, so ranks",
        "layers 0-1: edits of hook_pattern do not reach the output, so patterns cannot be subst",
    )
    assert len(problems) == (2 if name in WITHOUT_SCORES else 0)
    for problem, beginning in zip(problems, expected):
        assert problem.startswith(beginning)
        assert "give the model that it hosts, or its name" in problem


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
    reached = ATTENTION & set(found.layers[0].edits_reach)
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


def test_compatibility_mode_is_found_out_too():
    bridge = zoo.bridge("llama")
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


@pytest.mark.parametrize("points", [("hook_k",), ("hook_k", "hook_z")])
def test_key_value_heads_are_counted_where_they_are_shown_flat(model, inputs, monkeypatch, points):
    for point in points:
        flat = HookPoint()
        shown = model.hook_dict[f"blocks.1.attn.{point}"]
        shown.register_forward_hook(lambda _, given, x, flat=flat: flat(x.flatten(2)).view_as(x))
        monkeypatch.setitem(model.hook_dict, f"blocks.1.attn.{point}", flat)
    assert [layer.n_key_value_heads for layer in inspect_model(model, inputs).layers] == [2, 5]


def test_the_state_of_a_model_is_told_and_left(token_inputs):
    model = make_token_model().to(torch.bfloat16, print_details=False).train()
    model.add_module("dropout", torch.nn.Dropout(0.1))
    model.add_hook("blocks.0.hook_resid_pre", lambda activation, hook: None)
    found = inspect_model(model, token_inputs)
    assert (found.dtype, found.device) == ("bfloat16", "cpu")
    assert found.training
    assert found.dropout
    assert model.training
    # a bridge has two names for a hook point
    assert [len(p.fwd_hooks) for p in set(model.hook_dict.values())].count(1) == 1
    assert found.layers[0].pattern == "softmax"


def test_it_is_shown_as_a_table_and_written_as_json(token_model, token_inputs):
    found = inspect_model(token_model, token_inputs)
    frame = found.to_frame()
    assert list(frame["layer"]) == [0, 1]
    assert list(frame["heads"]) == [4, 4]
    assert list(frame["missing"]) == [", ".join(layer.missing) for layer in found.layers]
    assert list(frame["edits_lost"]) == [", ".join(layer.edits_lost) for layer in found.layers]
    assert KIND in found._repr_html_()
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


@pytest.mark.parametrize("name", zoo.some_families(HOSTED))
def test_the_example_is_long_enough_to_show_a_window(bridge_of, name):
    # a window of 4; all take 32 tokens, and Bloom any number
    found = inspect_model(bridge_of(name), example_input(bridge_of(name)))
    assert tuple(layer.attends for layer in found.layers) == ATTENDS.get(name, (GLOBAL, GLOBAL))


def mistral_with(window, folder):
    changes = {"sliding_window": window or None, "max_position_embeddings": 40}
    return load_any(zoo.save("mistral", folder, **changes)).model


def hooked_transformer_with(window, folder):
    return make_token_model(n_ctx=40, **({**LOCAL, "window_size": window} if window else {}))


@pytest.mark.parametrize(
    "make", [mistral_with, pytest.param(hooked_transformer_with, marks=needs_hooked_transformer)]
)
@pytest.mark.parametrize(("window", "length"), [(3, 16), (20, 22), (50, 40), (0, 16)])
def test_the_length_of_the_example(tmp_path, make, window, length):
    model = make(window, tmp_path)
    assert local_window(model) == window
    assert example_input(model).shape == (4, length)
    if window < 40:
        expected = f"local({window})" if window else "causal"
        assert inspect_model(model).layers[0].attends == expected


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
        layer_count(torch.nn.Linear(2, 2))
    with pytest.raises(InfoFlowError, match="Linear does not run on an example"):
        inspect_model(torch.nn.Linear(2, 2), token_inputs)
    with pytest.raises(InfoFlowError, match="example_input has token ids from"):
        inspect_model(token_model, token_inputs + 10)
    with torch.no_grad():
        token_model.embed.W_E.fill_(torch.nan)
    with pytest.raises(InfoFlowError, match="output holds NaN"):
        inspect_model(token_model, token_inputs)


def test_a_name_that_is_given_later_is_a_hook_point_too():
    """The table is kept as long as what it is made of is the same."""
    model = zoo.bridge("gpt2")
    assert "hook_mine" not in hook_points(model)
    model.hook_aliases = {**model.hook_aliases, "hook_mine": "blocks.0.hook_in"}
    assert hook_points(model)["hook_mine"] is hook_points(model)["blocks.0.hook_in"]
