"""Results keep their numbers and where they come from."""

import json

import pytest
import torch

from infoflow_lens import (
    InfoFlowError,
    JacobianInfluence,
    PositionsProbe,
    RecoveryProbe,
    run_probes,
)
from infoflow_lens.foundation.record import model_fingerprint
from infoflow_lens.foundation.saving import write_parts
from infoflow_lens.hooks import PositionsResult, RecoveryResult, Result
from infoflow_lens.hooks.result import LabelledArray
from tests.versions import same_release


@pytest.fixture
def results(model, inputs):
    probes = [PositionsProbe((1, 2)), RecoveryProbe((1, 2)), JacobianInfluence()]
    return run_probes(model, inputs, probes, progress=False)


def test_saving_and_loading_keeps_everything(results, tmp_path):
    for result in results:
        result.save(tmp_path / "result")
        loaded = Result.load(tmp_path / "result")
        assert type(loaded) is type(result)
        assert loaded.notes == result.notes
        assert loaded.record.to_dict() == result.record.to_dict()
        assert loaded.to_frame().equals(result.to_frame())
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("path", [3, None, b"x\xff/y", object()])
def test_what_is_no_path_is_refused_by_name(path, results):
    """Bytes and numbers ended in errors of Python."""
    with pytest.raises(InfoFlowError, match="expected"):
        results[0].save(path)


def test_results_of_earlier_versions_are_refused(results, tmp_path):
    """With what to do: their files have another schema."""
    result = results[0]
    write_parts(tmp_path / "x", "infoflow-lens result 1", *result.to_parts())
    with pytest.raises(InfoFlowError, match=r"of this version .*delete x\.json .*measure it again"):
        Result.load(tmp_path / "x")


def test_the_record_tells_settings_versions_and_model(results, model):
    record = results[0].record
    assert record.config == {
        "probe": "PositionsProbe",
        "ranks": [1, 2],
        "without": [],
        "spread": False,
    }
    assert same_release(record.versions["torch"], torch.__version__)
    assert record.model_fingerprint == model_fingerprint(model)
    assert record.weight_processing == {"normalization_type": None, "layer_norm_folded": False}


def test_loading_what_is_not_there(tmp_path, results):
    with pytest.raises(InfoFlowError, match="no Result at"):
        Result.load(tmp_path / "none")
    results[1].save(tmp_path / "recovery")
    with pytest.raises(InfoFlowError, match="holds a RecoveryResult: expected a PositionsResult"):
        PositionsResult.load(tmp_path / "recovery")
    assert isinstance(RecoveryResult.load(tmp_path / "recovery"), RecoveryResult)


def test_saved_files_are_plain_json_and_safetensors(results, tmp_path):
    results[1].save(tmp_path / "recovery")
    described = json.loads((tmp_path / "recovery.json").read_text())
    assert described["kind"] == "RecoveryResult"
    assert described["ranks"] == [1, 2]


def test_every_result_shows_and_plots_itself(results):
    for result in results:
        assert "<table" in result._repr_html_()
        assert len(result.plot().axes) > 0


@pytest.mark.parametrize("by_layer", [True, False])
def test_a_table_of_single_numbers(by_layer):
    """One a layer, which have no other axis, or one alone."""
    numbers = tuple(map(torch.tensor, (2.0, 3.0))) if by_layer else torch.tensor(2.0)
    table = LabelledArray("value", numbers, ("layer",) if by_layer else ()).to_frame()
    expected = {"layer": [0, 1], "value": [2.0, 3.0]} if by_layer else {"value": [2.0]}
    assert table.to_dict("list") == expected
