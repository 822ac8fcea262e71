"""The demo's still figures, drawn with matplotlib."""

from collections.abc import Mapping, Sequence

from infoflow_lens.foundation.lazy import mpl
from infoflow_lens.hooks import RecoveryResult

STAGE_COLOURS = {"initial": "#b8c2cc", "trained": "#0072b2"}
_ERRORS = {"second_moment": "by second moment (paper)", "fvu": "variance unexplained"}


def recovery(results: Mapping[str, RecoveryResult], layer: int = 0) -> mpl.Figure:
    """Recovery errors of the heads of a layer: a panel for each rank and error measure.

    Args:
        results: by stage, such as "initial"; each stage has a colour.
        layer: counted from 0.
    """
    ranks = next(iter(results.values())).ranks
    panels = [(index, rank, error) for index, rank in enumerate(ranks) for error in _ERRORS]
    figure = mpl.Figure(figsize=(2.6 * len(panels), 2.9), layout="constrained")
    figure.suptitle(f"Recovery error of the heads of layer {layer}", fontsize=11)
    first = None
    for place, (index, rank, error) in enumerate(panels):
        # panels share their scale
        axes = figure.add_subplot(1, len(panels), place + 1, sharey=first)
        first = first or axes
        width = 0.8 / len(results)
        for stage, (name, result) in enumerate(results.items()):
            values = getattr(result, error)[layer][:, index].tolist()
            axes.bar(
                [head + (stage - (len(results) - 1) / 2) * width for head in range(len(values))],
                values,
                width,
                label=name,
                color=STAGE_COLOURS.get(name),
            )
            axes.set_xticks(range(len(values)), [str(head) for head in range(len(values))])
        axes.set_title(f"rank {rank}\n{_ERRORS[error]}", fontsize=9)
        axes.set_xlabel("head", fontsize=9)
        axes.tick_params(labelsize=8, labelleft=place == 0)
        axes.spines[["top", "right"]].set_visible(False)
    assert first is not None
    first.set_ylabel("recovery error", fontsize=9)
    first.legend(fontsize=8)
    return figure


def training_curve(history: Sequence[Mapping[str, float | int]]) -> mpl.Figure:
    """Validation NMSE over epochs, a line for each length of sequences (``n_tokens``)."""
    figure = mpl.Figure(figsize=(6.5, 2.7), layout="constrained")
    figure.suptitle("Validation error while training", fontsize=11)
    axes = figure.add_subplot()
    lengths = list(dict.fromkeys(int(row["n_tokens"]) for row in history))
    for n_tokens in lengths:
        stage = "trained" if n_tokens == lengths[-1] else "initial"
        rows = [row for row in history if row["n_tokens"] == n_tokens]
        axes.plot(
            [row["epoch"] for row in rows],
            [row["validation_nmse"] for row in rows],
            color=STAGE_COLOURS[stage],
            label=f"{n_tokens} tokens",
        )
    axes.legend(frameon=False, fontsize=8)
    axes.set_yscale("log")
    axes.set_xlabel("epoch")
    axes.set_ylabel("validation NMSE")
    axes.spines[["top", "right"]].set_visible(False)
    return figure
