"""Hops against layers: what is needed, cases, a run, and how the numbers are judged."""

import itertools

import pandas as pd
import pytest

from infoflow_lens.experiments.studies.nested_qa import NestedQuestions, layers_needed
from infoflow_lens.experiments.studies.token_models import start_model

STUDY = NestedQuestions()


@pytest.mark.parametrize("hops", range(1, 20))
def test_the_layers_needed_are_those_of_sets_that_double(hops):
    held, layers = 1, 0
    while held < 2 * hops + 1:
        held, layers = 2 * held, layers + 1
    assert layers_needed(hops) == layers
    # as many are enough: the sign and the facts take each other's hops, after one layer of copying
    at_sign, at_facts, used = 0, 1, 1
    while at_sign < hops:
        at_sign, at_facts, used = at_sign + at_facts, 2 * at_facts, used + 1
    assert used == layers
    assert layers <= hops + 1 <= 2 * hops


def frame(accuracies, start="random"):
    """Runs of two epochs by (hops, layers): test accuracies of the seeds."""
    rows = []
    runs = [
        (hops, layers, seed, accuracy)
        for (hops, layers), seeds in accuracies.items()
        for seed, accuracy in enumerate(seeds)
    ]
    for run, (hops, layers, seed, accuracy) in enumerate(runs):
        about = {"run": run, "seed": seed, "start": start, "hops": hops, "layers": layers}
        scores = {"best_validation_loss": 1 - accuracy, "test_accuracy": accuracy, "chance": 0.5}
        rows += [{**about, **scores, "epoch": epoch} for epoch in (1, 2)]
    return pd.DataFrame(rows)


def predicted():
    """Solved with the layers needed; one seed of two is enough."""
    return {
        (hops, layers): (0.5, 1.0) if layers >= layers_needed(hops) else (0.55, 0.5)
        for hops, layers in itertools.product((1, 2, 3), (1, 2, 3, 4))
    }


def test_what_is_predicted_passes():
    verdict = STUDY.verdict(frame(predicted()))
    assert verdict.passed
    assert [r.split(": ")[1] for r in verdict.reasons if "solved" in r] == [
        "solved by 2 layers",
        "solved by 3 layers",
        "solved by 3 layers",
    ]


@pytest.mark.parametrize(
    "change",
    [
        {(1, 1): (0.5, 0.61)},  # one layer above chance
        {(3, 2): (0.5, 0.9)},  # two layers for three hops
        {(1, 2): (0.9, 0.9)},  # one hop is not solved by two
        {(2, 3): (0.5, 0.9), (2, 4): (0.5, 0.9)},  # two hops never solved
        {(2, 3): (0.5, 0.9)},  # more layers for two hops than for three
    ],
)
def test_anything_else_does_not(change):
    assert not STUDY.verdict(frame(predicted() | change)).passed


def test_three_hops_may_need_more_than_was_run():
    verdict = STUDY.verdict(frame(predicted() | {(3, 3): (0.5, 0.5), (3, 4): (0.5, 0.5)}))
    assert verdict.passed
    assert "3 hops: solved by no depth that was run" in verdict.reasons


def test_either_start_may_solve_it_and_none_may_be_too_good():
    weak = frame(dict.fromkeys(predicted(), (0.5, 0.5)), "paper")
    weak["run"] += 100
    assert STUDY.verdict(pd.concat([weak, frame(predicted())])).passed
    weak.loc[(weak["hops"] == 2) & (weak["layers"] == 1), "test_accuracy"] = 0.7
    verdict = STUDY.verdict(pd.concat([weak, frame(predicted())]))
    assert not verdict.passed
    [failed] = [reason for reason in verdict.reasons if "not as predicted" in reason]
    assert "0.700 (1 layer, the paper's start), chance 0.500" in failed


def test_the_seed_is_chosen_by_validation():
    results = frame(predicted())
    of_one_hop = (results["hops"] == 1) & (results["layers"] == 2)
    results.loc[of_one_hop & (results["test_accuracy"] == 1), "best_validation_loss"] = 9.0
    assert not STUDY.verdict(results).passed


def test_the_table_has_hops_against_layers():
    lines = STUDY.table(frame(predicted())).splitlines()
    assert "| 1 layer | 2 layers | 3 layers | 4 layers |" in lines[0]
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")
    assert lines[4] == (
        "| random start | 3 | 0.5 | 0.525 (0.5 to 0.55) | 0.525 (0.5 to 0.55) | "
        "0.75 (0.5 to 1) | 0.75 (0.5 to 1) | 6 | 4 | 3 |"
    )


def test_the_figure_has_a_line_for_each_number_of_hops():
    [axes] = STUDY.figure(frame(predicted())).axes
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert lines["1 hop"] == [0.55, 1, 1, 1]
    assert lines["3 hops"] == [0.55, 0.55, 1, 1]


@pytest.mark.parametrize("preset", ["smoke", "quick", "full"])
def test_every_case_has_its_task(preset):
    for case in STUDY.cases(preset):
        if preset == "full" and case["layers"] > 1:
            continue
        model, task = start_model(case, 0)
        assert (task.name, task.hops, task.n_chains) == ("nested_qa", case["hops"], 2)
        assert model.architecture.n_layers == case["layers"]


def test_a_run_that_learns_nothing_is_at_chance_or_below():
    case = {**STUDY.cases("smoke")[0], "epochs": 1, "lr": 1e-9, "n_train": 256, "n_test": 200}
    rows = STUDY.measure(case, 0, "cpu")
    assert [row["epoch"] for row in rows] == [1]
    assert rows[0]["chance"] == 0.5
    assert rows[0]["floor"] == 1 / 8
    assert rows[0]["test_accuracy"] < 0.5
