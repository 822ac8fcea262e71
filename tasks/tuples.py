"""Targets over tuples of tokens: the best pair, the best pair of each kind, the best triple."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial, reduce
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.foundation.settings import Count, Index, Positive
from infoflow_lens.tasks.task import RetrievalTask, Split, TokenDistribution
from infoflow_lens.theory.comparison import (
    ComparisonProfile,
    Component,
    Part,
    components_profile,
    depth_separation_profile,
    intrinsic_dimension_profile,
    sum_of_parts,
    triangle_center_profile,
)
from infoflow_lens.theory.score_graph import ScoreGraph


def _squared_norm_of_sum(x: Float[Tensor, "*batch arity d"]) -> Float[Tensor, "*batch"]:
    # tensor by tensor, which is faster than x.sum(dim=-2) over so short a dimension
    return reduce(torch.add, x.unbind(dim=-2)).square().sum(dim=-1)


@dataclass(frozen=True, kw_only=True)
class DepthSeparation(RetrievalTask):
    """F(X) = min_{s,t} ||x(s) + x(t)||^2 on the unit sphere (InfoFlow 2026, Thm 1, eq 8).

    One layer needs eps^-k parameters with k linear in T; two layers of one head need O(1/eps).
    Dimension and order of comparison are 2.
    """

    name: ClassVar[str] = "depth_separation"
    source: ClassVar[str] = "InfoFlow 2026, Theorem 1, eq 8"

    d_token: Count = 3
    tokens: TokenDistribution = "sphere"

    @property
    def components(self) -> tuple[Component, ...]:
        """The pair with the smallest sum."""
        return (Component(arity=2, score=_squared_norm_of_sum, symmetric=True, extremum="min"),)

    @property
    def comparison(self) -> ComparisonProfile:
        """Between C(T,2) - 2 and T^2 - 1 comparisons of pairs."""
        return depth_separation_profile()


MatrixKind = Literal["gaussian", "orthogonal", "rotoreflection"]


@cache
def _matrices(
    kind: MatrixKind, n: int, d: int, seed: int, n_draws: int
) -> Float[Tensor, "component d d"]:
    """Return the matrices of a target of best pairs, in float32, as they are kept."""
    generator = torch.Generator().manual_seed(derive_seed("matrices", seed))
    draws = torch.randn((n_draws, n, d, d), generator=generator, dtype=torch.float32)
    if kind == "gaussian":
        draws = draws / d**0.5
    else:
        # QR alone favours some rotations; the signs of R's diagonal undo that (Mezzadri 2007)
        q, r = torch.linalg.qr(draws)
        signs: Tensor = r.diagonal(dim1=-2, dim2=-1).sign()
        draws = q * signs[..., None, :]  # uniform over the orthogonal group
    if kind == "rotoreflection":
        # R S R^T: the same turn S in planes that are drawn at random
        draws = draws @ _rotoreflection(d).to(draws) @ draws.mT
    return draws[largest_overlap(draws).argmin()]


def _rotoreflection(d: int) -> Float[Tensor, "d d"]:
    """Turn by 90 degrees in as many planes as there are, and reflect what is left."""
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
    return torch.block_diag(*[turn] * (d // 2), *[-torch.eye(1)] * (d % 2))


def largest_overlap(matrices: Float[Tensor, "*draw component d d"]) -> Float[Tensor, "*draw"]:
    """Find the largest |cos| of a matrix with another or its transpose; 0 for a single matrix."""
    flat, transposed = (
        torch.nn.functional.normalize(m.flatten(-2), dim=-1) for m in (matrices, matrices.mT)
    )
    overlaps = torch.maximum((flat @ flat.mT).abs(), (flat @ transposed.mT).abs())
    # each pair of matrices once, and no matrix with itself
    return overlaps.triu(1).amax((-2, -1))


@dataclass(frozen=True, kw_only=True)
class IntrinsicDimension(RetrievalTask):
    """F(X) = sum_i max_{s,t} x(s)^T A_i x(t), i = 1 .. D (InfoFlow 2026, eqs 6 and 58).

    The maximum is stated, the sum over i is chosen. D first-layer heads are enough (Prop 1); the
    paper's estimate says that fewer are not. Dimension and order of comparison are 2.

    Attributes:
        n_components: D, the number of matrices A_i, drawn from the seed.
        matrix_kind: "gaussian", with entries of variance 1/d; "orthogonal", under which every token
            of a sphere reaches the same score, so that no token tells which matrix it is good for
            (`infoflow_lens.theory.routing`); or "rotoreflection", of
            these the ones that turn planes by 90 degrees, R S R^T with one S and rotations R drawn
            at random, and reflect what is left where d is odd: then all components have the same
            law, and as x^T A x <= 0 no token makes the best pair with itself [chosen].
        n_draws: the matrices are drawn so often, and the draw is taken in which the largest
            |cos(A_i, A_j)| or |cos(A_i, A_j^T)|, i < j, is least, so that no head serves two
            components by their likeness [chosen].

    Raises:
        InfoFlowError: for matrices that are not there in so few dimensions.
    """

    name: ClassVar[str] = "intrinsic_dimension"
    source: ClassVar[str] = "InfoFlow 2026, Sec. 6.1, eqs 6 and 58"

    n_components: Count = 2
    matrix_kind: MatrixKind = "gaussian"
    n_draws: Count = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.matrix_kind == "rotoreflection" and self.d_token < 3:
            raise InfoFlowError(
                f"d_token is {self.d_token} with matrix_kind 'rotoreflection': expected at least 3 "
                "dimensions; in fewer all these matrices are the same up to a sign"
            )

    @property
    def matrices(self) -> Float[Tensor, "component d_token d_token"]:
        """A_1 .. A_D."""
        n, d = self.n_components, self.d_token
        drawn = _matrices(self.matrix_kind, n, d, self.seed, self.n_draws)
        # a copy, as the drawn ones are kept for all such tasks
        return drawn.to(torch.get_default_dtype(), copy=True)

    @property
    def components(self) -> tuple[Component, ...]:
        """The best ordered pair for each matrix."""

        return tuple(Component(arity=2, score=_form(matrix)) for matrix in self.matrices)

    def retrieve(self, x: Float[Tensor, "batch pos d_token"]) -> list[Int[Tensor, "batch arity"]]:
        """Find the best pair for each matrix, by a matrix product, which is faster."""
        found = []
        for matrix in self.matrices.to(x):
            # scores [batch, s, t] as one axis, in which the pair (s, t) is s T + t
            best = (x @ matrix @ x.mT).flatten(1).argmax(dim=1)
            found.append(torch.stack([best // self.n_tokens, best % self.n_tokens], dim=1))
        return found

    @property
    def comparison(self) -> ComparisonProfile:
        """The number of comparisons: at most D(T^2 - 1), of pairs.

        Among numbers (d = 1) the best pair is one of the largest and smallest, which single tokens'
        scores find, so that the lower bound over pairs does not hold.
        """
        if self.d_token == 1:
            return components_profile(self.name, self.components)
        return intrinsic_dimension_profile(self.n_components)


def _form(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    """Return x^T A y of pairs (x, y), [..., 2, d_token]."""
    return lambda x: ((x[..., 0, :] @ matrix.to(x)) * x[..., 1, :]).sum(dim=-1)


@dataclass(frozen=True, kw_only=True)
class BestTree(RetrievalTask):
    """F(X) = max over (t_1, .., t_a) of the sum over edges (i, j) of x(t_i)^T A_ij x(t_j).

    Edges make a tree of the places, so that heads retrieve the best tuple place by place, whatever
    T is. Of the chain of three places, the default, Definition 2 of InfoFlow (2026) gives dimension
    and order 3, and yet heads (2, 1) do it with |I| = 3: a counterexample to Proposition 2 as it is
    printed, and the control of `triangle_center`, whose graph is a circle [derived; beyond the
    paper].

    Attributes:
        edges: pairs of places, from 0 on.
        matrix_kind: of the A_ij, as of `intrinsic_dimension`.

    Raises:
        InfoFlowError: for edges that make no tree.
    """

    name: ClassVar[str] = "best_tree"
    source: ClassVar[str] = "beyond the papers; a counterexample to InfoFlow 2026, Prop 2"

    d_token: Count = 3
    tokens: TokenDistribution = "sphere"
    edges: tuple[tuple[Index, Index], ...] = ((0, 1), (1, 2))
    matrix_kind: MatrixKind = "orthogonal"

    def __post_init__(self) -> None:
        super().__post_init__()
        graph = self.graph
        # a graph is a tree if it is connected and has one edge fewer than places
        n_edges = {len(self.edges), len(graph.edges)}  # which differ where an edge stands twice
        if not self.edges or len(graph.parts) > 1 or n_edges != {self.arity - 1}:
            raise InfoFlowError(
                f"edges is {self.edges}: expected those of a tree of places 0 to a - 1, such as "
                "((0, 1), (1, 2)) for a chain"
            )

    @property
    def arity(self) -> int:
        """a, the number of places."""
        return 1 + max([0, *(place for edge in self.edges for place in edge)])

    @property
    def graph(self) -> ScoreGraph:
        """The tree."""
        # a graph names each edge from the lower place to the higher
        ordered = {(min(edge), max(edge)) for edge in self.edges}
        return ScoreGraph(self.arity, frozenset(ordered))

    @property
    def matrices(self) -> Float[Tensor, "edge d_token d_token"]:
        """A_ij of every edge."""
        drawn = _matrices(self.matrix_kind, len(self.edges), self.d_token, self.seed, 1)
        # a copy, as the drawn ones are kept for all such tasks
        return drawn.to(torch.get_default_dtype(), copy=True)

    @property
    def components(self) -> tuple[Component, ...]:
        """The best tuple, with the parts of its score."""
        parts = [
            Part(edge, _form(matrix))
            for edge, matrix in zip(self.edges, self.matrices, strict=True)
        ]
        return (
            Component(
                self.arity, partial(sum_of_parts, parts, range(self.arity)), parts=tuple(parts)
            ),
        )

    @property
    def n_scores(self) -> int:
        """Scores that :meth:`retrieve` takes of a sequence."""
        return len(self.edges) * self.n_tokens**2

    def retrieve(self, x: Float[Tensor, "batch pos d_token"]) -> list[Int[Tensor, "batch arity"]]:
        """Find the best tuple, place by place, in T^2 steps an edge."""
        tables = {}
        for (i, j), matrix in zip(self.edges, self.matrices.to(x), strict=True):
            tables[i, j] = x @ matrix @ x.mT  # [batch, token at i, token at j]
            # the walk below meets an edge from either end
            tables[j, i] = tables[i, j].mT

        def add_up(place: int, parent: int | None) -> tuple[Tensor, dict[int, Tensor]]:
            """Return the best worth of the places below each token at a place, and their tokens."""
            worth, found = torch.zeros_like(x[..., 0]), dict[int, Tensor]()
            for child in self.graph.neighbours(place):
                if child == parent:
                    continue
                added, inner = add_up(child, place)
                # [batch, token here, token at the child]: for each token here the best one there
                best, found[child] = (tables[place, child] + added[:, None]).max(dim=2)
                # places further below are known by the child's token: read them at its choice
                found |= {p: at.gather(1, found[child]) for p, at in inner.items()}
                # each child chooses its best token by itself, since the graph has no circles
                worth = worth + best
            return worth, found

        worth, found = add_up(0, None)
        first = worth.argmax(dim=1, keepdim=True)
        others = [found[place].gather(1, first) for place in range(1, self.arity)]
        return [torch.cat([first, *others], dim=1)]


@dataclass(frozen=True, kw_only=True)
class TriangleCenter(RetrievalTask):
    """F(X) = min ||x(t1) + x(t2) + x(t3)||^2, norms clamped (InfoFlow 2026, eqs 7 and 59).

    Dimension and order of comparison are 3. No number of heads of two layers of max-position
    retrieval is enough for large T without growing information sets (Prop 2; proved for two
    layers by :func:`infoflow_lens.studies.bounds.triangle_limit`).

    Attributes:
        min_norm, max_norm: bounds to which the tokens' norms are clamped [values chosen].

    Raises:
        InfoFlowError: unless 0 < min_norm <= max_norm.
    """

    name: ClassVar[str] = "triangle_center"
    source: ClassVar[str] = "InfoFlow 2026, Sec. 6.2, eqs 7 and 59"

    min_norm: Positive = 0.5
    max_norm: Positive = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_norm > self.max_norm:
            raise InfoFlowError(
                f"min_norm is {self.min_norm}, max_norm {self.max_norm}: expected "
                "0 < min_norm <= max_norm"
            )

    def draw(
        self, n: int, generator: torch.Generator, split: Split | None = None
    ) -> Float[Tensor, "batch pos d_token"]:
        """Draw `n` sequences of i.i.d. tokens, their norms clamped."""
        x = super().draw(n, generator, split)
        norms = x.norm(dim=-1, keepdim=True)
        return x * norms.clamp(self.min_norm, self.max_norm) / norms

    @property
    def components(self) -> tuple[Component, ...]:
        """The triple with the smallest sum."""
        return (Component(arity=3, score=_squared_norm_of_sum, symmetric=True, extremum="min"),)

    @property
    def comparison(self) -> ComparisonProfile:
        """Between C(T,3) - 3 and T^3 - 1 comparisons of triples."""
        return triangle_center_profile()
