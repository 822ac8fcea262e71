"""The text: the standard library of the Python that runs, in three parts by file name."""

import hashlib
import os
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import user_path

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

# Of a thousand files, so many go to validation, and as many to the test part.
_HELD_OUT_PER_MILLE = 50
_KEY = b"infoflow-lens standard library"  # of the hash; another key gives other parts
# Not everywhere installed (tests), not of Python (packages), or written by the build for one
# machine, with its paths.
_LEFT_OUT_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_LEFT_OUT_STARTS = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class Corpus:
    """Texts of files, in three parts that share no file.

    Attributes:
        files: for each part, texts by path relative to the library, in the order of the paths.
        fingerprint: SHA-256 over parts, paths and texts, as 16 hex digits.
    """

    files: Mapping[Split, Mapping[str, str]]
    fingerprint: str

    def texts(self, split: Split) -> list[str]:
        """Return the texts of a part."""
        return list(self.files[split].values())

    def sizes(self) -> dict[Split, dict[str, int]]:
        """Return files and characters of each part."""
        return {
            split: {"files": len(files), "characters": sum(map(len, files.values()))}
            for split, files in self.files.items()
        }


def split_of(path: str) -> Split:
    """Return the part of a file, by a keyed hash (BLAKE2b) of its path relative to the library.

    Args:
        path: with forward slashes, such as "json/decoder.py". The same file is in the same part
            for every version of Python.
    """
    digest = hashlib.blake2b(path.encode(), key=_KEY, digest_size=8).digest()
    place = int.from_bytes(digest, "big") % 1000
    if place < _HELD_OUT_PER_MILLE:
        return "validation"
    return "test" if place < 2 * _HELD_OUT_PER_MILLE else "train"


def read_corpus(folder: str | os.PathLike[str] | None = None) -> Corpus:
    """Read the Python files of a folder, without those that are empty or not UTF-8.

    Args:
        folder: default, the standard library of the running Python.

    Raises:
        InfoFlowError: if a part has no file, as where the library is kept in an archive.
    """
    folder = user_path(folder or sysconfig.get_path("stdlib"))
    files: dict[Split, dict[str, str]] = {split: {} for split in SPLITS}
    digest = hashlib.sha256()
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    for name, path in sorted(paths.items()):
        if _LEFT_OUT_FOLDERS & set(name.split("/")) or path.name.startswith(_LEFT_OUT_STARTS):
            continue
        try:
            # the same text whatever line ends an installation has
            text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
        except (OSError, UnicodeDecodeError):
            continue
        if not text.strip():
            continue
        split = split_of(name)
        files[split][name] = text
        # NUL ends each part, so that no two corpora give the same bytes
        digest.update(f"{split}\0{name}\0{text}\0".encode())
    if empty := [split for split in SPLITS if not files[split]]:
        raise InfoFlowError(
            f"{str(folder)!r} has no Python files for {', '.join(empty)}: expected the standard "
            "library as files; use a Python that has it so"
        )
    return Corpus(files, digest.hexdigest()[:16])
