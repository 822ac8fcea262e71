"""Two layers need D heads in the first one for D best pairs (InfoFlow 2026, C.4, Fig. 1a)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infoflow_lens.experiments.claims import Claim
from infoflow_lens.experiments.stages import StagedResult, StagedStudy
from infoflow_lens.experiments.study import (
    Pair,
    Row,
    Settings,
    Statement,
)
from infoflow_lens.experiments.tables import markdown_table, spread
from infoflow_lens.hooks import PositionsProbe, run_probes
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import VectorTransformer
from infoflow_lens.tasks import IntrinsicDimension
from infoflow_lens.theory.best_heads import BestHeads, best_heads
from infoflow_lens.theory.comparison import best_tuples
from infoflow_lens.theory.estimate import phase_diagram
from infoflow_lens.training import TrainingConfig

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_OWED = 0.1  # what the best hard heads that were found leave, from which on a gap is owed
_ROUTE = 0.5  # share of queries from which on a head counts as playing a role
_PLAIN, _ROTATED, _LINEAR = "gaussian", "orthogonal", "gaussian, linear encoder"


@lru_cache(maxsize=64)
def _best_heads(task: IntrinsicDimension, n_heads: int, roles: int) -> BestHeads:
    """The best that were found; the same for all seeds of a setting."""
    return best_heads(task, n_heads, roles=roles)


class IntrinsicDimensionStudy(StagedStudy):
    """NMSE of two-layer models on a sum of D best pairs, by the heads of both layers.

    For every D models with as many heads: (D, D), (D - 1, D + 1) and (1, 2D - 1) [chosen: the
    paper's configurations and sizes did not survive in print]. By counting comparisons,
    max-position retrieval needs D heads in the first layer for large T. That counts heads of one
    role: behind an encoder with a hidden layer one head can look for different partners by what its
    query is (`infoflow_lens.theory.routing`), so what theory owes is said for each setting by
    `floor`, the least error that as many hard heads were found to reach on the study's own matrices
    (`infoflow_lens.theory.best_heads`, with as many tries as `floor_budget`). Three settings:

    - gaussian matrices, as published, where heads of several roles come close: no gap is owed;
    - orthogonal matrices, under which no token tells its role: a gap is owed at every D;
    - gaussian matrices and a linear encoder, whose heads have one role each: a gap is owed, and the
      floor is that of heads of one role.

    Tokens are uniform on the sphere [chosen]: of normal tokens the longest ones make the best
    pairs, whatever the matrix. Models are trained at growing lengths, and at the full one until
    nothing is gained any more (`infoflow_lens.experiments.stages`), since they stay on a plateau
    for long. `first` and `second` say how often a head of layer 1 attends, from the first or the
    second token of the best pair of a matrix, to the other one.
    """

    name: ClassVar[str] = "intrinsic_dimension"
    title: ClassVar[str] = "Do D best pairs need D heads in the first of two layers?"
    source: ClassVar[str] = "InfoFlow 2026, Prop. 1, App. C.4, Table 11, Fig. 1(a)"
    statement: ClassVar[Statement] = Statement.of("intrinsic_dimension")
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 2, "full": 2}

    def cases(self, preset: str) -> Sequence[Settings]:
        """By D, kind of matrices, draw and heads.

        Preset full has more matrices, and shorter sequences: at T = 16 three matrices are not
        learnt by as many steps (pilots).
        """
        settings: Mapping[str, Sequence[tuple[int, str, int]]] = {
            "smoke": [(2, _PLAIN, 1)],
            "quick": [(2, _ROTATED, 1), (2, _LINEAR, 1), (2, _PLAIN, 2)],
            "full": [(d, *rest) for d in (2, 3, 4) for rest in ((_ROTATED, 1), (_LINEAR, 2))],
        }
        sizes: Mapping[str, Mapping[str, Any]] = {
            "smoke": {
                "n_tokens": 4, "n_train": 1000, "lengths": [2],
                "epochs_each": 1, "epochs": 1, "last_epochs": 1,
            },
            "quick": {
                "n_tokens": 16, "n_train": 64000, "lengths": [4, 8],
                "epochs_each": 8, "epochs": 48, "last_epochs": 16,
            },
            "full": {
                "n_tokens": 8, "n_train": 64000, "lengths": [4],
                "epochs_each": 4, "epochs": 4, "last_epochs": 64,
            },
        }  # fmt: skip
        common = {"d_token": 3, "d_model": 32, "d_head": 4, "d_mlp": 64, "lr": 5e-3}
        return [
            {
                "D": d,
                "matrices": kind,
                "draw": draw,
                "heads": list(heads),
                **common,
                **sizes[preset],
            }
            for d, kind, draws in settings[preset]
            for draw in range(draws)
            for heads in dict.fromkeys([(d, d), (d - 1, d + 1), (1, 2 * d - 1)])
        ]

    def architecture(self, settings: Settings) -> Architecture:
        """Two layers of heads of the same dimension."""
        return two_layers(settings, settings["matrices"] == _LINEAR, init_mode="xavier_normal")

    def task(self, settings: Settings) -> IntrinsicDimension:
        """The target, which is the same for all models of a D, kind and draw."""
        return IntrinsicDimension(
            n_tokens=settings["n_tokens"],
            d_token=settings["d_token"],
            n_components=settings["D"],
            matrix_kind="orthogonal" if settings["matrices"] == _ROTATED else "gaussian",
            tokens="sphere",
            seed=1000 + settings["draw"],
        )

    def data_at(self, settings: Settings, seed: int, n_tokens: int) -> tuple[Pair, Pair]:
        """The target at a length."""
        task = replace(self.task(settings), n_tokens=n_tokens)
        return self.data_of(task, settings, seed, n=4000)

    def training(self, settings: Settings) -> TrainingConfig:
        """Batches of 256."""
        return TrainingConfig(batch_size=256, lr=settings["lr"], warmup_steps=100, weight_decay=0.0)

    def rows(self, settings: Settings, seed: int, trained: StagedResult) -> list[Row]:
        """A row for each head of the first layer; error and floor are those of the model."""
        task = self.task(settings)
        shared: Row = {
            "nmse": trained.last.nmse,
            "epochs_run": sum(trained.epochs.values()),
            "at_constant_rate": trained.epochs["constant"],
            **floor(task, settings["heads"][0], linear=settings["matrices"] == _LINEAR),
        }
        x = self.drawn(task, "routes", 2000, seed)[0]
        return [{**shared, **row} for row in route_rows(task, trained.model, x)]

    def table(self, results: "pd.DataFrame") -> str:
        """Errors by D, matrices and heads, beside what hard heads reach; then the routes."""
        runs = results.drop_duplicates("run")
        groups: Any = runs.groupby(["D", "matrices", "heads"], sort=False)
        least = _least(results)
        cells = []
        for (d, kind, heads), rows in groups:
            key = (d, kind, f"{d} {d}")
            cells.append(
                (
                    d,
                    kind,
                    heads_shown(heads),
                    "allowed" if _first(heads) >= d else "excluded",
                    spread(rows["floor"]),
                    "yes" if _first(heads) < d and _owed(rows) else "no",
                    spread(rows["nmse"]),
                    f"{least[d, kind, heads]:.3g}",
                    f"{least[d, kind, heads] / least.get(key, math.nan):.3g}",
                )
            )
        errors = markdown_table(
            [
                "D",
                "matrices",
                "heads",
                "count, one role a head",
                "hard heads reach",
                "gap owed",
                "NMSE, all runs",
                "least over seeds",
                "times that of (D, D)",
            ],
            cells,
        )
        of_heads = [
            (d, kind, heads_shown(heads), head + 1, *routes_shown(rows))
            for (d, kind, heads, head), rows in _heads(results)
        ]
        routed = markdown_table(
            ["D", "matrices", "heads", "head of layer 1", "attends to the partner", "roles"],
            of_heads,
        )
        return "\n\n".join(
            [
                errors,
                "Attention of the first layer, of the run of the least error: how often the head's "
                "first choice, at a token of the best pair of a matrix, is the other one; by "
                "matrix, from the first / from the second token.",
                routed,
                "Least over seeds: by geometric mean over draws. Published, in words and a figure: "
                "(D, D) lowest, the others higher by two to three orders, with a gap that narrows "
                "at the largest D; the numbers of Table 11 did not survive in print. What hard "
                "heads reach is the least error that was found, and bounds that of the best of "
                f"them from above only: {_searched(results)}.",
            ]
        )

    def figure(self, results: "pd.DataFrame") -> "Figure":
        """NMSE beside the floor, a panel for each kind of matrices; and the phase diagram."""
        from matplotlib.figure import Figure

        from infoflow_lens.report.phase import phase_key, phase_panel

        runs = results.drop_duplicates("run")
        kinds = list(dict.fromkeys(runs["matrices"]))
        figure = Figure(figsize=(3.4 * (1 + len(kinds)), 3.8), layout="constrained")
        *panels, phases = figure.subplots(1, 1 + len(kinds))
        for panel, kind in zip(panels, kinds, strict=True):
            of_kind = runs[runs["matrices"] == kind]
            names = sorted(set(zip(of_kind["D"], of_kind["heads"], strict=True)),
                           key=lambda pair: (pair[0], -_first(pair[1])))  # fmt: skip
            for place, (d, heads) in enumerate(names):
                rows = of_kind[(of_kind["D"] == d) & (of_kind["heads"] == heads)]
                colour = "#009e73" if _first(heads) >= d else "#d55e00"
                panel.plot([place] * len(rows), rows["nmse"], "o", color=colour, alpha=0.6)
                if _first(heads) < d:
                    panel.plot([place] * len(rows), rows["floor"].clip(lower=1e-7), "_",
                               color="#444444", markersize=16)  # fmt: skip
            panel.set_yscale("log")
            labels = [heads_shown(heads) for _, heads in names]
            panel.set_xticks(range(len(names)), labels, rotation=90 if len(names) > 4 else 0)
            panel.set_title(kind, fontsize="medium")
            panel.set_xlabel("heads (bar: hard heads reach)")
        panels[0].set_ylabel("validation NMSE")
        d = int(results["D"].max())
        n_tokens = int(results["n_tokens"].max())
        task = IntrinsicDimension(n_components=d, n_tokens=n_tokens)
        lengths = tuple(sorted({4, 8, 16, 32, 64, 128, 256} | {n_tokens}))
        heads = tuple((h, d) for h in range(1, d + 2))
        phase_panel(phases, phase_diagram(task, heads, lengths))
        phases.set_title(f"count, one role: D = {d}, $h_2$ = {d}", fontsize="medium")
        phase_key(figure)
        return figure

    def claims(self) -> Sequence[Claim]:
        """By the ratio of the least errors to (D, D), wherever a gap is owed."""
        text = (
            f"wherever hard heads leave {_OWED} or more, a model with fewer heads in the first "
            "layer has {bound} times the NMSE of (D, D) (least over seeds, geometric mean over "
            "draws)"
        )
        return (
            Claim(text, lambda r: {n: times for n, times, _, owed in _ratios(r) if owed}, ">=", 10),
        )

    def remarks(self, results: "pd.DataFrame") -> Sequence[str]:
        """The errors, and where no gap is owed."""
        return [
            f"{name}: {errors}{'' if owed else f', so no gap is owed ({times:.3g} times)'}"
            for name, times, errors, owed in _ratios(results)
        ]

    def controlled(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """(1, 2D - 1) in the place of (D, D)."""
        numbers = results.copy()
        few = _least(results)
        for key, value in few.items():
            d, kind, heads = cast("tuple[int, str, str]", key)
            if heads == f"1 {2 * d - 1}":
                here = (numbers["D"] == d) & (numbers["matrices"] == kind)
                numbers.loc[here & (numbers["heads"] == f"{d} {d}"), "nmse"] = value
        return {"fewer heads": numbers}


def two_layers(settings: Settings, linear: bool, **more: Any) -> Architecture:
    """Two layers of heads of the same dimension, with the sizes that the settings name.

    Args:
        settings: n_tokens, d_token, heads, d_model, d_head and d_mlp.
        linear: whether the encoder of tokens has no hidden layer.
        more: of the architecture.
    """
    return Architecture(
        n_heads=tuple(settings["heads"]),
        d_model=settings["d_model"],
        d_head=(settings["d_head"],) * 2,
        d_token=settings["d_token"],
        n_tokens=settings["n_tokens"],
        d_mlp=settings["d_mlp"],
        d_encoder=None if linear else settings["d_mlp"],
        act_fn="gelu",
        **more,
    )


def floor(task: IntrinsicDimension, n_heads: int, *, linear: bool) -> Row:
    """What is left by so many heads of the first layer that choose by hard maxima.

    Args:
        task: the target.
        n_heads: h_1.
        linear: whether they stand behind a linear encoder, where a head has one role; else it may
            choose, and need not.
    """
    # behind a linear encoder a head has one role; else as many as there are sides of pairs
    found = _best_heads(task, n_heads, 1 if linear else 2 * task.n_components)
    return {
        "floor": found.nmse,
        "floor_low": found.low,
        "floor_high": found.high,
        "held": found.held,
        "floor_budget": found.budget,
    }


def route_rows(
    task: IntrinsicDimension,
    model: VectorTransformer,
    x: Float[Tensor, "sample pos d_token"],
) -> list[Row]:
    """For each head of the first layer `routes`, matrix by matrix (from 1)."""
    (positions,) = run_probes(model, x, [PositionsProbe()], progress=False)
    first, second = routes(task, x, positions.argmax[0])
    return [
        {
            "head": head,
            **{f"first_{i + 1}": float(share) for i, share in enumerate(first[head])},
            **{f"second_{i + 1}": float(share) for i, share in enumerate(second[head])},
        }
        for head in range(len(first))
    ]


def routes(
    task: IntrinsicDimension,
    x: Float[Tensor, "sample pos d_token"],
    chosen: Int[Tensor, "sample head query"],
) -> tuple[Float[Tensor, "head component"], Float[Tensor, "head component"]]:
    """How often each head attends to the other token of the best pair of a matrix.

    Args:
        task: the target.
        x: sequences.
        chosen: the key of each head's largest score, of all queries.

    Returns:
        shares of the sequences: from the pair's first token, and from its second.
    """
    rows = torch.arange(len(x))
    shares: tuple[list[Tensor], list[Tensor]] = ([], [])
    for component in task.components:
        first, second = best_tuples(x, component)[0].unbind(dim=1)
        for side, query, key in ((0, first, second), (1, second, first)):
            hit = chosen[rows, :, query] == key[:, None]
            shares[side].append(hit.double().mean(dim=0))
    return torch.stack(shares[0], dim=1), torch.stack(shares[1], dim=1)


def _least(results: "pd.DataFrame") -> "pd.Series[float]":
    """Least NMSE over seeds, by D, matrices and heads; the geometric mean over draws."""
    import numpy as np

    by = ["D", "matrices", "heads"]
    of_draws = results.groupby([*by, "draw"], sort=False)["nmse"].min()
    least: Any = np.exp(np.log(of_draws).groupby(level=by, sort=False).mean())
    return least


def _searched(results: "pd.DataFrame") -> str:
    """How what hard heads reach was found."""
    if "floor_budget" not in results:
        return "these rows have heads of the matrices' own scores, and no search"
    return f"by searches of {results['floor_budget'].max():.0f} tries or fewer"


def _owed(rows: "pd.DataFrame") -> bool:
    """Whether the best hard heads that were found leave much, at every draw."""
    return bool((rows["floor_low"] >= _OWED).all())


def _heads(results: "pd.DataFrame") -> list[tuple[tuple[int, str, str, int], "pd.DataFrame"]]:
    """A row for each head of the best run, by D, matrices, heads and place."""
    by = ["D", "matrices", "heads"]
    best = results.loc[results.groupby(by, sort=False)["nmse"].idxmin(), "run"]
    groups: Any = results[results["run"].isin(best)].groupby([*by, "head"], sort=False)
    return list(groups)


def routes_shown(rows: "pd.DataFrame") -> tuple[str, int]:
    """The shares of a head in words, and how many matrices it serves."""
    row, shown, roles = rows.iloc[0], [], 0
    for i in range(1, int(row["D"]) + 1):
        first, second = float(row[f"first_{i}"]), float(row[f"second_{i}"])
        roles += max(first, second) >= _ROUTE
        shown.append(f"{first:.2f} / {second:.2f}")
    return "; ".join(shown), roles


def _first(heads: Any) -> int:
    """h_1 of heads as they stand in results.csv."""
    return int(str(heads).split()[0])


def heads_shown(heads: Any) -> str:
    """Heads of both layers, from the cell of results.csv."""
    return f"({', '.join(str(heads).split())})"


def _ratios(results: "pd.DataFrame") -> list[tuple[str, float, str, bool]]:
    """Of all models with fewer heads than D in the first layer, in the order of the rows.

    Returns:
        the model; its error over that of (D, D); both, and what hard heads reach, in words;
        whether a gap is owed.
    """
    least = _least(results)
    found = []
    groups: Any = results.drop_duplicates("run").groupby(["D", "matrices", "heads"], sort=False)
    for (d, kind, heads), rows in groups:
        if _first(heads) >= d:
            continue
        fewer = float(least[d, kind, heads])
        ours = float(least.get((d, kind, f"{d} {d}"), math.nan))
        errors = (
            f"NMSE {fewer:.2e}, ({d}, {d}) {ours:.2e}; hard heads reach {rows['floor'].min():.2g}"
        )
        name = f"D = {d}, {kind}, {heads_shown(heads)}"
        found.append((name, fewer / ours, errors, _owed(rows)))
    return found
