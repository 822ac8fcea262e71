"""D-retrieval: the target that needs D heads in one layer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.foundation.settings import Count, Positions
from infoflow_lens.tasks.target import Outer, OuterName, RetrievalTask
from infoflow_lens.tasks.task import check_positions
from infoflow_lens.theory.comparison import (
    ComparisonProfile,
    Component,
    components_profile,
    d_retrieval_profile,
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
