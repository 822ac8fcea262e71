"""Claims: what a study says that its numbers will be, judged and put into words by one object."""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import pd
from infoflow_lens.foundation.naming import nearest

Word: TypeAlias = Literal["seen", "fails its rule", "undecided"]  # of a verdict
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
_MOST_ENUMERATED = 3  # seeds that are drawn anew in all ways
_RESAMPLED = 20
_SURE = 0.9  # of resampled seeds, those that must say the same


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
        name: what the numbers are, in a few words, for tables.

    Raises:
        InfoFlowError: for another comparison, or a bound that does not fit it.
    """

    text: str
    numbers: "Callable[[pd.DataFrame], Numbers]"
    op: Comparison
    bound: float | tuple[float, float]
    needed: bool = True
    name: str = ""

    def __post_init__(self) -> None:
        if self.op not in _WORDS:
            raise InfoFlowError(f"op is {self.op!r}{nearest(self.op, _WORDS)}")
        if isinstance(self.bound, tuple) != (self.op == "within"):
            raise InfoFlowError(
                f"bound is {self.bound!r} for {self.op!r}: expected a number, or (least, largest) "
                'for "within"'
            )

    def rule(self) -> str:
        """Return the claim in words."""
        return self.text.format(bound=self.bound_in_words())

    def holds(self, number: float) -> bool:
        """Say whether a number keeps to the bound."""
        if isinstance(self.bound, tuple):
            return self.bound[0] <= number <= self.bound[1]
        kept = {
            "<": number < self.bound,
            "<=": number <= self.bound,
            ">": number > self.bound,
            ">=": number >= self.bound,
        }
        return kept[self.op]

    def room(self, number: float) -> float:
        """Return how far a number keeps from the bound, as a logarithm of their ratio if it exists.

        Of shares from a half on it is the ratio of what they leave. Below 0 where it breaks it.
        """
        if math.isnan(number):
            return -math.inf
        if isinstance(self.bound, tuple):
            least, most = self.bound
            # of two bounds the nearer one counts
            above = replace(self, op=">=", bound=least).room(number)
            return min(above, replace(self, op="<=", bound=most).room(number))
        if 0.5 <= self.bound < 1 and 0 <= number <= 1:  # shares: what they leave
            above = math.log((1 - self.bound) / (1 - number)) if number < 1 else math.inf
        elif number > 0 and self.bound > 0:
            above = math.log(number / self.bound)
        else:
            above = number - self.bound
        room = above if self.op in (">", ">=") else -above
        # on the bound of a strict comparison the room is 0, and yet the claim is broken
        return room if self.holds(number) else min(room, -1e-12)

    def judge(self, results: "pd.DataFrame") -> Verdict:
        """Judge whether all numbers keep to the bound, and say so in a sentence."""
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

    def bound_in_words(self) -> str:
        """Return the bound with its comparison, such as "at most 0.1"."""
        if isinstance(self.bound, tuple):
            return f"{_WORDS[self.op]} {_number(self.bound[0])} and {_number(self.bound[1])}"
        return f"{_WORDS[self.op]} {_number(self.bound)}"


def _describe_numbers(numbers: Numbers) -> str:
    """Return numbers with their labels, as text; only the least and the largest of many."""
    known = [label for label, number in numbers.items() if not math.isnan(number)]
    if len(numbers) > _MOST_SHOWN and known:
        ends = min(known, key=numbers.__getitem__), max(known, key=numbers.__getitem__)
        least, most = (f"{_number(numbers[label])} with {label}" for label in ends)
        return f"{len(numbers)} numbers from {least} to {most}"
    return "; ".join(
        f"{label}: {_number(number)}" if label else _number(number)
        for label, number in numbers.items()
    )


def say_range(numbers: Numbers) -> str:
    """Say from where to where numbers lie, by two digits, such as "40 to 71"."""
    known = sorted(number for number in numbers.values() if not math.isnan(number))
    if not known:
        return "no number"
    ends = (f"{one:.2g}" if abs(one) < 100 else f"{one:.0f}" for one in (known[0], known[-1]))
    return " to ".join(dict.fromkeys(ends))


def _number(number: float) -> str:
    if math.isnan(number):
        return "no number"
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


def deciding_number(claims: Sequence[Claim], results: "pd.DataFrame") -> tuple[str, str]:
    """Return in words the number nearest to its bound, or furthest beyond it, and that bound.

    Args:
        claims: of a study.
        results: its rows.
    """
    found = [(c.room(n), c, n, label) for c in claims for label, n in c.numbers(results).items()]
    if not found:
        return "no numbers", "-"
    _, claim, number, label = min(found, key=lambda each: each[0])
    known = "never" if math.isinf(number) else _number(number)
    what = f"{claim.name}: {known}".removeprefix(": ")
    return f"{what} ({label})" if label else what, claim.bound_in_words()


def share_of_seeds(claims: Sequence[Claim], results: "pd.DataFrame", n_seeds: int) -> float | None:
    """Return the share of resampled seeds with which all claims hold; None for a single seed.

    The seeds of all configurations are drawn anew together, with replacement: up to three in all
    ways, more of them 20 times.

    Args:
        claims: of a study.
        results: its rows; run numbers count seeds fastest, then configurations.
        n_seeds: of each configuration.
    """
    if n_seeds < 2:
        return None
    ways: Iterable[Sequence[int]] = itertools.combinations_with_replacement(range(n_seeds), n_seeds)
    if n_seeds > _MOST_ENUMERATED:
        drawn = random.Random(0)
        ways = [drawn.choices(range(n_seeds), k=n_seeds) for _ in range(_RESAMPLED)]
    place = results["run"] % n_seeds
    seeds = results.groupby(place)["seed"].first()
    broken = {id(c): not c.judge(results).passed for c in claims}
    ordered = sorted(claims, key=lambda c: not broken[id(c)])  # those first that will be broken
    configurations = set(results["run"] // n_seeds)
    held = total = 0.0
    for way in ways:
        # the rows of seed `own` take the number and the seed of the place that they are drawn for
        rows = pd.concat(
            [
                results[place == own].assign(
                    run=lambda r, own=own, new=new: r["run"] - own + new,
                    seed=seeds.get(new, new),
                )
                for new, own in enumerate(way)
            ],
            ignore_index=True,
        )
        chance = 1.0
        if n_seeds <= _MOST_ENUMERATED:  # as often as its orders are
            chance = math.factorial(n_seeds) / math.prod(
                math.factorial(way.count(own)) for own in set(way)
            )
        total += chance
        # a draw of seeds that all diverged in a configuration says nothing for the rule
        if set(rows["run"] // n_seeds) == configurations:
            held += chance * all(claim.judge(rows).passed for claim in ordered)
    return held / total


def say_verdict(passed: bool, share: float | None) -> Word:
    """Say a verdict with what other seeds may say of it.

    Args:
        passed: by the rule.
        share: of resampled seeds with which the rule is passed; None where there is one seed.
    """
    sure = share is None or (share >= _SURE if passed else share <= 1 - _SURE)
    return ("seen" if passed else "fails its rule") if sure else "undecided"
