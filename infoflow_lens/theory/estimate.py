"""The two-step estimate (Sec. 5.3): what an architecture must pay for a target, before training.

Step 1 counts comparisons, which bounds |I| and so the cost from below. Step 2 searches for a
schedule that learns the target, which bounds it from above.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from infoflow_lens.foundation.display import Displayed
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import Count as Number
from infoflow_lens.foundation.settings import Index, Seed, checked
from infoflow_lens.theory.comparison import (
    ComparisonProfile,
    Component,
    Count,
    Heads,
    growth_sizes,
    information_needed,
    least,
    model_comparisons,
    reading_profile,
)
from infoflow_lens.theory.cost import MODES, exponent
from infoflow_lens.theory.routing import RoutedError, routed_error
from infoflow_lens.theory.schedule import Schedule, Target, learns
from infoflow_lens.theory.search import Found, find, needs_order
from infoflow_lens.theory.shapes import ModelShape, shape_of

Verdict = Literal["allowed", "excluded, proved", "excluded for heads of one role", "undecided"]

_LARGEST_VERIFIED = 128  # longer sequences are verified at 64 tokens
_VERIFIED_AT = 64
_MOST_SCORES = 5 * 10**7  # in a verification: a few seconds


@dataclass(frozen=True)
class Estimate(Displayed):
    """What InfoFlow says of an architecture and a target, before any training.

    Attributes:
        target, n_heads, n_tokens, d_token: what was asked.
        d_model: E; a tuple where layers differ.
        count: which number of comparisons was used for the target; see `ComparisonProfile`.
        trees: K of eq (5).
        needed: the target's number of comparisons.
        capacity: comparisons of the architecture by max-position retrieval alone, one role a head.
        mechanisms: what the verdict is on: "max-position retrieval alone", or "all mechanisms" for
            targets that read fixed positions.
        verdict: "allowed" by a schedule that was run on samples; "excluded, proved", for any
            scores, roles and adaptive heads; "excluded for heads of one role", by the chosen count;
            or "undecided".
        why: what the verdict rests on, in words.
        min_heads: the smallest h_1 that counting leaves for large T, other layers as given, for
            heads of one role; None if no number of heads is enough.
        min_heads_here: the same at this T.
        min_information: the smallest |I| with which counting is met, at most T.
        saturated: whether no |I| up to T meets it.
        lower: exponents of the lower bound, by mode; "certified" rests on the proved count alone,
            with a tree for each component. See `infoflow_lens.theory.cost.exponent`.
        schedule: the best schedule found, by any mechanism.
        upper_information: its largest |I|.
        upper: its exponents, by mode.
        verified: how often the schedules held the active index set on sampled inputs; None where
            that was not tried.
        verified_at: T of these samples.
        routed: what first-layer heads with several roles leave; None where routing is no question.
        left_out: what the search did not weigh, in words.
        reasons: the argument in words.
        flags: the limits of the argument that concern these numbers.
    """

    target: str
    n_heads: tuple[int, ...]
    n_tokens: int
    d_token: int
    d_model: int | tuple[int, ...]
    count: Count
    trees: int
    needed: int
    capacity: int
    mechanisms: Literal["max-position retrieval alone", "all mechanisms"]
    verdict: Verdict
    why: str
    min_heads: int | None
    min_heads_here: int
    min_information: int
    saturated: bool
    lower: dict[str, float]
    schedule: Schedule | None
    upper_information: int | None
    upper: dict[str, float]
    verified: float | None
    verified_at: int | None
    routed: RoutedError | None
    left_out: tuple[str, ...]
    reasons: tuple[str, ...]
    flags: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The estimate as JSON-compatible values; the schedule in words."""
        plain = replace(self, schedule=None)
        values = asdict(plain)
        values["schedule"] = self.schedule.describe() if self.schedule else None
        return values


def max_position_capacity(
    profile: ComparisonProfile, n_heads: Sequence[int], n_tokens: int, trees: int = 1
) -> int:
    """Comparisons by max-position retrieval alone: eq (5) at the sizes to which sets can grow."""
    sizes = growth_sizes(tuple(n_heads), n_tokens)
    return model_comparisons(tuple(n_heads), n_tokens, sizes, profile.dimension, trees)


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


def _by_counting(capacity: int, needed: int) -> Verdict:
    """Without a schedule: what a count says of heads of one role."""
    return "excluded for heads of one role" if capacity < needed else "undecided"


@checked
def phase_diagram(
    task: Any,
    heads: tuple[Heads, ...],
    n_tokens: tuple[Number, ...],
    count: Count = "paper",
    trees: Number = 1,
) -> list[dict[str, Any]]:
    """For all heads and T the verdict on max-position retrieval alone, heads of one role.

    Args:
        task: a target with `comparison` and `components`; its own T does not matter.
        heads: tuples (h_1, .., h_L).
        n_tokens: values of T.
        count, trees: as in :func:`estimate`; :func:`flags_of` has the limits of the verdicts.

    Returns:
        Rows ``heads, n_tokens, verdict, needed, capacity``. Schedules are not run on samples here.

    Raises:
        InfoFlowError: as :func:`estimate`.
    """
    profile, components, reads = _asked(task)
    needed = {tokens: profile.number(tokens, count) for tokens in n_tokens}
    active = {tokens: 0 if reads else _seen_active(task, tokens) for tokens in n_tokens}
    rows = []
    for some in heads:
        for tokens in n_tokens:
            found = find(
                components, some, tokens, max_position_only=not reads, reads=reads,
                positional=bool(reads),
            )  # fmt: skip
            capacity = max_position_capacity(profile, some, tokens, trees)
            verdict: Verdict = "allowed"
            if found.schedule is None:
                too_small = growth_sizes(some, tokens)[-1][1] < active[tokens]
                proved = too_small or _one_layer_proof(profile, some, tokens) is not None
                verdict = "excluded, proved" if proved else _by_counting(capacity, needed[tokens])
            rows.append(
                {
                    "heads": list(some),
                    "n_tokens": tokens,
                    "verdict": verdict,
                    "needed": needed[tokens],
                    "capacity": capacity,
                }
            )
    return rows


def _seen_active(task: Any, n_tokens: int) -> int:
    """The most active tokens of some sampled inputs of T tokens, or of 64 where T is larger."""
    try:
        short = replace(task, n_tokens=min(n_tokens, _VERIFIED_AT))
    except (TypeError, ValueError):  # T follows from other sizes, or a subset does not fit
        return 0
    return _Samples(short, 20, 0).largest_active()


def _asked(task: Any) -> tuple[ComparisonProfile, tuple[Component, ...], Sequence[int]]:
    """The counts, the components and the fixed positions of a target."""
    components = tuple(getattr(task, "components", ()))
    reads = getattr(task, "reads", ())
    profile = getattr(task, "comparison", None)
    name = getattr(task, "name", type(task).__name__)
    if not components and not len(reads):
        raise InfoFlowError(
            f"task {name!r} has no components that heads could retrieve and reads no fixed "
            "positions: expected a target with `components` or `reads`, such as "
            "infoflow_lens.tasks.Target"
        )
    if not components and profile is None:
        profile = reading_profile(name)
    if not isinstance(profile, ComparisonProfile):
        raise InfoFlowError(
            f"task {name!r} has no comparison profile: expected `comparison`; "
            "components_profile(name, components) derives one"
        )
    longest = max([1, *(c.arity for c in components)])
    if components and longest > 1 and profile.dimension < longest:
        raise InfoFlowError(
            f"task {name!r} has components of arity {longest}, but its profile says dimension "
            f"{profile.dimension}: expected at least the arity; components_profile derives it"
        )
    return profile, components, reads


def _one_layer_proof(
    profile: ComparisonProfile, n_heads: Sequence[int], n_tokens: int
) -> str | None:
    """Why one layer cannot, if the proved count says so.

    CLS asks one constant question, so that its heads have one role each and adapt to nothing: for
    one layer the count of fixed trees is a proof. For more layers it is none, since heads that
    adapt or are routed are no fixed trees [derived].
    """
    if len(n_heads) > 1:
        return None
    needed = profile.number(n_tokens, "proved")
    made = max_position_capacity(profile, n_heads, n_tokens, profile.n_trees)
    if made >= needed:
        return None
    return (
        f"one layer asks a single question, CLS's, and makes {made} comparisons where {needed} are "
        "proved to be needed"
    )


@dataclass(frozen=True)
class _Samples:
    """Sequences on which schedules are run, at a T that can be."""

    task: Any
    n: int
    seed: int

    @classmethod
    def of(cls, task: Any, n: int, seed: int) -> "_Samples | None":
        """At the task's T, or at 64 where that is long; None if neither can be drawn."""
        if n < 1:
            return None
        if task.n_tokens > _LARGEST_VERIFIED:
            try:
                task = replace(task, n_tokens=_VERIFIED_AT)
            except (TypeError, ValueError):
                return None
        return cls(task, n, seed)

    def learns(self, schedule: Schedule, shape: ModelShape, heads: Sequence[int]) -> float | None:
        """How often a schedule holds the active set; None if it is not one for this T."""
        task = self.task
        arity = max([1, *(c.arity for c in task.components)])
        size = min(task.n_tokens, schedule.size)
        work = task.n_tokens * size**arity * max(1, len(task.components))
        n = max(5, min(self.n, _MOST_SCORES // max(1, work)))
        return learns(
            task, schedule, n, self.seed, positional=shape.positional, causal=shape.causal
        )

    def order_matters(self) -> bool:
        """Whether two tokens were seen that change the target by changing places."""
        x, y = self.task.sample(min(self.n, 5), self.seed)
        last = x.shape[1] - int(x.ndim == 2)  # the response sign stays where it is
        for first, second in itertools.islice(itertools.combinations(range(last), 2), 2000):
            swapped = x.clone()
            swapped[:, [first, second]] = x[:, [second, first]]
            for row in range(len(x)):
                try:
                    other = self.task.target(swapped[row : row + 1])
                except InfoFlowError:  # no sequence of the task
                    continue
                if not torch.allclose(other.double(), y[row : row + 1].double(), atol=1e-4):
                    return True
        return False

    def largest_active(self) -> int:
        """The most active tokens that an input was seen to have."""
        x, _ = self.task.sample(min(self.n, 50), self.seed)
        return int(self.task.active_index_set(x).sum(dim=1).max())


@checked
def estimate(
    architecture: Any,
    task: Target,
    *,
    count: Count = "paper",
    trees: Number = 1,
    verify: Index = 100,
    seed: Seed = 0,
) -> Estimate:
    """The two-step estimate of the paper's Sec. 5.3.

    Args:
        architecture: heads, width and length: an `Architecture`, a `ModelShape`, a config or model
            of TransformerLens or Hugging Face, or a folder with a config; see
            :func:`infoflow_lens.theory.shapes.shape_of`.
        task: a target with `comparison` and `components`, or `reads`.
        count: "paper" (the number that the paper's estimate uses), "unordered" (the better upper
            bound) or "proved" (the lower bound).
        trees: K in eq (5): 1 is the literal reading, ``task.comparison.n_trees`` removes its
            contradiction with global aggregation.
        verify: sampled inputs on which schedules are run; 0 for none. Above T = 128 they are run on
            64 tokens.
        seed: of the samples.

    Raises:
        InfoFlowError: for an unknown count, trees below 1, sizes that differ, a model of another
            kind than the theory's, or a task without anything to retrieve or read.
    """
    profile, components, reads = _asked(task)
    shape = _fitting(architecture, task)
    n_heads, n_tokens = shape.n_heads, task.n_tokens
    needed = profile.number(n_tokens, count)
    capacity = max_position_capacity(profile, n_heads, n_tokens, trees)
    size, saturated = information_needed(profile, n_heads, n_tokens, count, trees)
    proved_size, _ = information_needed(
        profile, n_heads, n_tokens, "proved", max(trees, profile.n_trees)
    )
    samples = _Samples.of(task, verify, seed)
    reachable = shape.reach(n_tokens) >= n_tokens
    best = _find(shape, components, reads, n_tokens) if reachable else Found(None, True)
    fixed = needs_order(components, reads, n_tokens) or bool(len(reads))
    alone = (
        best
        if fixed or not reachable
        else _find(shape, components, reads, n_tokens, max_position_only=True)
    )
    routed_schedule = _routed_schedule(shape, components, reads, n_tokens, alone, fixed)
    shown: dict[Schedule, float | None] = {}
    if samples is not None:
        for some in (best.schedule, alone.schedule, routed_schedule):
            if some is not None:
                shown.setdefault(some, samples.learns(some, shape, n_heads))
    verdict, why = _decide(
        profile, shape, n_tokens, alone, routed_schedule, shown, samples, fixed, reachable,
        needed, capacity, count,
    )  # fmt: skip
    d_token = getattr(task, "d_token", 1)
    sure = [
        value
        for some, value in shown.items()
        if value is not None and some in (best.schedule, alone.schedule)
    ]
    upper = best.schedule.size if best.schedule else None
    widest = max(shape.d_model)
    result = Estimate(
        target=profile.name,
        n_heads=n_heads,
        n_tokens=n_tokens,
        d_token=d_token,
        d_model=shape.d_model[0] if len(set(shape.d_model)) == 1 else shape.d_model,
        count=count,
        trees=trees,
        needed=needed,
        capacity=capacity,
        mechanisms="all mechanisms" if fixed else "max-position retrieval alone",
        verdict=verdict,
        why=why,
        min_heads=min_heads(profile, n_heads, count),
        min_heads_here=min_heads_at(profile, n_heads, n_tokens, count, trees),
        min_information=size,
        saturated=saturated,
        lower={
            mode: exponent(proved_size if mode == "certified" else size, d_token, widest, mode)
            for mode in MODES
        },
        schedule=best.schedule,
        upper_information=upper,
        upper=_upper(best.schedule, d_token, shape),
        verified=min(sure) if sure else None,
        verified_at=samples.task.n_tokens if samples and sure else None,
        routed=_routed_error(shape, task, components, samples),
        left_out=tuple(dict.fromkeys((*best.left_out, *alone.left_out))),
        reasons=(),
        flags=flags_of(profile, n_heads, count, trees),
    )
    reasons = _reasons(result, profile, shape, alone.schedule, components, reads)
    return replace(result, reasons=reasons, flags=(*result.flags, *_own_flags(result, profile)))


def _fitting(architecture: Any, task: Any) -> ModelShape:
    """The shape of the model on the task's sequences.

    Raises:
        InfoFlowError: where T or d of an architecture of ours is another than the task's.
    """
    shape = shape_of(architecture)
    own = getattr(architecture, "architecture", architecture)
    if hasattr(own, "n_tokens") and not shape.causal and shape.n_tokens != task.n_tokens:
        raise InfoFlowError(
            f"the task has n_tokens {task.n_tokens}, the architecture {shape.n_tokens}: use the "
            "same T"
        )
    d_token = getattr(own, "d_token", None)
    if d_token is not None and d_token != getattr(task, "d_token", None):
        raise InfoFlowError(
            f"the task has d_token {getattr(task, 'd_token', None)}, the architecture {d_token}: "
            "use the same d"
        )
    return shape if shape.n_tokens == task.n_tokens else shape.with_tokens(task.n_tokens)


def _find(
    shape: ModelShape,
    components: Sequence[Component],
    reads: Sequence[int],
    n_tokens: int,
    max_position_only: bool = False,
    roles: Sequence[int] | int = 1,
) -> Found:
    usable = shape.usable(n_tokens)
    return find(
        components,
        shape.n_heads,
        n_tokens,
        shape.positional,
        max_position_only=max_position_only,
        reads=reads,
        causal=shape.causal,
        roles=roles,
        d_model=shape.d_model,
        usable=None if all(usable) else usable,
    )


def _routed_schedule(
    shape: ModelShape,
    components: Sequence[Component],
    reads: Sequence[int],
    n_tokens: int,
    alone: Found,
    fixed: bool,
) -> Schedule | None:
    """A schedule of heads with several roles, where one role does not do and queries can route."""
    pairs = [c for c in components if c.arity == 2 and c.tuples is None]
    if alone.schedule is not None or fixed or len(pairs) < 2 or shape.n_layers < 2:
        return None
    many = 2 * len(pairs)
    roles = [
        many if (shape.routes if layer == 0 else shape.has_mlp) else 1
        for layer in range(shape.n_layers)
    ]
    if max(roles) == 1:
        return None
    found = _find(shape, components, reads, n_tokens, True, roles).schedule
    return found if found is not None and found.roles > 1 else None


def _decide(
    profile: ComparisonProfile,
    shape: ModelShape,
    n_tokens: int,
    alone: Found,
    routed: Schedule | None,
    shown: dict[Schedule, float | None],
    samples: _Samples | None,
    fixed: bool,
    reachable: bool,
    needed: int,
    capacity: int,
    count: Count,
) -> tuple[Verdict, str]:
    """The verdict, and what it rests on."""
    if not reachable:
        return "excluded, proved", (
            f"only the last {shape.reach(n_tokens)} of {n_tokens} tokens can reach the read-out "
            "through the windows of local attention"
        )
    if alone.schedule is not None:
        held = shown.get(alone.schedule)
        if held is None or held == 1:
            return "allowed", f"by a schedule with |I| <= {alone.schedule.size}"
    elif fixed and not (shape.positional or shape.causal):
        if samples is None or not samples.order_matters():
            return "undecided", "without positions no schedule is known, and none is excluded"
        return "excluded, proved", (
            "the target tells positions apart, and a model without positional encoding gives the "
            "same answer for every order of the tokens"
        )
    if routed is not None and shown.get(routed) == 1:
        return "allowed", (
            f"by routed heads, each with several roles, with |I| <= {routed.size}: "
            f"{routed.describe()}"
        )
    if alone.schedule is None and not fixed:
        most = growth_sizes(shape.n_heads, n_tokens)[-1][1]
        active = samples.largest_active() if samples is not None else 0
        if most < active:
            return "excluded, proved", (
                f"CLS can hold {most} tokens by max-position retrieval, whatever the scores, and "
                f"the target was seen to depend on {active}"
            )
        if (proof := _one_layer_proof(profile, shape.n_heads, n_tokens)) is not None:
            return "excluded, proved", proof
    verdict = _by_counting(capacity, needed)
    if alone.schedule is not None or verdict == "undecided":
        return "undecided", "counting excludes nothing, and no schedule is known that always holds"
    return verdict, f"by counting comparisons (count={count!r}), one role a head"


def _upper(schedule: Schedule | None, d_token: int, shape: ModelShape) -> dict[str, float]:
    """Exponents of the costliest state, each layer with its own width."""
    if schedule is None:
        return {}
    return {
        mode: max(
            exponent(size, d_token, width, mode)
            for size, width in zip(schedule.sizes, shape.d_model, strict=True)
        )
        for mode in MODES
    }


def _routed_error(
    shape: ModelShape, task: Any, components: Sequence[Component], samples: _Samples | None
) -> RoutedError | None:
    """What routing leaves, where fewer heads than pairs stand in the first of two layers."""
    pairs = len(components) > 1 and all(c.arity == 2 and c.tuples is None for c in components)
    if not pairs or shape.n_layers != 2 or shape.n_heads[0] >= len(components):
        return None
    if samples is None or shape.causal or not hasattr(task, "outer_function"):
        return None
    if len(components) > 8:
        return None
    return routed_error(samples.task, shape.n_heads[0], max(2, samples.n), samples.seed)


def _reasons(
    result: Estimate,
    profile: ComparisonProfile,
    shape: ModelShape,
    alone: Schedule | None,
    components: Sequence[Component],
    reads: Sequence[int],
) -> tuple[str, ...]:
    """The argument, in words."""
    reasons = []
    if result.needed:
        reasons.append(
            f"the target needs {result.needed} comparisons of {profile.dimension}-tuples "
            f"(count={result.count!r}); by max-position retrieval alone the model makes at most "
            f"{result.capacity} (eq 5 with K = {result.trees}, the last layer for CLS only "
            "[derived])"
        )
    elif reads:
        reasons.append("the target compares nothing: it reads fixed positions")
    reasons.append(f"{result.verdict}: {result.why}")
    if alone is not None:
        what = {
            "max-position retrieval": "max-position heads",
            "fixed positions": "fixed positions and retrieval",
        }.get(alone.mechanism, alone.mechanism)
        reasons.append(
            f"a schedule of {what} alone learns the target, with |I| <= {alone.size}: "
            f"{alone.describe()}"
        )
        if alone.adaptive:
            reasons.append(
                "it is adaptive: what a layer looks for depends on what was found before, which "
                "takes queries made by a network of all that is held [derived]"
            )
    if result.needed:
        reasons.extend(_heads_in_words(result, profile))
    if result.schedule and result.schedule is not alone:
        reasons.append(f"|I| <= {result.upper_information} is enough: {result.schedule.describe()}")
    if result.routed is not None:
        r = result.routed
        able = "queries come from a network" if shape.routes else "it would take an encoder network"
        reasons.append(
            f"{r.n_heads} first-layer heads with {r.roles} roles each ({able}) hold all best pairs "
            f"in {r.held:.0%} of {r.n} samples and leave an NMSE of {r.nmse:.2g} "
            f"[{r.low:.2g}, {r.high:.2g}] at T = {result.verified_at or result.n_tokens} [measured]"
        )
    if result.verified is None:
        reasons.append(
            "schedules were not run on samples here; the rules they combine are [derived]"
        )
    elif result.verified_at != result.n_tokens:
        reasons.append(f"schedules were run on samples of {result.verified_at} tokens")
    if not shape.positional:
        reasons.append("without a positional encoding no head can read fixed positions")
    if result.left_out:
        reasons.append("not weighed by the search: " + "; ".join(result.left_out))
    return tuple(reasons)


def _heads_in_words(result: Estimate, profile: ComparisonProfile) -> list[str]:
    reasons = []
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
        reasons.append(
            f"for large T counting asks for h_1 >= {result.min_heads} (heads of one role; with "
            "routing, heads times roles)"
            if profile.order > 1
            else f"for large T counting asks for h_1 >= {result.min_heads}"
        )
    if result.saturated:
        reasons.append(f"counting cannot be met by any |I|; T = {result.n_tokens} is reported")
    elif result.min_information:
        reasons.append(f"counting asks for some |I| >= {result.min_information}")
    else:
        reasons.append("counting asks for no |I| at all: no obstruction here")
    return reasons


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
