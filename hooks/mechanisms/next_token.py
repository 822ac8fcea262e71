"""The next-token loss of a model whose inside is edited, sequence by sequence."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.hooks.mechanisms.damage import Read, next_token_losses, places_of
from infoflow_lens.hooks.mechanisms.driver import KeptNumbers, layer_with_later_keys
from infoflow_lens.hooks.model.call import output_of
from infoflow_lens.hooks.model.inputs import Batch, Batches
from infoflow_lens.hooks.model.points import (
    check_finite,
    reads_vectors,
)
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


class NextTokenLoss:
    """The loss of the next token, in nats, summed over each sequence.

    Args:
        model: over token ids, with logits.
        batches: the sequences, which may be read several times.
        batch_size: sequences in a pass.
        last: how many predictions of each sequence count, the last ones; None for all.
        read: the positions whose predictions count, in place of the last ones; None for all.

    Raises:
        InfoFlowError: for a model over vectors or one that sees the tokens behind a query, for
            sequences without a next token, or positions that have none.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        batch_size: int,
        last: int | None = None,
        read: Read | None = None,
    ) -> None:
        if reads_vectors(model):
            raise InfoFlowError(
                "the model's output is a vector, which predicts no next token: expected a language "
                "model; for others use measure_mechanisms"
            )
        if batches.shortest < 2:
            raise InfoFlowError(
                f"a sequence has {batches.shortest} token: expected at least 2, one to read and "
                "one to predict; give longer ones"
            )
        for position in read or ():
            if not (-batches.shortest <= position < -1 or 0 <= position < batches.shortest - 1):
                raise InfoFlowError(
                    f"read has position {position}: expected one with a next token in every "
                    f"sequence, {-batches.shortest} to -2 or 0 to {batches.shortest - 2}; use "
                    "metric 'kl' for the last"
                )
        _check_causal(model)
        self.model, self.batches = model, batches
        self.batch_size, self.last, self.read = batch_size, last, read

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

    def lost(
        self, logits: Float[Tensor, "batch pos d_vocab"], batch: Batch
    ) -> Float[Tensor, " batch"]:
        """The loss of each sequence of a batch, from its logits."""
        return next_token_losses(logits, batch, self.states(batch)[:, :-1])

    def states(self, batch: Batch) -> Bool[Tensor, "batch pos"]:
        """The positions whose predictions count."""
        real = batch.mask()
        following = torch.cat([real[:, 1:], torch.zeros_like(real[:, :1])], dim=1)
        if self.read is not None:
            return torch.zeros_like(real).scatter_(1, places_of(self.read, batch), True)
        if self.last is None:
            return following
        left = following.flip(1).cumsum(dim=1).flip(1)  # predictions from here to the end
        return following & (left <= self.last)


def _check_causal(model: nn.Module) -> None:
    """Refuse models that see the token which they would have to predict, as encoders do.

    Raises:
        InfoFlowError: naming the layer.
    """
    layer = layer_with_later_keys(model)
    if layer is not None:
        raise InfoFlowError(
            f"queries of layer {layer} attend to later keys, so that the model sees the next "
            "token before it predicts it: expected a causal language model; for others use "
            "measure_mechanisms"
        )
