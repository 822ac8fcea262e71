"""One head with positional encoding sums three fixed tokens (InfoFlow 2026, C.3, Fig. 4)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from infoflow_lens.experiments.claims import Claim, Numbers
from infoflow_lens.experiments.study import Row, Settings, Statement, VectorStudy
from infoflow_lens.experiments.tables import markdown_table, spread
from infoflow_lens.foundation.drawing import SeededRandom
from infoflow_lens.foundation.seeds import derived_seed
from infoflow_lens.hooks.model.call import call
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import VectorTransformer, build_model
from infoflow_lens.tasks import PositionSum
from infoflow_lens.training import TrainingConfig, train

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_N_SUMMED = 3
_TAIL_RATE = 1e-4
_OURS, _PAPER = "no normalization", "LayerNorm, constant tail"


class SpecificPosition(VectorStudy):
    """Where CLS attends, on average over samples, and how much that varies between them.

    Published: validation error near zero; weights 1/3 on positions 1 to 3 and 0 elsewhere, the same
    for all samples. Two models: the project's, without normalization and trained along one cosine;
    and the paper's, with LayerNorm behind the attention's residual connection, a two-layer network
    that reads nothing but that, and a constant rate at the end. Sizes and rates are [chosen].
    """

    name: ClassVar[str] = "specific_position"
    title: ClassVar[str] = "Does one head with positional encoding learn to aggregate by position?"
    source: ClassVar[str] = "InfoFlow 2026, App. C.3, Fig. 4"

    statement: ClassVar[Statement] = Statement.of("specific_position")
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 3, "full": 3}
    _SIZES: ClassVar[Mapping[str, Mapping[str, int]]] = {
        "smoke": {"n_tokens": 8, "epochs": 12, "n_train": 2000},
        "quick": {"n_tokens": 16, "epochs": 60, "n_train": 8000},
        "full": {"n_tokens": 64, "epochs": 200, "n_train": 50000},
    }

    def cases(self, preset: str) -> Sequence[Settings]:
        """By model."""
        sizes = self._SIZES[preset]
        return [
            {"model": model, **sizes, "tail_epochs": tail, "d_token": 4, "d_model": 32, "d_mlp": 64}
            for model, tail in ((_OURS, 0), (_PAPER, sizes["epochs"] // 4))
        ]

    def architecture(self, settings: Settings) -> Architecture:
        """One layer, one head, learned positions; the paper's network is put behind it."""
        paper = settings["model"] == _PAPER
        return Architecture(
            n_heads=(1,),
            d_model=settings["d_model"],
            d_token=settings["d_token"],
            n_tokens=settings["n_tokens"],
            d_mlp=0 if paper else settings["d_mlp"],
            d_output=settings["d_token"],
            positional_embedding="learned",
            normalization="LN" if paper else "none",
        )

    def model(self, settings: Settings, seed: int, device: str) -> VectorTransformer:
        """An untrained model.

        TransformerLens normalises what a layer reads, the paper what it has written: the first
        LayerNorm is taken out, and the last one, which an attention-only model has right behind
        the residual connection, stays.
        """
        model = build_model(self.architecture(settings), seed=seed, device=device)
        if settings["model"] == _PAPER:
            model.blocks[0].ln1 = nn.Identity()
            with SeededRandom(derived_seed("readout", seed)):
                readout: Any = nn.Sequential(
                    nn.Linear(settings["d_model"], settings["d_mlp"]),
                    nn.GELU(),
                    nn.Linear(settings["d_mlp"], settings["d_token"]),
                ).to(device)
            model.unembed = readout
        return model

    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """A row for each position: its weight over samples."""
        task = PositionSum(n_tokens=settings["n_tokens"], d_token=settings["d_token"])
        model = self.model(settings, seed, device)
        data = [
            self.drawn(task, part, n, seed)
            for part, n in (("train", settings["n_train"]), ("validation", 2000), ("test", 1000))
        ]
        config = TrainingConfig(epochs=settings["epochs"], batch_size=128, lr=3e-3, seed=seed)
        plan = [config]
        if tail := settings["tail_epochs"]:
            plan.append(replace(config, epochs=tail, lr=_TAIL_RATE, lr_end=_TAIL_RATE))
        for part in plan:
            training = train(model, data[0], data[1], part, progress=False)
        x, y = (part.to(device) for part in data[2])
        made = call(model.eval(), x, ["blocks.0.attn.hook_pattern"], output=True)
        output, caught = made.output, made.activations
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
        groups: Any = results.groupby(["model", "position"], sort=False)
        table = markdown_table(
            [
                *("model", "position", "weight of CLS, over seeds"),
                *("deviation between samples", "published"),
            ],
            [
                (
                    model,
                    position,
                    spread(rows["weight"]),
                    spread(rows["weight_deviation"]),
                    "1/3" if int(position) <= _N_SUMMED else "0",
                )
                for (model, position), rows in groups
            ],
        )
        errors = markdown_table(
            ["model", "test MSE", "published"],
            [
                (model, spread(rows["mse"]), "near zero")
                for model, rows in results.drop_duplicates("run").groupby("model", sort=False)
            ],
        )
        return f"{errors}\n\n{table}"

    def figure(self, results: "pd.DataFrame") -> "Figure":
        """Weights by position, a bar each, with the spread between samples."""
        from matplotlib.figure import Figure

        models = list(dict.fromkeys(results["model"]))
        figure = Figure(figsize=(6 * len(models), 3.2), layout="constrained")
        panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
        for axes, model in zip(panels, models, strict=True):
            by_position = results[results["model"] == model].groupby("position")
            mean, deviation = by_position["weight"].mean(), by_position["weight_deviation"].mean()
            axes.bar(mean.index, mean, yerr=deviation, color="#009e73", capsize=3, label="trained")
            axes.axhline(1 / _N_SUMMED, color="#444444", linestyle=":", label="1/3")
            axes.set_xlabel("position")
            axes.set_title(model, fontsize="medium")
        panels[0].set_ylabel("attention of CLS")
        panels[0].legend(frameon=False)
        return figure

    def claims(self) -> Sequence[Claim]:
        """By the errors and the weights of every run."""
        weights = "the mean weights of CLS on positions 1 to 3 are {bound} from 1/3"
        return (
            Claim("the test MSE is {bound} in every run", _largest_error, "<", 1e-3),
            Claim(weights, _gap, "<=", 0.03),
            Claim("its mean weights elsewhere are {bound}", _elsewhere, "<", 0.02),
        )

    def controlled(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """The last positions in the place of the summed ones."""
        last = int(results["position"].max()) + 1
        return {"other positions": results.assign(position=last - results["position"])}


def _by_model(results: "pd.DataFrame", number: "Callable[[pd.DataFrame], float]") -> Numbers:
    groups: Any = results.groupby("model", sort=False)
    return {model: float(number(rows)) for model, rows in groups}


def _largest_error(results: "pd.DataFrame") -> Numbers:
    return _by_model(results, lambda rows: rows["mse"].max())


def _gap(results: "pd.DataFrame") -> Numbers:
    summed = results[results["position"] <= _N_SUMMED]
    return _by_model(summed, lambda rows: (rows["weight"] - 1 / _N_SUMMED).abs().max())


def _elsewhere(results: "pd.DataFrame") -> Numbers:
    others = results[results["position"] > _N_SUMMED]
    return _by_model(others, lambda rows: rows["weight"].max())
