"""Predicted against measured information sets at checkpoints through training."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from infoflow_lens.agreement import compare, coverage
from infoflow_lens.experiments.claims import Claim, Numbers
from infoflow_lens.experiments.demo import RANKS, DemoConfig
from infoflow_lens.experiments.study import Row, Settings, Statement, VectorStudy
from infoflow_lens.experiments.tables import markdown_table, spread
from infoflow_lens.hooks import JacobianInfluence, PositionsProbe, RecoveryProbe, run_probes
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import build_model
from infoflow_lens.tasks import VectorTask
from infoflow_lens.theory import propagate
from infoflow_lens.training import evaluate, train

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

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
    source: ClassVar[str] = "InfoFlow 2026, Sec. 5.1 (rule 1, eq 4), App. C.1"
    statement: ClassVar[Statement] = Statement.of("agreement_over_training")
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 3, "full": 5}
    judges_every_run: ClassVar[bool] = True

    def cases(self, preset: str) -> Sequence[Settings]:
        """One configuration."""
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
        """The demo's."""
        return _demo(settings, 0).architecture()

    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """A row for each checkpoint; epoch 0 is the model before training."""
        config = _demo(settings, seed)
        task = config.task()
        test = self.drawn(task, "test", settings["n_recovery"], seed)
        n_influence: int = settings["n_influence"]
        model = build_model(self.architecture(settings), seed=seed, device=device)
        rows = [{"epoch": 0, **_state_of(model, task, test, n_influence)}]

        def look(epoch: int, model: nn.Module) -> None:
            if epoch in settings["checkpoints"]:
                rows.append({"epoch": epoch, **_state_of(model, task, test, n_influence)})

        train(
            model,
            self.drawn(task, "train", settings["n_train"], seed),
            self.drawn(task, "validation", config.n_validation, seed),
            config.training(),
            after_epoch=look,
            progress=False,
        )
        ratios = [
            {f"ratio_rank{rank}": row[f"rank{rank}"] / rows[0][f"rank{rank}"] for rank in RANKS}
            for row in rows
        ]
        return [{**row, **ratio} for row, ratio in zip(rows, ratios, strict=True)]

    def table(self, results: "pd.DataFrame") -> str:
        """Means and ranges over seeds, a row a checkpoint; then what came first."""
        groups: Any = results.groupby("epoch")
        of_epochs = markdown_table(
            ["epoch", *_COLUMNS.values()],
            [[epoch, *(spread(rows[column]) for column in _COLUMNS)] for epoch, rows in groups],
        )
        firsts = markdown_table(
            ["seed", f"AUROC above {_AGREES}", f"NMSE below {_LEARNT}"],
            [
                (seed, _shown(agreement), _shown(error))
                for seed, agreement, error in _firsts(results)
            ],
        )
        return "\n\n".join(
            [
                of_epochs,
                "First epoch that was looked at with",
                firsts,
                "The sets are those of CLS. Predicted: at the end they hold the active tokens. "
                "Published: nothing between the ends of training; at its end recovery ratios of "
                ".065-.096 or .34-.78 (rank 1, six or five heads) and .78-1.09 (rank 2), of other "
                "sizes.",
            ]
        )

    def figure(self, results: "pd.DataFrame") -> "Figure":
        """Agreement, error and recovery over epochs; lines are means, bands the range."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 4), layout="constrained")
        agreement, error, recovery = figure.subplots(1, 3)
        panels = {
            agreement: ("auroc", "coverage", "influence_inside"),
            error: ("nmse",),
            recovery: ("ratio_rank1", "ratio_rank2", "concentration"),
        }
        by_epoch = results.groupby("epoch")
        for axes, columns in panels.items():
            for column in columns:
                mean, low, high = (getattr(by_epoch[column], f)() for f in ("mean", "min", "max"))
                (line,) = axes.plot(mean.index, mean, ".-", label=_COLUMNS[column])
                axes.fill_between(mean.index, low, high, color=line.get_color(), alpha=0.2)
            axes.set_xscale("symlog", base=2, linthresh=1)  # with epoch 0
            axes.set_xlim(0, None)
            axes.set_xlabel("epochs of training")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.legend(
                loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False, fontsize="small"
            )
        agreement.axhline(_AGREES, color="#444444", linewidth=0.8, linestyle=":")
        error.set_yscale("log")
        error.axhline(_LEARNT, color="#444444", linewidth=0.8, linestyle=":")
        return figure

    def claims(self) -> Sequence[Claim]:
        """By the first and the last checkpoint of every run."""
        auroc = "the AUROC of the predicted sets of CLS against measured influence is {bound}"
        return (
            Claim(f"{auroc} before training", lambda r: _by_seed(r, "auroc", 0), "<", 0.75),
            Claim(f"{auroc} at the end", lambda r: _by_seed(r, "auroc", -1), ">", _AGREES),
            Claim(
                "these sets hold {bound} of the active tokens at the end",
                lambda r: _by_seed(r, "coverage", -1),
                ">",
                0.97,
            ),
        )

    def remarks(self, results: "pd.DataFrame") -> Sequence[str]:
        """Which comes first, agreement or a small error."""
        return [
            f"seed {seed}: first epoch with an AUROC above {_AGREES}: {_shown(agreement)}, "
            f"with an NMSE below {_LEARNT}: {_shown(error)}"
            for seed, agreement, error in _firsts(results)
        ]

    def controlled(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """The untrained model at both ends."""
        import pandas as pd

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
    """What is measured at a checkpoint; of the first layer, means over its heads."""
    inputs = test[0][:n_influence]
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


def _firsts(results: "pd.DataFrame") -> list[tuple[int, int | None, int | None]]:
    """For every seed the first epochs with agreement and with a small error."""
    groups: Any = results.sort_values("epoch").groupby("seed")
    return [
        (
            int(seed),
            _first(rows["epoch"], rows["auroc"] > _AGREES),
            _first(rows["epoch"], rows["nmse"] < _LEARNT),
        )
        for seed, rows in groups
    ]


def _first(epochs: "pd.Series[int]", reached: "pd.Series[bool]") -> int | None:
    return int(epochs[reached].iloc[0]) if reached.any() else None


def _shown(epoch: int | None) -> str:
    return "none" if epoch is None else str(epoch)


def _by_seed(results: "pd.DataFrame", column: str, place: int) -> Numbers:
    """A column at the first or the last checkpoint of each run."""
    groups: Any = results.sort_values("epoch").groupby("seed")
    # first() and last() would pass over undefined numbers
    return {f"seed {seed}": float(rows[column].iloc[place]) for seed, rows in groups}
