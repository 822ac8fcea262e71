"""Opened models: the tools of TransformerLens, and ours, on the object as it is given."""

import copy
import threading

import pytest
import torch
import transformers
from torch import nn
from transformer_lens import patching
from transformer_lens.head_detector import detect_head

from infoflow_lens import (
    InfoFlowError,
    JacobianInfluence,
    PositionsProbe,
    RecoveryProbe,
    ask,
    attach,
    flow,
    inspect_model,
    load_any,
    run_probes,
)
from infoflow_lens.hooks import PatternsProbe, PowerRollout, measure_mechanisms, measure_why
from infoflow_lens.hooks.model.inputs import Batch
from infoflow_lens.models.named import open_model
from tests.conftest import some_of
from tests.reference import families, zoo

IDS = families.tokens()
RIGHT = families.masks(IDS)["right"]


@pytest.fixture(scope="module")
def plain():
    """Models of transformers by type and attention function, each made once."""
    made = {}

    def build(kind, how="eager"):
        if (kind, how) not in made:
            made[kind, how] = families.build(kind, how)
        return made[kind, how]

    return build


@pytest.fixture(scope="module")
def opened(plain):
    made = {}

    def build(kind, how="eager"):
        if (kind, how) not in made:
            made[kind, how] = open_model(plain(kind, how))
        return made[kind, how]

    return build


# The tools of TransformerLens


def test_what_is_opened_is_the_object_itself(plain, opened):
    model, named = plain("gpt2"), opened("gpt2")
    assert named.original_model is model
    assert open_model(named) is named
    with torch.no_grad():
        expected = model(IDS)
        assert torch.equal(named(IDS), expected.logits)
        assert torch.equal(named(IDS, return_type="output").logits, expected.logits)
        assert named(IDS, return_type=None) is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == {
        n.removeprefix("original_model."): p.data_ptr() for n, p in named.named_parameters()
    }
    assert (named.cfg.d_vocab, named.cfg.n_ctx, named.cfg.attention_dir) == (101, 64, "causal")


PATCHES = ["resid_pre", "resid_mid", "attn_out", "mlp_out"]
HEAD_PATCHES = ["out_by_pos", "q_by_pos", "k_by_pos", "v_by_pos", "pattern_by_pos", "out_all_pos"]
HEAD_PATCHES += ["q_all_pos", "k_all_pos", "v_all_pos", "pattern_all_pos", "pattern_dest_src_pos"]
PATCHES += [f"attn_head_{name}" for name in HEAD_PATCHES]


@pytest.mark.parametrize(
    "name", some_of(PATCHES, "resid_mid", "attn_head_q_by_pos", "attn_head_pattern_by_pos")
)
def test_patching_runs_and_reaches(opened, name):
    named, ids = opened("gpt2"), IDS[:1, :4]
    _, cache = named.run_with_cache(ids)
    corrupted = (ids + 40) % 101

    def metric(logits):
        return logits[0, -1, 5] - logits[0, -1, 6]

    found = getattr(patching, f"get_act_patch_{name}")(named, corrupted, cache, metric)
    with torch.no_grad():
        untouched = metric(named(corrupted))
    assert found.isfinite().all()
    assert (found - untouched).abs().max() > 1e-3


def test_a_patched_state_is_that_of_a_hook_of_torch(plain, opened):
    model, named = plain("llama"), opened("llama")
    with torch.no_grad():
        _, cache = named.run_with_cache(IDS)
        corrupted = (IDS + 40) % 101
        found = patching.get_act_patch_resid_pre(named, corrupted, cache, lambda out: out[0, -1, 5])

        def by_hand(layer, position):
            def put(module, args):
                stream = args[0].clone()
                stream[:, position] = cache["resid_pre", layer][:, position]
                return (stream, *args[1:])

            handle = model.model.layers[layer].register_forward_pre_hook(put)
            out = model(corrupted).logits[0, -1, 5]
            handle.remove()
            return out

        expected = torch.stack(
            [torch.stack([by_hand(layer, place) for place in range(7)]) for layer in range(2)]
        )
    assert torch.allclose(found, expected, atol=1e-6)


WRITERS = {
    "jamba": "embed 0_mixer_out 0_mlp_out 1_attn_out 1_mlp_out",
    "nemotron_h": "embed 0_mixer_out 1_attn_out",
    "falcon_h1": "embed 0_mixer_out 0_mlp_out 1_mixer_out 1_mlp_out",
    "gemma4_text": "embed 0_attn_out 0_mlp_out 0_extra_out 1_attn_out 1_mlp_out 1_extra_out",
}


@pytest.mark.parametrize(("kind", "writers"), WRITERS.items())
def test_decompositions_hold_mixers_and_third_sublayers(opened, kind, writers):
    expected = writers.split()
    _, cache = opened(kind).run_with_cache(IDS)
    last = opened(kind).cfg.n_layers - 1
    parts, labels = cache.decompose_resid(return_labels=True)
    assert torch.allclose(parts.sum(0), cache["resid_post", last], atol=1e-5)
    assert labels == expected
    some = {"mode": "attn", "incl_embeds": False, "pos_slice": -1}
    if kind == "falcon_h1":  # attention is added together with what stands beside it
        with pytest.raises(InfoFlowError, match="mode is 'attn', and no layer below has hook_attn"):
            cache.decompose_resid(**some)
        return
    heads, names = cache.decompose_resid(return_labels=True, **some)
    assert names == [label for label in expected if label.endswith("attn_out")]
    assert torch.equal(heads[-1], cache["attn_out", last][:, -1])


def test_what_a_mixer_lacks_has_its_name(opened):
    assert "blocks.1.hook_mixer_out" in opened("minimax").lacks()


def test_the_head_detector_runs_on_an_encoder(plain):
    named = open_model(zoo.build("bert"), zoo.tokenizer())
    found = detect_head(named, "w5 w6 w7 w5 w6 w7", "previous_token_head")
    _, cache = named.run_with_cache("w5 w6 w7 w5 w6 w7")
    patterns = torch.stack([cache["pattern", layer][0] for layer in range(2)])
    expected = patterns.diagonal(-1, -2, -1).sum(-1) / patterns.sum((-1, -2))
    assert torch.allclose(found, expected, atol=1e-2)  # it rounds


def test_decompositions_add_up_to_the_logits(plain, opened):
    for kind in ("gpt2", "llama", "gptj", "opt"):
        model, named = plain(kind), opened(kind)
        logits, cache = named.run_with_cache(IDS)
        constant = named.ln_final.numbers().bias @ named.W_U + named.unembed.b_U
        expected = logits[..., 5] - logits[..., 7] - (constant[5] - constant[7])
        for parts in (
            cache.decompose_resid(),
            cache.get_full_resid_decomposition(),
            cache.get_full_resid_decomposition(expand_neurons=False),
            cache.stack_neuron_results(-1, incl_remainder=True),
        ):
            assert torch.allclose(parts.sum(0), cache["resid_post", 1], atol=1e-5)
            shares = cache.logit_attrs(parts, torch.tensor(5), torch.tensor(7))
            assert torch.allclose(shares.sum(0), expected, atol=1e-5)
        heads = cache.stack_head_results(1, incl_remainder=True).sum(0)
        assert torch.allclose(heads, cache["resid_post", 0], atol=1e-5)
        lens = cache.accumulated_resid(apply_ln=True)
        assert torch.allclose(lens[-1] @ named.W_U + named.unembed.b_U, logits, atol=1e-4)
        assert not any(p.requires_grad for p in model.parameters())


REFUSED = [
    ("bert", lambda cache: cache.decompose_resid(), "do not add up to blocks.1.hook_resid_post"),
    ("bert", lambda cache: cache.apply_ln_to_stack(torch.zeros(1, 2, 7, 32)), "no final norm"),
    ("gemma2", lambda cache: cache.stack_head_results(), "heads do not add up to blocks.0.hook_at"),
    ("gemma2", lambda cache: cache.get_neuron_results(0), "neurons do not add up to blocks.0.hoo"),
    ("mixtral", lambda cache: cache.get_neuron_results(0), "no single matrix makes what the MLP"),
    ("gpt2", lambda cache: cache.decompose_resid(apply_ln=True, layer=1), "norms of layer 1 are"),
    ("cohere", lambda cache: cache.model.tokens_to_residual_directions(5), "scales or caps what"),
    ("jamba", lambda cache: cache.stack_head_results(), "blocks.0.attn.hook_z .* it runs mamba"),
    ("falcon_h1", lambda cache: cache.stack_head_results(), r"out is not shown \(another mixer"),
    ("doge", lambda cache: cache.decompose_resid(), "up to blocks.1.hook_resid_post .* is no sum"),
    ("gpt2", lambda cache: cache.decompose_resid(mode="heads"), "mode is 'heads': expected one of"),
    ("gpt2", lambda cache: cache.decompose_resid(3, mode="mlp"), "^layer is 3: expected 0 to 2"),
    ("gpt2", lambda cache: cache.decompose_resid(mlp_input=True), "layer is None: expected 0 to 1"),
    (
        "falcon_h1",
        lambda cache: run_probes(cache.model, IDS, [PowerRollout()], progress=False),
        r"'blocks.0.hook_attn_out' \(another mixer's output is added .*\): expected",
    ),
    # heads and neurons are not all that writes
    (
        "falcon_h1",
        lambda cache: cache.get_full_resid_decomposition(expand_neurons=False),
        "another mixer's output",
    ),
    ("jamba", lambda cache: cache.get_full_resid_decomposition(), "hook_z .* it runs mamba"),
    ("jamba", lambda cache: measure_why(cache.model, IDS[:1], 0, 0), r"with attention \(here 1\)"),
    ("bitnet", lambda cache: cache.model.blocks[0].attn.W_O, "blocks.0.attn has no W_O"),
]


@pytest.mark.parametrize(("kind", "ask", "match"), REFUSED)
def test_what_would_be_wrong_is_refused_with_the_reason(opened, kind, ask, match):
    _, cache = opened(kind).run_with_cache(IDS)
    with pytest.raises(InfoFlowError, match=match):
        ask(cache)


# What hooks see and change


def test_edits_of_states_are_those_of_hooks_of_torch(plain, opened):
    """Also with a sum in the hook, which is no sum of the model."""
    model, named = plain("bert"), opened("bert")
    steer = torch.randn(32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = named.run_with_hooks(
            IDS, **RIGHT, fwd_hooks=[("blocks.0.hook_resid_post", lambda t, hook: t + steer)]
        )
        handle = model.bert.encoder.layer[0].register_forward_hook(lambda m, a, out: out + steer)
        expected = model(IDS, **RIGHT).logits
        handle.remove()
    assert torch.allclose(found, expected, atol=1e-6)


EDITS = {
    "hook_embed": lambda model: model.transformer.wte,
    "blocks.0.hook_attn_out": lambda model: model.transformer.h[0].attn.c_proj,
    "blocks.0.hook_mlp_out": lambda model: model.transformer.h[0].mlp.c_proj,
    "ln_final.hook_normalized": lambda model: model.transformer.ln_f,
    "unembed.hook_out": lambda model: model.lm_head,
    "hook_pos_embed": lambda model: model.transformer.wpe,
    "blocks.1.mlp.hook_post": lambda model: model.transformer.h[1].mlp.act,
}


@pytest.mark.parametrize("name", EDITS)
def test_edits_of_parts_are_those_of_hooks_of_torch(plain, opened, name):
    model, named = plain("gpt2"), opened("gpt2")
    with torch.no_grad():
        found = named.run_with_hooks(IDS, fwd_hooks=[(name, lambda t, hook: t * 0.5)])
        handle = EDITS[name](model).register_forward_hook(lambda m, args, out: out * 0.5)
        expected = model(IDS).logits
        handle.remove()
    assert torch.allclose(found, expected, atol=1e-6)


def test_the_scale_of_the_final_norm_can_be_frozen(plain, opened):
    model, named = plain("llama"), opened("llama")
    with torch.no_grad():
        found = named.run_with_hooks(
            IDS, fwd_hooks=[("ln_final.hook_scale", lambda t, hook: 2 * t)]
        )
        expected = model.lm_head(model.model(IDS)[0] / 2)
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("how", ["eager", "sdpa"])
def test_gradients_at_hook_points_are_those_of_torch(plain, how):
    model = copy.deepcopy(plain("llama", how))
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    named, seen = open_model(model), {}
    points = ["blocks.0.hook_resid_post", "blocks.1.attn.hook_z"]
    hooks = [(p, lambda grad, hook: seen.__setitem__(hook.name, grad.clone())) for p in points]
    with named.hooks(bwd_hooks=hooks):
        named(IDS)[0, -1, 5].backward()
    kept = []
    handles = [
        model.model.layers[0].register_forward_hook(lambda m, args, out: kept.append(out)),
        model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(
            lambda m, args: kept.append(args[0])
        ),
    ]
    grads = torch.autograd.grad(model(IDS).logits[0, -1, 5], kept)
    for handle in handles:
        handle.remove()
    assert torch.allclose(seen[points[0]], grads[0], atol=1e-6)
    assert torch.allclose(seen[points[1]].flatten(-2), grads[1], atol=1e-6)


def unmask(scores, hook):
    return scores.nan_to_num(neginf=0.0)


def test_scores_are_lowest_where_the_call_closes_keys(opened):
    """And editing them leaves closed what stays so, and opens what gets a number."""
    for how in ("eager", "sdpa"):
        named = opened("llama", how)
        logits, cache = named.run_with_cache(IDS, **RIGHT)
        open_keys = cache["attn_scores", 0] > -torch.inf
        real = RIGHT["attention_mask"].bool()
        causal = torch.ones(7, 7, dtype=bool).tril()
        expected = causal & real[:, None, None]
        queries = real[:, None, :, None].expand_as(open_keys)
        assert torch.equal(open_keys[queries], expected.expand_as(open_keys)[queries])
        same = named.run_with_hooks(
            IDS, **RIGHT, fwd_hooks=[("blocks.0.attn.hook_attn_scores", lambda t, hook: t + 0)]
        )
        assert torch.allclose(same[real], logits[real], atol=1e-6)

        with named.hooks(fwd_hooks=[("blocks.0.attn.hook_attn_scores", unmask)]):
            _, cache = named.run_with_cache(IDS, names_filter=["blocks.0.attn.hook_pattern"])
        assert (cache["pattern", 0] > 0).all()


def test_packed_sequences_and_token_types_go_to_the_model(plain, opened):
    model, named = plain("llama", "sdpa"), opened("llama", "sdpa")
    packed = torch.tensor([[0, 0, 0, 1, 1, 1, 1]]).expand(2, -1)
    mask = torch.ones(7, 7, dtype=bool).tril() & (packed[:, None, None] == packed[:, None, :, None])
    kwargs = {"attention_mask": mask, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 2)}
    logits, cache = named.run_with_cache(IDS, **kwargs)
    assert torch.equal(cache["attn_scores", 1] > -torch.inf, mask.expand(2, 4, 7, 7))
    with torch.no_grad():
        assert torch.allclose(logits, model(IDS, **kwargs).logits, atol=1e-5)
        bert, types = opened("bert"), (torch.arange(14) % 7 > 3).long().reshape(2, 7)
        logits, _ = bert.run_with_cache(IDS, token_type_ids=types)
        assert torch.equal(logits, plain("bert")(IDS, token_type_ids=types).logits)


@pytest.mark.parametrize("how", ["eager", "sdpa"])
def test_cached_decoding_shows_one_query_over_all_keys(plain, opened, how):
    model, named = plain("llama", how), opened("llama", how)
    _, whole = named.run_with_cache(IDS)
    with torch.no_grad():
        past = model(IDS[:, :6], use_cache=True).past_key_values
    _, cache = named.run_with_cache(IDS[:, 6:], past_key_values=past)
    assert cache["pattern", 1].shape == (2, 4, 1, 7)
    assert torch.allclose(cache["pattern", 1], whole["pattern", 1][:, :, 6:], atol=1e-5)
    assert torch.allclose(cache["resid_post", 1], whole["resid_post", 1][:, 6:], atol=1e-4)


def test_hook_points_fire_in_each_pass_of_generation(plain, opened):
    named, lengths = opened("gpt2"), []

    def note(pattern, hook):
        lengths.append(tuple(pattern.shape[-2:]))

    settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with named.hooks(fwd_hooks=[("blocks.1.attn.hook_pattern", note)]):
        found = named.generate(IDS, **settings)
    assert torch.equal(found, plain("gpt2").generate(IDS, **settings))
    assert lengths == [(7, 7), (1, 8), (1, 9)]


def test_a_call_leaves_nothing_behind(plain, opened):
    """After an error in a hook, and beside another thread on the same model."""
    model, named = plain("gpt2"), opened("gpt2")
    state = torch.get_rng_state()

    def fail(t, hook):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        named.run_with_hooks(IDS, fwd_hooks=[("blocks.1.hook_resid_mid", fail)])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert len(torch.overrides._get_current_function_mode_stack()) == 0
    seen, found = [], []

    def look(t, hook):
        seen.append(threading.get_ident())
        if len(seen) == 1:
            other = threading.Thread(target=lambda: found.append(model(IDS + 1).logits))
            other.start()
            other.join()

    named.run_with_hooks(IDS, fwd_hooks=[(f"blocks.{i}.hook_resid_post", look) for i in (0, 1)])
    assert set(seen) == {threading.get_ident()}
    assert len(seen) == 2
    assert torch.equal(found[0], model(IDS + 1).logits)


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_dropout_is_drawn_as_without_hooks(kind):
    named = open_model(families.build(kind))
    named.train()
    results = []
    for names in ([], ["blocks.0.attn.hook_pattern", "blocks.1.hook_mlp_out"]):
        torch.manual_seed(7)
        results.append(named.run_with_hooks(IDS, fwd_hooks=[(n, lambda t, hook: None) for n in names]))  # fmt: skip  # noqa: E501
    assert torch.equal(*results)
    assert not torch.equal(results[0], named.eval()(IDS))


# A model that changes after it was opened


def own_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Each query sees itself and the key before."""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    near = torch.ones(query.shape[2], key.shape[2], dtype=bool).tril().triu(-1)
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~near, -torch.inf)
    weights = scores.softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def changed(model, change):
    """Change a model in place."""
    if change == "own attention":
        transformers.AttentionInterface.register("two_keys", own_attention)
        model.set_attn_implementation("two_keys")
    elif change == "sdpa":
        model.set_attn_implementation("sdpa")
    elif change == "cap off":
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = None
    elif change == "assigned weights":
        state = {n: p * 1.5 for n, p in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    elif change == "double":
        model.double()
    elif change == "vocabulary":
        model.resize_token_embeddings(120, mean_resizing=False)
    elif change == "function":
        inner = model.model.layers[0].mlp.forward
        model.model.layers[0].mlp.forward = lambda x: 2 * inner(x)  # no matrix makes it any more


CHANGES = ["own attention", "sdpa", "assigned weights", "double", "vocabulary", "function"]


@pytest.mark.parametrize("change", [*CHANGES, "cap off"])
def test_a_model_is_shown_as_it_is_now(change):
    model = families.build("gemma2" if change == "cap off" else "llama")
    named = open_model(model)
    named.run_with_cache(IDS)
    changed(model, change)
    logits, cache = named.run_with_cache(IDS)
    with torch.no_grad():
        expected = model(IDS, output_hidden_states=True)
    assert torch.allclose(logits, expected.logits, atol=1e-5)
    assert torch.allclose(cache["resid_pre", 1], expected.hidden_states[1], atol=1e-5)
    weight = model.model.layers[0].self_attn.o_proj.weight
    assert torch.equal(named.blocks[0].attn.W_O.flatten(0, 1), weight.T)
    fresh = open_model(copy.deepcopy(model)).run_with_cache(IDS)[1]
    assert fresh.keys() == cache.keys()
    for name in fresh:
        assert torch.allclose(fresh[name], cache[name], atol=1e-6), name
    assert (named.cfg.dtype, named.cfg.d_vocab) == (logits.dtype, logits.shape[-1])
    if change == "own attention":
        visible = (cache["attn_scores", 0] > -torch.inf).sum(-1)
        assert torch.equal(visible, torch.tensor([1, 2, 2, 2, 2, 2, 2]).expand(2, 4, 7))


def test_a_call_whose_attentions_do_not_fit_is_refused():
    model = families.build("llama")
    named = open_model(model)

    class Repeat(nn.Module):  # it attends more often in some calls
        def __init__(self, inner):
            super().__init__()
            self.inner, self.n = inner, 1

        def forward(self, hidden_states, **kwargs):
            return [self.inner(hidden_states, **kwargs) for _ in range(self.n)][-1]

    model.model.layers[1].self_attn = Repeat(model.model.layers[1].self_attn)
    named.run_with_cache(IDS, use_cache=False)
    model.model.layers[1].self_attn.n = 2
    with pytest.raises(InfoFlowError, match=r"block 1 .* has 2 softmaxes .*, and had 1 then"):
        named.run_with_cache(IDS, use_cache=False)
    other = ["blocks.0.attn.hook_pattern"]  # of a block that fits
    named.run_with_cache(IDS, use_cache=False, names_filter=other)


def test_calls_that_would_be_wrong_are_refused(opened):
    named = open_model(families.build("gpt2"))
    model = named.original_model
    for module in model.modules():  # as transformers sets it
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = True
    model.train()
    with pytest.raises(InfoFlowError, match="has gradient checkpointing, which runs its blocks ag"):
        named.run_with_cache(IDS)
    model.eval()
    named.run_with_cache(IDS)
    with pytest.raises(InfoFlowError, match="return_type is 'loss': expected 'logits', 'output'"):
        named(IDS, return_type="loss")
    with pytest.raises(InfoFlowError, match="has no tokenizer for 'a text'"):
        named("a text")
    with pytest.raises(InfoFlowError, match=r"is a DataParallel.*give its .module"):
        open_model(nn.DataParallel(model))
    with pytest.raises(InfoFlowError, match="of type str: expected a module"):
        open_model("gpt2")


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_compiled_functions_inside_a_model_are_seen_into():
    """They run as what they were made of while somebody looks, and compiled again afterwards."""
    compiled, counts = families.build("llama"), []

    def count(graph, inputs):
        counts.append(1)
        return graph.forward

    expected = open_model(families.build("llama")).run_with_cache(IDS)[1]
    for layer in compiled.model.layers:
        layer.mlp.forward = torch.compile(layer.mlp.forward, backend=count)
    with torch.no_grad():
        compiled(IDS)
        n_graphs = len(counts)
        _, cache = open_model(compiled).run_with_cache(IDS)
        compiled(IDS)
    assert n_graphs == len(counts) > 0
    for name in expected:
        assert torch.equal(cache[name], expected[name]), name
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_hooks_on_a_model_that_gets_other_hook_points_are_refused():
    named = open_model(families.build("gpt2"))
    block = named.original_model.transformer.h[1]
    hooks = [("blocks.0.attn.hook_z", lambda t, hook: None)]
    with named.hooks(fwd_hooks=hooks):
        block.mlp.c_proj = nn.Sequential(block.mlp.c_proj, nn.Tanh())
        with pytest.raises(InfoFlowError, match=r"its hook points \(blocks.1.mlp.hook_post\)"):
            named(IDS)
    assert "blocks.1.mlp.hook_post" in named.hook_dict
    named.run_with_hooks(IDS, fwd_hooks=hooks)
    assert "blocks.1.mlp.hook_post" not in named.hook_dict


def test_copies_are_of_their_own():
    named = open_model(families.build("gpt2"))
    other = copy.deepcopy(named)
    with torch.no_grad():
        other.original_model.transformer.h[0].attn.c_proj.weight.zero_()
    assert other.blocks[0].attn.W_O.abs().sum() == 0
    assert named.blocks[0].attn.W_O.abs().sum() > 0
    _, cache = other.run_with_cache(IDS)
    assert cache["attn_out", 0].abs().max() == 0


# Texts


def test_texts_become_what_the_model_takes():
    model, tokenizer = zoo.build("bert"), zoo.tokenizer()
    named = open_model(model, tokenizer)
    made = tokenizer(["w5 w6", "w7 w8 w9"], return_tensors="pt", padding=True)
    with torch.no_grad():
        expected = model(**made).logits
        assert torch.equal(named(["w5 w6", "w7 w8 w9"]), expected)
        assert torch.allclose(named("w5 w6"), expected[:1, :3], atol=1e-4)
    assert named.to_tokens("w5 w6").tolist() == [[2, 5, 6]]
    assert named.to_single_token("w5") == 5
    with pytest.raises(InfoFlowError, match="'w5 w6' is 2 tokens"):
        named.to_single_token("w5 w6")


# Other models than a stack over ids


def check_states(named, states, *args, **kwargs):
    """The states of blocks are those that transformers gives."""
    _, cache = named.run_with_cache(*args, **kwargs)
    for layer, state in enumerate(states):
        assert torch.allclose(cache["resid_pre", layer], state, atol=1e-5)
    return cache


@pytest.mark.parametrize("kind", some_of(["bart", "t5"], "bart"))
def test_encoders_with_decoders_are_opened_by_their_stacks(kind):
    model = families.build(kind, auto=["AutoModel"])
    call = {"input_ids": IDS, "decoder_input_ids": IDS + 1}
    with torch.no_grad():
        found = model(**call, output_attentions=True, output_hidden_states=True)
    for side in ("encoder", "decoder"):
        named = open_model(model, stack=side)
        states = found[f"{side}_hidden_states"][:2]
        cache = check_states(named, states, **call)
        for layer in range(2):
            own = f"{side}_attentions"
            assert torch.allclose(cache["pattern", layer], found[own][layer], atol=1e-5)
            if side == "decoder":
                cross = cache[f"blocks.{layer}.attn_1.hook_pattern"]
                assert torch.allclose(cross, found.cross_attentions[layer], atol=1e-5)
    with pytest.raises(InfoFlowError, match="expected one of 'encoder', 'decoder'"):
        open_model(model)


@pytest.mark.parametrize("kind", some_of(["bart", "t5"], "bart"))
def test_probes_on_a_decoder_read_its_own_tokens_and_mask(kind):
    """They took those of the encoder: lengths and tokens were wrong, without a word."""
    model = families.build(kind, auto=["AutoModel"])
    decoder = open_model(model, stack="decoder")
    own = IDS[:, :-1] + 1  # shorter than what the encoder reads
    masks = torch.ones_like(IDS), torch.ones_like(own)
    masks[0][1, -3:], masks[1][1, -2:] = 0, 0
    call = {"input_ids": IDS, "attention_mask": masks[0], "decoder_input_ids": own}
    with torch.no_grad():
        expected = model(**call, output_attentions=True).decoder_attentions
    with attach(decoder, PatternsProbe()) as attached:
        decoder(**call)
    for one, other in zip(attached.results()[0].patterns, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    with attach(decoder, PatternsProbe(), PositionsProbe()) as attached:
        decoder(**call, decoder_attention_mask=masks[1])
    assert attached.results()[0].lengths.tolist() == masks[1].sum(1).tolist()
    attached = attach(decoder, PatternsProbe())
    with pytest.raises(InfoFlowError, match="the call has no decoder_input_ids"), attached:
        decoder(input_ids=IDS)
    needs_own_call = "call the model yourself inside attach"
    with pytest.raises(InfoFlowError, match=needs_own_call):
        run_probes(decoder, IDS, [PatternsProbe()], progress=False)
    # what runs the model anew
    attached = attach(decoder, JacobianInfluence())
    with pytest.raises(InfoFlowError, match=needs_own_call), attached:
        decoder(**call)


@pytest.mark.parametrize("kind", some_of(["bart", "t5"], "bart"))
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_a_stack_given_alone_reads_its_ids_as_any_model(kind, side):
    """Each was refused as the decoder behind an encoder: its config speaks of both."""
    alone = getattr(families.build(kind, auto=["AutoModel"]), f"get_{side}")()
    with torch.no_grad():
        expected = alone(IDS, output_attentions=True, use_cache=False).attentions
    found, _ = run_probes(alone, IDS, [PatternsProbe(), JacobianInfluence()], progress=False)
    for one, other in zip(found.patterns, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_an_encoder_whose_decoder_does_not_run_is_to_be_given_alone():
    """It was a ValueError of transformers."""
    model = families.build("t5", auto=["AutoModelForSeq2SeqLM"])
    needed = "expected decoder_input_ids beside the ids; or the encoder alone"
    with pytest.raises(InfoFlowError, match=needed):
        ask(open_model(model, stack="encoder"), IDS[0], 5, 7, progress=False)
    with pytest.raises(InfoFlowError, match="call the model yourself inside attach"):
        ask(open_model(model, stack="decoder"), IDS[0], 5, 7, progress=False)


def test_a_stack_may_be_named_by_the_end_of_its_path():
    """The errors of folders say stack="encoder"; of a model with a head that was refused."""
    model = families.build("bart", auto=["AutoModelForSeq2SeqLM"])
    for side in ("encoder", "decoder"):
        found = open_model(model, stack=side).anatomy
        assert found.blocks is found.stacks[f"model.{side}"]
    with pytest.raises(InfoFlowError, match="stack is 'coder', and BartFor"):
        open_model(model, stack="coder")


@pytest.mark.parametrize("kind", some_of(["bart", "t5"], "t5"))
def test_the_embedding_of_a_stack_is_of_what_it_reads(kind):
    """That of a decoder was the encoder's."""
    model = families.build(kind, auto=["AutoModelForSeq2SeqLM"])
    call = {"input_ids": IDS, "decoder_input_ids": IDS.flip(1)}
    embed = model.get_input_embeddings()
    for side in ("encoder", "decoder"):
        named = open_model(model, stack=side)
        _, cache = named.run_with_cache(**call)
        read = call["decoder_input_ids" if side == "decoder" else "input_ids"]
        scale = getattr(model.get_encoder().embed_tokens, "embed_scale", 1)
        torch.testing.assert_close(cache["hook_embed"], embed(read) * scale)
        if kind == "bart":  # which takes these without ids
            own = "inputs_embeds" if side == "encoder" else "decoder_inputs_embeds"
            ids = {name: one for name, one in call.items() if one is not read}
            _, cache = named.run_with_cache(**ids, **{own: embed(read) * 2})
            torch.testing.assert_close(cache["hook_embed"], embed(read) * 2)


def test_types_of_tokens_are_no_embedding_of_ids(plain):
    """GPT-2 embeds them by the same module, and hook_embed showed the types."""
    model, types = plain("gpt2"), torch.ones_like(IDS)
    named, embed = open_model(model), model.get_input_embeddings()
    _, cache = named.run_with_cache(IDS, token_type_ids=types)
    assert torch.equal(cache["hook_embed"], embed(IDS))
    _, cache = named.run_with_cache(inputs_embeds=embed(IDS) * 2, token_type_ids=types)
    assert torch.equal(cache["hook_embed"], embed(IDS) * 2)


@pytest.mark.parametrize(
    "asked",
    [{"tokenizer": str.split}, {"stack": "decoder"}, {"example": {"input_ids": torch.ones(2, 3)}}],
)
def test_what_an_opened_model_cannot_follow_is_refused(opened, asked):
    """It was left out in silence."""
    (name,), named = asked, opened("gpt2")
    with pytest.raises(InfoFlowError, match=f"opened already, and another {name} is given"):
        open_model(named, **asked)
    assert open_model(named, named.tokenizer) is named


def test_what_is_no_tokenizer_and_weights_without_numbers_are_refused_by_name():
    """They were errors of Python and of torch."""
    model = families.build("gpt2")
    with pytest.raises(InfoFlowError, match="tokenizer is a str: expected a tokenizer"):
        load_any(model, tokenizer="gpt2")
    with pytest.raises(InfoFlowError, match="on the device 'meta'"):
        open_model(model.to("meta"))


def test_a_wrapper_that_names_no_argument_is_opened_by_token_ids(plain):
    class Wrapper(nn.Module):  # as PeftModel is
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, *args, **kwargs):
            return self.model(*args, **kwargs)

    named = open_model(Wrapper(plain("gpt2")))
    assert torch.equal(named(IDS), plain("gpt2")(IDS).logits)
    assert named.cfg.d_vocab == 101


def test_models_of_pixels_and_of_sounds_are_opened_by_an_example():
    generator = torch.Generator().manual_seed(0)
    vit = families.build("vit", "sdpa", auto=["AutoModel"])
    pixels = torch.randn(2, 3, 8, 8, generator=generator)
    named = open_model(vit, example={"pixel_values": pixels})
    with torch.no_grad():
        expected = vit(pixels, output_hidden_states=True)
    check_states(named, expected.hidden_states[:2], pixels)
    encoder = families.build("whisper", auto=["AutoModel"]).encoder
    sound = {"input_features": torch.randn(2, 8, 12, generator=generator)}
    with torch.no_grad():
        expected = encoder(**sound, output_hidden_states=True)
    check_states(open_model(encoder, example=sound), expected.hidden_states[:2], **sound)


def test_a_pass_of_its_own_that_lacks_inputs_is_refused_by_their_names():
    """It ended in an AttributeError of the model; what the error advises gives influence."""
    config = transformers.DecisionTransformerConfig(
        state_dim=3, act_dim=2, hidden_size=16, n_layer=2, n_head=2, max_ep_len=9
    )
    torch.manual_seed(0)
    model = transformers.DecisionTransformerModel(config).eval()
    rest = {"actions": torch.randn(2, 4, 2), "rewards": torch.randn(2, 4, 1)}
    rest |= {"returns_to_go": torch.randn(2, 4, 1), "timesteps": torch.arange(4).expand(2, 4)}
    rest |= {"attention_mask": torch.ones(2, 4)}
    given = {"states": torch.randn(2, 4, 3)} | rest
    named = open_model(model, example=given)
    with attach(named, PositionsProbe()) as attached:
        named(**given)
    assert attached.results()[0].n_sequences == 2
    message = "opened on states, actions, .* with which it fails .*'NoneType' object"
    with pytest.raises(InfoFlowError, match=message), attach(named, JacobianInfluence()):
        named(**given)

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, states):
            return self.model(states=states, **rest)

    own = open_model(Own(), example={"states": given["states"]})
    with attach(own, JacobianInfluence()) as attached:
        own(given["states"])
    assert attached.results()[0].influence.any()


def test_an_error_of_the_model_itself_stays_where_it_lacks_a_mask_alone(monkeypatch):
    example = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    opened = open_model(families.build("bert"), example=example)

    def fail(self, *args, **more):
        raise TypeError("of its own")

    monkeypatch.setattr(type(opened), "forward", fail)
    with pytest.raises(TypeError, match="of its own"):
        Batch(IDS).run(opened)


def test_influence_on_what_is_named_in_the_call():
    """What processors give is a dictionary: passes that were made anew ran on token ids."""
    vit = families.build("vit", "sdpa", auto=["AutoModel"])
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    named = open_model(vit, example={"pixel_values": pixels})
    found = []
    for args, kwargs in (((pixels,), {}), ((), {"pixel_values": pixels})):
        with attach(named, JacobianInfluence("resid_post", positions=(0,))) as attached:
            named(*args, **kwargs)
        found.append(attached.results()[0].influence)
    layers = next(m for m in vit.modules() if isinstance(m, nn.ModuleList) and len(m) == 2)
    with torch.no_grad():
        entering = vit(pixels, output_hidden_states=True).hidden_states[0][:1]

    def states(x):
        after = []
        for layer in layers:
            x = layer(x)
            after.append(x[0, 0])
        return torch.stack(after)

    expected = torch.autograd.functional.jacobian(states, entering)[:, :, 0].norm(dim=(1, 3))
    for influence in found:
        torch.testing.assert_close(influence[:, 0, 0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", some_of(["gpt2", "bert", "llama", "xlnet"], "gpt2"))
@pytest.mark.parametrize("side", ["none", "left"])
def test_influence_on_vectors_in_the_place_of_ids(plain, kind, side):
    """Passes that were made anew took them for ids."""
    model = plain(kind)
    masks = families.masks(IDS)[side] if side != "none" else {}
    given = {"inputs_embeds": model.get_input_embeddings()(IDS).detach()}, {"input_ids": IDS}
    found = []
    for one in given:
        with attach(model, JacobianInfluence("resid_post", positions=(-1,))) as attached:
            model(**one, **masks)
        found.append(attached.results()[0].influence)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_probes_on_a_model_of_positions_first():
    """A call without names was refused as one of another number of sequences."""
    layer = nn.TransformerEncoderLayer(12, 3, 20, batch_first=False)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(5, 3, 12, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        attention = model.layers[0].self_attn
        _, expected = attention(x, x, x, average_attn_weights=False)
    for args, kwargs in (((x,), {}), ((), {"src": x})):
        named = open_model(model, example={"src": x[:, :2]})
        with attach(named, PatternsProbe()) as attached:
            named(*args, **kwargs)
        torch.testing.assert_close(attached.results()[0].patterns[0], expected)


def test_influence_where_positions_are_first_names_what_helps():
    """It said that a call like the example was expected, which the call was."""
    models = [
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(12, 3, 20, batch_first=is_first), 2,
            enable_nested_tensor=False,
        ).eval()
        for is_first in (False, True)
    ]  # fmt: skip
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))
    turned = x.transpose(0, 1)
    named = open_model(models[0], example={"src": turned})
    wanted = pytest.raises(InfoFlowError, match=r"positions first.*batch_first=True.*state_dict")
    with wanted, attach(named, JacobianInfluence("resid_post")):
        named(turned)
    named = open_model(models[1], example={"src": x})
    with attach(named, JacobianInfluence("resid_post")) as attached:
        named(x)
    # the model that was refused gives the reference
    expected = [
        torch.autograd.functional.jacobian(lambda one: models[0](one[:, None])[:, 0], row)
        for row in x
    ]
    found = attached.results()[0].influence[-1]
    torch.testing.assert_close(found, torch.stack(expected).norm(dim=(2, 4)), rtol=1e-4, atol=1e-6)


def test_what_is_no_model_of_ids_says_so():
    """Random ids of an unknown vocabulary were a TypeError, and remedies spoke of ids alone."""
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    vit = families.build("vit", "sdpa", auto=["AutoModel"])
    named = open_model(vit, example={"pixel_values": pixels})
    with pytest.raises(InfoFlowError, match="ViTModel has no vocabulary"):
        inspect_model(named)
    for given in (pixels, {"pixel_values": pixels}):
        with pytest.raises(InfoFlowError, match="call it yourself inside attach"):
            run_probes(named, given, [PatternsProbe()], progress=False)


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_transformer_of_torch_alone(norm_first):
    layer = nn.TransformerEncoderLayer(12, 3, 20, norm_first=norm_first, batch_first=False)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(5, 2, 12, generator=torch.Generator().manual_seed(0))  # positions first
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    named = open_model(model, example={"src": x, "mask": mask})
    with torch.no_grad():
        _, cache = named.run_with_cache(x, mask=mask)
        assert torch.allclose(cache["resid_post", 0], model.layers[0](x, mask).transpose(0, 1), atol=1e-6)  # fmt: skip  # noqa: E501
        read = model.layers[0].norm1(x) if norm_first else x
        attention = model.layers[0].self_attn
        _, weights = attention(read, read, read, attn_mask=mask, average_attn_weights=False)
    assert torch.allclose(cache["pattern", 0], weights, atol=1e-6)
    assert torch.equal(cache["attn_scores", 0] > -torch.inf, (mask == 0).expand(2, 3, 5, 5))


# Our own measures


@pytest.mark.parametrize(("kind", "how"), [("gpt2", "sdpa"), ("bert", "eager"), ("llama", "sdpa")])
def test_probes_measure_opened_models(plain, kind, how):
    """Ranks against the plain model's weights, in padded sequences; influence by differences."""
    model = plain(kind, how)
    named = open_model(model)
    rows = [IDS[0], IDS[1, :4], IDS[1]]
    probes = [PositionsProbe(ranks=(1, 2)), JacobianInfluence("resid_post", positions=(-1,))]
    positions, influence = run_probes(named, rows, probes, progress=False)
    for index, row in enumerate(rows):
        with torch.no_grad():
            found = plain(kind)(row[None], output_attentions=True)
        for layer in range(2):
            weights = found.attentions[layer][0]
            expected = weights.argsort(-1, descending=True)[..., :2]
            expected[..., 1] = torch.where((weights > 0).sum(-1) > 1, expected[..., 1], -1)
            ranks = positions.positions[layer][index, :, : len(row)]
            assert torch.equal(ranks, expected)

    def last_state(enters):
        kept = []
        keep = lambda m, a, out: kept.append(out if torch.is_tensor(out) else out[0])  # noqa: E731
        first, last = (block.module for block in named.anatomy.blocks)
        handles = [
            first.register_forward_pre_hook(lambda m, args: (enters[None], *args[1:])),
            last.register_forward_hook(keep),
        ]
        model(rows[0][None])
        for handle in handles:
            handle.remove()
        return kept[0][0, -1]

    _, cache = named.run_with_cache(rows[0][None])
    jacobian = torch.autograd.functional.jacobian(last_state, cache["resid_pre", 0][0])
    expected = jacobian.square().sum((0, 2)).sqrt()
    found = influence.influence[1, 0, 0]
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-5 * float(expected.max()))


def test_attached_probes_cost_no_further_passes():
    model, forwards = families.build("gpt2"), []
    model.transformer.h[0].register_forward_pre_hook(lambda module, args: forwards.append(1))
    with attach(model, PositionsProbe()) as probes:
        for _ in range(3):
            model(IDS)
    assert probes.results()[0].positions[0].shape[0] == 6
    assert len(forwards) == 2 + 3  # the anatomy, and the calls


def test_every_entrance_takes_an_opened_model():
    named = open_model(families.build("bert"))
    capabilities = inspect_model(named)
    assert capabilities.problems() == ()
    assert capabilities.kind == "BertForMaskedLM"
    assert [layer.attends for layer in capabilities.layers] == ["bidirectional"] * 2
    ids = torch.randint(3, 100, (40, 7), generator=torch.Generator().manual_seed(2))
    (recovered,) = run_probes(named, ids, [RecoveryProbe((1,))], progress=False)
    assert recovered.errors.isfinite().any() if hasattr(recovered, "errors") else recovered
    found = measure_mechanisms(named, ids[:8], progress=False)
    assert found.to_frame().shape[0] > 0


SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
TEXT = {**SMALL, "intermediate_size": 16, "vocab_size": 50, "max_position_embeddings": 16}
SIZES = {
    "CLIPModel": {
        "text_config": {**TEXT, "eos_token_id": 49, "bos_token_id": 48, "pad_token_id": 0},
        "vision_config": {**SMALL, "intermediate_size": 16, "image_size": 16, "patch_size": 8},
    },
    "BertForMultipleChoice": TEXT,
    "PatchTSTForPrediction": {
        "num_input_channels": 1, "context_length": 16, "patch_length": 4, "d_model": 16,
        "num_attention_heads": 2, "num_hidden_layers": 2, "ffn_dim": 16, "prediction_length": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "takes", "example"),
    [
        ("CLIPModel", "pixel_values", None),
        ("BertForMultipleChoice", "input_ids", {"input_ids": torch.arange(20).reshape(2, 2, 5)}),
        ("PatchTSTForPrediction", "past_values", {"past_values": torch.ones(2, 16, 1)}),
    ],
)
def test_models_of_other_inputs_are_refused_with_what_they_take(name, takes, example):
    """Their own errors came through, such as "'NoneType' object has no attribute 'shape'"."""
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**SIZES[name])).eval()
    message = rf"{name} does not run .* its forward takes \(.*{takes}.*or a part of the model"
    with pytest.raises(InfoFlowError, match=message):
        run_probes(model, torch.ones(2, 5).long(), [PositionsProbe()], progress=False)
    with pytest.raises(InfoFlowError, match=message):
        flow(model, [[1, 2, 3]], progress=False)
    if example is None:
        assert open_model(model.text_model).cfg.n_layers == 2
    else:
        assert open_model(model, example=example).cfg.n_layers == 2


def test_ids_of_embeddings_that_were_resized_are_read():
    """They were refused, with the advice to replace labels such as -100."""
    model = zoo.build("gpt2").eval()
    named, hosted = open_model(model), zoo.bridge("gpt2")
    before = model.config.vocab_size
    ids = torch.tensor([[1, 2, before + 2, 3]])
    resized = r"tokenizer of this model; if its embeddings were resized .* load it again"
    for each in (named, hosted):
        with pytest.raises(InfoFlowError, match=resized):
            run_probes(each, ids, [PositionsProbe()], progress=False)
        with pytest.raises(InfoFlowError, match="replace labels such as -100"):
            run_probes(each, -ids, [PositionsProbe()], progress=False)
    model.resize_token_embeddings(before + 5, mean_resizing=False)
    (found,) = run_probes(named, ids, [PositionsProbe()], progress=False)
    expected = model(ids, output_attentions=True).attentions
    for layer, positions in enumerate(found.positions):
        assert positions[0, :, :, 0].equal(expected[layer][0].argmax(-1))
    assert named.cfg.d_vocab == before + 5


def test_the_first_token_is_left_out_wherever_padding_stands():
    """Of shorter texts padding was left out, and BOS stayed."""
    tokenizer = zoo.tokenizer()
    tokenizer.padding_side = "left"
    named = open_model(zoo.build("bert"), tokenizer)
    assert named.cfg.tokenizer_prepends_bos
    texts = ["w5 w6 w7", "w9"]
    ids = named.to_tokens(texts, prepend_bos=False)
    for row, text in zip(ids, texts, strict=True):
        (own,) = named.to_tokens(text, prepend_bos=False)
        assert own.tolist() == tokenizer(text)["input_ids"][1:]
        assert row[-len(own) :].equal(own)
        assert (row[: -len(own)] == tokenizer.pad_token_id).all()
