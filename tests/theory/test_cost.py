"""The parameter-cost law, and Theorem 3's code built and measured."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infoflow_lens import InfoFlowError, propagate
from infoflow_lens.theory.cost import DigitCode, TanhCode, exponent, exponents


@pytest.mark.parametrize(
    ("size", "law", "decoder", "total"),
    [
        (4, 1.0, 0.0, 0.0),
        (5, 1.25, 0.25, 1.0),
        (12, 3.0, 2.0, 2.0),
        (64, 16.0, 15.0, 15.0),
        (0, 0.0, 0.0, 0.0),
    ],
)
def test_exponents_of_example_1(size, law, decoder, total):
    """d = 4, E = 16: four tokens fit (O(1)); global aggregation of 64 costs eps^-15."""
    found = [exponent(size, 4, 16, mode) for mode in ("law", "decoder", "total")]
    assert found == [law, decoder, total]
    assert exponent(size, 4, 16) == total


@pytest.mark.parametrize(
    ("n", "latents", "bits"), [(4, 3, (3, 6)), (3, 2, (2, 4)), (2, 1, (2, 4)), (4, 2, (2, 4)),
                               (3, 1, (2, 4)), (6, 2, (2, 4)), (4, 1, (1, 2))]
)  # fmt: skip
def test_a_code_with_analog_coordinates_is_one_below_the_law(n, latents, bits):
    """Twice as many bits square the decoder's units at rd/E - 1, whatever the law says (T5)."""
    x = torch.rand(2000, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = []
    for b in bits:
        code = DigitCode(n, latents, b, analog=True)
        error = float((code.decode(code.encode(x)) - x).abs().max())
        assert 0.9 * 0.5 ** (b + 1) < error <= 0.5 ** (b + 1)
        rows.append((math.log(0.5 ** (b + 1)), math.log(code.decoder_units)))
        assert code.bits_per_latent / b == pytest.approx(exponent(n, 1, latents, "decoder"))
    (e0, u0), (e1, u1) = rows
    assert (u1 - u0) / (e0 - e1) == pytest.approx(n / latents - 1)
    # the decoder's steps stand where no code comes, so that steep units are exact
    steep = TanhCode(n, latents, b, analog=True, steepness=1e6 * code.decoder_units)
    latent = code.encode(x)
    torch.testing.assert_close(steep.decode(latent), code.decode(latent), rtol=0, atol=1e-9)


def test_costs_of_sets_are_those_of_their_sizes():
    sets = propagate([torch.tensor([[[1, 1, 0, 2]]]), torch.tensor([[[0, 0, 0, 1]]])], n_sources=3)
    by_state = exponents(sets, d_token=2, d_model=4, mode="law")
    assert by_state[0, 0].tolist() == [1.0, 0.5, 1.0, 0.5]
    assert by_state[1, 0, :3].isnan().all()  # nothing reads them
    assert by_state[1, 0, 3] == len(sets.of(1, 0, 3)) * 2 / 4


@given(
    n=st.integers(1, 4), latents=st.integers(1, 4), bits=st.integers(1, 5), seed=st.integers(0, 999)
)
def test_the_code_returns_the_middle_of_each_cell(n, latents, bits, seed):
    if -(-n * bits // latents) > 14:
        return
    code = DigitCode(n, latents, bits)
    x = torch.rand(64, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    middle = (x * 2**bits).floor() / 2**bits + 0.5 ** (bits + 1)
    latent = code.encode(x)
    assert latent.shape == (64, latents)
    assert latent.ge(0).all()
    assert latent.lt(1).all()
    torch.testing.assert_close(code.decode(latent), middle, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bits", [1, 3, 5])
def test_the_error_is_half_a_cell_exactly(bits):
    code = DigitCode(3, 2, bits)
    edge = torch.zeros(1, 3, dtype=torch.float64)
    error = (code.decode(code.encode(edge)) - edge).abs().max()
    assert float(error) == 0.5 ** (bits + 1)


@pytest.mark.parametrize(("bits", "found"), [(3, 5 / 3), (6, 1.5)])
def test_the_decoder_costs_the_law_up_to_the_ceiling(bits, found):
    """r d = 3 in E = 2 numbers: the law's exponent is 1.5."""
    code = DigitCode(3, 2, bits)
    assert code.bits_per_latent / bits == pytest.approx(found)
    assert code.decoder_units == 2 * 2 ** math.ceil(1.5 * bits)


@pytest.mark.parametrize("eps", [0.3, 0.1, 0.05])
def test_so_many_bits_reach_a_precision(eps):
    """B = ceil(log2(sqrt(r d) / eps)) bits, of two tokens of dimension 2 in three numbers."""
    code = DigitCode(4, 3, math.ceil(math.log2(math.sqrt(4) / eps)))
    x = torch.rand(500, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    error = (code.decode(code.encode(x)) - x).square().sum(-1).mean().sqrt()
    assert float(error) <= eps


def test_tanh_units_in_place_of_steps_lose_the_thresholds_only():
    """Lemma 1: the share of inputs that come out wrong falls with the steepness."""
    code = DigitCode(2, 1, 3)
    x = torch.rand(4000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact = code.decode(code.encode(x))
    wrong = []
    for steepness in (1e3, 1e4, 1e5):
        tanh = TanhCode(2, 1, 3, steepness=steepness)
        soft = tanh.decode(tanh.encode(x))
        wrong.append(float(((soft - exact).abs().amax(-1) > 0.01).double().mean()))
    assert wrong[0] > wrong[1] > wrong[2]
    assert wrong[2] < 0.01


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: exponent(3, 4, 16, "upper"), "mode is 'upper'"),
        (lambda: exponent(-1, 4, 16), r"size is -1"),
        (lambda: DigitCode(0, 1, 1), "n_coordinates is 0"),
        (
            lambda: exponent(3, 4, 16, "effective"),
            "expected one of law, decoder, total, 'effective' is 'total' now",
        ),
        (lambda: DigitCode(9, 1, 3), "expected at most 24"),
        (lambda: DigitCode(2, 2, 3, analog=True), "2 coordinates fit in 2 latents"),
        (lambda: DigitCode(4, 2, 2.5), "n_bits is 2.5"),
        (lambda: DigitCode(2, 1, 2).encode(torch.tensor([0.2, 1.5])), "expected 2 in"),
        (lambda: DigitCode(2, 1, 2).encode(torch.rand(3)), "inputs have 3 coordinates"),
    ],
)
def test_bad_values_are_named(call, message):
    with pytest.raises(InfoFlowError, match=message):
        call()
