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
from infoflow_lens.theory.comparison import Component, check_sizes, tuple_indices
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
_MOST_STATES = 1000  # of a layer; beyond, the exact search takes minutes


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
    """

    component: int


@dataclass(frozen=True)
class Specific:
    """A head of tokens that reads fixed positions, rule (3): together all tuples of an arity.

    Attributes:
        arity: length of the tuples, each of which is held by some token afterwards.
    """

    arity: int


@dataclass(frozen=True)
class Global:
    """A head that aggregates everything, rule (2)."""


Job: TypeAlias = Max | Specific | Global


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
    """

    layers: tuple[LayerSchedule, ...]
    size: int = field(default=0, compare=False)

    @property
    def needs_positions(self) -> bool:
        """Whether a head reads fixed positions, which takes a positional encoding."""
        return any(isinstance(job, Specific) for layer in self.layers for job in layer.token)

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
    retrieved = [job.component + 1 for job in jobs if isinstance(job, Max)]
    if retrieved:
        words.append("retrieve by score " + ", ".join(map(str, retrieved)))
    words += [
        f"hold all {job.arity}-tuples by position" for job in jobs if isinstance(job, Specific)
    ]
    words += ["aggregate everything" for job in jobs if isinstance(job, Global)]
    return " and ".join(words)


# Covers: every tuple inside what one token reads by position


def cover_groups(n_tokens: int, arity: int) -> int:
    """g, the most groups such that the C(g, arity) unions of `arity` groups fit on T tokens."""
    if not 1 <= arity <= n_tokens:
        raise InfoFlowError(f"tuples of {arity} tokens, but T is {n_tokens}: expected 1 to T")
    groups = arity
    while groups < n_tokens and math.comb(groups + 1, arity) <= n_tokens:
        groups += 1
    return min(groups, n_tokens)


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


def _best_inside(
    x: Float[Tensor, "batch pos d_token"],
    sets: Bool[Tensor, "batch holder pos"],
    component: Component,
) -> Float[Tensor, "batch holder"]:
    """For every holder the largest score of a tuple inside its set; -inf for an empty one."""
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
        scores = component.score(x[sequences, index[:, :, part]])
        best = torch.maximum(best, scores.amax(dim=-1))
    return best.masked_fill(sizes == 0, -torch.inf)


def _choice(
    job: Max,
    components: Sequence[Component],
    x: Float[Tensor, "batch pos d_token"],
    sets: Bool[Tensor, "batch all pos"],
    for_tokens: bool,
) -> Int[Tensor, "batch head all"]:
    """The position that a max-position head retrieves for each query; -1 for the others."""
    component, n_tokens = components[job.component], x.shape[1]
    chosen = torch.full((len(x), 1, n_tokens + 1), -1)
    if for_tokens and component.arity == 2:
        queries = x.unsqueeze(2).expand(-1, -1, n_tokens, -1)
        keys = x.unsqueeze(1).expand(-1, n_tokens, -1, -1)
        scores = component.score(torch.stack([queries, keys], dim=-2))
        chosen[:, 0, :n_tokens] = scores.argmax(dim=-1)
        return chosen
    best = _best_inside(x, sets[:, :n_tokens], component).argmax(dim=-1)
    queries_served = slice(0, n_tokens) if for_tokens else slice(n_tokens, None)
    chosen[:, 0, queries_served] = best[:, None]
    return chosen


def run_schedule(
    schedule: Schedule, components: Sequence[Component], x: Float[Tensor, "batch pos d_token"]
) -> InformationSets:
    """The information sets that a schedule gives on inputs: tokens 0 .. T - 1, then CLS.

    Raises:
        InfoFlowError: for a component that is not there, or a fixed-position job at CLS.
    """
    if not schedule.layers:
        raise InfoFlowError("the schedule has no layer: expected at least one")
    n_tokens = x.shape[1]
    sets = initial_sets(len(x), n_tokens + 1, n_tokens)
    is_cls = torch.arange(n_tokens + 1) == n_tokens
    members = []
    for number, layer in enumerate(schedule.layers):
        rules: list[Rule] = []
        for for_tokens, jobs in ((True, layer.token), (False, layer.cls)):
            for job in jobs:
                if isinstance(job, Global):
                    rules.append(GlobalAggregation(is_cls if not for_tokens else ~is_cls))
                elif isinstance(job, Specific):
                    if not for_tokens:
                        raise InfoFlowError(
                            f"layer {number} gives CLS a fixed-position job: expected it at tokens"
                        )
                    rules.append(SpecificPositions(cover(n_tokens, job.arity)))
                elif not 0 <= job.component < len(components):
                    raise InfoFlowError(
                        f"layer {number} retrieves component {job.component}: expected 0 to "
                        f"{len(components) - 1}"
                    )
                else:
                    rules.append(MaxPosition(_choice(job, components, x, sets, for_tokens)))
        sets = update(sets, rules)
        members.append(sets)
    return InformationSets(torch.stack(members))


def learns(
    task: Target,
    schedule: Schedule,
    n: int = 200,
    seed: int = 0,
    *,
    positional: bool = False,
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
    hits = 0
    for part in x.split(batch_size):
        held = run_schedule(schedule, task.components, part).members[-1, :, -1]
        hits += int((task.active_index_set(part) <= held).all(dim=1).sum())
    return hits / n


# Searching for the schedule with the smallest sets


@dataclass(frozen=True)
class _State:
    """How far a partial schedule has come. Components of one arity are interchangeable."""

    prepared: int = 0  # pairs that some token holds, by a token head
    covered: bool = False  # every tuple is held by some token
    solved: int = 0
    token: int = 1
    cls: int = 0
    worst: int = 0
    total: int = 0
    layers: tuple[LayerSchedule, ...] = ()

    @property
    def progress(self) -> tuple[int, bool, int]:
        return self.prepared, self.covered, self.solved

    @property
    def costs(self) -> tuple[int, int, int, int]:
        return self.worst, self.token, self.cls, self.total


def _next_states(
    state: _State, heads: int, last: bool, n: int, arity: int, n_tokens: int, positional: bool,
    cls_hidden: bool, max_position_only: bool,
) -> list[_State]:  # fmt: skip
    """All that one layer can do."""
    token_options: list[tuple[int, bool]] = [(0, False)]
    if not last:
        most = n - state.prepared if arity == 2 else 0
        token_options = [
            (pairs, cover_too)
            for cover_too in ((False, True) if positional and not state.covered else (False,))
            for pairs in range(min(most, heads - cover_too) + 1)
        ]
    ready = n if arity == 1 or state.covered else state.prepared if arity == 2 else 0
    cls_options: list[int | None] = [0]
    if last or cls_hidden:
        cls_options = [*range(min(heads, ready - state.solved) + 1)]
        if not max_position_only:
            cls_options.append(None)  # global
    following = []
    for pairs, cover_too in token_options:
        block = cover_size(n_tokens, arity) if cover_too else 1
        token = min(n_tokens, state.token * (block + pairs))
        for solve in cls_options:
            cls = n_tokens if solve is None else min(n_tokens, state.cls + solve * state.token)
            first = state.solved
            jobs: tuple[Job, ...] = (
                (Global(),) if solve is None else tuple(Max(i) for i in range(first, first + solve))
            )
            token_jobs: tuple[Job, ...] = tuple(
                Max(i) for i in range(state.prepared, state.prepared + pairs)
            )
            if cover_too:
                token_jobs = (Specific(arity), *token_jobs)
            following.append(
                _State(
                    prepared=state.prepared + pairs,
                    covered=state.covered or cover_too,
                    solved=n if solve is None else state.solved + solve,
                    token=token,
                    cls=cls,
                    worst=max(state.worst, cls, 0 if last else token),
                    total=state.total + cls + (0 if last else n_tokens * token),
                    layers=(*state.layers, LayerSchedule(token_jobs, jobs)),
                )
            )
    return following


def _undominated(states: Sequence[_State]) -> list[_State]:
    """States for which no other has come as far at no more cost in anything."""
    kept: list[_State] = []
    for state in sorted(states, key=lambda s: (s.costs, tuple(-int(p) for p in s.progress))):
        if not any(
            all(a >= b for a, b in zip(other.progress, state.progress, strict=True))
            and all(a <= b for a, b in zip(other.costs, state.costs, strict=True))
            for other in kept
        ):
            kept.append(state)
    return kept


def search(
    components: Sequence[Component],
    n_heads: Sequence[int],
    n_tokens: int,
    positional: bool = False,
    cls_hidden: bool = True,
    max_position_only: bool = False,
) -> Schedule | None:
    """The schedule that resolves every component with the smallest largest |I|.

    Exact among the schedules that combine four rules [derived]: a CLS head retrieves single tokens
    (R1); a token head pairs every token with its best partner and a CLS head of a later layer picks
    the best pair (R2); one token head per layer holds all tuples by position, then a CLS head picks
    for each component (R3, needs positions); CLS aggregates everything (R4).

    Args:
        components: what the target retrieves, all of one arity.
        n_heads: h_1 .. h_L.
        n_tokens: T.
        positional: whether there is a positional encoding.
        cls_hidden: whether CLS retrieves in hidden layers too.
        max_position_only: R1 and R2 only.

    Returns:
        The schedule with its size, or None if there is none.

    Raises:
        InfoFlowError: for no components, components of several arities, bad sizes, arity > T, or
            more partial schedules than an exact search can hold.
    """
    check_sizes(n_heads, n_tokens)
    arities = {component.arity for component in components}
    if len(arities) != 1:
        raise InfoFlowError(
            f"components have arities {sorted(arities)}: expected one arity for all of them"
        )
    (arity,) = arities
    if arity > n_tokens:
        raise InfoFlowError(f"tuples of {arity} tokens, but T is {n_tokens}: expected T >= {arity}")
    n = len(components)
    states = [_State()]
    for layer, heads in enumerate(n_heads):
        last = layer == len(n_heads) - 1
        states = _undominated(
            [
                following
                for state in states
                for following in _next_states(
                    state,
                    heads,
                    last,
                    n,
                    arity,
                    n_tokens,
                    positional and not max_position_only,
                    cls_hidden,
                    max_position_only,
                )
            ]
        )
        if len(states) > _MOST_STATES:
            raise InfoFlowError(
                f"{n} components and heads {tuple(n_heads)} leave {len(states)} partial schedules: "
                f"expected at most {_MOST_STATES} for an exact search; ask for fewer components or "
                "layers"
            )
    done = [state for state in states if state.solved == n]
    if not done:
        return None
    best = min(done, key=lambda state: (state.worst, state.total))
    return Schedule(best.layers, size=best.worst)
