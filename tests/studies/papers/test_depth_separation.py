"""The study of Theorem 1: its rule, its slopes, and small runs of it."""

import pandas as pd
import pytest

from infoflow_lens.studies.papers import depth_separation
from infoflow_lens.studies.papers.depth_separation import DepthSeparationStudy
from tests.studies.studies_for_tests import broken

STUDY = DepthSeparationStudy()
SIZES = {"one layer": (1000, 4000, 16000), "two layers": (1000, 3000, 9000)}


def frame(slopes, at_1000, sizes=SIZES):
    """Power laws of the least NMSE; a second seed is three times worse."""
    trained = [
        {"model": model, "width": 8, "n_tokens": 16, "eps": None, "seed": seed,
         "parameters": parameters, "max_error": None,
         "nmse": at_1000[model] * (parameters / 1000) ** slopes[model] * (1 + 2 * seed)}
        for model in slopes
        for parameters in sizes[model]
        for seed in (0, 1)
    ]  # fmt: skip
    built = [
        {"model": "two layers, built", "width": None, "n_tokens": 16, "eps": eps, "seed": 0,
         "parameters": parameters, "max_error": eps / 4, "nmse": 10 * eps**2}
        for eps, parameters in ((0.1, 200), (0.01, 2000))
    ]  # fmt: skip
    return pd.DataFrame([*trained, *built])


def depths(one, two):
    return {"one layer": one, "two layers": two}


@pytest.mark.parametrize(
    ("slopes", "at_1000", "sizes", "passed"),
    [
        (depths(-0.02, -2), depths(0.95, 0.5), SIZES, True),
        (depths(-0.02, -0.5), depths(0.95, 0.9), SIZES, False),  # a factor of 3 only
        (depths(-0.02, 0.0), depths(0.95, 0.01), SIZES, False),  # better, but width does nothing
        (depths(-0.02, -2), depths(0.95, 0.5), {**SIZES, "two layers": (1000, 20000)}, False),
    ],
)
def test_the_verdict_follows_the_stated_rule(slopes, at_1000, sizes, passed):
    assert STUDY.verdict(frame(slopes, at_1000, sizes)).passed is passed


def test_the_rule_needs_both_depths():
    assert broken(STUDY, frame({"one layer": -0.02}, {"one layer": 0.95})) == [0, 1, 2]


@pytest.mark.parametrize(
    ("n_tokens", "exponents", "least"),
    [(16, "at least 1.8 (2.5 by the sharper count)", "not below -0.8"), (4, "vacuous at", "any")],
)
def test_slopes_stand_beside_the_exponents(n_tokens, exponents, least):
    """(T - h - 1) / ((n + 1) h + 1) - 1 with h = 1, n = 3; by the sharper count (T - 2) / 4 - 1."""
    rows = frame(depths(-0.02, -1.5), depths(0.95, 0.5)).assign(n_tokens=n_tokens)
    (line,) = (x for x in STUDY.table(rows).splitlines() if x.startswith("| one layer | -0.02 |"))
    assert exponents in line
    assert f"| {least} |" in line
    assert "| two layers | -1.50 | at most 1 | -2 can be reached |" in STUDY.table(rows)


STAGES = {"lengths": [2, 3], "epochs_each": 1, "last_epochs": 1}


@pytest.mark.parametrize("stages", [{}, STAGES], ids=["at once", "in stages"])
@pytest.mark.parametrize("n_layers", [1, 2])
def test_parameters_are_counted(n_layers, stages):
    model = ("one layer", "two layers")[n_layers - 1]
    settings = {"model": model, "width": 8, "n_tokens": 4, "n_train": 300, "epochs": 1, **stages}
    (row,) = STUDY.measure(settings, 5, "cpu")
    encoder = 3 * 8 + 8 + 8 * 16 + 16 + 16  # and CLS
    attention = 4 * 16 * 3 + 3 * 3 + 16
    mlp = 2 * 8 * 16 + 8 + 16
    assert row["parameters"] == encoder + n_layers * (attention + mlp) + 16 + 1
    assert 0.5 < row["nmse"] < 2  # targets of training and validation have the same scale


def test_both_depths_train_on_short_sequences_first(monkeypatch):
    plans = []

    def planned(architecture, data, stages, config, **others):
        drawn = {part.shape[1] for n in (*stages.lengths, 4) for part, _ in data(n)}
        plans.append((architecture.n_layers, stages, config, drawn))
        raise KeyboardInterrupt

    monkeypatch.setattr(depth_separation, "train_in_stages", planned)
    for model in SIZES:
        settings = {"model": model, "width": 8, "n_tokens": 4, "n_train": 300, "epochs": 1}
        with pytest.raises(KeyboardInterrupt):
            STUDY.measure({**settings, **STAGES}, 5, "cpu")
    (one, *of_one), (two, *of_two) = plans
    assert (one, two) == (1, 2)
    assert of_one == of_two
    assert of_one[0].lengths == (2, 3)
    assert of_one[2] == {2, 3, 4}


def test_the_construction_keeps_its_precision():
    for eps in (0.2, 0.05):
        (row,) = STUDY.measure({"model": "two layers, built", "eps": eps, "n_tokens": 6}, 5, "cpu")
        assert 0 < row["max_error"] < eps
    # 96 units with two inputs, a bias and an output each, and 24 entries besides
    assert row["parameters"] == 96 * 4 + 24
    assert row["nmse"] < 0.01


def test_the_largest_one_layer_model_has_more_parameters():
    for preset in STUDY.presets:
        widths = {
            model: max(c["width"] for c in STUDY.cases(preset) if c["model"] == model)
            for model in SIZES
        }
        assert widths["one layer"] >= 2 * widths["two layers"]
