"""InfoFlow's sets, compared with attention, rollout, flow, contributions, gradient x input."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor, nn

from infoflow_lens.foundation.lazy import pd
from infoflow_lens.hooks import (
    AttendedProbe,
    JacobianInfluence,
    PositionsProbe,
    ResampleInfluence,
    baselines,
    measure_mechanisms,
    run_probes,
)
from infoflow_lens.probing.findings import predict_by_top_k
from infoflow_lens.ranking import CONTROLS, METRICS, RankingAgreement, compare_rankings
from infoflow_lens.studies.claims import Claim, Numbers
from infoflow_lens.studies.constructions import build_construction
from infoflow_lens.studies.language_model.snapshots import Snapshot, load_snapshot
from infoflow_lens.studies.language_model.study import (
    LanguageModelStudy,
    final,
    last_layer,
    model_of,
    select_rows,
)
from infoflow_lens.studies.plots import Axis, FigureSpec, Panel
from infoflow_lens.studies.study import Row, Settings, Statement
from infoflow_lens.studies.tables import Column, Part, TableSpec, groups, render
from infoflow_lens.theory import propagate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CIRCUIT = "in_context_qa_softmax"
_QUESTIONS = {"n_questions": 20, "n_answers": 10, "n_pairs": 10}
_DONORS, _CHOOSING, _BATCH = 4, 8, 8
_STATE: Literal["resid_post"] = "resid_post"
_INFLUENCES = ("jacobian", "resample")
_JUDGED = ("auroc", "influence_inside")  # of the rule
_MUST_WIN = ("random", "recency", "attention weight")
_MUST_NOT_LOSE = ("attention rollout", "attention flow", "contribution routes")
_SIZES = "k=1"


class Sets(LanguageModelStudy):
    """Every method's sets at each state, against two measures of influence."""

    name: ClassVar[str] = "sets"
    title: ClassVar[str] = "Do InfoFlow's sets say what states depend on, better than others do?"
    statement: ClassVar[Statement] = Statement.read("sets")
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 1, "full": 1}
    windows: ClassVar[Mapping[str, int]] = {"smoke": 4, "quick": 16, "full": 96}
    steps: ClassVar[Mapping[str, int | None]] = {"smoke": 1, "quick": 4, "full": None}
    lengths: ClassVar[Mapping[str, int]] = {"smoke": 16, "quick": 64, "full": 128}

    def cases(self, preset: str) -> Sequence[Settings]:
        """Return the snapshots, and a circuit whose weights were set by hand."""
        circuit = {
            "model": "built circuit",
            "step": -1,
            "final": True,
            "weights": _CIRCUIT,
            "text": "task",
            "n_windows": self.windows[preset],
            "n_context": 3 * _QUESTIONS["n_pairs"] + 2,
            "n_states": 8,
        }
        return [*super().cases(preset), circuit]

    def contexts(self, moment: Snapshot, preset: str) -> Sequence[Settings]:
        """Return windows of one length; states are taken at eight positions, evenly."""
        length = min(self.longest(moment), self.lengths[preset])
        return [{"n_context": length, "n_states": 8}]

    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """Return a row for each influence, size, layer, range of positions and method."""
        model, windows = self._windows(settings, seed, device)
        n, length = settings["n_windows"], windows.shape[1]
        # donors and the windows that choose mechanisms are not judged
        measured, donors, choosing = windows.split([n, _DONORS, _CHOOSING])
        n_states = settings["n_states"]
        places = tuple(length * (i + 1) // n_states - 1 for i in range(n_states))
        routes = baselines(model, _STATE, positions=places)
        influences = {
            "jacobian": JacobianInfluence(_STATE, positions=places),
            "resample": ResampleInfluence(donors, "median", state=_STATE, positions=places),
        }
        chosen, attended, *results = run_probes(
            model,
            measured,
            [PositionsProbe((1, 2, 3, 4)), AttendedProbe(), *influences.values(), *routes.values()],
            batch_size=_BATCH,
            progress=False,
        )
        # the circuit answers at its last position, and gives nothing to read before
        read: Any = {"read": (-1,)} if settings["weights"] == _CIRCUIT else {}
        mechanisms = measure_mechanisms(
            model, choosing, held_out=False, metric="kl", batch_size=_BATCH, progress=False, **read
        )
        sets = predict_by_top_k(chosen, length)
        rules = mechanisms.rules(attended.positions, chosen.argmax)
        sets["mechanisms"] = propagate(rules, length)
        found, scores = results[: len(influences)], results[len(influences) :]
        rows: list[Row] = []
        for name, influence in zip(influences, found, strict=True):
            agreement = compare_rankings(sets, dict(zip(routes, scores, strict=True)), influence)
            rows += [{"influence": name, **row} for row in _rows(agreement, (0,))]
            # of early snapshots, which show the course of training, all positions together do
            if settings["final"]:
                thirds = (0, length // 3, 2 * length // 3)
                rows += [{"influence": name, **row} for row in _rows(agreement, thirds)]
        return rows

    def _windows(self, settings: Settings, seed: int, device: str) -> tuple[nn.Module, Tensor]:
        """Return the model and its windows: measured, donors of tokens, and for mechanisms."""
        n = settings["n_windows"] + _DONORS + _CHOOSING
        if settings["weights"] == _CIRCUIT:
            circuit, task = build_construction(_CIRCUIT, **_QUESTIONS)
            return circuit.to(device), task.sample(n, seed=seed)[0]
        model = load_snapshot(self.source_of(settings), device)
        return model, self.shuffle(model, settings, n, seed)

    def table(self, results: "pd.DataFrame") -> str:
        """Return the last snapshots, a table for each model; then the leads, and the training."""
        whole = _whole(results)
        parts: list[Part] = [
            "AUROC, and the share of influence inside, at the sizes of k = 1 (mean over "
            "sequences, and half the 95% interval). Mechanisms have their own sizes."
        ]
        for (model,), rows in groups(final(whole), ("model",)):
            wanted = rows[(rows["size_of"] == _SIZES) | (rows["method"] == rows["size_of"])]
            places = wanted["influence"] + ", layer " + wanted["layer"].astype(str)
            table = TableSpec(("method",), (Column("", _cell, across="place"),))
            parts += [f"### {model}", table.render(wanted.assign(place=places)), _sizes(wanted)]
        if not whole["final"].all():
            training = TableSpec(
                ("model", "influence", "step"),
                (Column("", "auroc", "first", ".3f", across="method"),),
                rows=lambda rows: _select(last_layer(rows)),
            )
            parts += ["### Over training: AUROC in the last layer, k = 1", training]
        return render(parts, whole)

    def plots(self) -> FigureSpec:
        """Give AUROC of every method in the last layer, at the end and over training, by model."""
        return FigureSpec(
            (
                Panel(
                    (_draw_final,), Axis("AUROC, last layer (filled: jacobian, open: resample)"),
                    title=lambda rows: f"{model_of(rows)}, at the end", rows=final,
                ),
                *(
                    Panel((_draw_training,), Axis("step"), title=influence, legend="",
                          rows=partial(select_rows, "influence", influence))
                    for influence in _INFLUENCES
                ),
            ),
            per="model",
            rows=lambda results: _select_sizes(last_layer(_whole(results))),
        )  # fmt: skip

    def claims(self) -> Sequence[Claim]:
        """Judge the last layer of the last snapshot of every model but the built circuit."""
        wins = (
            "in the last layer of every trained model, at the sizes of k = 1 and for both "
            "influences, the sets' lead over {} is {{bound}} by the lower ends of the 95% "
            "intervals over sequences, in AUROC and in influence inside"
        )
        does_not_lose = "their lead over {} is {{bound}} in one of the two, by the upper end"
        texts = [(wins, "low", name) for name in _MUST_WIN]
        texts += [(does_not_lose, "high", name) for name in _MUST_NOT_LOSE]
        return [
            Claim(text.format(name), partial(_leads, name, end), ">" if end == "low" else ">=", 0)
            for text, end, name in texts
        ]

    def control_results(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Return rows with each control in place of the sets: it has no lead over itself."""
        found = {}
        for control in _MUST_WIN[:2]:
            changed = results.copy()
            leads = [name for name in changed if name.startswith("lead_")]
            changed.loc[changed["method"] == control, leads] = 0.0
            found[control] = changed
        return found


def _leads(method: str, end: str, results: "pd.DataFrame") -> Numbers:
    """Return the sets' lead over a method: the smaller lower end or the larger upper end of two."""
    rows = _select(last_layer(final(_whole(results))))
    ends = [f"lead_{metric}_{end}" for metric in _JUDGED]
    found: dict[str, float] = {}
    for (model, influence), some in groups(rows, ("model", "influence")):
        both = some[some["method"] == method][ends]
        # to win takes both metrics, not to lose takes one of them
        lead = both.min(axis=1, skipna=False) if end == "low" else both.max(axis=1, skipna=False)
        found[f"{model}, {influence}"] = float(lead.mean()) if len(lead) else math.nan
    return found


def _draw_final(axes: "Axes", rows: "pd.DataFrame") -> None:
    """Draw a point with its interval for each method and influence."""
    methods = list(dict.fromkeys(rows["method"]))
    for shift, (influence, marker) in enumerate(zip(_INFLUENCES, ("o", "s"), strict=True)):
        for row in select_rows("influence", influence, rows).itertuples():
            at: Any = row
            axes.errorbar(
                at.auroc, methods.index(at.method) + 0.24 * shift - 0.12,
                xerr=(at.auroc_high - at.auroc_low) / 2, marker=marker, markersize=4,
                color=_colour(at.method, methods), mfc=None if shift == 0 else "white",
            )  # fmt: skip
    labels = ["InfoFlow, k = 1" if method == _SIZES else method for method in methods]
    axes.set_yticks(range(len(methods)), labels, fontsize="small")
    axes.invert_yaxis()
    axes.axvline(0.5, color="#999999", linewidth=0.6)


def _draw_training(axes: "Axes", rows: "pd.DataFrame") -> None:
    """Draw a line with its interval for each method."""
    methods = list(dict.fromkeys(rows["method"]))
    for (method,), some in groups(rows.sort_values("step", kind="stable"), ("method",)):
        # -1, the step of a model of which none is known, is drawn at 0
        steps, colour = some["step"].clip(lower=0), _colour(method, methods)
        style, width = ":" if method in CONTROLS else "-", 2.2 if method == _SIZES else 1.2
        axes.plot(steps, some["auroc"], style, marker=".", color=colour, linewidth=width)
        axes.fill_between(steps, some["auroc_low"], some["auroc_high"], color=colour, alpha=0.1)


def _colour(method: str, methods: Sequence[str]) -> str:
    return "#000000" if method == _SIZES else f"C{methods.index(method) % 10}"


def _rows(agreement: RankingAgreement, starts: tuple[int, ...]) -> list[dict[str, Any]]:
    """Give the table with the leads of the sets, rounded: intervals are wider than a thousandth."""
    frame = agreement.to_frame(starts)
    keys = ["size_of", "method", "layer", "positions"]
    leads = agreement.ahead(starts)
    ends = [f"{metric}{end}" for metric in _JUDGED for end in ("", "_low", "_high")]
    leads = leads[[*keys, *ends]].rename(columns={name: f"lead_{name}" for name in ends})
    # only what is judged keeps its intervals: the others would double the file
    left_out = [f"{m}{end}" for m in METRICS if m not in _JUDGED for end in ("_low", "_high")]
    frame = frame.drop(columns=left_out).merge(leads, on=keys, how="left")
    frame["part"] = "all" if len(starts) == 1 else "third"
    rows: list[dict[str, Any]] = (
        frame.round(4).astype(object).where(frame.notna(), None).to_dict("records")
    )
    return rows


def _whole(results: "pd.DataFrame") -> "pd.DataFrame":
    return results[results["part"] == "all"]


def _select_sizes(rows: "pd.DataFrame") -> "pd.DataFrame":
    return rows[rows["size_of"] == _SIZES]


def _select(rows: "pd.DataFrame") -> "pd.DataFrame":
    """Select the rows of trained models at the set sizes of the rule."""
    rows = _select_sizes(rows)
    return rows[rows["weights"] != _CIRCUIT]


def _cell(rows: "pd.DataFrame") -> str | None:
    """Return AUROC with its interval, influence inside, and whether the sets are ahead."""
    row: Any = rows.iloc[0]
    half = (row["auroc_high"] - row["auroc_low"]) / 2
    if math.isnan(row["auroc"]):
        return None
    sign = ""
    if row["method"] != "measured":
        low, high = ([row[f"lead_{name}_{end}"] for name in _JUDGED] for end in ("low", "high"))
        sign = " (behind)" if min(low) > 0 else " (ahead)" if max(high) < 0 else ""
    interval = "" if math.isnan(half) else f" ± {half:.3f}"
    return f"{row['auroc']:.3f}{interval}; {row['influence_inside']:.3f}{sign}"


def _sizes(wanted: "pd.DataFrame") -> str:
    """Say how large the sets are."""
    sizes = wanted[wanted["method"] == wanted["size_of"]]
    sizes_in_words = "; ".join(
        f"{row['size_of']}, layer {row['layer']}: "
        + (
            f"{row['mean_size']:.1f} of {row['mean_candidates']:.1f} candidates in "
            f"{row['n_states']} states, "
            if row["n_states"]
            else ""
        )
        + f"all in {row['n_whole']}, none in {row['n_empty']}"
        for row in select_rows("influence", wanted["influence"].iloc[0], sizes).to_dict("records")
    )
    return (
        "(ahead): k = 1 loses to it by the rule's intervals; (behind): it loses to k = 1. Sizes: "
        f"{sizes_in_words}."
    )
