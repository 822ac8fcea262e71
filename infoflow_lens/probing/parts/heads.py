"""Parts on what heads do: their patterns are replaced, one by one or all at once."""

from collections.abc import Sequence

from infoflow_lens.hooks import HeadLabels, label_heads
from infoflow_lens.hooks.interventions.heads import COLOURS
from infoflow_lens.hooks.mechanisms.top_k import TopKResult, measure_top_k
from infoflow_lens.probing.part import Part, RunContext
from infoflow_lens.report.charts import Chart, Table, by_head, draw_names
from infoflow_lens.runs.checkpoint import Checkpoint

_FEWEST = 4  # sequences: two for labels, two to judge them


class LabelsPart(Part):
    """Shares of each head's worth that ideal patterns lose, and all heads replaced at once."""

    title = "What describes each head"
    text = (
        "A head is worth what the output loses when the head writes nothing but its mean. Its "
        "pattern was replaced by ideal ones; the smaller the share of the worth that is then lost, "
        "the better the ideal describes it: fixed (by position or by the distance to the key), max "
        "(the largest key, with the weight on the first position left as it is), several keys, or "
        "undecided where the texts do not tell. Labels are of half of the sequences, and hold on "
        "such texts alone; on the other half all heads were replaced at once, by their own label's "
        "ideal and by one for all."
    )
    sequences = "detail"
    edits = ("attn.hook_pattern", "attn.hook_z")

    def lacking_of_data(self, context: RunContext) -> str:
        """Say why the sequences are too few; empty if they are enough."""
        n = context.detail.n_sequences or 0
        if n >= _FEWEST:
            return ""
        more = "more text" if context.config.n_detail >= _FEWEST else f"--n-detail {_FEWEST}"
        need = f"labels need {_FEWEST} sequences, half of them to judge"
        return f"{need}, and there are {n}; give {more}"

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
        names = draw_names(frame.assign(hover=hover), "label", COLOURS, "hover")
        worth = by_head(
            frame, {"worth": f"what the output loses without the head ({result.metric})"}
        )
        tables = [result.joint_frame().round(3), result.thirds_frame().round(2)]
        return (names, *worth, *map(Table.from_frame, tables))

    def remarks(self, result: HeadLabels) -> str:
        """Say what the columns of the table are."""
        what = {
            "nmse": "the squared change of the output, over its variance",
            "kl": "the divergence KL(old || new) of the distributions, in nats",
            "loss": "the rise of the loss of the next token where it rises, in nats",
        }[result.metric]
        return (
            f"All heads at once, on {result.n_judged} sequences that no label has seen: damage is "
            f"{what}; error, one standard error over sequences; rise, that of the loss of the next "
            "token, in nats a token.\nIdeals: top k, the k largest keys; position and offset, the "
            "mean pattern by position or by distance; largest, one key; gated, one key beside the "
            "first position. Ablated heads write their mean. Below, by thirds of the "
            "layers: the heads of each label, and their share of what single heads are worth."
        )

    def facts(self, result: HeadLabels) -> Sequence[tuple[str, str]]:
        """Count the heads of each label."""
        of = f"of {len(result.labels)} heads"
        idle = [("idle", f"{int(result.idle.sum())} {of}")] if result.idle.any() else []
        return [*((name, f"{count} {of}") for name, count in result.counts().items()), *idle]


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

    def measure(self, context: RunContext, checkpoint: Checkpoint) -> TopKResult:
        """Search k by bisection; go on after the last finished point."""
        options = context.options(checkpoint)
        return measure_top_k(context.model, context.detail, search=True, **options)

    def facts(self, result: TopKResult) -> Sequence[tuple[str, str]]:
        """Return the least k of all layers at once."""
        return (("keys needed, all layers", f"{result.least()[-1]} of {result.n_pos}"),)
