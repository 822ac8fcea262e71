"""Rows of the studies as the theory's own constructions make them: what every rule must pass.

What models with too little of something leave is the best that is known of them: heads that were
found, the parts of a target that nothing retrieves, naming an answer by chance.
"""

import pandas as pd
import torch

from infoflow_lens.models.host import build_model
from infoflow_lens.objectives import evaluate_labels, nmse, outputs_of
from infoflow_lens.studies.best_heads import best_heads
from infoflow_lens.studies.constructions import build_construction
from infoflow_lens.studies.papers import find_study
from infoflow_lens.studies.papers.first_layer import recovery_rows
from tests.studies.papers import (
    test_depth_separation,
    test_head_count,
    test_intrinsic_dimension,
    test_kth_largest,
    test_nested_qa,
    test_specific_position,
    test_varying_depth,
)


def error_of(name, **sizes):
    """The NMSE of a construction."""
    model, task = build_construction(name, **sizes)
    x, y = task.sample(2000, 1)
    return nmse(outputs_of(model, model.forward_readout, x), y)


def accuracy_of(name, **sizes):
    """The accuracy of a construction over token ids."""
    model, task = build_construction(name, **sizes)
    return evaluate_labels(model, task.sample(200, 1)).accuracy


def recovery():
    """Proposition 1's heads beside untrained ones of the same shape."""
    model, task = build_construction(
        "intrinsic_dimension", n_tokens=8, d_token=3, n_components=2, tokens="sphere", beta=1e3
    )
    untrained = build_model(model.architecture, seed=0)
    rows = recovery_rows(untrained, model, *task.sample(400, 3))
    about = {"run": 0, "seed": 0, "target": "pairs", "D": 2, "heads": "2 2", "nmse": 0.0}
    return pd.DataFrame([{**about, **row} for row in rows])


def best_pairs():
    """D heads as Proposition 1 has them, and the best of fewer that a search finds."""
    rotated = {"n_tokens": 16, "d_token": 3, "tokens": "sphere", "matrix_kind": "orthogonal"}
    sizes = {"n_components": 2, **rotated}
    model_error = error_of("intrinsic_dimension", beta=1e5, **sizes)
    _, task = build_construction("intrinsic_dimension", **sizes)
    floor = best_heads(task, 1, budget=320, n=400).nmse
    kind = test_intrinsic_dimension.ROTATED
    errors = {(2, kind, "2 2"): model_error, (2, kind, "1 3"): floor}
    return test_intrinsic_dimension.frame(errors, floor=floor)


def retrieval():
    """D heads retrieve D tokens; D - 1 leave the part of the one that they do not."""
    task = build_construction("d_retrieval", n_components=4, n_tokens=16, d_token=4)[1]
    x, y = task.sample(2000, 1)
    largest = torch.stack([c.score(x[:, :, None]).amax(dim=1) for c in task.components], dim=1)
    three = torch.cat([largest[:, :3], torch.ones(len(x), 1)], dim=1)
    without = nmse(three @ torch.linalg.lstsq(three, y).solution, y)
    four = error_of("d_retrieval", n_components=4, n_tokens=16, d_token=4, beta=1e4)
    return test_head_count.frame({3: without, 4: four, 5: four})


def closest_pair():
    """Theorem 1's two layers by their precision, and a constant in the place of one layer."""
    study = find_study("depth_separation")
    built = [case for case in study.cases("quick") if case["model"] == "two layers, built"]
    two = [row for case in built for row in study.measure(case, 0, "cpu")]
    parameters = [row["parameters"] for row in two]
    rows = test_depth_separation.frame(
        test_depth_separation.depths(0, 0),
        test_depth_separation.depths(1.0, 1.0),
        {"one layer": parameters, "two layers": parameters},
    )
    by_size = {row["parameters"]: row["nmse"] for row in two}
    of_two = rows["model"] == "two layers"
    return rows.assign(nmse=rows["nmse"].mask(of_two, rows["parameters"].map(by_size)))


def ranks():
    """The extremes by one head; of what lies between, what the nearer extreme tells."""
    task = build_construction("kth_largest", n_tokens=8)[1]
    x = task.sample(4000, 1)[0][..., 0].sort(dim=1, descending=True).values

    def left(k):
        extreme = x[:, 0] if k <= 4 else x[:, -1]
        return 1 - float(torch.corrcoef(torch.stack([x[:, k - 1], extreme]))[0, 1]) ** 2

    errors = {k: left(k) for k in (2, 4)}
    ends = {
        k: error_of("kth_largest", n_tokens=8, k=k, attention="softmax", beta=300.0) for k in (1, 8)
    }
    rows = test_kth_largest.frame({1: ends[1], **errors, 8: ends[8]})
    return rows.assign(chooses_largest=(rows["k"] == 1).astype(float))


def codes():
    """Theorem 3's digit code; decoders of other widths as its law says."""
    study = find_study("cost_law")
    cases = [c for c in study.cases("quick") if study.judges(c)]
    rows = []
    for run, case in enumerate(cases):
        if case["model"] == "digit code":
            rows += [{"run": run, **case, **row} for row in study.measure(case, 0, "cpu")]
            continue
        law = case["size"] * case["d_token"] / case["d_model"]
        error = case["units"] ** (-2 / law) if law > 1 else 0.0
        width = case["units"] * case["d_model"]
        rows.append({"run": run, **case, "law": law, "law_nmse": error, "width": width})
        rows[-1]["nmse"] = error
    return pd.DataFrame(rows)


def depths():
    """Each theorem's construction with as many layers as it has; chance with fewer."""
    sizes = {
        "memorization": {"n_words": 10, "length": 4, "n_sequences": 20},
        "in_context_qa": {"n_questions": 6, "n_answers": 6, "n_pairs": 3},
        "template_matching": {"n_words": 16, "length": 3},
        "in_context_template_matching": {
            "n_words": 12, "length": 2, "n_answers": 8, "n_pairs": 2
        },
    }  # fmt: skip
    accuracies = {
        (task, n): (accuracy_of(task, **sizes[task]),) if n == layers else (0.25,)
        for task, layers in test_varying_depth.ENOUGH.items()
        for n in range(1, layers + 1)
    }
    return test_varying_depth.passing(accuracies)


def chains():
    """The construction of nested questions; naming an end of a chain with fewer layers."""
    predicted = dict(test_nested_qa.predicted())
    for hops, layers in ((1, 2), (2, 3), (3, 4)):
        found = accuracy_of("nested_qa", hops=hops)
        predicted[test_nested_qa.case(hops, layers)] = (found, found)
    return test_nested_qa.frame(predicted)


def fixed_positions():
    """Even weights, and a target that they give exactly."""
    third = 1 / 3
    return test_specific_position.frame((third, third, third, 0.0, 0.0, 0.0), mse=0.0)


BY_THEORY = {
    "max_position_recovery": recovery,
    "specific_position": fixed_positions,
    "intrinsic_dimension": best_pairs,
    "head_count": retrieval,
    "depth_separation": closest_pair,
    "kth_largest": ranks,
    "cost_law": codes,
    "varying_depth": depths,
    "nested_qa": chains,
}
