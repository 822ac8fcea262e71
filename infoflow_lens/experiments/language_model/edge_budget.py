"""Some edges of attention kept, the rest put to its mean: which choice needs the fewest?"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from infoflow_lens.experiments.claims import Claim, Numbers
from infoflow_lens.experiments.language_model.snapshots import Snapshot, loaded
from infoflow_lens.experiments.language_model.study import (
    LanguageModelStudy,
    final,
    groups,
    panels,
)
from infoflow_lens.experiments.study import Row, Settings, Statement
from infoflow_lens.experiments.tables import markdown_table
from infoflow_lens.hooks.mechanisms.edge_budget import EdgeBudgetResult, measure_edge_budget

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

GRADED, PILOT = "product x norm", "stdlib-2l"
ONE, ALL = "one state", "all states"
_SHARE, _MOST, _BATCH = 0.9, 0.05, 16
_CONTROLS, _RIVAL = ("chance", "another window"), "rollout"
_BUDGETS: Mapping[str, tuple[float, ...]] = {
    ONE: tuple(2.0**-i for i in range(13, 1, -1)),
    ALL: tuple(2.0**-i for i in range(10, 0, -1)),
}


class EdgeBudget(LanguageModelStudy):
    """Mean patterns of some windows; the loss of others, with edges kept by every method."""

    name: ClassVar[str] = "edge_budget"
    title: ClassVar[str] = "How many edges does a state need, and which choice finds them?"
    statement: ClassVar[Statement] = Statement.of("edge_budget")
    windows: ClassVar[Mapping[str, int]] = {"smoke": 4, "quick": 64, "full": 256}
    steps: ClassVar[Mapping[str, int | None]] = {"smoke": 1, "quick": 1, "full": 1}
    lengths: ClassVar[Mapping[str, int]] = {"smoke": 12, "quick": 64, "full": 128}

    def contexts(self, moment: Snapshot, preset: str) -> Sequence[Settings]:
        """Windows of one length."""
        return [{"n_context": min(self.longest(moment), self.lengths[preset])}]

    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """Rows of the curves, and of the edges that each method needs, of one state and of all."""
        model = loaded(self.source_of(settings), device)
        n = settings["n_windows"]
        judged, calibration = self.shuffled(model, settings, 2 * n, seed).split(n)
        rows: list[Row] = []
        for part in (ONE, ALL):
            asked: Any = {"metric": "kl", "read": (-1,)} if part == ONE else {"metric": "loss"}
            found = measure_edge_budget(
                model, judged, calibration, budgets=_BUDGETS[part], seed=seed, batch_size=_BATCH,
                progress=False, **asked,
            )  # fmt: skip
            rows += [{"part": part, **row} for row in _rows(found)]
        return rows

    def table(self, results: "pd.DataFrame") -> str:
        """The edges that are needed, and how many times those of the graded choice."""
        needed = final(results[results["kind"] == "needed"])
        parts = []
        for part in (ONE, ALL):
            rows = needed[needed["part"] == part]
            models = [model for (model,), _ in groups(rows, ("model",))]
            facts = [
                ("what attention is worth (nats)", "worth", ".3f"),
                ("edges", "n_edges", ".0f"),
            ]
            lines: list[tuple[str | None, ...]] = []
            for name, column, form in facts:
                of_model = rows.groupby("model")[column].mean()
                lines.append((name, *(f"{of_model[model]:{form}}" for model in models)))
            for (method,), some in groups(rows, ("method",)):
                by_model = some.groupby("model")
                lines.append((method, *(_cell(by_model.get_group(m)) for m in models)))
            parts += [
                f"### Edges of a window needed for {_SHARE:.0%}: {part}",
                "In brackets the 95% interval over windows; behind it how many times the edges of "
                f"the graded choice ({GRADED}) that is, *ahead* and *behind* where the interval of "
                "this lies on one side of 1.",
                markdown_table(("chosen by", *models), lines),
            ]
        return "\n\n".join(parts)

    def figure(self, results: "pd.DataFrame") -> "Figure":
        """What each choice keeps of what attention is worth; seeds of a kind of model together."""
        curves = final(results[results["kind"] == "curve"])
        curves = curves.assign(model=curves["model"].map(family))
        figure, by_model = panels(curves, 2, 11, 3.4, sharey=True)
        for model, axes in by_model:
            for axis, part in zip(axes, (ONE, ALL), strict=True):
                rows = curves[(curves["model"] == model) & (curves["part"] == part)]
                for index, ((method,), some) in enumerate(groups(rows, ("method",))):
                    by = some.groupby("budget")
                    edges, regained = by["edges"].mean(), by["regained"].agg(["mean", "min", "max"])
                    style = ":" if method in _CONTROLS else "-"
                    colour = "#000000" if method == GRADED else f"C{index % 10}"
                    axis.plot(
                        edges, regained["mean"], style, color=colour, label=method,
                        linewidth=2.2 if method == GRADED else 1.2,
                    )  # fmt: skip
                    axis.fill_between(
                        edges, regained["min"], regained["max"], color=colour, alpha=0.1
                    )
                axis.set_xscale("log")
                axis.set_ylim(-0.05, 1.05)
                axis.axhline(_SHARE, color="#999999", linewidth=0.6)
                axis.set_title(f"{model}: {part}", fontsize="medium")
                axis.set_xlabel("edges of a window")
            axes[0].set_ylabel("share of what attention is worth")
        handles = by_model[0][1][1].get_legend_handles_labels()
        figure.legend(*handles, loc="outside right upper", frameon=False, fontsize="small")
        return figure

    def judges(self, settings: Settings) -> bool:
        """Not the model that pilots looked at."""
        return bool(settings["model"] != PILOT)

    def claims(self) -> Sequence[Claim]:
        """By one state of the last snapshot of every model but the pilot's."""
        times = "needs {bound} times the edges of the graded choice, by the"
        return (
            Claim(
                f"for one state and {_SHARE:.0%} of what attention is worth, the graded choice "
                f"({GRADED}) needs {{bound}} of the edges, in every model but the pilot's",
                _share_needed, "<=", _MOST,
            ),
            *(
                Claim(
                    f"{control} {times} lower end of the 95% interval",
                    partial(_times, control, "times_low"), ">", 1,
                )
                for control in _CONTROLS
            ),
            Claim(
                f"{_RIVAL} {times} upper end of the 95% interval",
                partial(_times, _RIVAL, "times_high"), ">=", 1,
            ),
        )  # fmt: skip

    def controlled(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """The edges of a control in the place of the graded choice, and its own in their place."""
        found = {}
        for control in _CONTROLS:
            changed = results.copy()
            own = changed["method"] == control
            needed = changed.loc[own, "needed"].to_numpy()
            changed.loc[changed["method"] == GRADED, "needed"] = needed
            changed.loc[own, ["times", "times_low", "times_high"]] = 1.0
            found[control] = changed
        return found


def _judged(results: "pd.DataFrame", method: str) -> "pd.DataFrame":
    """What a method needs for one state of each judged model, by model and seed."""
    rows = final(results[(results["kind"] == "needed") & (results["part"] == ONE)])
    rows = rows[(rows["model"] != PILOT) & (rows["method"] == method)]
    several = rows["seed"].nunique() > 1
    labels = zip(rows["model"], rows["seed"], strict=True)
    return rows.set_axis([f"{m}, seed {seed}" if several else m for m, seed in labels])


def _share_needed(results: "pd.DataFrame") -> Numbers:
    """The share of all edges that the graded choice needs."""
    rows = _judged(results, GRADED)
    return {str(model): share for model, share in (rows["needed"] / rows["n_edges"]).items()}


def _times(method: str, end: str, results: "pd.DataFrame") -> Numbers:
    """How many times the edges of the graded choice a method needs."""
    return {str(model): times for model, times in _judged(results, method)[end].items()}


def family(model: str) -> str:
    """The kind of model that it is a seed of, apart from a model that names no seed."""
    return re.sub(r"-s\d+$", ", by seed", model)


def outcome(row: Mapping[Any, Any]) -> str:
    """Of a method against the graded choice: it needs fewer edges, as many, or more."""
    if row["times_high"] < 1:
        return "ahead"
    return "behind" if row["times_low"] > 1 else "level"


def _rows(found: EdgeBudgetResult) -> list[Row]:
    frame: list[Any] = found.to_frame().to_dict("records")
    curves = [{"kind": "curve", **row} for row in frame]
    merged: dict[tuple[str, float], list[Any]] = {}
    for row in curves:  # the draws of chance are one curve
        name = re.sub(r" \d+$", "", row["method"])
        merged.setdefault((name, row["budget"]), []).append({**row, "method": name})
    rows: list[Row] = [
        {**some[0], **{key: sum(r[key] for r in some) / len(some) for key in ("loss", "regained")}}
        for some in merged.values()
    ]
    n_edges = float(found.n_edges.double().mean())
    for method, needed in found.edges_needed(_SHARE).items():
        times = found.times_needed(method, GRADED, _SHARE) if GRADED in found.methods else needed
        rows.append(
            {
                "kind": "needed",
                "method": method,
                "needed": needed.edges,
                "low": needed.low,
                "high": needed.high,
                "times": times.edges,
                "times_low": times.low,
                "times_high": times.high,
                "n_edges": n_edges,
                "worth": found.worth,
                "bare": found.loss,
            }
        )
    return rows


def _cell(rows: "pd.DataFrame") -> str:
    at = rows.mean(numeric_only=True)
    text = f"{at['needed']:.0f} ({at['low']:.0f} to {at['high']:.0f})"
    if rows["method"].iloc[0] == GRADED:
        return text
    how = outcome(at.to_dict())
    return f"{text}; {at['times']:.2g}" + ("" if how == "level" else f", *{how}*")
