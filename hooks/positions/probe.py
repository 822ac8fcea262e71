"""Ranks the keys of every pass."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.hooks.model.points import attention_kind
from infoflow_lens.hooks.passes.ranking import (
    Ranked,
    check_rank_support,
    check_ranks,
    check_without,
)
from infoflow_lens.hooks.passes.view import Needs, Pass
from infoflow_lens.hooks.positions.result import (
    SPREAD,
    PositionsResult,
    ShardedPositions,
    layers_together,
)
from infoflow_lens.hooks.probe import Probe

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
            rests on.
        spread: measure the entropy and the concentration of each row of the pattern, too.

    Raises:
        InfoFlowError: for ranks below 1, or beyond the number of keys, or negative positions.
    """

    sharded: ClassVar = ShardedPositions

    def __init__(
        self, ranks: Sequence[int] = (1,), *, without: Sequence[int] = (), spread: bool = False
    ) -> None:
        super().__init__()
        self.ranks = check_ranks(ranks)
        self.without = check_without(without)
        self.spread = spread
        self._batches: list[dict[str, Any]] = []
        self._is_relu = False

    def config(self) -> Mapping[str, Any]:
        """The settings, as JSON-compatible values."""
        return {"ranks": list(self.ranks), "without": list(self.without), "spread": self.spread}

    def check(self, n_fit: int | None, n_evaluate: int | None, n_keys: int) -> None:
        """Refuse ranks that the data do not allow; see :meth:`Probe.check`."""
        check_rank_support(self.ranks, self.without, n_keys)

    def needs(self, model: nn.Module) -> Needs:
        """Scores to rank; with spread, the pattern."""
        return Needs.of(model, ranks=self.ranks, without=self.without, pattern=self.spread)

    def update(self, seen: Pass) -> None:
        """Rank the keys of a pass."""
        layers = range(seen.n_layers)
        ranked = [seen.ranked(layer, self.ranks, self.without) for layer in layers]
        full = torch.full((len(seen),), ranked[0].positions.shape[2])
        batch: dict[str, Any] = {"lengths": full if seen.lengths is None else seen.lengths}
        for name, part in zip(Ranked._fields, zip(*ranked, strict=True), strict=True):
            batch[name] = [tensor.cpu() for tensor in part]
        spread = [_spread(seen.pattern(layer)) for layer in layers] if self.spread else []
        for place, name in enumerate(SPREAD):
            batch[name] = [measures[place] for measures in spread]
        self._is_relu = attention_kind(seen.model) == "relu"
        self._batches.append(batch)

    def add(self, other: "PositionsProbe") -> None:
        """Append the sequences of another probe."""
        self._batches = [*self._batches, *other._batches]
        self._is_relu = other._is_relu

    def snapshot(self) -> dict[str, Any]:
        """All batches."""
        return {"batches": self._batches, "is_relu": self._is_relu}

    def restore(self, measured: Mapping[str, Any]) -> None:
        """Take over the batches."""
        self._batches, self._is_relu = measured["batches"], measured["is_relu"]

    def compute(self) -> PositionsResult:
        """All batches together."""
        layers = layers_together(self._batches)
        return PositionsResult(
            ranks=self.ranks,
            lengths=torch.cat([batch["lengths"] for batch in self._batches]),
            record=self.run_record(),
            notes=(*self.notes(), *self._lacking(layers["positions"])),
            **layers,
        )

    def _lacking(self, positions: Sequence[Tensor]) -> Iterator[str]:
        """What a reader must know: ranks without keys, and attention that has no argmax."""
        if self._is_relu:
            yield _RELU_NOTE
        for layer, chosen in enumerate(positions):
            for column, rank in enumerate(self.ranks):
                if not (chosen[..., column] >= 0).any():
                    yield f"layer {layer}: no query has a key of rank {rank}"


def _spread(
    pattern: Float[Tensor, "batch head query key"],
) -> tuple[Float[Tensor, "batch head query"], Float[Tensor, "batch head query"]]:
    """Entropy and largest share of every row; NaN for rows without weight."""
    pattern = pattern.float()
    shares = pattern / pattern.sum(dim=-1, keepdim=True)
    return torch.special.entr(shares).sum(dim=-1).cpu(), shares.amax(dim=-1).cpu()
