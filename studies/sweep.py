"""Running a study: every configuration and seed, in parallel, resumable, with a verdict."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any

import matplotlib

from infoflow_lens.foundation.display import Displayed, begin_sentence
from infoflow_lens.foundation.documents import kind_by_signature
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import (
    atomic_path,
    read_signed,
    user_path,
    writable_folder,
    write_signed,
    write_text,
)
from infoflow_lens.foundation.lazy import pd
from infoflow_lens.foundation.memory import check_memory
from infoflow_lens.foundation.naming import nearest
from infoflow_lens.foundation.packages import versions_identity
from infoflow_lens.foundation.progress import progress_bar
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.runs.executor import Executor, Unit, choose_device
from infoflow_lens.runs.folder import RunFolder
from infoflow_lens.studies.claims import Verdict, Word, say_verdict, share_of_seeds
from infoflow_lens.studies.study import ABOUT, Row, Settings, Study, TogetherStudy
from infoflow_lens.training import TrainingDivergedError

_RUN, _RECORD = "infoflow-lens study run 2", "infoflow-lens study record 1"
TABLE = kind_by_signature("table of a study", "infoflow-lens study")
_WRITES = ("results.csv", "table.md", "figure.png", "figure.svg", "record.json", "statement.md")
_MOST_SEEDS = 10_000


@dataclass(frozen=True)
class Run:
    """One configuration with one seed.

    Attributes:
        index: its place in the sweep, by which results are ordered.
        settings: of the study's own.
        seed: of everything that is drawn.
    """

    index: int
    settings: Settings
    seed: int

    def key(self) -> str:
        """Return a name that tells it from every other run of a study."""
        text = json.dumps([dict(self.settings), self.seed], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class StudyResult(Displayed):
    """What a study found.

    Attributes:
        rows: the table of ``results.csv``.
        verdict: by the study's rule.
        n_diverged: runs whose training diverged; they have no numbers.
        out: the folder.
    """

    rows: "pd.DataFrame"
    verdict: Verdict
    n_diverged: int
    out: Path


def run_study(
    study: Study,
    out: str | os.PathLike[str],
    *,
    preset: str | None = None,
    seeds: int | None = None,
    jobs: int = 1,
    n_threads: int = 1,
    device: str = "cpu",
    resume: bool = False,
    scheduler: str | None = None,
    together: bool = False,
    progress: bool = True,
    again: str = "",
) -> StudyResult:
    """Run what is missing of a study, and write its results.

    Writes ``statement.md`` before the first run, ``results.csv`` as runs finish, in the order of
    the sweep, then ``table.md``, ``figure.png``, ``figure.svg`` and ``record.json``. Every finished
    run is a file of its own in ``runs/``, so that nothing is lost whatever stops the sweep. Numbers
    do not depend on `jobs`. With `together` all missing seeds of a
    configuration are one batched model, and their numbers are the same to rounding.

    Args:
        study: what to run.
        out: folder.
        preset: "smoke", "quick" or "full"; default, "quick", or the only one that there is.
        seeds: how many; default, the preset's.
        jobs: processes at a time.
        n_threads: of each run; with another number sums are rounded otherwise.
        device: where to train.
        resume: go on with what the folder holds.
        scheduler: address of a dask scheduler, whose workers run in place of local processes.
        together: train the seeds of a configuration together, which fills a GPU.
        progress: show a bar.
        again: the command that goes on, as messages name it; default, this call.

    Raises:
        InfoFlowError: for bad settings, seeds that a study cannot train together, without the
            packages that several processes (extra ``studies``) or a scheduler (``cluster``) need,
            runs that do not fit in memory, a folder with results of another study or preset, or one
            that holds results where `resume` was not asked for.
        InfoFlowError: if the scheduler or a worker is gone, or the disk is full; finished runs are
            kept.
        KeyboardInterrupt: when it is stopped, with what to do to go on.
    """
    if preset is None:
        preset = next(iter(study.presets)) if len(study.presets) == 1 else "quick"
    if preset not in study.presets:
        raise InfoFlowError(f"preset is {preset!r}{nearest(preset, study.presets)}")
    n_seeds = study.presets[preset] if seeds is None else seeds
    if not 1 <= n_seeds <= _MOST_SEEDS:
        raise InfoFlowError(f"seeds is {n_seeds}: expected 1 to {_MOST_SEEDS}")
    if together and not isinstance(study, TogetherStudy):
        raise InfoFlowError(
            f"together is asked for, but the seeds of {study.name} are measured one by one: "
            "expected a study that trains them together; leave it out"
        )
    again = again or f"run_study(..., {str(out)!r}, resume=True)"
    executor = Executor(jobs, scheduler, n_threads, again=again)
    executor.check("a study")
    out, cases = user_path(out), check_cases(study, preset)
    # seeds count fastest: run // n_seeds is the configuration, on which verdicts rely
    runs = [
        Run(index, settings, seed)
        for index, (settings, seed) in enumerate(
            (settings, seed) for settings in cases for seed in range(n_seeds)
        )
    ]
    # without the number of seeds, so that a sweep can go on with more of them
    identity = {
        "the study": study.name,
        "the preset": preset,
        "the study's cases": list(cases),
        **versions_identity(),
    }
    with RunFolder.open(out, f"infoflow-lens study {study.name}", _WRITES) as folder:
        folder.check(identity)
        if folder.identity is not None and not resume:
            raise InfoFlowError(
                f"{str(out)!r} holds results of this study: go on with --resume, or choose another "
                "folder"
            )
        kept = {run.index: _read_rows(out, run) for run in runs if folder.holds(_name(run))}
        missing = [run for run in runs if run.index not in kept]
        units = _units(missing, together)
        if scheduler is None and missing:  # else runs take the memory of other machines
            # seeds that are trained together take the memory of all of them
            needed = max(len(unit) * study.memory(unit[0].settings) for unit in units)
            check_memory(needed, device, jobs)
        # connected first: where no run can start, the folder stays free
        with (
            executor.start_workers(f"finished runs are kept in {str(out)!r}") as run_units,
            progress_bar(study.name, len(runs), progress, done=len(kept)) as advance,
        ):
            folder.claim(identity)
            write_statement(study, out)
            writable_folder(out / "runs")
            named = (Unit(_describe(unit), (study, unit, device)) for unit in units)
            for measured in run_units(measure_unit, named):
                for run, rows in measured:
                    write_signed(out / _name(run), _RUN, {"rows": rows})
                    kept[run.index] = _read_rows(out, run)
                    advance()
                _write_csv(out, _table(runs, kept))
        return _finish(study, out, runs, kept, preset, cases, together)


def _finish(
    study: Study,
    out: Path,
    runs: Sequence[Run],
    kept: Mapping[int, list[Row]],
    preset: str,
    cases: Sequence[Settings],
    together: bool,
) -> StudyResult:
    table = _table(runs, kept)
    _write_csv(out, table)
    measured = _table(runs, kept, "finished")
    if measured.empty:
        raise InfoFlowError(
            f"all {len(runs)} runs of {study.name} diverged: expected numbers; see results.csv"
        )
    sweep = Sweep(study, preset, cases, len(runs) // len(cases), table, measured)
    TABLE.write(out / "table.md", sweep.write_table())
    figure = study.figure(measured)
    for kind in ("png", "svg"):
        # without a date and random names, the same numbers give the same bytes
        with (
            atomic_path(out / f"figure.{kind}") as temporary,
            matplotlib.rc_context({"svg.hashsalt": study.name}),
        ):
            figure.savefig(
                temporary, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None
            )
    record = RunRecord(
        config={
            "study": study.name,
            "preset": preset,
            "seeds": sorted({run.seed for run in runs}),
            "cases": [dict(settings) for settings in cases],
            "verdict": asdict(sweep.verdict),
            **({"seeds_together": True} if together else {}),
        }
    )
    write_signed(out / "record.json", _RECORD, record.to_dict())
    return StudyResult(table, sweep.verdict, sweep.n_diverged, out)


def write_statement(study: Study, out: Path) -> None:
    """Write what the study states beforehand, as ``statement.md``."""
    if study.statement is not None:
        write_text(out / "statement.md", study.statement.text)


@dataclass(frozen=True, eq=False)
class Sweep:
    """All runs of a study by one preset, and what comes of them.

    Attributes:
        study, preset: what was run.
        cases: its configurations, in their order.
        n_seeds: how many runs each has.
        rows: of all runs, those that diverged too.
        finished: those with numbers.
    """

    study: Study
    preset: str
    cases: Sequence[Settings]
    n_seeds: int
    rows: "pd.DataFrame"
    finished: "pd.DataFrame"

    @property
    def n_diverged(self) -> int:
        """Runs whose training diverged."""
        return int(self.rows[self.rows["status"] == "diverged"]["run"].nunique())

    @cached_property
    def verdict(self) -> Verdict:
        """The verdict by the study's rule, with a sentence for runs that diverged.

        Without numbers of a case that the rule is about, it is "not passed".
        """
        study, rows, cases, n_seeds = self.study, self.rows, self.cases, self.n_seeds
        finished = rows["status"] == "finished"
        notes = [f"every run diverged with {_differing(case, cases)}" for case in self._lost]
        # claims about a configuration without numbers cannot be judged
        if any(map(study.judges, self._lost)):
            return Verdict(False, tuple(notes))
        verdict = study.verdict(rows[finished])
        reasons = list(verdict.reasons)
        diverged = set(rows[~finished]["run"])
        of_rule = {run for run in diverged if study.judges(cases[run // n_seeds])}
        if of_rule:
            about = "every run" if study.judges_every_run else "the others"
            reasons.append(
                f"{len(of_rule)} of {len(cases) * n_seeds} runs diverged and have no numbers: the "
                f"rule is about {about}"
            )
        passed = verdict.passed and not (of_rule and study.judges_every_run)
        return Verdict(passed, tuple(reasons), (*verdict.remarks, *notes))

    @property
    def has_verdict(self) -> bool:
        """Say whether there are numbers of all that the rule is about."""
        lost = self.finished.empty or any(map(self.study.judges, self._lost))
        return bool(self.study.claims()) and not lost

    @cached_property
    def _lost(self) -> Sequence[Settings]:
        """The configurations of which no seed has numbers."""
        finished = self.rows[self.rows["status"] == "finished"]
        kept = set(finished["run"] // self.n_seeds)
        return [case for index, case in enumerate(self.cases) if index not in kept]

    @cached_property
    def word(self) -> Word:
        """The word for the verdict: "undecided" without all numbers, or if seeds may say else."""
        if not self.has_verdict:
            return "undecided"
        # to judge every draw of the seeds takes longer than all else, so it is done when asked for
        share = share_of_seeds(self.study.claims(), self.finished, self.n_seeds)
        return say_verdict(self.verdict.passed, share)

    @property
    def finding(self) -> str:
        """Say what came, in a sentence; empty without a verdict."""
        return self.study.say_finding(self.finished) if self.has_verdict else ""

    def write_table(self) -> str:
        """Write ``table.md``: the question, what came, the verdict, the figure, the numbers."""
        study, verdict, finding = self.study, self.verdict, self.finding
        heading = (
            f"# {study.title}\n\n{study.source}. Preset {self.preset}, "
            f"{self.rows['run'].nunique()} runs, {self.n_seeds} "
            f"seed{'s' if self.n_seeds > 1 else ''} of each kind"
        )
        diverged = f", of which {self.n_diverged} diverged" if self.n_diverged else ""
        reasons = "\n".join(f"- {reason}" for reason in verdict.reasons)
        remarks = "\n".join(f"- {remark}" for remark in verdict.remarks)
        parts = [
            f"{heading}{diverged}.",
            *([f"{begin_sentence(finding)}."] if finding else []),
            f"**{begin_sentence(self.word)}**. The rule:",
            reasons,
            *(["Not judged:", remarks] if remarks else []),
            f"![{study.title}](figure.png)",
            study.table(self.finished),
        ]
        return "\n\n".join(parts) + "\n"


def _differing(case: Settings, cases: Sequence[Settings]) -> str:
    """Return the settings of a case that differ between cases, as JSON."""
    return json.dumps(
        {n: value for n, value in case.items() if any(c.get(n) != value for c in cases)}
    )


def _units(runs: Sequence[Run], together: bool) -> list[list[Run]]:
    """Group the runs that are computed in one call: each alone, or all of a configuration."""
    if not together:
        return [[run] for run in runs]
    of_cases: dict[str, list[Run]] = {}
    for run in runs:
        of_cases.setdefault(json.dumps(dict(run.settings), sort_keys=True), []).append(run)
    return list(of_cases.values())


def _describe(unit: Sequence[Run]) -> str:
    """Name the runs of a unit, for errors."""
    return f"run {', '.join(str(run.index) for run in unit)} ({dict(unit[0].settings)})"


def measure_unit(task: tuple[Study, Sequence[Run], str]) -> list[tuple[Run, list[Row]]]:
    """Measure runs of one configuration on a device.

    Args:
        task: the study, its runs with the same settings, and the device.

    Returns:
        Each run with its rows; one row with the status "diverged" for a training that diverged.

    Raises:
        InfoFlowError: for rows that are not plain numbers and texts.
    """
    study, runs, device = *task[:2], choose_device(task[2])
    measured: list[list[Row] | None]
    if len(runs) > 1:
        assert isinstance(study, TogetherStudy)
        seeds = [run.seed for run in runs]
        measured = study.measure_together(runs[0].settings, seeds, device)
    else:
        try:
            measured = [study.measure(runs[0].settings, runs[0].seed, device)]
        # a run that diverged is a result, too, which its row tells
        except TrainingDivergedError:
            measured = [None]
    return [(run, _about(study, run, rows)) for run, rows in zip(runs, measured, strict=True)]


def _about(study: Study, run: Run, rows: list[Row] | None) -> list[Row]:
    """Add run, status, seed and settings to the measured rows; one row for a run that diverged."""
    status = "diverged" if rows is None else "finished"
    about: Row = {"run": run.index, "status": status, "seed": run.seed}
    settings = {key: plain_cell(value) for key, value in run.settings.items()}
    if rows is None:
        return [{**about, **settings}]
    return [{**about, **settings, **row} for row in check_rows(study, rows)]


def check_cases(study: Study, preset: str) -> Sequence[Settings]:
    """Check the configurations of a preset, and return them.

    Raises:
        InfoFlowError: if there are none, one stands there twice, or one is no dict that JSON has;
            or if the study has no name or title.
    """
    for attribute in ("name", "title"):
        if not getattr(study, attribute, ""):
            raise InfoFlowError(
                f"{type(study).__name__} has no {attribute}: expected a text, such as "
                f'{attribute} = "..." in its class'
            )
    cases = study.cases(preset)
    whose = f"cases({preset!r}) of {study.name}"
    if isinstance(cases, (str, Mapping)) or not isinstance(cases, Sequence) or not cases:
        raise InfoFlowError(f"{whose} gives {cases!r}: expected a list of dicts, one at least")
    known: set[str] = set()
    for case in cases:
        try:
            # files of runs are named by a digest of it: two equal cases would share one
            text = json.dumps(dict(case), sort_keys=True)
        except (TypeError, ValueError) as error:
            raise InfoFlowError(
                f"{whose} gives {case!r}: expected a dict of plain numbers, texts and lists "
                f"({error})"
            ) from error
        if text in known:
            raise InfoFlowError(f"{whose} gives {case!r} twice: expected each once")
        known.add(text)
    return cases


def check_rows(study: Study, rows: Any) -> list[Row]:
    """Check what `measure` returns, and return it with plain Python numbers.

    Raises:
        InfoFlowError: if it is no list of dicts of numbers, or one names what every row has.
    """
    whose = f"measure() of {study.name}"
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise InfoFlowError(
            f"{whose} gives {rows!r:.100}: expected a list with a dict for each row, such as "
            '[{"nmse": 0.1}]'
        )
    plain: list[Row] = []
    for row in rows:
        clashes = sorted(set(row) & set(ABOUT))
        if clashes:
            raise InfoFlowError(
                f"{whose} gives {', '.join(clashes)}, which every row has from its run: expected "
                "other names"
            )
        # numbers of NumPy and PyTorch become Python's; arrays stay, and are refused below
        values = {n: v.item() if getattr(v, "ndim", 1) == 0 else v for n, v in row.items()}
        for name, value in values.items():
            if not isinstance(value, (Real, str, type(None))):
                raise InfoFlowError(
                    f"{whose} gives {value!r:.100} for {name!r}: expected a number or a text"
                )
        plain.append(values)
    return plain


def plain_cell(value: Any) -> Any:
    """Return a setting as a cell of a table."""
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value


# The folder


def _name(run: Run) -> str:
    """Return the file of a finished run in the folder."""
    return f"runs/{run.key()}.json"


def _read_rows(out: Path, run: Run) -> list[Row]:
    """Read the rows of a finished run.

    Raises:
        InfoFlowError: if its file is spoiled.
    """
    hint = "expected what this version wrote; delete it to run it again"
    rows = read_signed(out / _name(run), _RUN, "run of a study", hint).get("rows")
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and {"seed", "status"} <= {*row} for row in rows
    ):
        raise InfoFlowError(
            f"{str(out / _name(run))!r} is no run of this study ({rows!r:.100}): {hint}"
        )
    return rows


def _table(
    runs: Sequence[Run], kept: Mapping[int, list[Row]], status: str | None = None
) -> "pd.DataFrame":
    """Collect all rows, in the order of the sweep; with a status, those of such runs alone.

    Rows without numbers would make floats of integers, so they are left out before there is a
    table.
    """
    rows = [{**row, "run": run.index} for run in runs for row in kept.get(run.index, ())]
    return pd.DataFrame([row for row in rows if status in (None, row["status"])])


def _write_csv(out: Path, table: "pd.DataFrame") -> None:
    write_text(out / "results.csv", table.to_csv(index=False))
