"""Documents: files at places that a user names, such as a page, a picture or a saved result.

A run owns its folder (``runs/folder.py``). Whatever is written elsewhere is a document, and this
module alone decides whether its place may be taken: by a new file, by an earlier document of the
same kind, or by anything regular where the user asks for it. Links, pipes, devices and folders
never give way.
"""

import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import (
    atomic_path,
    check_regular,
    open_regular,
    owner_of,
    user_path,
    writable_folder,
)

MARK = "infoflow-lens"  # a key of the header of each safetensors file that we write
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Document:
    """A kind of file that the package writes where a user asks for it.

    Attributes:
        what: what errors call one, such as "saved result".
        is_ours: returns whether the regular file at a path is one; OSError and ValueError mean no.
    """

    what: str
    is_ours: Callable[[Path], bool]

    def check(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Check, before work starts, that a document may be written.

        In the folder of a run, the run decides (:func:`~infoflow_lens.foundation.files.owned_by`).

        Args:
            path: of the file, see :func:`~infoflow_lens.foundation.files.user_path`; its folder is
                made if it is not there.
            overwrite: whether a regular file of another kind may be replaced, too.

        Returns:
            The path.

        Raises:
            InfoFlowError: for a folder that cannot be written, a name that no file can have there,
                a link, a pipe, a device or a folder in its place, and a file of another kind.
        """
        target = user_path(path)
        if not target.name or target.name == ".." or {"\0", "\n"} & set(os.fspath(path)):
            raise InfoFlowError(f"{os.fspath(path)!r} names no file: expected a file's name")
        writable_folder(target.parent)
        try:
            target.lstat()  # of a name that is too long the file system says so
        except FileNotFoundError:
            return target
        except (UnicodeEncodeError, OSError) as error:
            reason = getattr(error, "strerror", None) or getattr(error, "reason", None)
            raise InfoFlowError(
                f"{os.fspath(path)!r} is no name of a file ({reason}): expected another name"
            ) from error
        if owner_of(target) is not None:
            return target
        kind = _kind_of(target)
        if kind != "file":
            raise InfoFlowError(
                f"{str(target)!r} is a {kind}: expected a new file or an earlier {self.what}; "
                "choose another name"
            )
        if not overwrite and not self.recognises(target):
            raise InfoFlowError(
                f"{str(target)!r} is there and is no {self.what}: expected a new file or an "
                f"earlier {self.what}; choose another name, move the file away, or ask for it to "
                "be replaced (overwrite)"
            )
        return target

    def recognises(self, path: Path) -> bool:
        """Return whether a regular file is a document of this kind, by what it holds."""
        try:
            check_regular(path)
            return self.is_ours(path)
        except (OSError, ValueError, RecursionError, SafetensorError):
            return False

    @contextmanager
    def writing(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
        """Yield a temporary path that takes the document's place when the block ends well.

        Args:
            path, overwrite: as for :meth:`check`.

        Raises:
            InfoFlowError: as for :meth:`check`, and where the file cannot be written.
        """
        target = self.check(path, overwrite=overwrite)
        with atomic_path(target) as temporary:
            yield temporary

    def write(self, path: str | os.PathLike[str], text: str, *, overwrite: bool = False) -> Path:
        """Write a text as such a document, whole or not at all; arguments as for :meth:`writing`.

        Returns:
            The path.

        Raises:
            InfoFlowError: as for :meth:`writing`.
        """
        with self.writing(path, overwrite=overwrite) as temporary:
            temporary.write_text(text, encoding="utf-8")
        return user_path(path)


def kind_by_mark(what: str, mark: str) -> Document:
    """Return the kind of documents that hold a text by which they are known, such as pages."""

    def is_ours(path: Path) -> bool:
        with open_regular(path) as file:
            return mark.encode() in file.read()

    return Document(what, is_ours)


def kind_by_entry(what: str, key: str, kinds: tuple[str, ...]) -> Document:
    """Return the kind of JSON documents that say what they are.

    Args:
        what: what errors call one.
        key: of the entry that says it.
        kinds: how that entry may begin.
    """

    def is_ours(path: Path) -> bool:
        with open_regular(path) as file:
            held = json.loads(file.read())
        return isinstance(held, dict) and str(held.get(key)).startswith(kinds)

    return Document(what, is_ours)


def kind_of_tensors(
    document: Document, marks: tuple[str, ...], name: str | None = None
) -> Document:
    """Return the kind of safetensors files that we mark, or that stand beside a document of ours.

    Args:
        document: which describes them.
        marks: how their mark may begin.
        name: of the file beside them that is one; default, their own with the end ``.json``.
    """

    def is_ours(path: Path) -> bool:
        beside = f"{path.name.removesuffix('.safetensors')}.json" if name is None else name
        if document.recognises(path.with_name(beside)):
            return True
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get(MARK, "").startswith(marks)

    return Document(document.what, is_ours)


def kind_of_page(command: str) -> Document:
    """Return the kind of pages that a command writes; their templates name it."""
    mark = f'<meta name="generator" content="infoflow-lens {command}">'
    return kind_by_mark(f"page of infoflow-lens {command}", mark)


FLOW_PAGE, PROBE_PAGE = kind_of_page("flow"), kind_of_page("probe")
PICTURE_MAKER = "infoflow-lens estimate --plot"  # in the metadata of a picture
PICTURE = kind_by_mark("picture of infoflow-lens", PICTURE_MAKER)
CERTIFICATE = kind_by_entry("certificate", "format", ("infoflow-lens one-layer certificate",))
WITNESS = kind_by_entry("witness", "format", ("infoflow-lens exclusion",))
SAVED = ("infoflow-lens result ", "infoflow-lens flow ", "infoflow-lens saved ")
RESULT = kind_by_entry("saved result", "schema", SAVED)


def check_name(name: str, what: str) -> str:
    """Check a name of files below a folder: words with ``/`` between them, which stay below it.

    Raises:
        InfoFlowError: for anything else, such as an absolute path or "..".
    """
    if not isinstance(name, str) or not all(_NAME.fullmatch(part) for part in name.split("/")):
        raise InfoFlowError(
            f"{what} is {name!r}: expected letters, digits, '.', '_' and '-', with '/' between the "
            "names of folders; it stays below the folder, so no part begins with '.'"
        )
    return name


def _kind_of(path: Path) -> str:
    mode = path.lstat().st_mode
    kinds = {
        stat.S_ISREG: "file",
        stat.S_ISLNK: "link",
        stat.S_ISDIR: "folder",
        stat.S_ISFIFO: "pipe",
        stat.S_ISSOCK: "socket",
    }
    return next((kind for is_kind, kind in kinds.items() if is_kind(mode)), "device")
