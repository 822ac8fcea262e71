"""Attention flow: attention as pipes, and the most that can run from a token to a state."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from infoflow_lens.hooks.routes.attention import OverHeadsProbe
from infoflow_lens.hooks.routes.paths import Edges, Places, Scores
from infoflow_lens.theory.propagation import rows_at

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
        """Return a maximum flow for every asked state and every position."""
        return maximum_flows(edges, place)


def maximum_flows(edges: Edges, place: Places) -> Scores:
    """Return the maximum flow from every asked state down to every position."""
    flows = rows_at(edges, place)
    if len(edges) > 1:
        # two layers need no network: no two paths to a source share an edge
        flows[1] = _through_one_layer(flows[1], edges[0])
    flows[2:] = 0
    for layer in range(2, len(edges)):
        for sequence, asked in enumerate(place.tolist()):
            network = _Network(edges[: layer + 1, sequence])
            for row, position in enumerate(asked):
                if position >= 0:
                    flows[layer, sequence, row] = network.flows_from(position)
    return flows


def _through_one_layer(
    above: Float[Tensor, "batch asked middle"], below: Float[Tensor, "batch middle position"]
) -> Float[Tensor, "batch asked position"]:
    """Every middle position passes as much as the narrower of its two edges lets through."""
    rows = [torch.minimum(row[:, :, None], below).sum(dim=1) for row in above.unbind(dim=1)]
    return torch.stack(rows, dim=1)


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
        """The maximum flow from a state of the top layer down to every position of the input."""
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
