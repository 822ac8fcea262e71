"""Schedules: which head retrieves what, layer by layer, and whether that learns a target.

A schedule gives every head a job: the largest-scoring tuple of a component (max-position), a fixed
set of positions (specific-position), or everything (global). Running it on inputs gives information
sets; it *learns* a target if the set of CLS contains the active index set (Sec. 5.1, eq 4).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.seeds import derived_seed
from infoflow_lens.theory.comparison import (
    Component,
    all_different,
    component_tuples,
    least,
    tuple_indices,
)
from infoflow_lens.theory.information_sets import (
    GlobalAggregation,
    InformationSets,
    MaxPosition,
    Rule,
    SpecificPositions,
    initial_sets,
    update,
)

_MOST_SCORES_AT_ONCE = 2**21


@runtime_checkable
class Target(Protocol):
    """What a schedule needs to know of a task."""

    @property
    def n_tokens(self) -> int:
        """T."""
        ...

    @property
    def components(self) -> tuple[Component, ...]:
        """What the target retrieves."""
        ...

    def sample(self, n: int, seed: int) -> tuple[Tensor, Tensor]:
        """`n` sequences [n, pos, d_token] and their targets."""
        ...

    def active_index_set(self, x: Tensor) -> Tensor:
        """bool [batch, pos]."""
        ...


@dataclass(frozen=True)
class Max:
    """A head that retrieves by a component's score, rule (1).

    For tokens the score of (t, s) is that of the pair of their own tokens, for arity 2; otherwise,
    and for CLS, it is the largest score of a tuple inside what position s holds. Across two
    positions a score may look at one tuple only, chosen beforehand [chosen, needed: with arbitrary
    scores the abstract model beats its own counting bound].

    Attributes:
        component: its index.
        reverse: for pairs at tokens, whether the query's token comes second in the pair.
    """

    component: int
    reverse: bool = False


@dataclass(frozen=True)
class Routed:
    """A token head with several roles: which pair score it retrieves by, the query's token decides.

    A role is a component and a side of it. Every query takes the role for which its own token is
    good, by the share of tokens that could reach a higher score in that role; see
    :mod:`infoflow_lens.theory.routing` [derived and measured; beyond the paper].

    Attributes:
        components: indices of the components, of arity 2.
        choice: 0 for the best role of a query, 1 for its second best, and so on.
    """

    components: tuple[int, ...]
    choice: int = 0


@dataclass(frozen=True)
class Next:
    """A head of adaptive retrieval: the best token that scores below all that the query has found.

    What is looked for depends on what earlier layers found, which rule (1) allows: its score may
    look at all that the query holds. A token's search begins below itself, that of CLS at the top
    [derived; beyond the paper].

    Attributes:
        component: its index, of arity 1.
        from_below: whether to go from the worst token upwards.
    """

    component: int
    from_below: bool = False


@dataclass(frozen=True)
class Specific:
    """A head of tokens that reads fixed positions, rule (3): together all tuples of an arity.

    Attributes:
        arity: length of the tuples, each of which is held by some token afterwards.
    """

    arity: int


@dataclass(frozen=True)
class ReadTuples:
    """A head that reads fixed positions, rule (3), for a component whose tuples are listed.

    At tokens, each listed tuple is held by some token afterwards, but for the positions that all
    tuples share; CLS reads those.

    Attributes:
        component: its index.
    """

    component: int


@dataclass(frozen=True)
class ReadPositions:
    """A head of CLS that reads fixed positions, rule (3).

    Attributes:
        positions: what it reads.
    """

    positions: Sequence[int]


@dataclass(frozen=True)
class Global:
    """A head that aggregates everything, rule (2)."""


Job: TypeAlias = Max | Routed | Next | Specific | ReadTuples | ReadPositions | Global


@dataclass(frozen=True)
class LayerSchedule:
    """The jobs of a layer's heads, for token queries and for the CLS query."""

    token: tuple[Job, ...] = ()
    cls: tuple[Job, ...] = ()


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
        """All jobs."""
        return tuple(job for layer in self.layers for job in (*layer.token, *layer.cls))

    @property
    def needs_positions(self) -> bool:
        """Whether a head reads fixed positions, which takes a positional encoding."""
        return any(isinstance(job, (Specific, ReadTuples, ReadPositions)) for job in self.jobs)

    @property
    def roles(self) -> int:
        """The most roles that a head has: components times sides, 1 without routing."""
        routed = [len(job.components) for job in self.jobs if isinstance(job, Routed)]
        return max([1, *routed])

    @property
    def adaptive(self) -> bool:
        """Whether what a head looks for depends on what was found before."""
        return any(isinstance(job, Next) for job in self.jobs)

    def describe(self) -> str:
        """The jobs in words."""
        lines = []
        for number, layer in enumerate(self.layers, start=1):
            for query, jobs in (("tokens", layer.token), ("CLS", layer.cls)):
                if jobs:
                    lines.append(f"layer {number}, {query}: {_jobs_in_words(jobs)}")
        return "; ".join(lines)


def _jobs_in_words(jobs: Sequence[Job]) -> str:
    words = []
    retrieved = [
        f"{job.component + 1}{' (as its second token)' if job.reverse else ''}"
        for job in jobs
        if isinstance(job, Max)
    ]
    if retrieved:
        words.append("retrieve by score " + ", ".join(retrieved))
    for job in jobs:
        if isinstance(job, Routed):
            choice = "the best" if job.choice == 0 else f"choice {job.choice + 1}"
            names = ", ".join(str(i + 1) for i in job.components)
            words.append(f"retrieve by {choice} of scores {names} for the query (routed)")
        elif isinstance(job, Next):
            way = "smallest token above" if job.from_below else "largest token below"
            words.append(f"retrieve the {way} what was found, score {job.component + 1} (adaptive)")
        elif isinstance(job, Specific):
            words.append(f"hold all {job.arity}-tuples by position")
        elif isinstance(job, ReadTuples):
            words.append(f"read the tuples of score {job.component + 1} by position")
        elif isinstance(job, ReadPositions):
            words.append(f"read {_few_positions(job.positions)}")
        elif isinstance(job, Global):
            words.append("aggregate everything")
    return " and ".join(words)


def _few_positions(positions: Sequence[int]) -> str:
    if len(positions) > 8:
        return f"{len(positions)} fixed positions"
    return "positions " + ", ".join(map(str, positions))


# Covers: every tuple inside what one token reads by position


def cover_groups(n_tokens: int, arity: int) -> int:
    """g, the most groups such that the C(g, arity) unions of `arity` groups fit on T tokens."""
    if not 1 <= arity <= n_tokens:
        raise InfoFlowError(f"tuples of {arity} tokens, but T is {n_tokens}: expected 1 to T")
    if arity == 1:
        return n_tokens
    return min(n_tokens, least(lambda groups: math.comb(groups + 1, arity) > n_tokens, arity))


def cover_size(n_tokens: int, arity: int) -> int:
    """Positions in a block of the cover: ``arity * ceil(T / g)``, at most T [derived].

    About sqrt(2 T) for pairs and 1.65 T^(2/3) for triples.
    """
    groups = cover_groups(n_tokens, arity)
    return min(n_tokens, arity * -(-n_tokens // groups))


def cover(n_tokens: int, arity: int) -> Bool[Tensor, "pos key"]:
    """Fixed reads of T tokens and CLS such that every tuple of `arity` is read by some token.

    Tokens are split into g groups; each block, a union of `arity` groups, is given to a token that
    lies in it where a matching allows, so that its own residual adds nothing.
    """
    groups = np.array_split(np.arange(n_tokens), cover_groups(n_tokens, arity))
    unions = torch.combinations(torch.arange(len(groups)), arity).tolist()
    blocks = np.zeros((len(unions), n_tokens), dtype=bool)
    for row, union in enumerate(unions):
        blocks[row, np.concatenate([groups[g] for g in union])] = True
    holder = maximum_bipartite_matching(csr_array(blocks), perm_type="column")
    free = iter(sorted(set(range(n_tokens)) - set(holder.tolist())))
    holder = [token if token >= 0 else next(free) for token in holder.tolist()]
    reads = torch.zeros(n_tokens + 1, n_tokens + 1, dtype=torch.bool)
    for row, token in enumerate(holder):
        reads[token, :n_tokens] = torch.from_numpy(blocks[row])
    return reads


# Running a schedule


def best_inside(
    x: Float[Tensor, "batch pos d_token"],
    sets: Bool[Tensor, "batch holder pos"],
    component: Component,
) -> Float[Tensor, "batch holder"]:
    """For every holder the largest score of a tuple inside its set; -inf for an empty one."""
    if component.tuples is not None:
        return _best_listed(x, sets, component)
    if component.positions is not None:
        allowed = torch.zeros(x.shape[1], dtype=torch.bool)
        allowed[list(component.positions)] = True
        sets = sets & allowed
    sizes = sets.sum(dim=-1)
    width = max(1, int(sizes.max()))
    # members first, in order; short sets repeat their first member, which changes no maximum
    order = (~sets).to(torch.uint8).argsort(dim=-1, stable=True)[..., :width]
    index = torch.where(torch.arange(width) < sizes.unsqueeze(-1), order, order[..., :1])
    tuples = tuple_indices(width, component.arity, component.symmetric)
    best = torch.full(sizes.shape, -torch.inf, dtype=x.dtype)
    sequences = torch.arange(len(x))[:, None, None, None]
    chunk = max(1, _MOST_SCORES_AT_ONCE // (sizes.numel() * component.arity))
    for part in tuples.split(chunk):
        positions = index[:, :, part]
        scores = component.preference(x[sequences, positions])
        if component.distinct:
            scores = scores.masked_fill(~all_different(positions), -torch.inf)
        best = torch.maximum(best, scores.amax(dim=-1))
    return best.masked_fill(sizes == 0, -torch.inf)


def _best_listed(
    x: Float[Tensor, "batch pos d_token"],
    sets: Bool[Tensor, "batch holder pos"],
    component: Component,
) -> Float[Tensor, "batch holder"]:
    """For every holder the largest score of a listed tuple inside its set; -inf for none."""
    tuples = component_tuples(x.shape[1], component)
    held = sets[:, :, tuples].all(dim=-1)
    scores = component.preference(x[:, tuples])
    return scores[:, None].expand_as(held).masked_fill(~held, -torch.inf).amax(dim=-1)


def _pair_scores(
    component: Component, x: Float[Tensor, "batch pos d_token"], reverse: bool
) -> Float[Tensor, "batch query key"]:
    """The preference of every pair of tokens, -inf outside the component's positions."""
    n_tokens = x.shape[1]
    queries = x.unsqueeze(2).expand(-1, -1, n_tokens, -1)
    keys = x.unsqueeze(1).expand(-1, n_tokens, -1, -1)
    pair = [keys, queries] if reverse else [queries, keys]
    scores = component.preference(torch.stack(pair, dim=-2))
    if component.distinct:
        scores = scores.masked_fill(torch.eye(n_tokens, dtype=torch.bool), -torch.inf)
    if component.positions is not None:
        inside = torch.zeros(n_tokens, dtype=torch.bool)
        inside[list(component.positions)] = True
        scores = scores.masked_fill(~(inside[:, None] & inside), -torch.inf)
    return scores


class _Run:
    """A schedule on a batch: the sets, and how far adaptive searches have come."""

    def __init__(
        self,
        components: Sequence[Component],
        x: Float[Tensor, "batch pos d_token"],
        causal: bool,
        reference: Float[Tensor, "sample d_token"] | None,
    ) -> None:
        self.components, self.x, self.reference = components, x, reference
        self.batch, self.n_tokens = x.shape[:2]
        self.sets = initial_sets(self.batch, self.n_tokens + 1, self.n_tokens)
        self.sees = torch.ones(self.n_tokens, self.n_tokens, dtype=torch.bool)
        if causal:
            self.sees = self.sees.tril()
        self.lowest: dict[tuple[int, bool], Tensor] = {}
        self._roles: dict[tuple[int, ...], Tensor] = {}

    def layer(self, layer: LayerSchedule) -> None:
        """One layer; all positions read the sets of the layer before."""
        rules: list[Rule] = []
        found: dict[tuple[int, bool], Tensor] = {}
        for for_tokens, jobs in ((True, layer.token), (False, layer.cls)):
            for job in jobs:
                rules.append(self._rule(job, for_tokens, found))
        self.sets = update(self.sets, rules)
        self.lowest.update(found)

    def _rule(self, job: Job, for_tokens: bool, found: dict[tuple[int, bool], Tensor]) -> Rule:
        n = self.n_tokens
        is_cls = torch.arange(n + 1) == n
        if isinstance(job, Global):
            return GlobalAggregation(is_cls if not for_tokens else ~is_cls)
        if isinstance(job, (Specific, ReadTuples, ReadPositions)):
            return SpecificPositions(self._reads(job, for_tokens))
        chosen = torch.full((self.batch, 1, n + 1), -1)
        queries = slice(0, n) if for_tokens else slice(n, None)
        if isinstance(job, Next):
            chosen[:, 0, queries] = self._next(job, queries, found)
        elif isinstance(job, Routed):
            chosen[:, 0, queries] = self._routed(job, for_tokens)
        elif for_tokens and self.components[job.component].arity == 2:
            scores = _pair_scores(self.components[job.component], self.x, job.reverse)
            chosen[:, 0, queries] = scores.masked_fill(~self.sees, -torch.inf).argmax(dim=-1)
        else:
            chosen[:, 0, queries] = self._by_held(job, for_tokens)
        return MaxPosition(chosen)

    def _by_held(self, job: Max, for_tokens: bool) -> Int[Tensor, "batch _query"]:
        """The position that holds the best tuple; the same for all queries that see everything."""
        component, held = self.components[job.component], self.sets[:, : self.n_tokens]
        if component.tuples is not None:
            if not for_tokens:  # across two positions: the listed tuple that both together hold
                held = held | self.sets[:, self.n_tokens :]
            best = _best_listed(self.x, held, component)
        else:
            best = best_inside(self.x, held, component)
        if not for_tokens:
            return best.argmax(dim=-1, keepdim=True)
        each = best[:, None].expand(-1, self.n_tokens, -1)
        return each.masked_fill(~self.sees, -torch.inf).argmax(dim=-1)

    def _next(
        self, job: Next, queries: slice, found: dict[tuple[int, bool], Tensor]
    ) -> Int[Tensor, "batch query"]:
        key = (job.component, job.from_below)
        component = self.components[job.component]
        scores = component.preference(self.x[:, :, None])
        if component.positions is not None:
            outside = torch.ones(self.n_tokens, dtype=torch.bool)
            outside[list(component.positions)] = False
            scores = scores.masked_fill(outside, torch.inf if job.from_below else -torch.inf)
        scores = -scores if job.from_below else scores
        top = torch.full((self.batch, 1), torch.inf)
        lowest = self.lowest.get(key, torch.cat([scores, top], dim=1))
        found.setdefault(key, lowest.clone())
        below = scores[:, None] < lowest[:, queries, None]
        if queries.start == 0:
            below = below & self.sees
        best, at = scores[:, None].expand_as(below).masked_fill(~below, -torch.inf).max(dim=-1)
        nothing = best == -torch.inf
        reached = lowest.gather(1, at)
        found[key][:, queries] = torch.where(nothing, lowest[:, queries], reached)
        return torch.where(nothing, -1, at)

    def _routed(self, job: Routed, for_tokens: bool) -> Int[Tensor, "batch query"]:
        if not for_tokens:
            raise InfoFlowError("a routed job stands at CLS: expected it at tokens, whose queries")
        if self.reference is None:
            raise InfoFlowError(
                "a routed head needs tokens to compare with: pass `reference`, a sample of them"
            )
        from infoflow_lens.theory.routing import choose_roles, roles_of

        roles = roles_of(self.components, job.components)
        if job.components not in self._roles:
            self._roles[job.components] = choose_roles(
                self.components, roles, self.x, self.reference
            )
        taken = self._roles[job.components][..., job.choice]
        chosen = torch.full((self.batch, self.n_tokens), -1)
        for number, (component, reverse) in enumerate(roles):
            scores = _pair_scores(self.components[component], self.x, reverse)
            best = scores.masked_fill(~self.sees, -torch.inf).argmax(dim=-1)
            chosen = torch.where(taken == number, best, chosen)
        return chosen

    def _reads(
        self, job: Specific | ReadTuples | ReadPositions, for_tokens: bool
    ) -> Bool[Tensor, "pos key"]:
        n = self.n_tokens
        if isinstance(job, Specific):
            if not for_tokens:
                raise InfoFlowError("a cover by position stands at CLS: expected it at tokens")
            return cover(n, job.arity)
        reads = torch.zeros(n + 1, n + 1, dtype=torch.bool)
        if isinstance(job, ReadPositions):
            reads[n, list(job.positions)] = True
            return reads
        component = self.components[job.component]
        common, rests = shared_positions(component)
        if not for_tokens:
            reads[n, list(common)] = True
            return reads
        for holder, rest in zip(tuple_holders(n, rests), rests, strict=True):
            reads[holder, list(rest)] = True
        return reads


def shared_positions(
    component: Component,
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Of listed tuples the positions that all have, and the others of each."""
    assert component.tuples is not None
    common = set.intersection(*map(set, component.tuples)) if len(component.tuples) > 1 else set()
    rests = tuple(tuple(p for p in row if p not in common) for row in component.tuples)
    return tuple(sorted(common)), rests


def tuple_holders(n_tokens: int, rests: Sequence[Sequence[int]]) -> list[int]:
    """A token for each tuple, one of its last where that is free [chosen].

    Where there are more tuples than tokens, tokens hold several.
    """
    taken: set[int] = set()
    holders = []
    for rest in rests:
        if len(taken) == n_tokens:
            taken = set()
        free = next((p for p in sorted(rest, reverse=True) if p not in taken), None)
        if free is None:
            free = next(p for p in range(n_tokens) if p not in taken)
        taken.add(free)
        holders.append(free)
    return holders


def run_schedule(
    schedule: Schedule,
    components: Sequence[Component],
    x: Float[Tensor, "batch pos d_token"],
    *,
    causal: bool = False,
    reference: Float[Tensor, "sample d_token"] | None = None,
) -> InformationSets:
    """The information sets that a schedule gives on inputs: tokens 0 .. T - 1, then CLS.

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
    for number, layer in enumerate(schedule.layers):
        for job in (*layer.token, *layer.cls):
            asked = job.components if isinstance(job, Routed) else ()
            if isinstance(job, (Max, Next, ReadTuples)):
                asked = (job.component,)
            for index in asked:
                if not 0 <= index < len(components):
                    raise InfoFlowError(
                        f"layer {number} retrieves component {index}: expected 0 to "
                        f"{len(components) - 1}"
                    )
        if any(isinstance(job, Specific) for job in layer.cls):
            raise InfoFlowError(
                f"layer {number} gives CLS a fixed-position job: expected it at tokens"
            )
    run = _Run(components, x, causal, reference)
    members = []
    for layer in schedule.layers:
        run.layer(layer)
        members.append(run.sets)
    return InformationSets(torch.stack(members))


def learns(
    task: Target,
    schedule: Schedule,
    n: int = 200,
    seed: int = 0,
    *,
    positional: bool = False,
    causal: bool = False,
    batch_size: int = 50,
) -> float:
    """How often the active index set lies inside the final CLS set, over `n` sampled inputs.

    1.0 says that the schedule learns the target, as far as `n` samples can say (eq 4: for almost
    every input; where scores tie, which token counts as active is a convention).

    Args:
        task: the target and its inputs.
        schedule: what the heads do.
        n: sampled inputs.
        seed: of the samples.
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
    if batch_size < 1:
        raise InfoFlowError(f"batch_size is {batch_size}: expected at least 1")
    x, _ = task.sample(n, seed)
    reference = None
    if any(isinstance(job, Routed) for job in schedule.jobs):
        reference = reference_tokens(task, seed)
    hits = 0
    for part in x.split(batch_size):
        held = run_schedule(
            schedule, task.components, as_vectors(part), causal=causal, reference=reference
        ).members[-1, :, -1]
        hits += int((task.active_index_set(part) <= held).all(dim=1).sum())
    return hits / n


def as_vectors(x: Tensor) -> Float[Tensor, "batch pos d_token"]:
    """Tokens as vectors; a token id is a vector of one number."""
    return x.unsqueeze(-1).double() if x.ndim == 2 else x


def reference_tokens(task: Target, seed: int, n: int = 1024) -> Float[Tensor, "sample d_token"]:
    """Tokens of other sequences than those of :func:`learns`, for routed heads."""
    sequences = max(1, -(-n // task.n_tokens))
    x, _ = task.sample(sequences, derived_seed("reference", seed))
    return as_vectors(x).flatten(0, 1)[:n]
