"""Training makes the attended token recoverable, and no other (InfoFlow 2026, App. C.1 and C.2)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from infoflow_lens.foundation.lazy import pd
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.studies.claims import Claim, Numbers
from infoflow_lens.studies.papers.first_layer import (
    CLS,
    IDLE,
    TOKENS,
    recovery_rows,
)
from infoflow_lens.studies.papers.intrinsic_dimension import two_layers
from infoflow_lens.studies.papers.rows import (
    best_runs,
    has_enough_heads,
    heads_shown,
    numbers_of,
)
from infoflow_lens.studies.plots import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    Axis,
    Curves,
    FigureSpec,
    Legend,
    Panel,
)
from infoflow_lens.studies.stages import StagedResult, StagedStudy
from infoflow_lens.studies.study import (
    Pair,
    Row,
    Settings,
    Statement,
)
from infoflow_lens.studies.tables import Column, Part, TableSpec, Words, groups, markdown_table
from infoflow_lens.tasks import DRetrieval, IntrinsicDimension
from infoflow_lens.training import TrainingConfig, restored

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PAIRS, _SINGLES = "pairs", "single tokens"
_RANKS = (1, 2)
_BELOW = 0.1  # what is left of the initial error, at most
_NO_BETTER = 0.75  # the same for the second choice, on average and at least
_CASE = ["target", "D", "heads"]

RecoveryTask: TypeAlias = IntrinsicDimension | DRetrieval

# App. C.1 (argmax) and C.2 (second-largest): ratios trained / initial of every head, of all
# configurations whose numbers survive in print; which is which is not printed.
_PUBLISHED: Mapping[int, Sequence[tuple[float, ...]]] = {
    1: [
        (0.0863, 0.0910, 0.0958, 0.0817, 0.0650, 0.0906),
        (0.5195, 0.4676, 0.6618, 0.7624, 0.6126),
        (0.6629, 0.7793, 0.3400, 0.4273, 0.4308),
    ],
    2: [
        (0.9940, 1.0067, 1.0864, 0.9739, 0.7770, 1.0151),
        (1.0005, 0.9594, 0.9641, 1.0895, 0.9299),
        (1.0631, 1.0483, 1.0180, 1.0523, 1.0505),
        (1.0493, 1.0313, 1.0399, 0.9963, 1.0329),
        (1.0049, 1.0598, 0.9420, 0.9049, 0.9524, 1.0272),
        (1.0493, 1.0310, 0.9781, 1.0461, 1.0483, 1.0034, 1.0163),
        (0.8569, 1.0506, 1.0909, 1.0337, 1.0364, 0.9464, 0.9668),
    ],
}
_NOTE = (
    "Errors by second moment, of held-out sequences; fvu, by variance. A ratio is the error over "
    "that before training; `tempered`, that of the untrained head whose scores are scaled until "
    "its attention has the trained head's entropy. `nothing`: the NMSE rises by less than .01 when "
    "the head's output at these queries becomes its mean. Published: queries are not told apart, "
    "sizes did not survive in print, and the best seed alone is reported."
)


class MaxPositionRecovery(StagedStudy):
    """Errors of linear maps from the state behind the first layer to a head's chosen tokens.

    C.1 trains on a target "with intrinsic dimension D", which is defined for best pairs (eq 6): the
    value x(t)^T A x(s) needs all of the token x(s). Beside it stands D-retrieval, which needs one
    coordinate of each token, so that a head may deliver that alone. Errors are by second moment
    (eq 56), of held-out sequences, for queries at tokens and at CLS apart. A head does nothing at
    some queries if the NMSE rises by less than .01 when its output there becomes its mean.

    Sizes are [chosen], for the paper's do not survive in print: d = 3, T, E = 16 h_1 (the paper
    says E proportional to h), two layers, tokens on the sphere; a seed draws target and weights.

    Beside every trained head stands the same head before training, with its scores scaled so that
    its attention has the trained head's entropy (`tempered`): what is recovered because attention
    is peaked, whatever else was learnt.

    Preset full has the runs of quick among its own: more configurations, of the same size.
    """

    name: ClassVar[str] = "max_position_recovery"
    title: ClassVar[str] = "Does training make the token of the largest score recoverable?"
    finding: ClassVar[str] = (
        "the first choice is recovered to {1} of the error before training, the second to {2}"
    )
    source: ClassVar[str] = "InfoFlow 2026, App. C.1 and C.2, eq 56"
    statement: ClassVar[Statement] = Statement.read("max_position_recovery")
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 3, "full": 3}

    def cases(self, preset: str) -> Sequence[Settings]:
        """Vary the target, D and the heads of both layers."""
        around: Mapping[str, Sequence[tuple[str, int, Sequence[tuple[int, int]]]]] = {
            "smoke": [(_PAIRS, 2, [(2, 1)])],
            "quick": [(_PAIRS, 2, [(2, 2), (3, 2), (1, 3)]), (_SINGLES, 2, [(2, 2)])],
            "full": [
                (_PAIRS, 2, [(1, 2), (1, 3), (2, 1), (2, 2), (3, 2), (4, 2)]),
                (_SINGLES, 2, [(2, 2)]),
                (_PAIRS, 6, [(5, 5), (6, 6)]),
            ],
        }
        usual = {
            "n_tokens": 8, "n_train": 64000, "lengths": [4],
            "epochs_each": 4, "epochs": 4, "last_epochs": 64,
        }  # fmt: skip
        smallest = {
            "n_tokens": 4, "n_train": 1000, "lengths": [2],
            "epochs_each": 1, "epochs": 1, "last_epochs": 1,
        }  # fmt: skip
        return [
            {
                "target": target,
                "D": d,
                "heads": list(heads),
                "d_token": 3,
                "d_head": 4,
                "d_mlp": 64,
                "lr": 5e-3,
                **(smallest if preset == "smoke" else usual),
            }
            for target, d, configurations in around[preset]
            for heads in configurations
        ]

    def architecture(self, settings: Settings) -> Architecture:
        """Return two layers, with a width that grows with the heads of the first."""
        sizes = {**settings, "d_model": 16 * settings["heads"][0]}
        return two_layers(sizes, linear=False, init_mode="xavier_normal")

    def task(self, settings: Settings, seed: int) -> RecoveryTask:
        """Return the target, drawn anew for each seed."""
        sizes: dict[str, Any] = {
            "n_tokens": settings["n_tokens"],
            "d_token": settings["d_token"],
            "n_components": settings["D"],
            "tokens": "sphere",
            "seed": seed,
        }
        if settings["target"] == _PAIRS:
            return IntrinsicDimension(**sizes)
        # else two heads may be asked for nearly the same token
        return DRetrieval(**sizes, directions="orthonormal")

    def data_at(self, settings: Settings, seed: int, n_tokens: int) -> tuple[Pair, Pair]:
        """Return the target at a length."""
        task = replace(self.task(settings, seed), n_tokens=n_tokens)
        return self.data_of(task, settings, seed, n=4000)

    def training(self, settings: Settings) -> TrainingConfig:
        """Return batches of 256."""
        return TrainingConfig(batch_size=256, lr=settings["lr"], warmup_steps=100, weight_decay=0.0)

    def rows(self, settings: Settings, seed: int, trained: StagedResult) -> list[Row]:
        """Return a row for each head of the first layer, kind of query and rank."""
        task = self.task(settings, seed)
        _, (x, y) = self.data_of(task, settings, seed, n=4000, part="test")
        initial = restored(trained.model, trained.initial_state)
        return [
            {"nmse": trained.last.nmse, "epochs_run": sum(trained.epochs.values()), **row}
            for row in recovery_rows(initial, trained.model, x, y, _RANKS)
        ]

    def tables(self) -> Sequence[Part]:
        """Show every head of every seed, for both kinds of queries; then the published ratios."""
        columns = (
            Column("NMSE", "nmse", "first", ".1e"),
            Column("NMSE lost without", _lost),
            Column("entropy", "entropy", "first", ".2f"),
            Column("rank 1: initial", "initial_second_moment", "first", ".3f"),
            Column("trained", "trained_second_moment", "first", ".4f"),
            Column("ratio", "ratio", "first", ".3f"),
            Column("tempered: ratio", "tempered_ratio", "first", ".3f"),
            Column("rank 2: ratio", "ratio_second", "first", ".2f"),
            Column("tempered: ratio", "tempered_ratio_second", "first", ".2f"),
            Column("rank 1: fvu", "trained_fvu", "first", ".3f"),
        )
        words: Mapping[str, Words] = {"heads": heads_shown, "head": lambda head: head + 1}
        published = markdown_table(
            ["published", "heads of layer 1", "ratio of each head"],
            [
                (f"rank {rank}", len(ratios), ", ".join(f"{ratio:.3f}" for ratio in ratios))
                for rank, configurations in _PUBLISHED.items()
                for ratios in configurations
            ],
        )
        by = [*_CASE, "seed", "head", "queries"]
        return TableSpec(by, columns, _join_ranks, words), published, _NOTE

    def plots(self) -> FigureSpec:
        """Draw every head by configuration, and why: ratios over entropy, beside tempered heads."""
        ratio = Axis("recovery error, over that before training", "log", levels=[1, _BELOW])
        title = (
            "rank 1 (orange), rank 2 (blue); hollow: does nothing;\n"
            "squares: CLS; large: best seed; band: published"
        )
        every = Panel([_draw_heads], y=ratio, title=title, legend="", width=1.4)
        stages = {"tempered_ratio": ("untrained, tempered", GREY), "ratio": ("trained", ORANGE)}
        points = [
            Curves(
                "entropy", column, ["queries"], "each", style=marker, colour=colour,
                label=f"{name} ({queries})", rows=partial(_where, queries=queries),
            )
            for column, (name, colour) in stages.items()
            for queries, marker in ((TOKENS, "o"), (CLS, "s"))
        ]  # fmt: skip
        entropy = Axis("entropy of attention (nats)")
        legends: Mapping[str, Legend] = {_PAIRS: "inside", _SINGLES: ""}
        by_target = [
            Panel([_draw_gaps, *points], entropy, ratio, f"{target}: heads in use",
                  partial(_first_in_use, target=target), legend)
            for target, legend in legends.items()
        ]  # fmt: skip
        return FigureSpec([every, *by_target], size=(3.8, 4.2), share="y")

    def claims(self) -> Sequence[Claim]:
        """Judge the heads that do something, of the best seed of every configuration on pairs."""
        used = (
            "of the configurations on pairs with h_1 >= D a share of {bound} has heads in use (by "
            "ablation, at tokens and at CLS apart; the seed of least validation error)"
        )
        first = "the error of the first choice of these heads is {bound} of that before training"
        second = "the same of their second choice is {bound}, by the mean over heads"
        return (
            Claim(used, _share_in_use, ">=", 1, name="configurations with heads in use"),
            Claim(first, _first_choices, "<", _BELOW, name="error of the first choice"),
            Claim(second, _second_choices, ">=", _NO_BETTER, name="error of the second choice"),
        )

    def remarks(self, results: "pd.DataFrame") -> Sequence[str]:
        """Report tempered heads, fewer heads, and all seeds."""
        tempered = _best_heads(results, 1)["tempered_ratio"]
        remarks = [
            f"the same heads untrained, tempered to the same entropy: {tempered.min():.3f} to "
            f"{tempered.max():.3f}"
        ]
        fewer = _active_heads(best_runs(results[~_enough(results)], _CASE), 1)
        for (target, _, heads), rows in groups(fewer, _CASE):
            ratios = rows["ratio"]
            remarks.append(
                f"{target}, heads {heads_shown(heads)}: {ratios.min():.3f} to {ratios.max():.3f}"
            )
        every = _active_heads(results[_enough(results)], 1)["ratio"]
        remarks.append(
            f"all seeds: {(every < _BELOW).sum()} of {len(every)} below {_BELOW:g}, the largest "
            f"{every.max():.3f}"
        )
        return remarks

    def control_results(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Put the second choice, and the untrained heads, in the place of the first choice."""
        ratio, first = results["ratio"], results["rank"] == 1
        by = ["run", "head", "queries"]
        # of the same head and the same kind of query
        second = results[~first].set_index(by)["ratio"]
        at = list(zip(*(results[name] for name in by), strict=True))
        return {
            "second choice": results.assign(ratio=ratio.mask(first, second.reindex(at).to_numpy())),
            "untrained": results.assign(ratio=ratio.mask(first, 1.0)),
        }


def _enough(results: "pd.DataFrame") -> "pd.Series[bool]":
    """Return rows of models on pairs with at least D heads in the first layer."""
    return has_enough_heads(results) & (results["target"] == _PAIRS)


def _active_heads(results: "pd.DataFrame", rank: int) -> "pd.DataFrame":
    """Select rows of heads that do something at these queries, of their choice of a rank."""
    return results[(results["lost_without"] >= IDLE) & (results["rank"] == rank)]


def _best_heads(results: "pd.DataFrame", rank: int) -> "pd.DataFrame":
    """Select heads in use of the best seeds with at least D heads."""
    return _active_heads(best_runs(results[_enough(results)], _CASE), rank)


def _share_in_use(results: "pd.DataFrame") -> Numbers:
    """Return the share of the judged configurations that have heads in use."""
    cases = results[_CASE].drop_duplicates()
    return {"": _best_heads(results, 1)["run"].nunique() / max(1, int(_enough(cases).sum()))}


def _first_choices(results: "pd.DataFrame") -> Numbers:
    """Return what is left of the error before training, of every judged head and kind of query."""
    return numbers_of(
        _best_heads(results, 1),
        ["D", "heads", "head", "queries"],
        "ratio",
        lambda d, heads, head, at: f"D = {d}, {heads_shown(heads)}, head {head} at {at}",
    )


def _second_choices(results: "pd.DataFrame") -> Numbers:
    """Return the mean over judged heads, of each configuration."""
    return numbers_of(
        _best_heads(results, 2),
        ["D", "heads"],
        lambda rows: rows["ratio"].mean(),
        lambda d, heads: f"D = {d}, {heads_shown(heads)}",
    )


def _lost(rows: "pd.DataFrame") -> str:
    lost = rows["lost_without"].iloc[0]
    return f"{lost:.2g}" if lost >= IDLE else "nothing"


def _join_ranks(results: "pd.DataFrame") -> "pd.DataFrame":
    """Make a row for each head and kind of queries, both ranks beside each other.

    Seeds are in words, which say the one of least error of each configuration.
    """
    best = results["run"].isin(best_runs(results, _CASE)["run"])
    seeds = results["seed"].astype(str) + best.map({True: ", best", False: ""})
    first, second = (results.assign(seed=seeds)[results["rank"] == rank] for rank in _RANKS)
    by = ["run", "head", "queries"]
    of_second = second[[*by, "ratio", "tempered_ratio"]]
    return first.merge(of_second, "left", by, suffixes=("", "_second"))


def _first_in_use(results: "pd.DataFrame", target: str) -> "pd.DataFrame":
    """Select first choices of the heads in use, of a target."""
    return _active_heads(results[results["target"] == target], 1)


def _where(results: "pd.DataFrame", queries: str) -> "pd.DataFrame":
    return results[results["queries"] == queries]


def _draw_gaps(axes: "Axes", results: "pd.DataFrame") -> None:
    """Draw a line from each trained head to the tempered one."""
    ratio, tempered = results["ratio"], results["tempered_ratio"]
    axes.vlines(results["entropy"], ratio, tempered, color="#bbbbbb", linewidth=0.8)


def _draw_heads(axes: "Axes", results: "pd.DataFrame") -> None:
    """Draw the ratio of every head, at a place for each configuration."""
    best = set(best_runs(results, _CASE)["run"])
    labels = []
    for place, ((target, d, heads), rows) in enumerate(groups(results, _CASE)):
        labels.append(f"{heads_shown(heads)}\nD = {d}\n" + target.replace(" ", "\n"))
        for row in rows.to_dict("records"):
            at_cls, colour = row["queries"] == CLS, ORANGE if row["rank"] == 1 else BLUE
            axes.plot(
                place + 0.15 * at_cls + 0.4 * (row["rank"] == 2),
                row["ratio"],
                "s" if at_cls else "o",
                color=colour,
                markerfacecolor=colour if row["lost_without"] >= IDLE else "none",
                markersize=7 if row["run"] in best else 3.5,
            )
    # the published ratios of six heads
    axes.axhspan(0.065, 0.096, color=GREEN, alpha=0.2, linewidth=0)
    axes.set_xticks(range(len(labels)), labels, fontsize="small")
