"""Whether the mechanisms of all heads are enough together."""

from collections.abc import Sequence
from typing import Any

from infoflow_lens.hooks import Result
from infoflow_lens.hooks.mechanisms.sufficiency import (
    EVERY,
    KS,
    MEAN,
    MECHANISMS,
    RANDOM,
    SufficiencyResult,
    measure_sufficiency,
)
from infoflow_lens.probing.part import Part, RunContext
from infoflow_lens.report.charts import Lines
from infoflow_lens.runs.checkpoint import Checkpoint

_DRAWS = 3  # of random mechanisms


class SufficiencyPart(Part):
    """The loss with many heads replaced at once by their mechanisms, on other sequences than those
    on which the mechanisms were chosen.
    """

    title = "Are the mechanisms enough together?"
    text = (
        "Every head's pattern was replaced by its cheapest mechanism, all at once, and the loss of "
        "the next token measured on sequences on which mechanisms were not chosen. For comparison: "
        "every head with its k largest keys, and with one and the same ideal; the mechanisms dealt "
        "to the heads at random; every head's output its mean. That a mechanism says something of "
        "its head shows where the mechanisms cost less than one ideal for all."
    )
    after = ("mechanisms",)
    edits = ("attn.hook_z",)
    next_token = True
    by_default = False

    def lacking_of_data(self, context: RunContext) -> str:
        """Why the sequences are too few: some choose the mechanisms, others measure them."""
        if context.rest is not None:
            return ""
        n = context.batches.n_sequences or 0
        smaller = f", or an n_detail of at most {n - 1}" if n > 1 else ""
        return (
            f"all {n} sequences choose the mechanisms (n_detail is {context.config.n_detail}), so "
            f"none is left for sufficiency: expected more; give more text{smaller}"
        )

    def measure(self, context: RunContext, checkpoint: Checkpoint) -> Result:
        """Measure the curves; go on after the last finished point."""
        assert context.rest is not None
        mechanisms: Any = context.found["mechanisms"]
        return measure_sufficiency(
            context.model,
            context.rest,
            mechanisms,
            draws=_DRAWS,
            **context.options(checkpoint),
        )

    def figures(self, result: SufficiencyResult) -> Sequence[Lines]:
        """Every head with its k largest keys; then shares of the heads, by the mean of deals."""
        excess = _excess(result)
        levels = {
            MEAN: excess[MEAN],
            "every head's mean pattern": excess[f"{EVERY}specific_position"],
            MECHANISMS: excess[MECHANISMS],
        }
        curve = [excess[f"{EVERY}top {k}"] for k in KS]
        # random assignments are one line, their mean
        rises: dict[str, list[list[float]]] = {}
        for name, rise in zip(result.assignments, result.excess().tolist(), strict=True):
            if name in (MECHANISMS, MEAN) or name.startswith(RANDOM):
                rises.setdefault(RANDOM if name.startswith(RANDOM) else name, []).append(rise)
        series = {
            name: [0.0, *(sum(at) / len(at) for at in zip(*some, strict=True))]
            for name, some in sorted(rises.items(), key=lambda item: item[0] == MECHANISMS)
        }
        return (
            Lines(
                "What the loss of the next token rises by where every head keeps its largest keys",
                KS,
                {
                    **{name: [rise] * len(KS) for name, rise in levels.items()},
                    "k largest keys": curve,
                },
                "keys kept by every head",
                "nats a token",
            ),
            Lines(
                "What the loss of the next token rises by with heads replaced at once",
                [0, *result.n_replaced],
                series,
                "heads replaced",
                "nats a token",
            ),
        )

    def sentences(self, result: SufficiencyResult) -> Sequence[str]:
        """Say what all heads at once, one ideal for all, and the controls cost."""
        excess = _excess(result)
        dealt = [value for name, value in excess.items() if name.startswith(RANDOM)]
        uniform = ", ".join(
            f"{name.removeprefix(EVERY).replace('_', ' ')} {value:+.3f}"
            for name, value in excess.items()
            if name.startswith(EVERY)
        )
        return (
            f"sufficiency: {result.n_replaced[-1]} of {len(result.ideals)} heads replaced at once "
            f"by their mechanisms: loss {result.loss:.3f} {excess[MECHANISMS]:+.3f} nats a token; "
            f"random mechanisms {sum(dealt) / len(dealt):+.3f}, mean ablation {excess[MEAN]:+.3f}",
            f"sufficiency: every head the same: {uniform}",
        )

    def facts(self, result: SufficiencyResult) -> Sequence[tuple[str, str]]:
        """Return the loss, and what it rises by."""
        return (
            ("loss (nats a token)", f"{result.loss:.3f}"),
            ("with all heads replaced", f"{float(result.excess()[0, -1]):+.3f}"),
        )


def _excess(result: SufficiencyResult) -> dict[str, float]:
    """Return the rise of the loss with all heads replaced, in nats a token, by assignment."""
    return dict(zip(result.assignments, result.excess()[:, -1].tolist(), strict=True))
