"""Files that are either whole or absent, and folders that one run writes to at a time."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import stat
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from infoflow_lens.foundation.errors import InfoFlowError

PRIVATE = ".infoflow-lens"  # the folder in a run's folder whose contents are the run's alone
_SCRATCH, _LOCK, _WRITER = "scratch", "lock", "writer.json"
_LONGEST_LOCK = 4096
_held: list[Path] = []  # folders that this process writes to as a run, or for one


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` when the block ends well.

    A process killed inside the block leaves `path` as it was. In the folder of a run the temporary
    file lies in the run's scratch folder, elsewhere beside `path`.

    Raises:
        InfoFlowError: where the file cannot be written, such as on a full disk; and in the folder
            of a run, for a path that leads through a link.
    """
    target = Path(path)
    with naming_file(target):
        temporary = unused_path(target)
        # permissions are those of an ordinary new file; not every file system lets change them
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        try:
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def naming_file(target: Path) -> Iterator[None]:
    """Make what the system answers to a write an error that names the file."""
    try:
        yield
    except (OSError, SafetensorError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise InfoFlowError(
            f"cannot write {str(target)!r} ({reason}): expected room on the disk and a folder that "
            "you may write to; what was finished before is kept: make room, and run the same again "
            "(an experiment with --resume)"
        ) from error


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path`, whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all; NaN becomes null."""
    write_text(path, json.dumps(_without_nan(value), indent=2, allow_nan=False) + "\n")


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return value


def read_json(path: str | os.PathLike[str], what: str, hint: str) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        path: of the file.
        what: what errors call what it holds, such as "record of a run".
        hint: the end of errors: what to do.

    Raises:
        InfoFlowError: if it cannot be read, or is no JSON object in UTF-8.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not JSON, not UTF-8
        reason = str(error) or type(error).__name__
        raise InfoFlowError(f"{str(path)!r} is no {what} ({reason}): {hint}") from error
    if not isinstance(value, dict):
        raise InfoFlowError(
            f"{str(path)!r} is no {what} (it holds a {type(value).__name__}): {hint}"
        )
    return value


def write_signed(path: str | os.PathLike[str], schema: str, values: dict[str, Any]) -> None:
    """Write JSON with the name of its schema, and a digest by which a change is noticed."""
    signed = {"schema": schema, **_without_nan(values)}
    write_json(path, {**signed, "digest": _digest(signed)})


def read_signed(path: str | os.PathLike[str], schema: str, what: str, hint: str) -> dict[str, Any]:
    """The values that :func:`write_signed` wrote; arguments as for :func:`read_json`.

    Raises:
        InfoFlowError: if the file cannot be read, is of another schema or version, or has changed.
    """
    values = read_json(path, what, hint)
    found, digest = values.get("schema"), values.pop("digest", None)
    if found != schema:
        raise InfoFlowError(
            f"{str(path)!r} is no {what} of this version (its schema is {found!r}): expected "
            f"{schema!r}: {hint}"
        )
    if digest != _digest(values):
        raise InfoFlowError(
            f"{str(path)!r} is no {what} (it has changed since it was written): {hint}"
        )
    del values["schema"]
    return values


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def writable_folder(path: str | os.PathLike[str]) -> Path:
    """Make `path` a folder that can be written, and say so before any work starts.

    Raises:
        InfoFlowError: if it is empty or a file, or cannot be made or written.
    """
    if not os.fspath(path):
        raise InfoFlowError("the output folder is '': expected a name; '.' is the current folder")
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise InfoFlowError(
            f"cannot write to the output folder {str(folder)!r} ({reason}): "
            "expected a folder that you may write to; choose another folder"
        ) from error
    return folder


@contextmanager
def locked(path: str | os.PathLike[str], what: str) -> Iterator[Path]:
    """A writable folder that no other run writes to for the length of a block.

    The system gives the lock back when the process ends, however it ends. Where a file system has
    no such locks, a file says that the folder is taken; one that a killed run of this machine left
    is noticed. What dead runs have left unfinished in their scratch folder is removed; nothing
    else is.

    Args:
        path: the folder; made if it is not there.
        what: what writes, as others are told.

    Raises:
        InfoFlowError: if another run holds it, with its name, process and machine; if the folder
            cannot be written; or if links stand where the run's own files belong.
    """
    folder = writable_folder(path)
    private = folder / PRIVATE
    lock, writer = FileLock(private / _LOCK), private / _WRITER
    try:
        no_links(folder, private / _LOCK)
        no_links(folder, private / _SCRATCH)
        private.mkdir(exist_ok=True)
        _check_lock(private / _LOCK)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a file system without locks: said above
            lock.acquire(timeout=0)
    except Timeout as error:
        raise InfoFlowError(
            f"{str(folder)!r} is being written by {_named_in(writer)}: expected one run at a time "
            "in a folder; wait until it ends, or choose another folder"
        ) from error
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InfoFlowError(
            f"{str(folder)!r} cannot be locked ({reason}): expected a folder that you may "
            "write to; choose another folder"
        ) from error
    try:
        shutil.rmtree(private / _SCRATCH, ignore_errors=True)
        with writing_in(folder):
            about = {"what": what, "process": os.getpid(), "machine": socket.gethostname()}
            write_json(writer, about)
            yield folder
    finally:
        shutil.rmtree(private / _SCRATCH, ignore_errors=True)
        # while the lock is held: who opens the file from now on finds another one, and who has it
        # open already is told by filelock that it is gone
        with suppress(OSError):
            writer.unlink(missing_ok=True)
            (private / _LOCK).unlink(missing_ok=True)
        lock.release()
        with suppress(OSError):
            private.rmdir()


def _check_lock(path: Path) -> None:
    """Refuse what is no lock of ours, as opening it would empty it.

    Raises:
        InfoFlowError: for a file that holds something, or that has other names.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    # a lock without the system's help holds the process and the machine in a line or two
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or found.st_size > _LONGEST_LOCK:
        raise InfoFlowError(
            f"{str(path)!r} is no lock of a run: expected a small file with one name; move it "
            "away, or choose another folder"
        )


def no_links(folder: Path, path: Path) -> None:
    """Refuse a path whose parts below a folder are links, by which a run would leave its folder.

    Raises:
        InfoFlowError: naming the link.
    """
    place = folder
    for name in path.relative_to(folder).parts:
        place = place / name
        if place.is_symlink():
            raise InfoFlowError(
                f"{str(place)!r} is a link: expected the run's own files in its folder, where no "
                "link is followed; replace it by what it leads to, or choose another folder for "
                "the run"
            )


@contextmanager
def writing_in(folder: Path) -> Iterator[None]:
    """In this block files below a folder are written by way of its scratch folder.

    For the run that holds the lock of the folder, and for its workers.
    """
    _held.append(folder)
    try:
        yield
    finally:
        _held.remove(folder)


def unused_path(target: Path) -> Path:
    """A path for what will replace `target`: in the scratch folder of the run, or beside it.

    Raises:
        InfoFlowError: where links lead out of the run's folder, or it cannot be written.
    """
    with naming_file(target):
        return _scratch_for(target) / f".{target.name}.{uuid.uuid4().hex[:12]}.part"


def _scratch_for(target: Path) -> Path:
    around = [folder for folder in _held if target.is_relative_to(folder)]
    if not around:
        return target.parent
    folder = max(around, key=lambda path: len(path.parts))
    no_links(folder, target)
    return scratch_of(folder)


def scratch_of(folder: Path) -> Path:
    """The scratch folder of a run's folder, which is swept when another run begins or this ends."""
    scratch = folder / PRIVATE / _SCRATCH
    no_links(folder, scratch)
    scratch.mkdir(parents=True, exist_ok=True)
    return scratch


def _named_in(writer: Path) -> str:
    try:
        about = read_json(writer, "lock", "")
        return f"{about['what']}, process {about['process']} on {about['machine']}"
    except (InfoFlowError, KeyError):
        return "another run"
