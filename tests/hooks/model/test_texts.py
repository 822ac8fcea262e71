"""Texts that are tokenised together are what the model itself makes of each alone."""

import io
import logging

import pytest
from tokenizers.processors import TemplateProcessing

from infoflow_lens import load_any
from infoflow_lens.hooks.model.inputs import read_inputs
from infoflow_lens.hooks.model.texts import group_by_size, ids_of_texts
from tests.reference import zoo

TEXTS = ["w5 w6 w7", "w9", "w5 w6 w7 w8 w9", "w11 w12", "<bos> w5 <eos>", "w7 <eos> <eos>", "w8"]
# what the tokenizer itself puts around a text
TEMPLATES = {"nothing": "$A", "BOS": "<bos> $A", "EOS": "$A <eos>", "both": "<bos> $A <eos>"}


@pytest.fixture(scope="module", params=TEMPLATES)
def folder(request, tmp_path_factory):
    folder = zoo.save("gpt2", tmp_path_factory.mktemp("gpt2"))
    tokenizer = zoo.tokenizer()
    special = [(word, tokenizer.convert_tokens_to_ids(word)) for word in ("<bos>", "<eos>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=TEMPLATES[request.param], special_tokens=special
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return zoo.bridge(folder)


def test_long_texts_are_cut_as_their_tokenizer_does(folder):
    """What it puts behind a text, such as [SEP], stays: it was cut off."""
    opened = load_any(folder).model
    cut = {"truncation": True, "add_special_tokens": True}
    for text in ("w5 w6 w7 w8 w9", "w5 w6 " * 12_000):  # the second is read in parts
        for length in (3, 4, 5, 6, 9) if len(text) < 99 else (5,):
            (row,) = read_inputs(opened, [text], max_length=length).sequences()
            assert row.tolist() == opened.tokenizer(text, max_length=length, **cut)["input_ids"]
    texts = ["<bos> w5 w6 w7 w8", "w5 w6"]
    first, second = read_inputs(opened, texts, max_length=4).sequences()
    assert first.tolist()[:2] == [2, 5]
    assert second.tolist() == opened.tokenizer("w5 w6")["input_ids"]
    assert len(first) == 4


def test_opened_models_read_what_the_tokenizer_gives_and_bos_once(folder, model):
    """Where the tokenizer puts no BOS, who wants one writes it, and reads what a bridge does."""
    opened = load_any(folder).model
    plain, with_bos = read_inputs(opened, ["w5 w6", "<bos> w5 w6"]).sequences()
    made = opened.tokenizer("w5 w6")["input_ids"]
    bos = opened.tokenizer.bos_token_id
    assert plain.tolist() == made
    assert with_bos.tolist() == (made if made[0] == bos else [bos, *made])
    (bridged,) = read_inputs(model, ["w5 w6"]).sequences()
    end = opened.tokenizer.eos_token_id
    assert bridged.tolist() == [i for i in with_bos.tolist() if i != end]  # bridges take EOS off


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("by_default", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_together_as_alone(model, bare, by_default, side, monkeypatch):
    monkeypatch.setattr(model.cfg, "default_prepend_bos", by_default)
    monkeypatch.setattr(model.tokenizer, "padding_side", side)
    settings = {"prepend_bos": False} if bare else {}
    alone = [model.to_tokens(text, truncate=False, **settings)[0].tolist() for text in TEXTS]
    assert [ids.tolist() for ids in ids_of_texts(model, TEXTS, bare=bare)] == alone


def test_a_tokenizer_is_called_once_for_many_texts(model, monkeypatch):
    calls, own = [], type(model.tokenizer).__call__

    def counting(self, text, **settings):
        calls.append(len(text) if isinstance(text, list) else 1)
        return own(self, text, **settings)

    monkeypatch.setattr(type(model.tokenizer), "__call__", counting)
    ids_of_texts(model, TEXTS * 10)
    assert max(calls) == 70
    assert len(calls) < 10


def test_a_model_with_rules_of_its_own_is_asked_for_each_text(model, monkeypatch):
    own = type(model).to_tokens
    monkeypatch.setattr(type(model), "to_tokens", lambda *a, **s: own(*a, **s).repeat(1, 2))
    expected = [model.to_tokens(text, truncate=False)[0].tolist() for text in TEXTS]
    assert [ids.tolist() for ids in ids_of_texts(model, TEXTS)] == expected


def test_groups_hold_all_texts_in_their_order_and_long_ones_alone():
    texts = ["a" * n for n in (5, 2**17, 7, 2**15, *[2**15] * 40, 2**20, 3, 4)]
    groups = list(group_by_size(texts))
    assert [text for group in groups for text in group] == texts
    for group in groups:
        assert len(group) == 1 or max(map(len, group)) <= 2**16
        assert len(group) == 1 or sum(map(len, group)) <= 2**20


def test_texts_longer_than_the_context_bring_no_warning_of_indexing_errors(folder):
    """Texts that are cut into windows never run whole, of which the tokenizer knows nothing."""
    opened = load_any(folder).model
    opened.tokenizer.model_max_length = 2
    logger, said = logging.getLogger("transformers"), io.StringIO()
    handler = logging.StreamHandler(said)
    logger.addHandler(handler)
    try:
        ids_of_texts(opened, ["w5 w6 w7 w8 w9"])
        opened.to_tokens("w5 w6 w7 w8 w9", truncate=False)
    finally:
        logger.removeHandler(handler)
    assert "indexing errors" not in said.getvalue()
