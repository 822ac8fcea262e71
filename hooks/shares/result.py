"""Shares of what is read of a model, as a result."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from infoflow_lens.foundation.display import panel
from infoflow_lens.foundation.lazy import pd
from infoflow_lens.hooks.arrays import LabelledArray
from infoflow_lens.hooks.result import Result

_SMALL = 1e-3  # of the size of all shares, below which what is left over is not said [chosen]
_SHOWN = 12  # rows in a notebook


@dataclass(frozen=True, eq=False, kw_only=True)
class Shares(Result):
    """Who wrote what is read of a model, in one input.

    While the statistics of norms are held, what is read is a sum over all that wrote the residual
    stream: its derivative by what was written, times that. These are direct shares: a head's share
    is of what it writes itself, not of what later heads and MLPs make of it.

    Attributes:
        values: float64 [writer, pos], the share of what each writer wrote at each position.
        by_key: float64 [head, key], the shares of heads by the position from which they took it:
            weight times value; those of a head add up to its share where z is the weighted values.
        constants: what biases make.
        value: what is read.
        writers: their names: "token embedding", "positional embedding", "head 0.3", "MLP 0".
        heads: the names of the heads.
        readout: what is asked, in words.
        is_linear: whether it is linear in the stream while norms are held; if not, shares are those
            of its linear part and need not add up.
        tokens: of the input, as one reads them.
    """

    small: ClassVar[bool] = True

    values: Float[Tensor, "writer pos"]
    by_key: Float[Tensor, "head key"]
    constants: float
    value: float
    writers: tuple[str, ...]
    heads: tuple[str, ...]
    readout: str
    is_linear: bool
    tokens: tuple[str, ...]

    @property
    def distance(self) -> float:
        """The readout minus the sum of all shares and constants: 0 but for rounding where sums and
        norms alone stand behind what is written; else what a soft cap, an activation before the
        logits or a part that is not shown does.
        """
        return self.value - self.constants - float(self.values.sum())

    def by_writer(self) -> LabelledArray:
        """Sum the shares of each writer over all positions, [writer]."""
        return LabelledArray("share", self.values.sum(-1), ("writer",), {"writer": self.writers})

    def table(self) -> "pd.DataFrame":
        """Return a row for each writer, the largest first, and what it takes most from (heads)."""
        shares = self.values.sum(-1)
        order = shares.abs().argsort(descending=True, stable=True).tolist()
        places = {name: place for place, name in enumerate(self.heads)}
        rows = []
        for i in order:
            name = self.writers[i]
            row = {"writer": name, "share": float(shares[i]), "from": "", "of it": torch.nan}
            of_keys = self.by_key[places[name]] if name in places else None
            # of heads whose values are not shown, no key is known
            if of_keys is not None and not of_keys.isnan().any():
                key = int(of_keys.abs().argmax())
                row |= {"from": f"{self.tokens[key]} ({key})", "of it": float(of_keys[key])}
            rows.append(row)
        return pd.DataFrame(rows)

    def summary(self) -> str:
        """Say in a sentence who wrote most of it, and whether the shares add up."""
        rows = self.table()
        said = [f"{row.writer} {row.share:+.3g}" for row in rows.head(4).itertuples()]
        sentence = f"{self.readout} is {self.value:.4g}: {', '.join(said)}"
        if not self.is_linear:
            return f"{sentence}; it is not linear, so these shares of its linear part do not add up"
        if abs(self.distance) > _SMALL * float(self.values.abs().sum()):
            sentence += (
                f"; {self.distance:+.3g} is no share: more than sums and norms stands behind what "
                "is written, such as a soft cap, an activation before the logits, or a part that "
                "is not shown, and shares go through it"
            )
        return sentence

    def _repr_html_(self) -> str:
        facts = {"": self.summary(), "value": self.value, "constants": self.constants}
        more = "more: .table(), .to_frame(), .plot(), .save(path)"
        return panel(type(self).__name__, facts, self.notes, more, self.table().head(_SHOWN))

    def _coords(self) -> dict[str, tuple[str, ...]]:
        return {"writer": self.writers, "head": self.heads}
