"""Agreement metrics are scikit-learn's, state by state."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import (
    average_precision_score,
    jaccard_score,
    precision_score,
    recall_score,
    roc_auc_score,
)

from infoflow_lens import (
    InfoFlowError,
    JacobianInfluence,
    PositionsProbe,
    compare,
    load_any,
    propagate,
    run_probes,
)
from infoflow_lens.agreement import compare_by_position, coverage, coverage_curve, explained
from infoflow_lens.probing.page import _headline
from infoflow_lens.ranking import compare_rankings
from infoflow_lens.studies.constructions import build_construction
from infoflow_lens.theory import InformationSets
from tests.conftest import N_TOKENS
from tests.reference import sets as reference_sets
from tests.reference import zoo


def case(seed, n_layers=2, batch=4, n_source=6, extra=1, levels=4):
    """Random sets, and scores of few levels so that ties are common."""
    generator = torch.Generator().manual_seed(seed)
    shape = (n_layers, batch, n_source + extra, n_source)
    members = torch.rand(shape, generator=generator) < 0.4
    scores = torch.randint(levels, shape, generator=generator) / levels
    return InformationSets(members), scores


def mean_over_states(metric, members, scores, layer, positions, with_self):
    values = []
    for sequence in range(members.shape[1]):
        for t in positions:
            keep = [s for s in range(members.shape[3]) if with_self or s != t]
            value = metric(
                members[layer, sequence, t, keep].numpy(), scores[layer, sequence, t, keep].numpy()
            )
            if not math.isnan(value):
                values.append(value)
    return np.mean(values)


@settings(max_examples=4)
@given(st.integers(0, 10**6))
def test_threshold_free_metrics_equal_scikit_learn(seed):
    predicted, scores = case(seed)
    agreement = compare(predicted, scores)

    def auroc(truth, s):
        return roc_auc_score(truth, s) if 0 < truth.sum() < len(truth) else math.nan

    def average_precision(truth, s):
        return average_precision_score(truth, s) if truth.any() else math.nan

    for layer in (0, 1):
        for with_self, found in (
            (False, agreement.layers[layer]),
            (True, agreement.layers_with_self[layer]),
        ):
            arguments = (predicted.members, scores, layer, range(6), with_self)
            assert found.auroc == pytest.approx(mean_over_states(auroc, *arguments))
            assert found.average_precision == pytest.approx(
                mean_over_states(average_precision, *arguments)
            )
            assert found.n_states == 24
    cls = mean_over_states(auroc, predicted.members, scores, 1, [6], False)
    assert agreement.cls.auroc == pytest.approx(cls)
    assert agreement.cls.n_states == 4


@settings(max_examples=4)
@given(st.integers(0, 10**6))
def test_set_metrics_equal_scikit_learn(seed):
    predicted, scores = case(seed)
    agreement = compare(predicted, scores, threshold=0.5)
    measured = (scores >= 0.5 * scores.amax(-1, keepdim=True)) & (scores > 0)

    def jaccard(truth, found):
        return jaccard_score(truth, found) if (truth | found).any() else 1.0

    for name, metric in (
        # the predicted set is the prediction, the measured one the truth
        ("precision", lambda p, m: precision_score(m, p, zero_division=math.nan)),
        ("recall", lambda p, m: recall_score(m, p, zero_division=math.nan)),
        ("jaccard", jaccard),
        ("exact_match", lambda p, m: float((p == m).all())),
    ):
        expected = mean_over_states(metric, predicted.members, measured, 1, range(6), False)
        assert getattr(agreement.layers[1], name) == pytest.approx(expected), name


def test_influence_inside_is_a_share_of_squares():
    members = torch.zeros(1, 1, 3, 2, dtype=torch.bool)
    members[0, 0, 2, 0] = True
    scores = torch.ones(1, 1, 3, 2)
    scores[0, 0, 2] = torch.tensor([3.0, 4.0])
    agreement = compare(InformationSets(members), scores)
    assert agreement.cls.influence_inside == pytest.approx(9 / 25)


def test_perfect_agreement():
    predicted, _ = case(0)
    agreement = compare(predicted, predicted)
    for values in (*agreement.layers, *agreement.layers_with_self, agreement.cls):
        assert values.auroc == values.average_precision == values.precision == 1
        assert values.recall == values.jaccard == values.exact_match == values.influence_inside == 1
        assert values.predicted_size == values.measured_size


def test_a_causal_model_is_not_praised_for_the_future():
    """Random predictions of the past score a half, though the future never has influence."""
    generator = torch.Generator().manual_seed(0)
    past = torch.ones(12, 12, dtype=torch.bool).tril()
    scores = torch.rand(1, 400, 12, 12, generator=generator) * past
    members = (torch.rand(1, 400, 12, 12, generator=generator) < 0.3) & past
    agreement = compare(InformationSets(members), scores)
    assert agreement.layers[0].auroc == pytest.approx(0.5, abs=0.02)
    assert agreement.cls.auroc == pytest.approx(0.5, abs=0.05)


def test_where_every_position_is_a_source_the_last_is_the_read_out():
    predicted, scores = case(1, extra=0)
    agreement = compare(predicted, scores)
    assert agreement.cls.n_states == 4
    # the read-out position itself does not count
    changed = scores.clone()
    changed[1, :, 5, 5] = 1000.0
    inside = compare(predicted, changed, threshold=1e-9).cls
    assert inside.influence_inside == pytest.approx(agreement.cls.influence_inside)


def test_coverage_is_the_share_of_active_tokens_inside():
    predicted = torch.tensor([[True, True, False], [False, False, True]])
    active = torch.tensor([[True, False, True], [False, False, True]])
    assert coverage(predicted, active) == pytest.approx((1 / 2 + 1) / 2)
    members = torch.zeros(2, 2, 4, 3, dtype=torch.bool)
    members[1, :, 3] = predicted  # the first layer's sets do not count
    agreement = compare(InformationSets(members), torch.ones(2, 2, 4, 3), active=active)
    assert agreement.coverage == pytest.approx(0.75)


def test_nothing_to_average_is_nan_not_zero():
    members = torch.zeros(1, 2, 3, 3, dtype=torch.bool)
    agreement = compare(InformationSets(members), torch.ones(1, 2, 3, 3))
    assert math.isnan(agreement.cls.auroc)
    assert math.isnan(agreement.cls.precision)
    assert agreement.cls.recall == 0


def test_the_frame_names_states():
    predicted, scores = case(2)
    frame = compare(predicted, scores).to_frame()
    assert frame[["layer", "states", "with_self"]].values.tolist() == [
        [0, "tokens", False], [1, "tokens", False],
        [0, "tokens", True], [1, "tokens", True],
        [1, "cls", False],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (lambda s: s[:1], {}, "predict the same inputs"),
        (lambda s: -s - 1, {}, "is negative"),
        (lambda s: s * math.nan, {}, "infinite or NaN"),
        (lambda s: s + math.inf, {}, "infinite or NaN"),
        (lambda s: s, {"threshold": 0.0}, "threshold is 0.0"),
        (lambda s: s, {"active": torch.ones(3, 6, dtype=torch.bool)}, "active index sets"),
        (lambda s: s, {"active": torch.ones(4, 6)}, "active index sets"),
    ],
)
def test_bad_input_is_named(change, arguments, message):
    predicted, scores = case(3)
    with pytest.raises(InfoFlowError, match=message):
        compare(predicted, change(scores), **arguments)


def test_the_coverage_curve_is_the_share_inside_the_sets_of_k_positions(model, inputs):
    positions, influence = run_probes(
        model, inputs, [PositionsProbe((1, 2, 3)), JacobianInfluence()], progress=False
    )
    curve = coverage_curve(positions.positions, influence.influence)
    for k in (1, 2, 3):
        sets = reference_sets.propagate(
            [layer[0, :, :, :k].tolist() for layer in positions.positions], 7
        )
        inside = sorted(sets[1][-1])  # CLS is no source
        amount = influence.influence[1, 0, -1].double()
        one = coverage_curve([p[:1] for p in positions.positions], influence.influence[:, :1])
        if len(inside) == 7:  # nothing could be wrong
            assert math.isnan(one.last[k - 1])
        else:
            assert one.last[k - 1] == pytest.approx(float(amount[inside].sum() / amount.sum()))
            assert one.chance[k - 1] == pytest.approx(len(inside) / 7)
        assert one.size[k - 1] == len(inside)
    frame = curve.to_frame()
    assert list(frame["k"]) == [1, 2, 3]
    assert frame.equals(coverage_curve(positions, influence).to_frame())  # CLS is counted
    assert frame["size"].is_monotonic_increasing


def test_the_coverage_curve_of_hard_retrieval_is_complete_at_one():
    model, task = build_construction("intrinsic_dimension", attention="hardmax", n_tokens=9)
    x, _ = task.sample(20, seed=0)
    positions, influence = run_probes(
        model, x, [PositionsProbe((1, 2)), JacobianInfluence("resid_post")], progress=False
    )
    curve = coverage_curve(positions.positions, influence.influence)
    assert curve.last[0] == pytest.approx(1)
    assert curve.size[1] > curve.size[0]


def test_coverage_needs_positions_of_the_same_states(model, inputs):
    positions, influence = run_probes(
        model, inputs, [PositionsProbe((1, 2)), JacobianInfluence()], progress=False
    )
    with pytest.raises(InfoFlowError, match="expected \\[batch, head, pos, rank\\]"):
        coverage_curve(positions.positions[:1], influence.influence)
    with pytest.raises(InfoFlowError, match="negative, infinite or NaN"):
        coverage_curve(positions.positions, -influence.influence)


def test_states_behind_an_end_are_refused_by_their_place():
    predicted, scores = case(3)
    scores[:, 1, 4] = 0
    with pytest.raises(InfoFlowError, match="position 4 of sequence 1 has no influence from any"):
        compare(predicted, scores)


@settings(max_examples=8)
@given(st.integers(0, 10**6), st.integers(0, 1))
def test_padding_takes_no_part(seed, extra):
    """States and sources beyond a sequence's tokens; its last state is its own."""
    predicted, scores = case(seed, extra=extra)
    lengths = torch.randint(2, 7, (4,), generator=torch.Generator().manual_seed(seed))
    found = compare(predicted, scores, lengths=lengths)
    for layer in range(2):
        shares, last = [], []
        for sequence, n in enumerate(lengths.tolist()):
            for t in range(n + extra):
                keep = [s for s in range(n) if s != t]
                energy = scores[layer, sequence, t, keep].double() ** 2
                inside = energy[predicted.members[layer, sequence, t, keep]].sum()
                if energy.sum() > 0:
                    if t < n:
                        shares.append(float(inside / energy.sum()))
                    if t == n + extra - 1:
                        last.append(float(inside / energy.sum()))
        assert found.layers[layer].influence_inside == pytest.approx(np.mean(shares))
        if layer == 1:
            assert found.cls.influence_inside == pytest.approx(np.mean(last))
    assert found.cls.n_states == 4


def test_a_padded_coverage_curve_is_that_of_its_states():
    """Two sequences of one length and one shorter: the mean over states that could be wrong."""
    generator = torch.Generator().manual_seed(3)
    positions = [torch.randint(-1, 5, (3, 2, 5, 2), generator=generator) for _ in range(2)]
    influence = torch.rand(2, 3, 5, 5, generator=generator)
    lengths = torch.tensor([5, 5, 3])
    for layer in positions:
        layer[2] = layer[2].clamp(max=2)
    curve = coverage_curve(positions, influence, lengths)
    for k in range(2):
        sets = propagate([layer[..., : k + 1] for layer in positions], 5).members
        for layer in range(2):
            shares, last = [], []
            for sequence, n in enumerate(lengths.tolist()):
                for t in range(n):
                    others = [s for s in range(n) if s != t]
                    held = [s for s in others if sets[layer, sequence, t, s]]
                    if 0 < len(held) < len(others):
                        amount = influence[layer, sequence, t].double()
                        shares.append(float(amount[held].sum() / amount[others].sum()))
                        last += shares[-1:] if t == n - 1 else []
            expected = np.mean(shares) if shares else math.nan
            assert curve.layers[k][layer] == pytest.approx(expected, nan_ok=True)
        expected = np.mean(last) if last else math.nan
        assert curve.last[k] == pytest.approx(expected, nan_ok=True)


@settings(max_examples=8)
@given(st.integers(0, 10**6), st.booleans(), st.booleans())
def test_what_is_explained_is_the_mean_over_states_that_could_be_wrong(seed, with_self, squared):
    predicted, scores = case(seed)
    found = explained(predicted, scores, 1, with_self=with_self, squared=squared)
    shares, chances, kinds = [], [], []
    for sequence in range(4):
        for t in range(7):
            keep = [s for s in range(6) if with_self or s != t]
            amount = scores[1, sequence, t, keep].double() ** (1 + squared)
            held = predicted.members[1, sequence, t, keep]
            kind = (
                "silent" if amount.sum() == 0 else
                "empty" if not held.any() else "everything" if held.all() else ""
            )  # fmt: skip
            kinds.append(kind)
            if not kind:
                shares.append(float(amount[held].sum() / amount.sum()))
                chances.append(float(held.double().mean()))
    counts = [kinds.count(kind) for kind in ("silent", "empty", "everything")]
    assert [found.no_other, found.empty, found.everything] == counts
    assert found.inside == pytest.approx(np.mean(shares))
    assert found.chance == pytest.approx(np.mean(chances))
    assert (found.n_states, found.n_informative) == (28, len(shares))


def test_sentences_put_chance_beside_sizes_of_the_same_states():
    """Sets that hold all or nothing count in the mean size, and not in what is said beside it."""
    members = torch.zeros(1, 4, 6, 6, dtype=torch.bool)
    members[0, :2, 5, 2] = True  # one of five others
    everything = members.clone()
    everything[0, 2:, 5] = True
    scores = torch.ones(1, 4, 6, 6)
    scores[..., 2] = 4.0
    alone = str(explained(members[:, :2], scores[:, :2], last=True))
    assert alone == (
        "last position, layer 0: 50% of the influence of other tokens lies inside the predicted "
        "sets, which hold 1 of 5 other tokens; random sets of that size would hold 20%"
    )
    mixed = explained(everything, scores, last=True)
    assert str(mixed) == (
        "last position, layer 0: 50% of the influence of other tokens lies inside the predicted "
        "sets of the 2 of 4 states where these could be wrong; random sets of their sizes would "
        "hold 20%, and all sets hold 3 of 5 other tokens on average"
    )
    assert _headline(mixed) == (
        "If each head passes on the token of its largest score, the last state can hold 3.0 of "
        "5.0 other tokens on average. At the 2 of 4 sequences where the set could be wrong, being "
        "neither empty nor full, 50% of their measured influence lies inside, where random sets of "
        "their sizes would hold 20%."
    )


def test_places_that_are_left_out_are_those_that_heads_leave_out(model, inputs):
    """Counted from the end, CLS is the last place, and the last token the one before."""
    influence, made = run_probes(model, inputs, [JacobianInfluence()], progress=False)[0], {}
    for place in (-1, -2, N_TOKENS - 1):
        probe = PositionsProbe(without=(place,))
        (chosen,) = run_probes(model, inputs, [probe], progress=False)
        last = any((layer == N_TOKENS - 1).any() for layer in chosen.argmax)
        assert last == (place == -1)
        made[place] = explained(chosen, influence, last=True, without=(place,))
        assert made[place].others == N_TOKENS - (place != -1)
    assert made[-2] == made[N_TOKENS - 1]
    (chosen,) = run_probes(model, inputs, [PositionsProbe()], progress=False)
    assert made[-1] == explained(chosen, influence, last=True)


def test_lengths_that_do_not_fit_are_named():
    predicted, scores = case(0)
    for wrong in (torch.tensor([7, 1, 1, 1]), torch.tensor([1, 1, 1]), torch.tensor([0, 1, 1, 1])):
        with pytest.raises(InfoFlowError, match="4 numbers of tokens from 1 to 6"):
            compare(predicted, scores, lengths=wrong)


def test_positions_together_give_the_layers():
    """Means over the states of each position, weighed by their number."""
    predicted, scores = case(5)
    lengths = torch.tensor([6, 4, 2, 5])
    table = compare_by_position(predicted, scores, lengths=lengths)
    whole = compare(predicted, scores, lengths=lengths)
    for layer in range(2):
        rows = table[(table["layer"] == layer) & (table["position"] < 6)]
        expected = {t: int((lengths + 1 > t).sum()) for t in range(6)}  # CLS behind the tokens
        assert dict(zip(rows["position"], rows["n_states"], strict=True)) == expected
    # of full sequences, token states are all but the last position
    table, whole = compare_by_position(predicted, scores), compare(predicted, scores)
    for layer in range(2):
        rows = table[(table["layer"] == layer) & (table["position"] < 6)]
        assert rows["predicted_size"].mean() == pytest.approx(whole.layers[layer].predicted_size)
    last = table[(table["layer"] == 1) & (table["position"] == 6)]
    assert float(last["auroc"].iloc[0]) == pytest.approx(whole.cls.auroc)


def test_states_that_were_not_measured_take_no_part(token_model, token_inputs):
    probes = [PositionsProbe(), JacobianInfluence(), JacobianInfluence(positions=(-1, 2))]
    positions, all_states, some = run_probes(token_model, token_inputs, probes, progress=False)
    predicted = propagate(positions.argmax)
    by_position = compare_by_position(predicted, all_states)
    rows = compare_by_position(predicted, some)
    assert set(rows["position"]) == {2, 8}
    expected = by_position[by_position["position"].isin([2, 8])].reset_index(drop=True)
    np.testing.assert_allclose(rows["influence_inside"], expected["influence_inside"], rtol=1e-4)
    assert compare(predicted, some).layers[0].n_states == 2 * 19
    whole, part = compare(predicted, all_states), compare(predicted, some)
    assert part.cls.auroc == pytest.approx(whole.cls.auroc)


# Sequences of different lengths


@pytest.fixture(scope="module")
def of_lengths(tmp_path_factory):
    """Positions and influence of sequences of 4, 9, 6 and 3 tokens, together and one by one."""
    model = load_any(zoo.save("llama", tmp_path_factory.mktemp("llama"))).model
    rows = [row[:n] for row, n in zip(zoo.tokens(4, 9), (4, 9, 6, 3), strict=True)]

    def measured(inputs):
        probes = [PositionsProbe(), JacobianInfluence()]
        return run_probes(model, inputs, probes, progress=False)

    return measured(rows), [measured([row]) for row in rows]


def test_states_that_are_not_real_enter_no_mean_whatever_is_given(of_lengths):
    """Sets know the lengths, so a tensor in the place of the result changes nothing."""
    (positions, influence), alone = of_lengths
    expected = compare(positions, influence)
    predicted = propagate(positions)
    for one, other in (
        (predicted, influence),
        (predicted, influence.influence),
        (predicted.members, influence),
        (positions, influence.influence),
    ):
        assert compare(one, other).to_frame().equals(expected.to_frame())
    parts = [compare(*one) for one in alone]
    for layer, whole in enumerate(expected.layers):
        of_sequences = [part.layers[layer] for part in parts]
        assert whole.n_states == sum(part.n_states for part in of_sequences) == 22
        mean = sum(p.influence_inside * (p.n_states - 1) for p in of_sequences) / 18
        assert whole.influence_inside == pytest.approx(mean)


def test_results_of_other_sequences_are_refused_by_their_lengths(of_lengths):
    (positions, influence), _ = of_lengths
    other = replace(positions, lengths=positions.lengths.flip(0))
    for call in (compare, coverage_curve, explained):
        with pytest.raises(InfoFlowError, match="expected the same; probe and predict the same"):
            call(other, influence)


def test_a_tensor_with_states_that_cannot_be_real_is_refused(of_lengths):
    (positions, influence), _ = of_lengths
    sets = InformationSets(propagate(positions).members)
    for call in (
        lambda: compare(sets, influence.influence),
        lambda: coverage_curve(positions.positions, influence.influence),
        lambda: compare_rankings({"rule": sets}, {}, influence.influence),
    ):
        with pytest.raises(InfoFlowError, match="cannot be real"):
            call()
    with pytest.raises(InfoFlowError, match="expected the same; probe and predict"):
        compare(positions, influence, lengths=torch.tensor([4, 9, 6, 4]))


# Layers


@pytest.fixture
def some_layers(token_model, token_inputs):
    """The keys of all layers, and influence on some, however these were asked for."""

    def measured(layers, **more):
        probes = [PositionsProbe((1, 2)), JacobianInfluence("resid_post", layers=layers, **more)]
        return run_probes(token_model, token_inputs, probes, progress=False)

    return measured


def test_sets_of_all_layers_are_compared_with_the_layers_that_were_measured(some_layers):
    for layers in ((0,), (1,), (1, 0)):
        chosen, influence = some_layers(layers)
        assert influence.layers == layers
        whole = propagate(chosen.argmax, influence.influence.shape[-1])
        part = whole.part(influence.layers)
        assert compare(whole, influence) == compare(chosen, influence)
        if len(layers) < 2:  # in their order; of all layers, sets are taken to be in the model's
            assert compare(whole, influence) == compare(part, influence)
        labels = compare(whole, influence).to_frame()["layer"]
        assert set(labels) == set(influence.layers)
        assert set(compare_by_position(whole, influence)["layer"]) == set(influence.layers)
        assert explained(whole, influence).layer == layers[-1]
        curve = coverage_curve(chosen, influence)
        named = {name for name in curve.to_frame() if name.startswith("layer_")}
        assert named == {f"layer_{layer}" for layer in influence.layers}
        for place, layer in enumerate(influence.layers):
            assert curve.take_k(1)[layer] == explained(whole, influence, place).inside
        deepest = layers.index(max(layers))
        assert curve.last[0] == explained(whole, influence, deepest, last=True).inside
        assert compare(whole, influence).to_frame()["layer"].iloc[-1] == max(layers)
        scores = {"sets": whole.members.float()[list(influence.layers)]}
        ranked = compare_rankings({"all": whole}, scores, influence).to_frame()
        assert set(ranked["layer"]) == set(influence.layers)


def test_sources_above_the_input_are_not_what_sets_of_the_model_say(some_layers):
    chosen, influence = some_layers((1,), source_layer=1)
    with pytest.raises(InfoFlowError, match="predicted sets have shape"):
        compare(chosen, influence)
    above = propagate(chosen.argmax[1:], influence.influence.shape[-1])
    assert compare(above, influence).numbers == (1,)


def test_the_order_in_which_layers_were_asked_for_changes_no_number(some_layers):
    chosen, influence = some_layers((0, 1))
    _, turned = some_layers((1, 0))
    torch.testing.assert_close(turned.influence.flip(0), influence.influence)
    ranked = [
        compare_rankings({"sets": chosen}, {"scores": influence}, measured).to_frame()
        for measured in (influence, turned)
    ]
    of_scores = [frame.query("method == 'scores'").set_index("layer")["auroc"] for frame in ranked]
    pd.testing.assert_series_equal(of_scores[1].sort_index(), of_scores[0], rtol=1e-5)
    one, other = (compare(chosen, measured).to_frame() for measured in (influence, turned))
    by = ["states", "with_self", "layer"]
    pd.testing.assert_frame_equal(
        one.set_index(by).sort_index(), other.set_index(by).sort_index(), rtol=1e-5
    )
