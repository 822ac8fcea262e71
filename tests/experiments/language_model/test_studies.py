"""Studies of language models: run small, and their verdicts given what their controls gave."""

import warnings

import pandas as pd
import pytest

from infoflow_lens import InfoFlowError
from infoflow_lens.experiments.language_model.roles import Roles
from infoflow_lens.experiments.language_model.softness import Softness
from infoflow_lens.experiments.language_model.studies import LANGUAGE_MODEL_STUDIES
from infoflow_lens.experiments.language_model.sufficiency import Sufficiency
from infoflow_lens.experiments.language_model.topk import TopK
from infoflow_lens.experiments.sweep import run_study
from infoflow_lens.hooks import IDEALS
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


def sufficiency_rows(mechanisms):
    rows = [("mechanisms", mechanisms), ("mean ablation", 2.0)]
    rows += [(f"random mechanisms {i}", 1.0 + 0.1 * i) for i in range(8)]
    heads = {f"n_{name}": 1 for name in (*IDEALS, "soft")}
    return pd.DataFrame(
        [
            {**COMMON, **heads, "assignment": name, "share": 1.0, "excess": excess,
             "n_replaced": 4, "error": 0.01, "loss": 3.0}
            for name, excess in rows
        ]
    )  # fmt: skip


def test_sufficiency_is_seen_and_not_with_the_numbers_of_its_controls():
    study = Sufficiency()
    assert study.verdict(sufficiency_rows(0.3)).passed
    assert not study.verdict(sufficiency_rows(2.0)).passed  # mean ablation's
    assert not study.verdict(sufficiency_rows(1.0)).passed  # a random assignment's
    rows = sufficiency_rows(0.3)
    rows.loc[rows["assignment"] == "random mechanisms 3", "excess"] = 0.2
    assert not study.verdict(rows).passed


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
