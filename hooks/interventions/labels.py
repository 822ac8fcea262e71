"""Which ideal describes a head: labels from shares of its worth, with paired errors.

The worth of a head is what the output loses when its z is put to the mean; the share of an ideal is
what it loses over this, a ratio of sums over texts. Errors leave one text out, and that of the
difference of two shares does so for both at once. What a head is called and what replaces it are
two things: it is replaced by the ideal of least share of the two families, never by its name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

from jaxtyping import Float
from torch import Tensor

from infoflow_lens.hooks.interventions.ideals import SIMPLE, TOPS, HeadIdeal
from infoflow_lens.hooks.interventions.probe import jackknife

FIXED: tuple[HeadIdeal, ...] = ("position", "offset")
# Set before any head was labelled [chosen]: what counts as sure, as little, and as much.
ERRORS, _LITTLE, _MUCH = 2.0, 0.25, 0.5
# between the share of a simple pattern and that of the mean pattern: at most, and however sure
_NEAR, _SAME = 0.1, 0.02
_NOTHING = 1e-9  # worth of a text below which a head is worth nothing
SINK = 0.5  # mean weight on position 0 from which on a head has a sink


@dataclass(frozen=True)
class HeadLabel:
    """What a head is called, and what takes its place.

    Attributes:
        label: "fixed", "max", "several" keys, "spread" over more than eight, or "undecided"; this
            with shares that are NaN for a head that is worth nothing.
        name: the simplest that says it: "previous", "own", "even", "sink", "offset" or "position"
            of a fixed head, "top 2", ... of several; empty otherwise.
        replacement: the ideal that describes it best, of the two families.
        several: the ideal of fewest keys that keeps all but a quarter; `replacement` otherwise.
        other: the best ideal of the other family.
        does_either: whether both families lose little, so that one key does as well.
        fixed, largest: the shares of the two families.
        fixed_error, largest_error, gap_error: one standard error of each, and of their difference.
    """

    label: str
    name: str
    replacement: HeadIdeal
    several: HeadIdeal
    other: HeadIdeal
    does_either: bool
    fixed: float
    largest: float
    fixed_error: float
    largest_error: float
    gap_error: float


def compute_shares(
    lost: Float[Tensor, "sequence ideal"], worth: Float[Tensor, " sequence"]
) -> Float[Tensor, " ideal"]:
    """Compute the share of each ideal: what all texts lose, over the worth over all.

    NaN for a head that is worth nothing.
    """
    total = worth.sum()
    return lost.sum(dim=0) / total.masked_fill(total <= _NOTHING * len(worth), nan)


def label_head(
    lost: Float[Tensor, "sequence ideal"],
    worth: Float[Tensor, " sequence"],
    ideals: Sequence[HeadIdeal],
    has_sink: bool,
) -> HeadLabel:
    """Label a head by what each text loses by each ideal.

    Args:
        lost: of each text by each ideal.
        worth: what each text loses without the head.
        ideals: in the order of the last axis.
        has_sink: whether heads of this model keep their weight on position 0; then the max family
            is "gated" alone, else the lesser of "gated" and "largest".
    """
    if not worth.sum() > _NOTHING * len(worth):
        return HeadLabel("undecided", "", "position", "position", "gated", False, *[nan] * 5)
    shares = dict(zip(ideals, compute_shares(lost, worth).tolist(), strict=True))
    columns = {ideal: lost[:, i] for i, ideal in enumerate(ideals)}

    def error_of(of: Tensor) -> float:
        return float(jackknife(of[:, None], worth[:, None])[0])

    fixed = min(FIXED, key=lambda ideal: shares[ideal])
    family: tuple[HeadIdeal, ...] = ("gated",) if has_sink else ("gated", "largest")
    largest = min(family, key=lambda ideal: shares[ideal])
    f, g = shares[fixed], shares[largest]
    gap_error = error_of(columns[fixed] - columns[largest])
    best, other = (fixed, largest) if f <= g else (largest, fixed)
    least, least_error = min(f, g), error_of(columns[best])
    label, name, several, either = "undecided", "", best, False
    # surely much is lost by either family: neither a fixed pattern nor one key describes the head
    if least - ERRORS * least_error > _MUCH:
        enough = [ideal for ideal in TOPS if ideal in shares and shares[ideal] <= _LITTLE]
        label, name = ("several", enough[0]) if enough else ("spread", "")
        several = enough[0] if enough else best
    elif f <= _LITTLE and g <= _LITTLE:
        label, either = "fixed", True
    elif abs(f - g) > ERRORS * gap_error:
        label = "fixed" if f < g else "max"
    if label == "fixed":
        name = _simplest(columns, shares, worth, fixed)
    return HeadLabel(
        label, name, best, several, other, either, f, g,
        error_of(columns[fixed]), error_of(columns[largest]), gap_error,
    )  # fmt: skip


def _simplest(
    columns: dict[HeadIdeal, Tensor],
    shares: dict[HeadIdeal, float],
    worth: Tensor,
    fixed: HeadIdeal,
) -> str:
    """Find the simple pattern of least share that does as well as the mean one, or that."""
    for ideal in sorted((i for i in SIMPLE if i in shares), key=lambda i: shares[i]):
        apart = shares[ideal] - shares[fixed]
        error = float(jackknife((columns[ideal] - columns[fixed])[:, None], worth[:, None])[0])
        if apart <= min(_NEAR, max(ERRORS * error, _SAME)):
            return ideal
    return fixed
