"""Lemmas 3 to 7 of Chen & Zou 2024, as code.

Lemmas 3 and 4 carry memorization from one-hot words to any vectors of which no two are parallel;
Lemmas 5 to 7 are why one layer fails on templates. Lemmas 1 and 2 are constructions
(``instructive_attention``, ``constrained_attention``).
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError

_PARALLEL = 1e-9


def check_not_parallel(vectors: Float[Tensor, "vector d"]) -> None:
    """Refuse vectors of which two are parallel, or one is 0.

    Raises:
        InfoFlowError: naming them.
    """
    norms = vectors.double().norm(dim=1)
    if not bool((norms > 0).all()):
        raise InfoFlowError(f"vector {int((norms == 0).nonzero()[0])} is 0: expected none")
    unit = vectors.double() / norms[:, None]
    cosines = (unit @ unit.T).abs()
    cosines.fill_diagonal_(0)
    if float(cosines.max()) > 1 - _PARALLEL:
        i, j = divmod(int(cosines.argmax()), len(vectors))
        raise InfoFlowError(
            f"vectors {min(i, j)} and {max(i, j)} are parallel: expected linearly independent pairs"
        )


def projector(vectors: Float[Tensor, "vector d"]) -> Float[Tensor, "d vector"]:
    """W with ``(x_i W)[i] > (x_i W)[j]`` for all j != i (Lemma 3).

    Its columns are the vectors over their norms: ``x_i . x_j / |x_j| < |x_i|`` unless they are
    parallel (Cauchy and Schwarz). Labels are the vectors' numbers; permute columns for others.

    Raises:
        InfoFlowError: if two vectors are parallel, or one is 0.
    """
    check_not_parallel(vectors)
    return (vectors / vectors.norm(dim=1, keepdim=True)).T


def concatenated(
    vocabulary: Float[Tensor, "word d"], sequences: Int[Tensor, "batch pos"]
) -> Float[Tensor, "batch d_model"]:
    """What one layer of n heads makes of sequences at their response sign (Lemma 4).

    Head p attends to position p (Lemma 1) and writes its word to slot p, so the last column holds
    all words one below the other; the sign's own slot is the same for all. Two of them are parallel
    only if the sequences are equal: the sign's slot makes the factor 1.

    Args:
        vocabulary: word vectors, the sign among them, of which no two are parallel.
        sequences: word numbers; all end in the sign.

    Raises:
        InfoFlowError: for parallel words, or several last words.
    """
    check_not_parallel(vocabulary)
    if len(sequences[:, -1].unique()) > 1:
        raise InfoFlowError("the sequences end in several words: expected the response sign")
    return vocabulary[sequences].flatten(1)


def occurrences(sequences: Int[Tensor, "batch pos"], n_words: int) -> Int[Tensor, "pos word"]:
    """How often each word stands at each position.

    For all substitutions of one template every word does so equally often, n / |X| (Lemma 5).
    """
    return torch.stack([column.bincount(minlength=n_words) for column in sequences.T])


def multipliers(n_first: int, n_second: int) -> tuple[int, int]:
    """lambda and lambda' of Lemma 6: how often two templates' sequences balance one another.

    The smallest positive integers with ``lambda n = lambda' n'``, by Lemma 5 [derived; the lemma
    says that there are some].
    """
    divisor = math.gcd(n_first, n_second)
    return n_second // divisor, n_first // divisor


def template_dependence(
    first: Int[Tensor, "batch pos"], second: Int[Tensor, "other pos"]
) -> tuple[Int[Tensor, "all pos"], list[int]]:
    """Sequences of two templates with coefficients for which any one-layer model's outputs cancel.

    ``sum_i lambda o_i = sum_j lambda' o'_j`` for ReLU attention of any width and number of heads
    (Lemma 7), so that their labels cannot all be right (Theorem 4).

    Args:
        first, second: all substitutions of two templates, with the response sign at the end.
    """
    a, b = multipliers(len(first), len(second))
    return torch.cat([first, second]), [a] * len(first) + [-b] * len(second)


def combine(outputs: Float[Tensor, "all d"], coefficients: Sequence[int]) -> Float[Tensor, " d"]:
    """The combination of outputs that Lemma 7 says is 0."""
    weights = torch.tensor(coefficients, dtype=torch.float64, device=outputs.device)
    return weights @ outputs.double()
