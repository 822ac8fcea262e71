"""Baselines of influence: attention weights, rollout and flow, gradients; all by name."""

from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.hooks.influence.base import (
    AskedStates,
    MeasuredInfluence,
    Rerun,
    StateInfluence,
    StateName,
    rows_at_once,
    take_places,
)
from infoflow_lens.hooks.influence.derivatives import differentiate_along
from infoflow_lens.hooks.model.points import layer_count, takes_model
from infoflow_lens.hooks.passes.view import Pass
from infoflow_lens.hooks.probe import Probe
from infoflow_lens.hooks.routes.contributions import (
    ContributionRoutes,
    Edges,
    Places,
    RoutesProbe,
    Scores,
    add_residual,
    needs_of_parts,
)
from infoflow_lens.hooks.routes.graded import SETTINGS, GradedSetsProbe, PowerRollout
from infoflow_lens.hooks.scores import Asked
from infoflow_lens.theory.propagation import propagate_edges, rows_at

OverHeads = Literal["mean", "max"]


class OverHeadsProbe(RoutesProbe):
    """The base of measures that put the heads of a layer together first.

    Args:
        heads: "mean" of the heads' weights, or "max", the largest of them.
        positions: as for :class:`RoutesProbe`.

    Raises:
        InfoFlowError: for another way to put heads together.
    """

    residual: ClassVar[bool] = True  # whether the residual connection is an edge

    heads: OverHeads = "mean"

    def edges(self, seen: Pass, layer: int) -> Float[Tensor, "batch query key"]:
        """Return the pattern of a layer, its heads put together."""
        pattern = seen.pattern(layer).float()
        weights = pattern.mean(dim=1) if self.heads == "mean" else pattern.amax(dim=1)
        return add_residual(weights) if self.residual else weights


class AttentionWeight(OverHeadsProbe):
    """Scores [layer, batch, pos, source]: the attention weights of that layer alone.

    The mean over heads of the pattern, "raw attention" in Abnar & Zuidema (2020). It knows neither
    the layers below nor the residual connection: the key's position stands for the token that
    entered there. Rows of a softmax sum to 1.

    Args:
        heads: "mean" of the heads' weights, or "max", the largest of them.
        positions: whose states; default all. Negative ones count from the end of each sequence.

    Raises:
        InfoFlowError: for another way to put heads together, positions that no sequence has, or a
            model that does not show its patterns.
    """

    residual = False

    def follow(self, edges: Edges, place: Places) -> Scores:
        """Return each layer for itself."""
        return rows_at(edges, place)


class AttentionRollout(OverHeadsProbe):
    """Scores [layer, batch, pos, source]: attention rollout (Abnar & Zuidema 2020, Sec. 3, eq 1).

    With A_l = 0.5 W_l + 0.5 I, where W_l is the mean pattern of the heads, the scores of layer l
    are the rows of A_l A_{l-1} .. A_0: attention weights as shares of what is mixed, and the
    residual connection as one half. Where the rows of W_l do not sum to 1, (W_l + I) is divided by
    its row sums. Rows sum to 1; what CLS keeps of itself is no source and is left out.

    MLPs, values, output matrices and norms are left out.

    Args:
        heads: "mean" of the heads' weights, or "max", the largest of them.
        positions: whose states; default all. Negative ones count from the end of each sequence.

    Raises:
        InfoFlowError: for another way to put heads together, positions that no sequence has, or a
            model that does not show its patterns.
    """

    def follow(self, edges: Edges, place: Places) -> Scores:
        """Return the sum over all paths."""
        return propagate_edges(edges, "sum-product", queries=place)


_UNIT = 2**30  # scipy's capacities are int32; rows sum to one, so no flow exceeds one unit


class AttentionFlow(OverHeadsProbe):
    """Scores [layer, batch, pos, source]: attention flow (Abnar & Zuidema 2020, Sec. 3).

    The edges of attention rollout, A_l = 0.5 W_l + 0.5 I, are capacities of a network whose nodes
    are the positions of every layer. The score of a source is the maximum flow between it and the
    state, each source by itself. Nodes have no capacity of their own. Since a path is as wide as
    its narrowest edge, scores of different sources do not add up to 1.

    In the first layer the flow is the edge; in the second the sum over middle positions of the
    smaller of two edges; above, `scipy.sparse.csgraph.maximum_flow` (Dinic), with capacities
    rounded down to 2^-30. It is the slowest baseline: one network for each state and source, so ask
    for few `positions` in models of three or more layers.

    MLPs, values, output matrices and norms are left out.

    Args:
        heads: "mean" of the heads' weights, or "max", the largest of them.
        positions: whose states; default all. Negative ones count from the end of each sequence.

    Raises:
        InfoFlowError: for another way to put heads together, positions that no sequence has, or a
            model that does not show its patterns.
    """

    def follow(self, edges: Edges, place: Places) -> Scores:
        """Return the maximum flow from every asked state down to every position."""
        flows = rows_at(edges, place)
        if len(edges) > 1:
            # two layers need no network: no two paths to a source share an edge, so each position
            # between passes as much as the narrower of its two edges lets through
            above, below = flows[1].unbind(dim=1), edges[0]
            through = [torch.minimum(row[:, :, None], below).sum(dim=1) for row in above]
            flows[1] = torch.stack(through, dim=1)
        flows[2:] = 0
        for layer in range(2, len(edges)):
            for sequence, asked in enumerate(place.tolist()):
                network = _Network(edges[: layer + 1, sequence])
                for row, position in enumerate(asked):
                    if position >= 0:
                        flows[layer, sequence, row] = network.flows_from(position)
        return flows


class _Network:
    """The positions of all layers of one sequence, the input's first, with edges downwards."""

    def __init__(self, edges: Float[Tensor, "layer query key"]) -> None:
        from scipy.sparse import coo_array

        n_pos = edges.shape[1]
        queries, keys, capacities = [], [], []
        for layer, weights in enumerate(edges):
            query, key = weights.nonzero(as_tuple=True)
            queries.append(query.numpy() + (layer + 1) * n_pos)
            keys.append(key.numpy() + layer * n_pos)
            wide = weights[query, key].double().clamp(max=1) * _UNIT
            capacities.append(wide.floor().numpy().astype(np.int32))
        n = (len(edges) + 1) * n_pos
        places = np.concatenate(queries), np.concatenate(keys)
        self._graph = coo_array((np.concatenate(capacities), places), shape=(n, n)).tocsr()
        self._n_pos, self._top = n_pos, len(edges) * n_pos

    def flows_from(self, position: int) -> Float[Tensor, " position"]:
        """Find the maximum flow from a state of the top layer to every position of the input."""
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        state = self._top + position
        reached = breadth_first_order(self._graph, state, return_predecessors=False)
        part = np.sort(reached)  # what the state cannot reach only costs time
        graph = self._graph[part][:, part]
        start = int(np.searchsorted(part, state))
        flows = torch.zeros(self._n_pos, dtype=torch.float32)
        for index, source in enumerate(part[part < self._n_pos].tolist()):
            flows[source] = maximum_flow(graph, start, index).flow_value / _UNIT
        return flows


class GradientTimesInput(StateInfluence):
    """Influence [layer, batch, pos, source]: the norm of gradient x input, |J x_source|.

    The derivative of a state in the direction of the token's own vector: for every feature of the
    state the gradient by the token times the token, summed over the token's features. For a single
    output this is the gradient x input of Shrikumar et al. (2016), in absolute value; a state has
    many features, so their norm is taken. To first order it is how far the state moves for each
    share of the token that is taken away. Like :class:`JacobianInfluence` it is a derivative, so it
    is no independent witness beside one; it takes one derivative a token in place of one a feature.

    For models over token ids the input is what enters the first block, the embedding with its
    position; with `source_layer`, what enters that layer.

    Its passes are its own; see :class:`StateInfluence`.

    Args:
        state: "post_attention" (x'_l of eq 1) or "resid_post".
        source_layer: None for the tokens; l for ``resid_pre`` of layer l, and then layers from l.
        chunk_size: sources per pass; default, by the sizes of the model and the batch.
        through_hooks: differentiate through hooks of yours.
        layers: whose states; default all that the sources reach.
        positions: whose states; default all. Negative ones count from the end of each sequence.

    Raises:
        InfoFlowError: for an unknown state, layer or position, a model whose forward pass cannot be
            repeated from its hooks, or one of which a part has no derivatives.
    """

    differentiates: ClassVar[bool] = True

    state: StateName = "post_attention"

    def _measure(self, rerun: Rerun, states: AskedStates) -> MeasuredInfluence:
        start, expected, place = states
        n_source = start.shape[1]
        self._check_rerun(rerun, rerun(start), expected)
        rows = rows_at_once(rerun.model, expected[0].shape[1], expected[0].shape[2], start.device)
        chunk = self.chunk_size or max(1, rows // len(start))
        shape = (len(expected), len(start), place.shape[1], n_source)
        found = torch.zeros(shape, dtype=torch.float32)
        alone = torch.eye(n_source, dtype=torch.bool, device=start.device)
        for sources in torch.arange(n_source).split(chunk):
            directions = start[None] * alone[sources][:, None, :, None]
            moved = differentiate_along(rerun, start, directions)
            for layer, change in enumerate(moved):  # [source, batch, pos, d_model]
                norms = change.float().norm(dim=-1).permute(1, 2, 0)
                found[layer, :, :, sources] = take_places(norms, place).cpu()
        return found, {}


@takes_model
def baselines(
    model: nn.Module,
    state: StateName = "resid_post",
    *,
    positions: Asked | None = None,
    cheap: bool = False,
) -> dict[str, Probe[Any]]:
    """Return other measures of what a state depends on, as probes for one call of ``run_probes``.

    Args:
        model: any Transformer; one whose states cannot be decomposed has no contribution
            routes.
        state: that of gradient x input, "resid_post" or "post_attention"; the others are the same.
        positions: whose states; default all.
        cheap: only what costs a few bare forward passes: no gradient x input, which takes a
            derivative a token, and no attention flow of more than two layers.

    Returns:
        By name: "attention weight", "attention rollout", "graded sets" (the best path, by the
        product of attention weights), "attention flow", "contribution routes" (the widest path),
        "contribution rollout" (ALTI: heads together, all paths), "power rollout, replacing a token"
        and "power rollout, small changes" (contributions to a power), and "gradient x input".
    """
    found: dict[str, Probe[Any]] = {
        "attention weight": AttentionWeight(positions=positions),
        "attention rollout": AttentionRollout(positions=positions),
        "graded sets": GradedSetsProbe(positions=positions),
    }
    if not cheap or layer_count(model) <= 2:
        found["attention flow"] = AttentionFlow(positions=positions)
    # without parts that add up, routes by contributions have no numbers here
    try:
        needs_of_parts(model)
    except InfoFlowError:
        pass
    else:
        found["contribution routes"] = ContributionRoutes(positions=positions)
        found["contribution rollout"] = ContributionRoutes(
            "rollout", heads_apart=False, positions=positions
        )
        for question in SETTINGS:
            found[f"power rollout, {question}"] = PowerRollout(question, positions=positions)
    # gradients take backward passes; all other baselines read one forward pass
    if not cheap:
        found["gradient x input"] = GradientTimesInput(state, positions=positions)
    return found
