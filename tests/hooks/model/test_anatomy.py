"""Anatomies against what is written here by hand of each model, matrices against its weights."""

import copy
import threading

import pytest
import torch
from torch import nn

from infoflow_lens import InfoFlowError, open_model
from infoflow_lens.foundation.modules import part_in_eval_mode
from infoflow_lens.hooks.model.anatomy import find_anatomy
from infoflow_lens.hooks.model.parts import Norm
from tests.conftest import some_of
from tests.reference import families

EXAMPLE = {"input_ids": torch.arange(14).reshape(2, 7) % 11 + 3}
SUM = ("sum", "")

# Of block 1: its path, norms, heads of keys, whether q is rotated or scaled, where mid and mlp_out
# are, the modules of W_O and W_out; of the model: embedding, positions of its table, final norm,
# unembedding
HAND = {
    "gpt2": ("transformer.h.1", "pre", 4, False, SUM, SUM, "attn.c_proj", "mlp.c_proj",
             "transformer.wte", 64, "transformer.ln_f", "lm_head"),
    "llama": ("model.layers.1", "pre", 2, True, SUM, SUM, "self_attn.o_proj", "mlp.down_proj",
              "model.embed_tokens", None, "model.norm", "lm_head"),
    "gemma2": ("model.layers.1", "both", 2, True, SUM, SUM, "self_attn.o_proj", "mlp.down_proj",
               "model.embed_tokens", None, "model.norm", "lm_head"),
    "olmo2": ("model.layers.1", "post", 2, True, SUM, SUM, "self_attn.o_proj", "mlp.down_proj",
              "model.embed_tokens", None, "model.norm", "lm_head"),
    "bert": ("bert.encoder.layer.1", "post", 4, False,
             ("output", "bert.encoder.layer.1.attention.output.LayerNorm"), SUM,
             "attention.output.dense", "output.dense", "bert.embeddings.word_embeddings", 64,
             None, None),
    "albert": ("albert.encoder.albert_layer_groups.0.albert_layers.0", "post", 4, False,
               ("output", "albert.encoder.albert_layer_groups.0.albert_layers.0.attention."
                          "LayerNorm"), SUM, "attention.dense", "ffn_output",
               "albert.embeddings.word_embeddings", 64, None, None),
    "gptj": ("transformer.h.1", "pre", 4, True, None, ("output", "transformer.h.1.mlp"),
             "attn.out_proj", "mlp.fc_out", "transformer.wte", None, "transformer.ln_f", "lm_head"),
    "mixtral": ("model.layers.1", "pre", 2, True, SUM, SUM, "self_attn.o_proj", None,
                "model.embed_tokens", None, "model.norm", "lm_head"),
    "bitnet": ("model.layers.1", "pre", 2, True, SUM, SUM, None, "mlp.down_proj",
               "model.embed_tokens", None, "model.norm", "lm_head"),
    "opt": ("model.decoder.layers.1", "pre", 4, True, SUM, SUM, "self_attn.out_proj", "fc2",
            "model.decoder.embed_tokens", 64, "model.decoder.final_layer_norm", "lm_head"),
}  # fmt: skip


@pytest.fixture(scope="module")
def model_of():
    made = {}

    def build(kind):
        if kind not in made:
            made[kind] = families.build(kind)
        return made[kind]

    return build


def test_as_many_heads_as_tokens_are_no_streams():
    """Attentions over other lengths than that of the ids were left out, as hyper-connections."""
    model = families.build("whisper", auto=("AutoModel",))
    n_heads = model.config.encoder_attention_heads
    frames = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(0))
    example = {"input_features": frames, "decoder_input_ids": families.tokens(n_heads)}
    named = open_model(model, example=example, stack="encoder")
    assert [len(block.attentions) for block in named.anatomy.blocks] == [1, 1]


def place_of(place):
    return None if place is None else (place.kind, place.path)


@pytest.mark.parametrize("kind", some_of(list(HAND), "gpt2", "llama", "albert", "gptj"))
def test_blocks_states_and_ends_are_those_written_by_hand(model_of, kind):
    model = model_of(kind)
    found = find_anatomy(model, EXAMPLE)
    path, norms, n_kv, rotated, mid, mlp, w_o, w_out, embed, n_ctx, norm, unembed = HAND[kind]
    assert (len(found.blocks), found.d_model, found.distance) == (2, 32, 0)
    block = found.blocks[1]
    (attention,) = block.attentions
    assert (block.path, block.norms, block.axes) == (path, norms, (0, 1, 2))
    assert (attention.n_heads, attention.n_kv_heads, attention.d_head) == (4, n_kv, 8)
    assert (attention.is_rotated, attention.is_causal) == (rotated, kind not in families.ENCODERS)
    assert (place_of(block.mid), place_of(block.mlp_out)) == (mid, mlp)
    assert block.is_parallel == (kind == "gptj") == ("mid" in block.lacks)
    inner = {"output": attention.output, "mlp": block.mlp_output}
    assert [p and p.path.removeprefix(path + ".") for p in inner.values()] == [w_o, w_out]
    assert (found.start.embed, found.start.d_vocab, found.start.n_ctx) == (embed, 101, n_ctx)
    ends = found.end.norm, found.end.unembed
    assert [end and end.path for end in ends] == [norm, unembed]
    assert found.end.gives_output == (unembed is not None and kind != "gemma2")  # a soft cap


def test_an_anatomy_takes_two_forwards_and_leaves_no_trace(model_of):
    model, seen = model_of("gpt2"), []
    hook = model.register_forward_pre_hook(lambda module, args: seen.append(module.training))
    model.train()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    found = find_anatomy(model, EXAMPLE)
    assert seen == [False, False]
    assert all(m.training for m in model.modules())
    assert torch.equal(torch.get_rng_state(), before)
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert found.holds(model)
    hook.remove()
    model.eval()


def test_matrices_are_read_by_what_they_do(model_of):
    """With adapters that are unmerged, merged and switched off, and in other layouts."""
    gpt2 = model_of("gpt2")
    found = find_anatomy(gpt2, EXAMPLE).blocks[0]
    assert torch.allclose(found.attentions[0].output.weight(gpt2), gpt2.transformer.h[0].attn.c_proj.weight, atol=1e-6)  # fmt: skip  # noqa: E501
    assert torch.allclose(found.mlp_output.bias(gpt2), gpt2.transformer.h[0].mlp.c_proj.bias)

    class Adapter(nn.Module):
        """A matrix with one of low rank beside it."""

        def __init__(self, base):
            super().__init__()
            generator = torch.Generator().manual_seed(0)
            self.base, self.is_on = base, True
            self.a = nn.Parameter(torch.randn(2, base.in_features, generator=generator))
            self.b = nn.Parameter(torch.randn(base.out_features, 2, generator=generator))

        def forward(self, x):
            return self.base(x) + (x @ self.a.T @ self.b.T if self.is_on else 0)

    llama = copy.deepcopy(model_of("llama"))
    found = find_anatomy(llama, EXAMPLE)
    attention = llama.model.layers[0].self_attn
    base = attention.o_proj
    attention.o_proj = Adapter(base)
    assert not found.holds(llama)
    output = find_anatomy(llama, EXAMPLE).blocks[0].attentions[0].output
    assert output.path == "model.layers.0.self_attn.o_proj"
    full = base.weight + attention.o_proj.b @ attention.o_proj.a
    assert torch.allclose(output.weight(llama), full.T, atol=1e-5)
    attention.o_proj.is_on = False
    assert torch.allclose(output.weight(llama), base.weight.T, atol=1e-6)

    class Packed(nn.Parameter):
        """As of quantized weights, which can be multiplied by, and no more."""

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.Tensor.detach:
                raise NotImplementedError
            return super().__torch_function__(func, types, args, kwargs or {})

    expected, attention.o_proj = base.weight.T.clone(), base
    base.weight = Packed(base.weight.detach())
    assert torch.allclose(output.weight(llama), expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2"])
def test_norms_are_read_by_what_they_do(model_of, kind):
    model = model_of(kind)
    norm = find_anatomy(model, EXAMPLE).end.norm
    numbers = norm.numbers(model)
    x = 3 + torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    module = model.get_submodule(norm.path)
    scale = numbers.scale(x, module(x))
    centered = x - x.mean(-1, keepdim=True) if kind == "gpt2" else x
    assert numbers.centers == (kind == "gpt2")
    assert torch.allclose(scale, centered.square().mean(-1, keepdim=True).sqrt(), rtol=1e-4)
    assert torch.allclose(numbers.apply(x, scale) + numbers.bias, module(x), atol=1e-5)


class Layer(nn.TransformerEncoderLayer):
    def __init__(self, **settings):
        super().__init__(12, 3, 20, dropout=0.0, batch_first=True, **settings)


def test_modules_of_torch_alone():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.TransformerEncoder(Layer(norm_first=True), 2, enable_nested_tensor=False).eval()
        for parameter in model.parameters():  # so that biases are not 0
            parameter.data += 0.1 * torch.randn(parameter.shape)
    example = {"src": torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1))}
    blocks = find_anatomy(model, example).blocks
    assert [block.path for block in blocks] == ["layers.0", "layers.1"]
    weight = blocks[0].attentions[0].output.weight(model)
    assert torch.allclose(weight, model.layers[0].self_attn.out_proj.weight.T, atol=1e-6)
    assert blocks[0].norms == "pre"
    assert blocks[0].adds


def test_a_model_with_several_stacks_is_asked_which():
    model = families.build("t5", auto=["AutoModel"])
    example = EXAMPLE | {"decoder_input_ids": EXAMPLE["input_ids"]}
    with pytest.raises(InfoFlowError, match="expected one of 'encoder', 'decoder'"):
        find_anatomy(model, example)
    decoder = find_anatomy(model, example, stack="decoder")
    assert [len(block.attentions) for block in decoder.blocks] == [2, 2]
    assert decoder.blocks[0].lacks["mlp_out"].startswith("several attentions in this block")


compiles = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")


@compiles
@pytest.mark.parametrize("change", ["module", "function", "kind", "precision", "compiled"])
def test_an_anatomy_holds_until_something_changes(change):
    model = families.build("llama")
    found = find_anatomy(model, EXAMPLE)
    model.load_state_dict({n: p * 2 for n, p in model.state_dict().items()}, assign=True)
    assert found.holds(model)  # weights are no anatomy
    layer = model.model.layers[1]
    if change == "module":
        layer.mlp = copy.deepcopy(layer.mlp)
    elif change == "function":
        layer.self_attn.forward = layer.self_attn.forward
    elif change == "kind":
        model.set_attn_implementation("sdpa")
    elif change == "precision":
        model.double()
    else:
        layer.mlp.compile()
    assert not found.holds(model)


def refused(model, match, example=EXAMPLE):
    with pytest.raises(InfoFlowError, match=match):
        find_anatomy(model, example)


@compiles
def test_what_cannot_be_shown_is_refused_before_the_first_forward(model_of):
    seen = []
    model = families.build("llama")
    model.register_forward_pre_hook(lambda module, args: seen.append(module))
    model.set_attn_implementation("flex_attention")
    refused(model, "attention 'flex_attention'.*expected set_attn_implementation\\(\"eager\"\\)")
    model.set_attn_implementation("eager")
    refused(torch.compile(model), "is compiled, and compiled code cannot be watched")
    model.model.layers[0].mlp.to("meta")
    refused(model, "has weights on several devices: cpu, meta")
    assert not seen


def test_what_is_offloaded_is_refused_with_what_to_load():
    """It was taken for a model without weights, "load it with from_pretrained"."""
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(families.build("llama"), torch.device("cpu"))
    refused(model, "is offloaded by accelerate.*device_map={'': 'cpu'}")


def test_what_shows_no_attention_is_refused_with_the_reason():
    refused(families.build("longformer"), "takes softmaxes, but none is multiplied by values")
    refused(families.build("fnet"), "no attention was seen in FNetForMaskedLM")
    refused(families.build("gpt2"), "does not run on an example with src", {"src": torch.ones(2)})


def test_threads_may_read_parts_of_one_model_at_once():
    """One that reads a norm for long once made another's pass fail."""
    norm = torch.nn.LayerNorm(8).eval()
    entered, leave, failed = threading.Event(), threading.Event(), []

    def read_slowly():
        with part_in_eval_mode(norm):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=read_slowly)
    thread.start()
    entered.wait(10)
    try:
        numbers = Norm("", 8).numbers(norm)
    except InfoFlowError as error:
        failed.append(error)
    leave.set()
    thread.join()
    assert not failed
    torch.testing.assert_close(numbers.weight, norm.weight.detach())
    norm.train()
    Norm("", 8).numbers(norm)
    assert norm.training  # it has its own mode again
