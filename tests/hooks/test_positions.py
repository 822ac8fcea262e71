"""Attended positions of every layer, head and query, and what they say about a head."""

from collections import Counter

import pytest
import torch

from infoflow_lens import InfoFlowError, PositionsProbe, run_probes
from tests.conftest import HEADS, N_TOKENS, make_token_model
from tests.reference import ranking
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
    with pytest.raises(InfoFlowError, match="without 1"):
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
