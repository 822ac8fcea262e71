"""Contributions to a power against plain models of transformers, and what their result says."""

import copy
from itertools import product

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from infoflow_lens import InfoFlowError, attach, baselines, build_model, open_model, run_probes
from infoflow_lens.hooks import (
    ContributionRoutes,
    GradedSetsProbe,
    PatternsProbe,
    PowerRollout,
    PowerRolloutResult,
)
from infoflow_lens.hooks.model.parts import Norm
from infoflow_lens.hooks.routes.graded import PEAKED, find_readers
from infoflow_lens.models.architecture import Architecture
from tests.conftest import some_of, spread
from tests.reference import contributions, real_models, zoo

SETTINGS = {"replacing a token": (2, 1), "small changes": (1.1, 4)}
TEXTS = {
    "smollm2": "After the storm the harbour was quiet, and the boats that had sunk were raised.",
    "minilm": "A storm had sunk the boats that the harbour now raised.",
    "antiberty": "Q V Q L Q E S G P G L V K P S E T L S L T C",
}


def measured(model, ids):
    probes = [PowerRollout(question) for question in SETTINGS]
    probes += [PowerRollout(size="L2"), PatternsProbe()]
    return run_probes(model, ids, probes, progress=False)


def compared(model, ids, atol):
    """An opened model against the plain one."""
    *found, patterns = measured(open_model(model), ids)
    assert found[0].peakedness == found[1].peakedness
    if patterns.is_causal:
        expected = contributions.peakedness([p[0].double() for p in patterns.patterns])
        assert abs(found[0].peakedness - expected) < 1e-6
    for result, (p, own) in zip(found, [*SETTINGS.values(), (2, 1)], strict=True):
        order = 2 if result is found[2] else 1
        sizes = contributions.edges(model, ids, order)
        expected = contributions.power_rollout(sizes, p, own)
        np.testing.assert_allclose(result.scores[:, 0], expected, atol=atol)


@pytest.mark.parametrize("name", ["llama", "bert", "gemma2", "olmo2"])
def test_scores_are_those_of_the_plain_model(name):
    """Grouped values, RMS norms before a sublayer; LayerNorms behind it; norms on what is added."""
    model = zoo.build(name)
    model.set_attn_implementation("eager")
    with torch.no_grad():  # weights of norms that are not all 1
        for path, parameter in model.named_parameters():
            if parameter.ndim == 1 and "orm" in path and "weight" in path:
                parameter.mul_(torch.linspace(0.2, 3, len(parameter)))
    compared(getattr(model, "bert", model), zoo.tokens(1, 7), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS)
def test_scores_are_those_of_real_models(name):
    model, tokenizer = real_models.load(name)
    ids = tokenizer(TEXTS[name], return_tensors="pt")["input_ids"]
    compared(getattr(model, "bert", model), ids, 1e-4)


@pytest.mark.parametrize(
    ("name", "reader"),
    [
        ("llama", "post_attention_layernorm"),
        ("gpt2", "ln_2"),
        ("bert", "attention.output.LayerNorm"),
        ("gpt_neox", "input_layernorm"),  # of the next block: the MLP stands beside attention
    ],
)
def test_the_norm_that_reads_a_sum_is_found_by_running(name, reader):
    assert reader in find_readers(open_model(zoo.build(name)))[0]


NORMS, HALF = ("gpt2", "llama", "gemma2", "olmo2"), (torch.float16, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "dtype"), some_of(list(product(NORMS, HALF)), *spread(NORMS, HALF)[1::2])
)
def test_half_precision_finds_the_same_norms(name, dtype):
    """What a norm computes is read in float32, whatever the model computes in."""
    model = zoo.build(name)
    with torch.no_grad():  # one direction weighs most, so that another norm is another score
        for path, parameter in model.named_parameters():
            if parameter.ndim == 1 and ("norm" in path or "ln_" in path) and "weight" in path:
                parameter.mul_(torch.linspace(0.2, 3, len(parameter)))
    whole, half = open_model(model), open_model(copy.deepcopy(model).to(dtype))
    assert find_readers(half) == find_readers(whole)
    expected, found = (
        run_probes(one, zoo.tokens(1, 7), [PowerRollout()], progress=False)[0]
        for one in (whole, half)
    )
    np.testing.assert_allclose(found.scores, expected.scores, atol=0.02)


@pytest.mark.parametrize("weight", [1e-4, 1e4])
def test_norms_with_small_and_large_weights_are_read(weight):
    """A norm is read on its own scale, so that mean and weight are right at any size."""
    width = 16
    for norm, centers in ((torch.nn.LayerNorm(width), True), (torch.nn.RMSNorm(width), False)):
        torch.nn.init.constant_(norm.weight, weight)
        model = torch.nn.Sequential(norm)
        found = Norm("0", width).numbers(model)
        assert found.centers == centers
        np.testing.assert_allclose(found.weight.detach(), [weight] * width, rtol=1e-4)


def test_a_norm_that_cannot_be_read_is_named():
    """Another norm, or none, would be another number without a word."""

    class Clipped(LlamaRMSNorm):
        def forward(self, x):
            return super().forward(x).clamp(-0.5, 0.5)

    model = zoo.build("llama")
    norm = model.model.layers[0].post_attention_layernorm
    norm.__class__ = Clipped
    with pytest.raises(InfoFlowError, match=r"post_attention_layernorm.*Clipped"):
        find_readers(open_model(model))


def test_a_bridge_is_the_model_opened():
    ids = zoo.tokens(2, 6)
    for question in SETTINGS:
        bridge, plain = (
            run_probes(model, ids, [PowerRollout(question)], progress=False)[0]
            for model in (zoo.bridge("gpt2"), open_model(zoo.build("gpt2")))
        )
        torch.testing.assert_close(bridge.scores, plain.scores, atol=1e-5, rtol=0)


def test_vectors_with_cls_and_a_model_without_norms():
    sizes = {"n_heads": (2, 3), "d_model": 12, "d_token": 3, "n_tokens": 5, "d_mlp": 4}
    model = build_model(Architecture(**sizes), seed=3)
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    assert find_readers(model) == (None, None)
    found = measured(model, x)[:3]
    _, cache = model.run_with_cache(x)
    for sequence in range(2):
        layers = []
        for layer, block in enumerate(model.blocks):
            pattern = cache["pattern", layer][sequence].detach()  # [head, query, key]
            values = torch.einsum("khd,hdm->hkm", cache["v", layer][sequence], block.attn.W_O)
            taken = torch.einsum("hqk,hkm->qkm", pattern, values).detach()
            at = torch.arange(len(taken[0]))
            n_query = len(taken)
            full = torch.zeros(n_query, n_query, taken.shape[-1])
            full[:, : len(at)] = taken
            here = torch.arange(n_query)
            full[here, here] += cache["resid_pre", layer][sequence].detach()
            layers.append(full)
        for result, order in zip((found[0], found[2]), (1, 2), strict=True):
            edges = torch.stack(layers).norm(p=order, dim=-1).double().numpy()
            expected = contributions.power_rollout(edges, 2)[..., :5]
            np.testing.assert_allclose(result.scores[:, sequence], expected, atol=1e-5)


@pytest.mark.parametrize("name", ["gemma2", "olmo2"])
def test_padded_rows_of_a_norm_on_what_is_added_are_no_gap(name):
    """What heads bring to padding is 0, which no norm can be read from."""
    model, ids = open_model(zoo.build(name)), zoo.tokens(2, 7)
    padded, whole = (
        run_probes(
            model,
            texts,
            [PowerRollout(), ContributionRoutes(), GradedSetsProbe("norm")],
            progress=False,
        )
        for texts in ([ids[0], ids[1, :3]], ids[1:, :3])
    )
    for found, alone in zip(padded, whole, strict=True):
        shown = found.scores[:, 1, :3, :3]
        torch.testing.assert_close(shown, alone.scores[:, 0], atol=1e-5, rtol=0)


def test_sequences_of_different_length_are_those_alone(token_model, token_inputs):
    rows = [row[:n] for row, n in zip(token_inputs, (9, 4, 6), strict=False)]
    (together,) = run_probes(token_model, rows, [PowerRollout()], progress=False)
    total = 0.0
    for index, row in enumerate(rows):
        (alone,) = run_probes(token_model, row[None], [PowerRollout()], progress=False)
        own = together.scores[:, index, : len(row), : len(row)]
        torch.testing.assert_close(own, alone.scores[:, 0], atol=1e-6, rtol=1e-5)
        total += alone.peakedness * (len(row) - 1)  # the first query has no choice
    assert abs(together.peakedness - total / sum(len(row) - 1 for row in rows)) < 1e-6


def test_even_attention_claims_nothing(token_model, token_inputs, tmp_path):
    """As in untrained networks: it is noted, and says so when it is loaded."""
    with torch.no_grad():
        for name, parameter in token_model.named_parameters():
            if "W_Q" in name or "b_Q" in name or ".q." in name:
                parameter.zero_()
    (found,) = run_probes(token_model, token_inputs, [PowerRollout()], progress=False)
    assert found.peakedness < 1e-6
    assert not found.claim
    assert any("nearly even" in note for note in found.notes)
    found.save(tmp_path / "even")
    loaded = PowerRolloutResult.load(tmp_path / "even")
    assert not loaded.claim
    assert loaded.question == "replacing a token"
    peaked = run_probes(open_model(zoo.build("llama")), zoo.tokens(2, 6), [PowerRollout()],
                        progress=False)[0]  # fmt: skip
    assert peaked.peakedness > PEAKED
    assert not any("nearly even" in note for note in peaked.notes)


def test_both_questions_are_among_the_baselines(token_model):
    names = [name for name in baselines(token_model) if name.startswith("power rollout")]
    assert names == ["power rollout, replacing a token", "power rollout, small changes"]


def test_what_cannot_be_measured_is_named(token_model, token_inputs):
    with pytest.raises(InfoFlowError, match="question is 'both'"):
        PowerRollout("both")
    edit = ("blocks.1.attn.hook_z", lambda z, hook: z * 2)
    with (
        attach(token_model, PowerRollout()),
        pytest.raises(InfoFlowError, match=r"in layer 1 .* a hook of yours changes it"),
    ):
        token_model.run_with_hooks(token_inputs, fwd_hooks=[edit])


def test_reading_the_norms_shows_nothing_to_hooks_of_the_user():
    """Norms of bridges have hook points, and a cache that is filled beside the probe saw them."""
    model, ids = zoo.bridge("gpt2"), zoo.tokens(2, 6)
    with torch.no_grad():
        _, alone = model.run_with_cache(ids)
        with attach(model, PowerRollout()):
            _, beside = model.run_with_cache(ids)
    assert all(value.equal(beside[name]) for name, value in alone.items())
