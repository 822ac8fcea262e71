"""Heads whose first choice stands in a relation to the query."""

import pytest
import torch

from infoflow_lens import InfoFlowError
from infoflow_lens.hooks import Needs, find_heads
from tests.conftest import some_of
from tests.reference import families, zoo
from tests.reference.real_models import folder_of

TEXTS = [zoo.tokens(1, n, seed=n)[0] % 9 + 4 for n in (7, 9, 5)]


def by_hand(name, meant, asks=lambda ids, q: True, offers=lambda ids, k: True):
    """Shares and chances, in loops over the attention of the plain model."""
    model = zoo.build(name)
    counts, hits, chance = {}, {}, {}
    for ids in TEXTS:
        with torch.no_grad():
            attentions = model(ids[None], output_attentions=True).attentions
        for layer, attention in enumerate(attentions):
            for q in range(len(ids)):
                seen = [k for k in range(len(ids) if name == "bert" else q + 1) if offers(ids, k)]
                good = [k for k in seen if meant(ids, q, k)]
                if not asks(ids, q) or not good or len(good) == len(seen):
                    continue
                counts[layer] = counts.get(layer, 0) + 1
                chance[layer] = chance.get(layer, 0) + len(good) / len(seen)
                for head in range(attention.shape[1]):
                    first = max(seen, key=lambda k: float(attention[0, head, q, k]))
                    hits[layer, head] = hits.get((layer, head), 0) + (first in good)
    return {place: (n / counts[place[0]], chance[place[0]] / counts[place[0]], counts[place[0]])
            for place, n in hits.items()}  # fmt: skip


CASES = {
    "previous": lambda ids, q, k: k == q - 1,
    "next": lambda ids, q, k: k == q + 1,
    "self": lambda ids, q, k: k == q,
    "same token": lambda ids, q, k: k != q and ids[k] == ids[q],
    "after same token": lambda ids, q, k: 0 < k != q + 1 and ids[k - 1] == ids[q],
    2: lambda ids, q, k: k == 2,
    6: lambda ids, q, k: k == 6,  # which the shortest text does not have
    -1: lambda ids, q, k: k == len(ids) - 1,
}


@torch.no_grad()
@pytest.mark.parametrize("relation", [0, "previous"])
def test_a_head_without_a_preference_stands_out_by_nothing(relation):
    """All its scores are equal, and the first key was said to be the choice of all queries."""
    model = families.build("gpt2")
    queries = model.transformer.h[1].attn.c_attn
    queries.weight[:, :32], queries.bias[:32] = 0, 0
    found = find_heads(model, TEXTS, relation, progress=False)
    found = found[found["layer"] == 1]
    assert found["share"].tolist() == pytest.approx(found["chance"].tolist())


@torch.no_grad()
def test_a_choice_among_keys_whose_weights_underflow_is_by_their_scores():
    """Where the key left out has all weight, the first of the others was each query's choice."""
    model = families.build("gpt2")
    for block in model.transformer.h:
        block.attn.c_attn.weight[:, :32] *= 1500  # queries
    ids = torch.randint(3, 100, (4, 12), generator=torch.Generator().manual_seed(0))
    found = find_heads(
        model, ids, "previous", keys=lambda ids: torch.arange(len(ids)) > 0, progress=False
    )
    # of double precision, in which they do not
    exact = torch.stack(model.double()(ids, output_attentions=True).attentions)[..., 2:, 1:]
    assert exact.amax(dim=-1).min() > 0
    hits = exact.argmax(dim=-1) == torch.arange(10)
    for row in found.itertuples():
        expected = float(hits[row.layer, :, row.head].double().mean())
        assert row.share == pytest.approx(expected), (row.layer, row.head)


@torch.no_grad()
def test_layers_without_attention_have_no_heads():
    """Of a model in which a state space stands in the place of attention in the first layer."""
    model, ids = families.build("jamba"), families.tokens()[:1]
    (attention,) = model(ids, output_attentions=True).attentions
    first = attention[0].argmax(dim=-1)
    expected = (first[:, 1:] == torch.arange(first.shape[1] - 1)).double().mean(dim=1)
    found = find_heads(model, ids, "previous", progress=False).sort_values("head")
    assert found["layer"].tolist() == [1] * len(attention[0])
    # query 1 sees one key beside its own; query 0 sees none that is meant
    assert found["share"].tolist() == pytest.approx(expected.tolist())


@pytest.mark.parametrize("name", some_of(["llama", "bert"], "bert"))
@pytest.mark.parametrize("relation", CASES)
def test_shares_and_chance_are_those_of_the_plain_model(name, relation):
    expected = by_hand(name, CASES[relation])
    if not expected:  # a decoder sees nothing that comes later
        with pytest.raises(InfoFlowError, match="no query sees both a key that relation"):
            find_heads(zoo.build(name), TEXTS, relation, progress=False)
        return
    found = find_heads(zoo.build(name), TEXTS, relation, progress=False)
    rows = {
        (row.layer, row.head): (row.share, row.chance, row.queries) for row in found.itertuples()
    }
    assert rows.keys() == expected.keys()
    for place, row in rows.items():
        assert row == pytest.approx(expected[place])
    ahead = (found["share"] - found["chance"]).tolist()
    assert ahead == sorted(ahead, reverse=True)


def test_relations_of_ones_own_among_a_part_of_the_keys():
    found = find_heads(
        zoo.build("bert"),
        TEXTS,
        lambda ids: (ids[:, None] + ids[None, :]) % 2 == 0,
        queries=lambda ids: torch.arange(len(ids)) > 2,
        keys=lambda ids: torch.arange(len(ids)) < 3,
        progress=False,
    )
    expected = by_hand(
        "bert", lambda ids, q, k: (ids[q] + ids[k]) % 2 == 0,
        lambda ids, q: q > 2, lambda ids, k: k < 3,
    )  # fmt: skip
    for row in found.itertuples():
        told = (row.share, row.chance, row.queries)
        assert told == pytest.approx(expected[row.layer, row.head])


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"relation": "before"}, "expected one of self, previous"),
        ({"relation": lambda ids: ids}, "relation gives torch.int64"),
        ({"relation": "self", "keys": lambda ids: ids > 99}, "no query sees"),
        ({"relation": "self", "keys": lambda ids: [True]}, "keys gives <class 'list'>"),
    ],
)
def test_what_says_nothing_is_refused(given, match):
    with pytest.raises(InfoFlowError, match=match):
        find_heads(zoo.build("llama"), TEXTS, progress=False, **given)


def test_a_name_is_no_model():
    with pytest.raises(InfoFlowError, match="the name 'stdlib-2l' has no transformer blocks"):
        find_heads("stdlib-2l", ["a b"], "self", progress=False)


def test_needs_of_a_model_without_hook_points_name_what_opens_it():
    with pytest.raises(
        InfoFlowError, match=r"expected a model that is opened.*open_model\(model\)"
    ):
        Needs.of(zoo.build("llama"), pattern=True)


@pytest.mark.slow
def test_a_head_of_rxnmapper_maps_atoms():
    """Head 5, known as the one that finds the atoms of the product in what reacts."""
    smiles = "CC(C)S.Fc1cccnc1F>>CC(C)Sc1ncccc1F"

    def arrow(ids):
        return int((ids == arrow_id).nonzero()[0])

    from infoflow_lens import load_any

    model = load_any(folder_of("rxnmapper")).model
    arrow_id = model.tokenizer.convert_tokens_to_ids(">>")
    found = find_heads(
        model, [smiles], "same token", progress=False,
        queries=lambda ids: torch.arange(len(ids)) > arrow(ids),
        keys=lambda ids: torch.arange(len(ids)) < arrow(ids),
    )  # fmt: skip
    best = found[found["queries"] > 0].head(5)
    assert 5 in best["head"].tolist()
    assert best["share"].iloc[0] > 2 * best["chance"].iloc[0]
