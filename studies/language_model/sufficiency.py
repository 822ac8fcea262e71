"""Every head's pattern replaced at once: by its mechanism, and by one ideal for all heads."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from infoflow_lens.foundation.lazy import pd
from infoflow_lens.hooks import IDEALS, MechanismsResult, measure_mechanisms, replace_greedily
from infoflow_lens.hooks.interventions.patterns import SOFT
from infoflow_lens.hooks.mechanisms.measure import (
    EVERY,
    KS,
    MEAN,
    MECHANISMS,
    OF_THEORY,
    RANDOM,
    Interval,
    SufficiencyResult,
    choose_least_damage,
    measure_sufficiency,
)
from infoflow_lens.models.configs import read_shape
from infoflow_lens.studies.claims import Claim, Numbers
from infoflow_lens.studies.language_model.snapshots import Snapshot, load_snapshot
from infoflow_lens.studies.language_model.study import (
    LanguageModelStudy,
    add_names,
    final,
    format_steps,
    measure_models,
    model_of,
    select_rows,
    stack_rows,
)
from infoflow_lens.studies.plots import GREEN, GREY, ORANGE, Axis, FigureSpec, Panel
from infoflow_lens.studies.study import Row, Settings, Statement
from infoflow_lens.studies.tables import Column, Part, TableSpec, groups, render

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHARE, _LEAST_COST, _THRESHOLD = 0.25, 0.1, 0.05
_DRAWS, _BATCH, _GREEDY_WINDOWS = 8, 16, 16
_DEEP, _SHORT = 2, 64  # models of more layers are asked at so many tokens
_MOST_HEADS = 16  # of models of which the number of windows is varied
_SAME, _OTHERS = "same windows", "held out"
BEST, GREEDY = "best of three", "greedy"
ONE_IDEAL = (f"{EVERY}top 1", *(EVERY + i for i in ("specific_position", "global", "own_position")))
TOP_4 = f"{EVERY}top 4"


class Sufficiency(LanguageModelStudy):
    """The loss with mechanisms; their choice, mean patterns and the loss use different windows."""

    name: ClassVar[str] = "sufficiency"
    title: ClassVar[str] = "Are the mechanisms of all heads enough together?"
    statement: ClassVar[Statement] = Statement.read("sufficiency")
    windows: ClassVar[Mapping[str, int]] = {"smoke": 12, "quick": 512, "full": 1024}
    steps: ClassVar[Mapping[str, int | None]] = {"smoke": 1, "quick": 1, "full": None}
    ladder: ClassVar[Mapping[str, Sequence[int]]] = {
        "smoke": (8,),
        "quick": (32, 64, 128, 256),
        "full": (32, 64, 128, 256),
    }

    def contexts(self, moment: Snapshot, preset: str) -> Sequence[Settings]:
        """Take all heads; for the last snapshot of a small model numbers of windows, too."""
        shape = read_shape(moment.source.partition("@")[0])
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
        """Return rows of assignments and of heads; or of the two ways to choose on few windows."""
        model = load_snapshot(self.source_of(settings), device)
        if settings["part"] == "windows":
            n_draws = _n_draws(settings["n_windows"])
            # draws take every n-th window of one long list, so no window is in two of them
            n = n_draws * settings["n_windows"]
            windows = self.sequences(model, {**settings, "n_windows": n}, seed)
            return _measure_windows(model, windows[settings["draw"] :: n_draws], seed)
        windows = self.sequences(model, settings, seed)
        # if the choice and the loss shared windows, the choice would fit their noise
        calibration, choosing, judged = windows[0::4], windows[2::4], windows[1::2]
        mechanisms = measure_mechanisms(
            model, choosing, calibration=calibration, threshold=_THRESHOLD,
            batch_size=_BATCH, progress=False,
        )  # fmt: skip
        # the greedy choice measures many assignments, so few windows must do
        joint = replace_greedily(
            model, choosing[:_GREEDY_WINDOWS], mechanisms, budget=1e9, ideals=OF_THEORY,
            batch_size=_BATCH, progress=False,
        )  # fmt: skip
        others = {BEST: choose_least_damage(mechanisms, OF_THEORY), GREEDY: joint.heads}
        found = measure_sufficiency(
            model, judged, mechanisms, shares=(1.0,), draws=_DRAWS, others=others, seed=seed,
            batch_size=_BATCH, progress=False,
        )  # fmt: skip
        return [*_list_assignments(found), *_list_heads(mechanisms, others)]

    def table(self, results: "pd.DataFrame") -> str:
        """Give the curve of one ideal for all heads; what single heads need; numbers of windows."""
        last = final(results)
        early = results[(results["kind"] == "assignment") & ~results["final"].astype(bool)]
        parts = [*_OF_ASSIGNMENTS, *_OF_HEADS]
        parts += _OF_WINDOWS if (last["kind"] == "windows").any() else ()
        text = render(parts, last)
        return f"{text}\n\n{render(_OVER_TRAINING, early)}" if len(early) else text

    def plots(self) -> FigureSpec:
        """Draw every head with its k largest keys, beside assignments; shares by windows."""
        return FigureSpec(
            (
                Panel((_draw_assignments,), Axis("keys kept by every head", "log2"),
                      Axis("excess loss (nats a token)", limits=(0, None)), model_of,
                      partial(select_rows, "kind", "assignment"), legend="above"),
                Panel((_draw_windows,), Axis("windows", "log2"),
                      Axis("share of mean ablation", limits=(0, None), levels=(_SHARE,)),
                      rows=partial(select_rows, "kind", "windows")),
            ),
            per="model",
            size=(4.6, 3.6),
            rows=final,
        )  # fmt: skip

    def claims(self) -> Sequence[Claim]:
        """Judge the last snapshot of every model."""
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

    def control_results(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Return rows with each assignment in place of the mechanisms:
        it costs no less than itself.
        """
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
                # of several controls the one that comes nearest to passing
                changed.loc[own, "share_high"] = rows["share_high"].min()
            changed.loc[is_control, "lead_low"] = 0.0
            found[name] = changed
        return found


def _deals(assignments: Iterable[str]) -> tuple[str, ...]:
    """Return the random deals of the mechanisms among some assignments."""
    return tuple(name for name in dict.fromkeys(assignments) if str(name).startswith(RANDOM))


def _least(column: str, names: Sequence[str] | None, results: "pd.DataFrame") -> Numbers:
    """Return the least number over the named assignments, else over random deals; NaN if none."""
    rows = select_rows("kind", "assignment", results)

    def least(own: "pd.DataFrame") -> float:
        means = own.groupby("assignment")[column].mean()
        # an assignment that is missing is NaN, which breaks a claim
        return float(means.reindex(list(names or _deals(means.index))).min(skipna=False))

    return measure_models(rows, least)


def _n_draws(n_windows: int) -> int:
    """Count how many times windows are drawn, different ones each time."""
    return max(1, min(4, 128 // n_windows))


def _list_assignments(found: SufficiencyResult) -> list[Row]:
    """Make a row for each assignment: its excess, its share of mean ablation's, and who leads."""
    rows: list[Row] = []
    # of the last share, where all heads are replaced
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


def _list_heads(mechanisms: MechanismsResult, others: Mapping[str, Any]) -> list[Row]:
    """Make a row for each head: damages, errors, and what is enough."""
    frame = mechanisms.to_frame().rename(columns={ideal: f"damage_{ideal}" for ideal in IDEALS})
    records: list[Any] = frame.to_dict("records")
    for row in records:
        head = row["layer"], row["head"]
        row |= {name.replace(" ", "_"): ideals.get(head) for name, ideals in others.items()}
        row |= {f"sufficient_{ideal}": int(row[f"sufficient_{ideal}"]) for ideal in IDEALS}
    return [{"kind": "head", **row} for row in records]


def _measure_windows(model: nn.Module, windows: Tensor, seed: int) -> list[Row]:
    """Measure mechanisms of half of the windows, with and without their own mean patterns."""
    # mechanisms are chosen on one half of the windows, and their loss is judged on the other
    choosing, judged = windows[0::2], windows[1::2]
    rows: list[Row] = []
    for measure in (_SAME, _OTHERS):
        mechanisms = measure_mechanisms(
            model, choosing, held_out=measure == _OTHERS, threshold=_THRESHOLD,
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


# Tables and figures


def _assignments(results: "pd.DataFrame") -> "pd.DataFrame":
    """Return assignments below the model as it is; random deals as one, mean ablation behind."""
    rows = select_rows("kind", "assignment", results)
    deals = rows["assignment"].str.startswith(RANDOM)
    rows = rows.assign(assignment=rows["assignment"].where(~deals, RANDOM))
    bare = rows.drop_duplicates("model").assign(assignment=_BARE)
    last = rows["assignment"].isin([RANDOM, MEAN])
    ends = [rows[rows["assignment"] == name] for name in (RANDOM, MEAN)]
    return stack_rows(bare, rows[~last], *ends)


def _cell(rows: "pd.DataFrame") -> str:
    """Give the excess of an assignment and its share; of random deals the median and the range."""
    name, excess = rows["assignment"].iloc[0], rows["excess"]
    if name == _BARE:
        return f"{rows['n_context'].iloc[0]:.0f} tokens, {rows['loss'].iloc[0]:.3f}"
    if name == RANDOM:
        return f"{excess.median():+.3f} ({excess.min():+.3f} to {excess.max():+.3f})"
    inside = "" if name == MEAN else f" ({_ends(rows)})"
    return f"{excess.mean():+.3f}{inside}"


def _ends(rows: "pd.DataFrame") -> str:
    return f"{rows['share_low'].mean():.0%} to {rows['share_high'].mean():.0%}"


def _able(results: "pd.DataFrame") -> "pd.DataFrame":
    """Give heads for which a hard maximum is not far from enough, by model; what it costs them."""
    rows = select_rows("kind", "head", results)
    rows = add_names(rows[rows["damage_max_position"] <= 2 * _THRESHOLD])
    # models in the order of the rows, within each the heads by damage
    models = {model: place for place, model in enumerate(dict.fromkeys(results["model"]))}
    by_damage = rows.sort_values("damage_max_position")
    return by_damage.sort_values("model", key=lambda names: names.map(models), kind="stable")


def _interval_of_damage(rows: "pd.DataFrame") -> str:
    damage, error = (rows[f"{name}_max_position"].iloc[0] for name in ("damage", "error"))
    return f"{damage - 1.96 * error:.4f} to {damage + 1.96 * error:.4f}"


def _count_label(label: str, rows: "pd.DataFrame") -> int:
    return int((rows["mechanism"] == label).sum())


def _enough(ideal: str, rows: "pd.DataFrame") -> int:
    return int(rows[f"sufficient_{ideal}"].sum())


def _make_columns(measure: str) -> list[Column]:
    """Make the columns of one way to measure the mechanisms of few windows."""

    def select(number: "Callable[[pd.DataFrame], object]") -> "Callable[[pd.DataFrame], object]":
        return lambda rows: number(rows[rows["measure"] == measure])

    return [
        Column(f"label, {measure}", select(lambda rows: int(rows["n_specific_position"].iloc[0]))),
        Column(
            f"enough, {measure}", select(lambda rows: int(rows["enough_specific_position"].iloc[0]))
        ),
        Column(
            f"share, {measure}", select(lambda rows: f"{rows['share'].iloc[0]:.0%} ({_ends(rows)})")
        ),
        Column(
            f"within a quarter, {measure}", select(lambda rows: rows["share"].iloc[0] <= _SHARE)
        ),
    ]


def _early(results: "pd.DataFrame") -> "pd.DataFrame":
    return format_steps(results[results["assignment"].isin([MECHANISMS, TOP_4])])


_BARE = "none: context, loss"
_SHOWN = {ideal: ideal.replace("_", " ") for ideal in IDEALS}
_OF_ASSIGNMENTS: tuple[Part, ...] = (
    "All heads replaced: by how many nats a token the loss rises, and in brackets the 95% interval "
    "of its share of what mean ablation costs",
    TableSpec(
        ("assignment",),
        (Column("", _cell, across="model"),),
        rows=_assignments,
        names={"assignment": "replaced by"},
    ),
)
_OF_HEADS: tuple[Part, ...] = (
    "Heads for which an ideal alone is enough (damage at most .05 nats on windows that "
    "chose nothing), each ideal by itself; then the label, the first that is enough",
    TableSpec(
        ("model",),
        (
            Column("heads", len),
            *(Column(name, partial(_enough, ideal)) for ideal, name in _SHOWN.items()),
            *(
                Column(f"label {name}", partial(_count_label, label))
                for label, name in (*_SHOWN.items(), (SOFT, SOFT))
            ),
        ),
        rows=partial(select_rows, "kind", "head"),
    ),
    "Heads whose hard maximum costs at most .1 nats of divergence, with 95% intervals",
    TableSpec(
        ("model", "name"),
        (
            Column("damage", "damage_max_position", "first", ".4f"),
            Column("interval", _interval_of_damage),
            Column("label", lambda rows: rows["mechanism"].iloc[0].replace("_", " ")),
            Column("enough", lambda rows: rows["damage_max_position"].iloc[0] <= _THRESHOLD),
        ),
        rows=_able,
        names={"name": "head"},
    ),
)
_OF_WINDOWS: tuple[Part, ...] = (
    "Mechanisms chosen on half of the windows, all heads replaced on the other half: "
    "mean patterns of the windows that judge them (as published on 2026-11-22) and of "
    "others; heads labelled specific position, and the share of mean ablation's cost",
    TableSpec(
        ("model", "n_windows", "draw"),
        [*_make_columns(_SAME), *_make_columns(_OTHERS)],
        rows=partial(select_rows, "kind", "windows"),
        words={"draw": lambda draw: int(draw) + 1},
        names={"n_windows": "windows"},
    ),
)
_OVER_TRAINING: tuple[Part, ...] = (
    "Over training",
    TableSpec(("model", "step"), (Column("", _cell, across="assignment"),), rows=_early),
)


def _draw_assignments(axes: "Axes", rows: "pd.DataFrame") -> None:
    """Draw every head with its k largest keys; assignments as levels, random deals as a band."""
    excess = rows.groupby("assignment")["excess"].mean()
    tops = [excess[f"{EVERY}top {k}"] for k in KS]
    axes.plot(KS, tops, "o-", color="#cc79a7", label="every head: k largest keys")
    for name, label, colour, style in (
        (MEAN, "mean ablation", GREY, "-"),
        (f"{EVERY}global", "every head: global", "#56b4e9", ":"),
        (f"{EVERY}specific_position", "every head: mean pattern", GREEN, ":"),
        (BEST, "best of the theory's three", "#e69f00", "--"),
        (GREEDY, "the three, chosen greedily", "#e69f00", ":"),
        (MECHANISMS, "mechanisms", ORANGE, "-"),
    ):
        axes.axhline(excess[name], color=colour, linestyle=style, label=label)
    random_deals = excess[excess.index.str.startswith(RANDOM)]
    axes.axhspan(random_deals.min(), random_deals.max(), color="#999999", alpha=0.25, label="dealt")


def _draw_windows(axes: "Axes", rows: "pd.DataFrame") -> None:
    """Draw shares with their intervals, the two ways beside each other."""
    for measure, colour, by in ((_SAME, GREY, 0.97), (_OTHERS, ORANGE, 1.03)):
        some = rows[rows["measure"] == measure]
        if len(some):
            ends = (some["share"] - some["share_low"], some["share_high"] - some["share"])
            axes.errorbar(some["n_windows"] * by, some["share"], ends, fmt="o", ms=3,
                          color=colour, label=measure)  # fmt: skip
