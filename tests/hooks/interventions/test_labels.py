"""Estimates against finite differences by hand, rules on tables whose label is known, and heads."""

import inspect
import json
import re
from functools import cache
from itertools import product

import pytest
import torch
import transformers
from scipy.stats import t

from infoflow_lens import InfoFlowError, label_heads, load_any, open_model, run_probes
from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.hooks import AllHeads, HeadIdeals, HeadLabels, MeanPatternsProbe
from infoflow_lens.hooks.interventions.damage import Damage
from infoflow_lens.hooks.interventions.estimate import estimate_ideals
from infoflow_lens.hooks.interventions.heads import _Labelling
from infoflow_lens.hooks.interventions.labels import label_head
from infoflow_lens.hooks.interventions.probe import Intervention, _Source
from infoflow_lens.hooks.model.inputs import read_inputs
from tests.conftest import some_of
from tests.hooks.interventions.test_interventions import idealised, run_by_hand
from tests.reference import zoo

IDEALS = ("position", "offset", "own", "previous", "sink", "even", "gated", "largest",
          "top 2", "top 4", "top 8")  # fmt: skip


# Estimates


@pytest.mark.parametrize("read", [None, (-1,)])
def test_an_estimate_is_the_sum_over_queries_of_what_each_changes(read):
    """To second order a squared change; in small steps, query by query, with plain transformers."""
    model = zoo.build("llama").eval().double()
    tokens = zoo.tokens(2, 5)
    opened = open_model(zoo.build("llama").eval().double())
    (means,) = run_probes(opened, tokens, [MeanPatternsProbe()], progress=False)
    damage = Damage("nmse", read)
    with eval_mode(opened):
        found = estimate_ideals(
            opened, read_inputs(opened, tokens), damage, means, ("gated", "previous"),
            leaves_out=False, draws=250, batch_size=2,
        )  # fmt: skip
    assert found.forwards == 251
    step = 1e-2  # norms of the model are in float32
    for row in range(2):
        plain, patterns, _ = run_by_hand(model, tokens[row])
        for layer, head, column, ideal in ((0, 1, 0, "gated"), (1, 2, 1, "previous")):
            change = idealised(ideal, patterns[layer][head], [], layer, head)
            change = change - patterns[layer][head]
            changes = []
            for query in range(5):

                def move(there, query=query, head=head, change=change):
                    there = there.clone()
                    there[0, head, query] += step * change[query].to(there)
                    return there

                moved = run_by_hand(model, tokens[row], edits={(layer, "pattern"): move})[0]
                apart = (moved - plain) / step
                changes.append(apart if read is None else apart[-1:])
            expected = sum(float(apart.square().sum()) for apart in changes)
            if read is not None:  # one row alone: all queries enter it
                expected = float(sum(changes).square().sum())
            assert float(found.lost[layer][row, head, column]) == pytest.approx(expected, rel=0.15)


def test_estimates_of_a_sequence_do_not_depend_on_its_batch():
    model = open_model(zoo.build("gpt2").eval())
    rows = [row[: 9 - i] for i, row in enumerate(zoo.tokens(4, 9))]
    (means,) = run_probes(model, rows, [MeanPatternsProbe()], progress=False)
    found = [
        estimate_ideals(
            model, read_inputs(model, rows), Damage("kl", None), means, (*IDEALS, "ablated"),
            leaves_out=True, batch_size=size,
        )
        for size in (1, 4)
    ]  # fmt: skip
    for one, other in zip(found[0].lost, found[1].lost, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-9)


# Rules


def table(**shares):
    """Ten texts of worth 1 whose shares scatter by a hundredth, the same way for all ideals."""
    lost = torch.full((10, len(IDEALS)), 0.9, dtype=torch.float64)
    for name, share in shares.items():
        lost[:, IDEALS.index(name.replace("_", " "))] = share
    scatter = torch.linspace(-0.01, 0.01, 10, dtype=torch.float64)[:, None]
    return lost + scatter, torch.ones(10, dtype=torch.float64)


@pytest.mark.parametrize(
    ("shares", "label", "name", "replacement"),
    [
        ({"position": 0.05, "gated": 0.6}, "fixed", "position", "position"),
        ({"offset": 0.05, "previous": 0.06, "gated": 0.6}, "fixed", "previous", "offset"),
        ({"offset": 0.05, "even": 0.3, "gated": 0.6}, "fixed", "offset", "offset"),
        ({"position": 0.7, "gated": 0.1}, "max", "", "gated"),
        ({"position": 0.2, "gated": 0.02}, "fixed", "position", "gated"),  # one key does as well
        ({"top_2": 0.3, "top_4": 0.1}, "several", "top 4", "position"),
        ({"top_2": 0.8, "top_4": 0.7, "top_8": 0.4}, "spread", "", "position"),
    ],
)
def test_each_rule_gives_its_label(shares, label, name, replacement):
    lost, worth = table(**shares)
    found = label_head(lost, worth, IDEALS, has_sink=True)
    assert (found.label, found.name, found.replacement) == (label, name, replacement)
    assert found.does_either == (label == "fixed" and shares["gated"] <= 0.25)


def test_a_head_whose_families_scatter_is_undecided_with_the_error_of_leaving_a_text_out():
    generator = torch.Generator().manual_seed(1)
    lost, worth = table(position=0.4, offset=0.5, gated=0.42)
    lost = lost + 0.3 * torch.rand(lost.shape, generator=generator, dtype=torch.float64)
    worth = worth + torch.rand(10, generator=generator, dtype=torch.float64)
    found = label_head(lost, worth, IDEALS, has_sink=True)
    assert found.label == "undecided"
    f, g = lost[:, IDEALS.index("position")], lost[:, IDEALS.index("gated")]
    assert found.fixed == pytest.approx(float(f.sum() / worth.sum()))
    left = []
    for text in range(10):
        keep = torch.arange(10) != text
        left.append(float((f - g)[keep].sum() / worth[keep].sum()))
    mean = sum(left) / 10
    expected = (sum((one - mean) ** 2 for one in left) * 9 / 10) ** 0.5
    assert found.gap_error == pytest.approx(expected)


def test_without_a_sink_the_largest_key_alone_is_of_the_family():
    lost, worth = table(position=0.8, gated=0.7, largest=0.1)
    assert label_head(lost, worth, IDEALS, has_sink=False).replacement == "largest"
    assert label_head(lost, worth, IDEALS, has_sink=True).largest == pytest.approx(0.7, abs=0.02)


# Heads


@pytest.fixture(scope="module")
def labelled():
    source = inspect.getsource(json)
    texts = [source[i * 400 : i * 400 + 120 + 7 * (i % 4)] for i in range(16)]
    model = load_any("stdlib-2l").model
    return model, texts, label_heads(model, texts, max_length=32, progress=False)


def test_the_head_that_is_known_to_read_the_previous_token_is_called_so(labelled):
    _, _, found = labelled
    assert found.label_of(0, 6) == "fixed: previous"
    assert found.n_sequences == found.n_judged == 8
    assert found.forwards <= 60
    assert found.measured.sum() == 14
    assert sum(found.counts().values()) == 16
    *heads, joint = found.sentences()
    assert any(line.startswith("fixed: heads ") and " 0.6" in line for line in heads)
    damage = dict(zip(found.assignments, found.damage.tolist(), strict=True))
    assert joint.startswith("damage of replacing all heads at once (kl, 0 is none): ")
    assert f"{damage['every head ablated']:.3g} without heads" in joint
    assert joint in found._repr_html_()


def test_heads_replaced_by_their_labels_lose_less_than_by_one_ideal_for_all(labelled):
    model, texts, found = labelled
    damage = dict(zip(found.assignments, found.damage.tolist(), strict=True))
    single = [damage[f"every head {ideal}"] for ideal in ("position", "offset", "gated", "largest")]
    assert damage["each head by its label"] < min(single)
    # what stands there is what a pass of one's own gives, on the texts that were judged
    (means,) = run_probes(model, texts, [MeanPatternsProbe()], progress=False, max_length=32)
    probe = AllHeads(means, {"again": found.assignment()}, leaves_out=True)
    (again,) = run_probes(model, texts[1::2], [probe], progress=False, max_length=32)
    assert float(again.damage()[0]) == pytest.approx(damage["each head by its label"], rel=1e-4)
    assert float(again.risen()[0]) == pytest.approx(float(found.rise[0]), rel=1e-3)


def test_labels_are_a_table_a_picture_and_files(labelled, tmp_path):
    _, _, found = labelled
    frame = found.to_frame()
    assert list(frame["label"]) == list(found.labels)
    assert found.joint_frame()["damage"].is_monotonic_increasing
    thirds = found.thirds_frame()
    assert list(thirds["layers"]) == ["0 to 0", "1 to 1"]  # of two layers
    for row, layer in ((0, 0), (1, 1)):
        own = frame[frame["layer"] == layer]
        for label in found.counts():
            some = own[own["label"] == label]
            assert thirds[label][row] == len(some)
            share = some["worth"].sum() / own["worth"].sum()
            assert thirds[f"{label}, of worth"][row] == pytest.approx(share)
    found.plot().savefig(tmp_path / "labels.png")
    found.save(tmp_path / "labels")
    assert HeadLabels.load(tmp_path / "labels").to_frame().equals(frame)


@pytest.mark.parametrize(
    ("head", "metric"),
    [("BertForMaskedLM", "kl"), ("BertModel", "nmse"), ("BertForSequenceClassification", "kl")],
)
def test_encoders_are_labelled_by_the_change_of_their_output(head, metric):
    """States are no logits, whose softmax would mean something; a class is one row of a text."""
    torch.manual_seed(0)
    config = zoo.build("bert").config
    config.initializer_range = 0.5
    model = open_model(getattr(transformers, head)(config).eval())
    rows = [row[: 8 - i % 3] for i, row in enumerate(zoo.tokens(6, 8))]
    found = label_heads(model, rows, worthiest=2, progress=False)
    assert found.metric == metric
    chance = 2 * t.sf(2, 2)  # of two errors, over three texts
    said = f"labels rest on 3 texts: with so few, .* by chance in {chance:.0%} of cases"
    assert any(re.match(said, note) for note in found.notes)
    assert found.rise.isnan().all()
    assert not found.idle.any()  # each does more than a hundredth of what all do
    if metric == "nmse":
        with pytest.raises(InfoFlowError, match="the model's output is a vector: expected 'nmse'"):
            label_heads(model, rows, metric="kl", progress=False)
    if head == "BertForSequenceClassification":
        (result,) = run_probes(model, rows, [HeadIdeals(ideals=("own",))], progress=False)
        assert result.n_rows.tolist() == [1] * 6


def test_judged_texts_may_be_longer_than_those_of_labels():
    model = open_model(zoo.build("llama").eval())
    rows = [row[: 5 + 3 * (i % 2)] for i, row in enumerate(zoo.tokens(6, 8))]
    assert label_heads(model, rows, worthiest=0, progress=False).n_judged == 3


def test_too_few_texts_and_means_of_shorter_ones_are_refused():
    model, tokens = open_model(zoo.build("llama").eval()), zoo.tokens(6, 8)
    with pytest.raises(InfoFlowError, match="there are 1 texts for labels"):
        label_heads(model, tokens[:2], progress=False)
    with pytest.raises(InfoFlowError, match="there are 1 texts for labels"):  # no list to stack
        label_heads(model, tokens[:1], progress=False)
    for name in ("judge", "calibration"):
        with pytest.raises(InfoFlowError, match=f"{name} is a loader, which may be read once only"):
            label_heads(model, tokens, **{name: (row for row in tokens)}, progress=False)
        with pytest.raises(InfoFlowError, match=rf"{name}\[0\] has token ids from 999"):
            label_heads(model, tokens, **{name: [torch.tensor([999])] * 2}, progress=False)
    (means,) = run_probes(model, tokens[:, :5], [MeanPatternsProbe()], progress=False)
    with pytest.raises(InfoFlowError, match="at most 5 positions"):
        label_heads(model, tokens, calibration=means, progress=False)
    with pytest.raises(InfoFlowError, match=r"there is no head 7\.0"):
        label_heads(model, tokens, worthiest=0, progress=False).label_of(7, 0)


def test_heads_that_are_worth_nothing_are_undecided_and_said():
    """All texts are one, so that its means are what each head does."""
    model = open_model(zoo.build("llama").eval())
    found = label_heads(model, zoo.tokens(1, 8).repeat(6, 1), progress=False)
    assert set(found.labels) == {"undecided"}
    assert found.fixed.isnan().all()
    assert found.shares.isnan().all()
    assert "8 of 8 heads are worth nothing on these texts" in found.notes[0]
    lost, _ = table(position=0.05)
    assert label_head(lost, torch.zeros(10), IDEALS, has_sink=True).label == "undecided"


# Going on


class StoppedError(Exception):
    """What a run is stopped by."""


@cache
def small(kind):
    torch.manual_seed(0)
    config = zoo.build("bert").config
    config.initializer_range = 0.5
    built = transformers.BertModel(config) if kind == "vectors" else zoo.build(kind)
    return open_model(built.eval())


def label_small(kind="gpt2", **settings):
    rows = [row[: 9 - i % 3] for i, row in enumerate(zoo.tokens(11, 9))]
    options = {"inputs": rows, "worthiest": 2, "draws": 2, "batch_size": 4, "progress": False}
    return label_heads(small(kind), **{**options, **settings})


@pytest.fixture(scope="module", params=["gpt2", "vectors"])
def kept(request):
    states = []
    return request.param, label_small(request.param, after=states.append), states


def bytes_of(result, path):
    result.save(path)
    return [path.with_suffix(end).read_bytes() for end in (".json", ".safetensors")]


STOPS = list(product(["gpt2", "vectors"], [1, 3, 0.4, 0.6, 0.8, -1]))


@pytest.mark.parametrize(("kept", "stop"), some_of(STOPS, ("gpt2", 0.6)), indirect=["kept"])
def test_a_run_that_was_stopped_goes_on_inside_a_batch_to_the_same_bits(kept, stop, tmp_path):
    kind, whole, states = kept
    stop = round(stop * len(states)) if 0 < stop < 1 else stop % (len(states) + 1)
    reached = []

    def after(now):
        reached.append(now)
        if len(reached) == stop:
            raise StoppedError

    with pytest.raises(StoppedError):
        label_small(kind, after=after)
    more = []
    again = label_small(kind, resume=reached[-1], after=more.append)
    assert len(more) == len(states) - stop  # nothing is measured twice
    assert bytes_of(again, tmp_path / "again") == bytes_of(whole, tmp_path / "whole")


def test_what_is_repaired_above_begins_there_with_the_same_bits(monkeypatch, tmp_path):
    """Where no pass may start at a layer all of them run whole, also after every stop."""
    states, seen = [], []
    settings = {"worthiest": zoo.N_LAYERS * zoo.N_HEADS, "after": states.append}
    found = label_small(**settings)
    assert found.n_repaired
    rounds = ["labels", *(name for name in states[-1] if name.startswith("repair"))]
    ends = [max(i for i, at in enumerate(states) if name not in at) for name in rounds]
    expected, made = bytes_of(found, tmp_path / "found"), []
    monkeypatch.setattr(
        _Labelling, "_reach_again",
        lambda self, text, again=_Labelling._reach_again: made.append(again(self, text)),
    )  # fmt: skip
    for stop in ends[2::8]:
        again = label_small(**{**settings, "resume": states[stop], "after": seen.append})
        assert bytes_of(again, tmp_path / "again") == expected
    assert made  # what enters upper layers, which the run before knew
    monkeypatch.setattr(Intervention, "_layers_to_start", lambda self, seen: frozenset())
    plain = []
    monkeypatch.setattr(
        _Source, "run", lambda self, needs, run=_Source.run: plain.append(1) or run(self, needs)
    )
    whole = label_small(**settings)
    assert len(plain) == 2  # batches of judged texts; of the others the estimates have made them
    n_idle, n_tried = sum(name.startswith("idle") for name in states[-1]), len(rounds) - 1
    # where both families do one of them is measured as well
    n_either = sum(name.count("(") for name in states[-1] if name.startswith("either"))
    passes = 1 + 2 + 2 * n_tried + 1 + n_tried + 1 + len(whole.assignments) + n_idle + n_either
    assert whole.forwards == pytest.approx(passes)
    for name in ("damage", "rise", "shares", "worth", "idle"):
        assert getattr(whole, name).equal(getattr(found, name))
    assert (whole.labels, whole.replacements) == (found.labels, found.replacements)
    above = sum(name.startswith(f"repair {zoo.N_LAYERS - 1}.") for name in rounds)
    assert above > 1
    assert whole.forwards - found.forwards > above * (zoo.N_LAYERS - 1) / zoo.N_LAYERS


@pytest.mark.parametrize("kept", some_of(["gpt2", "vectors"], "gpt2"), indirect=True)
def test_batches_of_another_size_may_go_on(kept):
    kind, whole, states = kept
    for state in states[len(states) // 2 :: len(states)]:
        again = label_small(kind, resume=state, batch_size=3)
        torch.testing.assert_close(again.damage, whole.damage, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kept", some_of(["gpt2", "vectors"], "gpt2"), indirect=True)
def test_labels_of_another_run_are_refused_by_name(kept):
    kind, _, states = kept
    rows = [row[: 9 - i % 3] for i, row in enumerate(zoo.tokens(11, 9))]
    changes = {
        "inputs": (rows[::-1], "inputs"), "judge": (rows[:4], "n_sequences"),
        "calibration": (rows[:3], "leaves_out"), "seed": (1, "seed"), "draws": (3, "draws"),
        "worthiest": (1, "worthiest"),
    }  # fmt: skip
    if kind == "gpt2":
        changes["metric"] = "nmse", "metric"
    for option, (value, name) in changes.items():
        with pytest.raises(InfoFlowError, match=f"resume is of another run: {name} = "):
            label_small(kind, resume=states[-1], **{option: value})
    for state in (states[1], states[-1]):
        for name in state.keys() - {"identity"}:
            with pytest.raises(InfoFlowError, match=r"resume holds|cannot go on from a state"):
                label_small(kind, resume={**state, name: None})
    with pytest.raises(InfoFlowError, match=r"resume is 3, of type int"):
        label_small(kind, resume=3)


def test_other_means_are_another_run():
    model, states = open_model(zoo.build("gpt2").eval()), []
    first, second = (
        run_probes(model, zoo.tokens(n, 9), [MeanPatternsProbe()], progress=False)[0]
        for n in (3, 4)
    )
    label_small(calibration=first, after=states.append)
    label_small(calibration=first, resume=states[-1], after=lambda now: pytest.fail("anew"))
    with pytest.raises(InfoFlowError, match="resume is of another run: means = "):
        label_small(calibration=second, resume=states[-1])
