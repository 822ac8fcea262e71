"""Whether the mechanisms of all heads are enough together."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.hooks import LayerCapabilities, ModelCapabilities, Result
from infoflow_lens.hooks.mechanisms.sufficiency import (
    MEAN,
    MECHANISMS,
    RANDOM,
    SufficiencyResult,
    measure_sufficiency,
)
from infoflow_lens.probing.checkpoint import Checkpoint
from infoflow_lens.probing.part import Part, Setting

if TYPE_CHECKING:
    import plotly.graph_objects as go

_DRAWS = 3  # of random mechanisms


class SufficiencyPart(Part):
    """Many heads replaced at once by their mechanisms, on sequences that did not choose these."""

    title = "Are the mechanisms enough together?"
    text = (
        "Every head's pattern was replaced by its cheapest mechanism, all at once, and the loss of "
        "the next token measured on sequences on which mechanisms were not chosen. For comparison: "
        "the same mechanisms dealt to the heads at random, and every head's output its mean."
    )
    after = ("mechanisms",)
    by_default = False

    def lacking_of_model(self, capabilities: ModelCapabilities) -> str:
        """It reads the loss of the next token."""
        if capabilities.reads_vectors:
            return "its output is a vector, which predicts no next token"
        return ""

    def lacking(self, layer: LayerCapabilities) -> str:
        """Patterns are edited, and head outputs."""
        if "attn.hook_z" not in layer.edits_reach:
            return "edits of hook_z do not reach its output, so no head can be ablated"
        return super().lacking(layer)

    def check(self, setting: Setting) -> None:
        """Refuse data of which none is left to measure on."""
        if setting.rest is None:
            raise InfoFlowError(
                f"all {setting.batches.n_sequences} sequences choose the mechanisms (n_detail is "
                f"{setting.config.n_detail}): expected more, on which sufficiency is measured; "
                "give more text, or a smaller n_detail"
            )

    def measure(self, setting: Setting, checkpoint: Checkpoint) -> Result:
        """Go on behind the last finished point of the curves."""
        assert setting.rest is not None
        mechanisms: Any = setting.found["mechanisms"]
        return measure_sufficiency(
            setting.model,
            setting.rest,
            mechanisms,
            draws=_DRAWS,
            seed=setting.config.seed,
            batch_size=setting.config.batch_size,
            resume=checkpoint.load(),
            after=checkpoint.save,
            progress=setting.progress,
        )

    def figures(self, result: SufficiencyResult) -> Sequence["go.Figure"]:
        """The loss by the share of heads."""
        return (result.plot(),)

    def sentences(self, result: SufficiencyResult) -> Sequence[str]:
        """All heads at once, and the controls."""
        excess = dict(zip(result.assignments, result.excess()[:, -1].tolist(), strict=True))
        dealt = [value for name, value in excess.items() if name.startswith(RANDOM)]
        return (
            f"sufficiency: {result.n_replaced[-1]} of {len(result.ideals)} heads replaced at once "
            f"by their mechanisms: loss {result.loss:.3f} {excess[MECHANISMS]:+.3f} nats a token; "
            f"random mechanisms {sum(dealt) / len(dealt):+.3f}, mean ablation {excess[MEAN]:+.3f}",
        )

    def facts(self, result: SufficiencyResult) -> Sequence[tuple[str, str]]:
        """The loss, and what it rises by."""
        return (
            ("loss (nats a token)", f"{result.loss:.3f}"),
            ("with all heads replaced", f"{float(result.excess()[0, -1]):+.3f}"),
        )
