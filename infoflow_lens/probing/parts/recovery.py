"""Whether states can give attended tokens back."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from infoflow_lens.hooks import Probe, RecoveryProbe, RecoveryResult
from infoflow_lens.hooks.probe import Split
from infoflow_lens.probing.part import Part, RunContext
from infoflow_lens.report.heads import by_head

if TYPE_CHECKING:
    from infoflow_lens.report.charts import Chart

_WIDE, _SKETCH = 256, 64


def too_few_rows(result: RecoveryResult) -> tuple[int, ...]:
    """Return the layers whose maps had no more rows than features, so that they can fit any target.

    None where a penalty keeps the maps from that.
    """
    if result.record.config.get("ridge") is not None:
        return ()
    pairs = zip(result.n_features, result.n_fit, strict=False)  # not known of older results
    return tuple(layer for layer, (features, rows) in enumerate(pairs) if rows <= features)


class RecoveryPart(Part):
    """Linear maps from states to attended tokens, and their errors."""

    title = "Can the state give the attended token back?"
    text = (
        "The fraction of variance unexplained by a linear map from the state to the token that a "
        "head attends to at each rank, on held-out sequences: 0 is perfect, 1 is knowing nothing."
    )

    def lacking_of_data(self, context: RunContext) -> str:
        """Why the sequences are too few: maps are fitted on some and judged on others."""
        n, split = context.batches.n_sequences or 0, Split()
        if split.n_held_out(n):
            return ""
        return (
            f"recovery fits its maps on some sequences and judges them on every "
            f"{split.every}th, and of {n} none is left to judge on: expected at least "
            f"{split.every}; give more text"
        )

    def probes(self, context: RunContext) -> Mapping[str, Probe[Any]]:
        """Return the probe of maps from the post-attention state.

        For wide models its targets are sketched, and the maps are not kept.
        """
        config, wide = context.config, context.width > _WIDE
        sketch = (_SKETCH if wide else None) if config.sketch is None else config.sketch or None
        probe = RecoveryProbe(
            config.ranks, without=config.without, sketch=sketch, maps=not wide, seed=config.seed
        )
        return {"recovery": probe}

    def figures(self, result: RecoveryResult) -> Sequence["Chart"]:
        """Fraction of variance unexplained over layers and heads, a panel for each rank."""
        frame = result.to_frame()
        wide = frame.pivot_table(
            index=["layer", "head"], columns="rank", values="fvu", dropna=False
        )
        labels = {rank: f"rank {rank}" for rank in result.ranks}
        wide = wide.reset_index().rename(columns=labels)
        wide.loc[wide["layer"].isin(too_few_rows(result)), list(labels.values())] = math.nan
        titles = {name: f"unexplained variance, {name}" for name in list(labels.values())[:4]}
        return by_head(wide, titles, most=1.0)

    def remarks(self, result: RecoveryResult) -> str:
        """Return the layers that are not shown because their maps fit any target."""
        layers = too_few_rows(result)
        if not layers:
            return ""
        return (
            f"Not shown: layers {', '.join(map(str, layers))}, where the maps were fitted on "
            f"{min(result.n_fit[layer] for layer in layers)} rows, fewer than features, so that "
            "their errors say nothing; give more sequences."
        )

    def sentences(self, result: RecoveryResult) -> Sequence[str]:
        """Return the head whose token is recovered with the smallest error."""
        frame = result.to_frame().dropna(subset="fvu").sort_values("fvu")
        frame = frame[~frame["layer"].isin(too_few_rows(result))]
        if frame.empty and too_few_rows(result):
            return (f"recovery: {self.remarks(result)}",)
        if frame.empty or frame["fvu"].iloc[0] >= 1:
            return ("recovery: no head gives its token back better than the mean does",)
        best = frame.iloc[0]
        return (
            f"recovery: best head {best['layer']:.0f}.{best['head']:.0f} at rank "
            f"{best['rank']:.0f} leaves {best['fvu']:.1%} of the variance unexplained",
        )
