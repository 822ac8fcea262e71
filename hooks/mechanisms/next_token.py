"""The next-token loss of a model whose inside is edited, sequence by sequence."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from infoflow_lens.hooks.interventions.next_token import NextTokenLoss
from infoflow_lens.hooks.mechanisms.driver import KeptNumbers
from infoflow_lens.hooks.model.call import output_of
from infoflow_lens.hooks.model.inputs import Batch, Batches
from infoflow_lens.hooks.model.points import check_finite
from infoflow_lens.hooks.result import Result

Losses = Mapping[str, Any]
"""What was measured so far: losses, float [*point, sequence], by name, and of what run they are."""
Edit = Callable[[Batch, int], AbstractContextManager[object]]
"""The model edited for one batch, whose first sequence has that index, while the block lasts."""


@dataclass(frozen=True, eq=False, kw_only=True)
class NextTokenResult(Result):
    """The base of results that tell by how much an edited model's loss rises.

    Attributes:
        bare: float [sequence], summed next-token loss of the model as it is, in nats.
        n_tokens: int [sequence], predictions that count.
    """

    makes_small_table: ClassVar[bool] = True

    bare: Float[Tensor, " sequence"]
    n_tokens: Int[Tensor, " sequence"]

    @property
    def loss(self) -> float:
        """Of the model as it is, in nats a token."""
        return float(self.bare.sum() / self.n_tokens.sum())


class KeptLosses(KeptNumbers):
    """Losses by name, each measured once, also by a run that was stopped and goes on.

    Args:
        identity, resume, after: as of :class:`~.driver.KeptNumbers`.
        n: how many sequences there are.
    """

    def __init__(
        self,
        identity: Mapping[str, Any],
        resume: Losses | None,
        after: Callable[[Losses], None] | None,
        n: int | None,
    ) -> None:
        super().__init__(identity, resume, after)
        self._n = n

    def once(self, name: str, measured: Callable[[], Tensor], *points: int) -> Tensor:
        """The loss of that name [*point, sequence], measured unless it is there.

        Args:
            name: of the loss.
            measured: gives it, float64.
            points: how many it has beside the sequences.
        """
        return super().once(name, measured, *points, self._n or 0)


class EditedLoss:
    """The loss of the next token with the model edited, in nats, summed over each sequence.

    Args:
        model: over token ids, with logits.
        batches: the sequences, which may be read several times.
        batch_size: sequences in a pass.
        loss: which predictions count.

    Raises:
        InfoFlowError: for a model or sequences without such a loss.
    """

    def __init__(
        self, model: nn.Module, batches: Batches, batch_size: int, loss: NextTokenLoss
    ) -> None:
        loss.check(model, batches.shortest)
        self.model, self.batches = model, batches
        self.batch_size, self.loss = batch_size, loss
        self.states, self.lost = loss.states, loss.lost

    def counts(self) -> Int[Tensor, " sequence"]:
        """How many predictions of each sequence count."""
        counted = [self.states(b).sum(dim=1) for b in self.batches.batches(self.batch_size)]
        return torch.cat(counted)

    def sums(self, edit: Edit | None = None) -> Float[Tensor, " sequence"]:
        """The loss of each sequence, with the model as it is or edited.

        Raises:
            InfoFlowError: for logits that are NaN or infinite.
        """
        found, done = [], 0
        for batch in self.batches.batches(self.batch_size):
            found.append(self.of(batch, done, edit))
            done += len(batch)
        return torch.cat(found)

    def of(self, batch: Batch, first: int, edit: Edit | None = None) -> Float[Tensor, " batch"]:
        """The loss of each sequence of a batch, whose first has that index.

        Raises:
            InfoFlowError: for logits that are NaN or infinite.
        """
        with edit(batch, first) if edit is not None else nullcontext():
            logits = output_of(self.model, batch)
        check_finite(logits, "the logits", first)
        return self.lost(logits, batch)
