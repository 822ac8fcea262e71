"""Comparing triples is hard for two layers of any size (InfoFlow 2026, App. C.5, Table 12)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from infoflow_lens.experiments.study import Row, Settings, VectorStudy, Verdict
from infoflow_lens.experiments.tables import markdown_table, spread
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import build_model
from infoflow_lens.tasks import TriangleCenter
from infoflow_lens.theory.estimate import estimate
from infoflow_lens.training import TrainingConfig, train

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_SIZES = ((2, 16), (4, 32), (8, 64))  # heads of either layer, E
_NOISE, _CEILING = 0.01, 0.9  # by which NMSE above the second may fall from one T to the next
_APART = 1.2


class TriangleCenterStudy(VectorStudy):
    """NMSE by T for three sizes of two-layer models without positional encoding.

    Stated: three sizes, T growing, AdamW with a cosine schedule, clamped norms, the best validation
    NMSE averaged over seeds. Its numbers are stripped from the text, and so are all sizes: heads,
    E, d = 4, the MLP's width of 64, T, the learning rate and the number of samples are [chosen].

    Beside it stands what the estimate says before training: the exponent |I| d/E of the cost law,
    from below by counting comparisons (`count="paper"`) and from above by the best schedule, which
    without positions is global aggregation.
    """

    name: ClassVar[str] = "triangle_center"
    title: ClassVar[str] = "Does a target over triples defeat two layers of every size as T grows?"
    source: ClassVar[str] = "InfoFlow 2026, App. C.5, Table 12, Fig. 1b"
    acceptance: ClassVar[str] = (
        "the mean NMSE over seeds rises with T for every size (it may fall by .01 where it was "
        "above .9), is above .8 at the largest T for every size, and at every T the largest mean "
        "of the sizes is at most 1.2 times the smallest"
    )
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 2, "full": 5}

    def cases(self, preset: str) -> Sequence[Settings]:
        """By length and size."""
        lengths: Mapping[str, Sequence[int]] = {
            "smoke": (4, 8),
            "quick": (8, 16, 32),
            "full": (8, 16, 32, 48, 64),
        }
        sizes: Mapping[str, Mapping[str, int]] = {
            "smoke": {"n_train": 1000, "epochs": 2},
            "quick": {"n_train": 16000, "epochs": 25},
            "full": {"n_train": 50000, "epochs": 100},
        }
        return [
            {"n_tokens": n_tokens, "heads": [h, h], "d_model": d_model, **sizes[preset]}
            for n_tokens in lengths[preset]
            for h, d_model in _SIZES
        ]

    def architecture(self, settings: Settings) -> Architecture:
        """Two layers of the same heads, without positions."""
        return Architecture(
            n_heads=tuple(settings["heads"]),
            d_model=settings["d_model"],
            d_token=4,
            n_tokens=settings["n_tokens"],
            d_mlp=64,
            act_fn="gelu",
        )

    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """The errors of one model, and the estimate for its architecture."""
        architecture = self.architecture(settings)
        task = TriangleCenter(n_tokens=architecture.n_tokens, d_token=architecture.d_token)
        model = build_model(architecture, seed=seed, device=device)
        x, y = self.drawn(task, "train", settings["n_train"], seed)
        training = train(
            model,
            (x, y),
            self.drawn(task, "validation", 2000, seed),
            TrainingConfig(epochs=settings["epochs"], batch_size=256, lr=3e-3, seed=seed),
            progress=False,
        )
        best = training.history[training.best_epoch - 1]
        paper, proved = (
            estimate(architecture, task, count=count, verify=0) for count in ("paper", "proved")
        )
        return [
            {
                "nmse": training.nmse,
                "train_nmse": best["train_loss"] / float(y.double().var(correction=0)),
                "best_epoch": training.best_epoch,
                "information": paper.min_information,
                "information_proved": proved.min_information,
                "exponent_lower": paper.lower["law"],
                "exponent_upper": paper.upper["law"],
            }
        ]

    def table(self, results: "pd.DataFrame") -> str:
        """Errors by T and size, and what was estimated."""
        cells = []
        groups: Any = results.groupby(["n_tokens", "d_model"])
        for (n_tokens, d_model), rows in groups:
            one = rows.iloc[0]
            cells.append(
                (
                    n_tokens,
                    one["heads"].replace(" ", ", "),
                    d_model,
                    spread(rows["nmse"]),
                    spread(rows["train_nmse"]),
                    f"{one['information']}, {one['information_proved']}",
                    f"{one['exponent_lower']:.3g}, {one['exponent_upper']:.3g}",
                )
            )
        return "\n\n".join(
            [
                markdown_table(
                    [
                        "T",
                        "heads",
                        "E",
                        "NMSE",
                        "on training data",
                        "|I| by counting: paper, proved",
                        "exponent: at least, at most",
                    ],
                    cells,
                ),
                "Published (the numbers of Table 12 do not survive): NMSE grows fast with T and "
                "approaches 1, almost identically for all three sizes. The exponent is that of the "
                "cost law, |I| d/E, with |I| from counting (paper) and from the best schedule; "
                "up to 1 a state can hold all of I uncoded. By the law a larger E is cheaper, so "
                "that sizes perform alike does not follow from it.",
            ]
        )

    def figure(self, results: "pd.DataFrame") -> "Figure":
        """NMSE over T for each size, and the range of the estimated exponent."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8.5, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for index, (d_model, rows) in enumerate(results.groupby("d_model")):
            by_length = rows.groupby("n_tokens")
            nmse, colour = by_length["nmse"], f"C{index}"
            label = f"heads ({rows['heads'].iloc[0].replace(' ', ', ')}), E = {d_model}"
            left.plot(nmse.mean().index, nmse.mean(), "o-", color=colour, label=label)
            left.fill_between(nmse.mean().index, nmse.min(), nmse.max(), color=colour, alpha=0.2)
            lower, upper = (by_length[f"exponent_{end}"].first() for end in ("lower", "upper"))
            right.fill_between(lower.index, lower, upper, color=colour, alpha=0.25)
            right.plot(upper.index, upper, color=colour, linewidth=0.8)
        for axes in (left, right):
            axes.axhline(1, color="#444444", linewidth=0.8, linestyle=":")
            axes.set_xscale("log", base=2)
            axes.set_xlabel("T")
        left.set_ylim(0, None)
        left.set_ylabel("validation NMSE (dotted: a constant)")
        left.legend(frameon=False)
        right.set_ylabel("estimated exponent |I| d / E")
        return figure

    def verdict(self, results: "pd.DataFrame") -> Verdict:
        """By the means over seeds of every T and size."""
        means = results.groupby(["n_tokens", "d_model"])["nmse"].mean().unstack()
        # comparisons with a missing mean are false
        slack = _NOISE * (means.shift() > _CEILING)
        rises = bool((means.diff() >= -slack).iloc[1:].all(axis=None))
        last = means.iloc[-1]
        hard = bool((last > 0.8).all())
        apart = means.max(axis=1, skipna=False) / means.min(axis=1, skipna=False)
        reasons = [
            f"E = {d_model}: {', '.join(f'{value:.3f}' for value in column)} over T"
            for d_model, column in means.items()
        ]
        reasons.append(
            f"{'rises' if rises else 'does not rise'} with T; at T = {means.index[-1]} at least "
            f"{last.min():.3f}"
        )
        ratios = ", ".join(f"{ratio:.2f} (T = {n_tokens})" for n_tokens, ratio in apart.items())
        reasons.append(f"largest over smallest of the sizes: {ratios}")
        return Verdict(rises and hard and bool((apart <= _APART).all()), tuple(reasons))
