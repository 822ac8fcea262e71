"""The smallest architectures that the theory allows for a target, and what is excluded beside them.

For every number of layers and heads the search gives the smallest information sets; a width then
either holds them (|I| d <= E, no further cost) or pays eps^-max(1, |I| d / E - 1) parameters. What
heads do not compare, feed-forward networks do: their scores count, too, for in trials they were
what training did not learn. Where one layer must store everything, two are weighed beside it, in
which tokens store everything, each compares tuples with itself, and CLS retrieves the best token.
Those that no other one beats in layers, heads, width, exponent and such scores make the front.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from annotated_types import Interval, MinLen

from infoflow_lens.foundation.display import Displayed
from infoflow_lens.foundation.processes import threads
from infoflow_lens.foundation.progress import Advance
from infoflow_lens.foundation.settings import Count as Number
from infoflow_lens.foundation.settings import Index, Positive, Remedy, Seed, checked
from infoflow_lens.theory.comparison import Count
from infoflow_lens.theory.cost import Precision, exponent
from infoflow_lens.theory.estimate import Verdict, estimate_asked
from infoflow_lens.theory.jobs import Global, Max
from infoflow_lens.theory.question import Answer, Question
from infoflow_lens.theory.schedule import (
    LayerSchedule,
    Schedule,
    demands,
    scores_inside,
    set_length,
)
from infoflow_lens.theory.search import Found
from infoflow_lens.theory.shapes import ModelShape

_MOST_HEAD_CHOICES = 700
_SHARES = (1, 2, 4)  # of the width that holds everything, those that are weighed
_MLP_WIDTH = 4  # times E
N_VERIFIED = 30  # samples on which schedules are run, where nobody asks for another number


@dataclass(frozen=True)
class Candidate:
    """An architecture that the theory allows.

    Attributes:
        n_heads: h_1 .. h_L.
        d_model: E.
        information: the largest |I|, for every asked T.
        exponent: k in eps^-k further parameters, at the largest T; 0 where everything fits.
        inside: scores and products that feed-forward networks make of one state, all layers.
        d_head: the least per-head dimension of each layer, the rank of its scores; None for a layer
            of which it is not known.
        parameters: 12 L E^2 weights (feed-forward networks four times as wide as E), 2 E for each
            score inside a state, and eps^-k; an order of magnitude, since exponents leave out
            constants.
        schedule: what the heads do, in words.
        mechanisms: what it rests on: "max-position retrieval", "fixed positions" or "global
            aggregation".
        verified: how often the schedule held the active tokens on samples; None if not run.
    """

    n_heads: tuple[int, ...]
    d_model: int
    information: tuple[int, ...]
    exponent: float
    inside: int
    d_head: tuple[int | None, ...]
    parameters: float
    schedule: str
    mechanisms: str
    verified: float | None = None

    @property
    def measures(self) -> tuple[float, ...]:
        """The numbers that the front weighs: layers, heads, width, exponent, scores in a state."""
        return len(self.n_heads), sum(self.n_heads), self.d_model, self.exponent, self.inside


@dataclass(frozen=True)
class Neighbour:
    """An architecture just below a candidate, and what is known of it.

    Attributes:
        n_heads, d_model: its sizes.
        change: what was taken away.
        verdict: of max-position retrieval alone, at the largest T; see `Estimate`.
        why: what the verdict rests on.
        information: |I| of its best schedule by any mechanism; None if there is none.
        exponent: of that at its width, of encoder and decoder.
    """

    n_heads: tuple[int, ...]
    d_model: int
    change: str
    verdict: Verdict
    why: str
    information: int | None
    exponent: float | None


@dataclass(frozen=True)
class Design(Displayed):
    """The front of architectures for a target.

    Attributes:
        target: its name.
        n_tokens: the values of T, in order; |I| must serve the largest.
        d_token: d.
        error: eps.
        front: the candidates that no other one beats, by layers, heads, width.
        recommended: of those that hold everything in their width, or else of all, the one with the
            fewest scores inside states, then with the fewest parameters.
        neighbours: what lies just below the recommended one.
        left_out: what was not weighed, in words.
        count: of comparisons, for what is excluded.
    """

    target: str
    n_tokens: tuple[int, ...]
    d_token: int
    error: float
    front: tuple[Candidate, ...]
    recommended: Candidate | None
    neighbours: tuple[Neighbour, ...]
    left_out: tuple[str, ...]
    count: Count = "paper"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible values."""
        return asdict(self)


@checked
@threads(1)
def design(
    task: Any,
    n_tokens: Annotated[tuple[Number, ...], MinLen(1), Remedy("such as 16,64,256")],
    error: Precision = 1e-2,
    *,
    max_layers: Annotated[int, Interval(ge=1, le=6)] = 3,
    max_heads: Annotated[int, Interval(ge=1, le=64)] = 12,
    parameters: Positive | None = None,
    positional: bool = False,
    count: Count = "paper",
    verify: Index = N_VERIFIED,
    seed: Seed = 0,
    advance: Advance | None = None,
) -> Design:
    """Return the smallest architectures that the theory allows for a target.

    Args:
        task: the target; its T is replaced by those asked, where it has one of its own.
        n_tokens: values of T that the model should serve.
        error: eps, the precision that parameters are counted for.
        max_layers, max_heads: how far to look.
        parameters: the most that a candidate may have; None for any number.
        positional: whether models may have a positional encoding; they do where the target tells
            positions apart.
        count: as in :func:`infoflow_lens.theory.estimate.estimate`, for what is excluded.
        verify: samples on which the schedules of the front are run.
        seed: of the samples.
        advance: called after each choice of heads.

    Raises:
        InfoFlowError: for sizes below 1, eps outside (0, 1), or a target without anything to
            retrieve or read.
    """
    cases = [set_length(task, t) for t in sorted(set(n_tokens))]
    largest = cases[-1]
    questions = [Question.read(case, seed) for case in cases]
    d_token = getattr(largest, "d_token", 1)
    positional = positional or questions[-1].positional
    choices, left_out = head_choices(questions[-1].components, max_layers, max_heads)
    found: list[tuple[tuple[int, ...], Answer, tuple[int, ...]]] = []
    for heads in choices:
        sizes, last = [], None
        for question, case in zip(questions, cases, strict=True):
            shape = _shape(heads, 1, case.n_tokens, positional)
            answers = [
                answer
                for alone in (False, True)
                for answer in question.answers(shape, case.n_tokens, max_position_only=alone)
            ]
            left_out += [w for a in answers for w in a.found.left_out if w not in left_out]
            if not answers:
                break
            last = min(answers, key=_size)
            sizes.append(_size(last))
        # one architecture must serve every T
        if last is not None and len(sizes) == len(cases):
            found.append((heads, last, tuple(sizes)))
        if advance is not None:
            advance(1, str(heads))
    # to store everything is a way of its own, which no search over heads finds
    whole = _whole(questions[-1])
    if whole is not None and max_layers > 1 and max(whole[0]) <= max_heads:
        found.append((*whole, tuple(case.n_tokens for case in cases)))
    candidates = [
        candidate
        for heads, answer, sizes in found
        for candidate in _candidates(heads, answer, sizes, largest.n_tokens, d_token, error)
        if parameters is None or candidate.parameters <= parameters
    ]
    front = _front(candidates)
    asked = questions[-1]
    checked = tuple(_verify(candidate, asked, positional, verify, seed) for candidate in front)
    sound = [c for c in checked if c.verified in (None, 1.0)]
    # what fits comes first: an exponent's constant is not known
    recommended = min(
        sound, key=lambda c: (c.exponent > 0, c.inside, c.parameters, c.measures), default=None
    )
    below: tuple[Neighbour, ...] = ()
    if recommended is not None:
        below = neighbours(recommended, asked, positional, count, verify, seed)
    return Design(
        target=str(largest.name),
        n_tokens=tuple(case.n_tokens for case in cases),
        d_token=d_token,
        error=error,
        front=checked,
        recommended=recommended,
        neighbours=below,
        left_out=tuple(left_out),
        count=count,
    )


def head_choices(
    components: Sequence[Any], max_layers: int, max_heads: int
) -> tuple[list[tuple[int, ...]], list[str]]:
    """List the head counts to weigh: a layer of more heads than places to retrieve is of no use."""
    places = sum(1 if c.tuples is not None else max(1, c.arity - 1) for c in components)
    most = max(1, min(max_heads, places))
    left_out: list[str] = []
    choices: list[tuple[int, ...]] = []
    for layers in range(1, max_layers + 1):
        numbers: Sequence[int] = range(1, most + 1)
        if most**layers > _MOST_HEAD_CHOICES:
            numbers = sorted({1, 2, -(-most // 4), -(-most // 2), most - 1, most} - {0})
            left_out.append(f"with {layers} layers, heads other than {list(numbers)}")
        choices += itertools.product(numbers, repeat=layers)
    return choices, left_out


def _size(answer: Answer) -> int:
    assert answer.schedule is not None
    return answer.schedule.size


def _whole(question: Question) -> tuple[tuple[int, ...], Answer] | None:
    """Try two layers where one must store all: tokens store it, and CLS retrieves the best one.

    None where no heads choose between tokens: for single tokens, and where positions matter.
    """
    components = question.components
    n = question.task.n_tokens
    if question.positional or not components or any(c.tuples or c.rank > 1 for c in components):
        return None
    if max(c.arity for c in components) < 2:
        return None
    reads = LayerSchedule(cls=tuple(Max(i) for i in range(len(components))))
    schedule = Schedule((LayerSchedule(token=(Global(),)), reads), size=n, sizes=(n, n))
    return (1, len(components)), Answer(Found(schedule), question.readings[0])


def _candidates(
    heads: tuple[int, ...],
    answer: Answer,
    sizes: tuple[int, ...],
    n_tokens: int,
    d_token: int,
    error: float,
) -> list[Candidate]:
    """List one architecture at the width that holds everything, and at shares of that width."""
    needed = max(sizes) * d_token
    schedule, reading = answer.schedule, answer.reading
    assert schedule is not None
    inside = scores_inside(schedule, reading.components, reading.tokens, n_tokens, error)
    ranks: tuple[int | None, ...] = (None,) * len(heads)
    if reading.tokens is not None:
        asked = demands(schedule, reading.components, reading.tokens)
        ranks = tuple(demand.d_head for demand in asked)
    words = answer.describe()
    if schedule.adaptive:
        words += f"; its score jumps, within eps by {1 / error:.0f} units"
    result = []
    for share in _SHARES:
        width = max(1, -(-needed // share))
        k = exponent(max(sizes), d_token, width, "total")
        digits = k * -math.log10(error)
        # beyond what a float holds
        further = math.inf if digits > 300 else (10**digits if k else 0.0)
        # a layer: four matrices of attention, two of the network; a score: a unit with two sides
        weights = (4 + 2 * _MLP_WIDTH) * len(heads) * width**2 + 2 * width * sum(inside)
        result.append(
            Candidate(heads, width, sizes, k, sum(inside), ranks, weights + further,
                      words, schedule.mechanism)
        )  # fmt: skip
    return result


def _front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Keep the candidates that no other one beats in everything."""
    kept: list[Candidate] = []
    # whatever beats a candidate stands before it in this order, so one pass is enough
    for candidate in sorted(candidates, key=lambda c: (c.measures, c.n_heads)):
        if not any(
            all(a <= b for a, b in zip(other.measures, candidate.measures, strict=True))
            for other in kept
        ):
            kept.append(candidate)
    return kept


def _shape(heads: tuple[int, ...], d_model: int, n_tokens: int, positional: bool) -> ModelShape:
    return ModelShape(heads, (d_model,) * len(heads), n_tokens, positional)


def _verify(
    candidate: Candidate, asked: Question, positional: bool, verify: int, seed: int
) -> Candidate:
    shape = _shape(candidate.n_heads, candidate.d_model, asked.task.n_tokens, positional)
    found = estimate_asked(asked, shape, "paper", 1, verify, seed)
    return replace(candidate, verified=found.verified)


def neighbours(
    candidate: Candidate, asked: Question, positional: bool, count: Count, verify: int, seed: int
) -> tuple[Neighbour, ...]:
    """List what lies just below a candidate: a head less in a layer, or a layer less."""
    # an architecture that is reached in two ways is listed once
    options: dict[tuple[int, ...], str] = {}
    for layer, heads in enumerate(candidate.n_heads):
        if heads > 1:
            less = (*candidate.n_heads[:layer], heads - 1, *candidate.n_heads[layer + 1 :])
            options.setdefault(less, f"a head less in layer {layer + 1}")
    if len(candidate.n_heads) > 1:
        for layer in range(len(candidate.n_heads)):
            rest = (*candidate.n_heads[:layer], *candidate.n_heads[layer + 1 :])
            options.setdefault(rest, f"without layer {layer + 1}")
    below = []
    for fewer, change in options.items():
        shape = _shape(fewer, candidate.d_model, asked.task.n_tokens, positional)
        found = estimate_asked(asked, shape, count, 1, verify, seed)
        below.append(
            Neighbour(
                fewer,
                candidate.d_model,
                change,
                found.verdict,
                found.why,
                found.upper_information,
                found.upper.get("total"),
            )
        )
    return tuple(below)
