"""Jacobian influence equals PyTorch's own Jacobian, and finds what the model reads."""

import pytest
import torch

from infoflow_lens import InfoFlowError, JacobianInfluence, attach, run_probes
from tests.conftest import N_TOKENS, make_token_model
from tests.reference import transformer as reference


def norms(jacobian):
    """[pos, d_model, source, d_source] -> [pos, source]."""
    return jacobian.square().sum(dim=(1, 3)).sqrt()


def caught(model, names, *args, **kwargs):
    """The sum of activations of one run, with gradients (a cache has none)."""
    found = {}

    def catch(activation, hook):
        found[hook.name] = activation

    model.run_with_hooks(*args, fwd_hooks=[(name, catch) for name in names], **kwargs)
    return sum(found[name] for name in names)


@pytest.mark.parametrize("chunk_size", [1, 5, 64])
@pytest.mark.parametrize("state", ["post_attention", "resid_post"])
def test_equals_autograd_over_vector_tokens(model, inputs, state, chunk_size):
    probe = JacobianInfluence(state=state, chunk_size=chunk_size)
    (result,) = run_probes(model, inputs[:4], [probe], batch_size=3, progress=False)
    assert result.influence.shape == (2, 4, N_TOKENS + 1, N_TOKENS)
    weights = model.state_dict()
    for layer in (0, 1):
        for sample in range(4):

            def states(x, layer=layer):
                return reference.forward(model.architecture, weights, x[None])[f"{state}.{layer}"][
                    0
                ]

            jacobian = torch.autograd.functional.jacobian(states, inputs[sample])
            torch.testing.assert_close(
                result.influence[layer, sample], norms(jacobian), rtol=1e-5, atol=1e-6
            )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attn_only": True},
        {"parallel_attn_mlp": True},
        {"n_key_value_heads": 2},
        {"positional_embedding_type": "rotary", "d_head": 6},
        {"positional_embedding_type": "alibi"},
        {"normalization_type": None},
    ],
)
def test_equals_autograd_over_embeddings(token_inputs, changes):
    model = make_token_model(**changes)
    (result,) = run_probes(model, token_inputs[:3], [JacobianInfluence()], progress=False)

    def states(resid):
        names = ["blocks.1.hook_resid_pre", "blocks.1.hook_attn_out"]
        return caught(model, names, resid[None], start_at_layer=0)[0]

    for sample in range(3):
        start = model(token_inputs[sample : sample + 1], stop_at_layer=0)[0].detach()
        jacobian = torch.autograd.functional.jacobian(states, start)
        torch.testing.assert_close(
            result.influence[1, sample], norms(jacobian), rtol=1e-4, atol=1e-6
        )


def test_a_causal_model_has_no_influence_from_the_future(token_model, token_inputs):
    (result,) = run_probes(token_model, token_inputs, [JacobianInfluence()], progress=False)
    assert result.influence.triu(1).eq(0).all()
    assert result.influence.diagonal(dim1=-2, dim2=-1).gt(0).all()


def test_influence_between_layers(model, inputs):
    """From resid_pre of layer 1, CLS included, to the state after it."""
    probe = JacobianInfluence(state="resid_post", source_layer=1)
    (result,) = run_probes(model, inputs[:2], [probe], progress=False)
    assert result.layers == (1,)
    start = model(inputs[:2], stop_at_layer=1).detach()

    def states(resid):
        return model(resid[None], start_at_layer=1, stop_at_layer=2)[0]

    for sample in range(2):
        jacobian = torch.autograd.functional.jacobian(states, start[sample])
        torch.testing.assert_close(
            result.influence[0, sample], norms(jacobian), rtol=1e-5, atol=1e-6
        )
    assert result.influence[0, :, :N_TOKENS, N_TOKENS].eq(0).all()  # CLS is no key


def test_sets_hold_the_sources_above_a_share_of_the_largest(model, inputs):
    (result,) = run_probes(model, inputs, [JacobianInfluence()], progress=False)
    members = result.sets(0.4).members
    row = result.influence[1, 5, 2]
    expected = {s for s in range(N_TOKENS) if row[s] >= 0.4 * row.max()}
    assert result.sets(0.4).of(1, 5, 2) == expected
    assert (result.sets(0.7).members <= members).all()
    for threshold in (0.0, 1.5):
        with pytest.raises(InfoFlowError, match="threshold is"):
            result.sets(threshold)


def test_works_inside_the_users_inference_mode(model, inputs):
    with torch.inference_mode(), attach(model, JacobianInfluence()) as probes:
        model(inputs[:3])
    (outside,) = run_probes(model, inputs[:3], [JacobianInfluence()], progress=False)
    torch.testing.assert_close(probes[0].result().influence, outside.influence)


def test_a_pass_that_cannot_be_repeated_is_refused(token_model, token_inputs):
    """A mask is no part of what plain hooks see; one huge activation must not hide the others."""
    with torch.no_grad():
        token_model.embed.W_E[0, 0] = 3000.0
    token_inputs[:, 0] = 0
    mask = torch.ones_like(token_inputs)
    mask[:, :3] = 0
    probe = JacobianInfluence()
    with pytest.raises(InfoFlowError, match="attention_mask"):
        token_model.run_with_hooks(
            token_inputs, attention_mask=mask, fwd_hooks=probe.fwd_hooks(token_model)
        )


def test_models_that_cannot_start_from_the_residual_stream_are_refused(token_inputs):
    model = make_token_model(positional_embedding_type="shortformer")
    with pytest.raises(InfoFlowError, match="shortformer"):
        run_probes(model, token_inputs, [JacobianInfluence()], progress=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"state": "resid_mid"}, "state is 'resid_mid'"), ({"chunk_size": 0}, "chunk_size is 0")],
)
def test_bad_settings_are_named(arguments, message):
    with pytest.raises(InfoFlowError, match=message):
        JacobianInfluence(**arguments)


def test_a_layer_that_is_not_there(model, inputs):
    with pytest.raises(InfoFlowError, match="source_layer is 2"):
        run_probes(model, inputs, [JacobianInfluence(source_layer=2)], progress=False)
