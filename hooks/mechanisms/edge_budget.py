"""How many edges of attention does a model need? Some are kept, the rest is put to its mean.

It is the causal test of what is said to matter: as many edges as another method keeps, and the
loss of the model that is left with them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import torch
from annotated_types import MinLen
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.display import plain_label
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.progress import Advance
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.foundation.seeds import derive_seed
from infoflow_lens.foundation.settings import (
    Count,
    Distinct,
    Index,
    Positive,
    Seed,
    Share,
    checked,
)
from infoflow_lens.hooks.arrays import LabelledArray, frame_of
from infoflow_lens.hooks.interventions.damage import Damage, Read, Reference, metric_of, places_of
from infoflow_lens.hooks.interventions.next_token import NextTokenLoss
from infoflow_lens.hooks.interventions.patterns import SeenKeys, edits_of_patterns, with_mean_rest
from infoflow_lens.hooks.mechanisms.driver import Reading, identify, mean_patterns
from infoflow_lens.hooks.mechanisms.edges import (
    CHANCE,
    EdgeMethod,
    EdgeScores,
    methods_of,
    ranked,
)
from infoflow_lens.hooks.mechanisms.next_token import (
    Edit,
    EditedLoss,
    KeptLosses,
    Losses,
    NextTokenResult,
)
from infoflow_lens.hooks.model.call import catching, output_of
from infoflow_lens.hooks.model.inputs import Batch, Batches, Inputs
from infoflow_lens.hooks.model.points import takes_model

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

BUDGETS = tuple(2.0**-i for i in range(10, 0, -1))

Budgets = Annotated[tuple[Positive, ...], MinLen(1), Distinct()]
EdgeMetric = Literal["loss", "kl"]


class EdgesNeeded(NamedTuple):
    """How many edges of a window are needed.

    Attributes:
        edges: the mean over windows; NaN where attention is worth nothing.
        low, high: the 95% bootstrap interval over windows.
    """

    edges: float
    low: float
    high: float


@dataclass(frozen=True, eq=False, kw_only=True)
class EdgeBudgetResult(NextTokenResult):
    """The loss with some edges kept, and the rest of every pattern replaced by its mean.

    Attributes:
        metric: "loss", the next-token loss; "kl", the divergence of the next-token distribution
            from that of the model as it is, for which `bare` is 0. Nats, summed over the states
            that are read, `n_tokens` of each sequence.
        methods: the methods that choose edges, in the order of the first axis; "chance 0", ... are
            several draws.
        budgets: the budgets, rising: shares of a sequence's open edges, or numbers.
        kept: int [budget, sequence], the edges that are kept.
        n_edges: int [sequence], the edges on paths to the states that are read.
        losses: float [method, budget, sequence].
        none: float [sequence], without any edge: every head has its mean pattern.
    """

    metric: str
    methods: tuple[str, ...]
    budgets: tuple[float, ...]
    kept: Int[Tensor, "budget sequence"]
    n_edges: Int[Tensor, " sequence"]
    losses: Float[Tensor, "method budget sequence"]
    none: Float[Tensor, " sequence"]

    @property
    def worth(self) -> float:
        """What attention is worth: by how many nats a token mean patterns are worse."""
        return float((self.none - self.bare).sum() / self.n_tokens.sum())

    def regained(self) -> Float[Tensor, "method budget"]:
        """The share of that which the kept edges keep: 0 as without any, 1 as the model."""
        return (self.none - self.losses).sum(dim=2) / (self.none - self.bare).sum()

    @checked
    def edges_needed(
        self, share: Share = 0.9, *, draws: Count = 1000, seed: Seed = 0
    ) -> dict[str, EdgesNeeded]:
        """The edges of a window from which on a method keeps a share of what attention is worth.

        Between two budgets the share is taken to be linear in log(1 + edges); no edges and all are
        points of the curve, too. "chance" is the mean of its draws.

        Args:
            share: of what attention is worth.
            draws: how often windows are drawn, with replacement, for the intervals.
            seed: of the draws.
        """
        found = {}
        for name, needed in self._needed(share, draws, seed).items():
            low, high = needed[1:].quantile(torch.tensor([0.025, 0.975], dtype=needed.dtype))
            found[name] = EdgesNeeded(float(needed[0]), float(low), float(high))
        return found

    @checked
    def times_needed(
        self, method: str, other: str, share: Share = 0.9, *, draws: Count = 1000, seed: Seed = 0
    ) -> EdgesNeeded:
        """How many times the edges of another method one needs, on the same draws of windows.

        Args:
            method: one of `methods`, or "chance".
            other: the one whose edges are counted as 1.
            share, draws, seed: as for :meth:`edges_needed`.

        Raises:
            InfoFlowError: for a method that was not measured.
        """
        needed = self._needed(share, draws, seed)
        for name in (method, other):
            if name not in needed:
                raise InfoFlowError(
                    f"{name!r} was not measured: expected one of {', '.join(needed)}"
                )
        times = needed[method] / needed[other]
        low, high = times[1:].quantile(torch.tensor([0.025, 0.975], dtype=times.dtype))
        return EdgesNeeded(float(times[0]), float(low), float(high))

    def _curves(self) -> dict[str, Float[Tensor, "budget sequence"]]:
        """The losses of each method, those of chance as one."""
        curves = {m: v for m, v in zip(self.methods, self.losses) if not m.startswith(CHANCE)}
        drawn = [v for m, v in zip(self.methods, self.losses) if m.startswith(CHANCE)]
        return curves | ({CHANCE: torch.stack(drawn).mean(dim=0)} if drawn else {})

    def _needed(self, share: float, draws: int, seed: int) -> dict[str, Float[Tensor, " draw"]]:
        """By method; the first of all windows, then of windows drawn with replacement."""
        n = len(self.bare)
        generator = torch.Generator().manual_seed(derive_seed("edges needed", seed))
        drawn = torch.randint(n, (draws, n), generator=generator)
        counts = torch.zeros(draws, n, dtype=torch.float64)
        counts.scatter_add_(1, drawn, torch.ones_like(counts))
        counts = torch.cat([torch.ones_like(counts[:1]), counts])
        kept = torch.cat([torch.zeros_like(self.kept[:1]), self.kept, self.n_edges[None]])
        edges = (counts @ kept.double().T / n).log1p()
        worth = counts @ (self.none - self.bare)
        found = {}
        for name, losses in self._curves().items():
            whole = torch.cat([self.none[None], losses, self.bare[None]])
            regained = counts @ (self.none - whole).T / worth[:, None]
            found[name] = _crossed(edges, regained, share).where(worth > 0, torch.nan)
        return found

    def to_frame(self) -> "pd.DataFrame":
        """One row for each method and budget: edges of a window and of a state, loss, share."""
        kept = self.kept.double().mean(dim=1)
        excess = (self.losses - self.bare).sum(dim=2) / self.n_tokens.sum()
        numbers = {
            "edges": kept.expand(excess.shape),
            "edges_per_state": (self.kept.sum(dim=1) / self.n_tokens.sum()).expand(excess.shape),
            "share_of_edges": (self.kept.sum(dim=1) / self.n_edges.sum()).expand(excess.shape),
            "loss": self.loss + excess,
            "regained": self.regained(),
        }
        dims = ("method", "budget")
        coords = {"method": self.methods, "budget": self.budgets}
        return frame_of([LabelledArray(name, v, dims, coords) for name, v in numbers.items()])

    def plot(self) -> "Figure":
        """What each method keeps of what attention is worth, by the edges of a window."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.5, 4), layout="constrained")
        axes = figure.subplots()
        worth = (self.none - self.bare).sum()
        edges = self.kept.double().mean(dim=1)
        for name, losses in self._curves().items():
            regained = (self.none - losses).sum(dim=1) / worth
            axes.plot(edges, regained, ":" if name == CHANCE else ".-", label=plain_label(name))
        axes.axhline(1, color="#999999", linewidth=0.6)
        axes.set_xscale("log")
        axes.legend(frameon=False, fontsize="small")
        axes.set(xlabel="edges of a window", ylabel="share of what attention is worth")
        return figure


def _crossed(
    edges: Float[Tensor, "draw point"], regained: Float[Tensor, "draw point"], share: float
) -> Float[Tensor, " draw"]:
    """The edges from which on a share is regained, of logarithms of 1 + edges."""
    below = (regained < share).long()
    points = torch.arange(edges.shape[1] - 1)
    last = (below[:, :-1] * (points + 1)).amax(dim=1)  # 1 + the last point below
    last = (last - 1).clamp(min=0)[:, None]

    def at(values: Tensor, place: Tensor) -> Tensor:
        return values.gather(1, place)[:, 0]

    low, high = at(regained, last), at(regained, last + 1)
    part = ((share - low) / (high - low)).nan_to_num(nan=1.0).clamp(0, 1)
    return torch.lerp(at(edges, last), at(edges, last + 1), part).expm1()


@takes_model
@checked
def measure_edge_budget(
    model: nn.Module,
    inputs: Inputs,
    calibration: Inputs,
    *,
    methods: tuple[EdgeMethod, ...] | None = None,
    budgets: Budgets = BUDGETS,
    metric: EdgeMetric = "loss",
    read: Read | None = None,
    draws: Index = 3,
    seed: Seed = 0,
    attention_mask: Tensor | None = None,
    column: str | None = None,
    max_length: Count | None = None,
    batch_size: Count = 16,
    resume: Losses | None = None,
    after: Callable[[Losses], None] | None = None,
    progress: bool = True,
) -> EdgeBudgetResult:
    """The loss with as many edges kept as a budget allows, chosen by several methods.

    An edge is one weight (layer, head, query, key) of one pattern. Those that count lie on paths to
    the states of the last layer that are read. In the pass of the edited model a kept edge has the
    weight that its head gives it in that pass. On the other keys of its row stands the head's mean
    pattern (over calibration sequences, by query and key), scaled to the weight that they have
    together: so rows keep their sums, without edges every head has its mean pattern, and with all
    of them the model is as it is, bit for bit. As in the other measurements the edited model works
    with what it has: where a head attends follows from what the kept edges below it bring.

    Each sequence keeps the same share, or number, of its own edges, whatever the layer or head.
    See :meth:`EdgeScores.of <infoflow_lens.hooks.mechanisms.edges.EdgeScores.of>` for the methods:
    what they know is the pass of the model as it is; "gradient" and "gradient x change" also know
    the loss that is judged, next tokens included.

    Args:
        model: a language model in which an edited pattern reaches the output.
        inputs: sequences.
        calibration: other sequences, at least as long, of which mean patterns are taken.
        methods: default, all that the model can give.
        budgets: below 1, shares of a sequence's edges; else numbers of them.
        metric: "loss", of the next token; "kl", the divergence from the model as it is.
        read: the positions whose predictions count, negative ones from the end; None for all.
        draws: how many draws of "chance" there are.
        seed: of chance, of the order of equal scores, and of the gradients of "kl".
        attention_mask, column, max_length: of `inputs`, as for `run_probes`.
        batch_size: sequences in a pass.
        resume: what `after` was last given.
        after: called after each method with all losses so far.
        progress: show a bar.

    Raises:
        InfoFlowError: for bad inputs or settings, calibration sequences that are shorter, a method
            that the model cannot give, a model without next tokens, or one in which edited patterns
            do not reach the output.
    """
    chosen = _checked_budgets(budgets)
    reading = Reading(attention_mask, column, max_length, batch_size, progress)
    batches = reading.batches(model, inputs)
    others = Reading(None, column, max_length, batch_size, progress).batches(model, calibration)
    if (batches.longest or 0) > (others.longest or 0):
        raise InfoFlowError(
            f"calibration has sequences of at most {others.longest} positions, inputs of "
            f"{batches.longest}: expected mean patterns as long; give longer ones, or cut inputs "
            f"with max_length={others.longest}"
        )
    if metric == "loss":
        measure: _Measure = EditedLoss(model, batches, batch_size, NextTokenLoss(read=read))
    else:
        measure = _Divergence(model, metric_of(model, metric, read, batches.shortest))
    given = methods_of(model)
    asked = given if methods is None else methods
    names = [
        name
        for method in asked
        for name in ([f"{CHANCE} {i}" for i in range(draws)] if method == CHANCE else [method])
    ]
    budget_names = ", ".join(f"{budget:g}" for budget in chosen)
    settings = {
        "probe": "edge_budget",
        "methods": list(asked),
        "budgets": list(chosen),
        "metric": metric,
        "read": None if read is None else list(read),
        "draws": draws,
        "seed": seed,
        "n_calibration": others.n_sequences,
    }
    identity = identify(model, settings, inputs=batches, calibration=others)
    once = KeptLosses(identity, resume, after, batches.n_sequences).once
    with reading.measuring(model, batches, "edge budget", len(names) * len(chosen) + 2) as step:
        work = _Run(model, batches, others, measure, batch_size, chosen, asked, seed, step)
        bare = once("bare", work.bare)
        none = once("none", work.none)
        losses = [
            once(f"{name} at {budget_names}", partial(work.by, name), len(chosen)) for name in names
        ]
    return EdgeBudgetResult(
        metric=metric,
        methods=tuple(names),
        budgets=chosen,
        kept=work.kept(work.n_edges),
        n_edges=work.n_edges,
        losses=torch.stack(losses),
        none=none,
        bare=bare,
        n_tokens=work.n_states,
        record=RunRecord.from_model(
            model,
            settings,
            seed,
        ),
    )


def _checked_budgets(budgets: Sequence[float]) -> tuple[float, ...]:
    """Rising.

    Raises:
        InfoFlowError: for shares and numbers together, or parts of an edge.
    """
    chosen = tuple(sorted(float(budget) for budget in budgets))
    shares = [budget for budget in chosen if budget < 1]
    if len(shares) not in (0, len(chosen)):
        raise InfoFlowError(
            f"budgets are {list(chosen)}: expected shares of all edges below 1, or numbers of "
            "edges from 1 on, not both"
        )
    if not shares and any(budget % 1 for budget in chosen):
        raise InfoFlowError(f"budgets are {list(chosen)}: expected whole numbers of edges")
    return chosen


class _Divergence:
    """The divergence from the model as it is, as :class:`EditedLoss` gives losses."""

    def __init__(self, model: nn.Module, damage: Damage) -> None:
        self.model, self.damage = model, damage
        self._last: tuple[Batch, Reference] | None = None  # several edits of one batch follow

    def states(self, batch: Batch) -> Bool[Tensor, "batch pos"]:
        """The positions whose predictions count."""
        real = batch.mask()
        if self.damage.read is None:
            return real
        return torch.zeros_like(real).scatter_(1, places_of(self.damage.read, batch), True)

    def of(self, batch: Batch, first: int, edit: Edit | None = None) -> Float[Tensor, " batch"]:
        """The divergence in each sequence of a batch, whose first has that index."""
        if edit is None:
            return torch.zeros(len(batch), dtype=torch.float64)
        if self._last is None or self._last[0] is not batch:
            self._last = batch, self.damage.reference(output_of(self.model, batch), batch)
        with edit(batch, first):
            return self.damage.lost(self._last[1], output_of(self.model, batch), batch)[0]


_Measure = EditedLoss | _Divergence


class _Run:
    """One measurement."""

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        others: Batches,
        measure: _Measure,
        batch_size: int,
        budgets: Sequence[float],
        methods: Sequence[str],
        seed: int,
        step: Advance,
    ) -> None:
        self.model, self.batches, self.others = model, batches, others
        self.measure, self.batch_size = measure, batch_size
        self.budgets, self.methods, self.seed, self.step = budgets, methods, seed, step
        self.means = [mean.float() for mean in mean_patterns(model, others, batch_size)[0]]
        states = [measure.states(batch).sum(dim=1) for batch in batches.batches(batch_size)]
        self.n_states = torch.cat(states)
        self.n_edges = torch.cat([self._n_open(batch) for batch in batches.batches(batch_size)])

    def kept(self, n_edges: Int[Tensor, " sequence"]) -> Int[Tensor, "budget sequence"]:
        """How many edges of each sequence are kept."""
        rows = [
            (budget * n_edges).round().clamp(min=1).long() if budget < 1
            else n_edges.clamp(max=int(budget))
            for budget in self.budgets
        ]  # fmt: skip
        return torch.stack(rows)

    def bare(self) -> Float[Tensor, " sequence"]:
        """The loss of the model as it is."""
        return self._over_batches(lambda batch, first: self.measure.of(batch, first)[None])[0]

    def none(self) -> Float[Tensor, " sequence"]:
        """The loss with mean patterns."""

        def of(batch: Batch, first: int) -> Tensor:
            scores = self._scores(batch, first)
            places = [torch.where(keys, 0, -1)[:, None] for keys in scores.edges]
            nothing = torch.zeros(len(batch), dtype=torch.long)
            return self.measure.of(batch, first, self._edit(places, nothing))[None]

        return self._over_batches(of)[0]

    def by(self, name: str) -> Float[Tensor, "budget sequence"]:
        """The losses with the edges that a method chooses."""

        def of(batch: Batch, first: int) -> Tensor:
            scores = self._scores(batch, first)
            seeds = [
                derive_seed("edge budget", self.seed, name, first + i) for i in range(len(batch))
            ]
            method: EdgeMethod = CHANCE if name.startswith(CHANCE) else name  # type: ignore[assignment]
            places, n_edges = ranked(scores.of(method), scores.edges, seeds)
            lost = [
                self.measure.of(batch, first, self._edit(places, kept))
                for kept in self.kept(n_edges)
            ]
            return torch.stack(lost)

        found = self._over_batches(of)
        self.step(len(self.budgets))
        return found

    def _over_batches(self, of: Callable[[Batch, int], Tensor]) -> Tensor:
        found, done = [], 0
        for batch in self.batches.batches(self.batch_size):
            found.append(of(batch, done))
            done += len(batch)
        return torch.cat(found, dim=1)

    def _n_open(self, batch: Batch) -> Int[Tensor, " batch"]:
        heads = [len(mean) for mean in self.means]
        edges = self._scores(batch, 0).edges
        return torch.stack(
            [n * keys.sum(dim=(1, 2)) for n, keys in zip(heads, edges, strict=True)]
        ).sum(dim=0)

    def _scores(self, batch: Batch, first: int) -> EdgeScores:
        measure = self.measure.damage if isinstance(self.measure, _Divergence) else self.measure
        return EdgeScores(
            self.model, batch, first, self.measure.states(batch), measure, self.means,
            self.others, self.methods, self.seed,
        )  # fmt: skip

    def _edit(self, places: Sequence[Tensor], kept: Int[Tensor, " batch"]) -> Edit:
        @contextmanager
        def edited(batch: Batch, first: int) -> Iterator[None]:
            def keep(layer: int, seeing: SeenKeys, pattern: Tensor) -> Tensor:
                stays = places[layer] < kept[:, None, None, None]  # keys that are not open, too
                stays = stays.to(pattern.device).expand_as(pattern)
                return with_mean_rest(pattern, stays, self.means[layer])

            with catching(self.model, (), edits_of_patterns(self.model, range(len(places)), keep)):
                yield

        return edited
