"""One call from a model and a text to predicted sets beside measured influence."""

import math
import re
from dataclasses import replace

import matplotlib.figure
import numpy as np
import pandas as pd
import pytest
import torch

from infoflow_lens import (
    Flow,
    InfoFlowError,
    JacobianInfluence,
    PositionsProbe,
    compare,
    flow,
    load_any,
    propagate,
    run_probes,
    why_all,
)
from infoflow_lens.commands.texts import _say_found
from infoflow_lens.foundation.display import begin_sentence
from infoflow_lens.foundation.record import model_fingerprint
from infoflow_lens.hooks import PowerRollout, label_heads
from infoflow_lens.hooks.scores import describe_orders
from infoflow_lens.report.flow_plot import draw_flow
from infoflow_lens.studies.constructions import build_construction
from tests.conftest import make_token_model
from tests.reference import zoo

TEXT = "w5 w7 w9 w11 w5 w7"


@pytest.fixture(scope="module")
def hf_model():
    return zoo.build("gpt2")


@pytest.fixture(scope="module")
def host(hf_model):
    return load_any(hf_model, tokenizer=zoo.tokenizer()).model


def quick(model, text, *args, **settings):
    return flow(model, text, *args, progress=False, **settings)


@pytest.fixture(scope="module")
def found(host):
    return quick(host, TEXT)


def test_a_flow_is_what_the_probes_say(found, host):
    ids = host.to_tokens(TEXT)
    chosen, influence = run_probes(
        host,
        ids,
        [PositionsProbe((1,)), JacobianInfluence("resid_post", positions=(-1,))],
        progress=False,
    )
    sets = propagate(chosen.argmax)
    assert found.sets.members.equal(sets.members)
    torch.testing.assert_close(found.influence.influence, influence.influence)
    assert found.agreement == compare(sets, found.influence)
    assert found.tokens == (("<bos>", "w5", "w7", "w9", "w11", "w5", "w7"),)
    assert found.asked == ((6,),)


def test_its_title_names_the_model(found):
    assert found.title == "Information flow in a model in memory"
    assert quick("stdlib-2l", "x", influence=None).title == "Information flow in stdlib-2l"


def test_its_table_has_a_row_for_each_source_of_each_asked_state(found):
    frame = found.to_frame()
    assert list(zip(frame["layer"], frame["source"], strict=True)) == [
        (layer, source) for layer in range(2) for source in range(7)
    ]
    assert set(frame["position"]) == {6}
    assert list(frame["source_token"][:7]) == list(found.tokens[0])
    np.testing.assert_allclose(frame.groupby("layer")["share"].sum(), 1)
    members = found.sets.members[:, 0, 6].flatten().numpy()
    assert (frame["predicted"].to_numpy() == members).all()


def test_models_of_every_kind_give_the_same(found, hf_model, host, tmp_path):
    folder = zoo.save("gpt2", tmp_path / "gpt2")
    ids = host.to_tokens(TEXT)[0]
    for other in (
        quick(str(folder), TEXT),
        quick(hf_model, TEXT, tokenizer=zoo.tokenizer()),
        quick(load_any(folder), TEXT),
        quick(hf_model, ids[None].numpy()),
    ):
        assert other.sets.members.equal(found.sets.members)
        torch.testing.assert_close(other.influence.influence, found.influence.influence)


def test_several_texts_of_different_lengths_are_each_as_alone(found, host):
    both = quick(host, [TEXT, "w5 w9 w4"], position=(-1, 1))
    alone = quick(host, "w5 w9 w4", position=(-1, 1))
    assert both.asked == ((6, 1), (3, 1))
    frame = both.to_frame()
    again = frame[frame["input"] == 1].drop(columns="input").reset_index(drop=True)
    expected = alone.to_frame().drop(columns="input")
    assert list(again["predicted"]) == list(expected["predicted"])
    np.testing.assert_allclose(again["influence"], expected["influence"], rtol=1e-4)
    assert both.view.inputs[1].influence.shape == (2, 4, 4)


def test_all_positions_and_chosen_layers(host):
    everywhere = quick(host, TEXT, position="all", layer=-1)
    assert everywhere.layers == (1,)
    assert everywhere.asked == (tuple(range(7)),)
    (influence,) = run_probes(
        host, host.to_tokens(TEXT), [JacobianInfluence("resid_post")], progress=False
    )
    torch.testing.assert_close(everywhere.influence.influence[0], influence.influence[1])
    viewed = everywhere.view.inputs[0].influence
    assert viewed[0].isnan().all()
    assert not viewed[1].isnan().any()


def test_vectors_and_a_cls_token(model, inputs):
    found = quick(model, inputs[0])
    assert found.tokens == (tuple("0123456"),)
    assert found.asked == ((7,),)
    assert set(found.to_frame()["token"]) == {"CLS"}
    assert found.view.inputs[0].n_queries == 8
    torch.testing.assert_close(
        quick(model, inputs[:2]).influence.influence[:, :1], found.influence.influence
    )


def test_a_construction_flows_as_its_theorem_says():
    """Chen & Zou's memoriser answers from its tokens: all influence on CLS is inside its sets."""
    made, task = build_construction("d_retrieval")
    x, _ = task.sample(2, seed=0)
    found = quick(made, x)
    assert found.explained.inside == pytest.approx(1)


def test_a_flow_by_top_k_or_without_a_position_has_the_sets_of_the_probe(host):
    top = quick(host, TEXT, rule="top_k", k=2)
    (chosen,) = run_probes(host, host.to_tokens(TEXT), [PositionsProbe((1, 2))], progress=False)
    assert top.sets.members.equal(propagate(chosen.positions).members)
    assert (next(iter(top.view.rules)), top.view.k) == ("top_k", 2)
    (note,) = quick(host, TEXT, without=(0,)).notes
    assert (
        note == "position 0 is left out, as was asked: no head passes it on, and it is no candidate"
    )
    kept = quick(host, TEXT, without=(0,)).sets.members
    assert not kept[:, 0, 1:, 0].any()


def test_it_says_on_which_tokens_the_asked_state_depends(found, host, capsys):
    measured = found.influence.full()[-1, 0, 6].double()
    shares = measured[:6] / measured[:6].sum()  # its own token has no share
    said = found.describe_sources()
    assert said.startswith(f"in layer 1 {found.tokens[0][6]}@6 depends most on ")
    named = re.findall(r"(\S+)@(\d) \((\d+)%\)", said)
    assert len(named) == 5
    best = shares.argsort(descending=True)[:5].tolist()
    assert named == [(found.tokens[0][i], str(i), f"{100 * float(shares[i]):.0f}") for i in best]
    assert f"together {100 * float(shares[best].sum()):.0f}% of the influence" in said
    assert quick(host, TEXT, influence=None).describe_sources() == ""
    both = quick(host, ["w5 w9 w4", TEXT])
    assert both.describe_sources(1) == both.describe_sources(-1) == said
    with pytest.raises(InfoFlowError, match="input is 2: expected 0 to 1"):
        both.describe_sources(2)
    _say_found([found], None)
    assert f"{begin_sentence(said)}." in capsys.readouterr().out.splitlines()


def test_predicted_orders_stand_beside_what_was_measured(host, tmp_path):
    """Contributions set for the measure, best paths and distance; scipy has the correlation."""
    from scipy.stats import spearmanr

    found = quick(host, TEXT, without=(0,))
    (jacobian,) = run_probes(host, host.to_tokens(TEXT), [JacobianInfluence("resid_post")],
                             progress=False)  # fmt: skip
    (shares,) = run_probes(host, host.to_tokens(TEXT), [PowerRollout("small changes")],
                           progress=False)  # fmt: skip
    state = found.asked[0][0]
    others = torch.arange(1, state)
    measured = jacobian.influence[-1, 0, state, others]
    scores = {
        "contributions (small changes)": shares.scores[-1, 0, state, others],
        "best paths": found.graded.strengths[-1, 0, state, others],
        "last tokens first": others,
    }
    assert list(found.orders) == list(scores)
    for name, score in scores.items():
        assert found.orders[name] == pytest.approx(spearmanr(score, measured).statistic)
    best = max(found.orders, key=found.orders.get)
    assert f"{best} came nearest" in found.describe_order()
    assert f"{begin_sentence(found.describe_order())}." in found.view.notes
    noted = replace(found, notes=("influence is estimated",)).view
    assert "Influence is estimated." in noted.notes  # it stood there as a fragment
    resampled = quick(
        host, TEXT, influence="resample", reference=["w9 w8 w7 w6 w5 w4", "w4 w9 w5 w6 w8 w9"]
    )
    assert resampled.contributions.question == "replacing a token"
    everything = quick(host, TEXT, rule="top_k", k=7)
    assert f"exclude nothing; {everything.describe_order()}" in everything.summary()
    found.save(tmp_path / "flow")
    assert Flow.load(tmp_path / "flow").orders == found.orders
    assert quick(host, TEXT, influence=None).describe_order() == ""


def test_an_order_turned_round_is_not_near():
    """Of two orders the less wrong one "came nearest"."""
    said = describe_orders({"best paths": -0.9, "last tokens first": -0.5}, "0 by chance")
    assert said.startswith("none came near to the measured one (Spearman: last tokens first -0.50")


def test_a_model_without_parts_has_no_contributions():
    model = zoo.bend(zoo.build("llama"))
    found = quick(model, zoo.tokens(1, 6), "all")
    assert found.contributions is None
    assert list(found.orders) == ["best paths", "last tokens first"]


def test_what_is_left_out_is_no_candidate(host):
    """Counts, shares and chance are of the other tokens, as if the one were not there."""
    found, whole = quick(host, TEXT, without=(0,)), quick(host, TEXT)
    state = found.asked[0][0]
    influence = whole.influence.full()[-1, 0, state].double()
    members = found.sets.members[-1, 0, state] & (torch.arange(len(influence)) != 0)
    others = torch.arange(1, state)
    assert found.explained.others == state - 1
    assert found.explained.size == int(members[others].sum())
    held = influence[others][members[others]].sum() / influence[others].sum()
    if 0 < found.explained.size < found.explained.others:
        assert found.explained.inside == pytest.approx(float(held))
        assert found.explained.chance == pytest.approx(found.explained.size / (state - 1))
    frame = found.to_frame()
    last = frame[(frame["layer"] == found.layers[-1]) & (frame["position"] == state)]
    assert last["share"].isna().tolist() == [s in (0, state) for s in range(state + 1)]
    assert last["share"].sum() == pytest.approx(1)
    assert found.view.inputs[0].left_out == [0]
    row = found.agreement.layers[-1]
    assert row.measured_size <= state - 1
    everywhere = quick(host, TEXT, "all", without=(0,))
    influence = everywhere.influence.full()[:, :, 1:, 1:]
    plain = compare(everywhere.sets.members[:, :, 1:, 1:], influence, threshold=0.1)
    assert everywhere.agreement.cls == plain.cls


def test_mechanisms_are_measured_on_reference_inputs_or_taken_as_they_are(host):
    texts = [" ".join(f"w{(7 * i + j) % 30 + 4}" for j in range(6)) for i in range(8)]
    found = quick(host, TEXT, rule="mechanisms", reference=texts)
    labels = label_heads(host, texts, progress=False)
    assert found.mechanisms.mechanisms == labels.mechanisms
    again = quick(host, TEXT, rule=labels)
    assert again.sets.members.equal(found.sets.members)
    viewed = found.view.inputs[0]
    assert [[m.name for m in layer] for layer in viewed.mechanisms] == [
        list(names) for names in labels.mechanisms
    ]
    assert propagate(viewed.layers_of("mechanisms")).members.equal(found.sets.members)
    # labels of other weights would say nothing of these
    weight = next(host.parameters())
    before = weight.detach().clone()
    with torch.no_grad():
        weight.add_(1)
        try:
            with pytest.raises(InfoFlowError, match="other weights"):
                quick(host, TEXT, rule=labels)
        finally:
            weight.copy_(before)


def test_the_view_propagates_to_the_same_sets(found, host):
    viewed = quick(host, [TEXT, "w5 w9 w4"]).view.inputs
    assert propagate(viewed[0].layers_of("max_position")).members.equal(found.sets.members)
    alone = quick(host, "w5 w9 w4").sets.members
    assert propagate(viewed[1].layers_of("max_position")).members.equal(alone)


def test_influence_is_estimated_resampled_or_left_out(host, found):
    estimate = quick(host, TEXT, influence="estimate", n_directions=6, seed=1).influence
    assert estimate.record.config["estimate"] == 6
    assert estimate.relative_error is not None
    nothing = quick(host, TEXT, influence=None)
    assert nothing.influence is nothing.agreement is None
    assert "not measured" in repr(nothing)
    assert len(nothing.to_frame()) == 2 * 7 * 7
    assert nothing.view.inputs[0].influence is None


def moved_by_hand(model, ids, place, donors):
    """How far the last state moves with other vectors where those of a token enter; the median."""
    name = "blocks.0.hook_resid_pre"
    _, cache = model.run_with_cache(ids[None])
    last = f"blocks.{len(model.blocks) - 1}.hook_resid_post"
    moved = []
    for donor in donors:
        other = ids.clone()
        other[place] = donor
        entering = cache[name].clone()
        entering[:, place] = model.run_with_cache(other[None])[1][name][:, place]
        after = []
        with torch.no_grad():
            model.run_with_hooks(
                ids[None],
                fwd_hooks=[
                    (name, lambda entered, hook, put=entering: put),
                    (last, lambda state, hook, kept=after: kept.append(state[0, -1])),
                ],
            )
        moved.append((after[0] - cache[last][0, -1]).norm())
    return float(torch.stack(moved).quantile(0.5))


def test_resampling_puts_other_tokens_in_the_place_of_each(host):
    """Also where a text repeats its tokens: a token in its own place would move nothing."""
    text = "w5 w6 w5 w6 w5 w6 w5 w6"
    ids = host.to_tokens(text)[0]
    found = quick(host, text, influence="resample", layer=-1).influence.influence[0, 0, 0]
    for place in range(9):
        others = [token for token in ids.unique() if token != ids[place]]
        expected = moved_by_hand(host, ids, place, others)
        assert float(found[place]) == pytest.approx(expected, rel=1e-4)


def test_a_text_of_one_token_has_none_to_put_in_its_place(host):
    with pytest.raises(InfoFlowError, match="for position 0 the text has 1 other tokens"):
        quick(host, "w5 w5 w5 w5", influence="resample")


def test_reference_inputs_with_the_same_tokens_are_said_and_refused(host):
    reference = [f"w5 w{i} w9 w{i + 1} w{i + 2} w7" for i in range(20, 28)]
    (note,) = (n for n in quick(host, TEXT, influence="resample", reference=reference).notes)
    assert "the sequence's own token at position 0, 1, 3, 6: replaced by itself" in note
    with pytest.raises(InfoFlowError, match="the same tokens as the text everywhere"):
        quick(host, TEXT, influence="resample", reference=[TEXT] * 3)


def test_what_a_window_hides_is_no_other_token():
    """Mistral's layers see 4 tokens: after one layer a state holds 3 others, after two 6."""
    model = zoo.build("mistral")
    ids = zoo.tokens(1, 12)[0]
    counts = [
        quick(model, ids, layer=layer, rule="top_k", k=4).explained.others for layer in (0, 1)
    ]
    assert counts == [zoo.WINDOW - 1, 2 * (zoo.WINDOW - 1)]
    everything = quick(model, ids, layer=0, rule="top_k", k=4)
    assert "hold every other token that they can see (3)" in everything.summary()
    steps = torch.arange(12)
    expected = [steps.clamp(max=most) for most in (zoo.WINDOW - 1, 2 * (zoo.WINDOW - 1))]
    assert everything.view.inputs[0].possible.equal(torch.stack(expected))  # of the page


def test_a_click_anywhere_finds_influence_where_that_takes_seconds(host, found, monkeypatch):
    """What was asked for stays exact and alone; the picture has the other positions, too."""
    (everywhere,) = run_probes(
        host, host.to_tokens(TEXT), [JacobianInfluence("resid_post")], progress=False
    )
    torch.testing.assert_close(found.view.inputs[0].influence, everywhere.influence[:, 0])
    assert found.asked == ((6,),)
    assert not found.notes
    alone = quick(host, TEXT, position=-1)
    assert alone.view.inputs[0].influence[:, :6].isnan().all()
    assert alone.explained == found.explained
    exact = 1.5 * 7 * host.cfg.d_model  # passes
    cost = sum(p.numel() for p in host.original_model.transformer.h.parameters()) * 7
    monkeypatch.setattr("infoflow_lens.flows.run._DIRECTIONS_ELSEWHERE", 4)
    monkeypatch.setattr("infoflow_lens.flows.run._TWO_SECONDS", cost * exact * 0.9)
    estimated = quick(host, TEXT)
    assert estimated.elsewhere.relative_error is not None
    viewed = estimated.view.inputs[0].influence
    assert not viewed.isnan().any()
    torch.testing.assert_close(viewed[:, 6], everywhere.influence[:, 0, 6])
    assert "influence='exact'" in estimated.notes[-1]
    monkeypatch.setattr("infoflow_lens.flows.run._TWO_SECONDS", 10)
    last = quick(host, TEXT)
    assert last.elsewhere is None
    assert last.view.inputs[0].influence[:, :6].isnan().all()
    assert "a few seconds: position='all' (--position all)" in last.notes[-1]


def test_the_next_tokens_are_the_models(host, found):
    chances = host(host.to_tokens(TEXT))[0].softmax(-1)
    for position, said in enumerate(found.next_tokens[0]):
        top = chances[position].topk(5)
        assert [token for token, _ in said] == [host.tokenizer.decode([i]) for i in top.indices]
        np.testing.assert_allclose([chance for _, chance in said], top.values.detach(), rtol=1e-5)
    assert found.view.inputs[0].next_tokens == found.next_tokens[0]


def test_each_token_is_replaced_by_the_likeliest_other_one(host, found):
    ids = host.to_tokens(TEXT)[0]
    before = host(ids[None])[0].softmax(-1)
    (replaced,) = found.replaced
    for source in range(len(ids)):
        order = before[max(0, source - 1)].argsort(descending=True)
        put = next(int(i) for i in order if i != ids[source])
        assert replaced.by[source] == host.tokenizer.decode([put])
        other = ids.clone()
        other[source] = put
        chances = host(other[None])[0].softmax(-1)
        assert len(replaced.next_tokens[source]) == len(ids) - source
        for position, said in enumerate(replaced.next_tokens[source], start=source):
            top = chances[position].topk(5)
            assert [token for token, _ in said] == [host.tokenizer.decode([i]) for i in top.indices]
            np.testing.assert_allclose([c for _, c in said], top.values.detach(), rtol=1e-4)
    assert found.view.inputs[0].replaced.by == replaced.by


def test_tokens_are_replaced_only_where_that_is_quick(host, monkeypatch):
    monkeypatch.setattr("infoflow_lens.flows.next_tokens._TWO_SECONDS", 10)
    slow = quick(host, TEXT)
    assert slow.replaced is None
    assert slow.next_tokens is not None
    monkeypatch.undo()
    monkeypatch.setattr("infoflow_lens.flows.next_tokens._MOST_SAID", 10)
    assert quick(host, TEXT).replaced is None


def test_the_picture_says_why_heads_look_there_or_why_it_does_not(host, found, monkeypatch):
    expected = why_all(host, TEXT, progress=False)
    shown = found.view.inputs[0].reasons
    assert shown.part_names == expected.part_names
    for name in ("keys", "margins", "parts", "values", "rest"):
        for layer, known in zip(getattr(shown, name), getattr(expected, name), strict=True):
            torch.testing.assert_close(layer, known[0], equal_nan=True)
    monkeypatch.setattr("infoflow_lens.hooks.why._points", lambda *place: [])
    refused = quick(host, TEXT)
    assert refused.reasons is None
    assert "shows no queries" in refused.notes[0]
    monkeypatch.setattr("infoflow_lens.flows.run._MOST_REASONS", 10)
    assert "too many" in quick(host, TEXT).notes[0]


def test_influence_is_exact_where_that_is_quick_and_estimated_where_not(found, monkeypatch):
    assert found.influence.relative_error is None
    monkeypatch.setattr("infoflow_lens.flows.run._FEW_SECONDS", 10)
    assert quick(zoo.build("gpt2"), [[2, 5, 7]]).influence.relative_error is not None


def test_the_bar_knows_all_passes_before_it_moves(host, monkeypatch):
    from contextlib import contextmanager

    bars = []

    @contextmanager
    def bar(description, total, show=True, done=0):
        steps = []
        bars.append((description, total, show, steps))
        yield lambda n=1, status="": steps.append(n)

    monkeypatch.setattr("infoflow_lens.flows.run.progress_bar", bar)
    flow(host, [TEXT, "w5 w7"], position="all", influence="estimate")
    ((description, total, show, steps),) = bars
    assert description == "passes for influence"
    assert (total, show) == (8 * 7 * 1.5 + 8 * 3 * 1.5, True)
    assert sum(steps) == total
    assert len(steps) > 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"position": 7}, r"position is 7, but the text has 7 positions: expected 0 to 6, or -1"),
        ({"position": -8}, r"position is -8, but the text has 7 positions"),
        ({"position": (3, 3)}, r"position is \[3, 3\]|position is \(3, 3\)"),
        ({"position": "every"}, "position is 'every': expected .*'all'"),
        ({"layer": 2}, "layer is 2: expected 0 to 1, or -1 to -2"),
        ({"rule": "attention"}, "rule is 'attention': expected one of max_position, top_k"),
        ({"rule": "argmx"}, "rule is 'argmx': expected one of max_position, top_k, mechanisms"),
        ({"influence": "exakt"}, "influence is 'exakt'.* did you mean 'exact'"),
        ({"rule": "top_k", "k": 9}, "k is 9: expected 1 to 7"),
        ({"rule": "mechanisms"}, "expected at least 8 inputs, as over one"),
        ({"rule": "mechanisms", "reference": ["w5"] * 8}, "have at most 2 tokens, the text 7"),
        ({"threshold": 0}, "threshold is 0: expected"),
        ({"n_directions": 1}, "n_directions is 1: expected an integer of at least 2"),
    ],
)
def test_bad_settings_are_named_before_work(host, settings, message, monkeypatch):
    monkeypatch.setattr("infoflow_lens.flows.run.run_with_bar", None)
    with pytest.raises(InfoFlowError, match=message):
        quick(host, TEXT, **settings)


@pytest.mark.parametrize("text", ["", [], ()])
def test_no_text_is_refused_before_a_model_is_loaded(text):
    with pytest.raises(InfoFlowError, match="expected at least one text that is not empty"):
        quick("no/such/model", text)


def test_texts_that_do_not_fit(host):
    with pytest.raises(InfoFlowError, match="the model takes at most n_ctx"):
        quick(host, " ".join(["w5"] * 99))
    with pytest.raises(InfoFlowError, match=r"text\[1\] is ''"):
        quick(host, [TEXT, ""])
    with pytest.raises(InfoFlowError, match=r"position is 5, but text\[1\] has 2 positions"):
        quick(host, [TEXT, "w5"], position=5)
    with pytest.raises(InfoFlowError, match="text is a NoneType"):
        quick(host, None)
    with pytest.raises(InfoFlowError, match="the model has no tokenizer"):
        quick(zoo.build("gpt2"), TEXT)


@pytest.mark.parametrize("without", [(99,), (0, -9)])
def test_a_position_to_leave_out_that_no_text_has_is_refused(host, without):
    """It was left out of nothing, in silence."""
    with pytest.raises(InfoFlowError, match=f"without has position {without[-1]}, but the longest"):
        quick(host, [TEXT, "w5"], without=without)


def test_a_text_of_one_token_is_shown_and_says_that_it_has_no_other(host):
    found = quick(host, [[5]])
    assert found.sets.of(1, 0, 0) == {0}
    assert "no other token" in found.summary()
    assert isinstance(found.plot(), matplotlib.figure.Figure)
    with pytest.raises(InfoFlowError, match=r"the text has 0 other tokens, .* give reference="):
        quick(host, [[5]], influence="resample")


def test_its_repr_is_a_sentence(found):
    assert len(repr(found)) < 300
    share = found.explained.inside
    rows = found.to_frame().query("layer == 1 and predicted")  # of the own token it is NaN
    assert rows["share"].sum() == pytest.approx(share)
    assert f"{share:.0%} of the influence of other tokens on position 6" in repr(found)
    assert not math.isnan(share)


def test_what_excludes_nothing_is_said(host):
    assert "exclude nothing" in quick(host, TEXT, rule="top_k", k=7).summary()


def test_it_leaves_the_model_and_the_random_state_alone():
    model = make_token_model()
    model.train()
    before, state = model_fingerprint(model), torch.random.get_rng_state()
    quick(model, [[1, 2, 3]], influence="estimate")
    assert model_fingerprint(model) == before
    assert model.training
    assert torch.random.get_rng_state().equal(state)


def test_the_still_picture_shows_the_paths_and_the_influence(found):
    figure = found.plot()
    lattice, bars = figure.axes
    heights = [bar.get_height() for bar in bars.patches]
    influence = found.influence.influence[1, 0, 0]
    np.testing.assert_allclose(heights, influence / influence.max(), rtol=1e-5)
    assert [label.get_text() for label in bars.get_xticklabels()] == list(found.tokens[0])
    kept, passed = (len(lines.get_segments()) for lines in lattice.collections[:2])
    assert kept >= 2  # the residual stream, layer by layer
    assert passed >= len(found.sets.of(1, 0, 6)) - 1
    assert figure._repr_png_().startswith(b"\x89PNG")
    other = found.plot(position=3, layer=0)
    assert "position 3) in layer 0" in other.axes[0].get_title()
    with pytest.raises(InfoFlowError, match="layer 5, position 3: expected a layer from 0 to 1"):
        found.plot(position=3, layer=5)
    with pytest.raises(InfoFlowError, match="input is 3: expected 0 to 0"):
        found.plot(input=3)


def test_the_still_picture_of_a_deep_model_has_the_strongest_lines():
    """By strengths of graded sets: the strongest line into each token has that of its best path."""
    from tests.report.test_flow_page import make_input

    view = make_input(12, (6,) * 6, k=1, influence=None)
    figure = draw_flow(view, "max_position", 1, 5, 11)
    passed = figure.axes[0].collections[1]
    assert len(passed.get_segments()) == 30
    widths = passed.get_linewidths()
    assert list(widths) == sorted(widths, reverse=True)
    strengths = propagate(
        [each[None, ..., 0] for each in view.ranked],
        strength=[each[None, ..., 0] for each in view.weights],
    ).strengths[5, 0, 11]
    first = int(passed.get_segments()[0][0][0])
    others = strengths[:11]
    assert first == int(others.argmax())
    widest = {}
    for segment, width in zip(passed.get_segments(), widths, strict=True):
        widest.setdefault(int(segment[0][0]), (width - 0.5) / 2)
    for key, level in widest.items():
        if key != 11:
            assert level == pytest.approx(float(strengths[key] / others.max()), rel=1e-4)


def test_dollars_in_tokens_are_no_mathematics(found):
    from dataclasses import replace

    found = replace(found, tokens=((r"$\frac", "$", "_", "^", "x" * 40, "\\", "<b>"),))
    assert found.plot()._repr_png_()


def test_the_name_stays_a_function_whatever_is_imported():
    import infoflow_lens.flows.run

    assert callable(infoflow_lens.flow)
    assert infoflow_lens.flow is infoflow_lens.flows.run.flow


def test_a_device_and_a_number_type_may_be_torchs(host):
    made = quick(host, TEXT, device=torch.device("cpu"), dtype=torch.float32)
    assert made.record.config == quick(host, TEXT).record.config


def test_the_default_number_type_is_of_the_user(token_model):
    """torch.set_default_dtype(float64) ended in an error of torch."""
    asked = {"progress": False}
    texts = torch.randint(17, (2, 3), generator=torch.Generator().manual_seed(1))
    expected = flow(token_model, texts, **asked)
    torch.set_default_dtype(torch.float64)
    try:
        found = flow(token_model, texts, **asked)
        found.view  # noqa: B018
    finally:
        torch.set_default_dtype(torch.float32)
    pd.testing.assert_frame_equal(found.to_frame(), expected.to_frame(), rtol=1e-5)
