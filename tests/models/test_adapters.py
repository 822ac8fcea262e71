"""Folders with an adapter of PEFT are opened on their base, as PEFT runs them."""

import json
import os
import shutil
import sys
import warnings
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file

from infoflow_lens import InfoFlowError, PositionsProbe, attach, load_any, open_model, run_probes
from tests.conftest import some_of
from tests.reference import zoo

peft = pytest.importorskip("peft")
TARGETS = {
    "llama": ["q_proj", "o_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "bert": ["query", "value"],
}


def save(name, base, folder, with_embeddings=False, **settings):
    """Save an adapter with random weights, and return the model that PEFT makes with it."""
    settings = {"target_modules": TARGETS.get(name), "r": 3, "lora_alpha": 7} | settings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT asks transformers by an earlier name
        model = peft.get_peft_model(zoo.build(name), peft.LoraConfig(**settings))
        generator = torch.Generator().manual_seed(1)
        for weight in (p for p in model.parameters() if p.requires_grad):
            weight.data += torch.randn(weight.shape, generator=generator) / 3
        model.save_pretrained(folder, save_embedding_layers=False)
    change(folder, base_model_name_or_path=str(base))
    return model.eval()


def change(folder, **values):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture(scope="module")
def base_of(tmp_path_factory):
    """The folder of a base by name, which no test changes, and its logits."""

    @cache
    def get(name):
        base = zoo.save(name, tmp_path_factory.mktemp(name) / "base")
        with torch.no_grad():
            return base, load_any(base).model(zoo.tokens(2, 7))

    return get


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A base and an adapter on it, which no test changes."""
    out = tmp_path_factory.mktemp("saved")
    save("llama", zoo.save("llama", out / "base"), out / "adapter")
    return out / "adapter"


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "adapter")


CASES = [
    ("llama", {}),
    ("gpt2", {"fan_in_fan_out": True}),
    ("bert", {}),
    ("llama", {"use_dora": True, "use_rslora": True, "rank_pattern": {"o_proj": 2}}),
    ("llama", {"r": 40}),  # more than the layers are wide
    ("llama", {"modules_to_save": ["lm_head"]}),
    ("gpt2", {"fan_in_fan_out": True, "bias": "all"}),
    ("llama", {"init_lora_weights": "olora"}),  # takes its own matrices off the base
    ("llama", {"init_lora_weights": "orthogonal", "r": 4}),
    ("bert", {"trainable_token_indices": {"word_embeddings": [5, 7]}}),
]


@pytest.mark.parametrize(
    ("name", "settings"), some_of(CASES, CASES[1], CASES[3], CASES[5], CASES[9])
)
def test_the_adapter_counts_as_peft_has_it(name, settings, base_of, tmp_path):
    base, bare = base_of(name)
    model = save(name, base, tmp_path / "adapter", **settings)
    found = load_any(tmp_path / "adapter")
    ids = zoo.tokens(2, 7)
    with torch.no_grad():
        expected = model(ids, output_attentions=True)
    logits, cache = found.model.run_with_cache(ids)
    torch.testing.assert_close(logits, expected.logits, rtol=0, atol=1e-5)
    assert (logits - bare).abs().max() > 1e-2
    for layer, pattern in enumerate(
        model.merge_and_unload()(ids, output_attentions=True).attentions
    ):
        torch.testing.assert_close(cache["pattern", layer], pattern, rtol=0, atol=1e-5)
    assert found.source == "folder"
    assert f"an adapter on {str(base)!r}" in found.description
    assert found.tokenizer("w5 w7")["input_ids"][-2:] == [5, 7]
    run_probes(found, ids, [PositionsProbe()], progress=False)


def test_a_base_of_the_hub_is_what_was_downloaded_before(cache, folder):
    change(folder, base_model_name_or_path="owner/base")
    with pytest.raises(InfoFlowError, match="'owner/base', which is neither a folder here nor in"):
        load_any(folder)
    zoo.save_in_cache("llama", "owner/base", cache)
    assert "an adapter on" in load_any(folder).description


@pytest.mark.parametrize("whole", [False, True])
def test_an_adapter_on_the_hub_is_given_as_a_folder(whole, cache, folder):
    files = zoo.save_in_cache("llama", "owner/adapter", cache)
    shutil.copy(folder / "adapter_config.json", files)
    if not whole:
        (files / "config.json").unlink()
    with pytest.raises(InfoFlowError, match=r"'owner/adapter' holds an adapter.*give the folder"):
        load_any("owner/adapter")


def test_weights_that_torch_wrote_and_a_tokenizer_of_its_own(folder):
    weights = load_file(folder / "adapter_model.safetensors")
    torch.save(weights, folder / "adapter_model.bin")
    expected = load_any(folder).model(zoo.tokens(1, 4))
    os.remove(folder / "adapter_model.safetensors")
    zoo.tokenizer().save_pretrained(folder)
    found = load_any(folder)
    assert torch.equal(found.model(zoo.tokens(1, 4)), expected)
    assert found.tokenizer.name_or_path == str(folder)


def without_first(folder):
    weights = load_file(folder / "adapter_model.safetensors")
    save_file(dict(list(weights.items())[1:]), folder / "adapter_model.safetensors")


def with_pipe(folder):
    os.remove(folder / "adapter_model.safetensors")
    os.mkfifo(folder / "adapter_model.safetensors")


def with_claimed_rank(folder):
    """Claim a rank by a tensor of one number that is said to be a large matrix."""
    weights = load_file(folder / "adapter_model.safetensors")
    os.remove(folder / "adapter_model.safetensors")
    weights["z"] = torch.zeros(1).expand(2_000_000, 2_000_000)
    torch.save(weights, folder / "adapter_model.bin")
    change(folder, r=2_000_000)


REFUSED = {
    "peft_type 'IA3'": lambda folder: change(folder, peft_type="IA3"),
    "megatron_config .*expected a LoRA": lambda folder: change(folder, megatron_config={"a": 1}),
    "layer_replication": lambda folder: change(folder, layer_replication=[[0, 2]] * 10**6),
    "init_lora_weights 'pissa'": lambda folder: change(folder, init_lora_weights="pissa"),
    r"by '\(q\+\)\+proj', which may": lambda folder: change(folder, target_modules="(q+)+proj"),
    r"by '\(\.\*\.\*": lambda folder: change(folder, target_modules="(.*.*.*.*.*.*.*.*.*)x"),
    r"by '\(a\+\)\+!'": lambda folder: change(folder, rank_pattern={"(a+)+!": 2}),
    r"by '\(b\+\)\+!'": lambda folder: change(folder, exclude_modules="(b+)+!"),
    "says rank 1000000000": lambda folder: change(folder, r=10**9),
    "says rank 9999": lambda folder: change(folder, rank_pattern={"q_proj": 9999}),
    "says rank 2000000": with_claimed_rank,
    r"says rank \[9\]": lambda folder: change(folder, rank_pattern=[9]),
    "says rank 'many'": lambda folder: change(folder, r="many"),
    "base .* is None": lambda folder: change(folder, base_model_name_or_path=None),
    "base .* neither a folder": lambda folder: change(folder, base_model_name_or_path="/no/such"),
    "no model of transformers": lambda folder: change(folder, base_model_name_or_path=str(folder)),
    "lacks .*layers.*which its base.* has": without_first,
    "has .*down_proj.*lacks": lambda folder: change(folder, target_modules=["q_proj"]),
    "no regular file": with_pipe,
    "adapter_model.safetensors missing": lambda folder: os.remove(
        folder / "adapter_model.safetensors"
    ),
}


@pytest.mark.parametrize("match", REFUSED)
def test_what_is_no_lora_of_its_base_is_refused(match, folder):
    REFUSED[match](folder)
    with pytest.raises(InfoFlowError, match=match):
        load_any(folder)


def test_an_adapter_of_another_size_is_refused(folder, tmp_path):
    change(folder, base_model_name_or_path=str(zoo.save("gpt2", tmp_path / "gpt2")))
    with pytest.raises(InfoFlowError, match=r"adapter.*expected"):
        load_any(folder)


def test_without_peft_its_name_is_said(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InfoFlowError, match=r"needs the package 'peft'.*infoflow-lens\[adapters\]"):
        load_any(folder)


def test_an_adapter_that_is_switched_is_another_model(base_of, tmp_path):
    """Its weights are the same, and one probe took both for one model."""
    base, _ = base_of("llama")
    alone, ids = save("llama", base, tmp_path / "adapter"), zoo.tokens(3, 9)
    model, probe = open_model(alone), PositionsProbe()
    run_probes(model, ids, [probe], progress=False)
    with alone.disable_adapter():
        with pytest.raises(InfoFlowError, match="other weights or adapters"):
            run_probes(model, ids, [probe], progress=False)
        (off,) = run_probes(model, ids, [PositionsProbe()], progress=False)
    (on,) = run_probes(model, ids, [PositionsProbe()], progress=False)
    assert on.record.model_fingerprint == probe.run_record().model_fingerprint
    assert off.record.model_fingerprint != on.record.model_fingerprint
    said = pytest.raises(InfoFlowError, match="an adapter that was switched")
    with attach(model, PositionsProbe()), alone.disable_adapter(), said:
        model(ids)
