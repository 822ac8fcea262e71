"""Find which part of a model makes small changes of tokens and replaced tokens differ.

Run: nice python -m benchmarks.parting [--models smollm2 ...] [--texts N]

Needs `make models`. It adds to build/parting.csv, goes on where it was stopped, and packs all rows
into `parting.csv.gz`. What was predicted stands in docs/results/real_models/parting.md, written
before the run; `tables` makes the page's tables.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from benchmarks import depth, field
from infoflow_lens.hooks.model.call import call
from infoflow_lens.hooks.model.inputs import Batch
from infoflow_lens.studies import attributions

ROWS = depth.FOLDER / "parting.csv.gz"
PATTERNS, SINKS, OTHERS, GATES, NORMS = "patterns", "sink rows", "other rows", "gates", "norms"
HELD = {
    "nothing": (), PATTERNS: (PATTERNS,), SINKS: (SINKS,), OTHERS: (OTHERS,), GATES: (GATES,),
    NORMS: (NORMS,), "patterns and gates": (PATTERNS, GATES),
    "everything": (PATTERNS, GATES, NORMS),
}  # fmt: skip
WAYS = (0.01, 0.1, 0.3, 1.0)  # how far on the way to another token
SMALL, WHOLE = WAYS[0], WAYS[-1]
AGREEMENT, GROWTH, REAL = "agreement", "growth", "real replacement"
_DONORS, _TEXTS, _ROWS = 2, 32, 64


class Model:
    """A model in which parts can be held at what they are in one text."""

    def __init__(self, given: depth.Opened, ids: Tensor) -> None:
        self.given, self.ids = given, ids
        self.layers = depth.layers_of(given.model)
        blocks = attributions.read_blocks(given.model.original_model)
        # ALBERT's blocks are one block, whose modules are called once a layer
        self._gates: dict[Any, bool] = {b.activation: b.gate is not None for b in blocks}
        self._norms = {norm.module: norm for block in blocks for norm in block.norms}
        self._seen: dict[nn.Module, list[Tensor]] = defaultdict(list)
        with ExitStack() as hooks:
            for module in self._gates:
                hooks.callback(module.register_forward_hook(self._see_gate).remove)
            for module in self._norms:
                hooks.callback(module.register_forward_hook(self._see_norm).remove)
            self.patterns, states = attributions.read_text(given.model, ids)
        self.start = states[0]
        self.is_special = torch.tensor([int(token) in given.special for token in ids[0]])
        at = torch.arange(ids.shape[1])
        sinks = self.is_special | (at == 0)
        self._is_sink = [p[:, :, sinks].sum(-1) > 0.5 for p in self.patterns]

    def _see_gate(self, module: nn.Module, args: Any, output: Tensor) -> None:
        before = args[0]
        slope = torch.where(before == 0, 0, output / before)
        self._seen[module].append(output if self._gates[module] else slope)

    def _see_norm(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self._seen[module].append(self._norms[module].scale(args[0][0]))

    @contextmanager
    def hold(self, parts: Collection[str]) -> Iterator[dict[str, Callable[..., Tensor]]]:
        """Hold parts in this block, and give the edits of patterns that a call needs.

        A block is for one call: modules that are called once a layer are counted.
        """
        called: Counter[nn.Module] = Counter()

        def next_of(module: nn.Module) -> Tensor:
            called[module] += 1
            return self._seen[module][called[module] - 1]

        def gate(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            kept = next_of(module)
            return kept.expand_as(output) if self._gates[module] else args[0] * kept

        def norm(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            bias = getattr(module, "bias", None)
            scaled = self._norms[module].linear(args[0]) / next_of(module)
            return scaled if bias is None else scaled + bias

        def pattern(layer: int, rows: Bool[Tensor, "head query"] | None) -> Callable[..., Tensor]:
            kept = self.patterns[layer]

            def hook(activation: Tensor, hook: Any) -> Tensor:
                whole = kept.expand_as(activation)
                return whole if rows is None else torch.where(rows[..., None], whole, activation)

            return hook

        edits = {}
        for layer, is_sink in enumerate(self._is_sink):
            name = f"blocks.{layer}.attn.hook_pattern"
            if PATTERNS in parts:
                edits[name] = pattern(layer, None)
            elif SINKS in parts or OTHERS in parts:
                edits[name] = pattern(layer, is_sink if SINKS in parts else ~is_sink)
        with ExitStack() as hooks:
            for kind, modules, hook in ((GATES, self._gates, gate), (NORMS, self._norms, norm)):
                for module in modules if kind in parts else ():
                    hooks.callback(module.register_forward_hook(hook).remove)
            yield edits

    @torch.no_grad()
    def run(
        self, rows: Float[Tensor, "row pos d"], parts: Collection[str]
    ) -> list[Float[Tensor, "row pos d"]]:
        """Run from the first layer on with parts held; the outgoing streams that are judged."""
        points = [f"blocks.{layer}.hook_resid_post" for layer in self.layers]
        found = []
        for some in rows.split(_ROWS):
            batch = Batch(self.ids.expand(len(some), -1))
            with self.hold(parts) as edits:
                start = ("blocks.0.hook_resid_pre", some)
                seen = call(self.given.model, batch, points, edit=edits, start=start).activations
            found.append([seen[point] for point in points])
        return [torch.cat(parts) for parts in zip(*found, strict=True)]

    def change(
        self, other: Float[Tensor, "pos d"], way: float, parts: Collection[str], places: Any
    ) -> Float[Tensor, "layer place pos"]:
        """Sizes of what each token's way towards another changes in the states at some places."""
        n = len(self.start)
        rows = self.start.repeat(n + 1, 1, 1)  # the last one as it is
        at = torch.arange(n)
        rows[at, at] += way * (other - self.start)
        states = [state[:, list(places)] for state in self.run(rows, parts)]
        return torch.stack([(state[:-1] - state[-1]).norm(dim=-1).T for state in states])


def judge(
    given: depth.Opened, name: str, number: int, ids: Tensor, donors: Tensor
) -> Iterator[field.Row]:
    """Layer, measure, what is held, and value, in the mean over places and donors."""
    places, model = depth.places_of(ids, given.is_causal), Model(given, ids)
    entrance = "blocks.0.hook_resid_pre"
    others = call(given.model, Batch(donors), [entrance]).activations[entrance]
    found: dict[tuple[str, str], list[list[float]]] = defaultdict(list)

    def agree(one: Tensor, other: Tensor) -> list[float]:
        if not (one.isfinite().all() and other.isfinite().all()):
            return [float("nan")] * len(model.layers)
        return depth.agree_by_layer(given, ids, places, one, other)

    for other in others:
        changes = {
            name: [model.change(other, way, parts, places) for way in (SMALL, WHOLE)]
            for name, parts in HELD.items()
        }
        for name, (small, whole) in changes.items():
            found[AGREEMENT, name].append(agree(small, whole))
            # candidates that a place sees; all others have no change
            grows = [
                (b[a > 0] / a[a > 0]).median().item() * SMALL
                for a, b in zip(small, whole, strict=True)
            ]
            found[GROWTH, name].append(grows)
        real = changes["nothing"][1]
        for way in WAYS[1:-1]:
            middle = model.change(other, way, (), places)
            found[AGREEMENT, f"as far as {way}"].append(agree(changes["nothing"][0], middle))
        found[REAL, "small"].append(agree(changes["nothing"][0], real))
        found[REAL, "small, patterns held"].append(agree(changes[PATTERNS][0], real))
        found[REAL, "whole, patterns held"].append(agree(changes[PATTERNS][1], real))
    for (measure, name), values in found.items():
        for layer, value in zip(model.layers, np.mean(values, axis=0), strict=True):
            yield layer + 1, measure, name, float(value)
    shares = [float(rows.float().mean()) for rows in model._is_sink]
    yield 0, "sinks", "share of rows", float(np.mean(shares))


# What the page says, from the rows


def verdicts(rows: Any) -> str:
    """Each prediction of the statement, what came, and whether it was seen."""
    agree = {model: depth.by_text(rows, model, AGREEMENT) for model in depth.MODELS}
    tenth, third = (f"as far as {way}" for way in WAYS[1:-1])
    # what is nowhere a number, as a gated MLP without norms, is no column
    means = {m: found.mean().reindex([*HELD, tenth, third]) for m, found in agree.items()}
    gain = {model: mean - mean["nothing"] for model, mean in means.items()}
    found: list[tuple[str, str, bool]] = []

    def listed(models: Collection[str]) -> str:
        return ", ".join(models) or "none"

    first = [m for m in depth.MODELS if gain[m][PATTERNS] > gain[m][[GATES, NORMS]].max()]
    what = "1: holding patterns raises the agreement most, in each model"
    found.append((what, f"in {listed(first)}", len(first) == len(depth.MODELS)))
    lowest = sorted(depth.MODELS, key=lambda m: means[m]["nothing"])[:3]
    closed = {m: gain[m][PATTERNS] / (1 - means[m]["nothing"]) for m in lowest}
    what = "2: it closes a third of the gap in the three models that agree least"
    came = ", ".join(f"{m} {share:.0%}" for m, share in closed.items())
    found.append((what, came, min(closed.values()) >= 1 / 3))
    of_rows = {m: agree[m][OTHERS] - agree[m][SINKS] for m in depth.MODELS}
    what = "3: the other rows at least as much as the sink rows, in each model"
    below = [m for m, lead in of_rows.items() if depth.interval(lead)[2] < 0]
    found.append((what, f"behind in {listed(below)}", not below))
    ours, alone = agree["smollm2"], gain["smollm2"]
    lead = ours[GATES] - ours["nothing"]
    norms = [m for m in depth.MODELS[1:] if gain[m][NORMS] > gain[m][GATES]]
    what = "4: gates second in SmolLM2, norms second in none of the others"
    seen = depth.interval(lead)[1] > 0 and not alone[NORMS] > alone[GATES] and not norms
    found.append((what, f"by {depth.shown(lead)}; norms in {listed(norms)}", seen))
    what = "5: .01 and .1 agree by .9 in each model, .01 and .3 by less"
    came = ", ".join(f"{m} {mean[tenth]:.2f} and {mean[third]:.2f}" for m, mean in means.items())
    seen = all(mean[tenth] >= max(0.9, mean[third]) for mean in means.values())
    found.append((what, came, seen))
    real = depth.by_text(rows, "smollm2", REAL)
    leads = [real[f"{way}, patterns held"] - real["small"] for way in ("small", "whole")]
    what = "6: in SmolLM2 a real replacement is not predicted better with patterns held"
    came = "; ".join(f"by {depth.shown(lead)}" for lead in leads)
    found.append((what, came, all(depth.interval(lead)[1] <= 0 for lead in leads)))
    grows = {m: depth.by_text(rows, m, GROWTH)["nothing"].median() for m in ("smollm2", "minilm")}
    what = "7: a whole change is more than 100 times that at .01"
    came = ", ".join(f"{m} {100 * value:.0f}" for m, value in grows.items())
    found.append((what, came, min(grows.values()) > 1))
    wrong = sum(share < 1 / 3 for share in closed.values())
    what = "1 fails in at most one model, 2 in at most one of three (else refuted)"
    came = f"1 fails in {len(depth.MODELS) - len(first)}, 2 in {wrong}"
    found.append((what, came, len(depth.MODELS) - len(first) <= 1 and wrong <= 1))
    return depth.verdict_table(found)


def held_table(rows: Any) -> str:
    """How small and whole changes agree, by what is held."""
    lines = []
    for name in HELD:
        cells = []
        for model in depth.MODELS:
            values = depth.by_text(rows, model, AGREEMENT).get(name)
            cells.append("-" if values is None else depth.shown(values))
        lines.append([name, *cells])
    return depth.markdown(["held", *depth.MODELS], lines)


def layer_table(rows: Any) -> str:
    """The same in SmolLM2 by layer, and what a whole change is beside that at .01."""
    ours = rows[rows["model"] == "smollm2"]
    layers = sorted(set(ours["layer"]) - {0})
    lines = [
        [name, *(depth.shown(depth.by_text(rows, "smollm2", AGREEMENT, layer=at)[name])
                 for at in layers)]
        for name in ("nothing", PATTERNS, SINKS, OTHERS, GATES, "patterns and gates")
    ]  # fmt: skip
    grown = [depth.by_text(rows, "smollm2", GROWTH, layer=at)["nothing"] for at in layers]
    lines.append(["size at 1 over size at .01", *(f"{100 * one.median():.0f}" for one in grown)])
    return depth.markdown(["SmolLM2, by layer", *layers], lines)


def control_table(rows: Any) -> str:
    """Texts, sink rows, and what comes where everything is held."""
    lines = []
    for model in depth.MODELS:
        mine = rows[rows["model"] == model]
        held = mine[mine["method"] == "everything"].groupby("measure")["spearman"]
        share = mine[mine["measure"] == "sinks"]["spearman"].mean()
        least, most = held.min(), held.max()
        grown = f"{100 * least[GROWTH]:.1f} to {100 * most[GROWTH]:.1f}"
        cells = [model, str(mine["text"].nunique()), f"{share:.0%}"]
        lines.append([*cells, f"{least[AGREEMENT]:.3f}", grown])
    head = ["model", "texts", "sink rows", "everything held: least agreement", "size over size"]
    return depth.markdown(head, lines)


def tables() -> list[str]:
    """All tables of the page."""
    rows = field.read(ROWS)
    return [verdicts(rows), held_table(rows), layer_table(rows), control_table(rows)]


if __name__ == "__main__":
    field.run(__doc__, judge, _DONORS, ROWS, most=_TEXTS, seed=1)
