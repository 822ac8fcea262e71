"""The baseline: interpolated Kneser-Ney n-grams over the same tokens.

Kneser & Ney 1995, interpolated as in Chen & Goodman 1998 (section 4.1.6), with one discount an
order.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge
from jaxtyping import Float, Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import Count, checked
from infoflow_lens.studies.language_model.tokens import END_OF_TEXT_ID

_Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True)
class _Counts:
    """How often grams of one length were seen; a gram is a number in base `vocabulary`.

    Attributes:
        grams, counts: sorted, and their counts, of whatever is counted.
        contexts, totals, types: the grams without their last token, sorted; the sum of their
            counts, and how many tokens follow them.
        discount: what is taken from every count, n1 / (n1 + 2 n2) (Ney et al. 1994).
    """

    grams: _Integers
    counts: _Integers
    contexts: _Integers
    totals: _Integers
    types: _Integers
    discount: float

    @classmethod
    def count(cls, grams: _Integers, vocabulary: int) -> "_Counts":
        unique, counts = np.unique(grams, return_counts=True)
        # grams are sorted, so that those of one context stand together, from `first` on
        contexts, first, types = np.unique(
            unique // vocabulary, return_index=True, return_counts=True
        )
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        # without a gram that was seen once, nothing tells how much the unseen deserve
        discount = once / (once + 2 * twice) if once else 0.5
        return cls(unique, counts, contexts, np.add.reduceat(counts, first), types, discount)

    def interpolate(
        self,
        grams: _Integers,
        vocabulary: int,
        lower: Float[np.ndarray, " token"],  # type: ignore[type-arg, unused-ignore]
    ) -> Float[np.ndarray, " token"]:  # type: ignore[type-arg, unused-ignore]
        """Return the probability of each gram's last token, given `lower`, that of shorter ones."""
        count, _ = _look_up(self.grams, grams, self.counts)
        total, place = _look_up(self.contexts, grams // vocabulary, self.totals)
        # what the discount takes from tokens that were seen goes to shorter grams
        left = self.discount * self.types[place] * lower
        known = np.maximum(count - self.discount, 0) + left
        # of a context that was never seen shorter grams tell all
        return np.where(total > 0, known / np.maximum(total, 1), lower)


class NGram:
    """Interpolated Kneser-Ney models of the orders 1 to `order`, which share their counts."""

    @checked
    def __init__(
        self, stream: Int[Tensor, " pos"], vocabulary: Annotated[int, Ge(2)], order: Count = 5
    ) -> None:
        """Count the grams of a stream of ids below `vocabulary`.

        Raises:
            InfoFlowError: for an empty stream, or more grams than fit into 63 bits.
        """
        self.vocabulary, self.order = vocabulary, order
        if self.vocabulary**self.order > 2**63:
            raise InfoFlowError(
                f"order is {order} with {vocabulary} tokens: expected vocabulary ** order of at "
                "most 2 ** 63; lower the order"
            )
        if not len(stream):
            raise InfoFlowError("stream is empty: expected at least one token")
        grams = {n: self._grams(stream, n) for n in range(1, self.order + 1)}
        self._seen = {n: _Counts.count(found, vocabulary) for n, found in grams.items()}
        # a shorter gram counts by how many different tokens it follows (Kneser-Ney's novelty)
        self._continued = {
            n: _Counts.count(self._seen[n + 1].grams % vocabulary**n, vocabulary)
            for n in range(1, self.order)
        }

    def losses(self, stream: Int[Tensor, " pos"]) -> dict[int, float]:
        """Average, for each order, -log p over all tokens of a stream, in nats a token.

        A token's context is whatever stands before it in the stream; before the first stands
        <|endoftext|>.
        """
        found, shorter = {}, np.full(len(stream), 1 / self.vocabulary)
        for n in range(1, self.order + 1):
            grams = self._grams(stream, n)
            # an order ends in plain counts; longer ones fall back on its continuations
            p = self._seen[n].interpolate(grams, self.vocabulary, shorter)
            found[n] = float(-np.log(p).mean())
            if n < self.order:
                shorter = self._continued[n].interpolate(grams, self.vocabulary, shorter)
        return found

    def _grams(self, stream: Tensor, n: int) -> _Integers:
        """Return the gram that ends at each token."""
        tokens = np.concatenate(
            [np.full(n - 1, END_OF_TEXT_ID, np.int64), stream.numpy().astype(np.int64)]
        )
        grams = np.zeros(len(stream), np.int64)
        for place in range(n):
            # the earliest token is the highest digit
            grams = grams * self.vocabulary + tokens[place : place + len(stream)]
        return grams


def _look_up(keys: _Integers, asked: _Integers, values: _Integers) -> tuple[_Integers, _Integers]:
    """Look up values by sorted keys: the values, 0 for missing keys, and the places of the keys."""
    place = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
    return np.where(keys[place] == asked, values[place], 0), place
