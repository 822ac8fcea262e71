"""The k-th largest of T numbers: what one attention layer cannot single out."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.tasks.task import VectorTask, check_count
from infoflow_lens.theory.comparison import (
    ComparisonProfile,
    Component,
    kth_largest_profile,
)


@dataclass(frozen=True, kw_only=True)
class KthLargest(VectorTask):
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

    d_token: int = 1
    tokens: Literal["normal", "uniform", "unit", "sphere"] = "unit"
    k: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.d_token != 1:
            raise InfoFlowError(
                f"d_token is {self.d_token}: the k-th largest is one of numbers; expected 1"
            )
        if check_count(self.k, "k") > self.n_tokens:
            raise InfoFlowError(
                f"k is {self.k} for {self.n_tokens} tokens: expected 1 to {self.n_tokens}"
            )

    @property
    def components(self) -> tuple[Component, ...]:
        """The largest or smallest number; ranks between are no best tuple of tokens."""
        signs = {1: 1.0, self.n_tokens: -1.0}
        if self.k not in signs:
            return ()
        sign = signs[self.k]
        return (Component(arity=1, score=lambda x: sign * x[..., 0, 0], symmetric=True),)

    @property
    def comparison(self) -> ComparisonProfile:
        """Between ceil(T/m) - 1 and C(T, m) - 1 comparisons of m-tuples, m = min(k, T - k + 1)."""
        return kth_largest_profile(min(self.k, self.n_tokens - self.k + 1))

    def _where(self, x: Float[Tensor, "batch pos 1"]) -> Int[Tensor, "batch 1"]:
        """The position of the k-th largest; ties go to the lowest positions."""
        order = x.detach()[..., 0].argsort(dim=1, descending=True, stable=True)
        return order[:, self.k - 1 : self.k]

    def target(self, x: Float[Tensor, "batch pos 1"]) -> Float[Tensor, "batch 1"]:
        """The k-th largest number, differentiable in `x`."""
        self.check_input(x)
        return x[..., 0].gather(1, self._where(x))

    def active_index_set(self, x: Float[Tensor, "batch pos 1"]) -> Bool[Tensor, "batch pos"]:
        """The position of the k-th largest number."""
        self.check_input(x)
        active = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        return active.scatter_(1, self._where(x), True)
