"""On patterns and models whose scores are known."""

import math

import pytest
import torch

from infoflow_lens.studies.language_model.batches import repeat_random
from infoflow_lens.studies.language_model.config import LanguageModelConfig
from infoflow_lens.studies.language_model.measures import (
    loss_on_repeats,
    mean_loss,
    patterns,
    prefix_matching,
    previous_token,
    token_losses,
)
from infoflow_lens.studies.language_model.model import build_language_model

CONFIG = LanguageModelConfig(d_model=16, n_heads=2, vocabulary=300, n_context=32, longest_repeat=9)


@pytest.fixture(scope="module")
def model():
    return build_language_model(CONFIG)


def test_an_ideal_head_scores_one_and_another_zero():
    """Of ids whose occurrences are looked up, not counted."""
    ids = repeat_random(40, 3, 10)[0].tolist()
    pattern = torch.zeros(1, 1, 3, 21, 21)
    for query in range(21):
        pattern[0, 0, 0, query, max(query - 1, 0)] = 1
        seen = [at for at in range(1, query) if ids[at] == ids[query]]
        pattern[0, 0, 1, query, seen[-1] + 1 if seen else 0] = 1
        pattern[0, 0, 2, query, 0] = 1
    assert prefix_matching(pattern).tolist() == [[0, 1, 0]]
    assert previous_token(pattern).tolist() == [[1, 0, 0]]


def test_losses_are_those_of_transformers(model):
    ids = torch.randint(300, (5, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = float(model(ids, labels=ids).loss)
    assert mean_loss(model, ids) == pytest.approx(expected, rel=1e-5)
    assert token_losses(model, ids).shape == (5, 31)


def test_the_loss_on_repeats_counts_the_tokens_that_can_be_known(model):
    ids = repeat_random(300, 4, 9)
    each = token_losses(model, ids)
    expected = sum(float(each[:, place - 1].mean()) for place in range(11, 19)) / 8
    assert loss_on_repeats(model, ids) == pytest.approx(expected, rel=1e-5)


def test_patterns_leave_the_model_as_it_was(model):
    model.train()
    before = model.config._attn_implementation
    found = patterns(model, repeat_random(300, 4, 9))
    assert found.shape == (2, 4, 2, 19, 19)
    torch.testing.assert_close(found.sum(dim=-1), torch.ones(2, 4, 2, 19))
    assert model.training
    assert model.config._attn_implementation == before


def test_an_attention_only_model_adds_nothing_in_its_mlps_and_never_will(model):
    caught = []
    hooks = [
        block.mlp.register_forward_hook(lambda _m, _i, output: caught.append(output))
        for block in model.transformer.h
    ]
    loss = model(torch.arange(20)[None], labels=torch.arange(20)[None]).loss
    loss.backward()
    assert all(not output.any() for output in caught)
    assert len(caught) == 2
    for name, parameter in model.named_parameters():
        fixed = ".mlp." in name or ".ln_2." in name
        assert parameter.requires_grad != fixed
        assert (parameter.grad is None) == fixed
    for hook in hooks:
        hook.remove()


def test_initial_weights_depend_on_the_config_alone():
    state = torch.random.get_rng_state()
    first = build_language_model(CONFIG).state_dict()
    assert torch.random.get_rng_state().equal(state)
    torch.manual_seed(3)
    again = build_language_model(CONFIG).state_dict()
    assert all(again[name].equal(weight) for name, weight in first.items())


def test_a_new_model_is_at_chance(model):
    ids = repeat_random(300, 16, 9)
    assert mean_loss(model, ids) == pytest.approx(math.log(300), abs=0.2)
