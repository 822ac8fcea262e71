"""The embedding of a text is what the folder of an embedding model says it is of its states."""

import json

import pytest
import torch
from transformers import BertModel

from infoflow_lens import InfoFlowError, ask, load_any, open_model
from infoflow_lens.hooks import EmbeddingCosine
from tests.reference import zoo

OF_STATES = {  # [pos, d_model] to [d_model], by hand
    "mean": lambda states: sum(states) / len(states),
    "max": lambda states: torch.stack([column.max() for column in states.T]),
    "first": lambda states: states[0],
    "last": lambda states: states[len(states) - 1],
}


@pytest.fixture
def folder(tmp_path):
    """An encoder without a head, as sentence-transformers writes it but for the pooling."""
    with torch.random.fork_rng():
        torch.manual_seed(6)
        BertModel(zoo.build("bert").config).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def pool(folder, said):
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(said))


@pytest.mark.parametrize(
    ("said", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        pytest.param({"pooling_mode_mean_sqrt_len_tokens": True}, "mean", marks=pytest.mark.slow),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "first"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode": "cls"}, "first"),
        ({"pooling_mode": ["max"]}, "max"),
        (None, "mean"),
    ],
)
def test_two_sentences_are_near_by_the_models_own_pooling(said, pooling, folder):
    if said is not None:
        pool(folder, said)
    clean, other = zoo.tokens(2, 3)
    to = torch.arange(16.0) - 5
    found = ask(
        folder, clean, instead=other, readout=EmbeddingCosine(to), quick=True, progress=False
    )
    alone = BertModel.from_pretrained(folder)
    with torch.no_grad():
        by_hand = OF_STATES[pooling](alone(clean[None]).last_hidden_state[0])
    expected = by_hand @ to / (by_hand.norm() * to.norm())
    assert found.value == pytest.approx(float(expected), abs=1e-5)
    assert f"({pooling} of the last states)" in found.readout


def test_a_pooling_that_is_given_goes_first(folder):
    pool(folder, {"pooling_mode_cls_token": True})
    model = load_any(folder).model
    assert EmbeddingCosine(torch.ones(16), pooling="max").bind(model).pooling == "max"
    assert EmbeddingCosine(torch.ones(16)).bind(model).pooling == "first"
    with pytest.raises(InfoFlowError, match=r"pooling is 'maxi'.*did you mean 'max'"):
        EmbeddingCosine(torch.ones(16), pooling="maxi")


@pytest.mark.parametrize(
    ("said", "behind", "match"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}, None,
         "made with 'cls_token', 'max_tokens': expected one of"),
        ({"pooling_mode_weightedmean_tokens": True}, None, "made with 'weightedmean_tokens'"),
        ({}, None, "made with no mode"),
        ({"pooling_mode": "mean"}, "2_Dense", "the layer 2_Dense behind it"),
    ],
)  # fmt: skip
def test_what_the_readout_does_not_have_is_refused(said, behind, match, folder):
    pool(folder, said)
    if behind:
        (folder / behind).mkdir()
    model = load_any(folder).model
    with pytest.raises(InfoFlowError, match=match):
        EmbeddingCosine(torch.ones(16)).bind(model)


def test_a_pooling_that_is_no_json_is_named(folder):
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("mean")
    with pytest.raises(InfoFlowError, match="is no pooling of an embedding model"):
        EmbeddingCosine(torch.ones(16)).bind(load_any(folder).model)


@pytest.mark.parametrize("to", [torch.ones(2, 16), torch.ones(1, 16), [1.0], torch.tensor(1.0)])
def test_what_is_no_vector_is_no_embedding(to):
    with pytest.raises(InfoFlowError, match=r"expected a tensor \[d_model\], one vector"):
        EmbeddingCosine(to)


def test_an_embedding_of_another_width_is_refused():
    model = open_model(zoo.build("bert").bert)
    with pytest.raises(InfoFlowError, match="has 7 numbers, this model's have 16"):
        ask(model, torch.tensor([7, 34, 29]), readout=EmbeddingCosine(torch.ones(7)))
