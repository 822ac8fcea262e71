"""What the studies of Chen & Zou share: how runs start, what chance is, what a run gives."""

import itertools

import pandas as pd
import pytest
import torch

from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.studies.constructions import build_construction
from infoflow_lens.studies.papers.token_models import (
    ADAMW,
    SIZES,
    TASKS,
    chance_of,
    chance_to_see,
    chosen_accuracy,
    count_noun,
    data_of,
    last_epochs,
    load_settings_task,
    paper_training,
    start_model,
    train_run,
)
from infoflow_lens.tasks import load_task
from infoflow_lens.training import evaluate_labels

QA = {"n_questions": 6, "n_answers": 5, "n_pairs": 2}


def settings_of(task="in_context_qa", start="paper", layers=2, sizes=QA, **changes):
    return {"start": start, "task": task, "layers": layers, **sizes, **paper_training(task)} | {
        "epochs": 1,
        "n_train": 256,
        "n_test": 100,
        **changes,
    }


@pytest.mark.parametrize("task", list(TASKS))
@pytest.mark.parametrize("start", ["paper", "random"])
def test_a_start_has_the_layers_and_heads_that_are_asked_for(task, start):
    settings = settings_of(task, start, 2, SIZES["quick"][task], heads=[1, 2])
    model, made = start_model(settings, seed=0)
    assert made.name == task
    assert model.architecture.n_heads == (1, 2)
    assert model.architecture.attention == "relu"
    logits = model(made.sample(3, seed=0)[0])[:, -1]
    assert logits.shape == (3, made.n_labels)


def test_the_papers_start_scores_as_constructed_in_the_first_layer_and_little_in_deeper_ones():
    settings = settings_of(layers=3)
    model, task = start_model(settings, seed=0)
    construction, _ = build_construction("in_context_qa", **QA)
    x, _ = task.sample(5, seed=0)
    name = "blocks.0.attn.hook_attn_scores"
    scores = [m.run_with_cache(x)[1][name] for m in (model, construction)]
    torch.testing.assert_close(*scores)
    for block in model.blocks[1:]:
        weights = block.attn.W_Q.detach()
        assert float(weights.min()) >= 0
        assert 0.9 * settings["scale"] < float(weights.max()) <= settings["scale"]


def test_nested_questions_start_from_copies_within_facts():
    sizes = {"n_entities": 8, "hops": 2, "n_chains": 2}
    settings = {**settings_of(), **sizes, "task": "nested_qa"}
    model, task = start_model(settings, seed=0)
    x, _ = task.sample(4, seed=0)
    scores = model.run_with_cache(x)[1]["blocks.0.attn.hook_attn_scores"]
    fact = torch.arange(task.n_tokens) // 3
    others = (fact[:, None] == fact) & ~torch.eye(task.n_tokens, dtype=torch.bool)
    torch.testing.assert_close(scores, others.float().expand_as(scores))


def test_memorization_starts_from_uniform_scores():
    sizes = {"n_words": 50, "length": 6, "n_sequences": 100}
    model, _ = start_model(settings_of("memorization", sizes=sizes, layers=1), seed=0)
    weights = model.blocks[0].attn.W_Q.detach()
    assert float(weights.min()) >= 0
    assert 0.99 < float(weights.max()) < 1
    assert float(weights.mean()) == pytest.approx(0.5, abs=0.05)


def test_a_random_start_knows_nothing_of_the_construction():
    model, _ = start_model(settings_of(start="random", **ADAMW), seed=0)
    for block in model.blocks:
        assert float(block.attn.W_Q.detach().min()) < 0
        assert block.attn.W_K.requires_grad


def test_gaussian_matrices_are_whole_and_as_wide_as_asked_for():
    model, task = start_model(settings_of(start="whole", padding=7), seed=0)
    width = task.d_vocab + task.n_tokens + 7
    for block in model.blocks:
        assert not block.attn.W_K.requires_grad
        assert not block.attn.W_O.requires_grad
        for name in ("W_Q", "W_V"):
            weights = getattr(block.attn, name).detach()
            assert tuple(weights.shape) == (1, width, width)
            assert float(weights.std()) == pytest.approx(width**-0.5, rel=0.1)
            assert abs(float(weights.mean())) < 0.03


@pytest.mark.parametrize("plain", ["paper", "summed"])
def test_noise_lies_around_the_papers_start(plain):
    noisy = {"paper": "noisy", "summed": "noisy summed"}[plain]
    settings = settings_of(heads=2, noise=0.02)
    still, _ = start_model({**settings, "start": plain}, seed=0)
    moved, _ = start_model({**settings, "start": noisy}, seed=0)
    for (name, before), after in zip(still.named_parameters(), moved.parameters(), strict=True):
        difference = (after - before).detach()
        wanted = 0.02 if before.requires_grad else 0.0
        assert float(difference.std()) == pytest.approx(wanted, rel=0.3), name
    again, _ = start_model({**settings, "start": noisy}, seed=0)
    assert torch.equal(again.blocks[0].attn.W_Q, moved.blocks[0].attn.W_Q)


def test_fresh_sequences_are_drawn_anew_and_of_the_training_split():
    settings = settings_of(fresh=True, sizes={"n_questions": 4, "n_answers": 4, "n_pairs": 2})
    task = load_settings_task(settings)
    draw = data_of(task, settings, seed=0)
    (x, y), (other, _) = draw(1), draw(2)
    assert len(x) == settings["n_train"]
    assert torch.equal(y, task.target(x))
    assert not torch.equal(x, other)
    assert torch.equal(draw(1)[0], x)
    held_out = {tuple(row) for row in task.dataset("test", 300, seed=0)["x"]}
    assert not held_out & {tuple(row) for row in torch.cat([x, other]).tolist()}


def test_chance_is_one_over_the_answers_to_choose_from():
    labels = torch.tensor([0, 1, 1, 2])
    assert chance_of(load_task("memorization", n_words=9, n_sequences=20), labels) == 1 / 20
    assert chance_of(load_task("in_context_qa", n_pairs=4), labels) == 1 / 4
    assert chance_of(load_task("in_context_template_matching", n_pairs=3), labels) == 1 / 3
    assert chance_of(load_task("template_matching"), labels) == 1 / 2
    assert chance_of(load_task("nested_qa", n_chains=3), labels) == 1 / 3


def test_the_chance_of_nested_questions_is_that_of_naming_an_end_of_a_chain():
    task = load_task("nested_qa", n_entities=9, hops=2, n_chains=3)
    x, y = task.sample(50, seed=0)
    for sequence, label in zip(x.tolist(), y.tolist(), strict=True):
        ends = set(sequence[2:-2:3]) - set(sequence[0:-2:3])  # answers that are never asked
        assert label in ends
        assert 1 / len(ends) == chance_of(task, y)


def test_test_sequences_are_of_the_test_split_and_of_their_study():
    sizes = {"n_questions": 3, "n_answers": 3, "n_pairs": 2}  # 72 sequences: splits are small
    settings = settings_of(sizes=sizes)
    runs = [train_run(name, settings, 0, "cpu") for name in ("one", "one", "other")]
    train = {tuple(row) for row in runs[0].task.dataset("train", 500, seed=9)["x"]}
    assert not train & {tuple(row) for row in runs[0].x.tolist()}
    assert torch.equal(runs[0].x, runs[1].x)
    assert not torch.equal(runs[0].x, runs[2].x)
    # the number of an earlier draw is not that of the test
    seen = runs[0].task.dataset("test", 100, seed=derive_seed("one", "test", 0))["x"]
    assert torch.tensor([list(row) for row in seen]).tolist() != runs[0].x.tolist()


def test_a_run_holds_the_weights_of_the_least_validation_loss():
    run = train_run("any", settings_of(epochs=3, lr=0.3), 0, "cpu")
    losses = [row["validation_loss"] for row in run.training.history]
    assert run.training.loss == min(losses)
    validation = run.task.dataset("validation", 100, seed=0)
    assert evaluate_labels(run.model, validation).loss == pytest.approx(min(losses), abs=1e-6)


def test_results_are_read_by_run():
    rows = [
        {"run": run, "epoch": epoch, "best_validation_loss": loss, "test_accuracy": accuracy}
        for run, (loss, accuracy) in enumerate(((0.5, 0.9), (0.4, 0.7)))
        for epoch in (2, 1)
    ]
    last = last_epochs(pd.DataFrame(rows))
    assert list(last["epoch"]) == [2, 2]
    assert chosen_accuracy(last) == 0.7
    assert (count_noun(1, "layer"), count_noun(2, "layer")) == ("1 layer", "2 layers")


@pytest.mark.parametrize(("n_seeds", "n_cells"), [(1, 1), (2, 3), (3, 2)])
def test_the_power_of_a_rule_is_the_share_of_all_outcomes_that_pass_it(n_seeds, n_cells):
    """Every seed of every cell solves or does not, each as likely."""
    outcomes = list(itertools.product((False, True), repeat=n_seeds * n_cells))
    seen = sum(
        all(any(one[cell * n_seeds : (cell + 1) * n_seeds]) for cell in range(n_cells))
        for one in outcomes
    )
    assert f"in {seen / len(outcomes):.0%} of such" in chance_to_see(n_seeds, n_cells)
