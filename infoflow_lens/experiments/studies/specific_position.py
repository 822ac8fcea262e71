"""One head with positional encoding sums three fixed tokens (InfoFlow 2026, C.3, Fig. 4)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from infoflow_lens.experiments.study import Row, Settings, Statement, VectorStudy, Verdict
from infoflow_lens.experiments.tables import markdown_table, spread
from infoflow_lens.hooks.model.points import run_catching
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import build_model
from infoflow_lens.tasks import PositionSum
from infoflow_lens.training import TrainingConfig, train

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_N_SUMMED = 3


class SpecificPosition(VectorStudy):
    """Where CLS attends, on average over samples, and how much that varies between them.

    Published: validation error near zero; weights 1/3 on positions 1 to 3 and 0 elsewhere, the same
    for all samples.
    """

    name: ClassVar[str] = "specific_position"
    title: ClassVar[str] = "Does one head with positional encoding learn to aggregate by position?"
    source: ClassVar[str] = "InfoFlow 2026, App. C.3, Fig. 4"
    acceptance: ClassVar[str] = (
        "in every run a test MSE below 1e-3, mean weights of CLS within .03 of 1/3 on "
        "positions 1 to 3, and below .02 elsewhere"
    )

    statement: ClassVar[Statement] = Statement(
        written="2026-11-22",
        after_run=True,
        in_short=(
            "one head with positional encoding aggregates fixed positions evenly, whatever "
            "the tokens"
        ),
        prediction=(
            "One head with positional encoding puts a third of its attention on each of "
            "the three summed positions, in every sample, and fits the target."
        ),
        controls={
            "other positions": (
                "the weights of three positions that are not summed in the place of those that are"
            ),
        },
        refuted_by=(
            "a fitted target with uneven weights, or weights that vary between samples: "
            "then the sum is found in another way."
        ),
    )
    _SIZES: ClassVar[Mapping[str, Mapping[str, int]]] = {
        "smoke": {"n_tokens": 8, "epochs": 12, "n_train": 2000},
        "quick": {"n_tokens": 16, "epochs": 60, "n_train": 8000},
        "full": {"n_tokens": 64, "epochs": 200, "n_train": 50000},
    }

    def cases(self, preset: str) -> Sequence[Settings]:
        """One configuration."""
        return [{**self._SIZES[preset], "d_token": 4, "d_model": 32, "d_mlp": 64}]

    def architecture(self, settings: Settings) -> Architecture:
        """One layer, one head, learned positions."""
        return Architecture(
            n_heads=(1,),
            d_model=settings["d_model"],
            d_token=settings["d_token"],
            n_tokens=settings["n_tokens"],
            d_mlp=settings["d_mlp"],
            d_output=settings["d_token"],
            positional_embedding="learned",
        )

    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """A row for each position: its weight over samples."""
        task = PositionSum(n_tokens=settings["n_tokens"], d_token=settings["d_token"])
        model = build_model(self.architecture(settings), seed=seed, device=device)
        data = [
            self.drawn(task, part, n, seed)
            for part, n in (("train", settings["n_train"]), ("validation", 2000), ("test", 1000))
        ]
        training = train(
            model,
            data[0],
            data[1],
            TrainingConfig(epochs=settings["epochs"], batch_size=128, lr=3e-3, seed=seed),
            progress=False,
        )
        x, y = (part.to(device) for part in data[2])
        output, caught = run_catching(model.eval(), x, ["blocks.0.attn.hook_pattern"])
        weights = caught["blocks.0.attn.hook_pattern"][:, 0, -1].double().cpu()
        mse = float((output - y).detach().double().square().mean())
        return [
            {
                "validation_nmse": training.nmse,
                "mse": mse,
                "position": position + 1,
                "weight": float(weights[:, position].mean()),
                "weight_deviation": float(weights[:, position].std()),
            }
            for position in range(task.n_tokens)
        ]

    def table(self, results: "pd.DataFrame") -> str:
        """Mean weights by position, beside the published ones."""
        groups: Any = results.groupby("position")
        table = markdown_table(
            ["position", "weight of CLS, over seeds", "deviation between samples", "published"],
            [
                (
                    position,
                    spread(rows["weight"]),
                    spread(rows["weight_deviation"]),
                    "1/3" if int(position) <= _N_SUMMED else "0",
                )
                for position, rows in groups
            ],
        )
        errors = results.drop_duplicates("run")["mse"]
        return f"{table}\n\nTest MSE {spread(errors)}; published: near zero."

    def figure(self, results: "pd.DataFrame") -> "Figure":
        """Weights by position, a bar each, with the spread between samples."""
        from matplotlib.figure import Figure

        by_position = results.groupby("position")
        mean, deviation = by_position["weight"].mean(), by_position["weight_deviation"].mean()
        figure = Figure(figsize=(7, 3.2), layout="constrained")
        axes = figure.subplots()
        axes.bar(mean.index, mean, yerr=deviation, color="#009e73", capsize=3, label="trained")
        axes.axhline(1 / _N_SUMMED, color="#444444", linestyle=":", label="1/3")
        axes.set_xlabel("position")
        axes.set_ylabel("attention of CLS")
        axes.legend(frameon=False)
        return figure

    def verdict(self, results: "pd.DataFrame") -> Verdict:
        """By the errors and the weights of every run."""
        summed = results[results["position"] <= _N_SUMMED]
        others = results[results["position"] > _N_SUMMED]
        error = float(results["mse"].max())
        gap = float((summed["weight"] - 1 / _N_SUMMED).abs().max())
        rest = float(others["weight"].max())
        reasons = (
            f"largest MSE {error:.2g}",
            f"largest gap to 1/3 on positions 1 to 3: {gap:.3f}",
            f"largest weight elsewhere: {rest:.3f}",
        )
        return Verdict(error < 1e-3 and gap <= 0.03 and rest < 0.02, reasons)

    def controlled(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """The last positions in the place of the summed ones."""
        last = int(results["position"].max()) + 1
        return {"other positions": results.assign(position=last - results["position"])}
