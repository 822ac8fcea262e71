"""A training that is stopped goes on to the same bytes, and reads nothing that calls."""

import hashlib

import pytest
import torch

from infoflow_lens import InfoFlowError
from infoflow_lens.studies.language_model import training
from infoflow_lens.studies.language_model.config import LanguageModelConfig
from infoflow_lens.studies.language_model.corpus import Corpus, read_corpus

CONFIG = LanguageModelConfig(
    n_layers=1, d_model=8, n_heads=2, n_context=16, shortest_repeat=2, longest_repeat=7,
    vocabulary=300, n_steps=9, batch_size=4, save_every=4, warmup_steps=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def corpus():
    files = read_corpus().files
    return Corpus({split: dict(list(texts.items())[:4]) for split, texts in files.items()}, "few")


def train(out, corpus):
    return training.train_language_model(out, CONFIG, corpus=corpus, progress=False)


def bytes_of(out):
    files = sorted(path for path in out.rglob("*") if path.is_file())
    return {str(p.relative_to(out)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.mark.slow
def test_a_stopped_training_goes_on_to_the_same_bytes(tmp_path, corpus, monkeypatch):
    take_step = training._Run.take_step

    def stopped(run):
        if run.step == 6:
            raise KeyboardInterrupt
        take_step(run)

    with monkeypatch.context() as patch:
        patch.setattr(training._Run, "take_step", stopped)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "stopped", corpus)
    train(tmp_path / "stopped", corpus)
    train(tmp_path / "whole", corpus)
    assert bytes_of(tmp_path / "stopped") == bytes_of(tmp_path / "whole")
    torch.save({"callable": print}, tmp_path / "stopped" / "training.safetensors")
    with pytest.raises(InfoFlowError, match="is not what this run has written"):
        train(tmp_path / "stopped", corpus)
