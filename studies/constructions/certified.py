"""The model that a feasible one-layer certificate promises, hosted."""

import torch

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.models.hooked import HookedModel
from infoflow_lens.studies.certificates.separability import OneLayerCertificate
from infoflow_lens.studies.constructions.memorization import linear_readout

_MOST_WEIGHTS = 5 * 10**8


def certified_model(certificate: OneLayerCertificate) -> HookedModel:
    """A ReLU layer of n - 1 heads that gives every sequence of the set its label.

    The compact form of Theorem 1 (Chen & Zou 2024) with the certificate's weights. Logits at the
    last position are in the order of ``certificate.classes``, with its exact margin. Tokens keep
    their ids; those that no sequence has add nothing.

    Args:
        certificate: a feasible one, of at least two tokens a sequence.

    Raises:
        InfoFlowError: for an infeasible certificate, sequences of a single token, or token ids that
            would make the model too large.
    """
    if not isinstance(certificate, OneLayerCertificate):
        raise InfoFlowError(
            f"certificate is {type(certificate).__name__}: expected a OneLayerCertificate, as "
            "one_layer_certificate gives it"
        )
    if certificate.weights is None or certificate.features is None or certificate.model is None:
        raise InfoFlowError(
            "the certificate is infeasible: there is no one-layer model to build; expected a "
            "feasible one"
        )
    if certificate.n_pos < 2:
        raise InfoFlowError(
            "the sequences have a single token: expected at least one before the last to attend to"
        )
    # one row for each token up to the largest id, and units for positions and classes
    d_vocab = int(certificate.model.vocabulary.max()) + 1
    d_model = d_vocab + certificate.n_pos + len(certificate.classes)
    if d_vocab * d_model * certificate.n_pos > _MOST_WEIGHTS:
        raise InfoFlowError(
            f"token ids up to {d_vocab - 1} and {len(certificate.classes)} classes would make a "
            f"model of width {d_model}, too large to host: expected fewer or lower ids; number the "
            "tokens anew, or use the certificate's own model"
        )
    table = torch.zeros(
        len(certificate.classes), certificate.n_pos - 1, d_vocab, dtype=torch.float64
    )
    position, token = certificate.features.T
    table[:, position, token] = certificate.weights.T.double()
    return linear_readout(table).host()
