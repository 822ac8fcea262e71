"""Repeat the output of a finished run without loading its model and its data.

A run that has ended well leaves ``finished.json``: its settings, the digests of the files that it
read, and what it printed. If the settings and the files are unchanged, the output is read from the
folder. In any other case the run starts as usual, and reports what is wrong.
"""

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import digest_of, read_signed, write_signed
from infoflow_lens.foundation.packages import package_versions
from infoflow_lens.foundation.settings import check
from infoflow_lens.runs.folder import RunFolder

FINISHED = "finished.json"
_SCHEMA = "infoflow-lens finished 1"
_MOST_FILES = 1000  # of a source; with more files the run starts as usual
_COLUMNS = 5  # of the table that a run prints
_SMALL = 2**24  # bytes; larger results are compared by their size, smaller ones by their digest


def write_output(
    folder: RunFolder,
    settings: Mapping[str, Any],
    sources: Mapping[str, Path],
    output: Mapping[str, Any],
) -> None:
    """Write what a second start needs; write nothing if a source is neither a file nor a folder.

    Args:
        folder: of the run, which has written all its other files.
        settings: of the run, as JSON-compatible values.
        sources: the files or folders that the run has read, by name.
        output: what the run prints at its end: "sentences", and the "title" and "rows" of a table.
    """
    digests = {name: file_digests(path) for name, path in sources.items()}
    if all(files is not None for files in digests.values()):
        values = {
            "asked": dict(settings),
            "sources": digests,
            "versions": package_versions(),
            "written": _sizes(folder),
            "said": dict(output),
        }
        write_signed(folder.path / FINISHED, _SCHEMA, values)


def read_output(
    path: Path, settings: Mapping[str, Any], sources: Mapping[str, Path], writes: Iterable[str] = ()
) -> dict[str, Any] | None:
    """Read the output of a finished run with the same settings and files; None without one.

    Args:
        path: the folder; nothing is written to it.
        settings, sources: as for :func:`write_output`.
        writes: files that the run must have written; another command with the same settings may
            not have written them.

    Returns:
        The output, as :func:`write_output` takes it.
    """
    if not (path / FINISHED).is_file():
        return None
    try:
        values = read_signed(path / FINISHED, _SCHEMA, "end of a run", "run the same again")
        folder = RunFolder(path)
        sizes = _sizes(folder)
        # large files are known by their size alone: reading them takes longer than an answer may
        small = [name for name, size in sizes.items() if size <= _SMALL]
        whole = all(folder.holds(name) for name in (FINISHED, *small))
    except InfoFlowError:
        return None  # an ordinary start says what is wrong
    output: dict[str, Any] | None = values.get("said")
    if not isinstance(values.get("sources"), dict) or not _is_printable(output):
        return None  # it is not of our making
    # the answer is that of these settings, versions and files only
    now = {"asked": dict(settings), "versions": package_versions(), "written": sizes}
    whole = whole and all(name in sizes for name in writes)
    if not whole or any(values.get(name) != value for name, value in now.items()):
        return None
    for name, source in sources.items():
        if values["sources"].get(name) != file_digests(source):
            return None
    return output


def file_digests(source: Path) -> dict[str, str] | None:
    """Return the digests of a file, or of all files of a folder, by name.

    Returns:
        None if the source is neither, or is a folder of more than 1000 files.
    """
    if source.is_file():
        return {source.name: digest_of(source)}
    if not source.is_dir():
        return None
    files = list(islice((p for p in source.rglob("*") if p.is_file()), _MOST_FILES + 1))
    if len(files) > _MOST_FILES:
        return None
    return {path.relative_to(source).as_posix(): digest_of(path) for path in sorted(files)}


def _sizes(folder: RunFolder) -> dict[str, int]:
    """Return the sizes of the run's own files that are there."""
    paths = {name: folder.path / name for name in folder.names() if name != FINISHED}
    return {name: path.stat().st_size for name, path in paths.items() if path.is_file()}


def _is_printable(output: Any) -> bool:
    """Say whether the output has the expected form and no control characters."""
    try:
        sentences, title = check(output["sentences"], tuple[str, ...], "sentences"), output["title"]
        rows = check(output["rows"], tuple[tuple[str, ...], ...], "rows")
    except (InfoFlowError, KeyError, TypeError):
        return False
    texts = [title, *sentences, *(cell for row in rows for cell in row)]
    return len({len(row) for row in rows} - {_COLUMNS}) == 0 and all(
        isinstance(text, str) and text.isprintable() for text in texts
    )
