"""A hosted model is HookedTransformer, bit by bit, on TransformerLens 3 and 4."""

import copy
import inspect
import io

import pytest
import torch
from transformer_lens import ActivationCache, HookedRootModule
from transformer_lens.hook_points import HookPoint

from infoflow_lens import Architecture, InfoFlowError, build_model, load_model
from infoflow_lens.models.hooked import HAS_HOOKED_TRANSFORMER
from infoflow_lens.models.host import build_token_model
from tests.reference import frozen
from tests.reference import transformer as reference
from tests.versions import needs_hooked_transformer


@pytest.fixture
def layers_alike():
    """Layer norm, two layers of three heads, four outputs, biases that are not zero."""
    model = build_model(
        Architecture(
            n_heads=(3, 3), d_head=(4, 4), d_model=11, d_token=3, n_tokens=7, d_mlp=5, d_output=4,
            normalization="LN", positional_embedding="learned",
        ),
        seed=2,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


@pytest.fixture
def attention_only():
    return build_token_model(
        n_layers=2, n_heads=2, d_head=3, d_model=9, n_tokens=6, d_vocab=8, d_output=4,
        attention="softmax", seed=1,
    ).eval()  # fmt: skip


@pytest.fixture
def ids():
    return torch.randint(8, (5, 6), generator=torch.Generator().manual_seed(6))


@needs_hooked_transformer
@pytest.mark.parametrize("precision", frozen.DTYPES)
def test_bits_of_hooked_transformer_in_this_process(precision):
    """The same weights in TransformerLens's own blocks: everything that the reference keeps."""
    from tests.reference.hooked_transformer import twin_of

    for name in frozen.CASES:
        theirs, ours = frozen.shown(name, precision, host=twin_of), frozen.shown(name, precision)
        for what in ("structure", "hashes", "losses"):
            assert getattr(ours, what) == getattr(theirs, what), name
        for part, tensors in theirs.tensors.items():
            for label, value in tensors.items():
                found = ours.tensors[part][label]
                assert found.equal(value), frozen.difference(f"{name} {label}", found, value)


@needs_hooked_transformer
def test_bits_at_sizes_where_the_order_of_sums_shows():
    from tests.reference.hooked_transformer import twin_of

    model = build_model(
        Architecture(
            n_heads=(8, 4), d_model=128, d_token=9, n_tokens=40, d_mlp=300, normalization="LN"
        )
    )
    tokens = build_token_model(
        n_layers=2, n_heads=3, d_head=50, d_model=90, n_tokens=40, d_vocab=31, d_output=11
    )
    generator = torch.Generator().manual_seed(3)
    vectors = torch.randn(65, 40, 9, generator=generator)
    for ours, x in ((model, vectors), (tokens, torch.randint(31, (65, 40), generator=generator))):
        theirs = twin_of(ours)
        for read in ("__call__", "forward_readout"):
            outputs = getattr(ours, read)(x), getattr(theirs, read)(x)
            assert outputs[0].equal(outputs[1])
            trained = [n for n, p in ours.named_parameters() if p.requires_grad]
            gradients = (
                torch.autograd.grad(
                    output.square().sum(),
                    [host.get_parameter(name) for name in trained],
                    allow_unused=True,
                )
                for output, host in zip(outputs, (ours, theirs), strict=True)
            )
            for name, mine, other in zip(trained, *gradients, strict=True):
                assert mine is other is None or mine.equal(other), name


@needs_hooked_transformer
def test_a_seed_gives_the_weights_that_hooked_transformer_draws():
    from tests.reference.hooked_transformer import twin_of

    for name, build in frozen.TRAINED.items():
        if "one-hot" not in name and "Chen" not in name:
            ours = build()  # by seed 11
            for label, value in twin_of(ours, seed=11).named_parameters():
                assert ours.get_parameter(label).equal(value), (name, label)


def test_a_hooked_model_is_of_the_classes_of_transformer_lens(layers_alike, attention_only):
    import transformer_lens

    for model in (layers_alike, attention_only):
        assert isinstance(model, HookedRootModule)
        if HAS_HOOKED_TRANSFORMER:
            assert isinstance(model, transformer_lens.HookedTransformer)
            assert isinstance(model.cfg, transformer_lens.HookedTransformerConfig)
        else:
            assert isinstance(model.cfg, transformer_lens.TransformerBridgeConfig)
    cfg = layers_alike.cfg
    assert (cfg.n_layers, cfg.n_heads, cfg.d_head, cfg.d_model) == (2, 3, 4, 11)
    assert (cfg.n_ctx, cfg.d_mlp, cfg.d_vocab_out, cfg.attn_scale) == (8, 5, 4, 2.0)
    assert (cfg.normalization_type, cfg.attention_dir, cfg.attn_only) == (
        "LN", "bidirectional", False,
    )  # fmt: skip


SAVED = {
    "vectors": [[1.0556683540344238], [1.2722135782241821]],
    "tokens": [
        [10539.004826333274, 8259.293506511494, 9374.498055644],
        [8935.122609063132, 8198.838482028523, 7109.052257978467],
    ],
}


@pytest.mark.parametrize("name", SAVED)
def test_checkpoints_written_before(name):
    """By version 0.1.0 on HookedTransformer of TransformerLens 3.9, with what they gave there."""
    model = load_model(frozen.HERE / "saved" / name)
    x = (torch.arange(12).view(2, 3, 2) % 5 - 2) / 4
    output = model(x) if name == "vectors" else model(torch.arange(8).view(2, 4) % 5)[:, -1]
    expected = torch.tensor(SAVED[name], dtype=output.dtype)
    torch.testing.assert_close(output, expected, rtol=1e-6 if name == "vectors" else 1e-14, atol=0)


def test_state_dicts_with_the_causal_mask_of_earlier_transformer_lens(attention_only, ids):
    state = attention_only.state_dict()
    state |= {f"blocks.{layer}.attn.mask": torch.ones(6, 6).tril().bool() for layer in (0, 1)}
    twin = copy.deepcopy(attention_only)
    twin.load_state_dict(state)
    assert twin(ids).equal(attention_only(ids))
    with pytest.raises(RuntimeError, match="Missing key"):
        twin.load_state_dict({"unembed.b_U": state["unembed.b_U"]})


# Passes


def test_hooks_that_a_flag_turns_on(layers_alike, inputs):
    """The same output by way of every hook point of the heads' inputs and results."""
    expected = layers_alike(inputs)
    for flag in ("attn_result", "split_qkv_input", "attn_in", "hook_mlp_in"):
        getattr(layers_alike, f"set_use_{flag}")(True)
    output, cache = layers_alike.run_with_cache(inputs)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    for layer in (0, 1):
        for name in ("attn_in", "q_input", "k_input", "v_input"):
            assert cache[f"blocks.{layer}.hook_{name}"].shape == (23, 8, 3, 11)
        result = cache[f"blocks.{layer}.attn.hook_result"]
        written = result.sum(-2) + layers_alike.blocks[layer].attn.b_O
        torch.testing.assert_close(written, cache[f"blocks.{layer}.hook_attn_out"])
        assert cache[f"blocks.{layer}.hook_mlp_in"].equal(cache[f"blocks.{layer}.hook_resid_mid"])


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("blocks.0.attn.hook_result", "use_attn_result"),
        ("blocks.1.hook_k_input", "use_split_qkv_input"),
        ("blocks.0.hook_attn_in", "use_attn_in"),
        ("blocks.1.hook_mlp_in", "use_hook_mlp_in"),
    ],
)
def test_hooks_that_would_never_fire_are_refused(layers_alike, name, flag):
    with pytest.raises(InfoFlowError, match=rf"{flag} is False: call model.set_{flag}\(True\)"):
        layers_alike.add_hook(name, lambda value, hook: None)


def test_every_hook_point_fires_or_waits_for_a_flag(layers_alike, inputs):
    _, cache = layers_alike.run_with_cache(inputs)
    silent = {name.split(".")[-1] for name in set(layers_alike.hook_dict) - set(cache.keys())}
    assert silent == {
        "hook_attn_in", "hook_q_input", "hook_k_input", "hook_v_input", "hook_mlp_in",
        "hook_result",
    }  # fmt: skip
    assert all(isinstance(point, HookPoint) for point in layers_alike.hook_dict.values())


def test_hooks_in_a_block_are_gone_after_it(layers_alike, inputs):
    expected, seen = layers_alike(inputs), []

    def without(pattern, hook):
        seen.append(hook.name)
        return torch.zeros_like(pattern)

    with layers_alike.hooks(fwd_hooks=[("blocks.1.attn.hook_pattern", without)]):
        edited = layers_alike(inputs)
    assert seen == ["blocks.1.attn.hook_pattern"]
    assert (edited - expected).abs().max() > 1e-3
    assert layers_alike(inputs).equal(expected)


def test_gradients_reach_backward_hooks(layers_alike, inputs):
    gradients = {}

    def keep(gradient, hook):
        gradients[hook.name] = gradient

    names = ["blocks.0.attn.hook_pattern", "blocks.1.hook_resid_pre"]
    with layers_alike.hooks(bwd_hooks=[(name, keep) for name in names]):
        layers_alike(inputs).sum().backward()
    assert set(gradients) == set(names)
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (1, 2), (-1, None), (0, -1), (None, 0)])
def test_partial_runs_are_counted_as_in_transformer_lens(attention_only, ids, start, stop):
    _, cache = attention_only.run_with_cache(ids)
    states = [cache["blocks.0.hook_resid_pre"], cache["blocks.1.hook_resid_pre"]]
    states.append(cache["blocks.1.hook_resid_post"])
    given = ids if start is None else states[start % 2]
    found = attention_only(given, start_at_layer=start, stop_at_layer=stop)
    expected = attention_only(ids) if stop is None else states[range(2)[stop] if stop < 2 else 2]
    assert found.equal(expected)


def test_padding_is_no_key(attention_only, ids):
    """On either side; positions count from the first token, and other rows stay as they are."""
    short = attention_only(ids[:, :4])
    for columns, real in ((slice(2, 6), [0, 0, 1, 1, 1, 1]), (slice(0, 4), [1, 1, 1, 1, 0, 0])):
        padded, mask = ids.clone(), torch.ones_like(ids)
        padded[0], mask[0] = 7, torch.tensor(real)
        padded[0, columns] = ids[0, :4]
        output, cache = attention_only.run_with_cache(padded, attention_mask=mask)
        torch.testing.assert_close(output[0, columns], short[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(output[1:], attention_only(padded)[1:])
        for layer in (0, 1):
            hidden = cache[f"blocks.{layer}.attn.hook_pattern"][0, ..., mask[0] == 0]
            assert hidden.eq(0).all()


@pytest.mark.parametrize(
    ("x", "given", "message"),
    [
        ("some words", {}, "input is a str: .* no text"),
        (torch.zeros(2, 6), {}, "input is torch.float32: .* integer token ids"),
        (
            torch.zeros(2, 7, dtype=torch.long),
            {},
            "sequences have 7 tokens, the model takes at most 6",
        ),
        (torch.zeros(2, 6, dtype=torch.long), {"return_type": "loss"}, "no next-token loss"),
        (torch.zeros(2, 6, dtype=torch.long), {"past_kv_cache": 1}, "is bidirectional"),
        (
            torch.zeros(2, 6, dtype=torch.long),
            {"stop_at": 1},
            "no argument 'stop_at': .*did you mean 'stop_at_layer'",
        ),
        (
            torch.zeros(2, 6, dtype=torch.long),
            {"attention_mask": torch.ones(2, 5)},
            r"has shape \(2, 5\): expected that of the tokens",
        ),
    ],
)
def test_bad_input_of_token_models_is_named(attention_only, x, given, message):
    with pytest.raises(InfoFlowError, match=message):
        attention_only(x, **given)


# Precision and place


def test_float64_is_float64_throughout(layers_alike, inputs):
    model = layers_alike.double()
    output = model(inputs.double())
    state = model.state_dict()
    expected = reference.forward(model.architecture, state, inputs.double())["output"]
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


def test_layer_norm_in_half_precision(layers_alike, inputs):
    expected = layers_alike(inputs)
    output = layers_alike.to(torch.bfloat16)(inputs.to(torch.bfloat16))
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, rtol=0.1, atol=0.1)


def test_the_config_follows_the_tensors(layers_alike, capsys):
    for move, dtype, device in (
        (lambda: layers_alike.to(torch.float64), torch.float64, "cpu"),
        (lambda: layers_alike.to("cpu", torch.float32), torch.float32, "cpu"),
        (lambda: layers_alike.double(), torch.float64, "cpu"),
        (lambda: layers_alike.to(torch.bfloat16, print_details=True), torch.bfloat16, "cpu"),
        (lambda: layers_alike.to(device="meta"), torch.bfloat16, "meta"),
    ):
        assert move() is layers_alike
        assert layers_alike.blocks[0].attn.W_Q.dtype == layers_alike.cfg.dtype == dtype
        assert layers_alike.cfg.device == device
    assert capsys.readouterr().out == ""


def test_copies_and_files_of_the_whole_model(layers_alike, inputs):
    expected = layers_alike(inputs)
    kept = io.BytesIO()
    torch.save(layers_alike, kept)
    kept.seek(0)
    for twin in (copy.deepcopy(layers_alike), torch.load(kept, weights_only=False)):
        assert twin(inputs).equal(expected)
        twin.set_use_attn_result(True)
        assert not layers_alike.cfg.use_attn_result


# What TransformerLens reads


def test_weights_of_all_layers(layers_alike):
    for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"):
        expected = torch.stack([getattr(block.attn, name) for block in layers_alike.blocks])
        assert getattr(layers_alike, name).equal(expected)
    for name in ("W_in", "W_out", "b_in", "b_out"):
        expected = torch.stack([getattr(block.mlp, name) for block in layers_alike.blocks])
        assert getattr(layers_alike, name).equal(expected)
    assert layers_alike.W_E is layers_alike.embed.W_E
    assert layers_alike.W_U is layers_alike.unembed.W_U
    assert layers_alike.b_U is layers_alike.unembed.b_U
    assert layers_alike.W_E_pos.equal(torch.cat([layers_alike.W_E, layers_alike.W_pos]))
    assert layers_alike.n_params_total == sum(p.numel() for p in layers_alike.parameters())
    qk, ov = layers_alike.QK.AB, layers_alike.OV.AB
    for layer, block in enumerate(layers_alike.blocks):
        torch.testing.assert_close(qk[layer], block.attn.W_Q @ block.attn.W_K.transpose(1, 2))
        torch.testing.assert_close(ov[layer], block.attn.W_V @ block.attn.W_O)


def test_directions_of_outputs_are_columns_of_the_unembedding(attention_only):
    model = attention_only
    one, two = torch.tensor([3]), torch.tensor([3, 1])
    assert model.tokens_to_residual_directions(3).equal(model.W_U[:, 3])
    assert model.tokens_to_residual_directions(one).equal(model.W_U[:, 3])
    assert model.tokens_to_residual_directions(two).equal(model.W_U[:, [3, 1]].T)


def test_what_layers_of_different_heads_do_not_share(model, attention_only):
    assert model.heads_of_layers == (2, 5)
    assert model.all_head_labels()[1:4] == ["L0H1", "L1H0", "L1H1"]
    with pytest.raises(InfoFlowError, match=r"W_Q has a shape of its own in each layer \(\(2, 30"):
        _ = model.W_Q
    with pytest.raises(InfoFlowError, match="attention-only and has no W_in"):
        _ = attention_only.W_in
    with pytest.raises(InfoFlowError, match="attention-only and has no hook_mlp_in"):
        attention_only.set_use_hook_mlp_in(True)
    for text in (model.to_tokens, model.to_single_token, model.tokens_to_residual_directions):
        with pytest.raises(InfoFlowError, match="no tokenizer"):
            text("words")


def test_biases_up_to_a_layer(layers_alike):
    first, second = layers_alike.blocks
    before = first.attn.b_O + first.mlp.b_out
    torch.testing.assert_close(layers_alike.accumulated_bias(1), before)
    torch.testing.assert_close(
        layers_alike.accumulated_bias(1, mlp_input=True), before + second.attn.b_O
    )
    torch.testing.assert_close(
        layers_alike.accumulated_bias(2, include_mlp_biases=False),
        first.attn.b_O + second.attn.b_O,
    )


# Every public method of a cache. SSM layers are of other architectures.
CACHE_METHODS = {
    "accumulated_resid", "apply_ln_to_stack", "apply_slice_to_batch_dim", "compute_head_results",
    "decompose_resid", "get_full_resid_decomposition", "get_neuron_results", "items", "keys",
    "logit_attrs", "logit_lens", "remove_batch_dim", "stack_activation", "stack_head_results",
    "stack_neuron_results", "to", "toggle_autodiff", "values",
}  # fmt: skip
OF_OTHERS = {"compute_ssm_effective_attention", "compute_ssm_state", "ssm_layers"}


def test_every_method_of_a_cache_has_a_test():
    methods = {n for n, _ in inspect.getmembers(ActivationCache, inspect.isfunction) if n[0] != "_"}
    later = {"logit_lens"} if HAS_HOOKED_TRANSFORMER else set()
    assert methods == (CACHE_METHODS | OF_OTHERS) - later


@pytest.fixture
def cached(layers_alike, inputs):
    with torch.no_grad():
        return layers_alike.run_with_cache(inputs)


def test_cache_decompositions_sum_to_the_residual_stream(layers_alike, cached):
    _, cache = cached
    final = cache["blocks.1.hook_resid_post"]
    layer_one = cache["blocks.1.hook_resid_pre"]
    accumulated, labels = cache.accumulated_resid(layer=2, incl_mid=True, return_labels=True)
    assert labels == ["0_pre", "0_mid", "1_pre", "1_mid", "final_post"]
    assert accumulated[-1].equal(final)
    assert accumulated[2].equal(layer_one)
    for parts in (
        cache.decompose_resid(layer=2),
        cache.get_full_resid_decomposition(layer=2, expand_neurons=False),
        cache.get_full_resid_decomposition(layer=2, expand_neurons=True),
    ):
        torch.testing.assert_close(parts.sum(0), final, rtol=1e-4, atol=1e-5)
    parts = cache.decompose_resid(layer=1)
    torch.testing.assert_close(parts.sum(0), layer_one, rtol=1e-4, atol=1e-5)


def test_cache_results_of_heads_and_neurons(layers_alike, cached):
    _, cache = cached
    heads, labels = cache.stack_head_results(layer=2, return_labels=True)
    assert labels == layers_alike.all_head_labels()
    cache.compute_head_results()
    neurons = cache.stack_neuron_results(layer=2)
    assert neurons.shape == (10, 23, 8, 11)
    for layer, block in enumerate(layers_alike.blocks):
        z = cache[f"blocks.{layer}.attn.hook_z"]
        results = torch.einsum("bphd,hdm->hbpm", z, block.attn.W_O)
        torch.testing.assert_close(heads[3 * layer : 3 * layer + 3], results)
        torch.testing.assert_close(
            cache[f"blocks.{layer}.attn.hook_result"], results.permute(1, 2, 0, 3)
        )
        each = cache[f"blocks.{layer}.mlp.hook_post"].unsqueeze(-1) * block.mlp.W_out
        torch.testing.assert_close(cache.get_neuron_results(layer), each)
        torch.testing.assert_close(neurons[5 * layer : 5 * layer + 5], each.permute(2, 0, 1, 3))
    patterns = cache.stack_activation("pattern")
    assert patterns[1].equal(cache["blocks.1.attn.hook_pattern"])


def test_cache_attributes_of_outputs(layers_alike, cached):
    """Parts through the last layer norm and a column of W_U sum to the output, less the biases."""
    output, cache = cached
    parts = cache.decompose_resid(layer=2)
    normalized = cache.apply_ln_to_stack(parts, layer=2)
    gain, shift = layers_alike.ln_final.w, layers_alike.ln_final.b
    attributed = cache.logit_attrs(parts, tokens=2).sum(0)
    direction = layers_alike.W_U[:, 2]
    torch.testing.assert_close(normalized.sum(0) @ direction, attributed, rtol=1e-4, atol=1e-5)
    exact = normalized.sum(0)
    if float((exact - cache["ln_final.hook_normalized"]).abs().max()) < 1e-4:
        exact = exact * gain + shift  # where the method leaves the map of the norm to the caller
    else:
        exact = exact + shift
    whole = exact @ direction + layers_alike.b_U[2]
    torch.testing.assert_close(whole[:, -1], output[:, 2], rtol=1e-4, atol=1e-4)
    several = cache.logit_attrs(parts, tokens=torch.full((23, 8), 2))
    torch.testing.assert_close(several.sum(0), attributed, rtol=1e-4, atol=1e-5)


def test_cache_slices_copies_and_flags(layers_alike, cached, inputs):
    _, cache = cached
    assert set(cache.keys()) == {name for name, _ in cache.items()} == set(iter(cache))
    assert len(list(cache.values())) == len(cache)
    first = cache.apply_slice_to_batch_dim(0)
    assert first["blocks.0.hook_resid_pre"].equal(cache["blocks.0.hook_resid_pre"][0])
    _, single = layers_alike.run_with_cache(inputs[:1], remove_batch_dim=True)
    torch.testing.assert_close(
        single["blocks.1.hook_resid_post"], first["blocks.1.hook_resid_post"], rtol=1e-5, atol=1e-6
    )
    _, single = layers_alike.run_with_cache(inputs[:1])
    assert single.remove_batch_dim()["hook_embed"].shape == (8, 11)
    assert cache.to("cpu")["hook_embed"].device.type == "cpu"
    enabled = torch.is_grad_enabled()
    cache.toggle_autodiff(False)
    assert not torch.is_grad_enabled()
    cache.toggle_autodiff(enabled)
    _, plain = layers_alike.run_with_cache(inputs, return_cache_object=False)
    assert isinstance(plain, dict)


@pytest.mark.skipif(HAS_HOOKED_TRANSFORMER, reason="logit_lens is of TransformerLens 4")
def test_the_logit_lens_of_a_cache_ends_at_the_output(attention_only, ids):
    output, cache = attention_only.run_with_cache(ids)
    lens = cache.logit_lens(positions=None)
    torch.testing.assert_close(lens.values[-1], output, rtol=1e-5, atol=1e-6)


def test_cache_of_an_attention_only_model(attention_only, ids):
    _, cache = attention_only.run_with_cache(ids)
    final = cache["blocks.1.hook_resid_post"]
    for parts in (
        cache.decompose_resid(layer=2),
        cache.get_full_resid_decomposition(layer=2, expand_neurons=False),
    ):
        torch.testing.assert_close(parts.sum(0), final, rtol=1e-4, atol=1e-5)
