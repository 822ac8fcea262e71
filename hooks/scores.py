"""A score for every source and state: the result, and what the probes that give one share."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, ClassVar, TypeVar, cast

import torch
from annotated_types import MinLen
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError, refuse_names
from infoflow_lens.foundation.lazy import mpl, pd
from infoflow_lens.foundation.settings import Distinct
from infoflow_lens.hooks.model.points import config_value, position_count
from infoflow_lens.hooks.probe import Probe
from infoflow_lens.hooks.result import LabelledArray, Result, frame_of
from infoflow_lens.hooks.states import combined, concatenated, latest

Asked = Annotated[tuple[int, ...], MinLen(1), Distinct()]  # positions; negative ones from the end


@refuse_names(scattered="scatter", asked="has_scores")
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
        return cast(Tensor, getattr(self, self.column))

    @property
    def has_scores(self) -> Bool[Tensor, "batch position"]:
        """The mask of all positions whose states have scores."""
        has_scores = torch.zeros(len(self.positions), self.n_positions, dtype=torch.bool)
        sequence, row = (self.positions >= 0).nonzero(as_tuple=True)
        has_scores[sequence, self.positions[sequence, row]] = True
        return has_scores

    def full(self) -> Float[Tensor, "layer batch position source"]:
        """Return the scores of every position, 0 where a position was not asked for."""
        return self.scatter(self.values)

    def scatter(
        self,
        values: Float[Tensor, "layer batch pos source"] | Bool[Tensor, "layer batch pos source"],
    ) -> Tensor:
        """Put the values of the asked states at their positions, and 0 elsewhere."""
        everything = torch.arange(self.n_positions)
        exists = self.positions >= 0
        # all positions in their order: nothing has to be moved
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
        """Return one row for each layer, sample, position and source that exist."""
        exists = mark_existing(self.positions, self.lengths, self.values.shape[3])
        dims = ("sample", "position", "source")
        array = LabelledArray(self.column, self.values, ("layer", *dims), {"layer": self.layers})
        frame = frame_of([array], LabelledArray("exists", exists, dims))
        # the axis counts the asked states, the table says which positions these are
        sample, asked = (
            torch.tensor(frame[axis].to_numpy(dtype="int64")) for axis in ("sample", "position")
        )
        return frame.assign(position=self.positions[sample, asked].numpy())

    def plot(self, sample: int = 0) -> "mpl.Figure":
        """Draw heat maps of one sequence, a panel for each layer."""
        rows = self.positions[sample] >= 0
        array = LabelledArray(
            self.column,
            self.values[:, sample, rows, : int(self.lengths[sample])],
            ("layer", "position", "source"),
            {"layer": self.layers, "position": self.positions[sample, rows].tolist()},
        )
        probe = self.record.config.get("probe", self.column)
        return array.plot(f"{probe}, sequence {sample}")


ScoresT = TypeVar("ScoresT", bound=StateScores)


class StateScoresProbe(Probe[ScoresT]):
    """The base of probes that give every source a score for every state, or for chosen ones.

    What it keeps grows with the sequences, since every one has its own scores.

    Args:
        positions: whose states; default all. Negative ones count from the end of each sequence, so
            (-1,) is the last token, or CLS.

    Attributes:
        kind: of result.
    """

    kind: ClassVar[type[Any]]
    _: KW_ONLY
    positions: Asked | None = None

    scored = concatenated(2, 3)  # [sample, layer, asked, source]
    places = concatenated(1, fill=-1)
    lengths = concatenated()
    scored_layers = combined(latest)
    n_positions = combined(max)

    def check_positions(self, model: nn.Module, longest: int | None = None) -> None:
        """Refuse positions that no sequence of this model has.

        Args:
            model: to be run.
            longest: tokens of the longest sequence, if that is known.

        Raises:
            InfoFlowError: with the number of positions that there are.
        """
        n_pos = None if longest is None else position_count(model, longest)
        if n_pos and self.positions and not any(-n_pos <= p < n_pos for p in self.positions):
            raise InfoFlowError(
                f"positions are {list(self.positions)}, but the longest sequence has {n_pos} "
                "positions: expected some of these; -1 is the last of each"
            )
        n_ctx = config_value(model, "n_ctx")
        if n_ctx and self.positions and not all(-n_ctx <= p < n_ctx for p in self.positions):
            raise InfoFlowError(
                f"positions are {list(self.positions)}: the model has at most {n_ctx} positions; "
                "count from 0, or from -1 backwards"
            )

    def place(
        self, lengths: Int[Tensor, " batch"], n_source: int, n_pos: int
    ) -> Int[Tensor, "batch asked"]:
        """Return the positions of the asked states in each sequence; -1 where it has none.

        Args:
            lengths: the sources of each sequence.
            n_source, n_pos: sources and positions of the longest: CLS has no source.
        """
        asked = torch.arange(n_pos) if self.positions is None else torch.tensor(self.positions)
        ends = (lengths + n_pos - n_source)[:, None]
        place = torch.where(asked < 0, ends + asked, asked)
        return torch.where((place >= 0) & (place < ends), place, -1)

    def parts(
        self,
        scores: Float[Tensor, "layer batch asked source"],
        place: Int[Tensor, "batch asked"],
        lengths: Int[Tensor, " batch"],
        layers: Sequence[int],
        n_pos: int,
    ) -> dict[str, Any]:
        """Return what the scores of a pass add."""
        return {
            # sequences first, on whose axis batches are joined
            "scored": scores.transpose(0, 1),
            "places": place,
            "lengths": lengths,
            "scored_layers": list(layers),
            "n_positions": n_pos,
        }

    def more_fields(self) -> Mapping[str, Any]:
        """Return fields of the result beside the scores, if it has more."""
        return {}

    def compute(self) -> ScoresT:
        """Join the scores of all batches."""
        layers, scored = tuple(self.scored_layers), self.scored.transpose(0, 1).contiguous()
        found = {self.kind.column: scored, "positions": self.places, **self.more_fields()}
        return self.make_result(self.kind, layers=layers, **found)

    def notes(self) -> tuple[str, ...]:
        """Return what a reader of the result must know."""
        notes = super().notes()
        if self.positions is None or self.places is None:
            return notes
        lacking = (self.places < 0).sum(dim=0).tolist()
        return notes + tuple(
            f"{count} of {self.n_sequences} sequences have no position {position}"
            for position, count in zip(self.positions, lacking, strict=True)
            if count
        )


def mark_existing(
    place: Int[Tensor, "batch asked"], lengths: Int[Tensor, " batch"], n_source: int
) -> Bool[Tensor, "batch asked source"]:
    """Mark which states and sources a sequence has."""
    is_source = torch.arange(n_source) < lengths[:, None]
    return (place >= 0)[:, :, None] & is_source[:, None]


def spearman(
    one: Float[Tensor, "state source"],
    other: Float[Tensor, "state source"],
    candidate: Bool[Tensor, "state source"],
) -> Float[Tensor, " state"]:
    """Correlate the ranks of candidates (Spearman); 0 where one of the two has all equal."""
    ranks = []
    for values in (one, other):
        above = (values[:, :, None] - values[:, None]).sign() * candidate[:, None]
        # how many candidates lie below each, less how many lie above
        place = above.sum(dim=2) * candidate  # twice the mean rank of equals, around 0
        ranks.append(place / place.norm(dim=1, keepdim=True).clamp(min=1))
    return (ranks[0] * ranks[1]).sum(dim=1)


def describe_orders(orders: Mapping[str, float], chance: str, least: float = 0.0) -> str:
    """Say which of some orders came nearest to the measured one.

    Args:
        orders: the correlation of each with the measured one, by name.
        chance: what chance gives, in words.
        least: above which a correlation is to be, if any came near.
    """
    names = sorted(orders, key=lambda name: -orders[name])
    said = ", ".join(f"{name} {orders[name]:.2f}" for name in names)
    near = f"{names[0]} came nearest" if orders[names[0]] > least else "none came near"
    return f"{near} to the measured one (Spearman: {said}; {chance})"
