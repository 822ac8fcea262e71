"""What the theory reads off models and configs."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from transformer_lens.config import TransformerBridgeConfig
from transformers import BertConfig, GPT2Config, LlamaConfig, LlavaConfig, MistralConfig, T5Config

from infoflow_lens import Architecture, InfoFlowError, build_model, load_task, save_model
from infoflow_lens.models.configs import read_shape
from infoflow_lens.models.host import build_token_model
from infoflow_lens.tasks import Target
from infoflow_lens.theory.comparison import Component
from infoflow_lens.theory.estimate import estimate
from infoflow_lens.theory.shapes import ModelShape, shape_of
from infoflow_lens.theory.survey import survey, survey_cases
from tests.conftest import make_token_model
from tests.versions import needs_hooked_transformer

SIZES = {"n_layers": 2, "n_heads": 4, "d_model": 32, "d_head": 8, "n_ctx": 24, "d_vocab": 50}


def hooked(**settings):
    return TransformerBridgeConfig(**SIZES, act_fn="gelu", **settings)


def test_a_transformer_lens_config_is_asked():
    shape = shape_of(hooked())
    assert (shape.n_heads, shape.d_model, shape.n_tokens) == ((4, 4), (32, 32), 24)
    assert shape.causal
    assert shape.positional
    assert not shape_of(hooked(attention_dir="bidirectional")).causal
    task = load_task("d_retrieval", n_tokens=16)
    assert estimate(hooked(), task).verdict == "allowed by construction"  # a TypeError before


@needs_hooked_transformer
@pytest.mark.filterwarnings("ignore:HookedTransformer is deprecated")
def test_a_hooked_transformer_is_what_its_config_is():
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(**SIZES, act_fn="gelu")
    for found in (shape_of(HookedTransformer(config)), shape_of(config)):
        assert replace(found, source="") == replace(shape_of(hooked()), source="")


def test_a_model_is_what_its_config_is():
    assert shape_of(make_token_model()).n_heads == (4, 4)
    ours = Architecture(n_heads=(4, 1), d_model=16, d_token=3, n_tokens=9, d_encoder=8)
    shape = shape_of(build_model(ours, seed=0))
    assert shape == shape_of(ours)
    assert (shape.n_heads, shape.causal, shape.routes) == ((4, 1), False, True)


def test_hugging_face_configs():
    gpt2 = shape_of(GPT2Config(n_layer=3))
    assert (gpt2.n_heads, gpt2.d_model[0], gpt2.causal) == ((12, 12, 12), 768, True)
    llama = shape_of(LlamaConfig(num_hidden_layers=2, num_key_value_heads=8))
    assert llama.n_key_value_heads == (8, 8)
    assert "8 heads of keys and values" in llama.describe()
    assert not shape_of(BertConfig()).causal
    mistral = shape_of(MistralConfig(num_hidden_layers=2, sliding_window=16))
    assert mistral.windows == (16, 16)


def test_folders_and_names_have_the_shape_of_their_model(tmp_path):
    GPT2Config(n_layer=5).save_pretrained(tmp_path / "hf")
    assert shape_of(tmp_path / "hf").n_layers == 5
    assert read_shape(str(tmp_path / "hf" / "config.json")).n_layers == 5
    ours = Architecture(n_heads=(2, 1), d_model=8, d_token=3, n_tokens=5)
    save_model(build_model(ours, seed=0), tmp_path / "ours")
    assert read_shape(str(tmp_path / "ours")).n_heads == (2, 1)
    assert read_shape("gpt2").n_heads == (12,) * 12
    # a folder is what the model in memory is
    for name, changed in (("bare", {"d_mlp": 0}), ("cls", {"cls_is_key": True})):
        save_model(build_model(replace(ours, **changed)), tmp_path / name)
    assert not shape_of(tmp_path / "bare").has_mlp
    with pytest.raises(InfoFlowError, match="cls_is_key is True"):
        shape_of(tmp_path / "cls")


def test_local_layers_alternate(tmp_path):
    values = {
        "num_hidden_layers": 4, "num_attention_heads": 2, "hidden_size": 8, "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 99,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    shape = shape_of(tmp_path)
    assert shape.windows == (4, None, 4, None)
    assert shape.usable(50) == (False, True, False, True)
    assert shape.reach(50) == 50


def test_encoders_of_transformers_are_bidirectional():
    """ESM, RoFormer and thirty others were said to be causal; transformers' own lists are asked."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    masked = set(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    # those without CLS or softmax, and pairs of an encoder and a decoder, are refused
    refused = {"bart", "fnet", "mbart", "mvp", "perceiver"}
    for kind in sorted(masked - refused):
        assert not shape_of(CONFIG_MAPPING[kind]()).causal, kind
    assert shape_of(BertConfig(is_decoder=True)).causal
    gemma = {"num_hidden_layers": 2, "use_bidirectional_attention": True}
    assert not shape_of(CONFIG_MAPPING["gemma3_text"](**gemma)).causal


@pytest.mark.parametrize("kind", ["jamba", "qwen3_next", "recurrent_gemma", "falcon_h1"])
def test_layers_without_softmax_attention_are_refused(kind):
    """Layers of recurrences were counted as attention that sees everything."""
    from transformers import CONFIG_MAPPING

    with pytest.raises(InfoFlowError, match="softmax attention in every layer"):
        shape_of(CONFIG_MAPPING[kind]())


def test_files_are_read_as_transformers_reads_them(tmp_path):
    """A file of Gemma 3 without `layer_types` had no global layer, so that proofs were wrong."""
    values = {
        "model_type": "gemma3_text", "num_hidden_layers": 12, "sliding_window": 4,
        "sliding_window_pattern": 6,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert shape_of(tmp_path).windows == ((4,) * 5 + (None,)) * 2


def test_chunks_are_windows_that_see_no_further():
    from transformers import Llama4TextConfig

    shape = shape_of(Llama4TextConfig(num_hidden_layers=4, attention_chunk_size=16))
    assert shape.windows == (16, 16, 16, None)
    assert shape.usable(15) == (True,) * 4
    assert shape.usable(16) == (False, False, False, True)


def test_a_bidirectional_window_counts_one_side():
    """The plain model says how far a query sees."""
    from transformers import ModernBertConfig, ModernBertModel

    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 20}
    config = ModernBertConfig(
        **sizes, num_hidden_layers=1, local_attention=6, layer_types=["sliding_attention"],
        attn_implementation="eager", pad_token_id=0, bos_token_id=1, eos_token_id=2,
        cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model, ids = ModernBertModel(config).eval(), torch.arange(3, 15)[None]
    with torch.no_grad():
        rows = ids.repeat(13, 1)
        rows[torch.arange(12), torch.arange(12)] = 19
        states = model(rows).last_hidden_state[:, -1]
    sees = [source for source in range(12) if not torch.equal(states[source], states[12])]
    (window,) = shape_of(config).windows
    assert sees == list(range(12 - window, 12))


def test_what_no_window_reaches_is_excluded_for_certain():
    """Three layers that look four positions back reach twelve tokens."""
    task = load_task("d_retrieval", n_tokens=16, n_components=1)
    shape = ModelShape((4,) * 3, (32,) * 3, 16, True, causal=True, windows=(5, 5, 5))
    assert shape.reach(16) == 12
    found = estimate(shape, task)
    assert found.verdict == "excluded, proved"
    assert "only the last 12 of 16" in found.why


def test_width_of_each_layer_enters_the_exponent():
    task = load_task("intrinsic_dimension", n_tokens=64, n_components=3)
    narrow = estimate(ModelShape((3, 3), (16, 16), 64), task, verify=0)
    wide = estimate(ModelShape((3, 3), (16, 48), 64), task, verify=0)
    assert narrow.upper["law"] == 12 * 4 / 16
    assert wide.upper["law"] == max(4 * 4 / 16, 12 * 4 / 48)


def test_one_table_of_what_a_configuration_can_learn():
    tasks = [load_task(name) for name in ("d_retrieval", "kth_largest", "in_context_qa")]
    rows = survey(hooked(), survey_cases(tasks, (8, 16, 64)))
    cells = {(r["task"], r["n_tokens"], r["components"]): r["verdict"] for r in rows}
    assert cells["d_retrieval", 16, 8] == "allowed by construction"
    assert cells["kth_largest", 16, "k=8"] == "open"
    assert cells["kth_largest", 16, "k=2"] == "allowed by construction"
    assert cells["d_retrieval", 64, 2] == "not asked"  # longer than the model takes
    assert len(rows) == 6 + 6 + 1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (torch.nn.Linear(2, 2), "has no sizes"),
        ("no/such/folder", "there is no file"),
        ({"num_hidden_layers": 2}, "no heads and no width"),
        (Architecture((1,), 8, 2, 4, attention="relu"), "attention is 'relu'"),
    ],
)
def test_what_is_no_model_is_refused(model, message):
    with pytest.raises(InfoFlowError, match=message):
        shape_of(model)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2]", "holds a list.*expected an object in JSON"),
        ("{", "is no config of a model .*: expected an object in JSON"),
        ('{"num_hidden_layers": 2, "num_attention_heads": true, "hidden_size": 8}', "no heads"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InfoFlowError, match=message):
        shape_of(tmp_path)


def test_a_model_of_texts_and_pictures_is_what_its_texts_go_through(tmp_path):
    inner = MistralConfig(num_hidden_layers=2, sliding_window=None).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({"text_config": inner, "vision": {}}))
    assert shape_of(tmp_path).n_heads == (32, 32)
    outer = LlavaConfig(text_config=MistralConfig(num_hidden_layers=2, sliding_window=7))
    assert shape_of(outer).windows == (7, 7)


@pytest.mark.parametrize("name", ["Siglip", "Siglip2", "AltCLIP", "ChineseCLIP", "Flava", "Align"])
def test_encoders_of_texts_beside_pictures_read_both_ways(name):
    assert not shape_of(getattr(transformers, f"{name}Config")()).causal
    assert shape_of(transformers.CLIPConfig()).causal


@pytest.mark.skipif(
    not hasattr(GPT2Config(), "per_layer_config"), reason="this transformers has one head width"
)
def test_layers_with_heads_of_another_width_are_told_in_memory_and_in_a_folder(tmp_path):
    """Every sixth layer of Gemma 4 has heads twice as wide."""
    config = transformers.Gemma4Config()
    config.save_pretrained(tmp_path)
    expected = tuple(512 if layer % 6 == 5 else 256 for layer in range(30))
    assert shape_of(config).d_head == shape_of(tmp_path).d_head == expected


def test_a_saved_model_over_ids_has_its_positions(tmp_path):
    model = build_token_model(
        n_layers=2, n_heads=(2, 3), d_head=5, d_model=12, n_tokens=9, d_vocab=17, d_output=17
    )
    save_model(model, tmp_path)
    shape = shape_of(tmp_path)
    assert (shape.n_heads, shape.d_model, shape.n_tokens) == ((2, 3), (12, 12), 9)
    assert (shape.positional, shape.has_mlp) == (True, False)


def test_sizes_of_other_layers_and_encoders_with_decoders_are_refused():
    with pytest.raises(InfoFlowError, match="windows has 1 entries for 2 layers"):
        ModelShape((2, 2), (8, 8), 9, windows=(4,))
    with pytest.raises(InfoFlowError, match="is an encoder with a decoder"):
        shape_of(T5Config())


def test_layers_that_differ_are_told_one_by_one():
    words = ModelShape((2, 3), (8, 16), 9, windows=(4, None), n_key_value_heads=(1, 3)).describe()
    assert "heads (2, 3), E = (8, 16)" in words
    assert "1 layer local (window 4)" in words
    assert "(1, 3) heads of keys and values" in words


def test_unknown_names_are_refused():
    with pytest.raises(InfoFlowError, match="cannot be loaded"):
        read_shape("gpt22")


def test_a_target_of_ones_own_is_asked_of_any_model():
    largest = Component(1, lambda x: x[..., 0, 0], symmetric=True)
    target = Target(components=(largest,), n_tokens=12, d_token=2)
    assert estimate(GPT2Config(), target).verdict == "allowed by construction"
