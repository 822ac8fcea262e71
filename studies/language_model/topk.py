"""The least number of keys that each layer needs, by the length of the context."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from infoflow_lens.foundation.lazy import pd
from infoflow_lens.hooks.mechanisms.budgets import LARGEST, RANDOM, measure_top_k
from infoflow_lens.studies.claims import Claim, Numbers
from infoflow_lens.studies.language_model.snapshots import Snapshot, load_snapshot
from infoflow_lens.studies.language_model.study import (
    LanguageModelStudy,
    final,
    format_steps,
    least_within,
    measure_models,
    model_of,
    select_rows,
    stack_rows,
)
from infoflow_lens.studies.plots import Axis, Curves, FigureSpec, Panel
from infoflow_lens.studies.study import Row, Settings, Statement
from infoflow_lens.studies.tables import Column, Part, TableSpec, groups

_TOLERANCE, _CONSTANT, _GROWING, _BATCH = 0.01, 0.25, 0.5, 16
_KS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)


class TopK(LanguageModelStudy):
    """The same last tokens of each window, predicted from contexts of several lengths."""

    name: ClassVar[str] = "top_k"
    title: ClassVar[str] = "Do heads need a fixed number of keys, or a share of the context?"
    statement: ClassVar[Statement] = Statement.read("top_k")
    windows: ClassVar[Mapping[str, int]] = {"smoke": 10, "quick": 32, "full": 256}
    steps: ClassVar[Mapping[str, int | None]] = {"smoke": 1, "quick": 3, "full": None}
    lengths: ClassVar[Mapping[str, Sequence[int]]] = {
        "smoke": (12, 24),
        "quick": (32, 64, 128, 256, 512),
        "full": (32, 64, 128, 256, 512),
    }

    def contexts(self, moment: Snapshot, preset: str) -> Sequence[Settings]:
        """List doubling lengths up to the model's context; before the end only both extremes."""
        longest = self.longest(moment)
        lengths = [t for t in self.lengths[preset] if t <= longest]
        # over training the ends of the range show whether k grows, at a third of the cost
        if not moment.final:
            lengths = [lengths[0], lengths[-1]] if len(lengths) > 1 else lengths
        last = 8 if preset == "smoke" else 16
        return [{"n_context": t, "n_longest": max(lengths), "n_last": last} for t in lengths]

    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """Return a row for each kind of keys, layer and k."""
        model = load_snapshot(self.source_of(settings), device)
        whole = self.sequences(model, {**settings, "n_context": settings["n_longest"]}, seed)
        n_prefix = len(self._prefix(model))
        own = settings["n_context"] - n_prefix
        # every context ends in the same tokens, so that lengths differ in what stands before alone
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

    def tables(self) -> Sequence[Part]:
        """Return the least k by context, a row a layer."""
        return (
            "The least k that keeps the loss within 1%, in brackets with random keys; a layer "
            "matters if one random key a row costs more than 1%",
            TableSpec(
                ("model", "step", "layer"),
                (
                    Column("matters", _matters),
                    Column("T =", _both, across="n_context"),
                    Column("slope", partial(_slope, LARGEST), form=".2f"),
                    Column("with random keys", partial(_slope, RANDOM), form=".2f"),
                ),
                rows=lambda results: format_steps(least_keys(results)),
            ),
        )

    def plots(self) -> FigureSpec:
        """Return the least k against the context, and the loss against k at the longest."""
        least, loss = [], []
        for kind, style in ((LARGEST, ".-"), (RANDOM, ".:")):
            rows, label = partial(select_rows, "kept", kind), str if kind == LARGEST else ""
            least.append(
                Curves("n_context", "least", ("layer",), style=style, rows=rows, label=label)
            )
            loss.append(Curves("k", "percent", ("layer",), style=style, rows=rows, label=""))
        return FigureSpec(
            (
                Panel(least, Axis("tokens of context T (dotted: random keys)", "log2"),
                      Axis("least k", "log2"), model_of, least_keys),
                Panel(loss, Axis("keys kept, at the longest context", "log2"),
                      Axis("rise of the loss (%)", "symlog", (0, None), (100 * _TOLERANCE,)),
                      rows=_longest),
            ),
            per="model",
            rows=final,
        )  # fmt: skip

    def claims(self) -> Sequence[Claim]:
        """Judge the layers that matter in the last snapshot of every model."""
        return (
            Claim(
                "every model has {bound} layer that matters (one random key a row costs more than "
                "1% of the loss)",
                lambda results: measure_models(results, lambda own: len(_collect(_matters, own))),
                ">=", 1,
            ),
            Claim(
                "the keys that such a layer needs grow with the context with a power of {bound}",
                partial(_collect, partial(_slope, LARGEST)), "<=", _CONSTANT,
            ),
            Claim(
                "at the longest context it needs {bound} times as many keys as random ones",
                partial(_collect, _compare_random), "<", 1,
            ),
        )  # fmt: skip

    def remarks(self, results: "pd.DataFrame") -> Sequence[str]:
        """Return sentences that name the slopes."""
        slopes = _collect(partial(_slope, LARGEST), results).values()
        kind = "mixed"
        if slopes and min(slopes) >= _GROWING:
            kind = "growing (global)"
        elif slopes and max(slopes) <= _CONSTANT:
            kind = "constant (max-position)"
        return [f"over all layers that matter: {kind}"]

    def control_results(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Return rows with random keys in place of the largest."""
        random = select_rows("kept", RANDOM, results)
        return {"random keys": stack_rows(random, random.assign(kept=LARGEST))}


def least_keys(results: "pd.DataFrame") -> "pd.DataFrame":
    """Return the least k of each layer at each context, of the largest and of random keys.

    The column ``one`` is the cost of one key a row, the least over seeds. Contexts come in order
    of their length.
    """
    # key[4] below is the length of the context
    keys = ("model", "step", "final", "layer", "n_context", "kept")
    # layers are numbers, and "all": as texts they sort and group together
    rows = results.assign(layer=results["layer"].astype(str))
    found = [
        {
            **dict(zip(keys, key, strict=True)),
            # a layer for which no k is enough needs all keys
            "least": least_within(some, "k", _TOLERANCE) or int(key[4]),
            "one": some[some["k"] == 1]["rise"].min(),
        }
        for key, some in groups(rows, keys)
    ]
    return pd.DataFrame(found).sort_values("n_context", kind="stable")


def _longest(results: "pd.DataFrame") -> "pd.DataFrame":
    """Return the rows of the longest context, layers as texts."""
    rows = results[results["n_context"] == results["n_context"].max()]
    return rows.assign(layer=rows["layer"].astype(str), percent=100 * rows["rise"])


def _matters(least: "pd.DataFrame") -> bool:
    """Say whether a layer loses by one random key a row."""
    return bool(select_rows("kept", RANDOM, least)["one"].iloc[-1] > _TOLERANCE)


def _both(least: "pd.DataFrame") -> str:
    own, random = (select_rows("kept", kind, least)["least"].item() for kind in (LARGEST, RANDOM))
    return f"{own} ({random})"


def _slope(kind: str, least: "pd.DataFrame") -> float:
    """Return the power of the length with which k grows; NaN for one length."""
    rows = select_rows("kept", kind, least)
    if len(rows) < 2:
        return math.nan
    ends = rows.iloc[[0, -1]][["least", "n_context"]].astype(float)
    # the slope of a line in logarithms is the power; its ends span most of it
    keys, lengths = (math.log(ends[name].iloc[1] / ends[name].iloc[0]) for name in ends)
    return keys / lengths


def _compare_random(least: "pd.DataFrame") -> float:
    """Divide the keys needed at the longest context by the random keys needed there."""
    own, random = (select_rows("kept", kind, least)["least"].iloc[-1] for kind in (LARGEST, RANDOM))
    return float(own / random)


def _collect(number: "Callable[[pd.DataFrame], float]", results: "pd.DataFrame") -> Numbers:
    """Collect a number of each layer that matters."""
    last = final(results)
    found = groups(least_keys(last), ("model", "layer")) if len(last) else []
    return {
        f"{model}, layer {layer}": number(least)
        for (model, layer), least in found
        if layer != "all" and _matters(least)
    }
