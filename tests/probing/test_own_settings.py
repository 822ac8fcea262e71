"""Settings of single probes: what is measured with them is what the probe itself measures so."""

import dataclasses
import json

import pytest
import torch

from infoflow_lens import (
    InfoFlowError,
    JacobianInfluence,
    RecoveryProbe,
    load_any,
    probe,
    run_probes,
)
from infoflow_lens.hooks import PositionsProbe, Probe
from infoflow_lens.hooks.model.capabilities import inspect_model
from infoflow_lens.hooks.model.inputs import Batches
from infoflow_lens.probing.config import (
    OwnSetting,
    ProbingConfig,
    apply_settings,
    register_parts,
)
from infoflow_lens.probing.measuring import check_own_settings
from infoflow_lens.probing.part import ProbePart, RunContext, load_part, name_of
from infoflow_lens.probing.parts import PositionsPart
from tests.conftest import some_of
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
    assert json.loads((tmp_path / "out/record.json").read_text())["config"]["setting"] == sorted(
        given
    )
    with pytest.raises(InfoFlowError, match=r"settings \(setting\)"):
        probe(folder, ids, tmp_path / "out", probes=("positions", "recovery"), progress=False)


@pytest.mark.parametrize("make", ALL)
def test_every_field_of_every_probe_can_be_set(make, token_inputs):
    """To the value that it has: no field is refused, and nothing else changes."""
    made: Probe = make(token_inputs)
    for item in dataclasses.fields(made):
        if item.init:
            setting = OwnSetting("mine", item.name, getattr(made, item.name))
            again = apply_settings({"mine": made}, [setting], {})["mine"]
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
        ("positions.ranks=[1]", "positions.ranks cannot be changed .* with a Positions"),
        ("recvery.ridge=gcv", "no probe of this run.*did you mean 'recovery'"),
        ("recovery.target=identity recovery.vocabulary=[9999]", "vocabulary holds 9999"),
        ("recovery.ridge=1 recovery.ridge=gcv", "recovery.ridge is given twice"),
    ],
)
def test_what_cannot_be_set_is_refused_before_anything_is_measured(
    folder, ids, text, message, tmp_path
):
    if "vocabulary" not in text:  # which only the model says
        (data := tmp_path / "texts.txt").write_text("w5 w6\n" * 20)
        with pytest.raises(InfoFlowError, match=message):
            probe("no/model", data, probes=("recovery", "positions"), setting=text.split(" "))
    with pytest.raises(InfoFlowError, match=message):
        probe(
            folder, ids, probes=("recovery", "positions"), setting=text.split(" "), progress=False
        )


def test_settings_hold_in_any_order_and_for_probes_of_ones_own(folder, ids, tmp_path):
    both = ["recovery.vocabulary=[5, 6]", "recovery.target=identity"]
    for order in (both, both[::-1]):  # the second one goes on
        found = probe(folder, ids, tmp_path, probes=("recovery",), setting=order, progress=False)
    assert found.recovery.accuracy is not None
    own = RecoveryProbe((1, 2))
    name = name_of(own)
    found = probe(folder, ids, probes=(own,), setting=(f"{name}.ranks=[1]",), progress=False)
    assert found.found[name].ranks == (1,)


class InPercent(PositionsProbe):
    """Takes a share as a text, too."""

    share: float = 0.1

    def __post_init__(self):
        if isinstance(self.share, str):
            self.share = float(self.share.rstrip("%")) / 100
        super().__post_init__()


class TwoOfThem(PositionsPart):
    """Has other probes than the part that it is made from."""

    name = "two"

    def probes(self, context):
        return {"positions": InPercent(), "more": InPercent()}


@pytest.mark.parametrize(
    ("part", "names"), [(TwoOfThem(), ("positions", "more")), (ProbePart(InPercent(), "p"), ("p",))]
)
def test_probes_of_ones_own_judge_their_settings_themselves(part, names):
    for name in names:
        with register_parts({"mine": part}):
            config = ProbingConfig("", "", probes=("mine",), setting=(f"{name}.share=20%",))
            check_own_settings(config)
        made = apply_settings({name: InPercent()}, config.single_settings(), {})
        assert made[name].share == 0.2


@pytest.mark.parametrize("name", ["influence", "positions", "recovery"])
@pytest.mark.parametrize("influence", ["exact", "resample"])
def test_each_part_says_of_which_classes_its_probes_are(name, influence, folder):
    """So that their settings are refused before a model is loaded."""
    model, config = load_any(folder).model, ProbingConfig(model="", data="", influence=influence)
    batches = Batches(model, zoo.tokens(4, 9))
    context = RunContext(config, model, inspect_model(model, zoo.tokens(1, 9)), "", batches, False)
    part = load_part(name)
    found = part.probes(context)
    assert found.keys() == part.kinds.keys()
    assert all(isinstance(probe, part.kinds[name]) for name, probe in found.items())


@pytest.mark.parametrize("kind", some_of(["exact", "estimate", "resample"], "exact", "resample"))
def test_influence_is_measured_at_any_positions(kind, folder, ids, tmp_path):
    """[CLS] of an encoder, say, or what stands before the last token."""
    found = probe(
        folder, ids, tmp_path, probes=("positions", "influence", "routes"), influence=kind,
        n_detail=3, setting=("influence.positions=[0, -2]",), progress=False,
    )  # fmt: skip
    influence, n_pos = found.influence, ids.shape[1]
    assert influence.positions.tolist() == [[0, n_pos - 2]] * 3
    if kind == "exact":
        own = JacobianInfluence("resid_post", positions=(0, n_pos - 2))
        (expected,) = run_probes(load_any(folder).model, ids[:3], [own], progress=False)
        torch.testing.assert_close(influence.influence, expected.influence)
    assert set(found.found["routes"].to_frame()["positions"]) == {f"2 positions 0-{n_pos - 2}"}
    page = (tmp_path / "report.html").read_text()
    assert "the last state can hold" not in page  # it was not asked
    assert torch.tensor(found.curve.last).isnan().all()


def test_what_the_comparison_builds_on_stays(folder, ids):
    for field, value in (("layers", "[1, 0]"), ("source_layer", "1")):
        with pytest.raises(InfoFlowError, match=f"influence.{field} cannot be changed for"):
            probe(
                folder, ids, probes=("influence",), setting=(f"influence.{field}={value}",),
                progress=False,
            )  # fmt: skip


def test_the_seed_of_the_run_is_that_of_an_estimate(folder, ids):
    found = [
        probe(
            folder, ids, probes=("influence",), n_detail=3, seed=seed,
            setting=("influence.estimate=4",), progress=False,
        ).influence.influence
        for seed in (0, 7)
    ]  # fmt: skip
    assert not found[0].equal(found[1])


@pytest.mark.filterwarnings("ignore:layer 0. rank-deficient")
def test_maps_with_a_penalty_may_have_fewer_rows_than_features(folder):
    for setting, layers in (((), (0, 1)), (("recovery.ridge=gcv",), ())):
        found = probe(
            folder, zoo.tokens(5, 3), probes=("recovery",), ranks=(1,), setting=setting,
            progress=False,
        )  # fmt: skip
        assert found.recovery.too_few_rows == layers
