"""D heads for D best pairs, where nothing but the heads can be to blame (InfoFlow 2026, C.4)."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from infoflow_lens.experiments.claims import Claim, Numbers
from infoflow_lens.experiments.studies.first_layer import TOKENS, recovery_rows
from infoflow_lens.experiments.studies.intrinsic_dimension import (
    floor,
    heads_shown,
    route_rows,
    routes_shown,
    two_layers,
)
from infoflow_lens.experiments.study import (
    Pair,
    Row,
    Settings,
    Statement,
    TrainedStudy,
    standardised,
)
from infoflow_lens.experiments.tables import markdown_table
from infoflow_lens.foundation.seeds import derived_seed
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import VectorTransformer
from infoflow_lens.tasks import IntrinsicDimension
from infoflow_lens.tasks.tuples import largest_overlap
from infoflow_lens.training import Draw, TrainingConfig, TrainingResult, restored

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_SEPARATED, _ORTHOGONAL = "rotoreflection", "orthogonal"
_LINEAR, _HIDDEN = "linear", "hidden layer"
_BATCH = 256
_SMALL, _TIMES = 1e-3, 50  # the error of (D, D), and how much larger the others' are
_FIRST, _SECOND = 0.1, 0.75  # of the error before training: of the first choice, of the second
_IDLE = 0.01  # rise of the NMSE below which a head does nothing


class SeparatedPairs(TrainedStudy):
    """NMSE of two-layer models on a sum of D best pairs, of matrices that are alike and far apart.

    As `IntrinsicDimensionStudy`, with all taken away that lets models with D heads stop early or
    models with fewer go on: matrices of one law under which no token makes a pair with itself
    (rotoreflections; else a component whose best pairs are single tokens gets no head), with little
    overlap (of 4096 draws the one of least overlap); a linear encoder, behind which a head has one
    role; and training at full length from the start, on sequences that no step sees twice. Behind
    both stands what happens with either alone: orthogonal matrices, or a hidden layer.

    For each head of the first layer rows tell, beside its routes (`intrinsic_dimension`), what a
    linear map recovers from the states of tokens behind it of its first and its second choice, over
    the error before training (eq 56, as in `max_position_recovery`).

    Preset quick has T = 4 and D = 2 and 3; full has the other cells: T = 6 and 8, D = 4, and the
    matrices and encoders one by one.
    """

    name: ClassVar[str] = "separated_pairs"
    title: ClassVar[str] = "Do D best pairs of separated matrices need D heads?"
    source: ClassVar[str] = "InfoFlow 2026, Prop. 1, App. C.1 and C.4, Table 11, Fig. 1(a)"
    statement: ClassVar[Statement] = Statement.of("separated_pairs")
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 3, "full": 3}

    def cases(self, preset: str) -> Sequence[Settings]:
        """By D, T, matrices, encoder, draw and heads, in the order of what is asked first."""
        both = (_SEPARATED, _LINEAR)
        cells: Mapping[str, Sequence[tuple[int, int, tuple[str, str], int, int]]] = {
            "smoke": [(2, 3, both, 1, 10)],
            "quick": [(3, 4, both, 2, 15000), (2, 4, both, 2, 6000)],
            "full": [
                (2, 6, both, 2, 9000),
                (3, 6, both, 2, 18000),
                (2, 8, both, 2, 12000),
                (3, 8, both, 2, 27000),
                (3, 4, (_SEPARATED, _HIDDEN), 1, 15000),
                (3, 4, (_ORTHOGONAL, _LINEAR), 1, 15000),
                (3, 4, (_ORTHOGONAL, _HIDDEN), 1, 15000),
                (4, 4, both, 2, 18000),
            ],
        }
        return [
            {
                "D": d,
                "n_tokens": n_tokens,
                "matrices": matrices,
                "encoder": encoder,
                "draw": draw,
                "heads": list(heads),
                "d_token": 3,
                "d_model": 32,
                "d_head": 4,
                "d_mlp": 64,
                "lr": 5e-3,
                "steps": steps,
                "n_train": min(steps, 100) * _BATCH,  # of an epoch, and no other
            }
            for d, n_tokens, (matrices, encoder), draws, steps in cells[preset]
            for draw in range(draws)
            for heads in dict.fromkeys([(d, d), (d - 1, d + 1), (1, 2 * d - 1)])
            if (matrices, encoder) == both or heads == (d, d)
        ]

    def architecture(self, settings: Settings) -> Architecture:
        """Two layers of heads of the same dimension."""
        return two_layers(settings, settings["encoder"] == _LINEAR, init_mode="kaiming_uniform")

    def task(self, settings: Settings) -> IntrinsicDimension:
        """The target, which is the same for all models of a D, kind of matrices and draw."""
        return IntrinsicDimension(
            n_tokens=settings["n_tokens"],
            d_token=settings["d_token"],
            n_components=settings["D"],
            matrix_kind=settings["matrices"],
            n_draws=4096,
            tokens="sphere",
            seed=1000 + settings["draw"],
        )

    def data(self, settings: Settings, seed: int) -> tuple[Draw, Pair]:
        """Fresh sequences in every epoch."""
        drawn = self._scaled(settings)

        def draw(epoch: int) -> Pair:
            return drawn("train", settings["n_train"], derived_seed(seed, epoch))

        return draw, drawn("validation", 4000, seed)

    def _scaled(self, settings: Settings) -> Callable[[str, int, int], Pair]:
        """What draws sequences for a part, so many of a seed; targets of mean 0, deviation 1."""
        task = self.task(settings)
        scale = self.drawn(task, "scale", 20000, 0)
        return lambda part, n, seed: standardised(scale, self.drawn(task, part, n, seed))[1]

    def training(self, settings: Settings) -> TrainingConfig:
        """Along a cosine, at full length from the start."""
        return TrainingConfig(
            epochs=settings["steps"] * _BATCH // settings["n_train"],
            batch_size=_BATCH,
            lr=settings["lr"],
            betas=(0.9, 0.99),
            warmup_steps=100,
            weight_decay=0.0,
        )

    def rows(
        self, settings: Settings, seed: int, model: VectorTransformer, result: TrainingResult
    ) -> list[Row]:
        """A row for each head of the first layer; errors and floor are those of the model."""
        task = self.task(settings)
        shared: Row = {
            "nmse": result.nmse,
            "best_epoch": result.best_epoch,
            "overlap": float(largest_overlap(task.matrices)),
            **floor(task, settings["heads"][0], linear=settings["encoder"] == _LINEAR),
        }
        x, y = self._scaled(settings)("test", 2000, seed)
        initial = restored(model, result.initial_state)
        recovered = [r for r in recovery_rows(initial, model, x, y) if r["queries"] == TOKENS]
        rows = route_rows(task, model, x)
        for row in rows:
            first, second = (r for r in recovered if r["head"] == row["head"])
            row |= {
                "lost_without": first["lost_without"],
                "first_choice": first["ratio"],
                "second_choice": second["ratio"],
            }
        return [{**shared, **row} for row in rows]

    def table(self, results: "pd.DataFrame") -> str:
        """Errors of every seed by D, T and heads; then routes and recovery, head by head."""
        least = _least(results)
        groups: Any = results.drop_duplicates("run").groupby(_CELL, sort=False)
        errors = markdown_table(
            [
                *("D", "T", "matrices", "encoder", "heads", "hard heads reach"),
                *("NMSE of every seed, by draw", "least over seeds", "times that of (D, D)"),
            ],
            [
                (
                    *(*key[:-1], heads_shown(key[-1])),
                    f"{rows['floor'].min():.2g}",
                    "; ".join(
                        ", ".join(f"{error:.2g}" for error in of_draw["nmse"])
                        for _, of_draw in rows.groupby("draw")
                    ),
                    f"{least[key]:.2g}",
                    f"{least[key] / least.get(_enough(key), math.nan):.3g}",
                )
                for key, rows in groups
            ],
        )
        best = results[results["run"].isin(_best(results))]
        heads: Any = best.groupby([*_CELL, "draw", "head"], sort=False)
        routed = markdown_table(
            [
                *("D", "T", "matrices", "encoder", "heads", "draw", "head of layer 1"),
                *("attends to the partner", "roles", "NMSE lost without"),
                *("first choice", "second choice"),
            ],
            [
                (
                    *(*key[:4], heads_shown(key[4]), key[5], key[6] + 1, *routes_shown(rows)),
                    f"{rows['lost_without'].iloc[0]:.2g}",
                    f"{rows['first_choice'].iloc[0]:.3f}",
                    f"{rows['second_choice'].iloc[0]:.2f}",
                )
                for key, rows in heads
            ],
        )
        return "\n\n".join(
            [
                errors,
                "Heads of the first layer, of the seed of least error of each draw: how often the "
                "head's first choice, at a token of the best pair of a matrix, is the other one "
                "(by matrix, from the first / from the second token); and what a linear map "
                "recovers of its choices from the states of tokens, over the error before "
                "training.",
                routed,
                "Least over seeds: by geometric mean over draws. Published, in words and a figure: "
                "(D, D) lowest, the others higher by two to three orders; the numbers of Table 11 "
                "did not survive in print.",
            ]
        )

    def figure(self, results: "pd.DataFrame") -> "Figure":
        """Every seed, a panel for each D."""
        from matplotlib.figure import Figure

        runs = results.drop_duplicates("run")
        sizes = sorted(set(runs["D"]))
        figure = Figure(figsize=(3.6 * len(sizes) + 1, 4.2), layout="constrained")
        panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
        for panel, d in zip(panels, sizes, strict=True):
            groups: Any = runs[runs["D"] == d].groupby(_CELL, sort=False)
            labels = []
            for place, (key, rows) in enumerate(groups):
                colour = "#009e73" if key[-1] == f"{d} {d}" else "#d55e00"
                for draw, of_draw in rows.groupby("draw"):
                    at = [place + 0.25 * draw] * len(of_draw)
                    panel.plot(at, of_draw["nmse"], "os"[draw % 2], color=colour, alpha=0.6)
                name = f"T = {key[1]}, {heads_shown(key[-1])}"
                labels.append(name if _separated(key) else f"{name}\n{key[2]}, {key[3]}")
            panel.axhline(_SMALL, color="#444444", linewidth=0.8, linestyle=":")
            panel.set_yscale("log")
            panel.set_xticks(range(len(labels)), labels, rotation=90, fontsize="small")
            panel.set_title(f"D = {d}", fontsize="medium")
        panels[0].set_ylabel("validation NMSE, every seed (by draw)")
        return figure

    def claims(self) -> Sequence[Claim]:
        """By the errors of (D, D) and of the others, and by what is recovered."""
        least = "least over seeds, geometric mean over draws"
        small = f"the NMSE of (D, D) at D = 2 and 3 is {{bound}} ({least})"
        times = (
            "every model with fewer heads in the first layer has there {bound} times the NMSE of "
            f"(D, D) ({least})"
        )
        first = (
            "what is recovered of the first choice of the heads of (D, D) that are in use leaves "
            "{bound} of the error before training (best seed of each draw, mean over heads)"
        )
        second = "the same of their second choice leaves {bound} of it"
        return (
            Claim(small, _errors, "<=", _SMALL),
            Claim(times, _times, ">=", _TIMES),
            Claim(first, lambda r: _recovered(r, "first_choice"), "<", _FIRST),
            Claim(second, lambda r: _recovered(r, "second_choice"), ">=", _SECOND),
        )

    def judges(self, settings: Settings) -> bool:
        """The rule is about both changes together, at D = 2 and 3."""
        both = (settings["matrices"], settings["encoder"]) == (_SEPARATED, _LINEAR)
        return both and settings["D"] <= _MOST_JUDGED

    def remarks(self, results: "pd.DataFrame") -> Sequence[str]:
        """What either change alone gives, and larger D."""
        remarks = []
        for key, error in _least(results).items():
            cell: Any = key
            if not _separated(cell):
                with_both = _least(results).get((*cell[:2], _SEPARATED, _LINEAR, cell[4]), math.nan)
                beside = "" if math.isnan(with_both) else f", with both {with_both:.2e}"
                remarks.append(f"{_named(cell)}, {cell[2]}, {cell[3]}: {error:.2e}{beside}")
            elif cell[0] > _MOST_JUDGED:
                remarks.append(f"{_named(cell)}: {error:.2e}")
        return remarks

    def controlled(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Other models, and the second choice, in the place of what is judged."""
        least, fewer = _least(results), results.copy()
        for key in least.index:
            one_head = (*key[:-1], f"1 {2 * key[0] - 1}")
            if _judged(key) and key == _enough(key):
                here = (fewer[_CELL] == list(key)).all(axis=1)
                fewer.loc[here, "nmse"] = least[one_head]
        return {
            "fewer heads": fewer,
            "second choice": results.assign(first_choice=results["second_choice"]),
        }


_CELL = ["D", "n_tokens", "matrices", "encoder", "heads"]
_MOST_JUDGED = 3  # D
Cell = tuple[int, int, str, str, str]


def _enough(cell: Cell) -> Cell:
    """The cell of (D, D)."""
    return (*cell[:-1], f"{cell[0]} {cell[0]}")


def _separated(cell: Cell) -> bool:
    return cell[2:4] == (_SEPARATED, _LINEAR)


def _judged(cell: Cell) -> bool:
    return _separated(cell) and cell[0] <= _MOST_JUDGED


def _named(cell: Cell) -> str:
    return f"D = {cell[0]}, T = {cell[1]}, {heads_shown(cell[4])}"


def _least(results: "pd.DataFrame") -> "pd.Series[float]":
    """Least NMSE over seeds by cell; the geometric mean over draws."""
    import numpy as np

    of_draws = results.groupby([*_CELL, "draw"], sort=False)["nmse"].min()
    least: Any = np.exp(np.log(of_draws).groupby(level=_CELL, sort=False).mean())
    return least


def _best(results: "pd.DataFrame") -> list[int]:
    """The run of least error of each cell and draw."""
    runs = results.drop_duplicates("run").set_index("run")
    return list(runs.groupby([*_CELL, "draw"], sort=False)["nmse"].idxmin())


def _errors(results: "pd.DataFrame") -> Numbers:
    """Of (D, D), by D and T."""
    cells: Any = _least(results).items()
    return {
        _named(cell): float(error)
        for cell, error in cells
        if _judged(cell) and cell == _enough(cell)
    }


def _times(results: "pd.DataFrame") -> Numbers:
    """How many times that of (D, D) the error of models with fewer heads is."""
    least = _least(results)
    cells: Any = least.items()
    return {
        _named(cell): float(error / least.get(_enough(cell), math.nan))
        for cell, error in cells
        if _judged(cell) and cell != _enough(cell)
    }


def _recovered(results: "pd.DataFrame", choice: str) -> Numbers:
    """The mean of heads in use of the best models of (D, D), by D and T."""
    best = results[results["run"].isin(_best(results)) & (results["lost_without"] >= _IDLE)]
    groups: Any = best.groupby(_CELL, sort=False)
    return {
        _named(cell): float(rows[choice].mean())
        for cell, rows in groups
        if _judged(cell) and cell == _enough(cell)
    }
