"""A flow that was saved is the same flow again, without a model; foreign files are refused."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from infoflow_lens import Flow, InfoFlowError, PositionsProbe, flow, run_probes
from infoflow_lens.report.pages import render_flow
from tests.conftest import make_token_model, some_of

RULES = [{}, {"rule": "top_k", "k": 2}, {"influence": None}, {"rule": "mechanisms"}]


@pytest.mark.parametrize(
    "settings",
    some_of(RULES, RULES[1], RULES[3]),
    ids=["default", "top_k", "unmeasured", "mechanisms"],
)
def test_a_saved_flow_is_the_same_again(settings, tmp_path):
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(17, (n,), generator=generator) for n in (5, 3, 5, 5, 4, 5, 5, 5)]
    texts = texts if settings.get("rule") == "mechanisms" else texts[:2]
    made = flow(make_token_model(), texts, progress=False, **settings)
    made.save(tmp_path / "flow")
    again = Flow.load(tmp_path / "flow")
    assert repr(again) == repr(made)
    assert again.to_frame().equals(made.to_frame())
    assert again.graded.strengths.equal(made.graded.strengths)
    numbers = [one.agreement and asdict(one.agreement) for one in (again, made)]
    np.testing.assert_equal(*numbers)  # NaN equals NaN
    assert again.next_tokens == made.next_tokens
    assert again.replaced == made.replaced
    assert again.record == made.record
    assert render_flow(again.view) == render_flow(made.view)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "flow"
    flow(make_token_model(), [[1, 2, 3]], progress=False).save(path)
    return path


def test_foreign_and_spoiled_files_are_refused(saved, tmp_path):
    with pytest.raises(InfoFlowError, match=r"no Flow at .*: expected nothing\.json"):
        Flow.load(tmp_path / "nothing")
    (positions,) = run_probes(
        make_token_model(), [[1, 2, 3]], [PositionsProbe((1,))], progress=False
    )
    positions.save(tmp_path / "positions")
    with pytest.raises(InfoFlowError, match="is no Flow of this version"):
        Flow.load(tmp_path / "positions")
    with pytest.raises(InfoFlowError, match="is no PositionsResult of this version"):
        type(positions).load(saved)
    for end in (".json", ".safetensors"):
        (tmp_path / f"spoiled{end}").write_bytes(saved.with_suffix(end).read_bytes())
    values = json.loads((tmp_path / "spoiled.json").read_text())
    (tmp_path / "spoiled.json").write_text(json.dumps({**values, "title": "<b>"}))
    with pytest.raises(InfoFlowError, match="it has changed since it was written"):
        Flow.load(tmp_path / "spoiled")
    (tmp_path / "spoiled.json").write_text(json.dumps(values))
    (tmp_path / "spoiled.safetensors").write_bytes(b"short")
    with pytest.raises(InfoFlowError, match=r"spoiled.safetensors' cannot be read"):
        Flow.load(tmp_path / "spoiled")
