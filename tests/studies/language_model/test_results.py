"""What docs/results/language_model says is what the studies make of their rows."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr, ttest_rel

from infoflow_lens import InfoFlowError
from infoflow_lens.models.shipped import SHIPPED, find_package_folder
from infoflow_lens.studies import pages
from infoflow_lens.studies.language_model import graded_sets, roles
from infoflow_lens.studies.language_model.card import comparison, read_models
from infoflow_lens.studies.language_model.config import PRESETS
from infoflow_lens.studies.pages import (
    cell_of,
    count_in_words,
    list_numbers,
    page_templates,
    render_page,
    short,
    span,
    two_digits,
)
from infoflow_lens.studies.registry import LANGUAGE_MODEL_STUDIES
from infoflow_lens.studies.summary import (
    BEGIN,
    END,
    WRITTEN,
    language_model_runs,
    read_run,
    rows_of,
    summarise,
)
from tests.conftest import some_of

RESULTS = Path(__file__).parents[3] / "docs" / "results"
MODELS = read_models(RESULTS / "language_model" / "models")
RUNS = {path.name: path for path in language_model_runs(RESULTS)}


def config_of(path):
    return json.loads((path / "record.json").read_text())["config"]


@pytest.mark.slow
def test_tables_and_pages_are_what_the_summary_writes(tmp_path):
    """Byte by byte; each page has its template in the package."""
    of_models = tmp_path / "language_model"
    shutil.copytree(RESULTS / "language_model", of_models, ignore=shutil.ignore_patterns("*.png"))
    (of_models / "README.md").write_text(WRITTEN)
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    summarise(tmp_path)
    published = sorted((RESULTS / "language_model").rglob("*.md"))
    assert len(published) > len(LANGUAGE_MODEL_STUDIES) + len(RUNS)
    for page in published:
        assert (of_models / page.relative_to(RESULTS / "language_model")).read_text() == (
            page.read_text()
        ), page
        assert page.name == "table.md" or str(page.relative_to(RESULTS)) in page_templates()


@pytest.mark.parametrize("path", RUNS.values(), ids=RUNS)
def test_the_recorded_verdict_is_that_of_the_rows(path):
    config = config_of(path)
    study = LANGUAGE_MODEL_STUDIES[config["study"]]()
    assert read_run(study, path).verdict.passed is config["verdict"]["passed"]
    for case in config["cases"]:
        if case["final"] and case["model"] in PRESETS:
            # a shipped model tells no step
            assert case["step"] in (-1, PRESETS[case["model"]].n_steps)
        assert "/" not in case["model"]  # a name, no path


def test_every_study_has_a_run():
    assert {config_of(path)["study"] for path in RUNS.values()} == set(LANGUAGE_MODEL_STUDIES)


@pytest.mark.parametrize("name", some_of(LANGUAGE_MODEL_STUDIES, "top_k", "induction"))
def test_every_study_has_a_figure_of_one_moment(name):
    rows = rows_of(RUNS[name])
    last = rows[rows["final"].astype(bool)]
    study = LANGUAGE_MODEL_STUDIES[name]()
    assert study.table(last)
    assert study.figure(last).axes


def test_the_models_on_the_page_are_those_that_were_measured():
    for name, measured in MODELS.items():
        config = measured["record"]["config"]["config"]
        if name in PRESETS:
            assert config == PRESETS[name].to_dict()
        else:  # "-s1": the preset's settings, with this seed and so many steps
            kind, _, seed = name.rpartition("-s")
            changed = {"n_steps": 4000, "decay": 0.3, "seed": int(seed), "threads": 1}
            assert config == {**PRESETS[kind].to_dict(), **changed, "evaluate_every": 500}
    for name in SHIPPED:
        assert MODELS[name] == json.loads((find_package_folder(name) / "measured.json").read_text())


def test_models_side_by_side_are_of_one_text():
    first, other = MODELS["stdlib-2l"], json.loads(json.dumps(MODELS["stdlib-4l-mlp"]))
    assert len(comparison({"a": first, "b": other}).splitlines()) == 2 + 2 + 5 + 1
    other["record"]["config"]["corpus"] = "another"
    with pytest.raises(InfoFlowError, match="of 2 texts"):
        comparison({"a": first, "b": other})
    with pytest.raises(InfoFlowError, match="of 0 texts"):
        comparison({})


# Numbers, computed otherwise


def test_who_is_ahead_is_by_paired_t_intervals():
    rows = rows_of(RUNS["graded_sets"])
    rows = rows[(rows["on"] == "test") & (rows["influence"] == "resample")]
    chosen, ahead = graded_sets.chosen_of(rows_of(RUNS["graded_sets"])), 0
    for _, some in rows[rows["weights"] != "random 12 x 12"].groupby("model"):
        some = some[some["layer"] == some["layer"].max()]
        low = []
        for metric in ("spearman", "share"):
            by = some.pivot_table(index="sequence", columns="method", values=metric)
            both = by[[chosen, "attention rollout"]].dropna()
            low.append(ttest_rel(*both.to_numpy().T).confidence_interval().low)
        ahead += min(low) > 0
    tally = graded_sets.tally(rows_of(RUNS["graded_sets"]))
    of_rollout = tally[
        (tally["method"] == "attention rollout") & (tally["influence"] == "resample")
    ]
    assert (of_rollout["outcome"] == "ahead").sum() == ahead


def test_roles_and_their_cost_by_scipy():
    rows = rows_of(RUNS["roles"])
    heads = rows[rows["final"] & (rows["part"] == "head") & (rows["kind"] == "trained")]
    claims = roles.Roles().claims()
    rho = spearmanr(heads["roles"], heads["cost"]).statistic
    assert claims[2].numbers(rows)["stdlib-2l"] == pytest.approx(rho)
    generator = np.random.default_rng(0)
    permuted = [
        spearmanr(heads["roles"], generator.permutation(heads["cost"])).statistic
        for _ in range(300)
    ]
    level = claims[3].numbers(rows)["stdlib-2l"]
    assert level == pytest.approx(np.mean(np.array(permuted) < rho), abs=0.03)


# How numbers stand on a page


@pytest.mark.parametrize(
    ("number", "shown"), [(0.0123, ".012"), (-0.5, "-.500"), (10.25, "10.250"), (-1.5, "-1.500")]
)
def test_numbers_have_no_zero_before_the_point(number, shown):
    assert short(number) == shown


def test_factors_have_two_digits_and_ranges_two_ends():
    assert two_digits(1e-10) == ".00000000010"  # which ended in "math domain error"
    shown = [two_digits(number) for number in (0.344, 1.06, 8.31, 14.6, 231.7)]
    assert shown == [".34", "1.1", "8.3", "15", "232"]
    assert span(pd.Series([3.0, 1.0, 2.0])) == "1.000 to 3.000"
    assert span(pd.Series([1.0001, 1.0002])) == "1.000"
    assert span(pd.Series([0.5, float("nan"), 0.25]), 2) == ".25 to .50"


def test_numbers_in_a_row_and_small_counts_stand_as_prose():
    assert list_numbers([0.5]) == ".500"
    assert list_numbers([0.5, 1.25]) == ".500 and 1.250"
    assert list_numbers([3, 1, 2], "{:g}".format) == "3, 1 and 2"
    assert count_in_words("2 of 3") == "two of three"
    assert count_in_words(0) == "none"
    assert count_in_words(120) == "120"


def test_a_cell_is_found_by_the_cells_before_it():
    text = "| a | b |\n|---|---|\n| x | 1 |\n\nand\n\n| b | c | d |\n|---|---|---|\n| x | y | 2 |"
    assert cell_of(text, "b", "x") == "1"
    assert cell_of(text, "d", "x", "y") == "2"
    with pytest.raises(KeyError, match="no table has a column 'c'"):
        cell_of(text, "c", "z")


@pytest.mark.parametrize("text", ["{{ nothing }}", "{{", "{{ cell('a') }}", "{{ statement(3) }}"])
def test_a_template_that_cannot_be_filled_is_named(text, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "TEMPLATES", tmp_path)
    (tmp_path / "page.md.jinja").write_text(text)
    with pytest.raises(InfoFlowError, match=r"template of 'page\.md' cannot be filled"):
        render_page("page.md", {"cell": lambda run: {}[run]})
