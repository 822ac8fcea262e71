"""One attention layer by dense matrices, and separability by one dense linear program."""

import numpy as np
from scipy.optimize import linprog


def embed(sequence, vocabulary, n_class):
    """H [d', n]: one-hot tokens, one-hot positions, a row a class; columns are positions."""
    d, n = len(vocabulary), len(sequence)
    state = np.zeros((d + n + n_class, n))
    for position, token in enumerate(sequence):
        state[vocabulary.index(token), position] = 1
        state[d + position, position] = 1
    return state


def relu_layer(state, query_key, value):
    """Eq (2): H + 1/m sum V H relu(H^T W_QK H); the destination is the column."""
    heads = len(query_key)
    total = np.zeros_like(state)
    for qk, v in zip(query_key, value):
        total += v @ state @ np.maximum(state.T @ qk @ state, 0)
    return state + total / heads if heads else state


def softmax_layer(state, query_key, value):
    """One softmax head at the last position (eq 18), and its normaliser."""
    scores = np.exp(state.T @ query_key @ state[:, -1])
    return state[:, -1] + value @ state @ scores / scores.sum(), scores.sum()


def theorem_1(weights, features, vocabulary, n):
    """W_QK, W_V and W_O of the compact form of Theorem 1, entry by entry."""
    d, m, n_class = len(vocabulary), n - 1, len(weights[0])
    size = d + n + n_class
    query_key, value = np.zeros((m, size, size)), np.zeros((m, size, size))
    for p in range(m):
        query_key[p, d + p, d + n - 1] = 1
    for row, (p, token) in zip(weights, features):
        for c, weight in enumerate(row):
            value[p, d + n + c, vocabulary.index(token)] = m * weight
    classifier = np.zeros((n_class, size))
    for c in range(n_class):
        classifier[c, d + n + c] = 1
    return query_key, value, classifier


def indicators(x):
    """Phi, dense: a column for every (position, token) that occurs."""
    pairs = sorted({(p, t) for row in x for p, t in enumerate(row)})
    return np.array([[float(row[p] == t) for p, t in pairs] for row in x])


def separable(x, y):
    """Whether W with (W[y_i] - W[c]) . phi_i >= 1 exists: a dense feasibility program."""
    phi, labels = indicators(x), sorted(set(y))
    n, f = phi.shape
    rows = []
    for i in range(n):
        for c, label in enumerate(labels):
            if label != y[i]:
                row = np.zeros((len(labels), f))
                row[labels.index(y[i])] = -phi[i]
                row[c] = phi[i]
                rows.append(row.ravel())
    if not rows:
        return True
    found = linprog(
        np.zeros(len(labels) * f), np.array(rows), -np.ones(len(rows)), bounds=(None, None)
    )
    assert found.status in (0, 2), found.message
    return found.status == 0
