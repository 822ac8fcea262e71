"""Attended positions of every layer, head and query, and what they say about a head."""

from collections import Counter

import pytest
import torch

from infoflow_lens import (
    InfoFlowError,
    PositionsProbe,
    RecoveryProbe,
    flow,
    open_model,
    run_probes,
)
from tests.conftest import HEADS, N_TOKENS, make_token_model
from tests.reference import families, ranking
from tests.reference.induction import induction_model, repeated_segments


def test_probe_reports_every_layer_head_and_query(model, inputs):
    (result,) = run_probes(model, inputs, [PositionsProbe((2, 1))], batch_size=10, progress=False)
    _, cache = model.run_with_cache(inputs)
    for layer, heads in enumerate(HEADS):
        positions = result.positions[layer]
        assert positions.shape == (23, heads, N_TOKENS + 1, 2)
        scores = cache[f"blocks.{layer}.attn.hook_attn_scores"]
        for sample in (0, 11, 22):
            for head in range(heads):
                for query in range(N_TOKENS + 1):
                    expected = ranking.rank(scores[sample, head, query].tolist(), (2, 1))
                    found = positions[sample, head, query].tolist()
                    assert found == [position for position, _, _ in expected]
    assert result.argmax[0].equal(result.positions[0][..., 1])


def test_cls_is_attended_to_only_where_it_is_a_key(model, inputs):
    (result,) = run_probes(model, inputs, [PositionsProbe((N_TOKENS,))], progress=False)
    assert max(p.max() for p in result.positions) < N_TOKENS


def test_causal_queries_have_no_rank_beyond_their_keys(token_model, token_inputs):
    (result,) = run_probes(token_model, token_inputs, [PositionsProbe((1, 3))], progress=False)
    positions = result.positions[1]
    queries = torch.arange(9)
    assert (positions <= queries[None, None, :, None]).all()
    assert (positions[:, :, :2, 1] == -1).all()
    assert (positions[:, :, 2:, 1] >= 0).all()
    assert result.margins[1][:, :, :2, 1].isnan().all()
    assert result.margins[1][:, :, 0, 0].isinf().all()  # one key: nothing comes next


def test_grouped_keys_count_heads_by_their_queries(token_inputs):
    grouped = make_token_model(n_key_value_heads=2)
    (result,) = run_probes(grouped, token_inputs, [PositionsProbe()], progress=False)
    assert result.positions[0].shape == (19, 4, 9, 1)


def test_frame_has_a_row_a_measurement(model, inputs):
    (result,) = run_probes(model, inputs, [PositionsProbe((1, 2))], progress=False)
    frame = result.to_frame()
    assert list(frame.columns) == [
        "layer", "sample", "head", "query", "rank", "position", "margin", "ties",
    ]  # fmt: skip
    assert len(frame) == 23 * sum(HEADS) * (N_TOKENS + 1) * 2
    row = frame[
        (frame.layer == 1)
        & (frame["sample"] == 7)
        & (frame["head"] == 3)
        & (frame["query"] == 2)
        & (frame["rank"] == 2)
    ]
    assert int(row.position.iloc[0]) == int(result.positions[1][7, 3, 2, 1])


def test_infinite_scores_are_refused(model, inputs):
    def overflow(scores, hook):
        return scores.index_fill(-1, torch.tensor(2), torch.inf)

    hooks = [("blocks.1.attn.hook_attn_scores", overflow)]
    with model.hooks(fwd_hooks=hooks), pytest.raises(InfoFlowError, match="holds infinity"):
        run_probes(model, inputs, [PositionsProbe()], progress=False)


def test_ranks_beyond_the_keys_are_refused_before_the_model_runs(model, inputs):
    probe = PositionsProbe((1, N_TOKENS + 1))
    with pytest.raises(InfoFlowError, match=f"rank {N_TOKENS + 1} is beyond the number of keys"):
        run_probes(model, inputs, [probe], progress=False)
    assert probe.n_sequences == 0


def test_the_summary_counts_what_positions_explain(model, inputs):
    (result,) = run_probes(model, inputs, [PositionsProbe((1,))], progress=False)
    frame = result.summary(skip=2)
    assert len(frame) == 7
    for row in frame.to_dict("records"):
        keys = result.argmax[row["layer"]][:, row["head"], 2:].tolist()
        pairs = [(q + 2, k) for sequence in keys for q, k in enumerate(sequence)]
        offsets = Counter(k - q for q, k in pairs)
        indices = Counter(k for _, k in pairs)
        best = [Counter(k for q, k in pairs if q == query) for query in range(2, 8)]
        explained = sum(counts.most_common(1)[0][1] for counts in best) / len(pairs)
        assert row["by_offset"] == pytest.approx(offsets.most_common(1)[0][1] / len(pairs))
        assert offsets[row["offset"]] == offsets.most_common(1)[0][1]
        assert row["by_index"] == pytest.approx(indices.most_common(1)[0][1] / len(pairs))
        assert row["by_position"] == pytest.approx(explained)
        assert row["by_content"] == pytest.approx(1 - explained)


def test_a_previous_token_head_is_position_like_and_a_matching_head_is_not():
    model = induction_model(n_vocab=11, n_ctx=9)
    tokens, _ = repeated_segments(11, 200)
    (result,) = run_probes(model, tokens, [PositionsProbe((1,))], progress=False)
    previous, matching = result.summary(skip=6).to_dict("records")
    assert (previous["by_offset"], previous["offset"]) == (1, -1)
    assert previous["by_content"] == 0
    assert matching["by_content"] > 0.3


def test_a_summary_needs_rank_1_and_a_query(model, inputs):
    (result,) = run_probes(model, inputs, [PositionsProbe((2,))], progress=False)
    with pytest.raises(InfoFlowError, match="expected rank 1 among them"):
        result.summary()
    with pytest.raises(InfoFlowError, match="skip is 8"):
        result.summary(skip=8)


def test_tied_choices_explain_nothing():
    """Equal scores choose no key: the lowest one is a convention, no head that looks at BOS."""
    model = make_token_model()
    with torch.no_grad():
        model.blocks[1].attn.W_Q.zero_()
        model.blocks[1].attn.b_Q.zero_()
    x = torch.randint(17, (20, 9), generator=torch.Generator().manual_seed(0))
    (result,) = run_probes(model, x, [PositionsProbe()], progress=False)
    frame = result.summary(skip=1)
    tied = frame[frame["layer"] == 1]
    assert (tied["tied"] == 1).all()
    assert tied[["by_index", "by_offset", "by_position", "by_content"]].isna().all().all()
    assert (frame[frame["layer"] == 0]["tied"] == 0).all()


@pytest.mark.parametrize("without", [(-1,), (0, -2), (-20, 0, 1)])
def test_keys_are_left_out_from_both_ends_of_each_sequence(without):
    """The separators of an encoder: of each sequence alone, its scores masked by hand."""
    named = open_model(families.build("bert"))
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 90, (n,), generator=generator) for n in (9, 4, 7)]
    (found,) = run_probes(
        named, rows, [PositionsProbe((1, 2), without=without)], batch_size=3, progress=False
    )
    for sample, row in enumerate(rows):
        n = len(row)
        closed = [place % n for place in without if -n <= place < n]
        _, cache = named.run_with_cache(row[None])
        for layer in range(2):
            scores = cache["attn_scores", layer][0].clone()
            scores[..., closed] = -torch.inf
            for head in range(scores.shape[0]):
                for query in range(n):
                    expected = ranking.rank(scores[head, query].tolist(), (1, 2))
                    chosen = found.positions[layer][sample, head, query].tolist()
                    assert chosen == [position for position, _, _ in expected]


@pytest.mark.parametrize("without", [(), (0,), (0, -1)])
def test_concentration_is_the_weight_of_the_first_choice(without):
    """Where a key that attention rests on is left out, its weight is not that of the choice."""
    named = open_model(families.build("llama"))
    rows = [torch.arange(3, 3 + n) for n in (7, 1, 4)]
    (found,) = run_probes(
        named, rows, [PositionsProbe(without=without, spread=True)], batch_size=3, progress=False
    )
    for sample, row in enumerate(rows):
        _, cache = named.run_with_cache(row[None])
        for layer in range(2):
            pattern, choice = cache["pattern", layer][0], found.argmax[layer][sample]
            for head, query in torch.cartesian_prod(torch.arange(4), torch.arange(len(row))):
                key, share = choice[head, query], found.concentration[layer][sample, head, query]
                if key < 0:
                    assert share.isnan()
                else:
                    assert share == pytest.approx(float(pattern[head, query, key]), abs=1e-5)
                entropy = torch.special.entr(pattern[head, query]).sum()
                assert found.entropy[layer][sample, head, query] == pytest.approx(
                    float(entropy), abs=1e-5
                )


def test_frequencies_are_of_the_sequences_that_have_the_query():
    """As those of AttendedProbe: a query that few sequences have is drawn as dark as others."""
    named = open_model(families.build("llama"))
    rows = [torch.arange(3, 3 + n) for n in (7, 2, 4)]
    (found,) = run_probes(named, rows, [PositionsProbe()], batch_size=3, progress=False)
    drawn = found.plot(layer=1).axes[2].images[0].get_array()
    for query in range(7):
        there = [i for i, row in enumerate(rows) if query < len(row)]
        keys = Counter(int(found.argmax[1][i, 2, query]) for i in there)
        expected = [keys[key] / len(there) for key in range(7)]
        assert list(drawn[query]) == pytest.approx(expected)


def test_places_from_the_end_are_those_from_the_start(token_model, token_inputs):
    """In sequences of one length: ranks, recovery and flows, and the page of a saved flow."""
    n = token_inputs.shape[1]
    first, second = (
        run_probes(
            token_model,
            token_inputs,
            [
                PositionsProbe((1,), without=(place,)),
                RecoveryProbe(without=(0, place), controls=True),
            ],
            progress=False,
        )
        for place in (n - 2, -2)
    )
    for one, other in zip(first, second, strict=True):
        assert one.to_frame().equals(other.to_frame())
    assert first[1].n_fit == second[1].n_fit
    made = [
        flow(token_model, token_inputs[:1], influence=None, without=(place,), progress=False)
        for place in (n - 2, -2)
    ]
    assert torch.equal(made[0].sets.members, made[1].sets.members)
    assert torch.equal(made[0].graded.strengths, made[1].graded.strengths)
    with pytest.raises(InfoFlowError, match=r"rank \d+ is beyond"):
        run_probes(token_model, token_inputs, [PositionsProbe((n,), without=(-1,))], progress=False)
