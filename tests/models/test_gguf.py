"""Models of llama.cpp: a file each, whose weights and tokenizer are those that were written."""

import sys

import gguf
import numpy as np
import pytest
import torch
import transformers

from infoflow_lens import InfoFlowError, PositionsProbe, load_any, probe, run_probes
from infoflow_lens.foundation.errors import InfoFlowWarning
from infoflow_lens.models import pretrained
from infoflow_lens.models.configs import read_shape
from infoflow_lens.models.hooked import HAS_HOOKED_TRANSFORMER
from infoflow_lens.models.named import NamedModel
from tests.reference import families, zoo

WORDS = ["<s>", "a", "b", "c", "ab", *(chr(0x100 + i) for i in range(zoo.N_VOCAB - 5))]


def for_rotation(weight, n_heads):
    """The order of llama.cpp, which rotates neighbours, where transformers rotates halves."""
    return weight.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def write(path, model, *, n_layers=None, tokenizer=True, rounded=False, head=None):
    """What llama.cpp's converter writes of a Llama or Gemma 2; or with parts in eight bits.

    Args:
        path, model, n_layers, tokenizer, rounded: what is written where.
        head: of more fields, floats and words by their names; an array is a tensor.
    """
    config, n_heads = model.config, model.config.num_attention_heads
    is_gemma = config.model_type == "gemma2"
    writer = gguf.GGUFWriter(path, config.model_type)
    for name, value in (head or {}).items():
        if isinstance(value, str):
            writer.add_string(name, value)
        elif np.ndim(value):
            writer.add_tensor(name, value)
        else:
            writer.add_float32(name, value)
    if is_gemma:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
        writer.add_sliding_window(config.sliding_window)
        writer.add_key_length(config.head_dim)
    writer.add_name("tiny")
    writer.add_block_count(n_layers or config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(n_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if not is_gemma:
        writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(WORDS)
        writer.add_token_types([3, *[1] * (len(WORDS) - 1)])
        if tokenizer != "without merges":
            writer.add_token_merges(["a b"])
        writer.add_bos_token_id(0)
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    parts = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    if is_gemma:  # the unembedding is the embedding
        names.pop("output")
        parts |= {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
        }  # fmt: skip
    for layer in range(config.num_hidden_layers):
        for theirs, ours in parts.items():
            names[f"blk.{layer}.{theirs}"] = f"model.layers.{layer}.{ours}"
    state = model.state_dict()
    for theirs, ours in names.items():
        weight = state[f"{ours}.weight"]
        if is_gemma and theirs.endswith("norm"):
            weight = weight + 1
        if not is_gemma and theirs.endswith(("attn_q", "attn_k")):
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


def write_plain(path, model, head):
    """A file of a family whose weights llama.cpp leaves as they are, but for the names."""
    config, kind = model.config, model.config.model_type.removesuffix("_text")
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, kind)
    writer.add_name("mistral" if kind == "llama" else "tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", 4 * config.hidden_size))
    writer.add_head_count(config.num_attention_heads)
    if hasattr(config, "num_key_value_heads"):
        writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_vocab_size(config.vocab_size)
    for name, value in head.items():
        add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}
        add[type(value)](f"{kind}.{name}", value)
    for name, weight in model.state_dict().items():
        base, _, end = name.rpartition(".")
        if kind in ("nemotron", "gemma3") and "norm" in name and end == "weight":
            weight = weight + 1
        if kind == "gpt2" and ".h." in name and weight.ndim == 2:
            weight = weight.T.contiguous()
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            writer.add_tensor(f"{names.get_name(base)}.{end}", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("kind", "head", "settings"),
    [
        ("starcoder2", {"rope.freq_base": 1e6}, {"rope_theta": 1e6}),  # as all files of it have it
        ("stablelm", {"rope.dimension_count": 8}, {"partial_rotary_factor": 1.0}),
        ("stablelm", {"rope.freq_base": 1e2, "rope.dimension_count": 4},
         {"rope_theta": 1e2, "partial_rotary_factor": 0.5}),
        ("nemotron", {"attention.layer_norm_epsilon": 1e-2}, {"norm_eps": 1e-2}),
        ("phi3", {"rope.dimension_count": 6}, {"partial_rotary_factor": 0.75}),  # as Phi-4-mini
    ],
)  # fmt: skip
def test_positions_and_norms_are_those_of_the_file(kind, head, settings, tmp_path):
    """Transformers takes them from its own defaults, in silence."""
    own = {name: value for name, value in settings.items() if name == "norm_eps"}
    rope = {name: value for name, value in settings.items() if name != "norm_eps"}
    usual = {
        "nemotron": {"partial_rotary_factor": 0.5},
        "stablelm": {"partial_rotary_factor": 0.25},
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, **usual.get(kind, {}), **rope}
    large = {"phi3": 32064}  # of which transformers takes a token for padding
    alone = families.build(
        kind, rope_parameters=rope, vocab_size=large.get(kind, 101), sliding_window=None, **own
    )
    found, ids = load_any(write_plain(tmp_path / "tiny.gguf", alone, head)).model, zoo.tokens(3, 9)
    with torch.no_grad():
        torch.testing.assert_close(found(ids), alone(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("gpt2", {}),  # of other than 1024 positions
        ("qwen3", {"attention.key_length": 8}),  # of heads that are not 128 wide
    ],
)
def test_sizes_are_those_of_the_file(kind, head, tmp_path):
    """Transformers took its own, and the weights did not fit."""
    alone, ids = families.build(kind), zoo.tokens(3, 9)
    file = write_plain(tmp_path / "tiny.gguf", alone, head)
    with torch.no_grad():
        found = load_any(file).model(ids)
        torch.testing.assert_close(found, alone(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_27b", [False, True])
def test_positions_and_scales_of_gemma_3_are_those_of_the_file(is_27b, tmp_path, monkeypatch):
    """Both were those of the usual sizes, in silence."""
    monkeypatch.setitem(pretrained._LAYERS_OF_27B, "gemma3", 6 if is_27b else 62)
    plain = {"rope_type": "default", "rope_theta": 1e4}
    # as of 4B and all larger ones, where the positions of windows are not scaled
    full = (
        {"rope_theta": 1e2, "rope_type": "linear", "factor": 8.0} if is_27b else {"rope_theta": 1e2}
    )
    config = transformers.Gemma3TextConfig(
        vocab_size=101, hidden_size=64, intermediate_size=48, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=4,
        max_position_embeddings=64, query_pre_attn_scalar=16 if is_27b else 8,
        rope_parameters={"full_attention": plain | full, "sliding_attention": plain},
    )  # fmt: skip
    torch.manual_seed(0)
    alone, ids = transformers.Gemma3ForCausalLM(config).eval(), zoo.tokens(3, 9)
    for parameter in alone.parameters():
        parameter.requires_grad_(False).mul_(4 if parameter.ndim > 1 else 1)
    head = {
        "rope.freq_base": 1e2, "attention.key_length": 8, "attention.sliding_window": 4,
        "attention.layer_norm_rms_epsilon": 1e-6,
        **({"rope.scaling.type": "linear", "rope.scaling.factor": 8.0} if is_27b else {}),
    }  # fmt: skip
    found = load_any(write_plain(tmp_path / "tiny.gguf", alone, head)).model
    with torch.no_grad():
        torch.testing.assert_close(found(ids), alone(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_file_of_llama_that_is_named_mistral_has_no_window(tmp_path):
    """Transformers gave it that of its config of Mistral, 4096."""
    path = write_plain(tmp_path / "tiny.gguf", zoo.build("llama"), {"rope.dimension_count": 4})
    config = pretrained.config_of_gguf(path)
    assert (config.model_type, config.sliding_window) == ("mistral", None)


@pytest.mark.parametrize("is_27b", [False, True])
def test_caps_and_scales_of_gemma_2_are_those_of_the_file(is_27b, tmp_path, monkeypatch):
    """They were 50, 30 and 256 in silence; llama.cpp knows the scale of 27B by its layers."""
    monkeypatch.setitem(pretrained._LAYERS_OF_27B, "gemma2", zoo.N_LAYERS if is_27b else 46)
    alone, ids = zoo.build("gemma2"), zoo.tokens(3, 9)
    config = alone.config
    config._attn_implementation, config.head_dim = "eager", 2 * zoo.D_HEAD
    config.attn_logit_softcapping, config.final_logit_softcapping = 1.5, 2.5
    width = config.hidden_size // config.num_attention_heads
    config.query_pre_attn_scalar = width if is_27b else config.head_dim
    torch.manual_seed(0)
    alone = type(alone)(config).eval()
    found = load_any(write(tmp_path / "tiny.gguf", alone)).model
    with torch.no_grad():
        torch.testing.assert_close(found(ids), alone(ids).logits, rtol=1e-4, atol=1e-4)


SCALED = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALED)
def test_positions_that_a_file_scales_are_those_of_transformers(kind, tmp_path):
    """As in Llama 3.1 and its like, and in Llama 2 for longer texts; such files were refused."""
    config = zoo.build("llama").config
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e8}
    plain = transformers.LlamaForCausalLM(config).model.rotary_emb.inv_freq
    config.rope_parameters = {"rope_type": kind, "rope_theta": 1e8, **SCALED[kind]}
    torch.manual_seed(0)
    alone, ids = transformers.LlamaForCausalLM(config).eval(), zoo.tokens(3, 9)
    scaled = alone.model.rotary_emb.inv_freq
    head = {"llama.rope.scaling.factor": 4.0}
    if kind == "llama3":
        head = {"rope_freqs.weight": (plain / scaled).numpy()}
    found = load_any(write(tmp_path / "tiny.gguf", alone, head=head)).model
    torch.testing.assert_close(found.original_model.model.rotary_emb.inv_freq, scaled)
    assert not scaled.allclose(plain, rtol=0.1)
    with torch.no_grad():
        torch.testing.assert_close(found(ids), alone(ids).logits, rtol=1e-4, atol=1e-5)


def test_positions_that_a_file_scales_otherwise_are_refused(tmp_path):
    """Transformers reads none of it, and attention was another."""
    third = np.linspace(1, 3, zoo.D_HEAD // 2, dtype=np.float32)
    yarn = {"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.type": "yarn"}
    for head in (yarn, {"rope_freqs.weight": third}):
        file = write(tmp_path / "tiny.gguf", zoo.build("llama"), head=head)
        with pytest.raises(
            InfoFlowError, match=rf"rotary positions \({next(iter(head))}\) neither"
        ):
            load_any(file)
    write(file, zoo.build("llama"), head={"llama.rope.scaling.factor": 1.0})
    assert load_any(file).source == "file"


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


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path):
    """The model had none, without a word why."""
    file = write(tmp_path / "tiny.gguf", zoo.build("llama"), tokenizer="without merges")
    with pytest.warns(InfoFlowWarning, match=r"cannot be read \(tiny.gguf: .*token ids alone"):
        assert load_any(file).tokenizer is None


def test_what_cannot_be_read_is_named(file, tmp_path, monkeypatch):
    if HAS_HOOKED_TRANSFORMER:
        with pytest.raises(InfoFlowError, match=r"GGUF file.*expected backend 'auto'"):
            load_any(file, backend="hooked")
    with pytest.raises(InfoFlowError, match="is missing: expected a folder with a model"):
        load_any("not-there.gguf")
    wide = families.build("gpt2", n_inner=48)
    # transformers 5.20 takes weights of another shape, and no pass runs then
    refusal = r"a kind that transformers reads from such files; give|does not run on an example"
    with pytest.raises(InfoFlowError, match=refusal):
        load_any(write_plain(tmp_path / "wide.gguf", wide, {}))
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
