"""Fingerprints of tensors and models: of what they hold, and without a trace on the model."""

import pytest
import torch
from torch import nn

from infoflow_lens.foundation.record import fingerprint, model_fingerprint


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:1, ::2],
        lambda x: x[:1, :1],
        lambda x: x[::5],
        lambda x: x[:0],
        lambda x: x.T,
        lambda x: x[0, 0],
        lambda x: x.expand(2, 3, 4),
    ],
)
def test_a_view_has_the_fingerprint_of_its_copy(view):
    """One row of a stride once ended in an error of torch."""
    part = view(torch.arange(12).view(3, 4))
    assert fingerprint({"x": part}) == fingerprint({"x": part.clone().contiguous()})


class Spoilt(nn.Linear):
    """As those of bitsandbytes: asked for its state it changes itself."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self.weight.data.zero_()


def test_a_model_that_its_own_state_dict_would_change_is_left_alone():
    model = nn.Sequential(nn.Linear(3, 3), Spoilt(3, 2), nn.BatchNorm1d(2))
    before = [p.detach().clone() for p in model.parameters()]
    found = model_fingerprint(model)
    assert all(a.equal(b) for a, b in zip(before, model.parameters(), strict=True))
    with torch.no_grad():
        model[1].weight.add_(1)
    assert model_fingerprint(model) != found
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2), nn.BatchNorm1d(2))
    plain.load_state_dict(dict(zip(plain.state_dict(), [*before, *model.buffers()], strict=False)))
    assert model_fingerprint(plain)
