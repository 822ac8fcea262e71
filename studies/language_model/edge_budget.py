"""Keep some edges of attention and put the rest to their mean: which choice needs the fewest?"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from infoflow_lens.foundation.lazy import pd
from infoflow_lens.hooks.mechanisms.budgets import EdgeBudgetResult, measure_edge_budget
from infoflow_lens.studies.claims import Claim, Numbers
from infoflow_lens.studies.language_model.snapshots import Snapshot, load_snapshot
from infoflow_lens.studies.language_model.study import (
    LanguageModelStudy,
    final,
    model_of,
    stack_rows,
)
from infoflow_lens.studies.plots import Axis, Curves, FigureSpec, Panel
from infoflow_lens.studies.study import Row, Settings, Statement
from infoflow_lens.studies.tables import Column, Part, TableSpec

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
    statement: ClassVar[Statement] = Statement.read("edge_budget")
    windows: ClassVar[Mapping[str, int]] = {"smoke": 4, "quick": 64, "full": 256}
    steps: ClassVar[Mapping[str, int | None]] = {"smoke": 1, "quick": 1, "full": 1}
    lengths: ClassVar[Mapping[str, int]] = {"smoke": 12, "quick": 64, "full": 128}

    def contexts(self, moment: Snapshot, preset: str) -> Sequence[Settings]:
        """Return windows of one length."""
        return [{"n_context": min(self.longest(moment), self.lengths[preset])}]

    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """Return rows of the curves and of the edges that methods need, of one state and of all."""
        model = load_snapshot(self.source_of(settings), device)
        n = settings["n_windows"]
        # mean patterns of the judged windows would know them
        judged, calibration = self.shuffle(model, settings, 2 * n, seed).split(n)
        rows: list[Row] = []
        for part in (ONE, ALL):
            # one state is judged by what it predicts, all states by the loss of the text
            asked: Any = {"metric": "kl", "read": (-1,)} if part == ONE else {"metric": "loss"}
            found = measure_edge_budget(
                model, judged, calibration, budgets=_BUDGETS[part], seed=seed, batch_size=_BATCH,
                progress=False, **asked,
            )  # fmt: skip
            rows += [{"part": part, **row} for row in _rows(found)]
        return rows

    def tables(self) -> Sequence[Part]:
        """Return the edges that are needed, and how many times those of the graded choice."""
        return [part for state in (ONE, ALL) for part in self._show_states(state)]

    def _show_states(self, part: str) -> Sequence[Part]:
        return (
            f"### Edges of a window needed for {_SHARE:.0%}: {part}",
            "In brackets the 95% interval over windows; behind it how many times the edges of "
            f"the graded choice ({GRADED}) that is, *ahead* and *behind* where the interval of "
            "this lies on one side of 1.",
            TableSpec(
                ("method",),
                (Column("", _cell, across="model"),),
                rows=partial(_add_facts, part),
                names={"method": "chosen by"},
            ),
        )

    def plots(self) -> FigureSpec:
        """Draw what each choice keeps of attention's worth; seeds of a kind of model together."""
        lines = [
            Curves("edges", "regained", ("method",), band=True, style=style, rows=rows,
                   colour=_colour)
            for style, rows in (("-", partial(_filter, False)), (":", partial(_filter, True)))
        ]  # fmt: skip
        panels = [
            Panel(lines, Axis("edges of a window", "log"),
                  Axis("share of what attention is worth", limits=(-0.05, 1.05), levels=(_SHARE,)),
                  partial(_title, part), partial(_curves, part),
                  legend="inside" if part == ALL else "")
            for part in (ONE, ALL)
        ]  # fmt: skip
        return FigureSpec(
            panels, per="model", rows=lambda rows: rows.assign(model=rows["model"].map(family))
        )

    def judges(self, settings: Settings) -> bool:
        """Say whether the rule is about a model: not the pilot's."""
        return bool(settings["model"] != PILOT)

    def claims(self) -> Sequence[Claim]:
        """Judge one state of the last snapshot of every model but the pilot's."""
        times = "needs {bound} times the edges of the graded choice, by the"
        return (
            Claim(
                f"for one state and {_SHARE:.0%} of what attention is worth, the graded choice "
                f"({GRADED}) needs {{bound}} of the edges, in every model but the pilot's",
                _share_of_edges, "<=", _MOST,
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

    def control_results(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Return rows with the edges of each control in place of those of the graded choice."""
        found = {}
        for control in _CONTROLS:
            changed = results.copy()
            own = changed["method"] == control
            needed = changed.loc[own, "needed"].to_numpy()
            # rows of both methods stand in the same order of models
            changed.loc[changed["method"] == GRADED, "needed"] = needed
            # a control in its own place needs as many edges as itself
            changed.loc[own, ["times", "times_low", "times_high"]] = 1.0
            found[control] = changed
        return found


def _select(results: "pd.DataFrame", method: str) -> "pd.DataFrame":
    """Select what a method needs for one state of each judged model, by model and seed."""
    rows = final(results[(results["kind"] == "needed") & (results["part"] == ONE)])
    rows = rows[(rows["model"] != PILOT) & (rows["method"] == method)]
    several = rows["seed"].nunique() > 1
    # with one seed the model's name is enough
    labels = zip(rows["model"], rows["seed"], strict=True)
    return rows.set_axis([f"{m}, seed {seed}" if several else m for m, seed in labels])


def _share_of_edges(results: "pd.DataFrame") -> Numbers:
    """Return the share of all edges that the graded choice needs."""
    rows = _select(results, GRADED)
    return {str(model): share for model, share in (rows["needed"] / rows["n_edges"]).items()}


def _times(method: str, end: str, results: "pd.DataFrame") -> Numbers:
    """Return how many times the edges of the graded choice a method needs."""
    return {str(model): times for model, times in _select(results, method)[end].items()}


def family(model: str) -> str:
    """Return the name of a model without its seed; all seeds of a kind of model share it."""
    return re.sub(r"-s\d+$", ", by seed", model)


def outcome(row: Mapping[Any, Any]) -> str:
    """Compare a method with the graded choice: "ahead" with fewer edges, "level" or "behind"."""
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


_WORTH, _EDGES = "what attention is worth (nats)", "edges"  # lines above the methods


def _add_facts(part: str, results: "pd.DataFrame") -> "pd.DataFrame":
    """Put two rows of facts about all methods above the rows of what each method needs."""
    needed = final(results[(results["kind"] == "needed") & (results["part"] == part)])
    facts = [needed[needed["method"] == GRADED].assign(method=name) for name in (_WORTH, _EDGES)]
    return stack_rows(*facts, needed)


def _curves(part: str, results: "pd.DataFrame") -> "pd.DataFrame":
    """Select what is regained, with the mean number of edges of a budget."""
    rows = final(results[(results["kind"] == "curve") & (results["part"] == part)])
    return rows.assign(edges=rows.groupby(["method", "budget"])["edges"].transform("mean"))


def _colour(method: str) -> str:
    return "#000000" if method == GRADED else ""


def _title(part: str, rows: "pd.DataFrame") -> str:
    return f"{model_of(rows)}: {part}"


def _filter(control: bool, rows: "pd.DataFrame") -> "pd.DataFrame":
    return rows[rows["method"].isin(_CONTROLS) == control]


def _cell(rows: "pd.DataFrame") -> str:
    at, method = rows.mean(numeric_only=True), rows["method"].iloc[0]
    if method in (_WORTH, _EDGES):
        return f"{at['worth']:.3f}" if method == _WORTH else f"{at['n_edges']:.0f}"
    text = f"{at['needed']:.0f} ({at['low']:.0f} to {at['high']:.0f})"
    if method == GRADED:
        return text
    how = outcome(at.to_dict())
    return f"{text}; {at['times']:.2g}" + ("" if how == "level" else f", *{how}*")
