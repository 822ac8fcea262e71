"""Which key positions each head attends to most."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.hooks.model.points import attention_kind
from infoflow_lens.hooks.passes.ranking import (
    Ranked,
    check_rank_support,
    check_ranks,
    check_without,
)
from infoflow_lens.hooks.passes.view import Needs, Pass, padded_together
from infoflow_lens.hooks.probe import Probe
from infoflow_lens.hooks.result import Result

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


_RELU_NOTE = (
    "attention is ReLU: a head reads every key with a positive score, and none where there is no "
    "such key, so the largest score says too little; use AttendedProbe"
)


@dataclass(frozen=True, eq=False, kw_only=True)
class PositionsResult(Result):
    """Attended positions, one tensor for each layer.

    Attributes:
        ranks: the ranks, in the order of the last axis.
        positions: int [sample, head, query, rank]; -1 where undefined (fewer allowed keys).
        margins: float [sample, head, query, rank], in units of attention scores; NaN where
            undefined, infinite where there is no next key.
        ties: int [sample, head, query, rank], other keys with exactly the same score.
        lengths: int [sample], the positions of each sequence; entries of queries beyond are
            undefined.
        entropy: with spread, float [sample, head, query]: entropy of the row's weights as shares of
            their sum, in nats; NaN where there is no weight. Empty without.
        concentration: with spread, float [sample, head, query]: the share of the largest weight.
    """

    ranks: tuple[int, ...]
    positions: tuple[Int[Tensor, "sample _head query rank"], ...]
    margins: tuple[Float[Tensor, "sample _head query rank"], ...]
    ties: tuple[Int[Tensor, "sample _head query rank"], ...]
    lengths: Int[Tensor, " sample"]
    entropy: tuple[Float[Tensor, "sample _head query"], ...] = ()
    concentration: tuple[Float[Tensor, "sample _head query"], ...] = ()

    @property
    def argmax(self) -> tuple[Int[Tensor, "sample _head query"], ...]:
        """For every layer the positions of rank 1, as `propagate` takes them."""
        if 1 not in self.ranks:
            raise InfoFlowError(f"ranks are {self.ranks}, without 1: probe with ranks=(1, ...)")
        return tuple(p[..., self.ranks.index(1)] for p in self.positions)

    @property
    def passed(self) -> tuple[Int[Tensor, "sample _head query"], ...]:
        """What heads pass on by rule (1), :attr:`argmax`; `propagate` takes the result for it."""
        return self.argmax

    def summary(self, skip: int = 0) -> "pd.DataFrame":
        """How position-like and how content-like each head's first choice is.

        One row for each layer and head: shares of the (sample, query) pairs that have a choice,

        - ``by_offset``, explained by one relative offset, which is ``offset`` (key minus query);
        - ``by_index``, explained by one key position, which is ``index``;
        - ``by_position``, explained by the position of the query alone: the most frequent key of
          each query. No rule that looks at positions only explains more.
        - ``by_content``, the rest: what must come from the tokens, over these inputs.

        ``tied`` is the share of all pairs in which another key has exactly the largest score: these
        have no choice, and do not count in the others.

        With spread also the means of ``entropy`` and ``concentration`` over these queries.

        Args:
            skip: queries at positions below it are left out, such as BOS, whose choice is forced.

        Raises:
            InfoFlowError: if rank 1 was not probed, or `skip` leaves no query.
        """
        import pandas as pd

        n_query = self.positions[0].shape[2]
        if not 0 <= skip < n_query:
            raise InfoFlowError(f"skip is {skip}: expected 0 to {n_query - 1}, so that some stay")
        rows = []
        for layer, chosen in enumerate(self.argmax):
            for head, keys in enumerate(chosen[:, :, skip:].long().unbind(dim=1)):
                tied = self.ties[layer][:, head, skip:, self.ranks.index(1)] > 0
                row: dict[str, Any] = {"layer": layer, "head": head}
                row |= _explained(keys.masked_fill(tied, -1), skip)
                row["tied"] = float(tied.sum() / (keys >= 0).sum())
                if self.entropy:
                    row["entropy"] = float(self.entropy[layer][:, head, skip:].nanmean())
                    row["concentration"] = float(
                        self.concentration[layer][:, head, skip:].nanmean()
                    )
                rows.append(row)
        return pd.DataFrame(rows)

    def to_frame(self) -> "pd.DataFrame":
        """One row for each layer, sample, head, query and rank."""
        import pandas as pd

        frames = []
        for layer, positions in enumerate(self.positions):
            index = [
                i.flatten().numpy()
                for i in torch.unravel_index(torch.arange(positions.numel()), positions.shape)
            ]
            frames.append(
                pd.DataFrame(
                    {
                        "layer": layer,
                        "sample": index[0],
                        "head": index[1],
                        "query": index[2],
                        "rank": torch.tensor(self.ranks)[index[3]].numpy(),
                        "position": positions.flatten().numpy(),
                        "margin": self.margins[layer].flatten().numpy(),
                        "ties": self.ties[layer].flatten().numpy(),
                    }
                )
            )
        return pd.concat(frames, ignore_index=True)

    def plot(self, layer: int = 0) -> "go.Figure":
        """How often each key is the first choice of each query, a panel for each head."""
        import plotly.express as px

        chosen = self.argmax[layer].long()
        n_sample, n_head, n_query = chosen.shape
        counts = torch.zeros(n_head, n_query, max(n_query, int(chosen.max()) + 1))
        keys = chosen.clamp(min=0).permute(1, 2, 0)
        counts.scatter_add_(2, keys, (chosen >= 0).float().permute(1, 2, 0))
        return px.imshow(
            (counts / n_sample).numpy(),
            facet_col=0,
            facet_col_wrap=4,
            labels={"x": "key", "y": "query", "color": "frequency", "facet_col": "head"},
            title=f"First choice of the heads of layer {layer}",
        )


def _explained(keys: Int[Tensor, "sample query"], skip: int) -> dict[str, float]:
    """Shares of choices that one offset, one key, or one key for each query explain."""
    query = torch.arange(skip, skip + keys.shape[1]).expand_as(keys)
    defined = keys >= 0
    total = int(defined.sum())
    if total == 0:
        return dict.fromkeys(
            ("by_offset", "offset", "by_index", "index", "by_position", "by_content"), math.nan
        )
    offsets, offset_counts = (keys - query)[defined].unique(return_counts=True)
    indices, index_counts = keys[defined].unique(return_counts=True)
    by_query = torch.zeros(keys.shape[1], int(keys.max()) + 1)
    by_query.index_put_(
        ((query - skip)[defined], keys[defined]), torch.ones(total), accumulate=True
    )
    by_position = float(by_query.amax(dim=1).sum()) / total
    return {
        "by_offset": int(offset_counts.max()) / total,
        "offset": float(offsets[offset_counts.argmax()]),
        "by_index": int(index_counts.max()) / total,
        "index": float(indices[index_counts.argmax()]),
        "by_position": by_position,
        "by_content": 1 - by_position,
    }


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
        n_query = ranked[0].positions.shape[2]
        full = torch.full((len(seen),), n_query)
        batch = {
            "lengths": full if seen.lengths is None else seen.lengths,
            "spread": [_spread(seen.pattern(layer)) for layer in layers] if self.spread else [],
        }
        for name, part in zip(Ranked._fields, zip(*ranked, strict=True), strict=True):
            batch[name] = [tensor.cpu() for tensor in part]
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
        positions = self._together("positions", -1)
        spread = [
            padded_together([batch["spread"][layer] for batch in self._batches], (3,), math.nan)
            for layer in range(len(self._batches[0]["spread"]))
        ]
        return PositionsResult(
            ranks=self.ranks,
            positions=positions,
            margins=self._together("margins", math.nan),
            ties=self._together("ties", 0),
            lengths=torch.cat([batch["lengths"] for batch in self._batches]),
            entropy=tuple(layer[:, 0].contiguous() for layer in spread),
            concentration=tuple(layer[:, 1].contiguous() for layer in spread),
            record=self.run_record(),
            notes=(*self.notes(), *self._lacking(positions)),
        )

    def _together(self, name: str, fill: float | int) -> tuple[Tensor, ...]:
        """For every layer the tensors of all batches, filled up at the end of shorter ones."""
        layers = zip(*(batch[name] for batch in self._batches), strict=True)
        return tuple(padded_together(list(parts), (2,), fill) for parts in layers)

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
) -> Float[Tensor, "batch measure head query"]:
    """Entropy and largest share of every row; NaN for rows without weight."""
    pattern = pattern.float()
    shares = pattern / pattern.sum(dim=-1, keepdim=True)
    entropy = torch.special.entr(shares).sum(dim=-1)
    return torch.stack([entropy, shares.amax(dim=-1)], dim=1).cpu()
