"""Targets over single tokens: the largest, the k-th largest, fixed positions, all positions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.foundation.settings import Count, Positions
from infoflow_lens.tasks.task import (
    Outer,
    OuterName,
    RetrievalTask,
    TokenDistribution,
    VectorTask,
    check_positions,
)
from infoflow_lens.theory.comparison import (
    ComparisonProfile,
    Component,
    components_profile,
    d_retrieval_profile,
    kth_largest_profile,
)

Extremum = Literal["max", "min"]


@dataclass(frozen=True, kw_only=True)
class DRetrieval(RetrievalTask):
    """Generalized D-retrieval: F(X) = F0(ext_{t in S_1} a_1.x(t), ..., ext_{t in S_D} a_D.x(t)).

    Each component retrieves the token that is largest (or smallest) along a fixed unit direction
    a_i, anywhere or among a subset S_i of the positions; an outer function F0 joins the
    D values. With "max", "sum" and no subsets this is y = sum_i max_t a_i.x(t), the target of Yu
    et al. 2026 (arXiv 2510.06662, Sec. 5) and of InfoFlow's recovery experiments (Yu, Jiang, Bao,
    Li 2026, App. C.1). Order and dimension of comparison are 1.

    Attributes:
        n_components: D, the number of retrieved values.
        directions: how the unit vectors a_i are drawn: "random", independently; "orthonormal",
            at right angles (D <= d), so that no two components look for nearly the same token.
        extremum: "max" or "min", for all components or one each.
        outer: F0, "sum", "product", "square_sum", "identity" (a vector of D outputs), or a
            differentiable function from [batch, D] to [batch, d_output].
        subsets: S_i, for every component the positions that it looks at; None for all.

    Raises:
        InfoFlowError: for D below 1, more orthonormal directions than dimensions, tuples that
            have not D entries, an unknown extremum or outer function, or subsets that are empty
            or leave the sequence.
    """

    name: ClassVar[str] = "d_retrieval"
    source: ClassVar[str] = "Yu et al. 2026, arXiv 2510.06662, Sec. 5; InfoFlow 2026, App. C.1"

    n_components: Count = 4
    directions: Literal["random", "orthonormal"] = "random"
    extremum: Extremum | tuple[Extremum, ...] = "max"
    outer: OuterName | Outer = "sum"
    subsets: tuple[Positions, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.directions == "orthonormal" and self.n_components > self.d_token:
            raise InfoFlowError(
                f"n_components is {self.n_components}, but tokens have dimension {self.d_token}: "
                "at most that many directions are orthonormal; raise d_token, or take random ones"
            )
        for name in ("extremum", "subsets"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != self.n_components:
                raise InfoFlowError(
                    f"{name} has {len(value)} entries for {self.n_components} components: give "
                    "one for each, or leave it out"
                )
        if self.subsets is not None:
            subsets = [check_positions(s, self.n_tokens, "a subset") for s in self.subsets]
            object.__setattr__(self, "subsets", tuple(subsets))

    @property
    def extrema(self) -> tuple[Extremum, ...]:
        """ "max" or "min" for every component."""
        each = self.extremum
        return each if isinstance(each, tuple) else (each,) * self.n_components

    @property
    def signs(self) -> tuple[float, ...]:
        """A sign for every component: 1 if it retrieves the largest token, -1 if the smallest."""
        return tuple(1.0 if extremum == "max" else -1.0 for extremum in self.extrema)

    @property
    def vectors(self) -> Float[Tensor, "component d_token"]:
        """a_1 .. a_D, the unit vectors, drawn from the task's seed."""
        generator = torch.Generator().manual_seed(derive_seed("directions", self.seed))
        shape = self.n_components, self.d_token
        # the same numbers in each default dtype
        gaussian = torch.randn(shape, generator=generator, dtype=torch.float32)
        gaussian = gaussian.to(torch.get_default_dtype())
        if self.directions == "orthonormal":
            return torch.linalg.qr(gaussian.T).Q.T.contiguous()
        return gaussian / gaussian.norm(dim=-1, keepdim=True)

    @property
    def components(self) -> tuple[Component, ...]:
        """A component for each direction: the token that is largest, or smallest, along it."""

        def along(vector: Tensor) -> Callable[[Tensor], Tensor]:
            return lambda x: x[..., 0, :] @ vector.to(x)

        subsets = self.subsets or (None,) * self.n_components
        return tuple(
            Component(1, along(vector), symmetric=True, extremum=extremum, positions=subset)
            for vector, extremum, subset in zip(self.vectors, self.extrema, subsets, strict=True)
        )

    @property
    def comparison(self) -> ComparisonProfile | None:
        """Between D(T - D) and D(T - 1) comparisons of single tokens; for subsets, of their sizes.

        Among numbers (d = 1) directions are equal or opposite, so that fewer than D can matter.
        """
        if self.subsets is not None:
            return components_profile(self.name, self.components)
        # the smallest along a is the largest along -a: components count by signed direction
        signed = self.vectors * torch.tensor(self.signs)[:, None]
        return d_retrieval_profile(self.n_components, len(signed.unique(dim=0)))

    def target(self, x: Float[Tensor, "batch pos d_token"]) -> Float[Tensor, "batch d_output"]:
        """Return F(X), differentiable in `x`; outside ties its gradient is the active index set."""
        self.check_input(x)
        signs = torch.tensor(self.signs).to(x)
        # [batch, pos, component], negated where the smallest is sought, and back at the end
        scores = x @ self.vectors.to(x).T * signs
        if self.subsets is not None:
            outside = torch.ones(self.n_tokens, self.n_components, dtype=torch.bool)
            for component, subset in enumerate(self.subsets):
                outside[list(subset), component] = False
            scores = scores.masked_fill(outside.to(x.device), -torch.inf)
        return self.outer_function(scores.amax(dim=1) * signs)


def _number(x: Float[Tensor, "*batch arity d"]) -> Float[Tensor, "*batch"]:
    return x[..., 0, 0]


@dataclass(frozen=True, kw_only=True)
class KthLargest(RetrievalTask):
    """F(X) = x_(k), the k-th largest of T numbers in [0, 1] (InfoFlow 2026, Theorem 2).

    For k >= 2, encoder and decoder around one attention layer need eps^-((T-k+1)/(n+1) - 1)
    parameters. It is the largest over k-subsets of their smallest number, so its dimension of
    comparison is at most k, and by the same argument from below T - k + 1 [derived].

    Attributes:
        k: the rank, 1 for the largest number.

    Raises:
        InfoFlowError: for tokens that are no numbers (d_token other than 1), or k outside 1 .. T.
    """

    name: ClassVar[str] = "kth_largest"
    source: ClassVar[str] = "InfoFlow 2026, Theorem 2 (Sec. 4.1)"

    d_token: Count = 1
    tokens: TokenDistribution = "unit"
    k: Count = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.d_token != 1:
            raise InfoFlowError(
                f"d_token is {self.d_token}: the k-th largest is one of numbers; expected 1"
            )
        if self.k > self.n_tokens:
            raise InfoFlowError(
                f"k is {self.k} for {self.n_tokens} tokens: expected 1 to {self.n_tokens}"
            )

    @property
    def components(self) -> tuple[Component, ...]:
        """The k-th largest number."""
        return (Component(arity=1, score=_number, symmetric=True, rank=self.k),)

    @property
    def comparison(self) -> ComparisonProfile:
        """Between ceil(T/m) - 1 and C(T, m) - 1 comparisons of m-tuples, m = min(k, T - k + 1)."""
        return kth_largest_profile(min(self.k, self.n_tokens - self.k + 1))


@dataclass(frozen=True, kw_only=True)
class PositionSum(VectorTask):
    """F(X) = x(1) + x(2) + x(3), the sum of the tokens at fixed positions (InfoFlow 2026, eq 57).

    The target of mechanism III: one head with positional encoding aggregates fixed positions,
    whatever their tokens are (App. C.3). It compares nothing.

    Attributes:
        positions: the positions that are summed, counted from 0; the paper's are (0, 1, 2).

    Raises:
        InfoFlowError: for positions that are none of the sequence's, repeat, or are missing.
    """

    name: ClassVar[str] = "position_sum"
    source: ClassVar[str] = "InfoFlow 2026, App. C.3, eq 57"

    positions: Positions = (0, 1, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        chosen = check_positions(self.positions, self.n_tokens)
        object.__setattr__(self, "positions", chosen)

    @property
    def reads(self) -> tuple[int, ...]:
        """The positions that are summed."""
        return self.positions

    @property
    def d_output(self) -> int:
        """Dimension of the sum, that of a token."""
        return self.d_token

    def target(self, x: Float[Tensor, "batch pos d_token"]) -> Float[Tensor, "batch d_output"]:
        """Return the sum of the tokens at the positions."""
        self.check_input(x)
        return x[:, list(self.positions)].sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class GlobalMean(VectorTask):
    """F(X) = (x(1) + ... + x(T)) / T, which depends on every token [target chosen].

    The target of mechanism II: one head aggregates all tokens (InfoFlow 2026, Sec. 4.2). Its
    active index set is all positions; it compares nothing.
    """

    name: ClassVar[str] = "global_mean"
    source: ClassVar[str] = "InfoFlow 2026, Sec. 4.2, mechanism II [target chosen]"

    @property
    def reads(self) -> range:
        """The positions that the mean depends on: all of them."""
        return range(self.n_tokens)

    @property
    def d_output(self) -> int:
        """Dimension of the mean, that of a token."""
        return self.d_token

    def target(self, x: Float[Tensor, "batch pos d_token"]) -> Float[Tensor, "batch d_output"]:
        """Return the mean of all tokens."""
        self.check_input(x)
        return x.mean(dim=1)
