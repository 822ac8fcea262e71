"""check_study refuses what would fail after hours; run_study refuses the same at the first run."""

import random

import pytest
import torch

from infoflow_lens import InfoFlowError
from infoflow_lens.studies.checking import check_study
from infoflow_lens.studies.claims import Claim
from infoflow_lens.studies.study import Study
from infoflow_lens.studies.sweep import run_study


def mean(results):
    return {"": results["y"].mean()}


class Sums(Study):
    name, title = "sums", "Do sums grow?"
    presets = {"quick": 2}  # noqa: RUF012

    def cases(self, preset):
        return [{"n": 1, "of": 3}, {"n": 2, "of": 3}]

    def measure(self, settings, seed, device):
        return [{"y": settings["n"] + 10 * seed, "half": torch.tensor(0.5)}]

    def claims(self):
        return [Claim("the mean sum is {bound}", mean, "<", 9)]


def study(**methods):
    return type("Wrong", (Sums,), methods)()


def gives(value):
    return lambda *arguments: value


def test_a_study_that_is_right_gives_its_rows(tmp_path):
    rows = check_study(Sums(), "quick")
    assert rows["y"].tolist() == [1, 2]
    found = run_study(Sums(), str(tmp_path), progress=False)
    assert found.rows["y"].tolist() == [1, 11, 2, 12]
    assert found.rows["half"].tolist() == [0.5] * 4
    assert found.verdict.passed


def test_table_and_figure_are_by_the_settings_that_differ():
    rows = check_study(Sums(), "quick")
    assert Sums().table(rows).splitlines() == [
        "| n | y | half |", "|---|---|---|", "| 1 | 1 | 0.5 |", "| 2 | 2 | 0.5 |",
    ]  # fmt: skip
    labels = [(axes.get_xlabel(), axes.get_ylabel()) for axes in Sums().figure(rows).axes]
    assert labels == [("n", "y"), ("n", "half")]


EARLY = [
    ({"measure": gives({"y": 1})}, r"measure\(\) of sums gives .*: expected a list with a dict"),
    ({"measure": gives([])}, "expected a list with a dict"),
    ({"measure": gives([{"y": torch.ones(2)}])}, "for 'y': expected a number or a text"),
    ({"measure": gives([{"y": 1, "seed": 7, "run": 0}])}, "gives run, seed, which every row has"),
    ({"cases": gives([{"n": {1}}])}, "expected a dict of plain numbers"),
    ({"cases": gives([{"n": 1}, {"n": 1}])}, "twice"),
    ({"cases": gives([])}, "one at least"),
    ({"cases": gives({"n": 1})}, "expected a list of dicts"),
    ({"title": ""}, "Wrong has no title"),
]


@pytest.mark.parametrize(("methods", "message"), EARLY)
def test_wrong_cases_and_rows_are_refused_at_once(methods, message, tmp_path):
    with pytest.raises(InfoFlowError, match=message):
        check_study(study(**methods), "quick")
    with pytest.raises(InfoFlowError, match=message):
        run_study(study(**methods), tmp_path, progress=False)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"measure": lambda *_: [{"y": random.random()}]}, "and then .* for the same settings"),
        ({"table": gives(None)}, r"table\(\) of sums gives None: expected a str"),
        ({"figure": gives(None)}, "expected a Figure"),
        (
            {"claims": lambda self: [Claim("{bound}", lambda rows: {"": rows["z"]}, "<", 1)]},
            r"verdict\(\) of sums fails on rows with the columns run, .*KeyError: 'z'",
        ),
        (
            {"claims": lambda self: [Claim("{bound}", lambda rows: 3.0, "<", 1)]},
            'expected a dict, such as {"": 0.1}',
        ),
    ],
)
def test_what_would_fail_after_the_runs_is_refused_before(methods, message):
    with pytest.raises(InfoFlowError, match=message):
        check_study(study(**methods), "quick")


def test_presets_and_comparisons_are_known():
    with pytest.raises(InfoFlowError, match="expected one of its presets, quick"):
        check_study(Sums(), "full")
    with pytest.raises(InfoFlowError, match="of sums: expected some, as in presets = "):
        check_study(study(presets={}), "full")
    with pytest.raises(InfoFlowError, match="op is '=<'"):
        Claim("{bound}", mean, "=<", 1)
    for op, bound in (("<", (0, 1)), ("within", 1)):
        with pytest.raises(InfoFlowError, match="bound is"):
            Claim("{bound}", mean, op, bound)
