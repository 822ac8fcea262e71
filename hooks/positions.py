"""Which key positions each head attends to most."""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from infoflow_lens.hooks.capabilities import (
    attention_kind,
    check_scores,
    layer_count,
    scores_hook,
    unmasked,
)
from infoflow_lens.hooks.probe import Probe
from infoflow_lens.hooks.result import Result
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


_RELU_NOTE = (
    "attention is ReLU: a head reads every key with a positive score, and none where there is no "
    "such key, so the largest score says too little; use AttendedProbe"
)


class Ranked(NamedTuple):
    """Keys ranked by score, for each query; undefined entries are -1 (positions) or NaN (margins).

    Attributes:
        positions: key positions.
        margins: score of the rank minus the score of the next rank; infinite where there is no
            next key.
        ties: how many other keys have exactly the score of this rank.
    """

    positions: Int[Tensor, "*query rank"]
    margins: Float[Tensor, "*query rank"]
    ties: Int[Tensor, "*query rank"]


def rank_keys(scores: Float[Tensor, "*query key"], ranks: Sequence[int]) -> Ranked:
    """The keys of the k-th largest scores, for each k in `ranks` (1 is the argmax).

    Scores are compared in float32; ties go to the lowest position. Masked keys (-inf, or the
    lowest finite value that some models use instead) are never chosen: a rank beyond the allowed
    keys is undefined. A mask of another value, -1e9 say, cannot be told from a score.
    """
    scores = scores.detach()
    may_attend = unmasked(scores)
    scores = scores.float().masked_fill(~may_attend, -torch.inf)
    remaining = scores.clone()
    allowed = may_attend.sum(dim=-1)
    n_keys = scores.shape[-1]
    positions, margins, ties = [], [], []
    value, where = remaining.max(dim=-1)
    for rank in range(1, max(ranks) + 1):
        remaining.scatter_(-1, where.unsqueeze(-1), -torch.inf)
        # max returns the first of equal values, so ties go to the lowest position
        next_value, next_where = remaining.max(dim=-1)
        if rank in ranks:
            defined = allowed >= rank
            positions.append(where.masked_fill(~defined, -1))
            margins.append((value - next_value).masked_fill(~defined, math.nan))
            equal = (scores == value.unsqueeze(-1)).sum(dim=-1) - 1
            ties.append(equal.masked_fill(~defined, 0))
        value, where = next_value, next_where
    order = [sorted(set(ranks)).index(rank) for rank in ranks]
    dtype = torch.int16 if n_keys < 2**15 else torch.int32
    return Ranked(
        torch.stack(positions, dim=-1)[..., order].to(dtype),
        torch.stack(margins, dim=-1)[..., order],
        torch.stack(ties, dim=-1)[..., order].to(dtype),
    )


def rank_supported_keys(scores: Float[Tensor, "*query key"], ranks: Sequence[int]) -> Ranked:
    """:func:`rank_keys`, where some query has every rank.

    Raises:
        InfoFlowError: if a rank exceeds the keys of all queries.
    """
    ranked = rank_keys(scores, ranks)
    if not (ranked.positions.flatten(0, -2).amax(dim=0) >= 0).all():
        allowed = unmasked(scores).sum(dim=-1)
        check_rank_support(ranks, int(allowed.max()))
    return ranked


def check_ranks(ranks: Sequence[int]) -> tuple[int, ...]:
    """`ranks` as a tuple.

    Raises:
        InfoFlowError: unless they are different integers from 1 on.
    """
    try:
        chosen = tuple(operator.index(rank) for rank in ranks)
    except TypeError:
        chosen = ()
    if not chosen or min(chosen) < 1 or len(set(chosen)) != len(chosen):
        raise InfoFlowError(
            f"ranks are {ranks!r}: expected different integers of at least 1, such as (1, 2); "
            "rank 1 is the argmax"
        )
    return chosen


def check_rank_support(ranks: Sequence[int], n_keys: int) -> None:
    """Refuse ranks that no query can have.

    Raises:
        InfoFlowError: if a rank exceeds the number of keys.
    """
    if max(ranks) > n_keys:
        raise InfoFlowError(
            f"rank {max(ranks)} is beyond the number of keys: the longest row of attention has "
            f"{n_keys} keys; ask for ranks up to {n_keys}"
        )


def check_same_length(before: Tensor | None, now: Tensor) -> None:
    """Refuse sequences of another length than before (axis 2), which could not be put together.

    Raises:
        InfoFlowError: with both lengths.
    """
    if before is not None and before.shape[2] != now.shape[2]:
        raise InfoFlowError(
            f"this batch has {now.shape[2]} positions, those before had {before.shape[2]}: "
            "expected sequences of one length; use a probe for each length"
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
    """

    ranks: tuple[int, ...]
    positions: tuple[Int[Tensor, "sample _head query rank"], ...]
    margins: tuple[Float[Tensor, "sample _head query rank"], ...]
    ties: tuple[Int[Tensor, "sample _head query rank"], ...]

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
                shares = _explained(keys, skip)
                rows.append({"layer": layer, "head": head, **shares})
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

    s_i(t) of update rule (1) (Yu, Jiang, Bao, Li 2026, Sec. 5.1) is rank 1. Masked keys never
    appear. What it keeps grows with the sequences, since the positions of each are the result:
    a few bytes for each (layer, head, query, rank).

    Args:
        ranks: which ranks; 1 is the argmax.

    Raises:
        InfoFlowError: for ranks below 1, or beyond the number of keys.
    """

    def __init__(self, ranks: Sequence[int] = (1,)) -> None:
        super().__init__()
        self.ranks = check_ranks(ranks)
        self._ranked: list[list[Ranked]] = []
        self._is_relu = False

    def config(self) -> Mapping[str, Any]:
        """The settings, as JSON-compatible values."""
        return {"ranks": list(self.ranks)}

    def check(self, n_fit: int, n_evaluate: int, n_keys: int) -> None:
        """Refuse ranks and splits that the data do not allow; see :meth:`Probe.check`."""
        check_rank_support(self.ranks, n_keys)

    def _hook_points(self, model: nn.Module) -> tuple[str, ...]:
        self._is_relu = attention_kind(model) == "relu"
        return tuple(scores_hook(model, layer) for layer in range(layer_count(model)))

    def _update(
        self,
        model: nn.Module,
        activations: Mapping[str, Tensor],
        held_out: Bool[Tensor, " batch"],
    ) -> None:
        batch = []
        for name, scores in activations.items():
            check_scores(scores, name, self.n_sequences)
            batch.append(
                (name, Ranked(*(part.cpu() for part in rank_supported_keys(scores, self.ranks))))
            )
        by_name = dict(batch)
        check_same_length(self._ranked[0][0].positions if self._ranked else None, batch[0][1][0])
        self._ranked.append([by_name[name] for name in self._hook_points(model)])

    def _merge(self, other: "PositionsProbe") -> None:
        self._ranked.extend(other._ranked)
        self._is_relu = other._is_relu

    def _result(self) -> PositionsResult:
        layers = [
            Ranked(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
            for batches in zip(*self._ranked, strict=True)
        ]
        return PositionsResult(
            ranks=self.ranks,
            positions=tuple(layer.positions for layer in layers),
            margins=tuple(layer.margins for layer in layers),
            ties=tuple(layer.ties for layer in layers),
            record=self._run_record(),
            notes=(*self._notes(), *((_RELU_NOTE,) if self._is_relu else ())),
        )
