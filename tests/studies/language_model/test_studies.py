"""Studies of language models: run small, and their verdicts given what their controls gave."""

import warnings
from pathlib import Path

import pandas as pd
import pytest

from infoflow_lens import InfoFlowError
from infoflow_lens.studies.language_model.edge_budget import GRADED, ONE
from infoflow_lens.studies.registry import LANGUAGE_MODEL_STUDIES, find_study
from infoflow_lens.studies.summary import rows_of
from infoflow_lens.studies.sweep import run_study
from tests.reference import zoo


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    model, text = zoo.save_with_text("gpt2", tmp_path_factory.mktemp("given"), 600)
    return (model,), text


@pytest.mark.slow
@pytest.mark.parametrize("name", LANGUAGE_MODEL_STUDIES)
def test_a_study_gives_rows_a_table_a_figure_and_a_verdict(name, given, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        study = LANGUAGE_MODEL_STUDIES[name](*given)
        found = run_study(study, tmp_path, preset="smoke", progress=False)
        again = run_study(
            LANGUAGE_MODEL_STUDIES[name](*given), tmp_path, preset="smoke", resume=True,
            progress=False,
        )  # fmt: skip
    assert again.rows.equals(found.rows)
    kept = pd.read_csv(tmp_path / "results.csv")
    assert study.table(kept) in (tmp_path / "table.md").read_text()
    assert study.verdict(kept).passed == found.verdict.passed
    assert (tmp_path / "figure.png").stat().st_size > 1000
    for path in (*tmp_path.glob("*.json"), *tmp_path.glob("*.csv"), *tmp_path.glob("*.md")):
        assert given[0][0] not in path.read_text()  # digests, no paths


@pytest.mark.parametrize(
    ("models", "data", "message"),
    [
        ((), None, "no model is named"),
        (("gpt2",), "no.txt", "no file"),
        (("gpt2",), "ids.pt", "no texts"),
    ],
)
def test_what_is_missing_is_refused_before_work(models, data, message):
    with pytest.raises(InfoFlowError, match=message):
        find_study("sufficiency", models, data).cases("smoke")


# Rows that pass, as the studies' statements have it


RESULTS = Path(__file__).parents[3] / "docs" / "results" / "language_model"
COMMON = {"model": "m", "step": 10, "final": True, "n_context": 64, "seed": 0}
CONTROLS = {
    "mean ablation": 2.0,
    "every head top 1": 1.7,
    "every head top 4": 0.7,
    "every head specific_position": 1.2,
    "every head global": 1.5,
    "every head own_position": 1.9,
    **{f"random mechanisms {i}": 0.9 + 0.1 * i for i in range(8)},
}


def sufficiency_rows(own=0.3, **changed):
    """Every interval reaches .01 nats to both sides."""
    excess = {"mechanisms": own, **CONTROLS, **changed}
    mean = excess["mean ablation"]
    return pd.DataFrame(
        [
            {**COMMON, "kind": "assignment", "assignment": name, "excess": value,
             "share_high": (value + 0.01) / mean, "lead_low": value - own - 0.01}
            for name, value in excess.items()
        ]
    )  # fmt: skip


SMALL, LARGE = {32: 2, 128: 2}, {32: 16, 128: 64}


def top_k_rows(own=SMALL, random=LARGE):
    """Least k by length, of the largest and of random keys."""
    return pd.DataFrame(
        [
            {**COMMON, "n_context": length, "kept": kept, "layer": "0", "k": tried,
             "rise": 0.0 if tried >= k else 0.2}
            for kept, least in (("largest", own), ("random", random))
            for length, k in least.items()
            for tried in (1, 2, 4, 8, 16, 32, 64)
        ]
    )  # fmt: skip


def roles_rows(needed=4, cost=lambda roles: roles):
    """Roles 1 to 12 of twelve heads; what they cost, by a function of their roles."""
    rows = []
    for kind, cost_of, least in (("trained", cost, needed), ("untrained", lambda r: -r, 0)):
        rows += [
            {**COMMON, "kind": kind, "part": "head", "layer": 0, "head": r, "roles": r,
             "cost": cost_of(r), "deviation": 1.0, "roles_without_first": r,
             "fixed": 0.1, "by_token": 0.5,
             "by_token_shuffled": 0.0, "by_position": 0.1, "loss": 3.0}
            for r in range(1, 13)
        ]  # fmt: skip
        rows += [
            {**COMMON, "kind": kind, "part": "curve", "of": of, "rank": rank, "loss": 3.0,
             "rise": 0.0 if rank >= enough else 0.2}
            for of, enough in (("first", least), ("random", 8))
            for rank in (0, 1, 2, 4, 8, 16)
        ]  # fmt: skip
    return pd.DataFrame(rows)


def softness_rows(column="fvu"):
    """Four heads, of which two have learnt; the trained numbers taken from a column."""
    rows = []
    for kind, learnt in (("trained", 2), ("untrained", 0)):
        for head in range(4):
            row = {"fvu": 0.2 if head < learnt else 0.7, "fvu_control": 0.75, "fvu_least": 0.65,
                   "fvu_first": 0.72, "fvu_pattern": 0.7, "entropy": 1.0}  # fmt: skip
            if kind == "trained":
                row["fvu"] = row[column]
            excess = row["fvu_control"] - row["fvu"]
            rows.append({**COMMON, **row, "kind": kind, "layer": 0, "head": head, "excess": excess})
    return pd.DataFrame(rows)


def edge_rows(needed=50, model="m", **times):
    """What one state needs: the graded choice, and how many times that others need."""
    around = {"chance": 90, "another window": 40, "rollout": 1.1, "gradient": 0.5} | times
    rows = [(GRADED, 1), *around.items()]
    return pd.DataFrame(
        [
            {**COMMON, "model": model, "kind": "needed", "part": ONE, "method": name,
             "needed": needed * n, "low": needed * n, "high": needed * n, "times": n,
             "times_low": 0.8 * n, "times_high": 1.25 * n, "n_edges": 2000}
            for name, n in rows
        ]
    )  # fmt: skip


def sets_rows():
    """The committed rows, had the sets led everywhere."""
    rows = rows_of(RESULTS / "sets")
    return rows.assign(**{name: 0.1 for name in rows if name.startswith("lead_")})


def graded_rows():
    """The committed rows, without the model on which the graded sets were level with rollout."""
    rows = rows_of(RESULTS / "graded_sets")
    return rows[rows["model"] != "stdlib-2l-mlp-s0"]


PASSING = {
    "sufficiency": sufficiency_rows,
    "top_k": top_k_rows,
    "sets": sets_rows,
    "graded_sets": graded_rows,
    "roles": roles_rows,
    "softness": softness_rows,
    "induction": lambda: rows_of(RESULTS / "induction"),
    "reasons": lambda: rows_of(RESULTS / "reasons"),
    "edge_budget": edge_rows,
}
SHUFFLED = [5, 12, 1, 8, 3, 10, 6, 2, 11, 4, 9, 7]
PILOT = edge_rows(rollout=0.7, model="stdlib-2l")  # seen before the rule


@pytest.mark.parametrize(
    ("name", "rows", "broken"),
    [
        ("sufficiency", sufficiency_rows(0.495), [0]),  # the interval reaches beyond
        ("sufficiency", sufficiency_rows(0.01, **{"mean ablation": 0.09}), [1]),
        ("sufficiency", sufficiency_rows(**{"random mechanisms 3": 0.305}), [2]),
        ("sufficiency", sufficiency_rows(**{"every head global": 0.2}), [3]),
        ("sufficiency", sufficiency_rows(**{"every head top 4": 0.305}), [4]),
        ("sufficiency", sufficiency_rows()[:7], [2]),  # without random deals
        ("sufficiency", sufficiency_rows()[:0], [0, 1, 2, 3, 4]),
        ("top_k", top_k_rows({32: 2, 128: 8}), [1]),
        ("top_k", top_k_rows(SMALL, SMALL), [2]),  # which keys does not matter
        ("top_k", top_k_rows({32: 1, 128: 1}, {32: 1, 128: 1}), [0, 1, 2]),  # no layer does
        ("roles", roles_rows(1), [0]),  # one direction is enough
        ("roles", roles_rows(8), [1]),  # as many as random ones
        ("roles", roles_rows(4, lambda roles: -roles), [2, 3, 4]),  # as untrained
        ("roles", roles_rows(4, lambda roles: SHUFFLED[roles - 1]), [3]),
        ("softness", softness_rows("fvu_least"), [0]),
        ("edge_budget", edge_rows(needed=150), [0]),
        ("edge_budget", edge_rows(chance=1.1), [1]),
        ("edge_budget", edge_rows(**{"another window": 1.1}), [2]),
        ("edge_budget", edge_rows(rollout=0.7), [3]),  # behind rollout
        ("edge_budget", pd.concat([edge_rows(), edge_rows(rollout=0.7, model="m-s1")]), [3]),
        ("edge_budget", pd.concat([edge_rows(), PILOT]), []),
        ("edge_budget", PILOT, [0, 1, 2, 3]),
        ("induction", rows_of(RESULTS / "induction_mlp"), [1, 2, 5]),
        ("reasons", rows_of(RESULTS / "reasons_trained"), [0, 1, 2]),
    ],
)
def test_each_claim_is_broken_by_what_breaks_it(name, rows, broken):
    study = LANGUAGE_MODEL_STUDIES[name]()
    places = [i for i, claim in enumerate(study.claims()) if not claim.judge(rows).passed]
    assert places == broken
    assert study.verdict(rows).passed is not bool(places)


def test_keys_that_grow_with_the_context_are_called_so():
    (remark,) = LANGUAGE_MODEL_STUDIES["top_k"]().remarks(top_k_rows({32: 2, 128: 8}))
    assert remark.endswith("growing (global)")


def test_models_and_data_are_for_studies_of_language_models():
    assert find_study("top_k", ("gpt2",), "texts.txt").models == ("gpt2",)
    with pytest.raises(InfoFlowError, match="head_count trains models of its own"):
        find_study("head_count", ("gpt2",))
