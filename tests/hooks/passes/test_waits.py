"""On a GPU a pass waits for the device as its activations are checked, and once for each probe."""

import pytest
import torch

from infoflow_lens import PositionsProbe, RecoveryProbe
from infoflow_lens.foundation.record import WeightState
from infoflow_lens.hooks import AttendedProbe
from infoflow_lens.hooks.model.semantics import visibility
from infoflow_lens.hooks.passes import ranking
from infoflow_lens.hooks.passes.run import prepare, run
from infoflow_lens.hooks.probe import Split
from tests.reference.waits import waits


def by_rounds(scores, n, visible):
    """What the kernel does, without reading anything back."""
    whole = scores.float()
    if visible is not None:
        whole = whole.masked_fill(~visible.unsqueeze(-3), -torch.inf)
    left, found = whole, []
    for _ in range(n):
        best, place = left.max(dim=-1, keepdim=True)
        found.append((best, place, (whole == best).sum(dim=-1, keepdim=True) - 1))
        left = left.scatter(-1, place, -torch.inf)
    return tuple(torch.cat(parts, dim=-1) for parts in zip(*found, strict=True))


@pytest.mark.parametrize(
    "probes",
    [
        [PositionsProbe((1, 2), spread=True)],
        [AttendedProbe()],
        [RecoveryProbe((1, 2))],
        [RecoveryProbe((1,), sketch=4)],
        [PositionsProbe((1, 2)), RecoveryProbe((1, 2))],
    ],
    ids=lambda probes: " and ".join(type(probe).__name__ for probe in probes),
)
def test_a_pass_waits_once_and_once_for_each_probe(token_model, token_inputs, probes, monkeypatch):
    monkeypatch.setattr(ranking, "can_run", lambda scores: True)
    monkeypatch.setattr(ranking, "select_keys", by_rounds)
    token_model.eval()
    needs = prepare(token_model, probes, WeightState(token_model))
    visibility(token_model, token_inputs.shape[1])  # found once for a model and length
    with torch.no_grad(), waits(token_model) as counted:
        seen = run(token_model, token_inputs, needs)
        for probe in probes:
            probe.take(seen, Split())
    assert len(counted) <= 1 + len(probes), counted
