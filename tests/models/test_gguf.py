"""Models of llama.cpp: a file each, whose weights and tokenizer are those that were written."""

import sys

import gguf
import numpy as np
import pytest
import torch

from infoflow_lens import InfoFlowError, PositionsProbe, load_any, probe, run_probes
from infoflow_lens.models.configs import read_shape
from infoflow_lens.models.hooked import HAS_HOOKED_TRANSFORMER
from infoflow_lens.models.named import NamedModel
from tests.reference import zoo

WORDS = ["<s>", "a", "b", "c", "ab", *(chr(0x100 + i) for i in range(zoo.N_VOCAB - 5))]


def for_rotation(weight, n_heads):
    """The order of llama.cpp, which rotates neighbours, where transformers rotates halves."""
    return weight.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def write(path, model, *, n_layers=None, tokenizer=True, rounded=False):
    """What llama.cpp's converter writes of a Llama; in float32, or with parts in eight bits."""
    config, n_heads = model.config, model.config.num_attention_heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(n_layers or config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(n_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(WORDS)
        writer.add_token_types([3, *[1] * (len(WORDS) - 1)])
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(0)
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    parts = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    for layer in range(config.num_hidden_layers):
        for theirs, ours in parts.items():
            names[f"blk.{layer}.{theirs}"] = f"model.layers.{layer}.{ours}"
    state = model.state_dict()
    for theirs, ours in names.items():
        weight = state[f"{ours}.weight"]
        if theirs.endswith(("attn_q", "attn_k")):
            q = theirs.endswith("q")
            weight = for_rotation(weight, n_heads if q else config.num_key_value_heads)
        numbers = weight.numpy().astype(np.float32)
        kind = None
        if rounded and theirs.endswith("ffn_down"):
            kind = gguf.GGMLQuantizationType.Q8_0
            numbers = gguf.quantize(numbers, kind)
        writer.add_tensor(f"{theirs}.weight", numbers, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "tiny.gguf", zoo.build("llama"))


def test_a_file_is_the_model_that_was_written(file):
    found, alone, ids = load_any(file), zoo.build("llama"), zoo.tokens(3, 9)
    assert (found.source, type(found.model)) == ("file", NamedModel)
    with torch.no_grad():
        expected = alone(ids, output_attentions=True)
        torch.testing.assert_close(found.model(ids), expected.logits, rtol=1e-4, atol=1e-5)
    (positions,) = run_probes(found.model, ids, [PositionsProbe()], progress=False)
    for ours, pattern in zip(positions.argmax, expected.attentions, strict=True):
        assert ours.equal(pattern.argmax(-1).to(ours.dtype))


def test_weights_in_eight_bits_are_the_numbers_that_they_stand_for(tmp_path):
    """Blocks of 32 are whole numbers to 127 times a scale in half precision."""
    alone, ids = zoo.build("llama"), zoo.tokens(3, 9)
    found = load_any(write(tmp_path / "tiny.gguf", alone, rounded=True)).model
    for layer in alone.model.layers:
        blocks = layer.mlp.down_proj.weight.data.unflatten(-1, (-1, 32))
        scale = blocks.abs().amax(-1, keepdim=True) / 127
        numbers = (blocks / scale).round() * scale.half().float()
        layer.mlp.down_proj.weight.data = numbers.flatten(-2)
    with torch.no_grad():
        torch.testing.assert_close(found(ids), alone(ids).logits, rtol=1e-3, atol=1e-3)
        away = (found(ids) - zoo.build("llama")(ids).logits).abs().max()
        assert away > 10 * (found(ids) - alone(ids).logits).abs().max()


def test_its_tokenizer_is_in_the_file(file):
    model = load_any(str(file), dtype="bfloat16").model
    assert model.cfg.dtype is torch.bfloat16
    assert model.to_tokens("abc")[0, -2:].tolist() == [WORDS.index("ab"), WORDS.index("c")]
    texts, settings = ["abc", "cab", "bbc"], {"probes": ("positions",), "ranks": (1,)}
    found = probe(str(file), texts, **settings, progress=False)
    assert found.positions.n_sequences == 3


def test_its_shape_is_read_without_its_weights(file):
    assert read_shape(str(file)).n_heads == (zoo.N_HEADS,) * zoo.N_LAYERS


def test_a_file_without_a_tokenizer_has_none(tmp_path):
    file = write(tmp_path / "tiny.gguf", zoo.build("llama"), tokenizer=False)
    assert load_any(file).tokenizer is None


def test_what_cannot_be_read_is_named(file, tmp_path, monkeypatch):
    if HAS_HOOKED_TRANSFORMER:
        with pytest.raises(InfoFlowError, match=r"GGUF file.*expected backend 'auto'"):
            load_any(file, backend="hooked")
    with pytest.raises(InfoFlowError, match="is missing: expected a folder with a model"):
        load_any("not-there.gguf")
    large = write(tmp_path / "large.gguf", zoo.build("llama"), n_layers=10**6)
    with pytest.raises(InfoFlowError, match=r"the head of .* says num_hidden_layers 1000000"):
        load_any(large)
    for end in (0, 3, 200, file.stat().st_size // 2):
        (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:end])
        with pytest.raises(InfoFlowError, match=r"cut.gguf' cannot be (read|loaded)"):
            load_any(tmp_path / "cut.gguf")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InfoFlowError, match=r"an adapter .* lies beside"):
        load_any(file)
    (tmp_path / "adapter_config.json").unlink()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InfoFlowError, match=r'pip install "infoflow-lens\[gguf\]"'):
        load_any(file)
