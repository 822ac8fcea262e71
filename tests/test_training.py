"""Training ends with the same numbers, whatever happens on the way."""

import json
import math
import signal

import pytest
import torch
from safetensors.torch import save_file

from infoflow_lens import Architecture, InfoFlowError, build_model, load_task, train
from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.foundation.saving import read_state
from infoflow_lens.models.attention import set_attention
from infoflow_lens.models.host import build_token_model
from infoflow_lens.training import (
    TrainingConfig,
    TrainingDivergedError,
    TrainingInterrupted,
    evaluate,
    evaluate_labels,
    nmse,
    restored,
)
from tests.processes import printed_by, started

CONFIG = TrainingConfig(epochs=6, batch_size=80, lr=5e-3, seed=3)  # 3 steps an epoch


@pytest.fixture(scope="module")
def task():
    return load_task("d_retrieval", n_tokens=5, d_token=3, n_components=2, seed=1)


@pytest.fixture(scope="module")
def data(task):
    return task.dataset("train", 200), task.dataset("validation", 80)


@pytest.fixture(scope="module")
def undisturbed(data):
    """What training by CONFIG gives where nothing comes between."""
    return train(new_model(), *data, CONFIG, progress=False)


def new_model(seed=0):
    return build_model(
        Architecture(n_heads=(2, 1), d_model=8, d_token=3, n_tokens=5, d_mlp=16), seed=seed
    )


def numbers(result):
    return [(row["train_loss"], row["validation_nmse"], row["lr"]) for row in result.history]


def test_it_learns_and_leaves_the_best_weights_in_the_model(data):
    model = new_model()
    before = evaluate(model, data[1])
    result = train(model, *data, TrainingConfig(epochs=25, batch_size=50, lr=3e-2), progress=False)
    assert result.nmse < 0.2 < before
    assert evaluate(model, data[1]) == pytest.approx(result.nmse, rel=1e-6)
    assert result.nmse == min(row["validation_nmse"] for row in result.history)
    assert result.history[result.best_epoch - 1]["validation_nmse"] == result.nmse
    assert result.stopped == "finished"
    initial = restored(model, result.initial_state)
    assert evaluate(initial, data[1]) == pytest.approx(before, rel=1e-6)
    assert evaluate(model, data[1]) < 0.2  # the copy took nothing from the model


def test_the_first_steps_are_adamw_with_clipping_and_a_cosine(data):
    """Against a loop written with PyTorch's own scheduler over the full forward pass.

    In float64: AdamW blows rounding up to whole steps where the gradient is zero, as for b_K.
    """
    config = TrainingConfig(epochs=1, batch_size=32, lr=5e-3, weight_decay=0.1, seed=3)
    pairs = [tuple(part.with_format("torch")[:][c].double() for c in ("x", "y")) for part in data]
    result = train(new_model().to(torch.float64), *pairs, config, progress=False)

    model = new_model().to(torch.float64)
    x, y = pairs[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(derive_seed("epoch", 3, 0)))
    total = 0.0
    for chosen in order.split(32):
        loss = torch.nn.functional.mse_loss(model(x[chosen]), y[chosen])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        total += float(loss.detach()) * len(chosen)
    assert result.history[0]["train_loss"] == pytest.approx(total / 200, rel=1e-6)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(result.best_state[name], value, rtol=1e-6, atol=1e-8)


def test_nmse_of_the_best_constant_is_one():
    y = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)) + 5
    assert nmse(y.mean(0).expand(50, 3), y) == pytest.approx(1, rel=1e-6)
    assert nmse(y, y) == 0


def test_the_same_seed_gives_the_same_numbers(data, undisturbed):
    torch.manual_seed(77)
    second = train(new_model(), *data, CONFIG, progress=False)
    assert numbers(undisturbed) == numbers(second)
    other = train(
        new_model(), *data, TrainingConfig(**(vars(CONFIG) | {"seed": 4})), progress=False
    )
    assert numbers(undisturbed) != numbers(other)


def test_pairs_of_tensors_train_like_datasets(data, undisturbed):
    pairs = [tuple(part.with_format("torch")[:][c] for c in ("x", "y")) for part in data]
    assert numbers(train(new_model(), *pairs, CONFIG, progress=False)) == numbers(undisturbed)


class StopAt:
    """Raises `error` when the model has run `calls` times."""

    def __init__(self, model, calls, error):
        self.left = calls
        self.error = error
        model.add_hook("hook_embed", self)

    def __call__(self, activation, hook):
        self.left -= 1
        if self.left == 0:
            raise self.error


def test_data_may_be_drawn_anew_in_every_epoch(task, data, tmp_path):
    """Each epoch sees its own; data that are always the same train like data that are given."""
    asked = []

    def draw(epoch):
        asked.append(epoch)
        return task.sample(64, seed=epoch)

    fresh = train(new_model(), draw, data[1], CONFIG, checkpoint_dir=tmp_path, progress=False)
    assert asked == [1, *range(1, CONFIG.epochs + 1)]  # once before, to be checked
    fixed = train(new_model(), draw(1), data[1], CONFIG, progress=False)
    assert numbers(fresh)[0] == numbers(fixed)[0]
    assert numbers(fresh)[1:] != numbers(fixed)[1:]
    same = train(new_model(), lambda _: draw(1), data[1], CONFIG, progress=False)
    assert numbers(same) == numbers(fixed)
    # a folder of one is not gone on with by the other
    with pytest.raises(InfoFlowError, match="the data of epochs changed"):
        train(new_model(), draw(1), data[1], CONFIG, checkpoint_dir=tmp_path, progress=False)


def test_data_that_are_drawn_anew_resume_to_the_same_numbers(task, data, tmp_path):
    stopped = []

    def draw(epoch):
        if epoch == 4 and not stopped:
            stopped.append(epoch)
            raise KeyboardInterrupt
        return task.sample(64, seed=epoch)

    with pytest.raises(TrainingInterrupted):
        train(new_model(), draw, data[1], CONFIG, checkpoint_dir=tmp_path, progress=False)
    resumed = train(new_model(), draw, data[1], CONFIG, checkpoint_dir=tmp_path, progress=False)
    assert stopped
    whole = train(new_model(), draw, data[1], CONFIG, progress=False)
    assert numbers(resumed) == numbers(whole)


def test_an_epoch_of_another_kind_is_named(task, data):
    def draw(epoch):
        x, y = task.sample(64, seed=epoch)
        return (x, y) if epoch < 3 else (x, torch.zeros(64, dtype=torch.long))

    with pytest.raises(InfoFlowError, match=r"of epoch 3 are torch\.int64"):
        train(new_model(), draw, data[1], CONFIG, progress=False)

    def broken(epoch):
        x, y = task.sample(64, seed=epoch)
        return x, y / (epoch < 2)

    with pytest.raises(InfoFlowError, match=r"training \(epoch 2\) targets have NaN or infinite"):
        train(new_model(), broken, data[1], CONFIG, progress=False)


def test_ctrl_c_keeps_what_was_reached_and_resumes_to_the_same_numbers(data, undisturbed, tmp_path):
    model = new_model()
    StopAt(model, 15, KeyboardInterrupt)  # in the middle of epoch 4
    with pytest.raises(TrainingInterrupted) as stopped:
        train(model, *data, CONFIG, checkpoint_dir=tmp_path, progress=False)
    partial = stopped.value.result
    assert partial.stopped == "interrupted"
    assert 0 < partial.epochs_run < 6
    assert numbers(partial) == numbers(undisturbed)[: partial.epochs_run]
    assert str(tmp_path) in str(stopped.value)
    model.reset_hooks()
    assert evaluate(model, data[1]) == pytest.approx(partial.nmse, rel=1e-6)

    resumed = train(new_model(), *data, CONFIG, checkpoint_dir=tmp_path, progress=False)
    assert numbers(resumed) == numbers(undisturbed)
    for name, value in undisturbed.best_state.items():
        assert value.equal(resumed.best_state[name])
        assert undisturbed.initial_state[name].equal(resumed.initial_state[name])


SCRIPT = """
import json, sys, torch
torch.set_num_threads(1)
from infoflow_lens import Architecture, build_model, load_task, train
from infoflow_lens.training import TrainingConfig
task = load_task("d_retrieval", n_tokens=5, d_token=3, n_components=2)
model = build_model(Architecture(n_heads=(2, 1), d_model=8, d_token=3, n_tokens=5, d_mlp=16))
result = train(model, task.sample(600, 0), task.sample(100, 1),
               TrainingConfig(epochs=15, batch_size=16), checkpoint_dir=sys.argv[1], progress=False)
print(json.dumps([row["validation_nmse"] for row in result.history]))
"""


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_numbers(tmp_path):
    script, checkpoint = tmp_path / "script.py", tmp_path / "killed" / "training.safetensors"
    script.write_text(SCRIPT)
    with started(script, "killed", folder=tmp_path) as killed:
        killed.wait_until(checkpoint.exists)
        killed.send_signal(signal.SIGKILL)
        assert killed.wait(60) == -signal.SIGKILL  # it had not finished by itself
    done = len(read_state(checkpoint, "the checkpoint", "")["history"])
    assert 0 < done < 15
    outputs = [printed_by(script, name, folder=tmp_path) for name in ("killed", "whole")]
    assert json.loads(outputs[0]) == json.loads(outputs[1])


def test_a_finished_run_is_not_trained_again(data, tmp_path):
    first = train(new_model(), *data, CONFIG, checkpoint_dir=tmp_path, progress=False)
    model = new_model()
    again = train(model, *data, CONFIG, checkpoint_dir=tmp_path, progress=False)
    assert numbers(again) == numbers(first)
    assert evaluate(model, data[1]) == pytest.approx(first.nmse, rel=1e-6)


def test_a_checkpoint_of_other_settings_is_refused(task, data, tmp_path):
    train(new_model(), *data, CONFIG, checkpoint_dir=tmp_path, progress=False)
    other_config = TrainingConfig(**(vars(CONFIG) | {"lr": 1e-3}))
    for model, parts, config, said in (
        (new_model(), data, other_config, r"settings \(lr\) changed"),
        (new_model(seed=1), data, CONFIG, "other initial weights"),
        (new_model(), (data[0], task.dataset("test", 80)), CONFIG, "the data changed"),
    ):
        with pytest.raises(InfoFlowError, match=said):
            train(model, *parts, config, checkpoint_dir=tmp_path, progress=False)


def test_a_broken_checkpoint_is_named(data, tmp_path):
    (tmp_path / "training.safetensors").write_bytes(b"somebody else's")
    with pytest.raises(InfoFlowError, match=r"holds training.safetensors, which .* does not name"):
        train(new_model(), *data, CONFIG, checkpoint_dir=tmp_path, progress=False)
    (tmp_path / "training.safetensors").unlink()
    train(new_model(), *data, CONFIG, checkpoint_dir=tmp_path, progress=False)
    save_file({"x": torch.zeros(1)}, tmp_path / "training.safetensors")
    with pytest.raises(InfoFlowError, match="is not what this run has written"):
        train(new_model(), *data, CONFIG, checkpoint_dir=tmp_path, progress=False)
    with pytest.raises(InfoFlowError, match="checkpoint_every is 0"):
        train(new_model(), *data, CONFIG, checkpoint_every=0, progress=False)


def test_calling_again_with_the_interrupted_model_goes_on(data, undisturbed, tmp_path):
    """As in a notebook, where the model now holds the best weights so far."""
    model = new_model()
    StopAt(model, 15, KeyboardInterrupt)
    with pytest.raises(TrainingInterrupted):
        train(model, *data, CONFIG, checkpoint_dir=tmp_path, progress=False)
    model.reset_hooks()
    resumed = train(model, *data, CONFIG, checkpoint_dir=tmp_path, progress=False)
    assert numbers(resumed) == numbers(undisturbed)


def test_after_each_epoch_a_copy_of_the_model_is_shown(data, undisturbed):
    """Whatever is done to it, and to the random state, the training does not notice."""
    model, errors = new_model(), []

    def vandal(epoch, shown):
        assert not shown.training
        errors.append((epoch, evaluate(shown, data[1])))
        torch.manual_seed(epoch)
        shown(data[1].with_format("torch")[:2]["x"]).sum().backward()
        shown.train()
        with torch.no_grad():
            for parameter in shown.parameters():
                parameter.requires_grad_(False).zero_()

    result = train(model, *data, CONFIG, after_epoch=vandal, progress=False)
    assert numbers(result) == numbers(undisturbed)
    for name, value in undisturbed.best_state.items():
        assert value.equal(result.best_state[name])
        assert value.equal(model.state_dict()[name])
    assert errors == [
        (row["epoch"], pytest.approx(row["validation_nmse"], rel=1e-6))
        for row in undisturbed.history
    ]


def test_no_epoch_is_passed_over_when_a_run_is_resumed(data, undisturbed, tmp_path):
    seen, options = [], {"checkpoint_dir": tmp_path, "checkpoint_every": 2, "progress": False}

    def look(epoch, model):
        seen.append(epoch)

    def stop(epoch, model):
        if epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(TrainingInterrupted) as stopped:  # before epoch 2 was kept
        train(new_model(), *data, CONFIG, after_epoch=stop, **options)
    assert numbers(stopped.value.result) == numbers(undisturbed)[:2]
    model = new_model()
    StopAt(model, 15, KeyboardInterrupt)  # in the middle of epoch 4
    with pytest.raises(TrainingInterrupted):
        train(model, *data, CONFIG, after_epoch=look, **options)
    assert seen == [1, 2, 3]
    resumed = train(new_model(), *data, CONFIG, after_epoch=look, **options)
    assert seen == [1, 2, 3, 3, 4, 5, 6]
    assert numbers(resumed) == numbers(undisturbed)


def test_randomness_inside_the_model_follows_the_seed(data):
    x, y = (data[0].with_format("torch")[:][c] for c in ("x", "y"))

    def trained(global_seed):
        torch.manual_seed(0)
        module = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(15, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
        )
        torch.manual_seed(global_seed)
        state = torch.get_rng_state()
        result = train(module, (x, y), (x, y), CONFIG, progress=False)
        assert torch.get_rng_state().equal(state)
        return numbers(result)

    assert trained(1) == trained(2)


def test_patience_stops_early(data, monkeypatch):
    errors = iter([5.0, 3.0, 4.0, 3.5, 1.0])
    monkeypatch.setattr("infoflow_lens.objectives.nmse", lambda *arguments: next(errors))
    config = TrainingConfig(epochs=30, batch_size=32, patience=2)
    result = train(new_model(), *data, config, progress=False)
    assert result.stopped == "early"
    assert [row["validation_nmse"] for row in result.history] == [5.0, 3.0, 4.0, 3.5]
    assert result.best_epoch == 2


def test_a_slow_drift_is_no_improvement(data, monkeypatch):
    errors = iter([5.0, 4.0, 3.9, 3.8, 3.5, 3.4, 3.3])
    monkeypatch.setattr("infoflow_lens.objectives.nmse", lambda *arguments: next(errors))
    config = TrainingConfig(epochs=30, batch_size=32, patience=2, improvement=0.1)
    result = train(new_model(), *data, config, progress=False)
    # 3.9 and 3.8 are not a tenth below 4.0
    assert [row["validation_nmse"] for row in result.history] == [5.0, 4.0, 3.9, 3.8]
    assert result.best_epoch == 4  # the best weights are kept all the same


def test_a_low_error_stops_early(data, monkeypatch, tmp_path):
    errors = iter([5.0, 0.3, 0.2, 0.1, 0.4])
    monkeypatch.setattr("infoflow_lens.objectives.nmse", lambda *arguments: next(errors))
    config = TrainingConfig(epochs=30, batch_size=32, stop_below=0.2)
    kept = {"checkpoint_dir": tmp_path, "checkpoint_every": 7, "progress": False}
    result = train(new_model(), *data, config, **kept)
    assert result.stopped == "early"
    assert [row["validation_nmse"] for row in result.history] == [5.0, 0.3, 0.2, 0.1]
    # it was written though no checkpoint was due, and has nothing left to do
    assert train(new_model(), *data, config, **kept).epochs_run == 4


def test_divergence_is_said_and_the_best_weights_kept(data):
    x, y = (data[0].with_format("torch")[:][c] for c in ("x", "y"))
    model = new_model()
    config = TrainingConfig(epochs=9, batch_size=8, lr=1e18, grad_clip=None)
    with pytest.raises(TrainingDivergedError, match="no longer finite in epoch") as stopped:
        train(model, (x, y * 1e15), (x, y * 1e15), config, progress=False)
    assert stopped.value.result.stopped == "diverged"
    assert all(p.isfinite().all() for p in model.parameters())


def test_divergence_in_the_last_step_is_divergence(data):
    x, y = (data[0].with_format("torch")[:][c] for c in ("x", "y"))
    config = TrainingConfig(epochs=1, batch_size=200, lr=1e30, grad_clip=None)
    with pytest.raises(TrainingDivergedError):
        train(new_model(), (x, y), (x, y), config, progress=False)


def test_the_mode_of_the_model_is_kept(data):
    model = new_model()
    model.eval()
    train(model, *data, TrainingConfig(epochs=1), progress=False)
    assert not model.training


def test_learning_rate_warms_up_and_falls_to_its_end():
    config = TrainingConfig(lr=2.0, lr_end=0.5, warmup_steps=4)
    rates = [config.learning_rate(step, 24) for step in range(24)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[14] == pytest.approx(1.25)
    assert config.learning_rate(24, 24) == pytest.approx(0.5)
    assert rates[4:] == sorted(rates[4:], reverse=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x[:0], y[:0]), "training data are empty"),
        (lambda x, y: (x, y[:, 0]), r"y\[:, None\]"),
        (lambda x, y: (x, y.repeat(1, 2)), "build the model with d_output 2"),
        (lambda x, y: (x, y[:-1]), "200 inputs but 199 targets"),
        (lambda x, y: (x.masked_fill(x > 2, math.nan), y), "training inputs have NaN"),
        (lambda x, y: (x, y.masked_fill(y > 2, math.inf)), "training targets have NaN"),
        (lambda x, y: (x[:, :3], y), r"shape \(1, 3, 3\): the model expects"),
        (lambda x, y: (x.double(), y), "input is torch.float64, the weights"),
    ],
)
def test_bad_data_are_named_before_the_first_step(data, change, message):
    x, y = (data[0].with_format("torch")[:][c] for c in ("x", "y"))
    model = new_model()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(InfoFlowError, match=message):
        train(model, change(x, y), data[1], progress=False)
    assert all(a.equal(b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x, y.repeat(1, 3)), "build the model with d_output 3"),
        (lambda x, y: (x[:, :3], y), r"shape \(1, 3, 3\): the model expects"),
        (lambda x, y: (x, y.long()), "targets are torch.int64"),
        (lambda x, y: (x.numpy(), y.numpy()), "expected a datasets.Dataset"),
        (lambda x, y: (x, y, y), "tuple of 3: expected a datasets.Dataset .* or a pair"),
        (lambda x, y: (x,), "tuple of 1: expected a datasets.Dataset .* or a pair"),
    ],
)
def test_bad_validation_data_are_named_before_the_first_step(data, change, message):
    x, y = (data[1].with_format("torch")[:][c] for c in ("x", "y"))
    model = new_model()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(InfoFlowError, match=message):
        train(model, data[0], change(x, y), progress=False)
    with pytest.raises(InfoFlowError, match=message):
        evaluate(model, change(x, y))
    assert all(a.equal(b) for a, b in zip(before, model.parameters(), strict=True))


def test_constant_targets_have_no_nmse(data):
    x, y = (data[1].with_format("torch")[:][c] for c in ("x", "y"))
    with pytest.raises(InfoFlowError, match="do not vary"):
        evaluate(new_model(), (x, torch.ones_like(y)))


def test_one_validation_sequence_has_no_variance(data):
    with pytest.raises(InfoFlowError, match="do not vary"):
        train(new_model(), data[0], data[1].select([0]), progress=False)


def test_a_dataset_without_the_columns(data):
    with pytest.raises(InfoFlowError, match="without y: rename"):
        train(new_model(), data[0].rename_column("y", "label"), data[1], progress=False)


def test_an_output_folder_that_cannot_be_written(data, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InfoFlowError, match="cannot write to the output folder"):
        train(new_model(), *data, checkpoint_dir=tmp_path / "file", progress=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "epochs is 0"),
        ({"lr": 0}, "lr is 0"),
        ({"improvement": 1.0}, "improvement is 1.0"),
        ({"seed": 2**63}, "expected an integer from 0"),
        ({"optimizer": "sdg"}, "did you mean 'sgd'"),
        ({"optimizer": "sgd", "momentum": 1.0}, "momentum is 1.0"),
        ({"momentum": 0.9}, "expected optimizer 'sgd'"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(InfoFlowError, match=message):
        TrainingConfig(**settings)


# Labels over token ids

LABELS = TrainingConfig(epochs=5, batch_size=32, lr=1e-2, seed=3)


@pytest.fixture(scope="module")
def questions():
    return load_task("in_context_qa", n_questions=6, n_answers=6, n_pairs=2)


def new_token_model(task, n_layers=2, seed=0, **changes):
    settings = {
        "n_heads": 2,
        "d_head": 16,
        "d_model": 32,
        "n_tokens": task.n_tokens,
        "d_vocab": task.d_vocab,
        "d_output": task.n_labels,
        "attention": "softmax",
        "seed": seed,
    }
    return build_token_model(n_layers=n_layers, **(settings | changes))


def train_tokens(model, task, config=LABELS, **options):
    options = {"n_train": 150, "n_validation": 60, "progress": False} | options
    return train(model, task, config, **options)


def rows(result):
    return [tuple(row.items()) for row in result.history]


def test_one_layer_memorises_a_table():
    task = load_task("memorization", n_words=12, length=3, n_sequences=40)
    table = task.all_sequences()
    model = new_token_model(task, 1, n_heads=4)
    config = TrainingConfig(epochs=100, batch_size=40, lr=1e-2, weight_decay=0)
    result = train(model, table, table, config, progress=False)
    assert result.accuracy == 1
    assert result.loss < 0.01
    assert math.isnan(result.nmse)
    assert model(table[0])[:, -1].argmax(dim=1).equal(table[1])


@pytest.mark.slow
def test_two_layers_answer_in_context_and_one_does_not(questions):
    """Theorems 2 and 3 of Chen & Zou, on sequences that were never seen."""
    config = TrainingConfig(epochs=25, batch_size=64, lr=1e-2, weight_decay=0)
    scores = []
    for n_layers in (1, 2):
        model = new_token_model(questions, n_layers, one_hot=True)
        train_tokens(model, questions, config, n_train=1400, n_validation=180)
        scores.append(evaluate_labels(model, questions.dataset("test", 180)))
    assert scores[0].accuracy < 0.7  # one of the two answers of the context, at random: a half
    assert scores[1].accuracy > 0.95
    assert scores[1].loss < 0.1 < scores[0].loss


def test_history_of_labels_and_the_best_epoch(questions):
    model = new_token_model(questions)
    result = train_tokens(model, questions)
    assert list(result.history[0]) == [
        "epoch",
        "lr",
        "train_loss",
        "train_accuracy",
        "validation_loss",
        "validation_accuracy",
    ]
    best = result.history[result.best_epoch - 1]
    assert (
        result.loss == best["validation_loss"] == min(r["validation_loss"] for r in result.history)
    )
    assert result.accuracy == best["validation_accuracy"]
    x, y = (questions.dataset("validation", 60, seed=3).with_format("torch")[:][c] for c in "xy")
    logits = model(x)[:, -1].double()  # the model holds the best weights
    loss = -logits.log_softmax(dim=1).gather(1, y[:, None]).mean().detach()
    assert result.loss == pytest.approx(float(loss), rel=1e-5)
    assert result.accuracy == pytest.approx(float((logits.argmax(dim=1) == y).double().mean()))


def test_a_task_trains_on_its_own_splits(questions):
    """As with its datasets, whose splits share no sequence."""
    parts = [
        questions.dataset(split, n, seed=3) for split, n in (("train", 150), ("validation", 60))
    ]
    by_hand = train(new_token_model(questions), *parts, LABELS, progress=False)
    assert rows(by_hand) == rows(train_tokens(new_token_model(questions), questions))


def test_a_task_over_vectors_is_trained_on_too(task):
    parts = task.dataset("train", 200, seed=3), task.dataset("validation", 80, seed=3)
    expected = numbers(train(new_model(), *parts, CONFIG, progress=False))
    result = train(new_model(), task, CONFIG, n_train=200, n_validation=80, progress=False)
    assert numbers(result) == expected
    assert math.isnan(result.loss)
    assert math.isnan(result.accuracy)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 0.1}])
def test_the_first_steps_are_sgd_on_the_cross_entropy(questions, settings):
    """Against a loop over the full forward pass, in float64."""
    data = questions.sample(100, seed=0)
    config = TrainingConfig(
        **({"weight_decay": 0.0} | settings),
        epochs=1, batch_size=32, lr=0.2, optimizer="sgd", grad_clip=None, seed=3,
    )  # fmt: skip
    model = new_token_model(questions, attention="relu").to(torch.float64, print_details=False)
    by_hand = restored(model, model.state_dict())
    result = train(model, data, data, config, progress=False)

    weights = [p for p in by_hand.parameters() if p.requires_grad]
    momenta = [torch.zeros_like(p) for p in weights]
    order = torch.randperm(100, generator=torch.Generator().manual_seed(derive_seed("epoch", 3, 0)))
    losses, hits = 0.0, 0
    for step, chosen in enumerate(order.split(32)):
        x, y = data[0][chosen], data[1][chosen]
        logits = by_hand(x)[:, -1]
        loss = -logits.log_softmax(dim=1)[torch.arange(len(y)), y].mean()
        losses += float(loss.detach()) * len(y)
        hits += int((logits.argmax(dim=1) == y).sum())
        gradients = torch.autograd.grad(loss, weights)
        rate = 0.2 * 0.5 * (1 + math.cos(math.pi * step / 4))
        with torch.no_grad():
            for weight, gradient, momentum in zip(weights, gradients, momenta, strict=True):
                momentum *= settings.get("momentum", 0)
                momentum += gradient + settings.get("weight_decay", 0) * weight
                weight -= rate * momentum
    assert result.history[0]["train_loss"] == pytest.approx(losses / 100, rel=1e-9)
    assert result.history[0]["train_accuracy"] == pytest.approx(hits / 100)
    for name, value in by_hand.state_dict().items():
        torch.testing.assert_close(result.best_state[name], value, rtol=1e-8, atol=1e-10)


def test_fixed_parameters_stay_as_they_are(questions):
    model = new_token_model(questions, one_hot=True)
    result = train_tokens(model, questions, TrainingConfig(epochs=2, lr=1e-2, weight_decay=0.1))
    fixed = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert {"embed.W_E", "pos_embed.W_pos", "unembed.b_U"} <= fixed
    for name, parameter in model.named_parameters():
        assert parameter.equal(result.initial_state[name]) == (name in fixed), name
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(InfoFlowError, match="every parameter of the model is fixed"):
        train_tokens(model, questions)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_training_on_labels_resumes_to_the_same_numbers(questions, optimizer, tmp_path):
    changes = {"optimizer": optimizer, "momentum": 0.9 if optimizer == "sgd" else 0.0}
    config = TrainingConfig(**(vars(LABELS) | changes))
    undisturbed = train_tokens(new_token_model(questions), questions, config)
    model = new_token_model(questions)
    StopAt(model, 17, KeyboardInterrupt)  # in the middle of epoch 3
    with pytest.raises(TrainingInterrupted) as stopped:
        train_tokens(model, questions, config, checkpoint_dir=tmp_path)
    partial = stopped.value.result
    assert rows(partial) == rows(undisturbed)[:2]
    model.reset_hooks()
    resumed = train_tokens(new_token_model(questions), questions, config, checkpoint_dir=tmp_path)
    assert rows(resumed) == rows(undisturbed)
    assert (resumed.loss, resumed.accuracy) == (undisturbed.loss, undisturbed.accuracy)
    for name, value in undisturbed.best_state.items():
        assert value.equal(resumed.best_state[name])


def test_what_no_state_dict_holds_belongs_to_the_run(questions, tmp_path):
    train_tokens(new_token_model(questions), questions, checkpoint_dir=tmp_path)
    other_attention, other_fixed = new_token_model(questions), new_token_model(questions)
    set_attention(other_attention, "relu")
    other_fixed.embed.W_E.requires_grad_(False)
    for model in (other_attention, other_fixed):
        with pytest.raises(InfoFlowError, match=r"the model's settings .* changed"):
            train_tokens(model, questions, checkpoint_dir=tmp_path)


def test_the_record_names_optimizer_and_attention(questions):
    config = TrainingConfig(**(vars(LABELS) | {"optimizer": "sgd", "momentum": 0.5}))
    record = train_tokens(new_token_model(questions, attention="relu"), questions, config).record
    assert record.config["training"]["optimizer"] == "sgd"
    assert record.config["training"]["momentum"] == 0.5
    assert record.config["model"]["attention"] == ["relu", "relu"]
    assert record.seed == 3


def test_divergence_on_labels_is_said(questions):
    config = TrainingConfig(epochs=5, batch_size=8, lr=1e18, grad_clip=None, optimizer="sgd")
    model = new_token_model(questions, attention="relu")
    with pytest.raises(TrainingDivergedError, match="no longer finite"):
        train_tokens(model, questions, config)
    assert all(p.isfinite().all() for p in model.parameters())


def test_any_hooked_transformer_over_tokens_is_read_at_its_last_position(token_model, token_inputs):
    """A causal one with feed-forward networks and norms, which has no fast read-out."""
    y = token_inputs[:, 0]  # to be carried to the end
    result = train(
        token_model,
        (token_inputs, y),
        (token_inputs, y),
        TrainingConfig(epochs=30, batch_size=19, lr=1e-2),
        progress=False,
    )
    assert result.accuracy == 1
    assert token_model(token_inputs)[:, -1].argmax(dim=1).equal(y)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x, y + 3), "labels from 3 to 8, but the model has 6 outputs"),
        (lambda x, y: (x, y - 1), "labels from -1 to 4"),
        (lambda x, y: (x + 1, y), "token 13 at position .* from 0 to 12"),
        (lambda x, y: (torch.cat([x, x], 1), y), "16 tokens, the model in .* takes at most 8"),
        (lambda x, y: (x.float(), y), "expects integer token ids"),
        (lambda x, y: (x, y[:, None]), "leave out the second axis"),
        (lambda x, y: (x, y > 2), "labels are integers"),
        (lambda x, y: (x[:0], y[:0]), "data are empty"),
    ],
)
def test_bad_labels_and_tokens_are_named_before_the_first_step(questions, change, message):
    model, (x, y) = new_token_model(questions), questions.sample(300, seed=0)
    before = [p.clone() for p in model.parameters()]
    for data in ((change(x, y), (x, y)), ((x, y), change(x, y))):
        with pytest.raises(InfoFlowError, match=message):
            train(model, *data, progress=False)
    with pytest.raises(InfoFlowError, match=message):
        evaluate_labels(model, change(x, y))
    assert all(a.equal(b) for a, b in zip(before, model.parameters(), strict=True))


def test_what_is_given_must_belong_together(questions, task):
    model, data = new_token_model(questions), questions.sample(30, seed=0)
    vectors = task.sample(30, seed=0)
    with pytest.raises(InfoFlowError, match="expected the same kind"):
        train(model, data, vectors, progress=False)
    with pytest.raises(InfoFlowError, match="whose validation split is used"):
        train(model, questions, data, LABELS, progress=False)
    with pytest.raises(InfoFlowError, match="how much to draw from a task"):
        train(model, data, data, n_train=5, progress=False)
    with pytest.raises(InfoFlowError, match="n_validation is 0"):
        train(model, questions, n_validation=0, progress=False)
    with pytest.raises(InfoFlowError, match="validation data are NoneType"):
        train(model, data, progress=False)
    with pytest.raises(InfoFlowError, match="use evaluate_labels"):
        evaluate(model, data)
    with pytest.raises(InfoFlowError, match="use evaluate for"):
        evaluate_labels(new_model(), vectors)
    # a task of another vocabulary
    with pytest.raises(InfoFlowError, match="d_vocab"):
        train(model, load_task("in_context_qa", n_questions=9, n_pairs=2), progress=False)
