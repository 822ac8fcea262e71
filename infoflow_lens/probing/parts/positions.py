"""The positions to which heads attend."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from infoflow_lens.foundation.lazy import pd
from infoflow_lens.hooks import PositionsProbe, PositionsResult, Probe, ShardedPositions
from infoflow_lens.probing.part import Part, RunContext
from infoflow_lens.report.heads import by_head

if TYPE_CHECKING:
    from infoflow_lens.report.charts import Chart

AnyPositions = PositionsResult | ShardedPositions


class PositionsPart(Part):
    """The keys of the largest scores."""

    title = "Where heads look, and why"
    text = (
        "The share of first choices that no rule of positions explains, so that must come from the "
        "tokens, and the entropy of the attention rows."
    )

    fixed: ClassVar[Mapping[str, Sequence[str]]] = {"positions": ("ranks",)}

    def probes(self, context: RunContext) -> Mapping[str, Probe[Any]]:
        """Return the probe of ranked positions, with the spread of the attention rows."""
        config = context.config
        return {"positions": PositionsProbe(config.ranks, without=config.without, spread=True)}

    def table(self, result: AnyPositions) -> "pd.DataFrame":
        """Return a row for each head."""
        return result.summary()

    def figures(self, result: AnyPositions) -> Sequence["Chart"]:
        """Return two heat maps over heads; one if the spread was not measured."""
        found = result.summary()
        labels = {"by_content": "explained by tokens alone", "entropy": "entropy (nats)"}
        return by_head(found, {name: text for name, text in labels.items() if name in found})

    def facts(self, result: AnyPositions) -> Sequence[tuple[str, str]]:
        """Count the sequences that were seen."""
        return (("sequences", str(result.n_sequences)),)
