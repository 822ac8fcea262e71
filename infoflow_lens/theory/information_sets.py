"""Information sets and the three rules by which attention layers update them, graded or not.

The information set of a state is the set of input positions whose information it can still give
back (Yu, Jiang, Bao, Li 2026, Sec. 5.1). Predicted and measured sets are the same type, so that
comparing them is one function (`infoflow_lens.agreement.compare`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar, overload, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from infoflow_lens.foundation.display import count, panel
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.saving import Savable
from infoflow_lens.foundation.settings import check
from infoflow_lens.theory.propagation import GradedLayer, Path, check_strengths
from infoflow_lens.theory.rules import (
    Layer,
    PackedSets,
    Rule,
    SpecificPositions,
    Strength,
    pack,
    rules_of,
    unpack,
)


def check_lengths(lengths: Tensor, n_batch: int, n_source: int) -> Int[Tensor, " batch"]:
    """Return the lengths of sequences, as a tensor of integers.

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


SetsT = TypeVar("SetsT", bound="_OfStates")


class _OfStates:
    """What sets share with graded ones: a value for each source of each state.

    Attributes:
        lengths, notes: see :class:`InformationSets`.
    """

    lengths: Any
    notes: tuple[str, ...]
    _name: ClassVar[str]  # of the field [layer, batch, pos, source]
    _more: ClassVar[str]  # what a notebook says below

    @property
    def _values(self) -> Tensor:
        values: Tensor = getattr(self, self._name)
        return values

    @property
    def n_layers(self) -> int:
        """The number of attention layers."""
        return self._values.shape[0]

    @property
    def n_sources(self) -> int:
        """The number of input tokens, T in the paper."""
        return self._values.shape[3]

    def part(
        self: SetsT, layers: Sequence[int] | slice = slice(None), n: int | None = None
    ) -> SetsT:
        """Return the sets of some layers and of the first `n` sequences."""
        chosen = layers if isinstance(layers, slice) else list(layers)
        lengths = None if self.lengths is None else self.lengths[:n]
        some = {self._name: self._values[chosen][:, :n], "lengths": lengths}
        return replace(self, **some)  # type: ignore[type-var]

    def __repr__(self) -> str:
        sizes = map(count, self._values.shape, ("layer", "sequence", "position", "source"))
        return f"{type(self).__name__}({', '.join(sizes)})"

    def _repr_html_(self) -> str:
        facts = dict(zip(("layers", "sequences", "positions", "sources"), self._values.shape))
        return panel(type(self).__name__, facts, self.notes, self._more)


@dataclass(frozen=True, eq=False, repr=False)
class InformationSets(_OfStates, Savable):
    """Sets of input positions, one for every layer, sequence and position.

    Attributes:
        members: bool [layer, batch, pos, source]. Entry [l, b, t, s] says that input token s lies
            in the set of position t after attention layer l of sequence b. Layers count from 0 as
            in TransformerLens, so the paper's I_t^(l) is ``members[l - 1, :, t - 1]``. Positions
            beyond the sources (the CLS token, which reads but is no token) come last.
        lengths: int [batch], the tokens of each sequence, where they differ; None where all are of
            one length, or it is not known. States and sources beyond are not real.
        notes: what a reader must know, in words: those of the result that was propagated.

    Raises:
        InfoFlowError: if `members` is no bool tensor of four axes, or has more sources than
            positions; for lengths that do not fit.
    """

    _name = "members"
    _more = ".of(layer, sequence, position) is one set, .sizes() how large all are"

    members: Bool[Tensor, "layer batch pos source"]
    lengths: Int[Tensor, " batch"] | None = None
    notes: tuple[str, ...] = ()

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

    def of(self, layer: int, sequence: int, position: int) -> set[int]:
        """Return one information set as a Python set of source positions."""
        return set(self.members[layer, sequence, position].nonzero().flatten().tolist())

    def sizes(self) -> Int[Tensor, "layer batch pos"]:
        """Return the sizes |I_t^(l)|, on which the paper's parameter cost depends (Sec. 5.2)."""
        return self.members.sum(dim=-1)


@dataclass(frozen=True, eq=False, repr=False)
class GradedSets(_OfStates, Savable):
    """How strongly each state may hold each input position: information sets with an order.

    In a deep model the information set of a state soon holds every token. Here each token has the
    strength of the best path from it to the state; its sets at rising levels are nested, and that
    at level 0 is the information set.

    Attributes:
        strengths: float [layer, batch, pos, source], from 0, where there is no path, to 1. The
            axes are those of :class:`InformationSets`.
        lengths, notes: as in :class:`InformationSets`.

    Raises:
        InfoFlowError: if `strengths` is no float tensor of four axes from 0 to 1, or has more
            sources than positions; for lengths that do not fit.
    """

    _name = "strengths"
    _more = (
        ".at(level) are the sets of what is stronger, .of(layer, sequence, position) the "
        "strengths of one state"
    )

    strengths: Float[Tensor, "layer batch pos source"]
    lengths: Int[Tensor, " batch"] | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_strengths(self.strengths, "strengths of graded sets")
        if self.strengths.ndim != 4:
            raise InfoFlowError(
                f"strengths of graded sets have shape {tuple(self.strengths.shape)}: expected "
                "[layer, batch, pos, source]; propagate(..., strength=...) makes them"
            )
        self.at()  # which checks the rest

    def at(self, level: float = 0.0) -> InformationSets:
        """Return the sets of the sources whose strength is above a level.

        Raises:
            InfoFlowError: for a level below 0.
        """
        if not level >= 0:
            raise InfoFlowError(f"level is {level}: expected at least 0, from which all is held")
        return InformationSets(self.strengths > level, self.lengths, self.notes)

    def of(self, layer: int, sequence: int, position: int) -> dict[int, float]:
        """Return the strengths of the sources that one state may hold, the strongest first."""
        row = self.strengths[layer, sequence, position]
        order = row.argsort(descending=True, stable=True).tolist()
        return {source: float(row[source]) for source in order if row[source] > 0}


@runtime_checkable
class MovesKeys(Protocol):
    """A result that says which keys heads move, as those of PositionsProbe and AttendedProbe do."""

    @property
    def moved_keys(self) -> Sequence[Tensor]:
        """The keys of every layer: integers [batch, head, pos] or [batch, head, pos, rank]."""
        ...


def _sizes(
    layers: Sequence[tuple[Rule, ...]], strength: Sequence[Strength]
) -> tuple[int, int, torch.device]:
    """Return the batch, the number of positions and the device, by the first rule that knows them.

    Where none does, strengths of each sequence tell it.
    """
    found = [(*rule.sizes, rule.device) for layer in layers for rule in layer]
    if not found:
        raise InfoFlowError(
            "no layer to propagate through: expected attended positions or rules for each layer"
        )
    batch, n_pos, device = next((f for f in found if f[0] is not None), found[-1])
    if batch is None:
        # one tensor is of a layer with one rule, several are in a sequence
        each = [s for one in strength for s in ((one,) if isinstance(one, Tensor) else one or ())]
        batch = next((len(s) for s in each if isinstance(s, Tensor) and s.ndim > 2), 1)
    return batch, n_pos, device


def initial_sets(
    batch: int, n_pos: int, n_sources: int, device: torch.device | None = None
) -> Bool[Tensor, "batch pos source"]:
    """Make I_t^(0): {t} for tokens [stated], empty for CLS after them [derived, App. E]."""
    sets = torch.zeros(batch, n_pos, n_sources, dtype=torch.bool, device=device)
    tokens = torch.arange(n_sources, device=device)
    sets[:, tokens, tokens] = True
    return sets


def _apply_rules(
    words: Int[Tensor, "row word"], rules: Sequence[Rule], batch: int, n_sources: int
) -> Int[Tensor, "row word"]:
    """Move packed sets through one layer; the last row is the empty set of "no position"."""
    sets = PackedSets(words, words.clone(), batch, n_sources)
    for rule in rules:
        rule.apply(sets)
    return sets.after


def update(
    sets: Bool[Tensor, "batch pos source"], rules: Sequence[Rule]
) -> Bool[Tensor, "batch pos source"]:
    """Return the sets after one layer. All positions read the sets of the layer before."""
    packed = torch.nn.functional.pad(pack(sets.flatten(0, 1)), (0, 0, 0, 1))
    words = _apply_rules(packed, rules, sets.shape[0], sets.shape[2])
    return unpack(words[:-1], sets.shape[2]).view_as(sets)


def _layers(given: object) -> Sequence[Layer]:
    """Return the layers of what `propagate` takes.

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


@overload
def propagate(
    layers: Sequence[Layer] | MovesKeys, n_sources: int | None = None
) -> InformationSets: ...


@overload
def propagate(
    layers: Sequence[Layer] | MovesKeys | None = None,
    n_sources: int | None = None,
    *,
    strength: Sequence[Strength],
    path: Path = "product",
) -> GradedSets: ...


def propagate(
    layers: Sequence[Layer] | MovesKeys | None = None,
    n_sources: int | None = None,
    *,
    strength: Sequence[Strength] | None = None,
    path: Path = "product",
) -> InformationSets | GradedSets:
    """Return the information sets after every layer, from the keys that each head moves (Sec. 5.1).

    Starting from I_t = {t} for tokens and the empty set for positions beyond the sources (CLS),
    every layer unites a position's own set, which the residual stream keeps, with what its heads
    bring. A layer may mix the three rules, over heads and over positions.

    With `strength` the sets are graded: each edge from a key to a query has a strength from 0 to 1,
    the residual stream has 1, and a state holds a source as strongly as the best path from it
    allows [chosen; not in the paper]. At level 0 they are the sets without strengths, but for edges
    of strength 0, which are none.

    Args:
        layers: for every layer, integers [batch, head, pos] or [batch, head, pos, rank], the key
            positions that each head retrieves for each query (-1 for none; the number of heads may
            differ between layers), or a :class:`MaxPosition`, :class:`SpecificPositions`,
            :class:`GlobalAggregation`, or several of them. A result of `PositionsProbe` stands for
            its positions of rank 1, one of `AttendedProbe` for all its positions; the sets have its
            notes, and the lengths of its sequences, if it knows them. None, with strengths, for all
            keys.
        n_sources: T, the number of input tokens; default, the number of positions. Positions from
            n_sources on are CLS-like and start empty.
        strength: for every layer, floats from 0 to 1: of the shape of its positions; for
            `SpecificPositions` [pos, key] or [batch, pos, key]; for `GlobalAggregation` the same
            with sources in the place of keys, as it brings input positions themselves; for several
            rules a sequence with one for each. None stands for strengths of 1. Without `layers`,
            [batch, head, query, key] or [batch, query, key], such as attention weights.
        path: a path has the "product" of the strengths of its edges, or that of the "weakest".

    Returns:
        Sets of shape [layer, batch, pos, source]; graded ones with strengths.

    Raises:
        InfoFlowError: for an empty list, shapes that differ between layers, positions out of
            range, or strengths that do not fit.

    Example (App. E of the paper, T = 4 and CLS, counted from 0):
        >>> layer_1 = torch.tensor([[[2, 2, 1, 1, -1]]])  # CLS is not followed in layer 1
        >>> layer_2 = torch.tensor([[[-1, -1, -1, -1, 1]]])
        >>> sets = propagate([layer_1, layer_2], n_sources=4)
        >>> [sets.of(0, 0, t) for t in range(4)]
        [{0, 2}, {1, 2}, {1, 2}, {1, 3}]
        >>> sets.of(1, 0, 4)  # CLS holds the active index set of the target
        {1, 2}
        >>> half = torch.full((1, 1, 5), 0.5)
        >>> propagate([layer_1, layer_2], n_sources=4, strength=[half, half]).of(1, 0, 4)
        {1: 0.5, 2: 0.25}
    """
    if layers is None:
        layers, strength = _all_edges(strength)
    by_layer = [rules_of(layer) for layer in _layers(layers)]
    batch, n_pos, device = _sizes(by_layer, strength or ())
    n_sources = n_pos if n_sources is None else n_sources
    if not 1 <= n_sources <= n_pos:
        raise InfoFlowError(
            f"n_sources is {n_sources}: expected 1 to {n_pos}, the number of query positions"
        )
    for layer, rules in enumerate(by_layer):
        for rule in rules:
            rule.check(layer, batch, n_pos)
    # a result counts the positions of a sequence, CLS among them
    lengths, notes = getattr(layers, "lengths", None), tuple(getattr(layers, "notes", ()))
    if lengths is not None:
        lengths = lengths - (n_pos - n_sources)
    if strength is not None:
        given = _strengths(strength, by_layer, (batch, n_pos, n_sources))
        path = check(path, Path, "path")
        strengths = _grade(by_layer, given, path, batch, n_pos, n_sources, device)
        return GradedSets(strengths, lengths, notes)
    words = pack(initial_sets(1, n_pos, n_sources, device)[0]).repeat(batch, 1)
    # one more row, the empty set that "no position" brings
    words = torch.nn.functional.pad(words, (0, 0, 0, 1))
    members = torch.empty((len(by_layer), batch, n_pos, n_sources), dtype=torch.bool, device=device)
    for layer, rules in enumerate(by_layer):
        words = _apply_rules(words, rules, batch, n_sources)
        members[layer] = unpack(words[:-1], n_sources).view(batch, n_pos, n_sources)
    return InformationSets(members, lengths, notes)


def _all_edges(
    strength: Sequence[Strength] | None,
) -> tuple[Sequence[Layer], Sequence[Strength]]:
    """Return rules that read every key, and the strength of each edge, that of its strongest head.

    Raises:
        InfoFlowError: without strengths, or for those of other shapes.
    """
    layers: list[Layer] = []
    edges: list[Strength] = []
    # all keys are read, each as strongly as by the head that reads it most
    for layer, given in enumerate(() if strength is None else strength):
        if (
            not isinstance(given, Tensor)
            or given.ndim not in (3, 4)
            or given.shape[-1] != given.shape[-2]
        ):
            shape = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise InfoFlowError(
                f"strength of layer {layer} is {shape}: expected [batch, head, query, key] or "
                "[batch, query, key] where no positions are given"
            )
        if not given.shape[1]:
            raise InfoFlowError(
                f"strength of layer {layer} is of no heads: expected attention in every layer, as "
                "something else moves information there"
            )
        strongest = given.amax(dim=1) if given.ndim == 4 else given
        layers.append(SpecificPositions(torch.ones_like(strongest[0], dtype=torch.bool)))
        edges.append(strongest)
    if not layers:
        raise InfoFlowError(
            "no layer to propagate through: expected attended positions or rules for each layer, "
            "or the strengths of all edges, as in propagate(strength=patterns)"
        )
    return layers, edges


def _strengths(
    strength: Sequence[Strength], by_layer: Sequence[tuple[Rule, ...]], sizes: tuple[int, int, int]
) -> list[list[Tensor | None]]:
    """Return the strengths of each rule of each layer, checked."""
    if len(strength) != len(by_layer):
        raise InfoFlowError(
            f"there are strengths of {len(strength)} layers, and {len(by_layer)} layers: expected "
            "one for each; None where all edges have a strength of 1"
        )
    found = []
    # one tensor is the strengths of a layer's only rule
    for layer, (rules, given) in enumerate(zip(by_layer, strength, strict=True)):
        each: Sequence[Tensor | None] = (given,) if isinstance(given, Tensor) else given or ()
        each = [None] * len(rules) if given is None else each
        if len(each) != len(rules):
            raise InfoFlowError(
                f"layer {layer} has {len(rules)} rules and strengths of {len(each)}: expected a "
                "strength for each rule; None where its edges have a strength of 1"
            )
        for rule, one in zip(rules, each, strict=True):
            if one is None:
                continue
            check_strengths(one, f"strengths of layer {layer}")
            if tuple(one.shape) not in rule.shapes(*sizes):
                shapes = " or ".join(str(shape) for shape in rule.shapes(*sizes))
                raise InfoFlowError(
                    f"strengths of layer {layer} have shape {tuple(one.shape)}: expected {shapes}, "
                    f"one for each edge that {type(rule).__name__} names"
                )
        found.append(list(each))
    return found


def _grade(
    by_layer: Sequence[tuple[Rule, ...]],
    strength: Sequence[Sequence[Tensor | None]],
    path: Path,
    batch: int,
    n_pos: int,
    n_sources: int,
    device: torch.device,
) -> Float[Tensor, "layer batch pos source"]:
    """Return how strongly each state holds each source."""
    double = any(
        one is not None and one.dtype == torch.float64 for each in strength for one in each
    )
    dtype = torch.float64 if double else torch.float32
    held = initial_sets(batch, n_pos, n_sources, device).to(dtype)
    found = held.new_empty((len(by_layer), *held.shape))
    for layer, (rules, each) in enumerate(zip(by_layer, strength, strict=True)):
        found[layer] = held
        # the residual stream keeps what was held; the rules raise that in place
        sets = GradedLayer(held, found[layer], path)
        for rule, one in zip(rules, each, strict=True):
            rule.grade(sets, one)
        held = found[layer]
    return found
