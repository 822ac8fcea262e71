"""D-retrieval: the target that needs D heads in one layer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.seeds import derived_seed
from infoflow_lens.tasks.target import OUTER, Outer, RetrievalTask, check_outer
from infoflow_lens.tasks.task import check_count, check_positions
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

    n_components: int = 4
    directions: Literal["random", "orthonormal"] = "random"
    extremum: Extremum | tuple[Extremum, ...] = "max"
    outer: str | Outer = "sum"
    subsets: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self.n_components, "n_components")
        if self.directions not in ("random", "orthonormal"):
            raise InfoFlowError(
                f"directions is {self.directions!r}: expected 'random' or 'orthonormal'"
            )
        if self.directions == "orthonormal" and self.n_components > self.d_token:
            raise InfoFlowError(
                f"n_components is {self.n_components}, but tokens have dimension {self.d_token}: "
                "at most that many directions are orthonormal; raise d_token, or take random ones"
            )
        extremum: Any = self.extremum
        if not isinstance(extremum, (str, tuple, list)):
            raise InfoFlowError(f"extremum is {extremum!r}: expected 'max', 'min', or one each")
        if not isinstance(extremum, str):
            object.__setattr__(self, "extremum", tuple(extremum))
        for entry in self._extrema():
            if entry not in ("max", "min"):
                raise InfoFlowError(f"extremum {entry!r}: expected 'max' or 'min'")
        check_outer(self.outer)
        if self.subsets is not None:
            object.__setattr__(self, "subsets", self._checked_subsets())

    def _extrema(self) -> tuple[str, ...]:
        if isinstance(self.extremum, str):
            return (self.extremum,) * self.n_components
        if len(self.extremum) != self.n_components:
            raise InfoFlowError(
                f"extremum has {len(self.extremum)} entries for {self.n_components} components: "
                "give one for each, or one for all"
            )
        return self.extremum

    def _checked_subsets(self) -> tuple[tuple[int, ...], ...]:
        subsets: Any = self.subsets
        if not isinstance(subsets, (tuple, list)) or len(subsets) != self.n_components:
            n = f"{len(subsets)} entries" if isinstance(subsets, (tuple, list)) else repr(subsets)
            raise InfoFlowError(
                f"subsets has {n} for {self.n_components} components: "
                "give the positions of every component, or None"
            )
        return tuple(check_positions(subset, self.n_tokens, "a subset") for subset in subsets)

    @property
    def signs(self) -> tuple[float, ...]:
        """For every component 1 if it retrieves the largest, -1 if the smallest."""
        return tuple(1.0 if extremum == "max" else -1.0 for extremum in self._extrema())

    @property
    def outer_function(self) -> Outer:
        """F0 as a function from [batch, D] to [batch, d_output]."""
        return self.outer if callable(self.outer) else OUTER[self.outer]

    @property
    def vectors(self) -> Float[Tensor, "component d_token"]:
        """a_1 .. a_D, the unit vectors, drawn from the task's seed."""
        generator = torch.Generator().manual_seed(derived_seed("directions", self.seed))
        gaussian = torch.randn(self.n_components, self.d_token, generator=generator)
        if self.directions == "orthonormal":
            return torch.linalg.qr(gaussian.T).Q.T.contiguous()
        return gaussian / gaussian.norm(dim=-1, keepdim=True)

    @property
    def components(self) -> tuple[Component, ...]:
        """One token for each direction, largest or smallest along it."""

        def along(vector: Tensor) -> Callable[[Tensor], Tensor]:
            return lambda x: x[..., 0, :] @ vector.to(x)

        return tuple(
            Component(
                arity=1,
                score=along(sign * vector),
                symmetric=True,
                positions=self.subsets[i] if self.subsets is not None else None,
            )
            for i, (vector, sign) in enumerate(zip(self.vectors, self.signs, strict=True))
        )

    @property
    def comparison(self) -> ComparisonProfile | None:
        """Between D(T - D) and D(T - 1) comparisons of single tokens; for subsets, of their sizes.

        Among numbers (d = 1) directions are equal or opposite, so that fewer than D can matter.
        """
        if self.subsets is not None:
            return components_profile(self.name, self.components)
        signed = self.vectors * torch.tensor(self.signs)[:, None]
        return d_retrieval_profile(self.n_components, len(signed.unique(dim=0)))

    def _signed_scores(
        self, x: Float[Tensor, "batch pos d_token"]
    ) -> tuple[Float[Tensor, "batch pos component"], Float[Tensor, " component"]]:
        """Scores whose maximum is each component's extremum, -inf outside the subsets."""
        sign = torch.tensor(self.signs).to(x)
        scores = x @ self.vectors.to(x).T * sign
        if self.subsets is not None:
            outside = torch.ones(self.n_tokens, self.n_components, dtype=torch.bool)
            for component, subset in enumerate(self.subsets):
                outside[list(subset), component] = False
            scores = scores.masked_fill(outside.to(x.device), -torch.inf)
        return scores, sign

    def target(self, x: Float[Tensor, "batch pos d_token"]) -> Float[Tensor, "batch d_output"]:
        """F(X), differentiable in `x`; outside ties its gradient is the active index set."""
        self.check_input(x)
        scores, sign = self._signed_scores(x)
        return self.outer_function(scores.amax(dim=1) * sign)

    def active_index_set(self, x: Float[Tensor, "batch pos d_token"]) -> Bool[Tensor, "batch pos"]:
        """The positions where a component is attained, if F0 depends on that component there.

        Ties go to the lowest position; they have probability zero. Two components may share a
        position, so the set can have fewer than D members: the paper's |I_F| = D holds with
        positive probability only.
        """
        self.check_input(x)
        scores, sign = self._signed_scores(x.detach())
        best, where = scores.max(dim=1)
        values = (best * sign).requires_grad_(True)
        with torch.enable_grad():
            output = self.outer_function(values)
            matters = torch.stack(
                [
                    torch.autograd.grad(output[:, i].sum(), values, retain_graph=True)[0] != 0
                    for i in range(output.shape[-1])
                ]
            ).any(dim=0)
        active = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device)
        return active.scatter_add_(1, where, matters.to(torch.int64)) > 0
