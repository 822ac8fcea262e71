"""Rows that are kept until there are enough of them for one matrix product."""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infoflow_lens.hooks.recovery.statistics import RegressionStatistics


@dataclass
class Rows:
    """Rows of whole sequences, with the values that they chose among.

    Attributes:
        features: [row, feature].
        chosen: indices of values.
        values: [value, target]; or int [value], classes of one-hot targets.
        ends: after each sequence, the number of rows so far.
    """

    features: Float[Tensor, "row feature"]
    chosen: Int[Tensor, "row group"]
    values: Tensor
    ends: list[int]


@dataclass
class RowBuffer:
    """Regression statistics, with rows that wait until there are about `capacity` of them.

    The sums are large, so each addition is expensive. Rows are added in whole sequences as soon as
    these have `capacity` rows together. So the result does not depend on the size of the batches.

    Attributes:
        capacity: rows.
        n_classes: of one-hot targets; 0 for others.
    """

    made_of: ClassVar[dict[str, type]] = {"statistics": RegressionStatistics, "waiting": Rows}

    capacity: int
    n_classes: int = 0
    statistics: RegressionStatistics = field(default_factory=RegressionStatistics)
    waiting: list[Rows] = field(default_factory=list)

    @property
    def n(self) -> int:
        """The number of rows, those that wait included."""
        return self.statistics.n + sum(len(rows.features) for rows in self.waiting)

    def append(self, rows: Rows) -> None:
        """Let rows wait."""
        if len(rows.features):
            self.waiting.append(rows)

    def settle(self, everything: bool = False) -> None:
        """Add waiting rows to the statistics. If memory runs out, they go on waiting."""
        if not everything and sum(rows.ends[-1] for rows in self.waiting) < self.capacity:
            return  # as after most passes
        # cut where a sequence ends, so that the same rows come together whatever the batches
        while self.waiting:
            taken, count = [], 0
            for rows in self.waiting:
                enough = next((end for end in rows.ends if count + end >= self.capacity), None)
                if enough is not None:
                    taken.append((rows, enough))
                    count += enough
                    break
                taken.append((rows, len(rows.features)))
                count += len(rows.features)
            if count < self.capacity and not everything:
                return
            self._take_in(taken)
            last, used = taken[-1]
            rest = [_after(last, used)] if used < len(last.features) else []
            self.waiting = rest + self.waiting[len(taken) :]

    def _take_in(self, taken: list[tuple[Rows, int]]) -> None:
        features = torch.cat([rows.features[:n] for rows, n in taken])
        # values of all parts stand one behind the other, and chosen places move along with them
        first = [0, *accumulate(len(rows.values) for rows, _ in taken)]
        chosen = torch.cat(
            [rows.chosen[:n] + start for (rows, n), start in zip(taken, first, strict=False)]
        )
        values = torch.cat([rows.values for rows, _ in taken])
        if self.n_classes:
            self.statistics.update_classes(features, values, chosen, self.n_classes)
        else:
            self.statistics.update_chosen(features, values, chosen)

    def merge(self, other: "RowBuffer") -> None:
        """Add the rows of another buffer; those that wait are added when they are enough."""
        self.settle()
        self.statistics.merge(other.statistics)
        self.waiting = [*self.waiting, *other.waiting]


def _after(rows: Rows, used: int) -> Rows:
    ends = [end - used for end in rows.ends if end > used]
    return Rows(rows.features[used:], rows.chosen[used:], rows.values, ends)
