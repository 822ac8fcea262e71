"""Other answers to what states depend on, beside the predicted sets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infoflow_lens.agreement import explained
from infoflow_lens.hooks import (
    AttendedResult,
    InfluenceResult,
    PositionsResult,
    Result,
    baselines,
)
from infoflow_lens.probing.checkpoint import Checkpoint
from infoflow_lens.probing.compared import by_largest, by_mechanisms
from infoflow_lens.probing.part import Part, Setting
from infoflow_lens.probing.shards import run_in_shards
from infoflow_lens.ranking import compare_rankings

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


_LEFT_OUT = (
    "influence is an estimate, as the model is large: gradient x input, and attention flow of more "
    "than two layers, would take as long as exact influence and are left out"
)


@dataclass(frozen=True, eq=False, kw_only=True)
class RoutesComparison(Result):
    """Predicted sets and baselines against influence, at equal set sizes.

    Attributes:
        rows: for each set that gives the sizes, layer and method, the columns of
            :meth:`~infoflow_lens.ranking.RankingAgreement.to_frame`.
    """

    rows: tuple[Mapping[str, Any], ...]

    def to_frame(self) -> "pd.DataFrame":
        """One row for each size, layer and method."""
        import pandas as pd

        return pd.DataFrame(list(self.rows))

    def plot(self, metric: str = "auroc") -> "Figure":
        """A metric of every method by layer, a panel for each set that gives the sizes."""
        from matplotlib.figure import Figure

        frame = self.to_frame()
        sizes = frame["size_of"].unique()
        figure = Figure(figsize=(1 + 3 * len(sizes), 3.5), layout="constrained")
        figure.suptitle("What states depend on: predicted sets and baselines of the same size")
        grid = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
        for axes, size_of in zip(grid, sizes, strict=True):
            for method, rows in frame[frame["size_of"] == size_of].groupby("method", sort=False):
                axes.plot(rows["layer"], rows[metric], marker="o", label=str(method))
            axes.set(xlabel="layer", ylabel=metric, title=f"sizes of {size_of}")
        grid[-1].legend(fontsize="small")
        return figure


class RoutesPart(Part):
    """Attention weights, rollout, flow, contribution routes and gradient x input."""

    title = "Do other measures say better what states depend on?"
    text = (
        "Each baseline ranks the input tokens for each state, and is cut at the size of a "
        "predicted set. AUROC is the probability that a token of the set has more measured "
        "influence than one outside; a random order has one half, and measured influence itself "
        "the most. Gradient x input is a derivative, as exact influence is, and is no independent "
        "witness of it."
    )
    sequences = "detail"
    after = ("influence",)
    by_default = False

    def measure(self, setting: Setting, checkpoint: Checkpoint) -> Result:
        """Run all baselines over the sequences of influence; go on behind the last batch."""
        influence: InfluenceResult = setting.found["influence"]
        positions = influence.record.config["positions"]
        # where exact influence was too much, a derivative for each token is, too
        cheap = influence.relative_error is not None
        probes = baselines(setting.model, positions=positions, cheap=cheap)
        results = run_in_shards(setting, setting.detail, probes, checkpoint).results()
        chosen: PositionsResult = setting.found["influence_positions"]
        attended: AttendedResult = setting.found["influence_attended"]
        n_source = influence.influence.shape[-1]
        sets = by_largest(chosen, n_source)
        if "mechanisms" in setting.found:
            sets["mechanisms"] = by_mechanisms(
                setting.found["mechanisms"], attended, chosen, n_source
            )
        found = compare_rankings(sets, results, influence)
        # the comparison names the range that was asked for; few positions of it may be measured
        place = explained(next(iter(sets.values())).part(influence.layers), influence).place
        rows: list[Any] = found.to_frame().assign(positions=place).to_dict("records")
        return RoutesComparison(
            rows=tuple(rows),
            record=influence.record,
            notes=(
                *dict.fromkeys(note for result in results.values() for note in result.notes),
                *((_LEFT_OUT,) if cheap else ()),
            ),
        )

    def sentences(self, result: RoutesComparison) -> Sequence[str]:
        """The best method of the last layer, at the sizes of each set."""
        frame = result.to_frame()
        last = frame[(frame["layer"] == frame["layer"].max()) & (frame["kind"] != "control")]
        lines = []
        for size_of, rows in last.dropna(subset="auroc").groupby("size_of", sort=False):
            best = rows.sort_values("auroc", ascending=False).iloc[0]
            ours = rows[rows["method"] == size_of].iloc[0]
            lines.append(
                f"routes: sets {size_of} have AUROC {ours['auroc']:.3f} in the last layer; best at "
                f"their size: {best['method']}, {best['auroc']:.3f}"
            )
        return lines
