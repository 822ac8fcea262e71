"""Mean patterns and mean outputs of heads, a result of their own: made once, saved, used again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.hooks.interventions.edits import split_heads
from infoflow_lens.hooks.passes.view import Needs, Pass
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

    @classmethod
    def from_patterns(
        cls,
        patterns: Sequence[Float[Tensor, "_head query key"]],
        n: Float[Tensor, " query"],
        record: RunRecord,
    ) -> "MeanPatterns":
        """Make it of patterns alone, where no output of a head is asked for."""
        outputs = tuple(torch.empty(len(n), len(mean), 0) for mean in patterns)
        return cls(patterns=tuple(patterns), outputs=outputs, n=n, record=record)

    @property
    def n_pos(self) -> int:
        """The length of the longest sequence."""
        return len(self.n)

    def mean_outputs(self) -> tuple[Float[Tensor, "_head _d_head"], ...]:
        """Compute the mean z of each head over all positions of all sequences."""
        # position means count by how many sequences they are of, which makes it the mean over all
        weight = self.n / self.n.sum().clamp(min=1)
        return tuple(torch.einsum("qhd,q->hd", output, weight) for output in self.outputs)

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

    Args:
        what: "patterns", "outputs" or "both"; what is not asked for has a last axis of length 0.
    """

    reads = ("pattern",)
    patterns, outputs, n = summed(), summed(), summed()

    what: Literal["both", "patterns", "outputs"] = "both"

    def needs(self, model: nn.Module) -> Needs:
        """Read patterns, and z where it is asked for."""
        states = [] if self.what == "patterns" else ["head"]
        return Needs.of(model, pattern=True, states=states)

    def update(self, seen: Pass) -> Mapping[str, Any]:
        """Sum over the sequences of a pass; padding counts nowhere."""
        patterns, outputs = [], []
        real = seen.is_real(seen.pattern(0).shape[2])
        for layer in range(seen.n_layers):
            pattern = seen.pattern(layer)
            n_heads, n_query = pattern.shape[1:3]
            if self.what == "outputs":
                patterns.append(torch.zeros(n_heads, n_query, 0, dtype=torch.float64))
            else:
                weight = real.to(pattern.device, torch.float64)
                patterns.append(torch.einsum("bhqk,bq->hqk", pattern.double(), weight))
            if self.what == "patterns":
                outputs.append(torch.zeros(n_query, n_heads, 0, dtype=torch.float64))
            else:
                z = split_heads(seen.state(layer, "head"), n_heads).double()[:, :n_query]
                outputs.append(z.masked_fill(~real[:, :, None, None].to(z.device), 0).sum(dim=0))
        return {"patterns": patterns, "outputs": outputs, "n": real.double().sum(dim=0)}

    def compute(self) -> MeanPatterns:
        """Divide the sums."""
        n = self.n.clamp(min=1)
        return self.make_result(
            MeanPatterns,
            patterns=tuple((sums / n[:, None].to(sums.device)).cpu() for sums in self.patterns),
            outputs=tuple((sums / n[:, None, None].to(sums.device)).cpu() for sums in self.outputs),
            n=self.n,
        )
