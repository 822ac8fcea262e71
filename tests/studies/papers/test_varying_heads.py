"""What more heads change: cases, a run, and how the numbers are judged."""

import pandas as pd
import pytest

from infoflow_lens.studies.papers.token_models import start_model
from infoflow_lens.studies.papers.varying_heads import VaryingHeads
from infoflow_lens.studies.sweep import Run, measure_unit
from tests.studies.studies_for_tests import broken

STUDY = VaryingHeads()
NAN = float("nan")
# task: heads: epochs at which the seeds reach an accuracy of .95; NaN: never
PUBLISHED = {
    "memorization": {"1": (40, 50), "2": (35, 40), "8": (20, 30)},
    "in_context_qa": {"1 1": (10, NAN), "2 2": (12, 11), "4 4": (NAN, 19)},
    "template_matching": {"1 1": (3, 4), "4 4": (4, 3)},
    "in_context_template_matching": {
        "1 1 1": (30, NAN), "1 1 4": (35, 40), "1 1 1 1": (20, 25)
    },
}  # fmt: skip


def frame(until, summed=False, others=()):
    """Two epochs of each run, around the one that reaches .95.

    Seeds 0 and 1 choose the rate, 2 and 3 are judged: rate 1 is fast with the former and as
    asked for with the latter. `others`: rates that are slow with the former.
    """
    cases = [
        (task, heads, rate, seed, epoch)
        for task, by_heads in until.items()
        for heads, seeds in by_heads.items()
        for rate, slow in ((1.0, 0), *((rate, 30) for rate in others))
        for seed, epoch in enumerate((5 + slow, 6 + slow, *seeds))
    ]
    rows = []
    for run, (task, heads, rate, seed, epoch) in enumerate(cases):
        start = "paper" if task == "memorization" else "noisy"
        start = {"paper": "summed", "noisy": "noisy summed"}[start] if summed else start
        about = {"run": run, "seed": seed, "start": start, "task": task, "heads": heads}
        solved = epoch == epoch  # not NaN
        scores = {"test_accuracy": 0.96 if solved else 0.9, "rate": rate, "lr": 1e-9}
        scores["best_validation_loss"] = 0.04 if solved else 0.1
        rows += [
            {**about, **scores, "epoch": at, "validation_accuracy": accuracy}
            for at, accuracy in (((epoch - 1, 0.5), (epoch, 0.96)) if solved else ((50, 0.9),))
        ]
    return pd.DataFrame(rows)


def passing():
    """As published; eight heads memorize fast at a rate of their own, and slowly at that of one."""
    results = frame(PUBLISHED)
    eight = results[(results["heads"] == "8") & (results["task"] == "memorization")]
    slow = eight.assign(run=eight["run"] + 1000, epoch=eight["epoch"] + 40)
    results.loc[eight.index, "rate"] = 8.0
    return pd.concat([results, slow], ignore_index=True)


def changed(task, **heads):
    new = {name.replace("_", " ").strip(): seeds for name, seeds in heads.items()}
    return PUBLISHED | {task: PUBLISHED[task] | new}


def test_what_is_published_passes():
    assert broken(STUDY, frame(PUBLISHED)) == []
    counts = [len(claim.numbers(frame(PUBLISHED))) for claim in STUDY.claims()]
    assert counts == [1, 3 + 2, 3 + 2, 1]


@pytest.mark.parametrize(
    ("until", "claim", "missing"),
    [
        (changed("memorization", _8=(40, 40)), 0, "8 heads"),
        (changed("memorization", _8=(20, NAN)), 0, "8 heads"),  # one seed never does
        (changed("memorization", _1=(60, NAN)), 0, "8 heads"),  # nothing to compare with
        (changed("in_context_qa", _2_2=(21, 30)), 2, "reasoning, heads 2 2"),
        (changed("in_context_qa", _2_2=(4, 12)), 2, "reasoning, heads 2 2"),  # a clear effect
        (changed("template_matching", _4_4=(NAN, NAN)), 2, "generalization, heads 4 4"),
        (changed("in_context_template_matching", _1_1_1_1=(30, 31)), 3, ""),
        (changed("in_context_template_matching", _1_1_1=(NAN, NAN), _1_1_4=(NAN, NAN)), 3, ""),
    ],
)
def test_a_missing_effect_fails_and_is_named(until, claim, missing):
    results = frame(until)
    assert broken(STUDY, results)[-1] == claim
    failing = STUDY.claims()[claim]
    numbers = failing.numbers(results)
    assert [name for name, number in numbers.items() if not failing.holds(number)] == [missing]


def test_no_run_with_one_head_does_not_pass_in_silence():
    until = PUBLISHED | {"template_matching": {"4 4": (3, 4)}}
    assert broken(STUDY, frame(until)) == [1, 2]


def test_each_head_count_has_the_rate_that_other_seeds_choose():
    results = passing()
    verdict = STUDY.verdict(results)
    assert verdict.passed, verdict.reasons
    assert "| memorization | 8 | 8 | 25 (20 to 30) | 2 of 2 |" in STUDY.table(results)
    # seeds that are judged have no say
    tempting = (results["rate"] == 8) & (results["seed"] < 2)
    results.loc[tempting, "epoch"] += 60
    verdict = STUDY.verdict(results)
    assert not verdict.passed
    assert "| memorization | 8 | 1 | 65 (60 to 70) | 2 of 2 |" in STUDY.table(results)


def test_of_rates_that_never_reach_it_the_one_of_the_least_loss_is_chosen():
    results = frame({"memorization": {"1": (9, 9)}}, others=(3.0,))
    results["validation_accuracy"] = 0.5
    results.loc[results["rate"] == 3, "best_validation_loss"] = 0.01
    assert "| 1 | 3 | - | 0 of 2 |" in STUDY.table(results)


def test_summed_heads_are_shown_and_not_judged():
    other = frame({"memorization": {"8": (9, NAN)}, "in_context_qa": {"2 2": (4, 7)}}, summed=True)
    other["run"] += 5000
    results = pd.concat([passing(), other], ignore_index=True)
    verdict = STUDY.verdict(results)
    assert verdict.passed
    [memory, reasoning] = [remark for remark in verdict.remarks if "summed" in remark]
    assert memory.startswith("memorization, the paper's start, heads summed, heads 8: ")
    assert "seed 9" in memory
    assert reasoning.startswith("reasoning, the paper's start plus noise, heads summed, heads 2 2")
    assert "seed 4" in reasoning
    assert "| the paper's start, heads summed | memorization | 8 | 1 | 9 | 1 of 2 |" in (
        STUDY.table(results)
    )


def test_the_figure_is_drawn_where_no_rate_reaches_it():
    results = frame({"memorization": {"1": (9, 9)}})
    results["validation_accuracy"] = 0.5
    figure = STUDY.figure(results)
    figure.canvas.draw()
    low, high = figure.axes[0].get_xlim()
    assert 0 < low < 1 < high


@pytest.mark.parametrize("preset", ["quick", "full"])
def test_each_task_has_one_head_a_layer_and_more_at_the_same_rates(preset):
    cases = STUDY.cases(preset)
    assert all(len(case["heads"]) == case["layers"] for case in cases)
    for task in PUBLISHED:
        of_task = [case for case in cases if case["task"] == task]
        assert all(case["lr"] == case["rate"] for case in of_task)
        assert set(of_task[0]["heads"]) == {1}
        assert max(max(case["heads"]) for case in of_task) > 1
        rates = {}
        for case in of_task:
            rates.setdefault((case["start"], str(case["heads"])), []).append(case["rate"])
        assert len({tuple(grid) for grid in rates.values()}) == 1
        summed = {heads for start, heads in rates if "summed" in start}
        averaged = {heads for start, heads in rates if "summed" not in start}
        assert summed == {heads for heads in averaged if set(heads) - set("[1, ]")}


def test_a_run_has_the_heads_it_is_asked_for():
    case = next(c for c in STUDY.cases("smoke") if c["heads"] == [2])
    run = Run(0, {**case, "epochs": 2, "n_train": 256}, 0)
    ((_, rows),) = measure_unit((STUDY, [run], "cpu"))
    assert [row["epoch"] for row in rows] == [1, 2]
    assert {row["heads"] for row in rows} == {"2"}
    assert {row["rate"] for row in rows} == {case["lr"]} != {row["lr"] for row in rows}
    assert 0 <= rows[0]["test_accuracy"] <= 1
    model, task = start_model(case, 0)
    assert model.architecture.n_heads == (2,)
    assert rows[0]["floor"] == 1 / task.n_labels == 1 / 20


def test_summed_heads_are_the_papers_start_without_the_average():
    case = next(c for c in STUDY.cases("smoke") if c["heads"] == [2])
    x, _ = start_model(case, 0)[1].sample(4, seed=0)
    mean, total = (
        start_model({**case, "start": start}, 0)[0].run_with_cache(x)[1]["blocks.0.hook_attn_out"]
        for start in ("paper", "summed")
    )
    assert float(mean.detach().abs().max()) > 0
    assert (total == 2 * mean).all()
