"""The models that come with the package: loaded by name without a network, with heads as said."""

import json

import pytest
import torch

from infoflow_lens import InfoFlowError
from infoflow_lens.hooks.model.capabilities import inspect_model
from infoflow_lens.models.loading import load_any
from infoflow_lens.models.shipped import SHIPPED, find_package_folder


@pytest.fixture(scope="module")
def loaded():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield load_any("stdlib-2l")


@pytest.fixture(scope="module")
def attention(loaded):
    """Patterns by layer on repeated random tokens, as anybody would catch them."""
    generator = torch.Generator().manual_seed(7)
    half = torch.rand(32, 1023, generator=generator).argsort(dim=1)[:, :40] + 1
    tokens = torch.cat([torch.zeros(32, 1, dtype=torch.long), half, half], dim=1)
    with torch.no_grad():
        logits, cache = loaded.model.run_with_cache(tokens)
    return tokens, logits, [cache[f"blocks.{layer}.attn.hook_pattern"] for layer in (0, 1)]


def test_it_loads_by_name_with_its_tokenizer_in_float32(loaded):
    assert loaded.source == "name"
    assert loaded.description == "stdlib-2l: GPT2LMHeadModel, 2 layers, d_model 128, float32, cpu"
    assert loaded.model.to_tokens("import os").tolist()[0][0] == 0
    assert loaded.model.to_string(loaded.model.to_tokens("é = [1]\n", prepend_bos=False)) == [
        "é = [1]\n"
    ]


def test_all_measurements_are_possible(loaded):
    tokens = torch.randint(1, 1024, (2, 12), generator=torch.Generator().manual_seed(0))
    assert inspect_model(loaded.model, tokens).problems() == ()


def test_a_head_attends_to_the_previous_token_and_others_to_the_token_after_the_last_occurrence(
    attention,
):
    """Above .5, and as the card says. Prefix matching is written out here, query by query."""
    tokens, _, patterns = attention
    measured = json.loads((find_package_folder("stdlib-2l") / "measured.json").read_text())
    found = {"previous_token": torch.zeros(2, 8), "prefix_matching": torch.zeros(2, 8)}
    for layer, pattern in enumerate(patterns):
        for head in range(8):
            before = [pattern[:, head, q, q - 1].mean() for q in range(2, 81)]
            after = []
            for q in range(41, 81):
                (earlier,) = (tokens[0, 1:q] == tokens[0, q]).nonzero().flatten() + 1
                after.append(pattern[:, head, q, earlier + 1].mean())
            found["previous_token"][layer, head] = sum(before) / len(before)
            found["prefix_matching"][layer, head] = sum(after) / len(after)
    for name, scores in found.items():
        # other random tokens, and 40 instead of 50
        torch.testing.assert_close(scores, torch.tensor(measured[name]), atol=0.05, rtol=0)
    assert found["previous_token"][0].max() > 0.5
    assert found["prefix_matching"][1].max() > 0.5


def test_repeated_random_tokens_are_predicted(attention):
    tokens, logits, _ = attention
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none"
    )
    assert losses[:, :40].mean() > 6.9  # log 1023 is 6.93
    assert losses[:, 41:].mean() < 0.2


def test_its_weights_are_small_and_of_half_precision():
    from safetensors.torch import load_file

    for name in SHIPPED:
        file = find_package_folder(name) / "model.safetensors"
        assert file.stat().st_size < 4e6
        assert {weight.dtype for weight in load_file(file).values()} == {torch.float16}


def test_blocks_have_no_mlp_but_zeros(loaded):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 1024, (2, 9), generator=generator)
    _, cache = loaded.model.run_with_cache(tokens)
    for layer in (0, 1):
        assert not cache[f"blocks.{layer}.hook_mlp_out"].any()


def test_a_hooked_transformer_of_it_is_refused():
    with pytest.raises(InfoFlowError, match=r"HookedTransformer.*: expected backend 'auto'"):
        load_any("stdlib-2l", backend="hooked")


def test_a_folder_of_that_name_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stdlib-2l").mkdir()
    with pytest.raises(InfoFlowError, match="is no model"):
        load_any("stdlib-2l")


def test_a_misspelt_name_is_told_and_all_shipped_ones_are_named():
    with pytest.raises(InfoFlowError, match=r"did you mean .*stdlib-2l.*comes with this package"):
        load_any("stdlib2l")
