"""Which mechanism does a head need? Its pattern replaced by an idealised one, and what that costs.

If the model's output stays as it is when a head's pattern is replaced by an ideal one, that
mechanism is all that the head needs on these inputs. What describes a head, and costs less to
find out, is a label (:func:`~infoflow_lens.hooks.label_heads`).

A head's mechanism is the cheapest that is enough for it alone. Whether they are enough together is
asked on other sequences than those on which they were found, in nats of next-token loss, beside one
and the same ideal for every head, random mechanisms, and no head at all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Gt, Le, MinLen
from jaxtyping import Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.display import Displayed, plain_label
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import mpl, pd
from infoflow_lens.foundation.modules import derive_seed, eval_mode
from infoflow_lens.foundation.progress import progress_bar
from infoflow_lens.foundation.record import RunRecord, fingerprint, hash_values, model_fingerprint
from infoflow_lens.foundation.saving import Savable
from infoflow_lens.foundation.settings import (
    Count,
    Distinct,
    Index,
    NonNegative,
    Seed,
    check,
    checked,
)
from infoflow_lens.hooks.interventions.damage import Metric, NextTokenLoss, Read, metric_of
from infoflow_lens.hooks.interventions.ideals import AllHeads, Head, check_means
from infoflow_lens.hooks.interventions.kept import KeptNumbers, Reached, identify
from infoflow_lens.hooks.interventions.patterns import (
    IDEALS,
    Heads,
    Ideal,
    MeanPatterns,
    MeanPatternsProbe,
    name_ideal,
)
from infoflow_lens.hooks.interventions.probe import Intervention, InterventionResult
from infoflow_lens.hooks.mechanisms.result import MechanismsResult
from infoflow_lens.hooks.model.inputs import Batches, Inputs, read_inputs
from infoflow_lens.hooks.model.points import layer_count, takes_model
from infoflow_lens.hooks.passes.run import run_probes
from infoflow_lens.hooks.result import LabelledArray, Result, frame_of


def read_again(
    model: nn.Module,
    inputs: Inputs,
    attention_mask: Tensor | None,
    column: str | None,
    max_length: int | None,
) -> Batches:
    """Read inputs that several passes go over, as `run_probes` does.

    Raises:
        InfoFlowError: for inputs that can be read once only, or no TransformerLens model.
    """
    layer_count(model)
    batches = read_inputs(
        model, inputs, attention_mask=attention_mask, column=column, max_length=max_length
    )
    if batches.longest is None:
        raise InfoFlowError(
            f"inputs is {type(inputs).__name__}, which may be read once only: several passes "
            "go over the inputs; give a tensor, a list or a datasets.Dataset"
        )
    return batches


def read_calibration(
    model: nn.Module, given: Inputs, inputs: Batches, column: str | None, max_length: int | None
) -> Batches:
    """Read the sequences over which mean patterns are taken.

    Raises:
        InfoFlowError: as for :func:`read_again`, and for shorter ones than the inputs.
    """
    others = read_again(model, given, None, column, max_length)
    if (others.longest or 0) < (inputs.longest or 0):
        raise InfoFlowError(
            f"calibration has sequences of at most {others.longest} positions, the inputs "
            f"have {inputs.longest}: expected mean patterns as long; give longer ones, or cut "
            f"the inputs with max_length={others.longest}"
        )
    return others


@dataclass(frozen=True)
class Rounds:
    """Rounds of interventions on the same sequences, each of them measured once.

    Attributes:
        model: the model.
        batches: the sequences.
        calibration: those of mean patterns; None where they are the same.
        kept: what all rounds have measured so far, also in a run before.
        batch_size: sequences in a pass.
        progress: show a bar.
    """

    model: nn.Module
    batches: Batches
    calibration: Batches | None
    kept: KeptNumbers
    batch_size: int
    progress: bool

    def measure(self, name: str, probe: Intervention) -> InterventionResult:
        """Measure what is not measured yet of an intervention, which is kept by that name.

        Raises:
            InfoFlowError: as the probe says.
        """
        self.kept.take_up(name, probe)
        result: InterventionResult
        (result,) = run_probes(
            self.model, self.batches, [probe], batch_size=self.batch_size,
            skip=probe.n_sequences, progress=self.progress,
            after_batch=lambda n: self.kept.keep(**{name: probe.state_dict()}),
        )  # fmt: skip
        return result

    def find_means(self, what: Literal["patterns", "outputs"]) -> MeanPatterns:
        """Find mean patterns, or outputs, of the calibration."""
        return run_probes(
            self.model, self.calibration or self.batches, [MeanPatternsProbe(what)],
            batch_size=self.batch_size, progress=False,
        )[0]  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class NextTokenResult(Result):
    """The base of results that tell by how much an edited model's loss rises.

    Attributes:
        bare: float [sequence], summed next-token loss of the model as it is, in nats.
        n_tokens: int [sequence], predictions that count.
    """

    makes_small_table: ClassVar[bool] = True

    bare: Float[Tensor, " sequence"]
    n_tokens: Int[Tensor, " sequence"]

    @property
    def loss(self) -> float:
        """Compute the loss of the model as it is, in nats a token."""
        return float(self.bare.sum() / self.n_tokens.sum())


@takes_model
@checked
def measure_mechanisms(
    model: nn.Module,
    inputs: Inputs,
    *,
    calibration: Inputs | None = None,
    held_out: bool = True,
    metric: Metric | None = None,
    read: Read | None = None,
    threshold: NonNegative = 0.05,
    k: Count = 4,
    attention_mask: torch.Tensor | None = None,
    column: str | None = None,
    max_length: Count | None = None,
    batch_size: Count = 16,
    resume: Reached | None = None,
    after: Callable[[Reached], None] | None = None,
    progress: bool = True,
) -> MechanismsResult:
    """Measure the mechanism that each head needs: its pattern replaced by an ideal one.

    An intervention (:class:`~infoflow_lens.hooks.AllHeads`) with an edit for each head and ideal,
    on all sequences: five times as many edits as heads, of which several run in one pass, from the
    edited layer on where a pass can start there. The model is left as it was found.

    No sequence is judged by a mean pattern that it is in: damage measured so favours "specific
    position", the more the fewer sequences there are.

    Args:
        model: any Transformer in which an edited pattern reaches the output.
        inputs: sequences that are judged, in any of the forms that `run_probes` reads.
        calibration: other sequences, over which the mean patterns are, none shorter than the
            longest of `inputs`; default, `inputs` themselves, of which each is then judged by the
            mean pattern of all others.
        held_out: without a calibration: leave the sequence out. False gives the numbers of
            versions before 0.3.
        metric: "nmse", "kl" or "loss"; default "kl" for logits of one distribution, else "nmse".
        read: the positions of the logits that count, such as (-1,), the last of each sequence; None
            for all. Vector models have one output.
        threshold: the damage up to which an ideal is enough.
        k: for "top_k".
        attention_mask, column, max_length: as for `run_probes`.
        batch_size: sequences in a pass; several replacements of some of them may run together.
        resume: what `after` was last given.
        after: called after each batch with all that is measured so far.
        progress: show a bar.

    Raises:
        InfoFlowError: for bad inputs or settings, a calibration that is shorter than the inputs, a
            model whose patterns cannot be replaced, or progress of other settings or another model.
    """
    batches, others = read_again(model, inputs, attention_mask, column, max_length), None
    if calibration is not None:
        others = read_calibration(model, calibration, batches, column, max_length)
    damage = metric_of(model, metric, read, batches.shortest)
    settings: dict[str, Any] = {
        "metric": damage.name,
        "read": damage.read,
        "k": k,
        "n_sequences": batches.n_sequences,
        "held_out": held_out or others is not None,
        "n_calibration": None if others is None else others.n_sequences,
    }
    fingerprint = model_fingerprint(model)
    kept = KeptNumbers(identify(model, settings, inputs=batches, calibration=others), resume, after)
    rounds = Rounds(model, batches, others, kept, batch_size, progress)
    with eval_mode(model):
        means = rounds.find_means("patterns")
        counts = [len(mean) for mean in means.patterns]
        replacements = {
            f"{layer}.{head} {ideal}": {(layer, head): name_ideal(ideal, k)}
            for layer, n_heads in enumerate(counts)
            for head in range(n_heads)
            for ideal in IDEALS
        }
        probe = AllHeads(
            means, replacements, leaves_out=held_out and others is None, metric=damage.name,
            read=read, through_hooks=True,
        )  # fmt: skip
        found = rounds.measure("ideals", probe)
    return MechanismsResult(
        ideals=IDEALS,
        metric=damage.name,
        threshold=threshold,
        k=k,
        n_sequences=int(batches.n_sequences or 0),
        # edits stand by layer, head and ideal, as they were named
        damage=found.damage().float().view(-1, len(IDEALS)).split(counts),
        error=found.errors().float().view(-1, len(IDEALS)).split(counts),
        mean_patterns=tuple(mean.float().cpu() for mean in means.patterns),
        record=RunRecord.from_model(
            model, {"probe": "mechanisms", "threshold": threshold, **settings},
            fingerprint_of_model=fingerprint,
        ),
    )  # fmt: skip


Ideals = Annotated[tuple[Ideal, ...], MinLen(1), Distinct()]


@dataclass(frozen=True)
class JointReplacement(Displayed, Savable):
    """Heads that are replaced at once.

    Attributes:
        heads: (layer, head) and its ideal, in the order in which they were taken.
        damage: what the output loses with all of them replaced.
        share: their share of all heads.
    """

    heads: dict[tuple[int, int], Ideal]
    damage: float
    share: float


@takes_model
@checked
def replace_greedily(
    model: nn.Module,
    inputs: Inputs,
    mechanisms: MechanismsResult,
    *,
    budget: NonNegative,
    ideals: Ideals | None = None,
    read: Read | None = None,
    attention_mask: Tensor | None = None,
    column: str | None = None,
    max_length: Count | None = None,
    batch_size: Count = 16,
    progress: bool = True,
) -> JointReplacement:
    """Replace as many heads at once as a budget allows, greedily.

    Heads come in the order of their own damage; each is taken if all taken ones together stay
    within the budget. As everywhere, what the output gains at one position does not make up for
    what it loses at another. What is chosen here on some sequences is to be judged on others
    (:func:`~infoflow_lens.hooks.measure_sufficiency`).

    Args:
        model: the model that was measured.
        inputs: sequences other than those of the mean patterns.
        mechanisms: of these heads.
        budget: the largest joint damage, in the units of ``mechanisms.metric``.
        ideals: those that are tried at every head, of which it gets the one with which the output
            loses least beside the heads that are taken; default, its own mechanism alone, and heads
            without one stay as they are.
        read, attention_mask, column, max_length: as for :func:`measure_mechanisms`.
        batch_size: sequences in a pass.
        progress: show a bar.

    Raises:
        InfoFlowError: for a negative budget or bad inputs.
    """
    batches = read_again(model, inputs, attention_mask, column, max_length)
    candidates = []
    for layer, names in enumerate(mechanisms.mechanisms()):
        for head, name in enumerate(names):
            tried = ideals or tuple(ideal for ideal in IDEALS if ideal == name)
            damage = mechanisms.damage[layer][head]
            if tried:
                least = min(float(damage[IDEALS.index(ideal)]) for ideal in tried)
                candidates.append((least, layer, head, tried))
    taken: dict[Head, Ideal] = {}
    reached = 0.0
    means, metric = mechanisms.means(), check(mechanisms.metric, Metric, "metric")
    with progress_bar("joining", len(candidates), progress) as step:
        for _, layer, head, tried in sorted(candidates):
            trials = {ideal: {**taken, (layer, head): ideal} for ideal in tried}
            named: dict[str, dict[Head, str]] = {
                ideal: {at: name_ideal(i, mechanisms.k) for at, i in trial.items()}
                for ideal, trial in trials.items()
            }
            probe = AllHeads(means, named, metric=metric, read=read, through_hooks=True)
            result: InterventionResult
            (result,) = run_probes(model, batches, [probe], batch_size=batch_size, progress=False)
            lost = dict(zip(result.edits, result.damage().tolist(), strict=True))
            best = min(tried, key=lambda ideal: lost[ideal])
            # a head that does not fit is left out for good, and the next one is tried
            if lost[best] <= budget:
                taken, reached = trials[best], lost[best]
            step(1)
    n_heads = sum(len(layer) for layer in mechanisms.damage)
    return JointReplacement(taken, reached, len(taken) / n_heads)


MECHANISMS, MEAN, RANDOM = "mechanisms", "mean ablation", "random mechanisms"
EVERY = "every head "
OF_THEORY: tuple[Ideal, ...] = ("global", "specific_position", "max_position")
SHARES = (0.25, 0.5, 0.75, 1.0)
KS = (1, 2, 4, 8, 16)

Shares = Annotated[tuple[Annotated[float, Gt(0), Le(1)], ...], MinLen(1)]
Ks = Annotated[tuple[Count, ...], Distinct()]

_RESAMPLED = 2000  # draws of a bootstrap over sequences


class Interval(NamedTuple):
    """A number and its 95% interval, a bootstrap over sequences; NaN for a single one."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, eq=False, kw_only=True)
class SufficiencyResult(NextTokenResult):
    """The loss with shares of the heads replaced.

    Attributes:
        shares: which shares of all heads are replaced; heads of least damage come first.
        n_replaced: the heads of each share.
        assignments: what takes the place of a head, in the order of the first axis: "mechanisms",
            its own; "mean ablation", its mean output; "random mechanisms 0", ..., the mechanisms of
            all heads dealt at random. And with all heads replaced alone: "every head top 1", which
            is the hard maximum, "every head top 2", ..., "every head specific_position", "every
            head global", "every head own_position", and those that were given.
        losses: float [assignment, share, sequence], summed next-token loss in nats; NaN where it
            was not measured.
        heads: int [head, 2], layer and head in the order of replacement.
        ideals: for each of these the ideal that takes its place.
    """

    shares: tuple[float, ...]
    n_replaced: tuple[int, ...]
    assignments: tuple[str, ...]
    losses: Float[Tensor, "assignment share sequence"]
    heads: Int[Tensor, "head two"]
    ideals: tuple[str, ...]

    def excess(self) -> Float[Tensor, "assignment share"]:
        """Compute what the loss rises by, in nats a token."""
        return (self.losses - self.bare).sum(dim=2) / self.n_tokens.sum()

    def errors(self) -> Float[Tensor, "assignment share"]:
        """Estimate one standard error of :meth:`excess`, over sequences."""
        n = len(self.bare)
        if n < 2:
            return torch.full(self.losses.shape[:2], torch.nan, dtype=torch.float64)
        weight = self.n_tokens / self.n_tokens.sum()
        # of a ratio of sums, to first order: sequences count by their shares of the tokens
        apart = (self.losses - self.bare) / self.n_tokens - self.excess()[..., None]
        return ((apart * weight).square().sum(dim=2) * n / (n - 1)).sqrt()

    def share(self, of: str = MEAN, assignment: str = MECHANISMS) -> Interval:
        """Return the excess of an assignment over that of another, all heads replaced."""
        return self._resample(assignment, of, torch.div)

    def lead(self, over: str, assignment: str = MECHANISMS) -> Interval:
        """Compute how many nats a token an assignment costs less, all heads replaced."""
        return self._resample(assignment, over, lambda own, other: other - own)

    def _resample(
        self, assignment: str, other: str, made: Callable[[Tensor, Tensor], Tensor]
    ) -> Interval:
        """Make a number of two excesses, and its 95% interval over sequences drawn anew."""
        n = len(self.bare)
        places = [self.assignments.index(name) for name in (assignment, other)]
        # [2, sequence], with all heads replaced, or as many as were
        lost = self.losses[places, self.n_replaced.index(max(self.n_replaced))] - self.bare
        generator = torch.Generator().manual_seed(derive_seed("resampled sequences"))
        drawn = torch.randint(n, (_RESAMPLED, n), generator=generator)
        value = made(*(lost.sum(dim=1) / self.n_tokens.sum()))
        again = made(*(lost[:, drawn].sum(dim=2) / self.n_tokens[drawn].sum(dim=1)))
        low, high = torch.quantile(again, torch.tensor([0.025, 0.975]).to(again)).tolist()
        if n < 2:  # drawn again, a sequence is the same
            low = high = torch.nan
        return Interval(float(value), low, high)

    def to_frame(self) -> "pd.DataFrame":
        """Make a row for each assignment and share that was measured."""
        excess = self.excess()
        numbers = {
            "n_replaced": torch.tensor(self.n_replaced).expand(excess.shape),
            "loss": self.loss + excess,
            "excess": excess,
            "error": self.errors(),
        }
        dims, coords = (
            ("assignment", "share"),
            {"assignment": self.assignments, "share": self.shares},
        )
        measured = LabelledArray("measured", ~excess.isnan(), dims)
        columns = [LabelledArray(name, v, dims, coords) for name, v in numbers.items()]
        return frame_of(columns, measured)

    def plot(self) -> "mpl.Figure":
        """Draw the loss by the share of replaced heads; one ideal for all heads as points."""
        figure = mpl.Figure(figsize=(6, 3.5), layout="constrained")
        axes = figure.subplots()
        colours = {MECHANISMS: "#d55e00", MEAN: "#444444"}
        for name, rows in self.to_frame().groupby("assignment", sort=False):
            kind = RANDOM if str(name).startswith(RANDOM) else plain_label(name)
            if len(rows) < len(self.shares):
                axes.plot(rows["share"], rows["loss"], "_", markersize=12, label=kind)
                continue
            shares, losses = [0.0, *rows["share"]], [self.loss, *rows["loss"]]
            axes.plot(shares, losses, color=colours.get(kind, "#56b4e9"), label=kind)
        lines = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        axes.legend(lines.values(), lines.keys(), fontsize="small")
        axes.set(
            xlabel="share of heads", ylabel="nats a token", title="Heads replaced, all at once"
        )
        return figure


def assign_ideals(mechanisms: MechanismsResult) -> dict[Head, tuple[Ideal, float]]:
    """List every head's ideal and its damage, the least damage first.

    A head that stays soft has none that is enough; it gets the one of least damage.
    """
    found: dict[Head, tuple[Ideal, float]] = {}
    least = choose_least_damage(mechanisms)
    for layer, names in enumerate(mechanisms.mechanisms()):
        for head, name in enumerate(names):
            ideal: Any = name if name in mechanisms.ideals else least[layer, head]
            damage = mechanisms.damage[layer][head]
            found[layer, head] = ideal, float(damage[mechanisms.ideals.index(ideal)])
    return dict(sorted(found.items(), key=lambda item: (item[1][1], item[0])))


def choose_least_damage(
    mechanisms: MechanismsResult, ideals: Sequence[Ideal] = IDEALS
) -> dict[Head, Ideal]:
    """Choose every head's ideal of least damage.

    Args:
        mechanisms: the result of :func:`~infoflow_lens.hooks.measure_mechanisms`.
        ideals: among these.
    """
    places = [mechanisms.ideals.index(ideal) for ideal in ideals]
    return {
        (layer, head): ideals[int(row.argmin())]
        for layer, damage in enumerate(mechanisms.damage)
        for head, row in enumerate(damage[:, places])
    }


@takes_model
@checked
def measure_sufficiency(
    model: nn.Module,
    inputs: Inputs,
    mechanisms: MechanismsResult,
    *,
    shares: Shares = SHARES,
    draws: Index = 4,
    ks: Ks = KS,
    others: Mapping[str, Heads] | None = None,
    last: Count | None = None,
    seed: Seed = 0,
    attention_mask: Tensor | None = None,
    column: str | None = None,
    max_length: Count | None = None,
    batch_size: Count = 16,
    resume: Reached | None = None,
    after: Callable[[Reached], None] | None = None,
    progress: bool = True,
) -> SufficiencyResult:
    """Measure the next-token loss with many heads replaced at once by their mechanisms.

    Controls: one and the same ideal for every head, the same mechanisms dealt to the heads at
    random, and mean ablation, every replaced head's output its mean over these sequences (which
    favours the control). That a head's own mechanism says something of it is shown by the distance
    to the best of these, not by the loss alone.

    Args:
        model: the language model whose mechanisms these are.
        inputs: sequences, others than those on which mechanisms were measured, and no longer.
        mechanisms: the result of :func:`~infoflow_lens.hooks.measure_mechanisms`.
        shares: which shares of all heads to replace.
        draws: how many random assignments there are.
        ks: keys that every head keeps, in one pass each; 1 is the hard maximum.
        others: more assignments by name, such as a `JointReplacement.heads`: (layer, head) and its
            ideal. Heads that are not named stay as they are.
        last: how many predictions of each sequence count, the last ones; None for all.
        seed: of the random mechanisms.
        attention_mask, column, max_length: as for `run_probes`.
        batch_size: sequences in a pass.
        resume: what `after` was last given.
        after: called after each batch with all that is measured so far.
        progress: show a bar.

    Raises:
        InfoFlowError: for another model than the one that was measured, shares outside of (0, 1],
            names of others that are taken, sequences that are longer than the mean patterns, a
            model without next tokens, or one in which edited patterns do not reach the output.
    """
    batches = read_again(model, inputs, attention_mask, column, max_length)
    loss = NextTokenLoss(last)
    loss.check(model, batches.shortest)
    weights = model_fingerprint(model)
    remedy = "expected the same; measure the mechanisms of this model"
    mechanisms.record.check_model(weights, "mechanisms are of", remedy)
    means = mechanisms.means()
    check_means(means, batches.longest or 0, layer_count(model))
    least = assign_ideals(mechanisms)
    heads = list(least)
    ideals = [ideal for ideal, _ in least.values()]
    # measured at every share of heads; the others where all are replaced
    by_share: dict[str, Mapping[Head, str]] = {
        MECHANISMS: dict(zip(heads, ideals, strict=True)),
        MEAN: dict.fromkeys(heads, "ablated"),
    }
    for draw in range(draws):
        generator = torch.Generator().manual_seed(derive_seed("sufficiency", seed, draw))
        order = torch.randperm(len(heads), generator=generator).tolist()
        by_share[f"{RANDOM} {draw}"] = {heads[at]: ideals[i] for at, i in enumerate(order)}
    uniform = [f"top {k}" for k in ks] + ["specific_position", "global", "own_position"]
    of_all: dict[str, Mapping[Head, str]] = {EVERY + i: dict.fromkeys(heads, i) for i in uniform}
    if repeated := set(others or ()) & {*by_share, *of_all}:
        raise InfoFlowError(
            f"others has {sorted(repeated)}, which are names of assignments that are measured in "
            "any case: expected other names"
        )
    of_all |= others or {}
    counts = [max(1, round(share * len(heads))) for share in shares]
    names = (*by_share, *of_all)
    assignments = {
        f"{name} {n}": {
            head: name_ideal(given[head], mechanisms.k) for head in heads[:n] if head in given
        }
        for name, given in {**by_share, **of_all}.items()
        for n in counts
        if name in by_share or n == len(heads)
    }
    settings = {
        "probe": "sufficiency",
        "shares": list(shares),
        "draws": draws,
        "ks": list(ks),
        "last": last,
        "seed": seed,
        "mechanisms": dict(mechanisms.record.config),
    }
    patterns = fingerprint({str(i): mean for i, mean in enumerate(mechanisms.mean_patterns)})
    # what takes the place of heads, and of their patterns, is no setting and goes into the losses
    replaced = [(name, sorted(given.items())) for name, given in assignments.items()]
    identity = {**settings, "replaced": hash_values(replaced), "mean_patterns": patterns}
    kept = KeptNumbers(identify(model, identity, inputs=batches), resume, after)
    rounds = Rounds(model, batches, None, kept, batch_size, progress)
    # one mean over all positions, put at each of them
    own = rounds.find_means("outputs").mean_outputs()
    outputs = tuple(mean.expand(means.n_pos, -1, -1) for mean in own)
    means = replace(means, outputs=outputs)
    probe = AllHeads(means, assignments, readout=loss, rows=1, through_hooks=True)
    found = rounds.measure("replaced", probe)
    values = found.values()
    missing = torch.full_like(found.bare, torch.nan)
    rows = [[values.get(f"{name} {n}", missing) for n in counts] for name in names]
    return SufficiencyResult(
        shares=shares,
        n_replaced=tuple(counts),
        assignments=names,
        losses=torch.stack([torch.stack(row) for row in rows]),
        bare=found.bare,
        n_tokens=found.n_tokens,
        heads=torch.tensor(heads),
        ideals=tuple(ideals),
        record=RunRecord.from_model(model, settings, seed, fingerprint_of_model=weights),
    )
