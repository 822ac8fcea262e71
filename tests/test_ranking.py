"""Rankings against scikit-learn and against every way to break ties, counted one by one."""

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import average_precision_score, roc_auc_score

from infoflow_lens import (
    InfoFlowError,
    JacobianInfluence,
    PositionsProbe,
    compare,
    propagate,
    run_probes,
)
from infoflow_lens.hooks import AttentionRollout, AttentionWeight
from infoflow_lens.ranking import CONTROLS, METRICS, compare_rankings
from infoflow_lens.theory import InformationSets
from tests.conftest import make_token_model, some_of


def ways_to_cut(scores, size):
    """All sets of the `size` largest scores, each as likely."""
    ranked = sorted(range(len(scores)), key=lambda i: -scores[i])
    last = scores[ranked[size - 1]]
    sure = [i for i in ranked if scores[i] > last]
    tied = [i for i in ranked if scores[i] == last]
    return [{*sure, *more} for more in itertools.combinations(tied, size - len(sure))]


def one_set(chosen, influence, above, top_ways):
    labels = np.array([i in chosen for i in range(len(influence))])
    energy = influence**2
    return {
        "auroc": roc_auc_score(labels, influence),
        "average_precision": average_precision_score(labels, influence),
        "precision": np.mean([above[i] for i in chosen]),
        "precision_at_size": np.mean([len(chosen & top) / len(chosen) for top in top_ways]),
        "influence_inside": energy[labels].sum() / energy.sum(),
        "share_inside": influence[labels].sum() / influence.sum(),
    }


def by_hand(scores, influence, above, size):
    """The mean over all ways to break ties."""
    top = ways_to_cut(influence, size)
    rows = [one_set(chosen, influence, above, top) for chosen in ways_to_cut(scores, size)]
    return {metric: np.mean([row[metric] for row in rows]) for metric in rows[0]}


def integers(generator, *shape, most=3):
    return torch.randint(0, most + 1, shape, generator=generator).float()


@pytest.mark.parametrize("seed", some_of(range(2), 0))
def test_numbers_are_means_over_all_ways_to_break_ties(seed):
    """Small integers as scores and as influence, so that ties are everywhere."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, 2, 6, 6)
    influence = integers(generator, *shape)
    influence[..., 0] += 1  # every state depends on something
    scores = integers(generator, *shape)
    members = torch.rand(shape, generator=generator) < 0.4
    found = compare_rankings(
        {"ours": InformationSets(members)}, {"theirs": scores}, influence, threshold=0.6
    )
    checked = 0
    for layer, sequence, state in np.ndindex(2, 2, 6):
        others = [i for i in range(6) if i != state]
        here = (layer, sequence, state)
        chosen = members[here][others]
        size = int(chosen.sum())
        assert found.n_candidates[here] == 5
        assert found.sizes["ours"][here] == size
        if not 0 < size < 5:
            assert found.values["ours", "theirs"]["auroc"][here].isnan()
            continue
        strength = influence[here].double().numpy()
        above = (strength >= 0.6 * strength.max())[others]
        for method, ranking in (
            ("ours", chosen.double().numpy()),
            ("theirs", scores[here][others].double().numpy()),
            ("random", np.zeros(5)),
            ("recency", -np.abs(np.array(others) - state)),
            ("measured", strength[others]),
        ):
            values = found.values["ours", method]
            expected = by_hand(ranking, strength[others], above, size)
            for metric, value in expected.items():
                assert float(values[metric][here]) == pytest.approx(value), (method, metric)
            alike = np.ptp(ranking) == 0 or np.ptp(strength[others]) == 0
            rank = 0.0 if alike else stats.spearmanr(ranking, strength[others]).statistic
            assert float(values["spearman"][here]) == pytest.approx(rank)
            if 0 < above.sum() < 5:
                assert float(values["auroc_measured"][here]) == pytest.approx(
                    roc_auc_score(above, ranking)
                )
            else:
                assert values["auroc_measured"][here].isnan()
        checked += 1
    assert checked > 10


def test_a_random_order_is_known_without_drawing_one():
    generator = torch.Generator().manual_seed(0)
    influence = torch.rand(1, 3, 8, 8, generator=generator) + 0.1
    sets = InformationSets(torch.rand(1, 3, 8, 8, generator=generator) < 0.5)
    found = compare_rankings({"ours": sets}, {}, influence)
    size, n = found.sizes["ours"], found.n_candidates
    values = found.values["ours", "random"]
    taking_part = (size > 0) & (size < n)
    size = size.where(taking_part, 0)
    assert (values["auroc"][taking_part] - 0.5).abs().max() < 1e-12
    assert values["influence_inside"].nan_to_num().allclose((size / n).nan_to_num())
    assert values["precision_at_size"].nan_to_num().allclose((size / n).nan_to_num())


@pytest.fixture(scope="module")
def measured():
    model = make_token_model(n_heads=1)
    x = torch.randint(17, (6, 9), generator=torch.Generator().manual_seed(4))
    positions, weights, rollout, influence = run_probes(
        model,
        x,
        [
            PositionsProbe((1, 2)),
            AttentionWeight(),
            AttentionRollout(),
            JacobianInfluence("resid_post"),
        ],
        progress=False,
    )
    sets = {"k=1": propagate(positions.argmax), "k=2": propagate(positions.positions)}
    return sets, {"weights": weights, "rollout": rollout}, influence


def test_the_row_of_a_set_agrees_with_compare_where_all_states_take_part(measured):
    """compare counts every state alike, and those without choice too; here means are by state."""
    sets, scores, influence = measured
    found = compare_rankings(sets, scores, influence)
    plain = compare(sets["k=1"], influence)
    for layer in range(2):
        ours = found.values["k=1", "k=1"]["auroc"][layer]
        assert float(ours.nanmean()) == pytest.approx(plain.layers[layer].auroc)


def test_tables_have_means_over_sequences_and_intervals(measured):
    found = compare_rankings(*measured)
    frame = found.to_frame()
    assert len(frame) == 2 * 2 * (1 + 2 + len(CONTROLS))  # sets, layers, methods
    row = frame.query("size_of == 'k=2' and method == 'rollout' and layer == 1").iloc[0]
    by_sequence = found.values["k=2", "rollout"]["auroc"][1].nanmean(dim=1).numpy()
    assert row["auroc"] == pytest.approx(by_sequence.mean())
    low, high = stats.t.interval(0.95, 5, by_sequence.mean(), stats.sem(by_sequence))
    assert (row["auroc_low"], row["auroc_high"]) == pytest.approx((low, high))
    assert row["kind"] == "score"
    assert row["n_sequences"] == 6
    best = frame[frame["method"] == "measured"]
    assert (best["precision_at_size"] == 1).all()
    for metric in ("auroc", "influence_inside"):
        highest = frame.groupby(["size_of", "layer"])[metric].transform("max")
        assert (best[metric] >= highest[best.index] - 1e-12).all()
    assert frame["auroc"].notna().all()


def test_a_set_is_ahead_by_the_paired_difference(measured):
    found = compare_rankings(*measured)
    ahead = found.ahead()
    assert set(ahead["method"]) == {"weights", "rollout", *CONTROLS}
    row = ahead.query("size_of == 'k=1' and method == 'weights' and layer == 1").iloc[0]
    gap = found.values["k=1", "k=1"]["auroc"] - found.values["k=1", "weights"]["auroc"]
    gap = gap[1].nanmean(dim=1).numpy()
    assert row["auroc"] == pytest.approx(gap.mean())
    low, high = stats.t.interval(0.95, 5, gap.mean(), stats.sem(gap))
    assert (row["auroc_low"], row["auroc_high"]) == pytest.approx((low, high))


def test_ranges_of_positions_have_their_own_rows(measured):
    found = compare_rankings(*measured)
    frame = found.to_frame(starts=(0, 4))
    assert set(frame["positions"]) == {"0-3", "4-8"}
    row = frame.query(
        "size_of == 'k=1' and method == 'weights' and layer == 0 and positions == '4-8'"
    ).iloc[0]
    values = found.values["k=1", "weights"]["auroc"][0, :, 4:].nanmean(dim=1)
    assert row["auroc"] == pytest.approx(float(values.mean()))
    for starts in ((3, 1), (-1,), (), (0, 9)):
        with pytest.raises(InfoFlowError, match="starts are"):
            found.to_frame(starts=starts)


def test_states_without_a_choice_are_counted(measured):
    _, scores, influence = measured
    shape = influence.influence.shape
    everything = InformationSets(torch.ones(shape, dtype=torch.bool))
    nothing = InformationSets(torch.zeros(shape, dtype=torch.bool))
    some = InformationSets(torch.zeros(shape, dtype=torch.bool))
    some.members[:, :, 5, 0] = True
    found = compare_rankings({"all": everything, "none": nothing, "some": some}, scores, influence)
    frame = found.to_frame().query("method == 'random' and layer == 0").set_index("size_of")
    counts = frame[["n_states", "n_empty", "n_whole", "n_sequences"]]
    assert counts.loc["all"].tolist() == [0, 0, 6 * 9, 0]
    assert counts.loc["none"].tolist() == [0, 6 * 9, 0, 0]
    assert counts.loc["some"].tolist() == [6, 6 * 8, 0, 6]
    assert frame["auroc"].isna().tolist() == [True, True, False]


def test_only_states_that_all_hold_take_part(measured, token_model, token_inputs):
    sets, _, influence = measured
    few = AttentionRollout(positions=(-1,))
    (last,) = run_probes(token_model, token_inputs[:6], [few], progress=False)
    found = compare_rankings(sets, {"last": last}, influence)
    measured_there = ~found.sizes["k=1"].isnan()
    assert not measured_there[:, :, :8].any()
    assert measured_there[:, :, 8].all()
    assert found.values["k=1", "last"]["auroc"][:, :, :8].isnan().all()


def test_shorter_sequences_choose_among_their_own_sources(token_model, token_inputs):
    rows = [row[:n] for row, n in zip(token_inputs[:3], (9, 5, 7), strict=True)]
    probes = [PositionsProbe(), AttentionRollout(), JacobianInfluence("resid_post")]
    positions, rollout, influence = run_probes(token_model, rows, probes, progress=False)
    found = compare_rankings({"k=1": propagate(positions.argmax)}, {"rollout": rollout}, influence)
    (alone,) = (
        run_probes(token_model, rows[1][None], [probe()], progress=False)[0]
        for probe in (AttentionRollout,)
    )
    others = replace(rollout, lengths=rollout.lengths.flip(0))
    with pytest.raises(InfoFlowError, match=r"'rollout' has sequences of lengths \[7, 5, 9\]"):
        compare_rankings({"k=1": propagate(positions.argmax)}, {"rollout": others}, influence)
    assert found.n_candidates[0, 1, :5].tolist() == [0, 1, 2, 3, 4]
    assert found.n_candidates[0, 1, 5:].isnan().all()
    assert found.sizes["k=1"][:, 1, 5:].isnan().all()
    torch.testing.assert_close(alone.scores[:, 0], rollout.scores[:, 1, :5, :5])


def test_it_takes_what_compare_takes(measured):
    sets, scores, influence = measured
    model = make_token_model(n_heads=1)
    x = torch.randint(17, (6, 9), generator=torch.Generator().manual_seed(4))
    (chosen,) = run_probes(model, x, [PositionsProbe((1,))], progress=False)
    plain = compare_rankings({"k=1": sets["k=1"]}, scores, influence).to_frame()
    for given in (chosen, sets["k=1"].members):
        assert compare_rankings({"k=1": given}, scores, influence).to_frame().equals(plain)
    as_sets = compare_rankings(sets, scores, influence.sets()).to_frame()
    as_numbers = compare_rankings(sets, scores, influence.sets().members.float()).to_frame()
    assert as_sets["auroc"].equals(as_numbers["auroc"])
    lengths = [9] * 6
    ranked = {name: score.full() for name, score in scores.items()}
    as_list = compare_rankings(sets, ranked, influence.full(), lengths=lengths).to_frame()
    assert as_list.equals(compare_rankings(sets, ranked, influence.full()).to_frame())


def test_scores_of_other_layers_than_were_measured_are_refused(measured):
    """Scores of a layer have the shape of another one's, which they are not about."""
    sets, scores, influence = measured
    first, second = (
        replace(influence, layers=(layer,), influence=influence.influence[[layer]])
        for layer in (0, 1)
    )
    found = compare_rankings(sets, {"all": scores["weights"]}, second)
    whole = compare_rankings(sets, {"all": scores["weights"]}, influence)
    for metric, values in found.values["k=1", "all"].items():
        torch.testing.assert_close(
            values, whole.values["k=1", "all"][metric][1:], equal_nan=True, msg=metric
        )
    with pytest.raises(InfoFlowError, match=r"has scores of layers \(0,\), and layers \(1,\) were"):
        compare_rankings(sets, {"first": first}, second)


def test_it_is_drawn_and_shown(measured):
    found = compare_rankings(*measured)
    assert "rollout" in found._repr_html_()
    assert len(repr(found)) < 500
    panels = found.plot(metric="influence_inside").axes
    assert [axes.get_title() for axes in panels] == ["layer 0", "layer 1"]
    with pytest.raises(InfoFlowError, match="metric 'f1'"):
        found.plot(metric="f1")
    # of layers that are not all, the last is shown, too
    some = replace(found, numbers=(3, 7))
    for name in (*found.sets, *found.scores):
        assert name in some._repr_html_()
    assert "layer 7" in " ".join(re.sub(r"<[^>]*>", " ", some._repr_html_()).split())


def test_bad_input_is_named(measured):
    sets, scores, influence = measured
    with pytest.raises(InfoFlowError, match="at least one set"):
        compare_rankings({}, scores, influence)
    with pytest.raises(InfoFlowError, match="names of their own"):
        compare_rankings({"random": sets["k=1"]}, scores, influence)
    with pytest.raises(InfoFlowError, match=r"scores 'weights' have shape \(2, 6, 9, 8\)"):
        compare_rankings(sets, {"weights": torch.ones(2, 6, 9, 8)}, influence)
    with pytest.raises(InfoFlowError, match="scores of 'weights' are negative"):
        compare_rankings(sets, {"weights": -torch.ones(2, 6, 9, 9)}, influence)
    with pytest.raises(InfoFlowError, match="threshold is 0"):
        compare_rankings(sets, scores, influence, threshold=0)
    with pytest.raises(InfoFlowError, match="sets is a list: expected a mapping from names"):
        compare_rankings([sets["k=1"]], scores, influence)
    with pytest.raises(InfoFlowError, match="'weights' is list: expected what a probe"):
        compare_rankings(sets, {"weights": [1, 2]}, influence)
    with pytest.raises(InfoFlowError, match=r"the measured influence \(6, 9, 9\): expected"):
        compare_rankings(sets, scores, torch.ones(6, 9, 9))
    with pytest.raises(InfoFlowError, match="what was measured is a list: expected"):
        compare_rankings(sets, scores, [1.0])
    shorter = replace(sets["k=1"], lengths=torch.full((6,), 8))
    with pytest.raises(InfoFlowError, match="sequences have lengths"):
        compare_rankings({"mine": shorter}, scores, influence)
    with pytest.raises(InfoFlowError, match="predicted is a int"):
        compare_rankings({"mine": 3}, scores, influence)
    found = compare_rankings(sets, scores, influence)
    for confidence in (1, "most"):
        with pytest.raises(InfoFlowError, match=f"confidence is {confidence!r}"):
            found.to_frame(confidence=confidence)
    for starts in (3, "0", (1.5,), (True,)):
        with pytest.raises(InfoFlowError, match=r"starts (is|are) .* expected"):
            found.to_frame(starts=starts)
    assert found.to_frame(starts=np.array([0, 4])).equals(found.to_frame(starts=(0, 4)))
    assert set(METRICS) <= set(compare_rankings(*measured).to_frame())
    assert not math.isnan(compare_rankings(*measured).to_frame()["auroc"].iloc[0])


def test_rankings_are_given_where_sets_exclude_nothing():
    """Spearman and the AUROC of what was measured need no set, and are as with one that chooses."""
    generator = torch.Generator().manual_seed(0)
    influence, score = torch.rand(2, 2, 3, 6, 6, generator=generator).tril()
    whole = torch.ones(2, 3, 6, 6, dtype=torch.bool).tril()
    some = whole & (torch.rand(whole.shape, generator=generator) < 0.5)
    found = compare_rankings({"whole": whole, "some": some}, {"score": score}, influence)
    frame = found.to_frame().set_index(["size_of", "method", "layer"])
    row = frame.loc["whole", "score", 0]
    assert (row["n_states"], row["n_whole"], row["n_ranked"]) == (0, 15, 12)
    assert math.isnan(row["auroc"])
    expected = []
    for sequence in range(3):
        each = [
            stats.spearmanr(score[0, sequence, t, :t], influence[0, sequence, t, :t]).statistic
            for t in range(2, 6)
        ]
        expected.append(sum(each) / len(each))
    assert row["spearman"] == pytest.approx(sum(expected) / 3)
    assert row["spearman"] == pytest.approx(frame.loc["some", "score", 0]["spearman"])
    assert frame.loc["whole", "measured", 1]["spearman"] == pytest.approx(1)


def test_what_is_left_out_leaves_everything():
    """Sets, scores, influence, candidates and chance are those of inputs without the position."""
    generator = torch.Generator().manual_seed(1)
    influence, score = torch.rand(2, 2, 3, 6, 6, generator=generator).tril() + 0.01
    sets = torch.rand(2, 3, 6, 6, generator=generator) < 0.5
    influence[..., 0] = 1e3  # what attention rests on
    found = compare_rankings({"s": sets}, {"score": score}, influence, without=(0,))
    inside = [part[..., 1:] for part in (sets, score, influence)]
    for at, part in enumerate(inside):
        inside[at] = part[:, :, 1:]
    others = compare_rankings({"s": inside[0]}, {"score": inside[1]}, inside[2])
    assert found.n_candidates[:, :, 1:].equal(others.n_candidates)
    for method in ("s", "score", "random", "recency", "measured"):
        for metric in METRICS:
            one, other = (r.values["s", method][metric] for r in (found, others))
            torch.testing.assert_close(one[:, :, 1:], other, equal_nan=True)
