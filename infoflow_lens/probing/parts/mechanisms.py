"""The mechanism that each head needs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from infoflow_lens.foundation.lazy import pd
from infoflow_lens.hooks import MechanismsResult, measure_mechanisms
from infoflow_lens.probing.part import Part, RunContext
from infoflow_lens.report.heads import by_head, draw_names
from infoflow_lens.runs.checkpoint import Checkpoint

if TYPE_CHECKING:
    from infoflow_lens.report.charts import Chart

# In the order of the legend: patterns that do not depend on the input come first; the three
# mechanisms of the theory have strong colours.
_COLOURS = {
    "own_position": "#d9d9d9",
    "global": "#56b4e9",
    "specific_position": "#009e73",
    "max_position": "#d55e00",
    "top_k": "#cc79a7",
    "soft": "#444444",
}
_LABELS = {"own_position": "heads that do not matter (own position)"}
_MOST_NAMED = 32  # heads in a sentence


class MechanismsPart(Part):
    """The damage to the output when a head's pattern is replaced by ideal patterns."""

    title = "The mechanism of every head"
    text = (
        "Each head's pattern was replaced by ideal ones, and the loss of the output measured. All "
        "ideals within the threshold suffice; the mechanism is the first of them: its own position "
        "alone, evenly on all allowed keys (global), its mean pattern over other inputs (specific "
        "position), its hard maximum (max-position), its largest keys; else it stays soft. A head "
        "that does not matter can do with its own position alone."
    )
    sequences = "detail"
    edits = ("attn.hook_pattern",)

    def measure(self, context: RunContext, checkpoint: Checkpoint) -> MechanismsResult:
        """Measure the damage of all ideals; go on after the last finished batch."""
        return measure_mechanisms(
            context.model,
            context.detail,
            metric=context.config.metric,
            threshold=context.config.threshold,
            **context.options(checkpoint),
        )

    def figures(self, result: MechanismsResult) -> Sequence["Chart"]:
        """Return the mechanism of every head, its damages on hover; and which heads matter."""
        frame = result.to_frame()
        hover = [
            "\n".join(
                f"{ideal}: {row[ideal]:.2g}{' (suffices)' if row[f'sufficient_{ideal}'] else ''}"
                for ideal in result.ideals
            )
            for row in frame.to_dict("records")
        ]
        names = draw_names(frame, "mechanism", _COLOURS, hover)
        if "own_position" not in result.ideals:
            return (names,)
        lost = {"own_position": "what the output loses without the head"}
        return (names, *by_head(frame.assign(own_position=frame["own_position"].clip(0)), lost))

    def sentences(self, result: MechanismsResult) -> Sequence[str]:
        """Return the heads of each mechanism, and all heads for which an ideal suffices."""
        frame = result.to_frame()
        heads = frame["layer"].astype(str) + "." + frame["head"].astype(str)
        found = {name: heads[frame["mechanism"] == name] for name in frame["mechanism"]}
        labels = [f"{name}: {_name_heads(some, len(heads))}" for name, some in found.items()]
        enough = {ideal: heads[frame[f"sufficient_{ideal}"]] for ideal in result.ideals}
        others = [
            f"{ideal} would suffice for {_name_heads(some, len(heads))}"
            for ideal, some in enough.items()
            if len(some) > int((frame["mechanism"] == ideal).sum())
        ]
        return [*labels, *others]

    def facts(self, result: MechanismsResult) -> Sequence[tuple[str, str]]:
        """Count the heads that need each mechanism."""
        names = [name for layer in result.mechanisms() for name in layer]
        return [
            (_LABELS.get(name, name.replace("_", " ")), f"{names.count(name)} of {len(names)}")
            for name in dict.fromkeys(names)
        ]


def _name_heads(heads: "pd.Series[str]", n: int) -> str:
    """Name some of `n` heads, or say how many they are."""
    if len(heads) > _MOST_NAMED:
        return f"{len(heads)} of {n} heads; mechanisms.csv names them"
    return f"heads {' '.join(heads)}"
