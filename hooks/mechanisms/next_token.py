"""Results that tell by how much the next-token loss of an edited model rises."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from infoflow_lens.hooks.result import Result


@dataclass(frozen=True, eq=False, kw_only=True)
class NextTokenResult(Result):
    """The base of results that tell by how much an edited model's loss rises.

    Attributes:
        bare: float [sequence], summed next-token loss of the model as it is, in nats.
        n_tokens: int [sequence], predictions that count.
    """

    makes_small_table: ClassVar[bool] = True

    bare: Float[Tensor, " sequence"]
    n_tokens: Int[Tensor, " sequence"]

    @property
    def loss(self) -> float:
        """Compute the loss of the model as it is, in nats a token."""
        return float(self.bare.sum() / self.n_tokens.sum())
