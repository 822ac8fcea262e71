"""What one to four layers learn: cases, a run, and how the numbers are judged."""

import math

import pandas as pd
import pytest

from infoflow_lens.experiments.studies import find_study
from infoflow_lens.experiments.studies.varying_depth import VaryingDepth

STUDY = VaryingDepth()
ENOUGH = {
    "memorization": 1,
    "in_context_qa": 2,
    "template_matching": 2,
    "in_context_template_matching": 3,
}


def a_case(**changes):
    [case] = [c for c in STUDY.cases("smoke") if c["task"] == "in_context_qa" and c["layers"] == 2]
    tiny = {"epochs": 2, "n_train": 256, "n_test": 100}
    return {**case, **tiny, **changes}


# Hand-made results


def frame(accuracies, start="paper", chance=0.25):
    """Two epochs of a run for every (task, layers): accuracies of the seeds."""
    rows = []
    for run, (task, layers, seed, accuracy) in enumerate(
        (task, layers, seed, accuracy)
        for (task, layers), seeds in accuracies.items()
        for seed, accuracy in enumerate(seeds)
    ):
        rows += [
            {
                "run": run,
                "seed": seed,
                "start": start,
                "task": task,
                "layers": layers,
                "heads": 1,
                "epoch": epoch,
                "train_accuracy": accuracy * epoch / 2,
                "train_loss": 2 - accuracy,
                "validation_accuracy": accuracy,
                "validation_loss": 2 - accuracy,
                "best_validation_loss": 2 - accuracy,
                "test_accuracy": accuracy,
                "chance": chance,
                "floor": 0.05,
            }
            for epoch in (1, 2)
        ]
    return pd.DataFrame(rows)


def as_published():
    return {
        (task, layers): (1.0, 0.97) if layers >= enough else (0.26, 0.31)
        for task, enough in ENOUGH.items()
        for layers in (1, 2, 3, 4)
    }


def test_it_is_known_by_name():
    assert isinstance(find_study("varying_depth"), VaryingDepth)


@pytest.mark.parametrize("preset", ["quick", "full"])
def test_each_task_has_its_layers_from_the_papers_start(preset):
    cases = STUDY.cases(preset)
    paper = [(c["task"], c["layers"]) for c in cases if c["start"] == "paper"]
    deepest = {"memorization": 2} if preset == "quick" else {}
    assert sorted(paper) == sorted(
        (task, n) for task in ENOUGH for n in range(1, 1 + deepest.get(task, 4))
    )
    assert {c["task"] for c in cases if c["start"] == "random"} == set(ENOUGH)
    for case in cases:
        if case["start"] == "paper":
            assert (case["optimizer"], case["attention"], case["heads"]) == ("sgd", "relu", 1)


def test_full_has_the_papers_sizes():
    sizes = {case["task"]: case for case in STUDY.cases("full") if case["start"] == "paper"}
    assert (sizes["memorization"]["n_words"], sizes["memorization"]["length"]) == (500, 6)
    assert sizes["in_context_qa"]["n_questions"] == sizes["in_context_qa"]["n_answers"] == 100
    assert sizes["template_matching"]["n_words"] == 210
    contextual = sizes["in_context_template_matching"]
    assert [contextual[k] for k in ("n_words", "n_answers", "length")] == [100, 100, 5]


def test_a_run_gives_a_row_for_each_epoch_and_the_same_again():
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
    assert STUDY.measure(a_case(), seed=0, device="cpu") == rows
    assert STUDY.measure(a_case(), seed=1, device="cpu") != rows


def test_an_untrained_run_is_no_better_than_chance():
    # with next to no learning rate nothing is learned
    rows = STUDY.measure(a_case(lr=1e-9, epochs=1), seed=0, device="cpu")
    assert rows[0]["test_accuracy"] < 1 / 3 + 0.15


def test_what_is_published_passes():
    verdict = STUDY.verdict(frame(as_published()))
    assert verdict.passed
    assert len(verdict.reasons) == 1 + 2 + 2 + 3
    assert all("not as" not in reason for reason in verdict.reasons)


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({("memorization", 1): (0.5, 0.6)}, "memorization, 1 layer: test accuracy 0.600"),
        ({("in_context_qa", 1): (0.26, 0.36)}, "reasoning, 1 layer: highest"),
        ({("in_context_qa", 2): (0.9, 0.94)}, "reasoning, 2 layers: test accuracy 0.940"),
        ({("template_matching", 1): (0.5, 0.2)}, "generalization, 1 layer: highest"),
        (
            {("in_context_template_matching", 2): (0.26, 0.75)},
            "contextual generalization, 2 layers: highest test accuracy over seeds 0.750",
        ),
        (
            {("in_context_template_matching", 3): (0.26, 0.3)},
            "contextual generalization, 3 layers: test accuracy 0.300",
        ),
    ],
)
def test_a_missing_effect_fails_and_is_named(change, missing):
    verdict = STUDY.verdict(frame(as_published() | change))
    assert not verdict.passed
    [failed] = [reason for reason in verdict.reasons if "not as published" in reason]
    assert failed.startswith(missing)


def test_depth_beyond_what_is_needed_and_other_starts_are_not_judged():
    deep = frame(as_published() | {("in_context_qa", 4): (0.1, 0.1)})
    random = frame({("in_context_qa", 2): (0.1, 0.1), ("in_context_qa", 1): (0.9,)}, "random")
    random["run"] += 1000
    assert STUDY.verdict(pd.concat([deep, random])).passed


def test_the_seed_is_chosen_by_validation_not_by_test():
    results = frame(as_published())
    chosen = (results["task"] == "in_context_qa") & (results["layers"] == 2)
    results.loc[chosen & (results["seed"] == 0), "best_validation_loss"] = 0.1
    results.loc[chosen & (results["seed"] == 0), "test_accuracy"] = 0.5
    verdict = STUDY.verdict(results)
    assert not verdict.passed
    assert any("0.500 of the seed that validation chooses" in r for r in verdict.reasons)


def test_runs_that_all_diverged_do_not_pass_in_silence():
    results = frame({k: v for k, v in as_published().items() if k != ("in_context_qa", 2)})
    verdict = STUDY.verdict(results)
    assert not verdict.passed
    assert "reasoning: no finished run with 2 layers" in verdict.reasons


def test_the_table_has_seeds_spread_and_chance():
    lines = STUDY.table(frame(as_published())).splitlines()
    [line] = [x for x in lines if "| reasoning | 1 |" in x]
    # train accuracy is that of the last epoch
    assert line == (
        "| the paper's start | reasoning | 1 | 1 | 0.25 (0.05) | 0.285 (0.26 to 0.31) | "
        "0.285 (0.26 to 0.31) | 0 of 2 | chance |"
    )
    [line] = [x for x in lines if "| contextual generalization | 3 |" in x]
    assert line.endswith("| 2 of 2 | solved |")


def test_the_figure_shows_accuracy_and_loss_of_each_task():
    figure = STUDY.figure(frame(as_published()))
    axes = figure.axes
    assert len(axes) == 8
    assert [a.get_title() for a in axes[:4]] == [
        "memorization",
        "reasoning",
        "generalization",
        "contextual generalization",
    ]
    solid = [line for line in axes[1].lines if line.get_label().endswith(("layer", "layers"))]
    assert [line.get_label() for line in solid] == ["1 layer", "2 layers", "3 layers", "4 layers"]
    assert list(solid[0].get_ydata()) == [0.26, 0.26]
    assert list(axes[5].lines[0].get_ydata()) == [2 - 0.26] * 2
