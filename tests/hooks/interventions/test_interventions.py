"""Interventions against edits made by hand in plain transformers, sequence by sequence."""

import dataclasses
import inspect
import itertools
import json
from functools import cache

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from infoflow_lens import InfoFlowError, attach, load_any, open_model, probe, run_probes
from infoflow_lens.hooks import (
    HEAD_IDEALS,
    AllHeads,
    Edit,
    EditsOfPass,
    FunctionOfOutput,
    HeadIdeals,
    Intervention,
    InterventionResult,
    LogitDifference,
    MeanPatternsProbe,
    Needs,
    NextTokenLoss,
    Probe,
    edit_head,
    edit_head_output,
    heads_of,
    run,
)
from infoflow_lens.hooks.interventions.ideals import LayerMeans
from tests.conftest import some_of
from tests.reference import families, zoo

EDIT = {}  # (layer, what) -> function, for the attention below


def attention_by_hand(module, query, key, value, attention_mask=None, scaling=None, **kwargs):
    """Eager attention, whose pattern and z may be replaced; it knows nothing of the package."""
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    scores = query @ key.transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)
    if attention_mask is not None:
        scores = scores + attention_mask[..., : key.shape[2]]
    pattern = scores.softmax(-1)
    SEEN.append((pattern, None))
    pattern = EDIT.get((module.layer_idx, "pattern"), lambda p: p)(pattern)
    z = EDIT.get((module.layer_idx, "z"), lambda p: p)(pattern @ value)
    SEEN[-1] = (SEEN[-1][0], z)
    return z.transpose(1, 2).contiguous(), pattern


SEEN = []
AttentionInterface.register("by hand", attention_by_hand)
AttentionMaskInterface.register("by hand", eager_mask)


def run_by_hand(model, tokens, **edits):
    """Logits in float64, patterns and z of a sequence, with edits of (layer, what)."""
    EDIT.clear()
    EDIT.update(edits.get("edits", {}))
    SEEN.clear()
    model.set_attn_implementation("by hand")
    with torch.no_grad():
        logits = model(tokens[None]).logits[0].double()
    EDIT.clear()
    patterns, outputs = zip(*SEEN, strict=True)
    return logits, [p[0].double() for p in patterns], [z[0].double() for z in outputs]


def divergence(logits, plain):
    p, q = plain.log_softmax(-1), logits.log_softmax(-1)
    return float((p.exp() * (p - q)).sum())


def next_token_loss(logits, tokens):
    return float(torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="sum"))


def idealised(ideal, pattern, others, layer, head):
    """One head's pattern [query, key], by loops over queries; `others` are patterns of others."""
    n = len(pattern)
    made = torch.zeros(n, n, dtype=torch.float64)
    for query in range(n):
        row = pattern[query, : query + 1]
        if ideal == "position":
            have = [o[layer][head][query] for o in others if len(o[layer][head]) > query]
            mean = sum(h[: query + 1] for h in have) / len(have) if have else torch.ones(query + 1)
            made[query, : query + 1] = mean / mean.sum()
        elif ideal == "offset":
            weights = torch.zeros(query + 1, dtype=torch.float64)
            for key in range(1, query + 1):
                found = [
                    float(o[layer][head][q, q - (query - key)])
                    for o in others
                    for q in range(len(o[layer][head]))
                    if q - (query - key) > 0
                ]
                weights[key] = sum(found) / max(len(found), 1)
            have = [float(o[layer][head][query, 0]) for o in others if len(o[layer][head]) > query]
            sink = sum(have) / max(len(have), 1)
            if weights.sum() > 0:
                made[query, : query + 1] = weights / weights.sum() * (1 - sink)
            made[query, 0] = 1 - made[query, 1:].sum()
        elif ideal == "gated":
            made[query, 0] = row[0] if query else 1
            if query:
                made[query, 1 + int(row[1:].argmax())] += 1 - row[0]
        elif ideal == "largest":
            made[query, int(row.argmax())] = 1
        elif ideal.startswith("top"):
            best = row.argsort(descending=True)[: int(ideal[4:])]
            made[query, best] = row[best] / row[best].sum()
        else:
            key = {"own": query, "previous": max(query - 1, 0), "sink": 0}.get(ideal)
            made[query, slice(0, query + 1) if key is None else key] = (
                1 if key is not None else 1 / (query + 1)
            )
    return made


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def case(request):
    """A plain model, sequences of different lengths, and what it shows of each."""
    model = zoo.build(request.param).eval()
    tokens = [row[:n] for row, n in zip(zoo.tokens(5, 9), (8, 6, 9, 5, 7), strict=True)]
    runs = [run_by_hand(model, row) for row in tokens]
    return request.param, model, tokens, runs


@pytest.fixture(scope="module")
def measured(case):
    name, _, tokens, _ = case
    model = open_model(zoo.build(name).eval())
    (means,) = run_probes(model, tokens, [MeanPatternsProbe()], progress=False, batch_size=2)
    probe = HeadIdeals(means, HEAD_IDEALS, leaves_out=True)
    (result,) = run_probes(model, tokens, [probe], progress=False, batch_size=2)
    return model, means, result


def test_each_ideal_of_each_head_loses_what_an_edit_by_hand_loses(case, measured):
    _, model, tokens, runs = case
    _, _, result = measured
    assert len(result.edits) == 2 * 4 * len(HEAD_IDEALS)
    for column, name in enumerate(result.edits):
        place, ideal = name.split(" ", 1)
        layer, head = map(int, place.split("."))
        for row, (plain, patterns, outputs) in enumerate(runs[:3]):  # one is the longest of all
            sequence = tokens[row]
            others = [run for i, run in enumerate(runs) if i != row]
            if ideal == "ablated":
                n = len(sequence)
                mean = torch.zeros_like(outputs[layer][head])
                for query in range(n):
                    have = [o[2][layer][head][query] for o in others if len(o[0]) > query]
                    # where no other sequence is as long, all of their positions
                    have = have or [z for o in others for z in o[2][layer][head]]
                    mean[query] = sum(have) / len(have)
                made, what = mean, "z"
            else:
                found = [run[1] for run in others]
                made, what = idealised(ideal, patterns[layer][head], found, layer, head), "pattern"

            def edit(there, made=made, head=head):
                there = there.clone()
                there[0, head] = made.to(there)
                return there

            logits, _, _ = run_by_hand(model, sequence, edits={(layer, what): edit})
            expected = divergence(logits, plain)
            assert float(result.lost[row, column]) == pytest.approx(expected, abs=2e-5), name
            rise = next_token_loss(logits, sequence) - next_token_loss(plain, sequence)
            assert float(result.rise[row, column]) == pytest.approx(rise, abs=1e-4), name


def test_means_are_those_of_the_sequences_that_have_the_query(case, measured):
    _, _, tokens, runs = case
    _, means, _ = measured
    lengths = [len(row) for row in tokens]
    assert means.n.tolist() == [sum(n > q for n in lengths) for q in range(9)]
    for layer in range(2):
        for query in range(9):
            have = [run[1][layer][:, query] for run, n in zip(runs, lengths) if n > query]
            padded = [torch.nn.functional.pad(row, (0, 9 - row.shape[1])) for row in have]
            mean = sum(padded) / len(padded)
            torch.testing.assert_close(means.patterns[layer][:, query], mean, atol=1e-6, rtol=0)
    weights = torch.cat([run[1][1][:, 1:, 0] for run in runs], dim=1)
    torch.testing.assert_close(means.sink[1], weights.mean(dim=1), atol=1e-6, rtol=0)
    outputs = torch.cat([run[2][1] for run in runs], dim=1)  # [head, pos, d_head]
    torch.testing.assert_close(means.mean_outputs()[1], outputs.mean(dim=1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("leaves_out", [False, True])
def test_means_by_offset_of_an_encoder_are_over_the_keys_that_sequences_have(leaves_out):
    tokens = [row[:n] for row, n in zip(zoo.tokens(4, 9), (3, 3, 4, 9), strict=True)]
    model = open_model(zoo.build("bert").eval())
    (means,) = run_probes(model, tokens, [MeanPatternsProbe("patterns")], progress=False)
    every = [run(model, row[None], Needs.of(model, pattern=True)).pattern(1)[0] for row in tokens]
    for left, pattern in enumerate(every):
        n = pattern.shape[-1]
        others = [p for i, p in enumerate(every) if i != left or not leaves_out]
        weight = torch.zeros(4, n, n, dtype=torch.float64)
        for query, key in itertools.product(range(n), range(1, n)):
            found = [p[:, q, key - query + q] for p in others for q in range(p.shape[-1])
                     if 0 < key - query + q < p.shape[-1]]  # fmt: skip
            weight[:, query, key] = sum(found) / max(len(found), 1)
        of_layer = LayerMeans.select(means, 1, leaves_out)
        made = of_layer.offset_mean(pattern[None], range(4), torch.ones(1, 1, n, n, dtype=bool))
        made, expected = (part[..., 1:].nan_to_num() for part in (made[0], weight))
        made, expected = (p / p.sum(dim=-1, keepdim=True).clamp(min=1e-9) for p in (made, expected))
        torch.testing.assert_close(made, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("what", ["patterns", "outputs"])
def test_means_of_one_kind_are_those_of_both(case, measured, what):
    model, both, _ = measured
    (one,) = run_probes(model, case[2], [MeanPatternsProbe(what)], progress=False)
    for kind in ("patterns", "outputs"):
        for mean, same in zip(getattr(one, kind), getattr(both, kind), strict=True):
            if kind == what:
                torch.testing.assert_close(mean, same, atol=1e-6, rtol=0)
            else:
                assert mean.shape == (*same.shape[:2], 0)


def test_many_heads_at_once_lose_what_edits_by_hand_lose(case, measured):
    _, model, tokens, runs = case
    opened, means, _ = measured
    heads = {(0, 1): "gated", (0, 3): "own", (1, 0): "largest", (1, 2): "even"}
    probe = AllHeads(means, {"four": heads, "one": {(1, 2): "even"}})
    (result,) = run_probes(opened, tokens, [probe], progress=False)
    for row, (sequence, (plain, *_)) in enumerate(zip(tokens, runs, strict=True)):

        def edit(there, layer):
            there = there.clone()
            for (at, head), ideal in heads.items():
                if at == layer:
                    made = idealised(ideal, there[0, head].double(), [], layer, head)
                    there[0, head] = made.to(there)
            return there

        edits = {(layer, "pattern"): lambda p, layer=layer: edit(p, layer) for layer in range(2)}
        logits, _, _ = run_by_hand(model, sequence, edits=edits)
        expected = divergence(logits, plain)
        column = result.edits.index("four")
        assert float(result.lost[row, column]) == pytest.approx(expected, abs=2e-5)


class LooksAtFirst(Intervention):
    """Every head looks at the first token alone."""

    def edits(self, plain):
        for layer, head in heads_of(plain):
            yield edit_head(plain, layer, head, to_first)


def to_first(pattern):
    first = torch.zeros_like(pattern)
    first[..., 0] = pattern.sum(dim=-1)
    return first


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_an_edit_of_ones_own_is_the_ideal_of_that_name_however_edits_share_passes(
    case, measured, rows
):
    _, _, tokens, _ = case
    model, _, known = measured
    (result,) = run_probes(model, tokens, [LooksAtFirst(rows=rows)], progress=False)
    for column, name in enumerate(result.edits):
        same = known.edits.index(name.replace("to_first", "sink"))
        torch.testing.assert_close(
            result.lost[:, column], known.lost[:, same], atol=1e-5, rtol=1e-4
        )
    # the plain pass, one for each head of layer 0, and half of one for each of layer 1
    assert result.forwards == pytest.approx(1 + 4 + 4 / 2)


def test_readouts_change_by_what_they_change_in_plain_transformers(case, measured):
    _, model, tokens, _ = case
    opened = measured[0]
    answer = LogitDifference(3, 5)
    probe = LooksAtFirst(readout=answer)
    (result,) = run_probes(opened, tokens, [probe], progress=False)
    assert result.metric == str(answer)
    for row, sequence in enumerate(tokens):
        values = []
        for edits in (
            {},
            {(0, "pattern"): lambda p: torch.stack([to_first(p[0, 0]), *p[0, 1:]])[None]},
        ):
            logits = run_by_hand(model, sequence, edits=edits)[0][-1]
            values.append(float(logits[3] - logits[5]))
        assert float(result.lost[row, 0]) == pytest.approx(values[1] - values[0], abs=1e-4)


def first_head_looks_at_first(plain):
    yield edit_head(plain, 0, 0, to_first)


@pytest.mark.parametrize("last", [None, 2])
def test_the_loss_of_next_tokens_is_that_of_plain_transformers(case, measured, last):
    _, model, tokens, _ = case
    probe = EditsOfPass(first_head_looks_at_first, readout=NextTokenLoss(last=last))
    (result,) = run_probes(measured[0], tokens, [probe], progress=False)
    (edited,) = result.values().values()
    assert result.n_tokens.tolist() == [len(row) - 1 if last is None else last for row in tokens]
    for row, sequence in enumerate(tokens):
        for found, edits in (
            (result.bare, {}),
            (edited, {(0, "pattern"): lambda p: torch.stack([to_first(p[0, 0]), *p[0, 1:]])[None]}),
        ):
            logits = run_by_hand(model, sequence, edits=edits)[0]
            losses = torch.nn.functional.cross_entropy(logits[:-1], sequence[1:], reduction="none")[
                -(last or 0) :
            ]
            assert float(found[row]) == pytest.approx(float(losses.sum()), abs=1e-4)


def test_a_row_that_attends_to_nothing_counts_in_means_by_offset():
    """As of ReLU attention: the text that is left out was left in the counts of that row."""
    every = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(0)).tril().double()
    every[0, 0, 3] = 0
    n, visible = torch.full((4,), 3.0), torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    means = LayerMeans(every.mean(dim=0), torch.zeros(4, 1, 2), n, leaves_out=True)
    for left in range(3):
        others = [pattern[0] for i, pattern in enumerate(every) if i != left]
        weight = torch.zeros(4, 4, dtype=torch.float64)
        for query, key in itertools.product(range(4), range(1, 4)):
            found = [p[q, q - query + key] for p in others for q in range(4)
                     if 0 < q - query + key <= q]  # fmt: skip
            weight[query, key] = sum(found) / len(found) if key <= query else 0
        mine = every[left : left + 1]
        made = means.offset_mean(mine, [0], visible)[0, 0]
        sink = torch.stack(others).mean(dim=0)[:, 0]
        rest = (mine[0, 0].sum(dim=-1) - sink).clamp(min=0) * (weight.sum(dim=-1) > 0)
        expected = weight * (rest / weight.sum(dim=-1).clamp(min=1e-9))[:, None]
        torch.testing.assert_close(made[:, 1:], expected[:, 1:], atol=1e-6, rtol=0)


@pytest.mark.parametrize("lengths", [(5, 9, 4), (9, 9, 9)])
def test_classifiers_read_the_end_of_each_text_of_a_batch(lengths):
    """Passes that begin at a layer read the padding behind shorter texts, as of plain passes."""
    config = zoo.build("llama").config
    config.num_labels, config.pad_token_id = 3, 7
    torch.manual_seed(0)
    plain = transformers.LlamaForSequenceClassification(config).eval()
    with torch.no_grad():
        for weight in plain.parameters():
            weight.mul_(1 + 3 * (weight.ndim > 1))
    tokens = [row[:n] for row, n in zip(zoo.tokens(3, 9), lengths, strict=True)]
    tokens[0][0] = tokens[1][-1] = 7  # a pad token of the text's own, at its end, ends it before
    model, first = open_model(plain), FunctionOfOutput(lambda output: output[:, 0])
    alone, together = (
        run_probes(model, tokens, [LooksAtFirst(readout=first)], progress=False, batch_size=n)[0]
        for n in (1, 3)
    )
    assert alone.lost.abs().max() > 1e-2
    torch.testing.assert_close(together.lost, alone.lost, atol=1e-5, rtol=0)


def test_next_tokens_need_positions_that_have_one():
    model = open_model(zoo.build("llama").eval())
    for read, words in (((-1,), "expected one with a next token"), ((5,), "-6 to -2 or 0 to 4")):
        probe = EditsOfPass(first_head_looks_at_first, readout=NextTokenLoss(read=read))
        with pytest.raises(InfoFlowError, match=words):
            run_probes(model, zoo.tokens(2, 6), [probe], progress=False)


def test_workers_may_share_sequences_and_edits(case, measured):
    """The table is filled: what several have measured of any sequences and edits becomes one."""
    _, means, whole = measured
    tokens, model = case[2], measured[0]

    def measure(rows, heads, first):
        probe = HeadIdeals(means, HEAD_IDEALS, heads=heads, leaves_out=True)
        run_probes(model, tokens[rows], [probe], progress=False, first_index=first)
        return probe

    everything = tuple((i, h) for i in range(2) for h in range(4))
    one, other = measure(slice(0, 2), everything, 0), measure(slice(2, 5), everything, 2)
    kept = Probe.state_dict(other)
    again = HeadIdeals(means, HEAD_IDEALS, heads=everything, leaves_out=True)
    again.load_state_dict(kept)
    merged = again.merge(one).result()  # of two that have measured, by one that has not
    assert (merged.metric, merged.per_row) == (whole.metric, whole.per_row)
    torch.testing.assert_close(merged.damage(), whole.damage(), atol=1e-6, rtol=1e-5)
    assert merged.sequences.tolist() == [0, 1, 2, 3, 4]
    assert merged.edits == whole.edits
    torch.testing.assert_close(merged.lost, whole.lost, atol=1e-6, rtol=1e-5)
    from infoflow_lens.hooks.interventions.probe import fill_table

    parts = [measure(slice(0, 3), ((0, 1),), 0), measure(slice(2, 5), ((1, 3),), 2)]
    table = fill_table(parts[0].table, parts[1].table)
    assert table.lost.isnan().sum(dim=1).tolist() == [12, 12, 0, 12, 12]
    assert torch.equal(table.lost[2, :12], parts[0].table.lost[2])


def test_damage_and_its_error_are_means_over_rows():
    lost = torch.tensor([[1.0, 4.0], [3.0, torch.nan], [8.0, 2.0]], dtype=torch.float64)
    result = InterventionResult(
        metric="kl", edits=("a", "b"), sequences=torch.arange(3), lost=lost,
        rise=torch.full_like(lost, torch.nan), bare=torch.full((3,), torch.nan),
        n_rows=torch.tensor([2, 2, 4]),
        n_tokens=torch.zeros(3, dtype=torch.int64), per_row=1.0, forwards=1.0,
        record=open_record(),
    )  # fmt: skip
    assert result.damage().tolist() == pytest.approx([12 / 8, 6 / 6])
    left = torch.tensor([11 / 6, 9 / 6, 4 / 4])
    expected = float(((left - left.mean()).square().sum() * 2 / 3).sqrt())
    assert float(result.errors()[0]) == pytest.approx(expected)
    assert result.to_frame()["n_sequences"].tolist() == [3, 2]


def open_record():
    from infoflow_lens.foundation.record import RunRecord

    return RunRecord.from_model(zoo.build("gpt2"), {"probe": "test"})


llama = cache(lambda: open_model(zoo.build("llama")))  # which no refused edit changes


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda plain: [edit_head(plain, 0, 0, to_first)] * 2, "'0.0 to_first' twice"),
        (lambda plain: [to_first], "gives a function: expected Edit"),
        (lambda plain: None, "gives a NoneType: expected Edit"),
        (lambda plain: edit_head(plain, 0, 0, to_first), "gives a Edit: expected Edit objects in"),
        (lambda plain: [edit_head(plain, 0, 9, to_first)], "there is no head 9 in layer 0"),
        (lambda plain: [edit_head_output(plain, 0, -1, to_first)], "no head -1 in layer 0"),
        (lambda plain: [edit_head(plain, 0, 1.0, to_first)], "head is 1.0: expected an integer"),
        (lambda plain: [edit_head(plain, "0", 1, to_first)], "layer is '0': expected an integer"),
        (lambda plain: [], "Own.edits gives no edit: expected at least one for every pass"),
        (lambda plain: [edit_head(plain, 0, 0, lambda p: None, "x")], "'x' gives NoneType"),
        (lambda plain: [edit_head(plain, 0, 0, lambda p: p[0], "x")], r"'x' gives \(6, 6\)"),
        (lambda plain: [edit_head(plain, 0, 0, lambda p: p * torch.nan)], "makes the output NaN"),
        (lambda plain: [Edit("x", [to_first])], "expected a name, and functions by"),
        (lambda plain: [Edit(3, {})], "expected a name, and functions by"),
        (lambda plain: [Edit("x", {"blocks.9.hook_resid_pre": to_first})], "blocks.9.hook_resid"),
        (
            lambda plain: [Edit("x", {"blocks.0.attn.hook_pattern": lambda p: p[..., :2]})],
            r"the edit 'x' gives \(2, 4, 6, 2\)",
        ),
        (
            lambda plain: [Edit("x", {"hook_embed": lambda value, hook: value})],
            r"'x' at hook_embed takes \(value, hook\) .*a function of the activation alone",
        ),
    ],
)
def test_edits_that_cannot_be_made_are_refused(make, words):
    class Own(Intervention):
        def edits(self, plain):
            return make(plain)

    with pytest.raises(InfoFlowError, match=words):
        run_probes(llama(), zoo.tokens(2, 6), [Own()], progress=False)


def test_a_function_that_makes_no_edit_is_refused():
    model = open_model(zoo.build("llama"))
    with pytest.raises(InfoFlowError, match="gives no edit: expected at least one"):
        run_probes(model, zoo.tokens(2, 6), [EditsOfPass(lambda plain: [])], progress=False)


def test_means_that_do_not_fit_are_refused():
    model, tokens = open_model(zoo.build("llama")), zoo.tokens(3, 6)
    (short,) = run_probes(model, tokens[:, :4], [MeanPatternsProbe()], progress=False)
    cases = [
        (HeadIdeals(short), "means are of at most 4 positions, and a sequence has 6"),
        (HeadIdeals(), "'ablated', 'position', 'offset' need mean patterns, and none are given"),
        (HeadIdeals(ideals=("own",), heads=((0, 9),)), "there is no head 9 in layer 0"),
        (AllHeads(None, {"x": {(3, 0): "own"}}), "there is no head 0 in layer 3"),
    ]
    for asked, words in cases:
        with pytest.raises(InfoFlowError, match=words):
            run_probes(model, tokens, [asked], progress=False)


def test_outputs_of_bridges_have_their_heads_side_by_side(tmp_path):
    """A bridge and the opened model are edited alike."""
    bridge = zoo.bridge("gpt2")
    tokens = zoo.tokens(3, 6)

    class Zeroed(Intervention):
        def edits(self, plain):
            for layer, head in heads_of(plain):
                yield edit_head_output(plain, layer, head, torch.zeros_like)

    found = [
        run_probes(model, tokens, [Zeroed()], progress=False)[0]
        for model in (bridge, open_model(zoo.build("gpt2")))
    ]
    torch.testing.assert_close(found[0].lost, found[1].lost, atol=1e-5, rtol=1e-4)
    assert dataclasses.is_dataclass(found[0])


@pytest.mark.parametrize("jobs", some_of([1, 2], 1))
def test_it_runs_in_shards_and_workers_as_every_probe_does(jobs, tmp_path):
    source = inspect.getsource(json)
    texts = [source[i * 300 : i * 300 + 120] for i in range(5)]
    asked = HeadIdeals(ideals=("gated",), metric="nmse")  # what a row is worth is known at the end
    run = probe(
        "stdlib-2l", texts, probes=[asked], shard=2, jobs=jobs, max_length=24,
        out=tmp_path / "run", progress=False,
    )  # fmt: skip
    (alone,) = run_probes(
        load_any("stdlib-2l").model, texts, [asked], max_length=24, progress=False
    )
    (found,) = run.found.values()
    assert found.edits == alone.edits
    assert found.sequences.tolist() == [0, 1, 2, 3, 4]
    torch.testing.assert_close(found.lost, alone.lost, atol=1e-6, rtol=1e-5)
    assert found.metric == alone.metric == "nmse"
    assert found.per_row == pytest.approx(alone.per_row)
    assert found.forwards == pytest.approx(alone.forwards)


def test_hooks_of_the_users_see_nothing_and_what_they_change_is_refused_or_takes_part():
    model, tokens = open_model(zoo.build("llama").eval()), zoo.tokens(2, 6)
    calls = []
    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_z", lambda z, hook: calls.append(1))]):
        run_probes(model, tokens, [HeadIdeals(ideals=("own",))], progress=False)
    assert len(calls) == 1  # the pass that was made, none of the edited ones

    def halve(z, hook):
        return z / 2

    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_z", halve)]):
        with pytest.raises(InfoFlowError, match="through_hooks=True"):
            run_probes(model, tokens, [HeadIdeals(ideals=("own",))], progress=False)
        probe = HeadIdeals(ideals=("own",), through_hooks=True)
        (found,) = run_probes(model, tokens, [probe], progress=False)
    plain = zoo.build("llama").eval()
    head = 1
    for row in range(2):
        outputs = []
        for edit in (lambda p: p, lambda p: own_only(p, head)):
            edits = {(0, "z"): lambda z: z / 2, (0, "pattern"): edit}
            outputs.append(run_by_hand(plain, tokens[row], edits=edits)[0])
        expected = divergence(outputs[1], outputs[0])
        assert float(found.lost[row, found.edits.index("0.1 own")]) == pytest.approx(
            expected, abs=2e-5
        )


def own_only(pattern, head):
    pattern = pattern.clone()
    pattern[:, head] = torch.eye(pattern.shape[-1])
    return pattern


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_an_edit_before_the_blocks_acts(name):
    """Passes began behind it, and it did nothing."""
    model, tokens = open_model(zoo.build(name).eval()), zoo.tokens(3, 6)

    class Halved(Intervention):
        def edits(self, plain):
            yield Edit("alone", {"hook_embed": lambda a: a / 2})
            later = Edit("later", {"blocks.1.attn.hook_z": lambda z: z * 0})
            yield Edit.join("both", [Edit("first", {"hook_embed": lambda a: a / 2}), later])

    (found,) = run_probes(model, tokens, [Halved()], progress=False)
    plain = zoo.build(name).eval()
    embedding = plain.get_input_embeddings()
    before = [run_by_hand(plain, row)[0] for row in tokens]
    handle = embedding.register_forward_hook(lambda module, args, out: out / 2)
    cut = {(1, "z"): lambda z: z * 0}
    for column, edits in ((found.edits.index("alone"), {}), (found.edits.index("both"), cut)):
        for row in range(3):
            after = run_by_hand(plain, tokens[row], edits=edits)[0]
            expected = divergence(after, before[row])
            assert expected > 0.01
            assert float(found.lost[row, column]) == pytest.approx(expected, abs=2e-5)
    handle.remove()


def silence(plain):
    yield edit_head_output(plain, 0, 1, torch.zeros_like, "silent")


def give_a_cache(model, ids):
    """Give the keys of the first tokens, and the other ids."""
    with torch.no_grad():
        cache = model(ids[:, :4]).past_key_values
    return {"input_ids": ids[:, 4:], "past_key_values": cache}


def drop_out(model, ids):
    """Give ids, to a model that drops some of what it computes."""
    model.train()
    return {"input_ids": ids}


def give_a_second_text(model, ids):
    """Give other ids to the decoder, of another length."""
    return {"input_ids": ids, "decoder_input_ids": ids[:, 2:]}


@pytest.mark.parametrize(
    ("kind", "make_call"),
    [("gpt2", give_a_cache), ("gpt2", drop_out), ("bart", give_a_second_text)],
)
def test_a_call_that_our_own_pass_does_not_repeat_is_refused(kind, make_call):
    """What a call gave beside ids was left out, and edits were measured on another pass."""
    auto = ("AutoModelForSeq2SeqLM",) if kind == "bart" else None
    model = families.build(kind, "sdpa", auto=auto)
    named = open_model(model, stack="encoder" if kind == "bart" else None)
    arguments = make_call(model, families.tokens())
    refusal = pytest.raises(InfoFlowError, match="repeating the forward pass changes the output")
    with refusal, attach(named, EditsOfPass(silence)):
        named(**arguments)


@pytest.mark.parametrize("side", ["none", "right"])
def test_embeddings_in_the_place_of_ids_lose_what_their_ids_lose(side):
    """They were refused as no ids, with the remedy to do what was done."""
    model, ids = families.build("gpt2", "sdpa"), families.tokens()
    mask = families.masks(ids)[side]
    lost = []
    for given in ({"input_ids": ids}, {"inputs_embeds": model.get_input_embeddings()(ids)}):
        with attach(model, EditsOfPass(silence)) as probes:
            model(**given, **mask)
        lost.append(probes.results()[0].damage())
    assert lost[0] > 1e-3
    assert lost[1].allclose(lost[0])


def test_embeddings_have_no_next_token():
    model, ids = families.build("gpt2", "sdpa"), families.tokens()
    probe = EditsOfPass(silence, readout=NextTokenLoss())
    with pytest.raises(InfoFlowError, match="inputs_embeds do not say"), attach(model, probe):
        model(inputs_embeds=model.get_input_embeddings()(ids))


def test_blocks_with_a_forward_of_their_own_are_left_out_too():
    """As accelerate puts one on each module."""
    model, tokens = zoo.build("llama").eval(), zoo.tokens(2, 6)
    (expected,) = run_probes(
        open_model(model), tokens, [HeadIdeals(ideals=("own",))], progress=False
    )
    for block in model.model.layers:
        forward = block.forward
        block.forward = lambda *args, forward=forward, **kwargs: forward(*args, **kwargs)
    own = [block.forward for block in model.model.layers]
    (found,) = run_probes(open_model(model), tokens, [HeadIdeals(ideals=("own",))], progress=False)
    torch.testing.assert_close(found.lost, expected.lost)
    assert [block.forward for block in model.model.layers] == own


def test_what_runs_whole_is_counted_whole():
    """BLOOM's first block gives a bias to all others, so that none may be left out."""
    model, tokens = open_model(zoo.build("bloom").eval()), zoo.tokens(2, 6)
    (found,) = run_probes(model, tokens, [HeadIdeals(ideals=("own",))], progress=False)
    assert found.forwards == 1 + len(found.edits)


def test_states_of_a_model_without_a_head_predict_no_token():
    """Even where a state is as wide as the vocabulary is large."""
    config = transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=20)
    model = open_model(transformers.GPT2Model(config).eval())
    (found,) = run_probes(model, zoo.tokens(2, 6) % 20, [LooksAtFirst()], progress=False)
    assert found.metric == "nmse"
    assert found.rise.isnan().all()
    with pytest.raises(InfoFlowError, match="without a head, whose output is states"):
        run_probes(
            model, zoo.tokens(2, 6) % 20, [LooksAtFirst(readout=LogitDifference(3, 5))],
            progress=False,
        )  # fmt: skip


def test_the_same_numbers_of_sequences_are_refused_by_a_merge():
    model = open_model(zoo.build("llama").eval())
    one, other = LooksAtFirst(), LooksAtFirst()
    run_probes(model, zoo.tokens(2, 6), [one], progress=False)
    run_probes(model, zoo.tokens(2, 6, seed=5), [other], progress=False)
    with pytest.raises(InfoFlowError, match="numbered from first_index="):
        one.merge(other)


def test_a_metric_beside_a_readout_is_refused():
    with pytest.raises(InfoFlowError, match="are given with a readout"):
        LooksAtFirst(readout=LogitDifference(3, 5), metric="kl")


def test_a_function_as_readout_is_told_its_wrapper():
    with pytest.raises(InfoFlowError, match=r"FunctionOfOutput\(f\).*NextTokenLoss.*None"):
        LooksAtFirst(readout=len)


@pytest.mark.parametrize("answer", [-1, 10_000])
def test_answers_that_the_model_does_not_have_are_refused(answer):
    model = open_model(zoo.build("llama").eval())
    with pytest.raises(InfoFlowError, match=r"expected (an id from 0 on|ids from 0 to)"):
        run_probes(
            model, zoo.tokens(2, 6), [LooksAtFirst(readout=LogitDifference(answer, 5))],
            progress=False,
        )  # fmt: skip
