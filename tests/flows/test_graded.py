"""A flow's graded sets are those that the probe measures on the same texts."""

import pytest
import torch

from infoflow_lens import Architecture, build_model, flow, run_probes
from infoflow_lens.hooks import GradedSetsProbe
from tests.conftest import make_token_model


@pytest.mark.parametrize("kind", ["token ids", "vectors"])
def test_a_flow_has_the_graded_sets_of_its_texts(kind):
    generator = torch.Generator().manual_seed(0)
    if kind == "token ids":
        model = make_token_model()
        x = [torch.randint(17, (n,), generator=generator) for n in (7, 4)]
    else:
        sizes = {"n_heads": (2, 3), "d_model": 12, "d_token": 3, "n_tokens": 5}
        model = build_model(Architecture(**sizes), seed=0)
        x = torch.randn(2, 5, 3, generator=generator)
    made = flow(model, x, influence=None, progress=False)
    (found,) = run_probes(model, x, [GradedSetsProbe()], progress=False)
    assert made.graded.lengths.tolist() == found.lengths.tolist()
    for sequence, n in enumerate(found.lengths.tolist()):
        n_states = n + found.scores.shape[2] - found.scores.shape[3]
        torch.testing.assert_close(
            made.graded.strengths[:, sequence, :n_states, :n],
            found.scores[:, sequence, :n_states, :n],
        )


def test_positions_that_no_head_passes_on_have_no_strength():
    model = make_token_model()
    x = torch.randint(17, (1, 6), generator=torch.Generator().manual_seed(0))
    made = flow(model, x, influence=None, without=(0,), progress=False)
    assert not made.graded.strengths[:, 0, 1:, 0].any()
    assert (made.graded.strengths[:, 0, 5, 1:] > 0).all()
