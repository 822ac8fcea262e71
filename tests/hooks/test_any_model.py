"""Every question takes any Transformer as it is given, and says of it what the model does."""

import warnings

import pandas as pd
import pytest
import torch
import transformers
from torch import nn

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
    open_model,
    probe,
    propagate,
    run_probes,
    why,
    why_all,
)
from infoflow_lens.hooks import (
    AttendedProbe,
    AttentionFlow,
    AttentionRollout,
    AttentionWeight,
    GradedSetsProbe,
    LogitDifference,
    LogProbability,
    PatternsProbe,
    ResampleInfluence,
    measure_mechanisms,
    measure_shares,
)
from infoflow_lens.hooks.model.capabilities import layers_that_mix_elsewhere, note_other_mixing
from infoflow_lens.hooks.model.inputs import Batch
from infoflow_lens.hooks.model.points import list_trials
from infoflow_lens.probing import measuring
from infoflow_lens.probing.part import load_part
from tests.conftest import some_of
from tests.hooks.test_invariants import EVERY, numbers
from tests.reference import families, zoo

SIZES = {"vocab_size": 67, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 24}  # fmt: skip
KINDS = {  # without a language head, post-norm, one block twice, grouped keys, other names
    "bert": {},
    "albert": {"embedding_size": 12},
    "distilbert": {"dim": 24, "n_layers": 2, "n_heads": 4, "hidden_dim": 24},
    "llama": {"num_key_value_heads": 2},
}


class Plain(nn.Module):
    """One of nobody's library: a pre-norm block with fused attention."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(67, 12)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x @ self.embed.weight.T


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.up, self.down, self.norms = nn.Linear(12, 20), nn.Linear(20, 12), nn.LayerNorm(12)

    def forward(self, x):
        parts = self.qkv(self.norms(x)).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        z = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(z.transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.norms(x))))


def build(kind):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        if kind == "plain":
            model = Plain()
        else:
            import transformers

            config = transformers.AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind]})
            model = transformers.AutoModel.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data *= 4
    return model.eval()


@pytest.fixture(params=["plain", *KINDS])
def model(request):
    return build(request.param)


@pytest.fixture
def ids():
    return torch.randint(5, 60, (10, 9), generator=torch.Generator().manual_seed(1))


def patterns_alone(model, ids):
    """By the library itself, in eager attention; of our own model, by hand."""
    if isinstance(model, Plain):
        x, found = model.embed(ids), []
        for layer in model.layers:
            q, k, _ = layer.qkv(layer.norms(x)).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
            scores = (q @ k.transpose(-1, -2)) / 2
            closed = torch.ones(9, 9).triu(1) > 0
            found.append(scores.masked_fill(closed, -torch.inf).softmax(-1))
            x = layer(x)
        return found
    model.set_attn_implementation("eager")
    found = list(model(ids, output_attentions=True).attentions)
    model.set_attn_implementation("sdpa")
    return found


def test_first_choices_are_those_of_the_model_alone(model, ids):
    (found,) = run_probes(model, ids, [PositionsProbe((1,))], progress=False)
    with torch.no_grad():
        for ranked, pattern in zip(found.positions, patterns_alone(model, ids), strict=True):
            assert ranked[..., 0].equal(pattern.argmax(-1).to(ranked.dtype))


@pytest.mark.parametrize("model", some_of(["plain", *KINDS], "plain", "llama"), indirect=True)
def test_calls_of_the_object_itself_are_measured_while_probes_are_attached(model, ids):
    def probes():
        influence = JacobianInfluence("resid_post", positions=(-1,))  # by passes of its own
        return [PositionsProbe((1, 2)), RecoveryProbe((1,)), influence]

    expected = run_probes(model, ids, probes(), progress=False)
    before = model(ids)
    with torch.no_grad(), attach(model, *probes()) as attached:
        for part in ids.split(5):
            model(part)
        found = attached.results()
    model(ids)  # measured no more
    assert attached.results()[0].positions[0].shape == found[0].positions[0].shape
    for ours, theirs in zip(found[0].positions, expected[0].positions, strict=True):
        assert ours.equal(theirs)
    assert found[1].fvu[0].equal(expected[1].fvu[0])
    assert torch.allclose(found[2].influence, expected[2].influence, atol=1e-5)
    assert "forward" not in vars(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    after = model(ids)
    for one, other in zip(_tensors(before), _tensors(after), strict=True):
        assert one.equal(other)


def test_generation_is_measured_of_the_model_that_is_called_without_a_cache():
    """The remedies were an argument of another library, and a batch, which had run."""
    model, ids = families.build("llama"), families.tokens()
    with attach(model, PositionsProbe()), pytest.raises(InfoFlowError, match="use_cache=False"):
        model.generate(ids, max_new_tokens=3)
    with attach(model, PositionsProbe()) as probes:
        model.generate(ids, max_new_tokens=3, do_sample=False, use_cache=False)
    assert probes.results()[0].lengths.tolist() == [n for n in (7, 8, 9) for _ in ids]
    opened = open_model(model)
    with attach(opened, PositionsProbe()) as probes:
        opened.generate(ids, max_new_tokens=1)
    with pytest.raises(InfoFlowError, match="calls the model inside, so attach to that"):
        probes.results()


def test_backward_hooks_of_the_users_take_no_part_in_our_derivatives():
    """A block with one ran on copies: an MLP was missing in shares, and ask ended in a KeyError.

    Those that change gradients changed ours.
    """
    plain, ids, seen = families.build("gpt2"), families.tokens()[:1], []
    model = open_model(plain)
    measures = {
        "shares": lambda: measure_shares(model, ids, LogProbability(5)).to_frame(),
        "ask": lambda: ask(model, ids, 5, 6, quick=True, progress=False).to_frame("heads"),
        "influence": lambda: run_probes(
            model, ids, [JacobianInfluence(positions=(-1,))], progress=False
        )[0].to_frame(),
    }
    expected = {name: measure() for name, measure in measures.items()}

    def double(module, *gradients):
        seen.append(module)
        return tuple(None if one is None else 2 * one for one in gradients[0])

    for name in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        plain.requires_grad_(False)
        handle = getattr(plain.transformer.h[1], name)(double)
        for which, measure in measures.items():
            pd.testing.assert_frame_equal(measure(), expected[which], rtol=1e-5)
        assert not seen
        plain.requires_grad_(True)(ids).logits.sum().backward()
        assert seen  # it is where it was
        handle.remove()
        seen.clear()


def test_why_runs_in_inference_mode():
    """It said that the weights had been made there."""
    model = load_any(zoo.build("gpt2"), tokenizer=zoo.tokenizer())
    with torch.inference_mode():
        found = why(model, "w5 w6 w7 w5", 1, 0)
        every = why_all(model, "w5 w6 w7 w5")
    assert found.margin == pytest.approx(float(every.margins[1][0, 0, -1]), abs=1e-6)


class Flagged(Plain):
    """What its calls have beside ids is in no batch."""

    def forward(self, ids, flag):
        assert flag
        return super().forward(ids)


ATTACHED = {
    "decoder": lambda: (
        open_model(families.build("t5"), stack="decoder"),
        {"input_ids": families.tokens(), "decoder_input_ids": families.tokens()[:, :5]},
    ),
    "pictures": lambda: (
        open_model(families.build("vit"), example={"pixel_values": torch.ones(2, 3, 8, 8)}),
        {"pixel_values": torch.ones(3, 3, 8, 8)},
    ),
    "flag": lambda: (Flagged(), {"ids": families.tokens() % 67, "flag": True}),
}


@pytest.mark.parametrize("make", ATTACHED.values(), ids=ATTACHED)
def test_attached_probes_of_attention_run_no_passes_of_their_own(make):
    model, given = make()
    opened, calls = model, []
    if isinstance(model, Flagged):
        opened = open_model(model, example=given)
    else:
        model = model.original_model
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad(), attach(opened, PositionsProbe(), AttendedProbe()) as probes:
        opened(**given)
    handle.remove()
    assert len(calls) == 1
    assert len(probes.results()[0].positions[0]) == len(next(iter(given.values())))


def _tensors(output):
    return (
        [output]
        if isinstance(output, torch.Tensor)
        else [t for t in output.to_tuple() if isinstance(t, torch.Tensor)]
    )


def test_influence_is_the_jacobian_of_the_model_alone(model, ids):
    """By what enters the first block, which stands behind the norm of embeddings in BERTs."""
    jacobians = JacobianInfluence("resid_post", positions=(-1,))
    (found,) = run_probes(model, ids[:1], [jacobians], progress=False)
    if hasattr(model, "config"):
        model.set_attn_implementation("eager")
    blocks = [block.module for block in open_model(model).anatomy.blocks]
    seen = {"entered": [], "left": []}

    def last_state(x=None):
        def enter(module, args):
            seen["entered"].append(args[0])
            return (x, *args[1:]) if x is not None and len(seen["entered"]) == 1 else None

        def leave(module, args, out):
            seen["left"].append(out if isinstance(out, torch.Tensor) else out[0])

        seen.update(entered=[], left=[])
        handles = [module.register_forward_pre_hook(enter) for module in {*blocks}]
        handles += [module.register_forward_hook(leave) for module in {*blocks}]
        model(ids[:1])
        for handle in handles:
            handle.remove()
        return seen["left"][-1][0, -1]

    last_state()
    jacobian = torch.autograd.functional.jacobian(last_state, seen["entered"][0].detach())
    norms = jacobian[:, 0].square().sum(dim=(0, 2)).sqrt()
    torch.testing.assert_close(
        found.full()[-1, 0, 8].float(), norms, rtol=1e-3, atol=1e-4 * float(norms.max())
    )


@pytest.mark.parametrize("model", some_of(["plain", *KINDS], "bert"), indirect=True)
def test_every_other_question_takes_it(model, ids, tmp_path):
    assert not inspect_model(model, ids).problems()
    assert abs(why(model, ids[:1], 1, 2).distance) < 1e-3
    assert flow(model, ids[:1], progress=False).influence is not None
    assert measure_mechanisms(model, ids[:2], progress=False).mechanisms()
    found = probe(model, ids, probes=("positions", "recovery"), progress=False)
    assert found.positions.n_sequences == 10


def test_a_model_that_is_opened_or_held_is_the_same(ids):
    model = build("bert")
    expected = run_probes(model, ids, [PositionsProbe((1,))], progress=False)[0].positions
    holder = type("Held", (), {"_model": model})()  # as some libraries wrap a module
    for given in (open_model(model), load_any(model), holder):
        found = run_probes(given, ids, [PositionsProbe((1,))], progress=False)[0].positions
        assert all(a.equal(b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ["bert", "albert"])
def test_a_folder_without_a_language_head_is_loaded_as_it_is(kind, ids, tmp_path):
    model = build(kind)
    model.save_pretrained(tmp_path)
    loaded = load_any(tmp_path)
    assert type(model).__name__ in loaded.description
    expected, found = (
        run_probes(one, ids, [PositionsProbe((1,))], progress=False)[0].positions
        for one in (model, loaded)
    )
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))


def test_what_has_no_attention_is_refused_by_name(ids):
    with pytest.raises(InfoFlowError, match="no attention was seen in Sequential"):
        run_probes(nn.Sequential(nn.Embedding(67, 5)), ids, [PositionsProbe()], progress=False)


ALWAYS = ("squeezebert", "gemma3n_text", "jamba", "xlm")
RIGHT_OR_SAID = some_of(sorted({*families.KINDS, *ALWAYS}), *ALWAYS)


def test_an_embedding_that_has_positions_first_is_shown_as_others_are():
    """XLNet turns the ids; recovery ended in an error of torch."""
    model, ids = families.build("xlnet"), families.tokens()
    named, embed = open_model(model), model.get_input_embeddings()
    _, cache = named.run_with_cache(ids)
    assert torch.equal(cache["hook_embed"], embed(ids))
    found = named.run_with_hooks(ids, fwd_hooks=[("hook_embed", lambda t, hook: t * 0.5)])
    handle = embed.register_forward_hook(lambda module, args, out: out * 0.5)
    expected = model(ids)[0]
    handle.remove()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    inputs = torch.cat([ids] * 5)
    run_probes(model, inputs, [RecoveryProbe((1,))], progress=False)


@torch.no_grad()
def test_layers_without_attention_have_no_heads():
    """And what heads of the others read is what transformers gives."""
    model, ids = families.build("jamba"), families.tokens()
    (attention,) = model(ids, output_attentions=True).attentions
    probes = [PositionsProbe((1,), spread=True), PatternsProbe(), AttendedProbe(0.5)]
    positions, patterns, attended = run_probes(model, ids, probes, progress=False)
    n_heads = attention.shape[1]
    for found in (positions.argmax, patterns.patterns, attended.attended, positions.entropy):
        assert [layer.shape[1] for layer in found] == [0, n_heads]
    torch.testing.assert_close(patterns.patterns[1], attention, rtol=0, atol=1e-6)
    assert positions.argmax[1].long().equal(attention.argmax(dim=-1))
    assert attended.attended[1].equal(attention >= 0.5 * attention.amax(dim=-1, keepdim=True))
    for result in (positions, patterns, attended):
        assert result.notes == ("layer 0: no attention, so no heads",)
        assert set(result.to_frame()["layer"]) == {1}
        with pytest.raises(InfoFlowError, match="nothing to draw here"):
            result.plot(layer=0)
        assert result.plot(layer=1).axes
    assert set(positions.summary()["layer"]) == {1}
    probe = PositionsProbe((1,))
    named = open_model(model)
    named.run_with_hooks(ids, fwd_hooks=probe.fwd_hooks(named))
    assert probe.result().argmax[1].equal(positions.argmax[1])
    for asked in (positions, attended):
        with pytest.raises(InfoFlowError, match="layer 0 has no heads"):
            propagate(asked)
    with pytest.raises(InfoFlowError, match="strength of layer 0 is of no heads"):
        propagate(strength=patterns.patterns)


def test_layers_without_attention_are_named_where_all_must_have_it(monkeypatch):
    """Eager attention was asked for, which such a layer does not have."""
    model = open_model(families.build("jamba"))
    for measure in (MEASURES["RecoveryProbe 0"], MEASURES["mechanisms"]):
        with pytest.raises(InfoFlowError, match=r"blocks.0.attn.hook_.* it runs mamba \("):
            measure(model, torch.cat([families.tokens()] * 3))
    said = []
    found = probe(model, families.tokens(), progress=False, say=said.append)
    assert set(found.positions.summary()["layer"]) == {1}
    missing = {"attn.hook_z": r"it runs mamba \(", "hook_nothing": "no hook point 'blocks"}
    for name, reason in missing.items():
        with pytest.raises(InfoFlowError, match=reason):
            model.run_with_hooks(families.tokens(), fwd_hooks=[(f"blocks.0.{name}", print)])
    left_out = [line.split()[2] for line in said if "layer 0 of" in line and "runs mamba" in line]
    assert left_out == ["labels", "recovery", "routes"]
    why = r"labels cannot be measured in layer 0 of .* runs mamba"
    with pytest.raises(InfoFlowError, match=rf"^{why}"):
        probe(model, families.tokens(), probes=("labels",), progress=False)
    monkeypatch.setattr(measuring, "part_names", lambda: ("labels",))
    with pytest.raises(InfoFlowError, match=rf"nothing can be measured: {why}"):
        probe(model, families.tokens(), progress=False)
    assert [layer.mixer for layer in inspect_model(model).layers] == [
        "mamba (JambaMambaMixer)", None]  # fmt: skip


def test_a_run_measures_influence_where_layers_lack_attention(tmp_path):
    """It was refused with what is predicted beside it, though influence needs no heads."""
    model, ids = open_model(families.build("jamba")), families.tokens()
    for out in (tmp_path / "run", tmp_path / "run"):  # and again, from what is kept
        found = probe(model, ids, out, probes=("positions", "influence"), progress=False)
        assert list(found.found) == ["positions", "influence"]
    exact = JacobianInfluence("resid_post", seed=found.config.seed)
    (alone,) = run_probes(model, ids, [exact], progress=False)
    torch.testing.assert_close(found.influence.influence, alone.influence)
    (sentence,) = found.findings()
    assert "measured alone, as sets are predicted from heads of every layer" in sentence
    assert "in layer 0 of this JambaForCausalLM: it has no attention and runs mamba" in sentence
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    assert sentence[1:] in page
    assert load_part("influence").title in page
    assert len(pd.read_csv(tmp_path / "run" / "influence.csv")) == alone.influence.numel()
    assert not found.agreement
    assert found.curve is None


# by the layers in which something mixes positions besides attention, and where attention is added
MIXING = {
    "falcon_h1": ([0, 1], "self_attn.o_proj"),
    "convbert": ([0, 1], ""),
    "nystromformer": ([0, 1], ""),
    "zamba2": ([1], ""),
    "llama": ([], "self_attn.o_proj"),
    "jamba": ([], ""),
    "deepseek_v3": ([], "self_attn.o_proj"),
}


@pytest.mark.parametrize(("kind", "layers", "output"), [(k, *v) for k, v in MIXING.items()])
def test_what_mixes_positions_beside_attention_is_said(kind, layers, output):
    """Predicted sets were of attention alone, and too small, without a word."""
    model, ids = open_model(families.build(kind)), families.tokens()[:1]
    found = inspect_model(model, ids)
    assert [n for n, layer in enumerate(found.layers) if layer.mixes_elsewhere] == layers
    said = [line for line in found.problems() if "more than attention" in line]
    assert len(said) == bool(layers)
    if output:  # in the plain model without attention, does a token reach those behind it?
        plain = families.build(kind)
        with torch.no_grad():
            for layer in plain.model.layers:
                layer.get_submodule(output).weight.zero_()
            other = ids.clone()
            other[0, 2] = (other[0, 2] + 9) % 50 + 4
            moved = (plain(ids).logits - plain(other).logits).abs().amax(-1)[0]
        assert bool(moved[3:].max() > 1e-4) == bool(layers)


def test_pictures_of_one_channel_are_tried_for_what_mixes():
    """Their one channel was taken for a single position, which cannot tell."""
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        image_size=16, patch_size=8, num_channels=1,
    )  # fmt: skip
    pictures = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    model = open_model(transformers.ViTModel(config).eval(), example={"pixel_values": pictures})
    assert note_other_mixing(model, Batch(pictures)) == ""
    assert list_trials(model)[layers_that_mix_elsewhere] == []


@pytest.mark.parametrize(("first", "n"), [(5, 9), (6, 2)])
def test_neither_a_large_first_state_nor_a_short_text_hides_what_mixes(first, n):
    """Trained models write so much at the first token that all else beside it is small."""
    plain = families.build("falcon_h1")
    with torch.no_grad():
        plain.model.embed_tokens.weight[5] *= 3000
    batch = Batch(torch.arange(first, first + n)[None])
    assert layers_that_mix_elsewhere(open_model(plain), batch) == [0, 1]


def test_a_layer_that_only_mixes_names_what_can_be_asked_for():
    """The remedies were a TransformerLens model, and a rule that flow does not take."""
    model, ids = open_model(families.build("nemotron_h")), families.tokens()[:1]
    with pytest.raises(InfoFlowError, match=r"layer 0 shows no state .* state='resid_post'"):
        run_probes(model, ids, [JacobianInfluence()], progress=False)
    last = JacobianInfluence(state="resid_post", positions=(-1,))
    found, positions = run_probes(model, ids, [last, PositionsProbe()], progress=False)
    assert found.influence.isfinite().all()
    with pytest.raises(InfoFlowError, match=r"layer 0 has no heads.* ask\(\) and Jac"):
        propagate(positions)


def test_sources_that_hold_several_tokens_are_said():
    """What enters MobileBERT holds both neighbours of a token, whose influence it was called."""
    for kind, mixes in {"mobilebert": True, "bert": False}.items():
        plain, ids = families.build(kind), families.tokens()[:1]
        enters = next(m for n, m in plain.named_modules() if n.endswith("embeddings"))
        other = ids.clone()
        other[0, 2] += 1
        moved = (enters(ids) - enters(other)).abs().sum(-1)[0] > 1e-6
        assert moved.nonzero().flatten().tolist() == ([1, 2, 3] if mixes else [2])
        model = open_model(plain)
        resample = ResampleInfluence(ids + 1, state="resid_post")
        probes = [
            PositionsProbe(), AttentionRollout(), JacobianInfluence("resid_post"), resample
        ]  # fmt: skip
        batch = [ids[0, :1], ids[0]]  # of one token nothing can be told
        for result in [*run_probes(model, batch, probes, progress=False), flow(model, ids)]:
            said = [note for note in result.notes if note.startswith("what enters layer 0 holds")]
            assert len(said) == mixes
    within = JacobianInfluence("resid_post", source_layer=1)  # sources are states by their name
    assert not run_probes(open_model(families.build("mobilebert")), ids, [within])[0].notes


def test_influence_on_a_layer_of_a_new_model_is_found_by_forward_mode():
    """The first pass that leaves out blocks drew tokens, and all was slow, with a wrong reason."""
    model, ids = open_model(families.build("llama")), families.tokens()[:1]
    (found,) = run_probes(model, ids, [JacobianInfluence(source_layer=1)], progress=False)
    assert found.notes == ()


def test_whatever_follows_attention_says_what_else_mixes_positions():
    model, ids = open_model(families.build("falcon_h1")), families.tokens()[:1]
    follow = [PositionsProbe(), AttendedProbe(), GradedSetsProbe(), AttentionWeight(),
              AttentionRollout(), AttentionFlow()]  # fmt: skip
    probes = [*follow, PatternsProbe()]
    results = run_probes(model, [ids[0, :1], ids[0]], probes, progress=False)
    sets = [propagate(results[0]), propagate(results[1]), results[2].graded().at()]
    for found in (*results[:-1], *sets, flow(model, ids, progress=False)):
        (note,) = [note for note in found.notes if "more than attention" in note]
        assert note.startswith("layers 0-1: ")
    assert not results[-1].notes  # patterns are themselves, whatever else there is
    # what two processes have measured, one of them of a single token
    one, two = probes[1], AttendedProbe()
    run_probes(model, ids[:, :1], [two], progress=False)
    two.load_state_dict({**two.state_dict(), "mixing": ""})
    assert two.merge(one).result().notes == one.result().notes


REFUSED = ("longformer", "fnet", "funnel")
MEASURES = {
    **{name: lambda m, x, make=make: run_probes(m, x, [make(x)], progress=False)[0]
       for name, make in EVERY.items()},
    "why": lambda m, x: why(m, x[:1], 0, 0),
    "shares": lambda m, x: measure_shares(m, x[:1], LogProbability(5)),
    "mechanisms": lambda m, x: measure_mechanisms(m, x, progress=False),
    "inspect": lambda m, x: inspect_model(m, x),
}  # fmt: skip


@pytest.mark.parametrize("kind", RIGHT_OR_SAID)
def test_every_measure_of_every_family_gives_numbers_or_a_sentence(kind):
    """Also where blocks have no residual stream, sums stand outside of modules, or mixers lie in
    between.
    """
    ids = torch.cat([families.tokens() + i for i in range(3)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind in REFUSED:  # chunks of windows, no attention, several stacks
            with pytest.raises(InfoFlowError):
                open_model(families.build(kind))
            return
        model = open_model(families.build(kind))
        found, said = {}, {}
        for name, measure in MEASURES.items():
            try:
                found[name] = measure(model, ids)
            except InfoFlowError as error:
                said[name] = str(error)
    assert found
    assert all(len(words) > 60 for words in said.values())
    for name in found.keys() & EVERY.keys():
        for key, value in numbers(found[name]).items():
            if value.is_floating_point() and not key.startswith(("margins", "scores")):
                assert not value.isinf().any(), (name, key)


class WithPrompt(torch.nn.Module):
    """A model behind a learnt prompt of three vectors, as prompt tuning of PEFT makes it."""

    def __init__(self, model):
        super().__init__()
        self.base_model, self.config = model, model.config
        self.prompt = torch.nn.Parameter(torch.randn(3, model.config.hidden_size))

    def get_input_embeddings(self):
        return self.base_model.get_input_embeddings()

    def embed(self, input_ids):
        prompt = self.prompt.detach().expand(len(input_ids), -1, -1)
        return torch.cat([prompt, self.get_input_embeddings()(input_ids)], dim=1)

    def forward(self, input_ids):
        return self.base_model(inputs_embeds=self.embed(input_ids))


@pytest.mark.parametrize(
    "measure",
    [
        lambda model, ids: run_probes(model, ids, [PositionsProbe()], progress=False),
        lambda model, ids: run_probes(model, ids, [JacobianInfluence()], progress=False),
        lambda model, ids: measure_shares(model, ids[:1], LogitDifference(1, 2)),
    ],
    ids=["positions", "influence", "shares"],
)
def test_positions_that_are_no_tokens_are_refused(measure):
    """A learnt prompt stood among the positions, and each number had the name of another token."""
    with pytest.raises(InfoFlowError, match="shows 10 positions, and 7 token ids were given"):
        measure(WithPrompt(families.build("llama")), families.tokens())


def test_a_learnt_prompt_is_measured_as_vectors():
    """What the error says to do."""
    model, ids = WithPrompt(families.build("llama")), families.tokens()
    with attach(model.base_model, PatternsProbe()) as probes:
        model(ids)
    (found,) = probes.results()
    with torch.no_grad():
        outputs = model.base_model(inputs_embeds=model.embed(ids), output_attentions=True)
    for layer, expected in zip(found.patterns, outputs.attentions, strict=True):
        torch.testing.assert_close(layer, expected)


@pytest.mark.parametrize(("kind", "is_said"), [("gemma4_text", True), ("llama", False)])
def test_tokens_that_layers_read_a_second_time_are_said(kind, is_said):
    """Per-layer inputs of Gemma 4 are no part of influence, and nothing said so."""
    model, ids = families.build(kind), families.tokens()
    donors = families.tokens().flip(1)
    probes = [JacobianInfluence(positions=(-1,)), ResampleInfluence(donors)]
    for found in run_probes(model, ids, probes, progress=False):
        assert any("beside what enters layer 0" in note for note in found.notes) == is_said


@pytest.mark.parametrize("kind", ["led", "longt5"])
def test_a_decoder_whose_encoder_cannot_be_shown_reads_its_own_inputs(kind):
    """It was taken for the whole model: the encoder's mask hid its tokens, or its ids were read."""
    model = families.build(kind, auto=("AutoModelForSeq2SeqLM",))
    named, ids = open_model(model, stack="decoder"), families.tokens()
    given = {"input_ids": ids, "decoder_input_ids": ids.flip(1), **families.masks(ids)["right"]}
    with attach(named, PatternsProbe()) as probes, torch.no_grad():
        named(**given)
        expected = model(**given, output_attentions=True).decoder_attentions
    for layer, attention in zip(probes.results()[0].patterns, expected, strict=True):
        torch.testing.assert_close(layer, attention)
    with pytest.raises(InfoFlowError, match="was opened at its decoder"):
        run_probes(named, ids, [PatternsProbe()], progress=False)
