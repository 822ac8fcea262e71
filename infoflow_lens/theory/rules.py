"""The three rules by which attention layers update information sets (Yu et al. 2026, Sec. 5.1)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from infoflow_lens.foundation.display import brief
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.theory.propagation import GradedLayer, best_through

_BITS_PER_WORD = 64


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

    def view_by_position(self, words: Int[Tensor, "row word"]) -> Int[Tensor, "batch pos word"]:
        """View `before` or `after` by sequence and position, without the empty set."""
        return words[:-1].view(self.batch, self.n_pos, -1)


def pack(sets: Bool[Tensor, "row source"]) -> Int[Tensor, "row word"]:
    """Return sets as bits, 64 sources a word: uniting two sets is then one instruction a word."""
    padding = -sets.shape[1] % _BITS_PER_WORD
    bits = torch.nn.functional.pad(sets.to(torch.uint8), (0, padding)).unflatten(1, (-1, 8))
    places = torch.arange(8, dtype=torch.uint8, device=sets.device)
    # eight bools make a byte, and eight bytes a word
    return (bits << places).sum(dim=-1, dtype=torch.uint8).view(torch.int64)


def unpack(words: Int[Tensor, "row word"], n_sources: int) -> Bool[Tensor, "row source"]:
    """Return the inverse of :func:`pack`."""
    # every byte of bits becomes eight bools, which are eight bytes: a look-up of words
    byte = torch.arange(256, dtype=torch.uint8, device=words.device)
    places = torch.arange(8, dtype=torch.uint8, device=words.device)
    table = (byte[:, None] >> places & 1).view(torch.int64).flatten()
    bits = words.contiguous().view(torch.uint8)
    bools = table.index_select(0, bits.flatten().to(torch.int32)).view(torch.bool)
    return bools.view(len(words), -1)[:, :n_sources]


class Rule(ABC):
    """How some heads move sets in one layer."""

    @property
    def tensor(self) -> Tensor:
        """The tensor that the rule was made of, its first field.

        Raises:
            InfoFlowError: for a rule that was made of something else.
        """
        tensor = next(iter(vars(self).values()), None)
        if not isinstance(tensor, Tensor):
            raise InfoFlowError(
                f"{type(self).__name__} is made of {brief(tensor)}: expected a rule whose first "
                "field is a tensor with a row for each position, which says its size and device"
            )
        return tensor

    @property
    def device(self) -> torch.device:
        """The device of that tensor."""
        return self.tensor.device

    @property
    def sizes(self) -> tuple[int | None, int]:
        """Number of sequences, None for any, and of positions."""
        return None, len(self.tensor)

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
    def shapes(self, batch: int, n_pos: int, n_sources: int) -> Sequence[tuple[int, ...]]:
        """Return the shapes that strengths of its edges may have."""

    @abstractmethod
    def grade(self, sets: GradedLayer, strength: Tensor | None) -> None:
        """Raise how strongly queries hold sources; edges have these strengths, or 1."""

    @abstractmethod
    def describe(self, sequence: int = 0) -> Int[Tensor, "pos k"]:
        """Return the keys whose sets each query of a sequence gains; -1 for none."""


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
        if not self.positions.shape[1]:
            raise InfoFlowError(
                f"layer {layer} has no heads: expected attention in every layer, as something else "
                "moves information there, of which flow() knows no rule; ask() and "
                "JacobianInfluence take such models, and propagate() a GlobalAggregation in the "
                "place of these positions, for what reads all it sees"
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
        # [batch, head, pos, rank] rows of the packed sets; the last row is the empty set, for -1
        rows = torch.where(heads < 0, n_rows, heads + first_row[:, None, None, None])
        for index in rows.permute(1, 3, 0, 2).reshape(-1, n_rows):  # [head * rank, row]
            sets.after[:-1] |= sets.before.index_select(0, index)

    def shapes(self, batch: int, n_pos: int, n_sources: int) -> Sequence[tuple[int, ...]]:
        """Return the shape of one strength for each position that is moved."""
        return [tuple(self.positions.shape)]

    def grade(self, sets: GradedLayer, strength: Tensor | None) -> None:
        """See :meth:`Rule.grade`."""
        held = torch.nn.functional.pad(sets.before, (0, 0, 0, 1))  # of "no position" nothing
        ranked = self.positions.ndim == 4
        heads = (self.positions if ranked else self.positions.unsqueeze(-1)).long()
        given = strength if strength is None or ranked else strength.unsqueeze(-1)
        for head in range(heads.shape[1]):
            for rank in range(heads.shape[3]):
                rows = heads[:, head, :, rank, None] % held.shape[1]  # -1 is the last row
                brought = held.take_along_dim(rows.expand(-1, -1, held.shape[2]), dim=1)
                sets.bring(brought, None if given is None else given[:, head, :, rank, None])

    def describe(self, sequence: int = 0) -> Int[Tensor, "pos k"]:
        """Return the chosen keys of all heads, those of one head after those of another."""
        # positions of one sequence stand for all
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

    def check(self, layer: int, batch: int, n_pos: int) -> None:
        """See :meth:`Rule.check`."""
        if self.reads.dtype != torch.bool or self.reads.shape != (n_pos, n_pos):
            raise InfoFlowError(
                f"reads of layer {layer} are {self.reads.dtype} of shape "
                f"{tuple(self.reads.shape)}: expected bool [{n_pos}, {n_pos}], queries by keys"
            )

    def apply(self, sets: PackedSets) -> None:
        """See :meth:`Rule.apply`."""
        before, after = sets.view_by_position(sets.before), sets.view_by_position(sets.after)
        # key by key, as all its readers gain the same set, and a key without readers costs nothing
        for key in self.reads.any(dim=0).nonzero().flatten().tolist():
            readers = self.reads[:, key].nonzero().flatten()
            after[:, readers] |= before[:, key : key + 1]

    def shapes(self, batch: int, n_pos: int, n_sources: int) -> Sequence[tuple[int, ...]]:
        """Return the shapes of one strength for each query and key, in all sequences or in each."""
        return [(n_pos, n_pos), (batch, n_pos, n_pos)]

    def grade(self, sets: GradedLayer, strength: Tensor | None) -> None:
        """See :meth:`Rule.grade`."""
        edges = self.reads.to(sets.before)
        edges = edges if strength is None else edges * strength.to(edges)
        edges = edges.expand(len(sets.before), -1, -1)
        sets.bring(best_through(edges, sets.before, sets.path), None)

    def describe(self, sequence: int = 0) -> Int[Tensor, "pos k"]:
        """Return the fixed keys, the same in every sequence."""
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
        sets.view_by_position(sets.after)[:, self.queries] = pack(everything)

    def shapes(self, batch: int, n_pos: int, n_sources: int) -> Sequence[tuple[int, ...]]:
        """Return the shapes of a strength for each query and input, in all sequences or in each."""
        return [(n_pos, n_sources), (batch, n_pos, n_sources)]

    def grade(self, sets: GradedLayer, strength: Tensor | None) -> None:
        """See :meth:`Rule.grade`; the edges lead from the input positions themselves."""
        everything = self.queries[:, None].to(sets.before).expand_as(sets.before)
        sets.bring(everything, strength)

    def describe(self, sequence: int = 0) -> Int[Tensor, "pos k"]:
        """Return every position, for the queries that aggregate."""
        keys = torch.arange(len(self.queries), device=self.device)
        return torch.where(self.queries[:, None], keys, -1)


Layer: TypeAlias = Tensor | Rule | Sequence[Rule]
Strength: TypeAlias = Tensor | Sequence[Tensor | None] | None


def rules_of(layer: Layer) -> tuple[Rule, ...]:
    """Return a layer as a tuple of rules; a bare tensor holds attended positions."""
    if isinstance(layer, Tensor):
        return (MaxPosition(layer),)
    return (layer,) if isinstance(layer, Rule) else tuple(layer)
