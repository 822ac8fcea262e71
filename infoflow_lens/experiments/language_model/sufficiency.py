"""Every head's pattern replaced at once: by its mechanism, and by one ideal for all heads."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from infoflow_lens.experiments.claims import Claim, Numbers
from infoflow_lens.experiments.language_model.snapshots import Snapshot, loaded
from infoflow_lens.experiments.language_model.study import (
    MODEL,
    LanguageModelStudy,
    by_model,
    final,
    groups,
    panels,
    step_shown,
)
from infoflow_lens.experiments.study import Row, Settings, Statement
from infoflow_lens.experiments.tables import markdown_table
from infoflow_lens.hooks import IDEALS, MechanismsResult, measure_mechanisms, replace_greedily
from infoflow_lens.hooks.mechanisms.ideals import SOFT
from infoflow_lens.hooks.mechanisms.sufficiency import (
    EVERY,
    KS,
    MEAN,
    MECHANISMS,
    OF_THEORY,
    RANDOM,
    Interval,
    SufficiencyResult,
    measure_sufficiency,
    of_least_damage,
)
from infoflow_lens.models.configs import shape_of_named

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_SHARE, _LEAST_COST, _THRESHOLD = 0.25, 0.1, 0.05
_DRAWS, _BATCH, _GREEDY_WINDOWS = 8, 16, 16
_DEEP, _SHORT = 2, 64  # models of more layers are asked at so many tokens
_MOST_HEADS = 16  # of models of which the number of windows is varied
_SAME, _OTHERS = "same windows", "held out"
BEST, GREEDY = "best of three", "greedy"
ONE_IDEAL = (f"{EVERY}top 1", *(EVERY + i for i in ("specific_position", "global", "own_position")))
TOP_4 = f"{EVERY}top 4"
_NOTE = (
    "All heads replaced: by how many nats a token the loss rises, and in brackets the 95% interval "
    "of its share of what mean ablation costs"
)


class Sufficiency(LanguageModelStudy):
    """Mean patterns, the choice of mechanisms and the loss, each on windows of their own."""

    name: ClassVar[str] = "sufficiency"
    title: ClassVar[str] = "Are the mechanisms of all heads enough together?"
    statement: ClassVar[Statement] = Statement.of("sufficiency")
    windows: ClassVar[Mapping[str, int]] = {"smoke": 12, "quick": 512, "full": 1024}
    steps: ClassVar[Mapping[str, int | None]] = {"smoke": 1, "quick": 1, "full": None}
    ladder: ClassVar[Mapping[str, Sequence[int]]] = {
        "smoke": (8,),
        "quick": (32, 64, 128, 256),
        "full": (32, 64, 128, 256),
    }

    def contexts(self, moment: Snapshot, preset: str) -> Sequence[Settings]:
        """All heads; for the last snapshot of a small model numbers of windows, too."""
        shape = shape_of_named(moment.source.partition("@")[0])
        length = min(self.longest(moment), _SHORT if len(shape.n_heads) > _DEEP else 2**30)
        length = min(length, 24) if preset == "smoke" else length
        cases: list[Settings] = [{"part": "heads", "draw": 0, "n_context": length}]
        if moment.final and sum(shape.n_heads) <= _MOST_HEADS:
            cases += [
                {"part": "windows", "n_windows": n, "draw": draw, "n_context": length}
                for n in self.ladder[preset]
                for draw in range(_n_draws(n))
            ]
        return cases

    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """Rows of assignments and of heads; or of the two ways to choose on few windows."""
        model = loaded(self.source_of(settings), device)
        if settings["part"] == "windows":
            n_draws = _n_draws(settings["n_windows"])
            n = n_draws * settings["n_windows"]
            windows = self.sequences(model, {**settings, "n_windows": n}, seed)
            return _by_windows(model, windows[settings["draw"] :: n_draws], seed)
        windows = self.sequences(model, settings, seed)
        calibration, choosing, judged = windows[0::4], windows[2::4], windows[1::2]
        mechanisms = measure_mechanisms(
            model, choosing, calibration=calibration, threshold=_THRESHOLD, seed=seed,
            batch_size=_BATCH, progress=False,
        )  # fmt: skip
        joint = replace_greedily(
            model, choosing[:_GREEDY_WINDOWS], mechanisms, budget=1e9, ideals=OF_THEORY,
            batch_size=_BATCH, progress=False,
        )  # fmt: skip
        others = {BEST: of_least_damage(mechanisms, OF_THEORY), GREEDY: joint.heads}
        found = measure_sufficiency(
            model, judged, mechanisms, shares=(1.0,), draws=_DRAWS, others=others, seed=seed,
            batch_size=_BATCH, progress=False,
        )  # fmt: skip
        return [*_of_assignments(found), *_of_heads(mechanisms, others)]

    def table(self, results: "pd.DataFrame") -> str:
        """The curve of one ideal for every head; what single heads need; numbers of windows."""
        last = final(results)
        curve = last[last["kind"] == "assignment"]
        models = list(dict.fromkeys(curve["model"]))
        lines = []
        for name in _order(curve["assignment"]):
            cells = [_cell(curve[curve["model"] == model], name) for model in models]
            lines.append((name, *cells))
        about = curve.groupby("model", sort=False)[["n_context", "n_windows", "loss"]].first()
        context = (f"{int(row.n_context)} tokens, {row.loss:.3f}" for row in about.itertuples())
        lines.insert(0, ("none: context, loss", *context))
        parts = [_NOTE, markdown_table(("replaced by", *models), lines)]
        heads = last[last["kind"] == "head"]
        single = []
        for (model,), rows in groups(heads, ("model",)):
            enough = [f"{int(rows[f'sufficient_{i}'].sum())}" for i in IDEALS]
            labels = Counter(rows["mechanism"])
            single.append((model, len(rows), *enough, *(labels[i] for i in (*IDEALS, SOFT))))
        shown = [ideal.replace("_", " ") for ideal in IDEALS]
        parts += [
            "Heads for which an ideal alone is enough (damage at most .05 nats on windows that "
            "chose nothing), each ideal by itself; then the label, the first that is enough",
            markdown_table(
                ("model", "heads", *shown, *(f"label {name}" for name in (*shown, SOFT))), single
            ),
        ]
        hard = []
        for (model,), rows in groups(heads, ("model",)):
            able = rows[rows["damage_max_position"] <= 2 * _THRESHOLD]
            for row in able.sort_values("damage_max_position").to_dict("records"):
                damage, error = row["damage_max_position"], row["error_max_position"]
                hard.append(
                    (
                        model, f"{row['layer']:.0f}.{row['head']:.0f}", f"{damage:.4f}",
                        f"{damage - 1.96 * error:.4f} to {damage + 1.96 * error:.4f}",
                        row["mechanism"].replace("_", " "),
                        "yes" if damage <= _THRESHOLD else "no",
                    )
                )  # fmt: skip
        parts += [
            "Heads whose hard maximum costs at most .1 nats of divergence, with 95% intervals",
            markdown_table(("model", "head", "damage", "interval", "label", "enough"), hard),
        ]
        ladder = last[last["kind"] == "windows"]
        if len(ladder):
            parts += [
                "Mechanisms chosen on half of the windows, all heads replaced on the other half: "
                "mean patterns of the windows that judge them (as published on 2026-11-22) and of "
                "others; heads labelled specific position, and the share of mean ablation's cost",
                _windows_table(ladder),
            ]
        early = results[(results["kind"] == "assignment") & ~results["final"].astype(bool)]
        if len(early):
            over = [
                (model, step_shown(step), *(_cell(rows, name) for name in (MECHANISMS, TOP_4)))
                for (model, step), rows in groups(early, MODEL)
            ]
            parts += [
                "Over training",
                markdown_table(("model", "step", MECHANISMS, TOP_4), over),
            ]
        return "\n\n".join(parts)

    def figure(self, results: "pd.DataFrame") -> "Figure":
        """Every head with its k largest keys, beside assignments; shares by numbers of windows."""
        last = final(results)
        figure, by_model = panels(last, 2, 10, 3.0)
        for model, (left, right) in by_model:
            rows = last[(last["model"] == model) & (last["kind"] == "assignment")]
            excess = rows.groupby("assignment")["excess"].mean()
            tops = [excess[f"{EVERY}top {k}"] for k in KS]
            left.plot(KS, tops, "o-", color="#cc79a7", label="every head: k largest keys")
            for name, label, colour, style in (
                (MEAN, "mean ablation", "#444444", "-"),
                (f"{EVERY}global", "every head: global", "#56b4e9", ":"),
                (f"{EVERY}specific_position", "every head: mean pattern", "#009e73", ":"),
                (BEST, "best of the theory's three", "#e69f00", "--"),
                (GREEDY, "the three, chosen greedily", "#e69f00", ":"),
                (MECHANISMS, "mechanisms", "#d55e00", "-"),
            ):
                left.axhline(excess[name], color=colour, linestyle=style, label=label)
            dealt = excess[excess.index.str.startswith(RANDOM)]
            left.axhspan(dealt.min(), dealt.max(), color="#999999", alpha=0.25, label="dealt")
            left.set_xscale("log", base=2)
            left.xaxis.set_major_formatter("{x:g}")
            left.set_ylim(0, None)
            left.set_xlabel("keys kept by every head")
            left.set_ylabel(f"{model}\nexcess loss (nats a token)")
            ladder = last[(last["model"] == model) & (last["kind"] == "windows")]
            for measure, colour, by in ((_SAME, "#444444", 0.97), (_OTHERS, "#d55e00", 1.03)):
                some = ladder[ladder["measure"] == measure] if len(ladder) else ladder
                if some.empty:
                    continue
                spread = (some["share"] - some["share_low"], some["share_high"] - some["share"])
                right.errorbar(some["n_windows"] * by, some["share"], spread, fmt="o", ms=3,
                               color=colour, label=measure)  # fmt: skip
            right.set_ylim(0, None)
            right.axhline(_SHARE, color="#999999", linewidth=0.6)
            right.set_xscale("log", base=2)
            right.xaxis.set_major_formatter("{x:g}")
            right.set_xlabel("windows")
            right.set_ylabel("share of mean ablation")
            right.set_visible(len(ladder) > 0)
        handles, labels = by_model[0][1][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
        if by_model[0][1][1].get_visible():
            by_model[0][1][1].legend(frameon=False, fontsize="small")
        return figure

    def claims(self) -> Sequence[Claim]:
        """By the last snapshot of every model."""
        fewer = (
            "costs {bound} nats more than the mechanisms, by the lower end of the 95% interval of "
            "the difference"
        )
        return (
            Claim(
                "(A) with all heads in their mechanisms the excess loss is {bound} of that of mean "
                "ablation, by the upper end of the 95% interval, in every model",
                partial(_least, "share_high", (MECHANISMS,)), "<=", _SHARE,
            ),
            Claim(
                "(A) mean ablation costs {bound} nats", partial(_least, "excess", (MEAN,)),
                ">=", _LEAST_COST,
            ),
            Claim(
                f"(B) each of eight random deals of the same mechanisms {fewer}",
                partial(_least, "lead_low", None), ">", 0,
            ),
            Claim(
                "(B) every head with any one ideal (hard maximum, mean pattern, global, own "
                f"position) {fewer}",
                partial(_least, "lead_low", ONE_IDEAL), ">", 0,
            ),
            Claim(
                f"(C) every head with its four largest keys {fewer}",
                partial(_least, "lead_low", (TOP_4,)), ">", 0,
            ),
        )  # fmt: skip

    def controlled(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Each assignment in the place of the mechanisms: it costs no less than itself."""
        found = {}
        for name, controls in {
            "mean ablation": (MEAN,),
            "random deals": _deals(results["assignment"]),
            "one ideal for every head": ONE_IDEAL,
            "four largest keys for every head": (TOP_4,),
        }.items():
            changed = results.copy()
            is_control = changed["assignment"].isin(list(controls))
            for (model,), rows in groups(changed[is_control], ("model",)):
                own = (changed["model"] == model) & (changed["assignment"] == MECHANISMS)
                changed.loc[own, "share_high"] = rows["share_high"].min()
            changed.loc[is_control, "lead_low"] = 0.0
            found[name] = changed
        return found


def _deals(assignments: Iterable[str]) -> tuple[str, ...]:
    """The random deals of the mechanisms among some assignments."""
    return tuple(name for name in dict.fromkeys(assignments) if str(name).startswith(RANDOM))


def _least(column: str, names: Sequence[str] | None, results: "pd.DataFrame") -> Numbers:
    """The least number over assignments, the random deals where none is named; NaN without any."""
    rows = results[results["kind"] == "assignment"]

    def of_model(own: "pd.DataFrame") -> float:
        means = own.groupby("assignment")[column].mean()
        return float(means.reindex(list(names or _deals(means.index))).min(skipna=False))

    return by_model(rows, of_model)


def _n_draws(n_windows: int) -> int:
    """How often few windows are drawn, each time others."""
    return max(1, min(4, 128 // n_windows))


def _of_assignments(found: SufficiencyResult) -> list[Row]:
    """A row for each assignment: its excess, its share of mean ablation's, and who leads."""
    rows: list[Row] = []
    errors = found.errors()[:, -1].tolist()
    for name, excess, error in zip(
        found.assignments, found.excess()[:, -1].tolist(), errors, strict=True
    ):
        rows.append(
            {
                "kind": "assignment", "assignment": name, "loss": found.loss, "excess": excess,
                "error": error, **_interval("share", found.share(assignment=name)),
                **_interval("lead", found.lead(over=name)),
                **_interval("best_lead", found.lead(over=name, assignment=BEST)),
            }
        )  # fmt: skip
    return rows


def _interval(name: str, found: Interval) -> Row:
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


def _of_heads(mechanisms: MechanismsResult, others: Mapping[str, Any]) -> list[Row]:
    """A row for each head: damages, errors, and what is enough."""
    frame = mechanisms.to_frame().rename(columns={ideal: f"damage_{ideal}" for ideal in IDEALS})
    records: list[Any] = frame.to_dict("records")
    for row in records:
        head = row["layer"], row["head"]
        row |= {name.replace(" ", "_"): ideals.get(head) for name, ideals in others.items()}
        row |= {f"sufficient_{ideal}": int(row[f"sufficient_{ideal}"]) for ideal in IDEALS}
    return [{"kind": "head", **row} for row in records]


def _by_windows(model: nn.Module, windows: Tensor, seed: int) -> list[Row]:
    """Mechanisms of half of the windows, with and without their own mean patterns."""
    choosing, judged = windows[0::2], windows[1::2]
    rows: list[Row] = []
    for measure in (_SAME, _OTHERS):
        mechanisms = measure_mechanisms(
            model, choosing, held_out=measure == _OTHERS, threshold=_THRESHOLD, seed=seed,
            batch_size=_BATCH, progress=False,
        )  # fmt: skip
        found = measure_sufficiency(
            model, judged, mechanisms, shares=(1.0,), draws=0, ks=(), batch_size=_BATCH,
            progress=False,
        )  # fmt: skip
        excess = dict(zip(found.assignments, found.excess()[:, -1].tolist(), strict=True))
        labels = Counter(name for layer in mechanisms.mechanisms() for name in layer)
        enough = torch.cat(mechanisms.sufficient).sum(dim=0).tolist()
        rows.append(
            {
                "kind": "windows", "measure": measure, "loss": found.loss,
                "excess": excess[MECHANISMS], "mean_ablation": excess[MEAN],
                **_interval("share", found.share()),
                **{f"n_{name}": labels[name] for name in (*IDEALS, SOFT)},
                **{f"enough_{ideal}": n for ideal, n in zip(IDEALS, enough, strict=True)},
            }
        )  # fmt: skip
    return rows


def _order(names: Iterable[str]) -> list[str]:
    """Assignments without repeats, the random deals as one, mean ablation behind."""
    found = list(dict.fromkeys(RANDOM if name.startswith(RANDOM) else name for name in names))
    return [*(name for name in found if name not in (RANDOM, MEAN)), RANDOM, MEAN]


def _cell(rows: "pd.DataFrame", name: str) -> str | None:
    """The excess of an assignment and its share; of random deals the median and the range."""
    some = (
        rows[rows["assignment"].str.startswith(name)]
        if name == RANDOM
        else (rows[rows["assignment"] == name])
    )
    if some.empty:
        return None
    if name == RANDOM:
        excess = some["excess"]
        return f"{excess.median():+.3f} ({excess.min():+.3f} to {excess.max():+.3f})"
    row = some[["excess", "share", "share_low", "share_high"]].mean()
    inside = "" if name == MEAN else f" ({row['share_low']:.0%} to {row['share_high']:.0%})"
    return f"{row['excess']:+.3f}{inside}"


def _windows_table(ladder: "pd.DataFrame") -> str:
    """A line for each number of windows and draw, the two ways beside each other."""
    lines = []
    for (model, n, draw), rows in groups(ladder, ("model", "n_windows", "draw")):
        cells = []
        for measure in (_SAME, _OTHERS):
            row = rows[rows["measure"] == measure].iloc[0]
            within = "yes" if row["share"] <= _SHARE else "no"
            cells += [
                int(row["n_specific_position"]),
                int(row["enough_specific_position"]),
                f"{row['share']:.0%} ({row['share_low']:.0%} to {row['share_high']:.0%})",
                within,
            ]
        lines.append((model, int(n), int(draw) + 1, *cells))
    columns = ("label", "enough", "share", "within a quarter")
    return markdown_table(
        ("model", "windows", "draw", *(f"{c}, {m}" for m in (_SAME, _OTHERS) for c in columns)),
        lines,
    )
