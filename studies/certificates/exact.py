"""Linear algebra in exact integers, for what no rounding may decide."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import lapack

from infoflow_lens.foundation.packages import import_optional

_PRIME = 2**61 - 1


def exact_arithmetic() -> Any:
    """Import python-flint, on which exact integers rest.

    Raises:
        InfoFlowError: if it is not installed.
    """
    return import_optional("flint", "certificates", "exact linear algebra in integers")


def integer_kernel(matrix: Any, guess: NDArray[np.float64], positive: bool) -> list[int] | None:
    """Return integers v near a multiple of `guess` with ``matrix v = 0`` exactly, or None.

    The unknowns that a pivoted Cholesky factorisation finds dependent keep their guess, in
    integers; the others follow from the normal equations, solved in rationals.

    Args:
        matrix: scipy-sparse integers [equation, unknown].
        guess: [unknown], none 0.
        positive: whether all of v must be positive.
    """
    matrix = matrix.astype(np.int64)
    gram = (matrix.T @ matrix).toarray()
    tolerance = 1e-10 * max(1.0, float(gram.max(initial=0)))
    _, order, rank, _ = lapack.dpstrf(gram.astype(np.float64), tol=tolerance)
    # LAPACK counts from 1; unknowns behind the rank depend on those before
    bound, free = order[:rank] - 1, order[rank:] - 1
    if len(free) == 0:
        return None
    # a single free unknown fixes the multiple; proportions of several must survive rounding
    scale = 1.0 if len(free) == 1 else 2.0**16
    rounded = np.rint(scale * guess[free] / np.abs(guess[free]).max()).astype(np.int64)
    solved = _solve(gram[np.ix_(bound, bound)], -(gram[np.ix_(bound, free)] @ rounded))
    if solved is None:
        return None
    numerators, denominator = solved
    # everything times the denominator of the solution, so that all are integers
    values = [0] * matrix.shape[1]
    for k, value in zip(bound.tolist(), numerators, strict=True):
        values[k] = value
    for k, value in zip(free.tolist(), rounded.tolist(), strict=True):
        values[k] = value * denominator
    divisor = math.gcd(*values)
    if divisor == 0 or (positive and min(values) <= 0):
        return None
    values = [value // divisor for value in values]
    return values if is_kernel(matrix, values) else None


def _solve(square: NDArray[np.int64], right: NDArray[np.int64]) -> tuple[list[int], int] | None:
    """Return numerators and their denominator of the solution; None if `square` is singular."""
    if len(right) == 0:
        return [], 1
    flint = exact_arithmetic()
    try:
        solution = flint.fmpz_mat(square.tolist()).solve(flint.fmpz_mat(right[:, None].tolist()))
    except ZeroDivisionError:
        return None
    numerators, denominator = solution.numer_denom()
    return [int(value) for value in numerators.entries()], int(denominator)


def is_kernel(matrix: Any, values: Sequence[int]) -> bool:
    """Say whether ``matrix values = 0``, with Python integers of any size.

    Args:
        matrix: scipy-sparse integers [equation, unknown].
        values: [unknown].
    """
    coo = matrix.tocoo()
    sums = [0] * matrix.shape[0]
    for row, column, entry in zip(
        coo.row.tolist(), coo.col.tolist(), coo.data.tolist(), strict=True
    ):
        sums[row] += int(entry) * values[column]
    return not any(sums)


def independent_rows(matrix: Any) -> NDArray[np.int64]:
    """Find as many independent rows as the rank modulo a large prime, in order.

    Rows that are independent modulo a prime are independent. There could be more only if the prime
    divided all minors of that size.

    Args:
        matrix: scipy-sparse integers [row, column].
    """
    # turned, for pivots of the reduced form are independent columns
    dense = matrix.T.toarray().astype(np.int64)
    reduced, rank = exact_arithmetic().nmod_mat(*dense.shape, dense.ravel().tolist(), _PRIME).rref()
    pivots: list[int] = []
    # in the reduced form each row begins to the right of the one before
    for row in range(rank):
        column = pivots[-1] + 1 if pivots else 0
        while int(reduced[row, column]) == 0:
            column += 1
        pivots.append(column)
    return np.array(pivots, dtype=np.int64)
