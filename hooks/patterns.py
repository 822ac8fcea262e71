"""The attention of every head itself: patterns and scores, for a few sequences."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.lazy import mpl, pd
from infoflow_lens.foundation.modules import to_host
from infoflow_lens.foundation.settings import Share
from infoflow_lens.hooks.model.points import layers_with_attention
from infoflow_lens.hooks.passes.view import Needs, Pass
from infoflow_lens.hooks.probe import Probe
from infoflow_lens.hooks.result import (
    LabelledArray,
    Result,
    frame_of,
    note_layers_without_heads,
)
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

    A layer without attention has no heads.

    For a few sequences: it keeps 8 bytes for each (layer, head, query, key). For many, other probes
    keep what they need: :class:`PositionsProbe` the largest keys, :class:`AttendedProbe` those that
    count.
    """

    reads: ClassVar = ("scores", "pattern")
    patterns = concatenated(2, 3)
    scores = concatenated(2, 3, fill=-math.inf)
    lengths = concatenated()

    def needs(self, model: nn.Module) -> Needs:
        """Patterns and scores, of layers with attention."""
        return Needs.of(model, scores=True, pattern=True, layers=layers_with_attention(model))

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
        notes = (*self.notes(), *note_layers_without_heads(self.patterns))
        return self.make_result(PatternsResult, notes=notes)


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
    What it keeps grows with the sequences: one byte for each (layer, head, query, key). A layer
    without attention has no heads.

    Args:
        share: least share of the largest weight in the row; weights of 0 never count.

    Raises:
        InfoFlowError: unless ``0 <= share <= 1``.
    """

    share: Share = 0.01

    reads: ClassVar = ("pattern",)
    follows_attention: ClassVar[bool] = True
    attended = concatenated(2, 3)
    lengths = concatenated()

    def needs(self, model: nn.Module) -> Needs:
        """Patterns, of layers with attention."""
        return Needs.of(model, pattern=True, layers=layers_with_attention(model))

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
        notes = (*self.notes(), *note_layers_without_heads(self.attended))
        return self.make_result(AttendedResult, notes=notes)
