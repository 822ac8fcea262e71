"""Names that a module gives, and names that users may misspell."""

import difflib
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from infoflow_lens.foundation.errors import InfoFlowError


def list_public(module: Mapping[str, Any]) -> list[str]:
    """List the names that a module defines or imports, without modules and private names."""
    return sorted(n for n, v in module.items() if n[0] != "_" and not isinstance(v, ModuleType))


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: all known names, and the closest one.

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
