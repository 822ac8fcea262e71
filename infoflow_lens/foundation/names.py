"""Names that users may misspell."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the known ones, and the one that was meant."""
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=1)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    return f": expected one of {', '.join(names)}{guess}"
