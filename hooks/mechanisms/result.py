"""What the output loses by each idealised pattern, and the mechanism of a head that follows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import mpl, pd
from infoflow_lens.foundation.settings import NonNegative, Share, checked
from infoflow_lens.hooks.interventions.patterns import SOFT, MeanPatterns
from infoflow_lens.hooks.result import LabelledArray, Result
from infoflow_lens.theory.information_sets import MovesKeys
from infoflow_lens.theory.rules import MaxPosition, Rule, SpecificPositions


@dataclass(frozen=True, eq=False, kw_only=True)
class MechanismsResult(Result):
    """What the output loses when a head's pattern is idealised.

    Attributes:
        ideals: the idealisations, cheapest first, in the order of the last axis.
        metric: "nmse", the squared change of the output over the variance of the output; "kl", the
            divergence KL(old || new) of the next-token distributions, in nats; "loss", the
            rise of the next-token loss where it rises, in nats. All are means over positions, of
            which each counts at least 0: a gain at one does not make up for a loss at another.
        threshold: the damage up to which an idealisation counts as enough.
        k: of "top_k".
        n_sequences: how many were judged.
        damage: for every layer float [head, ideal].
        error: for every layer float [head, ideal], one standard error of the damage, as these
            sequences might have been others; NaN for a single one.
        mean_patterns: for every layer the mean pattern of each head, float [head, query, key], over
            the calibration or all sequences.
    """

    small: ClassVar[bool] = True

    ideals: tuple[str, ...]
    metric: str
    threshold: float
    k: int
    n_sequences: int
    damage: tuple[Float[Tensor, "_head ideal"], ...]
    error: tuple[Float[Tensor, "_head ideal"], ...]
    mean_patterns: tuple[Float[Tensor, "_head query key"], ...]

    @property
    def sufficient(self) -> tuple[Bool[Tensor, "_head ideal"], ...]:
        """Mark the ideals that are enough: those with a damage within the threshold."""
        return tuple(damage <= self.threshold for damage in self.damage)

    @property
    def certain(self) -> tuple[Bool[Tensor, "_head ideal"], ...]:
        """Mark where the threshold lies outside of the 95% interval of the damage (Student's t)."""
        from scipy.special import stdtrit

        errors = float(stdtrit(self.n_sequences - 1, 0.975))
        return tuple(
            (damage - self.threshold).abs() > errors * error
            for damage, error in zip(self.damage, self.error, strict=True)
        )

    @checked
    def mechanisms(self, threshold: NonNegative | None = None) -> tuple[tuple[str, ...], ...]:
        """Return the mechanism of every head: the cheapest ideal within the threshold, else "soft".

        The order of cost is that of `ideals` [chosen]: what does not look at the tokens comes
        before what compares them. A head that does not matter needs its own position alone. Others
        may be enough, too: `sufficient` has all of them.
        """
        most = self.threshold if threshold is None else threshold

        def choose(row: Float[Tensor, " ideal"]) -> str:
            enough = (n for n, d in zip(self.ideals, row.tolist(), strict=True) if d <= most)
            return next(enough, SOFT)

        return tuple(tuple(map(choose, layer)) for layer in self.damage)

    def means(self) -> MeanPatterns:
        """Give the mean patterns to interventions; mean outputs of heads are not among them."""
        patterns = self.mean_patterns
        n = torch.ones(patterns[0].shape[1], dtype=torch.float64)
        outputs = tuple(torch.empty(len(n), len(mean), 0) for mean in patterns)
        return MeanPatterns(patterns=patterns, outputs=outputs, n=n, record=self.record)

    def lost(self) -> tuple[Float[Tensor, " _head"], ...]:
        """Look up what the output loses without each head; 0 for one that it does not need.

        It is the damage of "own_position", where a head brings nothing from elsewhere. A head whose
        mechanism that is does not need more.
        """
        own = self.ideals.index("own_position")
        return tuple(
            damage[:, own].clamp(min=0) * torch.tensor([n != "own_position" for n in names])
            for damage, names in zip(self.damage, self.mechanisms(), strict=True)
        )

    @checked
    def rules(
        self,
        attended: Sequence[Int[Tensor, "batch _head query key"]] | MovesKeys,
        chosen: Sequence[Int[Tensor, "batch _head query"]] | MovesKeys,
        threshold: NonNegative | None = None,
        share: Share = 0.05,
    ) -> list[list[Rule]]:
        """Update rules for `propagate`, each head by its own mechanism (Sec. 5.1).

        Args:
            attended: all keys that heads draw from, an `AttendedResult` or its positions: for heads
                that stay soft, or need several keys.
            chosen: the argmax positions, a `PositionsResult` or its argmax: for max-position heads.
            threshold: as for :meth:`mechanisms`.
            share: the least share of a row's largest mean weight that is a fixed position.

        Raises:
            InfoFlowError: if they were measured on shorter ones, whose fixed positions say nothing
                of the rest, or the two stand in the other's place.
        """
        attended = attended.moved_keys if isinstance(attended, MovesKeys) else attended
        chosen = chosen.moved_keys if isinstance(chosen, MovesKeys) else chosen
        if attended[0].ndim != 4 or chosen[0].ndim != 3:
            raise InfoFlowError(
                f"attended and chosen keys have {attended[0].ndim} and {chosen[0].ndim} axes: "
                "expected 4 and 3; give results of AttendedProbe and PositionsProbe, in this order"
            )
        layers: list[list[Rule]] = []
        n_pos = chosen[0].shape[2]
        longest = self.mean_patterns[0].shape[1]
        if n_pos > longest:
            raise InfoFlowError(
                f"mechanisms were measured on at most {longest} positions, these sequences have "
                f"{n_pos}: expected sequences at least as long; measure mechanisms on them too"
            )
        # a real query attends to something; beyond a sequence's end there is nothing to pass on
        real = (attended[0] >= 0).any(dim=3).any(dim=1)
        for layer, names in enumerate(self.mechanisms(threshold)):
            # passes nothing on: so a layer has a rule where all heads need their own position alone
            rules: list[Rule] = [MaxPosition(torch.full_like(chosen[layer][:, :1], -1))]
            for head, name in enumerate(names):
                mean = self.mean_patterns[layer][head][:n_pos, :n_pos]
                if name == "max_position":
                    rules.append(MaxPosition(chosen[layer][:, head : head + 1]))
                elif name == "specific_position":
                    # a mean of softmax rows has some weight everywhere: small ones do not count
                    least = share * mean.amax(dim=-1, keepdim=True)
                    rules.append(_make_rule_of_keys((mean >= least) & (mean > 0), real))
                elif name == "global":
                    rules.append(_make_rule_of_keys(mean > 0, real))  # every key that is allowed
                elif name != "own_position":
                    rules.append(MaxPosition(attended[layer][:, head : head + 1]))
            layers.append(rules)
        return layers

    def to_frame(self) -> "pd.DataFrame":
        """Make a row for each layer and head: its mechanism, and the damage of every ideal.

        Behind these, for every ideal, are the error of its damage (``error_global``, ...) and
        whether it is enough (``sufficient_global``, ...).
        """
        rows = []
        for layer, names in enumerate(self.mechanisms()):
            for head, name in enumerate(names):
                row = {"layer": layer, "head": head, "mechanism": name}
                for prefix in ("", "error_", "sufficient_"):
                    values = getattr(self, prefix[:-1] or "damage")[layer][head].tolist()
                    row |= {prefix + i: v for i, v in zip(self.ideals, values, strict=True)}
                rows.append(row)
        return pd.DataFrame(rows)

    def plot(self) -> "mpl.Figure":
        """Draw the damage of every head in every ideal, on a logarithmic scale."""
        heads = [f"{i}.{h}" for i, layer in enumerate(self.damage) for h in range(len(layer))]
        return LabelledArray(
            f"log10 {self.metric}",
            torch.cat(self.damage).clamp(min=1e-6).log10(),
            ("layer.head", "ideal"),
            {"layer.head": heads, "ideal": self.ideals},
        ).plot("What the output loses")


def _make_rule_of_keys(reads: Bool[Tensor, "pos key"], real: Bool[Tensor, "batch pos"]) -> Rule:
    """Make the rule of fixed keys, of those that each sequence has."""
    if real.all():
        return SpecificPositions(reads)
    keys = torch.arange(reads.shape[1])
    return MaxPosition(torch.where(reads & real[:, None, None, : len(keys)], keys, -1))
