"""The phase diagram of an estimate as a picture."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import atomic_path, writable_folder

COLOURS = {"excluded": "#d55e00", "undecided": "#e4e7eb", "allowed": "#009e73"}
FORMATS = (".png", ".svg", ".pdf")


def check_picture_path(path: str | os.PathLike[str]) -> Path:
    """Refuse a file that no picture can be written to, before any work.

    Raises:
        InfoFlowError: for another ending than FORMATS, or a folder that can't be written.
    """
    target = Path(path)
    if target.suffix not in FORMATS:
        raise InfoFlowError(
            f"cannot draw to {target.name!r}: expected a name that ends in {', '.join(FORMATS)}"
        )
    writable_folder(target.parent)
    return target


def phase_figure(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Verdicts over h_1 and T, as `infoflow_lens.theory.estimate.phase_diagram` gives them."""
    heads = sorted({row["h1"] for row in rows})
    tokens = sorted({row["n_tokens"] for row in rows})
    names = list(COLOURS)
    verdicts = {(row["h1"], row["n_tokens"]): names.index(row["verdict"]) for row in rows}
    figure = Figure(figsize=(1.6 + 0.6 * len(tokens), 1.8 + 0.4 * len(heads)), layout="tight")
    axes = figure.subplots()
    axes.pcolormesh(
        [[verdicts[h, t] for t in tokens] for h in heads],
        cmap=ListedColormap(list(COLOURS.values())),
        vmin=-0.5,
        vmax=2.5,
        edgecolors="white",
    )
    axes.set_xticks([i + 0.5 for i in range(len(tokens))], [str(t) for t in tokens])
    axes.set_yticks([i + 0.5 for i in range(len(heads))], [str(h) for h in heads])
    axes.set_xlabel("tokens T")
    axes.set_ylabel("first-layer heads $h_1$")
    axes.set_title(title, fontsize=10)
    patches = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False)
    return figure


def draw_phase_diagram(
    rows: Sequence[Mapping[str, Any]], title: str, path: str | os.PathLike[str]
) -> None:
    """Write :func:`phase_figure` to a png, svg or pdf file, whole or not at all."""
    target = check_picture_path(path)
    with atomic_path(target) as temporary:
        phase_figure(rows, title).savefig(temporary, format=target.suffix[1:], dpi=150)
