"""Fewer heads than retrieved tokens cost accuracy (Yu et al. 2026, ICLR, Tables 2, 3 and 5)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from infoflow_lens.experiments.study import Row, Settings, Study, Verdict, spread
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import build_model
from infoflow_lens.tasks import DRetrieval
from infoflow_lens.training import TrainingConfig, train

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_D = 4  # tokens that the target retrieves
_LENGTHS = (8, 16, 32, 64, 128)

# Yu et al. 2026: minimum over seeds of the validation NMSE, by heads, for T in _LENGTHS.
_PUBLISHED: Mapping[int, tuple[float, ...]] = {  # Table 3: one layer, E = 32
    1: (1.75e-2, 1.98e-2, 2.06e-2, 2.54e-2, 3.03e-2),
    2: (7.17e-3, 7.39e-3, 7.82e-3, 8.57e-3, 1.02e-2),
    3: (2.11e-4, 2.17e-4, 2.73e-4, 3.71e-4, 4.77e-4),
    4: (1.32e-6, 5.59e-7, 3.40e-7, 3.46e-7, 5.70e-7),
    5: (2.19e-6, 4.33e-7, 3.22e-7, 2.73e-7, 2.66e-7),
}


class HeadCount(Study):
    """NMSE of one layer on D-retrieval, D = 4, by the number of heads (E = 32 shared by them)."""

    name: ClassVar[str] = "head_count"
    title: ClassVar[str] = "Does one layer need as many heads as tokens to retrieve?"
    source: ClassVar[str] = "Yu et al. 2026 (ICLR), Table 3; Theorem 2"
    acceptance: ClassVar[str] = (
        "the least NMSE over seeds falls by at least 20 times from 3 to 4 heads, at every T; "
        "preset full: within a factor of 5 of Table 3 at T = 16"
    )
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 2, "full": 5}

    def cases(self, preset: str) -> Sequence[Settings]:
        """By length and heads."""
        sizes: Mapping[str, tuple[Sequence[int], Sequence[int], int, float]] = {
            "smoke": ((8,), (3, 4), 8, 4e-3),
            "quick": ((16,), (2, 3, 4, 5), 400, 4e-3),
            "full": (_LENGTHS, (1, 2, 3, 4, 5), 2000, 4e-3),
        }
        lengths, heads, epochs, lr = sizes[preset]
        return [
            {"n_tokens": length, "heads": h, "epochs": epochs, "lr": lr, "preset": preset}
            for length in lengths
            for h in heads
        ]

    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """The best validation NMSE of one model."""
        heads, n_tokens = settings["heads"], settings["n_tokens"]
        # the target is the same for all models of a length
        task = DRetrieval(n_tokens=n_tokens, d_token=_D, n_components=_D, seed=0)
        d_head = 32 // heads
        architecture = Architecture(
            n_heads=(heads,),
            d_model=32,
            d_head=(d_head,),
            d_token=_D,
            n_tokens=n_tokens,
            d_mlp=32,
            act_fn="gelu",
        )
        model = build_model(architecture, seed=seed, device=device)
        train_data = self.drawn(task, "train", 8000, seed)
        validation = self.drawn(task, "validation", 2000, seed)
        config = TrainingConfig(
            epochs=settings["epochs"], batch_size=256, lr=settings["lr"], seed=seed
        )
        training = train(model, train_data, validation, config, progress=False)
        return [{"nmse": training.nmse, "best_epoch": training.best_epoch}]

    def table(self, results: "pd.DataFrame") -> str:
        """Minima over seeds beside Table 3, and all seeds."""
        lines = [
            "| T | heads | least NMSE over seeds | all seeds | Table 3 |",
            "|---|---|---|---|---|",
        ]
        groups: Any = results.groupby(["n_tokens", "heads"])
        for (length, heads), rows in groups:
            published = _PUBLISHED[int(heads)][_LENGTHS.index(int(length))]
            lines.append(
                f"| {length} | {heads} | {rows['nmse'].min():.2e} | {spread(rows['nmse'])} | "
                f"{published:.2e} |"
            )
        return "\n".join(lines)

    def figure(self, results: "pd.DataFrame") -> "Figure":
        """NMSE over heads, a line for each length, and the published ones dotted."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 3.8), layout="constrained")
        axes = figure.subplots()
        least = results.groupby(["n_tokens", "heads"])["nmse"].min()
        for index, length in enumerate(sorted(results["n_tokens"].unique())):
            ours = least.loc[length]
            colour = f"C{index}"
            axes.plot(ours.index, ours, "o-", color=colour, label=f"T = {length}")
            published = [_PUBLISHED[int(h)][_LENGTHS.index(int(length))] for h in ours.index]
            axes.plot(ours.index, published, "o:", color=colour, alpha=0.5)
        axes.axvline(_D, color="#444444", linewidth=0.8, linestyle="--")
        axes.set_yscale("log")
        axes.set_xlabel("heads (dotted: Table 3; dashed: D)")
        axes.set_ylabel("least NMSE over seeds")
        axes.set_xticks(sorted(results["heads"].unique()))
        axes.legend(frameon=False)
        return figure

    def verdict(self, results: "pd.DataFrame") -> Verdict:
        """By the fall from D - 1 to D heads."""
        least = results.groupby(["n_tokens", "heads"])["nmse"].min()
        passed, reasons = True, []
        for length in sorted(results["n_tokens"].unique()):
            fewer, enough = float(least[length, _D - 1]), float(least[length, _D])
            fall = fewer / enough
            passed &= fall >= 20
            reasons.append(f"T = {length}: {fewer:.2e} to {enough:.2e}, {fall:.0f} times")
            published = _PUBLISHED[_D][_LENGTHS.index(int(length))]
            if length == 16 and (results["preset"] == "full").all():
                factor = max(enough / published, published / enough)
                passed &= factor <= 5
                reasons.append(f"a factor of {factor:.1f} from Table 3 at T = 16, D heads")
        return Verdict(bool(passed), tuple(reasons))
