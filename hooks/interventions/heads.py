"""Labels that describe heads: what each does on these texts, and what all do when replaced."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import nan
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import mpl, pd
from infoflow_lens.foundation.modules import derive_seed, eval_mode
from infoflow_lens.foundation.progress import progress_bar
from infoflow_lens.foundation.record import RunRecord, fingerprint, model_fingerprint
from infoflow_lens.foundation.settings import Count, Index, Seed, checked
from infoflow_lens.hooks.interventions.damage import Metric, Read, metric_of
from infoflow_lens.hooks.interventions.estimate import DRAWS, Estimates, estimate_ideals
from infoflow_lens.hooks.interventions.ideals import (
    HEAD_IDEALS,
    PATTERN_IDEALS,
    AllHeads,
    HeadIdeal,
    HeadIdeals,
    check_means,
)
from infoflow_lens.hooks.interventions.kept import KeptNumbers, Reached, identify
from infoflow_lens.hooks.interventions.labels import (
    ERRORS,
    SINK,
    HeadLabel,
    compute_shares,
    label_head,
)
from infoflow_lens.hooks.interventions.patterns import MeanPatterns, MeanPatternsProbe
from infoflow_lens.hooks.interventions.probe import (
    Intervention,
    InterventionResult,
    PlainRun,
    jackknife,
)
from infoflow_lens.hooks.model.inputs import Batch, Batches, Inputs, read_inputs
from infoflow_lens.hooks.model.points import layer_count, takes_model
from infoflow_lens.hooks.passes.run import run_probes
from infoflow_lens.hooks.passes.view import Needs, Pass
from infoflow_lens.hooks.positions import AttendedResult, PositionsResult
from infoflow_lens.hooks.result import Result
from infoflow_lens.theory.rules import MaxPosition, Rule

Head = tuple[int, int]
_MOST_NAMED = 32  # heads in sentences
WORTHIEST = 14  # heads whose label rests on passes of their own, and that are tried anew together
_ABLATED = HEAD_IDEALS.index("ablated")
_FIXED_SHARE = 0.05  # of a row's largest mean weight, from which on a key is a fixed one [chosen]
_IDLE = 0.01  # of the damage of all heads, where there is no loss of the next token [chosen]
_FEW = 8  # texts, below which it is said how often labels are chance [chosen]
_SURE_TO = 50  # idle heads are found to within one in so many
OWN, SEVERAL = "each head by its label", "each head by its label, several keys where it says so"
_EVERYWHERE: tuple[HeadIdeal, ...] = (
    "position", "offset", "gated", "largest", "top 2", "top 4", "ablated"
)  # fmt: skip
COLOURS = {
    "fixed": "#009e73",
    "max": "#d55e00",
    "several": "#cc79a7",
    "spread": "#444444",
    "undecided": "#d9d9d9",
}


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadLabels(Result):
    """What each head does on some texts, and what all lose when they are replaced at once.

    A label is of a head *on texts*: a head that copies names is fixed where no name is asked for.

    Attributes:
        metric: in which losses are measured.
        n_sequences, n_judged: texts that labels rest on, and those on which all were replaced.
        heads: int [head, 2], layer and head.
        labels: "fixed" (by position or offset), "max" (the largest key, the sink's weight apart),
            "several" keys, "spread", or "undecided".
        names: the simplest pattern that says a fixed head, or "top k" of several; "" otherwise.
        replacements: the ideal that took the head's place when all were replaced, by its label and
            the joint repair.
        ideals: in the order of the axis of shares.
        shares: float [head, ideal], what the ideal loses over what the head is worth.
        fixed, largest, fixed_error, largest_error, gap_error: float [head], the shares of the two
            families, one standard error of each, and of their difference, over texts.
        worth: float [head], what a row of the output loses where the head's output is its mean.
        measured: bool [head], whether worth and the share of its own ideal come from passes with
            the head replaced; those of others are estimated.
        does_either: bool [head], fixed heads for which one key does as well.
        sink: float [head], the mean weight on position 0.
        idle: bool [head], the largest set, in the order of worth, that together raises the loss by
            less than its standard error; where there is no next-token loss, that together does at
            most a hundredth of the damage of all heads [chosen].
        mean_patterns: for every layer float [head, query, key], over the labelled and judged texts,
            or the calibration.
        assignments: what replaced all heads at once, judged on texts that no label has seen.
        damage, damage_error: float [assignment], what a row of the output loses, and its error.
        rise: float [assignment], the rise of the next-token loss in nats a token.
        n_repaired: heads whose replacement the joint repair changed.
        forwards: the work, in passes over the labelling texts and over the judged ones; a backward
            pass counts as one. Means are not among them.
    """

    small: ClassVar[bool] = True

    metric: str
    n_sequences: int
    n_judged: int
    heads: Int[Tensor, "head two"]
    labels: tuple[str, ...]
    names: tuple[str, ...]
    replacements: tuple[str, ...]
    ideals: tuple[str, ...]
    shares: Float[Tensor, "head ideal"]
    fixed: Float[Tensor, " head"]
    largest: Float[Tensor, " head"]
    fixed_error: Float[Tensor, " head"]
    largest_error: Float[Tensor, " head"]
    gap_error: Float[Tensor, " head"]
    worth: Float[Tensor, " head"]
    measured: Bool[Tensor, " head"]
    does_either: Bool[Tensor, " head"]
    sink: Float[Tensor, " head"]
    idle: Bool[Tensor, " head"]
    mean_patterns: tuple[Float[Tensor, "_head query key"], ...]
    assignments: tuple[str, ...]
    damage: Float[Tensor, " assignment"]
    damage_error: Float[Tensor, " assignment"]
    rise: Float[Tensor, " assignment"]
    n_repaired: int
    forwards: float

    def label_of(self, layer: int, head: int) -> str:
        """Look up the label of a head, with its name: "fixed: previous".

        Raises:
            InfoFlowError: for a head that is not there.
        """
        for index, place in enumerate(self.heads.tolist()):
            if place == [layer, head]:
                name = self.names[index]
                return f"{self.labels[index]}: {name}" if name else self.labels[index]
        raise InfoFlowError(
            f"there is no head {layer}.{head} among {len(self.heads)} with labels: expected a "
            "layer and a head of this model"
        )

    @property
    def mechanisms(self) -> tuple[tuple[str, ...], ...]:
        """The label of every head with its name, layer by layer; "idle" for heads that are."""
        layers: list[list[str]] = [[] for _ in self.mean_patterns]
        for (layer, head), idle in zip(self.heads.tolist(), self.idle.tolist(), strict=True):
            layers[layer].append("idle" if idle else self.label_of(layer, head))
        return tuple(map(tuple, layers))

    def lost(self) -> tuple[Float[Tensor, " _head"], ...]:
        """Look up what the output loses without each head, layer by layer; 0 for idle heads."""
        worth = self.worth.clamp(min=0).masked_fill(self.idle, 0)
        return worth.split([len(layer) for layer in self.mean_patterns])

    def rules(
        self,
        attended: Sequence[Int[Tensor, "batch _head query key"]] | AttendedResult,
        chosen: Sequence[Int[Tensor, "batch _head query rank"]] | PositionsResult,
    ) -> list[list[Rule]]:
        """Make the update rules of `propagate`, one for each head, by what describes it.

        What replaced the head when all were replaced says what it passes on (Yu, Jiang, Bao, Li
        2026, Sec. 5.1): the keys of its mean pattern; the largest key, beside position 0 where its
        weight stays; the k largest of "several". Heads that are "spread" pass on all keys that they
        draw from, and idle ones none.

        Args:
            attended: the keys that heads draw from, of :class:`~infoflow_lens.hooks.AttendedProbe`.
            chosen: the keys of the largest scores, the first of them first, of
                :class:`~infoflow_lens.hooks.PositionsProbe`. With one rank alone a head whose
                largest key is position 0 passes on nothing else.

        Raises:
            InfoFlowError: for sequences that are longer than those with labels, a model of other
                heads, or the two in each other's place.
        """
        if isinstance(attended, PositionsResult) or isinstance(chosen, AttendedResult):
            raise InfoFlowError(
                f"attended is {type(attended).__name__}, chosen {type(chosen).__name__}: expected "
                "results of AttendedProbe and PositionsProbe, in this order"
            )
        attended = attended.positions if isinstance(attended, AttendedResult) else attended
        chosen = chosen.positions if isinstance(chosen, PositionsResult) else chosen
        n_heads = [len(mean) for mean in self.mean_patterns]
        for given, by_layer in (("attended", attended), ("chosen", chosen)):
            if (counts := [part.shape[1] for part in by_layer]) != n_heads:
                raise InfoFlowError(
                    f"labels are of layers with {n_heads} heads, {given} keys of layers with "
                    f"{counts}: expected both of one model; call label_heads() with this model"
                )
        n_pos, longest = chosen[0].shape[2], self.mean_patterns[0].shape[1]
        if n_pos > longest:
            raise InfoFlowError(
                f"labels are of at most {longest} positions, these sequences have {n_pos}: "
                "expected sequences that are no longer; label heads on texts that are as long"
            )
        layers: list[list[Rule]] = [[] for _ in self.mean_patterns]
        for index, (layer, head) in enumerate(self.heads.tolist()):
            drawn, ranked = attended[layer][:, head], chosen[layer][:, head].to(attended[layer])
            keys = drawn  # of a head that is spread
            label, name, ideal = self.labels[index], self.names[index], self.replacements[index]
            if self.idle[index]:
                keys = torch.full_like(drawn[..., :1], -1)
            # with fewer ranks than keys the head passes on all that it draws from
            elif label == "several" and int(name.removeprefix("top ")) <= ranked.shape[-1]:
                keys = ranked[..., : int(name.removeprefix("top "))]
            # fixed, max and undecided heads pass on what took their place
            elif label not in ("several", "spread"):
                keys = _keys_of(ideal, drawn, ranked, self.mean_patterns[layer][head])
            layers[layer].append(MaxPosition(keys[:, None]))
        return layers

    def assignment(self) -> dict[Head, HeadIdeal]:
        """List what takes the place of each head, for :class:`~infoflow_lens.hooks.AllHeads`."""
        places = [(int(layer), int(head)) for layer, head in self.heads.tolist()]
        return dict(zip(places, self.replacements, strict=True))  # type: ignore[arg-type]

    def counts(self) -> dict[str, int]:
        """Count the heads of each label."""
        return {name: self.labels.count(name) for name in COLOURS if name in self.labels}

    def to_frame(self) -> "pd.DataFrame":
        """Make a row for each head: label, shares of both families with errors, worth, sink."""
        layer, head = self.heads[:, 0].tolist(), self.heads[:, 1].tolist()
        columns = {
            "layer": layer,
            "head": head,
            "label": self.labels,
            "name": self.names,
            "fixed": self.fixed.tolist(),
            "fixed_error": self.fixed_error.tolist(),
            "max": self.largest.tolist(),
            "max_error": self.largest_error.tolist(),
            "gap_error": self.gap_error.tolist(),
            "worth": self.worth.tolist(),
            "measured": self.measured.tolist(),
            "sink": self.sink.tolist(),
            "idle": self.idle.tolist(),
            "replacement": self.replacements,
        }
        return pd.DataFrame(columns)

    def joint_frame(self) -> "pd.DataFrame":
        """Make a row for each assignment that replaced all heads, the least damage first."""
        columns = {
            "all heads by": self.assignments,
            "damage": self.damage.tolist(),
            "error": self.damage_error.tolist(),
            "rise": self.rise.tolist(),
        }
        return pd.DataFrame(columns).sort_values("damage", ignore_index=True)

    def sentences(self) -> list[str]:
        """Say which heads have each label, of many how many, and how good labels are together."""
        counts = ", ".join(f"{name} {n}" for name, n in self.counts().items())
        lines = [f"labels of the {len(self.labels)} heads: {counts}"]
        if len(self.labels) <= _MOST_NAMED:
            frame = self.to_frame()
            heads = frame["layer"].astype(str) + "." + frame["head"].astype(str)
            lines = [
                f"{name}: heads {' '.join(heads[frame['label'] == name])}" for name in self.counts()
            ]
        joint = dict(zip(self.assignments, self.damage.tolist(), strict=True))
        ideals = {name: joint.get(f"every head {name}", nan) for name in _EVERYWHERE}
        best = min(_EVERYWHERE[:4], key=lambda name: ideals[name])  # those of the theory's kind
        return [
            *lines,
            f"damage of replacing all heads at once ({self.metric}, 0 is none): "
            f"{joint.get(OWN, nan):.3g} by their labels, {ideals[best]:.3g} by "
            f"the best one ideal for all ({best}), {ideals['ablated']:.3g} without heads",
        ]

    def thirds_frame(self) -> "pd.DataFrame":
        """Make a row for each third of the layers: heads of each label, and their share of worth.

        Worth is what the output loses without a head, alone; estimates may miss it by far.
        """
        frame, n_layers = self.to_frame(), int(self.heads[:, 0].max()) + 1
        # rounded up, so that layers which are left over go to the first parts
        bounds = [-(-n_layers * i // 3) for i in range(4)]
        rows = []
        for first, stop in pairwise(bounds):
            some = frame[frame["layer"].between(first, stop - 1)]
            total = some["worth"].clip(lower=0).sum()
            row: dict[str, object] = {"layers": f"{first} to {stop - 1}"}
            for label in self.counts():
                own = some[some["label"] == label]
                row[label] = len(own)
                row[f"{label}, of worth"] = own["worth"].clip(lower=0).sum() / (total or nan)
            rows.extend([row] * (first < stop))
        return pd.DataFrame(rows)

    def plot(self) -> "mpl.Figure":
        """Draw the label of every head, layer by layer."""
        from matplotlib.patches import Patch, Rectangle

        layer, head = self.heads[:, 0].tolist(), self.heads[:, 1].tolist()
        figure = mpl.Figure(figsize=(1.5 + 0.3 * (max(head) + 1), 1 + 0.22 * (max(layer) + 1)))
        figure.set_layout_engine("constrained")
        axes = figure.subplots()
        for x, y, label in zip(head, layer, self.labels, strict=True):
            axes.add_patch(Rectangle((x - 0.45, y - 0.45), 0.9, 0.9, color=COLOURS[label]))
        axes.set(
            xlim=(-0.5, max(head) + 0.5), ylim=(-0.5, max(layer) + 0.5),
            xlabel="head", ylabel="layer", title="What heads do on these texts",
        )  # fmt: skip
        counts = self.counts()
        patches = [Patch(color=COLOURS[name], label=f"{name} {n}") for name, n in counts.items()]
        figure.legend(handles=patches, loc="outside right upper", fontsize="small")
        return figure


def _keys_of(
    ideal: str,
    drawn: Int[Tensor, "batch query key"],
    ranked: Int[Tensor, "batch query rank"],
    mean: Float[Tensor, "longest longest"],
) -> Int[Tensor, "batch query k"]:
    """List the keys that a head passes on when an ideal takes its place; -1 for none."""
    if ideal == "largest":
        return ranked[..., :1]
    if ideal == "gated":  # the first position keeps its weight, where it has any
        places = torch.arange(ranked.shape[-1])
        first = torch.where(ranked > 0, places, len(places) - 1).amin(dim=-1, keepdim=True)
        return torch.cat([drawn[..., :1], ranked.gather(-1, first)], dim=-1)
    n_query, n_key = drawn.shape[1:]
    mean = mean[:n_query, :n_key]
    fixed = (mean > 0) & (mean >= _FIXED_SHARE * mean.amax(dim=-1, keepdim=True))
    # a real query draws from something; padding passes nothing on
    real = (drawn >= 0).any(dim=-1, keepdim=True)
    return torch.where(fixed & real, torch.arange(n_key).to(drawn), -1)


@takes_model
@checked
def label_heads(
    model: nn.Module,
    inputs: Inputs,
    *,
    calibration: Inputs | MeanPatterns | None = None,
    judge: Inputs | None = None,
    metric: Metric | None = None,
    read: Read | None = None,
    worthiest: Index = WORTHIEST,
    draws: Count = DRAWS,
    seed: Seed = 0,
    column: str | None = None,
    max_length: Count | None = None,
    batch_size: Count = 8,
    resume: Reached | None = None,
    after: Callable[[Reached], None] | None = None,
    progress: bool = True,
) -> HeadLabels:
    """Label every head by the ideal that describes it, and replace all heads at once.

    One pass and a few backward passes estimate what every ideal of every head costs. The heads of
    most worth then get passes of their own, and are tried anew while all heads are replaced. How
    good the labels are together is judged on other texts, beside one ideal for every head, the
    same ideals dealt at random, and no head at all. docs/measures.md has the rules and their
    numbers.

    Repeats of one length make content look fixed, since the copy then stands at one distance: let
    lengths vary.

    Args:
        model: any Transformer in which edited patterns reach the output.
        inputs: the texts that labels are of.
        calibration: others, over which means are, none shorter than the longest text; or their
            :class:`~infoflow_lens.hooks.MeanPatterns`. Default: all texts here, of which each is
            judged by the means of the others.
        judge: texts on which all heads are replaced; default, every second of `inputs`, which then
            takes no part in labels.
        metric: "nmse", "kl" or "loss"; default "kl" for logits of one distribution, else "nmse".
        read: the positions of the logits that count; None for all.
        worthiest: how many heads get passes of their own.
        draws: backward passes of the estimate.
        seed: of the estimate and the random control.
        column, max_length: as for `run_probes`.
        batch_size: sequences in a pass.
        resume: what `after` was last given.
        after: called after each batch of each step with all that is measured so far.
        progress: show a bar.

    Raises:
        InfoFlowError: for fewer than two texts on either side, means of shorter texts, a model in
            which edited patterns do not reach the output, or `resume` of another run.
    """
    from scipy.special import stdtr

    layer_count(model)
    asked: dict[str, Any] = {"metric": metric, "read": read}

    def texts_of(given: Inputs, name: str) -> Batches:
        return read_inputs(model, given, name=name, column=column, max_length=max_length)

    some, judged = _split(
        texts_of(inputs, "inputs"), None if judge is None else texts_of(judge, "judge")
    )
    leaves_out = calibration is None
    damage = metric_of(model, metric, read, min(some.shortest, judged.shortest))
    settings = {
        "probe": "labels", "metric": metric, "read": read, "worthiest": worthiest, "draws": draws,
        "n_sequences": some.n_sequences, "n_judged": judged.n_sequences, "leaves_out": leaves_out,
    }  # fmt: skip
    known, others = {**settings, "metric": damage.name, "seed": seed, "means": None}, None
    if isinstance(calibration, MeanPatterns):
        known["means"] = fingerprint(calibration.to_parts()[1])
    elif calibration is not None:
        others = texts_of(calibration, "calibration")
    identity = identify(model, known, inputs=some, judge=judged, calibration=others)
    kept = KeptNumbers(identity, resume, after)
    with eval_mode(model), progress_bar("labels", _N_STEPS, progress) as step:
        if isinstance(calibration, MeanPatterns):
            means = calibration
        else:
            parts = [some, judged] if others is None else [others]
            probe = MeanPatternsProbe()
            for part in parts:
                run_probes(model, part, [probe], batch_size=batch_size, progress=False)
            means = probe.result()
        check_means(means, max(some.longest or 0, judged.longest or 0), layer_count(model))
        step(1, "mean patterns")
        asked |= {"means": means, "leaves_out": leaves_out}
        ideals = HeadIdeals(**asked)
        plain_runs: dict[int, PlainRun] = {}

        def begin(batch: Batch, first: int, run: Callable[[Needs], Pass]) -> None:
            plain_runs[first] = ideals.begin_batch(model, batch, first, run)

        estimates = estimate_ideals(
            model, some, damage, means, HEAD_IDEALS,
            leaves_out=leaves_out, draws=draws, seed=seed, batch_size=batch_size,
            kept=kept, begin=begin,
        )  # fmt: skip
        step(1, "estimated")
        rows = damage.n_rows * damage.per_row()
        found = _Labelling(model, asked, batch_size, worthiest, estimates, rows, kept)
        step(1, "labelled")
        plain = found.begin(some, plain_runs)
        found.measure_worthiest(plain)
        n_repaired = found.repair(plain)
        step(1, "repaired")
        plain = found.begin(judged)
        joint = found.replace_all(plain, seed)
        without = float(joint.damage()[joint.edits.index("every head ablated")])
        idle = found.find_idle(plain, _IDLE * without)
        step(1, "replaced all heads")
    heads = list(found.labels)
    each = list(found.labels.values())
    n_without = sum(label.fixed != label.fixed for label in each)  # NaN
    notes = (
        f"{n_without} of {len(heads)} heads are worth nothing on these texts, as happens where all "
        "texts are the same: without worth, no share says what describes them",
    ) * bool(n_without)
    if judge is None:
        notes += (
            f"labels rest on the first of every two texts, {some.n_sequences} in all, and the "
            "others judge them: where two kinds of text alternate, give one of them as judge=",
        )
    if len(some.rows) < _FEW:
        chance = 2 * float(stdtr(len(some.rows) - 1, -ERRORS))
        notes += (
            f"labels rest on {len(some.rows)} texts: with so few, a head whose families lose the "
            f"same is called fixed or max by chance in {chance:.0%} of cases",
        )
    columns = ("fixed", "largest", "fixed_error", "largest_error", "gap_error")
    return HeadLabels(
        metric=damage.name,
        n_sequences=int(some.n_sequences or 0),
        n_judged=int(judged.n_sequences or 0),
        heads=torch.tensor(heads),
        labels=tuple(label.label for label in each),
        names=tuple(label.name for label in each),
        replacements=tuple(found.replacements[head] for head in heads),
        ideals=PATTERN_IDEALS,
        shares=torch.stack([compute_shares(*found.tables[head]) for head in heads]),
        worth=torch.tensor([found.worth[head] for head in heads], dtype=torch.float64),
        measured=torch.tensor([head in found.measured for head in heads]),
        does_either=torch.tensor([label.does_either for label in each]),
        sink=torch.cat([part.double() for part in means.sink]),
        idle=torch.tensor([head in idle for head in heads]),
        mean_patterns=tuple(mean.float() for mean in means.patterns),
        assignments=joint.edits,
        damage=joint.damage(),
        damage_error=joint.errors(),
        rise=joint.risen(),
        n_repaired=n_repaired,
        forwards=estimates.forwards + found.forwards,
        record=RunRecord.from_model(model, settings, seed, fingerprint_of_model=found.fingerprint),
        notes=notes,
        **{
            name: torch.tensor([getattr(label, name) for label in each], dtype=torch.float64)
            for name in columns
        },
    )


_N_STEPS = 5


def _split(every: Batches, judged: Batches | None) -> tuple[Batches, Batches]:
    """Choose the texts that are labelled on, and those that are judged on.

    Raises:
        InfoFlowError: for fewer than two of either.
    """
    n_every = len(every.rows)  # refuses what may be read once only
    n_judged = n_every // 2 if judged is None else len(judged.rows)
    n_some = n_every if judged is not None else n_every - n_judged
    for name, n in (("labels", n_some), ("the judgement", n_judged)):
        if n < 2:
            raise InfoFlowError(
                f"there are {n} texts for {name}: expected at least 2, from which an error over "
                "texts is estimated; give more (without judge=, half of the inputs are for the "
                "judgement)"
            )
    if judged is not None:
        return every, judged
    return every.take(range(0, n_every, 2)), every.take(range(1, n_every, 2))


class _Labelling:
    """The steps of :func:`label_heads`, from estimates on.

    Args:
        model: whose heads.
        asked: what every intervention is asked, with the means.
        batch_size: sequences in a pass.
        worthiest: how many heads are measured, and repaired.
        estimates: of all heads and ideals.
        rows: the rows of the output that count, times what the loss of a row is divided by.
        kept: what is measured, also by a run that was stopped.

    Attributes:
        tables: by head, in their order, what each text loses by the ideals, and without the head.
        labels: by head.
        worth: what a row of the output loses without it.
        measured: the heads of which worth and the label's own ideal were measured.
        replacements: what takes the place of each head.
        forwards: the work so far, in passes over all texts.
    """

    def __init__(
        self,
        model: nn.Module,
        asked: Mapping[str, Any],
        batch_size: int,
        worthiest: int,
        estimates: Estimates,
        rows: float,
        kept: KeptNumbers,
    ) -> None:
        self.model, self.asked, self.batch_size = model, asked, batch_size
        self.worthiest, self.forwards = worthiest, 0.0
        self.fingerprint = model_fingerprint(model)
        self._has_sink = any(bool((sink > SINK).any()) for sink in asked["means"].sink)
        self._rows, self._kept = rows, kept
        self.tables: dict[Head, tuple[Tensor, Tensor]] = {}
        self.labels: dict[Head, HeadLabel] = {}
        self.worth: dict[Head, float] = {}
        for layer, part in enumerate(estimates.lost):
            for index, of_head in enumerate(part.clone().unbind(dim=1)):
                self.tables[layer, index] = of_head[:, :_ABLATED], of_head[:, _ABLATED]
                self._label((layer, index))
        self.measured = set(self.worth_order[::-1][:worthiest])
        self.replacements = {head: label.replacement for head, label in self.labels.items()}

    def _label(self, head: Head) -> None:
        lost, worth = self.tables[head]
        self.labels[head] = label_head(lost, worth, PATTERN_IDEALS, self._has_sink)
        self.worth[head] = float(worth.sum()) / self._rows

    @property
    def worth_order(self) -> list[Head]:
        """Order the heads, of least worth first."""
        return sorted(self.worth, key=lambda head: self.worth[head])

    def begin(
        self, batches: Batches, of_estimates: Mapping[int, PlainRun] | None = None
    ) -> list[PlainRun]:
        """Make the plain passes of some texts, once for all that is measured on them.

        Args:
            batches: the texts.
            of_estimates: by first index those that estimates have made; None where there were none.
        """
        probe, runs, done = HeadIdeals(**self.asked), [], 0
        for batch in batches.batches(self.batch_size):
            run = (of_estimates or {}).get(done)
            if run is None or len(run.plain) != len(batch):  # estimated by a run that was stopped
                run = probe.begin_batch(self.model, batch, done)
            # estimates have counted their passes already
            run.is_counted = of_estimates is not None
            runs.append(run)
            done += len(batch)
        return runs

    def measure(
        self, name: str, texts: Sequence[PlainRun], probe: Intervention
    ) -> InterventionResult:
        """Measure an intervention on texts whose plain passes are there.

        Args:
            name: of the round, by which what is measured is kept.
            texts: the passes.
            probe: the intervention.
        """
        ends = [*accumulate((len(text.plain) for text in texts), initial=0)]
        begun = copy(probe)
        self._kept.take_up(name, begun)
        if begun.n_sequences in ends:  # else it was stopped among batches of another size
            probe = begun
        probe.prepare(self.model, self.fingerprint)
        with torch.no_grad():
            for plain_run, end in zip(texts, ends[1:], strict=True):
                if end <= probe.n_sequences:
                    plain_run.is_counted, plain_run.caught = True, None
                    continue
                if plain_run.is_stale:
                    self._reach_again(plain_run)
                probe.add(probe.measure(plain_run), len(plain_run.plain))
                self._kept.keep(**{name: probe.state_dict()})
        result = probe.result()
        self.forwards += result.forwards
        return result

    def replace(
        self, name: str, texts: Sequence[PlainRun], assignments: Mapping[str, Mapping[Head, str]]
    ) -> InterventionResult:
        """Replace many heads at once, in several ways."""
        return self.measure(name, texts, AllHeads(assignments=assignments, **self.asked))

    def measure_worthiest(self, texts: Sequence[PlainRun]) -> None:
        """Measure the heads of most worth, each by its own ideal, and label them again.

        Where both families then do, one of them by an estimate alone, that one is measured, too.
        """
        top = [head for head in self.worth_order[::-1] if head in self.measured]
        asked = {(head, self.labels[head].replacement) for head in top}
        done: set[tuple[Head, HeadIdeal]] = set()
        while asked:
            for ideal in sorted({ideal for _, ideal in asked}, key=PATTERN_IDEALS.index):
                # what the heads are worth is measured once, in the first round
                self._measure_each(ideal, texts, [h for h in top if (h, ideal) in asked], not done)
            done |= asked
            for head, _ in asked:
                self._label(head)
            either = [(head, self.labels[head]) for head in top if self.labels[head].does_either]
            both = {(h, ideal) for h, own in either for ideal in (own.replacement, own.other)}
            asked = both - done
        for head in top:
            self.replacements[head] = self.labels[head].replacement

    def _measure_each(
        self, ideal: HeadIdeal, texts: Sequence[PlainRun], heads: Sequence[Head], with_worth: bool
    ) -> None:
        """Measure some heads by an ideal, and where that is not known what they are worth."""
        ideals: tuple[HeadIdeal, ...] = ("ablated", ideal) if with_worth else (ideal,)
        probe = HeadIdeals(ideals=ideals, heads=tuple(heads), **self.asked)
        # kept by name, which tells rounds with other heads apart
        name = "worthiest" if with_worth else f"either {heads}"
        result = self.measure(f"{name} {ideal}", texts, probe)
        values = dict(zip(result.edits, result.lost.clamp(min=0).T, strict=True))
        for head in heads:
            place, (lost, worth) = f"{head[0]}.{head[1]}", self.tables[head]
            if with_worth:
                # in place: the same tensors are in `tables`
                worth.copy_(values[f"{place} ablated"])
            lost[:, PATTERN_IDEALS.index(ideal)] = values[f"{place} {ideal}"]

    def repair(self, texts: Sequence[PlainRun]) -> int:
        """Try the other family for the worthiest heads while all are replaced; keep what helps.

        Below the head that is tried nothing changes: where it can, a pass begins at its layer, with
        what entered there when all were replaced.
        """
        tried = self.worth_order[::-1][: self.worthiest]
        starts = {layer for layer, _ in tried}.intersection(*(text.states for text in texts))
        texts = [replace(text, catches=sorted(starts)) for text in texts]

        def joint(name: str, assignment: Mapping[Head, HeadIdeal]) -> float:
            return float(self.replace(name, texts, {"all": assignment}).damage()[0])

        reached, n_changed, is_better = joint("labels", self.replacements), 0, True
        for head in tried:
            for text in texts:
                if is_better:
                    # caught in the pass before, which was of the assignment in use
                    text.states = {**text.states, **(text.caught or {})}
                    text.is_stale = text.caught is None  # measured by a run that was stopped
                text.first = head[0] if head[0] in starts else None
            trial = {**self.replacements, head: self.labels[head].other}
            damage = joint(f"repair {head[0]}.{head[1]}", trial)
            is_better = damage < reached
            if is_better:
                self.replacements, reached = trial, damage
                n_changed += 1
        return n_changed

    def _reach_again(self, text: PlainRun) -> None:
        """Make anew what enters the layers of a text where a run that was stopped had it."""
        probe = AllHeads(assignments={"all": self.replacements}, **self.asked)
        probe.prepare(self.model, self.fingerprint)
        first, text.first = text.first, None
        probe.measure(text)
        text.states, text.first = {**text.states, **(text.caught or {})}, first
        text.is_stale = False

    def replace_all(self, texts: Sequence[PlainRun], seed: int) -> InterventionResult:
        """Replace all heads at once by their labels, by one ideal for all, and at random."""
        heads = list(self.labels)
        several = {
            head: label.several if label.label == "several" else self.replacements[head]
            for head, label in self.labels.items()
        }
        generator = torch.Generator().manual_seed(derive_seed("dealt", seed))
        order = torch.randperm(len(heads), generator=generator).tolist()
        dealt = {head: self.replacements[heads[i]] for head, i in zip(heads, order, strict=True)}
        assignments = {OWN: self.replacements, SEVERAL: several}
        assignments["labels dealt to heads at random"] = dealt
        assignments |= {f"every head {i}": dict.fromkeys(heads, i) for i in _EVERYWHERE}
        return self.replace("all heads", texts, assignments)

    def find_idle(self, texts: Sequence[PlainRun], most: float) -> set[Head]:
        """Find the most heads that do not matter together, by halving.

        Args:
            texts: the passes on which they are replaced.
            most: the damage up to which they do not, where there is no loss of the next token.
        """
        order = self.worth_order
        # the first `low` heads are known to be idle together; no more than `high` can be
        low, high = 0, len(order)
        while high - low > len(order) // _SURE_TO:
            middle = (low + high + 1) // 2
            some = {"idle": dict.fromkeys(order[:middle], "ablated")}
            result = self.replace(f"idle {middle}", texts, some)
            rise, error = result.risen(), jackknife(result.rise, result.n_tokens[:, None])
            is_idle = bool(rise < error)
            if rise.isnan().any():
                is_idle = float(result.damage()[0]) <= most
            low, high = (middle, high) if is_idle else (low, middle - 1)
        return set(order[:low])
