"""The study of C.5: its rule, its table, and small runs of it."""

import pandas as pd
import pytest
import torch

from infoflow_lens.studies.papers.triangle_center import TriangleCenterStudy, task_of
from infoflow_lens.tasks import DRetrieval, TriangleCenter
from tests.conftest import some_of
from tests.studies.studies_for_tests import broken

STUDY = TriangleCenterStudy()


def frame(means, controls=(0.1, 0.05)):
    """Two seeds around each mean, by T, of the sizes E = 16 and 64; controls at every T."""
    rows = [
        {"seed": seed, "target": target, "n_tokens": n_tokens, "heads": "4 4", "d_model": 32,
         "nmse": error, "train_nmse": error, "information": 2, "information_proved": 0,
         "exponent_lower": 0.1, "exponent_upper": 1.0}
        for n_tokens in means
        for target, error in zip(("pairs", "tokens"), controls, strict=True)
        for seed in (0, 1)
    ]  # fmt: skip
    return pd.DataFrame(
        rows
        + [
            {"target": "triples", "seed": seed, "n_tokens": n_tokens,
             "heads": f"{d_model // 8} {d_model // 8}",
             "d_model": d_model, "nmse": mean + shift, "train_nmse": mean - 0.1,
             "information": 6, "information_proved": 0,
             "exponent_lower": 24 / d_model, "exponent_upper": 4 * n_tokens / d_model}
            for n_tokens, pair in means.items()
            for d_model, mean in zip((16, 64), pair, strict=True)
            for seed, shift in enumerate((-0.05, 0.05))
        ]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("means", "claims"),
    [
        ({8: (0.2, 0.22), 16: (0.8, 0.85), 32: (0.95, 1.0)}, []),
        ({8: (0.2, 0.22), 16: (0.955, 1.0), 32: (0.95, 1.0)}, []),  # level at the ceiling
        ({8: (0.2, 0.22), 16: (0.98, 1.0), 32: (0.95, 1.0)}, [0]),  # falls for one size
        ({8: (0.2, 0.22), 16: (0.7, 0.75), 32: (0.79, 0.85)}, [1]),  # one size learns T = 32
        ({8: (0.2, 0.25), 16: (0.8, 0.85), 32: (0.95, 1.0)}, [2]),  # sizes differ at T = 8
    ],
)
def test_the_verdict_follows_the_stated_rule(means, claims):
    """Sizes that learnt nothing do not count as alike (T10)."""
    assert broken(STUDY, frame(means)) == claims
    largest = STUDY.claims()[1].numbers(frame(means))
    assert largest["T = 32, E = 64"] == pytest.approx(means[32][1])
    alike = STUDY.claims()[2].numbers(frame(means))
    assert set(alike) == {f"T = {t}" for t, (least, _) in means.items() if least <= 0.9}


@pytest.mark.parametrize("controls", [(0.4, 0.05), (0.1, 0.4), (0.1, float("nan"))])
def test_a_control_that_is_not_learnt_leaves_nothing_seen(controls):
    means = {8: (0.2, 0.22), 16: (0.8, 0.85), 32: (0.95, 1.0)}
    assert STUDY.verdict(frame(means)).passed
    assert not STUDY.verdict(frame(means, controls)).passed
    assert broken(STUDY, frame(means, (0.31, 0.05))) == [3]  # below a third of the triples' .98
    without = frame(means)
    assert not STUDY.verdict(without[without["target"] != "pairs"]).passed


@pytest.mark.parametrize("n_tokens", [4, 7])
def test_controls_are_of_the_same_tokens(n_tokens):
    x, y = task_of("pairs", n_tokens, 4).sample(50, 0)
    assert x.shape == (50, n_tokens, 4)
    assert x.norm(dim=-1).min() >= 0.5 - 1e-6
    assert x.norm(dim=-1).max() <= 2 + 1e-6
    sums = (x[:, :, None] + x[:, None]).square().sum(dim=-1).flatten(1)
    torch.testing.assert_close(y[:, 0], sums.amin(dim=1))
    x, y = task_of("tokens", n_tokens, 4).sample(50, 0)
    vectors = DRetrieval(n_components=3, n_tokens=n_tokens).vectors
    torch.testing.assert_close(y[:, 0], (x @ vectors.T).amax(dim=1).sum(dim=1))
    assert task_of("triples", n_tokens, 4) == TriangleCenter(n_tokens=n_tokens)


SETTINGS = {"target": "triples", "lr": 5e-3, "d_encoder": 16}


def test_a_row_holds_the_errors_and_the_estimate():
    (row,) = STUDY.measure(
        {"n_tokens": 8, "heads": [4, 4], "d_model": 32, **STUDY.steps(2), **SETTINGS}, 3, "cpu"
    )
    # T^3 - 1 comparisons ask for |I| = 3, C(8, 3) - 3 for none; all 8 tokens are enough; d/E = 1/8
    assert (row["information"], row["information_proved"]) == (3, 0)
    assert (row["exponent_lower"], row["exponent_upper"]) == (0.375, 1.0)


@pytest.mark.parametrize("target", some_of(["triples", "pairs", "tokens"], "triples"))
def test_the_smallest_model_learns_short_sequences(target):
    """So that a large error at a large T is not that of a training that does nothing."""
    settings = {"n_tokens": 3, "heads": [2, 2], "d_model": 16, **STUDY.steps(300), **SETTINGS}
    (row,) = STUDY.measure({**settings, "target": target}, 1, "cpu")
    assert row["nmse"] < 0.7
    assert row["train_nmse"] < 0.8


def test_pairs_behind_a_linear_encoder_are_pairs_and_judge_nothing():
    pairs, linear = (task_of(name, 5, 4) for name in ("pairs", "pairs, linear encoder"))
    assert pairs.components == linear.components
    encoders = {c["target"]: STUDY.architecture(c).d_encoder for c in STUDY.cases("quick")}
    assert encoders.pop("pairs, linear encoder") is None
    assert set(encoders.values()) == {64}
    results = frame({8: (0.2, 0.22), 16: (0.8, 0.85), 32: (0.95, 1.0)})
    beside = results[results["target"] == "pairs"].assign(target="pairs, linear encoder", nmse=0.9)
    assert broken(STUDY, pd.concat([results, beside])) == []


def test_controls_stand_at_every_length_of_the_triples():
    for preset in ("smoke", "quick", "full"):
        at = {(c["target"], c["n_tokens"]) for c in STUDY.cases(preset)}
        for target in ("triples", "pairs", "tokens"):
            assert {n for name, n in at if name == target} == {n for _, n in at}
