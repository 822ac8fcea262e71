"""The page over all studies: its table is written from their rows, not by hand."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from infoflow_lens.experiments.studies import STUDIES
from infoflow_lens.experiments.study import Study, Verdict
from infoflow_lens.experiments.sweep import report_text, verdict_of, write_statement
from infoflow_lens.experiments.tables import markdown_table
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import write_text

if TYPE_CHECKING:
    import pandas as pd

BEGIN, END = "<!-- summary -->", "<!-- end of summary -->"
# folders within a study's: a run by settings that it no longer has, and one of preset full
EARLIER, FULL = "earlier", "full"


def summarise(folder: Path) -> None:
    """Write statements, tables and the summary of a folder that has a folder for each study.

    Each study's ``statement.md`` and ``table.md`` are written anew from its code and its
    ``results.csv`` (or ``results.csv.gz``), and the table of all studies into ``README.md``,
    between the lines ``<!-- summary -->`` and ``<!-- end of summary -->``. A run of preset full
    stands in the folder ``full`` of its study. A study whose settings changed after its run is said
    to wait for one.

    Raises:
        InfoFlowError: where there is no README.md with these lines, or a run that cannot be read.
    """
    page = folder / "README.md"
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise InfoFlowError(
            f"{str(page)!r} has no place for the summary: expected a line {BEGIN} and, behind it, "
            f"a line {END}"
        )
    for study in STUDIES.values():
        if not (folder / study.name).is_dir():
            continue
        write_statement(study, folder / study.name)
        for run in runs_of(study, folder):
            write_text(run / "table.md", _report(study, run))
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    write_text(page, f"{before}{BEGIN}\n{summary_table(folder)}\n{END}{after}")


def summary_table(folder: Path) -> str:
    """A row for each run: what theory says, what was measured, and the verdict by its rule."""
    rows = [row for study in STUDIES.values() for row in _summary_rows(study, folder)]
    return markdown_table(
        ["experiment", "what theory says", "what was measured", "by its rule"], rows
    )


def _summary_rows(study: Study, folder: Path) -> list[tuple[str, str, str, str]]:
    of_study = folder / study.name
    places = [of_study, *(path for path in [of_study / FULL] if path.is_dir())]
    return [_summary_row(study, folder, path) for path in places]


def _summary_row(study: Study, folder: Path, path: Path) -> tuple[str, str, str, str]:
    theory = study.statement.in_short if study.statement else study.title
    label = ", full" if path.name == FULL else ""
    if _has_run(study, path):
        run = recorded_run(study, path)
        seen = "seen" if run.verdict.passed else "**not seen**"
        link = f"[`{study.name}`]({path.relative_to(folder).as_posix()}/table.md){label}"
        return link, theory, study.measured(run.finished), seen
    link = f"[`{study.name}`]({study.name}/statement.md){label}"
    written = f" of {study.statement.written}" if study.statement else ""
    note = f"the statement{written} awaits its run"
    if not label and (folder / study.name / EARLIER).is_dir():
        note += f"; an [earlier run]({study.name}/{EARLIER}/table.md) had other settings"
    return link, theory, note, "awaits its run"


def runs_of(study: Study, folder: Path) -> list[Path]:
    """The folders of a study's runs by the settings that it has now: quick, then full.

    Args:
        study: the study.
        folder: of all studies.
    """
    of_study = folder / study.name
    return [path for path in (of_study, of_study / FULL) if _has_run(study, path)]


def _has_run(study: Study, path: Path) -> bool:
    record = path / "record.json"
    if not record.is_file():
        return False
    config = _config(record)
    if path.name == FULL and config["preset"] != FULL:
        return False
    now = json.loads(json.dumps(list(study.cases(str(config["preset"])))))
    return bool(config["study"] == study.name and config["cases"] == now)


def rows_of(folder: Path, status: str | None = "finished") -> "pd.DataFrame":
    """The rows of a run's folder; those of finished runs alone, unless told otherwise.

    Raises:
        InfoFlowError: where there is no results.csv.
    """
    import pandas as pd

    paths = sorted(folder.glob("results.csv*"))
    if not paths:
        raise InfoFlowError(f"{str(folder)!r} has no results.csv: expected the rows of a study")
    rows = pd.read_csv(paths[0], dtype={"table": str})
    return rows if status is None else rows[rows["status"] == status]


def _config(record: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads(record.read_text(encoding="utf-8"))["config"]
    return config


class RecordedRun(NamedTuple):
    """A run of a study, as its folder holds it.

    Attributes:
        preset: of the run.
        rows: of all its runs.
        finished: those with numbers.
        verdict: of the rows.
    """

    preset: str
    rows: "pd.DataFrame"
    finished: "pd.DataFrame"
    verdict: Verdict


def recorded_run(study: Study, path: Path) -> RecordedRun:
    """The run of a study that a folder holds."""
    config: Any = _config(path / "record.json")
    rows = rows_of(path, None)
    verdict = verdict_of(study, rows, config["cases"], len(config["seeds"]))
    return RecordedRun(config["preset"], rows, rows[rows["status"] == "finished"], verdict)


def _report(study: Study, path: Path) -> str:
    run = recorded_run(study, path)
    n_diverged = run.rows[run.rows["status"] == "diverged"]["run"].nunique()
    n_runs = run.rows["run"].nunique()
    return report_text(study, run.finished, run.verdict, run.preset, n_runs, n_diverged)
