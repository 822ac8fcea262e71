"""Draw the pictures of docs/theory.md from the rules themselves.

Run: python docs/figures/draw_mechanisms.py
"""

from pathlib import Path

import torch
from matplotlib.figure import Figure

from infoflow_lens.theory import (
    GlobalAggregation,
    InformationSets,
    MaxPosition,
    SpecificPositions,
    propagate,
)

T = 6
FOLDER = Path(__file__).parent
INK, FAINT, HOLD = "#1f2933", "#c5ccd3", "#0072b2"


def draw(name: str, edges: list[tuple[int, int]], sets: InformationSets) -> None:
    """One layer: tokens below, positions above, each with the set that it holds afterwards."""
    figure = Figure(figsize=(6.4, 2.6), layout="tight")
    axes = figure.subplots()
    for t in range(T):
        axes.plot([t, t], [0, 1], color=FAINT, linestyle=":", zorder=1)  # the residual stream
    for key, query in edges:
        axes.annotate(
            "",
            xy=(query, 0.93),
            xytext=(key, 0.07),
            arrowprops={"arrowstyle": "->", "color": HOLD, "linewidth": 1.6},
        )
    for position in range(T + 1):
        label, size = (str(position + 1), 8) if position < T else ("CLS", 6)
        axes.plot(position, 0, "o", color="white", markeredgecolor=INK, markersize=15, zorder=3)
        axes.text(position, 0, label, ha="center", va="center", fontsize=size, zorder=4, color=INK)
        axes.plot(position, 1, "o", color="white", markeredgecolor=INK, markersize=15, zorder=3)
        held = ",".join(str(s + 1) for s in sorted(sets.of(0, 0, position)))
        held = "all" if len(sets.of(0, 0, position)) == T else held
        axes.text(position, 1.24, f"{{{held}}}", ha="center", fontsize=9, color=INK)
    axes.text(-0.75, 0, "before", ha="right", va="center", fontsize=9, color=INK)
    axes.text(-0.75, 1, "after", ha="right", va="center", fontsize=9, color=INK)
    axes.set_xlim(-1.7, T + 0.6)
    axes.set_ylim(-0.3, 1.5)
    axes.axis("off")
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})


def main() -> None:
    """Three pictures, one for each rule."""
    chosen = torch.tensor([4, 4, 0, 4, 0, 0, 4])
    draw(
        "max_position",
        [(int(key), query) for query, key in enumerate(chosen)],
        propagate([MaxPosition(chosen[None, None])], n_sources=T),
    )
    cls_only = torch.arange(T + 1) == T
    draw(
        "global",
        [(key, T) for key in range(T)],
        propagate([GlobalAggregation(cls_only)], n_sources=T),
    )
    reads = torch.zeros(T + 1, T + 1, dtype=torch.bool)
    for query in range(T):
        reads[query, max(0, query - 1)] = query > 0
    reads[T, :3] = True
    draw(
        "specific_position",
        [(int(key), int(query)) for query, key in reads.nonzero().tolist()],
        propagate([SpecificPositions(reads)], n_sources=T),
    )


if __name__ == "__main__":
    main()
