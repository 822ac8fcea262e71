"""Pairs of texts in commands: a model of two texts reads both, with their types."""

import json
import time
from threading import Thread
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest
import torch
import transformers
from markupsafe import escape
from typer.testing import CliRunner

from infoflow_lens import ask, flow, why
from infoflow_lens.cli import app
from infoflow_lens.flows.serve import AnswerServer
from tests.reference import zoo

FIRST, SECOND, OTHER = "w5 w6", "w7 w8", "w9 w8"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A classifier of pairs in which the types of tokens matter."""
    torch.manual_seed(0)
    config = zoo.build("bert").config
    config.id2label, config.label2id = {0: "no", 1: "yes"}, {"no": 0, "yes": 1}
    model = transformers.BertForSequenceClassification(config).eval()
    with torch.no_grad():
        model.classifier.weight.mul_(60)
        model.bert.embeddings.token_type_embeddings.weight.mul_(50)
    folder = tmp_path_factory.mktemp("pairs")
    model.save_pretrained(folder)
    words = zoo.pair_tokenizer()
    words.save_pretrained(folder)
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    # transformers saves them where they were given to the tokenizer's class alone
    config.write_text(json.dumps(settings | {"model_input_names": words.model_input_names}))
    return folder


def call(*words):
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == 0, done.output
    return done.stdout


def refuse(*words):
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == 2, done.output
    return " ".join(done.stderr.split())


def test_an_answer_is_that_of_the_pair(folder):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    words = zoo.pair_tokenizer()
    with torch.no_grad():
        logits = [
            model(**words(*pair, return_tensors="pt")).logits[0]
            for pair in ((FIRST, SECOND), (FIRST, OTHER))
        ]
    line = ["ask", folder, FIRST, "--second", SECOND, "--quick", "--json", "--quiet"]
    more = ["--instead", FIRST, "--instead-second", OTHER]
    found = json.loads(call(*line, *more))
    one, other = logits[0].topk(2).indices.tolist()
    assert found["value"] == pytest.approx(float(logits[0][one] - logits[0][other]), abs=1e-4)
    assert found["other"] == pytest.approx(float(logits[1][one] - logits[1][other]), abs=1e-4)
    same = json.loads(call(*line, "--instead", "w9 w6"))  # the second text stays
    with torch.no_grad():
        row = model(**words("w9 w6", SECOND, return_tensors="pt")).logits[0]
    assert same["other"] == pytest.approx(float(row[one] - row[other]), abs=1e-4)
    said = refuse(*line, "--instead-second", OTHER)
    assert "the other pair is 'w9 w8', and a pair is missing: expected a second text" in said


def test_a_picture_is_that_of_the_pair(folder, tmp_path):
    out, given = tmp_path / "flow.html", {"progress": False}
    shown = call("flow", folder, FIRST, "--second", SECOND, "--out", out, "--quiet")
    assert flow(folder, [(FIRST, SECOND)], **given).summary() in shown
    beside = ["flow", folder, FIRST, "--second", SECOND, "--with", "w9 w6"]
    shown = call(*beside, "--out", out, "--overwrite", "--quiet")
    assert flow(folder, [("w9 w6", SECOND)], **given).summary() in shown
    said = refuse("flow", folder, FIRST, "w9", "--second", SECOND, "--out", out, "--overwrite")
    assert "expected one text before it, not 2" in said


def test_a_reason_is_of_the_pair(folder):
    line = ["why", folder, FIRST, "--second", SECOND, "--layer", "1", "--head", "0", "--json"]
    found, expected = json.loads(call(*line)), why(folder, (FIRST, SECOND), 1, 0)
    assert found["tokens"] == list(expected.tokens)
    assert found["margin"] == pytest.approx(expected.margin, abs=1e-5)


def test_a_served_page_asks_of_pairs(folder, monkeypatch):
    """Of the one that was given, and of those that are typed.

    A label is no token, so that nothing stands there to be pressed; half a pair is refused in words
    that the page has, beside fields in which it can be completed.
    """
    pytest.importorskip("tornado", reason="the extra serve is not installed")
    run, pages = AnswerServer.run, []
    typed = {"text": OTHER, "second": SECOND, "instead": FIRST, "instead_second": SECOND}
    half = {"text": OTHER, "instead": FIRST, "instead_second": SECOND}

    def run_and_ask(server, first, ready, idle, **more):
        def ask_again():
            try:
                pages.append(urlopen(server.address).read().decode())
                for fields in (typed, half):
                    page = urlopen(Request(server.address, urlencode(fields).encode()))
                    while "It is being measured" in (said := urlopen(page.url).read().decode()):
                        time.sleep(0.02)
                    pages.append(said)
            finally:
                server.stop()

        return run(server, first, Thread(target=ask_again).start, idle, **more)

    monkeypatch.setattr(AnswerServer, "run", run_and_ask)
    call("serve", folder, FIRST, "--second", SECOND, "--quick", "--quiet")
    pairs = ((FIRST, SECOND), None), ((OTHER, SECOND), (FIRST, SECOND))
    refused = pages.pop()
    assert "the second text of the other pair is" in refused
    assert "--" not in refused.partition("This cannot be answered")[2].partition("</p>")[0]
    assert 'name="second" rows="2">\n</textarea>' in refused
    assert f"\n{SECOND}</textarea>" in refused
    for page, (pair, other) in zip(pages, pairs, strict=True):
        assert 'name="press"' not in page
        assert 'name="further"' not in page
        found = ask(folder, pair, instead=other, quick=True, progress=False)
        assert escape(found.summary()) in page
        assert f"\n{SECOND}</textarea>" in page
