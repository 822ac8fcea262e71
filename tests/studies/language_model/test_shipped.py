"""The card of a shipped model: made of its numbers, which its weights still have."""

import json

import pytest
import torch
from tokenizers import Tokenizer
from transformers import GPT2LMHeadModel

from infoflow_lens.foundation.record import fingerprint
from infoflow_lens.models.shipped import SHIPPED, find_package_folder
from infoflow_lens.studies.language_model.batches import repeat_random, text_windows
from infoflow_lens.studies.language_model.card import model_card
from infoflow_lens.studies.language_model.config import PRESETS
from infoflow_lens.studies.language_model.corpus import read_corpus
from infoflow_lens.studies.language_model.measures import (
    loss_on_repeats,
    mean_loss,
    patterns,
    prefix_matching,
)
from infoflow_lens.studies.language_model.tokens import token_stream

pytestmark = pytest.mark.parametrize("name", SHIPPED)


@pytest.fixture
def measured(name):
    return json.loads((find_package_folder(name) / "measured.json").read_text())


@pytest.fixture
def model(name):
    return GPT2LMHeadModel.from_pretrained(find_package_folder(name), dtype=torch.float32)


def test_the_card_is_what_its_numbers_make(name, measured):
    assert (find_package_folder(name) / "README.md").read_text() == model_card(name, measured)


def test_the_command_in_the_card_has_the_settings_of_the_record(name, measured):
    assert PRESETS[name].to_dict() == measured["record"]["config"]["config"]


def test_the_numbers_are_those_of_the_weights(name, measured, model):
    halves = {key: weight.half() for key, weight in model.state_dict().items()}
    assert fingerprint(halves) == measured["fingerprint"]
    ids = repeat_random(1024, 32, measured["half"])
    assert loss_on_repeats(model, ids) == pytest.approx(measured["repeated_loss"], abs=1e-3)
    scores = prefix_matching(patterns(model, ids))
    torch.testing.assert_close(scores, torch.tensor(measured["prefix_matching"]), atol=1e-3, rtol=0)


@pytest.mark.slow
def test_the_validation_loss_holds_on_the_text_of_this_python(name, measured, model):
    """Other versions of Python have other files and changed ones."""
    corpus = read_corpus()
    tokenizer = Tokenizer.from_file(str(find_package_folder(name) / "tokenizer.json"))
    stream = token_stream(tokenizer, corpus.texts("validation"))
    same = corpus.fingerprint == measured["record"]["config"]["corpus"]
    windows = text_windows(stream, 128, None if same else 400)
    tolerance = 1e-3 if same else 0.25
    assert mean_loss(model, windows) == pytest.approx(measured["loss"]["validation"], abs=tolerance)


def test_half_precision_costs_less_than_a_hundredth_of_a_nat(name, measured):
    assert abs(measured["loss"]["validation"] - measured["loss_float32"]) < 0.01
