"""Studies of language models: run small, and their verdicts given what their controls gave."""

import warnings

import pandas as pd
import pytest

from infoflow_lens import InfoFlowError
from infoflow_lens.experiments.language_model.edge_budget import GRADED, ONE, EdgeBudget
from infoflow_lens.experiments.language_model.roles import Roles
from infoflow_lens.experiments.language_model.softness import Softness
from infoflow_lens.experiments.language_model.studies import LANGUAGE_MODEL_STUDIES
from infoflow_lens.experiments.language_model.sufficiency import Sufficiency
from infoflow_lens.experiments.language_model.topk import TopK
from infoflow_lens.experiments.sweep import run_study
from tests.reference import zoo


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    zoo.save("gpt2", folder / "small")
    text = " ".join(f"w{(7 * i + i * i // 5) % 40 + 4}" for i in range(600))
    (folder / "text.txt").write_text(text)
    return (str(folder / "small"),), str(folder / "text.txt")


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
        Sufficiency(models, data).cases("smoke")


# Verdicts

COMMON = {"model": "m", "step": 10, "final": True, "n_context": 64}


CONTROLS = {
    "mean ablation": 2.0,
    "every head top 1": 1.7,
    "every head top 4": 0.7,
    "every head specific_position": 1.2,
    "every head global": 1.5,
    "every head own_position": 1.9,
    **{f"random mechanisms {i}": 0.9 + 0.1 * i for i in range(8)},
}


def sufficiency_rows(own, **changed):
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


def test_sufficiency_is_seen_and_not_with_the_numbers_of_its_controls():
    study = Sufficiency()
    assert study.verdict(sufficiency_rows(0.3)).passed
    for control in CONTROLS.values():
        assert not study.verdict(sufficiency_rows(control)).passed


def test_each_claim_of_sufficiency_is_told_by_itself():
    def claims(rows):
        (reason,) = Sufficiency().verdict(rows).reasons
        return reason.rpartition(": ")[2]

    assert claims(sufficiency_rows(0.3)) == "A yes, B yes, C yes"
    assert claims(sufficiency_rows(0.495)) == "A no, B yes, C yes"  # the interval reaches beyond
    assert claims(sufficiency_rows(0.3, **{"random mechanisms 3": 0.305})) == "A yes, B no, C yes"
    assert claims(sufficiency_rows(0.3, **{"every head global": 0.2})) == "A yes, B no, C yes"
    assert claims(sufficiency_rows(0.3, **{"every head top 4": 0.305})) == "A yes, B yes, C no"
    assert claims(sufficiency_rows(0.01, **{"mean ablation": 0.09})).startswith("A no")
    untold = sufficiency_rows(0.3)
    untold = untold[~untold["assignment"].str.startswith("random")]
    assert claims(untold) == "A yes, B no, C yes"


def top_k_rows(own, random):
    """Least k by length, of the largest and of random keys."""
    rows = []
    for kept, least in (("largest", own), ("random", random)):
        for length, k in least.items():
            for tried in (1, 2, 4, 8, 16, 32, 64):
                rise = 0.0 if tried >= k else 0.2
                rows.append(
                    {**COMMON, "n_context": length, "kept": kept, "layer": "0", "k": tried,
                     "rise": rise}
                )  # fmt: skip
    return pd.DataFrame(rows)


def test_top_k_is_constant_and_not_with_random_keys():
    study, own, random = TopK(), {32: 2, 128: 2}, {32: 16, 128: 64}
    assert study.verdict(top_k_rows(own, random)).passed
    assert not study.verdict(top_k_rows(random, random)).passed
    assert not study.verdict(top_k_rows(own, own)).passed  # which keys does not matter
    growing = study.verdict(top_k_rows({32: 2, 128: 8}, random))
    assert not growing.passed
    assert "growing (global)" in growing.reasons[-1]


def roles_rows(needed, cost):
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


def test_roles_are_seen_and_not_with_the_numbers_of_their_controls():
    study = Roles()
    assert study.verdict(roles_rows(4, lambda r: r)).passed
    assert not study.verdict(roles_rows(1, lambda r: r)).passed  # one direction is enough
    assert not study.verdict(roles_rows(8, lambda r: r)).passed  # as many as random ones
    assert not study.verdict(roles_rows(4, lambda r: -r)).passed  # as untrained
    shuffled = [5, 12, 1, 8, 3, 10, 6, 2, 11, 4, 9, 7]
    assert not study.verdict(roles_rows(4, lambda r: shuffled[r - 1])).passed


def softness_rows(column):
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


def test_learnt_retrieval_is_seen_and_not_with_a_tempered_untrained_head():
    study = Softness()
    assert study.verdict(softness_rows("fvu")).passed
    for control in ("fvu_first", "fvu_least", "fvu_control"):
        assert not study.verdict(softness_rows(control)).passed


def edge_rows(needed=50, model="m", **times):
    """What one state needs: the graded choice, and how many times that others need."""
    around = {"chance": 90, "another window": 40, "rollout": 1.1, "gradient": 0.5} | times
    rows = [(GRADED, 1), *around.items()]
    return pd.DataFrame(
        [
            {**COMMON, "model": model, "seed": 0, "kind": "needed", "part": ONE, "method": name,
             "needed": needed * n, "low": needed * n, "high": needed * n, "times": n,
             "times_low": 0.8 * n, "times_high": 1.25 * n, "n_edges": 2000}
            for name, n in rows
        ]
    )  # fmt: skip


def test_few_edges_are_enough_and_not_with_the_numbers_of_the_controls():
    study = EdgeBudget()
    assert study.verdict(edge_rows()).passed
    assert not study.verdict(edge_rows(needed=150)).passed  # too many
    assert not study.verdict(edge_rows(chance=1.1)).passed
    assert not study.verdict(edge_rows(**{"another window": 1.1})).passed
    assert not study.verdict(edge_rows(rollout=0.7)).passed  # behind rollout
    both = pd.concat([edge_rows(), edge_rows(rollout=0.7, model="m-s1")])
    assert not study.verdict(both).passed
    pilot = edge_rows(rollout=0.7, model="stdlib-2l")  # seen before the rule
    assert study.verdict(pd.concat([edge_rows(), pilot])).passed
    assert not study.verdict(pilot).passed
