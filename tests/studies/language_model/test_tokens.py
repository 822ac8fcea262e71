import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from infoflow_lens.studies.language_model.tokens import (
    END_OF_TEXT_ID,
    save_tokenizer,
    token_stream,
    train_tokenizer,
)

TEXTS = ["def f(x):\n    return x\n" * 20, "class A:\n    x = 'é'\n" * 20]
TOKENIZER = train_tokenizer(TEXTS, 270)


@settings(max_examples=20)
@given(st.lists(st.integers(0, 0x10FFFF).filter(lambda n: not 0xD800 <= n < 0xE000)))
def test_any_text_comes_back(numbers):
    text = "".join(map(chr, numbers))
    ids = TOKENIZER.encode(text).ids
    assert TOKENIZER.decode(ids) == text


def test_it_has_all_bytes_and_the_size_that_was_asked():
    assert TOKENIZER.get_vocab_size() == 270
    assert TOKENIZER.token_to_id("<|endoftext|>") == END_OF_TEXT_ID
    assert len(TOKENIZER.encode("return").ids) < len("return")


def test_the_stream_has_every_text_behind_a_mark():
    stream = token_stream(TOKENIZER, ["ab", "", "cd"])
    marks = (stream == END_OF_TEXT_ID).nonzero().flatten().tolist()
    assert marks == [0, 1 + len(TOKENIZER.encode("ab").ids), 2 + len(TOKENIZER.encode("ab").ids)]
    assert TOKENIZER.decode(stream.tolist()) == "abcd"  # the mark is no text


def test_saved_it_is_what_transformers_loads(tmp_path):
    """By a class that transformers 4 and 5 both have."""
    save_tokenizer(TOKENIZER, tmp_path, 64)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in (*TEXTS, "unseen: ß\t\t\n\n  🙂"):
        ids = loaded(text, add_special_tokens=False).input_ids
        assert ids == TOKENIZER.encode(text).ids
        assert loaded(text).input_ids == [END_OF_TEXT_ID, *ids]
        assert loaded.decode(ids) == text
    assert loaded.bos_token_id == loaded.eos_token_id == END_OF_TEXT_ID
    assert loaded.model_max_length == 64
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_a_vocabulary_learnt_again_is_the_same():
    assert train_tokenizer(TEXTS, 270).to_str() == TOKENIZER.to_str()


@pytest.mark.parametrize("texts", [[], [""]])
def test_no_texts_are_no_tokens(texts):
    assert len(token_stream(TOKENIZER, texts)) == len(texts)
