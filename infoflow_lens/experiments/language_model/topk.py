"""The least number of keys that each layer needs, against the length of the context."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from infoflow_lens.experiments.claims import Claim, Numbers
from infoflow_lens.experiments.language_model.snapshots import Snapshot, loaded
from infoflow_lens.experiments.language_model.study import (
    MODEL,
    LanguageModelStudy,
    by_model,
    final,
    groups,
    panels,
    stacked,
    step_shown,
)
from infoflow_lens.experiments.study import Row, Settings, Statement
from infoflow_lens.experiments.tables import markdown_table
from infoflow_lens.hooks.mechanisms.top_k import LARGEST, RANDOM, measure_top_k

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_TOLERANCE, _CONSTANT, _GROWING, _BATCH = 0.01, 0.25, 0.5, 16
_KS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)


class TopK(LanguageModelStudy):
    """The same last tokens of each window, predicted from contexts of several lengths."""

    name: ClassVar[str] = "top_k"
    title: ClassVar[str] = "Do heads need a fixed number of keys, or a share of the context?"
    statement: ClassVar[Statement] = Statement.of("top_k")
    windows: ClassVar[Mapping[str, int]] = {"smoke": 10, "quick": 32, "full": 256}
    steps: ClassVar[Mapping[str, int | None]] = {"smoke": 1, "quick": 3, "full": None}
    lengths: ClassVar[Mapping[str, Sequence[int]]] = {
        "smoke": (12, 24),
        "quick": (32, 64, 128, 256, 512),
        "full": (32, 64, 128, 256, 512),
    }

    def contexts(self, moment: Snapshot, preset: str) -> Sequence[Settings]:
        """Doubled lengths up to the model's context; shorter and longest alone before the end."""
        longest = self.longest(moment)
        lengths = [t for t in self.lengths[preset] if t <= longest]
        if not moment.final:
            lengths = [lengths[0], lengths[-1]] if len(lengths) > 1 else lengths
        last = 8 if preset == "smoke" else 16
        return [{"n_context": t, "n_longest": max(lengths), "n_last": last} for t in lengths]

    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """A row for each kind of keys, layer and k."""
        model = loaded(self.source_of(settings), device)
        whole = self.sequences(model, {**settings, "n_context": settings["n_longest"]}, seed)
        n_prefix = len(self._prefix(model))
        own = settings["n_context"] - n_prefix
        rows = torch.cat([whole[:, :n_prefix], whole[:, -own:]], dim=1)
        found = measure_top_k(
            model,
            rows,
            ks=tuple(k for k in _KS if k < settings["n_context"]),
            tolerance=_TOLERANCE,
            control=True,
            last=settings["n_last"],
            seed=seed,
            batch_size=_BATCH,
            progress=False,
        )
        frame: list[Any] = found.to_frame().to_dict("records")
        return [{**row, "bare": found.loss} for row in frame]

    def table(self, results: "pd.DataFrame") -> str:
        """The least k by context, a row a layer."""
        lengths = sorted(set(results["n_context"]))
        note = (
            "The least k that keeps the loss within 1%, in brackets with random keys; a layer "
            "matters if one random key a row costs more than 1%"
        )
        lines = []
        for (model, step), rows in groups(results, MODEL):
            for layer, curve in _curves(rows).items():
                cells = [
                    f"{curve.least[LARGEST][t]} ({curve.least[RANDOM][t]})"
                    if t in curve.least[LARGEST]
                    else None
                    for t in lengths
                ]
                matters = "yes" if curve.matters else "no"
                slopes = (f"{curve.slope(kind):.2f}" for kind in (LARGEST, RANDOM))
                lines.append((model, step_shown(step), layer, matters, *cells, *slopes))
        by_length = (f"T = {t}" for t in lengths)
        columns = ("model", "step", "layer", "matters", *by_length, "slope", "with random keys")
        return f"{note}\n\n{markdown_table(columns, lines)}"

    def figure(self, results: "pd.DataFrame") -> "Figure":
        """The least k against the context, and the loss against k at the longest."""
        last = final(results)
        figure, by_model = panels(last, 2, 9, 3.4)
        for model, (left, right) in by_model:
            rows = last[last["model"] == model]
            for index, (layer, curve) in enumerate(_curves(rows).items()):
                colour = "#444444" if layer == "all" else f"C{index}"
                label = "all at once" if layer == "all" else f"layer {layer}"
                for kind, style in ((LARGEST, ".-"), (RANDOM, ".:")):
                    least = curve.least[kind]
                    left.plot(
                        list(least), list(least.values()), style, color=colour,
                        label=label if kind == LARGEST else None,
                    )  # fmt: skip
                longest = rows[rows["n_context"] == rows["n_context"].max()]
                for kind, style in ((LARGEST, ".-"), (RANDOM, ".:")):
                    some = longest[(longest["layer"] == layer) & (longest["kept"] == kind)]
                    right.plot(some["k"], 100 * some["rise"], style, color=colour)
            left.plot(sorted(set(rows["n_context"])), sorted(set(rows["n_context"])), "--",
                      color="#bbbbbb", label="all keys")  # fmt: skip
            for axis in (left, right):
                axis.set_xscale("log", base=2)
                axis.xaxis.set_major_formatter("{x:g}")
            left.set_yscale("log", base=2)
            left.yaxis.set_major_formatter("{x:g}")
            left.set_xlabel("tokens of context T")
            left.set_ylabel(f"{model}\nleast k")
            right.set_xlabel("keys kept, at the longest context")
            right.set_ylabel("rise of the loss (%)")
            right.set_yscale("symlog", linthresh=1)
            right.axhline(100 * _TOLERANCE, color="#999999", linewidth=0.6)
        by_model[0][1][0].legend(frameon=False, fontsize="small", title="dotted: random keys")
        return figure

    def claims(self) -> Sequence[Claim]:
        """By the layers that matter in the last snapshot of every model."""
        return (
            Claim(
                "every model has {bound} layer that matters (one random key a row costs more than "
                "1% of the loss)",
                lambda results: by_model(results, lambda rows: len(_that_matter(rows))), ">=", 1,
            ),
            Claim(
                "the keys that such a layer needs grow with the context with a power of {bound}",
                partial(_of_layers, lambda curve: curve.slope(LARGEST)), "<=", _CONSTANT,
            ),
            Claim(
                "at the longest context it needs {bound} times as many keys as random ones",
                partial(
                    _of_layers, lambda curve: curve.at_longest(LARGEST) / curve.at_longest(RANDOM)
                ),
                "<", 1,
            ),
        )  # fmt: skip

    def remarks(self, results: "pd.DataFrame") -> Sequence[str]:
        """What the slopes are called."""
        slopes = _of_layers(lambda curve: curve.slope(LARGEST), results).values()
        kind = "mixed"
        if slopes and min(slopes) >= _GROWING:
            kind = "growing (global)"
        elif slopes and max(slopes) <= _CONSTANT:
            kind = "constant (max-position)"
        return [f"over all layers that matter: {kind}"]

    def controlled(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Random keys in the place of the largest."""
        random = results[results["kept"] == RANDOM]
        return {"random keys": stacked(random, random.assign(kept=LARGEST))}


class _Curve:
    """The least k of one layer by context."""

    def __init__(self, rows: "pd.DataFrame") -> None:
        self.least: dict[str, dict[int, int]] = {}
        for kind in (LARGEST, RANDOM):
            some = rows[rows["kept"] == kind]
            self.least[kind] = {
                int(t): _least(at, int(t)) for (t,), at in groups(some, ("n_context",))
            }
        longest = rows[rows["n_context"] == rows["n_context"].max()]
        one = longest[(longest["kept"] == RANDOM) & (longest["k"] == 1)]["rise"]
        self.matters = bool((one > _TOLERANCE).all())

    def at_longest(self, kind: str) -> int:
        return self.least[kind][max(self.least[kind])]

    def at_shortest(self, kind: str) -> int:
        return self.least[kind][min(self.least[kind])]

    def slope(self, kind: str) -> float:
        """The power of the length with which k grows; NaN for one length."""
        lengths = sorted(self.least[kind])
        if len(lengths) < 2:
            return math.nan
        rise = math.log(self.at_longest(kind) / self.at_shortest(kind))
        return rise / math.log(lengths[-1] / lengths[0])


def _least(rows: "pd.DataFrame", most: int) -> int:
    """The least k from which on the mean rise is within; all keys if none is."""
    by_k = rows.groupby("k")["rise"].mean().sort_index()
    least = most
    for k, rise in reversed(list(by_k.items())):
        if rise > _TOLERANCE:
            break
        least = int(k)
    return least


def _that_matter(rows: "pd.DataFrame") -> dict[str, _Curve]:
    return {
        layer: curve for layer, curve in _curves(rows).items() if layer != "all" and curve.matters
    }


def _of_layers(number: "Callable[[_Curve], float]", results: "pd.DataFrame") -> Numbers:
    """A number of each layer that matters."""
    return {
        f"{model}, layer {layer}": number(curve)
        for (model,), rows in groups(final(results), ("model",))
        for layer, curve in _that_matter(rows).items()
    }


def _curves(rows: "pd.DataFrame") -> dict[str, _Curve]:
    named = rows.assign(layer=rows["layer"].astype(str))
    return {layer[0]: _Curve(some) for layer, some in groups(named, ("layer",))}
