"""The study of the cost law: its rule, what its rows say of codes, and small runs of it."""

import math
from pathlib import Path

import pytest
import torch

from infoflow_lens.objectives import nmse
from infoflow_lens.studies.papers import cost_law, find_study
from infoflow_lens.theory.cost import DigitCode
from tests.studies.by_theory import codes
from tests.studies.studies_for_tests import broken

STUDY = find_study("cost_law")


def trained(rows, **where):
    """The rows of trained codes, of some states."""
    chosen = rows["model"] == "trained"
    for name, value in where.items():
        chosen &= rows[name] == value
    return chosen


@pytest.fixture(scope="module")
def rows_of_codes():
    return codes()


@pytest.fixture
def rows(rows_of_codes):
    """Of the codes that the theory knows, for each test to change."""
    return rows_of_codes.copy()


@pytest.mark.parametrize(
    ("where", "times", "claims"),
    [
        ({}, lambda rows: 1.0, []),
        ({}, lambda rows: 3.0, []),  # a factor for all changes no slope and no order
        ({"size": 2, "d_model": 1}, lambda rows: 3.0, [2]),  # unlike others of its exponent
        ({"law": 3.0}, lambda rows: 0.01, [3]),
        ({}, lambda rows: rows["width"] ** (2 / rows["law"]), [3, 4]),  # units bring nothing
    ],
)
def test_the_verdict_follows_the_stated_rule(where, times, claims, rows):
    chosen = trained(rows, **where)
    rows.loc[chosen, "nmse"] *= times(rows[chosen])
    assert set(claims) <= set(broken(STUDY, rows))
    assert bool(claims) or not broken(STUDY, rows)


def test_what_fits_must_lose_nothing(rows):
    rows.loc[trained(rows, law=1.0), "nmse"] = 0.02
    assert 1 in broken(STUDY, rows)


def test_a_code_of_another_exponent_is_none_of_the_laws(rows):
    rows.loc[rows["model"] == "digit code", "width"] **= 2
    assert 0 in broken(STUDY, rows)


def test_the_laws_error_is_that_of_the_digit_code(rows):
    """Half a cell of width 2^-B on every coordinate, over the variance of a uniform number."""
    code = DigitCode(2, 1, 3)
    x = torch.rand(20_000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    error = float((code.decode(code.encode(x)) - x).square().mean() / x.var())
    row = rows[(rows["model"] == "trained") & (rows["size"] == 2) & (rows["d_model"] == 1)]
    of_law = row.set_index("units")["law_nmse"][2**code.bits_per_latent]
    assert of_law == pytest.approx(4.0**-3)
    assert error == pytest.approx(of_law, rel=0.03)


@pytest.mark.parametrize("preset", ["smoke", "quick", "full"])
def test_cases_have_states_that_hold_all_and_states_that_do_not(preset):
    cases = STUDY.cases(preset)
    laws = {
        case["size"] * case["d_token"] / case["d_model"]
        for case in cases
        if case["model"] == "trained"
    }
    assert min(laws) <= 1 < max(laws)
    for case in cases:
        if case["model"] == "digit code":
            bits = case["bits"] * case["size"] * case["d_token"] / case["d_model"]
            assert bits == int(bits)  # dealt without a rest
        assert STUDY.judges(case) is (case["model"] in ("digit code", "trained"))


def test_where_all_fits_training_finds_it():
    (case,) = [
        c for c in STUDY.cases("smoke") if c["model"] == "trained" and c.get("units") == 16
        and c["d_model"] == 2
    ]  # fmt: skip
    (one,) = STUDY.measure({**case, "epochs": 8, "n_train": 8192}, 2, "cpu")
    assert one["nmse"] < 0.05
    assert one["law_nmse"] == 0


def test_a_single_decoder_has_as_many_bits_as_its_units_pay_for():
    """Of 16 units for one latent that is two tokens: 4 bits, 2 each, so more is not to be had."""
    (case,) = [c for c in STUDY.cases("smoke") if "decoder" in c["model"] and c.get("units") == 16]
    (row,) = STUDY.measure({**case, "epochs": 12, "n_train": 8192}, 0, "cpu")
    assert 4.0**-2 < row["nmse"] < 0.9
    assert row["width"] == 16
    assert math.isclose(row["law_nmse"], 4.0**-2)


def decoder_error(steepness):
    """The NMSE of a trained decoder of the digit code, 64 units for one latent; of the code itself.

    With a steepness its first layer starts as steps at the thresholds of the code, else as usual.
    """
    code = DigitCode(2, 1, 3)
    generator = torch.Generator().manual_seed(0)

    def drawn(n):
        x = torch.rand(n, 2, generator=generator).double()
        return code.encode(x).float() * 2 - 1, x.float() * 2 - 1

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
    if steepness is not None:
        with torch.no_grad():
            model[0].weight.fill_(steepness)
            model[0].bias.copy_(-steepness * (torch.arange(64) / 32 - 1 - 1 / 64))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    for _ in range(1000):
        z, x = drawn(256)
        optimizer.zero_grad()
        (model(z) - x).square().mean().backward()
        optimizer.step()
        schedule.step()
    z, x = drawn(4000)
    with torch.no_grad():
        return nmse(model(z), x), nmse(2 * code.decode(code.encode((x + 1) / 2)) - 1, x)


@pytest.mark.slow
def test_that_width_decides_is_a_matter_of_the_start():
    """The page said that parameters cannot buy it back; a steep first layer does (T6)."""
    usual, built = decoder_error(None)
    steep, _ = decoder_error(256)
    assert usual > 0.4
    assert steep < 1.2 * built
    page = (Path(__file__).parents[3] / "docs" / "results" / "README.md").read_text()
    assert "parameters cannot buy it back" not in page


def test_memory_grows_with_the_widest_layer():
    (case, *_) = [c for c in STUDY.cases("full") if c["model"] == "trained"]
    one, two = (STUDY.memory({**case, "units": n}) for n in (10**4, 2 * 10**4))
    assert two - one == 4 * 2 * cost_law._VALIDATION * 10**4 * case["d_model"]
