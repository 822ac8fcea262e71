"""Gradient times input against derivatives by autograd, and a model where it is known."""

import torch

from infoflow_lens import JacobianInfluence, run_probes
from infoflow_lens.hooks import GradientTimesInput, InfluenceResult
from infoflow_lens.hooks.influence.base import Rerun


def by_autograd(model, x, layers, state="post_attention"):
    """|J x_s| of every source, from the whole Jacobian."""
    rerun = Rerun(model, None, layers, state)
    expected = []
    for i in range(len(x)):
        jacobians = torch.autograd.functional.jacobian(lambda start: rerun(start), x[i : i + 1])
        expected.append(
            torch.stack(
                [torch.einsum("tdsf,sf->tsd", j[0, :, :, 0], x[i]).norm(dim=-1) for j in jacobians]
            )
        )
    return torch.stack(expected, dim=1)


def test_it_is_the_norm_of_the_jacobian_times_the_token(model, inputs):
    x = inputs[:1]
    expected = by_autograd(model, x, (0, 1))
    for chunk_size in (None, 3):
        (found,) = run_probes(model, x, [GradientTimesInput(chunk_size=chunk_size)], progress=False)
        assert isinstance(found, InfluenceResult)
        torch.testing.assert_close(found.influence, expected, rtol=1e-4, atol=1e-6)


def test_without_forward_mode_it_is_the_same(model, inputs, monkeypatch):
    (expected,) = run_probes(model, inputs[:3], [GradientTimesInput()], progress=False)

    def lacks(*args):
        raise NotImplementedError("no forward mode")

    monkeypatch.setattr(torch.func, "jvp", lacks)
    (found,) = run_probes(model, inputs[:3], [GradientTimesInput()], progress=False)
    torch.testing.assert_close(found.influence, expected.influence, rtol=1e-4, atol=1e-6)


def test_it_is_at_most_the_jacobian_times_the_length_of_the_token(model, inputs):
    found, jacobian = run_probes(
        model, inputs, [GradientTimesInput(), JacobianInfluence()], progress=False
    )
    bound = jacobian.influence * inputs.norm(dim=-1)[None, :, None]
    assert (found.influence <= bound * 1.0001 + 1e-6).all()
    assert (found.influence > 0.05 * bound).any()


def test_chosen_layers_and_positions_are_rows_of_the_whole(token_model, token_inputs):
    whole, chosen = run_probes(
        token_model,
        token_inputs[:4],
        [
            GradientTimesInput("resid_post"),
            GradientTimesInput("resid_post", layers=(1,), positions=(-1,)),
        ],
        progress=False,
    )
    torch.testing.assert_close(chosen.influence, whole.influence[1:, :, 8:], rtol=1e-4, atol=1e-6)
    assert chosen.layers == (1,)
