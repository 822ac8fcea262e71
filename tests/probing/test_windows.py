"""Texts joined and cut into windows."""

import json

import pytest
import torch

from infoflow_lens import InfoFlowError, load_any
from infoflow_lens.probing import data as reading
from infoflow_lens.probing import store as windowing
from infoflow_lens.probing.data import read_texts
from infoflow_lens.probing.store import spread_windows, token_stream
from tests.reference import zoo
from tests.reference.data import read_data


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    zoo.save("gpt2", folder)
    return load_any(folder).model


def test_each_text_brings_what_the_tokenizer_puts_before_it(model):
    prefix, stream = token_stream(model, ["w5 w6", "w7"])
    bos = model.to_tokens("w5")[0, 0]
    assert prefix.tolist() == [bos]
    assert stream.tolist() == [bos, 5, 6, bos, 7]


def test_windows_share_no_token_and_lie_evenly():
    prefix, stream = torch.tensor([0]), torch.cat([torch.tensor([0]), torch.arange(1, 101)])
    rows = spread_windows(prefix, stream, 6, 4)
    assert (rows[:, 0] == 0).all()
    assert rows[:, 1].tolist() == [1, 32, 64, 96]
    assert (rows[:, 1:].diff(dim=1) == 1).all()
    every = spread_windows(prefix, stream, 6, None)
    assert sorted(every[:, 1:].flatten().tolist()) == list(range(1, 101))


def test_a_text_shorter_than_a_window_is_refused(model):
    prefix, stream = token_stream(model, ["w5 w6"])
    with pytest.raises(InfoFlowError, match="has 2 tokens: expected at least 9"):
        spread_windows(prefix, stream, 10, 3)
    with pytest.raises(InfoFlowError, match="window is 1"):
        spread_windows(prefix, stream, 1, 3)


def test_a_text_file_is_one_text_with_its_line_breaks(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one\n\n    two\n")
    assert read_texts(str(path)) == ["one\n\n    two\n"]
    path.write_text(" \n")
    with pytest.raises(InfoFlowError, match="holds no text"):
        read_texts(str(path))


def test_rows_of_texts_and_of_ids(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"body": text}) for text in ("a b", "c")))
    assert read_texts(str(path)) is None  # nobody knows the column
    assert read_texts(str(path), "body") == ["a b", "c"]
    path.write_text(json.dumps({"input_ids": [1, 2]}))
    assert read_texts(str(path)) is None
    assert read_texts("repeated") is None


def test_a_file_is_read_in_windows_of_equal_length(model, tmp_path):
    path = tmp_path / "rows.jsonl"
    texts = [" ".join(f"w{i}" for i in range(4, 4 + n)) for n in (7, 3, 12)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    found = read_data(model, str(path), window=6, n=3)
    assert found.sequences().shape == (3, 6)
    ids = tmp_path / "ids.pt"
    torch.save(zoo.tokens(4, 9), ids)
    assert read_data(model, str(ids), window=6).sequences().shape == (4, 6)


@pytest.mark.parametrize("lines", ["one", "many"])
def test_long_texts_are_read_to_their_end(model, tmp_path, monkeypatch, lines):
    """In pieces that end with a line or a word, with one beginning-of-sequence before all."""
    monkeypatch.setattr(reading, "_PIECE", 1000)
    monkeypatch.setattr(windowing, "_PIECE", 300)
    words = [f"w{4 + i % 40}" for i in range(30_000)]
    text = " ".join(words) if lines == "one" else "\n".join(words)
    path = tmp_path / "long.txt"
    path.write_text(text)
    bos, *expected = model.to_tokens(text, truncate=False)[0].tolist()
    prefix, stream = token_stream(model, [text])
    assert stream.tolist() == [bos, *expected]
    rows = read_data(model, str(path), window=11).sequences()
    assert rows.shape == (len(expected) // 10, 11)
    assert (rows[:, 0] == bos).all()
    assert rows[:, 1:].flatten().tolist() == expected
    assert rows[5::7].equal(spread_windows(prefix, stream, 11, None)[5::7])
    assert read_texts(str(path)) == [text]
