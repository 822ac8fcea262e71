"""Are the mechanisms enough together? Many heads replaced at once, and what loss remains.

A head's mechanism is the cheapest that is enough for it alone. Whether they are enough together is
asked on other sequences than those on which they were found, in nats of next-token loss, beside one
and the same ideal for every head, random mechanisms, and no head at all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import torch
from annotated_types import Gt, Le, MinLen
from jaxtyping import Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.display import plain_label
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import mpl, pd
from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.foundation.record import RunRecord, fingerprint, hash_values, model_fingerprint
from infoflow_lens.foundation.settings import Count, Distinct, Index, Seed, checked
from infoflow_lens.hooks.interventions.damage import NextTokenLoss
from infoflow_lens.hooks.interventions.ideals import AllHeads, Head, check_means
from infoflow_lens.hooks.interventions.kept import KeptNumbers, Reached, identify
from infoflow_lens.hooks.interventions.patterns import IDEALS, Heads, Ideal, name_ideal
from infoflow_lens.hooks.mechanisms.measure import NextTokenResult, Rounds, read_again
from infoflow_lens.hooks.mechanisms.result import MechanismsResult
from infoflow_lens.hooks.model.inputs import Inputs
from infoflow_lens.hooks.model.points import layer_count, takes_model
from infoflow_lens.hooks.result import LabelledArray, frame_of

MECHANISMS, MEAN, RANDOM = "mechanisms", "mean ablation", "random mechanisms"
EVERY = "every head "
OF_THEORY: tuple[Ideal, ...] = ("global", "specific_position", "max_position")
SHARES = (0.25, 0.5, 0.75, 1.0)
KS = (1, 2, 4, 8, 16)

Shares = Annotated[tuple[Annotated[float, Gt(0), Le(1)], ...], MinLen(1)]
Ks = Annotated[tuple[Count, ...], Distinct()]

_RESAMPLED = 2000  # draws of a bootstrap over sequences


class Interval(NamedTuple):
    """A number and its 95% interval."""

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
    if mechanisms.record.model_fingerprint != weights:
        raise InfoFlowError(
            f"mechanisms are of model {mechanisms.record.model_fingerprint}, this is {weights} "
            "(other weights): expected the same; measure the mechanisms of this model"
        )
    means = mechanisms.means()
    check_means(means, batches.longest or 0, layer_count(model))
    mine = assign_ideals(mechanisms)
    heads = list(mine)
    ideals = [ideal for ideal, _ in mine.values()]
    dealt: dict[str, Mapping[Head, str]] = {
        MECHANISMS: dict(zip(heads, ideals, strict=True)),
        MEAN: dict.fromkeys(heads, "ablated"),
    }
    for draw in range(draws):
        generator = torch.Generator().manual_seed(derive_seed("sufficiency", seed, draw))
        order = torch.randperm(len(heads), generator=generator).tolist()
        dealt[f"{RANDOM} {draw}"] = {heads[at]: ideals[i] for at, i in enumerate(order)}
    single = [f"top {k}" for k in ks] + ["specific_position", "global", "own_position"]
    whole: dict[str, Mapping[Head, str]] = {EVERY + i: dict.fromkeys(heads, i) for i in single}
    if taken := set(others or ()) & {*dealt, *whole}:
        raise InfoFlowError(
            f"others has {sorted(taken)}, which are names of assignments that are measured in any "
            "case: expected other names"
        )
    whole |= others or {}
    counts = [max(1, round(share * len(heads))) for share in shares]
    names = (*dealt, *whole)
    assignments = {
        f"{name} {n}": {
            head: name_ideal(given[head], mechanisms.k) for head in heads[:n] if head in given
        }
        for name, given in {**dealt, **whole}.items()
        for n in counts
        if name in dealt or n == len(heads)
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
    known = {**settings, "replaced": hash_values(replaced), "mean_patterns": patterns}
    kept = KeptNumbers(identify(model, known, inputs=batches), resume, after)
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
