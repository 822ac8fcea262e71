"""A run of a few steps on a corpus of our own."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from infoflow_lens import InfoFlowError, load_any
from infoflow_lens.cli import app
from infoflow_lens.studies.language_model import training
from infoflow_lens.studies.language_model.card import model_card
from infoflow_lens.studies.language_model.config import (
    PRESETS,
    LanguageModelConfig,
    preset,
)
from infoflow_lens.studies.language_model.corpus import Corpus
from infoflow_lens.studies.language_model.training import train_language_model
from tests.conftest import some_of

CONFIG = LanguageModelConfig(
    d_model=16, n_heads=2, n_context=24, vocabulary=300, n_steps=7, batch_size=4, warmup_steps=2,
    shortest_repeat=3, longest_repeat=8, evaluate_every=3, save_every=2, threads=1,
)  # fmt: skip
LINES = [f"def f_{i}(x, y={i % 7}):\n    return x + y * {i % 5}\n\n" for i in range(120)]
CORPUS = Corpus(
    {
        "train": {"a.py": "".join(LINES[:90])},
        "validation": {"b.py": "".join(LINES[90:105])},
        "test": {"c.py": "".join(LINES[105:])},
    },
    "ours",
)


def contents(folder):
    """All files but the state, which holds no result."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in paths
        if path.name != "training.pt"
    }


def run(folder, config=CONFIG, corpus=CORPUS):
    return train_language_model(folder, config, corpus=corpus, progress=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return run(folder)


@pytest.mark.parametrize("stopped_at", some_of([1, 5], 5))
def test_a_stopped_run_goes_on_to_the_same_bytes(whole, tmp_path, monkeypatch, stopped_at):
    """Stopped in the middle of a step, as by a kill: nothing is cleaned up or saved then."""
    batch = training.training_batch

    def stopping(stream, config, step):
        if step == stopped_at:
            raise KeyboardInterrupt
        return batch(stream, config, step)

    monkeypatch.setattr(training, "training_batch", stopping)
    saved = stopped_at // 2 * 2
    words = f"stopped in step {stopped_at + 1}; the same call goes on behind step {saved}"
    with pytest.raises(KeyboardInterrupt, match=words):
        run(tmp_path)
    monkeypatch.undo()
    state = torch.random.get_rng_state()
    run(tmp_path)
    assert torch.random.get_rng_state().equal(state)
    assert contents(tmp_path) == contents(whole.folder)


def test_a_finished_run_changes_nothing_when_run_again(whole):
    before = contents(whole.folder)
    run(whole.folder)
    assert contents(whole.folder) == before


def test_checkpoints_are_dense_at_the_beginning_and_load_like_the_model(whole):
    names = sorted(path.name for path in (whole.folder / "checkpoints").iterdir())
    assert names == [f"step-{step:06d}" for step in (0, 1, 2, 4, 7)]
    loaded = load_any(whole.folder / "checkpoints" / "step-000002")
    assert loaded.tokenizer is not None
    assert loaded.model.cfg.n_layers == 2


def test_a_checkpoint_is_written_where_prefix_matching_moves(tmp_path, monkeypatch):
    scores = iter([0.0, 0.0, 0.0, 0.2, 0.21, 0.22, 0.22, 0.22, 0.22])

    def jumping(pattern):
        return torch.full(pattern.shape[:1] + pattern.shape[2:3], next(scores))

    monkeypatch.setattr(training, "prefix_matching", jumping)
    run(tmp_path, replace(CONFIG, evaluate_every=1, n_steps=7))
    names = sorted(int(path.name[5:]) for path in (tmp_path / "checkpoints").iterdir())
    assert names == [0, 1, 2, 3, 4, 7]


def test_what_was_measured_is_of_the_weights_in_half_precision(whole):
    assert {m.dtype for m in load_any(whole.folder, dtype="float16").model.parameters()} == {
        torch.float16
    }
    measured = json.loads((whole.folder / "measured.json").read_text())
    assert measured == json.loads(json.dumps(whole.measured))
    assert (whole.folder / "README.md").read_text() == model_card("language model", measured)
    assert measured["record"]["config"]["corpus"] == "ours"
    rows = (whole.folder / "test.jsonl").read_text().splitlines()
    texts = [json.loads(row)["text"] for row in rows]
    assert "".join(LINES[105:]).startswith("".join(texts))
    assert len(texts) > 5


def test_rows_of_the_history_come_when_they_are_due(whole):
    assert [row["step"] for row in whole.history] == [0, 1, 2, 3, 4, 6, 7]
    assert whole.history[-1]["validation_loss"] < whole.history[0]["validation_loss"]


def test_a_row_of_the_history_has_the_mean_loss_since_the_last_one(whole, tmp_path):
    of_each_step = run(tmp_path, replace(CONFIG, evaluate_every=1)).history
    losses = [row["train_loss"] for row in of_each_step[1:]]
    steps = [row["step"] for row in whole.history]
    for last, row in zip(steps, whole.history[1:], strict=False):
        since = losses[last : row["step"]]
        assert row["train_loss"] == pytest.approx(sum(since) / len(since))
    assert [row["lr"] for row in whole.history] == [CONFIG.learning_rate(step) for step in steps]


def test_another_run_in_the_folder_is_refused(whole):
    for config, corpus, said in (
        (replace(CONFIG, seed=1), CORPUS, r"settings \(seed\) changed"),
        (CONFIG, replace(CORPUS, fingerprint="another"), "the texts changed"),
    ):
        with pytest.raises(InfoFlowError, match=said):
            run(whole.folder, config, corpus)


def test_a_broken_state_is_refused(tmp_path):
    (tmp_path / "training.safetensors").write_bytes(b"no state")
    with pytest.raises(InfoFlowError, match=r"holds training.safetensors, which .* does not name"):
        run(tmp_path)


def test_too_little_text_is_refused(tmp_path):
    corpus = replace(CORPUS, files={**CORPUS.files, "test": {"c.py": "x"}})
    with pytest.raises(InfoFlowError, match="the test part has 2 tokens"):
        run(tmp_path, corpus=corpus)


def test_text_that_gives_too_few_entries_is_refused(tmp_path):
    with pytest.raises(InfoFlowError, match="expected vocabulary, 5000"):
        run(tmp_path, replace(CONFIG, vocabulary=5000))


def test_a_loss_that_is_no_longer_finite_is_told(tmp_path):
    with pytest.raises(InfoFlowError, match="no longer finite in step"):
        run(tmp_path, replace(CONFIG, lr=1e30, n_steps=30))


def test_threads_are_given_back(tmp_path):
    before = torch.get_num_threads()
    run(tmp_path, replace(CONFIG, threads=before + 1, n_steps=1))
    assert torch.get_num_threads() == before


def test_the_learning_rate_rises_stays_and_falls():
    config = LanguageModelConfig(n_steps=100, warmup_steps=10, decay=0.5, lr=1.0)
    rates = [config.learning_rate(step) for step in range(101)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10:51] == [1.0] * 41
    assert rates[75] == pytest.approx(0.5)
    assert rates[100] == pytest.approx(0.0)
    assert sorted(rates[50:], reverse=True) == rates[50:]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_heads": 3}, "a divisor"),
        ({"vocabulary": 100}, "vocabulary is 100: .* 257 to 32768"),
        ({"vocabulary": 100_000}, "vocabulary is 100000"),
        ({"longest_repeat": 200}, "longest_repeat < n_context"),
        ({"repeated": 1.5}, "repeated is 1.5"),
        ({"lr": 0.0}, "lr is 0.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, words):
    with pytest.raises(InfoFlowError, match=words):
        LanguageModelConfig(**changes)


def test_the_command_takes_a_preset_and_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "read_corpus", lambda: CORPUS)
    changes = {**CONFIG.to_dict(), "n_layers": 3}
    options = [
        part
        for name, value in changes.items()
        if name != "attention_only"
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    command = ["train-language-model", "stdlib-2l-mlp", "--out", str(tmp_path), "--quiet", *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "nats a token; " in result.output
    measured = json.loads((tmp_path / "measured.json").read_text())
    expected = {**changes, "attention_only": False}
    assert measured["record"]["config"]["config"] == expected


def test_a_misspelt_preset_is_one_line(tmp_path):
    command = ["train-language-model", "stdlib-2", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: preset is 'stdlib-2'")
    assert "stdlib-2l" in result.stderr


def test_presets_are_found_by_name():
    assert preset("stdlib-2l") is PRESETS["stdlib-2l"]
    with pytest.raises(InfoFlowError, match="stdlib-2l-mlp"):
        preset("stdlib-2l-mpl")
