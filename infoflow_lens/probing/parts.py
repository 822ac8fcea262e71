"""Where heads look and what describes them, what states depend on, and what they can give back."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from infoflow_lens.agreement import explained
from infoflow_lens.foundation.display import begin_sentence
from infoflow_lens.foundation.lazy import mpl, pd
from infoflow_lens.hooks import (
    AttendedProbe,
    AttendedResult,
    HeadLabels,
    InfluenceResult,
    JacobianInfluence,
    LayerCapabilities,
    PositionsProbe,
    PositionsResult,
    Probe,
    RecoveryProbe,
    RecoveryResult,
    ResampleInfluence,
    Result,
    ShardedPositions,
    baselines,
    label_heads,
)
from infoflow_lens.hooks.influence.probes import donors_from
from infoflow_lens.hooks.interventions.heads import COLOURS
from infoflow_lens.hooks.mechanisms.budgets import TopKResult, measure_top_k
from infoflow_lens.hooks.probe import Split
from infoflow_lens.probing.findings import predict_by_top_k
from infoflow_lens.probing.part import Part, RunContext, lack_of_heads, where_lacking
from infoflow_lens.probing.shards import run_in_shards
from infoflow_lens.ranking import compare_rankings
from infoflow_lens.report.charts import Chart, Lines, Table, by_head, draw_names
from infoflow_lens.runs.checkpoint import Checkpoint
from infoflow_lens.theory.information_sets import propagate

Kinds = Mapping[str, Sequence[type[Probe[Any]]]]
_DIRECTIONS = 16  # of an estimate
_EXACT_UP_TO = 2048  # input directions (tokens times width) that are differentiated one by one


class InfluencePart(Part):
    """Influence on states, and attention on the same sequences, from which it is predicted.

    Where a layer shows no heads nothing is predicted, and influence is measured alone.
    """

    title = "What states depend on"
    sequences = "detail"
    edits = ("hook_resid_pre",)
    fixed: ClassVar[Mapping[str, Sequence[str]]] = {
        "influence": ("state", "source_layer", "layers"),
        "influence_positions": ("ranks", "without"),
    }
    kinds: ClassVar[Kinds] = {
        "influence_attended": (AttendedProbe,),
        "influence_positions": (PositionsProbe,),
        "influence": (JacobianInfluence, ResampleInfluence),
    }

    def lacking(self, layer: LayerCapabilities) -> str:
        """Say why a layer cannot be measured; influence runs through whatever mixes positions."""
        return self.lost_edits(layer)

    def probes(self, context: RunContext) -> Mapping[str, Probe[Any]]:
        """Return the probe of influence, and the probes of attention from which it is predicted."""
        if where_lacking(context.capabilities, lack_of_heads):
            return {"influence": _influence_probe(context)}
        return {
            "influence_attended": AttendedProbe(),
            "influence_positions": PositionsProbe(
                context.config.ranks, without=context.config.without, spread=True
            ),
            "influence": _influence_probe(context),
        }

    def figures(self, result: Any) -> Sequence[Chart]:
        """Return no figures: the report shows influence beside the predictions."""
        return ()


def _influence_probe(context: RunContext) -> Probe[Any]:
    """Make the probe for the influence in the settings; "auto" is exact where that is cheap."""
    config, longest = context.config, context.detail.longest or 1
    if config.influence == "resample":
        return ResampleInfluence(
            donors_from(context.batches, config.n_detail, longest), "median", state="resid_post"
        )
    affordable = longest * context.width <= _EXACT_UP_TO
    if config.influence == "exact" or (config.influence == "auto" and affordable):
        return JacobianInfluence("resid_post", seed=config.seed)
    return JacobianInfluence("resid_post", positions=(-1,), estimate=_DIRECTIONS, seed=config.seed)


AnyPositions = PositionsResult | ShardedPositions


class PositionsPart(Part):
    """The keys of the largest scores."""

    title = "Where heads look, and why"
    text = (
        "The share of first choices that no rule of positions explains, so that must come from the "
        "tokens, and the entropy of the attention rows."
    )

    fixed: ClassVar[Mapping[str, Sequence[str]]] = {"positions": ("ranks",)}
    kinds: ClassVar[Kinds] = {"positions": (PositionsProbe,)}

    def lacking(self, layer: LayerCapabilities) -> str:
        """Say why a layer cannot be measured; one without attention has no heads to measure."""
        return "" if layer.mixer else super().lacking(layer)

    def probes(self, context: RunContext) -> Mapping[str, Probe[Any]]:
        """Return the probe of ranked positions, with the spread of the attention rows."""
        config = context.config
        return {"positions": PositionsProbe(config.ranks, without=config.without, spread=True)}

    def table(self, result: AnyPositions) -> "pd.DataFrame":
        """Return a row for each head."""
        return result.summary()

    def figures(self, result: AnyPositions) -> Sequence[Chart]:
        """Return two heat maps over heads; one if the spread was not measured."""
        found = result.summary()
        labels = {"by_content": "explained by tokens alone", "entropy": "entropy (nats)"}
        return by_head(found, {name: text for name, text in labels.items() if name in found})

    def facts(self, result: AnyPositions) -> Sequence[tuple[str, str]]:
        """Count the sequences that were seen."""
        return (("sequences", str(result.n_sequences)),)


_WIDE, _SKETCH = 256, 64


class RecoveryPart(Part):
    """Linear maps from states to attended tokens, and their errors."""

    title = "Can the state give the attended token back?"
    text = (
        "The fraction of variance unexplained by a linear map from the state to the token that a "
        "head attends to at each rank, on held-out sequences: 0 is perfect, 1 is knowing nothing."
    )
    kinds: ClassVar[Kinds] = {"recovery": (RecoveryProbe,)}

    def lacking_of_data(self, context: RunContext) -> str:
        """Say why the sequences are too few: maps are fitted on some and judged on others."""
        n, split = context.batches.n_sequences or 0, Split()
        if split.n_held_out(n):
            return ""
        return (
            f"recovery fits its maps on some sequences and judges them on every "
            f"{split.every}th, and of {n} none is left to judge on: expected at least "
            f"{split.every}; give more text"
        )

    def probes(self, context: RunContext) -> Mapping[str, Probe[Any]]:
        """Return the probe of maps from the post-attention state.

        For wide models its targets are sketched, and the maps are not kept.
        """
        config, wide = context.config, context.width > _WIDE
        # None leaves the choice to the width, 0 asks for exact maps
        sketch = (_SKETCH if wide else None) if config.sketch is None else config.sketch or None
        probe = RecoveryProbe(
            config.ranks, without=config.without, sketch=sketch, maps=not wide, seed=config.seed
        )
        return {"recovery": probe}

    def figures(self, result: RecoveryResult) -> Sequence[Chart]:
        """Return the fraction of variance unexplained by layer and head, a panel for each rank."""
        frame = result.to_frame()
        wide = frame.pivot_table(
            index=["layer", "head"], columns="rank", values="fvu", dropna=False
        )
        labels = {rank: f"rank {rank}" for rank in result.ranks}
        wide = wide.reset_index().rename(columns=labels)
        wide.loc[wide["layer"].isin(result.too_few_rows), list(labels.values())] = math.nan
        titles = {name: f"unexplained variance, {name}" for name in list(labels.values())[:4]}
        return by_head(wide, titles, most=1.0)

    def remarks(self, result: RecoveryResult) -> str:
        """Return the layers that are not shown because their maps fit any target."""
        said = result.describe_too_few_rows()
        return said and f"Not shown: {said}"


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


class Rank(NamedTuple):
    """The AUROC of a set, and the method of the largest AUROC among sets of the same sizes."""

    states: str
    size_of: str
    own: float
    best: str
    most: float


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

    def sentences(self) -> list[str]:
        """Name the best method of the last layer, at the sizes of each set."""
        return [
            f"routes: {rank.states}: sets {rank.size_of} have AUROC {rank.own:.3f}; best at their "
            f"size: {rank.best}, {rank.most:.3f}"
            for rank in self.ranks()
        ]

    def ranks(self) -> Sequence[Rank]:
        """Rank each set in the last layer, at its own sizes."""
        frame = self.to_frame()
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


class RoutesPart(Part):
    """Attention weights, rollout, flow, contribution routes and gradient x input."""

    title = "Do other measures say better what states depend on?"
    text = (
        "Each baseline ranks the input tokens for each state, and is cut at the size of a "
        "predicted set. AUROC is the probability that a token of the set has more measured "
        "influence than one outside; a random order has one half, and measured influence itself "
        "the most. Gradient x input is a derivative, as exact influence is, and is no independent "
        "witness of it. k=1 is the max-position rule; recency puts the last tokens first."
    )
    sequences = "detail"
    after = ("influence",)
    reads = ("labels",)

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
        if "labels" in context.found:
            labels: HeadLabels = context.found["labels"]
            sets["mechanisms"] = propagate(labels.rules(attended, chosen), n_source)
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

    def figures(self, result: RoutesComparison) -> Sequence[Chart]:
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


_FEWEST = 4  # sequences: two for labels, two to judge them


class LabelsPart(Part):
    """Shares of each head's worth that ideal patterns lose, and all heads replaced at once."""

    title = "What describes each head"
    text = (
        "A head is worth what the output loses when the head writes nothing but its mean. Its "
        "pattern was replaced by ideal ones; the smaller the share of the worth that is then lost, "
        "the better the ideal describes it: fixed (by position or by the distance to the key), max "
        "(the largest key, with the weight on the first position left as it is), several keys, or "
        "undecided where the texts do not tell. Labels are of half of the sequences, and hold on "
        "such texts alone; on the other half all heads were replaced at once, by their own label's "
        "ideal and by one for all."
    )
    sequences = "detail"
    edits = ("attn.hook_pattern", "attn.hook_z")

    def lacking_of_data(self, context: RunContext) -> str:
        """Say why the sequences are too few; empty if they are enough."""
        n = context.detail.n_sequences or 0
        if n >= _FEWEST:
            return ""
        more = "more text" if context.config.n_detail >= _FEWEST else f"--n-detail {_FEWEST}"
        need = f"labels need {_FEWEST} sequences, half of them to judge"
        return f"{need}, and there are {n}; give {more}"

    def measure(self, context: RunContext, checkpoint: Checkpoint) -> HeadLabels:
        """Label all heads; go on after the last finished batch."""
        options = context.options(checkpoint)
        options["batch_size"] = min(8, context.config.batch_size)
        return label_heads(context.model, context.detail, metric=context.config.metric, **options)

    def figures(self, result: HeadLabels) -> Sequence[Chart]:
        """Return the label of every head, what it is worth, and all heads at once."""
        frame = result.to_frame()
        hover = [
            f"{row['label']} {row['name']}\nfixed {row['fixed']:.2f} +- {row['fixed_error']:.2f}, "
            f"max {row['max']:.2f} +- {row['max_error']:.2f}\n"
            f"worth {row['worth']:.2g} ({'measured' if row['measured'] else 'estimated'})"
            for row in frame.to_dict("records")
        ]
        names = draw_names(frame.assign(hover=hover), "label", COLOURS, "hover")
        worth = by_head(
            frame, {"worth": f"what the output loses without the head ({result.metric})"}
        )
        tables = [result.joint_frame().round(3), result.thirds_frame().round(2)]
        return (names, *worth, *map(Table.from_frame, tables))

    def remarks(self, result: HeadLabels) -> str:
        """Say what the columns of the table are."""
        what = {
            "nmse": "the squared change of the output, over its variance",
            "kl": "the divergence KL(old || new) of the distributions, in nats",
            "loss": "the rise of the loss of the next token where it rises, in nats",
        }[result.metric]
        return (
            f"All heads at once, on {result.n_judged} sequences that no label has seen: damage is "
            f"{what}; error, one standard error over sequences; rise, that of the loss of the next "
            "token, in nats a token.\nIdeals: top k, the k largest keys; position and offset, the "
            "mean pattern by position or by distance; largest, one key; gated, one key beside the "
            "first position. Ablated heads write their mean. Below, by thirds of the "
            "layers: the heads of each label, and their share of what single heads are worth."
        )

    def facts(self, result: HeadLabels) -> Sequence[tuple[str, str]]:
        """Count the heads of each label."""
        of = f"of {len(result.labels)} heads"
        idle = [("idle", f"{int(result.idle.sum())} {of}")] if result.idle.any() else []
        return [*((name, f"{count} {of}") for name, count in result.counts().items()), *idle]


class TopKPart(Part):
    """The loss when heads keep only the k largest keys of every row."""

    title = "How many keys does a layer need?"
    text = (
        "The heads of one layer, or of all at once, keep the k keys of largest weight, rescaled. "
        "Shown is the least k, of powers of two, that keeps the loss of the next token within 1%: "
        "1 where one token is passed on, all where a mean over the context is taken."
    )
    sequences = "detail"
    edits = ("attn.hook_pattern",)
    next_token = True
    by_default = False

    def measure(self, context: RunContext, checkpoint: Checkpoint) -> TopKResult:
        """Search k by bisection; go on after the last finished point."""
        options = context.options(checkpoint)
        return measure_top_k(context.model, context.detail, search=True, **options)

    def facts(self, result: TopKResult) -> Sequence[tuple[str, str]]:
        """Return the least k of all layers at once."""
        return (("keys needed, all layers", f"{result.least()[-1]} of {result.n_pos}"),)
