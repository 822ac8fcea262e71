"""The flow to one state as a still picture, for papers."""

import io

import torch
from jaxtyping import Float
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.gridspec import GridSpec
from torch import Tensor

from infoflow_lens.foundation.display import cut, plain_label
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import mpl
from infoflow_lens.report.flow_view import Move, ViewedInput
from infoflow_lens.theory.information_sets import propagate

_PASSED, _KEPT, _INSIDE, _OUTSIDE, _QUIET = "#0072b2", "#9aa5b1", "#0072b2", "#d55e00", "#d5dae0"
_MOST_LINES = 30  # of heads [chosen]
_LETTERS = 12  # of a token


class StillPicture(mpl.Figure):
    """A figure that notebooks show without a backend of theirs."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
        return buffer.getvalue()


def draw_flow(viewed: ViewedInput, rule: str, k: int, layer: int, position: int) -> mpl.Figure:
    """Draw states as a lattice, the paths by which tokens can reach one, and what they weigh.

    The strongest lines are drawn, the stronger the wider: a line has the strength of the best path
    through it, which is the product of the attention weights along it.

    Below every token stands its influence on that state as a share of the largest, in blue where
    the token lies in the predicted set, in orange where it does not; the position's own token,
    which the residual stream holds in any case, is drawn hollow.

    Args:
        viewed: the input.
        rule, k: see `ViewedInput.layers_of`.
        layer: of the state, from 0.
        position: of the state.

    Raises:
        InfoFlowError: for a state that the input does not have, and unknown rules.
    """
    n_layers, n_pos, n_source = len(viewed.ranked), viewed.n_queries, len(viewed.tokens)
    if not (0 <= layer < n_layers and 0 <= position < n_pos):
        raise InfoFlowError(
            f"the state is layer {layer}, position {position}: expected a layer from 0 to "
            f"{n_layers - 1} and a position from 0 to {n_pos - 1}"
        )
    # the same sets as on the page
    rules = viewed.layers_of(rule, k)
    members = propagate(rules, n_source).members[layer, 0, position]
    weights = [_weights(viewed, rule, k, index) for index in range(layer + 1)]
    width = max(4.0, 0.32 * n_pos + 1.5)
    lattice_height = 0.42 * (layer + 2)
    figure = StillPicture(figsize=(width, lattice_height + 1.9), layout="constrained")
    grid = GridSpec(2, 1, figure=figure, height_ratios=[lattice_height, 1.0])
    lattice, bars = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
    # the strongest path first
    passed, kept, reached = _paths(weights, layer, position)
    lattice.add_collection(LineCollection(kept, colors=_KEPT, linewidths=1.0, zorder=1))
    levels = [strength / passed[0][0] for strength, _ in passed]
    lattice.add_collection(
        LineCollection(
            [segment for _, segment in passed],
            colors=[(*to_rgb(_PASSED), 0.3 + 0.6 * level) for level in levels],
            linewidths=[0.5 + 2 * level for level in levels],
            zorder=2,
        )
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
    lattice.set_title(plain_label(_title(viewed, layer, position)), fontsize=10)
    # without measured influence the bars say what is predicted
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
        range(n_source),
        [plain_label(cut(token, _LETTERS)) for token in viewed.tokens],
        rotation=90,
        fontsize=8,
    )
    for axes in (lattice, bars):
        axes.set_xlim(-0.7, n_pos - 0.3)
        axes.spines[["top", "right"]].set_visible(False)
    lattice.spines[["left", "bottom"]].set_visible(False)
    return figure


def _title(viewed: ViewedInput, layer: int, position: int) -> str:
    token = viewed.tokens[position] if position < len(viewed.tokens) else "CLS"
    return f"What can reach {cut(token, _LETTERS)} (position {position}) in layer {layer}"


def _weights(viewed: ViewedInput, rule: str, k: int, layer: int) -> Float[Tensor, "pos key"]:
    """Find the largest weight of all heads that pass a key to a query; 1 where none is known."""
    n_pos, moves = viewed.n_queries, viewed.describe(rule)
    found = torch.zeros(n_pos, n_pos + 1, dtype=torch.float32)  # the last column is "none"
    for head, ranked in enumerate(viewed.ranked[layer]):
        move = moves if isinstance(moves, Move) else moves[layer][head]
        keys = move.rule(ranked[None], k).describe()[:n_pos]
        weights = torch.full((n_pos, n_pos + 1), torch.nan, dtype=torch.float32)
        if viewed.patterns is not None:
            pattern = viewed.patterns[layer][head]
            weights[:, : pattern.shape[1]] = pattern.float()
        if viewed.weights is not None:
            known = viewed.weights[layer][head].float()
            # no key (-1), and keys of unknown weight, go to the last column, which is cut off
            weights.scatter_(
                1, torch.where(known.isnan(), n_pos, ranked.long()) % (n_pos + 1), known
            )
        passed = keys.long() % (n_pos + 1)
        of_head = weights.gather(1, passed).nan_to_num(1).clamp(max=1)
        found.scatter_reduce_(1, passed, of_head, "amax")
    return found[:, :n_pos]


Segment = tuple[tuple[int, int], tuple[int, int]]


def _paths(
    weights: list[Tensor], layer: int, position: int
) -> tuple[list[tuple[float, Segment]], list[Segment], set[tuple[int, int]]]:
    """Find the strongest lines of heads towards a state.

    Returns these lines with the strength of the best path through each, the residual stream
    between them, and the nodes on both.
    """
    n_pos = len(weights[0])
    # the strength of the best path from each state to the chosen one
    best = torch.zeros(layer + 2, n_pos, dtype=torch.float32)
    best[layer + 1, position] = 1
    goes_on: dict[tuple[int, int], int] = {}  # the query of the best path
    lines = []
    for level in range(layer, -1, -1):
        strength = best[level + 1, :, None] * weights[level]
        # own positions are left to the residual stream, which has lines of its own
        strength.fill_diagonal_(0)
        by_line = strength.max(dim=0)
        best[level] = torch.maximum(best[level + 1], by_line.values)
        for key in (by_line.values > best[level + 1]).nonzero().flatten().tolist():
            goes_on[level, key] = int(by_line.indices[key])
        lines += [
            (float(strength[query, key]), ((key, level), (query, level + 1)))
            for query, key in strength.nonzero().tolist()
        ]
    lines = sorted(lines, key=lambda line: (-line[0], -line[1][0][1]))[:_MOST_LINES]
    kept: set[Segment] = {((position, level), (position, level + 1)) for level in range(layer + 1)}
    for _, ((key, low), (place, level)) in lines:
        # the residual stream brings the token to this line, and takes it on to the next one
        kept |= {((key, below), (key, below + 1)) for below in range(low)}
        while level <= layer and (level, place) not in goes_on:
            kept.add(((place, level), (place, level + 1)))
            level += 1
    segments = [*kept, *(segment for _, segment in lines)]
    reached = {(level, place) for segment in segments for place, level in segment}
    return lines, sorted(kept), reached


def _share(viewed: ViewedInput, layer: int, position: int) -> Float[Tensor, " source"] | None:
    """Return the influence on the state over the largest; None where it was not measured."""
    if viewed.influence is None:
        return None
    found = viewed.influence[layer, position]
    if found.isnan().any():
        return None
    return found / found.max().clamp(min=torch.finfo(torch.float32).tiny)
