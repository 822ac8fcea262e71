"""Which key positions each head draws from at all, whatever makes its pattern."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from infoflow_lens.foundation.lazy import mpl, pd
from infoflow_lens.foundation.modules import to_host
from infoflow_lens.foundation.settings import Share
from infoflow_lens.hooks.arrays import LabelledArray, frame_of
from infoflow_lens.hooks.passes.view import Pass
from infoflow_lens.hooks.probe import Probe
from infoflow_lens.hooks.result import Result
from infoflow_lens.hooks.states import concatenated


@dataclass(frozen=True, eq=False, kw_only=True)
class AttendedResult(Result):
    """Attended keys, one tensor for each layer.

    Attributes:
        share: the least share of a row's largest weight that counts.
        attended: bool [sample, head, query, key]; False for padding.
        lengths: int [sample], the queries of each sequence; None (of results saved before) where
            they are not known, and all count.
    """

    share: float
    attended: tuple[Bool[Tensor, "sample _head query key"], ...]
    lengths: Int[Tensor, " sample"] | None = None

    @property
    def positions(self) -> tuple[Int[Tensor, "sample _head query key"], ...]:
        """The attended positions of every layer, -1 for the others, as `propagate` takes them."""
        layers = []
        for attended in self.attended:
            keys = torch.arange(attended.shape[-1], dtype=torch.int32)
            layers.append(torch.where(attended, keys, -1))
        return tuple(layers)

    @property
    def moved_keys(self) -> tuple[Int[Tensor, "sample _head query key"], ...]:
        """The keys that heads pass on, :attr:`positions`; `propagate` takes the result for them."""
        return self.positions

    @property
    def is_query(self) -> Bool[Tensor, "sample query"]:
        """The mask of queries, False on padding."""
        n_samples, _, n_queries, _ = self.attended[0].shape
        if self.lengths is None:
            return torch.ones(n_samples, n_queries, dtype=torch.bool)
        return torch.arange(n_queries) < self.lengths[:, None]

    def to_frame(self) -> "pd.DataFrame":
        """Return one row for each layer and head: how many keys a query draws from."""
        real = self.is_query
        # [query of any sequence, head]
        counts = [attended.sum(dim=-1).transpose(1, 2)[real] for attended in self.attended]
        by_head = {
            "mean_keys": [count.double().mean(dim=0) for count in counts],
            "most_keys": [count.amax(dim=0) for count in counts],
            "silent_queries": [(count == 0).double().mean(dim=0) for count in counts],
        }
        return frame_of(
            [LabelledArray(name, tuple(v), ("layer", "head")) for name, v in by_head.items()]
        )

    def plot(self, layer: int = 0) -> "mpl.Figure":
        """Draw how often each query that is there draws from each key, a panel for each head."""
        n = self.is_query.sum(dim=0)[:, None]
        often = tuple(attended.double().sum(dim=0) / n for attended in self.attended)
        array = LabelledArray("frequency", often, ("layer", "head", "query", "key"))
        return array.select(layer=layer).plot(f"Keys that heads of layer {layer} draw from")


class AttendedProbe(Probe[AttendedResult]):
    """The keys that a head draws from: those with at least `share` of the row's largest weight.

    Where a head does not single out one key (ReLU attention, ties, averages over positions), rule
    (1) of Sec. 5.1 with the argmax alone says too little. With all attended keys,
    ``propagate(result.positions)`` contains what the states can depend on through their values.
    What it keeps grows with the sequences: one byte for each (layer, head, query, key).

    Args:
        share: least share of the largest weight in the row; weights of 0 never count.

    Raises:
        InfoFlowError: unless ``0 <= share <= 1``.
    """

    share: Share = 0.01

    reads: ClassVar = ("pattern",)
    attended = concatenated(2, 3)
    lengths = concatenated()

    def update(self, seen: Pass) -> Mapping[str, Any]:
        """Return the keys of a pass."""
        layers = []
        for layer in range(seen.n_layers):
            pattern = seen.pattern(layer)
            largest = pattern.amax(dim=-1, keepdim=True)
            layers.append((pattern > 0) & (pattern >= self.share * largest))
        return {"attended": to_host(layers), "lengths": seen.lengths_of(layers[0].shape[2])}

    def compute(self) -> AttendedResult:
        """Join all batches."""
        return self.make_result(AttendedResult)
