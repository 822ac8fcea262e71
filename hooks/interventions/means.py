"""Mean patterns and mean outputs of heads, a result of their own: made once, saved, used again."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from infoflow_lens.hooks.interventions.edits import split_heads
from infoflow_lens.hooks.passes.view import Pass
from infoflow_lens.hooks.probe import Probe
from infoflow_lens.hooks.result import Result
from infoflow_lens.hooks.states import summed


@dataclass(frozen=True, eq=False, kw_only=True)
class MeanPatterns(Result):
    """What heads do on the average of some sequences, position by position.

    Attributes:
        patterns: for every layer float64 [head, query, key], the mean pattern of each query, over
            the sequences that have it.
        outputs: for every layer float64 [pos, head, d_head], the mean of z, as the patterns.
        n: float64 [query], over how many sequences.
    """

    patterns: tuple[Float[Tensor, "_head query key"], ...]
    outputs: tuple[Float[Tensor, "query _head _d_head"], ...]
    n: Float[Tensor, " query"]

    @property
    def n_pos(self) -> int:
        """The length of the longest sequence."""
        return len(self.n)

    @property
    def sink(self) -> tuple[Float[Tensor, " _head"], ...]:
        """The mean weight of each head on position 0, over the queries behind it."""
        weight = self.n[1:] / self.n[1:].sum().clamp(min=1)
        return tuple(pattern[:, 1:, 0] @ weight for pattern in self.patterns)


class MeanPatternsProbe(Probe[MeanPatterns]):
    """The mean pattern and the mean z of every head, by position.

    They take the place of a head's own where its mechanism is asked for
    (:class:`~infoflow_lens.hooks.HeadIdeals`). Give other sequences than those that are judged by
    them, none shorter than the longest of these.
    """

    reads = ("pattern", "head")
    patterns, outputs, n = summed(), summed(), summed()

    def update(self, seen: Pass) -> Mapping[str, Any]:
        """Sum over the sequences of a pass; padding counts nowhere."""
        patterns, outputs = [], []
        real = seen.is_real(seen.pattern(0).shape[2])
        for layer in range(seen.n_layers):
            pattern = seen.pattern(layer).double()
            weight = real.to(pattern)
            patterns.append(torch.einsum("bhqk,bq->hqk", pattern, weight))
            z = split_heads(seen.state(layer, "head"), pattern.shape[1]).double()
            z = z[:, : real.shape[1]].masked_fill(~real[:, :, None, None].to(z.device), 0)
            outputs.append(z.sum(dim=0))
        return {"patterns": patterns, "outputs": outputs, "n": real.double().sum(dim=0)}

    def compute(self) -> MeanPatterns:
        """Divide the sums."""
        n = self.n.clamp(min=1)
        return self.filled(
            MeanPatterns,
            patterns=tuple((sums / n[:, None].to(sums.device)).cpu() for sums in self.patterns),
            outputs=tuple((sums / n[:, None, None].to(sums.device)).cpu() for sums in self.outputs),
            n=self.n,
        )
