"""The counts of a target, and the lists of components that serve it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.theory.comparison import (
    ComparisonProfile,
    Component,
    Count,
    components_profile,
    growth_sizes,
    model_comparisons,
)
from infoflow_lens.theory.equivalence import Reading, readings
from infoflow_lens.theory.schedule import Samples, Schedule
from infoflow_lens.theory.score_graph import graph_of, partners_grow
from infoflow_lens.theory.search import Found, find, needs_order
from infoflow_lens.theory.shapes import ModelShape

_OBSERVED = 50  # inputs on which |I_F| is observed
_TOKENS = 8192  # on which scores are asked
_OBSERVED_AT = 64  # their T, so that active tokens are not crowded, unless that is dear
_MOST_SCORES = 3 * 10**7
_ENDS = tuple(  # the token with the largest first coordinate, and with the smallest
    Component(1, lambda x: x[..., 0, 0], extremum=extremum) for extremum in ("max", "min")
)


def max_position_capacity(
    profile: ComparisonProfile, n_heads: Sequence[int], n_tokens: int, trees: int = 1
) -> int:
    """Count comparisons by max-position retrieval alone: eq (5) at the sizes to which sets grow."""
    sizes = growth_sizes(tuple(n_heads), n_tokens)
    return model_comparisons(tuple(n_heads), n_tokens, sizes, profile.dimension, trees)


@dataclass(frozen=True)
class Answer:
    """A search and the list of components that it was for."""

    found: Found
    reading: Reading

    @property
    def schedule(self) -> Schedule | None:
        """The best one."""
        return self.found.schedule

    def run(self, samples: Samples | None, shape: ModelShape) -> float | None:
        """Return the share of samples whose active set the schedule holds; None if not run."""
        if samples is None or self.schedule is None:
            return None
        return samples.learns(self.schedule, self.reading.components, shape)

    def serves(self, held: float | None) -> bool:
        """Say whether the schedule serves the target; one that rests on samples must be run."""
        asked = self.schedule is not None and self.schedule.has_messages
        return held == 1.0 or (held is None and not self.reading.notes and not asked)

    def describe(self) -> str:
        """Return the schedule and its list, in words."""
        assert self.schedule is not None
        notes = "".join(f"; {note}" for note in self.reading.notes)
        return f"{self.schedule.describe()}{notes}"


@dataclass(frozen=True)
class Question:
    """What is asked of a target.

    Attributes:
        task: the target.
        profile: its counts.
        readings: its components, and lists of components that serve it as well.
        reads: fixed positions that it reads.
        least_trees: trees of comparison that the observed |I_F| leaves, at most `profile.n_trees`.
    """

    task: Any
    profile: ComparisonProfile
    readings: tuple[Reading, ...]
    reads: Sequence[int]
    least_trees: int

    @classmethod
    def read(cls, task: Any, seed: int) -> "Question":
        """Read the counts, components and fixed positions of a target.

        Raises:
            InfoFlowError: for nothing to retrieve or read, and counts that do not fit.
        """
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
            # it reads fixed positions, whatever they hold
            zero = lambda t: 0  # noqa: E731
            profile = ComparisonProfile(name, 1, 0, 1, paper=zero, unordered=zero, proved=zero)
        if not isinstance(profile, ComparisonProfile):
            raise InfoFlowError(
                f"task {name!r} has no comparison profile: expected `comparison`; "
                "components_profile(name, components) derives one"
            )
        # a profile that asks for less than a tuple's tokens would exclude too little
        longest = max([1, *(c.arity for c in components)])
        if components and longest > 1 and profile.dimension < longest:
            raise InfoFlowError(
                f"task {name!r} has components of arity {longest}, but its profile says dimension "
                f"{profile.dimension}: expected at least the arity; components_profile derives it"
            )
        # at a larger T, samples show more ways in which the target is read; if that is not too much
        # work
        samples = Samples.draw(task, _OBSERVED, seed, at=max(_OBSERVED_AT, task.n_tokens))
        if samples is not None and _OBSERVED * samples.n_scores > _MOST_SCORES:
            samples = Samples.draw(task, _OBSERVED, seed)
        if not components or samples is None:
            return cls(task, profile, (Reading(components),), reads, profile.n_trees)
        # trees that no sample has active at once need not be counted apart
        active = samples.largest_active() if profile.n_trees > 1 else 1
        return cls(
            task, profile,
            tuple(_readings(samples, Samples.draw(task, _OBSERVED, seed), components)), reads,
            max(1, min(profile.n_trees, -(-active // max(1, profile.dimension)))),
        )  # fmt: skip

    @property
    def components(self) -> tuple[Component, ...]:
        """Its own list."""
        return self.readings[0].components

    @property
    def positional(self) -> bool:
        """Say whether the target tells positions apart."""
        return bool(len(self.reads)) or needs_order(self.components, self.reads, self.task.n_tokens)

    @cached_property
    def is_linear(self) -> bool:
        """Say whether the value is a sum of linear functions of tokens; False where not asked."""
        samples = Samples.draw(self.task, _OBSERVED, 0)
        return samples is not None and samples.is_linear()

    def answers(
        self, shape: ModelShape, n_tokens: int, max_position_only: bool
    ) -> Iterator[Answer]:
        """Yield the best schedule for each list of components that has one, its own list first."""
        lists = self.readings
        if n_tokens == 2 and not self.positional:
            note = "of two tokens one is the first in any order, the other the last"
            lists += (Reading(_ENDS, (note,), lists[0].tokens),)
        for reading in lists:
            found = self.search(shape, n_tokens, max_position_only, reading=reading)
            if found.schedule is not None:
                yield Answer(found, reading)

    def search(
        self,
        shape: ModelShape,
        n_tokens: int,
        max_position_only: bool,
        roles: Sequence[int] | int = 1,
        reading: Reading | None = None,
    ) -> Found:
        """Return the best schedule for a list of components, by default its own."""
        usable = shape.usable(n_tokens)
        return find(
            (reading or self.readings[0]).components,
            shape.n_heads,
            n_tokens,
            shape.positional,
            max_position_only=max_position_only,
            reads=self.reads,
            causal=shape.causal,
            roles=roles,
            d_model=shape.d_model,
            usable=None if all(usable) else usable,
            plans=(reading or self.readings[0]).plans,
        )

    def profile_of(self, reading: Reading) -> ComparisonProfile:
        """Return the counts of a list of components; the target's own for its own list."""
        if not reading.notes:
            return self.profile
        return components_profile(self.profile.name, reading.components)

    @cached_property
    def width(self) -> int | None:
        """The largest treewidth of a score's graph, of the list that needs least; None if unasked.

        Pairs whose positions must differ have width 1.
        """
        reading = self.readings[-1]
        if reading.tokens is None:
            return None
        return max(graph_of(c, reading.tokens).width for c in reading.components)

    @cached_property
    def unmet(self) -> tuple[str, ...]:
        """The assumptions of the paper's count that the target was seen not to meet, in words."""
        reading = self.readings[-1]
        if reading.tokens is None:
            return ()
        tokens, unmet = reading.tokens, []
        graphs = [graph_of(c, tokens) for c in reading.components]
        if any(len(graph.edges) < math.comb(graph.n_places, 2) for graph in graphs):
            unmet.append(
                f"whole tuples are compared, and the score splits (its graph has treewidth "
                f"{self.width}, so that about T^{(self.width or 0) + 1} comparisons are enough)"
            )
        fewest = min((len(plan.messages) for plan in reading.plans()), default=None)
        if fewest is not None and fewest < sum(len(g.edges) for g in graphs if g.is_forest):
            unmet.append("each pair is looked up apart, and one look-up serves several")
        pairs = [c for c in reading.components if c.arity == 2 and c.tuples is None]
        if any(not partners_grow(pair, tokens) for pair in pairs):
            unmet.append("more tokens are best partners as T grows, and the same few stay")
        return tuple(unmet)

    def counts_out(self, shape: ModelShape, n_tokens: int, count: Count, trees: int) -> bool:
        """Say whether fewer comparisons are made than the least number of trees needs.

        One layer asks one question, so that there a witness decides, and no count.
        """
        if shape.n_layers == 1:
            return False
        for reading in self.readings:
            profile = self.profile_of(reading)
            needed = profile.number(n_tokens, count)
            # the count is of the profile's trees, of which fewer may serve
            needed = needed * min(self.least_trees, profile.n_trees) // profile.n_trees
            if max_position_capacity(profile, shape.n_heads, n_tokens, trees) >= needed:
                return False
        return True


def _readings(
    samples: Samples, own: Samples | None, components: Sequence[Component]
) -> list[Reading]:
    """List what components serve a target, from its outer function where that is known."""
    outer = getattr(samples.task, "outer_function", None)
    if outer is None or any(c.tuples is not None for c in components):
        return [Reading(tuple(components))]
    tokens = samples.tokens(_TOKENS)
    if len(components) == 1:
        return readings(components, tokens)
    extrema = [1.0 if c.extremum == "max" else -1.0 for c in components]
    signs = torch.tensor(getattr(samples.task, "signs", extrema))
    # at the T that is asked, too: what never decides among many tokens may decide among few
    values = [samples.component_values()]
    if own is not None:
        values.append(values[0] if own.task is samples.task else own.component_values())
    return readings(components, tokens, lambda z: outer(z * signs.to(z)), torch.cat(values))
