"""What more heads change: cases, a run, and how the numbers are judged."""

import pandas as pd
import pytest

from infoflow_lens.experiments.studies.token_models import epochs_until, start_model
from infoflow_lens.experiments.studies.varying_heads import VaryingHeads
from infoflow_lens.experiments.sweep import Run, measure_run

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


def frame(until, start="paper"):
    """Two epochs of each run, around the one that reaches .95."""
    rows = []
    run = 0
    for task, by_heads in until.items():
        for heads, seeds in by_heads.items():
            for seed, epoch in enumerate(seeds):
                solved = epoch == epoch  # not NaN
                for at, accuracy in ((epoch - 1, 0.5), (epoch, 0.96)) if solved else ((50, 0.9),):
                    rows.append(
                        {
                            "run": run,
                            "seed": seed,
                            "start": start,
                            "task": task,
                            "layers": len(heads.split()),
                            "heads": heads,
                            "epoch": at,
                            "validation_accuracy": accuracy,
                            "validation_loss": 1 - accuracy,
                            "train_accuracy": accuracy,
                            "train_loss": 1 - accuracy,
                            "best_validation_loss": 0.04 if solved else 0.1,
                            "test_accuracy": 0.96 if solved else 0.9,
                        }
                    )
                run += 1
    return pd.DataFrame(rows)


def changed(task, **heads):
    new = {name.replace("_", " ").strip(): seeds for name, seeds in heads.items()}
    return PUBLISHED | {task: PUBLISHED[task] | new}


def test_what_is_published_passes():
    verdict = STUDY.verdict(frame(PUBLISHED))
    assert verdict.passed, verdict.reasons
    assert len(verdict.reasons) == 1 + 3 + 2 + 1


@pytest.mark.parametrize(
    ("until", "missing"),
    [
        (changed("memorization", _8=(40, 40)), "memorization, mean epochs to .95: 45 with 1 head"),
        (changed("memorization", _8=(20, NAN)), "memorization, mean"),  # one seed never does
        (changed("memorization", _1=(60, NAN)), "memorization, mean"),  # nothing to compare with
        (
            changed("in_context_qa", _2_2=(21, 30)),
            "reasoning, heads 2 2: epochs to .95 of the fastest seed 21",
        ),
        (changed("in_context_qa", _2_2=(4, 12)), "reasoning, heads 2 2"),  # a clear effect
        (
            changed("template_matching", _4_4=(NAN, NAN)),
            "generalization, heads 4 4: epochs to .95 of the fastest seed never",
        ),
        (
            changed("in_context_template_matching", _1_1_1_1=(30, 31)),
            "contextual generalization, fastest seed",
        ),
        (
            changed("in_context_template_matching", _1_1_1=(NAN, NAN), _1_1_4=(NAN, NAN)),
            "contextual generalization, fastest seed",
        ),
    ],
)
def test_a_missing_effect_fails_and_is_named(until, missing):
    verdict = STUDY.verdict(frame(until))
    assert not verdict.passed
    [failed] = [reason for reason in verdict.reasons if "not as published" in reason]
    assert failed.startswith(missing)


def test_no_run_with_one_head_does_not_pass_in_silence():
    until = PUBLISHED | {"template_matching": {"4 4": (3, 4)}}
    verdict = STUDY.verdict(frame(until))
    assert not verdict.passed
    assert any("no finished run with one head" in reason for reason in verdict.reasons)


def test_other_starts_are_shown_and_not_judged():
    other = frame({"memorization": {"1": (5, 5), "8": (9, NAN)}}, "random")
    other["run"] += 1000
    results = pd.concat([frame(PUBLISHED), other], ignore_index=True)
    verdict = STUDY.verdict(results)
    assert verdict.passed
    assert verdict.reasons[-1].startswith("not judged, memorization, random start: 5 with 1 head")
    assert "| random start | memorization | 8 | 9 | 1 of 2 |" in STUDY.table(results)


def test_the_table_counts_the_seeds_that_reach_it():
    table = STUDY.table(frame(PUBLISHED))
    assert (
        "| the paper's start | memorization | 1 | 45 (40 to 50) | 2 of 2 | 0.96 (0.96 to 0.96) | "
        "more heads, faster |"
    ) in table
    assert "| reasoning | 1 1 | 10 | 1 of 2 | 0.93 (0.9 to 0.96) | no significant" in table


def test_the_figure_has_a_line_for_each_run_and_a_label_for_each_head_count():
    axes = STUDY.figure(frame(PUBLISHED)).axes
    assert [a.get_title() for a in axes[:2]] == ["memorization", "reasoning"]
    labels = [line.get_label() for line in axes[1].lines]
    assert [label for label in labels if label.startswith("[")] == ["[1, 1]", "[2, 2]", "[4, 4]"]
    assert len(axes[1].lines) == 2 * 6 + 1  # validation and training, and the line at .95


def test_epochs_until_an_accuracy():
    results = frame({"memorization": {"1": (7, NAN)}})
    until = epochs_until(results, 0.95)
    assert until[0] == 7
    assert until.isna()[1]


@pytest.mark.parametrize("preset", ["quick", "full"])
def test_each_task_has_one_head_a_layer_and_more(preset):
    cases = [case for case in STUDY.cases(preset) if case["start"] == "paper"]
    assert all(len(case["heads"]) == case["layers"] for case in cases)
    for task in PUBLISHED:
        counts = [case["heads"] for case in cases if case["task"] == task]
        assert set(counts[0]) == {1}
        assert max(max(heads) for heads in counts) > 1


def test_a_run_has_the_heads_it_is_asked_for():
    case = STUDY.cases("smoke")[1]
    _, rows = measure_run((STUDY, Run(0, {**case, "epochs": 2, "n_train": 256}, 0), "cpu"))
    assert [row["epoch"] for row in rows] == [1, 2]
    assert {row["heads"] for row in rows} == {"2"}
    assert 0 <= rows[0]["test_accuracy"] <= 1
    model, task = start_model(case, 0)
    assert model.architecture.n_heads == (2,)
    assert rows[0]["floor"] == 1 / task.n_labels == 1 / 20


def test_summed_heads_are_the_papers_start_without_the_average():
    case = {**STUDY.cases("smoke")[1], "start": "paper"}
    x, _ = start_model(case, 0)[1].sample(4, seed=0)
    mean, total = (
        start_model({**case, "start": start}, 0)[0].run_with_cache(x)[1]["blocks.0.hook_attn_out"]
        for start in ("paper", "summed")
    )
    assert float(mean.detach().abs().max()) > 0
    assert (total == 2 * mean).all()
