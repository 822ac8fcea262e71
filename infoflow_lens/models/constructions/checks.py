"""What constructions refuse."""

import math
from typing import Any

from infoflow_lens.foundation.errors import InfoFlowError

_LARGEST_BETA = 1e30


def check_positive(name: str, value: Any, least: float = 0.0) -> None:
    """Refuse what is no finite number above 0, or of at least `least` if that is positive.

    Raises:
        InfoFlowError: with the value.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0 or value < least:
        wanted = f"of at least {least}" if least else "above 0"
        raise InfoFlowError(f"{name} is {value!r}: expected a finite number {wanted}")


def check_beta(beta: Any) -> None:
    """Refuse a factor on scores that float32 cannot hold, or that is not positive.

    Raises:
        InfoFlowError: with the value.
    """
    check_positive("beta", beta)
    if beta > _LARGEST_BETA:
        raise InfoFlowError(
            f"beta is {beta!r}: expected at most {_LARGEST_BETA:.0e}, since scores are float32 and "
            "end at 3e38; attention='hardmax' is the limit of large beta"
        )


def check_soft_or_hard(attention: str) -> None:
    """Refuse attention whose rows do not sum to 1.

    Raises:
        InfoFlowError: with the known kinds.
    """
    if attention not in ("softmax", "hardmax"):
        raise InfoFlowError(
            f"attention is {attention!r}: expected 'softmax', as in the theorem, or 'hardmax', its "
            "limit"
        )
