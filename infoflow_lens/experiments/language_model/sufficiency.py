"""Every head's pattern replaced at once by its cheapest mechanism: what loss remains?"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from infoflow_lens.experiments.claims import Verdict
from infoflow_lens.experiments.language_model.snapshots import Snapshot, loaded
from infoflow_lens.experiments.language_model.study import (
    MODEL,
    LanguageModelStudy,
    final,
    groups,
    panels,
    step_shown,
)
from infoflow_lens.experiments.study import Row, Settings
from infoflow_lens.experiments.tables import markdown_table
from infoflow_lens.hooks import IDEALS, measure_mechanisms
from infoflow_lens.hooks.mechanisms.ideals import SOFT
from infoflow_lens.hooks.mechanisms.sufficiency import (
    MEAN,
    MECHANISMS,
    RANDOM,
    measure_sufficiency,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_SHARE, _LEAST_COST, _DRAWS, _BATCH = 0.25, 0.1, 8, 16
_COLOURS = {MECHANISMS: "#d55e00", MEAN: "#444444", RANDOM: "#56b4e9"}
_ASSIGNED = ("mechanisms", "random mechanisms", "mean ablation")


class Sufficiency(LanguageModelStudy):
    """Mechanisms chosen on one half of the windows, the loss measured on the other."""

    name: ClassVar[str] = "sufficiency"
    title: ClassVar[str] = "Are the mechanisms of all heads enough together?"
    acceptance: ClassVar[str] = (
        "in every trained model, at its full context and with all heads replaced, the excess loss "
        "is at most a quarter of that of mean ablation, which costs at least .1 nats, and below "
        "that of each of eight random assignments of the same mechanisms"
    )
    windows: ClassVar[Mapping[str, int]] = {"smoke": 10, "quick": 32, "full": 256}
    exact: ClassVar[Mapping[str, bool]] = {"smoke": False, "quick": False, "full": True}

    def contexts(self, moment: Snapshot, preset: str) -> Sequence[Settings]:
        """Lengths from 32 on for the last snapshot, the longest for the others."""
        longest = self.longest(moment)
        shorter = [t for t in (32, 64, 128, 256) if t < longest] if moment.final else []
        common = {"exact": self.exact[preset]}
        if preset == "smoke":
            shorter, longest = [], min(longest, 24)
        return [{**common, "n_context": length} for length in (*shorter, longest)]

    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """A row for each assignment and share."""
        model = loaded(self.source_of(settings), device)
        rows = self.sequences(model, settings, seed)
        mechanisms = measure_mechanisms(
            model,
            rows[0::2],
            threshold=0.05,
            exact=settings["exact"],
            seed=seed,
            batch_size=_BATCH,
            progress=False,
        )
        found = measure_sufficiency(
            model, rows[1::2], mechanisms, draws=_DRAWS, seed=seed, batch_size=_BATCH,
            progress=False,
        )  # fmt: skip
        counts = Counter(name for layer in mechanisms.mechanisms() for name in layer)
        of_heads: Row = {f"n_{name}": counts[name] for name in (*IDEALS, SOFT)}
        bare: Row = {"assignment": "none", "share": 0.0, "n_replaced": 0, "loss": found.loss,
                     "excess": 0.0, "error": 0.0}  # fmt: skip
        frame: list[Any] = found.to_frame().to_dict("records")
        return [{**row, **of_heads} for row in (bare, *frame)]

    def table(self, results: "pd.DataFrame") -> str:
        """Excess losses with all heads replaced; what the heads need; then shares."""
        together, alone, shares = [], [], []
        for (model, step, context), rows in groups(results, (*MODEL, "n_context")):
            at = _all(rows)
            place = (model, step_shown(step), context)
            own, mean = (at[at["assignment"] == kind] for kind in (MECHANISMS, MEAN))
            dealt = at[at["assignment"].str.startswith(RANDOM)]["excess"]
            random = f"{dealt.median():+.3f} ({dealt.min():+.3f} to {dealt.max():+.3f})"
            loss = f"{rows['loss'].iloc[0]:.3f}"
            together.append((*place, loss, _with_error(own), random, _with_error(mean)))
            alone.append((*place, *(int(rows[f"n_{name}"].iloc[0]) for name in _kinds())))
        for (model,), rows in groups(_at_longest(final(results)), ("model",)):
            for (share,), at in groups(rows[rows["share"] > 0], ("share",)):
                value = at.groupby("assignment")["excess"].mean()
                dealt = value[value.index.str.startswith(RANDOM)].median()
                rises = (f"{rise:+.3f}" for rise in (value[MECHANISMS], dealt, value[MEAN]))
                shares.append((model, f"{share:.0%}", int(at["n_replaced"].iloc[0]), *rises))
        place_names = ("model", "step", "context")
        kinds = (name.replace("_", " ") for name in _kinds())
        return "\n\n".join(
            (
                "All heads replaced: by how many nats a token the loss rises (one standard error)",
                markdown_table((*place_names, "loss", *_ASSIGNED), together),
                "The cheapest mechanism of each head alone, heads of each",
                markdown_table((*place_names, *kinds), alone),
                "The last snapshots at their full context, by the share of heads that is replaced",
                markdown_table(("model", "share", "heads", *_ASSIGNED), shares),
            )
        )

    def figure(self, results: "pd.DataFrame") -> "Figure":
        """By share, over training, and by context, for each model."""
        figure, by_model = panels(results, 3, 11, 3.2, sharey="row")
        for model, row in by_model:
            of_model = results[results["model"] == model]
            last = final(of_model)
            shown = (
                (_at_longest(last), "share", "share of heads replaced"),
                (_all(_at_longest(of_model)), "step", "training step"),
                (_all(last), "n_context", "tokens of context"),
            )
            for axis, (rows, column, label) in zip(row, shown, strict=True):
                for kind, colour in _COLOURS.items():
                    some = rows[rows["assignment"].str.startswith(kind)]
                    by = some.groupby(column)["excess"].agg(["median", "min", "max"])
                    axis.plot(by.index, by["median"], ".-", color=colour, label=kind)
                    axis.fill_between(by.index, by["min"], by["max"], color=colour, alpha=0.2)
                axis.set_xlabel(label)
                axis.axhline(0, color="#999999", linewidth=0.6)
            row[1].set_xscale("symlog", linthresh=100)
            row[1].set_xlim(0, None)
            row[2].set_xscale("log", base=2)
            row[2].xaxis.set_major_formatter("{x:g}")
            row[0].set_ylabel(f"{model}\nexcess loss (nats a token)")
        by_model[0][1][0].legend(frameon=False, fontsize="small")
        return figure

    def verdict(self, results: "pd.DataFrame") -> Verdict:
        """By the last snapshot of every model."""
        reasons, passed = [], True
        for (model,), rows in groups(_all(_at_longest(final(results))), ("model",)):
            excess = rows.groupby("assignment")["excess"].mean()
            own, mean = float(excess[MECHANISMS]), float(excess[MEAN])
            dealt = excess[excess.index.str.startswith(RANDOM)]
            below = int((dealt > own).sum())
            good = mean >= _LEAST_COST and own <= _SHARE * mean and below == len(dealt)
            passed = passed and good
            share = f"{own / mean:.0%}" if mean > 0 else "more than all"
            reasons.append(
                f"{model}: mechanisms {own:+.3f} nats, {share} of mean ablation's {mean:+.3f}; "
                f"below {below} of {len(dealt)} random assignments: {'yes' if good else 'no'}"
            )
        return Verdict(passed and bool(reasons), tuple(reasons))


def _kinds() -> tuple[str, ...]:
    return (*IDEALS, SOFT)


def _all(rows: "pd.DataFrame") -> "pd.DataFrame":
    return rows[rows["share"] == 1.0]


def _at_longest(rows: "pd.DataFrame") -> "pd.DataFrame":
    longest = rows.groupby(list(MODEL))["n_context"].transform("max")
    return rows[rows["n_context"] == longest]


def _with_error(rows: "pd.DataFrame") -> str:
    return f"{rows['excess'].mean():+.3f} ({rows['error'].mean():.3f})"
