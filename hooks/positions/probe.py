"""Ranks the keys of every pass."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from infoflow_lens.foundation.modules import to_host
from infoflow_lens.foundation.settings import BothEnds, Ranks
from infoflow_lens.hooks.model.points import attention_kind
from infoflow_lens.hooks.passes.ranking import check_rank_support
from infoflow_lens.hooks.passes.view import Needs, Pass
from infoflow_lens.hooks.positions.result import FILL, PositionsResult, ShardedPositions
from infoflow_lens.hooks.probe import Probe
from infoflow_lens.hooks.states import combined, concatenated, latest

_RELU_NOTE = (
    "attention is ReLU: a head reads every key with a positive score, and none where there is no "
    "such key, so the largest score says too little; use AttendedProbe"
)


class PositionsProbe(Probe[PositionsResult]):
    """The key positions of the k largest attention scores, per layer, head and query.

    s_i(t) of update rule (1) (Yu, Jiang, Bao, Li 2026, Sec. 5.1) is rank 1. Masked keys and padding
    never appear. Where a model shows the pattern in place of the scores, ranks come from the
    pattern. What it keeps grows with the sequences, since the positions of each are the result: a
    few bytes for each (layer, head, query, rank).

    Args:
        ranks: which ranks; 1 is the argmax.
        without: key positions that are never ranked, such as (0,) for a BOS token that attention
            rests on, or (-1,) for the last position of each sequence.
        spread: measure the entropy of each row of the pattern, too, and the share of the first
            choice in its weight.

    Raises:
        InfoFlowError: for ranks below 1, or beyond the number of keys.
    """

    ranks: Ranks = (1,)
    _: KW_ONLY
    without: BothEnds = ()
    spread: bool = False

    sharded: ClassVar = ShardedPositions
    positions = concatenated(2, fill=FILL["positions"])
    margins = concatenated(2, fill=FILL["margins"])
    ties = concatenated(2, fill=FILL["ties"])
    entropy = concatenated(2, fill=FILL["entropy"])
    concentration = concatenated(2, fill=FILL["concentration"])
    lengths = concatenated()
    is_relu = combined(latest)

    def check(self, n_fit: int | None, n_evaluate: int | None, n_keys: int) -> None:
        """Refuse ranks that the data do not allow; see :meth:`Probe.check`."""
        check_rank_support(self.ranks, self.without, n_keys)

    def needs(self, model: nn.Module) -> Needs:
        """Scores to rank; with spread, the pattern."""
        return Needs.of(model, ranks=self.ranks, without=self.without, pattern=self.spread)

    def update(self, seen: Pass) -> Mapping[str, Any]:
        """Return the ranked keys of a pass."""
        layers = range(seen.n_layers)
        ranked = [seen.ranked(layer, self.ranks, self.without) for layer in layers]
        spread = []
        if self.spread:
            n_keys = seen.pattern(0).shape[-1]
            left_out = seen.places(self.without, n_keys)
            spread = [_spread(seen.pattern(layer), left_out) for layer in layers]
        measured = [*zip(*ranked, strict=True), *zip(*spread, strict=True)]
        # all numbers come to the host in one go
        host = iter(to_host([tensor for of_layers in measured for tensor in of_layers]))
        names = ("positions", "margins", "ties", "entropy", "concentration")
        # without spread there are the first three alone
        by_name = {name: [next(host) for _ in found] for name, found in zip(names, measured)}
        return {
            "entropy": [],
            "concentration": [],
            **by_name,
            "lengths": seen.lengths_of(ranked[0].positions.shape[2]),
            "is_relu": attention_kind(seen.model) == "relu",
        }

    def compute(self) -> PositionsResult:
        """Join all batches."""
        return self.make_result(
            PositionsResult, notes=(*self.notes(), *self._lacking(self.positions))
        )

    def _lacking(self, positions: Sequence[Tensor]) -> Iterator[str]:
        """Say what a reader must know: ranks without keys, and attention that has no argmax."""
        if self.is_relu:
            yield _RELU_NOTE
        for layer, chosen in enumerate(positions):
            for column, rank in enumerate(self.ranks):
                if not (chosen[..., column] >= 0).any():
                    yield f"layer {layer}: no query has a key of rank {rank}"


def _spread(
    pattern: Float[Tensor, "batch head query key"], left_out: Bool[Tensor, "batch key"]
) -> tuple[Float[Tensor, "batch head query"], Float[Tensor, "batch head query"]]:
    """Entropy of every row, and the share of the first choice; NaN for rows without weight.

    Keys that are left out count in the row, and are no first choice.
    """
    pattern = pattern.float()
    shares = pattern / pattern.sum(dim=-1, keepdim=True)
    ranked = shares.masked_fill(left_out[:, None, None].to(shares.device), 0)
    largest = ranked.amax(dim=-1)
    return torch.special.entr(shares).sum(dim=-1), largest.masked_fill(largest == 0, torch.nan)
