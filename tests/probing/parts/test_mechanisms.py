"""What a run tells of mechanisms: every ideal that suffices, and what one for all heads costs."""

import pytest
import torch

from infoflow_lens.hooks import measure_mechanisms, measure_sufficiency
from infoflow_lens.hooks.interventions.patterns import IDEALS
from infoflow_lens.probing.parts.heads import MechanismsPart, SufficiencyPart
from tests.conftest import make_token_model


@pytest.fixture(scope="module")
def model():
    return make_token_model()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(17, (16, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def mechanisms(model, tokens):
    """Several ideals suffice for some heads."""
    exact = measure_mechanisms(model, tokens[:8], exact=True, progress=False)
    threshold = float(torch.cat(exact.damage).quantile(0.6))
    return measure_mechanisms(model, tokens[:8], threshold=threshold, progress=False)


def test_every_ideal_that_suffices_is_told_with_its_heads(mechanisms):
    lines = MechanismsPart().sentences(mechanisms)
    frame = mechanisms.to_frame()
    for ideal in IDEALS:
        enough = frame[frame[f"sufficient_{ideal}"]]
        named = frame[frame["mechanism"] == ideal]
        told = [line for line in lines if line.startswith(f"{ideal} would suffice")]
        assert len(told) == (len(enough) > len(named))
        if told:
            heads = [f"{layer}.{head}" for layer, head in zip(enough["layer"], enough["head"])]
            assert told[0].split(" heads ")[1].split() == heads
    assert any("would suffice" in line for line in lines)


def test_one_ideal_for_every_head_stands_beside_the_mechanisms(model, tokens, mechanisms):
    found = measure_sufficiency(model, tokens[8:], mechanisms, draws=2, progress=False)
    part = SufficiencyPart()
    first, every = part.sentences(found)
    by_keys, by_heads = part.figures(found)
    excess = dict(zip(found.assignments, found.excess()[:, -1].tolist(), strict=True))
    assert f"top 1 {excess['every head top 1']:+.3f}" in every
    assert f"global {excess['every head global']:+.3f}" in every
    assert f"{excess['mechanisms']:+.3f} nats a token" in first
    assert by_keys.series["k largest keys"] == [excess[f"every head top {k}"] for k in by_keys.x]
    assert list(by_heads.series) == ["mean ablation", "random mechanisms", "mechanisms"]
    assert by_heads.series["mechanisms"][-1] == excess["mechanisms"]
