"""Why induction heads attend to their keys: which parts of the model wrote these keys."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from infoflow_lens.foundation.lazy import pd
from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.hooks import PatternsProbe, WhyAll, measure_why_all, run_probes
from infoflow_lens.studies.claims import Claim, Numbers
from infoflow_lens.studies.language_model.batches import repeat_random
from infoflow_lens.studies.language_model.induction import Head, ids_of
from infoflow_lens.studies.language_model.measures import prefix_matching, previous_token
from infoflow_lens.studies.language_model.snapshots import load_snapshot, reset_weights
from infoflow_lens.studies.language_model.study import (
    IS_INDUCTION,
    TRAINED,
    UNTRAINED,
    OnRepeats,
    add_names,
    final,
    format_steps,
    model_of,
    stack_rows,
)
from infoflow_lens.studies.plots import Axis, FigureSpec, Panel
from infoflow_lens.studies.study import Row, Settings, Statement
from infoflow_lens.studies.tables import Column, Part, TableSpec, groups

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAIN, _MOSTLY, _RARELY = 0.5, 0.9, 0.25
_EVERY = 10_000  # parts of keys: all of them
_COLUMNS = (
    "lines", "first key is the target", "previous-token head",
    "its share", "of single lines (5% to 95%)", "largest part in",
    "largest other head", "untrained: largest part in",
)  # fmt: skip


class Reasons(OnRepeats):
    """What each part of the keys adds to the margins of induction heads."""

    name: ClassVar[str] = "reasons"
    title: ClassVar[str] = "Do induction heads look where the previous-token head marks?"
    statement: ClassVar[Statement] = Statement.read("reasons")
    windows: ClassVar[Mapping[str, int]] = {"smoke": 4, "quick": 32, "full": 128}
    steps: ClassVar[Mapping[str, int | None]] = {"smoke": 1, "quick": 1, "full": None}

    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """Return a row for each part of the keys of each induction head.

        A model without induction heads gives one row without a head.
        """
        source = self.source_of(settings)
        model = load_snapshot(source, device)
        half = settings["half"]
        vocabulary, begin = ids_of(model, half)
        draw = derive_seed("reasons", seed)
        ids = repeat_random(vocabulary, settings["n"], half, draw, begin)
        matching, before = _scores(model, ids)
        largest = max(matching.values())
        # no earlier head has written the keys of layer 0
        heads = [head for head, score in matching.items() if score > IS_INDUCTION and head[0] > 0]
        if not heads:
            return [{"kind": TRAINED, "layer": None, "head": None, "prefix_matching": largest}]
        first_layer = min(layer for layer, _ in heads)
        # before all induction heads, so that it can have marked the keys of each
        previous = max((head for head in before if head[0] < first_layer), key=before.__getitem__)
        rows = []
        lines = measure_why_all(model, ids, _EVERY)
        for head in heads:
            about: Row = {"prefix_matching": matching[head], "previous_token": before[previous]}
            rows += _rows(TRAINED, lines, head, previous, half, about)
        with reset_weights(source, derive_seed("untrained", seed)) as folder:
            lines = measure_why_all(load_snapshot(folder, device), ids, _EVERY)
            for head in heads:
                rows += _rows(UNTRAINED, lines, head, previous, half, {})
        return rows

    def tables(self) -> Sequence[Part]:
        """Give a row for each induction head; then the parts of the keys of the last snapshots."""
        return (
            TableSpec(
                ("model", "step", "head"),
                [Column(name, name, "first") for name in _COLUMNS],
                rows=_lines,
            ),
            "Shares of the margin, summed over lines: the six largest parts of the keys of "
            "each induction head",
            TableSpec(
                ("model", "name"),
                (Column("parts of the keys", _largest_parts),),
                rows=lambda results: _parts(TRAINED, final(results)),
                names={"name": "head"},
            ),
        )

    def plots(self) -> FigureSpec:
        """Return shares of all parts of the keys, trained and untrained."""
        return FigureSpec(
            (Panel((_draw_shares,), y=Axis("share of the margin", levels=(0,)), title=model_of),),
            per="model",
            size=(6, 3.6),
            rows=final,
        )

    def claims(self) -> Sequence[Claim]:
        """Judge every induction head of the last snapshots."""
        part = "the part of the keys that the previous-token head wrote"
        return (
            Claim(
                f"for every induction head {part} has {{bound}} of the margin between the first "
                "and the second key",
                partial(_collect, lambda head: head.part["share"]), ">", _MAIN,
            ),
            Claim(
                "less twice what any other head of the layers before has it has {bound}",
                partial(_collect, lambda head: head.part["share"] - 2 * head.other["share"]),
                ">", 0,
            ),
            Claim(
                "it is the largest part in {bound} of the lines",
                partial(_collect, lambda head: head.part["largest"]), ">=", _MOSTLY,
            ),
            Claim(
                "in the untrained model it is so in {bound}",
                partial(_collect, lambda head: head.untrained), "<=", _RARELY,
            ),
        )  # fmt: skip

    def control_results(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Return rows with another earlier head in the previous-token head's place.

        The second control has the untrained model in place of the trained one.
        """
        other = results.copy()
        for _, own in groups(other[other["kind"] == TRAINED], ("model", "layer", "head", "seed")):
            heads = own[own["part"].astype(str).str.startswith("head ")]
            rivals = heads[heads["is_previous"] == 0]["share"]
            if len(rivals):
                # of the other earlier heads the one of the largest share takes its place
                other.loc[own.index, "is_previous"] = 0.0
                other.loc[rivals.idxmax(), "is_previous"] = 1.0
        untrained = results[results["kind"] == UNTRAINED]
        return {
            "every other head": other,
            "untrained": stack_rows(untrained, untrained.assign(kind=TRAINED)),
        }


def _parts(kind: str, results: "pd.DataFrame") -> "pd.DataFrame":
    """Return the parts of the keys of induction heads, with the heads' names."""
    return add_names(results[results["kind"] == kind].dropna(subset=["head"]))


def _heads(results: "pd.DataFrame") -> "Iterator[tuple[str, int, str, _Head]]":
    """Yield model, step and name of each induction head, and what the rule reads of it."""
    untrained = _parts(UNTRAINED, results)
    for (model, step, name), own in groups(_parts(TRAINED, results), ("model", "step", "name")):
        beside = (untrained["model"] == model) & (untrained["step"] == step)
        yield model, step, name, _Head(own, untrained[beside & (untrained["name"] == name)])


def _collect(number: "Callable[[_Head], float]", results: "pd.DataFrame") -> Numbers:
    """Collect a number of each induction head."""
    found = _heads(final(results))
    return {f"{model} {name}": float(number(head)) for model, _, name, head in found}


def _lines(results: "pd.DataFrame") -> "pd.DataFrame":
    """Return the cells of each induction head; without one, the largest prefix matching."""
    lines = []
    for (model, step), rows in groups(results, ("model", "step")):
        found = [
            {"model": model, "step": step, "head": name, **head.cells()}
            for *_, name, head in _heads(rows)
        ]
        most = f"none ({rows['prefix_matching'].max():.2f})"
        nothing = {"model": model, "step": step, "head": most, **dict.fromkeys(_COLUMNS, "")}
        lines += found or [nothing]
    return format_steps(pd.DataFrame(lines))


def _largest_parts(rows: "pd.DataFrame") -> str:
    means = rows.groupby("part")["share"].mean()
    order = means.abs().sort_values(ascending=False).index
    return ", ".join(f"{name} {means[name]:+.2f}" for name in order[:6])


def _draw_shares(axes: "Axes", rows: "pd.DataFrame") -> None:
    """Draw the share of each part, a marker for each head."""
    for kind, marker in ((UNTRAINED, "x"), (TRAINED, "o")):
        for number, ((name,), own) in enumerate(groups(_parts(kind, rows), ("name",))):
            means = own.groupby("part", sort=False)["share"].mean()
            style: dict[str, Any] = {"label": name}
            if kind == UNTRAINED:  # one name for all of them
                style = {"color": "#bbbbbb", "label": None if number else UNTRAINED}
            axes.plot(means.index, means, marker, **style)
    axes.tick_params(axis="x", rotation=90, labelsize="small")


class _Head:
    """What the rule reads of one induction head.

    Attributes:
        part: the part of the keys that the previous-token head wrote, means over seeds.
        other: that of the other head with the largest share.
        untrained: in how many lines of the untrained model the part is the largest.
    """

    def __init__(self, trained: "pd.DataFrame", untrained: "pd.DataFrame") -> None:
        numbers: Any = ["lines", "on_target", "share", "low", "high", "largest", "is_previous"]
        means: Any = trained.groupby("part", sort=False)[numbers].mean()
        self.part = means.loc[means["is_previous"].idxmax()]
        heads = means[means.index.str.startswith("head ") & (means["is_previous"] == 0)]
        self.other = heads.loc[heads["share"].idxmax()]
        self.untrained = float(untrained["largest"][untrained["is_previous"] == 1].mean())

    def cells(self) -> dict[str, str]:
        """Return its numbers as a table shows them."""
        part, other = self.part, self.other
        cells = (
            f"{part['lines']:.0f}", f"{part['on_target']:.1%}", part.name.removeprefix("head "),
            f"{part['share']:.2f}", f"{part['low']:.2f} to {part['high']:.2f}",
            f"{part['largest']:.1%}", f"{other.name.removeprefix('head ')} ({other['share']:+.2f})",
            f"{self.untrained:.1%}",
        )  # fmt: skip
        return dict(zip(_COLUMNS, cells, strict=True))


def _scores(model: nn.Module, ids: Tensor) -> tuple[dict[Head, float], dict[Head, float]]:
    """Return prefix matching and attention to the token before, of every head."""
    (found,) = run_probes(model, ids, [PatternsProbe()], batch_size=16, progress=False)
    scores: tuple[dict[Head, float], dict[Head, float]] = ({}, {})
    for layer, pattern in enumerate(found.patterns):
        for by_head, score in zip(scores, (prefix_matching, previous_token), strict=True):
            # scores ask for an axis of layers in front, which one layer lacks
            for head, value in enumerate(score(pattern[None].float())[0].tolist()):
                by_head[layer, head] = value
    return scores


def _rows(kind: str, lines: WhyAll, head: Head, previous: Head, half: int, about: Row) -> list[Row]:
    """Return the parts of the keys of a head, over the queries whose next token is known.

    Those of a trained head are the lines whose first key is the token behind the earlier
    occurrence; an untrained head has no such preference, and all its lines count.
    """
    layer, number = head
    queries = torch.arange(half + 1, 2 * half + 1)
    keys = lines.keys[layer][:, number, queries]
    # induction: the key behind the earlier copy of the query's token
    on_target = keys[..., 0] == queries - half + 1
    kept = on_target if kind == TRAINED else torch.ones_like(on_target)
    margins, second = lines.margins[layer][:, number, queries][kept], keys[kept][:, 1]
    parts, values = (
        found[layer][:, number, queries][kept] for found in (lines.parts, lines.values)
    )
    n_parts = len(lines.part_names)
    # parts by name, as each line lists its strongest ones only
    by_part = torch.zeros(len(margins), n_parts, dtype=values.dtype)
    # -1 is no part and has the value 0, which may be added to part 0
    by_part.scatter_add_(1, parts.clamp(min=0), values)
    largest = by_part.argmax(dim=1)
    rows: list[Row] = []
    for place in sorted(set(parts.flatten().tolist()) - {-1}):
        shares = by_part[:, place] / margins
        low, high = shares.quantile(torch.tensor([0.05, 0.95], dtype=shares.dtype)).tolist()
        name = lines.part_names[place]
        rows.append(
            {
                **about,
                "kind": kind,
                "layer": layer,
                "head": number,
                "part": name,
                "is_previous": float(name == "head {}.{}".format(*previous)),
                "lines": len(margins),
                "on_target": float(on_target.double().mean()),
                "begins_second": float((second == 0).double().mean()),
                "margin": float(margins.mean()),
                "share": float(by_part[:, place].sum() / margins.sum()),
                "low": low,
                "high": high,
                "largest": float((largest == place).double().mean()),
            }
        )
    return rows
