"""Claims: what a study says that its numbers will be, judged and put into words by one object."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.names import nearest

if TYPE_CHECKING:
    import pandas as pd

Comparison: TypeAlias = Literal["<", "<=", ">", ">=", "within"]
Numbers: TypeAlias = Mapping[str, float]  # by what each is of; "" where there is one alone

_WORDS: Mapping[Comparison, str] = {
    "<": "below",
    "<=": "at most",
    ">": "above",
    ">=": "at least",
    "within": "between",
}
_MOST_SHOWN = 8  # numbers that a sentence names one by one


@dataclass(frozen=True)
class Verdict:
    """Whether an effect was seen.

    Attributes:
        passed: by the study's stated rule.
        reasons: the numbers behind it, a line each.
        remarks: other sentences, which judge nothing.
    """

    passed: bool
    reasons: tuple[str, ...]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Claim:
    """A bound that numbers of a study keep to, if what it says is so.

    Attributes:
        text: the claim, with ``{bound}`` in the place of "at most 0.1" and its like.
        numbers: computes the numbers from the rows of a study, each by the name of its group; the
            name of a single number is "". A number that is NaN breaks the claim.
        op: how each is compared with the bound.
        bound: a number; the least and the largest one for "within".
        needed: whether the claim is broken where there is no number at all.

    Raises:
        InfoFlowError: for another comparison, or a bound that does not fit it.
    """

    text: str
    numbers: "Callable[[pd.DataFrame], Numbers]"
    op: Comparison
    bound: float | tuple[float, float]
    needed: bool = True

    def __post_init__(self) -> None:
        if self.op not in _WORDS:
            raise InfoFlowError(f"op is {self.op!r}{nearest(self.op, _WORDS)}")
        if isinstance(self.bound, tuple) != (self.op == "within"):
            raise InfoFlowError(
                f"bound is {self.bound!r} for {self.op!r}: expected a number, or (least, largest) "
                'for "within"'
            )

    def rule(self) -> str:
        """The claim in words."""
        return self.text.format(bound=self._bound())

    def holds(self, number: float) -> bool:
        """Whether a number keeps to the bound."""
        if isinstance(self.bound, tuple):
            return self.bound[0] <= number <= self.bound[1]
        kept = {
            "<": number < self.bound,
            "<=": number <= self.bound,
            ">": number > self.bound,
            ">=": number >= self.bound,
        }
        return kept[self.op]

    def judge(self, results: "pd.DataFrame") -> Verdict:
        """Whether all numbers keep to the bound, and a sentence that says so."""
        numbers = self.numbers(results)
        if not isinstance(numbers, Mapping):
            raise InfoFlowError(
                f"the numbers of the claim {self.text!r} are {numbers!r}: expected a dict, such as "
                '{"": 0.1}'
            )
        if not numbers:
            return Verdict(not self.needed, (f"{self.rule()}: no numbers",) * self.needed)
        kept = [self.holds(number) for number in numbers.values()]
        outcome = "yes" if all(kept) else "**no**"
        if len(kept) > 1 and not all(kept):
            outcome += f", {sum(kept)} of {len(kept)}"
        return Verdict(all(kept), (f"{self.rule()}: {outcome} ({_describe_numbers(numbers)})",))

    def _bound(self) -> str:
        if isinstance(self.bound, tuple):
            return f"{_WORDS[self.op]} {_number(self.bound[0])} and {_number(self.bound[1])}"
        return f"{_WORDS[self.op]} {_number(self.bound)}"


def _describe_numbers(numbers: Numbers) -> str:
    """Numbers with their labels, as text; only the least and the largest of many."""
    known = [label for label, number in numbers.items() if not math.isnan(number)]
    if len(numbers) > _MOST_SHOWN and known:
        ends = min(known, key=numbers.__getitem__), max(known, key=numbers.__getitem__)
        least, most = (f"{_number(numbers[label])} with {label}" for label in ends)
        return f"{len(numbers)} numbers from {least} to {most}"
    return "; ".join(
        f"{label}: {_number(number)}" if label else _number(number)
        for label, number in numbers.items()
    )


def _number(number: float) -> str:
    return f"{number:.0f}" if 1000 <= abs(number) < math.inf else f"{number:.3g}"


def judge_claims(
    claims: Sequence[Claim], results: "pd.DataFrame", remarks: Sequence[str] = ()
) -> Verdict:
    """Judge all claims of a study together.

    Args:
        claims: of a study; without claims the verdict is "not passed".
        results: its rows.
        remarks: sentences that follow them and judge nothing.
    """
    verdicts = [claim.judge(results) for claim in claims]
    reasons = [reason for verdict in verdicts for reason in verdict.reasons]
    passed = bool(verdicts) and all(verdict.passed for verdict in verdicts)
    return Verdict(passed, tuple(reasons), tuple(remarks))
