"""Documents: files at places that a user names, such as a page, a picture or a saved result.

A run owns its folder (``runs/folder.py``). Whatever is written elsewhere is a document, and this
module alone decides whether its place may be taken: by a new file, in the place of an earlier
document of the same kind, or of anything regular where the user asks for it. A mark says that we
have made a document, and a digest that it still is as it was made: what was edited is the user's.
Links, pipes, devices and folders never give way.
"""

import hashlib
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import (
    atomic_path,
    check_regular,
    has_digest,
    open_regular,
    owner_of,
    read_json,
    read_tensors,
    user_path,
    writable_folder,
)


@dataclass(frozen=True)
class Document:
    """A kind of file that the package writes where a user asks for it.

    Attributes:
        what: what errors call one, such as "saved result".
        is_ours: returns whether the regular file at a path is one, as we have written it; OSError
            and ValueError mean no.
        mark: what its signature says, where its kind is known by one.
    """

    what: str
    is_ours: Callable[[Path], bool]
    mark: str | None = None

    def check(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Check, before work starts, that a document may be written.

        In the folder of a run, the run decides (:func:`~infoflow_lens.foundation.files.let_own`).

        Args:
            path: of the file, see :func:`~infoflow_lens.foundation.files.user_path`; its folder is
                made if it is not there.
            overwrite: whether a regular file of another kind, or one that was edited, may be
                replaced, too.

        Returns:
            The path.

        Raises:
            InfoFlowError: for a folder that cannot be written, a name that no file can have there,
                a link, a pipe, a device or a folder in its place, and a file of another kind.
        """
        target = user_path(path)
        # names that no file system takes, or that would split a line of the log
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
        # a file of a run belongs to that run, which decides
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
                f"{str(target)!r} is there and is no {self.what} as this version has written it: "
                f"expected a new file or an earlier {self.what}, unchanged; choose another name, "
                "move the file away, or ask for it to be replaced (overwrite)"
            )
        return target

    def recognises(self, path: Path) -> bool:
        """Return whether a regular file is a document of this kind, by what it holds."""
        try:
            check_regular(path)
            return self.is_ours(path)
        except (OSError, ValueError, TypeError, RuntimeError, SafetensorError):
            return False

    @contextmanager
    def open(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
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
        """Write a text as such a document, whole or not at all; arguments as for :meth:`open`.

        Returns:
            The path.

        Raises:
            InfoFlowError: as for :meth:`open`.
        """
        with self.open(path, overwrite=overwrite) as temporary:
            temporary.write_bytes(self.sign(text.encode()))
        return user_path(path)

    def sign(self, content: bytes) -> bytes:
        """Return a content as it is written: with its signature, where the kind has one."""
        return content if self.mark is None else _sign(content, self.mark)


def kind_by_signature(what: str, mark: str) -> Document:
    """Return the kind of texts and pictures that end with a mark, and a digest of all before it.

    Args:
        what: what errors call one.
        mark: without "--", which no comment of an SVG may hold.
    """

    def is_ours(path: Path) -> bool:
        with open_regular(path) as file:
            content = file.read()
        place = content.rfind(_begin_of(content) + mark.encode())
        # four bytes with the size stand before the type of a chunk
        before = content[: place - 4] + _PNG_END if content.startswith(_PNG) else content[:place]
        return _sign(before, mark) == content

    return Document(what, is_ours, mark)


def _sign(content: bytes, mark: str) -> bytes:
    """Return a text or a picture with a mark and a digest, as a comment at its end."""
    begin = _begin_of(content) + f"{mark} ".encode()
    if content.startswith(_PNG):
        # a PNG ends with a chunk of its own, so the comment is a chunk before it
        body = content[: -len(_PNG_END)]
        chunk = begin + _digest(body + begin)
        # the size is of the data alone, the check of the four letters of the type, too
        numbers = len(chunk) - 4, zlib.crc32(chunk)
        size, check = (number.to_bytes(4, "big") for number in numbers)
        return body + size + chunk + check + _PNG_END
    end = b"\n" if content.startswith(_PDF) else b" -->\n"
    return content + begin + _digest(content + begin) + end


def _begin_of(content: bytes) -> bytes:
    """Return how a comment begins in a text or a picture."""
    if content.startswith(_PNG):
        return b"tEXtComment\0"
    return b"% " if content.startswith(_PDF) else b"<!-- "


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest()[:32].encode()


_PNG, _PDF = b"\x89PNG", b"%PDF"  # how such files begin
_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"


def kind_by_digest(what: str, key: str | None = None, kinds: tuple[str, ...] = ()) -> Document:
    """Return the kind of JSON documents that hold a digest of themselves.

    Args:
        what: what errors call one.
        key: of an entry that says what they are; None where the digest is all.
        kinds: how that entry may begin.
    """

    def is_ours(path: Path) -> bool:
        with open_regular(path) as file:
            held = json.loads(file.read())
        return has_digest(held) and (key is None or str(held.get(key)).startswith(kinds))

    return Document(what, is_ours)


def kind_of_tensors(
    document: Document, marks: tuple[str, ...], name: str | None = None
) -> Document:
    """Return the kind of safetensors files with their digest in their header, or beside them.

    Args:
        document: which describes them, and may hold the digest as the entry "tensors".
        marks: how their mark may begin.
        name: of the file beside them that is one; default, their own with the end ``.json``.
    """

    def is_ours(path: Path) -> bool:
        from infoflow_lens.foundation.record import fingerprint

        beside = f"{path.name.removesuffix('.safetensors')}.json" if name is None else name
        with safe_open(path, framework="pt") as file:
            mark, _, digest = (file.metadata() or {}).get(_KEY, "").rpartition(" ")
        digests = {digest} if f"{mark} ".startswith(marks) else set()
        if document.recognises(path.with_name(beside)):
            digests.add(read_json(path.with_name(beside), document.what, "").get("tensors"))
        return bool(digests) and fingerprint(read_tensors(path)) in digests

    return Document(document.what, is_ours)


def header_of_tensors(mark: str, digest: str) -> dict[str, str]:
    """Return the header by which :func:`kind_of_tensors` knows a file.

    Args:
        mark: what the tensors are.
        digest: their :func:`~infoflow_lens.foundation.record.fingerprint`.
    """
    return {_KEY: f"{mark} {digest}"}  # one entry: of several the order is drawn at random


_KEY = "infoflow-lens"


def kind_of_page(command: str) -> Document:
    """Return the kind of pages that a command writes."""
    return kind_by_signature(f"page of infoflow-lens {command}", f"infoflow-lens {command}")


FLOW_PAGE, PROBE_PAGE = kind_of_page("flow"), kind_of_page("probe")
ANSWER_PAGE = kind_of_page("ask")
PICTURE_MAKER = "infoflow-lens estimate --plot"  # in the metadata of a picture
PICTURE = kind_by_signature("picture of infoflow-lens", "picture of infoflow-lens")
CERTIFICATE = kind_by_digest("certificate", "format", ("infoflow-lens one-layer certificate",))
WITNESS = kind_by_digest("witness", "format", ("infoflow-lens exclusion",))
SAVED = ("infoflow-lens result ", "infoflow-lens flow ", "infoflow-lens saved ")
RESULT = kind_by_digest("saved result", "schema", SAVED)
NUMBERS = kind_of_tensors(RESULT, SAVED)


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
