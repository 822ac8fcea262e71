"""Pieces of margins against parts taken out one by one, circuits known from the weights up, and
the scores of models of every family."""

import dataclasses
import warnings

import numpy as np
import pytest
import torch

from infoflow_lens import InfoFlowError, build_model, load_any, open_model
from infoflow_lens.hooks import PositionsProbe, measure_why, measure_why_all, run_probes
from infoflow_lens.hooks import why as measure
from infoflow_lens.hooks.why import find_sinks
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.studies.constructions import build_construction
from tests.conftest import make_token_model
from tests.reference import zoo
from tests.reference.induction import SHARP, induction_model, repeated_segments
from tests.reference.why import Gpt2
from tests.versions import for_each, needs_hooked_transformer


def family(name, tmp_path, dtype="float32", **changes):
    return load_any(zoo.save(name, tmp_path / name, **changes), dtype=dtype).model


def asked(model, inputs, queries=(3, -1)):
    """Every head of every layer, at each of some queries in turn."""
    for layer, block in enumerate(model.blocks):
        for head in range(len(block.attn.W_O)):
            query = queries[(layer + head) % len(queries)]
            yield measure_why(model, inputs, layer, head, query)


def misses(found):
    """By how much the pieces miss the margin, relative to their size."""
    return abs(found.distance) / max(float(found.pieces.abs().sum()), 1e-9)


def perturbed(model):
    """With biases and gains that are not 0 and 1."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def with_one_row_of_constants(names, rows):
    """Biases of norms and projections in one last row."""
    biases = [name for name in names if "bias" in name or name.startswith("b_")]
    kept = [i for i, name in enumerate(names) if name not in biases]
    left = [i for i, name in enumerate(names) if name in biases]
    whole = torch.cat([rows[kept], rows[left].sum(0, keepdim=True)])
    return (*(names[i] for i in kept), "constants"), whole


def test_pieces_are_what_scores_lose_when_parts_are_taken_out():
    ids = zoo.tokens(1, 7)
    reference = Gpt2(zoo.build("gpt2"), ids[0])
    model = load_any(zoo.build("gpt2")).model
    for layer, head, query in ((0, 2, 6), (1, 0, 6), (1, 3, 4)):
        found = measure_why(model, ids, layer, head, query)
        query_parts, key_parts, pieces = reference.pieces(layer, head, query, found.keys)
        query_parts, pieces = with_one_row_of_constants(query_parts, pieces)
        key_parts, pieces = with_one_row_of_constants(key_parts, pieces.T)
        pieces = pieces.T
        assert (found.query_parts, found.key_parts) == (query_parts, key_parts)
        named = found.arrays["pieces"].coords
        assert (named["query_part"], named["key_part"]) == (query_parts, key_parts)
        torch.testing.assert_close(found.pieces, pieces, rtol=1e-4, atol=1e-5)
        assert found.margin == pytest.approx(float(pieces.sum()), abs=1e-5)
    torch.testing.assert_close(found.by_key().values, pieces.sum(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.by_query().values, pieces.sum(1), rtol=1e-4, atol=1e-5)


def test_scores_of_other_queries_and_keys_than_those_that_are_shown_are_refused(
    monkeypatch, token_model, token_inputs
):
    monkeypatch.setattr(
        "infoflow_lens.hooks.why._points",
        lambda model, layer, side: [f"blocks.0.attn.hook_{side}"],  # of another layer
    )
    with pytest.raises(InfoFlowError, match="do not depend on what it shows as queries"):
        measure_why(token_model, token_inputs[:1], 1, 0)


@pytest.mark.parametrize("name", zoo.some_families([*zoo.FAMILIES], zoo.FEW))
def test_pieces_add_up_in_models_of_every_family(name, tmp_path):
    """Norms behind sums, of queries and keys, on what attention adds; grouped keys; ALiBi."""
    # experts of gpt_oss have no double precision; in single precision misses of llama are rounding
    model = family(name, tmp_path, dtype="float32" if name == "gpt_oss" else "float64")
    found = list(asked(model, zoo.tokens(1, 8)))
    bar = 0.2 if name == "gemma2" else 5e-5 if name.startswith("cohere") else 1e-5
    assert max(map(misses, found)) < bar
    if name == "gemma2":  # a soft cap on its scores
        worst = max(found, key=misses)
        assert misses(worst) > 1e-3
        assert "is no sum of products of these parts" in worst.summary()
    (ranked,) = run_probes(model, zoo.tokens(1, 8), [PositionsProbe((1, 2))], progress=False)
    for one in found:
        first, second = ranked.positions[one.layer][0, one.head, one.query].tolist()
        assert one.keys[0] == first
        assert one.keys[1] == second or second in one.sinks


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_key_parts_with_rotary_embeddings_are_those_of_transformers(name, tmp_path):
    """The key without the part, projected and rotated by the functions of transformers alone."""
    from transformers.models.gpt_neox import modeling_gpt_neox
    from transformers.models.llama import modeling_llama

    alone, ids = zoo.build(name), zoo.tokens(1, 9)
    inner = alone.model if name == "llama" else alone.gpt_neox
    module = modeling_llama if name == "llama" else modeling_gpt_neox
    layer = inner.layers[1]
    norm = layer.input_layernorm
    attention = layer.self_attn if name == "llama" else layer.attention
    with torch.no_grad():
        states = alone(ids, output_hidden_states=True).hidden_states
        first, x = states[0][0].double(), states[1][0].double()
        cos, sin = inner.rotary_emb(states[0], torch.arange(9)[None])
        host = load_any(zoo.build(name)).model
        found = measure_why(host, ids, 1, 3, 8)

        def margin(key_states):
            """With norms of the whole states."""
            parts = []
            for state in (x, key_states):
                if name == "llama":
                    scale = (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
                    parts.append(state / scale * norm.weight)
                else:
                    scale = (x.var(-1, keepdim=True, correction=0) + norm.eps).sqrt()
                    centred = state - state.mean(-1, keepdim=True)
                    parts.append(centred / scale * norm.weight + norm.bias)
            query, key = (part.float() for part in parts)
            if name == "llama":
                q = attention.q_proj(query).view(1, 9, 4, 4).transpose(1, 2)
                k = attention.k_proj(key).view(1, 9, 2, 4).transpose(1, 2)
                q, k = module.apply_rotary_pos_emb(q, k, cos, sin)
                k = k.repeat_interleave(2, dim=1)
            else:
                q, k = (
                    attention.query_key_value(part).view(1, 9, 4, 12).transpose(1, 2)
                    for part in (query, key)
                )
                q, k = module.apply_rotary_pos_emb(q[..., :4], k[..., 4:8], cos, sin)
            scores = (q[0, 3, 8] @ k[0, 3].T) / 2
            return float(scores[found.keys[0]] - scores[found.keys[1]])

        given = dict(zip(found.key_parts, found.by_key().values.tolist(), strict=True))
        assert margin(x) == pytest.approx(found.margin, abs=1e-4)
        lost = margin(x) - margin(x - first)
    assert given["token embedding"] == pytest.approx(lost, abs=1e-4)


HOOKED = for_each(
    [
        ({"normalization_type": "LN"},),
        ({"normalization_type": "RMS"},),
        ({"normalization_type": None},),
        ({"attn_only": True},),
        ({"n_key_value_heads": 2},),
        ({"parallel_attn_mlp": True},),
        ({"use_attn_scale": False},),
        ({"use_attention_sinks": True},),
        ({"scale_attn_by_inverse_layer_idx": True, "parallel_attn_mlp": True},),
        ({"d_head": 6, "positional_embedding_type": "rotary", "rotary_dim": 4},),
        (
            {
                "d_head": 6,
                "positional_embedding_type": "rotary",
                "rotary_dim": 6,
                "rotary_adjacent_pairs": True,
                "n_key_value_heads": 2,
            },
        ),
    ]
)


@pytest.mark.parametrize("changes", [param.values[0] for param in HOOKED])
@needs_hooked_transformer
def test_pieces_add_up_in_a_hooked_transformer(changes, token_inputs):
    model = perturbed(make_token_model(**changes))
    assert max(map(misses, asked(model, token_inputs[:1]))) < 1e-5


@needs_hooked_transformer
def test_folding_a_norm_moves_its_gain_and_bias_and_leaves_the_sums(token_inputs):
    """Embeddings, MLP and attention add what they did; folding moves value biases to b_O."""
    plain = perturbed(make_token_model(normalization_type="LN"))
    found = measure_why(plain, token_inputs[:1], 1, 2)
    plain.process_weights_(fold_ln=True, center_writing_weights=True)
    folded = measure_why(plain, token_inputs[:1], 1, 2)
    assert misses(folded) < 1e-5
    assert folded.margin == pytest.approx(found.margin, abs=1e-4)
    before, after = (
        dict(zip(one.key_parts, one.by_key().values.tolist(), strict=True))
        for one in (found, folded)
    )
    for kind in ("token", "positional", "MLP", ("head", "constants")):
        sums = [
            sum(value for name, value in parts.items() if name.startswith(kind))
            for parts in (before, after)
        ]
        assert sums[1] == pytest.approx(sums[0], abs=1e-4)


@needs_hooked_transformer
@pytest.mark.parametrize(
    "changes",
    [
        {"positional_embedding_type": "alibi"},
        {"positional_embedding_type": "shortformer"},
        {"use_qk_norm": True, "normalization_type": "RMS"},
        {"use_normalization_before_and_after": True, "normalization_type": "RMS"},
    ],
)
def test_pieces_add_up_where_scores_are_more_than_products_of_the_normed_stream(
    changes, token_inputs
):
    model = perturbed(make_token_model(**changes))
    found = list(asked(model, token_inputs[:1]))
    assert max(map(misses, found)) < 1e-5
    has_bias = changes.get("positional_embedding_type") == "alibi"
    assert any(one.added for one in found) == has_bias
    assert all(
        ("adds" in one.summary()) == (abs(one.added) > 1e-3 * abs(one.margin)) for one in found
    )


@needs_hooked_transformer
@pytest.mark.parametrize("changes", [{"attn_scores_soft_cap": 1.0}, {"clip_qkv": 0.01}])
def test_what_is_no_sum_of_products_is_said_with_its_size(changes, token_inputs):
    model = perturbed(make_token_model(**changes))
    found = max(asked(model, token_inputs[:1]), key=misses)
    assert misses(found) > 1e-2
    assert f"{found.distance:+.3g} is no sum of products" in found.summary()


@pytest.mark.parametrize("attention", ["softmax", "relu", "hardmax"])
def test_pieces_add_up_in_models_over_vectors_with_layers_of_their_own(attention):
    shape = Architecture(
        n_heads=(2, 5, 3), d_model=30, d_token=3, n_tokens=7, d_mlp=11, attention=attention
    )
    model = build_model(shape, seed=5)
    x = torch.randn(1, 7, 3, generator=torch.Generator().manual_seed(0))
    found = list(asked(model, x, (-1, 2)))
    assert max(map(misses, found)) < 1e-5
    assert found[-1].query == 7
    assert found[-1].tokens[0] == "CLS"
    assert found[-1].query_parts[0] == "token embedding"
    assert "head 1.4" in found[-1].query_parts


def test_the_whole_reason_of_a_built_induction_head_is_its_previous_token_head():
    """Its query reads the token, its keys what head 0.0 copied, with the weight SHARP."""
    model = induction_model(11, 9)
    tokens, starts = repeated_segments(11, 5)
    for row, start in zip(tokens, starts.tolist(), strict=True):
        for step in range(3):
            target, query = start + step + 1, 6 + step
            other = 0  # its token is not that of the query, nor is the one before it
            found = measure_why(model, row[None], 1, 0, query, (target, other))
            by_key = dict(zip(found.key_parts, found.by_key().values.tolist(), strict=True))
            assert by_key.pop("head 0.0") == pytest.approx(SHARP, rel=1e-5)
            assert max(map(abs, by_key.values())) < 1e-5
            by_query = dict(zip(found.query_parts, found.by_query().values.tolist(), strict=True))
            assert by_query.pop("token embedding") == pytest.approx(SHARP, rel=1e-5)
            assert max(map(abs, by_query.values())) < 1e-5
            best = measure_why(model, row[None], 1, 0, query)
            assert best.keys[0] == target
            assert best.table()["part"][0] == "head 0.0"


def test_constructions_over_vectors_can_be_asked():
    model, task = build_construction("kth_largest")[:2]
    x = task.sample(1, 0)[0]
    assert max(map(misses, asked(model, x, (-1,)))) < 1e-5


def test_all_lines_are_those_that_are_asked_one_by_one(tmp_path):
    model = family("llama", tmp_path)
    inputs = [zoo.tokens(1, 9)[0], zoo.tokens(1, 6, seed=1)[0]]
    every = measure_why_all(model, inputs)
    assert [keys.shape for keys in every.keys] == [(2, 4, 9, 2)] * 2
    for sample, layer, head, query in ((0, 0, 1, 5), (0, 1, 3, 8), (1, 1, 2, 5)):
        one = measure_why(model, inputs[sample][None], layer, head, query)
        line = every.of(layer, head, query, sample)
        assert tuple(line["keys"]) == one.keys
        assert line["margin"] == one.margin
        by_key = one.table().head(6)
        assert [name for name, _ in line["parts"]] == by_key["part"].tolist()
        assert [value for _, value in line["parts"]] == pytest.approx(
            by_key["value"].tolist(), abs=1e-5
        )
        assert line["rest"] == pytest.approx(one.table()["value"][6:].sum(), abs=1e-5)
    assert every.of(1, 0, 0) is None  # the first query sees one key
    assert every.of(1, 0, 7, sample=1) is None  # the second input is shorter
    assert torch.isnan(every.margins[0][1, :, 6:]).all()


def test_results_are_saved_tabled_and_drawn(tmp_path, token_model, token_inputs):
    found = measure_why(token_model, token_inputs[:1], 1, 2, keys=(4, 1))
    found.save(tmp_path / "why")
    loaded = type(found).load(tmp_path / "why")
    assert loaded.pieces.equal(found.pieces)
    assert (loaded.keys, loaded.tokens, loaded.margin) == (found.keys, found.tokens, found.margin)
    frame = found.to_frame()
    assert len(frame) == found.pieces.numel()
    assert set(frame) == {"query_part", "key_part", "pieces"}
    assert found.table("query")["value"].sum() == pytest.approx(found.margin, abs=1e-4)
    assert found.table()["share"].sum() == pytest.approx(1, abs=1e-4)
    assert found.plot().axes
    assert "speaks most for " in found._repr_html_()
    assert repr(found) == f"Why({found.summary()})"
    every = measure_why_all(token_model, token_inputs[:2])
    every.save(tmp_path / "all")
    again = type(every).load(tmp_path / "all")
    assert again.of(1, 2, 8, sample=1) == every.of(1, 2, 8, sample=1)


def test_shares_are_of_the_margin_also_where_the_model_adds_to_it(token_model, token_inputs):
    """A part that speaks for the key has a share above 0, whatever ALiBi adds."""
    plain = measure_why(token_model, token_inputs[:1], 1, 2, keys=(4, 1))
    added = -2 * plain.margin
    found = dataclasses.replace(plain, added=added, margin=plain.margin + added)
    for by in ("key", "query"):
        table = found.table(by)
        assert table["share"].tolist() == pytest.approx((table["value"] / found.margin).tolist())
        assert table["share"].sum() == pytest.approx(-1, rel=1e-4)
    against = dataclasses.replace(plain, pieces=-plain.pieces.abs(), margin=2.0)
    assert "of the keys none speaks for it, " in against.summary()  # ALiBi alone does
    nothing = dataclasses.replace(plain, margin=0.0)
    assert nothing.table()["share"].isna().all()


def test_keys_in_the_other_order_are_not_preferred(token_model, token_inputs):
    """It said that a key was preferred by less than nothing."""
    found = [measure_why(token_model, token_inputs[:1], 1, 2, keys=k) for k in ((4, 1), (1, 4))]
    better, worse = sorted(found, key=lambda one: -one.margin)
    assert better.margin == pytest.approx(-worse.margin)
    tokens, size = worse.tokens, f"{better.margin:.3g}"
    assert f" prefers {tokens[2]!r} ({worse.keys[1]}) to " in better.summary()
    assert f" scores {tokens[1]!r} ({worse.keys[0]}) below {tokens[2]!r}" in worse.summary()
    assert all(f" by {size} in attention score: " in one.summary() for one in found)
    assert f"for {tokens[1]!r}" in worse.summary()


def test_a_picture_of_many_parts_has_the_strongest_and_the_sum_of_the_others(
    token_model, token_inputs
):
    found = measure_why(token_model, token_inputs[:1], 1, 2, keys=(4, 1))
    pieces = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    many = dataclasses.replace(
        found, pieces=pieces, query_parts=tuple(f"part {i}" for i in range(40)),
        key_parts=("a", "b", "c"),
    )  # fmt: skip
    (image,) = many.plot().axes[0].get_images()
    shown, names = image.get_array(), [t.get_text() for t in many.plot().axes[0].get_yticklabels()]
    assert names[-1] == "the others"
    np.testing.assert_allclose(shown.sum(axis=0), pieces.sum(dim=0), rtol=1e-4)
    for name, row in zip(names[:-1], shown[:-1], strict=True):
        np.testing.assert_allclose(row, pieces[int(name.split()[1])], rtol=1e-6)
    weakest_shown = min(abs(row).sum() for row in shown[:-1])
    left = set(range(40)) - {int(name.split()[1]) for name in names[:-1]}
    assert all(float(pieces[i].abs().sum()) <= weakest_shown for i in left)
    with pytest.raises(InfoFlowError, match="by is 'keys': expected 'key' or 'query'"):
        found.table("keys")


def test_it_leaves_the_model_as_it_was(token_model, token_inputs):
    token_model.train()
    measure_why(token_model, token_inputs[:1], 1, 0)
    assert token_model.training
    assert all(parameter.grad is None for parameter in token_model.parameters())


def test_what_a_hook_writes_to_the_stream_is_a_constant(token_model, token_inputs):
    plain = measure_why(token_model, token_inputs[:1], 1, 0, keys=(5, 2))
    write = torch.randn(12, generator=torch.Generator().manual_seed(0))
    hook = ("blocks.0.hook_resid_post", lambda stream, hook: stream + write)
    with warnings.catch_warnings(), token_model.hooks(fwd_hooks=[hook]):
        warnings.simplefilter("ignore")
        found = measure_why(token_model, token_inputs[:1], 1, 0, keys=(5, 2))
    assert misses(found) < 1e-5
    (before, after) = (one.pieces[-1].abs().sum() for one in (plain, found))
    assert float(after) > 2 * float(before)


def test_a_sink_is_a_special_position_that_most_queries_choose_first():
    scores = torch.zeros(3, 6, 6).masked_fill(torch.ones(6, 6).triu(1) > 0, -torch.inf)
    scores[0, :, 0], scores[1, :, 2] = 3, 3
    scores[2, 3:, 2] = 3
    first = torch.tensor([True, False, False, False, False, False])
    assert find_sinks(scores, first).nonzero().tolist() == [[0, 0]]
    special = torch.tensor([True, False, True, False, False, False])
    assert find_sinks(scores, special).nonzero().tolist() == [[0, 0], [1, 2], [2, 2]]
    assert not find_sinks(scores[:, :4, :4], special[:4]).any()  # three queries tell nothing


def test_a_sink_is_no_second_key_unless_it_is_asked_for(monkeypatch, token_model, token_inputs):
    plain = measure_why(token_model, token_inputs[:1], 1, 2)
    first, second = plain.keys
    monkeypatch.setattr(
        "infoflow_lens.hooks.why.find_sinks",
        lambda scores, special: torch.arange(9).eq(second).expand(len(scores), -1),
    )
    found = measure_why(token_model, token_inputs[:1], 1, 2)
    assert found.keys[0] == first
    assert found.keys[1] not in (first, second)
    assert f"position {second}, to which most of its queries look, is left out" in found.summary()
    asked_for = measure_why(token_model, token_inputs[:1], 1, 2, keys=(first, second))
    assert asked_for.pieces.equal(plain.pieces)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer": 2}, "layer is 2, but there are 2 layers"),
        ({"head": 4}, "head is 4, but there are 4 heads"),
        ({"query": 9}, "query is 9, but there are 9 positions"),
        ({"query": 0}, "position 0 has 1 keys"),
        ({"query": 3, "keys": (1, 5)}, "does not see key 5"),
        ({"keys": (1, 1)}, "they are the same key"),
        ({"keys": (1, 9)}, "keys is 9"),
    ],
)
def test_places_that_are_not_there_are_refused(settings, message, token_model, token_inputs):
    with pytest.raises(InfoFlowError, match=message):
        measure_why(token_model, token_inputs[:1], **{"layer": 1, "head": 0, **settings})


def test_several_sequences_are_refused(token_model, token_inputs):
    with pytest.raises(InfoFlowError, match="expected one"):
        measure_why(token_model, token_inputs[:2], 1, 0)


def test_heads_with_keys_of_their_own_are_differentiated_at_once(monkeypatch):
    """Each took derivatives of all heads: 100 tokens of 96 heads took five times as long."""
    seen, plain = [], measure.differentiate
    monkeypatch.setattr(measure, "differentiate", lambda *a: seen.append(a) or plain(*a))
    measure_why_all(open_model(zoo.build("llama")), zoo.tokens(1, 6))
    # four heads read two heads of keys, in two layers
    assert len(seen) == 2 * 2
