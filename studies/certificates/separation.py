"""Separating labelled sequences by weights, or finding out why not: the solver of the certificate.

Both answers are integers that are checked exactly. Floating-point methods only propose.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.progress import Advance
from infoflow_lens.studies.certificates.exact import integer_kernel

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

_MOST_DESCENT = 2 * 10**7  # feature times class: L-BFGS keeps about 15 copies
_MOST_AT_ONCE = 2**22
_MOST_PAIRS = 20_000  # the first working set


@dataclass(frozen=True)
class Sequences:
    """Sequences by their features, the pairs (position, token) that occur before the last position.

    The last position is left out: its indicator is constant, so it is the sum of any other's.

    Attributes:
        tokens: [sequence, pos].
        columns: the feature of every position but the last, [sequence, pos - 1].
        features: (position, token) of every feature, [feature, 2].
    """

    tokens: Integers
    columns: Integers
    features: Integers

    def phi(self) -> Any:
        """Return the indicators, sparse [sequence, feature]."""
        n, width = self.columns.shape
        return sparse.csr_matrix(
            (np.ones(n * width), self.columns.ravel(), np.arange(n + 1) * width),
            shape=(n, len(self.features)),
        )


@dataclass(frozen=True)
class Problem:
    """Sequences with labels as indices of classes, [sequence] in 0 .. n_classes - 1."""

    sequences: Sequences
    y: Integers
    n_classes: int

    def __len__(self) -> int:
        return len(self.y)

    def restrict(self, classes: Integers) -> tuple["Problem", Integers]:
        """Return the problem of some classes alone, and which sequences it keeps."""
        position = np.full(self.n_classes, -1)
        position[classes] = np.arange(len(classes))
        kept = np.flatnonzero(position[self.y] >= 0)
        # features anew, as those of other sequences alone would be columns of zeros
        part = Problem(
            add_features(self.sequences.tokens[kept]), position[self.y[kept]], len(classes)
        )
        return part, kept


def add_features(tokens: Integers) -> Sequences:
    """Return the sequences of tokens [sequence, pos] with their features."""
    n, width = tokens.shape
    columns = np.zeros((n, width - 1), dtype=np.int64)
    # sequences of one token have no feature, and this shape all the same
    features = [np.zeros((0, 2), dtype=np.int64)]
    start = 0
    for position in range(width - 1):
        values, index = np.unique(tokens[:, position], return_inverse=True)
        columns[:, position] = start + index.reshape(-1)
        features.append(np.stack([np.full(len(values), position), values], axis=1))
        start += len(values)
    return Sequences(tokens, columns, np.concatenate(features))


def is_witness(problem: Problem, entries: Sequence[tuple[int, int, int]]) -> bool:
    """Check Gordan's conditions, with Python integers."""
    row_sums: dict[int, int] = {}
    features: dict[tuple[int, int], int] = {}
    for row, column, value in entries:
        if value * (1 if problem.y[row] == column else -1) < 0:
            return False
        row_sums[row] = row_sums.get(row, 0) + value
        # -1 stands for the last position, whose token is the same for all
        for feature in (*problem.sequences.columns[row].tolist(), -1):
            features[feature, column] = features.get((feature, column), 0) + value
    nonzero = any(value for _, _, value in entries)
    return nonzero and not any(row_sums.values()) and not any(features.values())


def chunks(n: int, width: int) -> Iterator[slice]:
    """Split `n` rows of `width` numbers into parts that fit into memory."""
    size = max(1, _MOST_AT_ONCE // max(1, width))
    return (slice(start, min(n, start + size)) for start in range(0, n, size))


def _gaps(problem: Problem, weights: NDArray[Any]) -> Iterator[tuple[slice, NDArray[Any]]]:
    """Yield own score minus each class's, by parts of the sequences; 0 for the own class."""
    columns = problem.sequences.columns
    for part in chunks(len(problem), problem.n_classes):
        scores = np.zeros((part.stop - part.start, problem.n_classes), dtype=weights.dtype)
        for feature in columns[part].T:
            scores += weights[feature]
        own = scores[np.arange(len(scores)), problem.y[part]]
        yield part, own[:, None] - scores


def exact_margin(problem: Problem, weights: Integers) -> int:
    """Return the least margin of integer weights; for at least two classes."""
    largest = max(int(np.max(weights, initial=0)), -int(np.min(weights, initial=0)))
    # a gap is the difference of two sums over positions
    if 2 * largest * problem.sequences.tokens.shape[1] >= 2**62:
        raise InfoFlowError(
            f"weights of up to {largest} overflow 64-bit integers: the set is separable only with "
            "larger weights than can be checked here; take fewer sequences"
        )
    least = 2**62
    for part, gaps in _gaps(problem, weights):
        # the gap of the own class is 0 and no margin
        gaps[np.arange(len(gaps)), problem.y[part]] = least
        least = min(least, int(gaps.min()))
    return least


def _prototypes(problem: Problem) -> Integers:
    """Return the sum of phi over each class. Right at once if each class is one sequence."""
    n = len(problem)
    labels = sparse.csr_matrix(
        (np.ones(n), (np.arange(n), problem.y)), shape=(n, problem.n_classes)
    )
    return (problem.sequences.phi().T @ labels).astype(np.int64).toarray()


def _round(problem: Problem, weights: Floats) -> Integers | None:
    """Find integer weights with margin of at least 1 that follow `weights`; None if not found."""
    least = min(
        (float(np.where(_others(problem, part), gaps, np.inf).min()))
        for part, gaps in _gaps(problem, weights)
    )
    largest = float(np.abs(weights).max(initial=0))
    # weights that fail clearly fail after rounding, too
    if least < -1e-6 * largest or largest == 0:
        return None
    # near 0 rounding is tried all the same: what is right is decided on the integers
    scale = 1 / least if least > 1e-12 else 1.0
    width = problem.sequences.tokens.shape[1]
    # the model multiplies by the number of heads in float64, which must stay exact
    while largest * scale * width**2 < 2**52:
        integers = np.rint(weights * scale).astype(np.int64)
        if exact_margin(problem, integers) >= 1:
            return integers
        # larger integers follow the weights more closely; without a margin in longer steps
        scale *= 2 if least > 1e-12 else 2**8
    return None


def _others(problem: Problem, part: slice) -> NDArray[np.bool_]:
    return np.arange(problem.n_classes) != problem.y[part][:, None]


def _descend(problem: Problem, iterations: int = 300) -> tuple[Floats, Floats]:
    """Minimise ``sum max(0, 1 - gap)^2`` over pairs (sequence, other class).

    The least value is 0 iff the set is separable. Else it is attained, and the gradient says that
    the hinges are multipliers of a witness, so pairs with a positive hinge hold one [derived].

    Returns:
        Weights [feature, class] and hinges [sequence, class].
    """
    from scipy.optimize import minimize

    phi = problem.sequences.phi()
    transposed = phi.T.tocsr()
    shape = (phi.shape[1], problem.n_classes)
    own = (np.arange(len(problem)), problem.y)

    def hinges(weights: Floats) -> Floats:
        scores = phi @ weights
        hinge = 1 - scores[own][:, None] + scores
        # a class has no gap to itself
        hinge[own] = 0
        result: Floats = np.maximum(hinge, 0, out=hinge)
        return result

    def loss(flat: Floats) -> tuple[float, Floats]:
        hinge = hinges(flat.reshape(shape))
        value = float(np.vdot(hinge, hinge)) / 2
        # the own class's score enters the gap to every other class
        hinge[own] = -hinge.sum(axis=1)
        return value, (transposed @ hinge).ravel()

    options = {"maxiter": iterations, "maxfun": 2 * iterations, "maxcor": 5, "ftol": 0.0}
    found = minimize(
        loss, np.zeros(math.prod(shape)), jac=True, method="L-BFGS-B", options=options | {"gtol": 0}
    )
    weights: Floats = found.x.reshape(shape)
    return weights, hinges(weights)


@dataclass(frozen=True)
class Multipliers:
    """A witness as nonnegative multipliers of pairs (sequence, other class)."""

    rows: Integers
    columns: Integers
    values: list[int]


def _pair_matrix(problem: Problem, rows: Integers, columns: Integers) -> tuple[Any, Integers]:
    """Return rows (e_y - e_c) x phi of pairs, sparse [pair, variable], and their variables.

    A variable is feature * n_classes + class.
    """
    features = problem.sequences.columns[rows]
    n_classes, width = problem.n_classes, features.shape[1]
    own = features * n_classes + problem.y[rows][:, None]
    other = features * n_classes + columns[:, None]
    # only variables of these pairs: most features occur in few of them
    variables, index = np.unique(np.concatenate([own, other], axis=1), return_inverse=True)
    values = np.tile(np.repeat([1, -1], width), len(rows))
    starts = np.arange(len(rows) + 1) * 2 * width
    shape = (len(rows), len(variables))
    return sparse.csr_matrix((values, index.reshape(-1), starts), shape=shape), variables


def _solve_pairs(problem: Problem, rows: Integers, columns: Integers) -> tuple[bool, Any]:
    """Separate the pairs, or find multipliers: ``min s`` with ``gap >= 1 - s`` and s >= 0.

    The least s is 0 if the pairs are separable and else 1: nothing lies between, since weights can
    be scaled. So no small number decides [derived].

    Returns:
        True and weights [feature, class], or False and the dual solution [pair].
    """
    from scipy.optimize import linprog

    matrix, variables = _pair_matrix(problem, rows, columns)
    n = len(variables)
    # one slack for all pairs: at 0 all are separated, and multipliers show why not
    constraints = sparse.hstack([-matrix, -np.ones((len(rows), 1))]).tocsr()
    cost = np.zeros(n + 1)
    cost[-1] = len(rows)  # multipliers of about 1, well above the solver's tolerances
    bounds = np.full((n + 1, 2), (-np.inf, np.inf))
    bounds[-1, 0] = 0
    found = linprog(
        cost,
        constraints,
        -np.ones(len(rows)),
        bounds=bounds,
        method="highs-ds",
        options={"primal_feasibility_tolerance": 1e-9, "dual_feasibility_tolerance": 1e-9},
    )
    if found.x is None:
        raise InfoFlowError(
            f"the linear program of {len(rows)} pairs and {n} weights was not solved "
            f"({found.message}): take fewer sequences"
        )
    # the slack is 1 if no weights separate, and 0 if some do
    if found.x[-1] > 0.5:
        return False, np.maximum(-found.ineqlin.marginals, 0)
    weights = np.zeros(len(problem.sequences.features) * problem.n_classes)
    weights[variables] = found.x[:-1]
    return True, weights.reshape(-1, problem.n_classes)


def _exact_multipliers(
    problem: Problem, rows: Integers, columns: Integers, guess: Floats
) -> Multipliers | None:
    """Return checked integer multipliers on the support of a dual solution, or None."""
    # numbers near 0 may be noise of the solver, so several cuts are tried
    for threshold in (1e-9, 1e-7, 1e-5, 1e-3):
        kept = np.flatnonzero(guess > threshold * np.max(guess, initial=0))
        if len(kept) == 0:
            continue
        matrix, _ = _pair_matrix(problem, rows[kept], columns[kept])
        values = integer_kernel(matrix.T.tocsc(), guess[kept], positive=True)
        if values is not None:
            return Multipliers(rows[kept], columns[kept], values)
    return None


def _sparser(problem: Problem, found: Multipliers, rows: Integers, columns: Integers) -> Any:
    """Return a witness with fewer pairs, if least sums with one pair at 1 give one [chosen]."""
    from scipy.optimize import linprog

    if len(found.values) > 64 or len(rows) > 5000:
        return found
    matrix, _ = _pair_matrix(problem, rows, columns)
    equations = matrix.T.tocsr()
    known = set(zip(found.rows.tolist(), found.columns.tolist()))
    inside = [k for k, pair in enumerate(zip(rows.tolist(), columns.tolist())) if pair in known]
    # some pairs of the witness, spread over it, each as the one that stays
    for pair in inside[:: max(1, len(inside) // 8)]:
        bounds = np.full((len(rows), 2), (0, np.inf))
        # at least 1 for one pair, since all zeros would have the least sum
        bounds[pair, 0] = 1
        least = linprog(
            np.ones(len(rows)),
            A_eq=equations,
            b_eq=np.zeros(equations.shape[0]),
            bounds=bounds,
            method="highs-ds",
        )
        if least.x is None or (least.x > 1e-9).sum() >= len(found.values):
            continue
        smaller = _exact_multipliers(problem, rows, columns, least.x)
        if smaller is not None and len(smaller.values) < len(found.values):
            found = smaller
    return found


def _class_order(problem: Problem, hinge: Floats) -> Integers:
    """Order classes: the most confused pair, then always the one most confused with those taken."""
    n = problem.n_classes
    chosen_by = sparse.csr_matrix(
        (np.ones(len(problem)), (problem.y, np.arange(len(problem)))), shape=(n, len(problem))
    )
    mass = chosen_by @ hinge
    # hinges of one class against another, in both directions
    mass = mass + mass.T
    first = int(mass.max(axis=1).argmax())
    order, is_chosen = [first], np.zeros(n, dtype=bool)
    is_chosen[first] = True
    reach = mass[first].copy()
    while len(order) < n:
        following = int(np.argmax(np.where(is_chosen, -1.0, reach)))
        # of the classes that are left, the one that is most confused with those taken
        order.append(following)
        is_chosen[following] = True
        reach += mass[following]
    return np.array(order)


def _largest_pairs(problem: Problem, hinge: Floats, most: int) -> tuple[Integers, Integers]:
    """Select the pairs of largest positive hinge; all pairs if they are few."""
    if len(problem) * (problem.n_classes - 1) <= most:
        rows, columns = np.nonzero(_others(problem, slice(None)))
        return rows, columns
    rows, columns = np.nonzero(hinge)
    if len(rows) > most:
        best = np.argsort(-hinge[rows, columns], kind="stable")[:most]
        rows, columns = rows[best], columns[best]
    return rows, columns


def _subset_witness(problem: Problem, hinge: Floats, advance: Advance) -> Multipliers | None:
    """Return a witness on 2, 4, 8, ... of the classes: smaller, and found sooner, than on all."""
    order = _class_order(problem, hinge)
    size = 2
    while size < problem.n_classes:
        advance(0, f"{size} of {problem.n_classes} classes")
        classes = np.sort(order[:size])
        # a witness on some classes is one on all, with multipliers of 0 elsewhere
        part, kept = problem.restrict(classes)
        size *= 2
        weights, hinges = _descend(part)
        if _round(part, weights) is not None:
            continue
        # descent has not separated them: a linear program on the pairs that it left decides
        rows, columns = _largest_pairs(part, hinges, _MOST_PAIRS)
        separable, dual = _solve_pairs(part, rows, columns)
        if separable:
            continue
        found = _exact_multipliers(part, rows, columns, dual)
        if found is not None:
            found = _sparser(part, found, rows, columns)
            return Multipliers(kept[found.rows], classes[found.columns], found.values)
    return None


def _cutting_planes(
    problem: Problem, hinge: Floats | None, weights: Floats, advance: Advance
) -> Integers | Multipliers:
    """Decide by linear programs on a growing set of pairs.

    Raises:
        InfoFlowError: if neither answer could be checked in integers.
    """
    chosen = np.zeros((len(problem), problem.n_classes), dtype=bool)
    if hinge is not None:
        chosen[_largest_pairs(problem, hinge, _MOST_PAIRS)] = True
    while True:
        _add_worst(problem, weights, chosen)
        rows, columns = np.nonzero(chosen)
        advance(0, f"{len(rows)} pairs")
        separable, answer = _solve_pairs(problem, rows, columns)
        # pairs that cannot be separated exclude all; weights must still be right on every pair
        if not separable:
            found = _exact_multipliers(problem, rows, columns, answer)
            if found is not None:
                result: Multipliers = _sparser(problem, found, rows, columns)
                return result
        else:
            weights = answer
            integers = _round(problem, weights)
            if integers is not None:
                return integers
            if _add_worst(problem, weights, chosen):
                continue
        raise InfoFlowError(
            f"{len(problem)} sequences of {problem.n_classes} classes were not decided: the linear "
            f"program says that {len(rows)} pairs are {'' if separable else 'not '}separable, but "
            "no integers that prove it were found; take fewer sequences"
        )


def _add_worst(problem: Problem, weights: Floats, chosen: NDArray[np.bool_]) -> int:
    """Add the three most violated pairs of every sequence (gap below 1/2); return how many."""
    before = int(chosen.sum())
    most = min(3, problem.n_classes - 1)
    for part, gaps in _gaps(problem, weights):
        gaps[np.arange(len(gaps)), problem.y[part]] = np.inf
        # the own class has an infinite gap, so that it is never chosen
        worst = np.argpartition(gaps, most - 1, axis=1)[:, :most]
        violated = np.take_along_axis(gaps, worst, axis=1) < 0.5
        rows = np.repeat(np.arange(part.start, part.stop), most)[violated.ravel()]
        chosen[rows, worst[violated]] = True
    return int(chosen.sum()) - before


def _duplicates(problem: Problem) -> Multipliers | None:
    """Return a sequence that occurs with two labels: its own witness."""
    _, index = np.unique(problem.sequences.tokens, axis=0, return_inverse=True)
    seen: dict[int, int] = {}
    for i, group in enumerate(index.reshape(-1).tolist()):
        j = seen.setdefault(group, i)
        if problem.y[i] != problem.y[j]:
            # each takes from the other's class what that one adds, so that all cancels
            return Multipliers(np.array([j, i]), problem.y[[i, j]], [1, 1])
    return None


def decide(problem: Problem, advance: Advance) -> Integers | Multipliers:
    """Return integer weights that separate, or multipliers of a witness."""
    if problem.n_classes == 1:
        return np.zeros((len(problem.sequences.features), 1), dtype=np.int64)
    if (double := _duplicates(problem)) is not None:
        return double
    # the cheapest answer first: sums over classes, descent, a witness on few classes
    prototypes = _prototypes(problem)
    if exact_margin(problem, prototypes) >= 1:
        return prototypes
    advance(0, "descent")
    if prototypes.size > _MOST_DESCENT:
        return _cutting_planes(problem, None, prototypes.astype(np.float64), advance)
    del prototypes
    weights, hinge = _descend(problem)
    if (integers := _round(problem, weights)) is not None:
        return integers
    if (found := _subset_witness(problem, hinge, advance)) is not None:
        return found
    return _cutting_planes(problem, hinge, weights, advance)
