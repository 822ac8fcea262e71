"""Results on the Hugging Face hub: uploaded and loaded again by the hub's own client."""

import huggingface_hub.constants
import pytest
import torch

from infoflow_lens import InfoFlowError, PositionsProbe, probe, run_probes
from infoflow_lens.hooks import PositionsResult, Result, check_probe
from tests.conftest import make_token_model
from tests.reference.hub import TOKEN, hub

IDS = torch.randint(17, (6, 8), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def model():
    return make_token_model()


@pytest.fixture
def datasets(monkeypatch, tmp_path):
    with hub() as (address, datasets):
        for name, value in {  # of the client, read from the environment when it is imported
            "ENDPOINT": address,
            "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": False,
        }.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        yield datasets


def test_a_result_comes_back_as_it_was(model, datasets):
    (found,) = run_probes(model, IDS, [PositionsProbe()], progress=False)
    assert found.push_to_hub("me/numbers", token=TOKEN).endswith("me/numbers")
    assert set(datasets["me/numbers"]) == {
        "README.md", "PositionsResult.json", "PositionsResult.safetensors",
    }  # fmt: skip
    again = PositionsResult.from_hub("me/numbers")
    assert all(a.equal(b) for a, b in zip(found.positions, again.positions, strict=True))
    assert again.record == found.record
    card = datasets["me/numbers"]["README.md"].decode()
    assert 'Result.from_hub("me/numbers", "PositionsResult")' in card


def test_a_card_that_is_there_stays_and_other_files_too(model, datasets):
    (found,) = run_probes(model, IDS, [PositionsProbe()], progress=False)
    datasets["me/mine"] |= {"README.md": b"my own words", "notes.txt": b"mine"}
    found.push_to_hub("me/mine", "first", token=TOKEN)
    assert datasets["me/mine"]["README.md"] == b"my own words"
    assert datasets["me/mine"]["notes.txt"] == b"mine"
    assert isinstance(Result.from_hub("me/mine", "first"), PositionsResult)


def test_a_probe_run_is_uploaded_with_its_tables_and_report_but_not_its_data(
    model, datasets, tmp_path
):
    found = probe(
        model, IDS, probes=["positions", "influence"], out=tmp_path / "run", ranks=(1,),
        shard=4, progress=False,
    )  # fmt: skip
    found.push_to_hub("me/run", token=TOKEN)
    names = set(datasets["me/run"])
    assert {"report.html", "explained.csv", "positions.csv", "influence.json"} <= names
    assert not any("inputs" in name for name in names)
    assert torch.equal(Result.from_hub("me/run", "influence").influence, found.influence.influence)
    shards = Result.from_hub("me/run", "positions").shards()
    assert [each.n_sequences for each in shards] == [4, 2]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda r: r.push_to_hub("me/numbers", token="hf_wrong"), "the hub refuses it .*log in"),
        (lambda r: r.push_to_hub("me/a b", token=TOKEN), "expected owner/name"),
        (lambda r: r.from_hub("me/nothing"), "'me/nothing': the hub refuses it"),
    ],
)
def test_what_cannot_be_done_is_said(model, datasets, call, says):
    (found,) = run_probes(model, IDS, [PositionsProbe()], progress=False)
    with pytest.raises(InfoFlowError, match=says):
        call(found)


def test_a_temporary_folder_that_has_gone_is_named(model, datasets, tmp_path, monkeypatch):
    (found,) = run_probes(model, IDS, [PositionsProbe()], progress=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    for call in (
        lambda: found.push_to_hub("me/numbers", token=TOKEN),
        lambda: probe(model, IDS, probes=["positions"], progress=False),
        lambda: check_probe(PositionsProbe(), model, IDS),
    ):
        with pytest.raises(InfoFlowError, match=r"no temporary folder can be made .* set TMPDIR"):
            call()


def test_another_kind_of_result_and_no_network_are_refused(model, datasets, monkeypatch):
    (found,) = run_probes(model, IDS, [PositionsProbe()], progress=False)
    found.push_to_hub("me/numbers", "influence", token=TOKEN)
    with pytest.raises(InfoFlowError, match="holds a PositionsResult"):
        type("Other", (Result,), {}).from_hub("me/numbers", "influence")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(InfoFlowError, match="'me/new': the hub cannot be reached"):
        found.push_to_hub("me/new", token=TOKEN)
