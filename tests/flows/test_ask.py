"""ask(): the front door, the command and the page of an answer."""

import errno
import json
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from typer.testing import CliRunner

from infoflow_lens import (
    Answer,
    InfoFlowError,
    PositionsProbe,
    ask,
    load_any,
    open_model,
    probe,
    run_probes,
)
from infoflow_lens.cli import app
from infoflow_lens.commands.texts import _print_answer
from infoflow_lens.flows.ask import cut_lines, find_units
from infoflow_lens.hooks.answer.question import Question
from infoflow_lens.hooks.readouts import FunctionOfOutput, LogitDifference, LogProbability
from infoflow_lens.report.answer import Form, render_answer
from tests.conftest import make_token_model
from tests.reference import families, zoo

TEXT, OTHER = "w7 w34 w29 w47 w30 w5", "w7 w34 w36 w47 w30 w5"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = zoo.save("llama", tmp_path_factory.mktemp("llama"))
    zoo.tokenizer(begins=False).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(folder):
    return load_any(folder)


@pytest.fixture(scope="module")
def found(folder):
    return ask(folder, TEXT, "w9", "w23", OTHER, progress=False)


@pytest.fixture(scope="module")
def guessed(folder):
    """Asked with a text alone."""
    return ask(folder, TEXT, quick=True, progress=False)


def logits_of(text):
    ids = torch.tensor([zoo.words().index(word) for word in text.split()])
    with torch.no_grad():
        return zoo.build("llama")(ids[None]).logits[0, -1]


def test_a_folder_a_users_model_and_a_loaded_one_have_one_answer(folder, found):
    """The model as it is, and the tokens that its tokenizer gives."""
    for text, value in ((TEXT, found.value), (OTHER, found.other_value)):
        assert value == pytest.approx(float(logits_of(text)[9] - logits_of(text)[23]), abs=1e-5)
    assert found.tokens == tuple(TEXT.split())
    assert found.readout == "'w9' against 'w23'"
    alone = zoo.build("llama", attention=None)
    for model in (alone, load_any(folder)):
        words = {} if model is not alone else {"tokenizer": zoo.tokenizer(begins=False)}
        again = ask(model, TEXT, "w9", "w23", OTHER, progress=False, **words)
        assert again.unit_effect.nan_to_num(7).equal(found.unit_effect.nan_to_num(7))
        assert (again.kept, again.lost) == (found.kept, found.lost)
    ids = [torch.tensor([zoo.words().index(w) for w in t.split()]) for t in (TEXT, OTHER)]
    again = ask(alone, ids[0], 9, 23, ids[1], quick=True, progress=False)
    assert again.value == found.value
    assert not alone.training


def test_a_hosted_model_is_asked_too(folder):
    """Through a bridge, which puts its token in front; and one of our own classes."""
    found = ask(zoo.bridge(folder), TEXT, "w9", "w23", quick=True, progress=False)
    assert isinstance(found, Answer)
    ours = make_token_model()
    ids = torch.arange(5) + 4
    found = ask(ours, ids, 3, 7, quick=True, progress=False)
    with torch.no_grad():
        logits = ours(ids[None])[0, -1]
    assert found.value == pytest.approx(float(logits[3] - logits[7]), abs=1e-5)


def test_by_default_the_two_likeliest_are_compared(guessed):
    found = guessed
    first, second = logits_of(TEXT).topk(2).indices.tolist()
    words = zoo.words()
    assert found.readout == f"{words[first]!r} against {words[second]!r}"
    assert found.guess == words[first]
    assert found.chance == pytest.approx(float(logits_of(TEXT).softmax(-1).max()), abs=1e-5)


@pytest.mark.parametrize("place", [0, 1])
def test_the_answer_that_is_likeliest_is_not_compared_with_itself(loaded, place):
    """Against the likeliest the second is asked: it was compared with itself."""
    most = logits_of(TEXT).topk(2).indices.tolist()
    found = ask(loaded, TEXT, against=most[place], quick=True, progress=False)
    words = zoo.words()
    assert found.readout == f"{words[most[1 - place]]!r} against {words[most[place]]!r}"


def test_a_classifier_is_asked_for_its_classes():
    """By their labels, which were words of the tokenizer, or by their numbers; a crash before."""
    config = zoo.build("bert").config
    config = type(config).from_dict(
        config.to_dict() | {"id2label": {0: "bad", 1: "LABEL_1", 2: "good"}}
    )
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config).eval()
    given = {"tokenizer": zoo.tokenizer(begins=False), "quick": True, "progress": False}
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, 7, 8]])).logits[0]
    names = ("bad", "class 1", "good")
    first, second = logits.topk(2).indices.tolist()
    for answers in ((), (first,), (names[first], names[second])):
        found = ask(model, "w5 w6 w7 w8", *answers, **given)
        assert found.readout == f"{names[first]} against {names[second]}"
        assert found.guess == names[first]
        assert found.answers == (names[first], names[second])
        assert found.value == pytest.approx(float(logits[first] - logits[second]), abs=1e-5)
    with pytest.raises(InfoFlowError, match=r"one of 'bad', 'class 1', 'good', or a class's num"):
        ask(model, "w5 w6 w7 w8", "fine", **given)
    config.num_labels = 1
    one = transformers.BertForSequenceClassification(config).eval()
    with pytest.raises(InfoFlowError, match="gives one number: expected two answers"):
        ask(one, "w5 w6 w7 w8", **given)


def test_what_follows_a_sentence_is_asked_by_its_classes():
    """It counts no labels, and its two classes were named as the first two tokens."""
    torch.manual_seed(0)
    model = transformers.BertForNextSentencePrediction(zoo.build("bert").config).eval()
    words = zoo.pair_tokenizer()
    given = {"tokenizer": words, "quick": True, "progress": False}
    with torch.no_grad():
        logits = model(**words("w5 w6", "w7 w8", return_tensors="pt")).logits[0]
    found = ask(model, ("w5 w6", "w7 w8"), "class 1", "class 0", **given)
    assert found.answers == ("class 1", "class 0")
    assert found.guess == f"class {int(logits.argmax())}"
    assert found.value == pytest.approx(float(logits[1] - logits[0]), abs=1e-5)
    with pytest.raises(InfoFlowError, match="one of 'class 0', 'class 1', or a class's number"):
        ask(model, ("w5 w6", "w7 w8"), "w9", **given)


def test_a_pair_of_texts_is_one_question():
    """With the types of its tokens, as a tuple or as the tokenizer makes it; it was refused."""
    torch.manual_seed(0)
    plain = transformers.BertForSequenceClassification(zoo.build("bert").config).eval()
    with torch.no_grad():
        plain.classifier.weight.mul_(60)
        plain.bert.embeddings.token_type_embeddings.weight.mul_(50)
    words = zoo.pair_tokenizer()
    pair, other = ("w5 w6", "w7 w8"), ("w5 w6", "w9 w8")
    with torch.no_grad():
        made = [words(*each, return_tensors="pt") for each in (pair, other)]
        logits = [plain(**each).logits[0] for each in made]
    assert made[0]["token_type_ids"].any()
    model = open_model(plain, words)
    given = {"readout": LogitDifference(1, 0), "progress": False}
    found = ask(model, pair, instead=other, **given)
    for value, row in zip((found.value, found.other_value), logits, strict=True):
        assert value == pytest.approx(float(row[1] - row[0]), abs=1e-5)
    assert found.changed == (4,)
    assert " ".join(found.tokens) == "<bos> w5 w6 <eos> w7 w8 <eos>"
    assert float(found.token_other[4]) == pytest.approx(-found.gap, abs=1e-5)
    for text in (words(*pair), dict(made[0]), [pair]):
        assert ask(model, text, instead=other, **given, quick=True).value == found.value
    likely = ask(model, pair, quick=True, progress=False)
    assert likely.guess == f"class {int(logits[0].argmax())}"
    with pytest.raises(InfoFlowError, match="text and instead differ in token_type_ids: expected"):
        ask(model, pair, instead=("w5", "w6 w9 w8"), **given)
    with pytest.raises(InfoFlowError, match="instead differ in token_type_ids"):
        ask(model, pair, instead=made[1]["input_ids"][0], **given)
    with pytest.raises(
        InfoFlowError,
        match="text holds 2 sequences: expected one; ask for each alone, or give a pair",
    ):
        ask(model, [pair, other], **given)


def test_token_ids_are_a_list_an_array_or_a_tensor(loaded):
    ids = [zoo.words().index(word) for word in TEXT.split()]
    other = [zoo.words().index(word) for word in OTHER.split()]
    values = {
        ask(loaded, kind(ids), 9, 23, kind(other), at=at, quick=True, progress=False).value
        for kind in (list, np.array, torch.tensor)
        for at in (None, -1)
    }
    assert len(values) == 2  # with and without the last token


def test_texts_that_differ_inside_of_a_character_differ(folder):
    """Tokens that are shown alike were none that differ."""
    words = zoo.tokenizer(begins=False)
    spell = words.decode
    alike = SimpleNamespace(w29="?", w36="?")
    model = load_any(folder, backend="opened").model
    model.tokenizer = words
    words.decode = lambda ids, **more: getattr(alike, spell(ids, **more), spell(ids, **more))
    found = ask(model, TEXT, "w9", "w23", OTHER, quick=True, progress=False)
    assert found.tokens == found.other_tokens
    assert found.changed == (2,)
    assert "with ? in the place of" in found.describe_tokens()


def test_a_function_of_the_output_gets_one_tensor(loaded):
    readout = FunctionOfOutput(lambda output: output.start_logits[:, 3])
    with pytest.raises(InfoFlowError, match="expected a function of one tensor"):
        ask(loaded, TEXT, readout=readout, quick=True, progress=False)


def test_json_of_the_command_is_json(folder):
    """It held NaN."""
    line = ["ask", str(folder), TEXT, "--answer", "w9", "--quick", "--json", "--quiet"]
    shown = CliRunner().invoke(app, line)
    assert shown.exit_code == 0, shown.output
    refuse = pytest.fail
    assert json.loads(shown.output, parse_constant=refuse)["heads"]


@pytest.mark.parametrize("command", ["ask", "flow"])
def test_what_was_measured_is_printed_where_the_page_cannot_be_written(
    command, folder, tmp_path, monkeypatch
):
    """It was lost, and the error said that what was finished was kept."""

    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    line = [command, str(folder), TEXT, "--quiet", "--out", str(tmp_path / "page.html")]
    line += ["--answer", "w9", "--quick"] if command == "ask" else ["--influence", "none"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        shown = CliRunner().invoke(app, line)
    assert shown.exit_code == 2
    said = "The model says" if command == "ask" else "Influence was not measured"
    assert said in shown.stdout
    assert "page:" not in shown.stdout
    assert "No space left" in shown.stderr


def test_answers_of_several_tokens_are_told_by_the_first_that_differs(loaded):
    found = ask(loaded, TEXT, "w9 w10 w11", "w9 w12", OTHER, quick=True, progress=False)
    assert found.tokens == (*TEXT.split(), "w9")
    assert found.readout == "'w10' against 'w12'"
    expected = logits_of(TEXT + " w9")
    assert found.value == pytest.approx(float(expected[10] - expected[12]), abs=1e-5)


def test_a_masked_word_is_asked_at_the_mask(tmp_path, capsys):
    folder = zoo.save("bert", tmp_path / "bert")
    words = zoo.tokenizer(begins=False)
    words.mask_token = "w49"
    found = ask(
        zoo.build("bert"), "w5 w49 w7 w8", "w9", "w23", "w5 w49 w7 w20",
        tokenizer=words, quick=True, progress=False,
    )  # fmt: skip
    ids = torch.tensor([[5, 49, 7, 8]])
    with torch.no_grad():
        logits = zoo.build("bert")(ids).logits[0, 1]
    assert found.value == pytest.approx(float(logits[9] - logits[23]), abs=1e-5)
    assert folder.is_dir()
    _print_answer(found)  # it said "from the end of the text"
    assert "Where they look from w49@1\n" in capsys.readouterr().out


def test_of_many_words_those_that_change_most_are_printed(found, capsys, monkeypatch):
    monkeypatch.setattr("infoflow_lens.commands.texts._MOST_WORDS", 2)
    _print_answer(found)
    printed = capsys.readouterr().out.partition("Words: ")[2].partition("Heads and MLPs")[0]
    table = found.to_frame("tokens")
    sizes = table[["effect", "effect of the other token"]].abs().max(axis=1)
    first, second = sorted(sizes.nlargest(2).index)
    names = [line.split(":")[0].strip(" -") for line in printed.splitlines()[1:3]]
    assert names == [found.name_span(first), found.name_span(second)]
    assert "4 others change it less" in printed


def test_a_line_break_is_written_as_one(found, capsys):
    """It was written with two backslashes."""
    broken = replace(found, guess="\\n", replacements=(("\\n",),) * len(found.replacements))
    _print_answer(broken)
    printed = capsys.readouterr().out
    assert r"The model says '\n' (" in printed
    assert r" by '\n'" in printed


@pytest.fixture
def masked():
    words = zoo.tokenizer(begins=False)
    words.mask_token = "w49"
    return {"model": zoo.build("bert"), "tokenizer": words, "quick": True, "progress": False}


def test_what_answers_share_stands_before_the_mask(masked):
    """It was read behind the text, as where the text goes on."""
    other = "w5 w49 w7 w20"
    found = ask(text="w5 w49 w7 w8", answer="w9 w10", against="w9 w12", instead=other, **masked)
    assert found.tokens == ("w5", "w9", "w49", "w7", "w8")
    assert found.other_tokens == ("w5", "w9", "w49", "w7", "w20")
    with torch.no_grad():
        logits = zoo.build("bert")(torch.tensor([[5, 9, 49, 7, 8]])).logits[0, 2]
    assert found.read_at == 2
    assert found.value == pytest.approx(float(logits[10] - logits[12]), abs=1e-5)


def test_an_encoder_is_asked_at_a_mask_alone(masked):
    """It was asked at the last token, which is [SEP], and the other text at what it has there."""
    with pytest.raises(InfoFlowError, match="the text has no mask, and the BertForMaskedLM"):
        ask(text="w5 w6 w7 w8", answer="w9", against="w12", **masked)
    with pytest.raises(InfoFlowError, match="the text has no mask"):
        ask(text="w5 w6 w7 w8", **masked)
    with pytest.raises(InfoFlowError, match=r"text has its mask at position 1, .* same place"):
        ask(text="w5 w49 w7", answer="w9", against="w12", instead="w5 w7 w49", **masked)
    read = LogitDifference("w9", "w12", 3)  # a place that one names
    assert ask(text="w5 w6 w7 w8", readout=read, **masked).read_at == 3


def test_answers_are_chosen_without_dropout():
    """Of a model in training mode they were the likeliest two of one draw."""
    config = zoo.build("gpt2").config
    config.resid_pdrop = config.embd_pdrop = 0.5
    model = transformers.GPT2LMHeadModel(config)
    model.load_state_dict(zoo.build("gpt2").state_dict())
    given = {"tokenizer": zoo.tokenizer(), "quick": True, "progress": False}
    text = TEXT[:11]  # three words
    expected = ask(model.eval(), text, **given).readout
    assert {ask(model.train(), text, **given).readout for _ in range(2)} == {expected}
    assert model.training


def test_a_question_goes_on_in_its_folder(folder, found, tmp_path, monkeypatch):
    """Ctrl-C in a pass; the command says what it prints without an interruption."""
    place, calls = tmp_path / "kept", []
    read = Question._read

    def stopping(self, *given):
        calls.append(given)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return read(self, *given)

    monkeypatch.setattr(Question, "_read", stopping)
    given = (TEXT, "w9", "w23", OTHER)
    with pytest.raises(KeyboardInterrupt, match=r"ask the same with resume='.*kept' \(--resume"):
        ask(folder, *given, progress=False, resume=place)
    again = ask(folder, *given, progress=False, resume=place)
    assert again.token_mean.equal(found.token_mean)
    assert again.path_effect.equal(found.path_effect)
    n = len(calls)
    line = ["ask", str(folder), TEXT, "--answer", "w9", "--against", "w23", "--instead", OTHER]
    shown = CliRunner().invoke(app, [*line, "--quiet", "--resume", str(place)])
    assert found.summary() in shown.output.replace("\n", "")
    assert len(calls) == n  # all is kept
    with pytest.raises(InfoFlowError, match="resume is of another run: inputs"):
        ask(folder, TEXT + " w8", "w9", "w23", quick=True, progress=False, resume=place)


def test_the_folder_of_another_run_is_left_as_it_is(folder, tmp_path):
    """Answers were kept in it, and its manifest named what no run of its kind writes."""
    place = tmp_path / "probed"
    probe(folder, [TEXT, OTHER], place, probes=("positions",), progress=False)
    before = {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}
    with pytest.raises(InfoFlowError, match="holds a run of something else"):
        ask(folder, TEXT, "w9", "w23", quick=True, progress=False, resume=place)
    assert {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()} == before


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"answer": "w9", "readout": LogProbability(9)}, "a readout is given beside answers"),
        ({"answer": "w9 w10", "against": "w9"}, "do not differ in any token"),
        ({"answer": ""}, "expected a word"),
        ({"instead": "w5 w6"}, "have 6 and 2 tokens"),
        ({"instead": TEXT}, "the two texts have the same tokens"),
        ({"text": ""}, "text"),
        ({"answer": -9}, "the answer is -9: expected an id from 0 on"),
        ({"answer": 9, "against": 2300}, "expected ids from 0 to 49"),
        ({"batch_size": 0}, "batch_size"),
        ({"readout": "w9"}, r"readout is 'w9': expected a Readout such as LogitDifference\("),
        ({"readout": len}, r"or FunctionOfOutput\(f\) for a function f of the logits"),
    ],
)
def test_questions_that_cannot_be_asked_are_refused(loaded, given, match):
    with pytest.raises(InfoFlowError, match=match):
        ask(**{"model": loaded, "text": TEXT, "progress": False, **given})


@pytest.mark.parametrize(("at", "place"), [(3, 3), (-1, 5)])
def test_why_a_token_of_the_text_is_asked_of_what_stands_before_it(loaded, at, place):
    words = TEXT.split()
    found = ask(loaded, TEXT, at=at, quick=True, progress=False)
    assert found.tokens == tuple(words[:place])
    logits = logits_of(" ".join(words[:place]))
    said = zoo.words().index(words[place])
    logits[said], value = -torch.inf, float(logits[said])
    assert found.value == pytest.approx(value - float(logits.max()), abs=1e-5)
    assert found.readout.startswith(f"{words[place]!r} against")
    both = ask(loaded, TEXT, "w9", "w23", OTHER, at=at, quick=True, progress=False)
    assert both.other_tokens == tuple(OTHER.split()[:place])


@pytest.mark.parametrize("at", [0, 6, -6, 99])
def test_a_place_that_cannot_be_asked_is_refused(loaded, at):
    with pytest.raises(InfoFlowError, match=f"at is {at}, and the text has 6 tokens"):
        ask(loaded, TEXT, at=at, progress=False)
    with pytest.raises(InfoFlowError, match="put the mask in the place of that token"):
        ask(zoo.build("bert"), torch.tensor([5, 6, 7]), at=1, progress=False)


def test_a_place_of_a_text_with_types_is_asked_with_those_before_it(folder):
    """It was refused, and the error named another way to measure."""
    model = zoo.build("gpt2")
    ids = torch.tensor([[zoo.words().index(word) for word in TEXT.split()]])
    types = torch.tensor([[3, 3, 3, 4, 4, 4]])
    given = {"input_ids": ids, "token_type_ids": types}
    with torch.no_grad():
        logits = model(ids[:, :4], token_type_ids=types[:, :4]).logits[0, -1]
        without = model(ids[:, :4]).logits[0, -1]
    found = ask(model, given, ids[0, 4].item(), 9, at=4, quick=True, progress=False)
    assert found.value == pytest.approx(float(logits[ids[0, 4]] - logits[9]), abs=1e-5)
    assert abs(found.value - float(without[ids[0, 4]] - without[9])) > 1e-3
    assert ask(model, given, None, 9, at=4, quick=True, progress=False).value == found.value


def test_the_other_text_of_a_place_is_as_long_as_the_text_or_as_what_is_read(loaded):
    """A longer one was taken, and cut."""
    part = " ".join(OTHER.split()[:5])
    for other in (OTHER, part):
        found = ask(loaded, TEXT, "w9", "w23", other, at=5, quick=True, progress=False)
        assert " ".join(found.other_tokens) == part
    for other in (OTHER + " w8", " ".join(OTHER.split()[:4]), OTHER + " w8" * zoo.N_CTX):
        with pytest.raises(InfoFlowError, match="text has 6 tokens and instead has"):
            ask(loaded, TEXT, "w9", "w23", other, at=5, quick=True, progress=False)


@pytest.mark.parametrize("at", [5, 7 - zoo.N_CTX])
def test_of_a_text_that_is_too_long_the_beginning_is_asked(at):
    """It was refused, though what stands behind is not read."""
    words = [*TEXT.split(), *["w5"] * zoo.N_CTX]
    words = words[: zoo.N_CTX + 2] if at < 0 else words
    place = at % len(words)
    given = {"tokenizer": zoo.tokenizer(begins=False), "quick": True, "progress": False}
    expected = ask(zoo.build("gpt2"), " ".join(words[: place + 1]), at=place, **given)
    long = " ".join(words)
    ids = torch.tensor([zoo.words().index(word) for word in words])
    with_mask = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
    for text in (long, with_mask) if at < 0 else (ids,):
        found = ask(zoo.build("gpt2"), text, at=at, **given)
        assert (found.value, found.tokens) == (expected.value, expected.tokens)
    pairs = {**given, "tokenizer": zoo.pair_tokenizer()}
    pair = (" ".join(words[:3]), " ".join(words[3:]))
    found = ask(zoo.build("gpt2"), pair, at=5, **pairs)  # in which three tokens are the tokenizer's
    assert found.tokens == ("<bos>", *words[:3], "<eos>")
    with pytest.raises(InfoFlowError, match="at most n_ctx"):
        ask(zoo.build("gpt2"), long, at=len(words) - 1, **given)


def test_what_was_measured_is_not_kept_beside_weights(folder, tmp_path):
    """It was; and a number for a folder ended in a TypeError."""
    before = sorted(path.name for path in folder.iterdir())
    for place in (folder, folder / "config.json", 3, [], True, "\0"):
        with pytest.raises(InfoFlowError, match=r"holds a model, and nothing|config.json|no path"):
            ask(folder, TEXT, "w9", "w23", OTHER, quick=True, progress=False, resume=place)
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize("answers", [(), ("w9 w10", "w9 w12")])
def test_a_text_that_is_too_long_is_refused_with_what_ask_takes(answers):
    """It advised a setting that ask has not; what answers share counts, too."""
    model = zoo.build("gpt2")
    long = " ".join(["w5"] * (zoo.N_CTX - len(answers) // 2 + 1))
    with pytest.raises(InfoFlowError, match=f"at most n_ctx {zoo.N_CTX}: expected fewer; shorten"):
        ask(model, long, *answers, tokenizer=zoo.tokenizer(), quick=True, progress=False)


def test_a_pair_of_nothing_is_refused():
    """It ran, on what the tokenizer puts around two texts."""
    model = open_model(zoo.build("bert"), zoo.pair_tokenizer())
    with pytest.raises(InfoFlowError, match=r"is \('', ''\): expected texts that are not empty"):
        ask(model, ("", ""), readout=LogitDifference(7, 8), quick=True, progress=False)
    pairs = [("w5", ""), ("", "w5"), ("", "")]
    with pytest.raises(InfoFlowError, match=r"inputs\[2\] is \('', ''\)"):
        run_probes(model, pairs, [PositionsProbe()], progress=False)
    run_probes(model, pairs[:2], [PositionsProbe()], progress=False)


def test_words_need_a_tokenizer():
    with pytest.raises(InfoFlowError, match="tokenizer"):
        ask(zoo.build("llama"), TEXT, progress=False)
    ids = torch.tensor([7, 34, 29])
    with pytest.raises(InfoFlowError, match="'w9' is a word, but the model has no tokenizer"):
        ask(zoo.build("llama"), ids, "w9", progress=False)


def test_the_command_prints_what_the_function_found(folder, found, tmp_path):
    page = tmp_path / "answer.html"
    line = ["ask", str(folder), TEXT, "--answer", "w9", "--against", "w23", "--instead", OTHER]
    shown = CliRunner().invoke(app, [*line, "--out", str(page), "--quiet"])
    assert shown.exit_code == 0, shown.output
    assert found.summary() in shown.output.replace("\n", "")
    for sentence, _ in found.bundles():
        assert sentence in shown.output
    assert f"- {found.tokens[1]}@1: " in shown.output  # of equal tokens it is seen which one
    text = page.read_text()
    assert found.summary().replace("'", "&#39;") in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    again = CliRunner().invoke(app, [*line, "--json", "--quick", "--quiet"])
    told = json.loads(again.stdout)
    assert told["value"] == pytest.approx(found.value)
    assert {"tokens", "states", "heads", "paths"} <= set(told)


def test_what_texts_hold_is_no_markup_on_the_page(found, tmp_path):
    import dataclasses

    evil = dataclasses.replace(found, tokens=("<script>alert(1)</script>", *found.tokens[1:]))
    text = evil.to_html(tmp_path / "x.html").read_text()
    assert "<script>alert" not in text


def test_the_form_counts_positions_as_the_page_does(found):
    """It said "from 1 on", of positions that are counted from 0 and of which 0 cannot be asked."""
    page = render_answer(found, Form(TEXT))
    assert "<label>At position, such as 3 for Word@3 <input" in page
    assert "Word@3 is the word at position 3, counted from 0" in page


def test_a_notebook_shows_the_summary(found):
    shown = found._repr_html_()
    assert "Answer" in shown
    assert "The model says" in shown
    assert repr(found).startswith("Answer(The model says")


def test_the_picture_has_every_strip_and_every_bundle(found):
    from infoflow_lens.report.strips import draw_strips

    picture = str(draw_strips(found))
    assert picture.count('class="cell"') == found.strips.numel()
    bundles = found.bundles()
    effects = [abs(float(found.path_effect[group].sum())) for _, group in bundles]
    drawn = sorted(range(len(bundles)), key=lambda number: -effects[number])[:12]
    assert picture.count('<a href="#line-') == len(drawn)
    for number in drawn:
        assert f"{number + 1}. {bundles[number][0]}" in picture
    signed = [float(found.path_effect[group].sum()) / found.gap for _, group in bundles]
    assert signed == sorted(signed)  # what speaks most for the answer first
    kinds = {int(found.places[bundles[number][1][0]][6]) for number in drawn}
    assert picture.count("swatch") == len(kinds)
    shares = (-found.strips / found.gap).clamp(0, 1)
    for share in shares.flatten().tolist():
        assert f'fill-opacity="{share:.3f}"' in picture


def test_lines_are_cut_at_once_by_their_numbers(loaded, guessed):
    found = guessed
    bundles = found.bundles()
    number, group = next((n, g) for n, (_, g) in enumerate(bundles, 1) if len(g) == 1)
    effect = cut_lines(loaded, found, [number])
    assert effect == pytest.approx(float(found.path_effect[group[0]]), abs=1e-4)
    same = ((number for _ in range(2)), np.array([number]), torch.tensor([number]), {number})
    for lines in same:
        assert cut_lines(loaded, found, lines) == effect
    for lines in ([], [0], [len(bundles) + 1]):
        with pytest.raises(InfoFlowError, match=f"of 1 to {len(bundles)}, the lines of this"):
            cut_lines(loaded, found, lines)
    for lines in (1, True, [True], None, "1", b"1", 1.0, [1.0], np.eye(2), [None], {number: 1}):
        with pytest.raises(InfoFlowError, match=r"^lines (is|are) .*expected"):
            cut_lines(loaded, found, lines)
    with pytest.raises(InfoFlowError, match="expected the model and the readout of the answer"):
        cut_lines(zoo.build("gpt2"), found, [1])


def test_a_page_without_lines_speaks_of_none(folder, found, tmp_path):
    drawn = found.to_html(tmp_path / "drawn.html").read_text()
    assert ("Lines: what decides" in drawn) == bool(found.bundles())
    # the other way round the model prefers the other answer
    plain = ask(folder, TEXT, "w23", "w9", OTHER, progress=False)
    least = min((found, plain), key=lambda answer: len(answer.places))
    assert not least.bundles()
    assert "Lines:" not in least.to_html(tmp_path / "plain.html").read_text()


def test_words_are_what_the_tokenizer_writes_without_a_blank(tmp_path):
    """As byte-level BPE, SentencePiece and WordPiece write them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = {
        "bytes": (["<s>", "un", "happ", "y", "Ġcat", "s", "Ġ", "Ċ", "?"], decoders.ByteLevel()),
        "blanks": (["<s>", "▁un", "happ", "y", "▁cat", "s", "?"], decoders.Metaspace()),
        "pieces": (["<s>", "un", "##happ", "##y", "cat", "##s", "?"], decoders.WordPiece()),
    }
    expected = {
        "bytes": ([0, 1, 2, 3, 4, 5, 8, 7, 1], [(0, 1), (1, 4), (4, 7), (7, 8), (8, 9)]),
        "blanks": ([0, 1, 2, 3, 4, 5, 6], [(0, 1), (1, 4), (4, 7)]),
        "pieces": ([0, 1, 2, 3, 4, 5], [(0, 1), (1, 4), (4, 6)]),
    }
    for name, (words, decoder) in pieces.items():
        made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "?"))
        made.decoder, made.pre_tokenizer = decoder, pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")
        ids, spans = expected[name]
        assert find_units(SimpleNamespace(tokenizer=tokenizer), torch.tensor(ids), "words") == spans


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two two! Three?", ["One.", "Two two!", "Three?"]),
        ("He has 3.5 of it, e.g. here. She said: \"No.\" Then", [
            "He has 3.5 of it, e.g. here.", 'She said: "No."', "Then",
        ]),
        ("a title\n\nA line (of it.) More", ["a title\n\n", "A line (of it.)", "More"]),
        ("\u597d\u3002\u597d\uff01\u597d", ["\u597d\u3002", "\u597d\uff01", "\u597d"]),
        ("", []),
    ],
)  # fmt: skip
def test_sentences_end_behind_stops_and_line_breaks(text, sentences):
    """Of single bytes, after a token that begins the text."""
    tokenizer = load_any("stdlib-2l", backend="opened").tokenizer
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
    spans = find_units(SimpleNamespace(tokenizer=tokenizer), ids, "sentences")
    said = [tokenizer.decode(ids[slice(*span)]) for span in spans or [(0, 1)]]
    assert [said[0], *map(str.strip, said[1:])] == ["<|endoftext|>", *map(str.strip, sentences)]


def test_units_are_said_on_the_page_and_by_the_command(folder, found, tmp_path):
    spans = ask(folder, TEXT, "w9", "w23", OTHER, units=[(1, 3)], progress=False)
    assert spans.spans.tolist() == [[0, 1], [1, 3], [3, 4], [4, 5], [5, 6]]
    assert spans.to_frame("tokens")["token"].tolist() == ["w7", "w34 w29", "w47", "w30", "w5"]
    page = spans.to_html(tmp_path / "units.html").read_text()
    assert page.count('class="cell"') == spans.strips.numel() == 5 * len(spans.strip_layers)
    assert "were exchanged at once" in page
    assert "were exchanged at once" not in found.to_html(tmp_path / "single.html").read_text()
    by_function = ask(
        folder, TEXT, "w9", "w23", OTHER, quick=True, progress=False,
        units=lambda words: [(words.index("w34"), words.index("w47"))],
    )  # fmt: skip
    assert by_function.spans.equal(spans.spans)
    alone = ask(folder, TEXT, "w9", "w23", OTHER, units="words", progress=False)
    assert alone.token_mean.equal(found.token_mean)  # whose words are tokens
    line = ["ask", str(folder), TEXT, "--quick", "--quiet", "--units"]
    assert CliRunner().invoke(app, [*line, "words"]).exit_code == 0
    assert CliRunner().invoke(app, [*line, "sentences"]).exit_code == 0
    refused = CliRunner().invoke(app, [*line, "lines"])
    assert refused.exit_code == 2
    assert "units are 'lines': expected spans" in refused.stderr


@pytest.mark.parametrize(
    "units", [[(0, 7)], [(2, 2)], [(-1, 2)], [(0, 2), (1, 3)], [(0, 1, 2)], 3, [0], "lines"]
)
def test_units_that_are_none_are_refused(loaded, units):
    with pytest.raises(InfoFlowError, match="expected spans"):
        ask(loaded, TEXT, quick=True, units=units, progress=False)


def test_states_are_no_words():
    """A sentence encoder said its first dimension as a word, and then, in an error, two of them."""
    config = zoo.build("bert").config
    model = open_model(transformers.BertModel(config).eval(), zoo.tokenizer(begins=False))
    for answers in (("w5", "w6"), ()):
        with pytest.raises(InfoFlowError, match=r"^an answer .* expected readout=EmbeddingCosine"):
            ask(model, "w5 w6 w7 w8", *answers, progress=False)


def test_two_answers_never_have_one_name():
    """As parts of two emoji, and numbers behind the tokenizer's words, of which nothing is read."""
    model = open_model(families.build("llama"), zoo.tokenizer(begins=False))
    found = ask(model, "w5 w6 w7 w8", 60, 70, quick=True, progress=False)
    assert found.answers == ("'' (token 60)", "'' (token 70)")
    assert "'' (token 60) against '' (token 70), is" in found.summary()
