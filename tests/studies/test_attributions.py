"""Attributions of the field, against loops over the modules of plain models."""

import pytest
import torch
from transformers import AlbertConfig, AlbertModel

from infoflow_lens import InfoFlowError, open_model
from infoflow_lens.hooks.model.call import call
from infoflow_lens.studies import attributions
from tests.reference import attributions as loops
from tests.reference import zoo

KINDS = ("llama", "gpt2", "bert", "albert")


def built(name):
    """A small random model in float64, with weights of norms that are not 1, and its pass."""
    if name == "albert":
        sizes = {"hidden_size": 16, "embedding_size": 8, "num_attention_heads": 4}
        torch.manual_seed(0)
        more = {"num_hidden_layers": 3, "intermediate_size": 24, "vocab_size": 50}
        model = AlbertModel(AlbertConfig(**sizes, **more)).eval().double()
    else:
        model = zoo.build(name).double()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim == 1 and ("orm" in path or "ln_" in path):
                parameter.add_(torch.linspace(-0.3, 0.4, len(parameter)))
    model, ids = getattr(model, name, model), zoo.tokens(1, 5)
    opened = open_model(model)
    patterns, states = attributions.read_text(opened, ids)
    out = [f"blocks.{layer}.hook_resid_post" for layer in range(len(states))]
    seen = call(opened, ids, out).activations
    return model, ids, [one.double() for one in patterns], states, [seen[name][0] for name in out]


@pytest.mark.parametrize("name", KINDS)
def test_decompx_sums_to_the_states_of_the_model(name):
    model, _, patterns, states, out = built(name)
    found = list(attributions.decompose(attributions.read_blocks(model), patterns, states[0]))
    for parts, state in zip(found, out, strict=True):
        torch.testing.assert_close(parts.sum(0), state, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_edges_and_decompx_are_those_of_loops(name):
    model, ids, patterns, states, _ = built(name)
    blocks = attributions.read_blocks(model)
    edges = attributions.measure_edges(blocks, patterns, states)
    expected = [torch.stack(one) for one in zip(*loops.layers(model, ids), strict=True)]
    for found, one in zip(edges[:3], expected, strict=True):
        torch.testing.assert_close(found, one, atol=1e-5, rtol=0)
    rolled = attributions.roll_out(edges.globenc)
    torch.testing.assert_close(rolled, torch.stack(loops.roll_out(expected[1])), atol=1e-5, rtol=0)
    by_loops = loops.decompose(model, ids)
    for parts, layer in zip(
        attributions.decompose(blocks, patterns, states[0]), by_loops, strict=True
    ):
        one = torch.stack([torch.stack(row) for row in layer]).transpose(0, 1)
        torch.testing.assert_close(parts, one, atol=1e-5, rtol=0)


def test_alti_logit_is_that_of_loops():
    model, ids, patterns, states, out = built("llama")
    norm = attributions.Norm(model.model.norm)
    towards = model.model.norm.weight * model.lm_head.weight[7] / norm.scale(out[-1][-1:])[0]
    edges = attributions.measure_edges(
        attributions.read_blocks(model), patterns, states, towards.detach()
    )
    expected = loops.alti_logit(model, ids, 7)
    torch.testing.assert_close(attributions.alti_logit(edges), expected, atol=1e-5, rtol=0)


def test_integrated_gradients_are_those_of_many_small_steps():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 4, 2, generator=generator, dtype=torch.float64)
    start, reference = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)

    def function(rows):
        return torch.einsum("rpd,pdo->ro", rows, weight).tanh()

    found = attributions.integrate_gradients(function, start, reference, 24)
    expected, n = torch.zeros(2, 3, dtype=torch.float64), 400
    for step in range(n):
        at = (reference + (step + 0.5) / n * (start - reference)).requires_grad_()
        for output, value in enumerate(function(at[None])[0]):
            (slope,) = torch.autograd.grad(value, at, retain_graph=True)
            for position in range(3):
                expected[output, position] += slope[position] @ (start - reference)[position] / n
    torch.testing.assert_close(found.parts, expected, atol=1e-5, rtol=0)
    assert found.error.max() < 1e-6


def test_models_of_another_kind_are_named():
    with pytest.raises(InfoFlowError, match="layers of another kind"):
        attributions.read_blocks(zoo.build("gpt_neox"))
    edges = attributions.Edges(*torch.ones(3, 1, 2, 2), None)
    with pytest.raises(InfoFlowError, match="towards="):
        attributions.alti_logit(edges)
