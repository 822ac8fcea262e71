"""Information sets and the three rules by which attention layers update them.

The information set of a state is the set of input positions whose information it can still give
back (Yu, Jiang, Bao, Li 2026, Sec. 5.1). Predicted and measured sets are the same type, so that
comparing them is one function (`infoflow_lens.agreement.compare`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from infoflow_lens.foundation.display import panel
from infoflow_lens.foundation.errors import InfoFlowError

_BITS_PER_WORD = 64


@dataclass(frozen=True, eq=False)
class InformationSets:
    """Sets of input positions, one for every layer, sequence and position.

    Attributes:
        members: bool [layer, batch, pos, source]. Entry [l, b, t, s] says that input token s lies
            in the set of position t after attention layer l of sequence b. Layers count from 0 as
            in TransformerLens, so the paper's I_t^(l) is ``members[l - 1, :, t - 1]``. Positions
            beyond the sources (the CLS token, which reads but is no token) come last.

    Raises:
        InfoFlowError: if `members` is no bool tensor of four axes, or has more sources than
            positions.
    """

    members: Bool[Tensor, "layer batch pos source"]

    def __post_init__(self) -> None:
        members = self.members
        if not isinstance(members, Tensor):
            raise InfoFlowError(
                f"information sets are a {type(members).__name__}: expected bool [layer, batch, "
                "pos, source]; propagate(...) makes them from what heads pass on"
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

    def sizes(self) -> Int[Tensor, "layer batch pos"]:
        """The sizes |I_t^(l)|, on which the paper's parameter cost depends (Sec. 5.2)."""
        return self.members.sum(dim=-1)


@dataclass(frozen=True, eq=False)
class MaxPosition:
    """Rule (1), max-position retrieval: each query gains the sets of the keys that heads chose.

    ``I_t^(l) = I_t^(l-1) U U_i I_{s_i(t)}^(l-1)`` with s_i(t) the argmax of head i. [derived: the
    formula is restored from the prose of Sec. 5.1.]

    Attributes:
        positions: integers [batch, head, pos] or [batch, head, pos, rank], key positions; several
            ranks are united, -1 passes nothing (a query that this head does not serve, say).
    """

    positions: Int[Tensor, "batch head pos *rank"]


@dataclass(frozen=True, eq=False)
class SpecificPositions:
    """Rule (3), specific-position aggregation: each query gains the sets of fixed keys.

    ``I_t^(l) = I_t^(l-1) U U_{s in S_t} I_s^(l-1)``, where S_t depends on the position and the
    layer only. It needs a positional encoding. [derived: the formula is restored from Sec. 5.1.]

    Attributes:
        reads: bool [pos, key]; entry [t, s] says that s lies in S_t.
    """

    reads: Bool[Tensor, "pos key"]


@dataclass(frozen=True, eq=False)
class GlobalAggregation:
    """Rule (2), global aggregation: each of the queries holds all input positions.

    ``I_t^(l) = {1..T}``. [derived: the formula is restored from Sec. 5.1.]

    Attributes:
        queries: bool [pos], the queries that aggregate.
    """

    queries: Bool[Tensor, " pos"]


@runtime_checkable
class Passing(Protocol):
    """A result that says what heads pass on, as those of PositionsProbe and AttendedProbe do."""

    @property
    def passed(self) -> Sequence[Tensor]:
        """For every layer integers [batch, head, pos] or [batch, head, pos, rank]."""
        ...


Rule: TypeAlias = MaxPosition | SpecificPositions | GlobalAggregation
Layer: TypeAlias = Tensor | Rule | Sequence[Rule]


def _rules(layer: Layer) -> tuple[Rule, ...]:
    """A layer as a tuple of rules; a bare tensor holds attended positions."""
    if isinstance(layer, Tensor):
        return (MaxPosition(layer),)
    if isinstance(layer, (MaxPosition, SpecificPositions, GlobalAggregation)):
        return (layer,)
    return tuple(layer)


def _check_rule(rule: Rule, layer: int, batch: int, n_pos: int) -> None:
    """Refuse a rule that does not fit the sequences.

    Raises:
        InfoFlowError: for wrong shapes, dtypes or positions out of range.
    """
    if isinstance(rule, GlobalAggregation):
        if rule.queries.dtype != torch.bool or rule.queries.shape != (n_pos,):
            raise InfoFlowError(
                f"queries of layer {layer} are {rule.queries.dtype} of shape "
                f"{tuple(rule.queries.shape)}: expected bool [{n_pos}]"
            )
        return
    if isinstance(rule, SpecificPositions):
        if rule.reads.dtype != torch.bool or rule.reads.shape != (n_pos, n_pos):
            raise InfoFlowError(
                f"reads of layer {layer} are {rule.reads.dtype} of shape "
                f"{tuple(rule.reads.shape)}: expected bool [{n_pos}, {n_pos}], queries by keys"
            )
        return
    chosen = rule.positions
    if chosen.ndim not in (3, 4) or chosen.is_floating_point() or chosen.dtype == torch.bool:
        raise InfoFlowError(
            f"positions of layer {layer} are {chosen.dtype} of shape {tuple(chosen.shape)}: "
            "expected integers [batch, head, pos] or [batch, head, pos, rank]"
        )
    if (chosen.shape[0], chosen.shape[2]) != (batch, n_pos):
        raise InfoFlowError(
            f"positions of layer {layer} have batch and pos "
            f"{(chosen.shape[0], chosen.shape[2])}, expected {(batch, n_pos)}: "
            "pass the same sequences through every layer"
        )
    if chosen.numel():
        lowest, highest = torch.aminmax(chosen)
        if lowest < -1 or highest >= n_pos:
            raise InfoFlowError(
                f"positions of layer {layer} lie in [{lowest}, {highest}]: "
                f"expected key positions 0 to {n_pos - 1}, or -1 for none"
            )


def _sizes(layers: Sequence[tuple[Rule, ...]]) -> tuple[int, int, torch.device]:
    """Batch, number of positions and device, from the first rules that tell."""
    batch, n_pos, device = 1, None, torch.device("cpu")
    for rule in (rule for layer in layers for rule in layer):
        if isinstance(rule, MaxPosition) and rule.positions.ndim >= 3:
            return rule.positions.shape[0], rule.positions.shape[2], rule.positions.device
        if isinstance(rule, SpecificPositions):
            n_pos, device = len(rule.reads), rule.reads.device
        elif isinstance(rule, GlobalAggregation):
            n_pos, device = len(rule.queries), rule.queries.device
        elif isinstance(rule, MaxPosition):
            _check_rule(rule, 0, 0, 0)
    if n_pos is None:
        raise InfoFlowError(
            "no layer to propagate through: expected attended positions or rules for each layer"
        )
    return batch, n_pos, device


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


def _update(
    words: Int[Tensor, "row word"], rules: Sequence[Rule], batch: int, n_sources: int
) -> Int[Tensor, "row word"]:
    """One layer on packed sets; the last row is the empty set of "no position"."""
    n_pos = (len(words) - 1) // batch
    united = words.clone()
    before = words[:-1].view(batch, n_pos, -1)
    after = united[:-1].view(batch, n_pos, -1)
    # half the bytes to read for the gather, where they can count the rows
    index_type = torch.int32 if len(words) < 2**31 else torch.int64
    first_row = torch.arange(batch, dtype=index_type, device=words.device)[:, None] * n_pos
    for rule in rules:
        if isinstance(rule, MaxPosition):
            chosen = rule.positions.to(index_type)
            heads = chosen.unsqueeze(-1) if chosen.ndim == 3 else chosen
            rows = torch.where(heads < 0, batch * n_pos, heads + first_row[:, :, None, None])
            rows = rows.permute(1, 3, 0, 2).reshape(-1, batch * n_pos)  # [head * rank, row]
            for index in rows:
                united[:-1] |= words.index_select(0, index)
        elif isinstance(rule, SpecificPositions):
            for key in rule.reads.any(dim=0).nonzero().flatten().tolist():
                readers = rule.reads[:, key].nonzero().flatten()
                after[:, readers] |= before[:, key : key + 1]
        else:
            everything = torch.ones(1, n_sources, dtype=torch.bool, device=words.device)
            after[:, rule.queries] = _pack(everything)
    return united


def update(
    sets: Bool[Tensor, "batch pos source"], rules: Sequence[Rule]
) -> Bool[Tensor, "batch pos source"]:
    """The sets after one layer. All positions read the sets of the layer before."""
    packed = torch.nn.functional.pad(_pack(sets.flatten(0, 1)), (0, 0, 0, 1))
    words = _update(packed, rules, sets.shape[0], sets.shape[2])
    return _unpack(words[:-1], sets.shape[2]).view_as(sets)


def _layers(given: object) -> Sequence[Layer]:
    """The layers of what `propagate` takes.

    Raises:
        InfoFlowError: for what says nothing of what heads pass on.
    """
    if isinstance(given, Passing):
        return given.passed
    if hasattr(given, "rules"):
        raise InfoFlowError(
            f"layers is a {type(given).__name__}, which says by what mechanism heads pass on, not "
            "what: expected result.rules(attended, positions), with results of AttendedProbe and "
            "PositionsProbe on the same inputs"
        )
    if not isinstance(given, (Sequence, Tensor)) or isinstance(given, str):
        raise InfoFlowError(
            f"layers is a {type(given).__name__}: expected the positions or rules of every layer, "
            "or a result of PositionsProbe or AttendedProbe"
        )
    return given  # type: ignore[return-value]


def propagate(layers: Sequence[Layer] | Passing, n_sources: int | None = None) -> InformationSets:
    """Information sets after every layer, from what each head passes on (Sec. 5.1).

    Starting from I_t = {t} for tokens and the empty set for positions beyond the sources (CLS),
    every layer unites a position's own set, which the residual stream keeps, with what its heads
    bring. A layer may mix the three rules, over heads and over positions.

    Args:
        layers: for every layer, integers [batch, head, pos] or [batch, head, pos, rank], the key
            positions that each head retrieves for each query (-1 for none; the number of heads may
            differ between layers), or a :class:`MaxPosition`, :class:`SpecificPositions`,
            :class:`GlobalAggregation`, or several of them. A result of `PositionsProbe` stands for
            its positions of rank 1, one of `AttendedProbe` for all its positions.
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
            _check_rule(rule, layer, batch, n_pos)
    words = _pack(initial_sets(1, n_pos, n_sources, device)[0]).repeat(batch, 1)
    words = torch.nn.functional.pad(words, (0, 0, 0, 1))
    members = torch.empty((len(by_layer), batch, n_pos, n_sources), dtype=torch.bool, device=device)
    for layer, rules in enumerate(by_layer):
        words = _update(words, rules, batch, n_sources)
        members[layer] = _unpack(words[:-1], n_sources).view(batch, n_pos, n_sources)
    return InformationSets(members)
