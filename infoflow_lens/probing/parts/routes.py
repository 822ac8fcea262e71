"""Other measures of what states depend on, compared with the predicted sets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from infoflow_lens.agreement import explained
from infoflow_lens.foundation.display import begin_sentence
from infoflow_lens.foundation.lazy import mpl, pd
from infoflow_lens.hooks import (
    AttendedResult,
    InfluenceResult,
    PositionsResult,
    Result,
    baselines,
)
from infoflow_lens.probing.compared import predict_by_mechanisms, predict_by_top_k
from infoflow_lens.probing.part import Part, RunContext
from infoflow_lens.probing.shards import run_in_shards
from infoflow_lens.ranking import compare_rankings
from infoflow_lens.report.charts import Lines, Table
from infoflow_lens.runs.checkpoint import Checkpoint

if TYPE_CHECKING:
    from infoflow_lens.report.charts import Chart

_LEFT_OUT = "gradient x input, and attention flow of more than two layers, are left out: "
_LARGE = _LEFT_OUT + (
    "influence is an estimate, as the model is large, and they take as long as exact influence"
)
_BY_DEFAULT = _LEFT_OUT + "they take long; with probes=influence,routes they are measured"
# what the page shows of each method: its name there, and what is said of it
_COLUMNS = {
    "auroc": ("AUROC", "is measured influence larger in its set than outside? .5 is chance"),
    "share_inside": ("share inside", "share of the influence of other tokens inside its set"),
    "spearman": ("Spearman", "rank correlation of its scores with measured influence"),
}


@dataclass(frozen=True, eq=False, kw_only=True)
class RoutesComparison(Result):
    """Predicted sets and baselines against influence, at equal set sizes.

    Attributes:
        rows: for each set that gives the sizes, layer and method, the columns of
            :meth:`~infoflow_lens.ranking.RankingAgreement.to_frame`.
    """

    makes_small_table: ClassVar[bool] = True

    rows: tuple[Mapping[str, str | int | float | None], ...]

    def to_frame(self) -> "pd.DataFrame":
        """Return one row for each size, layer and method."""
        return pd.DataFrame(list(self.rows))

    def plot(self, metric: str = "auroc") -> "mpl.Figure":
        """Return a metric of every method by layer, a panel for each set that gives the sizes."""
        frame = self.to_frame()
        sizes = frame["size_of"].unique()
        figure = mpl.Figure(figsize=(1 + 3 * len(sizes), 3.5), layout="constrained")
        figure.suptitle("What states depend on: predicted sets and baselines of the same size")
        grid = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
        for axes, size_of in zip(grid, sizes, strict=True):
            for method, rows in frame[frame["size_of"] == size_of].groupby("method", sort=False):
                axes.plot(rows["layer"], rows[metric], marker="o", label=str(method))
            axes.set(xlabel="layer", ylabel=metric, title=f"sizes of {size_of}")
        grid[-1].legend(fontsize="small")
        return figure


class Rank(NamedTuple):
    """The AUROC of a set, and the method of the largest AUROC among sets of the same sizes."""

    states: str
    size_of: str
    own: float
    best: str
    most: float


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
    reads = ("mechanisms",)

    def measure(self, context: RunContext, checkpoint: Checkpoint) -> Result:
        """Run the baselines on the sequences of influence; go on after the last finished batch.

        Slow baselines are left out if influence is an estimate, as exact derivatives took too long
        then, and if the user names no probes.
        """
        influence: InfluenceResult = context.found["influence"]
        positions = influence.record.config["positions"]
        left_out = _LARGE if influence.relative_error is not None else ""
        if context.config.probes is None:
            left_out = left_out or _BY_DEFAULT
        probes = baselines(context.model, positions=positions, cheap=bool(left_out))
        results = run_in_shards(context, context.detail, probes, checkpoint).results()
        chosen: PositionsResult = context.found["influence_positions"]
        attended: AttendedResult = context.found["influence_attended"]
        n_source = influence.influence.shape[-1]
        sets = predict_by_top_k(chosen, n_source)
        if "mechanisms" in context.found:
            sets["mechanisms"] = predict_by_mechanisms(
                context.found["mechanisms"], attended, chosen, n_source
            )
        found = compare_rankings(sets, results, influence, without=context.config.without)
        # the comparison names the range that was asked for; few positions of it may be measured
        place = explained(next(iter(sets.values())), influence).place
        rows: list[Any] = found.to_frame().assign(positions=place).to_dict("records")
        return RoutesComparison(
            rows=tuple(rows),
            record=influence.record,
            notes=(
                *dict.fromkeys(note for result in results.values() for note in result.notes),
                *((left_out,) if left_out else ()),
            ),
        )

    def figures(self, result: RoutesComparison) -> Sequence["Chart"]:
        """Return the last layer's methods at the sizes of the first sets; and AUROC over layers."""
        frame = result.to_frame()
        rows = frame[frame["size_of"] == frame["size_of"].iloc[0]]
        last = rows[rows["layer"] == rows["layer"].max()]
        last = last.sort_values("auroc", ascending=False, kind="stable")
        size = f"{last['mean_size'].iloc[0]:.1f} of {last['mean_candidates'].iloc[0]:.1f}"
        table = Table(
            {"method": "", "kind": "", **dict(_COLUMNS.values())},
            last[["method", "kind", *_COLUMNS]].to_numpy(dtype=object).tolist(),
            caption=f"Layer {last['layer'].iloc[0]}, {last['positions'].iloc[0]}, sets of "
            f"{size} other tokens; routes.csv has all sizes, layers, measures and intervals",
        )
        # a line over one or two layers shows nothing
        layers = sorted(rows["layer"].unique())
        if len(layers) < 3:
            return (table,)
        series = {
            str(method): list(each.sort_values("layer")["auroc"])
            for method, each in rows.groupby("method", sort=False)
        }
        lines = Lines("AUROC of measured influence, by layer", layers, series, "layer", "", 1.0)
        return (table, lines)

    def remarks(self, result: RoutesComparison) -> str:
        """Say what was left out, and why."""
        return " ".join(f"{begin_sentence(note)}." for note in result.notes)

    def sentences(self, result: RoutesComparison) -> Sequence[str]:
        """Return the best method of the last layer, at the sizes of each set."""
        return [
            f"routes: {rank.states}: sets {rank.size_of} have AUROC {rank.own:.3f}; best at their "
            f"size: {rank.best}, {rank.most:.3f}"
            for rank in self.ranks(result)
        ]

    def ranks(self, result: RoutesComparison) -> Sequence[Rank]:
        """Rank each set in the last layer, at its own sizes."""
        frame = result.to_frame()
        last = frame[(frame["layer"] == frame["layer"].max()) & (frame["kind"] != "control")]
        found = []
        for size_of, rows in last.dropna(subset="auroc").groupby("size_of", sort=False):
            best = rows.sort_values("auroc", ascending=False).iloc[0]
            own = rows[rows["method"] == size_of].iloc[0]
            states = f"{own['positions']}, layer {own['layer']}"
            found.append(
                Rank(states, str(size_of), own["auroc"], str(best["method"]), best["auroc"])
            )
        return found
