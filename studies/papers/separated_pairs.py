"""D heads for D best pairs, where nothing but the heads can be to blame (InfoFlow 2026, C.4)."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

from infoflow_lens.foundation.lazy import pd
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import VectorTransformer
from infoflow_lens.studies.claims import Claim, Numbers
from infoflow_lens.studies.papers.first_layer import IDLE, TOKENS, recovery_rows
from infoflow_lens.studies.papers.intrinsic_dimension import (
    NAMES,
    WORDS,
    floor,
    partners,
    roles,
    route_rows,
    two_layers,
)
from infoflow_lens.studies.papers.rows import (
    best_runs,
    compare_with_enough,
    exchange_heads,
    first_heads,
    has_enough_heads,
    heads_shown,
    numbers_of,
    runs_of,
)
from infoflow_lens.studies.plots import GREEN, ORANGE, Axis, FigureSpec, Panel, Points
from infoflow_lens.studies.study import FreshStudy, Row, Settings, Statement
from infoflow_lens.studies.tables import Column, Part, TableSpec, groups
from infoflow_lens.tasks import IntrinsicDimension
from infoflow_lens.tasks.tuples import largest_overlap
from infoflow_lens.training import TrainingResult, restored

_SEPARATED, _ORTHOGONAL = "rotoreflection", "orthogonal"
_LINEAR, _HIDDEN = "linear", "hidden layer"
_SMALL, _TIMES = 1e-3, 50  # the error of (D, D), and how much larger the others' are
_FIRST, _SECOND = 0.1, 0.75  # of the error before training: of the first choice, of the second
_CELL = ("D", "n_tokens", "matrices", "encoder", "heads")
_MOST_JUDGED = 3  # D


class SeparatedPairs(FreshStudy):
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

    Preset quick has T = 4 and D = 2 and 3; full has the other cells: T = 6 and 8, the matrices and
    encoders one by one, and a short look at D = 4; longer has three times the steps at D = 2,
    T = 6, and longest six times the steps at D = 2, T = 8.
    """

    name: ClassVar[str] = "separated_pairs"
    title: ClassVar[str] = "Do D best pairs of separated matrices need D heads?"
    finding: ClassVar[str] = "D heads in the first layer end at NMSE {0}, fewer at {1} times that"
    source: ClassVar[str] = "InfoFlow 2026, Prop. 1, App. C.1 and C.4, Table 11, Fig. 1(a)"
    statement: ClassVar[Statement] = Statement.read("separated_pairs")
    presets: ClassVar[Mapping[str, int]] = {
        "smoke": 1, "quick": 3, "full": 3, "longer": 3, "longest": 1,
    }  # fmt: skip

    def cases(self, preset: str) -> Sequence[Settings]:
        """Vary D, T, matrices, encoder, draw and heads, in the order of what is asked first."""
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
                (4, 4, both, 1, 6000),
            ],
            "longer": [(2, 6, both, 1, 27000)],
            "longest": [(2, 8, both, 1, 72000)],
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
                **self.steps(steps),
            }
            for d, n_tokens, (matrices, encoder), draws, steps in cells[preset]
            for draw in range(draws)
            # as many heads in all, shared out differently; for D = 2 two of these are one
            for heads in dict.fromkeys([(d, d), (d - 1, d + 1), (1, 2 * d - 1)])
            # what one change alone gives is asked of (D, D) only
            if (matrices, encoder) == both or heads == (d, d)
        ]

    def architecture(self, settings: Settings) -> Architecture:
        """Return two layers of heads of the same dimension."""
        return two_layers(settings, settings["encoder"] == _LINEAR, init_mode="kaiming_uniform")

    def task(self, settings: Settings) -> IntrinsicDimension:
        """Return the target, which is the same for all models of a D, kind of matrices and draw."""
        return IntrinsicDimension(
            n_tokens=settings["n_tokens"],
            d_token=settings["d_token"],
            n_components=settings["D"],
            matrix_kind=settings["matrices"],
            n_draws=4096,
            tokens="sphere",
            seed=1000 + settings["draw"],
        )

    def rows(
        self, settings: Settings, seed: int, model: VectorTransformer, result: TrainingResult
    ) -> list[Row]:
        """Give a row for each head of the first layer; errors and floor are those of the model."""
        task = self.task(settings)
        shared: Row = {
            "nmse": result.nmse,
            "best_epoch": result.best_epoch,
            "overlap": float(largest_overlap(task.matrices)),
            **floor(task, settings["heads"][0], linear=settings["encoder"] == _LINEAR),
        }
        x, y = self.scale_draws(settings)("test", 2000, seed)
        # what a map recovers before training is owed to the width alone
        initial = restored(model, result.initial_state)
        recovered = [r for r in recovery_rows(initial, model, x, y) if r["queries"] == TOKENS]
        rows = route_rows(task, model, x)
        for row in rows:
            # two rows a head: of its first and of its second choice
            first, second = (r for r in recovered if r["head"] == row["head"])
            row |= {
                "lost_without": first["lost_without"],
                "first_choice": first["ratio"],
                "second_choice": second["ratio"],
            }
        return [{**shared, **row} for row in rows]

    def tables(self) -> Sequence[Part]:
        """Return errors of every seed by D, T and heads; then routes and recovery, head by head."""
        errors = (
            Column("hard heads reach", "floor", "least", ".2g"),
            Column("NMSE of every seed, by draw", _every_seed),
            Column("least over seeds", "least", "first", ".2g"),
            Column("times that of (D, D)", "times", "first"),
        )
        of_heads = (
            Column("attends to the partner", partners),
            Column("roles", roles),
            Column("NMSE lost without", "lost_without", "first", ".2g"),
            Column("first choice", "first_choice", "first", ".3f"),
            Column("second choice", "second_choice", "first", ".2f"),
        )
        by = [*_CELL, "draw"]
        return (
            TableSpec(_CELL, errors, partial(compare_with_enough, by=_CELL), WORDS),
            "Heads of the first layer, of the seed of least error of each draw: how often the "
            "head's first choice, at a token of the best pair of a matrix, is the other one "
            "(by matrix, from the first / from the second token); and what a linear map "
            "recovers of its choices from the states of tokens, over the error before "
            "training.",
            TableSpec([*by, "head"], of_heads, partial(best_runs, by=by), WORDS, NAMES),
            "Least over seeds: by geometric mean over draws. Published, in words and a figure: "
            "(D, D) lowest, the others higher by two to three orders; the numbers of Table 11 "
            "did not survive in print.",
        )

    def plots(self) -> FigureSpec:
        """Draw every seed, a panel for each D."""
        seeds = Points(
            _CELL, "nmse", label=_place, beside="draw",
            colour=lambda d, *cell: GREEN if first_heads(cell[-1]) == d else ORANGE,
        )  # fmt: skip
        error = Axis("validation NMSE, every seed (by draw)", "log", levels=[_SMALL])
        panel = Panel([seeds], y=error, title=lambda rows: f"D = {rows['D'].iloc[0]}")
        return FigureSpec([panel], per="D", size=(4.2, 4.2), share="y", rows=_sort_by_d)

    def claims(self) -> Sequence[Claim]:
        """Judge the errors of (D, D) and of the others, and what is recovered."""
        least = "least over seeds, geometric mean over draws"
        small = f"the NMSE of (D, D), D up to {_MOST_JUDGED}, is {{bound}} ({least})"
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
            Claim(
                small,
                partial(_read_cells, column="least", enough=True),
                "<=",
                _SMALL,
                name="NMSE of (D, D)",
            ),
            Claim(
                times,
                partial(_read_cells, column="times", enough=False),
                ">=",
                _TIMES,
                name="NMSE of fewer heads over it",
            ),
            Claim(
                first,
                partial(_recovery, choice="first_choice"),
                "<",
                _FIRST,
                name="error of the first choice",
            ),
            Claim(
                second,
                partial(_recovery, choice="second_choice"),
                ">=",
                _SECOND,
                name="error of the second",
            ),
        )

    def judges(self, settings: Settings) -> bool:
        """Say whether the rule judges: it is about both changes together, at D = 2 and 3."""
        both = (settings["matrices"], settings["encoder"]) == (_SEPARATED, _LINEAR)
        return both and settings["D"] <= _MOST_JUDGED

    def remarks(self, results: "pd.DataFrame") -> Sequence[str]:
        """Say what either change alone gives, and larger D."""
        runs, remarks = compare_with_enough(results, _CELL), []
        for cell, rows in groups(runs, _CELL):
            d, length, matrices, encoder, heads = cell
            error = rows["least"].iloc[0]
            if not _has_both(rows).all():
                both = runs[_has_both(runs) & (runs["D"] == d) & (runs["n_tokens"] == length)]
                both = both[both["heads"] == heads]["least"]
                beside = "" if both.empty else f", with both {both.iloc[0]:.2e}"
                remarks.append(f"{_name_cell(*cell)}, {matrices}, {encoder}: {error:.2e}{beside}")
            elif d > _MOST_JUDGED:
                remarks.append(f"{_name_cell(*cell)}: {error:.2e}")
        return remarks

    def control_results(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Put other models, and the second choice, in the place of what is judged."""
        return {
            "fewer heads": exchange_heads(results, _CELL),
            "second choice": results.assign(first_choice=results["second_choice"]),
        }


def _sort_by_d(results: "pd.DataFrame") -> "pd.DataFrame":
    return runs_of(results).sort_values("D", kind="stable")


def _has_both(rows: "pd.DataFrame") -> "pd.Series[bool]":
    """Mark the runs of both changes together."""
    separated: pd.Series[bool] = rows["matrices"] == _SEPARATED
    return separated & (rows["encoder"] == _LINEAR)


def _select(rows: "pd.DataFrame", *, enough: bool) -> "pd.DataFrame":
    """Select runs of both changes together with small D, of (D, D) or of fewer heads."""
    judged = _has_both(rows) & (rows["D"] <= _MOST_JUDGED)
    return rows[judged & (has_enough_heads(rows) == enough)]


def _name_cell(d: int, n_tokens: int, matrices: str, encoder: str, heads: str) -> str:
    return f"D = {d}, T = {n_tokens}, {heads_shown(heads)}"


def _place(d: int, n_tokens: int, matrices: str, encoder: str, heads: str) -> str:
    name = f"T = {n_tokens}, {heads_shown(heads)}"
    both = (matrices, encoder) == (_SEPARATED, _LINEAR)
    return name if both else f"{name}\n{matrices}, {encoder}"


def _every_seed(rows: "pd.DataFrame") -> str:
    """Return the errors of a cell, draw by draw."""
    draws = groups(rows, ["draw"], sort=True)
    return "; ".join(", ".join(f"{error:.2g}" for error in draw["nmse"]) for _, draw in draws)


def _read_cells(results: "pd.DataFrame", column: str, *, enough: bool) -> Numbers:
    """Read what stands beside the judged cells, by D, T and heads."""
    judged = _select(compare_with_enough(results, _CELL), enough=enough)
    return numbers_of(judged, _CELL, lambda rows: rows[column].iloc[0], _name_cell)


def _recovery(results: "pd.DataFrame", choice: str) -> Numbers:
    """Average over the heads in use of the best models of (D, D), by D and T."""
    best = _select(best_runs(results, [*_CELL, "draw"]), enough=True)
    in_use = best[best["lost_without"] >= IDLE]
    return numbers_of(in_use, _CELL, lambda rows: rows[choice].mean(), _name_cell)
