"""Baselines in a probe run: the same numbers as by hand, also after a stop."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from infoflow_lens import (
    JacobianInfluence,
    PositionsProbe,
    baselines,
    compare,
    load_any,
    run_probes,
)
from infoflow_lens.agreement import explained
from infoflow_lens.hooks import AttentionRollout
from infoflow_lens.probing import shard
from infoflow_lens.probing.config import ProbingConfig
from infoflow_lens.probing.findings import predict_by_top_k
from infoflow_lens.probing.page import build_report
from infoflow_lens.probing.run import run_probing
from infoflow_lens.ranking import compare_rankings
from tests.reference import zoo

TEXTS = [" ".join(f"w{(7 * i + j * j) % 30 + 4}" for j in range(9 + i % 2)) for i in range(6)]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = zoo.save("gpt2", tmp_path_factory.mktemp("gpt2"), n_head=1)
    data = tmp_path_factory.mktemp("data") / "texts.txt"
    data.write_text("\n\n".join(TEXTS))
    return ProbingConfig(
        str(folder), str(data), probes=("influence", "routes"), ranks=(1, 2), batch_size=2
    )


def test_its_table_is_that_of_the_measures_by_hand(tmp_path, config, monkeypatch):
    run, skipped = shard.run_shard, []

    def watched(stops):
        def run_watched(model, inputs, probes, *, skip, after_batch, **settings):
            if any(isinstance(probe, AttentionRollout) for probe in probes):
                skipped.append(skip)

                def after(n):
                    after_batch(n)
                    if stops:
                        raise KeyboardInterrupt

            else:
                after = after_batch
            return run(model, inputs, probes, skip=skip, after_batch=after, **settings)

        return run_watched

    with monkeypatch.context() as patch:
        patch.setattr(shard, "run_shard", watched(stops=True))
        with pytest.raises(KeyboardInterrupt):
            run_probing(tmp_path, config, progress=False)
    skipped.clear()
    monkeypatch.setattr(shard, "run_shard", watched(stops=False))
    found = run_probing(tmp_path, config, progress=False)
    table = pd.read_csv(tmp_path / "routes.csv")
    assert skipped == [2]
    model = load_any(config.model).model
    ids = [model.to_tokens(text)[0] for text in TEXTS]
    probes = baselines(model)
    assert set(table["method"]) == {
        "k=1", "k=2", *probes, "random", "recency", "measured",
    }  # fmt: skip
    chosen, influence, *scores = run_probes(
        model,
        ids,
        [PositionsProbe((1, 2)), JacobianInfluence("resid_post"), *probes.values()],
        progress=False,
    )
    expected = compare_rankings(
        predict_by_top_k(chosen, influence.influence.shape[-1]),
        dict(zip(probes, scores, strict=True)),
        influence,
    ).to_frame()
    expected["positions"] = "all positions"  # in words, as they were measured
    pd.testing.assert_frame_equal(table, expected, rtol=1e-3, atol=1e-3, check_dtype=False)
    lines = found.found["routes"].sentences()
    assert "layer 1: sets k=1 have AUROC" in lines[0]
    own = expected[expected["layer"] == expected["layer"].max()].query("size_of == 'k=1'")
    shown = found.parts["routes"].figures(found.found["routes"])[0]
    assert [row[0] for row in shown.rows] == list(own.sort_values("auroc")["method"])[::-1]
    own = own[own["kind"] != "control"].set_index("method")["auroc"]
    headline = build_report(found).headline
    if own.idxmax() == "k=1":
        assert "No baseline of the same size is nearer" in headline
    else:
        assert f"{own.idxmax()} is nearest to influence (AUROC {own.max():.3f};" in headline


def test_what_is_left_out_leaves_prediction_and_measurement_together(tmp_path, config):
    found = run_probing(tmp_path, replace(config, without=(0,)), progress=False)
    influence = found.influence
    model = load_any(config.model).model
    ids = [model.to_tokens(text)[0] for text in TEXTS]
    (chosen,) = run_probes(model, ids, [PositionsProbe((1, 2), without=(0,))], progress=False)
    n_source = influence.influence.shape[-1]
    sets = predict_by_top_k(chosen, n_source)
    by_hand = compare_rankings(sets, {}, influence, without=(0,)).to_frame()
    table = pd.read_csv(tmp_path / "routes.csv")
    columns = ["auroc", "n_states", "mean_candidates"]
    for name in sets:
        own = f"method == {name!r} and size_of == {name!r}"
        one, other = (rows.query(own)[columns].to_numpy() for rows in (table, by_hand))
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)
    plain = compare(sets["k=1"], influence, without=(0,))
    assert found.agreement["max_position"] == plain
    last = explained(sets["k=1"], influence, last=True, without=(0,))
    assert found.last["max_position"] == last
    # of n tokens the last state may hold n - 2: neither its own nor the first
    assert last.others == pytest.approx(np.mean([len(row) - 2 for row in ids]))
    assert not found.predicted["max_position"].members[:, :, 1:, 0].any()


def test_where_no_probes_are_named_the_slow_ones_are_left_out(tmp_path, config):
    found = run_probing(
        tmp_path, replace(config, probes=None, ranks=(1,), n_detail=2), progress=False
    )
    methods = set(found.found["routes"].to_frame()["method"])
    assert "attention rollout" in methods
    assert "gradient x input" not in methods
    (section,) = (each for each in build_report(found).sections if "other measures" in each.title)
    assert "are left out: they take long" in section.text
