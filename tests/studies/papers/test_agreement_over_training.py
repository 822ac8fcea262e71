"""The study of agreement through training: its rule, and what a checkpoint says of a model."""

import math

import pandas as pd
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from infoflow_lens import build_model, train
from infoflow_lens.studies.demo import DemoConfig
from infoflow_lens.studies.papers.agreement_over_training import AgreementOverTraining
from tests.reference import sets as reference

STUDY = AgreementOverTraining()
EPOCHS = (0, 2, 8)


def frame(auroc=(0.5, 0.9, 0.99), coverage=0.99, nmse=(40.0, 5e-3, 1e-4)):
    """Two seeds, the second with a slightly lower AUROC."""
    others = ("average_precision", "influence_inside", "predicted_size", "concentration")
    return pd.DataFrame(
        [
            {"run": seed, "seed": seed, "epoch": epoch, "nmse": nmse[i],
             "auroc": auroc[i] - 0.02 * seed, "coverage": coverage if i == 2 else 0.6,
             "ratio_rank1": 0.3, "ratio_rank2": 0.9, **dict.fromkeys(others, 0.7)}
            for seed in (0, 1)
            for i, epoch in enumerate(EPOCHS)
        ]
    ).sample(frac=1, random_state=0)  # fmt: skip


@pytest.mark.parametrize(
    ("results", "passed"),
    [
        (frame(), True),
        (frame(auroc=(0.8, 0.9, 0.99)), False),  # they agreed before training
        (frame(auroc=(0.5, 0.99, 0.96)), False),  # the second seed lost it again
        (frame(coverage=0.96), False),  # the sets do not hold what the target needs
        (frame(nmse=(40.0, 20.0, 10.0)), True),  # the error is not judged
        (frame(auroc=(0.5, 0.99, math.nan)), False),  # undefined at the end
    ],
)
def test_the_verdict_follows_the_stated_rule(results, passed):
    assert STUDY.verdict(results).passed is passed


SETTINGS = {
    "D": 2, "heads": [2, 1], "d_model": 8, "d_mlp": 8, "batch": 32, "lr": 8e-3, "n_tokens": 5,
    "n_train": 200, "n_recovery": 60, "n_influence": 12, "epochs": 1, "checkpoints": [0, 1],
}  # fmt: skip


def by_hand(model, task, x):
    """Means of AUROC, average precision and coverage, by the model's cache and autograd."""
    _, cache = model.run_with_cache(x)
    scores = [cache["attn_scores", layer][..., :5].argmax(dim=-1) for layer in (0, 1)]
    aurocs, precisions, coverages = [], [], []
    for sequence in range(len(x)):
        chosen = [layer[sequence].unsqueeze(-1).tolist() for layer in scores]
        held = reference.propagate(chosen, 5)[-1][-1]

        def state(tokens):
            caught = []
            point = "blocks.1.hook_resid_mid"
            hooks = [(point, lambda value, hook: caught.append(value))]
            model.run_with_hooks(tokens[None], fwd_hooks=hooks)
            return caught[0][0, -1]

        jacobian = torch.autograd.functional.jacobian(state, x[sequence])
        influence = jacobian.square().sum(dim=(0, 2)).sqrt()
        is_held = [source in held for source in range(5)]
        if len(held) < 5:  # else there is nothing to tell apart
            aurocs.append(roc_auc_score(is_held, influence))
        precisions.append(average_precision_score(is_held, influence))
        active = {int((x[sequence] @ direction).argmax()) for direction in task.vectors}
        coverages.append(len(active & held) / len(active))
    return [sum(values) / len(values) for values in (aurocs, precisions, coverages)]


def test_a_row_is_the_model_at_its_checkpoint():
    """The model before training and after an epoch, trained again without being looked at."""
    rows = STUDY.measure(SETTINGS, 3, "cpu")
    assert [row["epoch"] for row in rows] == [0, 1]
    config = DemoConfig(
        seed=3, n_tokens=5, n_components=2, n_heads=(2, 1), d_model=8, d_mlp=8, epochs=1,
        batch_size=32,
    )  # fmt: skip
    task = config.task()
    x, y = STUDY.draw(task, "test", 60, 3)
    model = build_model(config.architecture(), seed=3)
    for row in rows:
        with torch.no_grad():
            error = (model(x) - y).square().mean() / y.var(dim=0, unbiased=False)
        assert row["nmse"] == pytest.approx(float(error), rel=1e-4)
        auroc, precision, coverage = by_hand(model, task, x[:12])
        assert row["auroc"] == pytest.approx(auroc, abs=1e-6)
        assert row["average_precision"] == pytest.approx(precision, abs=1e-6)
        assert row["coverage"] == pytest.approx(coverage)
        if row["epoch"] == 0:
            data = (
                STUDY.draw(task, part, n, 3) for part, n in (("train", 200), ("validation", 2000))
            )
            train(model, *data, config.training(), progress=False)
    assert rows[0]["ratio_rank1"] == rows[0]["ratio_rank2"] == 1
    assert rows[1]["ratio_rank1"] == pytest.approx(rows[1]["rank1"] / rows[0]["rank1"])
    assert rows[0]["nmse"] != rows[1]["nmse"]


@pytest.mark.parametrize("preset", ["smoke", "quick", "full"])
def test_every_preset_looks_before_training_and_at_its_end(preset):
    (case,) = STUDY.cases(preset)
    assert case["checkpoints"][0] == 0
    assert case["checkpoints"][-1] == case["epochs"]
    assert case["checkpoints"] == sorted(set(case["checkpoints"]))
