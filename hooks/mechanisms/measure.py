"""Which mechanism does a head need? Its pattern replaced by an idealised one, and what that costs.

If the model's output stays as it is when a head's pattern is replaced by an ideal one, that
mechanism is all that the head needs on these inputs.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import pi
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.progress import Advance
from infoflow_lens.foundation.record import RunRecord, model_fingerprint
from infoflow_lens.foundation.seeds import derive_seed
from infoflow_lens.foundation.settings import Count, NonNegative, Seed, checked
from infoflow_lens.hooks.interventions.damage import Damage, Metric, Read, Reference, metric_of
from infoflow_lens.hooks.interventions.passes import (
    example_of,
    layers_to_start,
    real_queries,
    run_from,
    sequences_at_once,
)
from infoflow_lens.hooks.interventions.patterns import IDEALS, Replacement, replacement_hooks
from infoflow_lens.hooks.mechanisms.driver import (
    Reading,
    check_kept,
    check_resumed,
    identify,
    mean_patterns,
)
from infoflow_lens.hooks.mechanisms.estimate import estimated
from infoflow_lens.hooks.mechanisms.result import MechanismsResult
from infoflow_lens.hooks.model.call import Edits, call, output_of
from infoflow_lens.hooks.model.inputs import Batch, Batches, Inputs
from infoflow_lens.hooks.model.points import check_finite, layer_count, pattern_hook, takes_model

_DRAWS, _MOST_DRAWS = 64, 8  # directions of an estimate: over all sequences, and for each
_FIRST = 8  # one in so many sequences is in the first block, which has at least
_ROWS_FIRST = 64  # rows of the output in the first block of sequences
_STANDARD_ERRORS = 4.0  # between a mean over some sequences and the threshold
_DOUBT = 2.0  # times the estimate, that an early "enough" needs to be within the threshold
_FAR = 10.0  # times the threshold: where an estimate alone excludes an ideal
_N_IDEALS = len(IDEALS)
_MEAN = IDEALS.index("specific_position")


@dataclass
class MechanismsProgress:
    """How far :func:`measure_mechanisms` has come, to go on from there; a copy, of plain values.

    Attributes:
        settings: of the run, with digests of the model and the inputs.
        mean_patterns: for every layer the mean patterns, over the calibration or all inputs.
        n_mean: for each query, over how many sequences.
        seen: what the scale of the damage is made of.
        n_estimated: sequences whose damages are estimated.
        estimates: the estimated loss of every (layer, head, ideal), summed over these sequences.
        slopes: for every layer the derivative of the estimates by the mean patterns, and its noise.
        calibration: the standard error of the estimates of mean patterns, from the choice of the
            sequences over which these are; empty until it is known.
        asked: the replacements that are measured now.
        n_done: sequences on which they are.
        closed: the replacements whose measurement is finished.
        n, n_rows, sums, squares: of each replacement, the sequences on which it was measured, the
            rows of their output, what these lost, and the sum of squares over sequences.
    """

    settings: dict[str, Any]
    mean_patterns: list[Float[Tensor, "_head query key"]]
    n_mean: Float[Tensor, " query"]
    seen: dict[str, Any]
    n_estimated: int
    estimates: Float[Tensor, " replacement"]
    slopes: list[Float[Tensor, "two _head query key"]]
    calibration: Float[Tensor, " head"]
    asked: Bool[Tensor, " replacement"]
    n_done: int
    closed: Bool[Tensor, " replacement"]
    n: Int[Tensor, " replacement"]
    n_rows: Int[Tensor, " replacement"]
    sums: Float[Tensor, " replacement"]
    squares: Float[Tensor, " replacement"]


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
    batch_size: Count = 64,
    resume: MechanismsProgress | None = None,
    after_batch: Callable[[MechanismsProgress], None] | None = None,
    progress: bool = True,
) -> MechanismsResult:
    """The mechanism that each head needs: its pattern replaced by an ideal one.

    First the damage of all heads and ideals is estimated, to second order, from a few backward
    passes (:func:`~infoflow_lens.hooks.mechanisms.estimate.estimated`). The estimate alone only
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
        resume: from an earlier run on the same inputs with the same settings.
        after_batch: called with the progress after every batch.
        progress: show a bar.

    Raises:
        InfoFlowError: for bad inputs or settings, a calibration that is shorter than the inputs, a
            model whose patterns cannot be replaced, or progress of other settings or another model.
    """
    reading = Reading(attention_mask, column, max_length, batch_size, progress)
    batches = reading.batches(model, inputs)
    others = None
    if calibration is not None:
        others = replace(reading, attention_mask=None).batches(model, calibration)
        if (others.longest or 0) < (batches.longest or 0):
            raise InfoFlowError(
                f"calibration has at most {others.longest} positions, the inputs have "
                f"{batches.longest}: expected one that is as long, so that there are mean patterns "
                "for every position; give longer ones, or cut the inputs by max_length"
            )
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
    if resume is not None:
        check_resumed(resume.settings, known)
    with reading.measuring(model, batches, "replacing", None) as step:
        run = _Run(model, batches, others, damage, known, batch_size, after_batch, step)
        run.begin(resume)
        run.estimate()
        run.replace()
    at = run.at
    counts = [len(mean) for mean in at.mean_patterns]
    by_layer = [
        numbers.view(-1, _N_IDEALS).split(counts)
        for numbers in (run.damages().float(), at.n, run.errors().float())
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
        mean_patterns=tuple(mean.float().cpu() for mean in at.mean_patterns),
        record=RunRecord.from_model(
            model, {"probe": "mechanisms", **settings}, seed, fingerprint_of_model=fingerprint
        ),
    )


class _Run:
    """One measurement."""

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        others: Batches | None,
        metric: Damage,
        settings: dict[str, Any],
        batch_size: int,
        after_batch: Callable[[MechanismsProgress], None] | None,
        step: Advance,
    ) -> None:
        self.model, self.batches, self.metric = model, batches, metric
        self.calibration = batches if others is None else others
        self.leaves_out = others is None and settings["held_out"]
        self.settings, self.batch_size = settings, batch_size
        self.after_batch, self.step = after_batch, step
        self.n = int(batches.n_sequences or 0)
        self.threshold: float = settings["threshold"]
        self.k: int = settings["k"]

    def begin(self, resume: MechanismsProgress | None) -> None:
        """From the progress, or with the mean patterns and the scale of the damage."""
        if resume is not None:
            self._check(resume)
            self.at = deepcopy(resume)
            self.metric.load_state(self.at.seen)
        else:
            means, n_mean = self._mean_patterns()
            zeros = torch.zeros(sum(map(len, means)) * _N_IDEALS, dtype=torch.float64)
            slopes = [mean.new_zeros(2, *mean.shape) for mean in means]
            self.at = MechanismsProgress(
                self.settings, means, n_mean, self.metric.state(), 0, zeros, slopes, zeros[:0],
                zeros > 0, 0, zeros > 0, zeros.long(), zeros.long(), zeros.clone(), zeros.clone(),
            )  # fmt: skip
        self.per_row = self.metric.per_row()
        self.replacements = [
            Replacement(layer, head, ideal)
            for layer, mean in enumerate(self.at.mean_patterns)
            for head in range(len(mean))
            for ideal in IDEALS
        ]
        self.ideal = torch.arange(len(self.replacements)) % _N_IDEALS

    def _check(self, resume: MechanismsProgress) -> None:
        """Refuse progress that no run of this kind has made.

        Raises:
            InfoFlowError: naming the field.
        """
        names = [pattern_hook(self.model, layer) for layer in range(layer_count(self.model))]
        batch = next(self.calibration.batches(1))
        more = (self.calibration.longest or 0) - batch.tokens.shape[1]
        patterns = call(self.model, batch, names).activations
        found = [patterns[name].shape[1:] for name in names]
        shapes = [(n_heads, n_query + more, n_key + more) for n_heads, n_query, n_key in found]
        n_heads = sum(shape[0] for shape in shapes)
        each, real = [n_heads * _N_IDEALS], torch.float64
        for name, expected in (
            ("mean_patterns", shapes),
            ("slopes", [(2, *shape) for shape in shapes]),
        ):
            given = getattr(resume, name)
            given = given if isinstance(given, (list, tuple)) else [given]
            for layer, shape in enumerate(expected):
                value = given[layer] if len(given) == len(expected) else None
                check_kept(value, shape, real, f"{name}[{layer}]")
        kinds = {"asked": torch.bool, "closed": torch.bool, "n": torch.int64, "n_rows": torch.int64}
        for name in ("estimates", "asked", "closed", "n", "n_rows", "sums", "squares"):
            check_kept(getattr(resume, name), each, kinds.get(name, real), name)
        check_kept(resume.n_mean, [shapes[0][1]], real, "n_mean")
        known = getattr(resume.calibration, "shape", None) != (0,)
        check_kept(resume.calibration, [n_heads if known else 0], real, "calibration")
        counts, seen = (resume.n_estimated, resume.n_done), resume.seen
        if not all(type(count) is int and 0 <= count <= self.n for count in counts) or not (
            isinstance(seen, dict)
            and seen.keys() == self.metric.state().keys()
            and all(isinstance(value, (int, float, Tensor)) for value in seen.values())
            and all(torch.as_tensor(value).isfinite().all() for value in seen.values())
        ):
            raise InfoFlowError(
                f"resume holds n_estimated and n_done {counts} of {self.n} sequences, and as seen "
                f"{seen!r:.100}: expected what after_batch gave; leave resume out to measure anew"
            )

    # Estimated

    def estimate(self) -> None:
        """The damage of everything, to second order, and what the calibration adds to errors."""
        draws = max(1, min(_MOST_DRAWS, -(-_DRAWS // self.n)))
        at = self.at
        size = min(self.batch_size, self._at_once())
        for batch in self.batches.batches(size, skip=at.n_estimated):
            seeds = [
                derive_seed(self.settings["seed"], at.n_estimated + i) for i in range(len(batch))
            ]
            found = estimated(
                self.model, batch, self.metric, at.mean_patterns, self.k, draws, seeds, self.n_mean
            )
            at.estimates = at.estimates + found.lost.mean(dim=1).sum(dim=0)
            signs = torch.tensor([1, 1 - 2 * (at.n_estimated % 2)]).view(2, 1, 1, 1)
            pairs = zip(at.slopes, found.slopes, strict=True)
            at.slopes = [a + b.to(a) * signs.to(a) for a, b in pairs]
            at.n_estimated += len(batch)
            self._report(f"estimated {at.n_estimated} of {self.n} sequences")
        if not len(at.calibration):
            at.calibration = self._calibration_errors()

    @property
    def n_mean(self) -> Float[Tensor, " query"] | None:
        """Over how many sequences mean patterns are, where one is left out of them."""
        return self.at.n_mean if self.leaves_out else None

    def _calibration_errors(self) -> Float[Tensor, " head"]:
        """One standard error of estimates, as the calibration might have been another one.

        To first order: a sequence moves the mean pattern, and that the estimate by its slope. What
        the noise of the slope adds to the square of that is taken off.
        """
        names = [pattern_hook(self.model, layer) for layer in range(layer_count(self.model))]
        means = self.at.mean_patterns
        per_query = self.at.n_mean.clamp(min=1)[:, None]
        slopes = [slope / per_query for slope in self.at.slopes]
        squares = torch.zeros(sum(map(len, means)), dtype=torch.float64)
        for batch in self.calibration.batches(self.batch_size):
            caught = call(self.model, batch, names).activations
            moved = []
            for name, mean, slope in zip(names, means, slopes, strict=True):
                pattern = caught[name].double()
                real, (n_query, n_key) = real_queries(batch, pattern), pattern.shape[-2:]
                apart = (pattern - mean[:, :n_query, :n_key]) * real[:, None, :, None]
                slope = slope[..., :n_query, :n_key]
                moved.append(torch.einsum("bhqk,shqk->sbh", apart, slope))
            found, noise = torch.cat(moved, dim=2).square().sum(dim=1).cpu()
            squares += found - noise
        n = self.calibration.n_sequences or 1
        return (squares.clamp(min=0) * n / max(n - 1, 1)).sqrt()

    def estimated(self) -> Float[Tensor, " replacement"]:
        """Estimated damages; NaN where there are none."""
        damage = self.at.estimates / (self.per_row * self.metric.n_rows)
        # the loss of the token that comes rises where its linear part is negative, and that has the
        # variance 2 KL and, under the model, the mean 0: the mean of the positive part of a normal
        return (damage / pi).sqrt() if self.metric.name == "loss" else damage

    # Replaced

    def replace(self) -> None:
        """Measure until every ideal of every head is decided, or everything on all sequences."""
        while True:
            if self.at.n_done == 0:
                self.at.asked = self._open()
            if not bool(self.at.asked.any()):
                return
            self._measure_asked()
            self.at.n_done = 0

    def _open(self) -> Bool[Tensor, " replacement"]:
        """What to measure next: the same ideal of all heads for which it is open."""
        open_ = ~self.at.closed
        if self.settings["exact"]:
            return open_
        estimate = self.estimated().view(-1, _N_IDEALS)
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
        known = self.at.closed
        floor = max(self.threshold / _FAR, 1e-30)
        ratio = self.estimated()[known] / self.damages()[known].clamp(min=floor)
        worst = float(ratio.nan_to_num(nan=0.0).max()) if len(ratio) else 0.0
        return self.threshold * _FAR * max(1.0, worst / 2)

    def _measure_asked(self) -> None:
        at = self.at
        order = torch.arange(self.n)
        if not self.settings["exact"]:
            generator = torch.Generator()
            generator.manual_seed(derive_seed("mechanisms", self.settings["seed"], "order"))
            order = torch.randperm(self.n, generator=generator)
        for stop in self._blocks():
            here = order[at.n_done : stop].tolist()
            for batch in self.batches.take(here).batches(self.batch_size) if here else ():
                open_ = (at.asked & ~at.closed).nonzero().flatten()
                lost = self._lost(batch, open_.tolist())
                at.n[open_] += len(batch)
                at.n_rows[open_] += int(self.metric.counted(batch).sum())
                at.sums[open_] += lost.sum(dim=1)
                at.squares[open_] += lost.square().sum(dim=1)
                at.n_done += len(batch)
                if at.n_done == stop:
                    at.closed[open_] |= self._is_decided()[open_]
                    if at.n_done == self.n or bool(at.closed[at.asked].all()):
                        at.closed |= at.asked
                        at.n_done = self.n
                self._report(f"{at.n_done} of {self.n} sequences")
            if at.n_done == self.n:
                return

    def _blocks(self) -> Iterator[int]:
        """The numbers of sequences after which is asked what is decided; each twice the last."""
        stop = self.n
        if not self.settings["exact"]:
            stop = max(2, -(-self.n // _FIRST), -(-_ROWS_FIRST * self.n // self.metric.n_rows))
        while stop < self.n:
            yield stop
            stop *= 2
        yield self.n

    def _relative_variance(self, least: float) -> Float[Tensor, " replacement"]:
        """That of the mean over the measured sequences, over its square.

        The deviation between sequences, over their mean, counts as at least the root of `least`.
        """
        n = self.at.n.double().clamp(min=1)
        variance = n * self.at.squares / self.at.sums.square().clamp(min=1e-300) - 1
        return variance.clamp(min=least) / (n - 1).clamp(min=1)

    def _is_decided(self) -> Bool[Tensor, " replacement"]:
        # of these sequences: nothing is open once all are measured
        left = 1 - self.at.n.double() / self.n
        error = (self._relative_variance(least=1.0) * left).sqrt()
        mean, margin = self.damages(), 1 + _STANDARD_ERRORS * error
        enough = (mean * margin <= self.threshold) & (self.estimated() <= self.threshold / _DOUBT)
        # what is lost so far is more than all may lose
        certain = self.at.sums > self.threshold * self.per_row * self.metric.n_rows
        return enough | certain | (mean > self.threshold * margin)

    def damages(self) -> Float[Tensor, " replacement"]:
        """The damage: measured, else estimated."""
        measured = self.at.sums / (self.per_row * self.at.n_rows.clamp(min=1))
        return torch.where(self.at.n > 0, measured, self.estimated())

    def errors(self) -> Float[Tensor, " replacement"]:
        """One standard error of each damage, over sequences and over the calibration."""
        damage, estimate, known = self.damages(), self.estimated(), self.at.n > 0
        floor = max(self.threshold / 1000, 1e-30)
        missed = (damage.clamp(min=floor) / estimate.clamp(min=floor)).log()[known]
        missed = missed[missed.isfinite()]
        factor = missed.square().mean().sqrt().exp() if len(missed) else torch.tensor(_FAR)
        of_estimate = self.at.estimates.view(-1, _N_IDEALS)[:, _MEAN].clamp(min=1e-300)
        share = self.at.calibration / of_estimate
        if self.metric.name == "loss":
            share = share / 2  # its estimate is a root
        variance = self._relative_variance(least=0.0).masked_fill(self.at.n < 2, torch.nan)
        variance.view(-1, _N_IDEALS)[:, _MEAN] += share.square()
        variance = variance.masked_fill(damage == 0, 0)
        return torch.where(known, damage * variance.sqrt(), estimate * (factor - 1))

    def _lost(self, batch: Batch, open_: list[int]) -> Float[Tensor, "replacement batch"]:
        """What each sequence of a batch loses by some replacements, each alone."""
        before, entering = self._before(batch, {self.replacements[i].layer for i in open_})
        n_copies = max(1, self._at_once() // len(batch))
        lost = []
        for layer, group in groupby(open_, lambda i: self._start(self.replacements[i].layer)):
            indices = list(group)
            for start in range(0, len(indices), n_copies):
                some = indices[start : start + n_copies]
                copies = [self.replacements[i]._replace(copy=n) for n, i in enumerate(some)]
                means = self.at.mean_patterns
                hooks = replacement_hooks(self.model, copies, means, self.k, len(some), self.n_mean)
                changed = self._run_copies(batch, entering, layer, len(some), hooks)
                lost.append(self.metric.lost(before, changed, batch))
        return torch.cat(lost)

    @cached_property
    def starts(self) -> frozenset[int]:
        """The layers at which a pass can start."""
        return layers_to_start(self.model, self.batches)

    def _start(self, layer: int) -> int | None:
        """The layer where a pass starts that edits this one; None for a whole pass."""
        return layer if layer in self.starts else None

    def _before(self, batch: Batch, layers: set[int]) -> tuple[Reference, dict[int, Tensor]]:
        """The output, and what enters the layers where passes start."""
        names = {layer: f"blocks.{layer}.hook_resid_pre" for layer in layers & self.starts}
        caught = call(self.model, batch, tuple(names.values()), output=True)
        before = self.metric.reference(caught.output, batch)
        return before, {layer: caught.activations[name] for layer, name in names.items()}

    def _run_copies(
        self, batch: Batch, entering: dict[int, Tensor], layer: int | None, n: int, hooks: Edits
    ) -> Tensor:
        """The output of copies of a batch, from a layer on if possible."""
        if layer is not None:
            # padding stands on the right, where nothing real looks
            state = torch.cat([entering[layer]] * n)
            return run_from(self.model, layer, state, example_of(batch), hooks)
        copies = batch.take(torch.arange(len(batch)).repeat(n))
        whole: Tensor = call(self.model, copies, edit=hooks, output=True).output
        return whole

    def _mean_patterns(
        self,
    ) -> tuple[list[Float[Tensor, "_head query key"]], Float[Tensor, " query"]]:
        """Mean patterns over the sequences that have the query; the metric sees the outputs."""

        def see(output: Tensor, batch: Batch, done: int) -> None:
            check_finite(output, "the output", done)
            self.metric.see(output, batch)
            self.step(0, f"mean patterns: {done + len(batch)} of {self.n} sequences")

        if self.calibration is self.batches:
            return mean_patterns(self.model, self.batches, self.batch_size, see)
        done = 0
        for batch in self.batches.batches(self.batch_size):
            see(output_of(self.model, batch), batch, done)
            done += len(batch)
        return mean_patterns(self.model, self.calibration, self.batch_size)

    def _at_once(self) -> int:
        n_heads = max(map(len, self.at.mean_patterns))
        return sequences_at_once(self.model, self.batches.longest or 1, n_heads)

    def _report(self, what: str) -> None:
        at = self.at
        self.step(0, f"{what}: {int(at.closed.sum())} of {len(at.closed)} measured")
        if self.after_batch is not None:
            self.after_batch(deepcopy(at))
