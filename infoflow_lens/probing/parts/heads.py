"""Parts on what heads do: their patterns are replaced, one by one or all at once."""

from collections.abc import Sequence
from typing import Any

from infoflow_lens.foundation.lazy import pd
from infoflow_lens.hooks import (
    HeadLabels,
    MechanismsResult,
    Result,
    label_heads,
    measure_mechanisms,
)
from infoflow_lens.hooks.interventions.heads import COLOURS, OWN
from infoflow_lens.hooks.mechanisms.sufficiency import (
    EVERY,
    KS,
    MEAN,
    MECHANISMS,
    RANDOM,
    SufficiencyResult,
    measure_sufficiency,
)
from infoflow_lens.hooks.mechanisms.top_k import TopKResult, measure_top_k
from infoflow_lens.probing.part import Part, RunContext
from infoflow_lens.report.charts import Chart, Lines, Table
from infoflow_lens.report.heads import by_head, draw_names
from infoflow_lens.runs.checkpoint import Checkpoint

_FEWEST = 4  # sequences: two for labels, two to judge them


class LabelsPart(Part):
    """Shares of each head's worth that ideal patterns lose, and all heads replaced at once."""

    title = "What describes each head"
    text = (
        "A head is worth what the output loses when it writes its mean alone. Its pattern was "
        "replaced by ideal ones; the share of the worth that is lost says how well each describes "
        "it: fixed (by position or by the distance to the key), max (the largest key, with the "
        "weight on the first position left as it is), several keys, or undecided where the texts "
        "do not tell. Labels are of half of the sequences, and hold on such texts alone; on the "
        "other half all heads were replaced at once, by their own label's ideal and by one for all."
    )
    sequences = "detail"
    edits = ("attn.hook_pattern", "attn.hook_z")
    by_default = False

    def lacking_of_data(self, context: RunContext) -> str:
        """Why the sequences are too few; empty if they are enough."""
        n = context.detail.n_sequences or 0
        if n >= _FEWEST:
            return ""
        return f"labels need {_FEWEST} sequences, half of them to judge, and there are {n}"

    def measure(self, context: RunContext, checkpoint: Checkpoint) -> HeadLabels:
        """Label all heads; go on after the last finished batch."""
        options = context.options(checkpoint)
        options["batch_size"] = min(8, context.config.batch_size)
        return label_heads(context.model, context.detail, metric=context.config.metric, **options)

    def figures(self, result: HeadLabels) -> Sequence[Chart]:
        """Return the label of every head, what it is worth, and all heads at once."""
        frame = result.to_frame()
        hover = [
            f"{row['label']} {row['name']}\nfixed {row['fixed']:.2f} +- {row['fixed_error']:.2f}, "
            f"max {row['max']:.2f} +- {row['max_error']:.2f}\n"
            f"worth {row['worth']:.2g} ({'measured' if row['measured'] else 'estimated'})"
            for row in frame.to_dict("records")
        ]
        names = draw_names(frame, "label", COLOURS, hover)
        worth = by_head(
            frame, {"worth": f"what the output loses without the head ({result.metric})"}
        )
        tables = [result.joint_frame().round(3), result.thirds_frame().round(2)]
        return (names, *worth, *map(Table.from_frame, tables))

    def remarks(self, result: HeadLabels) -> str:
        """Say what the columns of the table are."""
        what = {
            "nmse": "the squared change of the output, over its variance",
            "kl": "the divergence of the new distribution from the old one, in nats",
            "loss": "the rise of the loss of the next token where it rises, in nats",
        }[result.metric]
        return (
            f"All heads at once, on {result.n_judged} sequences that no label has seen: damage is "
            f"{what}; error, one standard error over sequences; rise, that of the loss of the next "
            "token, in nats a token. Ablated heads write their mean. Below, by thirds of the "
            "layers: the heads of each label, and their share of what single heads are worth."
        )

    def sentences(self, result: HeadLabels) -> Sequence[str]:
        """Say how many heads have each label, and how good labels are together."""
        counts = ", ".join(f"{name} {n}" for name, n in result.counts().items())
        joint = result.joint_frame().set_index("all heads by")["damage"]
        single = joint[[name for name in joint.index if name.startswith("every head")]]
        theory = single.drop(["every head top 2", "every head top 4", "every head ablated"])
        return (
            f"{counts} of {len(result.labels)} heads",
            f"all heads at once: {joint[OWN]:.3g} by their labels, {theory.min():.3g} by the best "
            f"one ideal for all ({theory.idxmin().removeprefix('every head ')}), "
            f"{joint['every head ablated']:.3g} without heads ({result.metric})",
        )

    def facts(self, result: HeadLabels) -> Sequence[tuple[str, str]]:
        """Count the heads of each label."""
        n = len(result.labels)
        return [(name, f"{count} of {n}") for name, count in result.counts().items()]


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

    def figures(self, result: MechanismsResult) -> Sequence[Chart]:
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
