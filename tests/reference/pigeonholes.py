"""Theorems 1 to 3 in numbers, and pairs that a given model confuses: pigeonholes that run.

`kth_largest_collision` (Theorem 2) is in :mod:`infoflow_lens.studies.bounds`.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.studies.bounds import (
    Collision,
    attention_average,
    find_cube,
)
from infoflow_lens.studies.comparison_trees import ComparisonTree, Leaf, postorder
from infoflow_lens.theory.comparison import component_tuples

Function = Callable[[Tensor], Tensor]

_MOST_BALLS = 2000

_MOST_SEQUENCES = 10**6


def ball_centres(n_balls: int) -> Float[Tensor, "ball 3"]:
    """Points b_j of a half-sphere, far from one another and from one another's antipodes.

    A Fibonacci lattice [chosen]. The balls of Theorem 1's proof lie around their antipodes.
    """
    number = torch.arange(n_balls, dtype=torch.float64)
    height = (number + 0.5) / n_balls
    angle = number * math.pi * (3 - math.sqrt(5))
    flat = (1 - height**2).sqrt()
    return torch.stack([flat * angle.cos(), flat * angle.sin(), height], dim=1)


@lru_cache(maxsize=64)
def largest_radius(n_heads: int) -> float:
    """The largest L for which :func:`ball_centres` serve the proof of Theorem 1 with h heads.

    The h + 1 balls B(-b_j, L) must be disjoint, ``|b_i - b_j| > 2 L``, and no token of one may be
    within L of the antipode of a token of another, ``|b_i + b_j| > 3 L``: otherwise the closest
    pair would not be the one that the proof means [derived].

    Raises:
        InfoFlowError: for more than 2000 heads.
    """
    if n_heads > _MOST_BALLS:
        raise InfoFlowError(f"n_heads is {n_heads}: expected at most {_MOST_BALLS} balls to place")
    centres = ball_centres(n_heads + 1)
    apart = torch.pdist(centres).min() / 2
    antipodes = torch.cdist(centres, -centres).min() / 3
    return float(torch.minimum(apart, antipodes)) * (1 - 1e-9)


def closest_pair_collision(
    heads: Sequence[tuple[Function, Function]], n_tokens: int, eps: float
) -> Collision:
    """Two sequences that one layer confuses though their closest pairs differ (Thm 1).

    The proof's construction: h + 1 balls on the sphere, of which h heads have their largest weights
    in h at most; in the free one, N = T - h - 1 tokens lie at radii from N ordered grids with
    spacing 4 eps of the squared distance. Of all such sequences two share a cube of the heads' sums
    over these tokens. Where they agree, a token that is closest to nothing is put. Then
    ``min ||x(s) + x(t)||^2`` differs by 4 eps or more, while every head's average differs by at
    most ``2 N eta`` [derived from the proof].

    Args:
        heads: for each head its score, from tokens [..., 3] to scores [...], for the constant query
            of CLS and without positions; and its value, from tokens to [..., n] in [-1, 1].
        n_tokens: T, at least h + 2.
        eps: precision; it must leave at least two grid points a token, and few enough sequences to
            list (a million).

    Raises:
        InfoFlowError: for too few tokens, an eps that does not, or values outside [-1, 1].
    """
    n_heads = len(heads)
    free = n_tokens - n_heads - 1
    if n_heads < 1 or free < 1:
        raise InfoFlowError(
            f"{n_heads} heads and T = {n_tokens}: expected at least one head, and T of at least "
            "h + 2"
        )
    radius, centres = largest_radius(n_heads), ball_centres(n_heads + 1)
    points = math.floor(radius**2 / (4 * free * eps))
    if points < 2 or points**free > _MOST_SEQUENCES:
        raise InfoFlowError(
            f"eps is {eps}: {points} radii for each of {free} tokens; expected at least 2, and at "
            "most a million sequences; choose another eps"
        )
    squared = 4 * eps * torch.arange(1, free * points + 1, dtype=torch.float64)
    grids = torch.stack([_near_antipode(centre, squared) for centre in centres])
    strongest = [int(score(grids.flatten(0, 1)).argmax()) for score, _ in heads]
    ball = min(set(range(n_heads + 1)) - {index // (free * points) for index in strongest})
    y = grids.flatten(0, 1)[strongest]
    z = grids[ball].view(free, points, 3)
    choices = torch.tensor(list(itertools.product(range(points), repeat=free)))
    sums = []
    for (score, value), top in zip(heads, y, strict=True):
        weight = (score(z) - score(top)).exp()
        values = value(z)
        if not bool((values.abs() <= 1 + 1e-9).all()):
            raise InfoFlowError(
                f"values reach {float(values.abs().max()):.3g}: expected entries in [-1, 1]; scale "
                "them, which scales the bound alike"
            )
        per_token = torch.cat([weight.unsqueeze(-1) * values, weight.unsqueeze(-1)], dim=-1)
        picked = per_token[torch.arange(free), choices]
        sums.append(picked.mean(dim=1))
    side, pair = find_cube(torch.cat(sums, dim=1), len(choices))
    if pair is None:
        raise InfoFlowError(f"no two of {len(choices)} sequences share a cube; choose another eps")
    first, second = choices[list(pair)]
    filler = centres[ball]
    places = torch.arange(free)
    sequences = []
    for chosen in (first, second):
        tokens = torch.where((first != second)[:, None], z[places, chosen], filler)
        sequences.append(torch.cat([y, filler[None], tokens]))
    both = torch.stack(sequences)
    values_of = [closest_pair(x) for x in both]
    outputs = [attention_average(both, score, value) for score, value in heads]
    n = outputs[0].shape[-1]
    bound = 2 * free * side
    return Collision(
        first=both[0],
        second=both[1],
        gap=abs(values_of[0] - values_of[1]),
        distance=max(float((o[0] - o[1]).abs().max()) for o in outputs),
        distance_bound=bound,
        forced_width=2 * eps / (n * n_heads * bound),
    )


def _near_antipode(
    centre: Float[Tensor, "3"], squared: Float[Tensor, " point"]
) -> Float[Tensor, "point 3"]:
    """Points z of the sphere with ``||z + centre||^2`` as given, along one great circle."""
    axis = torch.eye(3, dtype=torch.float64)[int(centre.abs().argmin())]
    across = torch.linalg.cross(centre, axis)
    across = across / across.norm()
    cosine = 1 - squared / 2
    sine = (1 - cosine**2).sqrt()
    return -cosine[:, None] * centre + sine[:, None] * across


def closest_pair(x: Float[Tensor, "pos d_token"]) -> float:
    """``min_{s,t} ||x(s) + x(t)||^2`` (eq 8)."""
    return float((x[:, None] + x).square().sum(dim=-1).min())


@dataclass(frozen=True)
class EncodingCollision:
    """Two inputs whose codes nearly agree.

    Attributes:
        first, second: the inputs [coordinate].
        gap: their largest difference in a coordinate, at least 4 eps.
        distance: the largest difference of their codes.
        distance_bound: the side of the cube that they share.
        forced_width: hidden units of weight at most 1 that a decoder of error eps needs.
    """

    first: Float[Tensor, " coordinate"]
    second: Float[Tensor, " coordinate"]
    gap: float
    distance: float
    distance_bound: float
    forced_width: float


def encoding_collision(encoder: Function, n_coordinates: int, eps: float) -> EncodingCollision:
    """Two inputs that an encoder into few numbers confuses (Thm 3, lower half) [derived].

    A grid with spacing 4 eps in [0, 1]^(r d) has about (1 / 4 eps)^(r d) points; their codes lie in
    [-1, 1]^E, so two of them share a cube of side about (4 eps)^(r d / E). A decoder with error eps
    must tell them apart, 2 eps or more in some coordinate, which takes
    ``2 eps / (E side)`` units with weights of at most 1 (Lemma 4 of Yu et al.).

    Args:
        encoder: from inputs [batch, n_coordinates] to codes [batch, E] in [-1, 1].
        n_coordinates: r d.
        eps: precision; the grid must have at most a million points.

    Raises:
        InfoFlowError: for a grid too large or of one point, codes outside the box, or more numbers
            than coordinates, where nothing need collide.
    """
    points = math.floor(1 / (4 * eps)) + 1
    if points < 2 or points**n_coordinates > _MOST_SEQUENCES:
        raise InfoFlowError(
            f"eps is {eps}: a grid of {points}^{n_coordinates} points; expected at least 2 a "
            "coordinate and at most a million; choose another eps"
        )
    axis = 4 * eps * torch.arange(points, dtype=torch.float64)
    grid = torch.cartesian_prod(*[axis] * n_coordinates).view(-1, n_coordinates)
    codes = encoder(grid).double()
    if not bool((codes.abs() <= 1 + 1e-9).all()):
        raise InfoFlowError(
            f"codes reach {float(codes.abs().max()):.3g}: expected [-1, 1]; the theorem needs a "
            "fixed box"
        )
    side, pair = find_cube(codes, len(grid))
    if pair is None:
        raise InfoFlowError(
            f"no two of {len(grid)} codes share a cube: expected fewer latents than coordinates"
        )
    first, second = grid[pair[0]], grid[pair[1]]
    return EncodingCollision(
        first=first,
        second=second,
        gap=float((first - second).abs().max()),
        distance=float((codes[pair[0]] - codes[pair[1]]).abs().max()),
        distance_bound=side,
        forced_width=2 * eps / (codes.shape[1] * side),
    )


def uncovered_input(
    task: Any, trees: Sequence[ComparisonTree], n: int = 50, seed: int = 0
) -> Float[Tensor, "pos d_token"] | None:
    """An input whose active tokens the trees do not find: why no leaf can be missing (App. D).

    The tokens are independent, so a sequence stays one when its tokens change places: the tokens
    that matter are moved to a tuple that no leaf holds. If the trees have all tuples, sampled
    sequences are tried as they are.

    Args:
        task: a target of independent tokens, with components of rank 1.
        trees: of comparison, over its T.
        n: sampled sequences.
        seed: of the samples.

    Returns:
        The input, or None if the trees cover the active index set of all that were tried.
    """
    leaves = {
        node.positions for tree in trees for node in postorder(tree.root) if isinstance(node, Leaf)
    }
    held = {frozenset(leaf) for leaf in leaves}
    x, _ = task.sample(n, seed)
    tried = [x]
    for component in task.components:
        missing = [
            tuple(row)
            for row in component_tuples(task.n_tokens, component).tolist()
            if frozenset(row) not in held and len(set(row)) == len(row)
        ]
        active = task.active_index_set(x)
        for row, goal in zip(range(n), itertools.cycle(missing or [()]), strict=False):
            members = active[row].nonzero()[:, 0].tolist()
            if goal and len(members) >= len(goal):
                tried.append(_moved(x[row], members[: len(goal)], goal)[None])
    for part in tried:
        winners = [tree.evaluate(part)[0] for tree in trees]
        found = torch.zeros(part.shape[:2], dtype=torch.bool)
        for winner in winners:
            found.scatter_(1, winner, True)
        lost = (task.active_index_set(part) & ~found).any(dim=1)
        if lost.any():
            return part[int(lost.nonzero()[0])]
    return None


def _moved(
    x: Float[Tensor, "pos d_token"], members: Sequence[int], goal: Sequence[int]
) -> Float[Tensor, "pos d_token"]:
    """The same tokens, those at `members` standing at `goal`."""
    rest = iter([p for p in range(len(x)) if p not in members])
    places = dict(zip(goal, members, strict=True))
    return x[[places[p] if p in places else next(rest) for p in range(len(x))]]
