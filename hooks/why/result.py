"""Why a head prefers one key to another, as results."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infoflow_lens.foundation.display import panel, quote
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import mpl, pd
from infoflow_lens.hooks.result import LabelledArray, Result

STRONGEST = 6  # key parts of each line that :class:`WhyAll` names, unless more are asked for
_SMALL = 1e-3  # of the size of the pieces, below which what is left over is not said [chosen]
_SHOWN = 12  # parts in a picture; the others are summed


@dataclass(frozen=True, eq=False, kw_only=True)
class Why(Result):
    """Why a head prefers one key to another, in one input.

    The margin is the first key's score minus the second's, before the softmax. While the statistics
    of norms are held, a query and a key are linear in their states, a score is linear in either,
    and each state is a sum of what wrote it. So the margin is the sum of the pieces: of what a part
    of the query makes of the same part of both keys, at the first key minus at the second.

    Attributes:
        pieces: float64 [query_part, key_part].
        query_parts: names of the parts of the query: "token embedding", "positional embedding",
            "head 0.3" (layer 0, head 3), "MLP 0", and "constants", what biases of norms and
            projections make; "embedding" where tokens and positions are not told apart.
        key_parts: of the keys.
        margin: the difference of the two scores that the model shows.
        added: what the model adds to it whatever the states are, such as ALiBi.
        layer, head, query: whose scores these are; the query is a position from 0.
        keys: positions of the first and the second key.
        sinks: positions that most queries of the head choose first, and that are no second key
            unless they were asked for.
        tokens: of the query, the first and the second key, as one reads them.
    """

    small: ClassVar[bool] = True

    pieces: Float[Tensor, "query_part key_part"]
    query_parts: tuple[str, ...]
    key_parts: tuple[str, ...]
    margin: float
    layer: int
    head: int
    query: int
    keys: tuple[int, int]
    tokens: tuple[str, str, str]
    added: float = 0.0
    sinks: tuple[int, ...] = ()

    @property
    def distance(self) -> float:
        """The margin minus the pieces and what is added to scores.

        It is 0 up to rounding where scores are sums of products. Otherwise it is what the model
        does with these sums (a soft cap, say), or the effect of parts of earlier layers that the
        model does not show.
        """
        return self.margin - self.added - float(self.pieces.sum())

    def by_key(self) -> LabelledArray:
        """Return what each part of the keys adds to the margin: why this key, [key_part]."""
        return self._sum_pieces("by_key", 0, "key_part", self.key_parts)

    def by_query(self) -> LabelledArray:
        """Return the same for each part of the query, what the head looks for, [query_part]."""
        return self._sum_pieces("by_query", 1, "query_part", self.query_parts)

    def _sum_pieces(self, name: str, axis: int, dim: str, names: tuple[str, ...]) -> LabelledArray:
        return LabelledArray(name, self.pieces.sum(dim=axis), (dim,), {dim: names})

    def table(self, by: str = "key") -> "pd.DataFrame":
        """Return a row for each part, the largest first: its name, value, and share of the margin.

        Shares add up to 1 where the margin is all of parts: see `added` and `distance`.

        Args:
            by: "key" or "query".

        Raises:
            InfoFlowError: for anything else.
        """
        if by not in ("key", "query"):
            raise InfoFlowError(f"by is {by!r}: expected 'key' or 'query'")
        found = self.by_key() if by == "key" else self.by_query()
        values = found.values
        assert isinstance(values, Tensor)
        order = values.abs().argsort(descending=True, stable=True)
        # not of the sum of the parts, which ALiBi or a soft cap makes another number
        share = values / (self.margin or torch.nan)
        columns = {
            "part": [found.places(f"{by}_part")[i] for i in order.tolist()],
            "value": values[order].numpy(),
            "share": share[order].numpy(),
        }
        return pd.DataFrame(columns)

    def summary(self) -> str:
        """Say in a sentence what is preferred to what, and what speaks most for and against it."""
        query, one, other = map(quote, self.tokens)
        parts = self.table().set_index("part")["value"]
        # keys may be given in the order in which the head does not prefer them
        is_preferred = self.margin >= 0
        goal = "it" if is_preferred else one
        said = [f"none speaks for {goal}"]
        if parts.max() > 0:
            said = [f"{parts.idxmax()} speaks most for {goal} ({parts.max():+.3g})"]
        if parts.min() < 0:
            said.append(f"{parts.idxmin()} most against it ({parts.min():+.3g})")
        sentence = (
            f"head {self.layer}.{self.head} at {query} ({self.query}) "
            f"{'prefers' if is_preferred else 'scores'} {one} ({self.keys[0]}) "
            f"{'to' if is_preferred else 'below'} {other} ({self.keys[1]}) by "
            f"{abs(self.margin):.3g} in attention score: of the parts of the keys {', '.join(said)}"
        )
        left = [sink for sink in self.sinks if sink not in self.keys]
        if left:
            places = ", ".join(map(str, left))
            sentence += f"; position {places}, to which most of its queries look, is left out"
        if abs(self.added) > _SMALL * abs(self.margin):
            sentence += f"; the model itself adds {self.added:+.3g}, whatever the states are"
        if abs(self.distance) > _SMALL * float(self.pieces.abs().sum()):
            sentence += (
                f"; {self.distance:+.3g} is left over, which is no sum of products of these parts: "
                "a soft cap, or a part of an earlier layer that is not shown"
            )
        return sentence

    def plot(self, *args: Any, **where: Any) -> "mpl.Figure":
        """Return a heat map of the pieces: the strongest parts, and the sum of the others.

        Arguments are those of :meth:`array`; with any the array is shown as it is.
        """
        if args or where:
            return super().plot(*args, **where)
        rows, query_parts = _strongest(self.pieces, self.query_parts)
        columns, key_parts = _strongest(rows.T, self.key_parts)
        coords = {"query_part": query_parts, "key_part": key_parts}
        grouped = LabelledArray("pieces", columns.T, ("query_part", "key_part"), coords)
        figure = grouped.plot(self.summary())
        for axes in figure.axes[:1]:
            axes.tick_params(axis="x", rotation=90)
        return figure

    def _repr_html_(self) -> str:
        facts = {"": self.summary(), "margin": self.margin}
        more = "more: .table(), .table('query'), .to_frame(), .plot(), .save(path)"
        return panel(type(self).__name__, facts, self.notes, more, self.table().head(_SHOWN))


def _strongest(
    values: Float[Tensor, "part other"], names: tuple[str, ...]
) -> tuple[Tensor, tuple[str, ...]]:
    """Return the strongest rows in their order, and the sum of the others."""
    if len(names) <= _SHOWN:
        return values, names
    kept = values.abs().sum(dim=1).topk(_SHOWN).indices.sort().values
    left = torch.ones(len(names), dtype=torch.bool)
    left[kept] = False
    rows = torch.cat([values[kept], values[left].sum(dim=0, keepdim=True)])
    return rows, (*(names[i] for i in kept.tolist()), "the others")


@dataclass(frozen=True, eq=False, kw_only=True)
class WhyAll(Result):
    """For every head and query, why the first key is preferred to the second: the strongest parts.

    All are tuples with a tensor for each layer, since layers differ in heads. Queries that see
    fewer than two keys, and positions that a shorter input lacks, have -1 and NaN.

    Attributes:
        keys: int64 [sample, head, query, 2], positions of the key with the largest score and of the
            next one that is no sink; -1 for none.
        margins: float64 [sample, head, query], the difference of their scores; NaN for none.
        parts: int64 [sample, head, query, strongest], the parts of the keys that add most to the
            margin or take most from it, the largest size first, as places in `part_names`; -1 for
            none. There are 6 unless `strongest` says otherwise.
        values: float64 [sample, head, query, strongest], what these add (see :meth:`Why.by_key`);
            0 for none.
        rest: float64 [sample, head, query], what all other parts add together, and what is no sum
            of products of parts (ALiBi, a soft cap); with `values` they sum to the margin. NaN for
            none.
        part_names: names of the parts of all layers, as in :class:`Why`.
    """

    keys: tuple[Int[Tensor, "sample _head query rank"], ...]
    margins: tuple[Float[Tensor, "sample _head query"], ...]
    parts: tuple[Int[Tensor, "sample _head query strongest"], ...]
    values: tuple[Float[Tensor, "sample _head query strongest"], ...]
    rest: tuple[Float[Tensor, "sample _head query"], ...]
    part_names: tuple[str, ...]

    def of(self, layer: int, head: int, query: int, sample: int = 0) -> dict[str, Any] | None:
        """Return one line as plain values; None where the query sees fewer than two keys.

        Returns:
            "keys" (two positions), "margin", "parts" (pairs of a name and a value, the strongest
            first) and "rest".
        """
        place = (sample, head, query)
        keys = self.keys[layer][place].tolist()
        if min(keys) < 0:
            return None
        numbers, values = self.parts[layer][place].tolist(), self.values[layer][place].tolist()
        pairs = zip(numbers, values, strict=True)
        return {
            "keys": keys,
            "margin": float(self.margins[layer][place]),
            "parts": [(self.part_names[i], value) for i, value in pairs if i >= 0],
            "rest": float(self.rest[layer][place]),
        }
