"""The two-step estimate (Sec. 5.3): what an architecture must pay for a target, before training.

Step 1 counts comparisons, which bounds |I| and so the cost from below. Step 2 searches for a
schedule that learns the target, which bounds it from above.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.theory.comparison import (
    COUNTS,
    ComparisonProfile,
    Count,
    check_sizes,
    check_trees,
    growth_sizes,
    information_needed,
    least,
    model_comparisons,
)
from infoflow_lens.theory.cost import MODES, exponent
from infoflow_lens.theory.schedule import Schedule, Target, learns, search

Verdict = Literal["excluded", "allowed", "undecided"]

_LARGEST_VERIFIED = 128


@runtime_checkable
class ArchitectureLike(Protocol):
    """What the estimate needs of an architecture; `infoflow_lens.Architecture` has it."""

    @property
    def n_heads(self) -> tuple[int, ...]:
        """h_1 .. h_L."""
        ...

    @property
    def d_model(self) -> int:
        """E."""
        ...

    @property
    def d_token(self) -> int:
        """d."""
        ...

    @property
    def n_tokens(self) -> int:
        """T."""
        ...

    @property
    def positional_embedding(self) -> Any:
        """None or "none" for a model without positions."""
        ...


@dataclass(frozen=True)
class Estimate:
    """What InfoFlow says of an architecture and a target, before any training.

    Attributes:
        target, n_heads, n_tokens, d_token, d_model: what was asked.
        count: which number of comparisons was used for the target; see `ComparisonProfile`.
        trees: K of eq (5).
        needed: the target's number of comparisons.
        capacity: comparisons of the architecture by max-position retrieval alone.
        verdict: on max-position retrieval alone: "excluded" by counting, "allowed" by a schedule
            that learns the target, or "undecided".
        min_heads: the smallest h_1 that counting leaves for large T, other layers as given; None if
            no number of heads is enough.
        min_heads_here: the same at this T.
        min_information: the smallest |I| with which counting is met, at most T.
        saturated: whether no |I| up to T meets it.
        lower: exponents of the lower bound, by mode; see `infoflow_lens.theory.cost.exponent`.
        schedule: the best schedule found.
        upper_information: its largest |I|.
        upper: its exponents, by mode.
        verified: how often the schedule held the active index set on sampled inputs; None where
            that was not tried (large T).
        reasons: the argument in words.
        flags: the limits of the argument that concern these numbers.
    """

    target: str
    n_heads: tuple[int, ...]
    n_tokens: int
    d_token: int
    d_model: int
    count: Count
    trees: int
    needed: int
    capacity: int
    verdict: Verdict
    min_heads: int | None
    min_heads_here: int
    min_information: int
    saturated: bool
    lower: dict[str, float]
    schedule: Schedule | None
    upper_information: int | None
    upper: dict[str, float]
    verified: float | None
    reasons: tuple[str, ...]
    flags: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The estimate as JSON-compatible values; the schedule in words."""
        values = asdict(self)
        values["schedule"] = self.schedule.describe() if self.schedule else None
        return values


def max_position_capacity(
    profile: ComparisonProfile, n_heads: Sequence[int], n_tokens: int, trees: int = 1
) -> int:
    """Comparisons by max-position retrieval alone: eq (5) at the sizes to which sets can grow."""
    sizes = growth_sizes(n_heads, n_tokens)
    return model_comparisons(n_heads, n_tokens, sizes, profile.dimension, trees)


def min_heads(profile: ComparisonProfile, n_heads: Sequence[int], count: Count) -> int | None:
    """The smallest h_1 that counting leaves for large T, with the other layers as given.

    Leading terms: ``(h_1 + .. + h_{L-1}) T^2`` for L >= 2, or ``h_1 T`` for one layer, against the
    target's ``c T^order``. None if the target's order is larger: then no number of heads is enough
    without growing sets (Prop 2).
    """
    order_of_attention = 1 if len(n_heads) == 1 else 2
    if profile.order > order_of_attention:
        return None
    if profile.order < order_of_attention:
        return 1
    others = sum(n_heads[1:-1])
    return max(1, math.ceil(profile.leading_coefficient(count) - 1e-6) - others)


def min_heads_at(
    profile: ComparisonProfile,
    n_heads: Sequence[int],
    n_tokens: int,
    count: Count,
    trees: int = 1,
) -> int:
    """The smallest h_1 with which counting is met at this T, with the other layers as given."""
    needed = profile.number(n_tokens, count)

    def enough(first: int) -> bool:
        heads = (first, *n_heads[1:])
        return max_position_capacity(profile, heads, n_tokens, trees) >= needed

    return least(enough, 1)


def _verdict(by_score: Schedule | None, capacity: int, needed: int) -> Verdict:
    """On max-position retrieval alone: by a schedule of such heads, or by counting."""
    if by_score is not None:
        return "allowed"
    return "excluded" if capacity < needed else "undecided"


def phase_diagram(
    task: Any,
    heads: Sequence[Sequence[int]],
    n_tokens: Sequence[int],
    count: Count = "paper",
    trees: int = 1,
) -> list[dict[str, Any]]:
    """For all heads and T, whether max-position retrieval alone is excluded, allowed or undecided.

    Args:
        task: a target with `comparison` and `components`; its own T does not matter.
        heads: tuples (h_1, .., h_L).
        n_tokens: values of T.
        count, trees: as in :func:`estimate`; :func:`flags_of` has the limits of the verdicts.

    Returns:
        Rows ``heads, n_tokens, verdict, needed, capacity``.

    Raises:
        InfoFlowError: as :func:`estimate`.
    """
    profile = _profile_of(task)
    check_trees(trees)
    needed = {tokens: profile.number(tokens, count) for tokens in n_tokens}
    rows = []
    for some in heads:
        for tokens in n_tokens:
            by_score = search(task.components, some, tokens, max_position_only=True)
            capacity = max_position_capacity(profile, some, tokens, trees)
            rows.append(
                {
                    "heads": list(some),
                    "n_tokens": tokens,
                    "verdict": _verdict(by_score, capacity, needed[tokens]),
                    "needed": needed[tokens],
                    "capacity": capacity,
                }
            )
    return rows


def _profile_of(task: Any) -> ComparisonProfile:
    profile = getattr(task, "comparison", None)
    if not isinstance(profile, ComparisonProfile) or not getattr(task, "components", ()):
        raise InfoFlowError(
            f"task {getattr(task, 'name', task)!r} has no comparison profile, or no components "
            "that heads could retrieve: expected a target whose value is that of best tuples of "
            "tokens; choose another, or give it `comparison` and `components`"
        )
    return profile


def estimate(
    architecture: ArchitectureLike,
    task: Target,
    *,
    count: Count = "paper",
    trees: int = 1,
    verify: int = 100,
    seed: int = 0,
) -> Estimate:
    """The two-step estimate of the paper's Sec. 5.3.

    Args:
        architecture: heads, width and length.
        task: a target with `comparison` and `components`.
        count: "paper" (the number that the paper's estimate uses), "unordered" (the better upper
            bound) or "proved" (the lower bound).
        trees: K in eq (5): 1 is the literal reading, ``task.comparison.n_trees`` removes its
            contradiction with global aggregation.
        verify: sampled inputs on which the schedule is run; 0 for none. Above T = 128 it is not.
        seed: of the samples.

    Raises:
        InfoFlowError: for an unknown count, trees below 1, T that differ, or a task without
            profile.
    """
    profile = _profile_of(task)
    n_heads, n_tokens = tuple(architecture.n_heads), architecture.n_tokens
    check_sizes(n_heads, n_tokens)
    if count not in COUNTS:
        raise InfoFlowError(f"count is {count!r}: expected one of {', '.join(COUNTS)}")
    check_trees(trees)
    if task.n_tokens != n_tokens:
        raise InfoFlowError(
            f"the task has n_tokens {task.n_tokens}, the architecture {n_tokens}: use the same T"
        )
    needed = profile.number(n_tokens, count)
    capacity = max_position_capacity(profile, n_heads, n_tokens, trees)
    size, saturated = information_needed(profile, n_heads, n_tokens, count, trees)
    positional = architecture.positional_embedding not in (None, "none", False)
    schedule = search(task.components, n_heads, n_tokens, positional)
    by_score = search(task.components, n_heads, n_tokens, max_position_only=True)
    verified = None
    if verify and n_tokens <= _LARGEST_VERIFIED:
        # the best schedule, and the one that the verdict "allowed" rests on
        verified = min(
            learns(task, some, verify, seed, positional=positional)
            for some in dict.fromkeys((schedule, by_score))
            if some is not None
        )
    upper = schedule.size if schedule else None
    d_token, d_model = architecture.d_token, architecture.d_model
    result = Estimate(
        target=profile.name,
        n_heads=n_heads,
        n_tokens=n_tokens,
        d_token=d_token,
        d_model=d_model,
        count=count,
        trees=trees,
        needed=needed,
        capacity=capacity,
        verdict=_verdict(by_score, capacity, needed),
        min_heads=min_heads(profile, n_heads, count),
        min_heads_here=min_heads_at(profile, n_heads, n_tokens, count, trees),
        min_information=size,
        saturated=saturated,
        lower={mode: exponent(size, d_token, d_model, mode) for mode in MODES},
        schedule=schedule,
        upper_information=upper,
        upper={} if upper is None else {m: exponent(upper, d_token, d_model, m) for m in MODES},
        verified=verified,
        reasons=(),
        flags=flags_of(profile, n_heads, count, trees),
    )
    reasons = _reasons(result, profile, positional, by_score)
    return replace(result, reasons=reasons, flags=(*result.flags, *_own_flags(result, profile)))


def _reasons(
    result: Estimate, profile: ComparisonProfile, positional: bool, by_score: Schedule | None
) -> tuple[str, ...]:
    """The argument, in words."""
    reasons = [
        f"the target needs {result.needed} comparisons of {profile.dimension}-tuples "
        f"(count={result.count!r}); by max-position retrieval alone the model makes at most "
        f"{result.capacity} (eq 5 with K = {result.trees}, the last layer for CLS only [derived])"
    ]
    if result.verdict == "excluded":
        reasons.append("so max-position retrieval alone is excluded: some |I| must grow")
    elif by_score is not None:
        reasons.append(
            "a schedule of max-position heads alone learns the target, with |I| <= "
            f"{by_score.size}: {by_score.describe()}"
        )
    else:
        reasons.append(
            "counting does not exclude max-position retrieval alone, but no such schedule is known"
        )
    if result.min_heads is None and profile.order < 3:
        reasons.append(
            "one layer compares h T keys at its only query that is read, the target grows like "
            f"T^{profile.order}: for large T no number of heads of one layer is enough (Thm 1)"
        )
    elif result.min_heads is None:
        reasons.append(
            f"its order of comparison is {profile.order}: beyond some T no number of heads is "
            "enough without growing sets (Prop 2)"
        )
    else:
        reasons.append(f"for large T counting asks for h_1 >= {result.min_heads}")
    if result.saturated:
        reasons.append(f"counting cannot be met by any |I|; T = {result.n_tokens} is reported")
    elif result.min_information:
        reasons.append(f"counting asks for some |I| >= {result.min_information}")
    else:
        reasons.append("counting asks for no |I| at all: no obstruction here")
    if result.schedule:
        reasons.append(f"|I| <= {result.upper_information} is enough: {result.schedule.describe()}")
    if result.verified is None:
        reasons.append(
            "schedules were not run on samples here; the rules they combine are [derived]"
        )
    if not positional:
        reasons.append("without a positional encoding no head can read fixed positions")
    return tuple(reasons)


def flags_of(
    profile: ComparisonProfile, n_heads: Sequence[int], count: Count, trees: int
) -> tuple[str, ...]:
    """The limits of the argument that concern verdicts and counts."""
    flags = list(profile.flags_for(count))
    if count != "proved" and profile.order > 1:
        flags.append(
            f"[flag] count={count!r} is an upper bound on the target's number of comparisons, so "
            "it suggests but does not prove what is excluded; count='proved' does"
        )
    if trees == 1 and profile.n_trees >= 3:
        flags.append(
            "[flag] K = 1 is the literal reading of eq (5), under which one head of global "
            f"aggregation fails for D >= 3, though the paper says it works; K = {profile.n_trees} "
            "(a tree for each component) removes that [chosen], and is not proved sound in general"
        )
    if len(n_heads) > 1 and profile.order == 2:
        flags.append(
            "[flag] that h_1 decides whatever layer 2 does is asymptotic: at small T a wide layer "
            "2 can make up the count"
        )
    flags.append(
        "[chosen] a score looks at tuples inside what one position holds, or at one tuple across "
        "two; with arbitrary scores the abstract model beats its own counting bound"
    )
    return tuple(flags)


def _own_flags(result: Estimate, profile: ComparisonProfile) -> tuple[str, ...]:
    """The limits that only this estimate's own numbers show."""
    flags = []
    if result.saturated:
        flags.append(
            "[flag] m_min is saturated: eq (5) is met by no |I| up to T"
            + (
                f", although the schedule found learns the target: with K = {result.trees} the "
                "count contradicts it"
                if result.schedule
                else ""
            )
        )
    if result.upper_information is not None:
        made = model_comparisons(
            result.n_heads,
            result.n_tokens,
            result.upper_information,
            profile.dimension,
            profile.n_trees,
        )
        if made < profile.number(result.n_tokens, "proved"):
            flags.append("[flag] the schedule found makes fewer comparisons than are proved needed")
    if result.verified is not None and result.verified < 1:
        flags.append(f"[flag] on {1 - result.verified:.0%} of the samples a schedule failed")
    flags.append("exponents leave out constants and the cost of nonlinear parts of the target")
    return tuple(flags)
