"""Models and inputs on which mechanisms were once silently wrong."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from infoflow_lens.hooks.interventions import edits, probe
from infoflow_lens.hooks.interventions.patterns import IDEALS, ideal_pattern, rescale, substituted
from infoflow_lens.hooks.mechanisms.measure import measure_mechanisms, replace_greedily
from infoflow_lens.hooks.model.inputs import read_inputs
from tests.conftest import make_token_model, some_of, spread
from tests.reference import zoo
from tests.reference.induction import induction_model, repeated_segments
from tests.versions import needs_hooked_transformer


def damage_by_whole_passes(model, ids, heads):
    """KL of one replacement, from two passes over everything."""
    with torch.no_grad():
        before = model(ids).double().log_softmax(-1)
        with substituted(model, heads):
            after = model(ids).double().log_softmax(-1)
    return float((before.exp() * (before - after)).sum(-1).mean())


def steer(activation):
    return activation + torch.linspace(-1, 1, activation.shape[-1])


def add(model, kind, name):
    """A steering vector, put on the model in one of the ways that users have."""
    point = model.hook_dict[name]
    if kind == "add_hook":
        model.add_hook(name, lambda activation, hook: steer(activation))
    elif kind == "permanent":
        model.add_perma_hook(name, lambda activation, hook: steer(activation))
    elif kind == "forward hook":
        point.register_forward_hook(lambda module, args, output: steer(output))
    elif kind == "forward pre-hook":
        point.register_forward_pre_hook(lambda module, args: (steer(args[0]),))
    else:
        model.blocks[1].register_forward_pre_hook(lambda module, args: (steer(args[0]), *args[1:]))


HOOKS = [
    ("add_hook", "blocks.1.hook_resid_pre"),
    ("permanent", "blocks.1.hook_resid_pre"),
    ("forward hook", "blocks.1.hook_resid_pre"),
    ("forward pre-hook", "blocks.1.hook_resid_pre"),
    ("on the block", "blocks.1.hook_resid_pre"),
    ("add_hook", "hook_embed"),
    ("add_hook", "blocks.0.hook_resid_post"),
    ("add_hook", "blocks.1.hook_mlp_out"),
    ("add_hook", "ln_final.hook_normalized"),
]


@pytest.mark.parametrize(("kind", "name"), some_of(HOOKS, HOOKS[4], HOOKS[8]))
def test_a_users_hook_acts_once(token_model, token_inputs, kind, name):
    add(token_model, kind, name)
    alone = measure_mechanisms(token_model, token_inputs[:, :1], progress=False)
    assert max(float(layer.max()) for layer in alone.damage) < 1e-9  # one token: one pattern
    found = measure_mechanisms(token_model, token_inputs, progress=False)
    expected = damage_by_whole_passes(token_model, token_inputs, {(1, 2): "global"})
    measured = float(found.damage[1][2, IDEALS.index("global")])
    assert measured == pytest.approx(expected, rel=1e-4)


def test_hooks_that_talk_to_each_other_see_whole_passes(token_model, token_inputs):
    """What a hook keeps of the first layer, another adds behind the second."""
    kept = {}
    token_model.add_hook("blocks.0.hook_resid_post", lambda x, hook: kept.update(x=x))
    token_model.add_hook("blocks.1.hook_resid_post", lambda x, hook: x + kept["x"])
    found = measure_mechanisms(token_model, token_inputs, batch_size=7, progress=False)
    expected = damage_by_whole_passes(token_model, token_inputs, {(1, 2): "global"})
    measured = float(found.damage[1][2, IDEALS.index("global")])
    assert measured == pytest.approx(expected, rel=1e-4)


@needs_hooked_transformer
def test_positions_of_shortformer_models_reach_every_layer(token_inputs):
    model = make_token_model(positional_embedding_type="shortformer")
    found = measure_mechanisms(model, token_inputs, progress=False)
    for head, ideal in ((0, "max_position"), (3, "global")):
        expected = damage_by_whole_passes(model, token_inputs, {(1, head): ideal})
        measured = float(found.damage[1][head, IDEALS.index(ideal)])
        assert measured == pytest.approx(expected, rel=1e-4)


def test_a_gain_at_one_position_hides_no_loss_at_another():
    """An induction head is sure and wrong where a repetition ends: its absence is a gain there."""
    model = induction_model(n_vocab=11, n_ctx=9)
    tokens, _ = repeated_segments(11, 40)
    tokens[:30, -1] = (tokens[:30, -1] + 1) % 11  # it repeats in the last ten sequences only

    def losses(heads=None, means=None):
        with torch.no_grad(), substituted(model, heads or {}, means):
            return model(tokens, return_type="loss", loss_per_token=True)

    rise = losses({(1, 0): "global"}) - losses()
    assert rise.mean() < -1  # nats: a gain on the whole
    assert rise[:, -2].mean() > 1  # where tokens repeat, a loss
    found = measure_mechanisms(model, tokens, metric="loss", progress=False)
    assert found.mechanisms() == (("specific_position",), ("top_k",))  # all that match alike
    joint = replace_greedily(model, tokens, found, budget=0.05, progress=False)
    assert joint.share == 1
    assert joint.damage < 1e-3
    assert (losses(joint.heads, found.mean_patterns) - losses()).max() < 1e-3


def test_keys_that_equal_the_kth_largest_are_all_kept():
    pattern = torch.tensor([[0.4, 0.1, 0.1, 0.1, 0.1, 0.2], [0.25, 0.25, 0.25, 0.25, 0.0, 0.0]])
    made = ideal_pattern(pattern, pattern > 0, "top_k", k=3)
    assert made[0].equal(pattern[0])
    assert made[1].equal(pattern[1])
    made = ideal_pattern(pattern, pattern > 0, "top_k", k=2)
    torch.testing.assert_close(made[0], torch.tensor([2 / 3, 0, 0, 0, 0, 1 / 3]))
    shuffled = torch.tensor([3, 5, 1, 0, 4, 2])
    assert ideal_pattern(pattern[:, shuffled], pattern[:, shuffled] > 0, "top_k", k=3).equal(
        ideal_pattern(pattern, pattern > 0, "top_k", k=3)[:, shuffled]
    )


class PatternFirst(HookedRootModule):
    """A causal layer of attention whose hook points fire as on a native bridge of version 4.

    The pattern fires before the scores, and the scores carry the pattern.
    """

    boot_transformers = None  # tells probes that it is a bridge

    def __init__(self, order):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weights(*shape):
            return nn.Parameter(torch.randn(shape, generator=generator))

        self.order, self.cfg = order, SimpleNamespace(d_vocab=17, n_ctx=9)
        self.W_E, self.W_U = weights(17, 6), weights(6, 17)
        self.blocks = nn.ModuleList([nn.Module()])
        self.blocks[0].attn = nn.Module()
        attn, self.blocks[0].hook_resid_pre = self.blocks[0].attn, HookPoint()
        attn.hook_pattern, attn.hook_attn_scores = HookPoint(), HookPoint()
        attn.W_Q, attn.W_V, attn.W_O = weights(2, 6, 6), weights(2, 6, 3), weights(2, 3, 6)
        self.setup()

    def forward(self, ids, attention_mask=None):
        attn, x = self.blocks[0].attn, self.blocks[0].hook_resid_pre(self.W_E[ids])
        scores = torch.einsum("bqd,hde,bke->bhqk", x, attn.W_Q, x)
        masked = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(masked, -torch.inf)
        pattern = scores.softmax(-1)
        if self.order == "scores that are the pattern, first":
            attn.hook_attn_scores(pattern)
        pattern = attn.hook_pattern(pattern)
        if self.order == "pattern first":
            attn.hook_attn_scores(pattern)
        if self.order == "scores late":
            attn.hook_attn_scores(scores)
        z = torch.einsum("bhqk,bkd,hde->bqhe", pattern, x, attn.W_V)
        return (x + torch.einsum("bqhe,hed->bqd", z, attn.W_O)) @ self.W_U


@pytest.mark.parametrize(
    "order", ["scores that are the pattern, first", "pattern first", "scores late", "no scores"]
)
def test_masks_do_not_rely_on_what_fires_first(order, token_inputs):
    model = PatternFirst(order)
    found = measure_mechanisms(model, token_inputs, progress=False)
    evenly = torch.ones(9, 9).tril() / torch.arange(1, 10)[:, None]
    for head in (0, 1):
        with substituted(model, {(0, head): "global"}):
            for ids in (token_inputs, token_inputs.flip(0)):  # the second pass, as the first
                _, cache = model.run_with_cache(ids)
                pattern = cache["blocks.0.attn.hook_pattern"][:, head]
                torch.testing.assert_close(pattern, evenly.expand(19, 9, 9))
        expected = damage_by_whole_passes(model, token_inputs, {(0, head): "global"})
        measured = float(found.damage[0][head, IDEALS.index("global")])
        assert measured == pytest.approx(expected, rel=1e-4)
    quick = measure_mechanisms(model, token_inputs, progress=False)
    assert quick.mechanisms() == found.mechanisms()


def test_small_weights_rescale_without_overflow():
    """What is left of a row may be so small that one over it is infinite."""
    pattern = torch.tensor([[1.0, 2e-42, 0.0]])
    made = rescale(pattern * torch.tensor([0.0, 1.0, 1.0]), pattern.sum(-1, keepdim=True))
    assert made.tolist() == [[0.0, 1.0, 0.0]]


STARTED = ["gpt2", "llama", "gpt_oss"]


@pytest.mark.parametrize(
    ("name", "ragged"),
    some_of(list(product(STARTED, [False, True])), *spread(STARTED, [False, True])[:2]),
)
def test_a_bridge_that_starts_at_a_layer_gives_what_whole_passes_give(name, ragged, monkeypatch):
    model, ids = zoo.bridge(name), zoo.tokens(6, 9)
    inputs = [row[: 9 - i] for i, row in enumerate(ids)] if ragged else ids
    n_layers = len(model.blocks)
    assert edits.find_starts(model, read_inputs(model, inputs)) == set(range(n_layers))
    found = measure_mechanisms(model, inputs, batch_size=3, progress=False)
    monkeypatch.setattr(probe, "find_starts", lambda *args: frozenset())
    whole = measure_mechanisms(model, inputs, batch_size=3, progress=False)
    for one, other in zip(found.damage, whole.damage, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-8)


def test_a_bridge_whose_layers_share_more_than_the_stream_runs_whole():
    """The second layer of this model adds what the first gave, behind the back of the stream."""
    model = zoo.bridge("gpt2")
    batches = read_inputs(model, zoo.tokens(4, 6))
    first, second = model.original_model.transformer.h
    kept = {}

    def keep(module, args, output):
        kept["x"] = output

    def add(module, args, output):
        if isinstance(output, tuple):
            return output[0] + kept["x"][0], *output[1:]
        return output + kept["x"]

    keep.__module__ = add.__module__ = "transformer_lens.hooks"  # they belong to the model
    first.register_forward_hook(keep)
    second.register_forward_hook(add)
    assert edits.find_starts(model, batches) == {0}


def test_longer_sequences_than_were_measured_are_refused(token_model, token_inputs):
    found = measure_mechanisms(token_model, token_inputs[:, :5], progress=False)
    with (
        substituted(token_model, {(0, 0): "specific_position"}, found.mean_patterns),
        pytest.raises(ValueError, match="at most 5 positions, this sequence has 9"),
    ):
        token_model(token_inputs)
