"""The report's figures, all plotly."""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from jaxtyping import Bool, Float, Int
from plotly.subplots import make_subplots
from torch import Tensor

from infoflow_lens.hooks import RecoveryResult

HEAD_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b")
FAINT = "rgba(120,120,120,0.13)"
RESIDUAL = "rgba(120,120,120,0.7)"
INK = "#1f2933"
STAGE_COLOURS = {"initial": "#b8c2cc", "trained": "#0072b2"}

# how strong a measured edge is drawn, by its share of the largest influence on the state
_STRENGTHS = ((0.1, 0.25), (0.3, 0.5), (0.6, 0.95))

Edge = tuple[int, int, int]  # layer, key position below, query position above


def _style(figure: go.Figure, height: int) -> go.Figure:
    return figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 60, "r": 20, "t": 40, "b": 45},
        font={"family": "system-ui, sans-serif", "size": 13, "color": INK},
        legend={"orientation": "h", "yanchor": "top", "y": -0.12, "x": 0},
    )


def position_labels(n_pos: int, n_source: int) -> list[str]:
    """Names of the positions: token numbers, and CLS for what comes after the tokens."""
    return [str(t) if t < n_source else "CLS" for t in range(n_pos)]


def _on_path(
    edges: Sequence[Edge], n_layers: int, n_source: int, target: int
) -> tuple[set[Edge], set[Edge]]:
    """The edges through which tokens can reach the last layer's `target`, by attention and by the
    residual stream."""
    reached = [set(range(n_source))]  # the positions of each layer that know any token
    for layer in range(n_layers):
        known = reached[-1]
        reached.append(known | {query for at, key, query in edges if at == layer and key in known})
    alive = {target}
    by_attention: set[Edge] = set()
    by_residual: set[Edge] = set()
    for layer in reversed(range(n_layers)):
        used = {
            (at, key, query)
            for at, key, query in edges
            if at == layer and query in alive and key in reached[layer]
        }
        by_attention |= used
        by_residual |= {(layer, t, t) for t in alive if t in reached[layer]}
        alive |= {key for _, key, _ in used}
    return by_attention, by_residual


def _lines(edges: Sequence[Edge]) -> tuple[list[int | None], list[int | None]]:
    xs: list[int | None] = []
    ys: list[int | None] = []
    for layer, key, query in edges:
        xs += [key, query, None]
        ys += [layer, layer + 1, None]
    return xs, ys


def information_flow(
    positions: Sequence[Int[Tensor, "_head pos"]],
    measured: Sequence[Float[Tensor, "pos pos"]],
    n_source: int,
    active: Bool[Tensor, " source"],
    cls_set: Bool[Tensor, " source"],
    influence: Float[Tensor, " source"],
) -> go.Figure:
    """The flow of one input, layer by layer: predicted edges beside measured ones.

    Args:
        positions: for every layer, the key that each head retrieves for each query (rule 1).
        measured: for every layer, the influence of each position below on each position above.
        n_source: the number of tokens; positions from there on are CLS.
        active: the target's active index set.
        cls_set: the predicted set of the read-out position.
        influence: the measured influence of each token on the read-out position.
    """
    n_layers, n_pos = len(positions), positions[0].shape[1]
    figure = make_subplots(
        cols=2,
        shared_yaxes=True,
        horizontal_spacing=0.04,
        subplot_titles=("Predicted: what each head retrieves", "Measured: layer Jacobians"),
    )
    by_head: dict[int, list[Edge]] = {}
    for layer, chosen in enumerate(positions):
        for head, keys in enumerate(chosen.tolist()):
            by_head.setdefault(head, []).extend(
                (layer, key, query) for query, key in enumerate(keys) if key >= 0
            )
    predicted = [edge for edges in by_head.values() for edge in edges]
    path, residual = _on_path(predicted, n_layers, n_source, n_pos - 1)
    _add_edges(figure, 1, [e for e in predicted if e not in path], FAINT, 1, None)
    _add_edges(figure, 1, sorted(residual), RESIDUAL, 2, "residual stream", dash="dot")
    for head, edges in by_head.items():
        colour = HEAD_COLOURS[head % len(HEAD_COLOURS)]
        _add_edges(figure, 1, [e for e in edges if e in path], colour, 2, f"head {head}")

    strength: dict[Edge, float] = {}
    for layer, scores in enumerate(measured):
        share = scores / scores.amax(dim=1, keepdim=True).clamp(min=1e-30)
        share.fill_diagonal_(0)  # the position itself: the residual stream
        for query, key in (share >= _STRENGTHS[0][0]).nonzero().tolist():
            strength[layer, key, query] = float(share[query, key])
    path, residual = _on_path(list(strength), n_layers, n_source, n_pos - 1)
    _add_edges(figure, 2, [e for e in strength if e not in path], FAINT, 1, None)
    _add_edges(figure, 2, sorted(residual), RESIDUAL, 2, None, dash="dot")
    bounds = [*_STRENGTHS[1:], (float("inf"), 0.0)]
    for (low, opacity), (high, _) in zip(_STRENGTHS, bounds, strict=True):
        edges = [e for e in path if low <= strength[e] < high]
        upper = "" if high == float("inf") else f" to {high:.0%}"
        name = f"influence {low:.0%}{upper or ' and more'} of the largest"
        _add_edges(figure, 2, edges, f"rgba(51,51,51,{opacity})", 2, name)

    labels = position_labels(n_pos, n_source)
    share_on_cls = (influence / influence.max().clamp(min=1e-30)).tolist()
    for column, in_set in ((1, cls_set.tolist()), (2, [s >= 0.1 for s in share_on_cls])):
        for layer in range(n_layers + 1):
            shown = range(n_pos)
            figure.add_scatter(
                x=list(shown),
                y=[layer] * n_pos,
                mode="markers",
                showlegend=False,
                marker={
                    "size": [13 if layer == 0 and t < n_source else 9 for t in shown],
                    "color": [
                        "#f0b429" if layer == 0 and t < n_source and in_set[t] else "white"
                        for t in shown
                    ],
                    "line": {
                        "width": [
                            3 if layer == 0 and t < n_source and active[t] else 1.2 for t in shown
                        ],
                        "color": [
                            "#c81e1e" if layer == 0 and t < n_source and active[t] else INK
                            for t in shown
                        ],
                    },
                },
                text=[
                    f"token {t}<br>influence on CLS {share_on_cls[t]:.0%} of the largest"
                    if layer == 0 and t < n_source
                    else f"position {labels[t]} after layer {layer}"
                    for t in shown
                ],
                hoverinfo="text",
                row=1,
                col=column,
            )
        figure.update_xaxes(
            tickvals=list(range(n_pos)),
            ticktext=labels,
            showgrid=False,
            zeroline=False,
            row=1,
            col=column,
        )
    figure.update_yaxes(
        tickvals=list(range(n_layers + 1)),
        ticktext=["tokens", *(f"layer {layer + 1}" for layer in range(n_layers))],
        showgrid=False,
        zeroline=False,
        range=[-0.25, n_layers + 0.25],
    )
    return _style(figure, 150 + 150 * n_layers)


def _add_edges(
    figure: go.Figure,
    column: int,
    edges: Sequence[Edge],
    colour: str,
    width: int,
    name: str | None,
    dash: str = "solid",
) -> None:
    if not edges:
        return
    xs, ys = _lines(edges)
    figure.add_scatter(
        x=xs,
        y=ys,
        mode="lines",
        line={"color": colour, "width": width, "dash": dash},
        hoverinfo="skip",
        name=name or "",
        showlegend=name is not None,
        row=1,
        col=column,
    )


def influence_beside_sets(
    members: Bool[Tensor, "layer pos source"],
    influence: Float[Tensor, "layer pos source"],
) -> go.Figure:
    """For one input: predicted sets above, measured influence below, a column for each layer."""
    n_layers, n_pos, n_source = members.shape
    figure = make_subplots(
        rows=2,
        cols=n_layers,
        shared_xaxes=True,
        shared_yaxes=True,
        vertical_spacing=0.09,
        horizontal_spacing=0.04,
        subplot_titles=[
            *(f"predicted set, layer {layer + 1}" for layer in range(n_layers)),
            *(f"measured influence, layer {layer + 1}" for layer in range(n_layers)),
        ],
    )
    labels = position_labels(n_pos, n_source)
    share = influence / influence.amax(dim=-1, keepdim=True).clamp(min=1e-30)
    for layer in range(n_layers):
        for row, values in ((1, members[layer].float()), (2, share[layer])):
            figure.add_heatmap(
                z=[[round(v, 3) for v in line] for line in values.tolist()],
                y=labels,
                zmin=0,
                zmax=1,
                colorscale="Blues",
                showscale=layer == n_layers - 1 and row == 2,
                colorbar={"title": "share of<br>largest", "len": 0.45, "y": 0.2},
                hovertemplate="position %{y}, token %{x}: %{z}<extra></extra>",
                row=row,
                col=layer + 1,
            )
    figure.update_yaxes(autorange="reversed", type="category", dtick=1, tickfont={"size": 9})
    figure.update_xaxes(dtick=1, tickfont={"size": 9})
    figure.update_xaxes(title_text="input token", row=2)
    figure.update_yaxes(title_text="position", col=1)
    return _style(figure, 620)


def recovery(results: Mapping[str, RecoveryResult], layer: int = 0) -> go.Figure:
    """Recovery error of each head of a layer: a panel for each rank and error, a colour a stage."""
    ranks = next(iter(results.values())).ranks
    errors = {"second_moment": "by second moment (paper)", "fvu": "variance unexplained"}
    figure = make_subplots(
        cols=len(ranks) * len(errors),
        shared_yaxes=True,
        horizontal_spacing=0.03,
        subplot_titles=[f"rank {r}<br>{title}" for r in ranks for title in errors.values()],
    )
    column = 0
    for index, _ in enumerate(ranks):
        for error in errors:
            column += 1
            for stage, result in results.items():
                values = getattr(result, error)[layer][:, index].tolist()
                figure.add_bar(
                    x=[f"head {head}" for head in range(len(values))],
                    y=values,
                    name=stage,
                    legendgroup=stage,
                    showlegend=column == 1,
                    marker_color=STAGE_COLOURS.get(stage),
                    hovertemplate="%{x}: %{y:.3f}<extra>" + stage + "</extra>",
                    row=1,
                    col=column,
                )
    figure.update_layout(barmode="group")
    figure.update_yaxes(title_text="recovery error", col=1)
    figure = _style(figure, 360)
    return figure.update_layout(margin={"t": 60})


def training_curve(history: Sequence[Mapping[str, float | int]]) -> go.Figure:
    """Validation NMSE over epochs."""
    figure = go.Figure(
        go.Scatter(
            x=[row["epoch"] for row in history],
            y=[row["validation_nmse"] for row in history],
            line={"color": STAGE_COLOURS["trained"]},
            hovertemplate="epoch %{x}: %{y:.2e}<extra></extra>",
        )
    )
    figure.update_yaxes(type="log", title_text="validation NMSE", exponentformat="power", dtick=1)
    figure.update_xaxes(title_text="epoch")
    return _style(figure, 280)
