"""Seeds: checked, and derived from one another without collisions."""

import hashlib
from typing import Any

from infoflow_lens.foundation.errors import InfoFlowError

_LARGEST = 2**63 - 1


def check_seed(seed: Any, name: str = "seed") -> int:
    """`seed`, if it is an integer that every generator takes.

    Raises:
        InfoFlowError: if it is not.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed <= _LARGEST:
        raise InfoFlowError(f"{name} is {seed!r}: expected an integer from 0 to 2^63 - 1")
    return seed


def derived_seed(*parts: str | int) -> int:
    """A seed for a purpose: equal parts give equal seeds, others unrelated ones."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") & _LARGEST
