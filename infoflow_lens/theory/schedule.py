"""Schedules: which head retrieves what, layer by layer, and whether that learns a target.

A schedule gives every head a job: the largest-scoring tuple of a component (max-position), a fixed
set of positions (specific-position), or everything (global). Running it on inputs gives information
sets; it *learns* a target if the set of CLS contains the active index set (Sec. 5.1, eq 4).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.foundation.settings import Count as Number
from infoflow_lens.foundation.settings import Seed, checked
from infoflow_lens.theory.comparison import Component
from infoflow_lens.theory.information_sets import InformationSets, initial_sets, update
from infoflow_lens.theory.jobs import Job, Message, Progress


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
        """bool [batch, pos]."""
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
    """Sequences without their targets, which may be dear, where the task can draw them alone."""
    alone = getattr(task, "inputs", None)
    return task.sample(n, seed)[0] if alone is None else alone(n, seed)


def reference_tokens(task: Target, seed: int, n: int = 1024) -> Float[Tensor, "sample d_token"]:
    """Return tokens of other sequences than those of :func:`learns`, for routed heads."""
    sequences = max(1, -(-n // task.n_tokens))
    # a seed of its own, so that no query meets its own sequence among them
    x = inputs(task, sequences, derive_seed("reference", seed))
    return as_vectors(x).flatten(0, 1)[:n]
