"""Sweeps: the same numbers however they are run, nothing lost, nothing mixed."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import ClassVar

import pandas as pd
import pytest

from infoflow_lens import InfoFlowError
from infoflow_lens.foundation import packages
from infoflow_lens.foundation.files import write_signed
from infoflow_lens.runs.folder import RunFolder
from infoflow_lens.studies.papers import STUDIES, find_study
from infoflow_lens.studies.study import TogetherStudy
from infoflow_lens.studies.sweep import run_study
from infoflow_lens.training import TrainingDivergedError
from tests.processes import losing_a_worker
from tests.studies.studies_for_tests import Squares


def run(study, out, **arguments):
    return run_study(study, out, progress=False, **arguments)


def test_a_sweep_writes_rows_table_figure_and_record(tmp_path):
    result = run(Squares(), tmp_path, preset="smoke", seeds=2)
    rows = pd.read_csv(tmp_path / "results.csv")
    assert rows["run"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert rows["number"].tolist() == [2, 2, 2, 2, 3, 3, 3, 3]
    assert rows["seed"].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert set(rows["heads"]) == {"2 1", "3 1"}
    assert result.verdict.passed
    table = (tmp_path / "table.md").read_text()
    assert "Preset smoke, 4 runs, 2 seeds of each kind." in table
    assert "the square of 3 is above 1 times that of 2: yes" in table
    about = json.loads((tmp_path / "record.json").read_text())
    assert about["config"]["verdict"]["passed"] is True
    assert about["versions"]["torch"]
    assert about["environment"]["threads"] >= 1
    for kind in ("png", "svg"):
        assert (tmp_path / f"figure.{kind}").stat().st_size > 500


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_jobs_change_nothing_but_the_time(tmp_path):
    """And every run has one thread."""
    for jobs in (1, 2):
        seen = tmp_path / f"seen by {jobs}"
        seen.mkdir()
        run(Squares(seen), tmp_path / str(jobs), jobs=jobs)
        assert {path.read_text() for path in seen.iterdir()} == {"1"}
    one, two = ((tmp_path / str(jobs) / "results.csv").read_bytes() for jobs in (1, 2))
    assert one == two
    figures = [(tmp_path / str(jobs) / "figure.svg").stat().st_size for jobs in (1, 2)]
    assert figures[0] == figures[1]


def test_resuming_runs_only_what_is_missing(tmp_path):
    seen = tmp_path / "seen"
    seen.mkdir()
    run(Squares(), tmp_path / "out", seeds=1)
    whole = (tmp_path / "out" / "results.csv").read_bytes()
    kept = sorted((tmp_path / "out" / "runs").iterdir())
    kept[0].unlink()
    run(Squares(seen), tmp_path / "out", seeds=1, resume=True)
    assert len(list(seen.iterdir())) == 1
    assert (tmp_path / "out" / "results.csv").read_bytes() == whole
    run(Squares(seen), tmp_path / "out", seeds=2, resume=True)  # more seeds may be added
    assert len(list(seen.iterdir())) == 1 + 5


@pytest.mark.parametrize("rows", [None, 5, {}, ["x"], [{"square": 4}]])
def test_a_run_that_was_signed_anew_is_named(rows, tmp_path):
    run(Squares(), tmp_path, preset="smoke")
    path = next((tmp_path / "runs").iterdir())
    schema = json.loads(path.read_text())["schema"]
    with RunFolder.open(tmp_path, "a run"):
        write_signed(path, schema, {} if rows is None else {"rows": rows})
    with pytest.raises(InfoFlowError, match=r"is no run of this study .* delete it to run it"):
        run(Squares(), tmp_path, preset="smoke", resume=True)


def test_ctrl_c_keeps_finished_runs(tmp_path):
    class Interrupted(Squares):
        def measure(self, settings, seed, device):
            if settings["number"] == 3:
                raise KeyboardInterrupt
            return super().measure(settings, seed, device)

    with pytest.raises(KeyboardInterrupt, match=r"go on with run_study\(.*, resume=True\)"):
        run(Interrupted(), tmp_path, seeds=1)
    assert len(pd.read_csv(tmp_path / "results.csv")) == 2 * 3
    seen = tmp_path / "seen"
    seen.mkdir()
    result = run(Squares(seen), tmp_path, seeds=1, resume=True)
    assert len(list(seen.iterdir())) == 2
    assert result.rows["number"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_a_diverging_run_is_recorded_and_the_sweep_goes_on(tmp_path):
    result = run(Squares(diverging=(4,)), tmp_path)
    assert result.n_diverged == 2
    rows = pd.read_csv(tmp_path / "results.csv")
    assert rows[rows["number"] == 4]["status"].tolist() == ["diverged", "diverged"]
    assert rows[rows["number"] == 4]["square"].isna().all()
    assert "of which 2 diverged" in (tmp_path / "table.md").read_text()
    with pytest.raises(InfoFlowError, match="all 2 runs of squares diverged"):
        run(Squares(diverging=(2, 3)), tmp_path / "all", preset="smoke")


def test_a_case_of_which_every_run_diverged_is_not_seen(tmp_path):
    result = run(Squares(diverging=[2]), tmp_path, preset="smoke")
    assert not result.verdict.passed
    assert result.verdict.reasons == ('every run diverged with {"number": 2, "heads": [2, 1]}',)
    assert (tmp_path / "table.md").is_file()


def test_a_case_that_is_only_reported_does_not_decide(tmp_path, monkeypatch):
    monkeypatch.setattr(Squares, "judges", lambda study, settings: settings["number"] != 4)
    result = run(Squares(diverging=[4]), tmp_path / "without")
    assert result.verdict.passed
    assert result.verdict.remarks == ('every run diverged with {"number": 4, "heads": [4, 1]}',)


class Sometimes(Squares):
    """The first seed of one case diverges."""

    def measure(self, settings, seed, device):
        if (settings["number"], seed) == (2, 0):
            raise TrainingDivergedError(SimpleNamespace(epochs_run=3), 0.1)
        return super().measure(settings, seed, device)


@pytest.mark.parametrize("every", [False, True])
def test_a_diverged_run_is_told_and_breaks_a_rule_about_every_run(tmp_path, monkeypatch, every):
    monkeypatch.setattr(Sometimes, "judges_every_run", every)
    result = run(Sometimes(), tmp_path, preset="smoke", seeds=2)
    assert result.verdict.passed is not every
    assert "1 of 4 runs diverged" in result.verdict.reasons[-1]
    # numbers that are whole stay whole, though one run has none
    assert "| 2 |" in (tmp_path / "table.md").read_text()


def test_results_are_never_mixed(tmp_path):
    class Others(Squares):
        name = "others"

    run(Squares(), tmp_path, preset="smoke")
    with pytest.raises(InfoFlowError, match="go on with --resume, or choose another folder"):
        run(Squares(), tmp_path, preset="smoke")
    with pytest.raises(InfoFlowError, match=r"the preset changed .*'smoke' -> 'quick'"):
        run(Squares(), tmp_path, preset="quick", resume=True)
    with pytest.raises(InfoFlowError, match=r"the study changed .*'squares' -> 'others'"):
        run(Others(), tmp_path, preset="smoke", resume=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "quik"}, "preset is 'quik'.* did you mean 'quick'"),
        ({"device": "gpu"}, "device is 'gpu', which does not answer"),
        ({"seeds": 0}, "seeds is 0"),
        ({"jobs": 0}, "jobs is 0"),
        ({"scheduler": "tcp://127.0.0.1:1"}, "no dask scheduler at"),
    ],
)
def test_bad_settings_are_named(tmp_path, arguments, message):
    with pytest.raises(InfoFlowError, match=message):
        run(Squares(), tmp_path, **arguments)


class Huge(Squares):
    """Runs that no machine has the memory for."""

    def memory(self, settings):
        return settings["number"] * 2**60


def test_runs_that_do_not_fit_in_memory_are_refused_before_any_starts(tmp_path):
    with pytest.raises(InfoFlowError, match=r"a run needs about .* GiB of memory on cpu, but .*"):
        run(Huge(tmp_path / "seen"), tmp_path / "out", preset="smoke")
    assert not (tmp_path / "seen").exists()
    assert not (tmp_path / "out").exists()


def test_what_is_finished_needs_no_memory(tmp_path):
    run(Squares(), tmp_path, preset="smoke")
    assert run(Huge(), tmp_path, preset="smoke", resume=True).verdict.passed


@pytest.mark.parametrize("name", STUDIES)
def test_more_training_sequences_need_more_memory(name):
    study = find_study(name)
    settings = next(case for case in study.cases("full") if "n_train" in case)
    more = {**settings, "n_train": 2 * settings["n_train"]}
    assert study.memory(more) > study.memory(settings) > 2**20


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_the_smoke_preset_of_every_study_runs_to_its_verdict(name, tmp_path):
    study = find_study(name)
    result = run(study, tmp_path, preset="smoke")
    assert result.n_diverged == 0
    assert result.verdict.reasons
    table = (tmp_path / "table.md").read_text()
    assert all(claim.rule() in table for claim in study.claims() if claim.needed)
    assert (tmp_path / "figure.png").stat().st_size > 1000
    assert result.rows["run"].nunique() == len(study.cases("smoke"))


def test_a_full_disk_is_one_error_and_finished_runs_stay(tmp_path, monkeypatch):
    replace = os.replace

    def full(source, target):
        if target.name == "results.csv":
            raise OSError(28, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(InfoFlowError, match=r"No space left on device.*with --resume"):
            run(Squares(), tmp_path)
    assert len(list((tmp_path / "runs").iterdir())) == 1
    assert not list(tmp_path.rglob(".*"))
    run(Squares(), tmp_path, resume=True)
    run(Squares(), tmp_path / "undisturbed")
    for name in ("results.csv", "figure.svg", "figure.png", "table.md", "record.json"):
        undisturbed = (tmp_path / "undisturbed" / name).read_bytes()
        assert (tmp_path / name).read_bytes() == undisturbed


def test_runs_of_another_version_are_not_mixed(tmp_path, monkeypatch):
    run(Squares(), tmp_path, preset="smoke")
    now = {**packages.package_versions(), "infoflow-lens": "0.0.9"}
    monkeypatch.setattr(packages, "package_versions", lambda: now)
    with pytest.raises(InfoFlowError, match=r"versions \(infoflow-lens\) changed"):
        run(Squares(), tmp_path, preset="smoke", resume=True)


def test_two_sweeps_at_once_in_one_folder(tmp_path):
    (tmp_path / "seen").mkdir()
    with ThreadPoolExecutor(1) as other:
        first = other.submit(run, Squares(tmp_path / "seen", pause=0.2), tmp_path / "out")
        while not any((tmp_path / "seen").iterdir()):
            time.sleep(0.01)
        with pytest.raises(InfoFlowError, match="is being written by infoflow-lens study"):
            run(Squares(), tmp_path / "out", resume=True)
    assert first.result().verdict.passed


def test_a_scheduler_that_is_not_there_leaves_the_folder_free(tmp_path):
    for address in ("tcp://127.0.0.1:1", "nonsense://x", "127.0.0.1:notaport"):
        with pytest.raises(InfoFlowError, match="no dask scheduler at"):
            run(Squares(), tmp_path, scheduler=address)
    assert run(Squares(), tmp_path).verdict.passed


def test_absurd_counts_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(InfoFlowError, match="seeds is 1000000: expected 1 to 10000"):
        run(find_study("head_count"), tmp_path, seeds=10**6)
    with pytest.raises(InfoFlowError, match="jobs is 100000"):
        run(Squares(), tmp_path, jobs=10**5)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the cluster's own
def test_a_killed_worker_loses_nothing(tmp_path):
    """A scheduler and two workers on loopback; one is killed in the middle."""
    pytest.importorskip("distributed")
    run(Squares(), tmp_path / "alone")
    runs = tmp_path / "spread" / "runs"
    with losing_a_worker(lambda: runs.is_dir() and any(runs.iterdir())) as scheduler:
        run(Squares(pause=0.3), tmp_path / "spread", scheduler=scheduler)
    files = [tmp_path / name / "results.csv" for name in ("alone", "spread")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_studies_are_found_by_name_and_state_their_rule():
    for name, study in STUDIES.items():
        assert find_study(name) is study
        assert study.title
        assert study.rule()
        assert set(study.presets) >= {"smoke", "quick", "full"}
        for preset in study.presets:
            cases = study.cases(preset)
            assert cases
            assert json.loads(json.dumps(list(cases))) == list(cases)
    with pytest.raises(InfoFlowError, match="did you mean 'head_count'"):
        find_study("headcount")


class Together(Squares, TogetherStudy):
    """Squares whose seeds are measured in one call, of which one diverges."""

    architecture = None
    calls: ClassVar[list[tuple[int, ...]]] = []

    def memory(self, settings):
        return 0

    def measure_together(self, settings, seeds, device):
        self.calls.append((settings["number"], *seeds))
        return [
            None if (settings["number"], seed) == (2, 1) else self.measure(settings, seed, device)
            for seed in seeds
        ]


def test_seeds_of_a_configuration_may_run_together(tmp_path):
    """With the rows of seeds one by one; what is missing alone runs."""
    alone = run(Together(), tmp_path / "alone", preset="smoke", seeds=3).rows
    Together.calls.clear()
    both = run(Together(), tmp_path / "both", preset="smoke", seeds=3, together=True)
    assert Together.calls == [(2, 0, 1, 2), (3, 0, 1, 2)]
    assert both.n_diverged == 1
    kept = alone[alone["run"] != 1].reset_index(drop=True)
    found = both.rows[both.rows["status"] == "finished"].reset_index(drop=True)
    pd.testing.assert_frame_equal(found, kept, check_dtype=False)
    record = json.loads((tmp_path / "both" / "record.json").read_text())
    assert record["config"]["seeds_together"] is True
    record = json.loads((tmp_path / "alone" / "record.json").read_text())
    assert "seeds_together" not in record["config"]
    run(Together(), tmp_path / "both", preset="smoke", seeds=4, together=True, resume=True)
    assert len(Together.calls) == 2  # one new seed of each: measured as any run


def test_a_study_of_single_seeds_is_refused_together(tmp_path):
    with pytest.raises(InfoFlowError, match="the seeds of squares are measured one by one"):
        run(Squares(), tmp_path, together=True)
