"""A score for every source and state: the result, and what the probes that give one share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.checks import check_integers
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.hooks.passes.view import padded_together
from infoflow_lens.hooks.probe import Probe
from infoflow_lens.hooks.result import Result

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


@dataclass(frozen=True, eq=False, kw_only=True)
class StateScores(Result):
    """A score of every source for every state, [layer, batch, pos, source].

    Attributes:
        column: the name of the attribute that holds the scores.
        layers: the layers, in the order of the first axis.
        positions: int [batch, pos], the position of each of these states in its own sequence; -1
            where the sequence has none.
        lengths: int [batch], the number of sources of each sequence.
        n_positions: positions of the longest sequence: as many as sources, and CLS if there is one.
    """

    column: ClassVar[str]

    layers: tuple[int, ...]
    positions: Int[Tensor, "batch pos"]
    lengths: Int[Tensor, " batch"]
    n_positions: int

    @property
    def values(self) -> Float[Tensor, "layer batch pos source"]:
        """The scores, under whatever name."""
        values: Tensor = getattr(self, self.column)
        return values

    @property
    def asked(self) -> Bool[Tensor, "batch position"]:
        """Which states of all positions have scores."""
        asked = torch.zeros(len(self.positions), self.n_positions, dtype=torch.bool)
        sequence, row = (self.positions >= 0).nonzero(as_tuple=True)
        asked[sequence, self.positions[sequence, row]] = True
        return asked

    def full(self) -> Float[Tensor, "layer batch position source"]:
        """The scores of every position, 0 where a position was not asked for."""
        return self.scattered(self.values)

    def scattered(
        self,
        values: Float[Tensor, "layer batch pos source"] | Bool[Tensor, "layer batch pos source"],
    ) -> Tensor:
        """Values of the asked states at their positions, 0 elsewhere."""
        everything = torch.arange(self.n_positions)
        exists = self.positions >= 0
        if self.positions.shape[1] == self.n_positions and bool(
            ((self.positions == everything) | ~exists).all()
        ):
            return values
        n_layers, _, _, n_source = values.shape
        full = values.new_zeros(n_layers, len(self.positions), self.n_positions, n_source)
        sequence, row = exists.nonzero(as_tuple=True)
        full[:, sequence, self.positions[sequence, row]] = values[:, sequence, row]
        return full

    def to_frame(self) -> "pd.DataFrame":
        """One row for each layer, sample, position and source that exist."""
        import pandas as pd

        exists = existing(self.positions, self.lengths, self.values.shape[3])
        layer, sample, row, source = exists.expand_as(self.values).nonzero(
            as_tuple=True
        )  # in the order of the axes
        return pd.DataFrame(
            {
                "layer": torch.tensor(self.layers)[layer].numpy(),
                "sample": sample.numpy(),
                "position": self.positions[sample, row].numpy(),
                "source": source.numpy(),
                self.column: self.values[layer, sample, row, source].numpy(),
            }
        )

    def plot(self, sample: int = 0) -> "go.Figure":
        """Heat maps of one sequence, a panel for each layer."""
        import plotly.express as px

        n_source = int(self.lengths[sample])
        rows = self.positions[sample] >= 0
        figure = px.imshow(
            self.values[:, sample, rows, :n_source].numpy(),
            facet_col=0,
            y=[str(position) for position in self.positions[sample, rows].tolist()],
            labels={"x": "source", "y": "position", "color": self.column, "facet_col": "layer"},
            title=f"{self.record.config.get('probe', self.column)}, sequence {sample}",
        )
        for panel, layer in zip(figure.layout.annotations, self.layers, strict=False):
            panel.text = f"layer {layer}"
        return figure


ScoresT = TypeVar("ScoresT", bound=StateScores)


class StateScoresProbe(Probe[ScoresT]):
    """The base of probes that give every source a score for every state, or for chosen ones.

    What it keeps grows with the sequences, since every one has its own scores.

    Args:
        positions: whose states; default all. Negative ones count from the end of each sequence, so
            (-1,) is the last token, or CLS.
    """

    def __init__(self, positions: Sequence[int] | None = None) -> None:
        super().__init__()
        self.positions = unless_none(partial(check_integers, least=None), positions, "positions")
        self._batches: list[dict[str, Tensor]] = []
        self._layers: tuple[int, ...] = ()
        self._n_positions = 0

    def config(self) -> Mapping[str, Any]:
        """The settings, as JSON-compatible values."""
        return {"positions": None if self.positions is None else list(self.positions)}

    def check_positions(self, model: nn.Module) -> None:
        """Refuse positions that no sequence of this model has.

        Raises:
            InfoFlowError: with the number of positions that there are.
        """
        n_ctx = getattr(getattr(model, "cfg", None), "n_ctx", None)
        if n_ctx and self.positions and not all(-n_ctx <= p < n_ctx for p in self.positions):
            raise InfoFlowError(
                f"positions are {list(self.positions)}: the model has at most {n_ctx} positions; "
                "count from 0, or from -1 backwards"
            )

    def place(self, n_states: Int[Tensor, " batch"], n_pos: int) -> Int[Tensor, "batch asked"]:
        """The positions of the asked states in each sequence; -1 where it has none."""
        asked = torch.arange(n_pos) if self.positions is None else torch.tensor(self.positions)
        ends = n_states[:, None]
        place = torch.where(asked < 0, ends + asked, asked)
        return torch.where((place >= 0) & (place < ends), place, -1)

    def keep(
        self,
        scores: Float[Tensor, "layer batch asked source"],
        place: Int[Tensor, "batch asked"],
        lengths: Int[Tensor, " batch"],
        layers: Sequence[int],
        n_pos: int,
    ) -> None:
        """Take in the scores of a pass."""
        batch = {"scores": scores.transpose(0, 1), "places": place, "lengths": lengths}
        self._batches.append(batch)
        self._layers = tuple(layers)
        self._n_positions = max(self._n_positions, n_pos)

    def add(self, other: "StateScoresProbe[ScoresT]") -> None:
        """Append the sequences of another probe."""
        self._layers = other._layers
        self._batches = [*self._batches, *other._batches]
        self._n_positions = max(self._n_positions, other._n_positions)

    def snapshot(self) -> dict[str, Any]:
        """All batches."""
        return {
            "batches": self._batches,
            "layers": list(self._layers),
            "n_positions": self._n_positions,
        }

    def restore(self, measured: Mapping[str, Any]) -> None:
        """Take over the batches."""
        self._batches, self._layers = measured["batches"], tuple(measured["layers"])
        self._n_positions = measured["n_positions"]

    def scores(self) -> Float[Tensor, "layer batch pos source"]:
        """Those of all batches together."""
        parts = [batch["scores"] for batch in self._batches]
        return padded_together(parts, (2, 3), 0).transpose(0, 1).contiguous()

    def about(self) -> dict[str, Any]:
        """What a result says of its scores."""
        return {
            "layers": self._layers,
            "positions": padded_together([batch["places"] for batch in self._batches], (1,), -1),
            "lengths": torch.cat([batch["lengths"] for batch in self._batches]),
            "n_positions": self._n_positions,
            "record": self.run_record(),
            "notes": self.notes(),
        }

    def notes(self) -> tuple[str, ...]:
        """What a reader of the result must know."""
        notes = super().notes()
        if self.positions is None or not self._batches:
            return notes
        places = torch.cat([batch["places"] for batch in self._batches])
        lacking = (places < 0).sum(dim=0).tolist()
        return notes + tuple(
            f"{count} of {self.n_sequences} sequences have no position {position}"
            for position, count in zip(self.positions, lacking, strict=True)
            if count
        )


def existing(
    place: Int[Tensor, "batch asked"], lengths: Int[Tensor, " batch"], n_source: int
) -> Bool[Tensor, "batch asked source"]:
    """Which states and sources a sequence has."""
    is_source = torch.arange(n_source) < lengths[:, None]
    return (place >= 0)[:, :, None] & is_source[:, None]


def unless_none(check: Callable[..., Any], value: Any, name: str) -> Any:
    """What a check gives for a value, None for None."""
    return None if value is None else check(value, name)
