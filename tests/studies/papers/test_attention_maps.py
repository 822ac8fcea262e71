"""What heads do: operations found where they are, the rule, and a small run."""

import pandas as pd
import pytest
import torch

from infoflow_lens import InfoFlowError
from infoflow_lens.models.host import zero_model
from infoflow_lens.studies.constructions import build_construction
from infoflow_lens.studies.papers.attention_maps import (
    AttentionMaps,
    find_operations,
)
from infoflow_lens.studies.papers.token_models import start_model
from infoflow_lens.studies.sweep import Run, measure_unit
from tests.studies.studies_for_tests import broken

STUDY = AttentionMaps()
QA = {"n_questions": 6, "n_answers": 6, "n_pairs": 3}
TEMPLATES = {"n_words": 10, "length": 3}


# Operations


def test_the_construction_copies_and_matches():
    model, task = build_construction("in_context_qa", **QA)
    found = find_operations(model, task, task.sample(100, seed=0)[0], seed=0)
    assert all(bool(happens.all()) for happens in found.happens.values())
    assert found.chance["matching"] == pytest.approx(1 / 3)  # one pair of three holds it
    assert found.chance["copying"] < 0.2


def test_the_construction_parses():
    model, task = build_construction("template_matching", **TEMPLATES)
    found = find_operations(model, task, task.sample(100, seed=0)[0], seed=0)
    assert list(found.happens) == ["parsing", "strict parsing"]
    assert all(bool(happens.all()) for happens in found.happens.values())
    # of two other words one is equal in aab, aba and abb, and both in aaa: (3/4 + 1) / 4
    assert found.chance["parsing"] == pytest.approx(7 / 16, abs=0.15)


def test_other_tasks_are_refused_by_name():
    model, task = build_construction("memorization", n_words=6, length=2, n_sequences=3)
    with pytest.raises(InfoFlowError, match="task is 'memorization': expected in_context_qa or"):
        find_operations(model, task, task.sample(3, seed=0)[0], seed=0)


def test_a_model_that_attends_to_nothing_does_nothing():
    for name, sizes in (("in_context_qa", QA), ("template_matching", TEMPLATES)):
        built, task = build_construction(name, **sizes)
        x, _ = task.sample(200, seed=0)
        found = find_operations(zero_model(built.architecture), task, x, seed=0)
        if name == "in_context_qa":
            assert not found.happens["copying"].any()
            assert not found.happens["matching"].any()
        else:  # without attention, sequences of different words are parsed
            different = torch.tensor([len({*row[:3]}) == 3 for row in x.tolist()])
            assert torch.equal(found.happens["strict parsing"], different)
            assert len(found.happens["parsing"]) == int((~different).sum()) > 0
            assert not found.happens["parsing"].any()


def test_another_match_is_no_match():
    # W_QK of layer 2 that prefers what does not hold the query
    model, task = build_construction("in_context_qa", **QA)
    attention = model.blocks[1].attn
    with torch.no_grad():
        attention.W_Q[0, : task.n_questions] = 1 - attention.W_Q[0, : task.n_questions]
    found = find_operations(model, task, task.sample(100, seed=0)[0], seed=0)
    assert bool(found.happens["copying"].all())
    assert not found.happens["matching"].any()


# Results


def frame(shares, accuracy=0.99, initial=None, start="paper"):
    before = {"copying": 1.0, "matching": 0.5, "parsing": 1.0} | (initial or {})
    rows = [
        {
            "run": seed + 2 * (operation == "parsing"),
            "seed": seed,
            "start": start,
            "task": "template_matching" if operation == "parsing" else "in_context_qa",
            "kind": "operation",
            "operation": operation,
            "model": model,
            "share": value,
            "chance": 0.25,
            "test_accuracy": accuracy if seed == 0 else 0.97,
        }
        for operation, trained in shares.items()
        for seed, share in enumerate(trained)
        for model, value in zip(
            ("trained", "initial", "construction"), (share, before[operation], 1.0), strict=True
        )
    ]
    head = {"kind": "head", "layer": 1, "mechanism": "soft", "own_position_kl": 2.0}
    about = {"run": 0, "seed": 0, "start": start, "task": "in_context_qa"}
    return pd.DataFrame([*rows, {**about, **head, "test_accuracy": accuracy}])  # fmt: skip


SEEN = {"copying": (1.0, 0.98), "matching": (0.95, 0.97), "parsing": (0.93, 1.0)}


def test_operations_that_happen_pass_and_a_start_that_does_them_need_not_gain():
    assert STUDY.verdict(frame(SEEN)).passed
    _, happens, gains = STUDY.claims()
    assert list(happens.numbers(frame(SEEN))) == [
        "reasoning, copying",
        "reasoning, matching",
        "generalization, parsing",
    ]
    # the least of .95 and .97, behind .5 before training
    assert gains.numbers(frame(SEEN)) == {"reasoning, matching": pytest.approx(0.45)}


@pytest.mark.parametrize(
    ("operation", "shares"),
    [("copying", (1.0, 0.85)), ("matching", (0.89, 0.97)), ("parsing", (0.0, 1.0))],
)
def test_an_operation_that_does_not_happen_fails(operation, shares):
    results = frame(SEEN | {operation: shares})
    assert broken(STUDY, results)
    shown = STUDY.claims()[1].numbers(results)
    assert [name for name, share in shown.items() if share < 0.9] in (
        [name for name in shown if operation in name],
    )


def test_models_that_do_not_solve_the_task_are_not_asked():
    unsolved = frame(SEEN | {"matching": (0.1, 0.95)}, accuracy=0.3)  # of seed 0
    assert STUDY.verdict(unsolved).passed
    unsolved["test_accuracy"] = 0.3
    assert 0 in broken(STUDY, unsolved)


def test_random_starts_are_not_judged():
    random = frame({"matching": (0.1, 0.1)}, start="random")
    random["run"] += 10
    results = pd.concat([frame(SEEN), random], ignore_index=True)
    assert STUDY.verdict(results).passed


@pytest.mark.parametrize("task", ["in_context_qa", "template_matching"])
def test_a_run_finds_what_the_start_does(task):
    [case] = [c for c in STUDY.cases("smoke") if (c["task"], c["start"]) == (task, "paper")]
    # next to no learning: the trained model is the initial one
    case = {**case, "epochs": 1, "lr": 1e-9}
    ((_, rows),) = measure_unit((STUDY, [Run(0, case, 0)], "cpu"))
    results = pd.DataFrame(rows)
    shares = results[results["kind"] == "operation"].pivot(
        index="operation", columns="model", values="share"
    )
    assert list(shares["trained"]) == list(shares["initial"])
    first = "copying" if task == "in_context_qa" else "parsing"
    assert shares.loc[first, "initial"] == 1
    assert (shares["construction"] == 1).all()
    assert list(results.loc[results["kind"] == "head", "layer"]) == [0, 1]
    maps = results[results["kind"] == "map"]
    n = start_model(case, 0)[1].n_tokens
    assert len(maps) == 2 * 2 * n * n
    grid = maps[maps["layer"] == 0].pivot_table(
        index=["example", "query"], columns="key", values="weight"
    )
    if task == "in_context_qa":  # copies within pairs, whatever the tokens
        fact = torch.arange(n) // 3
        expected = ((fact[:, None] == fact) & ~torch.eye(n, dtype=torch.bool)).float()
        for example in ("A = 1 B = 2 A =", "A = 1 B = 2 B ="):
            weights = torch.tensor(grid.loc[example].to_numpy())
            torch.testing.assert_close(weights, expected.double(), rtol=0, atol=1e-5)
    else:
        assert grid.loc[("A A B =", 0), 1] == pytest.approx(1, abs=1e-5)
        assert grid.loc[("A A B =", 0), 2] == pytest.approx(0, abs=1e-5)
        assert grid.loc[("A B B =", 1), 2] == pytest.approx(1, abs=1e-5)
    assert len(STUDY.figure(results).axes) == 4
    assert "| the paper's start |" in STUDY.table(results)
    assert not STUDY.verdict(results).passed  # nothing is solved
