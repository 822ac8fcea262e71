"""Which mechanism does a head need? Its pattern replaced by an idealised one, and what that costs.

If the model's output stays as it is when a head's pattern is replaced by an ideal one, that
mechanism is all that the head needs on these inputs.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import pairwise
from math import pi
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.foundation.progress import Advance, progress_bar
from infoflow_lens.foundation.record import RunRecord, model_fingerprint
from infoflow_lens.foundation.seeds import derive_seed
from infoflow_lens.foundation.settings import Count, NonNegative, Seed, checked
from infoflow_lens.hooks.interventions.damage import Damage, Metric, Read, metric_of
from infoflow_lens.hooks.interventions.estimate import estimate_batch
from infoflow_lens.hooks.interventions.ideals import AllHeads, Head, LayerMeans
from infoflow_lens.hooks.interventions.kept import KeptNumbers, Reached, identify
from infoflow_lens.hooks.interventions.means import MeanPatternsProbe
from infoflow_lens.hooks.interventions.passes import real_queries, sequences_at_once
from infoflow_lens.hooks.interventions.patterns import IDEALS, name_ideal
from infoflow_lens.hooks.mechanisms.driver import read_again, read_calibration
from infoflow_lens.hooks.mechanisms.result import MechanismsResult
from infoflow_lens.hooks.model.call import call
from infoflow_lens.hooks.model.inputs import Batches, Inputs
from infoflow_lens.hooks.model.points import layer_count, pattern_hook, takes_model
from infoflow_lens.hooks.passes.run import run_probes

_DRAWS, _MOST_DRAWS = 64, 8  # directions of an estimate: over all sequences, and for each
_FIRST = 8  # one in so many sequences is in the first block, which has at least
_ROWS_FIRST = 64  # rows of the output in the first block of sequences
_STANDARD_ERRORS = 4.0  # between a mean over some sequences and the threshold
_DOUBT = 2.0  # times the estimate, that an early "enough" needs to be within the threshold
_FAR = 10.0  # times the threshold: where an estimate alone excludes an ideal
_N_IDEALS = len(IDEALS)
_MEAN = IDEALS.index("specific_position")


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
    exact: bool = False,
    seed: Seed = 0,
    attention_mask: Tensor | None = None,
    column: str | None = None,
    max_length: Count | None = None,
    batch_size: Count = 16,
    resume: Reached | None = None,
    after: Callable[[Reached], None] | None = None,
    progress: bool = True,
) -> MechanismsResult:
    """The mechanism that each head needs: its pattern replaced by an ideal one.

    First the damage of all heads and ideals is estimated, to second order, from a few backward
    passes (:mod:`~infoflow_lens.hooks.interventions.estimate`). The estimate alone only
    excludes ideals, those whose damage it puts far above the threshold. By each of the others the
    head's pattern is replaced, on as many sequences as it takes to decide whether it is enough: all
    that are enough are listed, and each rests on a replacement. docs/measures.md has the rule.
    Where a pass can start at a layer a replacement runs only the layers from its own on. The model
    is left as it was found.

    No sequence is judged by a mean pattern that it is in: damage measured so favours "specific
    position", the more the fewer sequences there are.

    Args:
        model: any TransformerLens model in which an edited pattern reaches the output.
        inputs: sequences that are judged, in any of the forms that `run_probes` reads.
        calibration: other sequences, over which the mean patterns are, none shorter than the
            longest of `inputs`; default, `inputs` themselves, of which each is then judged by the
            mean pattern of all others.
        held_out: without a calibration: leave the sequence out. False gives the numbers of
            versions before 0.3.
        metric: "nmse", "kl" or "loss"; default "nmse" for vector outputs and "kl" for logits.
        read: the positions of the logits that count, such as (-1,), the last of each sequence; None
            for all. Vector models have one output.
        threshold: the damage up to which an ideal is enough.
        k: for "top_k".
        exact: measure all ideals of all heads on all sequences; the estimate then serves the error
            from the calibration alone.
        seed: of the estimate, and of the order in which sequences are taken.
        attention_mask, column, max_length: as for `run_probes`.
        batch_size: sequences in a pass; several replacements of some of them may run together.
        resume: what `after` was last given.
        after: called after each batch with all that is measured so far.
        progress: show a bar.

    Raises:
        InfoFlowError: for bad inputs or settings, a calibration that is shorter than the inputs, a
            model whose patterns cannot be replaced, or progress of other settings or another model.
    """
    batches = read_again(model, inputs, attention_mask, column, max_length)
    others = None
    if calibration is not None:
        others = read_calibration(model, calibration, batches, column, max_length)
    damage = metric_of(model, metric, read, batches.shortest)
    settings = {
        "metric": damage.name,
        "read": damage.read,
        "threshold": threshold,
        "k": k,
        "exact": exact,
        "seed": seed,
        "n_sequences": batches.n_sequences,
        "held_out": held_out or others is not None,
        "n_calibration": None if others is None else others.n_sequences,
    }
    fingerprint = model_fingerprint(model)
    known = identify(model, settings, inputs=batches, calibration=others)
    with eval_mode(model), progress_bar("replacing", None, progress) as step:
        run = _Run(model, batches, others, damage, known, batch_size, resume, after, step)
        run.estimate()
        run.replace()
    counts = [len(mean) for mean in run.means.patterns]
    by_layer = [
        numbers.view(-1, _N_IDEALS).split(counts)
        for numbers in (run.damages().float(), run.measured.sum(dim=0), run.errors().float())
    ]
    return MechanismsResult(
        ideals=IDEALS,
        metric=damage.name,
        threshold=threshold,
        k=k,
        n_sequences=run.n,
        damage=by_layer[0],
        replaced=by_layer[1],
        error=by_layer[2],
        mean_patterns=tuple(mean.float().cpu() for mean in run.means.patterns),
        record=RunRecord.from_model(
            model, {"probe": "mechanisms", **settings}, seed, fingerprint_of_model=fingerprint
        ),
    )


class _Run(KeptNumbers):
    """One measurement; tensors that it has reached are never changed, but replaced.

    Attributes:
        estimates: the estimated loss of every (layer, head, ideal), summed over sequences.
        slopes: by layer, the derivative of the estimates by the mean patterns, and its noise.
        lost: what each sequence loses by each replacement; 0 where that is not measured.
        measured: whether it is.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        others: Batches | None,
        metric: Damage,
        settings: dict[str, Any],
        batch_size: int,
        resume: Reached | None,
        after: Callable[[Reached], None] | None,
        step: Advance,
    ) -> None:
        super().__init__(settings, resume, after)
        self.model, self.batches, self.metric = model, batches, metric
        self.calibration = batches if others is None else others
        self.leaves_out = others is None and settings["held_out"]
        self.settings, self.batch_size, self.step = settings, batch_size, step
        self.n = int(batches.n_sequences or 0)
        self.threshold: float = settings["threshold"]
        self.k: int = settings["k"]
        (self.means,) = run_probes(
            model, self.calibration, [MeanPatternsProbe("patterns")],
            batch_size=batch_size, progress=False,
        )  # fmt: skip
        patterns = self.means.patterns
        heads = [(i, h) for i, mean in enumerate(patterns) for h in range(len(mean))]
        self.replacements = {
            f"{head[0]}.{head[1]} {ideal}": {head: name_ideal(ideal, self.k)}
            for head in heads
            for ideal in IDEALS
        }
        self.ideal = torch.arange(len(self.replacements)) % _N_IDEALS
        zeros = torch.zeros(len(self.replacements), dtype=torch.float64)
        table = zeros.repeat(self.n, 1)
        # one without others would count sequences twice, or not at all
        slopes = [f"slopes {i}" for i in range(len(patterns))]
        self.check_together(["estimates", "lost", "measured", "n_estimated", "seen", *slopes])
        self.estimates = self.begin("estimates", zeros)
        self.slopes = {
            name: self.begin(name, mean.new_zeros(2, *mean.shape))
            for name, mean in zip(slopes, patterns, strict=True)
        }
        self.lost, self.measured = self.begin("lost", table), self.begin("measured", table > 0)
        self.n_estimated = self.take_up_estimates(self.metric, self.n)

    # Estimated

    def estimate(self) -> None:
        """The damage of everything, to second order, and what the calibration adds to errors."""
        draws = max(1, min(_MOST_DRAWS, -(-_DRAWS // self.n)))
        n_heads = max(map(len, self.means.patterns))
        most = sequences_at_once(self.model, self.batches.longest or 1, n_heads)
        size = min(self.batch_size, most)
        layers = [
            LayerMeans.select(self.means, i, self.leaves_out)
            for i in range(len(self.means.patterns))
        ]
        ideals = [name_ideal(ideal, self.k) for ideal in IDEALS]
        for batch in self.batches.batches(size, skip=self.n_estimated):
            seeds = [
                derive_seed(self.settings["seed"], self.n_estimated + i) for i in range(len(batch))
            ]
            found = estimate_batch(
                self.model, batch, self.metric, layers, ideals, draws, seeds, with_slopes=True
            )
            lost = torch.cat([part.sum(dim=0).flatten() for part in found.lost])
            self.estimates = self.estimates + lost
            signs = torch.tensor([1, 1 - 2 * (self.n_estimated % 2)]).view(2, 1, 1, 1)
            for (name, slope), part in zip(self.slopes.items(), found.slopes, strict=True):
                self.slopes[name] = slope = slope.clone()
                slope[..., : part.shape[2], : part.shape[3]] += part.to(slope) * signs
            self.n_estimated += len(batch)
            self._report(f"estimated {self.n_estimated} of {self.n} sequences")
        self.of_calibration = self._calibration_errors()
        self.per_row = self.metric.per_row()

    def _calibration_errors(self) -> Float[Tensor, " head"]:
        """Estimate one standard error of estimates, as the calibration might have been another.

        To first order: a sequence moves the mean pattern, and that the estimate by its slope. What
        the noise of the slope adds to the square of that is taken off.
        """
        names = [pattern_hook(self.model, layer) for layer in range(layer_count(self.model))]
        means = self.means.patterns
        per_query = self.means.n.clamp(min=1)[:, None]
        slopes = [slope / per_query for slope in self.slopes.values()]
        squares = torch.zeros(sum(map(len, means)), dtype=torch.float64)
        for batch in self.calibration.batches(self.batch_size):
            caught = call(self.model, batch, names).activations
            moved = []
            for name, mean, slope in zip(names, means, slopes, strict=True):
                pattern = caught[name].double().cpu()
                real, (n_query, n_key) = real_queries(batch, pattern), pattern.shape[-2:]
                apart = (pattern - mean[:, :n_query, :n_key]) * real[:, None, :, None]
                slope = slope[..., :n_query, :n_key]
                moved.append(torch.einsum("bhqk,shqk->sbh", apart, slope))
            found, noise = torch.cat(moved, dim=2).square().sum(dim=1).cpu()
            squares += found - noise
        n = self.calibration.n_sequences or 1
        return (squares.clamp(min=0) * n / max(n - 1, 1)).sqrt()

    def scale_estimates(self) -> Float[Tensor, " replacement"]:
        """Scale estimates to damages; NaN where there are none."""
        damage = self.estimates / (self.per_row * self.metric.n_rows)
        # the loss of the token that comes rises where its linear part is negative, and that has the
        # variance 2 KL and, under the model, the mean 0: the mean of the positive part of a normal
        return (damage / pi).sqrt() if self.metric.name == "loss" else damage

    # Replaced

    def replace(self) -> None:
        """Measure until every ideal of every head is decided, or everything on all sequences.

        What is measured decides what comes next, so a run that goes on takes the same way.
        """
        self.plain = self._intervention({"none": {}})
        order = torch.arange(self.n)
        if not self.settings["exact"]:
            generator = torch.Generator()
            generator.manual_seed(derive_seed("mechanisms", self.settings["seed"], "order"))
            order = torch.randperm(self.n, generator=generator)
        self.closed = torch.zeros(len(self.ideal), dtype=torch.bool)
        while bool((asked := self._open()).any()):
            for start, stop in pairwise([0, *self._blocks()]):
                open_ = (asked & ~self.closed).nonzero().flatten()
                if len(open_):
                    self._measure(order[start:stop], open_)
                    self.closed[open_] |= self._find_sure(order[:stop])[open_]
            self.closed |= asked

    def _open(self) -> Bool[Tensor, " replacement"]:
        """Choose what to measure next: the same ideal of all heads for which it is open."""
        open_ = ~self.closed
        if self.settings["exact"]:
            return open_
        estimate = self.scale_estimates().view(-1, _N_IDEALS)
        # a head is called soft only after its likeliest ideal was tried
        likeliest = estimate.nan_to_num(nan=torch.inf).argmin(dim=1, keepdim=True)
        likeliest = likeliest == torch.arange(_N_IDEALS)
        open_ &= ~((estimate > self._far()) & ~likeliest).flatten()
        if not bool(open_.any()):
            return open_
        return open_ & (self.ideal == self.ideal[open_].min())

    def _far(self) -> float:
        """The damage from which on the estimate alone excludes.

        The more estimates turned out too large in this run, the farther.
        """
        known = self.closed
        floor = max(self.threshold / _FAR, 1e-30)
        ratio = self.scale_estimates()[known] / self.damages()[known].clamp(min=floor)
        worst = float(ratio.nan_to_num(nan=0.0).max()) if len(ratio) else 0.0
        return self.threshold * _FAR * max(1.0, worst / 2)

    def _measure(self, rows: Int[Tensor, " row"], open_: Int[Tensor, " open"]) -> None:
        """Replace patterns on some sequences where that is not done yet."""
        names = list(self.replacements)
        if self.measured[rows][:, open_].all():
            return
        for batch in self.batches.take(rows.tolist()).batches(self.batch_size):
            here, rows = rows[: len(batch)], rows[len(batch) :]
            missing = open_[~self.measured[here][:, open_].all(dim=0)]
            if not len(missing):
                continue
            plain_run = self.plain.begin_batch(self.model, batch)
            some = {names[index]: self.replacements[names[index]] for index in missing.tolist()}
            table = self._intervention(some).measure(plain_run)["table"]
            columns = torch.tensor([names.index(name) for name in table.edits])
            self.lost, self.measured = self.lost.clone(), self.measured.clone()
            self.lost[here[:, None], columns] = table.lost
            self.measured[here[:, None], columns] = True
            n_whole = int(self.measured[:, missing].all(dim=1).sum())
            self._report(f"{n_whole} of {self.n} sequences")

    def _intervention(self, assignments: Mapping[str, Mapping[Head, str]]) -> AllHeads:
        return AllHeads(
            self.means, assignments, leaves_out=self.leaves_out, metric=self.metric.name,
            read=self.settings["read"], through_hooks=True,
        )  # fmt: skip

    def _blocks(self) -> Iterator[int]:
        """The numbers of sequences after which is asked what is decided; each twice the last."""
        stop = self.n
        if not self.settings["exact"]:
            stop = max(2, -(-self.n // _FIRST), -(-_ROWS_FIRST * self.n // self.metric.n_rows))
        while stop < self.n:
            yield stop
            stop *= 2
        yield self.n

    def _sums(
        self, rows: Int[Tensor, " row"] | slice = slice(None)
    ) -> tuple[Float[Tensor, " replacement"], ...]:
        """Sum up each replacement on these sequences: how many were measured, the rows of their
        output, what these lost, and the sum of squares over sequences.
        """
        measured, lost = self.measured[rows].double(), self.lost[rows]
        n_rows = self.n_rows[rows].double() @ measured
        return measured.sum(dim=0), n_rows, lost.sum(dim=0), lost.square().sum(dim=0)

    @cached_property
    def n_rows(self) -> Int[Tensor, " sequence"]:
        """The rows of the output of each sequence that count."""
        counted = [
            self.metric.mark_rows(b).sum(dim=1) for b in self.batches.batches(self.batch_size)
        ]
        return torch.cat(counted)

    @staticmethod
    def _relative_variance(
        n: Tensor, sums: Tensor, squares: Tensor, least: float
    ) -> Float[Tensor, " replacement"]:
        """That of the mean over the measured sequences, over its square.

        The deviation between sequences, over their mean, counts as at least the root of `least`.
        """
        n = n.clamp(min=1)
        variance = n * squares / sums.square().clamp(min=1e-300) - 1
        return variance.clamp(min=least) / (n - 1).clamp(min=1)

    def _find_sure(self, rows: Int[Tensor, " row"]) -> Bool[Tensor, " replacement"]:
        """Find the replacements of which these sequences, the first, say enough."""
        n, n_rows, sums, squares = self._sums(rows)
        # of these sequences: nothing is open once all are measured
        error = (self._relative_variance(n, sums, squares, 1.0) * (1 - n / self.n)).sqrt()
        mean, margin = sums / (self.per_row * n_rows.clamp(min=1)), 1 + _STANDARD_ERRORS * error
        enough = (mean * margin <= self.threshold) & (
            self.scale_estimates() <= self.threshold / _DOUBT
        )
        # what is lost so far is more than all may lose
        certain = sums > self.threshold * self.per_row * self.metric.n_rows
        return enough | certain | (mean > self.threshold * margin)

    def damages(self) -> Float[Tensor, " replacement"]:
        """The damage: measured, else estimated."""
        n, n_rows, sums, _ = self._sums()
        return torch.where(
            n > 0, sums / (self.per_row * n_rows.clamp(min=1)), self.scale_estimates()
        )

    def errors(self) -> Float[Tensor, " replacement"]:
        """Estimate one standard error of each damage, over sequences and over the calibration."""
        n, _, sums, squares = self._sums()
        damage, estimate, known = self.damages(), self.scale_estimates(), n > 0
        floor = max(self.threshold / 1000, 1e-30)
        missed = (damage.clamp(min=floor) / estimate.clamp(min=floor)).log()[known]
        missed = missed[missed.isfinite()]
        factor = missed.square().mean().sqrt().exp() if len(missed) else torch.tensor(_FAR)
        of_estimate = self.estimates.view(-1, _N_IDEALS)[:, _MEAN].clamp(min=1e-300)
        share = self.of_calibration / of_estimate
        if self.metric.name == "loss":
            share = share / 2  # its estimate is a root
        variance = self._relative_variance(n, sums, squares, 0.0).masked_fill(n < 2, torch.nan)
        variance.view(-1, _N_IDEALS)[:, _MEAN] += share.square()
        variance = variance.masked_fill(damage == 0, 0)
        return torch.where(known, damage * variance.sqrt(), estimate * (factor - 1))

    def _report(self, what: str) -> None:
        n_measured = int(self.measured.any(dim=0).sum())
        self.step(0, f"{what}: {n_measured} of {len(self.estimates)} measured")
        reached = ("estimates", "lost", "measured", "n_estimated")
        now = {name: getattr(self, name) for name in reached}
        self.keep(**now, **self.slopes, seen=self.metric.state())
