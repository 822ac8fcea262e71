"""Many heads replaced at once, and keys taken out: against plain passes, and on a known circuit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from infoflow_lens import InfoFlowError, load_any
from infoflow_lens.hooks import measure_mechanisms
from infoflow_lens.hooks.interventions.patterns import ideal_pattern, substituted
from infoflow_lens.hooks.mechanisms.budgets import measure_top_k
from infoflow_lens.hooks.mechanisms.measure import (
    MEAN,
    MECHANISMS,
    RANDOM,
    assign_ideals,
    choose_least_damage,
    measure_sufficiency,
    replace_greedily,
)
from tests.conftest import make_token_model, redraw_weights
from tests.reference import zoo
from tests.reference.induction import induction_model, repeated_segments

N_VOCAB, N_CTX = 11, 9


@pytest.fixture(scope="module")
def model():
    made = make_token_model(n_layers=2, n_heads=3, d_head=4, d_model=12, n_ctx=12, d_vocab=20)
    return redraw_weights(made, 5, 0.6)


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(20, (12, 10), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def mechanisms(model, tokens):
    return measure_mechanisms(model, tokens[:6], progress=False)


@pytest.fixture(scope="module")
def found(model, tokens, mechanisms):
    return measure_sufficiency(model, tokens[6:], mechanisms, draws=2, progress=False)


def plain_loss(model, tokens, hooks=()):
    """Summed next-token loss of each sequence."""
    with torch.no_grad():
        logits = model.run_with_hooks(tokens, fwd_hooks=list(hooks))
    loss = cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    return loss.double().sum(dim=1)


def test_the_loss_of_the_model_as_it_is(model, tokens, found):
    torch.testing.assert_close(found.bare, plain_loss(model, tokens[6:]), rtol=1e-5, atol=1e-5)
    assert found.n_tokens.tolist() == [9] * 6
    assert found.loss == pytest.approx(float(found.bare.sum()) / 54)
    (axes,) = found.plot().axes
    labels = [line.get_label() for line in axes.lines]
    assert len(labels) == len(found.assignments)
    # the draws of random mechanisms share an entry of the legend
    kinds = [RANDOM if name.startswith(RANDOM) else name for name in found.assignments]
    assert set(labels) == set(kinds)
    curves = [line for line in axes.lines if len(line.get_ydata()) > 1]
    assert len(curves) == 4
    assert all(line.get_ydata()[0] == found.loss for line in curves)


def test_heads_are_replaced_in_the_order_of_their_damage(mechanisms, found):
    mine = assign_ideals(mechanisms)
    damages = [damage for _, damage in mine.values()]
    assert damages == sorted(damages)
    assert [tuple(head) for head in found.heads.tolist()] == list(mine)
    assert found.n_replaced == (2, 3, 4, 6)


def test_each_point_is_a_pass_with_those_heads_replaced(model, tokens, mechanisms, found):
    for column, n in enumerate(found.n_replaced):
        some = {head: ideal for head, (ideal, _) in list(assign_ideals(mechanisms).items())[:n]}
        with substituted(model, some, mechanisms.mean_patterns, mechanisms.k):
            expected = plain_loss(model, tokens[6:])
        torch.testing.assert_close(found.losses[0, column], expected, rtol=1e-5, atol=1e-5)


def test_mean_ablation_by_hand(model, tokens, found):
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens[6:])
    hooks = []
    for layer in range(2):
        name = f"blocks.{layer}.attn.hook_z"
        mean = cache[name].mean(dim=(0, 1))
        hooks.append((name, lambda z, hook, mean=mean: mean.expand_as(z)))
    row = found.assignments.index(MEAN)
    expected = plain_loss(model, tokens[6:], hooks)
    torch.testing.assert_close(found.losses[row, -1], expected, rtol=1e-4, atol=1e-4)


def test_random_mechanisms_are_the_same_ones_dealt_anew(model, tokens, mechanisms, found):
    assert found.assignments[:4] == (MECHANISMS, MEAN, f"{RANDOM} 0", f"{RANDOM} 1")
    again = measure_sufficiency(model, tokens[6:], mechanisms, draws=2, progress=False)
    same(again.losses, found.losses)
    other = measure_sufficiency(model, tokens[6:], mechanisms, draws=2, seed=1, progress=False)
    assert other.losses[:2].equal(found.losses[:2])
    if len(set(found.ideals)) > 1:
        assert not other.losses[2:4].equal(found.losses[2:4])


def same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_one_ideal_for_every_head_by_hand(model, tokens, mechanisms, found):
    """Each with all heads replaced alone; the mean patterns are those of other sequences."""

    def keep(pattern, hook):
        order = pattern.argsort(dim=-1, descending=True, stable=True)
        kept = torch.zeros_like(pattern).scatter_(-1, order[..., :k], 1.0) * pattern
        return kept / kept.sum(dim=-1, keepdim=True)

    def hooks(edit):
        return [(f"blocks.{layer}.attn.hook_pattern", edit) for layer in range(2)]

    rows = dict(zip(found.assignments, found.losses, strict=True))
    for k in (1, 2, 4, 8):
        expected = plain_loss(model, tokens[6:], hooks(keep))
        torch.testing.assert_close(rows[f"every head top {k}"][-1], expected, rtol=1e-5, atol=1e-4)
    evenly = torch.ones(10, 10).tril() / torch.arange(1, 11)[:, None]
    _, cache = model.run_with_cache(tokens[:6])
    means = [cache["pattern", layer].mean(dim=0) for layer in range(2)]
    for name, edit in {
        "global": lambda pattern, hook: evenly.expand_as(pattern),
        "own_position": lambda pattern, hook: torch.eye(10).expand_as(pattern),
        "specific_position": lambda pattern, hook: means[hook.layer()].expand_as(pattern),
    }.items():
        expected = plain_loss(model, tokens[6:], hooks(edit))
        torch.testing.assert_close(rows[f"every head {name}"][-1], expected, rtol=1e-5, atol=1e-4)
        assert rows[f"every head {name}"][:-1].isnan().all()
    torch.testing.assert_close(rows["every head top 16"][-1], found.bare, rtol=1e-6, atol=1e-5)
    frame = found.to_frame()
    assert not frame.isna().any().any()
    assert (frame["assignment"] == "every head top 2").sum() == 1


def test_other_assignments_and_heads_that_they_leave_alone(model, tokens, mechanisms):
    given = {"one": {(1, 2): "global"}, "none": {}}
    found = measure_sufficiency(
        model, tokens[6:], mechanisms, draws=0, ks=(), others=given, progress=False
    )
    rows = dict(zip(found.assignments, found.losses[:, -1], strict=True))
    with substituted(model, given["one"]):
        expected = plain_loss(model, tokens[6:])
    torch.testing.assert_close(rows["one"], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows["none"], found.bare, rtol=1e-6, atol=1e-6)
    with pytest.raises(InfoFlowError, match="expected other names"):
        measure_sufficiency(model, tokens, mechanisms, others={MEAN: {}}, progress=False)


def test_intervals_of_shares_and_leads_resample_sequences_together(found):
    """Against a plain bootstrap of our own, with another generator."""
    rows = dict(zip(found.assignments, (found.losses[:, -1] - found.bare).numpy(), strict=True))
    own, mean = rows[MECHANISMS], rows[MEAN]
    generator = np.random.default_rng(0)
    drawn = generator.integers(6, size=(20000, 6))
    share, lead = found.share(), found.lead(over=MEAN)
    assert share.value == pytest.approx(own.sum() / mean.sum())
    assert lead.value == pytest.approx((mean - own).sum() / 54)
    differences = (mean - own)[drawn].sum(axis=1) / 54
    low, high = np.quantile(differences, [0.025, 0.975])
    assert lead.low == pytest.approx(low, abs=0.1 * (high - low))
    assert lead.high == pytest.approx(high, abs=0.1 * (high - low))
    assert share.low < share.value < share.high
    assert found.share(of=MECHANISMS) == (1, 1, 1)
    assert found.lead(over=MECHANISMS) == (0, 0, 0)
    one = {name: getattr(found, name)[..., :1] for name in ("losses", "bare", "n_tokens")}
    alone = replace(found, **one).share()
    assert alone.value == pytest.approx(own[0] / mean[0])
    assert np.isnan([alone.low, alone.high]).all()  # it had the width 0


def test_a_joint_replacement_takes_the_ideal_that_is_best_beside_those_taken(model, tokens):
    mechanisms = measure_mechanisms(model, tokens[:6], progress=False)
    tried = ("global", "specific_position", "max_position")
    joint = replace_greedily(
        model, tokens[6:], mechanisms, budget=1e9, ideals=tried, progress=False
    )
    assert joint.share == 1

    def damage(heads):
        with torch.no_grad():
            before = model(tokens[6:]).log_softmax(-1)
            with substituted(model, heads, mechanisms.mean_patterns):
                after = model(tokens[6:]).log_softmax(-1)
        return float((before.exp() * (before - after)).sum(-1).mean())

    taken = {}
    for head, chosen in joint.heads.items():
        each = {ideal: damage({**taken, head: ideal}) for ideal in tried}
        assert min(each, key=each.get) == chosen
        taken[head] = chosen
    assert joint.damage == pytest.approx(damage(joint.heads), rel=1e-4)
    least = choose_least_damage(mechanisms, tried)
    for (layer, head), ideal in least.items():
        row = mechanisms.damage[layer][head]
        places = [mechanisms.ideals.index(one) for one in tried]
        assert float(row[places].min()) == float(row[mechanisms.ideals.index(ideal)])


def test_the_error_is_that_of_a_mean_over_sequences(found):
    apart = (found.losses[0, -1] - found.bare) / 9  # of sequences of one length
    assert float(found.errors()[0, -1]) == pytest.approx(float(apart.std()) / 6**0.5)


def test_it_goes_on_where_it_stopped(model, tokens, mechanisms):
    kept, ran = [], []
    settings = {"draws": 2, "batch_size": 2, "progress": False}
    whole = measure_sufficiency(model, tokens[6:], mechanisms, **settings, after=kept.append)
    assert len(kept) == 3
    resumed = measure_sufficiency(
        model, tokens[6:], mechanisms, **settings, resume=kept[0], after=ran.append
    )
    same(resumed.losses, whole.losses)
    assert len(ran) == 2


def test_longer_sequences_and_other_models_are_refused(model, tokens, mechanisms):
    longer = torch.cat([tokens, tokens[:, :1]], dim=1)
    with pytest.raises(InfoFlowError, match="at most 10 positions"):
        measure_sufficiency(model, longer, mechanisms, progress=False)
    other = make_token_model(n_layers=2, n_heads=3, d_head=4, d_model=12, n_ctx=12, d_vocab=20)
    with pytest.raises(InfoFlowError, match="other weights"):
        measure_sufficiency(other, tokens, mechanisms, progress=False)


def test_a_circuit_of_mechanisms_loses_nothing_and_without_heads_all():
    model, (tokens, _) = induction_model(N_VOCAB, N_CTX), repeated_segments(N_VOCAB, 200)
    chosen = measure_mechanisms(model, tokens[:100], read=(-1, -2, -3), progress=False)
    found = measure_sufficiency(model, tokens[100:], chosen, draws=12, last=2, progress=False)
    excess = dict(zip(found.assignments, found.excess()[:, -1].tolist(), strict=True))
    assert sorted(found.ideals) == ["max_position", "specific_position"]
    assert found.loss < 0.01
    assert abs(excess[MECHANISMS]) < 0.01
    assert excess[MEAN] > 1
    swapped = [v for k, v in excess.items() if k.startswith(RANDOM)]
    assert max(swapped) > 0.3  # the two dealt the other way round


# Top k


@pytest.fixture(scope="module")
def keys(model, tokens):
    return measure_top_k(model, tokens, control=True, progress=False)


def test_a_small_tolerance_is_said_as_it_is(keys):
    """It was 0%."""
    *layers, together = keys.least()
    (said,) = replace(keys, tolerance=0.001).sentences()
    assert "within 0.1%, by layer: " in said
    (said,) = keys.sentences()
    assert said.endswith(
        f"within 1%, by layer: {' '.join(map(str, layers))}; all layers at once: {together} (of 10)"
    )


@pytest.mark.parametrize("k", [10, 9])  # the last row, of 10 keys, predicts nothing
def test_all_keys_are_the_model_itself(model, tokens, k):
    found = measure_top_k(model, tokens, ks=(k,), control=True, progress=False)
    assert [bar.get_height() for bar in found.plot().axes[0].patches] == list(found.least())
    torch.testing.assert_close(found.rise(), torch.zeros(2, 3, 1).double(), rtol=0, atol=1e-6)


def test_the_largest_keys_by_hand(model, tokens, keys):
    def keep(pattern, hook):
        order = pattern.argsort(dim=-1, descending=True, stable=True)
        kept = torch.zeros_like(pattern).scatter_(-1, order[..., :2], 1.0) * pattern
        return kept / kept.sum(dim=-1, keepdim=True)

    expected = plain_loss(model, tokens, [("blocks.1.attn.hook_pattern", keep)])
    found = keys.losses[0, 1, keys.ks.index(2)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_random_keys_do_not_depend_on_the_default_number_type(model, tokens, keys):
    torch.set_default_dtype(torch.float64)
    try:
        other = measure_top_k(model, tokens, control=True, progress=False)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(other.losses, keys.losses, rtol=1e-5, atol=1e-5)


def test_random_keys_of_a_text_do_not_depend_on_those_beside_it(model, tokens):
    """They were drawn by the width of the batch: 4.9 nats apart; and a run went on with others."""
    texts = [row[:n] for row, n in zip(tokens, (10, 4, 7, 10, 3, 6), strict=False)]
    asked = {"ks": (1, 2), "control": True, "progress": False}
    kept = []
    whole = measure_top_k(model, texts, **asked, after=kept.append)
    for batch_size in (1, 3):
        again = measure_top_k(model, texts, **asked, batch_size=batch_size, after=kept.append)
        torch.testing.assert_close(again.losses, whole.losses, rtol=0, atol=1e-4)
    resumed = measure_top_k(model, texts, **asked, resume=kept[1])
    torch.testing.assert_close(resumed.losses, whole.losses, rtol=0, atol=1e-4)
    alone = measure_top_k(model, texts[:1], **asked)
    torch.testing.assert_close(alone.losses[..., 0], whole.losses[..., 0], rtol=0, atol=1e-4)


def test_a_table_has_what_was_looked_at(model, tokens, keys):
    found = measure_top_k(model, tokens, search=True, progress=False)
    for result in (found, keys):
        frame = result.to_frame().set_index(["kept", "layer", "k"])
        assert len(frame) == int((~result.losses[..., 0].isnan()).sum())
        for (kept, layer, k), row in frame.iterrows():
            place = 2 if layer == "all" else int(layer)
            sums = result.losses[result.kept.index(kept), place, result.ks.index(k)]
            assert row["loss"] == pytest.approx(float(sums.sum()) / 108)
            assert row["rise"] == pytest.approx(float(sums.sum() / result.bare.sum()) - 1)


NOT_LOOKED = float("nan")


@pytest.mark.parametrize(
    ("rises", "least"),
    [((0.05, 0.05, 0.05), 1), ((0.5, 0.05, 0.05), 2), ((0.05, 0.5, 0.05), 4), ((0, 0, 0.5), 10),
     ((NOT_LOOKED, 0.5, 0.05), 4), ((0.5, NOT_LOOKED, 0.05), 4), ((NOT_LOOKED, 0.05, 0), 2)],
)  # fmt: skip
def test_the_least_k_is_one_from_which_on_all_are_enough(keys, rises, least):
    losses = keys.bare * (1 + torch.tensor(rises, dtype=torch.float64)[:, None])
    found = replace(
        keys, ks=(1, 2, 4), tolerance=0.1, kept=("largest",), losses=losses.expand(1, 3, -1, -1)
    )
    assert found.least() == (least,) * 3


def test_no_more_keys_are_needed_than_there_are(keys):
    """It said 50 of 10."""
    found = replace(keys, ks=(50,), losses=keys.bare.expand(1, 3, 1, -1), kept=("largest",))
    assert found.least() == (10,) * 3
    assert found.sentences()[0].endswith("by layer: 10 10; all layers at once: 10 (of 10)")


def test_a_search_finds_what_looking_at_all_finds_where_the_loss_falls(model, tokens):
    def least(search, tolerance):
        return measure_top_k(model, tokens, tolerance=tolerance, search=search, progress=False)

    for tolerance in (1e-4, 0.05):
        whole = least(False, tolerance)
        enough = whole.rise()[0] <= tolerance
        falls = (enough.long().diff(dim=1) >= 0).all(dim=1)
        searched = least(True, tolerance)
        for layer in range(3):
            if falls[layer]:
                assert searched.least()[layer] == whole.least()[layer]
        assert searched.losses[..., 0].isnan().any()


@pytest.mark.parametrize("search", [False, True])
def test_a_stopped_measurement_goes_on_behind_its_last_batch(model, tokens, search):
    settings = {"search": search, "tolerance": 1e-3, "batch_size": 5, "progress": False}
    kept, ran = [], []
    whole = measure_top_k(model, tokens, **settings, after=kept.append)
    for stop in (0, len(kept) // 2, len(kept) - 1):
        resumed = measure_top_k(model, tokens, **settings, resume=kept[stop], after=ran.append)
        same(resumed.losses, whole.losses)
        assert len(ran) == len(kept) - stop - 1
        ran.clear()


def test_only_the_last_predictions_count(model, tokens):
    found = measure_top_k(model, tokens, ks=(1,), last=2, progress=False)
    with torch.no_grad():
        logits = model(tokens)
    loss = cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    torch.testing.assert_close(found.bare, loss[:, -2:].double().sum(dim=1), rtol=1e-5, atol=1e-5)
    assert found.n_tokens.tolist() == [2] * 12


def test_heads_of_one_key_need_one():
    """Where it has an answer, the circuit's heads look at one key each."""
    model, (tokens, _) = induction_model(N_VOCAB, N_CTX), repeated_segments(N_VOCAB, 50)
    found = measure_top_k(model, tokens, ks=(1,), last=2, progress=False)
    torch.testing.assert_close(found.losses, found.bare.expand_as(found.losses), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_keys_are_the_model_itself_also_with_sinks_in_half_precision(dtype):
    """Rows of GPT-OSS sum to less than 1, and in half precision to less than the parts say."""
    model, ids = load_any(zoo.build("gpt_oss").to(dtype)).model, zoo.tokens(4, 12)
    found = measure_top_k(model, ids, ks=(12,), control=True, progress=False)
    assert found.losses.equal(found.bare.expand_as(found.losses))


def test_rows_without_weight_stay_so_in_half_precision():
    empty = torch.zeros(2, 3, 3, dtype=torch.float16)
    assert ideal_pattern(empty, empty.bool(), "top_k", k=2).equal(empty)


def test_a_model_whose_patterns_cannot_be_edited_is_refused():
    """Its loss would stay the same whatever is taken out, as if one key were enough."""
    with pytest.raises(InfoFlowError, match="edits of the pattern of layer 0 do not reach"):
        measure_top_k(zoo.bridge("gpt_neo"), zoo.tokens(2, 6), progress=False)


def test_a_model_that_sees_the_next_token_is_refused():
    with pytest.raises(InfoFlowError, match="layer 0 attend to later keys, so that the model sees"):
        measure_top_k(load_any(zoo.build("bert")).model, zoo.tokens(2, 6), progress=False)
