"""The estimate of all damages: its mean is the second-order damage; what it leaves alone."""

import copy
from itertools import product

import pytest
import torch

from infoflow_lens import run_probes
from infoflow_lens.hooks import AttendedProbe
from infoflow_lens.hooks.interventions.damage import Damage
from infoflow_lens.hooks.interventions.estimate import estimate_batch
from infoflow_lens.hooks.interventions.ideals import LayerMeans
from infoflow_lens.hooks.interventions.patterns import IDEALS, ideal_pattern, name_ideal
from infoflow_lens.hooks.mechanisms.measure import measure_mechanisms
from infoflow_lens.hooks.model.inputs import Batch
from tests.conftest import make_token_model, some_of


def first_order_change(model, inputs, layer, head, ideal, mean, query=slice(None)):
    """The derivative of the output by a step of some queries' patterns towards an ideal one."""
    outputs = []
    for step in (-1e-5, 1e-5):

        def towards(pattern, hook, step=step):
            own = pattern[:, head]
            allowed = torch.ones(own.shape[-2:], dtype=torch.bool)
            if inputs.ndim == 2:
                allowed = allowed.tril()
            else:
                allowed[:, -1] = False  # CLS is no key
            made = ideal_pattern(own, allowed.expand_as(own), ideal, mean[head])
            moved = pattern.clone()
            moved[:, head, query] += step * (made - own)[:, query]
            return moved

        with torch.no_grad():
            outputs.append(
                model.run_with_hooks(
                    inputs, fwd_hooks=[(f"blocks.{layer}.attn.hook_pattern", towards)]
                )
            )
    return (outputs[1] - outputs[0]) / 2e-5


def estimated(model, inputs, damage, means, draws, **more):
    """The estimate of all of IDEALS, by means over n sequences."""
    n_pos = means[0].shape[-1]
    layers = [LayerMeans(mean, torch.empty(n_pos, 0), torch.ones(n_pos), False) for mean in means]
    ideals = [name_ideal(ideal, 4) for ideal in IDEALS]
    seeds = range(len(inputs))
    return estimate_batch(model, Batch(inputs), damage, layers, ideals, draws, seeds, **more)


CASES = [
    (0, 1, "own_position"),
    (0, 0, "specific_position"),
    (1, 1, "max_position"),
    (1, 0, "top_k"),
]


@pytest.mark.parametrize(
    ("metric", "read"),
    some_of(list(product(["kl", "nmse"], [None, (-1, 2)])), ("kl", (-1, 2))),
)
def test_the_mean_over_directions_is_the_second_order_damage_of_the_queries(
    token_model, token_inputs, metric, read
):
    """Query by query, and then summed."""
    model, token_inputs = token_model.to(torch.float64, print_details=False), token_inputs[:8]
    _, cache = model.run_with_cache(token_inputs)
    means = [cache["pattern", layer].mean(dim=0) for layer in range(2)]
    found = estimated(model, token_inputs, Damage(metric, read), means, 400)
    p = model(token_inputs).softmax(-1).detach()
    places = slice(None) if read is None else list(read)
    for layer, head, ideal in CASES:
        expected = torch.zeros(8, dtype=torch.float64)
        for query in range(9):
            change = first_order_change(
                model, token_inputs, layer, head, ideal, means[layer], query
            )
            if metric == "kl":
                of_row = ((p * change**2).sum(-1) - (p * change).sum(-1) ** 2) / 2
            else:
                of_row = change.square().sum(-1)
            expected += of_row[:, places].sum(dim=1)
        measured = found.lost[layer][:, head, IDEALS.index(ideal)]
        assert float(measured.sum() / expected.sum()) == pytest.approx(1, abs=0.08)
        torch.testing.assert_close(measured, expected, rtol=0.35, atol=1e-12)


def test_of_a_number_one_direction_is_enough(model, inputs):
    """There the squared change is the square of one inner product."""
    model = model.to(torch.float64, print_details=False)
    x = inputs.double()
    _, cache = model.run_with_cache(x)
    means = [cache["pattern", layer].mean(dim=0) for layer in range(2)]
    found = estimated(model, x, Damage("nmse", None), means, 1).lost
    assert model(x).shape == (23, 1)
    for layer, head, ideal in ((0, 1, "own_position"), (1, 4, "global"), (1, 0, "max_position")):
        change = first_order_change(model, x, layer, head, ideal, means[layer])
        measured = found[layer][:, head, IDEALS.index(ideal)]
        torch.testing.assert_close(measured, change[:, 0] ** 2, rtol=1e-5, atol=1e-12)


def test_batches_and_padding_change_nothing():
    model = make_token_model().to(torch.float64, print_details=False)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(17, (n,), generator=generator) for n in (9, 4, 6, 2, 9, 5)]
    small, large = (
        measure_mechanisms(model, sequences, batch_size=size, progress=False) for size in (1, 6)
    )
    for name in ("damage", "error"):
        for a, b in zip(getattr(small, name), getattr(large, name), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-9)
    again = measure_mechanisms(model, sequences, batch_size=6, progress=False)
    assert all(a.equal(b) for a, b in zip(again.damage, large.damage, strict=True))


def test_nothing_of_the_user_takes_part_in_the_gradient(token_model, token_inputs):
    """Backward hooks stay silent, gradients unset, flags, generators and modes as they were."""
    fired = []
    token_model.add_hook(
        "blocks.0.attn.hook_pattern", lambda gradient, hook: fired.append(0), dir="bwd"
    )
    token_model.blocks[1].register_full_backward_pre_hook(lambda module, g: fired.append(1))
    token_model.requires_grad_(False)
    token_model.train()
    before, state = copy.deepcopy(token_model.state_dict()), torch.get_rng_state()
    plain = measure_mechanisms(make_token_model(), token_inputs, progress=False)
    with torch.inference_mode():
        found = measure_mechanisms(token_model, token_inputs.clone(), progress=False)
    assert fired == []
    assert torch.get_rng_state().equal(state)
    assert token_model.training
    assert all(p.grad is None and not p.requires_grad for p in token_model.parameters())
    assert all(before[name].equal(value) for name, value in token_model.state_dict().items())
    assert len(token_model.hook_dict["blocks.0.attn.hook_pattern"].bwd_hooks) == 1
    for one, other in zip(found.damage, plain.damage, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
    loss = token_model.requires_grad_(True)(token_inputs, return_type="loss")
    loss.backward()
    assert sorted(set(fired)) == [0, 1]  # the hooks are back


def test_probes_that_are_attached_do_not_see_it(token_model, token_inputs):
    from infoflow_lens import attach

    with attach(token_model, AttendedProbe()) as (probe,):
        measure_mechanisms(token_model, token_inputs[:5], progress=False)
        token_model(token_inputs)
    assert probe.n_sequences == 19
    (alone,) = run_probes(token_model, token_inputs, [AttendedProbe()], progress=False)
    assert all(a.equal(b) for a, b in zip(probe.result().positions, alone.positions, strict=True))
