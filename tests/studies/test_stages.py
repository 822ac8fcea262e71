"""Training in stages: lengths that grow, a constant rate, then a cosine."""

from dataclasses import replace

import pytest
import torch

from infoflow_lens import Architecture, InfoFlowError, build_model, load_task
from infoflow_lens.studies.stages import Stages, train_in_stages, train_in_stages_together
from infoflow_lens.training import TrainingConfig

ARCHITECTURE = Architecture(n_heads=(1, 1), d_model=8, d_token=2, n_tokens=6, d_mlp=8)
CONFIG = TrainingConfig(batch_size=64, lr=3e-3)


def data(n_tokens):
    task = load_task("d_retrieval", n_tokens=n_tokens, d_token=2, n_components=1)
    return task.sample(256, 0), task.sample(100, 1)


def run(stages, architecture=ARCHITECTURE, config=CONFIG, of=data, checkpoint_dir=None):
    return train_in_stages(
        architecture, of, stages, config, model_seed=3, checkpoint_dir=checkpoint_dir
    )


def test_every_stage_goes_on_from_the_one_before():
    result = run(Stages((3, 4), epochs_each=1, epochs=2, last_epochs=1))
    assert result.epochs == {"T = 3": 1, "T = 4": 1, "constant": 2, "cosine": 1}
    assert [row["n_tokens"] for row in result.history] == [3, 4, 6, 6, 6]
    assert [row["epoch"] for row in result.history] == [1, 2, 3, 4, 5]
    assert result.model.architecture == ARCHITECTURE
    untrained = build_model(ARCHITECTURE, seed=3)
    for name, parameter in untrained.named_parameters():
        assert torch.equal(result.initial_state[name], parameter)
    assert result.last.history[-1]["lr"] < CONFIG.lr / 2
    again = run(Stages((3, 4), epochs_each=1, epochs=2, last_epochs=1))
    assert again.history == result.history


def test_the_constant_rate_ends_when_nothing_is_gained():
    stages = Stages(epochs=12, last_epochs=1, patience=2, improvement=0.9)
    result = run(stages)
    assert result.epochs["constant"] < 12
    assert run(Stages(epochs=12, last_epochs=1, patience=12)).epochs["constant"] == 12


def test_without_epochs_at_the_constant_rate_there_is_no_such_stage():
    result = run(Stages((3,), epochs_each=1, epochs=0, last_epochs=1))
    assert result.epochs == {"T = 3": 1, "cosine": 1}


def test_a_run_goes_on_from_the_stages_that_it_has(tmp_path):
    stages = Stages((3,), epochs_each=2, epochs=0, last_epochs=2)

    def until_the_full_length(n_tokens):
        if n_tokens == 6:
            raise KeyboardInterrupt
        return data(n_tokens)

    kept = tmp_path / "1" / "training.safetensors"
    with pytest.raises(KeyboardInterrupt):
        run(stages, of=until_the_full_length, checkpoint_dir=tmp_path)
    written = kept.stat().st_mtime_ns
    result = run(stages, checkpoint_dir=tmp_path)
    assert kept.stat().st_mtime_ns == written
    assert result.history == run(stages).history


def test_no_stage_ends_at_an_error():
    config = replace(CONFIG, stop_below=1e9)
    result = run(Stages((3,), epochs_each=2, epochs=2, last_epochs=2), config=config)
    assert result.epochs == {"T = 3": 2, "constant": 2, "cosine": 2}


def test_lengths_must_grow_below_the_full_one():
    with pytest.raises(InfoFlowError, match=r"lengths is \(4, 3\): expected numbers that grow"):
        Stages((4, 3))
    with pytest.raises(InfoFlowError, match="reach n_tokens 6"):
        run(Stages((6,)))
    with_positions = Architecture(
        n_heads=(1,), d_model=8, d_token=2, n_tokens=6, d_mlp=8, positional_embedding="learned"
    )
    with pytest.raises(InfoFlowError, match="has positions"):
        run(Stages((3,)), with_positions)


def test_seeds_go_through_the_stages_together():
    """Each with the errors that it has alone; one that diverges takes no others with it."""
    stages = Stages((3,), epochs_each=1, epochs=3, last_epochs=1, patience=1, improvement=0.4)

    def of_seed(seed, n_tokens):
        task = load_task("d_retrieval", n_tokens=n_tokens, d_token=2, n_components=1)
        x, y = task.sample(256, seed)
        return (x, y * 1e30 if seed == 5 and n_tokens == 6 else y), task.sample(100, 1)

    config = replace(CONFIG, grad_clip=None)
    together = train_in_stages_together(ARCHITECTURE, of_seed, stages, config, (3, 5, 4))
    assert together[1] is None
    for seed, found in zip((3, 4), (together[0], together[2]), strict=True):
        alone = train_in_stages(
            ARCHITECTURE, lambda n, seed=seed: of_seed(seed, n), stages,
            replace(config, seed=seed), model_seed=seed,
        )  # fmt: skip
        assert found.epochs == alone.epochs
        assert [len(row) for row in found.history] == [len(row) for row in alone.history]
        for row, expected in zip(found.history, alone.history, strict=True):
            assert row == pytest.approx(expected, rel=1e-3)
        assert found.model.architecture == ARCHITECTURE
        for name, parameter in build_model(ARCHITECTURE, seed=seed).named_parameters():
            assert torch.equal(found.initial_state[name], parameter)
