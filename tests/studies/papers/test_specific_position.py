"""The study of C.3: its table, its rule, and a small run of it."""

import pandas as pd
import pytest
import torch

from infoflow_lens.studies.papers import find_study, specific_position
from infoflow_lens.studies.sweep import run_study
from tests.studies.studies_for_tests import broken

STUDY = find_study("specific_position")


def frame(weights, mse=1e-4, model="no normalization"):
    return pd.DataFrame(
        [
            {"run": run, "seed": run, "model": model, "mse": mse, "validation_nmse": mse,
             "position": t + 1, "weight": weight, "weight_deviation": 0.001}
            for run in (0, 1)
            for t, weight in enumerate(weights)
        ]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("weights", "mse", "claims"),
    [
        ((0.33, 0.34, 0.33, 0.0), 1e-4, []),
        ((0.33, 0.34, 0.33, 0.0), 2e-3, [0]),  # it does not fit the target
        ((0.40, 0.30, 0.30, 0.0), 1e-4, [1]),  # not even
        ((0.32, 0.32, 0.32, 0.04), 1e-4, [2]),  # looks elsewhere
    ],
)
def test_the_verdict_follows_the_stated_rule(weights, mse, claims):
    assert broken(STUDY, frame(weights, mse)) == claims


def test_the_rule_is_about_every_model():
    """The project's and the paper's."""
    good, bad = (0.33, 0.34, 0.33, 0.0), (0.4, 0.3, 0.3, 0.0)
    for ours, paper, passed in ((good, good, True), (good, bad, False), (bad, good, False)):
        both = pd.concat([frame(ours), frame(paper, model="LayerNorm, constant tail")])
        assert STUDY.verdict(both).passed is passed


def test_the_papers_model_normalises_what_attention_has_written():
    """By hand: attention, residual connection, LayerNorm, a network of two layers."""
    settings = {**STUDY.cases("smoke")[1], "n_tokens": 5}
    model = STUDY.model(settings, 0, "cpu")
    x = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output, cache = model.run_with_cache(x)
        attention = model.blocks[0].attn
        embedded = cache["blocks.0.hook_resid_pre"]
        value = embedded[:, :5] @ attention.W_V[0] + attention.b_V[0]
        weights = cache["blocks.0.attn.hook_pattern"][:, 0, -1, :5]
        written = (weights[:, :, None] * value).sum(dim=1) @ attention.W_O[0] + attention.b_O
        normalised = torch.nn.functional.layer_norm(embedded[:, -1] + written, (32,), eps=1e-5)
        first, _, last = model.unembed
        expected = last(torch.nn.functional.gelu(first(normalised)))
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model.forward_readout(x), output, rtol=1e-4, atol=1e-5)


def test_the_same_seed_gives_the_same_model():
    settings, state = STUDY.cases("smoke")[1], torch.get_rng_state()
    one, again, other = (STUDY.model(settings, seed, "cpu").state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["unembed.0.weight"], other["unembed.0.weight"])
    assert torch.equal(torch.get_rng_state(), state)


def test_the_papers_training_ends_with_a_tail_of_small_steps(monkeypatch):
    asked = []

    def note(model, train, validation, config, progress):
        asked.append((config.lr, config.lr_end, config.epochs))
        if len(asked) == 2:
            raise StopIteration

    monkeypatch.setattr(specific_position, "train", note)
    case = next(case for case in STUDY.cases("full") if case["tail_epochs"])
    with pytest.raises(StopIteration):
        STUDY.measure({**case, "n_train": 8}, 0, "cpu")
    assert asked[1] == (1e-4, 1e-4, case["tail_epochs"]) != asked[0]


@pytest.mark.slow
def test_a_small_run_shows_the_effect(tmp_path):
    """Weights of a trained model: even on the summed positions whatever the sample."""
    result = run_study(STUDY, tmp_path, preset="smoke", progress=False)
    assert STUDY.verdict(result.rows[result.rows["model"] == "no normalization"]).passed
    # twelve epochs are too few for the network that undoes the normalization
    assert result.rows["mse"].max() < 0.05
    summed = result.rows[result.rows["position"] <= 3]
    assert summed["weight"].between(0.3, 0.36).all()
    assert (summed["weight_deviation"] < 0.02).all()
    assert result.rows.groupby("run")["weight"].sum().sub(1).abs().max() < 1e-6
