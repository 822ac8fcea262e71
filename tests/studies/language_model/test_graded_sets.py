"""The study of graded sets: its rows by hand, its choice and its rule on rows made up."""

import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from infoflow_lens import InfoFlowError, JacobianInfluence, run_probes
from infoflow_lens.hooks import GradedSetsProbe, measure_mechanisms
from infoflow_lens.studies.language_model.graded_sets import GradedSetsStudy, chosen_of
from infoflow_lens.studies.language_model.snapshots import load_snapshot
from tests.reference import zoo


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = zoo.save("gpt2", tmp_path_factory.mktemp("tiny"), n_head=2)
    text = tmp_path_factory.mktemp("data") / "held_out.txt"
    text.write_text(" ".join(f"w{word}" for word in zoo.tokens(1, 600)[0].tolist()))
    return GradedSetsStudy([str(folder)], str(text))


@pytest.fixture(scope="module")
def rows(study):
    settings = study.cases("smoke")[0]
    return pd.DataFrame([{**settings, **row} for row in study.measure(settings, 0, "cpu")])


@pytest.mark.parametrize("strength", ["weight", "damage"])
def test_rows_are_those_of_the_measures_by_hand(study, rows, strength):
    """The texts that choose and those that are measured share no window."""
    settings = study.cases("smoke")[0]
    model = load_snapshot(study.source_of(settings), "cpu")
    texts = study.texts_of(model, settings, 0)
    windows = [tuple(row) for part in texts.values() for row in part.tolist()]
    assert len(set(windows)) == len(windows)
    places = tuple(range(1, 16, 2))
    more = {}
    if strength == "damage":
        more["damage"] = measure_mechanisms(
            model, texts["validation"][:8], metric="kl", batch_size=8, progress=False
        )
    for text, measured in texts.items():
        graded, influence = run_probes(
            model,
            measured[4:],  # the others are donors
            [
                GradedSetsProbe(strength, positions=places, **more),
                JacobianInfluence("resid_post", positions=places),
            ],
            progress=False,
        )
        mine = rows[
            (rows["on"] == text)
            & (rows["influence"] == "jacobian")
            & (rows["method"] == f"graded: {strength}, product")
        ].set_index(["layer", "sequence"])
        assert len(mine) == 2 * len(measured[4:])
        for layer, sequence in mine.index:
            ranks, shares = [], []
            for row, place in enumerate(places):
                score = graded.scores[layer, sequence, row, :place].numpy()
                real = influence.influence[layer, sequence, row, :place].numpy()
                if place > 1:  # of two tokens one may be in the quarter
                    alike = np.ptp(score) == 0
                    ranks.append(0.0 if alike else stats.spearmanr(score, real).statistic)
                    quarter = np.argsort(-score)[: -(-place // 4)]
                    shares.append(real[quarter].sum() / real.sum())
            found = mine.loc[(layer, sequence)]
            assert found["spearman"] == pytest.approx(np.mean(ranks), abs=2e-4)
            if strength == "weight":  # no two scores are equal
                assert found["share"] == pytest.approx(np.mean(shares), abs=2e-4)


def test_every_method_stands_in_every_layer_for_both_influences_and_texts(rows):
    counts = rows.groupby(["on", "influence", "layer"])["method"].nunique()
    assert len(counts) == 2 * 2 * 2
    assert set(counts) == {1 + 6 + 8 + 3}  # first choices, graded, baselines, controls
    ideal = rows[rows["method"] == "measured"]
    assert (ideal["spearman"] == 1).all()
    assert (rows[rows["method"] == "random"]["spearman"] == 0).all()


CHOSEN, OTHER = "graded: norm, product", "graded: weight, product"


def judged(spearman, share, mlp=True, validation=(0.9, 0.8), model="m"):
    """Rows of a model: leads of the chosen sets over rollout (low, high) in both measures."""
    made = []
    for influence, on, method in itertools.product(
        ("jacobian", "resample"),
        ("validation", "test"),
        (CHOSEN, OTHER, "attention rollout"),
    ):
        for sequence in range(8):
            row = {
                "model": model, "final": True, "weights": "w", "mlp": mlp, "on": on, "layer": 1,
                "influence": influence, "method": method, "sequence": sequence,
                "spearman": 0.5, "share": 0.5,
            }  # fmt: skip
            if on == "validation":
                row["spearman"] = dict(zip((CHOSEN, OTHER), validation, strict=True)).get(method, 0)
            elif method == CHOSEN:
                row["spearman"] += spearman + 0.01 * (-1) ** sequence
                row["share"] += share + 0.01 * (-1) ** sequence
            made.append(row)
    return pd.DataFrame(made)


@pytest.mark.parametrize(
    ("leads", "mlp", "passed"),
    [
        ((0.1, 0.1), True, True),
        ((0.0, 0.1), True, False),  # level, where it should be ahead
        ((0.0, 0.0), False, True),  # level is enough without MLPs
        ((-0.1, 0.1), False, True),
        ((-0.1, -0.1), False, False),
    ],
)
def test_the_verdict_follows_its_rule(leads, mlp, passed):
    assert GradedSetsStudy().verdict(judged(*leads, mlp=mlp)).passed is passed


def test_every_judged_model_counts_and_that_of_pilots_does_not():
    good, bad = judged(0.1, 0.1, model="a"), judged(-0.1, -0.1, model="b")
    assert not GradedSetsStudy().verdict(pd.concat([good, bad])).passed
    pilot = judged(-0.1, -0.1, model="stdlib-2l", mlp=False)
    found = GradedSetsStudy().verdict(pd.concat([good, pilot]))
    assert found.passed
    assert any("of pilots, not judged" in remark for remark in found.remarks)
    assert not GradedSetsStudy().verdict(pilot).passed  # nothing is judged


def test_other_text_chooses_and_the_text_that_is_judged_does_not():
    assert chosen_of(judged(-0.1, -0.1)) == CHOSEN
    assert chosen_of(judged(0.1, 0.1, validation=(0.7, 0.8))) == OTHER
    found = GradedSetsStudy().verdict(judged(0.1, 0.1, validation=(0.7, 0.8)))
    assert not found.passed  # the other is level with rollout


@pytest.mark.slow
def test_a_random_model_of_gpt_2s_depth_needs_no_text():
    study = GradedSetsStudy(["stdlib-2l"])
    deep = study.cases("smoke")[-1]
    assert not study.judges(deep)
    rows = pd.DataFrame(study.measure({**deep, "n_context": 12}, 0, "cpu"))
    assert set(rows["layer"]) == set(range(12))
    assert set(rows["on"]) == {"test"}
    last = rows[(rows["layer"] == 11) & (rows["method"] == "first choices")]
    assert (last["size"] > 0.9 * last["candidates"]).all()
    ranked = rows[(rows["layer"] == 11) & (rows["method"] == OTHER)]
    assert torch.tensor(ranked["spearman"].tolist()).isfinite().all()


def test_graded_sets_without_a_model_are_refused():
    with pytest.raises(InfoFlowError, match="no model is named"):
        GradedSetsStudy().cases("smoke")
