"""Settings of single probes: what is measured with them is what the probe itself measures so."""

import dataclasses
import json

import pytest
import torch

from infoflow_lens import InfoFlowError, RecoveryProbe, load_any, probe, run_probes
from infoflow_lens.hooks import Probe
from infoflow_lens.probing.own_settings import OwnSetting, with_own_settings
from tests.hooks.test_invariants import MAKES
from tests.reference import zoo

ALL = [make for makes in MAKES.values() for make in makes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return zoo.save("gpt2", tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def ids():
    return zoo.tokens(40, 9)


def test_a_run_measures_by_them(folder, ids, tmp_path):
    given = ["recovery.ridge=gcv", 'recovery.target=["resid_pre", 1]', "positions.spread=false"]
    found = probe(
        folder, ids, tmp_path / "out", probes=("positions", "recovery"), setting=given,
        progress=False,
    )  # fmt: skip
    own = RecoveryProbe((1, 2, 3, 4), ridge="gcv", target=("resid_pre", 1))
    (expected,) = run_probes(load_any(folder).model, ids, [own], progress=False)
    for mine, theirs in zip(found.recovery.fvu, expected.fvu, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert found.found["positions"].record.config["spread"] is False
    assert json.loads((tmp_path / "out/record.json").read_text())["config"]["setting"] == given
    with pytest.raises(InfoFlowError, match=r"settings \(setting\)"):
        probe(folder, ids, tmp_path / "out", probes=("positions", "recovery"), progress=False)


@pytest.mark.parametrize("make", ALL)
def test_every_field_of_every_probe_can_be_set(make, token_inputs):
    """To the value that it has: no field is refused, and nothing else changes."""
    made: Probe = make(token_inputs)
    for item in dataclasses.fields(made):
        if item.init:
            setting = OwnSetting("mine", item.name, getattr(made, item.name))
            again = with_own_settings({"mine": made}, [setting], ())["mine"]
            assert again is not made
            assert again.config() == made.config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recovery", "expected NAME.FIELD=VALUE, such as recovery.ridge=gcv"),
        ("ridge=gcv", "expected NAME.FIELD=VALUE"),
        ("recovery.ridg=gcv", "recovery has no setting 'ridg'.*did you mean 'ridge'"),
        ("recovery.ridge=-1", "recovery: ridge is -1"),
        ("recovery.maps=1", "recovery: maps is 1: expected True or False"),
        ("recovery.ranks=[1]", "one of the whole run: expected --ranks"),
        ("recvery.ridge=gcv", "a probe that is not measured.*did you mean 'recovery'"),
    ],
)
def test_what_cannot_be_set_is_refused_before_anything_is_measured(folder, ids, text, message):
    with pytest.raises(InfoFlowError, match=message):
        probe(folder, ids, probes=("recovery",), setting=(text,), progress=False)
