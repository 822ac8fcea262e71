"""One head with positional encoding sums three fixed tokens (InfoFlow 2026, C.3, Fig. 4)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from infoflow_lens.foundation.lazy import pd
from infoflow_lens.foundation.modules import SeededRandom, derive_seed
from infoflow_lens.hooks.model.call import call
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import VectorTransformer, build_model
from infoflow_lens.studies.claims import Claim, Numbers
from infoflow_lens.studies.papers.rows import numbers_of, runs_of
from infoflow_lens.studies.plots import Axis, Bars, FigureSpec, Panel
from infoflow_lens.studies.study import Row, Settings, Statement, VectorStudy
from infoflow_lens.studies.tables import Column, Part, TableSpec
from infoflow_lens.tasks import PositionSum
from infoflow_lens.training import TrainingConfig, train

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
    finding: ClassVar[str] = "test MSE {0}; weights miss 1/3 by {1}, elsewhere they are {2}"
    source: ClassVar[str] = "InfoFlow 2026, App. C.3, Fig. 4"

    statement: ClassVar[Statement] = Statement.read("specific_position")
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 3, "full": 3}
    _SIZES: ClassVar[Mapping[str, Mapping[str, int]]] = {
        "smoke": {"n_tokens": 8, "epochs": 12, "n_train": 2000},
        "quick": {"n_tokens": 16, "epochs": 60, "n_train": 8000},
        "full": {"n_tokens": 64, "epochs": 200, "n_train": 50000},
    }

    def cases(self, preset: str) -> Sequence[Settings]:
        """Vary the model."""
        sizes = self._SIZES[preset]
        return [
            {"model": model, **sizes, "tail_epochs": tail, "d_token": 4, "d_model": 32, "d_mlp": 64}
            for model, tail in ((_OURS, 0), (_PAPER, sizes["epochs"] // 4))
        ]

    def architecture(self, settings: Settings) -> Architecture:
        """Return one layer, one head, learned positions; the paper's network is put behind it."""
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
        """Return an untrained model.

        TransformerLens normalises what a layer reads, the paper what it has written: the first
        LayerNorm is taken out, and the last one, which an attention-only model has right behind
        the residual connection, stays.
        """
        model = build_model(self.architecture(settings), seed=seed, device=device)
        if settings["model"] == _PAPER:
            model.blocks[0].ln1 = nn.Identity()
            with SeededRandom(derive_seed("readout", seed)):
                readout: Any = nn.Sequential(
                    nn.Linear(settings["d_model"], settings["d_mlp"]),
                    nn.GELU(),
                    nn.Linear(settings["d_mlp"], settings["d_token"]),
                ).to(device)
            model.unembed = readout
        return model

    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """Return a row for each position: its weight over samples."""
        task = PositionSum(n_tokens=settings["n_tokens"], d_token=settings["d_token"])
        model = self.model(settings, seed, device)
        data = [
            self.draw(task, part, n, seed)
            for part, n in (("train", settings["n_train"]), ("validation", 2000), ("test", 1000))
        ]
        config = TrainingConfig(epochs=settings["epochs"], batch_size=128, lr=3e-3, seed=seed)
        # a tail of small steps, where the preset has one
        plan = [config]
        if tail := settings["tail_epochs"]:
            plan.append(replace(config, epochs=tail, lr=_TAIL_RATE, lr_end=_TAIL_RATE))
        for part in plan:
            training = train(model, data[0], data[1], part, progress=False)
        x, y = (part.to(device) for part in data[2])
        made = call(model.eval(), x, ["blocks.0.attn.hook_pattern"], output=True)
        output, caught = made.output, made.activations
        # [sample, key] of the one head at CLS
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

    def tables(self) -> Sequence[Part]:
        """Return errors, and mean weights by position, beside the published ones."""
        errors = Column("test MSE", "mse"), Column("published", lambda rows: "near zero")
        weights = (
            Column("weight of CLS, over seeds", "weight"),
            Column("deviation between samples", "weight_deviation"),
            Column("published", lambda r: "1/3" if r["position"].iloc[0] <= _N_SUMMED else "0"),
        )
        return (
            TableSpec(("model",), errors, runs_of),
            TableSpec(("model", "position"), weights),
        )

    def plots(self) -> FigureSpec:
        """Return weights by position, a bar each, with the spread between samples."""
        bars = Bars("position", "weight", error="weight_deviation")
        weight = Axis("attention of CLS (dotted: 1/3)", levels=[1 / _N_SUMMED])
        panel = Panel([bars], Axis("position"), weight, lambda rows: rows["model"].iloc[0])
        return FigureSpec([panel], per="model", size=(6, 3.2), share="y")

    def claims(self) -> Sequence[Claim]:
        """Judge the errors and the weights of every run."""
        weights = "the mean weights of CLS on positions 1 to 3 are {bound} from 1/3"
        return (
            Claim(
                "the test MSE is {bound} in every run",
                lambda r: numbers_of(r, ["model"], "mse"),
                "<",
                1e-3,
                name="test MSE",
            ),
            Claim(weights, _gaps, "<=", 0.03, name="weights from 1/3"),
            Claim(
                "its mean weights elsewhere are {bound}",
                _elsewhere,
                "<",
                0.02,
                name="weights elsewhere",
            ),
        )

    def control_results(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Put the last positions in the place of the summed ones."""
        last = int(results["position"].max()) + 1
        return {"other positions": results.assign(position=last - results["position"])}


def _gaps(results: "pd.DataFrame") -> Numbers:
    """Return the largest distance from 1/3 of a weight on the summed positions, by model."""
    summed = results[results["position"] <= _N_SUMMED]
    return numbers_of(summed.assign(gap=(summed["weight"] - 1 / _N_SUMMED).abs()), ["model"], "gap")


def _elsewhere(results: "pd.DataFrame") -> Numbers:
    return numbers_of(results[results["position"] > _N_SUMMED], ["model"], "weight")
