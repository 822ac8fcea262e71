"""How many keys the heads of a layer need."""

from collections.abc import Sequence

from infoflow_lens.hooks import Result
from infoflow_lens.hooks.mechanisms.top_k import TopKResult, measure_top_k
from infoflow_lens.probing.part import Part, RunContext
from infoflow_lens.runs.checkpoint import Checkpoint


class TopKPart(Part):
    """The loss when heads keep only the k largest keys of every row."""

    title = "How many keys does a layer need?"
    text = (
        "The heads of one layer, or of all at once, keep the k keys of largest weight, rescaled. "
        "Shown is the least k, of powers of two, that keeps the loss of the next token within 1%: "
        "1 where one token is passed on, all where a mean over the context is taken."
    )
    sequences = "detail"
    edits = ("attn.hook_pattern",)
    next_token = True
    by_default = False

    def measure(self, context: RunContext, checkpoint: Checkpoint) -> Result:
        """Search k by bisection; go on after the last finished point."""
        options = context.options(checkpoint)
        return measure_top_k(context.model, context.detail, search=True, **options)

    def sentences(self, result: TopKResult) -> Sequence[str]:
        """Return the least k of every layer."""
        *layers, together = result.least()
        return (
            f"top k: keys that keep the loss within {result.tolerance:.0%}, by layer: "
            f"{' '.join(map(str, layers))}; all layers at once: {together} (of {result.n_pos})",
        )

    def facts(self, result: TopKResult) -> Sequence[tuple[str, str]]:
        """Return the least k of all layers at once."""
        return (("keys needed, all layers", f"{result.least()[-1]} of {result.n_pos}"),)
