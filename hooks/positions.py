"""Which key positions each head attends to most."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.hooks.model.points import (
    attention_hooks,
    attention_kind,
    attention_scores,
    check_finite,
    layer_count,
    pattern_hook,
)
from infoflow_lens.hooks.passes.ranking import (
    Ranked,
    check_positions,
    check_rank_support,
    check_ranks,
    leaving_out,
    rank_keys,
)
from infoflow_lens.hooks.passes.view import Pass, padded_together
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

    def summary(self, skip: int = 0) -> "pd.DataFrame":
        """How position-like and how content-like each head's first choice is.

        One row for each layer and head: shares of the (sample, query) pairs that have a choice,

        - ``by_offset``, explained by one relative offset, which is ``offset`` (key minus query);
        - ``by_index``, explained by one key position, which is ``index``;
        - ``by_position``, explained by the position of the query alone: the most frequent key of
          each query. No rule that looks at positions only explains more.
        - ``by_content``, the rest: what must come from the tokens, over these inputs.

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
                row = {"layer": layer, "head": head, **_explained(keys, skip)}
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
        self.without = check_positions(without)
        self.spread = spread
        self._ranked: list[list[Ranked]] = []
        self._spread: list[list[tuple[Tensor, Tensor]]] = []
        self._lengths: list[Tensor] = []
        self._is_relu = False

    def config(self) -> Mapping[str, Any]:
        """The settings, as JSON-compatible values."""
        return {"ranks": list(self.ranks), "without": list(self.without), "spread": self.spread}

    def check(self, n_fit: int | None, n_evaluate: int | None, n_keys: int) -> None:
        """Refuse ranks and splits that the data do not allow; see :meth:`Probe.check`."""
        check_rank_support(self.ranks, n_keys - len([k for k in self.without if k < n_keys]))

    def _hook_points(self, model: nn.Module) -> tuple[str, ...]:
        self._is_relu = attention_kind(model) == "relu"
        names: list[str] = []
        for layer in range(layer_count(model)):
            names += attention_hooks(model, layer)[0]
            if self.spread:
                names.append(pattern_hook(model, layer))
        return tuple(names)

    def _optional_points(self, model: nn.Module) -> tuple[str, ...]:
        layers = range(layer_count(model))
        return tuple(name for layer in layers for name in attention_hooks(model, layer)[1])

    def _update(self, model: nn.Module, seen: Pass) -> None:
        ranked, spreads = [], []
        for layer in range(layer_count(model)):
            scores = attention_scores(seen.activations, layer, seen.first)
            keys = rank_keys(leaving_out(scores, self.without), self.ranks)
            ranked.append(Ranked(*(part.cpu() for part in keys)))
            if self.spread:
                name = pattern_hook(model, layer)
                check_finite(seen.activations[name], name, seen.first)
                spreads.append(_spread(seen.activations[name]))
        n_query = ranked[0].positions.shape[2]
        lengths = seen.lengths
        if lengths is None:
            lengths = torch.full((len(ranked[0].positions),), n_query)
        self._ranked.append(ranked)
        self._spread.append(spreads)
        self._lengths.append(lengths)

    def _merge(self, other: "PositionsProbe") -> None:
        self._ranked.extend(other._ranked)
        self._spread.extend(other._spread)
        self._lengths.extend(other._lengths)
        self._is_relu = other._is_relu

    def _result(self) -> PositionsResult:
        positions, margins, ties = (
            tuple(
                padded_together([ranked[layer][part] for ranked in self._ranked], (2,), fill)
                for layer in range(len(self._ranked[0]))
            )
            for part, fill in enumerate((-1, math.nan, 0))
        )
        entropy, concentration = (
            tuple(
                padded_together([spread[layer][part] for spread in self._spread], (2,), math.nan)
                for layer in range(len(self._spread[0]))
            )
            for part in (0, 1)
        )
        return PositionsResult(
            ranks=self.ranks,
            positions=positions,
            margins=margins,
            ties=ties,
            lengths=torch.cat(self._lengths),
            entropy=entropy,
            concentration=concentration,
            record=self._run_record(),
            notes=(*self._notes(), *self._lacking(positions)),
        )

    def _lacking(self, positions: Sequence[Tensor]) -> Iterator[str]:
        """What a reader must know: ranks without keys, and attention that has no argmax."""
        if self._is_relu:
            yield _RELU_NOTE
        for layer, chosen in enumerate(positions):
            for column, rank in enumerate(self.ranks):
                if not (chosen[..., column] >= 0).any():
                    yield f"layer {layer}: no query has a key of rank {rank}"


def _spread(pattern: Float[Tensor, "batch head query key"]) -> tuple[Tensor, Tensor]:
    """Entropy and largest share of every row [batch, head, query]; NaN for rows without weight."""
    pattern = pattern.float()
    shares = pattern / pattern.sum(dim=-1, keepdim=True)
    entropy = torch.special.entr(shares).sum(dim=-1)
    return entropy.cpu(), shares.amax(dim=-1).cpu()
