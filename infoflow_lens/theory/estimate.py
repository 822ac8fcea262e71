"""The two-step estimate (Sec. 5.3): what an architecture must pay for a target, before training.

Step 1 counts comparisons, which bounds |I| and so the cost from below. Step 2 searches for a
schedule that learns the target, which bounds it from above.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

from infoflow_lens.foundation.display import Displayed
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.processes import threads
from infoflow_lens.foundation.settings import Count as Number
from infoflow_lens.foundation.settings import Index, Seed, checked
from infoflow_lens.theory.comparison import (
    ComparisonProfile,
    Component,
    Count,
    Heads,
    least,
    least_information,
    model_comparisons,
)
from infoflow_lens.theory.cost import MODES, exponent
from infoflow_lens.theory.exclusion import Document, carry_over, describe, excluding
from infoflow_lens.theory.question import Answer, Question, max_position_capacity
from infoflow_lens.theory.routing import RoutedError, measure_routing
from infoflow_lens.theory.schedule import (
    Demand,
    Samples,
    Schedule,
    Target,
    demands,
    set_length,
)
from infoflow_lens.theory.search import Found
from infoflow_lens.theory.shapes import ModelShape, shape_of

Verdict = Literal[
    "allowed by construction", "excluded, proved", "excluded by the paper's count", "open"
]


@dataclass(frozen=True)
class Estimate(Displayed):
    """What InfoFlow says of an architecture and a target, before any training.

    Attributes:
        target, n_heads, n_tokens, d_token: what was asked.
        d_model: E; a tuple where layers differ.
        count: which number of comparisons was used for the target; see `ComparisonProfile`.
        trees: K of eq (5).
        needed: the target's number of comparisons, of the components that the schedule retrieves.
        capacity: comparisons of the architecture by max-position retrieval alone, one role a head.
        mechanisms: what the verdict is on: "max-position retrieval alone", or "all mechanisms" for
            targets that read fixed positions.
        verdict: "excluded, proved" by a witness, for any scores, roles and adaptive heads;
            "allowed by construction", by a schedule that was run on samples; "excluded by the
            paper's count", where all that it assumes was seen on samples, which is no proof; or
            "open".
        why: what the verdict rests on, in words.
        witness: what proves "excluded, proved", as JSON-compatible values;
            `infoflow_lens.foundation.exclusions.verify_exclusion` checks it with the target alone.
        min_heads: the smallest h_1 that counting leaves for large T, other layers as given, for
            heads of one role; None if no number of heads is enough.
        min_heads_here: the same at this T.
        min_information: the smallest |I| with which counting is met, at most T.
        saturated: whether no |I| up to T meets it.
        lower: exponents of a decoder, |I| d / E - 1: "counted" by `min_information`, "certified" by
            the proved count alone, with a tree for each component. See
            `infoflow_lens.theory.cost.exponent`.
        schedule: the best schedule found, by any mechanism.
        upper_information: its largest |I|.
        upper: its exponents, by mode.
        verified: how often the schedules held the active index set on sampled inputs; None where
            that was not tried.
        verified_on: how many inputs these were. Where all were served, a schedule fails on less
            than 3 / `verified_on` of all inputs (95%).
        verified_at: T of these samples.
        d_head: the least per-head dimension of each layer by the schedule of the verdict, the rank
            of its scores; None for a layer of which it is not known.
        products: of numbers, which feed-forward networks make after each layer by that schedule.
        width: the largest treewidth of a score's graph: about T^(width + 1) comparisons are enough;
            None where no score is compared.
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
    witness: Document | None
    min_heads: int | None
    min_heads_here: int
    min_information: int
    saturated: bool
    lower: dict[str, float]
    schedule: Schedule | None
    upper_information: int | None
    upper: dict[str, float]
    verified: float | None
    verified_on: int | None
    verified_at: int | None
    d_head: tuple[int | None, ...]
    products: tuple[int, ...]
    width: int | None
    routed: RoutedError | None
    left_out: tuple[str, ...]
    reasons: tuple[str, ...]
    flags: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as JSON-compatible values; the schedule in words."""
        words = self.schedule.describe() if self.schedule else None
        return asdict(replace(self, schedule=None)) | {"schedule": words}


def min_heads(profile: ComparisonProfile, n_heads: Sequence[int], count: Count) -> int | None:
    """Return the smallest h_1 that counting leaves for large T, with the other layers as given.

    Leading terms: ``(h_1 + .. + h_{L-1}) T^2`` for L >= 2, or ``h_1 T`` for one layer, against the
    target's ``c T^p`` by this count. None if p is larger: then no number of heads is enough
    without growing sets (Prop 2).
    """
    order_of_attention = 1 if len(n_heads) == 1 else 2
    growth = profile.growth(count)
    if growth > order_of_attention:
        return None
    if growth < order_of_attention:
        return 1
    # the last layer has one query that is read, so its heads do not count for large T
    others = sum(n_heads[1:-1])
    # less a hair, since the coefficient is that of a large finite T, with lower terms in it
    return max(1, math.ceil(profile.leading_coefficient(count) - 1e-6) - others)


def min_heads_at(
    profile: ComparisonProfile,
    n_heads: Sequence[int],
    n_tokens: int,
    count: Count,
    trees: int = 1,
) -> int:
    """Find the least h_1 with which counting is met at this T, the other layers as given."""
    needed = profile.number(n_tokens, count)

    capacity = partial(max_position_capacity, profile, n_tokens=n_tokens, trees=trees)
    return least(lambda first: capacity((first, *n_heads[1:])) >= needed, 1)


@checked
@threads(1)
def phase_diagram(
    task: Any,
    heads: tuple[Heads, ...],
    n_tokens: tuple[Number, ...],
    count: Count = "paper",
    trees: Number = 1,
    *,
    positional: bool | None = None,
) -> list[dict[str, Any]]:
    """Judge max-position retrieval alone, heads of one role, for all heads and T.

    Args:
        task: a target with `comparison` and `components`; its own T does not matter.
        heads: tuples (h_1, .., h_L).
        n_tokens: values of T.
        count, trees: as in :func:`estimate`; :func:`list_flags` has the limits of the verdicts.
        positional: whether models have a positional encoding; default, where the target reads fixed
            positions.

    Returns:
        Rows ``heads, n_tokens, verdict, needed, capacity``. Schedules are run on 20 inputs. A
        witness for some heads and T is tried for fewer heads and larger T, too.

    Raises:
        InfoFlowError: as :func:`estimate`, and for a T that the target cannot have.
    """
    asked = Question.read(task, seed=0)
    positional = bool(asked.reads) if positional is None else positional
    cases = {tokens: set_length(task, tokens) for tokens in n_tokens}
    found: dict[tuple[Heads, int], Verdict] = {}
    witnesses: list[Document] = []
    # the most heads and the fewest tokens first: what is proved of them holds for fewer and longer
    for tokens, some in itertools.product(sorted(n_tokens), sorted(heads, key=sum, reverse=True)):
        shape = ModelShape(some, (1,) * len(some), tokens, positional)
        case = cases[tokens]
        samples = Samples.draw(case, 20, 0)
        known = [w for w in witnesses if len(w["n_heads"]) == len(some)]
        asked_here = _Case(asked, shape, tokens, samples, case)
        found[some, tokens], _, witness = asked_here.decide(0, count, trees, known)
        witnesses += [] if witness is None else [witness]
    return [
        {
            "heads": list(some),
            "n_tokens": tokens,
            "verdict": found[some, tokens],
            "needed": asked.profile.number(tokens, count),
            "capacity": max_position_capacity(asked.profile, some, tokens, trees),
        }
        for some, tokens in itertools.product(heads, n_tokens)
    ]


@checked
@threads(1)
def estimate(
    architecture: Any,
    task: Target,
    *,
    count: Count = "paper",
    trees: Number = 1,
    verify: Index = 100,
    seed: Seed = 0,
) -> Estimate:
    """Return the two-step estimate of the paper's Sec. 5.3.

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
    return estimate_asked(Question.read(task, seed), architecture, count, trees, verify, seed)


def estimate_asked(
    asked: Question,
    architecture: Any,
    count: Count,
    trees: int,
    verify: int,
    seed: int,
) -> Estimate:
    """Return the estimate of a target that was read before, which for many takes most of the time.

    Args:
        asked: the target as the search sees it, read with this seed.
        architecture, count, trees, verify, seed: as in :func:`estimate`.
    """
    task = asked.task
    shape = _fit_shape(architecture, task)
    n_heads, n_tokens = shape.n_heads, task.n_tokens
    asked.profile.number(n_tokens, count)  # refuses what cannot be counted, before the search
    samples = Samples.draw(task, verify, seed)
    case = _Case(asked, shape, n_tokens, samples, task)
    best, alone = case.best, case.alone
    # what a target lists may be more than what it needs
    if alone.schedule is None:
        needs = [(asked.profile_of(r).number(n_tokens, count), r) for r in asked.readings]
        alone = replace(alone, reading=min(needs, key=lambda each: each[0])[1])
    profile = asked.profile_of(alone.reading)
    needed = profile.number(n_tokens, count)
    capacity = max_position_capacity(profile, n_heads, n_tokens, trees)
    size, saturated = least_information(profile, n_heads, n_tokens, count, trees)
    proved_size, _ = least_information(
        profile, n_heads, n_tokens, "proved", max(trees, profile.n_trees)
    )
    if asked.least_trees < profile.n_trees:  # a count of them is then no lower bound
        proved_size = 0
    verdict, why, witness = case.decide(seed, count, trees)
    if best.schedule is not None:  # a lower bound does not exceed what some schedule holds
        proved_size = min(proved_size, best.schedule.size)
    d_token = getattr(task, "d_token", 1)
    sure = [held for held in (case.run(best), case.run(alone)) if held is not None]
    schedule = best.schedule
    # the widest layer has most room, and a lower bound must hold there, too
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
        mechanisms="all mechanisms" if asked.positional else "max-position retrieval alone",
        verdict=verdict,
        why=why,
        witness=witness,
        min_heads=min_heads(profile, n_heads, count),
        min_heads_here=min_heads_at(profile, n_heads, n_tokens, count, trees),
        min_information=size,
        saturated=saturated,
        lower={
            "counted": exponent(size, d_token, widest, "decoder"),
            "certified": exponent(proved_size, d_token, widest, "decoder"),
        },
        schedule=schedule,
        upper_information=schedule.size if schedule else None,
        upper=_bound_exponents(schedule, d_token, shape),
        verified=min(sure) if sure else None,
        verified_on=case.run_on if sure else None,
        verified_at=samples.task.n_tokens if samples and sure else None,
        d_head=tuple(demand.d_head for demand in case.demands),
        products=tuple(demand.products for demand in case.demands),
        width=asked.width,
        routed=_measure_routing(shape, task, asked.components, samples),
        left_out=tuple(dict.fromkeys((*best.found.left_out, *alone.found.left_out))),
        reasons=(),
        flags=list_flags(profile, n_heads, count, trees),
    )
    reasons = _list_reasons(result, profile, shape, alone, asked)
    return replace(
        result, reasons=reasons, flags=(*result.flags, *_list_own_flags(result, profile))
    )


def _fit_shape(architecture: Any, task: Any) -> ModelShape:
    """Return the shape of the model on the task's sequences.

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
    return shape if shape.n_tokens == task.n_tokens else shape.set_length(task.n_tokens)


@dataclass
class _Case:
    """One target and one architecture: the schedules, run on samples, and the verdict."""

    asked: Question
    shape: ModelShape
    n_tokens: int
    samples: Samples | None
    task: Any

    def __post_init__(self) -> None:
        self._held: dict[Answer, float | None] = {}
        self.reachable = self.shape.reach(self.n_tokens) >= self.n_tokens

    @cached_property
    def best(self) -> Answer:
        """The schedule with the smallest sets, by any mechanism."""
        found = self._search_own(False)
        smaller = self.alone.schedule
        if smaller is not None and (found.schedule is None or smaller.size < found.schedule.size):
            return self.alone
        return found

    @cached_property
    def alone(self) -> Answer:
        """The answer by max-position retrieval alone, by all mechanisms where positions matter."""
        if self.asked.positional or not self.reachable:
            return self._search_own(False)
        answers = self.asked.answers(self.shape, self.n_tokens, True)
        right = (each for each in answers if each.serves(self.run(each)))
        return next(right, None) or self._search_own(True)

    def _search_own(self, max_position_only: bool) -> Answer:
        """Search for the target's own list."""
        own = self.asked.readings[0]
        if not self.reachable:
            return Answer(Found(None), own)
        return Answer(self.asked.search(self.shape, self.n_tokens, max_position_only), own)

    @cached_property
    def demands(self) -> tuple[Demand, ...]:
        """The demands of the verdict's schedule on each layer; none without tokens."""
        answer = self.alone
        if answer.schedule is None or answer.reading.tokens is None:
            return ()
        return demands(answer.schedule, answer.reading.components, answer.reading.tokens)

    def lacks(self) -> str | None:
        """Say what the architecture has too little of for the schedule; None if nothing."""
        given = self.shape.d_head or ()
        for layer, (demand, n) in enumerate(zip(self.demands, given, strict=False), start=1):
            if demand.d_head is not None and demand.d_head > n:
                return (
                    f"d_head >= {demand.d_head} in layer {layer}, the rank of its scores, not {n}"
                )
        schedule = self.alone.schedule
        if self.shape.has_mlp or schedule is None:
            return None
        if any(demand.products for demand in self.demands):
            return "feed-forward networks, which join what a token holds"
        # what is held together by position, heads do not compare
        inside = self.asked.components and schedule.mechanism != "max-position retrieval"
        if inside or not self.asked.is_linear:
            return "feed-forward networks, which make the value of what CLS holds"
        return None

    def run(self, answer: Answer) -> float | None:
        """Return the share of samples on which a schedule holds the active set; None if not run."""
        if answer not in self._held:
            self._held[answer] = answer.run(self.samples, self.shape)
        return self._held[answer]

    @cached_property
    def routing(self) -> Answer | None:
        """The schedule of heads with several roles, where one does not do and queries can route."""
        shape = self.shape
        pairs = [c for c in self.asked.components if c.arity == 2 and c.tuples is None]
        if (
            not self.reachable
            or self.alone.schedule is not None
            or self.asked.positional
            or len(pairs) < 2
        ):
            return None
        # a query can choose its role behind a nonlinear encoder, or behind a feed-forward network,
        # which pairs ask for in any case
        able = [shape.routes, *[True] * (shape.n_layers - 1)]
        if shape.n_layers < 2 or not shape.has_mlp:
            return None
        # a pair can be looked up from either of its tokens
        roles = [2 * len(pairs) if yes else 1 for yes in able]
        found = self.asked.search(shape, self.n_tokens, True, roles)
        several = found.schedule is not None and found.schedule.roles > 1
        return Answer(found, self.asked.readings[0]) if several else None

    def decide(
        self, seed: int, count: Count, trees: int, known: Sequence[Document] = ()
    ) -> tuple[Verdict, str, Document | None]:
        """Return the verdict, what it rests on, and the witness if it is proved.

        A proof goes first: what a schedule misses may be too rare for samples. `known` are
        witnesses of other sizes, which may serve here as well.
        """
        asked, case = self.asked, None if self.samples is None else self.task
        positions_matter = asked.positional and (self.shape.positional or self.shape.causal)
        # where the model can read the positions that count, no kind of witness applies
        if case is not None and not (self.reachable and positions_matter):
            witness = carry_over(known, case, self.shape)
            unserved = self.alone.schedule is None
            witness = witness or excluding(case, self.shape, seed, asked.positional, unserved)
            if witness is not None:
                return "excluded, proved", describe(witness), witness
        allowed = self.alone.schedule is not None and self.alone.serves(self.run(self.alone))
        lacking = self.lacks() if allowed else None
        if lacking is not None:
            return (
                "open",
                f"heads are enough, but the schedule that is known asks for {lacking}",
                None,
            )
        if allowed:
            return "allowed by construction", self._explain(self.alone), None
        if self.routing is not None and self.run(self.routing) == 1.0:
            why = "by routed heads, each with several roles, "
            # without the explanation's own "by ", which the words before it say
            return "allowed by construction", why + self._explain(self.routing)[3:], None
        missing = self.alone.schedule is None
        # the count is of max-position retrieval; it decides only where no schedule is known
        counted = missing and self.reachable and not asked.positional
        if counted and asked.counts_out(self.shape, self.n_tokens, count, trees):
            if asked.unmet:
                return "open", (
                    "the paper's count says no, but what it assumes does not hold here: "
                    f"{'; '.join(asked.unmet)}; no schedule for these heads is known, no proof "
                    "against them either"
                ), None  # fmt: skip
            several = "trees" if asked.least_trees > 1 else "tree"
            return "excluded by the paper's count", (
                f"by comparisons (count={count!r}, {asked.least_trees} {several} by the observed "
                "|I_F|); it assumes one role a head, fixed trees over whole tuples, and that more "
                "partners are best as T grows, as far as samples show; no witness proves it"
            ), None  # fmt: skip
        found = "is known" if missing else "that was found held the active tokens of all samples"
        return "open", f"nothing is excluded, and no schedule {found}", None

    @property
    def run_on(self) -> int:
        """The number of inputs on which the schedule of the verdict was run."""
        answer = self.alone if self.alone.schedule is not None else self.best
        assert self.samples is not None
        assert answer.schedule is not None
        return self.samples.number(answer.schedule, answer.reading.components)

    def _explain(self, answer: Answer) -> str:
        assert answer.schedule is not None
        why = f"by a schedule with |I| <= {answer.schedule.size}"
        if answer.reading.notes or answer.schedule.roles > 1 or answer.schedule.has_messages:
            why += f": {answer.describe()}"
        if answer.schedule.adaptive:
            why += "; its score jumps at what was found before, which no continuous score does"
        if self.samples is not None:
            n = self.samples.number(answer.schedule, answer.reading.components)
            length = self.samples.task.n_tokens
            inputs = f"{n} inputs" if length == self.n_tokens else f"{n} inputs of {length} tokens"
            why += f"; run on {inputs}, it fails on less than {3 / n:.2g} of all (95%)"
        return why


def _bound_exponents(
    schedule: Schedule | None, d_token: int, shape: ModelShape
) -> dict[str, float]:
    """Return the exponents of the costliest state, each layer with its own width."""
    if schedule is None:
        return {}
    return {
        mode: max(
            exponent(size, d_token, width, mode)
            for size, width in zip(schedule.sizes, shape.d_model, strict=True)
        )
        for mode in MODES
    }


def _measure_routing(
    shape: ModelShape, task: Any, components: Sequence[Component], samples: Samples | None
) -> RoutedError | None:
    """Measure what routing leaves, where the first of two layers has fewer heads than pairs."""
    pairs = len(components) > 1 and all(c.arity == 2 and c.tuples is None for c in components)
    few = shape.n_layers == 2 and shape.n_heads[0] < len(components) <= 8
    if not (pairs and few) or samples is None:
        return None
    if shape.causal or not hasattr(task, "outer_function"):
        return None
    return measure_routing(samples.task, shape.n_heads[0], max(2, samples.n), samples.seed)


def _list_reasons(
    result: Estimate,
    profile: ComparisonProfile,
    shape: ModelShape,
    answer: Answer,
    asked: Question,
) -> tuple[str, ...]:
    """Return the sentences that justify the verdict: what is needed and what is enough.

    How it was tried, and what was not weighed, stands last.

    Args:
        result: the estimate, of which the sentences are.
        profile: how the target compares tuples.
        shape: of the model.
        answer: what the search found with one mechanism for all heads.
        asked: the target as the search sees it.
    """
    reasons = []
    # uses one mechanism in all heads; result.schedule is the best of any
    alone = answer.schedule
    if result.needed:
        as_well = f"; {'; '.join(answer.reading.notes)}" if answer.reading.notes else ""
        reasons.append(
            f"the target needs {result.needed} comparisons of {profile.dimension}-tuples "
            f"(count={result.count!r}{as_well}); by max-position retrieval alone the model makes "
            f"at most {result.capacity} (eq 5 with K = {result.trees}, the last layer for CLS only "
            "[derived])"
        )
        if asked.unmet:
            reasons.append(f"what that count assumes does not hold: {'; '.join(asked.unmet)}")
    elif len(asked.reads):
        # whether it compares what it reads is not known: nested questions do, a mean does not
        reasons.append("no comparisons of the target are counted: it reads fixed positions")
    reasons.append(f"{result.verdict}: {result.why}")
    if alone is not None and answer.describe() not in result.why:
        what = {
            "max-position retrieval": "max-position heads",
            "fixed positions": "fixed positions and retrieval",
        }.get(alone.mechanism, alone.mechanism)
        reasons.append(
            f"a schedule of {what} alone learns the target, with |I| <= {alone.size}: "
            f"{answer.describe()}"
        )
    if alone is not None and alone.adaptive:
        reasons.append(
            "it is adaptive: what a layer looks for depends on what was found before, which "
            "takes queries that a network computes from the whole state, and a score that "
            "jumps at what was found [derived]"
        )
    if result.d_head:
        d_heads = ", ".join("?" if n is None else str(n) for n in result.d_head)
        unknown = "; ? where no rank is known" if None in result.d_head else ""
        products = ", ".join(map(str, result.products))
        reasons.append(
            f"this schedule asks for d_head >= ({d_heads}) by layer, the rank of its scores "
            f"(whether fewer are enough is open{unknown}); and for ({products}) products in "
            "feed-forward networks, beside the target's own outer function"
        )
    if alone is not None and (numbers := alone.size * result.d_token) > max(shape.d_model):
        reasons.append(
            f"|I| d = {numbers} numbers do not fit in E = {max(shape.d_model)}: they must be "
            "coded, which costs parameters by the upper exponent"
        )
    if result.needed:
        reasons.extend(_describe_heads(result, profile))
    if result.schedule and result.schedule != alone:
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


def _describe_heads(result: Estimate, profile: ComparisonProfile) -> list[str]:
    reasons = []
    # what counting asks of the heads of the first layer
    if result.min_heads is None and profile.order < 3:
        reasons.append(
            "one layer compares h T keys at its only query that is read, the target grows like "
            f"T^{profile.order}: for large T no number of heads of one layer is enough (Thm 1)"
        )
    elif result.min_heads is None and result.width not in (0, 1):
        reasons.append(
            f"its order of comparison is {profile.order}: by the paper's count no number of heads "
            "is enough beyond some T without growing sets (Prop 2; not true of all such targets, "
            "of the triangle proved for two layers)"
        )
    elif result.min_heads is None:
        # single tokens, of which ranks are asked, or tuples of places
        one_by_one = (
            "heads that look below what was found retrieve ranks one by one"
            if result.width == 0
            else "the score's graph is a tree: heads can retrieve its places one by one"
        )
        reasons.append(
            f"its order of comparison is {profile.order}, of fixed trees, but {one_by_one}, "
            "against Prop 2 as it is printed"
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


def list_flags(
    profile: ComparisonProfile, n_heads: Sequence[int], count: Count, trees: int
) -> tuple[str, ...]:
    """Return what a reader has to know of verdicts and counts, as sentences.

    "[flag]" marks where the argument may fail, "[chosen]" what was assumed to make it.
    """
    flags = list(profile.flags_for(count))
    # of the count itself
    if count != "proved" and profile.order > 1:
        flags.append(
            f"[flag] count={count!r} is an upper bound on the target's number of comparisons, so "
            "it suggests but does not prove what is excluded; a witness does"
        )
    # of K in eq (5), the number of trees of comparisons that a position runs at once
    if trees == 1 and profile.n_trees >= 3:
        flags.append(
            "[flag] K = 1 is the literal reading of eq (5), under which one head of global "
            f"aggregation fails for D >= 3, though the paper says it works; K = {profile.n_trees} "
            "(a tree for each component) removes that [chosen], and is not proved sound in general"
        )
    if len(n_heads) > 1 and profile.order == 2:
        flags.append(
            "[flag] h_1 decides regardless of layer 2 only as T grows: at small T a wide layer 2 "
            "can make up the count"
        )
    flags.append(
        "[chosen] a score looks at tuples inside what one position holds, or at one tuple across "
        "two; with arbitrary scores the counting bound is false for the abstract model"
    )
    return tuple(flags)


def _list_own_flags(result: Estimate, profile: ComparisonProfile) -> tuple[str, ...]:
    """List the limits that only this estimate's own numbers show."""
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
        # what the found schedule does, against what is proved to be needed
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
