"""The page of all studies, whose table is made from their rows."""

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from gzip import GzipFile
from io import BytesIO
from pathlib import Path
from typing import Any

from infoflow_lens.foundation.display import begin_sentence
from infoflow_lens.foundation.documents import Document, kind_by_signature
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import name_file_in_errors, open_regular, read_json, user_path
from infoflow_lens.foundation.lazy import pd
from infoflow_lens.studies.claims import Numbers, deciding_number
from infoflow_lens.studies.language_model.card import comparison, read_models
from infoflow_lens.studies.pages import cell_of, page_templates, render_page
from infoflow_lens.studies.papers import STUDIES
from infoflow_lens.studies.papers.head_count import join_paper_numbers
from infoflow_lens.studies.papers.rows import best_runs, compare_with_enough, has_enough_heads
from infoflow_lens.studies.papers.token_models import epochs_until, last_epochs
from infoflow_lens.studies.registry import LANGUAGE_MODEL_STUDIES, STUDY_KINDS
from infoflow_lens.studies.study import Study
from infoflow_lens.studies.sweep import TABLE, Sweep, plain_cell
from infoflow_lens.studies.tables import markdown_table

BEGIN, END = "<!-- summary -->", "<!-- end of summary -->"
WRITTEN = "<!-- written by infoflow-lens study --summary -->"  # as which a page begins
EARLIER = "earlier"  # the folder of a run by settings that a study no longer has
# columns in which rows may differ from the settings: a run has its own learning rate in each
# epoch, and its own number of states where sets leave some out
_MEASURED = ("lr", "n_states")
# what templates can make of rows
_OF_ROWS: Mapping[str, Any] = {
    function.__name__: function
    for function in (
        compare_with_enough,
        join_paper_numbers,
        best_runs,
        epochs_until,
        has_enough_heads,
        last_epochs,
    )
}
_SIGNED = kind_by_signature("page of infoflow-lens study --summary", "infoflow-lens study page")
_PAGE = replace(
    _SIGNED, is_ours=lambda path: _text_of(path).strip() == WRITTEN or _SIGNED.is_ours(path)
)
_README = Document("page with a place for the summary", lambda path: BEGIN in _text_of(path))
_MOST_ROWS = 2**28  # bytes
_LONGEST_CELL = 120
_RUN_AGAIN = "expected what `infoflow-lens study` wrote; run the study again"


def summarise(folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write tables and pages of a folder that has a folder for each study.

    Each study's ``table.md`` is written anew from its code and its
    ``results.csv`` (or ``results.csv.gz``), and the table of all studies into ``README.md``,
    between the lines ``<!-- summary -->`` and ``<!-- end of summary -->``. The templates of pages
    belong to the package, and so does what they say: a page is filled from its template only where
    one that this function wrote stands already, or the line :data:`WRITTEN` alone. More runs of a
    study stand in folders within its own, each named by its preset, as ``full``. A study whose
    settings changed after its run is said to wait for one. Studies of language models have the
    folder ``language_model``, where one study may have several runs.

    Args:
        folder: the folder of all studies. It holds rows, records and pages; nothing in it is run.
        overwrite: whether a table or a page that was edited, or that no study wrote, may be
            replaced, too.

    Raises:
        InfoFlowError: where there is no README.md with these lines, a run that cannot be read, or
            another file in the place of a table.
    """
    folder = user_path(folder)
    # all of it before anything is written
    rows, pages, runs = [], {}, {}
    for study in STUDIES.values():
        for path in _folders_of(study, folder):
            run = read_run(study, path) if _has_run(study, path) else None
            if run is not None:
                runs[path] = run
                with _name_rows_in_errors(path):
                    pages[path / "table.md"] = run.write_table()
            rows.append(_summary_row(study, folder, path, run))
    summary = markdown_table(
        ["study", "what theory says", "what came", "nearest to its bound", "by its rule"], rows
    )
    for path in language_model_runs(folder):
        study = LANGUAGE_MODEL_STUDIES[_config(path / "record.json")["study"]]()
        runs[path] = read_run(study, path)
        with _name_rows_in_errors(path):
            pages[path / "table.md"] = runs[path].write_table()
    # pages quote the tables of their runs, which are made before
    for name in page_templates():
        if _stands(folder / name):
            pages[folder / name] = f"{_page(name, folder, pages, runs)}\n"
    page = folder / "README.md"
    # README.md is a page of ours where it has a template that is in use;
    # else it is the user's, with a place for the table
    of_readme = _PAGE if page in pages else _README
    pages[page] = _insert_summary(page, pages.get(page), summary)
    kinds = {path: TABLE if path.name == "table.md" else _PAGE for path in pages}
    kinds[page] = of_readme
    for path in pages:
        kinds[path].check(path, overwrite=overwrite)
    for path, content in pages.items():
        kinds[path].write(path, content, overwrite=overwrite)


def _stands(page: Path) -> bool:
    """Return whether there is a page that `study --summary` writes, edited or not."""
    try:
        text = _text_of(page)
    except OSError:
        return False
    return WRITTEN in text or f"<!-- {_SIGNED.mark} " in text


def _text_of(page: Path) -> str:
    with open_regular(page) as file:
        return file.read().decode("utf-8", errors="replace")


def _insert_summary(page: Path, text: str | None, summary: str) -> str:
    """Return the text of a page, by default what stands in it now, with the table in its place.

    Raises:
        InfoFlowError: if it has no place for the table, or is not UTF-8.
    """
    if text is None:
        text = ""
        if os.path.lexists(page):
            with name_file_in_errors(page, "read"):
                text = _text_of(page)
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise InfoFlowError(
            f"{str(page)!r} has no place for the summary: expected a line {BEGIN} and, behind it, "
            f"a line {END}"
        )
    # what is not UTF-8 was read as this sign, and would be written back as it
    if "\ufffd" in text:
        raise InfoFlowError(f"{str(page)!r} is not UTF-8: expected a page in it; convert the page")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n{summary}\n{END}{after}"


def language_model_runs(folder: Path) -> list[Path]:
    """Return the folders of runs of language-model studies below the folder of all studies."""
    return [path.parent for path in sorted((folder / "language_model").glob("*/record.json"))]


def _page(
    name: str,
    folder: Path,
    pages: Mapping[Path, str],
    runs: Mapping[Path, Sweep],
) -> str:
    """Return a page filled from the runs in the folders beside it, and their tables.

    Args:
        name: of the page, by its path below the folder of all studies.
        folder: of all studies.
        pages: what will be written, by path.
        runs: those that are read already, by folder.
    """
    beside = (folder / name).parent

    def table(run: str) -> str:
        return pages[beside / run / "table.md"]

    def section(run: str, heading: str) -> str:
        """Return what a run's table.md has below a heading."""
        text = table(run).partition(f"\n### {heading}\n")[2]
        if not text:
            raise KeyError(f"{heading} in table.md of {run}")
        # up to the next heading, or the next line in bold
        return re.split(r"\n\n(?:### |\*\*)", text)[0].strip()

    # a run of its own folder, or one that another page has
    @cache
    def find_run(run: str) -> Sweep:
        if beside / run in runs:
            return runs[beside / run]
        study = STUDY_KINDS[_config(beside / run / "record.json")["study"]]()
        return read_run(study, beside / run)

    def numbers(run: str, place: int) -> Numbers:
        """Return the numbers of a claim of a study."""
        recorded = find_run(run)
        return recorded.study.claims()[place].numbers(recorded.finished)

    def holds(run: str, place: int, label: str) -> bool:
        """Say whether a claim of a study holds for what one of its numbers is of."""
        return find_run(run).study.claims()[place].holds(numbers(run, place)[label])

    return render_page(
        name,
        {
            "rows": cache(lambda run: rows_of(beside / run)),
            "verdict": lambda run: find_run(run).verdict,
            "seen": lambda run: f"**{begin_sentence(find_run(run).word)}**",
            "passed": lambda run: _say_outcome(find_run(run)),
            "numbers": numbers,
            "holds": holds,
            "models": lambda: comparison(read_models(beside / "models")),
            "section": section,
            "cell": lambda run, column, *first: cell_of(table(run), column, *first),
            "statements": [study.statement.text for study in STUDIES.values() if study.statement],
            **_OF_ROWS,
        },
    )


def _say_outcome(run: Sweep) -> str:
    word = "passed" if run.verdict.passed else "not passed"
    return f"{word} (*undecided*: by other draws of its seeds)" if run.word == "undecided" else word


def _summary_row(study: Study, folder: Path, path: Path, run: Sweep | None) -> tuple[str, ...]:
    """Return what theory says, what came, the number nearest to its bound, and the verdict."""
    theory = study.statement.summary if study.statement else study.title
    # the run in the study's own folder needs no name, others have their preset's
    label = "" if path == folder / study.name else f", {path.name}"
    if run is not None:
        link = f"[`{study.name}`]({path.relative_to(folder).as_posix()}/table.md){label}"
        if not run.has_verdict:
            return link, _cell(theory), _cell(run.verdict.reasons[0]), "", run.word
        number, bound = deciding_number(study.claims(), run.finished)
        return link, _cell(theory), _cell(run.finding), _cell(f"{number}, for {bound}"), run.word
    link = f"[`{study.name}`]({study.name}/statement.md){label}"
    note = "the statement awaits its run"
    if not label and (folder / study.name / EARLIER).is_dir():
        note += f"; an [earlier run]({study.name}/{EARLIER}/table.md) had other settings"
    return link, _cell(theory), note, "", "awaits its run"


def _cell(text: str) -> str:
    return text if len(text) <= _LONGEST_CELL else f"{text[: _LONGEST_CELL - 2].rstrip()} .."


def runs_of(study: Study, folder: Path) -> list[Path]:
    """Return the folders of a study's runs by its present settings: its own, then by preset.

    Args:
        study: the study.
        folder: of all studies.
    """
    return [path for path in _folders_of(study, folder) if _has_run(study, path)]


def _folders_of(study: Study, folder: Path) -> list[Path]:
    """Give the folder of a study, with or without a run, and those in it that a preset names."""
    of_study = folder / study.name
    of_presets = [of_study / preset for preset in study.presets]
    return [of_study, *(path for path in of_presets if path.is_dir())]


def _has_run(study: Study, path: Path) -> bool:
    record = path / "record.json"
    if not record.is_file():
        return False
    config = _config(record)
    if config["study"] != study.name or config["preset"] not in study.presets:
        return False
    if path.name != study.name and config["preset"] != path.name:
        return False
    # as the record has it: tuples have become lists in JSON
    now = json.loads(json.dumps(list(study.cases(config["preset"]))))
    return bool(config["cases"] == now)


def rows_of(folder: Path, status: str | None = "finished") -> "pd.DataFrame":
    """Read the rows of a run from its folder.

    Args:
        folder: of the run.
        status: rows with this status alone; None for all rows.

    Raises:
        InfoFlowError: where there is no results.csv, or one that is not of a study.
    """
    path = _rows_path(folder)
    try:
        # the published tables of a study have numbers as names
        rows = pd.read_csv(BytesIO(_unpack(path)), dtype={"table": str})
    # pandas's errors are ValueErrors
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise InfoFlowError(f"{str(path)!r} has no rows ({error}): {_RUN_AGAIN}") from error
    for name in ("run", "seed", "status"):
        if name not in rows:
            raise InfoFlowError(f"{str(path)!r} has no column {name!r}: {_RUN_AGAIN}")
    return rows if status is None else rows[rows["status"] == status]


def _unpack(path: Path) -> bytes:
    """Return what a file of rows holds, unpacked.

    Raises:
        OSError, EOFError, ValueError: for a file that is not whole, or far larger than rows are.
    """
    with open_regular(path) as file:
        # one byte more than is allowed, by which a larger file is told
        content = (GzipFile(fileobj=file) if path.suffix == ".gz" else file).read(_MOST_ROWS + 1)
    if len(content) > _MOST_ROWS:
        raise ValueError(f"it holds more than {_MOST_ROWS:,} bytes")
    return content


def _rows_path(folder: Path) -> Path:
    paths = [folder / name for name in ("results.csv", "results.csv.gz")]
    found = [path for path in paths if path.is_file()]
    if not found:
        raise InfoFlowError(f"{str(folder)!r} has no results.csv: expected the rows of a study")
    return found[0]


def _config(record: Path) -> dict[str, Any]:
    """Return the settings of a recorded run.

    Raises:
        InfoFlowError: if the file is not the record of a study.
    """
    values = read_json(record, "record of a study", _RUN_AGAIN).get("config")
    config: dict[str, Any] = values if isinstance(values, dict) else {}
    expected: Mapping[str, type] = {"study": str, "preset": str, "seeds": list, "cases": list}
    for name, kind in expected.items():
        value = config.get(name)
        if not isinstance(value, kind) or (name == "seeds" and not value):
            raise InfoFlowError(
                f"{str(record)!r} is no record of a study (its {name} is {value!r}): {_RUN_AGAIN}"
            )
    return config


def _check_rows(path: Path, rows: "pd.DataFrame", config: Mapping[str, Any]) -> None:
    """Refuse rows that are not those of the recorded settings.

    Raises:
        InfoFlowError: naming the run and the column.
    """
    # the rows that the recorded settings give, by the number of the run
    cases, seeds = config["cases"], config["seeds"]
    expected = {
        index * len(seeds) + place: {**case, "seed": seed}
        for index, case in enumerate(cases)
        for place, seed in enumerate(seeds)
    }
    # pandas makes floats of a column with an empty cell, and texts of one with a text
    if rows["run"].dtype.kind != "i":
        raise InfoFlowError(f"{str(path)!r} has a run that is no number: {_RUN_AGAIN}")
    found = set(rows["run"])
    if found != set(expected):
        odd = min(found ^ set(expected))
        raise InfoFlowError(
            f"{str(path)!r} has {'no rows' if odd in expected else 'rows'} of run {odd}: expected "
            f"runs 0 to {len(expected) - 1}, as record.json has {len(cases)} cases and "
            f"{len(seeds)} seeds; {_RUN_AGAIN}"
        )
    unknown = set(rows["status"]) - {"finished", "diverged"}
    if unknown:
        raise InfoFlowError(
            f"{str(path)!r} has the status {unknown.pop()!r}: expected 'finished' or 'diverged'; "
            f"{_RUN_AGAIN}"
        )
    if rows.duplicated().any():
        run = rows["run"][rows.duplicated()].iloc[0]
        raise InfoFlowError(f"{str(path)!r} has a row of run {run} twice: {_RUN_AGAIN}")
    # columns that a row was measured in are not settings
    settings = dict.fromkeys(name for case in cases for name in case)
    names = ["seed", *(name for name in settings if name not in _MEASURED)]
    missing = [name for name in names if name not in rows]
    if missing:
        raise InfoFlowError(f"{str(path)!r} has no column {missing[0]!r}: {_RUN_AGAIN}")
    # a run can have many rows of the same settings, which are compared once
    for row in rows.drop_duplicates(["run", *names]).to_dict("records"):
        for name in names:
            value = expected[row["run"]].get(name)
            if not _same(row[name], plain_cell(value)):
                raise InfoFlowError(
                    f"{str(path)!r}: {name} of run {row['run']} is {row[name]!r}, but "
                    f"{value!r} in record.json: {_RUN_AGAIN}"
                )


def _same(cell: Any, value: Any) -> bool:
    """Say whether a cell of results.csv equals a setting of the record."""
    if value in (None, ""):
        return bool(cell != cell)  # NaN
    if str(cell) == str(value):
        return True
    try:
        # one text in a column makes texts of its numbers, and [4] is 4 in a column without texts
        return float(cell) == float(value)
    except (TypeError, ValueError):
        return False


def read_run(study: Study, path: Path) -> Sweep:
    """Read the runs of a study that a folder holds.

    Raises:
        InfoFlowError: if they cannot be read, or rows are not by the settings of the record.
    """
    config = _config(path / "record.json")
    rows, n_seeds = rows_of(path, None), len(config["seeds"])
    _check_rows(_rows_path(path), rows, config)
    finished = rows[rows["status"] == "finished"]
    run = Sweep(study, config["preset"], config["cases"], n_seeds, rows, finished)
    with _name_rows_in_errors(path):
        _ = run.verdict  # rows that cannot be judged are refused here
    return run


@contextmanager
def _name_rows_in_errors(path: Path) -> Iterator[None]:
    """Name the file whose measured columns a study cannot take."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise InfoFlowError(
            f"{str(_rows_path(path))!r} cannot be judged ({type(error).__name__}: {error}): "
            f"{_RUN_AGAIN}"
        ) from error
