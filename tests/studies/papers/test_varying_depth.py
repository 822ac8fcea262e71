"""What one to four layers learn: cases, a run, and how the numbers are judged."""

import math

import pandas as pd
import pytest
import torch

from infoflow_lens.studies.papers.token_models import start_model
from infoflow_lens.studies.papers.varying_depth import (
    VaryingDepth,
    context_gradient,
    context_length,
)
from infoflow_lens.tasks import load_task
from tests.studies.studies_for_tests import broken, token_rows

STUDY = VaryingDepth()
ENOUGH = {
    "memorization": 1,
    "in_context_qa": 2,
    "template_matching": 2,
    "in_context_template_matching": 3,
}


def a_case(**changes):
    [case, _] = [
        c for c in STUDY.cases("smoke") if c["task"] == "in_context_qa" and c["layers"] == 2
    ]
    tiny = {"epochs": 2, "n_train": 256, "n_test": 100}
    return {**case, **tiny, **changes}


# Hand-made results


def frame(accuracies, start="noisy", gradient=1e-3):
    """Runs for every (task, layers): accuracies of the seeds."""
    runs = [
        {"task": task, "layers": layers, "seed": seed, "test_accuracy": accuracy}
        for (task, layers), seeds in accuracies.items()
        for seed, accuracy in enumerate(seeds)
    ]
    return token_rows(
        runs, start=start, heads=1, chance=0.25, floor=0.05, context_gradient=gradient
    )


def as_published():
    return {
        (task, layers): (1.0, 0.97) if layers >= enough else (0.26, 0.31)
        for task, enough in ENOUGH.items()
        for layers in range(1, enough + 1)
    }


def few():
    return {case: seeds for case, seeds in as_published().items() if case[1] < ENOUGH[case[0]]}


def together(*frames):
    for place, one in enumerate(frames):
        one["run"] += 1000 * place
    return pd.concat(frames, ignore_index=True)


def passing(judged=None, whole=None):
    """The start plus noise, Gaussian matrices, and the start that cannot move."""
    still = {(task, 1): (0.05,) for task in ENOUGH if task != "memorization"}
    return together(
        frame(as_published() | (judged or {})),
        frame(few() | (whole or {}), "whole"),
        frame(still, "paper", gradient=0.0),
    )


@pytest.mark.parametrize(("preset", "more"), [("quick", 0), ("full", 1)])
def test_each_task_has_its_layers_from_starts_that_can_move(preset, more):
    cases = STUDY.cases(preset)
    for start in ("noisy", "whole"):
        found = [(c["task"], c["layers"]) for c in cases if c["start"] == start]
        wanted = [(task, n) for task, enough in ENOUGH.items() for n in range(1, enough + more + 1)]
        assert sorted(found) == sorted(wanted)
    paper = [(c["task"], c["layers"]) for c in cases if c["start"] == "paper"]
    assert paper == [(task, 1) for task in ENOUGH if task != "memorization"]
    for case in cases:
        assert (case["attention"], case["heads"]) == ("relu", 1) or case["start"] == "softmax"
        assert case["fresh"] is (case["task"] != "memorization")


def test_full_has_the_papers_sizes():
    sizes = {case["task"]: case for case in STUDY.cases("full") if case["start"] == "noisy"}
    assert (sizes["memorization"]["n_words"], sizes["memorization"]["length"]) == (500, 6)
    assert sizes["in_context_qa"]["n_questions"] == sizes["in_context_qa"]["n_answers"] == 100
    assert sizes["template_matching"]["n_words"] == 210
    contextual = sizes["in_context_template_matching"]
    assert [contextual[k] for k in ("n_words", "n_answers", "length")] == [100, 100, 5]


@pytest.mark.parametrize("case", [c for c in STUDY.cases("quick") if c["layers"] == 1], ids=str)
def test_the_papers_start_cannot_come_to_read_the_context(case):
    """The context can be swapped without a change; noise and Gaussian matrices let it in."""
    model, task = start_model(case, 3)
    x, y = task.sample(64, seed=0)
    n_context = context_length(task)
    swapped = torch.cat([x[:, :n_context].roll(1, 0), x[:, n_context:]], 1)
    assert not torch.equal(swapped, x)
    gradient = context_gradient(model, x, y, n_context)
    same = torch.equal(model(x)[:, -1], model(swapped)[:, -1])
    # noise does not open a mask of -1
    closed = case["start"] == "noisy" and case["task"] == "in_context_template_matching"
    assert same is (case["start"] == "paper" or closed)
    assert (gradient == 0) is same


def test_the_context_ends_before_the_query():
    for name, sizes, wanted in (
        ("in_context_qa", {"n_questions": 6, "n_answers": 6, "n_pairs": 2}, "a -> 1 b -> 2"),
        ("template_matching", {"n_words": 16, "length": 3}, "a b c"),
    ):
        task = load_task(name, **sizes)
        assert context_length(task) == len(wanted.split())
    contextual = load_task("in_context_template_matching", length=3, n_pairs=3)
    assert context_length(contextual) == contextual.n_tokens - 4


def test_a_run_gives_a_row_for_each_epoch():
    rows = STUDY.measure(a_case(), seed=0, device="cpu")
    assert [row["epoch"] for row in rows] == [1, 2]
    for row in rows:
        assert 0 <= row["test_accuracy"] <= 1
        assert (row["chance"], row["floor"]) == (1 / 3, 1 / 8)
        assert math.isfinite(row["train_loss"])
        assert math.isfinite(row["validation_loss"])
    losses = [row["validation_loss"] for row in rows]
    assert rows[0]["best_validation_loss"] == min(losses)
    assert rows[0]["best_epoch"] == 1 + losses.index(min(losses))


def test_what_is_published_passes():
    assert broken(STUDY, passing()) == []
    few, moving, enough = (claim.numbers(passing()) for claim in STUDY.claims())
    assert few.keys() == moving.keys()
    assert (len(few), len(enough)) == (1 + 1 + 2, 4)


@pytest.mark.parametrize(
    ("change", "claim", "missing"),
    [
        ({("memorization", 1): (0.5, 0.6)}, 2, "memorization, 1 layer"),
        ({("in_context_qa", 1): (0.26, 0.36)}, 0, "reasoning, 1 layer"),
        ({("in_context_qa", 2): (0.9, 0.94)}, 2, "reasoning, 2 layers"),
        ({("template_matching", 1): (0.5, 0.2)}, 0, "generalization, 1 layer"),
        (
            {("in_context_template_matching", 2): (0.26, 0.75)},
            0,
            "contextual generalization, 2 layers",
        ),
        (
            {("in_context_template_matching", 3): (0.26, 0.3)},
            2,
            "contextual generalization, 3 layers",
        ),
    ],
)
def test_a_missing_effect_fails_and_is_named(change, claim, missing):
    results = passing(change)
    assert broken(STUDY, results) == [claim]
    failing = STUDY.claims()[claim]
    numbers = failing.numbers(results)
    assert [name for name, number in numbers.items() if not failing.holds(number)] == [missing]


def test_gaussian_matrices_with_too_few_layers_are_judged():
    assert not STUDY.verdict(passing(whole={("in_context_qa", 1): (0.26, 0.4)})).passed
    assert STUDY.verdict(passing(whole={("in_context_qa", 2): (0.1, 0.1)})).passed  # enough: not


def test_depth_beyond_what_is_needed_is_not_judged():
    assert STUDY.verdict(passing({("in_context_qa", 4): (0.1, 0.1)})).passed


def test_the_seed_is_chosen_by_validation_not_by_test():
    results = passing()
    chosen = (results["task"] == "in_context_qa") & (results["layers"] == 2)
    results.loc[chosen & (results["seed"] == 0), "best_validation_loss"] = 0.1
    results.loc[chosen & (results["seed"] == 0), "test_accuracy"] = 0.5
    assert broken(STUDY, results) == [2]
    assert STUDY.claims()[2].numbers(results)["reasoning, 2 layers"] == 0.5
