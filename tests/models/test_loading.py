"""Models by name or folder, saved in the real formats and loaded by the real code, offline."""

import json
import os
import random
import sys
import threading
import warnings
from types import SimpleNamespace
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from infoflow_lens import InfoFlowError, InfoFlowWarning, flow, open_model
from infoflow_lens.models.hooked import HAS_HOOKED_TRANSFORMER
from infoflow_lens.models.host import build_model, save_model
from infoflow_lens.models.loading import Backend, load_any
from infoflow_lens.models.named import NamedModel
from infoflow_lens.models.pretrained import find_class, without_trace
from infoflow_lens.probing.config import ProbingConfig, SurveyConfig
from tests.conftest import make_token_model, some_of
from tests.processes import started
from tests.reference import families, zoo
from tests.versions import needs_hooked_transformer, needs_version_4

TOKENS = zoo.tokens(3, 9)
# for which TransformerLens 3 would run Python from the hub
WITH_CODE = ("openai/gpt-oss-20b",)
# official names of models of many architectures, and what stands for them in the cache
OFFICIAL = {
    "gpt2": "gpt2",
    "facebook/opt-125m": "opt",
    "Qwen/Qwen2-0.5B": "qwen2",
    "EleutherAI/gpt-neo-125M": "gpt_neo",
    "EleutherAI/pythia-14m": "gpt_neox",
    "EleutherAI/gpt-j-6B": "gptj",
    "bigscience/bloom-560m": "bloom",
    "mistralai/Mistral-7B-v0.1": "mistral",
    "openai/gpt-oss-20b": "gpt_oss",
}


def plain(name, attention=None, **changes):
    """Logits of transformers alone, with the attention that it chooses; eager for soft caps."""
    attention = "eager" if name == "gemma2" else attention
    with torch.no_grad():
        return zoo.build(name, attention=attention, **changes)(TOKENS).logits


def logits(model):
    with torch.no_grad():
        return model(TOKENS)


# What is loaded is what was saved


def test_a_soft_cap_of_scores_is_in_effect(tmp_path):
    """Fused attention of transformers 5.20, which a folder has by default there, left it out."""
    cap = {"attn_logit_softcapping": 0.3}
    expected = plain("gemma2", **cap)
    assert logits(load_any(zoo.save("gemma2", tmp_path / "x", **cap)).model).equal(expected)
    assert (plain("gemma2") - expected).abs().max() > 0.1


@pytest.mark.parametrize("name", zoo.some_families(zoo.FAMILIES))
def test_a_folder_of_hugging_face_computes_what_transformers_computes(name, tmp_path):
    loaded = load_any(zoo.save(name, tmp_path / name))
    assert (type(loaded.model), loaded.source) == (NamedModel, "folder")
    assert type(loaded.model.original_model).__name__ == zoo.ARCHITECTURES[name][1]
    assert logits(loaded.model).equal(plain(name))
    if name not in zoo.WITHOUT_TOKENIZER:
        assert loaded.tokenizer("w5 w7")["input_ids"][-2:] == [5, 7]
    assert not loaded.model.training


def test_weights_in_several_files_are_those_of_one(tmp_path):
    zoo.build("gpt2").save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert not (tmp_path / "model.safetensors").exists()
    found = logits(load_any(tmp_path).model)
    torch.testing.assert_close(found, plain("gpt2"), rtol=1e-4, atol=1e-4)


def test_twenty_families_are_known():
    assert len(zoo.FAMILIES) >= 20


def test_padded_batches_of_openai_gpt_keep_the_causal_mask(tmp_path):
    """Its bridge lost it."""
    model = families.build("openai-gpt")
    model.save_pretrained(tmp_path)
    ids = families.tokens()
    mask = families.masks(ids)["right"]["attention_mask"]
    found = load_any(tmp_path).model(ids, attention_mask=mask)
    assert found.equal(model(ids, attention_mask=mask).logits)


def narrow(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Attention of a user's own: each query sees itself and the key before."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    near = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril().triu(-1)
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~near, -torch.inf)
    weights = scores.softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


@pytest.mark.parametrize("name", ["narrow", "sdpa"])
def test_attention_of_ones_own_is_what_a_flow_shows(name, monkeypatch):
    """Under a name of its own, or in the place of another: eager attention stood in for it."""
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(functions._local_mapping, name, narrow)
    model = zoo.build("llama")
    model.set_attn_implementation(name)
    ids = zoo.tokens(1, 7)
    found = flow(model, ids, -1, influence="exact", progress=False)
    sees = torch.ones(7, 7, dtype=torch.bool).tril().triu(-1)
    assert all(torch.equal(layer[0] > -torch.inf, sees.expand_as(layer[0]))
               for layer in found.attention.scores)  # fmt: skip
    influence = found.influence.full()[:, 0, 6]
    for layer, of_token in enumerate(influence):
        assert not of_token[: 6 - (layer + 1)].any()
        assert (of_token[6 - (layer + 1) : 6] > 0).all()
    assert model.config._attn_implementation == name


@pytest.mark.parametrize("value", ["kernels-community/flash-attn", "flex_attention", "eager"])
@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_no_file_names_the_code_of_attention(key, value, tmp_path, monkeypatch):
    """Transformers would fetch and run it; fused attention, or eager, is its own."""
    asked, own = [], transformers.PreTrainedModel._check_and_adjust_attn_implementation
    monkeypatch.setattr(
        transformers.PreTrainedModel,
        "_check_and_adjust_attn_implementation",
        lambda model, name, *args, **kwargs: (
            asked.append(name) or own(model, name, *args, **kwargs)
        ),
    )
    folder = zoo.save("llama", tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    used = load_any(folder).model.original_model.config._attn_implementation
    assert used == ("eager" if value == "eager" else "sdpa")
    assert {*asked} <= {None, "eager", "sdpa"}


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("llama", "model.layers.1.self_attn.q_proj.weight"),
        ("gpt2", "transformer.h.0.attn.c_attn.weight"),
        ("bert", "bert.encoder.layer.0.attention.self.value.bias"),
    ],
)
def test_missing_weights_are_no_random_ones(name, weight, tmp_path):
    folder = zoo.save(name, tmp_path / name)
    state = load_file(folder / "model.safetensors")
    assert weight in state
    del state[weight]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InfoFlowError, match=rf"lacks weights \({weight}\), which would be random"):
        load_any(folder)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_weights_of_a_pooler_may_be_missing_where_nothing_reads_it(kind, tmp_path):
    """As of encoders that were trained on masked words; a classifier reads its pooler."""
    model = families.build(kind, "sdpa", auto=("AutoModel",))
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    kept = {name: weight for name, weight in state.items() if "pooler" not in name}
    assert len(kept) == len(state) - 2
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load_any(tmp_path)
    assert loaded.description.endswith("without weights of its pooler, which are not read")
    ids = families.tokens()
    with torch.no_grad():
        assert loaded.model(ids).equal(model(ids).last_hidden_state)
    classifier = transformers.BertForSequenceClassification(zoo.build("bert").config)
    classifier.save_pretrained(tmp_path / "other")
    state = load_file(tmp_path / "other" / "model.safetensors")
    del state["bert.pooler.dense.weight"]
    save_file(state, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InfoFlowError, match=r"lacks weights \(bert.pooler.dense.weight\)"):
        load_any(tmp_path / "other")


@pytest.mark.parametrize(
    ("official", "name"), some_of(OFFICIAL.items(), *list(OFFICIAL.items())[:4])
)
def test_an_official_name_computes_what_transformers_computes(official, name, cache):
    zoo.save_in_cache(name, official, cache)
    loaded = load_any(official)
    assert (type(loaded.model), loaded.source) == (NamedModel, "name")
    assert logits(loaded.model).equal(plain(name))
    if name not in zoo.WITHOUT_TOKENIZER:
        assert loaded.tokenizer("w5 w7")["input_ids"][-2:] == [5, 7]
    assert not loaded.model.training


def test_weights_of_official_models_are_as_trained(cache):
    zoo.save_in_cache("gpt2", "gpt2", cache)
    found, trained = load_any("gpt2").model.original_model, zoo.build("gpt2")
    expected = trained.state_dict()
    assert all(torch.equal(one, expected[name]) for name, one in found.state_dict().items())
    trained = trained.transformer.h[1]
    if HAS_HOOKED_TRANSFORMER:
        hooked = load_any("gpt2", backend="hooked").model.blocks[1]
        assert torch.equal(hooked.ln1.w, trained.ln_1.weight)
        assert torch.equal(hooked.mlp.W_out, trained.mlp.c_proj.weight)


@needs_hooked_transformer
@pytest.mark.parametrize(("official", "name"), list(OFFICIAL.items())[:4])
def test_a_hooked_transformer_is_had_where_it_is_asked_for(official, name, cache):
    zoo.save_in_cache(name, official, cache)
    loaded = load_any(official, backend="hooked")
    assert (type(loaded.model).__name__, loaded.source) == ("HookedTransformer", "name")
    torch.testing.assert_close(logits(loaded.model), plain(name), rtol=1e-4, atol=1e-4)
    assert not loaded.model.training


def test_the_backend_that_is_gone_says_what_to_do():
    with pytest.raises(InfoFlowError, match=r"was removed.*TransformerBridge\.boot_transformers\("):
        load_any("gpt2", backend="bridge")


def test_probe_and_survey_offer_the_backends_that_there_are():
    for config in (ProbingConfig, SurveyConfig):
        assert get_args(get_type_hints(config)["backend"]) == get_args(Backend)


def test_an_alias_stands_for_its_official_name(cache):
    zoo.save_in_cache("gpt2", "gpt2", cache)
    torch.testing.assert_close(
        logits(load_any("gpt2-small").model), plain("gpt2"), rtol=1e-4, atol=1e-4
    )


def test_other_models_of_the_hub_are_opened(cache):
    zoo.save_in_cache("llama", "someone/their-llama", cache)
    assert logits(load_any("someone/their-llama").model).equal(plain("llama"))


def test_encoders_are_opened_although_hooked_transformer_would_take_their_weights(cache):
    zoo.save_in_cache("bert", "google-bert/bert-base-cased", cache)
    assert logits(load_any("bert-base-cased").model).equal(plain("bert"))
    if HAS_HOOKED_TRANSFORMER:
        with pytest.raises(InfoFlowError, match=r"no decoder of tokens.*expected backend 'auto'"):
            load_any("bert-base-cased", backend="hooked")


@needs_version_4
@pytest.mark.parametrize("name", ["gpt2", "bert-base-cased", "gtp2"])
def test_version_4_has_no_backend_hooked(name, cache):
    message = r"transformer-lens 4\S* has no HookedTransformer: expected backend 'auto', or trans"
    with pytest.raises(InfoFlowError, match=message):
        load_any(name, backend="hooked")


@needs_version_4
def test_the_old_format_has_a_native_bridge_in_version_4(cache, monkeypatch):
    """Neel Nanda's models, in TransformerLens's own format; here one layer of random weights."""
    import huggingface_hub

    sizes = {"d_model": 8, "n_layers": 1, "d_head": 4, "n_heads": 2, "n_ctx": 9, "d_vocab": 50}
    config = {"d_mlp": 16, "act_fn": "gelu", "attn_only": True, "normalization": None, **sizes}
    attn = "blocks.0.attn."
    shapes = {"embed.W_E": (50, 8), "pos_embed.W_pos": (9, 8), "unembed.W_U": (8, 50)}
    shapes |= {"unembed.b_U": (50,), f"{attn}b_O": (8,), f"{attn}W_O": (2, 4, 8)}
    for part in "QKV":
        shapes |= {f"{attn}W_{part}": (2, 8, 4), f"{attn}b_{part}": (2, 4)}
    generator = torch.Generator().manual_seed(3)
    state = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    snapshot = zoo.in_cache("NeelNanda/Attn_Only_1L512W_C4_Code", cache)
    (snapshot / "config.json").write_text(json.dumps(config))
    torch.save(state, snapshot / "model_final.pth")
    monkeypatch.setattr(
        huggingface_hub.HfApi, "list_repo_files", lambda self, name: ["model_final.pth"]
    )
    loaded = load_any("attn-only-1l")
    resid = state["embed.W_E"][TOKENS] + state["pos_embed.W_pos"]
    q, k, v = (
        torch.einsum("bpm,hmd->bhpd", resid, state[f"{attn}W_{part}"])
        + state[f"{attn}b_{part}"][:, None]
        for part in "QKV"
    )
    future = torch.ones(9, 9).triu(1).bool()
    pattern = (q @ k.mT / 2).masked_fill(future, -torch.inf).softmax(-1)
    resid = resid + torch.einsum("bhpd,hdm->bpm", pattern @ v, state[f"{attn}W_O"])
    expected = (resid + state[f"{attn}b_O"]) @ state["unembed.W_U"] + state["unembed.b_U"]
    torch.testing.assert_close(logits(loaded.model), expected, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_of_ours(architecture, inputs, tmp_path):
    model = build_model(architecture, seed=5)
    save_model(model, tmp_path / "ours")
    loaded = load_any(tmp_path / "ours")
    assert (loaded.source, loaded.tokenizer) == ("checkpoint", None)
    assert torch.equal(loaded.model(inputs), model(inputs))
    assert "over vector tokens" in loaded.description


# Options


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_dtype_of_folders_names_and_checkpoints(dtype, cache, architecture, tmp_path):
    zoo.save_in_cache("gpt2", "gpt2", cache)
    save_model(build_model(architecture), tmp_path / "ours")
    for each in ("gpt2", zoo.save("llama", tmp_path / "llama"), tmp_path / "ours"):
        model = load_any(each, dtype=dtype).model
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_checkpoint_keeps_the_dtype_that_it_was_saved_in(architecture, tmp_path):
    model = build_model(architecture).to(torch.float64)
    save_model(model, tmp_path)
    assert next(load_any(tmp_path).model.parameters()).dtype == torch.float64


@pytest.mark.parametrize("name", some_of(zoo.NAMES, "gpt2", "qwen2", "llama"))
def test_a_missing_tokenizer_is_no_error(name, tmp_path):
    # of some architectures transformers would make a tokenizer without words
    loaded = load_any(zoo.save(name, tmp_path / name, with_tokenizer=False))
    assert loaded.tokenizer is None
    assert loaded.model.tokenizer is None
    assert "no tokenizer" in loaded.description
    torch.testing.assert_close(logits(loaded.model), plain(name), rtol=1e-4, atol=1e-4)


def test_a_missing_tokenizer_of_an_official_name_is_no_error(cache):
    zoo.save_in_cache("gpt2", "gpt2", cache, with_tokenizer=False)
    loaded = load_any("gpt2")
    assert loaded.tokenizer is None
    torch.testing.assert_close(logits(loaded.model), plain("gpt2"), rtol=1e-4, atol=1e-4)


def test_nothing_is_left_behind(cache, tmp_path, capsys):
    zoo.save_in_cache("gpt2", "gpt2", cache)
    folder = zoo.save("llama", tmp_path / "llama")
    capsys.readouterr()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    filters, default = list(warnings.filters), torch.get_default_dtype()
    gradients = torch.is_grad_enabled()
    for each in ("gpt2", folder):
        load_any(each, dtype="bfloat16")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # noqa: NPY002
    assert warnings.filters == filters
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == (default, gradients)
    assert capsys.readouterr().out == ""  # stdout belongs to the caller


def test_threads_that_load_at_once_leave_stdout_and_filters_as_found():
    before, filters = sys.stdout, list(warnings.filters)
    first_is_out = threading.Event()

    def second():
        with without_trace():
            first_is_out.wait(10)

    with without_trace():
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.2)
    first_is_out.set()
    thread.join()
    assert (sys.stdout, warnings.filters) == (before, filters)


# Bad input


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "name is empty"),
        ("  ", "name is empty"),
        ("gtp2", "'gtp2' is no official name .*did you mean gpt2"),
        ("pythia-70n", "did you mean EleutherAI/pythia-70m"),
        ("zzzzzzzzzzzzzzzz", "no official name of TransformerLens; expected an official name"),
        ("./nowhere", "'nowhere' is missing: expected a folder"),
        ("a/b/c", "'a/b/c' is missing: expected a folder"),
    ],
)
def test_names_that_stand_for_nothing(name, message, cache):
    with pytest.raises(InfoFlowError, match=message):
        load_any(name)


@pytest.mark.parametrize("name", ["gpt2", "google-bert/bert-base-cased", "someone/their-model"])
def test_without_a_network_and_a_cached_copy_a_local_folder_is_asked_for(name, cache):
    with pytest.raises(InfoFlowError, match=r"not in the local cache .*give a local folder"):
        load_any(name)


def test_a_misspelt_owner_and_name_is_told_the_nearest_official_one(cache):
    with pytest.raises(InfoFlowError, match=r"did you mean .*EleutherAI/pythia-70m"):
        load_any("EleutherAI/pythia-70")


def test_folders_that_are_no_models(tmp_path):
    with pytest.raises(InfoFlowError, match=r"config.json missing, architecture.json missing"):
        load_any(tmp_path)
    file = tmp_path / "notes.txt"
    file.write_text("no model")
    with pytest.raises(InfoFlowError, match="is a file"):
        load_any(file)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(InfoFlowError, match=r"no weights .*model.safetensors"):
        load_any(tmp_path)
    (tmp_path / "architecture.json").write_text("{}")
    with pytest.raises(InfoFlowError, match=r"model.safetensors missing"):
        load_any(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", "{}", r"cannot be loaded \(ValueError: Unrecognized model"),
        ("config.json", "{nope", r"is no config \(Expecting property name"),
        ("config.json", '{"model_type": "vit"}', "is of a vit: expected a model over tokens"),
        ("model.safetensors", "rubbish", r"the weights in .* cannot be read .*header too small"),
    ],
)
def test_broken_files_are_said_of_the_model(file, text, message, tmp_path):
    folder = zoo.save("gpt2", tmp_path / "gpt2")
    (folder / file).write_text(text)
    with pytest.raises(InfoFlowError, match=message):
        load_any(folder)


def test_models_of_other_kinds_are_refused(tmp_path):
    with pytest.raises(InfoFlowError, match="is an encoder with a decoder"):
        load_any(zoo.save("t5", tmp_path / "t5"))
    with pytest.raises(InfoFlowError, match="no attention was seen in MambaForCausalLM"):
        load_any(zoo.save("mamba", tmp_path / "mamba"))


def test_a_model_without_weights_is_refused():
    with pytest.raises(InfoFlowError, match="a ReLU, has no weights: expected a Transformer"):
        load_any(torch.nn.ReLU())


@pytest.mark.parametrize("error", [MemoryError, torch.cuda.OutOfMemoryError])
def test_a_model_too_large_for_memory_is_said_with_what_to_do(tmp_path, monkeypatch, error):
    def none_left(*args, **kwargs):
        raise error

    folder = zoo.save("gpt2", tmp_path / "gpt2")
    monkeypatch.setattr("infoflow_lens.models.loading.transformers_model", none_left)
    with pytest.raises(InfoFlowError, match="does not fit into memory: try dtype bfloat16"):
        load_any(folder)


def test_options_that_do_not_exist(tmp_path, architecture):
    folder = zoo.save("gpt2", tmp_path / "gpt2")
    save_model(build_model(architecture), tmp_path / "ours")
    for options, message in [
        ({"backend": "openned"}, "backend is 'openned'.*did you mean 'opened'"),
        (
            {"backend": "hooked"},
            "local folder, which HookedTransformer does not load"
            if HAS_HOOKED_TRANSFORMER
            else "has no HookedTransformer",
        ),
        ({"dtype": "bfloat"}, "dtype is 'bfloat'.*did you mean 'bfloat16'"),
        ({"dtype": torch.int8}, "dtype is 'int8': expected one of float32"),
        ({"device": "gpu"}, "device is 'gpu', which does not answer"),
        ({"device": "meta"}, "'meta' holds no numbers"),
    ]:
        with pytest.raises(InfoFlowError, match=message):
            load_any(folder, **options)
    assert load_any(tmp_path / "ours", backend="hooked").source == "checkpoint"


def test_the_zoo_is_saved_in_the_format_of_hugging_face(tmp_path):
    folder = zoo.save("llama", tmp_path / "llama")
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert {"model.safetensors", "tokenizer.json"} <= {file.name for file in folder.iterdir()}


# Models that are in memory


def test_a_model_of_transformers_in_memory_is_opened_and_left_alone():
    alone = zoo.build("gpt2")
    alone.train()
    alone.set_attn_implementation("sdpa")
    before = {name: type(module) for name, module in alone.named_modules()}
    loaded = load_any(alone, tokenizer=zoo.tokenizer())
    assert (type(loaded.model), loaded.source) == (NamedModel, "memory")
    assert loaded.model.original_model is alone
    assert loaded.model.to_tokens("w5 w7")[0].tolist() == [2, 5, 7]
    assert {name: type(module) for name, module in alone.named_modules()} == before
    assert alone.training
    assert alone.config._attn_implementation == "sdpa"
    assert not alone.transformer.h[0].attn._forward_hooks


SMALL = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 1, "moe_intermediate_size": 8, "head_dim": 4}
# Families whose models know their architecture from a file alone, and settings beyond the sizes
FROM_A_CONFIG = {
    "Arcee": {},
    "Cohere": {},
    "Falcon": {},
    "GPTBigCode": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "Gemma3": {"head_dim": 4},
    "GptOss": {"num_local_experts": 2, "sliding_window": 8, **EXPERTS},
    "Granite": {},
    "HunYuanDenseV1": {"head_dim": 4},
    "Olmo": {},
    "Olmo2": {},
    "Olmo3": {},
    "Qwen3Moe": {"num_experts": 2, **EXPERTS},
    "XGLM": {"d_model": 16, "ffn_dim": 24, "num_layers": 2, "attention_heads": 4},
}


@pytest.mark.parametrize("family", FROM_A_CONFIG)
def test_a_model_that_was_built_from_a_config_is_opened(family):
    """Its config names no architecture, and is left so."""
    transformers = pytest.importorskip("transformers")
    config = f"{family}{'Text' if family == 'Gemma3' else ''}Config"
    kind = getattr(transformers, f"{family}ForCausalLM", None)
    if kind is None:
        pytest.skip(f"the installed transformers has no {family}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        alone = kind(getattr(transformers, config)(**SMALL, **FROM_A_CONFIG[family])).eval()
    alone.set_attn_implementation("eager")
    assert alone.config.architectures is None
    expected = logits(alone).logits
    torch.testing.assert_close(logits(load_any(alone).model), expected, rtol=1e-4, atol=1e-4)
    assert alone.config.architectures is None


def test_a_class_of_ones_own_is_opened():
    from transformers import LlamaForCausalLM

    alone = zoo.build("llama")
    alone.__class__ = type("OurLlama", (LlamaForCausalLM,), {})
    alone.config.architectures = None
    torch.testing.assert_close(logits(load_any(alone).model), plain("llama"), rtol=1e-4, atol=1e-4)


def test_a_model_in_memory_that_cannot_run_is_said_by_name():
    def fail(module, given):
        raise RuntimeError("expected Float32, got Double")

    alone = zoo.build("gpt2")
    alone.register_forward_pre_hook(fail)
    with pytest.raises(
        InfoFlowError, match=r"GPT2LMHeadModel does not run .*RuntimeError: expected Float32, got D"
    ):
        load_any(alone)


def test_a_model_in_memory_needs_no_tokenizer():
    loaded = load_any(zoo.build("llama"))
    assert loaded.tokenizer is None
    torch.testing.assert_close(logits(loaded.model), plain("llama"), rtol=1e-4, atol=1e-4)


def test_a_model_in_memory_finds_the_tokenizer_of_its_folder(tmp_path):
    from transformers import AutoModelForCausalLM

    alone = AutoModelForCausalLM.from_pretrained(zoo.save("gpt2", tmp_path / "gpt2"))
    assert load_any(alone).model.to_tokens("w5 w7")[0].tolist()[-2:] == [5, 7]


@pytest.mark.parametrize("place", ["gpt2-small", "./gpt2-small", "in memory"])
def test_a_folder_called_like_another_model_is_itself(place, cache, tmp_path, monkeypatch):
    """TransformerLens takes gpt2-small for gpt2, also where both are folders."""
    from transformers import AutoModelForCausalLM

    for name in ("gpt2-small", "gpt2"):
        zoo.save("gpt2", tmp_path / name)
    other = json.loads((tmp_path / "gpt2" / "tokenizer.json").read_text())
    words = other["model"]["vocab"]
    words["w5"], words["w6"] = words["w6"], words["w5"]
    (tmp_path / "gpt2" / "tokenizer.json").write_text(json.dumps(other))
    monkeypatch.chdir(tmp_path)
    if place == "in memory":
        loaded = load_any(AutoModelForCausalLM.from_pretrained("gpt2-small"))
    else:
        loaded = load_any(place)
    assert loaded.model.to_tokens("w5 w7").tolist()[0][-2:] == [5, 7]
    assert "gpt2-small" in loaded.description
    assert load_any("gpt2").model.to_tokens("w5 w7").tolist()[0][-2:] == [6, 7]


def test_what_hosts_already_is_taken_as_it_is(model):
    loaded = load_any(model)
    assert loaded.model is model
    assert load_any(loaded) is loaded
    assert "in memory" in repr(loaded)
    assert len(repr(loaded)) < 200


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype is 'torch.bfloat16', but the .* in memory has"),
    ],
)
def test_a_model_in_memory_is_neither_moved_nor_cast(settings, message):
    with pytest.raises(InfoFlowError, match=message):
        load_any(zoo.build("gpt2"), **settings)


@pytest.mark.parametrize("kind", [zoo.build, zoo.bridge, lambda name: open_model(zoo.build(name))])
def test_what_is_in_memory_is_made_no_hooked_transformer(kind):
    with pytest.raises(InfoFlowError, match="is no HookedTransformer: expected backend 'auto'"):
        load_any(kind("gpt2"), backend="hooked")


def test_what_is_no_model_is_refused_by_name(model):
    with pytest.raises(InfoFlowError, match="Linear does not run on an example"):
        load_any(torch.nn.Linear(2, 3))
    with pytest.raises(InfoFlowError, match="the model is of type int: expected a name"):
        load_any(5)
    with pytest.raises(InfoFlowError, match=r"set it there, model\.tokenizer"):
        load_any(model, tokenizer=zoo.tokenizer())
    with pytest.raises(InfoFlowError, match="models by name or folder bring their own"):
        load_any("gpt2", tokenizer=zoo.tokenizer())


def test_a_revision_of_the_hub_is_that_revision(cache):
    """The same name holds two models: main, and a branch with another seed."""
    folder = zoo.save_in_cache("gpt2", "somebody/model", cache)
    repository = folder.parent.parent
    (repository / "refs" / "step1000").write_text("1" * 40)
    other = repository / "snapshots" / ("1" * 40)
    other.mkdir()
    zoo.save("gpt2", other, n_inner=zoo.D_MLP // 2)
    main = load_any("somebody/model@main")
    found = load_any("somebody/model@step1000")
    assert found.source == "name"
    assert "somebody/model@step1000" in found.description
    assert found.model.cfg.d_mlp == zoo.D_MLP // 2
    torch.testing.assert_close(logits(main.model), plain("gpt2"), rtol=1e-4, atol=1e-4)


def test_a_revision_that_is_not_there_is_refused_by_name(cache):
    zoo.save_in_cache("gpt2", "somebody/model", cache)
    with pytest.raises(InfoFlowError, match=r"'somebody/model@step7' .*cannot be downloaded"):
        load_any("somebody/model@step7")


# Folders from anybody

CODE = "import pathlib\npathlib.Path('ran').write_text('')\n"


def with_code(folder, where):
    """A folder of a model whose files name Python of its own."""
    zoo.save("gpt2", folder)
    (folder / "own.py").write_text(f"{CODE}class Own: pass\nclass OwnConfig: pass\n")
    names = {
        "config": ("config.json", {"AutoConfig": "own.OwnConfig"}),
        "tokenizer": ("tokenizer_config.json", {"AutoTokenizer": ["own.Own", None]}),
    }  # fmt: skip
    if where == "generation":
        (folder / "custom_generate").mkdir()
        (folder / "custom_generate" / "generate.py").write_text(CODE)
        return folder
    name, auto_map = names[where]
    values = json.loads((folder / name).read_text())
    if where == "config":
        values["model_type"] = "own"
    else:
        values["tokenizer_class"] = "Own"
    (folder / name).write_text(json.dumps({**values, "auto_map": auto_map}))
    return folder


@pytest.mark.parametrize("where", ["config", "tokenizer", "generation"])
def test_code_in_a_folder_never_runs_and_no_question_is_asked(where, tmp_path, monkeypatch):
    """It once ran after a `y` to a question that nobody could see."""
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or "y")
    folder = with_code(tmp_path / "model", where)
    if where != "config":  # a way to generate, and words for which transformers has a class
        assert load_any(folder).tokenizer is not None
    else:
        with pytest.raises(InfoFlowError, match=r"model' needs Python code of its own .*auto_map"):
            load_any(folder)
    assert asked == []
    assert not (tmp_path / "ran").exists()


def test_a_config_names_models_and_nothing_else(tmp_path):
    """`architectures` may name any attribute of transformers: what is no model is not called."""
    for name in ("pipeline", "Trainer", "AutoTokenizer", "logging", "nothing"):
        assert find_class(SimpleNamespace(architectures=[name])) is AutoModelForCausalLM
    assert find_class(SimpleNamespace(architectures=["GPT2LMHeadModel"])) is GPT2LMHeadModel


HUGE = {
    "labels": {"num_labels": 3 * 10**7},
    "fewer labels": {"num_labels": 10**6},
    "layers": {"n_layer": 9 * 10**6},
    "positions": {"n_positions": 10**7},
    "width": {"n_embd": 4 * 10**5, "n_head": 4},
    "words": {"vocab_size": 10**9},
    "inner": {"n_inner": 10**8},
}


SPOILED = [(what, weights) for what in HUGE for weights in ("safetensors", "bin")]
ALWAYS = [(what, weights) for what, weights in SPOILED if (what == "layers") == (weights == "bin")]


@pytest.mark.parametrize(("what", "weights"), some_of(SPOILED, *ALWAYS))
def test_sizes_far_above_the_weights_are_refused_before_a_model_is_made(
    what, weights, tmp_path, sizes_made
):
    """num_labels alone once took a minute and 6.6 GB; layers of a .bin were not compared."""
    folder = zoo.save("gpt2", tmp_path / "gpt2")
    if weights == "bin":
        tensors = load_file(folder / "model.safetensors")
        torch.save(tensors, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    load_any(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | HUGE[what]))
    sizes_made.clear()
    with pytest.raises(InfoFlowError, match="which the weights beside it do not hold"):
        load_any(folder)
    assert len(sizes_made) < 200
    assert sum(sizes_made) < 10**5


def test_large_numbers_that_are_no_sizes_are_let_through(tmp_path):
    folder = zoo.save("llama", tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 5 * 10**7}))
    load_any(folder)


@pytest.mark.parametrize("text", ["{", "{}", ""])
@pytest.mark.parametrize("place", ["folder", "name", "memory"])
def test_a_tokenizer_that_cannot_be_read_is_said(text, place, cache, tmp_path):
    given = folder = zoo.save("gpt2", tmp_path / "gpt2")
    if place == "name":
        given, folder = "gpt2", zoo.save_in_cache("gpt2", "gpt2", cache)
    (folder / "tokenizer.json").write_text(text)
    if place == "memory":
        given = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.warns(InfoFlowWarning, match=r"cannot be read \(tokenizer\.json: .*download the"):
        assert load_any(given).tokenizer is None


def test_a_panic_of_a_library_is_an_error(tmp_path, monkeypatch):
    """Those of Rust are no Exception, and end a command in a traceback."""

    class PanicException(BaseException):
        pass

    def gives_up(*args, **kwargs):
        raise PanicException("regex too large")

    folder = zoo.save("gpt2", tmp_path / "gpt2")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", gives_up)
    with pytest.raises(InfoFlowError, match=r"gave up: regex too large.*take another model"):
        load_any(folder)


def test_a_pipe_among_the_files_of_a_model_is_refused(tmp_path):
    folder = zoo.save("gpt2", tmp_path / "gpt2")
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(InfoFlowError, match=r"tokenizer\.json.* no regular file"):
        load_any(folder)


@pytest.mark.parametrize("name", ["../pipe.safetensors", "sub/pipe.safetensors", ".."])
def test_an_index_names_files_beside_it_alone(name, tmp_path):
    """Shards elsewhere were read unseen, and a pipe was waited for."""
    folder = zoo.save("gpt2", tmp_path / "gpt2")
    weights = folder / "model.safetensors"
    shard = weights.rename(folder / "model-00001-of-00001.safetensors")
    index = folder / "model.safetensors.index.json"
    names = dict.fromkeys(load_file(shard), shard.name)
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    load_any(folder)
    os.mkfifo(tmp_path / "pipe.safetensors")
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, name)}))
    with pytest.raises(InfoFlowError, match="which is no file beside it"):
        load_any(folder)


@needs_hooked_transformer
def test_official_names_that_would_run_code_are_no_hooked_transformer():
    with pytest.raises(InfoFlowError, match=r"would run Python from the hub.*'auto'"):
        load_any("microsoft/phi-2", backend="hooked")


def test_weights_in_the_format_before_pytorch_1_6_are_loaded(tmp_path):
    folder = zoo.save("gpt2", tmp_path / "gpt2")
    expected = logits(load_any(folder).model)
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    (folder / "model.safetensors").unlink()
    torch.testing.assert_close(logits(load_any(folder).model), expected)


def with_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_entries_that_size_nothing_may_be_large(tmp_path):
    """What a trainer wrote beside the sizes."""
    folder = zoo.save("gpt2", tmp_path / "gpt2")
    loaded = load_any(with_config(folder, trained_tokens=15 * 10**12, created=20240101000000))
    assert logits(loaded.model).equal(plain("gpt2"))


@pytest.mark.parametrize("name", ["GPTNeoForCausalLM", "LlamaForCausalLM"])
def test_a_class_that_reads_another_config_is_refused_before_it_is_made(name, tmp_path):
    """It would take the sizes of its own default, which are those of a large model."""
    folder = with_config(zoo.save("gpt2", tmp_path / "gpt2"), architectures=[name])
    with pytest.raises(InfoFlowError, match=f"name {name}, which reads another kind of config"):
        load_any(folder)


def test_a_number_that_a_file_says_is_many_counts_once(tmp_path):
    folder = zoo.save("gpt2", tmp_path / "gpt2")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    (name,) = (name for name in tensors if "wte" in name)
    width = tensors[name].shape[1]
    tensors = {k: v for k, v in tensors.items() if "lm_head" not in k}
    torch.save({**tensors, name: torch.zeros(1).expand(2**26, width)}, folder / "pytorch_model.bin")
    with_config(folder, vocab_size=2**26)
    with pytest.raises(InfoFlowError, match="which the weights beside it do not hold"):
        load_any(folder)


def test_what_transformers_logs_of_a_folder_sends_nothing_to_the_terminal(tmp_path):
    folder = zoo.save("gpt2", tmp_path / "gpt2")
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.h.0.\x1b]0;pwned\x07x"] = torch.zeros(2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with started("-m", "infoflow_lens.cli", "inspect", folder, folder=tmp_path) as said:
        assert said.wait(600) == 0
        printed, logged = said.stdout, said.stderr
    # TransformerLens 3 silences what transformers logs while it loads
    assert HAS_HOOKED_TRANSFORMER or "pwned" in logged
    assert not [mark for mark in ("\x1b]", "\x07") if mark in logged + printed]


@needs_version_4
@pytest.mark.parametrize("spoiled", ["nan", "inf", "overflow"])
def test_a_model_that_gives_nan_by_itself_is_named(spoiled, tmp_path):
    """It was said of the TransformerBridge, whose logits differed by "nan%"."""
    model = zoo.build("gpt2").eval()
    weights = model.transformer.h[0].mlp.c_fc.weight
    dtype, why = None, "transformer.h.0.mlp.c_fc.weight holds NaN or infinity"
    with torch.no_grad():
        if spoiled == "overflow":
            dtype, why = "float16", "its numbers overflow in torch.float16; .*load it in float32"
            weights.mul_(1e4)
            model.transformer.h[0].mlp.c_proj.weight.mul_(1e4)
            model = model.half()
        else:
            weights[0, 0] = float(spoiled)
    model.save_pretrained(tmp_path)
    message = f"^the GPT2LMHeadModel itself gives NaN or infinity for a few random tokens: {why}"
    for load in (
        lambda: load_any(model),
        lambda: load_any(tmp_path, dtype=dtype),
        lambda: open_model(model),
        lambda: flow(model, [[1, 2, 3]], progress=False),
    ):
        with pytest.raises(InfoFlowError, match=message) as error:
            load()
        assert "ridge" not in str(error.value)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_texts_are_what_the_tokenizer_makes_of_them(name, tmp_path):
    found = load_any(zoo.save(name, tmp_path / name))
    assert found.tokenizer("w5 w7")["input_ids"] == [2, 5, 7]
    assert found.model.to_tokens("w5 w7").tolist() == [[2, 5, 7]]
    assert found.model.to_str_tokens("w5 w7") == ["<bos>", "w5", "w7"]
    assert found.model.to_tokens("w5 w7", prepend_bos=False).tolist() == [[5, 7]]
    assert found.model.to_string(torch.tensor([[5, 7], [6, 8]])) == ["w5 w7", "w6 w8"]


def test_what_is_in_memory_is_opened_without_a_copy():
    alone = zoo.build("llama")
    found = load_any(alone, backend="opened")
    assert found.model.original_model is alone
    host = make_token_model()
    assert load_any(host, backend="opened").model.original_model is host


def test_a_model_in_memory_without_a_name_asks_no_network(monkeypatch):
    """The name of its class was taken for one of the hub, and tried again and again."""
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.file_download.get_hf_file_metadata",
        lambda *given, **_: asked.append(given),
    )
    for alone in (zoo.build("bert").bert, zoo.build("gpt2")):
        for backend in ("auto", "opened"):
            assert load_any(alone, backend=backend).tokenizer is None
    assert asked == []
