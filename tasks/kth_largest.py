"""The k-th largest of T numbers: what one attention layer cannot single out."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import Count
from infoflow_lens.tasks.target import RetrievalTask
from infoflow_lens.tasks.task import TokenDistribution
from infoflow_lens.theory.comparison import (
    ComparisonProfile,
    Component,
    kth_largest_profile,
)


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
