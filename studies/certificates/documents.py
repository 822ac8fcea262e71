"""One-layer certificates of named tokens and labels, as documents that anybody can check."""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.studies.certificates.separability import (
    OneLayerCertificate,
    one_layer_certificate,
)


def certificate_document(
    sequences: Sequence[Sequence[Hashable]], labels: Sequence[Hashable], *, progress: bool = False
) -> tuple[dict[str, Any], OneLayerCertificate]:
    """Decide whether one attention layer can fit all labels; return a document and an object.

    The document holds the sequences, the labels, and the model's integer weights or the witness;
    :func:`infoflow_lens.studies.certificates.proof.verify` checks it without anything else.

    Args:
        sequences: tokens, of any kind that JSON has; all of one length, with the same last token.
        labels: one a sequence.
        progress: whether to show a bar.

    Raises:
        InfoFlowError: for sequences or labels that fit no certificate.
    """
    if len(sequences) != len(labels) or not len(sequences):
        raise InfoFlowError(
            f"{len(sequences)} sequences and {len(labels)} labels: expected as many, at least one"
        )
    # tokens and classes of any kind, numbered for the solver
    tokens = _number({token for sequence in sequences for token in sequence})
    classes = _number(set(labels))
    lengths = {len(sequence) for sequence in sequences}
    if len(lengths) > 1:
        raise InfoFlowError(f"sequences have lengths {sorted(lengths)[:5]}: expected one length")
    x = np.array([[tokens[token] for token in sequence] for sequence in sequences], dtype=np.int64)
    y = np.array([classes[label] for label in labels], dtype=np.int64)
    found = one_layer_certificate((x, y), progress=progress)
    names, kinds = list(tokens), list(classes)
    document: dict[str, Any] = {
        "format": "infoflow-lens one-layer certificate 1",
        "verdict": "fits" if found.feasible else "cannot fit",
        "holds_for": found.holds_for,
        "sequences": [list(sequence) for sequence in sequences],
        "labels": list(labels),
    }
    # a document holds the user's own tokens and labels, so that it can be checked without this code
    if found.witness is not None:
        w = found.witness
        document["witness"] = [
            [row, kinds[w.classes[column]], value]
            for row, column, value in zip(w.rows, w.columns, w.values, strict=True)
        ]
    else:
        assert found.weights is not None and found.features is not None  # noqa: PT018
        document["weights"] = [
            [position, names[token], kinds[found.classes[column]], value]
            for (position, token), row in zip(
                found.features.tolist(), found.weights.tolist(), strict=True
            )
            for column, value in enumerate(row)
            if value
        ]
    return document, found


def _number(values: set[Any]) -> dict[Any, int]:
    """Number values in a fixed order, by kind and then by value."""
    return {v: i for i, v in enumerate(sorted(values, key=lambda v: (type(v).__name__, v)))}
