"""The folder of a run: who owns what lies in it, and whether a run may go on there.

Everything below ``--out`` that a run writes stands in its manifest, ``manifest.jsonl``: first what
the run is, then a line with the digest of each file. What the manifest does not name is somebody
else's, and is neither read, replaced nor removed.

A run that has ended well leaves ``finished.json``: its settings, the digests of the files that it
read, and what it printed. If the settings and the files are unchanged, the output is read from the
folder. In any other case the run starts as usual, and reports what is wrong.
"""

import errno
import json
import os
import shutil
import socket
import stat
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path, PureWindowsPath
from typing import Any

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from infoflow_lens.foundation.display import brief
from infoflow_lens.foundation.errors import InfoFlowError, explain_error
from infoflow_lens.foundation.files import (
    digest_of,
    digest_of_values,
    let_own,
    name_file_in_errors,
    open_regular,
    read_json,
    read_signed,
    sync,
    temporary_name,
    user_path,
    writable_folder,
    write_signed,
)
from infoflow_lens.foundation.packages import package_versions
from infoflow_lens.foundation.settings import check

MANIFEST = "manifest.jsonl"
PRIVATE = ".infoflow-lens"  # the folder for files that are needed only during a run
_SCRATCH, _LOCK, _WRITER = "scratch", "lock", "writer.json"
_SCHEMA = "infoflow-lens run 1"
_LONGEST_LOCK = 4096
_READ_BY_PEOPLE = (".html", ".csv", ".md", ".svg", ".png")  # of which an edit is seen at once
# what file systems answer that have no locks, or whose server of locks is away
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO)


class RunFolder:
    """The folder that one run writes to, in the run's process or in one of its workers.

    While :func:`~infoflow_lens.foundation.files.let_own` holds it, every file that is written
    below it comes from its scratch folder, takes the place of none but the run's own, and stands in
    the manifest.

    Args:
        path: the folder, which is there.

    Attributes:
        path: the folder.
        identity: what the numbers depend on, by what errors call it; None where no run has said it.

    Raises:
        InfoFlowError: for a manifest that is spoiled.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.identity: dict[str, Any] | None = None
        self._digests: dict[str, list[str]] = {}
        self._read_position = (-1, 0)  # the manifest's inode, and how far it was read
        self._seen: set[str] = set()  # files that were unchanged when this run first met them
        self._read()

    @classmethod
    @contextmanager
    def open(
        cls, path: str | os.PathLike[str], what: str, writes: Iterable[str] = ()
    ) -> Iterator["RunFolder"]:
        """Open a folder to which no other run writes for the length of a block.

        The system gives the lock back when the process ends, however it ends. Where a file system
        has no such locks, a file says that the folder is taken; one that a killed run of this
        machine left is noticed. What dead runs have left unfinished in their scratch folder is
        removed, and nothing else. A folder that was made for a run which wrote nothing is removed.

        Args:
            path: the folder; made if it is not there.
            what: what writes, as others are told.
            writes: names of files that the run will write; refused now where they are not its own.

        Raises:
            InfoFlowError: if another run holds it, with its name, process and machine; if the
                folder cannot be written; if it holds files of others, or of earlier versions, or
                links, in the places of the run's own.
        """
        with ExitStack() as stack:
            place = user_path(path)
            # folders that did not exist go again, if the run leaves nothing in them
            for parent in reversed((place, *place.parents)):
                if not parent.exists():
                    stack.callback(_remove_if_empty, parent)
            writable_folder(path)
            stack.enter_context(_lock_folder(place, what))
            folder = cls(place)
            folder._rewrite()
            folder._check_own(folder.path / name for name in writes)
            folder._refuse_edits(n for n in folder.names() if n.endswith(_READ_BY_PEOPLE))
            finished = False
            try:
                with let_own(folder):
                    yield folder
                finished = True
            # also after an error: what is finished can be gone on from
            finally:
                with suppress(OSError):
                    folder._rewrite(finished)

    # The identity of the run

    def check(self, identity: Mapping[str, Any]) -> None:
        """Refuse a folder with results of a run with another identity.

        Args:
            identity: what is known of this run so far, by what errors call it.

        Raises:
            InfoFlowError: naming what differs.
        """
        if self.identity is None:
            return
        from infoflow_lens.foundation.record import is_same  # which loads torch

        for what, now in json.loads(json.dumps(dict(identity))).items():
            was = self.identity.get(what)
            if is_same(was, now):
                continue
            if isinstance(was, dict) and isinstance(now, dict):  # name the entry that differs
                key = next(key for key in [*now, *was] if was.get(key) != now.get(key))
                what, was, now = f"{what} ({key})", was.get(key), now.get(key)
            raise InfoFlowError(
                f"{str(self.path)!r} holds results of another run: {what} changed since it "
                f"was written ({brief(was)} -> {brief(now)}); expected the same, to go on; choose "
                "another folder"
            )

    def claim(self, identity: Mapping[str, Any]) -> None:
        """Write the identity of the run to the manifest; refuse the folder of another run.

        Args:
            identity: all that the numbers depend on, by what errors call it.

        Raises:
            InfoFlowError: as :meth:`check`.
        """
        # what the earlier run named and this one does not counts as changed
        self.check({**dict.fromkeys(self.identity or ()), **identity})
        if self.identity is None:
            self.identity = json.loads(json.dumps(dict(identity)))
            self._rewrite(begin=True)

    # The files of the run

    def holds(self, *names: str) -> bool:
        """Say whether the files of a result exist; refuse files that this run has not written.

        Args:
            names: of the files; without the first one there is no result.

        Raises:
            InfoFlowError: naming a file that has changed since, is of another run, or is a link.
        """
        # lexists, so that a link to nothing counts as a file and is refused
        if not os.path.lexists(self.path / names[0]):
            return False
        for name in names:
            path = self.path / name
            refuse_links(self.path, path)
            if not os.path.lexists(path):
                raise InfoFlowError(
                    f"{str(path)!r} is gone, and belongs to {names[0]}: expected all that this run "
                    f"has written; delete {' and '.join(names)} to make it again"
                )
            with name_file_in_errors(path, "read"):
                digest = digest_of(path)
            if digest not in self._digests_of(name):
                raise InfoFlowError(
                    f"{str(path)!r} is not what this run has written (it has changed since, or is "
                    f"of another run): expected the run's own; delete {' and '.join(names)} to "
                    "make it again"
                )
        return True

    def remove(self, *names: str) -> None:
        """Remove files of the run, if they are there and its own."""
        for name in names:
            if self._digests_of(name):
                refuse_links(self.path, self.path / name)
                with name_file_in_errors(self.path / name):
                    (self.path / name).unlink(missing_ok=True)

    def subfolder(self, name: str) -> Path:
        """Return the path of a subfolder whose files have an owner of their own, as a training has.

        Raises:
            InfoFlowError: if it is a link.
        """
        refuse_links(self.path, self.path / name)
        return self.path / name

    def names(self, below: str = "") -> list[str]:
        """Return the files of the run, all or those in one of its folders."""
        self._read()
        beginning = f"{below}/" if below else ""
        return sorted(name for name in self._digests if name.startswith(beginning))

    def _refuse_edits(self, names: Iterable[str]) -> None:
        """Refuse files of the run that somebody has edited, as they are not the run's alone.

        Raises:
            InfoFlowError: naming the file.
        """
        self._read()
        for name in set(names) - self._seen:
            path = self.path / name
            refuse_links(self.path, path)
            if path.is_file() and digest_of(path) not in self._digests_of(name):
                raise InfoFlowError(
                    f"{str(path)!r} is not what this run has written (it has changed since), and "
                    "would be written anew: expected the run's own; move it away to keep it, or "
                    "delete it"
                )
            self._seen.add(name)

    # Writing

    @property
    def scratch(self) -> Path:
        """The folder for what is unfinished, which is swept when a run begins and ends."""
        scratch = self.path / PRIVATE / _SCRATCH
        refuse_links(self.path, scratch)
        with name_file_in_errors(scratch):
            scratch.mkdir(parents=True, exist_ok=True)
        return scratch

    def temporary(self, target: Path) -> Path:
        """Return a path of its own for what will replace `target`.

        Raises:
            InfoFlowError: where links lead to `target`, or it is somebody else's.
        """
        if not self._is_private(target):
            self._check_own([target])
            name = target.relative_to(self.path).as_posix()
            self._refuse_edits([name] if self._digests_of(name) else [])
        return self.scratch / temporary_name(target)

    def replace(self, temporary: Path, target: Path, digest: str | None = None) -> None:
        """Put a finished file in its place, named in the manifest; its digest, if it is known."""
        if not self._is_private(target):
            self._check_own([target])
            with name_file_in_errors(temporary, "read"):
                digest = digest_of(temporary) if digest is None else digest
            self._append(target.relative_to(self.path).as_posix(), digest)
        with name_file_in_errors(target):
            os.replace(temporary, target)

    def replace_folder(self, temporary: Path, target: Path) -> None:
        """Put the files of a finished folder in the place of the run's own in `target`."""
        self._check_own([target, *(target / file.name for file in temporary.iterdir())], {target})
        files = sorted(temporary.iterdir())
        below = target.relative_to(self.path).as_posix()
        with name_file_in_errors(target):
            # a new folder moves at once; into one that is there files go one by one
            if not target.exists():
                for file in files:
                    self._append(f"{below}/{file.name}", digest_of(file))
                os.replace(temporary, target)
                return
        new = {f"{below}/{file.name}" for file in files}
        self.remove(*(name for name in self.names(below) if name not in new))
        for file in files:
            self.replace(file, target / file.name)
        shutil.rmtree(temporary, ignore_errors=True)

    def _is_private(self, target: Path) -> bool:
        return target.is_relative_to(self.path / PRIVATE)

    def _check_own(self, targets: Iterable[Path], folders: Iterable[Path] = ()) -> None:
        """Refuse places that somebody else has taken."""
        taken = []
        for target in targets:
            refuse_links(self.path, target)
            if not os.path.lexists(target) or (target in folders and target.is_dir()):
                continue
            if not self._digests_of(target.relative_to(self.path).as_posix()):
                taken.append(target.name)
        if taken:
            raise InfoFlowError(
                f"{str(self.path)!r} holds {', '.join(taken)}, which the run would overwrite, and "
                f"which {MANIFEST}, the list of the run's own files, does not name: expected no "
                "files of others or of earlier versions there; move them away, or choose another "
                "folder"
            )

    # The manifest

    def _digests_of(self, name: str) -> list[str]:
        """Return the digests that a file of the run may have; none for what is not the run's."""
        if name not in self._digests:
            self._read()  # a worker may have written it
        return self._digests.get(name, [])

    def _read(self) -> None:
        """Read what is new in the manifest; workers and this process append to it."""
        path = self.path / MANIFEST
        refuse_links(self.path, path)
        if not os.path.lexists(path):
            return
        with name_file_in_errors(path, "read"), open_regular(path) as file:
            found = os.fstat(file.fileno())
            # another file under the name, or a shorter one: read from the beginning
            if found.st_ino != self._read_position[0] or found.st_size < self._read_position[1]:
                self._digests, self._read_position = {}, (found.st_ino, 0)
                self._read_header(file.readline())
            else:
                file.seek(self._read_position[1])
            lines = file.read()
            self._read_position = (found.st_ino, file.tell())
        for line in lines.splitlines():
            try:
                entry = json.loads(line)
                name, digest = entry["name"], str(entry["sha256"])
            except (ValueError, KeyError, TypeError, RecursionError):
                continue  # a kill has cut it off; the file that it names is not yet in its place
            if not _stays_below(name):
                raise InfoFlowError(
                    f"{str(path)!r} names {name!r}, which is no file below the folder of the run: "
                    "expected what this version wrote; choose another folder"
                )
            # the newest last; the one before counts while a file is replaced
            digests = self._digests.setdefault(name, [])
            digests[:] = [*(d for d in digests if d != digest), digest]

    def _read_header(self, line: bytes) -> None:
        try:
            header = json.loads(line)
            digest = header.pop("digest")
            if header["schema"] != _SCHEMA or digest != digest_of_values(header):
                raise ValueError("it has changed since it was written")
            if not isinstance(header["identity"], (dict, type(None))):
                raise TypeError("its identity is no mapping")
            self.identity = header["identity"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InfoFlowError(
                f"{str(self.path / MANIFEST)!r} is no manifest of a run of this version "
                f"({type(error).__name__}): expected what this version wrote; delete {MANIFEST} "
                "and the results beside it, or choose another folder"
            ) from error

    def _append(self, name: str, digest: str) -> None:
        if self._digests_of(name)[-1:] == [digest]:
            return
        if not (self.path / MANIFEST).exists():
            self._rewrite(begin=True)
        line = json.dumps({"name": name, "sha256": digest}) + "\n"
        # before the file is in its place: a file without an entry counts as somebody else's
        flags = os.O_WRONLY | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        with name_file_in_errors(self.path / MANIFEST):
            descriptor = os.open(self.path / MANIFEST, flags)
            with os.fdopen(descriptor, "ab") as file:  # which writes all of it, or says why not
                # what a full disk has cut off before is a line of its own, and is not read
                file.write(b"" if self._ends_a_line() else b"\n")
                file.write(line.encode())
                file.flush()
                sync(file.fileno())
        self._read()

    def _ends_a_line(self) -> bool:
        """Return whether the manifest ends with a whole line."""
        with open_regular(self.path / MANIFEST) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            return file.read() in (b"", b"\n")

    def _rewrite(self, finished: bool = False, begin: bool = False) -> None:
        """Write the manifest anew, in order, without files that are gone.

        A file whose writing was cut off may still be the one before, so both are kept until a run
        ends well.
        """
        # reading brings the header of the file, which does not know a new identity yet
        identity = self.identity
        self._read()
        self.identity = identity or self.identity
        target = self.path / MANIFEST
        # a finished run has one digest for each file; one that goes on may be between two
        kept = {
            name: digests[-1:] if finished else digests[-2:]
            for name, digests in sorted(self._digests.items())
            if os.path.lexists(self.path / name)
        }
        if not kept and not begin:  # a folder without files of a run is free for any run
            self.identity, self._digests = None, {}
            target.unlink(missing_ok=True)
            return
        header: dict[str, Any] = {"schema": _SCHEMA, "identity": self.identity}
        lines = [json.dumps({**header, "digest": digest_of_values(header)})]
        for name, digests in kept.items():
            lines += [json.dumps({"name": name, "sha256": digest}) for digest in digests]
        # replaced at once: a reader sees the old manifest or the new one
        temporary = self.scratch / f"{MANIFEST}.{uuid.uuid4().hex[:12]}"
        with name_file_in_errors(target):
            temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            os.replace(temporary, target)
        self._read_position = (-1, 0)
        self._read()


def _stays_below(name: Any) -> bool:
    """Return whether a name of a manifest leads to a file below its folder, and to no other."""
    if not isinstance(name, str) or PureWindowsPath(name).drive:
        return False
    parts = name.split("/")  # of an absolute name the first is empty
    return not any(part in ("", ".", "..") or {"\\", "\0"} & set(part) for part in parts)


def refuse_links(folder: Path, path: Path) -> None:
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
def _lock_folder(folder: Path, what: str) -> Iterator[None]:
    """Hold the lock of a folder for a block, and empty its scratch folder."""
    private = folder / PRIVATE
    lock: BaseFileLock = FileLock(private / _LOCK)
    writer = private / _WRITER
    try:
        for name in (_LOCK, _WRITER, _SCRATCH):
            refuse_links(folder, private / name)
        private.mkdir(exist_ok=True)
        _check_lock(private / _LOCK)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for a file system without locks: see RunFolder.open
            try:
                lock.acquire(timeout=0)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                with suppress(OSError):  # the empty file of the lock that could not be had
                    if not (private / _LOCK).stat().st_size:
                        (private / _LOCK).unlink()
                lock = SoftFileLock(private / _LOCK)
                lock.acquire(timeout=0)
    except Timeout as error:
        raise InfoFlowError(
            f"{str(folder)!r} is being written by {_describe_writer(writer)}: expected one run at "
            "a time in a folder; wait until it ends, or choose another folder"
        ) from error
    except (OSError, NotImplementedError) as error:
        raise InfoFlowError(
            f"{str(folder)!r} cannot be locked ({explain_error(error)}): expected a folder that "
            "you may write to; choose another folder"
        ) from error
    try:
        shutil.rmtree(private / _SCRATCH, ignore_errors=True)
        with name_file_in_errors(writer):
            writer.unlink(missing_ok=True)
            about = {"what": what, "process": os.getpid(), "machine": socket.gethostname()}
            writer.write_text(json.dumps(about), encoding="utf-8")
        yield
    finally:
        shutil.rmtree(private / _SCRATCH, ignore_errors=True)
        # remove the file while the lock is held: a process that opens it later finds a new file,
        # and filelock tells a process that has it open already
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
    # on a file system without locks the file holds the process and the machine
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or found.st_size > _LONGEST_LOCK:
        raise InfoFlowError(
            f"{str(path)!r} is no lock of a run: expected a small file with one name; move it "
            "away, or choose another folder"
        )


def _describe_writer(writer: Path) -> str:
    try:
        about = read_json(writer, "lock", "")
        return f"{about['what']}, process {about['process']} on {about['machine']}"
    except (InfoFlowError, KeyError):
        return "another run"


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


FINISHED = "finished.json"
_END_SCHEMA = "infoflow-lens finished 1"
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
        write_signed(folder.path / FINISHED, _END_SCHEMA, values)


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
        values = read_signed(path / FINISHED, _END_SCHEMA, "end of a run", "run the same again")
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
