"""The results in docs/results: what stands there is what the studies make of their rows."""

import json
from pathlib import Path

import pandas as pd
import pytest

from infoflow_lens.experiments.studies import STUDIES, find_study

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def rows_of(name):
    (path,) = (RESULTS / name).glob("results.csv*")
    rows = pd.read_csv(path, dtype={"table": str})
    return rows[rows["status"] == "finished"]


def record_of(name):
    return json.loads((RESULTS / name / "record.json").read_text())["config"]


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_has_its_quick_run_of_the_settings_that_it_has_now(name):
    config = record_of(name)
    study = find_study(name)
    assert config["preset"] == "quick"
    assert config["cases"] == json.loads(json.dumps(list(study.cases("quick"))))
    assert config["seeds"] == list(range(study.presets["quick"]))
    assert rows_of(name)["run"].nunique() == len(config["cases"]) * len(config["seeds"])


@pytest.mark.parametrize("name", STUDIES)
def test_the_table_and_the_verdict_are_those_of_the_rows(name):
    study, rows = find_study(name), rows_of(name)
    table = (RESULTS / name / "table.md").read_text()
    assert study.table(rows) in table
    verdict = study.verdict(rows)
    assert verdict.passed is record_of(name)["verdict"]["passed"]
    seen = "Seen" if verdict.passed else "Not seen"
    assert f"**{seen}**, by the rule: {study.acceptance}" in table
    for reason in verdict.reasons:
        assert f"- {reason}" in table


@pytest.mark.parametrize("name", STUDIES)
def test_tables_and_figures_do_without_a_case(name):
    study, rows = find_study(name), rows_of(name)
    seeds = len(record_of(name)["seeds"])
    cases = rows["run"] // seeds
    for case in cases.unique():
        without = rows[cases != case]
        if not without.empty:
            assert study.table(without)
            assert study.figure(without).axes


def test_the_page_tells_of_every_study_and_of_its_verdict():
    page = (RESULTS / "README.md").read_text()
    for name in STUDIES:
        (line,) = [line for line in page.splitlines() if line.startswith(f"| [`{name}`]")]
        verdict = line.rsplit("|", 2)[1].replace("*", "").strip()
        assert verdict.startswith("seen" if record_of(name)["verdict"]["passed"] else "not seen")
