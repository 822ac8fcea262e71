"""The theorems' exponents: how many parameters a shallow model needs, eps^-k.

Each bound says where it holds; outside it is *vacuous*, and its exponent is 0 with the reason,
never negative. Constants are not given by the theorems; finite forms are [derived] and say so.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from jaxtyping import Float
from scipy.special import lambertw
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import Count, Positive, Remedy, checked
from infoflow_lens.theory.comparison import least, root_ceiling
from infoflow_lens.theory.cost import Precision


@dataclass(frozen=True)
class Bound:
    """A lower bound Omega(eps^-exponent) on the number of parameters.

    Attributes:
        exponent: k; 0 where the bound is vacuous.
        vacuous: whether it says nothing here.
        reason: in words, what it counts or why it says nothing.
        source: theorem and mark.
    """

    exponent: float
    vacuous: bool
    reason: str
    source: str


def _bound(exponent: float, reason: str, source: str) -> Bound:
    if exponent > 0:
        return Bound(exponent, False, reason, source)
    why = f"the bound is vacuous here: its exponent would be {exponent:.3g}; {reason}"
    return Bound(0.0, True, why, source)


@checked
def depth_separation_bound(
    n_tokens: Count, n_heads: Count, d_head: Count, sharp: bool = False
) -> Bound:
    """Bound one layer on min_{s,t} ||x(s) + x(t)||^2 (Thm 1/4): the exponent is linear in T.

    ``k = (T - h - 1) / ((n + 1) h + 1) - 1``, or with `sharp` ``(T - h - 1) / ((n + 1) h) - 1``,
    what the counting of free positions and constraints gives [derived from the proof; the paper
    never prints the number]. Two layers of one head need O(1/eps).

    Args:
        n_tokens: T.
        n_heads: h.
        d_head: n, per-head dimension.
        sharp: without the slack that makes the count a strict inequality.
    """
    free = n_tokens - n_heads - 1
    constraints = (d_head + 1) * n_heads + (0 if sharp else 1)
    return _bound(
        free / constraints - 1,
        f"{max(free, 0)} free positions against {constraints} constraints",
        "Theorem 1 (4), single layer [derived]",
    )


@checked
def kth_largest_bound(n_tokens: Count, k: Count, d_head: Count, increasing: bool = True) -> Bound:
    """Bound one softmax head on the k-th largest of T scalars, k >= 2 (Thm 2/5).

    The theorem is of heads whose score does not decrease with the scalar, of any values in R^n, and
    of weights of at most 1: ``(T - k + 1) / (n + 1) - 1`` [derived; confirmed numerically]. It
    grows with T at fixed k and falls with k. [flag: the paper's "growing exponentially in" lost its
    variable; it is T, not k.] A score that does not increase sees ``1 - x``, of which the k-th
    largest is the (T - k + 1)-th: ``k / (n + 1) - 1`` [derived]. Nothing is proved of other scores.

    Args:
        n_tokens: T.
        k: which value.
        d_head: n, per-head dimension.
        increasing: whether the head's score does not decrease with the scalar; False for one that
            does not increase.

    Raises:
        InfoFlowError: for the value at the top of the score's order, which attention does retrieve
            (k = 1, or k = T where the score decreases), or k outside 1 to T.
    """
    place = k if increasing else n_tokens - k + 1  # in the order of the score
    if not 2 <= place <= n_tokens:
        low, high = (2, n_tokens) if increasing else (1, n_tokens - 1)
        raise InfoFlowError(
            f"k is {k} of T = {n_tokens} values: expected {low} to {high} for scores that "
            f"{'increase' if increasing else 'decrease'}; the theorem needs k >= 2 in the order of "
            "the score (the proof divides by the k - 1 coordinates that it fixes), and the first "
            "is retrieved at no such cost"
        )
    free = n_tokens - place + 1
    return _bound(
        free / (d_head + 1) - 1,
        f"{free} free coordinates in {d_head + 1} numbers",
        f"Theorem 2 (5) [derived], for scores that do not {'de' if increasing else 'in'}crease; "
        "flag: exponential in T, not in k",
    )


@checked
def encoding_bound(n_tokens: Count, d_token: Count, d_model: Count) -> Bound:
    """Return coding r tokens of dimension d in E numbers of [-1, 1] (Thm 3/6): ``r d / E - 1``.

    [derived] for uniform error and weights of at most 1. [flag: the upper bound eps^(-rd/E) is for
    L2 error and unbounded weights, so the two halves differ in norm and weights.]
    """
    return _bound(
        n_tokens * d_token / d_model - 1,
        f"{n_tokens * d_token} coordinates in {d_model} numbers",
        "Theorem 3 (6) [derived]; flag: needs codes in a fixed box; norms and weights differ from "
        "the upper bound's",
    )


@checked
def growing_information(
    coefficient: Positive,
    order: Annotated[int, Ge(3), Remedy("Prop 2 needs it; at 2 attention is enough")],
    dimension: Count,
    n_heads: Count,
    n_layers: Count,
    n_tokens: Count,
    trees: Count = 1,
) -> float:
    """Return the least |I| for a target of C T^order comparisons, order >= 3 (Prop 2).

    [flag] That order counts fixed trees of comparison, and layers compare what earlier ones have
    chosen: a chain of three places has order 3, and heads (2, 1) do it with |I| = 3
    (`best_tree`). So this is no bound for scores whose graph is a tree; of the triangle's see
    :func:`triangle_limit`.

    ``(C / (4 L K))^(1 / dimension) T^((order - 1) / dimension)`` for ``T^(order - 2) >= 4 L h / C``
    [derived]. At order 2 the h T^2 of attention absorbs the count.

    Args:
        coefficient: C.
        order: beta'.
        dimension: beta_1.
        n_heads: h, the most heads of a layer.
        n_layers: L.
        n_tokens: T.
        trees: K.

    Returns:
        The bound; 0 where T is too small for it.

    Raises:
        InfoFlowError: for an order below 3, or values below 1.
    """
    if n_tokens ** (order - 2) < 4 * n_layers * n_heads / coefficient:
        return 0.0
    scale = (coefficient / (4 * n_layers * trees)) ** (1 / dimension)
    return float(scale * n_tokens ** ((order - 1) / dimension))


@checked
def triangle_limit(first: Count, second: Count) -> int:
    """Return the least T from which on two layers of heads cannot learn the triangle centre.

    Of ``min |x + y + z|^2`` and max-position retrieval by any analytic scores, roles and positions
    [proved, beyond the paper; for more layers it is open]. With I the most that CLS can hold, plant
    m = floor(I / 3) + 1 triples with small sums of equal length among n = (T - 3 m) / 3 tokens of
    each of three laws like theirs. Given one token of a triple another one is like a token of its
    law, up to a ratio of densities of 2 on average, so that a head picks it with probability
    2 / n. So CLS holds a planted token after layer 1, or some token holds two of one triple, with
    probability at most ``m (18 h_1 + 6 h_1 (h_1 - 1) T / n) / n``. Where this is below 1, there are
    such inputs in which neither does, and then no choice of layer 2 sees a triple: all choices stay
    near almost every such tie, and yet each of the m triples is the best close to it, 3 m > I
    tokens.

    Returns:
        T, such as 441 for (2, 1).
    """
    # each head of layer 2 gives CLS a token with its h_1 choices,
    # each head of layer 1 a token alone
    held = second * (1 + first) + first
    m = held // 3 + 1

    def excludes(n: int) -> bool:
        n_tokens = 3 * (n + m)
        return m * (18 * first + 6 * first * (first - 1) * n_tokens / n) < n

    return 3 * (least(excludes, 1) + m)


# What a softmax costs in place of a minimum


@checked
def softmin_gap(n_items: Count, beta: Positive) -> float:
    """Bound a softmin average less the minimum: it is at most ``W0((n - 1) / e) / beta`` [derived].

    For weights proportional to exp(-beta a_s) over n items, ``0 <= sum p_s a_s - min a`` is at most
    that, with equality where all other items have the same gap; W0 is Lambert's function. It
    grows like ln(n) / beta, and beta costs no parameters.

    Raises:
        InfoFlowError: for n below 1 or beta <= 0.
    """
    if n_items.bit_length() < 1000:
        return float(lambertw((n_items - 1) / math.e).real) / beta
    logarithm = math.log(n_items - 1) - 1  # w + ln w, where (n - 1) / e is no float any more
    w = logarithm
    for _ in range(50):
        # Newton's step for w + ln w = ln((n - 1) / e)
        w -= (w + math.log(w) - logarithm) / (1 + 1 / w)
    return w / beta


def depth_separation_error(n_tokens: int, beta: float, ffn_error: float = 0.0) -> float:
    """Return the largest error of the two-layer construction of Theorem 1 [derived].

    ``18 (2 W0((T - 1)/e) / beta + eps_FFN)``: one softmin in each layer, and the error of the
    product between them. [flag] Eq (40) as printed compares a(t) with the minimum in its second
    term; it must be with x(t).v(t).

    Args:
        n_tokens: T.
        beta: factor on the scores of both layers.
        ffn_error: largest error of the FFN's product.
    """
    return 18 * (2 * softmin_gap(n_tokens, beta) + ffn_error)


# Theorem 2 by construction: two sequences that one head cannot tell apart


@dataclass(frozen=True)
class Collision:
    """Two sequences with different k-th largest values whose attention outputs nearly agree.

    Attributes:
        first, second: the sequences [T].
        gap: difference of their k-th largest values.
        distance: largest difference of their attention outputs.
        distance_bound: 2 N eta / (k - 1), what the proof allows.
        forced_width: hidden units that a decoder with weights of at most 1 needs: 2 eps over n
            times the distance bound.
    """

    first: Float[Tensor, " pos"]
    second: Float[Tensor, " pos"]
    gap: float
    distance: float
    distance_bound: float
    forced_width: float


def attention_average(
    x: Float[Tensor, "*batch pos"],
    score: Callable[[Tensor], Tensor],
    value: Callable[[Tensor], Tensor],
) -> Float[Tensor, "*batch d_head"]:
    """Return softmax attention of a fixed query over scalar tokens (eq 44)."""
    weights = torch.softmax(score(x), dim=-1)
    return (weights.unsqueeze(-1) * value(x)).sum(dim=-2)


@checked
def kth_largest_collision(
    score: Callable[[Tensor], Tensor],
    value: Callable[[Tensor], Tensor],
    n_tokens: Count,
    k: Count,
    eps: Precision,
) -> Collision:
    """Return the pair of sequences on which Theorem 2's proof rests, found by its pigeonhole.

    k - 1 coordinates stay at 1; the others run over ordered grids with spacing 4 eps. All grid
    sequences fall into cubes of (n + 1) weighted averages; two in one cube differ in the k-th
    largest value by 4 eps or more once their common coordinates are set to 0. That the averages lie
    in these cubes is what a score that does not decrease and values in [-1, 1] are needed for.

    Args:
        score: lambda, non-decreasing, from scalars [...] to scores [...].
        value: phi, from scalars [...] to values [..., n] in [-1, 1].
        n_tokens: T.
        k: which value, 2 <= k <= T.
        eps: precision; it must leave at least two grid points a coordinate, and few enough
            sequences to list (a million).

    Raises:
        InfoFlowError: if eps does not, no two sequences share a cube, the score was seen to
            decrease, or values lie outside [-1, 1].
    """
    bound = kth_largest_bound(n_tokens, k, value(torch.zeros(1)).shape[-1])
    n = value(torch.zeros(1)).shape[-1]
    free = n_tokens - k + 1
    # the proof's grid: so many points on each free coordinate that two sequences must share a cube
    points = math.floor(1 / (4 * (free + 1) * eps))
    if points < 2 or points**free > 10**6:
        raise InfoFlowError(
            f"eps is {eps}: {points} grid points on {free} coordinates; expected at least 2 points "
            "and at most a million sequences; choose another eps"
        )
    # the grid of a coordinate begins above that of the one before, which keeps the order
    grids = [
        [4 * eps * (1 + coordinate * points + step) for step in range(points)]
        for coordinate in range(free)
    ]
    _check_head(score, value, sorted({0.0, 1.0, *itertools.chain(*grids)}))
    z = torch.tensor(list(itertools.product(*grids)), dtype=torch.float64)
    # over the weight of the coordinates at 1, so that none is above 1
    weights = (score(z) - score(torch.ones(1, dtype=z.dtype))).exp()
    # [sequence, n + 1]: the weighted values and the weights, of which the output is made
    averages = torch.cat(
        [(weights.unsqueeze(-1) * value(z)).mean(dim=1), weights.mean(dim=1, keepdim=True)], dim=1
    )
    side, pair = find_cube(averages, len(z))
    if pair is None:
        raise InfoFlowError(f"no two of {len(z)} sequences share a cube ({bound.reason})")
    sequences = torch.ones(2, n_tokens, dtype=z.dtype)
    differ = z[pair[0]] != z[pair[1]]
    # where the two agree they may as well be 0, which changes no gap
    sequences[:, k - 1 :] = torch.where(differ, z[list(pair)], 0.0)
    outputs = attention_average(sequences, score, value)
    # k - 1 coordinates are 1, so the k-th largest number is the largest of the others
    kth = sequences.sort(dim=1, descending=True).values[:, k - 1]
    distance_bound = 2 * free * side / (k - 1)
    return Collision(
        first=sequences[0],
        second=sequences[1],
        gap=float((kth[0] - kth[1]).abs()),
        distance=float((outputs[0] - outputs[1]).abs().max()),
        distance_bound=distance_bound,
        forced_width=2 * eps / (n * distance_bound),
    )


def _check_head(
    score: Callable[[Tensor], Tensor], value: Callable[[Tensor], Tensor], at: Sequence[float]
) -> None:
    """Refuse a head of which Theorem 2 does not speak, as seen at some scalars in order."""
    x = torch.tensor(at, dtype=torch.float64)
    steps = score(x).diff()
    down = int(steps.argmin())
    if float(steps[down]) < -1e-9:
        raise InfoFlowError(
            f"score falls by {-float(steps[down]):.3g} from x = {at[down]:.3g} to "
            f"{at[down + 1]:.3g}: expected one that does not decrease, as Theorem 2 assumes; for "
            "one that does not increase give score and value of 1 - x, and T - k + 1 in the place "
            "of k"
        )
    largest = float(value(x).abs().max())
    if largest > 1 + 1e-9:
        raise InfoFlowError(
            f"value reaches {largest:.3g} in size: expected values in [-1, 1]; divide by that"
        )


def cells_of(sequences: int, dimensions: int) -> int:
    """Return the most cells an axis can have so that all cells are fewer than the sequences."""
    return max(1, root_ceiling(sequences, dimensions) - 1)


def find_cube(
    numbers: Float[Tensor, "sequence number"], n_sequences: int
) -> tuple[float, tuple[int, int] | None]:
    """Find the side with fewer cubes of [-1, 1]^k than sequences, and two that share a cube."""
    n_cells = cells_of(n_sequences, numbers.shape[1])
    side = 2 / n_cells
    # 1 itself lies in the last cell
    cubes = ((numbers + 1) / side).floor().clamp(max=n_cells - 1)
    seen: dict[tuple[float, ...], int] = {}
    for index, cube in enumerate(map(tuple, cubes.tolist())):
        if cube in seen:
            return side, (seen[cube], index)
        seen[cube] = index
    return side, None
