"""Shares of an answer against sums made by hand of a plain model, and sums on every family."""

from dataclasses import replace

import pytest
import torch
import transformers

from infoflow_lens import InfoFlowError, build_model, load_any, open_model
from infoflow_lens.hooks import (
    FunctionOfOutput,
    LogitDifference,
    LogProbability,
    measure_shares,
    measure_why,
    measure_why_all,
)
from infoflow_lens.models.architecture import Architecture
from tests.reference import families, zoo


@pytest.fixture
def ids():
    return zoo.tokens(1, 9)


def misses(found):
    return abs(found.distance) / float(found.values.abs().sum())


def by_hand(model, ids, answer, against):
    """GPT-2's logit difference at the last position, by what its modules wrote."""
    wrote, handles, parts = {}, [], {}
    modules = model.transformer

    def keep(name, what):
        def hook(module, args, out):
            wrote[name] = (args[0] if what == "input" else out)[0].double()

        return hook

    for layer, block in enumerate(modules.h):
        handles.append(block.attn.c_proj.register_forward_hook(keep(f"z{layer}", "input")))
        handles.append(block.mlp.register_forward_hook(keep(f"MLP {layer}", "output")))
    handles.append(modules.ln_f.register_forward_hook(keep("last", "input")))
    with torch.no_grad():
        model(ids)
        [handle.remove() for handle in handles]
        norm, n = modules.ln_f, ids.shape[1]
        deviation = (wrote["last"][-1].var(correction=0) + norm.eps).sqrt()
        direction = (model.lm_head.weight[answer] - model.lm_head.weight[against]).double()
        direction = direction * norm.weight.double() / deviation
        direction = direction - direction.mean()  # centring
        parts["token embedding"] = modules.wte(ids[0])[-1].double() @ direction
        parts["positional embedding"] = modules.wpe(torch.arange(n))[-1].double() @ direction
        n_heads = model.config.n_head
        for layer, block in enumerate(modules.h):
            matrix = block.attn.c_proj.weight.double().unflatten(0, (n_heads, -1))
            z = wrote[f"z{layer}"][-1].unflatten(-1, (n_heads, -1))
            for head in range(n_heads):
                parts[f"head {layer}.{head}"] = z[head] @ matrix[head] @ direction
            parts[f"MLP {layer}"] = wrote[f"MLP {layer}"][-1] @ direction
    return parts


@pytest.mark.parametrize("open_it", [open_model, lambda model: load_any(model)])
def test_shares_are_what_each_writer_adds_to_the_answer(open_it, ids):
    expected = by_hand(zoo.build("gpt2"), ids, 7, 3)
    found = measure_shares(open_it(zoo.build("gpt2")), ids, LogitDifference(7, 3))
    assert found.writers == tuple(expected)
    given = torch.stack([*expected.values()])
    torch.testing.assert_close(found.by_writer().values, given, rtol=1e-4, atol=1e-5)
    assert not found.values[:, :-1].any()  # at other positions nothing is written of this answer
    with torch.no_grad():
        logits = zoo.build("gpt2")(ids).logits[0, -1]
    assert found.value == pytest.approx(float(logits[7] - logits[3]), abs=1e-5)
    assert misses(found) < 1e-5
    assert abs(found.constants) > 1e-3  # biases of attention and of the last norm


def test_a_head_whose_values_are_not_shown_is_said_to_take_from_no_key(ids):
    found = measure_shares(open_model(zoo.build("gpt2")), ids, LogitDifference(7, 3))
    keys = found.by_key.clone()
    keys[0] = torch.nan
    rows = replace(found, by_key=keys).table().set_index("writer")
    assert rows.loc[found.heads[0], "from"] == ""
    assert (
        rows.loc[found.heads[1], "from"]
        == found.table().set_index("writer").loc[found.heads[1], "from"]
    )


@pytest.mark.parametrize("name", zoo.some_families([*zoo.FAMILIES], zoo.FEW))
def test_shares_add_up_on_every_family(name, ids):
    model = open_model(zoo.build(name))
    found = measure_shares(model, ids, LogitDifference(7, 3, position=4))
    if name in ("bert", "gemma2"):  # an activation before the logits; a soft cap on them
        assert 1e-4 < misses(found) < 0.5
        assert f"{found.distance:+.3g} is left over, " in found.summary()
    else:
        assert misses(found) < 1e-4
    heads = [i for i, writer in enumerate(found.writers) if writer in found.heads]
    torch.testing.assert_close(
        found.by_key.sum(-1), found.values[heads].sum(-1), rtol=1e-4, atol=1e-4
    )


def test_two_attentions_that_one_sum_adds_hide_no_mlp(ids):
    """MLPs of DiffLlama were no writers, and shares of heads went through them."""
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    config = transformers.DiffLlamaConfig(vocab_size=50, initializer_range=0.3, **shape, **heads)
    plain, kept = transformers.DiffLlamaForCausalLM(config).eval(), {}
    plain.model.norm.register_forward_pre_hook(lambda _, args: kept.update(end=args[0]))
    for layer, block in enumerate(plain.model.layers):
        block.mlp.register_forward_hook(lambda _, args, out, n=layer: kept.update({n: out}))
    with torch.no_grad():
        plain(ids)
        scale = (kept["end"][0, -1].square().mean() + plain.model.norm.variance_epsilon).rsqrt()
        read = scale * plain.model.norm.weight * (plain.lm_head.weight[7] - plain.lm_head.weight[3])
        expected = [float(kept[layer][0, -1] @ read) for layer in (0, 1)]
    found = measure_shares(open_model(plain), ids, LogitDifference(7, 3))
    shares = dict(zip(found.writers, found.by_writer().values.tolist(), strict=True))
    assert [shares["MLP 0"], shares["MLP 1"]] == pytest.approx(expected, abs=1e-4)
    assert misses(found) < 1e-4


def test_a_third_sublayer_writes_too(ids):
    """Per-layer inputs of Gemma 4 were no writers, and shares went through their gates."""
    plain, kept = families.build("gemma4_text"), {}
    plain.model.norm.register_forward_pre_hook(lambda _, args: kept.update(end=args[0]))
    for layer, block in enumerate(plain.model.layers):
        block.layer_scalar.fill_(0.5 + layer)
        norm = block.post_per_layer_input_norm
        norm.register_forward_hook(lambda _, args, out, n=layer: kept.update({n: out}))
    with torch.no_grad():
        plain(ids)
        scale = (kept["end"][0, -1].square().mean() + plain.config.rms_norm_eps).rsqrt()
        read = scale * plain.model.norm.weight * (plain.lm_head.weight[7] - plain.lm_head.weight[3])
        # a block multiplies all that it has summed
        factors = (0.5 * 1.5, 1.5)
        expected = [f * float(kept[n][0, -1] @ read) for n, f in enumerate(factors)]
    found = measure_shares(open_model(plain), ids, LogitDifference(7, 3))
    shares = dict(zip(found.writers, found.by_writer().values.tolist(), strict=True))
    given = [shares["third sublayer 0"], shares["third sublayer 1"]]
    assert given == pytest.approx(expected, abs=1e-5)
    assert misses(found) < 1e-4


def test_shares_add_up_in_models_over_vectors():
    shape = Architecture(n_heads=(2, 5), d_model=30, d_token=3, n_tokens=7, d_mlp=11)
    model = build_model(shape, seed=5)
    x = torch.randn(1, 7, 3, generator=torch.Generator().manual_seed(0))
    first = FunctionOfOutput(lambda output: output[:, 0], is_linear=True, name="the first output")
    found = measure_shares(model, x, first)
    assert misses(found) < 1e-5
    assert "the first output is" in found.summary()


def test_what_is_not_linear_says_so(ids):
    found = measure_shares(open_model(zoo.build("gpt2")), ids, LogProbability(7))
    with torch.no_grad():
        alone = zoo.build("gpt2")(ids).logits[0, -1].log_softmax(-1)[7]
    assert found.value == pytest.approx(float(alone), abs=1e-5)
    assert "shares of its linear part do not add up" in found.summary()


def test_what_half_precision_rounds_is_laid_on_it(ids):
    model = open_model(families.build("llama").to(torch.bfloat16))  # has no soft cap
    assert (
        "half precision rounds so much"
        in measure_shares(model, ids, LogitDifference(5, 7)).summary()
    )


def test_a_table_says_from_which_token_a_head_took_its_share(ids, tmp_path):
    found = measure_shares(load_any(zoo.build("llama")), ids, LogitDifference(7))
    table = found.table()
    assert table["share"].sum() + found.constants == pytest.approx(found.value, abs=1e-4)
    assert (table["share"].abs().diff().dropna() <= 1e-9).all()
    row = table[table["writer"] == "head 1.2"].iloc[0]
    keys = found.by_key[found.heads.index("head 1.2")]
    assert row["of it"] == pytest.approx(float(keys[int(keys.abs().argmax())]))
    found.save(tmp_path / "shares")
    assert type(found).load(tmp_path / "shares").values.equal(found.values)
    assert "writer" in found._repr_html_()
    assert repr(found) == f"Shares({found.summary()})"


@pytest.mark.parametrize(
    ("readout", "message"),
    [
        (LogitDifference("w5 w6"), "is 2 tokens .*expected one"),
        (LogitDifference(()), "the answer is empty"),
        (LogitDifference(7, position=9), "position is 9, and there are 9"),
        (None, r"readout is None: expected a Readout such as LogitDifference\("),
        (FunctionOfOutput(lambda output: 3), "gives int: expected a tensor with a number for each"),
    ],
)
def test_readouts_that_read_nothing_are_refused(readout, message, ids):
    model = open_model(zoo.build("gpt2"), zoo.tokenizer())
    with pytest.raises(InfoFlowError, match=message):
        measure_shares(model, ids, readout)


class Packed(torch.autograd.Function):
    """An operation whose derivative is undefined, as of torch's packed int8 weights."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


@pytest.mark.parametrize("pack", [torch.Tensor.detach, Packed.apply])
def test_what_has_no_derivative_is_refused(pack, ids, monkeypatch):
    """All shares, and all parts of reasons, were 0."""
    model = zoo.build("llama")
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            plain = module.forward
            monkeypatch.setattr(module, "forward", lambda x, plain=plain: pack(plain(x)))
    for measure in (
        lambda: measure_shares(model, ids, LogitDifference(7, 3)),
        lambda: measure_why(model, ids, 1, 2),
        lambda: measure_why_all(model, ids),
    ):
        with pytest.raises(InfoFlowError, match=r"LlamaForCausalLM has no derivative .*float32"):
            measure()


def test_words_need_a_tokenizer_and_one_sequence(ids):
    model = open_model(zoo.build("gpt2"))
    with pytest.raises(InfoFlowError, match="is a word, but the model has no tokenizer"):
        measure_shares(model, ids, LogitDifference("w5"))
    with pytest.raises(InfoFlowError, match=r"2 sequences: expected one.* a pair of texts as a tu"):
        measure_shares(model, zoo.tokens(2, 9), LogitDifference(5))


def test_a_pair_of_texts_is_one_sequence():
    """It was read as two."""
    words = zoo.pair_tokenizer()
    model, plain = open_model(zoo.build("bert"), words), zoo.build("bert")
    found = measure_shares(model, ("w5 w6", "w7"), LogitDifference(9, 23, -1))
    with torch.no_grad():
        logits = plain(**words("w5 w6", "w7", return_tensors="pt")).logits[0, -1]
    assert found.value == pytest.approx(float(logits[9] - logits[23]), abs=1e-5)


def logit_direction(model, ids, norm, weight):
    """By what a last state adds to the logit of 7 minus that of 3, while the norm is held."""
    kept = []
    handle = norm.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    model(ids)
    handle.remove()
    scale = (kept[0][0, -1].square().mean() + 1e-6).rsqrt()
    return scale * weight * (model.lm_head.weight[7] - model.lm_head.weight[3])


@torch.no_grad()
def test_what_runs_in_the_place_of_attention_writes_too(ids):
    """Shares went through linear attention and the gate of attention: two fifths did not add up."""
    plain, kept = families.build("qwen3_next"), {}
    first, second = plain.model.layers
    for name, module in (("mixer 0", first.linear_attn), ("attention", second.self_attn.o_proj),
                         ("MLP 0", first.mlp), ("MLP 1", second.mlp)):  # fmt: skip
        module.register_forward_hook(lambda _, args, out, name=name: kept.update({name: out}))
    norm = plain.model.norm
    read = logit_direction(plain, ids, norm, 1 + norm.weight)
    expected = {name: float(out.reshape(1, -1, 32)[0, -1] @ read) for name, out in kept.items()}
    with torch.enable_grad():
        found = measure_shares(open_model(plain), ids, LogitDifference(7, 3))
    shares = dict(zip(found.writers, found.by_writer().values.tolist(), strict=True))
    # the heads together, gated, write what the output matrix of attention gives
    shares["attention"] = sum(share for name, share in shares.items() if "head" in name)
    assert {name: shares[name] for name in expected} == pytest.approx(expected, abs=1e-5)
    assert misses(found) < 1e-4


@pytest.mark.parametrize("kind", ["jamba", "lfm2", "bamba", "falcon_h1"])
def test_shares_of_models_with_few_attentions_add_up(kind, ids):
    found = measure_shares(open_model(families.build(kind)), ids, LogitDifference(7, 3))
    assert "mixer 0" in found.writers
    assert misses(found) < 1e-4
