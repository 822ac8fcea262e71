"""Theorem 1 of Chen & Zou 2024: one layer memorises, with a head for each position."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from infoflow_lens.studies.constructions.attention_only import AttentionOnly, Head, Rows
from infoflow_lens.studies.constructions.registry import construction
from infoflow_lens.tasks.questions import Memorization

Form = Literal["blocks", "compact"]


@construction("Chen & Zou 2024, Theorem 1")
def memorization(task: Memorization, *, form: Form = "blocks") -> AttentionOnly:
    """A layer that gives every stored sequence its label (Theorem 1, Lemmas 3 and 4).

    With k words, n = k + 1 and d token rows (the words and the sign):

    - "blocks", as in the proof: n heads, d' = max(n d, d + n). Head i < k attends from the sign to
      position i and writes its token into rows i d .. i d + d - 1; head k removes the residual. The
      classifier has a 1 for every token of the label's sequence: margin >= 1.
    - "compact" [derived]: k heads, d' = d + n + C. Head p writes what the token at its position
      adds to every label, so any linear map of the (position, token) indicators is a classifier.

    Corrected: d counts the response sign; d' is max(n d, d + n), not max(k d, d + k).

    Raises:
        InfoFlowError: for an unknown form.
    """
    stored, _ = task.all_sequences()
    # each label has a table of places and tokens, which a linear readout sums
    if form == "compact":
        table = torch.zeros(task.n_labels, task.length, task.d_vocab)
        labels = torch.arange(task.n_labels)
        for position in range(task.length):
            table[labels, position, stored[:, position]] = 1
        return linear_readout(table)
    d, n = task.d_vocab, task.n_tokens
    rows = Rows(d, n, padding=max(n * d, d + n) - d - n)
    # a head for each place copies its token to the last position, into dimensions of its own
    last = rows.units([rows.last_position])
    heads = [
        Head(
            key=rows.units([rows.positions[i]]),
            query=last,
            read=rows.units(rows.tokens),
            write=n * rows.units(range(i * d, (i + 1) * d)),
        )
        for i in range(n - 1)
    ]
    # one head more takes the position's own content off again
    places, used = rows.units(rows.positions), rows.units(range(d + n))
    heads.append(Head(key=places, query=places, read=used, write=-n * used))
    classifier = torch.zeros(task.n_labels, rows.d_model)
    for i in range(n - 1):
        classifier[torch.arange(task.n_labels), i * d + stored[:, i]] = 1
    return AttentionOnly(rows, (tuple(heads),), classifier)


def linear_readout(table: Float[Tensor, "label pos d_vocab"]) -> AttentionOnly:
    """A layer whose logits are a sum over positions of a function of the token there.

    The compact form of Theorem 1, and the sufficient half of the one-layer certificate: logit c of
    a sequence is ``sum_p table[c, p, x(p)]``, p over all positions but the last.

    Args:
        table: what every token adds to every label at every position but the last.
    """
    n_labels, k, d = table.shape
    rows = Rows(d, k + 1, padding=n_labels)
    last = rows.units([rows.last_position])
    heads = []
    for position in range(k):
        # a head has the rank of what it reads: the table stands on the side of the longer axis
        if d <= n_labels:
            read, write = rows.units(rows.tokens), table.new_zeros(rows.d_model, d)
            # times k, as a layer averages over its heads
            write[rows.rest] = k * table[:, position]
        else:
            read = table.new_zeros(rows.d_model, n_labels)
            read[rows.tokens] = table[:, position].T
            write = k * rows.units(rows.rest)
        heads.append(Head(rows.units([rows.positions[position]]), last, read, write))
    return AttentionOnly(rows, (tuple(heads),), rows.units(rows.rest).T)
