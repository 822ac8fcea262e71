"""The flow to one state as a still picture, for papers."""

import io
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.report.flow_view import ViewedInput
from infoflow_lens.theory.information_sets import propagate
from infoflow_lens.theory.rules import Rule

_PASSED, _KEPT, _INSIDE, _OUTSIDE, _QUIET = "#0072b2", "#9aa5b1", "#0072b2", "#d55e00", "#d5dae0"


class StillPicture(Figure):
    """A figure that notebooks show without a backend of theirs."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
        return buffer.getvalue()


def draw_flow(
    viewed: ViewedInput, rule: str, k: int, layer: int, position: int, title: str = ""
) -> Figure:
    """States as a lattice, the paths by which tokens can reach one of them, and what they weigh.

    Below every token stands its influence on that state as a share of the largest, in blue where
    the token lies in the predicted set, in orange where it does not; the position's own token,
    which the residual stream holds in any case, is drawn hollow.

    Args:
        viewed: the input.
        rule, k: see `ViewedInput.layers_of`.
        layer: of the state, from 0.
        position: of the state.
        title: of the figure.

    Raises:
        InfoFlowError: for a state that the input does not have, and unknown rules.
    """
    n_layers, n_pos, n_source = len(viewed.ranked), viewed.n_queries, len(viewed.tokens)
    if not (0 <= layer < n_layers and 0 <= position < n_pos):
        raise InfoFlowError(
            f"the state is layer {layer}, position {position}: expected a layer from 0 to "
            f"{n_layers - 1} and a position from 0 to {n_pos - 1}"
        )
    rules = viewed.layers_of(rule, k)
    members = propagate(rules, n_source).members[layer, 0, position]
    passes = [_passes(layer_rules, n_pos) for layer_rules in rules[: layer + 1]]
    width = max(4.0, 0.32 * n_pos + 1.5)
    lattice_height = 0.42 * (layer + 2)
    figure = StillPicture(figsize=(width, lattice_height + 1.9), layout="constrained")
    grid = GridSpec(2, 1, figure=figure, height_ratios=[lattice_height, 1.0])
    lattice, bars = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
    passed, kept, reached = _paths(passes, layer, position)
    lattice.add_collection(LineCollection(kept, colors=_KEPT, linewidths=1.0, zorder=1))
    faint = min(1.0, 12 / max(1, len(passed)) ** 0.5)  # many lines would be one surface
    lattice.add_collection(
        LineCollection(passed, colors=_PASSED, linewidths=faint, alpha=0.8 * faint, zorder=2)
    )
    for level in range(layer + 2):
        places = range(n_pos if level else n_source)
        colours = [
            ("black" if (level, p) == (layer + 1, position) else _PASSED)
            if (level, p) in reached
            else _QUIET
            for p in places
        ]
        lattice.scatter(list(places), [level] * len(places), s=26, c=colours, zorder=3)
    names = ["tokens", *(f"layer {i}" for i in range(layer + 1))]
    lattice.set_yticks(range(layer + 2), names)
    lattice.set_xticks([])
    lattice.set_title(title or _title(viewed, layer, position), fontsize=10)
    share = _share(viewed, layer, position)
    heights = members.float() if share is None else share
    for source, height in enumerate(heights.tolist()):
        colour = _INSIDE if members[source] else _OUTSIDE
        own = source == position
        bars.bar(source, height, width=0.7, color="white" if own else colour, edgecolor=colour)
    bars.set_ylim(0, 1.05)
    bars.set_yticks([0, 1])
    bars.set_ylabel("in the set" if share is None else "influence\n/ largest", fontsize=8)
    bars.set_xticks(
        range(n_source), [_short(token) for token in viewed.tokens], rotation=90, fontsize=8
    )
    for axes in (lattice, bars):
        axes.set_xlim(-0.7, n_pos - 0.3)
        axes.spines[["top", "right"]].set_visible(False)
    lattice.spines[["left", "bottom"]].set_visible(False)
    return figure


def _title(viewed: ViewedInput, layer: int, position: int) -> str:
    token = viewed.tokens[position] if position < len(viewed.tokens) else "CLS"
    return f"What can reach {_short(token)} (position {position}) in layer {layer}"


def _short(token: str) -> str:
    # matplotlib reads what stands between dollars as mathematics
    return (token if len(token) <= 12 else token[:11] + "…").replace("$", r"\$")


def _passes(rules: Sequence[Rule], n_pos: int) -> Bool[Tensor, "pos key"]:
    """Which keys any head passes to which queries."""
    reads = torch.zeros(n_pos, n_pos + 1, dtype=torch.bool)  # the last column is "none"
    for rule in rules:
        keys = rule.describe()
        reads.scatter_(1, torch.where(keys < 0, n_pos, keys), True)
    return reads[:, :n_pos]


Segment = tuple[tuple[int, int], tuple[int, int]]


def _paths(
    passes: list[Tensor], layer: int, position: int
) -> tuple[list[Segment], list[Segment], set[tuple[int, int]]]:
    """Lines that heads and the residual stream make towards a state, and the nodes on them."""
    passed: list[Segment] = []
    kept: list[Segment] = []
    here, reached = {position}, {(layer + 1, position)}
    for level in range(layer, -1, -1):
        below: set[int] = set()
        for query in sorted(here):
            keys = passes[level][query].nonzero().flatten().tolist()
            kept.append(((query, level), (query, level + 1)))
            passed += [((key, level), (query, level + 1)) for key in keys if key != query]
            below |= {query, *keys}
        here = below
        reached |= {(level, place) for place in here}
    return passed, kept, reached


def _share(viewed: ViewedInput, layer: int, position: int) -> Float[Tensor, " source"] | None:
    """Influence on the state over the largest; None where it was not measured."""
    if viewed.influence is None:
        return None
    found = viewed.influence[layer, position]
    if found.isnan().any():
        return None
    return found / found.max().clamp(min=torch.finfo(torch.float32).tiny)
