"""Hops against layers: what is needed, cases, training in stages, and how numbers are judged."""

import itertools

import pytest
import torch

from infoflow_lens import InfoFlowError
from infoflow_lens.studies.papers import nested_qa
from infoflow_lens.studies.papers.nested_qa import (
    NestedQuestions,
    ends_last,
    fewest_layers,
    move_queries,
)
from infoflow_lens.studies.papers.token_models import start_model
from infoflow_lens.tasks import load_task
from tests.studies.studies_for_tests import broken, token_rows

STUDY = NestedQuestions()


@pytest.mark.parametrize("hops", range(1, 20))
def test_the_layers_needed_are_those_of_sets_that_double(hops):
    held, layers = 1, 0
    while held < 2 * hops + 1:
        held, layers = 2 * held, layers + 1
    assert fewest_layers(hops) == layers
    # as many are enough: the sign and the facts take each other's hops, after one layer of copying
    at_sign, at_facts, used = 0, 1, 1
    while at_sign < hops:
        at_sign, at_facts, used = at_sign + at_facts, 2 * at_facts, used + 1
    assert used == layers
    assert layers <= hops + 1 <= 2 * hops


def frame(accuracies):
    """Runs by (start, asked, hops, layers, noise): test accuracies of the seeds."""
    names = ("start", "asked", "hops", "layers", "noise")
    runs = [
        {**dict(zip(names, case, strict=True)), "seed": seed, "test_accuracy": accuracy}
        for case, seeds in accuracies.items()
        for seed, accuracy in enumerate(seeds)
    ]
    for run in runs:
        hops, accuracy = run["hops"], run["test_accuracy"]
        near = {n: accuracy if n == hops else 0.97 if n < hops else None for n in (1, 2, 3)}
        run |= {f"from_{n}": value for n, value in near.items()}
        run |= dict.fromkeys(("end_last", "end_before"), accuracy if hops > 1 else None)
    return token_rows(runs, chance=0.5, before=0.1)


def case(hops, layers, asked="growing", noise=None):
    return ("whole" if noise is None else "constructed", asked, hops, layers, noise)


def predicted():
    """Solved with the layers needed, by growing distances; one seed of two is enough."""
    return {
        case(1, 1): (0.55, 0.5),
        case(1, 2): (1.0, 0.6),
        case(2, 2): (0.5, 0.5),
        case(2, 3): (0.6, 0.99),
        case(2, 3, "at once"): (0.5, 0.51),
        case(3, 2): (0.5, 0.49),
        case(3, 4): (0.5, 0.52),
        case(2, 3, "at once", 0.1): (1.0, 1.0),
        case(2, 3, "at once", 0.3): (0.3, 0.2),
    }


def test_what_is_predicted_passes():
    assert broken(STUDY, frame(predicted())) == []
    assert STUDY.claims()[1].numbers(frame(predicted()))["2 hops, 3 layers"] == 0.99


@pytest.mark.parametrize(
    ("changed", "accuracies", "claim"),
    [
        (case(1, 1), (0.5, 0.61), 0),  # one layer above chance
        (case(3, 2), (0.5, 0.9), 0),  # two layers for three hops
        (case(1, 2), (0.9, 0.9), 1),  # one hop is not solved by two
        (case(2, 3), (0.9, 0.9), 1),  # two hops are not solved by three
        (case(2, 3, "at once"), (0.5, 0.97), 2),  # they are without growing distances, too
        (case(2, 2, "at once", 0.1), (0.5, 0.9), 0),  # too few layers, from another start
    ],
)
def test_anything_else_does_not(changed, accuracies, claim):
    assert broken(STUDY, frame(predicted() | {changed: accuracies})) == [claim]


def test_three_hops_and_noise_are_told_and_not_judged():
    three = {case(3, 4): (0.2, 0.1), case(2, 3, "at once", 0.1): (0.1, 0.1)}
    verdict = STUDY.verdict(frame(predicted() | three))
    assert verdict.passed
    assert "3 hops, 4 layers: 0.970, 0.970, 0.200 when asked 1 to 3" in " ".join(verdict.remarks)
    assert "noise of 0.3: test accuracy 0.100 to 0.100 before training, 0.200 to 0.300 after" in (
        " ".join(verdict.remarks)
    )


def test_the_seed_is_chosen_by_validation():
    results = frame(predicted())
    of_one_hop = (results["hops"] == 1) & (results["layers"] == 2)
    results.loc[of_one_hop & (results["test_accuracy"] == 1), "best_validation_loss"] = 9.0
    assert not STUDY.verdict(results).passed


# Training


def test_questions_asked_later_have_the_same_answer():
    task = load_task("nested_qa", n_entities=9, hops=3, n_chains=2)
    x, y = task.sample(40, seed=0)
    moved = move_queries(x, torch.arange(40) % 3)
    assert torch.equal(moved[:, :-2], x[:, :-2])
    for row, (sequence, label) in enumerate(zip(moved.tolist(), y.tolist(), strict=True)):
        facts = dict(zip(sequence[0:-2:3], sequence[2:-2:3], strict=True))
        here = sequence[-2]
        for _ in range(3 - row % 3):
            here = facts[here]
        assert here == label
    assert torch.equal(moved[::3], x[::3])


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_contexts_whose_last_fact_ends_a_chain(hops):
    task = load_task("nested_qa", n_entities=9, hops=hops, n_chains=2)
    x, _ = task.sample(60, seed=0)
    expected = []
    for sequence in x.tolist():
        facts = dict(zip(sequence[0:-2:3], sequence[2:-2:3], strict=True))
        end = list(facts.values())[-1]
        expected.append(end not in facts)
    assert ends_last(x).tolist() == expected
    assert all(expected) is (hops == 1)


def settings(**changes):
    [quick] = [
        case
        for case in STUDY.cases("quick")
        if case["asked"] == "growing" and (case["hops"], case["layers"]) == (3, 4)
    ]
    return {**quick, "epochs": 2, "stage": 1, "n_train": 128, "n_test": 50, **changes}


def test_stages_grow_distance_and_depth_and_take_over_weights(monkeypatch):
    """Each stage begins where the one before ended, a layer deeper."""
    stages = []
    plain = nested_qa.train

    def seen(model, data, validation, config, **rest):
        begun = {name: value.clone() for name, value in model.named_parameters()}
        training = plain(model, data, validation, config, **rest)
        ended = {name: value.clone() for name, value in model.named_parameters()}
        stages.append((begun, ended, data(1), validation, config))
        return training

    monkeypatch.setattr(nested_qa, "train", seen)
    rows = STUDY.measure(settings(), 0, "cpu")
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4]
    assert 3 <= rows[0]["best_epoch"] <= 4  # of the last stage
    task = load_task("nested_qa", n_entities=8, hops=3, n_chains=2)
    for stage, (begun, _, (x, y), (asked, labels), config) in enumerate(stages, start=1):
        assert sum("W_V" in name for name in begun) == stage + 1
        assert (config.lr_end == 0) is (stage == 3)
        # from at most so many hops before the end, and half of the questions and all validation
        # from just so many
        near = torch.stack([move_queries(x, torch.full((len(x),), n))[:, -2] for n in range(4)])
        distance = (near == y).int().argmax(0)
        assert distance.min() >= 1
        assert distance.max() == stage
        assert stage == 1 or 0.5 < float((distance == stage).float().mean()) < 0.95
        near = move_queries(asked, torch.full((len(asked),), stage))
        assert torch.equal(near[:, -2], labels)
    for (_, ended, *_), (begun, *_) in itertools.pairwise(stages):
        for name, value in ended.items():
            assert torch.equal(begun[name], value), name
    assert STUDY.measure(settings(), 0, "cpu") == rows
    assert task.n_tokens == stages[0][2][0].shape[1]


@pytest.mark.parametrize("preset", ["smoke", "quick", "full"])
def test_every_case_has_its_task(preset):
    for one in STUDY.cases(preset):
        if preset == "full" and one["layers"] > 2:
            continue
        model, task = start_model(one, 0)
        assert (task.name, task.hops, task.n_chains) == ("nested_qa", one["hops"], 2)
        assert model.architecture.n_layers == one["layers"]


def test_quick_runs_as_many_epochs_with_growing_distances_as_without():
    [grown, at_once] = [
        c for c in STUDY.cases("quick") if (c["start"], c["hops"], c["layers"]) == ("whole", 2, 3)
    ]
    assert grown["epochs"] + grown["stage"] == at_once["epochs"]
    assert at_once["asked"] == "at once"


def test_a_little_noise_leaves_the_construction_as_it_is_and_much_does_not():
    [small, *_, large] = [
        c for c in STUDY.cases("quick") if c["start"] == "constructed" and c["hops"] == 1
    ]
    tiny = {"epochs": 1, "n_train": 128, "n_test": 100}
    before = [STUDY.measure({**c, **tiny}, 0, "cpu")[0]["before"] for c in (small, large)]
    assert before[0] > 0.9
    assert before[1] < 0.5


def test_a_construction_of_other_depth_is_refused():
    [one, *_] = [c for c in STUDY.cases("quick") if c["start"] == "constructed"]
    with pytest.raises(InfoFlowError, match="layers is 5: expected 2"):
        start_model({**one, "layers": 5}, 0)


def test_a_run_that_learns_nothing_is_at_chance_or_below():
    one = {**STUDY.cases("smoke")[0], "epochs": 1, "lr": 1e-9, "n_train": 256, "n_test": 200}
    rows = STUDY.measure(one, 0, "cpu")
    assert [row["epoch"] for row in rows] == [1]
    assert rows[0]["chance"] == 0.5
    assert rows[0]["floor"] == 1 / 8
    assert rows[0]["test_accuracy"] < 0.5
    assert rows[0]["from_1"] == rows[0]["test_accuracy"]
