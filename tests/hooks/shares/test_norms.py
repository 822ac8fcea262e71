"""Norms whose statistics are held: the same numbers, and linear in what they norm."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from infoflow_lens import InfoFlowError
from infoflow_lens.hooks.shares import HeldNorms


def by_hand(x):
    """As TransformerLens writes a layer norm."""
    x = x - x.mean(-1, keepdim=True)
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def by_variance(x):
    variance, mean = torch.var_mean(x, -1, keepdim=True, correction=0)
    return (x - mean) * (variance + 1e-5) ** -0.5


NORMS = {
    "layer norm": nn.LayerNorm(6).double(),
    "layer norm without weights": nn.LayerNorm(6, elementwise_affine=False),
    "RMS norm": nn.RMSNorm(6).double(),
    "functional, by keywords": lambda x: F.layer_norm(input=x, normalized_shape=(6,), eps=1e-3),
    "by hand": by_hand,
    "variance and mean": by_variance,
    "standard deviation": lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True),
    "length": lambda x: F.normalize(x, dim=-1),
    "length by hand": lambda x: x / x.norm(dim=-1, keepdim=True),
    "rsqrt": lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6),
}


@pytest.fixture(autouse=True)
def _gains():
    generator = torch.Generator().manual_seed(0)
    for norm in NORMS.values():
        for parameter in norm.parameters() if isinstance(norm, nn.Module) else ():
            parameter.data = torch.randn(6, generator=generator, dtype=torch.float64)


@pytest.fixture
def x():
    return torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("name", NORMS)
def test_held_norms_give_the_numbers_of_the_norm(name, x):
    with HeldNorms():
        held = NORMS[name](x)
    torch.testing.assert_close(held, NORMS[name](x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NORMS)
def test_held_norms_are_linear_in_what_they_norm(name, x):
    """Scaled by 1.01 with the same statistics, what they give moves as their derivative says."""
    norm = NORMS[name]
    leaf = x.clone().requires_grad_()
    with HeldNorms() as first:
        (derivative,) = torch.autograd.grad(norm(leaf).sum(), leaf)
    found = []
    for scale in (1, 1.01):
        with HeldNorms(first.statistics):
            found.append(float(norm(scale * x).detach().sum()))
    assert found[1] - found[0] == pytest.approx(0.01 * float((derivative * x).sum()), rel=1e-6)


def test_fused_norms_in_half_precision_are_computed_wide(x):
    norm = nn.LayerNorm(6).to(torch.bfloat16)
    with HeldNorms():
        held = norm(x.to(torch.bfloat16))
    assert held.dtype == torch.bfloat16
    assert held.equal(norm(x.to(torch.bfloat16)))


def test_statistics_of_another_pass_are_refused(x):
    with HeldNorms() as first:
        by_hand(x)
    refused = pytest.raises(InfoFlowError, match="computed other norms than the first")
    with refused, HeldNorms(first.statistics):
        by_hand(x[:1])
    with refused, HeldNorms(first.statistics):
        by_hand(by_hand(x))


def test_a_group_norm_is_refused_by_name(x):
    with pytest.raises(InfoFlowError, match="group norm"), HeldNorms():
        nn.GroupNorm(1, 5).double()(x)
