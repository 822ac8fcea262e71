"""Parameters that constructions share."""

from typing import Annotated, Literal

from annotated_types import Interval

from infoflow_lens.foundation.settings import Remedy

Beta = Annotated[
    float,
    Interval(gt=0, le=1e30),
    Remedy("since scores are float32 and end at 3e38; attention='hardmax' is the limit"),
]
Limit = Literal["softmax", "hardmax"]
"""Attention as in the theorem, or its limit for large beta; of both rows sum to 1."""
