"""The results in docs/results: what stands there is what the studies make of their rows."""

import gzip
import itertools
import json
import math
import re
import shutil
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from infoflow_lens import InfoFlowError
from infoflow_lens.cli import app
from infoflow_lens.studies import pages, summary
from infoflow_lens.studies.claims import Claim, deciding_number, say_range, share_of_seeds
from infoflow_lens.studies.papers import STUDIES, find_study
from infoflow_lens.studies.summary import (
    BEGIN,
    END,
    WRITTEN,
    read_run,
    rows_of,
    runs_of,
    summarise,
)
from infoflow_lens.studies.sweep import plain_cell
from tests.conftest import some_of
from tests.foundation.test_documents import occupy

RESULTS = Path(__file__).parents[2] / "docs" / "results"
RUNS = {
    str(path.relative_to(RESULTS)): (study, path)
    for study in STUDIES.values()
    for path in runs_of(study, RESULTS)
}
of_each_run = pytest.mark.parametrize(("study", "path"), RUNS.values(), ids=RUNS)
run_of = cache(read_run)


def config_of(path):
    return json.loads((path / "record.json").read_text())["config"]


def test_every_run_is_by_the_present_settings_of_its_study():
    others = ("earlier", "partly")
    found = {
        str(path.parent.relative_to(RESULTS))
        for name in STUDIES
        for path in (RESULTS / name).rglob("record.json")
        if path.parent.name not in others
    }
    assert set(RUNS) == found >= set(STUDIES)


@of_each_run
def test_a_run_is_whole(study, path):
    config = config_of(path)
    preset = "quick" if path.name == study.name else path.name
    assert config["preset"] == preset
    assert config["cases"] == json.loads(json.dumps(list(study.cases(preset))))
    assert config["seeds"] == list(range(study.presets[preset]))
    n_runs = len(config["cases"]) * len(config["seeds"])
    assert rows_of(path, None)["run"].nunique() == n_runs


@of_each_run
def test_the_recorded_run_is_that_of_the_rows(study, path):
    """A record keeps what was said then; a statement says where its rule was changed since."""
    said = config_of(path)["verdict"]["passed"]
    if " was seen" in study.statement.part("Rule.").partition("Changed on ")[2]:
        assert said is False
    else:
        assert run_of(study, path).verdict.passed is said


@pytest.mark.parametrize(
    ("study", "path"),
    some_of(RUNS.values(), *[run for run in RUNS.values() if run[1].name == run[0].name]),
    ids=RUNS,
)
def test_tables_and_figures_do_without_a_case(study, path):
    """Without the first and one between; of larger presets without one, and no figure."""
    rows = rows_of(path)
    cases = rows["run"] // len(config_of(path)["seeds"])
    ordered = sorted(cases.unique())
    middle = ordered[len(ordered) // 2]
    quick = path.name == study.name
    for case in {ordered[0], middle} if quick else {middle}:
        without = rows[cases != case]
        if not without.empty:
            assert study.table(without)
    if quick:
        assert study.figure(rows[cases != ordered[0]] if len(ordered) > 1 else rows).axes


@pytest.mark.slow
def test_the_pages_are_what_the_summary_writes(tmp_path):
    """Tables and the page over all studies, byte by byte."""
    copy = tmp_path / "results"
    shutil.copytree(RESULTS, copy, ignore=shutil.ignore_patterns("*.png", "language_model"))
    (copy / "README.md").write_text(WRITTEN)  # its template gives the rest
    done = CliRunner().invoke(app, ["study", "--summary", "--out", str(copy)])
    assert done.exit_code == 0, done.output
    for page in sorted(copy.rglob("*.md")):
        assert page.read_text() == (RESULTS / page.relative_to(copy)).read_text(), page
    table = (copy / "README.md").read_text().split(BEGIN)[1].split(END)[0]
    lines = [line for line in table.splitlines() if line.startswith("| [`")]
    assert len(lines) == len(RUNS)
    for line, (name, (study, path)) in zip(lines, RUNS.items(), strict=True):
        assert (copy / study.name / "statement.md").is_file()
        preset = "" if path.name == study.name else f", {path.name}"
        assert line.startswith(f"| [`{study.name}`]({name}/table.md){preset} |")
        assert line.endswith(f"| {WORDS[name]} |")
        cells = line.strip("| ").split(" | ")
        assert max(map(len, cells)) <= 120  # one had 1,204, with 91 numbers


def test_the_page_speaks_of_every_larger_run():
    """It said that no separated pairs were trained for longer at T = 8, and a run of them stood."""
    said = (RESULTS / "README.md").read_text().split(END)[1]
    assert [name for name in RUNS if "/" in name and f"({name}/table.md)" not in said] == []


WORDS = dict.fromkeys(RUNS, "seen") | {
    # a verdict by luck: of resampled seeds a quarter or more say something else
    "max_position_recovery": "undecided",
    "intrinsic_dimension": "undecided",
    "separated_pairs": "undecided",
    "depth_separation/full": "undecided",
    "max_position_recovery/full": "fails its rule",
    "intrinsic_dimension/full": "fails its rule",
    "separated_pairs/full": "fails its rule",
    "separated_pairs/longest": "fails its rule",
    "cost_law": "fails its rule",
    "varying_depth": "fails its rule",
    "varying_heads": "fails its rule",
    "varying_heads/full": "fails its rule",
    "nested_qa": "fails its rule",
}


@pytest.mark.parametrize("name", ["depth_separation/full", "intrinsic_dimension"])
def test_words_follow_from_seeds(name):
    """By brute force, over all ways to draw the seeds anew."""
    study, path = RUNS[name]
    run, n = run_of(study, path), len(config_of(path)["seeds"])
    said = []
    for way in itertools.product(range(n), repeat=n):
        parts = [run.finished[run.finished["run"] % n == own] for own in way]
        moved = [
            p.assign(run=p["run"] - own + new)
            for new, (own, p) in enumerate(zip(way, parts, strict=True))
        ]
        said.append(study.verdict(pd.concat(moved, ignore_index=True)).passed)
    share = share_of_seeds(study.claims(), run.finished, n)
    assert share == pytest.approx(sum(said) / len(said))
    assert 0.1 < share < 0.9
    assert run.word == "undecided"


@pytest.mark.parametrize(
    ("op", "bound", "numbers", "deciding"),
    [
        ("<=", 0.1, {"a": 0.05, "b": 0.09}, ("error: 0.09 (b)", "at most 0.1")),
        (">=", 10, {"a": 5, "b": 200}, ("error: 5 (a)", "at least 10")),
        ("<", 0, {"": -0.5}, ("error: -0.5", "below 0")),
        (">=", 0.95, {"a": 1, "b": 0.951}, ("error: 0.951 (b)", "at least 0.95")),
        ("within", (0.5, 2), {"a": 1, "b": 1.9, "c": 0.6}, ("error: 1.9 (b)", "between 0.5 and 2")),
        ("<", 1, {"a": 0.1, "b": float("nan")}, ("error: no number (b)", "below 1")),
        ("<", 1, {"": float("inf")}, ("error: never", "below 1")),
    ],
)
def test_the_number_nearest_to_its_bound_decides(op, bound, numbers, deciding):
    claim = Claim("an error is {bound}", lambda rows: numbers, op, bound, name="error")
    assert deciding_number([claim], pd.DataFrame()) == deciding


def test_a_share_of_one_does_not_decide():
    """The least of the ratios was 5.32 for 5, and the row named an attention of 1."""
    study, path = RUNS["kth_largest/full"]
    words, bound = deciding_number(study.claims(), run_of(study, path).finished)
    assert words == "NMSE over that of k = 1 and T: 5.32 (k = 8)"
    assert bound == "at least 5"


def test_a_number_that_does_not_exist_is_said_in_words():
    """A page had "nan", and 0 where one head never gets there."""
    numbers = {"a": 0.5, "b": float("nan")}
    verdict = Claim("an error is {bound}", lambda rows: numbers, "<", 1).judge(pd.DataFrame())
    assert verdict.reasons == ("an error is below 1: **no**, 1 of 2 (a: 0.5; b: no number)",)
    study, path = RUNS["varying_heads"]
    claim = next(c for c in study.claims() if c.name == "epochs over those of one head")
    found = claim.numbers(run_of(study, path).finished)
    assert all(math.isnan(found[f"generalization, heads {n}"]) for n in ("1 1", "2 2", "4 4"))
    assert found["reasoning, heads 2 2"] == 1


def test_what_came_is_said_by_its_ends():
    assert say_range({"a": 40.04, "b": 70.6}) == "40 to 71"
    assert say_range({"a": 0.9470, "b": 0.9473}) == "0.95"
    assert say_range({"a": 1144.2, "b": float("nan")}) == "1144"
    assert say_range({"a": 2, "b": math.inf}) == "2 to inf"
    assert say_range({"b": float("nan")}) == "no number"


@pytest.mark.parametrize("name", RUNS)
def test_every_run_says_what_came(name):
    """A reader could not tell what a study found from the number nearest to its bound."""
    study, path = RUNS[name]
    said = study.say_finding(run_of(study, path).finished)
    assert re.search(r"\d", said)
    assert said[1:] in (path / "table.md").read_text()
    assert said.replace("|", r"\|") in (RESULTS / "README.md").read_text()


HOSTILE = "{{ cycler.__init__.__globals__.os.system('touch ran') }}"


def test_a_template_in_a_folder_of_results_is_not_run(tmp_path, monkeypatch):
    """It was rendered once, with all that Python can do."""
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    (out / "language_model").mkdir(parents=True)
    for name in ("x.md.jinja", "README.md.jinja", "language_model/README.md.jinja"):
        (out / name).write_text(HOSTILE)
    (out / "x.md").write_text(f"mine, {WRITTEN}")
    (out / "README.md").write_text(f"{HOSTILE}\n{BEGIN}\n{END}\n")
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    summarise(out)
    assert not (tmp_path / "ran").exists()
    after = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert after.pop(out / "README.md").startswith(HOSTILE.encode())  # a text as any other
    before.pop(out / "README.md")
    assert after == before


def test_data_of_a_page_are_no_template_either(tmp_path, monkeypatch):
    """Rows and records are values of the page, and what they hold is shown as it is."""
    monkeypatch.setattr(pages, "TEMPLATES", tmp_path)
    (tmp_path / "page.md.jinja").write_text("{{ value }}")
    assert pages.render_page("page.md", {"value": HOSTILE}) == HOSTILE


@pytest.mark.parametrize(
    "text",
    ["{{ value.__class__.__mro__ }}", "{{ ''.__class__ }}", HOSTILE, "{% include '/etc/hosts' %}"],
)
def test_the_sandbox_keeps_what_python_keeps_private(text, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "TEMPLATES", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.md.jinja").write_text(text)
    with pytest.raises(InfoFlowError, match="cannot be filled"):
        pages.render_page("page.md", {"value": 1})
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("how", ["foreign", "pipe", "link", "folder"])
def test_a_table_that_no_study_wrote_is_not_replaced(how, tmp_path):
    shutil.copytree(RESULTS / "kth_largest", tmp_path / "kth_largest")
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    table = tmp_path / "kth_largest" / "table.md"
    table.unlink()
    other = tmp_path / "theirs"
    other.write_text("mine")
    table.write_text("mine") if how == "foreign" else occupy(how, table, other)
    with pytest.raises(InfoFlowError, match=r"table\.md' is (there|a (pipe|link|folder))"):
        summarise(tmp_path)
    assert (tmp_path / "README.md").read_text() == f"{BEGIN}\n{END}\n"
    assert other.read_text() == "mine"
    if how == "foreign":
        summarise(tmp_path, overwrite=True)
        assert table.read_text() == (RESULTS / "kth_largest" / "table.md").read_text()


@pytest.mark.parametrize("how", ["pipe", "link", "folder"])
def test_the_page_itself_must_be_a_file(how, tmp_path):
    other = tmp_path / "theirs"
    other.write_text(f"{BEGIN}\n{END}\n")
    occupy(how, tmp_path / "README.md", other)
    with pytest.raises(InfoFlowError, match="README"):
        summarise(tmp_path)
    assert other.read_text() == f"{BEGIN}\n{END}\n"


def test_a_page_without_a_place_for_the_summary_is_left_alone(tmp_path):
    for text in ("", f"{END} {BEGIN}", f"{BEGIN} {BEGIN} {END}"):
        (tmp_path / "README.md").write_text(text)
        with pytest.raises(InfoFlowError, match="has no place for the summary"):
            summarise(tmp_path)
        assert (tmp_path / "README.md").read_text() == text


def test_numbers_that_change_change_the_summary(tmp_path):
    """A summary is of the rows beside it."""
    study = find_study("specific_position")
    copy = tmp_path / study.name
    shutil.copytree(RESULTS / study.name, copy)
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    summarise(tmp_path)
    before = (tmp_path / "README.md").read_text()
    rows = pd.read_csv(copy / "results.csv")
    rows.assign(mse=0.5).to_csv(copy / "results.csv", index=False)
    summarise(tmp_path)
    broken = "| test MSE: 0.5 (no normalization), for below 0.001 | fails its rule |"
    assert broken in (tmp_path / "README.md").read_text()
    assert broken not in before
    assert "**Fails its rule**" in (copy / "table.md").read_text()


@pytest.mark.parametrize("spoiled", ["", "full"], ids=["quick", "full"])
@pytest.mark.parametrize("change", [{"cases": []}, {"preset": "smoke"}, {"study": "head_count"}])
def test_a_run_by_other_settings_is_said_to_be_missing(spoiled, change, tmp_path):
    shutil.copytree(RESULTS / "kth_largest", tmp_path / "kth_largest")
    record = tmp_path / "kth_largest" / spoiled / "record.json"
    text = json.loads(record.read_text())
    record.write_text(json.dumps({**text, "config": {**text["config"], **change}}))
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    summarise(tmp_path)
    page = (tmp_path / "README.md").read_text()
    quick, full = (line for line in page.splitlines() if line.startswith("| [`kth_largest`]"))
    assert quick.endswith("| awaits its run |" if not spoiled else "| seen |")
    assert full.endswith("| awaits its run |" if spoiled else "| seen |")


@pytest.mark.parametrize(
    "name", [name for name in STUDIES if len(config_of(RESULTS / name)["cases"]) > 1]
)
def test_a_case_of_which_every_run_diverged_is_told(name, tmp_path):
    """Of each run the first case that is judged."""
    study, path = RUNS[name]
    config = config_of(path)
    case = next(i for i, settings in enumerate(config["cases"]) if study.judges(settings))
    rows = rows_of(path, None)
    lost = rows["run"] // len(config["seeds"]) == case
    copy = tmp_path / path.relative_to(RESULTS)
    copy.mkdir(parents=True)
    shutil.copy(path / "record.json", copy)
    rows.assign(status=rows["status"].mask(lost, "diverged")).to_csv(copy / "results.csv")
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    summarise(tmp_path)
    lines = (tmp_path / "README.md").read_text().splitlines()
    [row] = [line for line in lines if "every run diverged with {" in line]
    assert row.endswith("| undecided |")
    assert "every run diverged with {" in (copy / "table.md").read_text()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("record.json", '{"config": {"study"', "is no record of a study"),
        ("record.json", "[]", "it holds a list"),
        ("record.json", "{}", "its study is None"),
        ("record.json", '{"config": {"study": "kth_largest", "preset": 3}}', "its preset is 3"),
        ("results.csv", "", "has no rows"),
        ("results.csv", "\0", "has no column 'run'"),
        ("results.csv", "run,seed\n0,0\n", "has no column 'status'"),
        ("results.csv", None, "has no results.csv"),
        ("results.csv", "run,seed,status\n0,0,finished\n", "has no rows of run 1: expected runs 0"),
        ("results.csv", ("\n14,", "\n99,"), "has no rows of run 14"),
        ("results.csv", ("\n14,", "\n<<<<<<< HEAD\n14,"), "a run that is no number"),
        ("results.csv", ("\n14,finished", "\n14,finshed"), "has the status 'finshed'"),
        ("results.csv", ("\n14,", "\n14,finished,7,16,16,16000,60,1,0,1,1\n14,"), "seed of run 14"),
        ("results.csv", ("seed,k,", "seed,x,"), "has no column 'k'"),
        ("results.csv", (",nmse,", ",error,"), "cannot be judged .KeyError"),
        ("results.csv", (",0.0006107844435404661,", ",x,"), "cannot be judged"),
        ("results.csv", ("\n14,finished,2,16,", "\n14,finished,2,x,"), "k of run 14 is 'x'"),
        ("results.csv", ("\n14,finished,2,16,", "\n14,finished,2,8,"), "k of run 14 is 8, but 16"),
        ("results.csv", ("\n14,finished,2,", "\n14,finished,7,"), "seed of run 14 is 7, but 2"),
    ],
)  # fmt: skip
def test_a_run_that_cannot_be_read_is_named_before_anything_is_written(
    name, text, message, tmp_path
):
    of_study = tmp_path / "kth_largest"
    shutil.copytree(RESULTS / "kth_largest", of_study)
    spoiled = of_study / name
    if text is None:
        spoiled.unlink()
    elif isinstance(text, tuple):
        assert spoiled.read_text().count(text[0]) == 1
        spoiled.write_text(spoiled.read_text().replace(*text))
    else:
        spoiled.write_text(text)
    for page in (tmp_path / "README.md", of_study / "table.md", of_study / "statement.md"):
        page.write_text(f"{BEGIN}\n{END}\n")
    with pytest.raises(InfoFlowError, match=message) as refused:
        summarise(tmp_path)
    assert str(of_study if text is None else spoiled) in str(refused.value)
    for page in (tmp_path / "README.md", of_study / "table.md", of_study / "statement.md"):
        assert page.read_text() == f"{BEGIN}\n{END}\n"


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_settings_survive_the_file_of_the_rows(study, tmp_path):
    """By every preset: the rows are those of the record, and only what is measured is missing."""
    for preset in study.presets:
        cases = study.cases(preset)
        config = {"study": study.name, "preset": preset, "seeds": [0], "cases": cases}
        (tmp_path / "record.json").write_text(json.dumps({"config": config}))
        rows = [
            {"run": run, "status": "finished", "seed": 0}
            | {name: plain_cell(value) for name, value in case.items()}
            for run, case in enumerate(cases)
        ]
        pd.DataFrame(rows).to_csv(tmp_path / "results.csv", index=False)
        with pytest.raises(InfoFlowError, match="cannot be judged"):
            read_run(study, tmp_path)


def test_quick_numbers_are_not_told_as_those_of_full(tmp_path):
    shutil.copytree(RESULTS / "kth_largest", tmp_path / "kth_largest")
    shutil.copy(RESULTS / "kth_largest" / "record.json", tmp_path / "kth_largest" / "full")
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    summarise(tmp_path)
    page = (tmp_path / "README.md").read_text()
    _, full = (line for line in page.splitlines() if line.startswith("| [`kth_largest`]"))
    assert full.endswith("| awaits its run |")


def test_rows_that_unpack_to_far_more_than_rows_are_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(summary, "_MOST_ROWS", 10**4)
    with gzip.open(tmp_path / "results.csv.gz", "wb") as file:
        file.write(b"run,seed,status\n" + b"0,0,finished\n" * 10**5)
    with pytest.raises(InfoFlowError, match=r"has no rows .it holds more than 10,000 bytes"):
        rows_of(tmp_path)


def test_graded_sets_are_said_to_be_behind_where_they_are():
    """The page named no layer, and one of two metrics; rollout is ahead by rank (T7)."""
    rows = rows_of(RESULTS / "language_model" / "graded_sets")
    rows = rows[(rows["on"] == "test") & (rows["influence"] == "jacobian")]
    rows = rows[rows["model"] != "random 12 x 12"]
    last, first = [], []
    for _, model in rows.groupby("model"):
        for layer, ahead in ((model["layer"].max(), last), (0, first)):
            mean = model[model["layer"] == layer].groupby("method")["spearman"].mean()
            ahead.append(mean["attention rollout"] > mean["graded: norm, product"])
    assert (sum(last), sum(first)) == (4, 5)
    page = " ".join((RESULTS / "language_model" / "README.md").read_text().split())
    assert "rollout is ahead in the mean on four of five models there, and on all five" in page
