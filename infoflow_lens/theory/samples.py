"""Sequences of a target, at a T that can be drawn and run."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.memory import format_bytes, free_memory
from infoflow_lens.theory.comparison import Component, best_tuples
from infoflow_lens.theory.schedule import Schedule, as_vectors, inputs, learns, reference_tokens
from infoflow_lens.theory.shapes import ModelShape

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
