"""Targets of the other two mechanisms: fixed positions (III), and all positions (II)."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from infoflow_lens.foundation.settings import Positions
from infoflow_lens.tasks.task import VectorTask, check_positions


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
