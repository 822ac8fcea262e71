"""How many layers a chain of questions needs (Chen & Zou 2024, Sec. 7)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from infoflow_lens.experiments.studies.token_models import (
    ABOVE_CHANCE,
    ADAMW,
    PAPER,
    RANDOM,
    SOLVED,
    STARTS,
    TokenStudy,
    chosen_accuracy,
    counted,
    last_epochs,
    paper_training,
)
from infoflow_lens.experiments.study import Settings, Statement, Verdict
from infoflow_lens.experiments.tables import markdown_table, spread

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_HOPS, _LAYERS = (1, 2, 3), (1, 2, 3, 4)


def layers_needed(hops: int) -> int:
    """The fewest layers of one max-position head for `hops`, ceil(log2(2 hops + 1)) [derived].

    The answer hangs on 2 hops + 1 positions (both entities of every fact, and the query), and by
    update rule (1) (InfoFlow 2026, Sec. 5.1) one head a layer at most doubles what a state holds.
    As many are enough: layer 1 copies within facts; then every layer matches, at the sign and at
    all facts at once, so that facts of 1, 2, 4, .. hops take the sign 1, 3, 7, .. hops.
    """
    return (2 * hops).bit_length()


class NestedQuestions(TokenStudy):
    """Test accuracy for one to three hops and one to four layers.

    The context holds two chains, so a model that answers with any entity that is never asked about,
    an end of a chain, is right in half of the cases: `chance`. From the paper's start the first
    layer copies within facts as in Theorem 3, deeper layers start from uniform W_QK on [0, scale)
    and W_V = I, and training is by SGD; "random" is Gaussian and trained by AdamW. One ReLU head a
    layer. All sizes and settings are [chosen].
    """

    name: ClassVar[str] = "nested_qa"
    title: ClassVar[str] = "How many attention layers do chains of questions need?"
    source: ClassVar[str] = "Chen & Zou 2024, Sec. 7 (proposed there; no experiment)"
    acceptance: ClassVar[str] = (
        "by test accuracy: with fewer than ceil(log2(2 hops + 1)) layers (2, 3, 3 for one to three "
        "hops) no seed of any start is more than .1 above chance; and the least number of layers "
        "with which, from some start, the seed of the least validation loss reaches .95 is two for "
        "one hop, three or four for two hops, and does not fall from two to three "
        "hops, which no depth that was run may solve"
    )
    statement: ClassVar[Statement] = Statement(
        written="2026-11-22",
        after_run=True,
        in_short=(
            "a chain of h hops needs at least ceil(log2(2h + 1)) layers; the paper proposes 2h"
        ),
        prediction=(
            "With fewer layers than sets that double allow, accuracy stays at naming "
            "either end of a chain; one hop is learnt with two layers, two hops with three "
            "or four."
        ),
        controls={
            "a layer less": ("the accuracies of a layer less in the place of those of each depth"),
        },
        refuted_by=(
            "a model with fewer layers above chance by more than .1. That models with "
            "enough layers do not learn refutes nothing: weights set by hand solve every "
            "chain with as many (`nested_qa` of the constructions), so training is what "
            "fails."
        ),
    )
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 2, "full": 5}
    judges_every_run: ClassVar[bool] = True

    def cases(self, preset: str) -> Sequence[Settings]:
        """By start, hops and layers."""
        sizes: Mapping[str, tuple[Sequence[int], Sequence[int], Mapping[str, Any]]] = {
            "smoke": ((1, 2), (1, 2), {"n_entities": 8, "epochs": 2, "n_train": 1024}),
            "quick": (_HOPS, _LAYERS, {"n_entities": 12, "epochs": 24, "n_train": 8192}),
            "full": (
                _HOPS,
                (1, 2, 3, 4, 5, 6),
                {"n_entities": 100, "epochs": 240, "n_train": 65536},
            ),
        }
        hops, layers, rest = sizes[preset]
        base = {"preset": preset, "task": "nested_qa", "n_chains": 2}
        settings = {**base, **paper_training("in_context_qa"), **rest}
        starts: Mapping[str, Mapping[str, Any]] = {PAPER: {}, RANDOM: ADAMW}
        return [
            {**settings, **changes, "start": start, "hops": h, "layers": n}
            for start, changes in starts.items()
            for h in hops
            for n in layers
        ]

    def table(self, results: "pd.DataFrame") -> str:
        """Test accuracies by hops and layers, beside the layers that are enough by construction."""
        runs = last_epochs(results)
        layers = [int(n) for n in sorted(runs["layers"].unique())]
        columns = [
            "start",
            "hops",
            "chance",
            *(counted(n, "layer") for n in layers),
            "layers: copy-match a hop (the paper's design)",
            "copy once, match a hop",
            "matching at facts, too",
        ]
        lines = []
        groups: Any = runs.groupby(["start", "hops"], sort=False)
        for (start, hops), rows in groups:
            cells = [spread(rows.loc[rows["layers"] == n, "test_accuracy"]) for n in layers]
            chance = f"{rows['chance'].mean():.3g}"
            needed = (2 * hops, hops + 1, layers_needed(int(hops)))
            lines.append((STARTS[start], hops, chance, *cells, *needed))
        return "\n\n".join(
            [
                markdown_table(columns, lines),
                "Test accuracy over seeds, mean (least to largest), of the epoch of the least "
                "validation loss. The paper proposes the task and gives no numbers.",
            ]
        )

    def figure(self, results: "pd.DataFrame") -> "Figure":
        """Test accuracy over layers, a panel for each start and a line for each number of hops."""
        from matplotlib.figure import Figure

        runs = last_epochs(results)
        starts = list(dict.fromkeys(runs["start"]))
        figure = Figure(figsize=(4.2 * max(1, len(starts)), 3.4), layout="constrained")
        axes = figure.subplots(1, max(1, len(starts)), squeeze=False)[0]
        for panel, start in zip(axes, starts, strict=True):
            of_start = runs[runs["start"] == start]
            for index, (hops, rows) in enumerate(of_start.groupby("hops")):
                colour, label = f"C{index}", counted(int(hops), "hop")
                panel.plot(rows["layers"], rows["test_accuracy"], "o", color=colour, alpha=0.5)
                best = rows.groupby("layers")["test_accuracy"].max()
                panel.plot(best.index, best, "-", color=colour, label=label)
            panel.axhline(of_start["chance"].mean(), color="#444444", linestyle="--", linewidth=0.8)
            panel.set_title(STARTS[start])
            panel.set_xticks(sorted(runs["layers"].unique()))
            panel.set_xlabel("layers")
            panel.set_ylim(-0.03, 1.03)
        axes[0].set_ylabel("test accuracy (dashed: chance)")
        axes[0].legend(frameon=False, fontsize="small")
        return figure

    def verdict(self, results: "pd.DataFrame") -> Verdict:
        """By test accuracy with too few layers, and the least depth that is enough."""
        runs = last_epochs(results)
        passed, reasons = True, []
        least: dict[int, float] = {}
        for hops in sorted(int(h) for h in runs["hops"].unique()):
            rows = runs[runs["hops"] == hops]
            few = rows[rows["layers"] < layers_needed(hops)]
            if len(few):
                above = few["test_accuracy"] - few["chance"]
                highest = few.loc[above.idxmax()]
                seen = bool((above <= ABOVE_CHANCE).all())
                passed &= seen
                reasons.append(
                    f"{counted(hops, 'hop')}, fewer than {layers_needed(hops)} layers: highest "
                    f"test accuracy {highest['test_accuracy']:.3f} ("
                    f"{counted(int(highest['layers']), 'layer')}, "
                    f"{STARTS[highest['start']]}), chance {highest['chance']:.3f}: "
                    f"{'as' if seen else 'not as'} predicted"
                )
            groups: Any = rows.groupby(["layers", "start"])
            enough = [n for (n, _), of_n in groups if chosen_accuracy(of_n) >= SOLVED]
            least[hops] = min(enough, default=float("inf"))
            shown = counted(int(least[hops]), "layer") if enough else "no depth that was run"
            reasons.append(f"{counted(hops, 'hop')}: solved by {shown}")
        grows = (
            least.get(1) == 2 and least.get(2) in (3, 4) and least[2] <= least.get(3, float("inf"))
        )
        return Verdict(passed and grows, tuple(reasons))

    def controlled(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Every depth with the accuracies of a layer less."""
        deeper = results.assign(layers=results["layers"] + 1)
        return {"a layer less": deeper[deeper["layers"] <= results["layers"].max()]}
