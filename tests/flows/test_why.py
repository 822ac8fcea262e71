"""Why does this head look there: models by folder and in memory, texts, and what is refused."""

import pytest
import torch

from infoflow_lens import InfoFlowError, load_any, why, why_all
from infoflow_lens.hooks import measure_why
from tests.conftest import some_of
from tests.reference import zoo

TEXT = "w5 w7 w9 w11 w5 w7"


def quick(function, *args, **settings):
    return function(*args, progress=False, **settings)


@pytest.mark.parametrize("name", some_of(["gpt2", "gpt_neox", "llama"], "gpt_neox"))
def test_a_folder_and_a_text_are_enough(name, tmp_path):
    folder = zoo.save(name, tmp_path / name)
    found = quick(why, folder, TEXT, 1, 2)
    host = load_any(folder).model
    expected = measure_why(host, host.to_tokens(TEXT), 1, 2, -1)
    assert found.pieces.equal(expected.pieces)
    assert found.tokens[0] == "w7"
    line = quick(why_all, folder, TEXT).of(1, 2, found.query)
    assert (tuple(line["keys"]), line["margin"]) == (found.keys, found.margin)


def test_it_takes_what_load_any_takes(tmp_path):
    loaded = load_any(zoo.build("gpt2"), tokenizer=zoo.tokenizer())
    ids = loaded.model.to_tokens(TEXT)[0]
    of_text, of_ids, of_list, in_double = (
        quick(why, model, text, -1, -1, max_length=6)
        for model, text in (
            (loaded, TEXT),
            (loaded.model, ids),
            (loaded, ids.tolist()),
            (zoo.build("gpt2").double(), ids),
        )
    )
    assert of_text.query == 5
    assert (of_text.layer, of_text.head) == (1, 3)
    for other in (of_ids, of_list):
        assert other.pieces.equal(of_text.pieces)
    torch.testing.assert_close(in_double.pieces, of_text.pieces, rtol=1e-4, atol=1e-5)


def test_more_parts_are_named_where_more_are_asked_for():
    model = load_any(zoo.build("gpt2"))
    few, every = (
        quick(why_all, model, zoo.tokens(2, 8), strongest=n).of(1, 0, 7, sample=1) for n in (2, 100)
    )
    assert few["parts"] == every["parts"][:2]
    assert every["rest"] == pytest.approx(0, abs=1e-5)  # rounding in single precision
    assert sum(value for _, value in every["parts"]) == pytest.approx(every["margin"], abs=1e-4)
    assert len(every["parts"]) == 8


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("", {}, "text is ''"),
        ([TEXT, TEXT], {}, "2 sequences.* or give a pair of texts as a tuple"),
        (TEXT, {"layer": 2}, "layer is 2"),
        (TEXT, {"head": "0"}, "head is '0'"),
        (TEXT, {"keys": (1,)}, "keys are"),
        (TEXT, {"device": "nowhere"}, "nowhere"),
    ],
)
def test_what_does_not_fit_is_refused(text, settings, message):
    model = load_any(zoo.build("gpt2"), tokenizer=zoo.tokenizer())
    with pytest.raises(InfoFlowError, match=message):
        quick(why, model, text, **{"layer": 1, "head": 0, **settings})


def test_no_model_is_loaded_for_an_empty_text():
    with pytest.raises(InfoFlowError, match="text"):
        quick(why, "no/such/model", "", 0, 0)
