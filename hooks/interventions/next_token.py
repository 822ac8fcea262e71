"""The loss of the next token, as what edits are judged by."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import Count, check_fields
from infoflow_lens.hooks.interventions.damage import Read, next_token_losses, places_of
from infoflow_lens.hooks.interventions.passes import layer_with_later_keys
from infoflow_lens.hooks.model.inputs import Batch
from infoflow_lens.hooks.model.points import reads_vectors


@dataclass(frozen=True)
class NextTokenLoss:
    """The loss of the next token, in nats, summed over each sequence.

    Args:
        last: how many predictions of each sequence count, the last ones; None for all.
        read: the positions whose predictions count, in place of the last ones; None for all.
    """

    last: Count | None = None
    read: Read | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self, model: nn.Module, shortest: int) -> None:
        """Refuse models and sequences that have no such loss.

        Args:
            model: whose loss it is.
            shortest: tokens of the shortest sequence.

        Raises:
            InfoFlowError: for a model over vectors or one that sees the tokens behind a query, for
                sequences without a next token, or positions that have none.
        """
        if reads_vectors(model):
            raise InfoFlowError(
                "the model's output is a vector, which predicts no next token: expected a language "
                "model; for others use measure_mechanisms"
            )
        if shortest < 2:
            raise InfoFlowError(
                f"a sequence has {shortest} token: expected at least 2, one to read and one to "
                "predict; give longer ones"
            )
        for position in self.read or ():
            if not (-shortest <= position < -1 or 0 <= position < shortest - 1):
                raise InfoFlowError(
                    f"read has position {position}: expected one with a next token in every "
                    f"sequence, {-shortest} to -2 or 0 to {shortest - 2}; use metric 'kl' for the "
                    "last"
                )
        layer = layer_with_later_keys(model)
        if layer is not None:
            raise InfoFlowError(
                f"queries of layer {layer} attend to later keys, so that the model sees the next "
                "token before it predicts it: expected a causal language model; for others use "
                "measure_mechanisms"
            )

    def states(self, batch: Batch) -> Bool[Tensor, "batch pos"]:
        """Mark the positions whose predictions count."""
        real = batch.mask()
        # a position predicts where a real token stands behind it: the last of a sequence does not
        following = torch.cat([real[:, 1:], torch.zeros_like(real[:, :1])], dim=1)
        if self.read is not None:
            return torch.zeros_like(real).scatter_(1, places_of(self.read, batch), True)
        if self.last is None:
            return following
        left = following.flip(1).cumsum(dim=1).flip(1)  # predictions from here to the end
        return following & (left <= self.last)

    def lost(
        self, logits: Float[Tensor, "batch pos d_vocab"], batch: Batch
    ) -> Float[Tensor, " batch"]:
        """Sum the losses of each sequence of a batch, from its logits; float64."""
        return next_token_losses(logits, batch, self.states(batch)[:, :-1])
