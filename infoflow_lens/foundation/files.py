"""Files that are either whole or absent, and folders that one run writes to at a time."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

from safetensors import SafetensorError

from infoflow_lens.foundation.errors import InfoFlowError, explain_error

_DEEPEST = 250  # folders in one another


def user_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of what a user names, to be read or written, with ``~`` as in a shell.

    Raises:
        InfoFlowError: for what is no path, for more folders in one another than Python can make,
            and for a ``~`` or ``~name`` that has no home folder.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):  # of a path object that gives bytes, neither
        raise InfoFlowError(
            f"a {type(path).__name__} is no path: expected the name of a file or a folder"
        )
    if "\0" in text:
        raise InfoFlowError(f"{text[:200]!r} is no path (it holds a null byte): expected a name")
    found = os.path.expanduser(text)
    if found == text and text.startswith("~"):
        raise InfoFlowError(
            f"{text[:200]!r} is no path (there is no home folder of that name): expected ~ or "
            "~USER in front; a name that begins with '~' is written as ./~name"
        )
    if len(Path(found).parts) > _DEEPEST:
        raise InfoFlowError(
            f"{text[:60]!r}... is no path ({len(Path(found).parts)} folders in one another): "
            f"expected at most {_DEEPEST}"
        )
    # "./~x" is a name here, and stays one wherever it is looked at again
    return Path(found).absolute() if str(Path(found)).startswith("~") else Path(found)


def make_temporary_folder(prefix: str, inside: Path | None = None) -> Path:
    """Make a new folder, in a given one or where the system keeps what is temporary.

    Raises:
        InfoFlowError: where it cannot, such as when TMPDIR has gone since the process began.
    """
    try:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=inside))
    except OSError as error:
        raise InfoFlowError(
            f"no temporary folder can be made ({error}): expected one that may be written to; "
            "set TMPDIR to a folder with room, and start Python again"
        ) from error


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a new folder, which is removed with all that is in it when the block ends.

    Raises:
        InfoFlowError: as :func:`make_temporary_folder`.
    """
    folder = make_temporary_folder("infoflow-lens-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def temporary_name(target: Path) -> str:
    """Return a new name for what will take a file's place, legal wherever that of the file is."""
    return f".{target.name[:20]}.{uuid.uuid4().hex[:12]}.part"


@runtime_checkable
class Owner(Protocol):
    """Who owns what lies below a folder, and decides how it is written: see ``RunFolder``."""

    path: Path

    def temporary(self, target: Path) -> Path:
        """Return a path of its own for what will replace `target`, or an error."""
        ...

    def replace(self, temporary: Path, target: Path) -> None:
        """Put a finished file in its place."""
        ...


_owners: list[Owner] = []


@contextmanager
def let_own(owner: Owner) -> Iterator[None]:
    """Let the owner decide, in this block, how files below its folder are written."""
    _owners.append(owner)
    try:
        yield
    finally:
        _owners.remove(owner)


def owner_of(target: Path) -> Owner | None:
    """Return the owner of the innermost folder in which a file will lie; None where it has none."""
    owners = [owner for owner in _owners if target.is_relative_to(owner.path)]
    return max(owners, key=lambda owner: len(owner.path.parts), default=None)


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` when the block ends well.

    A process killed inside the block leaves `path` as it was. In the folder of a run the temporary
    file lies in the run's scratch folder, elsewhere beside `path`.

    Raises:
        InfoFlowError: where the file cannot be written, such as on a full disk; and for what the
            owner of the folder refuses (:func:`let_own`).
    """
    with name_file_in_errors(Path(path)), atomic_paths([Path(path)]) as (temporary,):
        yield temporary


@contextmanager
def atomic_paths(targets: Sequence[Path], removed: Sequence[Path] = ()) -> Iterator[list[Path]]:
    """Yield temporary paths that replace several files when the block ends well: all, or none.

    In the folder of a run they take their places one by one, as a run goes on after them.

    Args:
        targets: of one folder of a run, or outside of such folders; the last one comes last.
        removed: files that go when the others are in their places; none in the folder of a run.

    Raises:
        InfoFlowError: as :func:`atomic_path`.
    """
    owner = owner_of(targets[-1])
    temporaries = []
    try:
        for target in targets:
            with name_file_in_errors(target):
                if owner is None:
                    temporary = target.with_name(temporary_name(target))
                else:
                    temporary = owner.temporary(target)
                # permissions are those of an ordinary new file
                os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
                temporaries.append((temporary, _mode_of(target, temporary)))
        yield [temporary for temporary, _ in temporaries]
        for target, (temporary, mode) in zip(targets, temporaries, strict=True):
            with name_file_in_errors(target):
                with temporary.open("rb+") as file:
                    sync(file.fileno())
                # safetensors puts a file of its own in this one's place, for its owner alone
                if stat.S_IMODE(temporary.stat().st_mode) != mode:
                    with suppress(OSError):  # not every file system lets permissions change
                        temporary.chmod(mode)
        finished = [temporary for temporary, _ in temporaries]
        if owner is None:
            with name_file_in_errors(targets[-1]):
                _replace_together(finished, targets, removed)
        else:
            for temporary, target in zip(finished, targets, strict=True):
                owner.replace(temporary, target)
    finally:
        for temporary, _ in temporaries:
            temporary.unlink(missing_ok=True)


def _mode_of(target: Path, new: Path) -> int:
    """Return the permissions of the file that is replaced, or of a new one."""
    with suppress(OSError):
        before = target.lstat().st_mode
        if stat.S_ISREG(before):
            return stat.S_IMODE(before)
    return stat.S_IMODE(new.stat().st_mode)


def _replace_together(
    temporaries: Sequence[Path], targets: Sequence[Path], removed: Sequence[Path]
) -> None:
    """Put finished files in their places; what was there comes back if one of them cannot go."""
    # a single file takes its place at once, with no moment in which there is none
    if len(targets) == 1 and not removed:
        os.replace(temporaries[0], targets[0])
        return
    new = [target for target in targets if not os.path.lexists(target)]
    aside = {
        target: target.with_name(temporary_name(target))
        for target in (*targets, *removed)
        if target not in new
    }
    try:
        for target, before in aside.items():
            os.replace(target, before)
        for temporary, target in zip(temporaries, targets, strict=True):
            os.replace(temporary, target)
    except BaseException:
        # all or none: what was there before comes back
        for target in new:
            target.unlink(missing_ok=True)
        for target, before in aside.items():
            if before.exists():
                os.replace(before, target)
        raise
    for before in aside.values():
        before.unlink(missing_ok=True)


def sync(descriptor: int) -> None:
    """Wait until a file is on its disk, where its file system can say so.

    Raises:
        OSError: if it could not be written; not where files there cannot be synchronised (EINVAL).
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file to be read. A link is followed; a pipe or a device is never waited for.

    Raises:
        OSError: if it cannot be opened, or is no regular file.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    check_regular(path)  # before it is opened: to open some devices does something
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # it has changed in between
        os.close(descriptor)
        raise OSError(errno.EINVAL, _NOT_REGULAR, os.fspath(path))
    return os.fdopen(descriptor, "rb")


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise if a path leads to something else than a regular file, such as a pipe or a folder.

    Raises:
        OSError: if it does, or leads nowhere.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, _NOT_REGULAR, os.fspath(path))


_NOT_REGULAR = "it is no regular file"


def read_tensors(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the tensors of a safetensors file, also where a file system cannot map files (ENODEV).

    Raises:
        OSError, SafetensorError: if it cannot be read, or is no regular file.
    """
    from safetensors.torch import load, load_file  # torch is not needed to write a text

    check_regular(path)
    try:
        return load_file(path)
    except (OSError, SafetensorError, RuntimeError) as error:
        if os.strerror(errno.ENODEV) not in str(error):
            raise
        with open_regular(path) as file:
            return load(file.read())


@contextmanager
def name_file_in_errors(target: Path, verb: str = "write") -> Iterator[None]:
    """Turn errors of the system into an InfoFlowError that names the file and what was tried."""
    try:
        yield
    except (OSError, SafetensorError, MemoryError) as error:
        remedy = _REMEDIES.get(
            getattr(error, "errno", None) or 0,
            "expected room on the disk and a folder that you may use; make room, and run the same "
            "again: what the folder of a run holds is kept (a study goes on with --resume)",
        )
        raise InfoFlowError(
            f"cannot {verb} {str(target)!r} ({explain_error(error)}): {remedy}"
        ) from error


_REMEDIES = {
    errno.EXDEV: "expected all of a run on one disk, where files take each other's place whole; "
    "choose an output folder on that disk",
    errno.ENAMETOOLONG: "expected a name that the file system takes; choose a shorter one",
}


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path`, whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all; NaN and infinity are null."""
    write_text(path, json_text(value) + "\n")


def json_text(value: Any) -> str:
    """Return `value` as indented JSON; NaN and infinity, which JSON does not have, are null."""
    return json.dumps(_without_nan(value), indent=2, allow_nan=False)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        # infinity, too, differs from itself by NaN
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return value


def read_json(path: str | os.PathLike[str], what: str, hint: str) -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        path: of the file.
        what: what errors call what it holds, such as "record of a run".
        hint: the end of errors: what to do.

    Raises:
        InfoFlowError: if it cannot be read, or is no JSON object in UTF-8.
    """
    try:
        with open_regular(path) as file:
            value = json.loads(file.read().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not JSON, not UTF-8
        raise InfoFlowError(
            f"{str(path)!r} is no {what} ({explain_error(error)}): {hint}"
        ) from error
    if not isinstance(value, dict):
        raise InfoFlowError(
            f"{str(path)!r} is no {what} (it holds a {type(value).__name__}): {hint}"
        )
    return value


def write_signed(path: str | os.PathLike[str], schema: str, values: dict[str, Any]) -> None:
    """Write JSON with the name of its schema, and a digest by which a change is noticed."""
    write_text(path, sign(schema, values))


def sign(schema: str, values: dict[str, Any]) -> str:
    """Return the JSON that :func:`write_signed` writes.

    Raises:
        InfoFlowError: for values that JSON does not have.
    """
    return add_digest({"schema": schema, **values})


def add_digest(values: Mapping[str, Any]) -> str:
    """Return the JSON of values, with a digest by which a change is noticed; NaN becomes null.

    Raises:
        InfoFlowError: for values that JSON does not have.
    """
    held = _without_nan(dict(values))
    try:
        return (
            json.dumps({**held, "digest": digest_of_values(held)}, indent=2, allow_nan=False) + "\n"
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise InfoFlowError(
            f"what is to be saved is no JSON ({error}): expected numbers, texts, lists and "
            "mappings of Python; convert it first, such as float(value) of a number of NumPy"
        ) from error


def read_signed(path: str | os.PathLike[str], schema: str, what: str, hint: str) -> dict[str, Any]:
    """Read the values that :func:`write_signed` wrote; arguments as for :func:`read_json`.

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
    if digest != digest_of_values(values):
        raise InfoFlowError(
            f"{str(path)!r} is no {what} (it has changed since it was written): {hint}"
        )
    del values["schema"]
    return values


def has_digest(values: Any) -> bool:
    """Return whether what was read is what :func:`add_digest` wrote."""
    if not isinstance(values, dict) or "digest" not in values:
        return False
    return bool(
        values["digest"] == digest_of_values({k: v for k, v in values.items() if k != "digest"})
    )


def digest_of_values(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of values of JSON, whatever their order, as 16 hex digits."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def writable_folder(path: str | os.PathLike[str]) -> Path:
    """Make `path` a folder that can be written, and say so before any work starts.

    Raises:
        InfoFlowError: if it is empty or a file, or cannot be made or written; and as for
            :func:`user_path`.
    """
    if isinstance(path, str | os.PathLike) and not os.fspath(path):
        raise InfoFlowError("the output folder is '': expected a name; '.' is the current folder")
    folder = user_path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # a folder may exist, and not be writable: only writing tells
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise InfoFlowError(
            f"cannot write to the output folder {str(folder)!r} ({explain_error(error)}): "
            "expected a folder that you may write to; choose another folder"
        ) from error
    return folder


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a regular file, as 32 hex digits."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()[:32]
