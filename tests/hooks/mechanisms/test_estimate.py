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
    some_of(list(product(["kl", "nmse"], [None, (-1, 2)])), ("kl", None), ("nmse", (-1, 2))),
)
def test_the_mean_over_directions_is_the_second_order_damage_of_the_queries(
    token_model, token_inputs, metric, read
):
    """Query by query, and then summed."""
    model = token_model.to(torch.float64, print_details=False)
    _, cache = model.run_with_cache(token_inputs)
    means = [cache["pattern", layer].mean(dim=0) for layer in range(2)]
    found = estimated(model, token_inputs, Damage(metric, read), means, 800)
    p = model(token_inputs).softmax(-1).detach()
    places = slice(None) if read is None else list(read)
    for layer, head, ideal in CASES:
        expected = torch.zeros(19, dtype=torch.float64)
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


@pytest.mark.parametrize("is_one_row", [False, True])
def test_slopes_are_the_derivative_of_the_estimate_by_the_mean_pattern(
    token_model, token_inputs, is_one_row
):
    """By steps of the mean, with the same directions; where sequences see all of it."""
    model, x = token_model.to(torch.float64, print_details=False), token_inputs[:5]
    _, cache = model.run_with_cache(x)
    means = [cache["pattern", layer].mean(dim=0) for layer in range(2)]

    def estimate(means):
        damage = Damage("kl", (-1,) if is_one_row else None)
        return estimated(model, x, damage, means, 3, with_slopes=True)

    slope = estimate(means).slopes[0][0]
    place = IDEALS.index("specific_position")
    step = 1e-4 * torch.rand(means[0].shape, generator=torch.Generator().manual_seed(0)).double()
    step = step.tril() - step.tril().mean(dim=-1, keepdim=True).expand(step.shape).tril()
    step[:, :, 0] -= step.sum(dim=-1)  # rows keep their sums, so nothing is rescaled
    moved = [estimate([means[0] + sign * step, means[1]]).lost[0][..., place] for sign in (-1, 1)]
    found = (moved[1] - moved[0]).sum(dim=0) / 2
    torch.testing.assert_close(found, (slope * step).sum(dim=(1, 2)), rtol=1e-4, atol=1e-15)


def test_batches_and_padding_change_nothing():
    model = make_token_model().to(torch.float64, print_details=False)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(17, (n,), generator=generator) for n in (9, 4, 6, 2, 9, 5)]
    small, large = (
        measure_mechanisms(model, sequences, batch_size=size, progress=False) for size in (1, 6)
    )
    for name in ("damage", "replaced", "error"):
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


def test_models_without_gradients_are_measured_exactly(token_model, token_inputs):
    forward = token_model.forward
    token_model.forward = torch.no_grad()(forward)
    found = measure_mechanisms(token_model, token_inputs, threshold=0.01, progress=False)
    exact = measure_mechanisms(
        make_token_model(), token_inputs, threshold=0.01, exact=True, progress=False
    )
    assert found.mechanisms() == exact.mechanisms()


@pytest.fixture(scope="module")
def measured_exactly():
    """A model, what it reads, and its exact measurement."""
    model = make_token_model(n_layers=3, n_heads=6, d_model=24, n_ctx=16)
    with torch.no_grad():
        for block in model.blocks:
            for name in ("W_Q", "W_K", "W_V"):
                getattr(block.attn, name).mul_(5)
    ids = torch.randint(17, (40, 16), generator=torch.Generator().manual_seed(0))
    return model, ids, measure_mechanisms(model, ids, exact=True, progress=False)


@pytest.mark.parametrize("threshold", [0.002, 0.01, 0.05])
def test_labels_are_those_of_the_exact_measurement(threshold, measured_exactly):
    model, ids, exact = measured_exactly
    found = measure_mechanisms(model, ids, threshold=threshold, progress=False)
    pairs = [
        (a, b)
        for one, other in zip(exact.mechanisms(threshold), found.mechanisms(), strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    assert sum(a == b for a, b in pairs) >= 17  # of 18
    assert len({a for a, _ in pairs}) > 1
    damages, numbers, errors, true = (
        torch.cat(part) for part in (found.damage, found.replaced, found.error, exact.damage)
    )
    assert all(layer.all() for layer in exact.exact)
    assert 0 < int(numbers.sum()) < 0.9 * numbers.numel() * 40
    assert torch.cat(found.sufficient).equal((true <= threshold) & (numbers > 0))
    # what is enough rests on replaced patterns; a soft head's likeliest ideal was tried
    for row, (_, label) in zip(numbers, pairs, strict=True):
        assert row[IDEALS.index(label)] > 0 if label in IDEALS else (row > 0).any()
    exactly = numbers == 40
    torch.testing.assert_close(damages[exactly], true[exactly], rtol=1e-4, atol=1e-7)
    far = (damages - true).abs() > 2 * errors + 1e-7
    assert float(far.double().mean()) < 0.15
