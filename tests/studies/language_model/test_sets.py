"""The study of sets on a tiny model and on the built circuit, and its rule on rows made up."""

import pandas as pd
import pytest
import torch

from infoflow_lens import JacobianInfluence, PositionsProbe, propagate, run_probes
from infoflow_lens.ranking import compare_rankings
from infoflow_lens.studies.language_model.sets import Sets, _cell
from infoflow_lens.studies.language_model.snapshots import load_snapshot
from infoflow_lens.studies.sweep import run_study
from tests.reference import zoo


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = zoo.save("gpt2", tmp_path_factory.mktemp("tiny"), n_head=2)
    text = tmp_path_factory.mktemp("data") / "held_out.txt"
    words = zoo.tokens(1, 600)[0].tolist()
    text.write_text(" ".join(f"w{word}" for word in words))
    return Sets([str(folder)], str(text))


@pytest.fixture(scope="module")
def result(study, tmp_path_factory):
    return run_study(study, tmp_path_factory.mktemp("out"), preset="smoke", progress=False)


def test_rows_are_those_of_the_measures_by_hand(study, result):
    (settings, _) = study.cases("smoke")
    model = load_snapshot(study.source_of(settings), "cpu")
    n = settings["n_windows"] + 4 + 8
    spread = study.sequences(model, {**settings, "n_windows": n}, 0)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    x = spread[order][: settings["n_windows"]]
    assert x.shape == (4, 16)
    places = tuple(range(1, 16, 2))
    chosen, influence = run_probes(
        model, x, [PositionsProbe(), JacobianInfluence("resid_post", positions=places)],
        progress=False,
    )  # fmt: skip
    expected = compare_rankings({"k=1": propagate(chosen.argmax)}, {}, influence).to_frame()
    rows = result.rows
    mine = rows[
        (rows["weights"] == settings["weights"])
        & (rows["influence"] == "jacobian")
        & (rows["size_of"] == "k=1")
        & (rows["method"] == "k=1")
        & (rows["part"] == "all")
    ]
    wanted = expected[expected["method"] == "k=1"]
    for column in ("auroc", "influence_inside", "n_states", "mean_size"):
        assert mine[column].tolist() == pytest.approx(wanted[column].tolist(), abs=2e-4)


def test_every_method_stands_at_every_size_for_both_influences(result):
    rows = result.rows
    rows = rows[(rows["part"] == "all") & (rows["model"] == "built circuit")]
    counts = rows.groupby(["influence", "size_of", "layer"])["method"].nunique()
    assert len(counts) == 2 * 4 * 2
    assert set(counts) == {13}
    thirds = result.rows[result.rows["part"] == "third"]
    assert set(thirds[thirds["model"] == "built circuit"]["positions"]) == {"0-9", "10-20", "21-31"}


def test_on_the_built_circuit_mechanisms_name_what_the_answer_rests_on(result):
    """Its first layer reads fixed positions, its second the largest key."""
    rows = result.rows
    rows = rows[(rows["model"] == "built circuit") & (rows["part"] == "all")]
    first = rows[(rows["layer"] == 0) & (rows["method"] == "mechanisms")]
    first = first.set_index("influence")
    assert first.loc["jacobian", "influence_inside"] > 0.999
    random = rows[(rows["layer"] == 1) & (rows["method"] == "random")]
    assert (random["lead_auroc_low"] > 0).any()


def test_it_tells_what_it_found(result):
    text = (result.out / "table.md").read_text()
    assert "### tiny" in text or "### built circuit" in text
    assert "| attention rollout |" in text
    assert (result.out / "figure.png").stat().st_size > 1000


def judged(**leads):
    """Rows of one trained model whose sets lead by these (low, high) against each method."""
    rows = []
    for method, (low, high) in leads.items():
        for influence in ("jacobian", "resample"):
            row = {
                "model": "m", "step": 1, "final": True, "weights": "w", "part": "all",
                "influence": influence, "size_of": "k=1", "layer": 1,
                "method": method.replace("_", " "),
            }  # fmt: skip
            for metric in ("auroc", "influence_inside"):
                row |= {f"lead_{metric}_low": low, f"lead_{metric}_high": high}
            rows.append(row)
    return pd.DataFrame(rows)


WIN, LEVEL, LOSS = (0.1, 0.2), (-0.1, 0.1), (-0.2, -0.1)
BASE = {
    "random": WIN, "recency": WIN, "attention_weight": WIN, "attention_rollout": LEVEL,
    "attention_flow": WIN, "contribution_routes": LEVEL, "gradient_x_input": LOSS,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "passed"),
    [
        ({}, True),
        ({"recency": LEVEL}, False),
        ({"attention_weight": LOSS}, False),
        ({"attention_rollout": LOSS}, False),
        ({"contribution_routes": WIN}, True),
    ],
)
def test_the_verdict_follows_its_rule(study, changed, passed):
    assert study.verdict(judged(**{**BASE, **changed})).passed is passed


def test_a_cell_has_half_the_width_of_the_interval_and_who_is_ahead():
    rows = judged(random=WIN).assign(auroc=0.8, auroc_low=0.7, auroc_high=0.9, influence_inside=0.5)
    assert _cell(rows) == "0.800 ± 0.100; 0.500 (behind)"
    assert _cell(rows.assign(method="measured")) == "0.800 ± 0.100; 0.500"
    assert _cell(rows.assign(auroc_low=float("nan"))) == "0.800; 0.500 (behind)"
    assert _cell(rows.assign(auroc=float("nan"))) is None
