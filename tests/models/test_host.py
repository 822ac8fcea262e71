"""The hosted model is the paper's; test_hooked.py says that it is HookedTransformer's, too."""

import itertools
import json
import random

import pandas as pd
import pytest
import torch
from transformer_lens import ActivationCache, HookedRootModule, patching

from infoflow_lens import Architecture, InfoFlowError, build_model, load_model, save_model
from infoflow_lens.models.attention import set_attention
from infoflow_lens.models.host import build_token_model
from infoflow_lens.models.loading import load_any
from infoflow_lens.studies.constructions import build_construction
from tests.conftest import D_HEAD, D_MODEL, D_TOKEN, HEADS, N_TOKENS
from tests.reference import transformer as reference

VARIANTS = {
    "plain": {},
    "positions and layer norm": {"positional_embedding": "learned", "normalization": "LN"},
    "tanh, two-layer encoder": {"act_fn": "tanh", "d_encoder": 19},
    "relu, CLS as a key": {"act_fn": "relu", "cls_is_key": True},
    "attention only": {"d_mlp": 0},
    "vector output, default scale": {"d_output": 4, "attn_scale": None},
    "three layers": {"n_heads": (1, 3, 2), "d_head": (4, 7, 5)},
    "one layer": {"n_heads": (3,), "d_head": None},
}


def variant(name, seed=1):
    settings = {
        "n_heads": HEADS,
        "d_head": D_HEAD,
        "d_model": D_MODEL,
        "d_token": D_TOKEN,
        "n_tokens": N_TOKENS,
        "d_mlp": 11,
        "attn_scale": 1.3,
    }
    model = build_model(Architecture(**(settings | VARIANTS[name])), seed=seed)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():  # biases start at zero, which would hide a forgotten one
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


SIZES = {
    "n_layers": 3,
    "n_heads": (2, 1, 3),
    "d_head": 5,
    "d_model": 19,
    "n_tokens": 7,
    "d_vocab": 11,
    "d_output": 4,
}
TOKEN_VARIANTS = {
    "relu": {},
    "softmax": {"attention": "softmax"},
    "one layer, one-hot": {"n_layers": 1, "n_heads": 2, "one_hot": True},
    "the paper's start": {"init": "chen_zou", "d_head": 19, "n_layers": 2, "n_heads": 2},
}


def token_variant(name, **changes):
    return build_token_model(**(SIZES | TOKEN_VARIANTS[name] | changes))


# a model of every kind, and input for it
KINDS = pytest.mark.parametrize("name", [*VARIANTS, *TOKEN_VARIANTS])


def made(name, **changes):
    if name in VARIANTS:
        return variant(name, **changes)
    return token_variant(name, **changes)


@pytest.fixture
def ids():
    return torch.randint(11, (13, 7), generator=torch.Generator().manual_seed(6))


@pytest.fixture
def x(name, inputs, ids):
    return inputs.double() if name in VARIANTS else ids


def answer(model, x):
    """What is read: the output at CLS, or at the last position."""
    output = model(x)
    return output if model.reads_vectors else output[:, -1]


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_the_written_out_model(name, inputs):
    model = variant(name)
    output, cache = model.run_with_cache(inputs)
    expected = reference.forward(model.architecture, model.state_dict(), inputs)
    torch.testing.assert_close(output, expected["output"], rtol=1e-5, atol=1e-5)
    for layer in range(model.architecture.n_layers):
        state = cache[f"blocks.{layer}.hook_resid_pre"] + cache[f"blocks.{layer}.hook_attn_out"]
        torch.testing.assert_close(state, expected[f"post_attention.{layer}"], rtol=1e-5, atol=1e-5)


@KINDS
def test_the_fast_read_out_has_the_same_numbers_and_gradients(name, x):
    model = made(name).double()
    full, fast = answer(model, x), model.forward_readout(x)
    torch.testing.assert_close(fast, full, rtol=1e-10, atol=1e-12)
    parameters = [p for p in model.parameters() if p.requires_grad]
    mine, theirs = (
        torch.autograd.grad(output.square().sum(), parameters, allow_unused=True)
        for output in (fast, full)
    )
    for one, other in zip(mine, theirs, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-10)


def test_shapes_in_the_cache_tell_layers_and_heads_apart(model, inputs):
    output, cache = model.run_with_cache(inputs)
    assert isinstance(model, HookedRootModule)
    assert isinstance(cache, ActivationCache)
    assert output.shape == (23, 1)
    assert cache["hook_tokens"].equal(inputs)
    assert cache["hook_embed"].shape == (23, N_TOKENS + 1, D_MODEL)
    for layer, (heads, d_head) in enumerate(zip(HEADS, D_HEAD, strict=True)):
        prefix = f"blocks.{layer}.attn.hook_"
        assert cache[f"{prefix}pattern"].shape == (23, heads, N_TOKENS + 1, N_TOKENS + 1)
        assert cache[f"{prefix}z"].shape == (23, N_TOKENS + 1, heads, d_head)
        torch.testing.assert_close(
            cache[f"{prefix}pattern"].sum(-1), torch.ones(23, heads, N_TOKENS + 1)
        )


def test_cls_reads_but_is_not_read(model, inputs):
    _, cache = model.run_with_cache(inputs)
    for layer in (0, 1):
        scores = cache[f"blocks.{layer}.attn.hook_attn_scores"]
        assert scores[..., -1].isneginf().all()
        assert scores[..., :-1].isfinite().all()
        assert cache[f"blocks.{layer}.attn.hook_pattern"][..., -1].eq(0).all()
    as_key = variant("relu, CLS as a key")
    _, cache = as_key.run_with_cache(inputs)
    assert cache["blocks.0.attn.hook_pattern"][..., -1].gt(0).all()


def test_permuting_tokens_changes_nothing_without_positions(model, inputs):
    order = torch.randperm(N_TOKENS, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(inputs[:, order]), model(inputs), rtol=1e-5, atol=1e-6)
    positional = variant("positions and layer norm")
    assert (positional(inputs[:, order]) - positional(inputs)).abs().max() > 1e-3


def test_running_in_parts_equals_running_at_once(model, inputs):
    middle = model(inputs, stop_at_layer=1)
    assert middle.shape == (23, N_TOKENS + 1, D_MODEL)
    torch.testing.assert_close(model(middle, start_at_layer=1), model(inputs))
    assert model(inputs, return_type=None) is None


def test_without_attention_cls_sees_no_token(model, inputs):
    def no_attention(z, hook):
        return torch.zeros_like(z)

    names = [f"blocks.{layer}.attn.hook_z" for layer in (0, 1)]
    alone = model.run_with_hooks(inputs, fwd_hooks=[(name, no_attention) for name in names])
    # without attention CLS has seen no token
    assert (alone - alone[0]).abs().max() < 1e-6
    assert (model(inputs) - model(inputs)[0]).abs().max() > 1e-3


def test_transformer_lens_patching_works(model, inputs):
    clean, corrupted = inputs[:1], inputs[1:2]
    model.eval()  # asked for by TransformerLens 4
    _, cache = model.run_with_cache(clean)
    effect = patching.generic_activation_patch(
        model,
        corrupted,
        cache,
        patching_metric=lambda output: output[0, 0],
        patch_setter=patching.layer_pos_patch_setter,
        activation_name="resid_pre",
        # its default would take the number of positions from the last axis of token ids
        index_df=pd.DataFrame(
            itertools.product(range(2), range(N_TOKENS + 1)), columns=["layer", "pos"]
        ),
    )
    effect = torch.as_tensor(effect).view(2, N_TOKENS + 1)
    # CLS starts the same in both, so patching it in at the first layer changes nothing
    torch.testing.assert_close(effect[0, N_TOKENS], model(corrupted)[0, 0])
    assert (effect[0, :N_TOKENS] - model(corrupted)[0, 0]).abs().max() > 1e-4


def test_per_head_stacks_are_refused_where_layers_differ(inputs):
    """TransformerLens would take cfg.n_heads for every layer, and mislabel or drop heads."""
    _, cache = variant("plain").run_with_cache(inputs)
    with pytest.raises(InfoFlowError, match="layers have"):
        cache.stack_head_results(layer=-1)
    equal = build_model(Architecture(n_heads=(2, 2), d_model=6, d_token=D_TOKEN, n_tokens=N_TOKENS))
    _, cache = equal.run_with_cache(inputs)
    assert cache.stack_head_results(layer=-1).shape[0] == 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_runs_in_other_precisions(model, inputs, dtype):
    expected = model(inputs)
    model.to(dtype)
    output = model(inputs.to(dtype))
    assert output.dtype == dtype
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5  # bfloat16 has 8 bits
    torch.testing.assert_close(output.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["plain", "relu"])
def test_the_seed_makes_the_model_and_leaves_the_global_state(name):
    states = torch.get_rng_state(), random.getstate()
    first, second, other = made(name, seed=3), made(name, seed=3), made(name, seed=4)
    assert torch.get_rng_state().equal(states[0])
    assert random.getstate() == states[1]
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert mine.equal(theirs)
    assert not first.blocks[0].attn.W_Q.equal(other.blocks[0].attn.W_Q)


def test_seeds_are_0_by_default():
    sizes = {"n_heads": (2,), "d_model": 8, "d_token": 3, "n_tokens": 5}
    default, zero = build_model(Architecture(**sizes)), build_model(Architecture(**sizes), seed=0)
    assert default.blocks[0].attn.W_Q.equal(zero.blocks[0].attn.W_Q)


@pytest.mark.parametrize("mode", ["gpt2", "xavier_uniform", "kaiming_normal"])
def test_every_weight_is_initialised(mode):
    model = build_model(
        Architecture(
            n_heads=(2, 1), d_model=6, d_token=3, n_tokens=4, init_mode=mode, d_encoder=5,
            positional_embedding="learned",
        )
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        is_weight = "W_" in name
        assert bool(parameter.abs().sum() > 0) == is_weight, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@KINDS
def test_saving_and_loading(name, dtype, x, tmp_path):
    """With the precision, what is fixed, and the attention, as they are."""
    model = made(name).to(dtype)
    x = x.to(dtype) if name in VARIANTS else x
    save_model(model, tmp_path / "model")
    state = torch.get_rng_state()
    for loaded in (load_model(tmp_path / "model"), load_any(tmp_path / "model").model):
        assert loaded.architecture == model.architecture
        assert loaded(x).equal(model(x))
        fixed = [p.requires_grad for p in model.parameters()]
        assert [p.requires_grad for p in loaded.parameters()] == fixed
    assert torch.get_rng_state().equal(state)


def test_loading_what_is_no_model(tmp_path):
    with pytest.raises(InfoFlowError, match="no saved model"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 5, D_TOKEN), r"shape \(2, 5, 3\): .* \[batch, 7, 3\]"),
        (torch.zeros(2, N_TOKENS, 4), r"shape \(2, 7, 4\): .* \[batch, 7, 3\]"),
        (torch.zeros(N_TOKENS, D_TOKEN), "expects vector tokens"),
        (torch.zeros(0, N_TOKENS, D_TOKEN), "expects vector tokens"),
        (torch.zeros(2, N_TOKENS, D_TOKEN).long(), "input is torch.int64, the weights"),
        (torch.zeros(2, N_TOKENS, D_TOKEN).double(), r"convert with x.to\(torch.float32\)"),
    ],
)
def test_bad_input_is_named(model, x, message):
    with pytest.raises(InfoFlowError, match=message):
        model(x)


def test_what_vector_tokens_do_not_have_is_refused(model, inputs):
    with pytest.raises(InfoFlowError, match="no next-token loss"):
        model(inputs, return_type="loss")
    with pytest.raises(InfoFlowError, match="no attention_mask"):
        model(inputs, attention_mask=torch.ones(23, N_TOKENS))


def test_models_of_others_are_not_saved_by_half(token_model, tmp_path):
    with pytest.raises(InfoFlowError, match="of others save the state_dict"):
        save_model(token_model, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("construction", "settings"),
    [
        ("d_retrieval", {"attention": "hardmax", "outer": "square_sum"}),
        ("in_context_qa", {"n_pairs": 2, "n_questions": 5, "n_answers": 3}),
    ],
)
def test_a_construction_is_saved_with_its_attention(construction, settings, tmp_path):
    model, task = build_construction(construction, **settings)
    save_model(model, tmp_path)
    x, _ = task.sample(9, seed=0)
    assert load_model(tmp_path)(x).equal(model(x))


def paper_forward(model, x):
    """Eq 2 of Chen & Zou: H += sum_i V_i H sigma(H^T W_QK H), o = W_O H[:, -1]."""
    softmax = model.architecture.attention == "softmax"
    outputs = []
    for row in x:
        h = (model.embed.W_E[row] + model.pos_embed.W_pos[: len(row)]).T  # [d_model, pos]
        for block in model.blocks:
            attn, update = block.attn, 0
            for head in range(len(attn.W_Q)):
                w_qk = attn.W_K[head] @ attn.W_Q[head].T  # source by destination
                w_v = (attn.W_V[head] @ attn.W_O[head]).T
                scores = h.T @ w_qk @ h
                pattern = scores.softmax(dim=0) if softmax else scores.clamp(min=0)
                update = update + w_v @ h @ pattern
            h = h + update
        outputs.append(model.unembed.W_U.T @ h[:, -1])
    return torch.stack(outputs)


@pytest.mark.parametrize("name", TOKEN_VARIANTS)
def test_token_models_are_the_paper_s(name, ids):
    model = token_variant(name).to(torch.float64)
    assert isinstance(model, HookedRootModule)
    expected = paper_forward(model, ids)
    torch.testing.assert_close(model(ids)[:, -1], expected, rtol=1e-10, atol=1e-12)


def test_token_models_have_heads_of_their_own_in_every_layer(ids):
    _, cache = token_variant("relu").run_with_cache(ids)
    shapes = [cache[f"blocks.{layer}.attn.hook_pattern"].shape for layer in range(3)]
    assert shapes == [(13, heads, 7, 7) for heads in (2, 1, 3)]
    with pytest.raises(InfoFlowError, match="layers have"):
        cache.stack_head_results(layer=-1)


def test_what_is_trained_of_a_token_model():
    def trained(model):
        names = {name.split(".")[-1] for name, p in model.named_parameters() if p.requires_grad}
        assert not any(p.any() for n, p in model.named_parameters() if n.split(".")[-1][:2] == "b_")
        return names

    weights = {"W_Q", "W_K", "W_V", "W_O", "W_U"}
    assert trained(token_variant("relu")) == weights | {"W_E", "W_pos"}
    assert trained(token_variant("one layer, one-hot")) == weights
    assert trained(token_variant("the paper's start")) == {"W_Q", "W_V", "W_U"}


def test_the_paper_s_start():
    """Sec. 9.1: one-hot tokens over one-hot positions, W_QK and W_C in [0, 1), W_V of value 1."""
    model = token_variant("the paper's start")
    units = torch.eye(19)
    assert model.embed.W_E.equal(units[:11])
    assert model.pos_embed.W_pos.equal(units[11:18])
    for block in model.blocks:
        assert block.attn.W_K.equal(units.expand(2, 19, 19))
        assert (block.attn.W_V @ block.attn.W_O).equal(units.expand(2, 19, 19) / 2)
    for weights in (model.blocks[0].attn.W_Q, model.blocks[1].attn.W_Q, model.unembed.W_U):
        assert 0 <= float(weights.detach().min()) < 0.1
        assert 0.9 < float(weights.detach().max()) < 1
        assert 0.4 < float(weights.detach().mean()) < 0.6


def test_saving_keeps_an_attention_that_was_changed(ids, tmp_path):
    model = token_variant("relu")
    set_attention(model, "softmax")
    save_model(model, tmp_path)
    assert load_model(tmp_path).architecture.attention == "softmax"
    assert load_model(tmp_path)(ids).equal(model(ids))
    set_attention(model, "relu")
    model.blocks[0].attn.hook_pattern = type(model.blocks[0].attn.hook_k)()  # one of a softmax
    with pytest.raises(InfoFlowError, match=r"different attention \(relu, softmax\)"):
        save_model(model, tmp_path / "mixed")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "image"}, "of kind 'image'"),
        ({"depth": 3}, "no field 'depth'"),
        ({"d_model": 20}, r"gives embed.W_E the shape \(11, 20\), model.safetensors \(11, 19\)"),
        ({"d_model": None}, "d_model is None"),
    ],
)
def test_a_saved_token_model_that_was_spoilt(change, message, tmp_path):
    save_model(token_variant("relu"), tmp_path)
    file = tmp_path / "architecture.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(InfoFlowError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ([3] * 3000, "says 3000 layers, model.safetensors holds 2"),
        ([10**6, 10**6], "gives blocks.0.attn.W_Q the shape"),
    ],
)
def test_a_file_that_names_more_heads_than_its_weights_have_is_refused_at_once(
    heads, message, tmp_path, sizes_made
):
    """Nothing is made in these sizes: 3,000 layers once took 86 seconds."""
    save_model(
        build_model(Architecture((3, 1), d_model=12, d_head=(4, 4), d_token=2, n_tokens=5)),
        tmp_path,
    )
    file = tmp_path / "architecture.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"n_heads": heads}))
    sizes_made.clear()
    with pytest.raises(InfoFlowError, match=message):
        load_model(tmp_path)
    assert len(sizes_made) < 200
    assert sum(sizes_made) < 10**5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_heads": (2, 1)}, "2 entries for 3 layers"),
        ({"attention": "relo"}, "did you mean 'relu'"),
        ({"init": "chen"}, "did you mean 'chen_zou'"),
        ({"init": "chen_zou"}, "expected d_head 19"),
        ({"one_hot": True, "d_model": 17}, r"d_vocab \+ n_tokens = 18"),
    ],
)
def test_bad_sizes_of_token_models_are_named(change, message):
    with pytest.raises(InfoFlowError, match=message):
        token_variant("relu", **change)
