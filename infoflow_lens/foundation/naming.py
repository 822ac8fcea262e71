"""What users name: a file, a task, or something on the hub.

One text may mean several things: ``imdb:train`` is a split of a dataset of the hub, and could be a
variable of a module of that name. :func:`find_named` alone decides, and neither imports anything
nor asks a network to do so.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from infoflow_lens.foundation.errors import InfoFlowError, explain_error
from infoflow_lens.foundation.files import user_path

NameKind = Literal["file", "task", "hub"]
_PATH = re.compile(r"[./~]|[A-Za-z]:[/\\]|.*\\|.*/$", re.DOTALL)  # also of Windows
GGUF = ".gguf"  # the end of a file with a whole model, as llama.cpp writes it
OWN_TASK = ".py"  # the end of a file whose variable FILE.py:NAME is a task of the user's own


@dataclass(frozen=True)
class Named:
    """What a user has named.

    Attributes:
        kind: "file" (or a folder), "task" or "hub".
        name: without the kind in front.
        is_said: whether the user said the kind, and it was not inferred.
    """

    kind: NameKind
    name: str
    is_said: bool = False

    @property
    def path(self) -> Path:
        """The path of a file."""
        return user_path(self.name)


def find_named(text: str, tasks: Collection[str] = (), endings: Collection[str] = ()) -> Named:
    """Find what a text names. The first of these that fits:

    1. ``file:PATH``, ``task:NAME`` and ``hub:NAME`` say it themselves.
    2. A path that exists is a file.
    3. A known name is a task, and so is ``FILE.py:NAME``, a variable in a file that exists.
    4. What begins with ``.``, ``/`` or ``~``, ends like a file or with ``/``, or is a path of
       Windows, is a file that is missing.
    5. All else is a name on the hub, such as ``OWNER/NAME`` or ``NAME:SPLIT``.

    A variable of a module is a task only where the user says so: ``task:MODULE:NAME``.

    Args:
        text: what the user gave.
        tasks: the names that are known.
        endings: of files, such as ".txt".

    Raises:
        InfoFlowError: for an empty text, or a kind without a name.
    """
    # a kind in front decides, whatever exists
    kind, colon, rest = text.partition(":")
    for known in get_args(NameKind):
        if colon and kind == known:
            if not rest.strip():
                raise InfoFlowError(f"{text!r} names no {kind}: expected {kind}:NAME")
            return _check_path(Named(known, rest, is_said=True))
    if not text.strip():
        raise InfoFlowError("the name is empty: expected a file, a task, or a name on the hub")
    # what exists is a file, before all names
    if is_path(text):
        return Named("file", text)
    if text in tasks or _is_own_task(text):
        return Named("task", text)
    # what looks like a file, and is none, is a file that is missing
    if _PATH.match(text) or Path(text).suffix in endings:
        return _check_path(Named("file", text))
    return Named("hub", text)


def find_model(text: str) -> Named:
    """Find what names a model, a file or something on the hub, as :func:`find_named`.

    A name on the hub may also be an official name of TransformerLens, or of a model that comes with
    the package. A path with several folders is a file, also where it is missing.

    Raises:
        InfoFlowError: for what is said to be a task.
    """
    named = find_named(text, endings=(GGUF,))
    if named.kind == "task":
        raise InfoFlowError(
            f"the model is {text!r}, a task: expected a folder, an official name, or owner/name"
        )
    if named.kind == "hub" and not named.is_said and named.name.count("/") > 1:
        return _check_path(Named("file", named.name))
    return named


def _check_path(named: Named) -> Named:
    """Return a name, if it is no file, or one whose path the system can look at.

    Raises:
        InfoFlowError: for a path that is too long, or whose user is unknown.
    """
    if named.kind == "file":
        path = named.path
        try:
            path.exists()
        except (OSError, ValueError) as error:
            raise InfoFlowError(
                f"{named.name[:200]!r} is no path ({explain_error(error)}): expected the path of a "
                "file or folder"
            ) from error
    return named


def _is_own_task(text: str) -> bool:
    where, _, variable = text.rpartition(":")
    return where.endswith(OWN_TASK) and variable.isidentifier() and is_path(where)


def is_path(text: str) -> bool:
    """Return whether a text is the path of something that is there."""
    try:
        return user_path(text).exists()
    except (OSError, ValueError):  # too long, a null byte, a user that is not known
        return False


def list_public(module: Mapping[str, Any]) -> list[str]:
    """List the names that a module defines or imports, without modules and private names."""
    return sorted(n for n, v in module.items() if n[0] != "_" and not isinstance(v, ModuleType))


def nearest(name: str, known: Iterable[str]) -> str:
    """End an error message about an unknown name: with all known names, and the closest one.

    Args:
        name: the unknown name.
        known: the known names.
    """
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=1)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    return f": expected one of {', '.join(names)}{guess}"


def check_known(given: Iterable[str], known: Iterable[str], owner: str, kind: str) -> None:
    """Refuse names that something does not have.

    Args:
        given: the names to check.
        known: the names that exist.
        owner: what has these names, such as "task 'd_retrieval'".
        kind: what they are names of, such as "parameter".

    Raises:
        InfoFlowError: with the first unknown name, and the closest known one.
    """
    names = list(known)
    for name in given:
        if name not in names:
            raise InfoFlowError(f"{owner} has no {kind} {name!r}{nearest(name, names)}")
