"""Information sets and the three rules by which attention layers update them.

The information set of a state is the set of input positions whose information it can still give
back (Yu, Jiang, Bao, Li 2026, Sec. 5.1). Predicted and measured sets are the same type, so that
comparing them is one function (`infoflow_lens.agreement.compare`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from infoflow_lens.foundation.display import panel
from infoflow_lens.foundation.errors import InfoFlowError

_BITS_PER_WORD = 64


def check_lengths(lengths: Tensor, n_batch: int, n_source: int) -> Int[Tensor, " batch"]:
    """Lengths of sequences, as a tensor of integers.

    Raises:
        InfoFlowError: unless there is one from 1 to the number of sources for each sequence.
    """
    found = torch.as_tensor(lengths)
    if found.shape != (n_batch,) or not ((found >= 1) & (found <= n_source)).all():
        raise InfoFlowError(
            f"lengths are {found.tolist()}: expected {n_batch} numbers of tokens from 1 to "
            f"{n_source}"
        )
    return found


@dataclass(frozen=True, eq=False)
class InformationSets:
    """Sets of input positions, one for every layer, sequence and position.

    Attributes:
        members: bool [layer, batch, pos, source]. Entry [l, b, t, s] says that input token s lies
            in the set of position t after attention layer l of sequence b. Layers count from 0 as
            in TransformerLens, so the paper's I_t^(l) is ``members[l - 1, :, t - 1]``. Positions
            beyond the sources (the CLS token, which reads but is no token) come last.
        lengths: int [batch], the tokens of each sequence, where they differ; None where all are of
            one length, or it is not known. States and sources beyond are not real.

    Raises:
        InfoFlowError: if `members` is no bool tensor of four axes, or has more sources than
            positions; for lengths that do not fit.
    """

    members: Bool[Tensor, "layer batch pos source"]
    lengths: Int[Tensor, " batch"] | None = None

    def __post_init__(self) -> None:
        members = self.members
        if not isinstance(members, Tensor):
            raise InfoFlowError(
                f"information sets are a {type(members).__name__}: expected bool [layer, batch, "
                "pos, source]; propagate(...) makes them from the keys that heads move"
            )
        if members.ndim != 4 or members.dtype != torch.bool:
            raise InfoFlowError(
                f"information sets are {members.dtype} of shape {tuple(members.shape)}: "
                "expected bool [layer, batch, pos, source]; threshold scores before you build them"
            )
        if members.shape[3] > members.shape[2]:
            raise InfoFlowError(
                f"information sets have {members.shape[3]} sources but {members.shape[2]} "
                "positions: every source is a position; pass one row for each"
            )
        if self.lengths is not None:
            check_lengths(self.lengths, members.shape[1], members.shape[3])

    @property
    def n_layers(self) -> int:
        """The number of attention layers."""
        return self.members.shape[0]

    @property
    def n_sources(self) -> int:
        """The number of input tokens, T in the paper."""
        return self.members.shape[3]

    def of(self, layer: int, sequence: int, position: int) -> set[int]:
        """One information set as a Python set of source positions."""
        return set(self.members[layer, sequence, position].nonzero().flatten().tolist())

    def __repr__(self) -> str:
        n_layers, n_batch, n_pos, n_source = self.members.shape
        return (
            f"InformationSets({n_layers} layers, {n_batch} sequences, {n_pos} positions, "
            f"{n_source} sources)"
        )

    def _repr_html_(self) -> str:
        n_layers, n_batch, n_pos, n_source = self.members.shape
        facts = {"layers": n_layers, "sequences": n_batch, "positions": n_pos, "sources": n_source}
        more = ".of(layer, sequence, position) is one set, .sizes() how large all are"
        return panel("InformationSets", facts, more=more)

    def part(
        self, layers: Sequence[int] | slice = slice(None), n: int | None = None
    ) -> "InformationSets":
        """The sets of some layers and of the first `n` sequences."""
        chosen = layers if isinstance(layers, slice) else list(layers)
        lengths = None if self.lengths is None else self.lengths[:n]
        return replace(self, members=self.members[chosen][:, :n], lengths=lengths)

    def sizes(self) -> Int[Tensor, "layer batch pos"]:
        """The sizes |I_t^(l)|, on which the paper's parameter cost depends (Sec. 5.2)."""
        return self.members.sum(dim=-1)


@dataclass(frozen=True)
class PackedSets:
    """The sets of a layer as bits, 64 sources a word: uniting two sets is one instruction a word.

    Attributes:
        before: [batch * pos + 1, word], the sets that the layer reads; the last row is the empty
            set of "no position".
        after: the same rows, which rules unite with what they move.
        batch: number of sequences.
        n_sources: T.
    """

    before: Int[Tensor, "row word"]
    after: Int[Tensor, "row word"]
    batch: int
    n_sources: int

    @property
    def n_pos(self) -> int:
        """Positions of a sequence."""
        return (len(self.before) - 1) // self.batch

    def by_position(self, words: Int[Tensor, "row word"]) -> Int[Tensor, "batch pos word"]:
        """A view of `before` or `after`, without the empty set."""
        return words[:-1].view(self.batch, self.n_pos, -1)


class Rule(ABC):
    """How some heads move sets in one layer."""

    @property
    @abstractmethod
    def given(self) -> Tensor:
        """What it was made of."""

    @property
    def device(self) -> torch.device:
        """Where that is."""
        return self.given.device

    @property
    def sizes(self) -> tuple[int | None, int]:
        """Number of sequences, None for any, and of positions."""
        return None, len(self.given)

    @abstractmethod
    def check(self, layer: int, batch: int, n_pos: int) -> None:
        """Refuse sequences that the rule does not fit.

        Raises:
            InfoFlowError: for wrong shapes, dtypes or positions out of range.
        """

    @abstractmethod
    def apply(self, sets: PackedSets) -> None:
        """Unite the sets of the queries with those that are moved to them."""

    @abstractmethod
    def describe(self, sequence: int = 0) -> Int[Tensor, "pos k"]:
        """The keys whose sets each query of a sequence gains; -1 for none."""


@dataclass(frozen=True, eq=False)
class MaxPosition(Rule):
    """Rule (1), max-position retrieval: each query gains the sets of the keys that heads chose.

    ``I_t^(l) = I_t^(l-1) U U_i I_{s_i(t)}^(l-1)`` with s_i(t) the argmax of head i. [derived: the
    formula is restored from the prose of Sec. 5.1.]

    Attributes:
        positions: integers [batch, head, pos] or [batch, head, pos, rank], key positions; several
            ranks are united, -1 moves nothing (a query that this head does not serve, say).
    """

    positions: Int[Tensor, "batch head pos *rank"]

    @property
    def sizes(self) -> tuple[int | None, int]:
        """Number of sequences and of positions.

        Raises:
            InfoFlowError: for positions of another shape or type.
        """
        self._check_type(0)
        return self.positions.shape[0], self.positions.shape[2]

    @property
    def given(self) -> Tensor:
        """The positions."""
        return self.positions

    def _check_type(self, layer: int) -> None:
        chosen = self.positions
        if chosen.ndim not in (3, 4) or chosen.is_floating_point() or chosen.dtype == torch.bool:
            raise InfoFlowError(
                f"positions of layer {layer} are {chosen.dtype} of shape {tuple(chosen.shape)}: "
                "expected integers [batch, head, pos] or [batch, head, pos, rank]"
            )

    def check(self, layer: int, batch: int, n_pos: int) -> None:
        """See :meth:`Rule.check`."""
        self._check_type(layer)
        if self.sizes != (batch, n_pos):
            raise InfoFlowError(
                f"positions of layer {layer} have batch and pos {self.sizes}, expected "
                f"{(batch, n_pos)}: pass the same sequences through every layer"
            )
        if self.positions.numel():
            lowest, highest = torch.aminmax(self.positions)
            if lowest < -1 or highest >= n_pos:
                raise InfoFlowError(
                    f"positions of layer {layer} lie in [{lowest}, {highest}]: "
                    f"expected key positions 0 to {n_pos - 1}, or -1 for none"
                )

    def apply(self, sets: PackedSets) -> None:
        """See :meth:`Rule.apply`."""
        n_rows, n_pos = len(sets.before) - 1, sets.n_pos
        # half the bytes to read for the gather, where they can count the rows
        index_type = torch.int32 if n_rows < 2**31 - 1 else torch.int64
        first_row = torch.arange(sets.batch, dtype=index_type, device=self.device) * n_pos
        chosen = self.positions.to(index_type)
        heads = chosen.unsqueeze(-1) if chosen.ndim == 3 else chosen
        rows = torch.where(heads < 0, n_rows, heads + first_row[:, None, None, None])
        for index in rows.permute(1, 3, 0, 2).reshape(-1, n_rows):  # [head * rank, row]
            sets.after[:-1] |= sets.before.index_select(0, index)

    def describe(self, sequence: int = 0) -> Int[Tensor, "pos k"]:
        """The chosen keys of all heads, those of one head after those of another."""
        chosen = self.positions[sequence if len(self.positions) > 1 else 0].long()
        heads = chosen.unsqueeze(-1) if chosen.ndim == 2 else chosen
        return heads.permute(1, 0, 2).flatten(1)


@dataclass(frozen=True, eq=False)
class SpecificPositions(Rule):
    """Rule (3), specific-position aggregation: each query gains the sets of fixed keys.

    ``I_t^(l) = I_t^(l-1) U U_{s in S_t} I_s^(l-1)``, where S_t depends on the position and the
    layer only. It needs a positional encoding. [derived: the formula is restored from Sec. 5.1.]

    Attributes:
        reads: bool [pos, key]; entry [t, s] says that s lies in S_t.
    """

    reads: Bool[Tensor, "pos key"]

    @property
    def given(self) -> Tensor:
        """The reads."""
        return self.reads

    def check(self, layer: int, batch: int, n_pos: int) -> None:
        """See :meth:`Rule.check`."""
        if self.reads.dtype != torch.bool or self.reads.shape != (n_pos, n_pos):
            raise InfoFlowError(
                f"reads of layer {layer} are {self.reads.dtype} of shape "
                f"{tuple(self.reads.shape)}: expected bool [{n_pos}, {n_pos}], queries by keys"
            )

    def apply(self, sets: PackedSets) -> None:
        """See :meth:`Rule.apply`."""
        before, after = sets.by_position(sets.before), sets.by_position(sets.after)
        for key in self.reads.any(dim=0).nonzero().flatten().tolist():
            readers = self.reads[:, key].nonzero().flatten()
            after[:, readers] |= before[:, key : key + 1]

    def describe(self, sequence: int = 0) -> Int[Tensor, "pos k"]:
        """The fixed keys, the same in every sequence."""
        keys = torch.arange(self.reads.shape[1], device=self.device)
        return torch.where(self.reads, keys, -1)


@dataclass(frozen=True, eq=False)
class GlobalAggregation(Rule):
    """Rule (2), global aggregation: each of the queries holds all input positions.

    ``I_t^(l) = {1..T}``. [derived: the formula is restored from Sec. 5.1.]

    Attributes:
        queries: bool [pos], the queries that aggregate.
    """

    queries: Bool[Tensor, " pos"]

    @property
    def given(self) -> Tensor:
        """The queries."""
        return self.queries

    def check(self, layer: int, batch: int, n_pos: int) -> None:
        """See :meth:`Rule.check`."""
        if self.queries.dtype != torch.bool or self.queries.shape != (n_pos,):
            raise InfoFlowError(
                f"queries of layer {layer} are {self.queries.dtype} of shape "
                f"{tuple(self.queries.shape)}: expected bool [{n_pos}]"
            )

    def apply(self, sets: PackedSets) -> None:
        """See :meth:`Rule.apply`."""
        everything = torch.ones(1, sets.n_sources, dtype=torch.bool, device=sets.after.device)
        sets.by_position(sets.after)[:, self.queries] = _pack(everything)

    def describe(self, sequence: int = 0) -> Int[Tensor, "pos k"]:
        """Every position, for the queries that aggregate."""
        keys = torch.arange(len(self.queries), device=self.device)
        return torch.where(self.queries[:, None], keys, -1)


@runtime_checkable
class MovesKeys(Protocol):
    """A result that says which keys heads move, as those of PositionsProbe and AttendedProbe do."""

    @property
    def moved_keys(self) -> Sequence[Tensor]:
        """For every layer integers [batch, head, pos] or [batch, head, pos, rank]."""
        ...


Layer: TypeAlias = Tensor | Rule | Sequence[Rule]


def _rules(layer: Layer) -> tuple[Rule, ...]:
    """A layer as a tuple of rules; a bare tensor holds attended positions."""
    if isinstance(layer, Tensor):
        return (MaxPosition(layer),)
    return (layer,) if isinstance(layer, Rule) else tuple(layer)


def _sizes(layers: Sequence[tuple[Rule, ...]]) -> tuple[int, int, torch.device]:
    """Batch, number of positions and device: from the first rule that knows the batch."""
    found = [(*rule.sizes, rule.device) for layer in layers for rule in layer]
    if not found:
        raise InfoFlowError(
            "no layer to propagate through: expected attended positions or rules for each layer"
        )
    batch, n_pos, device = next((f for f in found if f[0] is not None), found[-1])
    return batch or 1, n_pos, device


def initial_sets(
    batch: int, n_pos: int, n_sources: int, device: torch.device | None = None
) -> Bool[Tensor, "batch pos source"]:
    """I_t^(0): {t} for tokens [stated], empty for positions beyond them, CLS [derived, App. E]."""
    sets = torch.zeros(batch, n_pos, n_sources, dtype=torch.bool, device=device)
    tokens = torch.arange(n_sources, device=device)
    sets[:, tokens, tokens] = True
    return sets


def _pack(sets: Bool[Tensor, "row source"]) -> Int[Tensor, "row word"]:
    """Sets as bits, 64 sources a word: uniting two sets is then one instruction a word."""
    padding = -sets.shape[1] % _BITS_PER_WORD
    bits = torch.nn.functional.pad(sets.to(torch.uint8), (0, padding)).unflatten(1, (-1, 8))
    places = torch.arange(8, dtype=torch.uint8, device=sets.device)
    return (bits << places).sum(dim=-1, dtype=torch.uint8).view(torch.int64)


def _unpack(words: Int[Tensor, "row word"], n_sources: int) -> Bool[Tensor, "row source"]:
    """The inverse of :func:`_pack`."""
    # every byte of bits becomes eight bools, which are eight bytes: a look-up of words
    byte = torch.arange(256, dtype=torch.uint8, device=words.device)
    places = torch.arange(8, dtype=torch.uint8, device=words.device)
    table = (byte[:, None] >> places & 1).view(torch.int64).flatten()
    bits = words.contiguous().view(torch.uint8)
    bools = table.index_select(0, bits.flatten().to(torch.int32)).view(torch.bool)
    return bools.view(len(words), -1)[:, :n_sources]


def _united(
    words: Int[Tensor, "row word"], rules: Sequence[Rule], batch: int, n_sources: int
) -> Int[Tensor, "row word"]:
    """One layer on packed sets; the last row is the empty set of "no position"."""
    sets = PackedSets(words, words.clone(), batch, n_sources)
    for rule in rules:
        rule.apply(sets)
    return sets.after


def update(
    sets: Bool[Tensor, "batch pos source"], rules: Sequence[Rule]
) -> Bool[Tensor, "batch pos source"]:
    """The sets after one layer. All positions read the sets of the layer before."""
    packed = torch.nn.functional.pad(_pack(sets.flatten(0, 1)), (0, 0, 0, 1))
    words = _united(packed, rules, sets.shape[0], sets.shape[2])
    return _unpack(words[:-1], sets.shape[2]).view_as(sets)


def _layers(given: object) -> Sequence[Layer]:
    """The layers of what `propagate` takes.

    Raises:
        InfoFlowError: for what does not say which keys heads move.
    """
    if isinstance(given, MovesKeys):
        return given.moved_keys
    if hasattr(given, "rules"):
        raise InfoFlowError(
            f"layers is a {type(given).__name__}, which names mechanisms, not the keys that heads "
            "move: expected result.rules(attended, positions), with results of AttendedProbe and "
            "PositionsProbe on the same inputs"
        )
    if not isinstance(given, (Sequence, Tensor)) or isinstance(given, str):
        raise InfoFlowError(
            f"layers is a {type(given).__name__}: expected the positions or rules of every layer, "
            "or a result of PositionsProbe or AttendedProbe"
        )
    return given  # type: ignore[return-value]


def propagate(layers: Sequence[Layer] | MovesKeys, n_sources: int | None = None) -> InformationSets:
    """Information sets after every layer, from the keys that each head moves (Sec. 5.1).

    Starting from I_t = {t} for tokens and the empty set for positions beyond the sources (CLS),
    every layer unites a position's own set, which the residual stream keeps, with what its heads
    bring. A layer may mix the three rules, over heads and over positions.

    Args:
        layers: for every layer, integers [batch, head, pos] or [batch, head, pos, rank], the key
            positions that each head retrieves for each query (-1 for none; the number of heads may
            differ between layers), or a :class:`MaxPosition`, :class:`SpecificPositions`,
            :class:`GlobalAggregation`, or several of them. A result of `PositionsProbe` stands for
            its positions of rank 1, one of `AttendedProbe` for all its positions; the sets have the
            lengths of its sequences, if it knows them.
        n_sources: T, the number of input tokens; default, the number of positions. Positions from
            n_sources on are CLS-like and start empty.

    Returns:
        Sets of shape [layer, batch, pos, source].

    Raises:
        InfoFlowError: for an empty list, shapes that differ between layers, or positions out of
            range.

    Example (App. E of the paper, T = 4 and CLS, counted from 0):
        >>> layer_1 = torch.tensor([[[2, 2, 1, 1, -1]]])  # CLS is not followed in layer 1
        >>> layer_2 = torch.tensor([[[-1, -1, -1, -1, 1]]])
        >>> sets = propagate([layer_1, layer_2], n_sources=4)
        >>> [sets.of(0, 0, t) for t in range(4)]
        [{0, 2}, {1, 2}, {1, 2}, {1, 3}]
        >>> sets.of(1, 0, 4)  # CLS holds the active index set of the target
        {1, 2}
    """
    by_layer = [_rules(layer) for layer in _layers(layers)]
    batch, n_pos, device = _sizes(by_layer)
    n_sources = n_pos if n_sources is None else n_sources
    if not 1 <= n_sources <= n_pos:
        raise InfoFlowError(
            f"n_sources is {n_sources}: expected 1 to {n_pos}, the number of query positions"
        )
    for layer, rules in enumerate(by_layer):
        for rule in rules:
            rule.check(layer, batch, n_pos)
    words = _pack(initial_sets(1, n_pos, n_sources, device)[0]).repeat(batch, 1)
    words = torch.nn.functional.pad(words, (0, 0, 0, 1))
    members = torch.empty((len(by_layer), batch, n_pos, n_sources), dtype=torch.bool, device=device)
    for layer, rules in enumerate(by_layer):
        words = _united(words, rules, batch, n_sources)
        members[layer] = _unpack(words[:-1], n_sources).view(batch, n_pos, n_sources)
    # a result counts the positions of a sequence, CLS among them
    lengths = getattr(layers, "lengths", None)
    if lengths is not None:
        lengths = lengths - (n_pos - n_sources)
    return InformationSets(members, lengths)
