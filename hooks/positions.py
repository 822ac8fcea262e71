"""Which positions heads choose or draw from, with margins and ties; patterns of a few sequences."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError, refuse_names
from infoflow_lens.foundation.lazy import mpl, pd
from infoflow_lens.foundation.modules import to_host
from infoflow_lens.foundation.settings import BothEnds, Ranks, Share
from infoflow_lens.hooks.model.points import attention_kind, layers_with_attention
from infoflow_lens.hooks.passes.ranking import check_rank_support
from infoflow_lens.hooks.passes.view import Needs, Pass
from infoflow_lens.hooks.probe import Probe
from infoflow_lens.hooks.result import (
    LabelledArray,
    Result,
    frame_of,
    note_layers_without_heads,
)
from infoflow_lens.hooks.sharded import ShardedResult, common_notes
from infoflow_lens.hooks.states import combined, concatenated, latest, summed

_COUNTS_AT_ONCE = 2**26  # numbers; more layers than these hold are counted in several rounds
# what stands at queries beyond the end of a sequence
FILL = {
    "positions": -1,
    "margins": math.nan,
    "ties": 0,
    "entropy": math.nan,
    "concentration": math.nan,
}


@refuse_names(joined="join")
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
        concentration: with spread, float [sample, head, query]: the share of the first choice in
            the row's weight, that of keys that are left out included; NaN where there is no weight.
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
        """The positions of rank 1 of every layer, as `propagate` takes them."""
        column = _column_of_first(self)
        return tuple(layer[..., column] for layer in self.positions)

    @property
    def moved_keys(self) -> tuple[Int[Tensor, "sample _head query"], ...]:
        """The keys that heads pass on by rule (1), :attr:`argmax`; `propagate` takes the result."""
        return self.argmax

    def summary(self, skip: int = 0) -> "pd.DataFrame":
        """Tell how position-like and how content-like each head's first choice is.

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
        return _summarise(lambda: [self], skip)

    @property
    def n_sequences(self) -> int:
        """The number of sequences that were seen."""
        return len(self.lengths)

    def first(self, n: int) -> "PositionsResult":
        """Return the result of the first `n` sequences."""
        layers: dict[str, Any] = {
            name: tuple(layer[:n] for layer in getattr(self, name)) for name in FILL
        }
        return replace(self, lengths=self.lengths[:n], **layers)

    @classmethod
    def join(cls, parts: Sequence["PositionsResult"]) -> "PositionsResult":
        """Join the results of several groups of sequences, one behind the other.

        Args:
            parts: of the same probe and model.
        """
        lengths = torch.cat([part.lengths for part in parts])
        layers: dict[str, Any] = {
            name: concatenated(2, fill=fill).value([getattr(part, name) for part in parts])
            for name, fill in FILL.items()
        }
        notes = common_notes(part.notes for part in parts)
        return replace(parts[0], lengths=lengths, notes=notes, **layers)

    def to_frame(self) -> "pd.DataFrame":
        """Return one row for each layer, sample, head, query and rank."""
        frame = frame_of([self.arrays[name] for name in ("positions", "margins", "ties")])
        return frame.rename(columns={"positions": "position", "margins": "margin"})

    def plot(self, layer: int = 0) -> "mpl.Figure":
        """Draw how often each key is the first choice of each query that is there, by head."""
        n_queries = self.positions[0].shape[2]
        n = (torch.arange(n_queries) < self.lengths[:, None]).sum(dim=0)
        often = tuple(_frequencies(chosen.long(), n) for chosen in self.argmax)
        array = LabelledArray("frequency", often, ("layer", "head", "query", "key"))
        return array.select(layer=layer).plot(f"First choice of the heads of layer {layer}")


def _frequencies(
    chosen: Int[Tensor, "sample head query"], n: Int[Tensor, " query"]
) -> Float[Tensor, "head query key"]:
    """Return the share in which a query chooses a key, of the `n` samples that have the query."""
    n_head, n_query = chosen.shape[1:]
    n_key = max(n_query, int(chosen.max()) + 1 if chosen.numel() else 0)
    counts = torch.zeros(n_head, n_query, n_key)
    keys = chosen.clamp(min=0).permute(1, 2, 0)
    counts.scatter_add_(2, keys, (chosen >= 0).float().permute(1, 2, 0))
    return counts / n.clamp(min=1)[:, None]


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedPositions(ShardedResult[PositionsResult]):
    """Attended positions of many sequences: what :class:`PositionsResult` is for some.

    What is a mean or a count is taken over the files, one in memory at a time; what is a tensor of
    all sequences is read whole, if it fits.
    """

    of: ClassVar[type[PositionsResult]] = PositionsResult

    def _join(self, parts: Sequence[PositionsResult]) -> PositionsResult:
        return PositionsResult.join(parts)

    @property
    def argmax(self) -> tuple[Int[Tensor, "sample _head query"], ...]:
        """:attr:`PositionsResult.argmax` of all sequences, in memory."""
        return self.whole().argmax

    @property
    def moved_keys(self) -> tuple[Int[Tensor, "sample _head query"], ...]:
        """:attr:`PositionsResult.moved_keys` of all sequences, in memory."""
        return self.whole().moved_keys

    @property
    def lengths(self) -> Int[Tensor, " sample"]:
        """:attr:`PositionsResult.lengths` of all sequences, which `propagate` reads."""
        return torch.cat([part.lengths for part in self.shards()])

    def summary(self, skip: int = 0) -> "pd.DataFrame":
        """Return :meth:`PositionsResult.summary` of all sequences.

        Raises:
            InfoFlowError: as there, and for a file that is gone or spoiled.
        """
        return _summarise(self.shards, skip)

    def to_frame(self) -> "pd.DataFrame":
        """Return :meth:`PositionsResult.to_frame` of all sequences, in memory."""
        return self.whole().to_frame()

    def plot(self, layer: int = 0) -> "mpl.Figure":
        """Draw :meth:`PositionsResult.plot` of the first file."""
        return next(self.shards()).plot(layer)


def _column_of_first(part: PositionsResult) -> int:
    """Return the place of rank 1."""
    if 1 not in part.ranks:
        raise InfoFlowError(
            f"ranks are {part.ranks}: expected rank 1 among them; probe with ranks=(1, ...)"
        )
    return part.ranks.index(1)


def _summarise(parts: Callable[[], Iterable[PositionsResult]], skip: int) -> "pd.DataFrame":
    """Make :meth:`PositionsResult.summary` of several parts, one in memory at a time.

    Args:
        parts: gives them, at least one; called again for every few layers where there are very many
            keys.
        skip: as there.

    Raises:
        InfoFlowError: as there.
    """
    # sizes first: counts [head, query, key] of all layers may not fit into memory
    n_query = n_layers = n_heads = 0
    for part in parts():
        n_layers = len(part.positions)
        n_query = max(n_query, part.positions[0].shape[2])
        n_heads = max(n_heads, *(layer.shape[1] for layer in part.positions))
    if not 0 <= skip < n_query:
        raise InfoFlowError(
            f"skip is {skip}: expected 0 to {n_query - 1}, so that some queries remain"
        )
    column = _column_of_first(part)
    at_once = max(1, _COUNTS_AT_ONCE // (n_heads * n_query * n_query))
    rows: list[dict[str, Any]] = []
    for start in range(0, n_layers, at_once):
        layers = range(start, min(start + at_once, n_layers))
        totals: dict[int, Any] = {}
        for part in parts():
            for layer in layers:
                found = _count_choices(part, layer, column, skip)
                totals[layer] = summed().merge(totals.get(layer), found)
        for layer, total in totals.items():
            for head, counts in enumerate(total["chosen"]):
                row = {"layer": layer, "head": head, **_explain_choices(counts, skip)}
                row["tied"] = float(total["tied"][head] / total["allowed"][head])
                if "spread" in total:
                    spread = total["spread"][:, head] / total["n_spread"][:, head]
                    row["entropy"], row["concentration"] = spread.tolist()
                rows.append(row)
    return pd.DataFrame(rows)


def _count_choices(
    part: PositionsResult, layer: int, column: int, skip: int
) -> dict[str, Int[Tensor, "..."] | Float[Tensor, "measure head"]]:
    """Count the choices of a layer's heads in some sequences, as what can be added up.

    Args:
        part: the sequences.
        layer: the layer.
        column: that of rank 1.
        skip: as for :meth:`PositionsResult.summary`.

    Returns:
        "chosen" [head, query, key], how often each query chooses each key; "allowed" and "tied"
        [head], queries that have a key, and those of them without a choice; with spread, the sums
        of both measures and their numbers, "spread" and "n_spread" [measure, head].
    """
    keys = part.positions[layer][:, :, skip:, column].long()
    n_head, n_query = keys.shape[1:]
    n_key = max(n_query + skip, int(keys.max()) + 1 if keys.numel() else 0)
    tied = (part.ties[layer][:, :, skip:, column] > 0) & (keys >= 0)
    head = torch.arange(n_head)[:, None].expand_as(keys)
    query = torch.arange(n_query).expand_as(keys)
    # one number for each (head, query, key), to be counted at once
    flat = ((head * n_query + query) * n_key + keys)[(keys >= 0) & ~tied]
    counts = torch.bincount(flat, minlength=n_head * n_query * n_key)
    found: dict[str, Tensor] = {
        "chosen": counts.view(n_head, n_query, n_key),
        "allowed": (keys >= 0).sum(dim=(0, 2)),
        "tied": tied.sum(dim=(0, 2)),
    }
    if part.entropy:
        both = torch.stack([part.entropy[layer], part.concentration[layer]])[..., skip:].double()
        found["spread"] = both.nansum(dim=(1, 3))
        found["n_spread"] = (~both.isnan()).sum(dim=(1, 3))
    return found


def _explain_choices(counts: Int[Tensor, "query key"], skip: int) -> dict[str, float]:
    """Return the shares of choices that one offset, one key, or one key for each query explain."""
    # a head without choices, or whose choices are all tied
    total = int(counts.sum())
    if total == 0:
        return dict.fromkeys(
            ("by_offset", "offset", "by_index", "index", "by_position", "by_content"), math.nan
        )
    n_query, n_key = counts.shape
    # key minus query, so that one offset is one diagonal
    offset = torch.arange(n_key) - (skip + torch.arange(n_query))[:, None]
    first = int(offset.min())
    by_offset = torch.bincount((offset - first).flatten(), counts.flatten().double())
    by_index = counts.sum(dim=0)
    by_position = float(counts.amax(dim=1).sum()) / total
    return {
        "by_offset": float(by_offset.max()) / total,
        "offset": float(by_offset.argmax() + first),
        "by_index": int(by_index.max()) / total,
        "index": float(by_index.argmax()),
        "by_position": by_position,
        "by_content": 1 - by_position,
    }


_RELU_NOTE = (
    "attention is ReLU: a head reads every key with a positive score, and none where there is no "
    "such key, so the largest score says too little; use AttendedProbe"
)


class PositionsProbe(Probe[PositionsResult]):
    """The key positions of the k largest attention scores, per layer, head and query.

    s_i(t) of update rule (1) (Yu, Jiang, Bao, Li 2026, Sec. 5.1) is rank 1. Masked keys and padding
    never appear. A layer without attention has no heads. Where a model shows the pattern in place
    of the scores, ranks come from the pattern. What it keeps grows with the sequences, since the
    positions of each are the result: a few bytes for each (layer, head, query, rank).

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
    follows_attention: ClassVar[bool] = True
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
        """Name the scores to rank; with spread, the pattern."""
        layers = layers_with_attention(model)
        return Needs.of(
            model, ranks=self.ranks, without=self.without, pattern=self.spread, layers=layers
        )

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
        yield from note_layers_without_heads(positions)
        for layer, chosen in enumerate(positions):
            for column, rank in enumerate(self.ranks):
                if chosen.shape[1] and not (chosen[..., column] >= 0).any():
                    yield f"layer {layer}: no query has a key of rank {rank}"


def _spread(
    pattern: Float[Tensor, "batch head query key"], left_out: Bool[Tensor, "batch key"]
) -> tuple[Float[Tensor, "batch head query"], Float[Tensor, "batch head query"]]:
    """Find the entropy of every row, and the share of the first choice; NaN without weight.

    Keys that are left out count in the row, and are no first choice.
    """
    pattern = pattern.float()
    shares = pattern / pattern.sum(dim=-1, keepdim=True)
    ranked = shares.masked_fill(left_out[:, None, None].to(shares.device), 0)
    largest = ranked.amax(dim=-1)
    return torch.special.entr(shares).sum(dim=-1), largest.masked_fill(largest == 0, torch.nan)


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
