"""Eq 2 of Chen & Zou 2024, written out: columns are positions, the destination is a column."""

import torch


def activate(kind, scores):
    """[source, destination]; softmax normalises over the sources."""
    return scores.clamp(min=0) if kind == "relu" else torch.softmax(scores, dim=0)


def forward(tokens, d_vocab, n_padding, layers, classifier, kind="relu"):
    """Logits of one sequence; `layers` hold pairs of dense matrices (W_QK, W_V)."""
    n = len(tokens)
    h = torch.zeros(d_vocab + n + n_padding, n, dtype=classifier.dtype)
    for position, token in enumerate(tokens):
        h[token, position] = 1
        h[d_vocab + position, position] = 1
    for heads in layers:
        attended = [w_v @ h @ activate(kind, h.T @ w_qk @ h) for w_qk, w_v in heads]
        h = h + sum(attended) / len(heads)
    return classifier @ h[:, -1]
