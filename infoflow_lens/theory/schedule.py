"""Schedules: which head retrieves what, layer by layer, and whether that learns a target.

A schedule gives every head a job: the largest-scoring tuple of a component (max-position), a fixed
set of positions (specific-position), or everything (global). Running it on inputs gives information
sets; it *learns* a target if the set of CLS contains the active index set (Sec. 5.1, eq 4).

Beside heads and width a schedule asks for rank and products.
A head scores keys by q.k, a matrix of rank d_head at most, and what depends on the query alone
changes no choice. So a job needs d_head of at least the rank of its scores [query, key] after each
row's mean is taken off, or of a function that increases with them; that is enough [derived], and
below it the job is open. What a token then
holds of two others must be joined by the feed-forward network: as many products as the rank.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.memory import format_bytes, free_memory
from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.foundation.settings import Count as Number
from infoflow_lens.foundation.settings import Seed, checked
from infoflow_lens.theory.comparison import Component, best_tuples
from infoflow_lens.theory.information_sets import InformationSets, initial_sets, update
from infoflow_lens.theory.jobs import Global, Job, Max, Message, Next, Progress, Specific
from infoflow_lens.theory.shapes import ModelShape


@runtime_checkable
class Target(Protocol):
    """What a schedule needs to know of a task."""

    @property
    def n_tokens(self) -> int:
        """T."""
        ...

    @property
    def components(self) -> tuple[Component, ...]:
        """The components that the target retrieves."""
        ...

    def sample(self, n: int, seed: int) -> tuple[Tensor, Tensor]:
        """Draw `n` sequences [n, pos, d_token] and their targets."""
        ...

    def active_index_set(self, x: Tensor) -> Tensor:
        """Return bool [batch, pos]."""
        ...


@dataclass(frozen=True)
class LayerSchedule:
    """The jobs of a layer's heads, for token queries and for the CLS query."""

    token: tuple[Job, ...] = ()
    cls: tuple[Job, ...] = ()

    def describe(self) -> list[str]:
        """Say what tokens do, and what CLS does; leave out those without jobs."""
        said = []
        for queries, jobs in (("tokens", self.token), ("CLS", self.cls)):
            ordered = sorted(jobs, key=lambda job: not job.first_in_words)
            # neighbours alone are joined: the search lists jobs of one kind behind one another
            groups = itertools.groupby([job.describe() for job in ordered], key=lambda d: d[0])
            words = [f"{verb} {', '.join(what for _, what in all_)}" for verb, all_ in groups]
            if words:
                said.append(f"{queries}: {' and '.join(word.strip(', ') for word in words)}")
        return said


@dataclass(frozen=True)
class Schedule:
    """A job for every head that has one, layer by layer.

    Attributes:
        layers: the layers' jobs.
        size: the largest |I| that counts (all states of hidden layers, CLS in the last), from
            the growth of sets; filled by the search.
        sizes: the same for every layer.
    """

    layers: tuple[LayerSchedule, ...]
    size: int = field(default=0, compare=False)
    sizes: tuple[int, ...] = field(default=(), compare=False)

    @property
    def jobs(self) -> tuple[Job, ...]:
        """The jobs of all layers."""
        return tuple(job for layer in self.layers for job in (*layer.token, *layer.cls))

    @property
    def mechanism(self) -> str:
        """The mechanism that it rests on: of its jobs' mechanisms the one that asks for most."""
        used = {job.mechanism for job in self.jobs}
        order = ("global aggregation", "fixed positions")
        return next((name for name in order if name in used), "max-position retrieval")

    @property
    def needs_positions(self) -> bool:
        """Say whether a head reads fixed positions, which takes a positional encoding."""
        return any(job.mechanism == "fixed positions" for job in self.jobs)

    @property
    def roles(self) -> int:
        """The most roles that a head has: components times sides, 1 without routing."""
        return max([1, *(job.roles for job in self.jobs)])

    @property
    def adaptive(self) -> bool:
        """Say whether what a head looks for depends on what was found before.

        A first step of such a search is that for the largest or the smallest, and depends on none.
        """
        steps = [job.uses for job in self.jobs if job.is_adaptive]
        return len(steps) > len(set(steps))

    @property
    def has_messages(self) -> bool:
        """Say whether it rests on the graph of a score, which was asked on samples or declared."""
        return any(isinstance(job, Message) for job in self.jobs)

    def describe(self) -> str:
        """Return the jobs in words."""
        return "; ".join(
            f"layer {number}, {words}"
            for number, layer in enumerate(self.layers, start=1)
            for words in layer.describe()
        )


def run_schedule(
    schedule: Schedule,
    components: Sequence[Component],
    x: Float[Tensor, "batch pos d_token"],
    *,
    causal: bool = False,
    reference: Float[Tensor, "sample d_token"] | None = None,
) -> InformationSets:
    """Return the information sets that a schedule gives on inputs: tokens 0 .. T - 1, then CLS.

    Args:
        schedule: what the heads do.
        components: what they retrieve.
        x: the inputs.
        causal: whether a token sees itself and earlier ones only; CLS, the last, sees all.
        reference: tokens by which routed heads know what is a good score; needed for those alone.

    Raises:
        InfoFlowError: for a component that is not there, or a job where it cannot stand.
    """
    if not schedule.layers:
        raise InfoFlowError("the schedule has no layer: expected at least one")
    placed = [
        [(job, for_tokens) for jobs, for_tokens in ((layer.token, True), (layer.cls, False))
         for job in jobs]
        for layer in schedule.layers
    ]  # fmt: skip
    for job, for_tokens in itertools.chain(*placed):
        job.check(len(components), for_tokens)
    batch, n_tokens = x.shape[:2]
    sees = torch.ones(n_tokens, n_tokens, dtype=torch.bool)
    run = Progress(
        components, x, initial_sets(batch, n_tokens + 1, n_tokens),
        sees.tril() if causal else sees, reference,
    )  # fmt: skip
    members = []
    for layer in placed:
        # the heads of a layer act at once, on what the layers below have found
        run.reached_next = {}
        run.sets = update(run.sets, [job.rule(run, for_tokens) for job, for_tokens in layer])
        run.reached.update(run.reached_next)
        members.append(run.sets)
    return InformationSets(torch.stack(members))


@checked
def learns(
    task: Target,
    schedule: Schedule,
    n: Number = 200,
    seed: Seed = 0,
    *,
    components: Sequence[Component] | None = None,
    positional: bool = False,
    causal: bool = False,
    batch_size: Number = 50,
) -> float:
    """Return how often the active set lies inside the final CLS set, over `n` sampled inputs.

    1.0 says that the schedule learns the target, as far as `n` samples can say (eq 4: for almost
    every input; where scores tie, which token counts as active is a convention).

    Args:
        task: the target and its inputs.
        schedule: what the heads do.
        n: sampled inputs.
        seed: of the samples.
        components: what the schedule retrieves; default, the task's own.
        positional: whether the model has a positional encoding.
        causal: whether tokens see earlier ones only.
        batch_size: inputs at a time.

    Raises:
        InfoFlowError: if `n` is below 1, or the schedule reads fixed positions without a positional
            encoding.
    """
    if schedule.needs_positions and not positional:
        raise InfoFlowError(
            f"the schedule reads fixed positions ({schedule.describe()}), which takes a positional "
            "encoding: pass positional=True if the model has one, or use another schedule"
        )
    x = inputs(task, n, seed)
    retrieved = task.components if components is None else components
    reference = reference_tokens(task, seed) if schedule.roles > 1 else None
    hits = 0
    for part in x.split(batch_size):
        # [batch, source]: what CLS, the last position, holds after the last layer
        held = run_schedule(
            schedule, retrieved, as_vectors(part), causal=causal, reference=reference
        ).members[-1, :, -1]
        hits += int((task.active_index_set(part) <= held).all(dim=1).sum())
    return hits / n


def as_vectors(x: Tensor) -> Float[Tensor, "batch pos d_token"]:
    """Return tokens as vectors; a token id is a vector of one number."""
    return x.unsqueeze(-1).double() if x.ndim == 2 else x


def inputs(task: Target, n: int, seed: int) -> Tensor:
    """Draw sequences without their targets, which may be dear, where the task can do so."""
    alone = getattr(task, "inputs", None)
    return task.sample(n, seed)[0] if alone is None else alone(n, seed)


def reference_tokens(task: Target, seed: int, n: int = 1024) -> Float[Tensor, "sample d_token"]:
    """Return tokens of other sequences than those of :func:`learns`, for routed heads."""
    sequences = max(1, -(-n // task.n_tokens))
    # a seed of its own, so that no query meets its own sequence among them
    x = inputs(task, sequences, derive_seed("reference", seed))
    return as_vectors(x).flatten(0, 1)[:n]


_SAMPLES = 64  # queries and keys, so that ranks above 63 are seen as 63
_SMALLEST = 1e-3  # of the largest singular value: what is below changes scores by a thousandth


@dataclass(frozen=True)
class Demand:
    """What one layer's jobs ask for.

    Attributes:
        d_head: the least per-head dimension; None where a job's score is not known to have a rank
            (it reads positions, has several roles, or depends on what was found).
        products: of numbers that a token holds, which the feed-forward network makes.
    """

    d_head: int | None
    products: int


def demands(
    schedule: Schedule,
    components: Sequence[Component],
    tokens: Float[Tensor, "sample d_token"],
) -> tuple[Demand, ...]:
    """List what each layer of a schedule asks for, seen on samples of tokens.

    Args:
        schedule: the jobs.
        components: what they retrieve.
        tokens: tokens to draw from.
    """
    found = []
    for layer in schedule.layers:
        ranks = [_rank(job, components, tokens) for job in layer.token]
        # CLS is one query, so its row of scores has rank 1
        known = [1 if isinstance(job, (Max, Message)) else None for job in layer.cls]
        needed = [*ranks, *known]
        d_head = None if None in needed else max([1, *(n for n in needed if n is not None)])
        joined = [r for job, r in zip(layer.token, ranks, strict=True) if _joins(job, components)]
        found.append(Demand(d_head, sum(r for r in joined if r is not None)))
    return tuple(found)


def scores_inside(
    schedule: Schedule,
    components: Sequence[Component],
    tokens: Float[Tensor, "sample d_token"] | None,
    n_tokens: int,
    error: float,
) -> tuple[int, ...]:
    """Count the scores and products that a feed-forward network makes of one state, by layer.

    Where a state holds everything, or a block of positions, the network itself compares the tuples
    inside: all of them at CLS, those with the token itself at tokens. Where heads compare, it joins
    what was found, in as many products as the score has rank. A search below what was found asks
    for a step, 1 / error units [derived; orders of magnitude].

    Args:
        schedule: the jobs.
        components: what they retrieve.
        tokens: tokens to draw from; None where none are at hand, then ranks count as 1.
        n_tokens: T.
        error: eps.
    """
    joined = [0] * len(schedule.layers)
    if tokens is not None:
        joined = [demand.products for demand in demands(schedule, components, tokens)]
    found, begun = [], set[Job]()
    for layer, n in zip(schedule.layers, joined, strict=True):
        for job in (*layer.token, *layer.cls):
            if isinstance(job, (Global, Specific)):
                held = min(n_tokens, job.gain(n_tokens))
                n += sum(_inside(c, held, job in layer.token) for c in components)
            # the first step of a search is an ordinary maximum; each later one has a jump to make
            if isinstance(job, Next) and job in begun:
                n += round(1 / error)
            begun.add(job)
        found.append(n)
    return tuple(found)


def _inside(component: Component, held: int, with_own: bool) -> int:
    """Count the tuples that a state of `held` tokens compares, of a block those with its own."""
    if component.tuples is not None:
        return len(component.tuples)
    if component.rank > 1:  # sorted, by pairs
        return math.comb(held, 2)
    if component.positions is not None:
        held = min(held, len(component.positions))
    # positions only bound how many tokens there are to choose from
    n = replace(component, positions=None).n_tuples(held, ordered=not component.symmetric)
    return -(-n * component.arity // held) if with_own else n


def _joins(job: Job, components: Sequence[Component]) -> bool:
    """Say whether a token needs a number of what it is and what the head gave it, together."""
    return isinstance(job, Message) or (
        isinstance(job, Max) and components[job.component].arity > 1
    )


def _rank(
    job: Job, components: Sequence[Component], tokens: Float[Tensor, "sample d_token"]
) -> int | None:
    """Return the rank of a token head's scores; None where it is not known."""
    generator = torch.Generator().manual_seed(6)

    def draw(n: int) -> Tensor:
        return tokens[torch.randint(len(tokens), (_SAMPLES, n), generator=generator)].double()

    if isinstance(job, Message):
        keys, queries = draw(job.size), draw(1)
        score = job.score
    elif isinstance(job, Max) and components[job.component].arity == 1:
        return 1
    elif isinstance(job, Max) and components[job.component].arity == 2:
        keys, queries = draw(1), draw(1)
        first = components[job.component].preference
        score = first if job.reverse else lambda x: first(x.flip(-2))
    else:
        return None
    shape = (_SAMPLES, _SAMPLES, -1, -1)
    pairs = torch.cat([keys[None].expand(shape), queries[:, None].expand(shape)], dim=-2)
    scores = score(pairs.to(tokens)).double()
    # what increases with a score chooses alike: a distance by its square, an exponential by its log
    alike = [scores, scores * scores.abs(), scores.sign() * scores.abs().pow(1 / 3)]
    if (scores > 0).all():
        alike.append(scores.log())
    # a head may make whichever of them has the least rank
    ranks = [rank for rank in map(rank_of, alike) if rank is not None]
    return min(ranks, default=None)


def rank_of(scores: Float[Tensor, "query key"]) -> int | None:
    """Find the rank of scores, up to what depends on the query alone, to .001 of the largest.

    None where a score is not finite: no product of queries and keys is it.
    """
    if not scores.isfinite().all():
        return None
    values = torch.linalg.svdvals((scores - scores.mean(dim=1, keepdim=True)).double())
    return int((values > _SMALLEST * values[0].clamp(min=1e-9)).sum())


_LARGEST_RUN = 128  # longer sequences are run at 64 tokens
_RUN_AT = 64
_MOST_SCORES = 5 * 10**7  # in a verification: a few seconds
_LOOKED_AT = 50  # inputs at once, where fewer are drawn
_BYTES = 5 * 4  # of each number of an input: it, and what is made of it to compare tokens


def resize(task: Any, n_tokens: int) -> Any:
    """Return the task on sequences of T tokens; None where it has no such ones.

    Its T may follow from other sizes, or a subset of positions may not fit.
    """
    try:
        return task if task.n_tokens == n_tokens else replace(task, n_tokens=n_tokens)
    except (TypeError, ValueError):
        return None


def set_length(task: Any, n_tokens: int) -> Any:
    """Return the task on sequences of T tokens.

    Raises:
        InfoFlowError: where its T follows from other sizes, and is another.
    """
    if task.n_tokens == n_tokens:
        return task
    try:
        return replace(task, n_tokens=n_tokens)
    except TypeError:
        name = getattr(task, "name", type(task).__name__)
        raise InfoFlowError(
            f"task {name!r} has {task.n_tokens} tokens, which follow from its other sizes: "
            f"expected n_tokens {task.n_tokens}; load it with other sizes"
        ) from None


@dataclass(frozen=True)
class Samples:
    """Sequences on which schedules are run.

    Attributes:
        task: the target, at a T that can be drawn.
        n: how many.
        seed: of the draws.
    """

    task: Any
    n: int
    seed: int

    @classmethod
    def draw(cls, task: Any, n: int, seed: int, at: int | None = None) -> "Samples | None":
        """Prepare samples at T or `at`, at 64 where that is long; None if they cannot be drawn.

        Raises:
            InfoFlowError: for tokens so large that the sequences that are run fit in no memory.
        """
        n_tokens = task.n_tokens if at is None else at
        resized = resize(task, n_tokens if n_tokens <= _LARGEST_RUN else _RUN_AT)
        if n < 1 or (resized is None and task.n_tokens > _LARGEST_RUN):
            return None
        found = cls(resized or task, n, seed)
        d_token = getattr(found.task, "d_token", 1) or 1
        # however many are asked for, no more are run
        most = min(n, _MOST_SCORES // max(1, found.task.n_tokens + found.n_scores))
        drawn = max(most, _LOOKED_AT)
        needed = drawn * found.task.n_tokens * d_token * _BYTES
        if (free := free_memory()) is not None and needed > free:
            raise InfoFlowError(
                f"d_token is {d_token}: {drawn} inputs of the task need about "
                f"{format_bytes(needed)} of memory, but {format_bytes(free)} is free: expected "
                "fewer numbers in a token"
            )
        return found

    def number(self, schedule: Schedule, components: Sequence[Component]) -> int:
        """Count the samples on which a schedule is run: fewer than there are where that is dear."""
        arity = max([1, *(c.arity for c in components)])
        size = min(self.task.n_tokens, schedule.size)
        work = self.task.n_tokens * size**arity * max(1, len(components)) + self.n_scores
        # five in any case, however dear they are
        return max(5, min(self.n, _MOST_SCORES // max(1, work)))

    def learns(
        self, schedule: Schedule, components: Sequence[Component], shape: ModelShape
    ) -> float:
        """Return how often a schedule that retrieves these components holds the active set."""
        return learns(
            self.task, schedule, self.number(schedule, components), self.seed,
            components=components, positional=shape.positional, causal=shape.causal,
        )  # fmt: skip

    @property
    def n_scores(self) -> int:
        """Tuples whose scores the target asks for on one of them; a task may know how few."""
        n = self.task.n_tokens
        own = getattr(self.task, "n_scores", None)
        return (
            own
            if own is not None
            else sum(
                n if c.rank > 1 else c.n_tuples(n, ordered=not c.symmetric)
                for c in getattr(self.task, "components", ())
            )
        )

    def tokens(self, n: int) -> Float[Tensor, "sample d_token"]:
        """Draw some tokens."""
        return reference_tokens(self.task, self.seed, n)

    def sequences(self, n: int) -> Tensor:
        """Draw some inputs."""
        return inputs(self.task, n, self.seed)

    def find_swap(self) -> tuple[Tensor, Tensor] | None:
        """Find two inputs that differ in the places of two tokens and in the value, if any."""
        x, y = self.task.sample(min(self.n, 5), self.seed)
        last = x.shape[1] - int(x.ndim == 2)  # the response sign stays where it is
        # one swap is enough to show that positions matter
        for first, second in itertools.islice(itertools.combinations(range(last), 2), 2000):
            swapped = x.clone()
            swapped[:, [first, second]] = x[:, [second, first]]
            for row in range(len(x)):
                try:
                    other = self.task.target(swapped[row : row + 1])
                except InfoFlowError:  # no sequence of the task
                    continue
                if not torch.allclose(other.double(), y[row : row + 1].double(), atol=1e-4):
                    return x[row], swapped[row]
        return None

    def largest_active(self) -> int:
        """Return |I_F|: the most active tokens that an input was seen to have."""
        return int(self.task.active_index_set(self.sequences(_LOOKED_AT)).sum(dim=1).max())

    def component_values(self) -> Float[Tensor, "batch component"]:
        """Return what the components of some inputs are worth, each in its own preference."""
        x = as_vectors(self.sequences(48))
        return torch.stack([best_tuples(x, c)[1] for c in self.task.components], dim=1)

    def is_linear(self) -> bool:
        """Say whether the value is a sum of linear functions of retrieved, or of read, tokens.

        Such a sum takes no feed-forward network. Seen by derivatives that are alike on some inputs;
        labels of token ids are no such sums.
        """
        x = self.sequences(_LOOKED_AT)
        components = getattr(self.task, "components", ())
        outer = getattr(self.task, "outer_function", None)
        if x.ndim == 2 or (components and outer is None):
            return False
        rows = torch.arange(len(x))[:, None]
        with torch.enable_grad():
            tokens = [x[rows, best_tuples(x, c)[0]].requires_grad_(True) for c in components]
            if outer is None or not components:
                tokens = [x.clone().requires_grad_(True)]
                values = self.task.target(tokens[0])
            else:
                scores = [c.score(t) for c, t in zip(components, tokens, strict=True)]
                values = outer(torch.stack(scores, dim=1))
            # of each output by each token; a row for each input
            found = [
                torch.autograd.grad(column.sum(), tokens, retain_graph=True, allow_unused=True)
                for column in values.T
            ]
        slopes = [slope for each in found for slope in each if slope is not None]
        return all(torch.allclose(s, s[:1].expand_as(s), rtol=1e-4, atol=1e-5) for s in slopes)
