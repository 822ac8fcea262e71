"""What TransformerLens can mislead a probe by, on a small model of each architecture.

The models are saved in the formats of their makers and loaded by the real code; what is right comes
from the plain models of transformers.
"""

import random

import numpy as np
import pytest
import torch

from infoflow_lens import InfoFlowError, PositionsProbe, RecoveryProbe, attach, run_probes
from infoflow_lens.hooks import AttendedProbe
from infoflow_lens.hooks.model.call import call
from infoflow_lens.hooks.model.semantics import post_attention_hooks, state_sum
from infoflow_lens.models.hooked import HAS_HOOKED_TRANSFORMER
from infoflow_lens.models.loading import load_any
from tests.conftest import make_token_model
from tests.reference import zoo
from tests.versions import needs_hooked_transformer, needs_version_4

LENGTHS = (9, 5, 9, 3)


# Bridges of TransformerLens 3 compute something else of Cohere's
HOSTED = [f for f in zoo.FAMILIES if not (HAS_HOOKED_TRANSFORMER and f.startswith("cohere"))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: zoo.save(name, tmp_path_factory.mktemp(name)) for name in zoo.FAMILIES}


@pytest.mark.parametrize("name", zoo.some_families(zoo.FAMILIES))
def test_a_model_is_the_plain_one(name, folders):
    model, ids = load_any(folders[name]).model, zoo.tokens(3, 11)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), zoo.build(name)(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module", params=zoo.some_families(HOSTED))
def architecture(request, folders):
    """Name, the bridge, and the plain model that it hosts a copy of."""
    name = request.param
    return name, zoo.bridge(folders[name]), zoo.build(name)


def sequences():
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(4, zoo.N_VOCAB, (n,), generator=generator) for n in LENGTHS]


def patterns(plain, sequence):
    """The attention of the plain model on one sequence, a tensor [head, query, key] a layer."""
    with torch.no_grad():
        found = plain(sequence[None], output_attentions=True).attentions
    return [layer[0] for layer in found]


def test_first_choices_are_those_of_the_plain_model(architecture):
    """Whether the hook of scores carries scores or the pattern, in whatever order hooks fire."""
    _, model, plain = architecture
    (found,) = run_probes(model, sequences(), [PositionsProbe((1, 2))], progress=False)
    for index, sequence in enumerate(sequences()):
        n = len(sequence)
        for layer, pattern in enumerate(patterns(plain, sequence)):
            shares, keys = pattern.topk(2, dim=-1)
            clear = shares[..., 0] - shares[..., 1] > 1e-4
            chosen = found.positions[layer][index, :, :n, 0].long()
            assert chosen[clear].equal(keys[..., 0][clear])
            second = found.positions[layer][index, :, :n, 1]
            assert (second[shares[..., 1] == 0] == -1).all()  # a single key has no second
            margins = found.margins[layer][index, :, :n, 0]
            both = clear & (shares[..., 1] > 1e-6)
            expected = (shares[..., 0] / shares[..., 1]).log()
            torch.testing.assert_close(margins[both], expected[both], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_dropped_on_either_side(architecture, side):
    _, model, plain = architecture
    longest = max(LENGTHS)
    ids = torch.zeros(len(LENGTHS), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences()):
        n = len(sequence)
        place = slice(longest - n, None) if side == "left" else slice(0, n)
        ids[row, place], mask[row, place] = sequence, 1
    with attach(model, AttendedProbe(0.0)) as probes:
        model(ids, attention_mask=mask)
    (attended,) = probes.results()
    with attach(model, PositionsProbe(spread=True)) as probes:
        model(ids, attention_mask=mask)
    (found,) = probes.results()
    for index, sequence in enumerate(sequences()):
        n = len(sequence)
        for layer, pattern in enumerate(patterns(plain, sequence)):
            assert attended.attended[layer][index, :, :n, :n].equal(pattern > 0)
            assert not attended.attended[layer][index, :, n:].any()
            assert not attended.attended[layer][index, :, :, n:].any()
            largest = (pattern / pattern.sum(-1, keepdim=True)).amax(dim=-1)
            torch.testing.assert_close(
                found.concentration[layer][index, :, :n], largest, atol=1e-5, rtol=0
            )
            assert found.concentration[layer][index, :, n:].isnan().all()


def test_a_mask_that_is_forgotten_changes_what_the_model_does(architecture):
    """So padding without a mask cannot be mended afterwards; run_probes makes the mask itself."""
    _, model, plain = architecture
    sequence = sequences()[1]
    padded = torch.cat([torch.zeros(4, dtype=torch.long), sequence])
    with torch.no_grad():
        gap = model(padded[None])[0, -1] - plain(sequence[None]).logits[0, -1]
    assert gap.abs().max() > 0.1
    (found,) = run_probes(
        model, padded[None], [PositionsProbe()], attention_mask=(padded > 0)[None], progress=False
    )
    (alone,) = run_probes(model, sequence[None], [PositionsProbe()], progress=False)
    assert all(a.equal(b) for a, b in zip(found.positions, alone.positions, strict=True))


# The module whose output is x' of the first layer, or what has to be added to it.
ATTENTION_OUTPUT = {"bert": "bert.encoder.layer.0.attention"}
MLP_INPUT_NORM = {
    "gpt2": "transformer.h.0.ln_2",
    "gpt_neo": "transformer.h.0.ln_2",
    "opt": "model.decoder.layers.0.final_layer_norm",
    "bloom": "transformer.h.0.post_attention_layernorm",
    "llama": "model.layers.0.post_attention_layernorm",
    "mistral": "model.layers.0.post_attention_layernorm",
    "qwen2": "model.layers.0.post_attention_layernorm",
    "gemma2": "model.layers.0.pre_feedforward_layernorm",
    "gpt_oss": "model.layers.0.post_attention_layernorm",
    "gemma3": "model.layers.0.pre_feedforward_layernorm",
    "qwen3": "model.layers.0.post_attention_layernorm",
    "granite": "model.layers.0.post_attention_layernorm",
    "olmo2": "model.layers.0.mlp",  # no norm stands before it
    "stablelm": "model.layers.0.post_attention_layernorm",
    "phi3": "model.layers.0.post_attention_layernorm",
}
ATTENTION_OF_PARALLEL = {
    "gptj": "transformer.h.0.attn",
    "codegen": "transformer.h.0.attn",
    "gpt_neox": "gpt_neox.layers.0.attention",
    "falcon": "transformer.h.0.self_attention",
    "cohere": "model.layers.0.self_attn",
    "cohere2": "model.layers.0.self_attn",
}


def test_the_post_attention_state_is_that_of_the_plain_model(architecture):
    """x' = what enters the block plus attention; BERT normalises it, parallel blocks hide it."""
    name, model, plain = architecture
    ids = sequences()[0][None]
    seen = {}

    def keep(label):
        def hook(module, args, output):
            seen[label] = (args[0] if args else None, output)

        return hook

    if name in MLP_INPUT_NORM:  # the second norm reads the state
        plain.get_submodule(MLP_INPUT_NORM[name]).register_forward_hook(keep("state"))
    elif name in ATTENTION_OUTPUT:
        plain.get_submodule(ATTENTION_OUTPUT[name]).register_forward_hook(keep("state"))
    else:
        plain.get_submodule(ATTENTION_OF_PARALLEL[name]).register_forward_hook(keep("attention"))
    with torch.no_grad():
        states = plain(ids, output_hidden_states=True).hidden_states
    if name in MLP_INPUT_NORM:
        expected = seen["state"][0]
    elif name in ATTENTION_OUTPUT:
        expected = seen["state"][1][0]
    else:
        expected = states[0] + seen["attention"][1][0]
    points = post_attention_hooks(model, 0)
    with torch.no_grad():
        found = state_sum(call(model, ids, points).activations, points)
    torch.testing.assert_close(found, expected.view_as(found), atol=1e-5, rtol=1e-5)


@needs_version_4
def test_the_post_attention_state_is_found_in_every_layer(monkeypatch):
    """Gemma 4 has a factor behind the sums of each block: it says nothing of the other blocks."""
    settings = {"head_dim": 4, "global_head_dim": 4, "num_key_value_heads": 2, "sliding_window": 4,
                "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
                "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
    settings = {**zoo.ARCHITECTURES["llama"][2], **settings}
    family = ("Gemma4TextConfig", "Gemma4ForCausalLM", settings)
    monkeypatch.setitem(zoo.ARCHITECTURES, "gemma4", family)
    model, plain, seen = zoo.bridge("gemma4"), zoo.build("gemma4"), []
    ids = sequences()[0][None]
    for inner in (model.original_model, plain):
        inner.model.layers[0].layer_scalar.fill_(0.5)
    for block in plain.model.layers:
        norm = block.pre_feedforward_layernorm
        norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    with torch.no_grad():
        plain(ids)
    for layer, expected in enumerate(seen):
        points = post_attention_hooks(model, layer)
        found = state_sum(call(model, ids, points).activations, points)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_block_that_shows_no_sum_is_refused_by_name():
    """Its second layer multiplies what the MLP gives, behind the hook point."""
    model = zoo.bridge("gptj")
    model.blocks[1].mlp.register_forward_hook(lambda module, args, output: output * 2)
    assert post_attention_hooks(model, 0)
    with pytest.raises(InfoFlowError, match=r"of layer 1 .* are no sum .* give the model that it"):
        post_attention_hooks(model, 1)


def test_recovery_reads_tokens_off_that_state(architecture):
    """Maps for every head, also of grouped queries, and better than nothing."""
    _, model, _ = architecture
    ids = torch.randint(4, zoo.N_VOCAB, (80, 6), generator=torch.Generator().manual_seed(0))
    (found,) = run_probes(model, ids, [RecoveryProbe()], progress=False)
    for layer in found.fvu:
        assert layer.shape == (zoo.N_HEADS, 1)  # of grouped queries too
        assert layer.isfinite().all()
    assert min(float(layer.min()) for layer in found.fvu) < 0.9


def snapshot(model):
    return {
        "hooks": {name: len(point.fwd_hooks) for name, point in model.hook_dict.items()},
        "training": [module.training for module in model.modules()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "grads": [p.grad is None for p in model.parameters()],
        "dtype": [p.dtype for p in model.parameters()],
        "grad mode": torch.is_grad_enabled(),
        "torch": torch.get_rng_state().tolist(),
        "numpy": np.random.get_state()[1].tolist(),  # noqa: NPY002
        "python": random.getstate(),
        "flags": {key: value for key, value in vars(model.cfg).items() if key.startswith("use_")},
    }


def test_a_bridge_is_left_as_it_was(architecture):
    _, model, _ = architecture
    model.train()
    fired = []
    model.add_hook("blocks.0.hook_resid_pre", lambda activation, hook: fired.append(1))
    before = snapshot(model)
    run_probes(
        model, sequences(), [PositionsProbe((1, 2)), RecoveryProbe()], eval_every=2, progress=False
    )
    assert snapshot(model) == before
    fired.clear()
    model(sequences()[0][None])
    assert fired == [1]
    model.eval().reset_hooks()


def fused(folder):
    """A bridge around a model that was loaded with fused attention."""
    import transformers
    from transformer_lens.model_bridge import TransformerBridge

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    assert model.config._attn_implementation == "sdpa"
    return TransformerBridge.boot_transformers(str(folder), hf_model=model, device="cpu")


@needs_hooked_transformer
def test_attention_that_is_not_shown_is_refused(folders):
    """Models loaded with fused attention never show their patterns."""
    with (
        pytest.raises(InfoFlowError, match="neither hook_attn_scores nor hook_pattern fires"),
        attach(fused(folders["opt"]), PositionsProbe()),
    ):
        pass


@needs_version_4
@pytest.mark.parametrize("name", ["opt", "llama", "gpt2"])
def test_fused_attention_that_version_4_makes_eager_is_seen_right(folders, name):
    model, ids = fused(folders[name]), zoo.tokens(3, 9)
    (found,) = run_probes(model, ids, [PositionsProbe(spread=True)], progress=False)
    with torch.no_grad():
        expected = zoo.build(name)(ids, output_attentions=True).attentions
    for layer, pattern in enumerate(expected):
        torch.testing.assert_close(
            found.concentration[layer], pattern.amax(dim=-1), atol=1e-5, rtol=0
        )


def test_names_that_fire_behind_a_flag_are_never_waited_for(token_model, token_inputs):
    """hook_result fires only if use_attn_result is set; no probe needs it."""
    flags = (token_model.cfg.use_attn_result, token_model.cfg.use_split_qkv_input)
    run_probes(token_model, token_inputs, [PositionsProbe(), RecoveryProbe()], progress=False)
    assert (token_model.cfg.use_attn_result, token_model.cfg.use_split_qkv_input) == flags
    for probe in (PositionsProbe(), RecoveryProbe()):
        for name, _ in probe.fwd_hooks(token_model):
            assert "hook_result" not in name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_agrees_where_the_margin_exceeds_its_rounding(dtype, token_inputs):
    model = make_token_model()
    (exact,) = run_probes(model, token_inputs, [PositionsProbe()], progress=False)
    (half,) = run_probes(
        make_token_model().to(dtype), token_inputs, [PositionsProbe()], progress=False
    )
    agreed = compared = 0
    for layer in range(2):
        largest = call(model, token_inputs, [f"blocks.{layer}.attn.hook_attn_scores"]).activations[
            f"blocks.{layer}.attn.hook_attn_scores"
        ]
        scale = float(largest[largest.isfinite()].abs().max())
        # errors of several rounded products before the scores
        clear = exact.margins[layer] > 8 * scale * torch.finfo(dtype).eps
        same = exact.positions[layer] == half.positions[layer]
        agreed += int((same & clear).sum())
        compared += int(clear.sum())
    assert compared > 500
    assert agreed == compared


def test_a_config_that_lies_about_the_dtype_is_not_believed(token_inputs):
    model = make_token_model().double()
    assert model.cfg.dtype == torch.float32
    (found,) = run_probes(model, token_inputs, [RecoveryProbe()], progress=False)
    assert found.weight[0].dtype == torch.float64


def test_dropout_does_not_reach_what_is_probed(folders):
    folder = folders["gpt2"]
    ids = sequences()[0][None]
    model = load_any(folder).model
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    model.train()
    results = [
        run_probes(model, ids, [PositionsProbe(spread=True)], progress=False)[0] for _ in range(2)
    ]
    for layer in range(2):
        assert results[0].entropy[layer].equal(results[1].entropy[layer])
        assert (results[0].concentration[layer] <= 1).all()
