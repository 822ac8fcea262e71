"""The attention of every head itself: patterns and scores, for a few sequences."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from infoflow_lens.hooks.passes.view import Needs, Pass, padded_together
from infoflow_lens.hooks.probe import Probe
from infoflow_lens.hooks.result import Result

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


@dataclass(frozen=True, eq=False, kw_only=True)
class PatternsResult(Result):
    """Patterns and scores, one tensor for each layer.

    Attributes:
        patterns: float [sample, head, query, key], attention weights; 0 beyond a sequence's end.
        scores: float [sample, head, query, key], before the softmax; -inf for masked keys and
            beyond a sequence's end. Where a model shows no scores, the logarithm of the weights.
        lengths: int [sample], the tokens of each sequence.
    """

    patterns: tuple[Float[Tensor, "sample _head query key"], ...]
    scores: tuple[Float[Tensor, "sample _head query key"], ...]
    lengths: Int[Tensor, " sample"]

    def to_frame(self) -> "pd.DataFrame":
        """One row for each layer, sample, head, query and allowed key."""
        import pandas as pd

        frames = []
        for layer, (patterns, scores) in enumerate(zip(self.patterns, self.scores, strict=True)):
            sample, head, query, key = (scores > -torch.inf).nonzero(as_tuple=True)
            frames.append(
                pd.DataFrame(
                    {
                        "layer": layer,
                        "sample": sample.numpy(),
                        "head": head.numpy(),
                        "query": query.numpy(),
                        "key": key.numpy(),
                        "weight": patterns[sample, head, query, key].numpy(),
                        "score": scores[sample, head, query, key].numpy(),
                    }
                )
            )
        return pd.concat(frames, ignore_index=True)

    def plot(self, layer: int = 0, sample: int = 0) -> "go.Figure":
        """The patterns of one sequence, a panel for each head."""
        import plotly.express as px

        return px.imshow(
            self.patterns[layer][sample].numpy(),
            facet_col=0,
            facet_col_wrap=4,
            labels={"x": "key", "y": "query", "color": "weight", "facet_col": "head"},
            title=f"Attention of the heads of layer {layer}, sequence {sample}",
        )


class PatternsProbe(Probe[PatternsResult]):
    """The attention patterns and scores of every layer and head, as they are.

    For a few sequences: it keeps 8 bytes for each (layer, head, query, key). For many, other probes
    keep what they need: :class:`PositionsProbe` the largest keys, :class:`AttendedProbe` those that
    count.
    """

    def __init__(self) -> None:
        super().__init__()
        self._batches: list[dict[str, Any]] = []

    def config(self) -> Mapping[str, Any]:
        """No settings."""
        return {}

    def needs(self, model: nn.Module) -> Needs:
        """Scores and pattern."""
        return Needs.of(model, scores=True, pattern=True)

    def update(self, seen: Pass) -> None:
        """Keep those of a pass."""
        layers = range(seen.n_layers)
        patterns = [seen.pattern(layer).float().cpu() for layer in layers]
        full = torch.full((len(seen),), patterns[0].shape[2])
        self._batches.append(
            {
                "patterns": patterns,
                "scores": [_open(seen.scores(layer)).cpu() for layer in layers],
                "lengths": full if seen.lengths is None else seen.lengths,
            }
        )

    def add(self, other: "PatternsProbe") -> None:
        """Append the sequences of another probe."""
        self._batches = [*self._batches, *other._batches]

    def snapshot(self) -> dict[str, Any]:
        """All batches."""
        return {"batches": self._batches}

    def restore(self, measured: Mapping[str, Any]) -> None:
        """Take over the batches."""
        self._batches = measured["batches"]

    def compute(self) -> PatternsResult:
        """All batches together."""
        return PatternsResult(
            patterns=self._together("patterns", 0),
            scores=self._together("scores", -math.inf),
            lengths=torch.cat([batch["lengths"] for batch in self._batches]),
            record=self.run_record(),
            notes=self.notes(),
        )

    def _together(self, name: str, fill: float) -> tuple[Tensor, ...]:
        layers = zip(*(batch[name] for batch in self._batches), strict=True)
        return tuple(padded_together(list(parts), (2, 3), fill).contiguous() for parts in layers)


def _open(scores: Float[Tensor, "batch head query key"]) -> Float[Tensor, "batch head query key"]:
    """In float32, with -inf for masked keys: some models have the lowest finite value there."""
    masked = scores <= torch.finfo(scores.dtype).min
    return scores.float().masked_fill(masked, -math.inf)
