"""Predicted against measured information sets at checkpoints through training."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from infoflow_lens.agreement import compare, coverage
from infoflow_lens.foundation.lazy import pd
from infoflow_lens.hooks import JacobianInfluence, PositionsProbe, RecoveryProbe, run_probes
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import build_model
from infoflow_lens.studies.claims import Claim, Numbers
from infoflow_lens.studies.demo import RANKS, DemoConfig
from infoflow_lens.studies.papers.rows import numbers_of
from infoflow_lens.studies.plots import Axis, Curves, FigureSpec, Panel
from infoflow_lens.studies.study import Row, Settings, Statement, VectorStudy
from infoflow_lens.studies.tables import Column, Part, TableSpec, groups
from infoflow_lens.tasks import VectorTask
from infoflow_lens.theory import propagate
from infoflow_lens.training import evaluate, train

_AGREES = 0.95
_LEARNT = 1e-2  # the NMSE beside whose epoch that of agreement is told

_COLUMNS = {
    "nmse": "NMSE",
    "auroc": "AUROC",
    "average_precision": "average precision",
    "coverage": "active tokens in the set",
    "influence_inside": "influence inside",
    "predicted_size": "size of the set",
    "ratio_rank1": "rank-1 recovery error, over initial",
    "ratio_rank2": "rank-2 recovery error, over initial",
    "concentration": "largest share of attention",
}


def _panel(*columns: str, **of_y: Any) -> Panel:
    """Return means over seeds by epoch, with their range, epoch 0 included."""
    layers = [
        Curves("epoch", column, style=".-", band=True, label=_COLUMNS[column], colour=f"C{i}")
        for i, column in enumerate(columns)
    ]
    epochs = Axis("epochs of training", "symlog", (0, None))
    return Panel(layers, epochs, Axis(**of_y), legend="above")


class AgreementOverTraining(VectorStudy):
    """The demo's model and target, looked at while it is trained.

    The sets of CLS are predicted from the model's own attention by rule (1), and compared with the
    norms of its Jacobian. Predicted before training: a model that has learnt the target holds the
    active tokens in these sets (eq 4), for which it has heads enough: D in the first layer. When
    that comes, theory does not say. The paper shows nothing between the ends of training; model
    and sizes are the demo's [chosen].
    """

    name: ClassVar[str] = "agreement_over_training"
    title: ClassVar[str] = "When does a model become InfoFlow-like in training?"
    finding: ClassVar[str] = (
        "AUROC of the sets against influence: {0} before training, {1} at its end"
    )
    source: ClassVar[str] = "InfoFlow 2026, Sec. 5.1 (rule 1, eq 4), App. C.1"
    statement: ClassVar[Statement] = Statement.read("agreement_over_training")
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 3, "full": 5}
    judges_every_run: ClassVar[bool] = True

    def cases(self, preset: str) -> Sequence[Settings]:
        """List the one configuration."""
        sizes: Mapping[str, Settings] = {
            "smoke": {
                "n_tokens": 8,
                "n_train": 2000,
                "n_recovery": 500,
                "n_influence": 64,
                "epochs": 4,
                "checkpoints": [0, 1, 2, 4],
            },
            "quick": {
                "n_tokens": 16,
                "n_train": 16000,
                "n_recovery": 4000,
                "n_influence": 512,
                "epochs": 80,
                "checkpoints": [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80],
            },
            "full": {
                "n_tokens": 64,
                "n_train": 50000,
                "n_recovery": 4000,
                "n_influence": 512,
                "epochs": 200,
                "checkpoints": [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 200],
            },
        }
        common = {"D": 4, "heads": [4, 1], "d_model": 32, "d_mlp": 64, "batch": 256, "lr": 8e-3}
        return [{**common, **sizes[preset]}]

    def architecture(self, settings: Settings) -> Architecture:
        """Return the demo's."""
        return _demo(settings, 0).architecture()

    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """Return a row for each checkpoint; epoch 0 is the model before training."""
        config = _demo(settings, seed)
        task = config.task()
        test = self.draw(task, "test", settings["n_recovery"], seed)
        n_influence: int = settings["n_influence"]
        model = build_model(self.architecture(settings), seed=seed, device=device)
        rows = [{"epoch": 0, **_state_of(model, task, test, n_influence)}]

        def look(epoch: int, model: nn.Module) -> None:
            if epoch in settings["checkpoints"]:
                rows.append({"epoch": epoch, **_state_of(model, task, test, n_influence)})

        train(
            model,
            self.draw(task, "train", settings["n_train"], seed),
            self.draw(task, "validation", config.n_validation, seed),
            config.training(),
            after_epoch=look,
            progress=False,
        )
        # how far training has lowered the errors of recovery, by checkpoint
        ratios = [
            {f"ratio_rank{rank}": row[f"rank{rank}"] / rows[0][f"rank{rank}"] for rank in RANKS}
            for row in rows
        ]
        return [{**row, **ratio} for row, ratio in zip(rows, ratios, strict=True)]

    def tables(self) -> Sequence[Part]:
        """Return means and ranges over seeds, a row a checkpoint; then what came first."""
        columns = [Column(name, column) for column, name in _COLUMNS.items()]
        firsts = (
            Column(f"AUROC above {_AGREES}", lambda run: _first(run, run["auroc"] > _AGREES)),
            Column(f"NMSE below {_LEARNT}", lambda run: _first(run, run["nmse"] < _LEARNT)),
        )
        return (
            TableSpec(("epoch",), columns, sort=True),
            "First epoch that was looked at with",
            TableSpec(("seed",), firsts, sort=True),
            "The sets are those of CLS. Predicted: at the end they hold the active tokens. "
            "Published: nothing between the ends of training; at its end recovery ratios of "
            ".065-.096 or .34-.78 (rank 1, six or five heads) and .78-1.09 (rank 2), of other "
            "sizes.",
        )

    def plots(self) -> FigureSpec:
        """Return agreement, error and recovery over epochs; lines are means, bands the range."""
        agreement = _panel("auroc", "coverage", "influence_inside", levels=[_AGREES])
        error = _panel("nmse", scale="log", levels=[_LEARNT])
        recovery = _panel("ratio_rank1", "ratio_rank2", "concentration")
        return FigureSpec([agreement, error, recovery], size=(3.7, 4))

    def claims(self) -> Sequence[Claim]:
        """Judge the first and the last checkpoint of every run."""
        auroc = "the AUROC of the predicted sets of CLS against measured influence is {bound}"
        return (
            Claim(
                f"{auroc} before training",
                lambda r: _read_end(r, "auroc", 0),
                "<",
                0.75,
                name="AUROC before",
            ),
            Claim(
                f"{auroc} at the end",
                lambda r: _read_end(r, "auroc", -1),
                ">",
                _AGREES,
                name="AUROC at the end",
            ),
            Claim(
                "these sets hold {bound} of the active tokens at the end",
                lambda r: _read_end(r, "coverage", -1),
                ">",
                0.97,
                name="active tokens held at the end",
            ),
        )

    def remarks(self, results: "pd.DataFrame") -> Sequence[str]:
        """Say which comes first, agreement or a small error."""
        return [
            f"seed {seed}: first epoch with an AUROC above {_AGREES}: "
            f"{_first(run, run['auroc'] > _AGREES)}, with an NMSE below {_LEARNT}: "
            f"{_first(run, run['nmse'] < _LEARNT)}"
            for (seed,), run in groups(results, ["seed"], sort=True)
        ]

    def control_results(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Put the untrained model at both ends."""
        first = results[results["epoch"] == results["epoch"].min()]
        twin = first.assign(epoch=int(results["epoch"].max()))
        return {"before training": pd.concat([first, twin])}


def _demo(settings: Settings, seed: int) -> DemoConfig:
    return DemoConfig(
        seed=seed,
        n_tokens=settings["n_tokens"],
        n_components=settings["D"],
        n_heads=tuple(settings["heads"]),
        d_model=settings["d_model"],
        d_mlp=settings["d_mlp"],
        epochs=settings["epochs"],
        batch_size=settings["batch"],
        lr=settings["lr"],
    )


def _state_of(
    model: nn.Module, task: VectorTask, test: tuple[Tensor, Tensor], n_influence: int
) -> dict[str, float]:
    """Measure the model at a checkpoint; of the first layer, means over its heads."""
    inputs = test[0][:n_influence]
    # sets of CLS alone are compared, so that its influence is enough
    positions, influence = run_probes(
        model,
        inputs,
        [PositionsProbe(spread=True), JacobianInfluence(positions=(-1,))],
        progress=False,
    )
    (recovery,) = run_probes(model, test[0], [RecoveryProbe(RANKS, maps=False)], progress=False)
    predicted = propagate(positions.argmax, n_sources=task.n_tokens)
    cls = compare(predicted, influence).cls
    errors = recovery.second_moment[0].mean(dim=0).tolist()
    return {
        "nmse": evaluate(model, test),
        "auroc": cls.auroc,
        "average_precision": cls.average_precision,
        "coverage": coverage(predicted.members[-1][:, -1], task.active_index_set(inputs)),
        "influence_inside": cls.influence_inside,
        "predicted_size": cls.predicted_size,
        "concentration": float(positions.concentration[0].double().mean()),
        **{f"rank{rank}": error for rank, error in zip(RANKS, errors, strict=True)},
    }


def _first(run: "pd.DataFrame", reached: "pd.Series[bool]") -> str:
    """Return the first epoch at which it is reached, in words."""
    return str(int(run["epoch"][reached].min())) if reached.any() else "none"


def _read_end(results: "pd.DataFrame", column: str, place: int) -> Numbers:
    """Read a column at the first or the last checkpoint of each run."""
    # first() and last() would pass over undefined numbers
    return numbers_of(
        results.sort_values(["seed", "epoch"]),
        ["seed"],
        lambda run: run[column].iloc[place],
        "seed {}".format,
    )
