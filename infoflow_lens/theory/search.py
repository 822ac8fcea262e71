"""The search for the schedule with the smallest information sets (step 2 of the estimate).

It counts: components of one kind are alike, so a partial schedule is how many of each kind
tokens and CLS hold, and how large their sets are. Layer by layer, all that the heads can do is
tried, and of the partial schedules those are kept that no other one beats.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import Count, check_by_layer, checked
from infoflow_lens.theory.comparison import Component, Heads, common_positions, tuple_holders
from infoflow_lens.theory.jobs import (
    Global,
    Job,
    Max,
    Message,
    Next,
    ReadPositions,
    ReadTuples,
    Routed,
    Specific,
)
from infoflow_lens.theory.schedule import LayerSchedule, Schedule
from infoflow_lens.theory.score_graph import Plan

_MOST_KEPT = 400  # partial schedules of a layer in the full search
_BEAM = 100  # in the first pass, which finds an upper bound
_MOST_WEIGHED = 40_000  # partial schedules in all: a few seconds
_N_PROGRESS = 12  # fields of a state that say how far it has come
_MOST_COMPONENTS = 256


@dataclass(frozen=True)
class Found:
    """What a search gave.

    Attributes:
        schedule: the one with the smallest largest |I|; None if there is none.
        left_out: schedules of the known jobs that were not weighed, in words; empty if none.
    """

    schedule: Schedule | None
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Kinds:
    """The components by what retrieving them takes, as indices."""

    singles: tuple[int, ...]
    ranked: tuple[int, ...]
    pairs: tuple[int, ...]
    wide: tuple[int, ...]
    listed: tuple[int, ...]
    rank: int  # of the ranked ones, from the nearer end, the largest
    below: tuple[bool, ...]  # whether the nearer end of each ranked one is the lower
    rest: int  # tokens of a listed tuple but for the shared ones
    common: int  # shared ones
    sides: (
        int  # token heads that a pair takes: two if its order counts and tokens see the past only
    )
    max_arity: int


class _TokenAction(NamedTuple):
    """What token heads do in a layer: numbers of components, but for `cover` and `climb`."""

    pairs: int = 0
    singles: int = 0
    climb: int = 0  # whether every ranked component is searched one step further
    cover: int = 0  # the arity of the tuples that are held by position; 0 for none
    listed: int = 0


class _ClsAction(NamedTuple):
    """What CLS heads do in a layer: numbers of components, but for `climb` and `read`."""

    singles: int = 0
    pairs: int = 0
    wide: int = 0
    listed: int = 0
    climb: int = 0
    read: int = 0  # whether the fixed positions are read


class _State(NamedTuple):
    """How far a partial schedule has come, and what it holds."""

    single_tok: int = 0  # single tokens that all tokens hold
    single_inh: int = 0  # of these, those that CLS took over
    single_cls: int = 0
    prepared: int = 0  # pairs that some token holds
    pair_cls: int = 0
    covered: int = 0  # arity of the tuples that are all held by some token; 0 for none
    wide_cls: int = 0
    listed_tok: int = 0
    listed_cls: int = 0
    run_tok: int = 1  # consecutive ranks that a token holds
    run_cls: int = 0
    read: int = 0
    own: int = 1  # size of what a token holds for itself
    shared: int = 0  # size of what all tokens hold
    excl: int = 0  # size of what CLS gained
    inh: int = 0  # size of the shared part that came with it
    worst: float = 0.0  # largest |I| / E_l
    total: float = 0.0
    actions: tuple[tuple[_TokenAction, _ClsAction | None], ...] = ()
    sizes: tuple[int, ...] = ()

    @property
    def progress(self) -> tuple[int, ...]:
        return cast(tuple[int, ...], self[:_N_PROGRESS])

    @property
    def costs(self) -> tuple[float, ...]:
        sizes = (self.own, self.shared, self.excl, self.inh)
        return (self.worst, self.total, *map(float, sizes))


def _group_components(
    components: Sequence[Component], n_tokens: int, causal: bool, served: Collection[int] = ()
) -> _Kinds:
    """Group a target's components by how heads can retrieve them, with the sizes that this takes.

    Args:
        components: of the target.
        n_tokens: T.
        causal: whether a token sees earlier ones alone.
        served: the numbers of components that another plan retrieves, which are left out.
    """
    groups: dict[str, list[int]] = {k: [] for k in ("single", "ranked", "pair", "wide", "listed")}
    for index, component in enumerate(components):
        if index in served:
            continue
        if component.tuples is not None:
            kind = "listed"
        elif component.rank > 1:
            kind = "ranked"
        else:
            kind = {1: "single", 2: "pair"}.get(component.arity, "wide")
        groups[kind].append(index)
    # the r-th largest is found step by step from the nearer end, the top or the bottom
    n_steps, below = [1], []
    for index in groups["ranked"]:
        component = components[index]
        n = n_tokens if component.positions is None else len(component.positions)
        n_steps.append(min(component.rank, n - component.rank + 1))
        below.append(component.rank > n - component.rank + 1)
    rest, common = 0, 0
    for index in groups["listed"]:
        shared, rests = common_positions(components[index])
        common = max(common, len(shared))
        held: dict[int, set[int]] = {}
        # each tuple is collected by one of its positions, which reads the others of all tuples
        # that it collects; the position that reads the most sets the size
        for holder, row in zip(tuple_holders(n_tokens, rests), rests, strict=True):
            held.setdefault(holder, {holder}).update(row)
        rest = max(rest, max(map(len, held.values())))
    ordered = any(not components[i].symmetric for i in groups["pair"])
    return _Kinds(
        singles=tuple(groups["single"]),
        ranked=tuple(groups["ranked"]),
        pairs=tuple(groups["pair"]),
        wide=tuple(groups["wide"]),
        listed=tuple(groups["listed"]),
        rank=max(n_steps),
        below=tuple(below),
        rest=rest,
        common=common,
        # the later token of a pair does the retrieval, and may be the first or the second of it
        sides=2 if causal and ordered else 1,
        max_arity=max([0, *(components[i].arity for i in (*groups["pair"], *groups["wide"]))]),
    )


@dataclass(frozen=True)
class _Problem:
    """What is asked, as the search needs it."""

    kinds: _Kinds
    n_heads: tuple[int, ...]  # of tokens
    cls_heads: tuple[int, ...]
    n_tokens: int
    positional: bool
    causal: bool
    max_position_only: bool
    roles: tuple[int, ...]
    widths: tuple[int, ...]
    usable: tuple[bool, ...]
    reads: Sequence[int]
    coarse: bool = False  # whether only few numbers of heads are tried for each kind

    def _list_numbers(self, most: int, *others: int) -> Iterable[int]:
        """List how many of a kind a layer may take."""
        if not self.coarse:
            return range(most + 1)
        return sorted({0, most, *(n for n in others if 0 < n < most)})

    @property
    def n_layers(self) -> int:
        """L."""
        return len(self.n_heads)

    @property
    def reads_positions(self) -> bool:
        """Say whether heads may read fixed positions."""
        return self.positional and not self.max_position_only

    def token_actions(self, state: _State, layer: int) -> Iterator[_TokenAction]:
        """Yield what token heads can do in a layer."""
        kinds, heads = self.kinds, self.n_heads[layer]
        # after the last layer CLS alone is read, so heads of tokens have nothing to do in it
        if layer == len(self.n_heads) - 1 or not self.usable[layer]:
            yield _TokenAction()
            return
        # each of these is one head, or one a component, whatever else the layer does
        covers = [0]
        # a cover of tuples holds all shorter ones too, so only a longer one is worth a head
        if self.reads_positions and not self.causal and kinds.max_arity > state.covered:
            arities = {kinds.max_arity}
            if kinds.pairs:
                arities.add(2)
            covers += sorted(a for a in arities if a > state.covered)
        listed = [0]
        if self.reads_positions and kinds.listed and not state.listed_tok:
            listed += [len(kinds.listed)]
        many = self.roles[layer]
        # a causal token sees some tokens only: the next one that it finds need not be the next rank
        climbs = [0, 1] if kinds.ranked and not self.causal and state.run_tok < kinds.rank else [0]
        missing = len(kinds.pairs) - state.prepared
        for cover, some, climb in itertools.product(covers, listed, climbs):
            left = heads - (cover > 0) - some - climb * len(kinds.ranked)
            if left < 0:
                continue
            # the heads that are left prepare pairs first; single tokens take what remains
            most = min(missing, left * many // kinds.sides) if not cover else 0
            # the coarse pass tries an even share of the missing pairs over the hidden layers, too
            for pairs in self._list_numbers(most, -(-missing // max(1, self.n_layers - 1))):
                used = -(-pairs * kinds.sides // many)
                free = len(kinds.singles) - state.single_tok if not self.causal else 0
                for singles in self._list_numbers(min(free, left - used)):
                    yield _TokenAction(pairs, singles, climb, cover, some)

    def cls_actions(self, state: _State, layer: int, listing: int) -> Iterator[_ClsAction | None]:
        """Yield what CLS heads can do in a layer; None for aggregating everything."""
        kinds, heads = self.kinds, self.cls_heads[layer]
        # CLS reads what all listed tuples share in the layer in which tokens read the rest
        heads -= listing if kinds.common else 0
        if heads < 0:
            return
        if not self.usable[layer]:
            yield _ClsAction()
            return
        if not self.max_position_only:
            yield None
        # what is left of each kind, and already prepared at tokens where it must be
        singles = len(kinds.singles) - max(state.single_cls + state.single_inh, 0)
        pairs = (len(kinds.pairs) if state.covered >= 2 else state.prepared) - state.pair_cls
        wide = (len(kinds.wide) if state.covered >= kinds.max_arity else 0) - state.wide_cls
        listed = state.listed_tok - state.listed_cls
        reads = [0, 1] if self.reads and self.reads_positions and not state.read else [0]
        climbs = [0, 1] if kinds.ranked and state.run_cls < kinds.rank else [0]
        for climb, read in itertools.product(climbs, reads):
            left = heads - climb * len(kinds.ranked) - read
            if left < 0:
                continue
            most = (max(singles, 0), pairs, max(wide, 0), listed)
            for taken in self._share_out(left, most):
                yield _ClsAction(*taken, climb=climb, read=read)  # type: ignore[misc]

    def _share_out(self, heads: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yield all ways to give at most so many heads to kinds with so many components."""
        if not most:
            yield ()
            return
        for number in self._list_numbers(min(most[0], heads)):
            for rest in self._share_out(heads - number, most[1:]):
                yield number, *rest

    def list_next(self, state: _State, layer: int) -> Iterator[_State]:
        """Yield all states that one layer can lead to."""
        for tokens in self.token_actions(state, layer):
            for cls in self.cls_actions(state, layer, tokens.listed):
                yield self._advance(state, layer, tokens, cls)

    def _advance(
        self,
        state: _State,
        layer: int,
        tokens: _TokenAction,
        cls: _ClsAction | None,
    ) -> _State:
        kinds, limit, last = self.kinds, self.n_tokens, layer == len(self.n_heads) - 1
        # every head multiplies what its own query holds, and adds what all tokens then share
        block = Specific(tokens.cover).gain(limit) if tokens.cover else 1
        ranked, listed = tokens.climb * len(kinds.ranked), tokens.listed * kinds.rest
        gained = block + tokens.pairs * kinds.sides + ranked + listed
        own = min(limit, state.own * gained)
        shared = min(limit, state.shared + tokens.singles * state.own)
        excl, inh, single_inh = state.excl, state.inh, state.single_inh
        if cls is None:
            excl = limit
            done = (
                len(kinds.singles), len(kinds.pairs), len(kinds.wide), len(kinds.listed),
                kinds.rank, 1,
            )  # fmt: skip
        else:
            n_taken = (
                cls.singles + cls.pairs + cls.wide + cls.listed + cls.climb * len(kinds.ranked)
            )
            # heads read states from before this layer, so what they bring has the old size
            excl += (n_taken + cls.read * len(self.reads)) * state.own
            excl += tokens.listed * kinds.common * state.own
            if n_taken or cls.read:
                # whichever token CLS retrieves or reads brings along what all tokens share
                inh, single_inh = state.shared, state.single_tok
            done = (
                min(state.single_cls + cls.singles, len(kinds.singles)),
                state.pair_cls + cls.pairs,
                state.wide_cls + cls.wide,
                state.listed_cls + cls.listed,
                state.run_cls + cls.climb * state.run_tok,
                max(state.read, cls.read),
            )
        excl = min(limit, excl)
        at_cls = min(limit, excl + inh)
        # no head reads tokens after the last layer, so their sets cost nothing
        at_tokens = 0 if last else min(limit, own + shared)
        size = max(at_cls, at_tokens)
        return _State(
            single_tok=state.single_tok + tokens.singles,
            single_inh=single_inh,
            single_cls=done[0],
            prepared=state.prepared + tokens.pairs,
            pair_cls=done[1],
            covered=max(state.covered, tokens.cover),
            wide_cls=done[2],
            listed_tok=state.listed_tok + tokens.listed,
            listed_cls=done[3],
            # a token that climbs doubles its run, by the run of what it found
            run_tok=state.run_tok * (2 if tokens.climb else 1),
            run_cls=done[4],
            read=done[5],
            own=own,
            shared=shared,
            excl=excl,
            inh=inh,
            worst=max(state.worst, size / self.widths[layer]),
            # T tokens have states of the one size, and a single CLS one of the other
            total=state.total + at_cls + float(limit) * at_tokens,
            actions=(*state.actions, (tokens, cls)),
            sizes=(*state.sizes, size),
        )

    def schedule(self, state: _State) -> Schedule:
        """Return the jobs that led to a state."""
        before, layers = _State(), []
        for layer, (tokens, cls) in enumerate(state.actions):
            layers.append(self._list_jobs(before, layer, tokens, cls))
            before = self._advance(before, layer, tokens, cls)
        return Schedule(tuple(layers), size=max(state.sizes), sizes=state.sizes)

    def _list_jobs(
        self,
        state: _State,
        layer: int,
        tokens: _TokenAction,
        cls: _ClsAction | None,
    ) -> LayerSchedule:
        kinds = self.kinds
        jobs: list[Job] = [Specific(tokens.cover)] if tokens.cover else []
        chosen = kinds.pairs[state.prepared : state.prepared + tokens.pairs]
        heads = -(-len(chosen) * kinds.sides // self.roles[layer])
        # heads choose between pairs only where this saves heads; else each pair has its own head
        if chosen and self.roles[layer] > 1 and heads < len(chosen):
            jobs += [Routed(chosen, choice) for choice in range(heads)]
        else:
            jobs += [Max(i) for i in chosen]
            if kinds.sides == 2:
                jobs += [Max(i, reverse=True) for i in chosen]
        # tokens take single tokens from the end of the list, CLS from its start
        ends = kinds.singles[::-1]
        jobs += [Max(i) for i in ends[state.single_tok : state.single_tok + tokens.singles]]
        climbs = [Next(i, below) for i, below in zip(kinds.ranked, kinds.below, strict=True)]
        jobs += climbs if tokens.climb else []
        tuples = [ReadTuples(i) for i in kinds.listed[: tokens.listed]]
        if cls is None:
            return LayerSchedule((*jobs, *tuples), (Global(),))
        at_cls: list[Job] = []
        for all_, first, number in (
            # a head that only takes over what tokens share repeats the last component
            (kinds.singles, min(state.single_cls, len(kinds.singles) - cls.singles), cls.singles),
            (kinds.pairs, state.pair_cls, cls.pairs),
            (kinds.wide, state.wide_cls, cls.wide),
            (kinds.listed, state.listed_cls, cls.listed),
        ):
            at_cls += [Max(i) for i in all_[first : first + number]]
        at_cls += climbs if cls.climb else []
        at_cls += [ReadPositions(self.reads)] if cls.read else []
        at_cls += tuples if kinds.common else []
        return LayerSchedule((*jobs, *tuples), tuple(at_cls))

    def is_done(self, state: _State) -> bool:
        kinds = self.kinds
        return (
            state.single_cls + state.single_inh >= len(kinds.singles)
            and state.pair_cls >= len(kinds.pairs)
            and state.wide_cls >= len(kinds.wide)
            and state.listed_cls >= len(kinds.listed)
            and (not kinds.ranked or state.run_cls >= kinds.rank)
            and (not self.reads or state.read >= 1)
        )


def _keep_best(states: Iterable[_State]) -> list[_State]:
    """Keep the states than which no other has come as far at no more cost in anything."""
    best: dict[tuple[Any, ...], _State] = {}
    for state in states:  # equal but for the jobs
        best.setdefault(state[:-2], state)
    # whatever beats a state stands before it in this order, so one pass is enough
    order = sorted(best.values(), key=lambda s: (s.costs, tuple(-p for p in s.progress)))
    if not order:
        return []
    progress = np.array([s.progress for s in order], dtype=np.float64)
    costs = np.array([s.costs for s in order], dtype=np.float64)
    kept = np.empty(len(order), dtype=np.int64)
    n = 0
    for row in range(len(order)):
        some = kept[:n]
        beaten = (progress[some] >= progress[row]).all(axis=1)
        beaten &= (costs[some] <= costs[row]).all(axis=1)
        if not beaten.any():
            kept[n] = row
            n += 1
    return [order[row] for row in kept[:n]]


def _spread(states: Sequence[_State], most: int) -> list[_State]:
    """Keep about so many states, the cheapest at every stage of progress, one of each at least."""
    stages: dict[int, list[_State]] = {}
    for state in sorted(states, key=lambda s: s.costs):
        stages.setdefault(sum(state.progress), []).append(state)
    # the cheapest of every stage first, then the second of every stage, and so on
    rounds = itertools.zip_longest(*stages.values())
    flat = [state for round_ in rounds for state in round_ if state is not None]
    return flat[: max(most, len(stages))]


def _search(problem: _Problem, most: int, bound: float) -> tuple[_State | None, bool]:
    """Return the best schedule, and whether all were weighed; costs above `bound` are dropped."""
    states, exhaustive, weighed = [_State()], True, 0
    for layer in range(len(problem.n_heads)):
        candidates = []
        for state in states:
            candidates += [s for s in problem.list_next(state, layer) if s.worst <= bound]
            # too many to weigh in time: the schedule of the quick pass stands
            if weighed + len(candidates) > _MOST_WEIGHED:
                return None, False
        weighed += len(candidates)
        states = _keep_best(candidates)
        if len(states) > most:
            states, exhaustive = _spread(states, most), False
    done = [state for state in states if problem.is_done(state)]
    return min(done, key=lambda s: (s.worst, s.total), default=None), exhaustive


def needs_order(components: Sequence[Component], reads: Sequence[int], n_tokens: int) -> bool:
    """Say whether the target tells positions apart, so that a model must, too, to learn it."""
    return bool(reads and len(reads) < n_tokens) or any(
        c.tuples is not None or (c.positions is not None and len(c.positions) < n_tokens)
        for c in components
    )


@checked
def find(
    components: Sequence[Component],
    n_heads: Heads,
    n_tokens: Count,
    positional: bool = False,
    *,
    max_position_only: bool = False,
    reads: Sequence[int] = (),
    causal: bool = False,
    roles: Sequence[int] | int = 1,
    d_model: Sequence[int] | int = 1,
    usable: Sequence[bool] | None = None,
    plans: Callable[[], Iterable[Plan]] = tuple,
) -> Found:
    """Return the schedule that resolves every component with the smallest largest |I|.

    Exact among the schedules that combine these rules [derived]: a head retrieves a single token,
    for CLS or for all tokens (R1); a token head pairs every token with its best partner and a CLS
    head of a later layer picks the best pair (R2), where a head with r roles serves r; token
    heads hold all tuples by position, then a CLS head picks for each component (R3, needs
    positions); everything is aggregated (R4); ranks are found one below the other, by CLS or by
    tokens, which double what they hold in every layer (R5); fixed positions are read (R6). Where
    these do not do, components of `plans` are served by messages, the others by these rules with
    the heads that are left (R7).

    Where there are more partial schedules than a few hundred in a layer, the most promising are
    kept and the answer says so.

    Args:
        components: what the target retrieves, arities mixed.
        n_heads: h_1 .. h_L.
        n_tokens: T.
        positional: whether there is a positional encoding.
        max_position_only: R1, R2 and R5 only.
        reads: positions that the target reads whatever they hold.
        causal: whether tokens see earlier ones only; CLS, the last, sees all.
        roles: r of the heads of all layers, or of each.
        d_model: E, or E_l of each layer: the largest |I| / E_l is made small.
        usable: layers whose heads may have jobs; default, all.
        plans: gives plans for components whose scores' graphs are trees, as
            :func:`infoflow_lens.theory.score_graph.plans` makes them; none in causal models.

    Raises:
        InfoFlowError: for nothing to retrieve, too many components, bad sizes, or arity > T.
    """
    if not components and not reads:
        raise InfoFlowError(
            "the target retrieves no component and reads no position: expected at least one of "
            "either"
        )
    if len(components) > _MOST_COMPONENTS:
        raise InfoFlowError(
            f"the target has {len(components)} components: expected at most {_MOST_COMPONENTS}"
        )
    for component in components:
        needed = component.arity if component.rank == 1 else component.rank
        if needed > n_tokens:
            raise InfoFlowError(
                f"tuples of {needed} tokens, but T is {n_tokens}: expected T >= {needed}"
            )
    # what the search does not weigh, so that a failure is no proof
    left_out = []
    if causal and not max_position_only and any(c.arity > 1 for c in components):
        left_out.append("covers of all tuples by position in a causal model")
    if causal and any(c.arity == 1 for c in components):
        left_out.append("single tokens retrieved by token queries of a causal model")
    if usable is not None and not all(usable):
        left_out.append("jobs for heads of local attention")
    # heads of a model without positions cannot tell orders apart
    if needs_order(components, reads, n_tokens) and not (positional or causal):
        return Found(None, tuple(left_out))
    problem = _Problem(
        kinds=_group_components(components, n_tokens, causal),
        n_heads=tuple(n_heads),
        cls_heads=tuple(n_heads),
        n_tokens=n_tokens,
        positional=positional,
        causal=causal,
        max_position_only=max_position_only,
        roles=check_by_layer(roles, "roles", len(n_heads)),
        widths=check_by_layer(d_model, "d_model", len(n_heads)),
        usable=tuple(usable) if usable is not None else (True,) * len(n_heads),
        reads=reads,
    )
    best, exhaustive = _solve(problem)
    if not exhaustive:
        left_out.append(
            f"partial schedules beyond the best {_MOST_KEPT} of a layer and {_MOST_WEIGHED} in all"
        )
    if best is not None:
        return Found(problem.schedule(best), tuple(left_out))
    if causal and any(c.arity > 2 for c in components):
        left_out.append("messages of longer tuples in a causal model")
    if causal:
        return Found(None, tuple(left_out))
    # plans of several rounds, which the search layer by layer does not find
    planned = (_schedule_plan(plan, problem, components) for plan in plans())
    return Found(next(filter(None, planned), None), tuple(left_out))


def _solve(problem: _Problem) -> tuple[_State | None, bool]:
    """Find the best partial schedule that does all, and say whether all were weighed."""
    # a quick pass gives an upper bound, by which the full one drops most partial schedules
    first, _ = _search(replace(problem, coarse=True), _BEAM, float("inf"))
    bound = float("inf") if first is None else first.worst
    second, exhaustive = _search(problem, _MOST_KEPT, bound)
    candidates = [state for state in (first, second) if state is not None]
    return min(candidates, key=lambda s: (s.worst, s.total), default=None), exhaustive


def _schedule_plan(
    plan: Plan, problem: _Problem, components: Sequence[Component]
) -> Schedule | None:
    """Place a plan's messages in layers, and search for jobs of all other components."""
    able = [heads * use for heads, use in zip(problem.n_heads, problem.usable, strict=True)]
    kinds = _group_components(components, problem.n_tokens, problem.causal, plan.components)
    for at in plan.placements(able):
        jobs = [
            LayerSchedule(
                tuple(job for job in plan.messages if at[job] == layer),
                tuple(job for job in plan.reads if at[job] == layer),
            )
            for layer in range(problem.n_layers)
        ]
        # messages take their heads first; all other jobs share what is left
        others = replace(
            problem,
            kinds=kinds,
            n_heads=tuple(n - len(own.token) for n, own in zip(problem.n_heads, jobs, strict=True)),
            cls_heads=tuple(n - len(own.cls) for n, own in zip(problem.n_heads, jobs, strict=True)),
        )
        state, _ = _solve(others)
        if state is not None:
            return _join(jobs, others.schedule(state), problem.n_tokens)
    return None


def _join(jobs: Sequence[LayerSchedule], others: Schedule, n_tokens: int) -> Schedule:
    """Join two schedules; a state holds what messages carry to it beside all else."""
    layers, sizes, at_tokens, at_cls = [], [], 0, 0
    for number, (own, other, size) in enumerate(
        zip(jobs, others.layers, others.sizes, strict=True)
    ):
        layers.append(LayerSchedule((*own.token, *other.token), (*own.cls, *other.cls)))
        at_tokens += sum(job.size for job in own.token if isinstance(job, Message))
        at_cls += sum(job.size for job in own.cls if isinstance(job, Message))
        last = number == len(jobs) - 1
        sizes.append(min(n_tokens, size + max(at_cls, 0 if last else at_tokens)))
    return Schedule(tuple(layers), size=max(sizes), sizes=tuple(sizes))
