"""Seeds, derived from one another without collisions."""

import hashlib

from infoflow_lens.foundation.settings import LARGEST_SEED


def derive_seed(*parts: str | int) -> int:
    """Derive a seed from 0 to 2^63 - 1: equal parts give equal seeds, others unrelated ones."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") & LARGEST_SEED
