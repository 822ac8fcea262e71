"""The study of what induction heads prefer, against lines asked one by one; and its rule."""

import pandas as pd
import pytest

from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.hooks import measure_why
from infoflow_lens.models.loading import load_any
from infoflow_lens.studies.language_model.batches import repeat_random
from infoflow_lens.studies.language_model.reasons import Reasons
from tests.studies.studies_for_tests import broken, smoke_rows

HALF, N = 12, 2


@pytest.fixture(scope="module")
def study():
    return Reasons(["stdlib-2l"])


@pytest.fixture(scope="module")
def results(study):
    return smoke_rows(study, half=HALF, n=N)


def test_shares_are_those_of_lines_asked_one_by_one(results):
    model = load_any("stdlib-2l").model
    ids = repeat_random(1024, N, HALF, derive_seed("reasons", 0))
    trained = results[results["kind"] == "trained"].dropna(subset=["head"])
    head = int(trained["head"].iloc[0])
    own = trained[trained["head"] == head].set_index("part")
    by_part, margins, most, asked = 0, 0.0, [], 0
    for row in ids:
        for query in range(HALF + 1, 2 * HALF + 1):
            asked += 1
            found = measure_why(model, row[None], 1, head, query)
            if found.keys[0] != query - HALF + 1:
                continue
            by_part = by_part + found.by_key().values
            margins += found.margin
            most.append(found.key_parts[int(found.by_key().values.argmax())])
    assert own["lines"].iloc[0] == len(most)
    assert own["on_target"].iloc[0] == pytest.approx(len(most) / asked)
    for name, value in zip(found.key_parts, by_part.tolist(), strict=True):
        assert own.loc[name, "share"] == pytest.approx(value / margins, abs=1e-4)
        assert own.loc[name, "largest"] == pytest.approx(most.count(name) / len(most))
    assert own["share"].sum() == pytest.approx(1, abs=1e-4)
    assert list(own.index[own["is_previous"] == 1]) == ["head 0.6"]


def rows(share=0.8, other=0.1, largest=0.95, untrained=0.05, model="a"):
    common = {"model": model, "step": 1, "final": True, "seed": 0, "layer": 1.0, "head": 0.0}
    common |= {"prefix_matching": 0.9, "lines": 100, "on_target": 1.0, "low": 0.0, "high": 1.0}
    parts = {
        "token embedding": (0, 1 - share - other),
        "head 0.1": (1, share),
        "head 0.2": (0, other),
    }
    return pd.DataFrame(
        {**common, "kind": kind, "part": part, "is_previous": is_previous, "share": value,
         "largest": most if is_previous else (1 - most) / 2}
        for kind, most in (("trained", largest), ("untrained", untrained))
        for part, (is_previous, value) in parts.items()
    )  # fmt: skip


def without_induction_head():
    row = {"model": "b", "step": 1, "final": True, "seed": 0, "kind": "trained"}
    return pd.DataFrame([{**row, "layer": None, "head": None, "prefix_matching": 0.1}])


def test_the_rule_passes_and_fails_by_each_of_its_parts(study):
    assert study.verdict(rows()).passed
    changes = ({"share": 0.4}, {"other": 0.45}, {"largest": 0.8}, {"untrained": 0.3})
    for place, changed in enumerate(changes):
        assert broken(study, rows(**changed)) == [place]


def test_models_without_an_induction_head_are_told_and_not_judged(study):
    alone = study.verdict(without_induction_head())
    assert not alone.passed
    both = pd.DataFrame([*rows().to_dict("records"), *without_induction_head().to_dict("records")])
    verdict = study.verdict(both)
    assert verdict.passed
    assert verdict.remarks[0] == "b: no induction head (largest prefix matching 0.10)"
    assert "none (0.10)" in study.table(both)
    assert study.figure(both).axes
    assert study.figure(without_induction_head()).axes
