"""The attention of every head itself: patterns and scores, for a few sequences."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infoflow_lens.foundation.lazy import mpl, pd
from infoflow_lens.foundation.modules import to_host
from infoflow_lens.hooks.arrays import LabelledArray, frame_of
from infoflow_lens.hooks.passes.view import Pass
from infoflow_lens.hooks.probe import Probe
from infoflow_lens.hooks.result import Result
from infoflow_lens.hooks.states import concatenated


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

    @property
    def is_causal(self) -> bool:
        """Say whether no query reads a later key."""
        return not any(
            bool((layer > -math.inf).flatten(0, 1).any(dim=0).triu(1).any())
            for layer in self.scores
        )

    def to_frame(self) -> "pd.DataFrame":
        """Return one row for each layer, sample, head, query and allowed key."""
        dims = ("layer", "sample", "head", "query", "key")
        found = (("weight", self.patterns), ("score", self.scores))
        allowed = tuple(scores > -torch.inf for scores in self.scores)
        return frame_of(
            [LabelledArray(name, values, dims) for name, values in found],
            LabelledArray("allowed", allowed, dims),
        )

    def plot(self, layer: int = 0, sample: int = 0) -> "mpl.Figure":
        """Return the patterns of one sequence, a panel for each head."""
        return super().plot("patterns", layer=layer, sample=sample)


class PatternsProbe(Probe[PatternsResult]):
    """The attention patterns and scores of every layer and head, as they are.

    For a few sequences: it keeps 8 bytes for each (layer, head, query, key). For many, other probes
    keep what they need: :class:`PositionsProbe` the largest keys, :class:`AttendedProbe` those that
    count.
    """

    reads: ClassVar = ("scores", "pattern")
    patterns = concatenated(2, 3)
    scores = concatenated(2, 3, fill=-math.inf)
    lengths = concatenated()

    def update(self, seen: Pass) -> Mapping[str, Any]:
        """Read the patterns and scores of a pass."""
        layers = range(seen.n_layers)
        attention = [
            make(layer).float() for make in (seen.pattern, seen.scores) for layer in layers
        ]
        # one transfer for all: the patterns of every layer, then the scores of every layer
        host = to_host(attention)
        return {
            "patterns": host[: len(layers)],
            "scores": host[len(layers) :],
            "lengths": seen.lengths_of(host[0].shape[2]),
        }

    def compute(self) -> PatternsResult:
        """Join all batches."""
        return self.make_result(PatternsResult)
