"""Routes from tokens to states, one path, one edge and one head at a time, in plain numpy."""

import itertools

import numpy as np
from scipy.optimize import linprog


def residual_added(pattern):
    """One head's or the mean pattern [query, key] with the residual connection, rows of sum 1."""
    rows = []
    for query, row in enumerate(np.asarray(pattern).copy()):
        row[query] += 1
        rows.append(row / row.sum())
    return np.array(rows)


def paths(n_layers, n_pos, state, source):
    """All paths from a state of the last layer down to a source: the position at every level."""
    for between in itertools.product(range(n_pos), repeat=n_layers - 1):
        yield (state, *between, source)


def edges_of(path, edges):
    """The weights of a path's edges; `edges` has the lowest layer first."""
    top_down = list(reversed(edges))
    return [top_down[i][path[i], path[i + 1]] for i in range(len(edges))]


def rollout(edges):
    """The sum over paths of the products of their edges."""
    n = len(edges[0])
    return np.array(
        [
            [
                sum(np.prod(edges_of(path, edges)) for path in paths(len(edges), n, t, s))
                for s in range(n)
            ]
            for t in range(n)
        ]
    )


def widest(edges):
    """The widest path, by its narrowest edge."""
    n = len(edges[0])
    return np.array(
        [
            [
                max(min(edges_of(path, edges)) for path in paths(len(edges), n, t, s))
                for s in range(n)
            ]
            for t in range(n)
        ]
    )


def reached_above(edges, state, threshold):
    """The sources that a search from a state reaches through edges above a threshold."""
    here = {state}
    for weights in reversed(edges):
        here = {
            key for query in here for key in range(len(weights)) if weights[query, key] > threshold
        }
    return here


def max_flow(edges, state, source):
    """The maximum flow from a state down to a source, by linear programming over all edges."""
    n, n_layers = len(edges[0]), len(edges)
    variables = [(layer, q, k) for layer in range(n_layers) for q in range(n) for k in range(n)]
    bounds = [(0, edges[layer][q, k]) for layer, q, k in variables]
    conserved, leaving = [], np.zeros(len(variables))
    for level in range(n_layers + 1):
        for position in range(n):
            row = np.zeros(len(variables))
            for i, (layer, q, k) in enumerate(variables):
                if (layer, k) == (level, position):
                    row[i] += 1  # comes in from above
                if (layer + 1, q) == (level, position):
                    row[i] -= 1
            if (level, position) == (n_layers, state):
                leaving = -row
            elif (level, position) != (0, source):
                conserved.append(row)
    found = linprog(
        -leaving, A_eq=np.array(conserved), b_eq=np.zeros(len(conserved)), bounds=bounds
    )
    return -found.fun


def importances(before, pattern, values, output, bias, heads_apart=True):
    """Edges into every state of a layer by proximity (Ferrando & Voita 2024).

    Args:
        before: [pos, d_model]; pattern: [head, query, key]; values: [key, head, d_head];
        output: [head, d_head, d_model]; bias: [d_model].
    """
    n_heads, n_query, n_key = pattern.shape
    edges = np.zeros((n_query, n_key))
    for t in range(n_query):
        parts = [(t, before[t])]
        for j in range(n_key):
            brought = [pattern[h, t, j] * values[j, h] @ output[h] for h in range(n_heads)]
            parts += [(j, z) for z in (brought if heads_apart else [sum(brought)])]
        whole = sum(z for _, z in parts) + bias
        near = [max(0, np.abs(whole).sum() - np.abs(z - whole).sum()) for _, z in parts]
        if sum(near) == 0:
            edges[t, t] = 1
            continue
        for (j, _), proximity in zip(parts, near, strict=True):
            edges[t, j] += proximity / sum(near)
    return edges


def best_path(layers, state, source, path, through=None):
    """The strength of the best path from a source up to a state, by all heads and positions.

    Args:
        layers: for every layer strengths [head, query, key]; each position also keeps to itself,
            with strength 1.
        path: "product" or "weakest".
        through: an edge (layer, head, query, key) that the path must use.
    """

    def down(layer, query, so_far, used):
        if layer < 0:
            return so_far if query == source and used else 0.0
        found = down(layer - 1, query, so_far, used)  # the residual connection
        for head, pattern in enumerate(layers[layer]):
            for key, strength in enumerate(pattern[query]):
                joined = so_far * strength if path == "product" else min(so_far, strength)
                if joined > 0:
                    here = used or (layer, head, query, key) == through
                    found = max(found, down(layer - 1, key, joined, here))
        return found

    return down(len(layers) - 1, state, 1.0, through is None)
