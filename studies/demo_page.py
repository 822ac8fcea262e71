"""The page of the demo: one HTML file that holds everything it shows."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from infoflow_lens.agreement import Agreement
from infoflow_lens.foundation.lazy import mpl
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.hooks import RecoveryResult
from infoflow_lens.report.assets import add_policy, templates
from infoflow_lens.report.charts import render_chart
from infoflow_lens.report.flow_view import FlowView, ViewedInput
from infoflow_lens.report.pages import (
    METRICS,
    agreement_rows,
    fallback,
    mounting_script,
    picture_data,
    picture_element,
)
from infoflow_lens.theory.information_sets import InformationSets

STAGE_COLOURS = {"initial": "#b8c2cc", "trained": "#0072b2"}
_ERRORS = {"second_moment": "by second moment (paper)", "fvu": "variance unexplained"}


def draw_recovery(results: Mapping[str, RecoveryResult]) -> mpl.Figure:
    """Draw recovery errors of the heads of the first layer: a panel for each rank and measure.

    Args:
        results: by stage, such as "initial"; each stage has a colour.
    """
    ranks = next(iter(results.values())).ranks
    panels = [(index, rank, error) for index, rank in enumerate(ranks) for error in _ERRORS]
    figure = mpl.Figure(figsize=(2.6 * len(panels), 2.9), layout="constrained")
    figure.suptitle("Recovery error of the heads of layer 0", fontsize=11)
    first = None
    for place, (index, rank, error) in enumerate(panels):
        # panels share their scale
        axes = figure.add_subplot(1, len(panels), place + 1, sharey=first)
        first = first or axes
        width = 0.8 / len(results)
        for stage, (name, result) in enumerate(results.items()):
            values = getattr(result, error)[0][:, index].tolist()
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
    """Draw validation NMSE over epochs, a line for each length of sequences (``n_tokens``)."""
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


@dataclass(frozen=True)
class Stage:
    """A model at one moment, predicted and measured on the same inputs.

    Attributes:
        name: "initial", "trained", ...
        recovery: recovery errors.
        agreement: predicted against measured sets, over all probed inputs.
        positions: for every layer, the retrieved keys of the shown inputs [shown, head, pos].
        predicted: information sets of the shown inputs.
        influence: measured influence on the shown inputs [layer, shown, pos, source].
        edges: for every layer, the influence of its inputs on its outputs [shown, pos, pos].
    """

    name: str
    recovery: RecoveryResult
    agreement: Agreement
    positions: Sequence[Int[Tensor, "shown _head pos"]]
    predicted: InformationSets
    influence: Float[Tensor, "layer shown pos source"]
    edges: Sequence[Float[Tensor, "shown pos pos"]]


def render_demo(
    stages: Sequence[Stage],
    active: Bool[Tensor, "shown source"],
    history: Sequence[Mapping[str, float | int]],
    record: RunRecord,
    **words: Any,
) -> str:
    """Return the demo's page, which fetches nothing and opens on the interactive picture.

    Args:
        stages: the model at different moments, in the order of time.
        active: the target's active index sets of the shown inputs.
        history: of the training, as in `StagedResult`.
        record: of the run.
        words: `title`; `headline`, the finding in a sentence or two; `facts`, short statements
            under it, as (label, value).
    """
    flow = picture_of(stages, active)
    data = picture_data(flow)
    recovery = draw_recovery({stage.name: stage.recovery for stage in stages})
    template = templates().get_template("demo.html.j2")
    page = template.render(
        **words,
        picture=picture_element(data, fallback(flow)),
        script=mounting_script([data]),
        recovery=render_chart(recovery),
        curve=render_chart(training_curve(history)),
        metrics=METRICS,
        rows=agreement_rows({stage.name: stage.agreement for stage in stages}, "CLS"),
        threshold=stages[-1].agreement.threshold,
        record=json.dumps(record.to_dict(), indent=2),
    )
    return add_policy(page)


def picture_of(stages: Sequence[Stage], active: Bool[Tensor, "shown source"]) -> FlowView:
    """Return the shown inputs of every stage, the last stage first."""
    inputs, groups = [], []
    # the trained stage is what one looks at first
    for stage in reversed(stages):
        n_source, n_pos = stage.predicted.n_sources, stage.predicted.members.shape[2]
        groups.append((stage.name, len(active)))
        for number, needed in enumerate(active):
            inputs.append(
                ViewedInput(
                    tokens=[f"x{position}" for position in range(n_source)],
                    n_queries=n_pos,
                    ranked=[chosen[number][..., None] for chosen in stage.positions],
                    influence=stage.influence[:, number],
                    edges=[edges[number] for edges in stage.edges],
                    marked=needed.nonzero().flatten().tolist(),
                    causal=False,
                    name=f"input {number}",
                )
            )
    return FlowView(
        title="",
        inputs=inputs,
        groups=groups,
        influence_name="norm of the Jacobian of the state by the token; between layers, of the "
        "state above by the state below",
        marked_name="in the active index set of the target",
    )
