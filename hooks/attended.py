"""Which key positions each head draws from at all, whatever makes its pattern."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.hooks.passes.view import Needs, Pass, padded_together
from infoflow_lens.hooks.probe import Probe
from infoflow_lens.hooks.result import Result

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


@dataclass(frozen=True, eq=False, kw_only=True)
class AttendedResult(Result):
    """Attended keys, one tensor for each layer.

    Attributes:
        share: the least share of a row's largest weight that counts.
        attended: bool [sample, head, query, key]; False for padding.
    """

    share: float
    attended: tuple[Bool[Tensor, "sample _head query key"], ...]

    @property
    def positions(self) -> tuple[Int[Tensor, "sample _head query key"], ...]:
        """For every layer the attended positions, -1 for the others, as `propagate` takes them."""
        layers = []
        for attended in self.attended:
            keys = torch.arange(attended.shape[-1], dtype=torch.int32)
            layers.append(torch.where(attended, keys, -1))
        return tuple(layers)

    @property
    def moved_keys(self) -> tuple[Int[Tensor, "sample _head query key"], ...]:
        """What heads pass on, :attr:`positions`; `propagate` takes the result for it."""
        return self.positions

    def to_frame(self) -> "pd.DataFrame":
        """One row for each layer and head: how many keys a query draws from."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "layer": layer,
                    "head": head,
                    "mean_keys": float(counts.mean()),
                    "most_keys": int(counts.max()),
                    "silent_queries": float((counts == 0).double().mean()),
                }
                for layer, attended in enumerate(self.attended)
                for head, counts in enumerate(attended.sum(dim=-1).double().unbind(dim=1))
            ]
        )

    def plot(self, layer: int = 0) -> "go.Figure":
        """How often each query draws from each key, a panel for each head."""
        import plotly.express as px

        return px.imshow(
            self.attended[layer].double().mean(dim=0).numpy(),
            facet_col=0,
            facet_col_wrap=4,
            labels={"x": "key", "y": "query", "color": "frequency", "facet_col": "head"},
            title=f"Keys that the heads of layer {layer} draw from",
        )


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

    def __init__(self, share: float = 0.01) -> None:
        super().__init__()
        if isinstance(share, bool) or not 0 <= share <= 1:
            raise InfoFlowError(
                f"share is {share}: expected a share of the row's largest weight, 0 to 1"
            )
        self.share = share
        self._batches: list[list[Tensor]] = []

    def config(self) -> Mapping[str, Any]:
        """The settings, as JSON-compatible values."""
        return {"share": self.share}

    def needs(self, model: nn.Module) -> Needs:
        """Patterns."""
        return Needs.of(model, pattern=True)

    def update(self, seen: Pass) -> None:
        """Mark the keys of a pass."""
        layers = []
        for layer in range(seen.n_layers):
            pattern = seen.pattern(layer)
            largest = pattern.amax(dim=-1, keepdim=True)
            layers.append(((pattern > 0) & (pattern >= self.share * largest)).cpu())
        self._batches.append(layers)

    def add(self, other: "AttendedProbe") -> None:
        """Append the sequences of another probe."""
        self._batches = [*self._batches, *other._batches]

    def snapshot(self) -> dict[str, Any]:
        """All batches."""
        return {"batches": self._batches}

    def restore(self, measured: Mapping[str, Any]) -> None:
        """Take over the batches."""
        self._batches = measured["batches"]

    def compute(self) -> AttendedResult:
        """All batches together."""
        return AttendedResult(
            share=self.share,
            attended=tuple(
                padded_together(list(parts), (2, 3), False)
                for parts in zip(*self._batches, strict=True)
            ),
            record=self.run_record(),
            notes=self.notes(),
        )
