"""The phase diagram of an estimate as a picture."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from infoflow_lens.foundation.display import plain_label
from infoflow_lens.foundation.documents import PICTURE, PICTURE_MAKER
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import user_path
from infoflow_lens.foundation.lazy import mpl

COLOURS = {
    "excluded, proved": "#a33c00",
    "excluded by the paper's count": "#e69f00",
    "open": "#e4e7eb",
    "allowed by construction": "#009e73",
}
FORMATS = (".png", ".svg", ".pdf")


def check_picture_path(path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Check, before any work, that a picture can be written to a file.

    Args:
        path: of the picture.
        overwrite: whether a file that is no picture of ours may be replaced, too.

    Raises:
        InfoFlowError: for another ending than FORMATS, a folder that can't be written, and another
            file in the picture's place.
    """
    target = user_path(path)
    if target.suffix not in FORMATS:
        raise InfoFlowError(
            f"cannot draw to {target.name!r}: expected a name that ends in {', '.join(FORMATS)}"
        )
    return PICTURE.check(target, overwrite=overwrite)


def phase_panel(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw verdicts over h_1 and T, for one choice of the other layers' heads.

    Rows are those of `infoflow_lens.theory.estimate.phase_diagram`.
    """
    first = sorted({row["heads"][0] for row in rows})
    tokens = sorted({row["n_tokens"] for row in rows})
    names = list(COLOURS)
    found = {(row["heads"][0], row["n_tokens"]): names.index(row["verdict"]) for row in rows}
    axes.pcolormesh(
        [[found[h, t] for t in tokens] for h in first],
        cmap=ListedColormap(list(COLOURS.values())),
        # each verdict is a whole number, in the middle of the step of its colour
        vmin=-0.5,
        vmax=len(names) - 0.5,
        edgecolors="white",
    )
    axes.set_xticks([i + 0.5 for i in range(len(tokens))], [str(t) for t in tokens], fontsize=7)
    axes.set_yticks([i + 0.5 for i in range(len(first))], [str(h) for h in first])
    axes.set_xlabel("tokens T")
    axes.set_ylabel("first-layer heads $h_1$")


def phase_key(figure: mpl.Figure) -> None:
    """Draw a legend of the colours of phase panels, below the figure."""
    patches = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(COLOURS), frameon=False)


def phase_figure(rows: Sequence[Mapping[str, Any]], title: str) -> mpl.Figure:
    """Draw verdicts over h_1 and T, a panel for each choice of the other layers' heads.

    Rows are those of `infoflow_lens.theory.estimate.phase_diagram`.
    """
    panels: dict[tuple[int, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        panels.setdefault(tuple(row["heads"][1:]), []).append(row)
    first, tokens = {row["heads"][0] for row in rows}, {row["n_tokens"] for row in rows}
    width = len(panels) * (0.9 + 0.5 * len(tokens))
    figure = mpl.Figure(figsize=(max(4.5, width), 2.2 + 0.35 * len(first)), layout="constrained")
    for column, others in enumerate(sorted(panels)):
        axes = figure.add_subplot(1, len(panels), column + 1)
        phase_panel(axes, panels[others])
        if others:
            axes.set_title("$h_2, ..$ = " + ", ".join(map(str, others)), fontsize=9)
        if column > 0:
            axes.set_ylabel("")
    figure.suptitle(plain_label(title), fontsize=10)
    phase_key(figure)
    return figure


def draw_phase_diagram(
    rows: Sequence[Mapping[str, Any]],
    title: str,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
) -> None:
    """Write :func:`phase_figure` to a png, svg or pdf file, whole or not at all.

    Args:
        rows, title: as there.
        path, overwrite: as for :func:`check_picture_path`.

    Raises:
        InfoFlowError: as :func:`check_picture_path`.
    """
    target = check_picture_path(path, overwrite=overwrite)
    maker = {"Software" if target.suffix == ".png" else "Creator": PICTURE_MAKER}
    with PICTURE.open(target, overwrite=overwrite) as temporary:
        figure = phase_figure(rows, title)
        figure.savefig(temporary, format=target.suffix[1:], dpi=150, metadata=maker)
        temporary.write_bytes(PICTURE.sign(temporary.read_bytes()))
