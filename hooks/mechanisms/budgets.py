"""How much attention does a model need: keys of a layer, and edges of all?

Of k keys in every row: heads that pass on one token need as many whatever the length of the context
(max-position); heads that take a mean over all need the more the longer it is (global).

Of edges: some are kept, the rest is put to its mean. It is the causal test of what is said to
matter: as many edges as another method keeps, and the loss of the model that is left with them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import torch
from annotated_types import MinLen
from jaxtyping import Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.display import plain_label
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import mpl, pd
from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.foundation.settings import (
    Count,
    Distinct,
    Index,
    Positive,
    Seed,
    Share,
    checked,
)
from infoflow_lens.hooks.interventions.damage import NextTokenLoss, Read, metric_of
from infoflow_lens.hooks.interventions.edits import Edit
from infoflow_lens.hooks.interventions.kept import KeptNumbers, Reached, identify
from infoflow_lens.hooks.interventions.patterns import fill_with_mean, ideal_pattern, rescale
from infoflow_lens.hooks.interventions.probe import EditsOfPass, InterventionResult
from infoflow_lens.hooks.mechanisms.edges import (
    CHANCE,
    EdgeMethod,
    EdgeScores,
    Judge,
    methods_of,
    open_edges,
    rank_edges,
)
from infoflow_lens.hooks.mechanisms.measure import (
    NextTokenResult,
    Rounds,
    read_again,
    read_calibration,
)
from infoflow_lens.hooks.model.call import run_few_tokens
from infoflow_lens.hooks.model.inputs import Batches, Inputs
from infoflow_lens.hooks.model.points import layer_count, pattern_hook, takes_model
from infoflow_lens.hooks.passes.run import run
from infoflow_lens.hooks.passes.view import Needs, Pass
from infoflow_lens.hooks.result import LabelledArray, frame_of

Kept: TypeAlias = Literal["largest", "random"]
LARGEST: Final = "largest"
RANDOM: Final = "random"

Ks = Annotated[tuple[Count, ...], MinLen(1), Distinct()]


@dataclass(frozen=True, eq=False, kw_only=True)
class TopKResult(NextTokenResult):
    """The loss with all but k keys of every row taken out, and the rest rescaled.

    Attributes:
        ks: the numbers of keys, rising.
        tolerance: the relative rise of the loss up to which k is enough.
        kept: which keys stay, in the order of the first axis: "largest", those of largest weight;
            "random", the control, any that are allowed.
        losses: float [kept, layer, k, sequence], summed next-token loss in nats; the last entry of
            the layer axis is all layers at once; NaN where a search did not look.
        n_pos: tokens of the longest sequence.
    """

    ks: tuple[int, ...]
    tolerance: float
    kept: tuple[Kept, ...]
    losses: Float[Tensor, "kept layer k sequence"]
    n_pos: int

    def rise(self) -> Float[Tensor, "kept layer k"]:
        """Compute by how much the loss rises, relative to it."""
        return (self.losses - self.bare).sum(dim=3) / self.bare.sum()

    def least(self, kept: str = LARGEST) -> tuple[int, ...]:
        """Return the least k of each layer, and of all at once, from which on the loss is within.

        Where even the largest of `ks` is not enough, or is more, it is ``n_pos``, all keys.
        """
        enough = self.rise()[self.kept.index(kept)] <= self.tolerance
        found = []
        for row, known in zip(enough, ~self.losses[self.kept.index(kept), ..., 0].isnan()):
            least = self.n_pos
            # from the largest k down to the first that is not enough, past those not looked at
            for k, good, seen in reversed(list(zip(self.ks, row.tolist(), known.tolist()))):
                if seen and not good:
                    break
                least = k if seen else least
            found.append(min(least, self.n_pos))
        return tuple(found)

    def sentences(self) -> list[str]:
        """Say the least k of every layer, and of all at once."""
        *layers, together = self.least()
        return [
            f"top k: keys that keep the loss within {100 * self.tolerance:.3g}%, by layer: "
            f"{' '.join(map(str, layers))}; all layers at once: {together} (of {self.n_pos})",
        ]

    def to_frame(self) -> "pd.DataFrame":
        """Make a row for what is kept, layer ("all" for all at once) and k that was looked at."""
        rise = self.rise()
        dims = ("kept", "layer", "k")
        layers = [*map(str, range(rise.shape[1] - 1)), "all"]
        coords = {"kept": self.kept, "layer": layers, "k": self.ks}
        numbers = {"loss": self.loss * (1 + rise), "rise": rise}
        return frame_of(
            [LabelledArray(name, values, dims, coords) for name, values in numbers.items()],
            LabelledArray("looked", ~rise.isnan(), dims),
        )

    def plot(self) -> "mpl.Figure":
        """Draw the least k of every layer."""
        least = LabelledArray(
            f"keys of at most {self.n_pos}",
            torch.tensor(self.least()),
            ("layer",),
            {"layer": [*range(self.losses.shape[1] - 1), "all at once"]},
        )
        return least.plot(f"The least k that keeps the loss within {100 * self.tolerance:.3g}%")


@takes_model
@checked
def measure_top_k(
    model: nn.Module,
    inputs: Inputs,
    *,
    ks: Ks | None = None,
    tolerance: Positive = 0.01,
    search: bool = False,
    control: bool = False,
    last: Count | None = None,
    seed: Seed = 0,
    attention_mask: Tensor | None = None,
    column: str | None = None,
    max_length: Count | None = None,
    batch_size: Count = 16,
    resume: Reached | None = None,
    after: Callable[[Reached], None] | None = None,
    progress: bool = True,
) -> TopKResult:
    """Measure the next-token loss where the heads of a layer keep k keys of every row.

    Args:
        model: a language model in which an edited pattern reaches the output.
        inputs: sequences.
        ks: numbers of keys; default, powers of two below the length.
        tolerance: the relative rise of the loss that is allowed.
        search: look at as few k as halving needs, which takes the loss to fall as k rises.
        control: keep random keys, too, in place of the largest.
        last: how many predictions of each sequence count, the last ones; None for all.
        seed: of the random keys.
        attention_mask, column, max_length: as for `run_probes`.
        batch_size: sequences in a pass.
        resume: what `after` was last given.
        after: called after each batch with all that is measured so far.
        progress: show a bar.

    Raises:
        InfoFlowError: for k below 1, a tolerance that is not positive, a model without next
            tokens, or one in which edited patterns do not reach the output.
    """
    batches = read_again(model, inputs, attention_mask, column, max_length)
    loss = NextTokenLoss(last)
    loss.check(model, batches.shortest)
    n_pos = batches.longest or 0
    powers = [2**i for i in range(n_pos.bit_length()) if 2**i < n_pos]
    chosen = tuple(sorted(ks or powers or (1,)))
    kinds: tuple[Kept, ...] = (LARGEST, RANDOM) if control else (LARGEST,)
    n_layers = layer_count(model)
    settings = {
        "probe": "top_k",
        "ks": list(chosen),
        "tolerance": float(tolerance),
        "search": search,
        "control": control,
        "last": last,
        "seed": seed,
    }
    kept = KeptNumbers(identify(model, settings, inputs=batches), resume, after)
    rounds = Rounds(model, batches, None, kept, batch_size, progress)
    n = batches.n_sequences or 0
    losses = torch.full((len(kinds), n_layers + 1, len(chosen), n), torch.nan).double()
    # where to look, of each kind and layer: from one place in `chosen` to before another
    ends = {(kind, layer): (0, len(chosen)) for kind in kinds for layer in range(n_layers + 1)}
    n_rounds = 0
    while ends:
        places = [
            (kind, layer, at)
            for (kind, layer), (low, high) in ends.items()
            for at in ([(low + high) // 2] if search else range(low, high))
        ]
        points = tuple((kind, layer, chosen[at]) for kind, layer, at in places)
        make = partial(_keep_few, points, seed)
        probe = EditsOfPass(make, readout=loss, rows=1, through_hooks=True)
        found = rounds.measure(f"round {n_rounds}", probe)
        values, most, n_rounds = found.values(), (1 + tolerance) * found.bare.sum(), n_rounds + 1
        for kind, layer, at in places:
            lost = losses[kinds.index(kind), layer, at] = values[f"{kind} {layer} {chosen[at]}"]
            # without a search a layer has several places in one round, and is done with the first
            low, high = ends.pop((kind, layer), (0, 0))
            low, high = (low, at) if bool(lost.sum() <= most) else (at + 1, high)
            if search and low < high:
                ends[kind, layer] = low, high
    return TopKResult(
        ks=chosen,
        tolerance=float(tolerance),
        kept=kinds,
        losses=losses,
        bare=found.bare,
        n_tokens=found.n_tokens,
        n_pos=n_pos,
        record=RunRecord.from_model(model, settings, seed),
    )


def _keep_few(points: Iterable[tuple[Kept, int, int]], seed: int, plain: Pass) -> Iterable[Edit]:
    """Make an edit for each point: which keys stay, the layer, their number for all, how many."""
    for kind, layer, k in points:
        layers = range(plain.n_layers) if layer == plain.n_layers else [layer]
        drawn = seed if kind == RANDOM else None
        edited = {
            pattern_hook(plain.model, i): partial(_keep_k, plain, i, k, drawn) for i in layers
        }
        yield Edit(f"{kind} {layer} {k}", edited)


def _keep_k(plain: Pass, layer: int, k: int, seed: int | None, pattern: Tensor) -> Tensor:
    """Keep k keys of every row; the largest, or with a seed any that are seen."""
    visible = plain.visible(layer)[:, None]
    if seed is None:
        return ideal_pattern(pattern, visible, "top_k", k=k)
    # random numbers in the place of scores, below them all for closed keys and padding
    order = torch.full(pattern.shape, -1.0)
    lengths = plain.lengths_of(pattern.shape[2]).tolist()
    for row, index, n in zip(order, plain.indices.tolist(), lengths, strict=True):
        # by sequence, without its padding, so whatever the batch
        generator = torch.Generator().manual_seed(derive_seed("top k", seed, layer, index))
        row[:, :n, :n] = torch.rand(len(row), n, n, generator=generator, dtype=torch.float32)
    order = order.to(pattern.device).masked_fill(~visible, -1.0)
    least = order.topk(min(k, order.shape[-1]), dim=-1).values[..., -1:]
    kept = pattern * ((order >= least) & visible)
    return rescale(kept, pattern.sum(dim=-1, keepdim=True))


BUDGETS = tuple(2.0**-i for i in range(10, 0, -1))

Budgets = Annotated[tuple[Positive, ...], MinLen(1), Distinct()]
EdgeMetric = Literal["loss", "kl"]


class EdgesNeeded(NamedTuple):
    """How many edges of a window are needed.

    Attributes:
        edges: the mean over windows; NaN where attention is worth nothing.
        low, high: the 95% bootstrap interval over windows; NaN for a single one.
    """

    edges: float
    low: float
    high: float

    @classmethod
    def from_draws(cls, edges: Float[Tensor, " draw"]) -> "EdgesNeeded":
        """Make it of the edges of all windows, and behind these of windows drawn again."""
        low, high = edges[1:].quantile(torch.tensor([0.025, 0.975], dtype=edges.dtype)).tolist()
        return cls(float(edges[0]), low, high)


@dataclass(frozen=True, eq=False, kw_only=True)
class EdgeBudgetResult(NextTokenResult):
    """The loss with some edges kept, and the rest of every pattern replaced by its mean.

    Attributes:
        metric: "loss", the next-token loss; "kl", the divergence of the next-token distribution p
            of the model as it is from the new one q, KL(p || q), for which `bare` is 0. Nats,
            summed over the states that are read, `n_tokens` of each sequence.
        methods: the methods that choose edges, in the order of the first axis; "chance 0", ... are
            several draws.
        budgets: the budgets, rising: shares of a sequence's open edges, or numbers.
        kept: int [budget, sequence], the edges that are kept.
        n_edges: int [sequence], the edges on paths to the states that are read, of rows with more
            than one key.
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
        """Compute by how many nats a token mean patterns are worse: what attention is worth."""
        return float((self.none - self.bare).sum() / self.n_tokens.sum())

    def regained(self) -> Float[Tensor, "method budget"]:
        """Compute the share of it that kept edges keep: 0 as without any, 1 as the model."""
        return (self.none - self.losses).sum(dim=2) / (self.none - self.bare).sum()

    @checked
    def edges_needed(
        self, share: Share = 0.9, *, draws: Count = 1000, seed: Seed = 0
    ) -> dict[str, EdgesNeeded]:
        """Find how many edges of a window each method needs to keep a share of attention's worth.

        Between two budgets the share is taken to be linear in log(1 + edges); no edges and all are
        points of the curve, too. "chance" is the mean of its draws.

        Args:
            share: of what attention is worth.
            draws: how often windows are drawn, with replacement, for the intervals.
            seed: of the draws.
        """
        needed = self._find_needed(share, draws, seed)
        return {name: EdgesNeeded.from_draws(edges) for name, edges in needed.items()}

    @checked
    def times_needed(
        self, method: str, other: str, share: Share = 0.9, *, draws: Count = 1000, seed: Seed = 0
    ) -> EdgesNeeded:
        """Compare how many edges two methods need, on the same draws of windows.

        Args:
            method: one of `methods`, or "chance".
            other: the one whose edges are counted as 1.
            share, draws, seed: as for :meth:`edges_needed`.

        Raises:
            InfoFlowError: for a method that was not measured.
        """
        needed = self._find_needed(share, draws, seed)
        for name in (method, other):
            if name not in needed:
                raise InfoFlowError(
                    f"{name!r} was not measured: expected one of {', '.join(needed)}"
                )
        return EdgesNeeded.from_draws(needed[method] / needed[other])

    def _curves(self) -> dict[str, Float[Tensor, "budget sequence"]]:
        """List the losses of each method, those of chance as one."""
        curves = {m: v for m, v in zip(self.methods, self.losses) if not m.startswith(CHANCE)}
        drawn = [v for m, v in zip(self.methods, self.losses) if m.startswith(CHANCE)]
        return curves | ({CHANCE: torch.stack(drawn).mean(dim=0)} if drawn else {})

    def _find_needed(
        self, share: float, draws: int, seed: int
    ) -> dict[str, Float[Tensor, " draw"]]:
        """Find the edges needed by each method: of all windows, then of windows drawn again."""
        n = len(self.bare)
        generator = torch.Generator().manual_seed(derive_seed("edges needed", seed))
        drawn = torch.randint(n, (draws, n), generator=generator)
        # how often each draw has each window, as weights; the first row has each window once
        counts = torch.zeros(draws, n, dtype=torch.float64)
        counts.scatter_add_(1, drawn, torch.ones_like(counts))
        counts = torch.cat([torch.ones_like(counts[:1]), counts])
        kept = torch.cat([torch.zeros_like(self.kept[:1]), self.kept, self.n_edges[None]])
        edges = (counts @ kept.double().T / n).log1p()
        worth = counts @ (self.none - self.bare)
        if n < 2:  # drawn again, a window is the same
            worth[1:] = torch.nan
        found = {}
        for name, losses in self._curves().items():
            whole = torch.cat([self.none[None], losses, self.bare[None]])
            regained = counts @ (self.none - whole).T / worth[:, None]
            found[name] = _find_crossing(edges, regained, share).where(worth > 0, torch.nan)
        return found

    def to_frame(self) -> "pd.DataFrame":
        """Make a row for each method and budget: edges of a window and of a state, loss, share."""
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

    def plot(self) -> "mpl.Figure":
        """Draw what each method keeps of what attention is worth, by the edges of a window."""
        figure = mpl.Figure(figsize=(6.5, 4), layout="constrained")
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


def _find_crossing(
    edges: Float[Tensor, "draw point"], regained: Float[Tensor, "draw point"], share: float
) -> Float[Tensor, " draw"]:
    """Find the edges from which on a share is regained, of logarithms of 1 + edges."""
    below = (regained < share).long()
    points = torch.arange(edges.shape[1] - 1)
    # the last one, as a curve may cross the share more than once
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
    resume: Reached | None = None,
    after: Callable[[Reached], None] | None = None,
    progress: bool = True,
) -> EdgeBudgetResult:
    """Measure the loss with as many edges kept as a budget allows, chosen by several methods.

    An edge is one weight (layer, head, query, key) of one pattern. Those that count lie on paths to
    the states of the last layer that are read, in rows of more than one key: where a query sees one
    there is nothing to choose. In the pass of the edited model a kept edge has the
    weight that its head gives it in that pass. On the other keys of its row stands the head's mean
    pattern (over calibration sequences, by query and key), scaled to the weight that they have
    together: so rows keep their sums, without edges every head has its mean pattern, and with all
    of them the model is as it is, bit for bit. As in the other measurements the edited model works
    with what it has: where a head attends follows from what the kept edges below it bring.

    Each sequence keeps the same share, or number, of its own edges, whatever the layer or head.
    See :meth:`~infoflow_lens.hooks.mechanisms.edges.EdgeScores.compute` for the methods: what they
    know is the pass of the model as it is; "gradient" and "gradient x change" also know
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
        after: called after each batch of each method with all that is measured so far.
        progress: show a bar.

    Raises:
        InfoFlowError: for bad inputs or settings, calibration sequences that are shorter, a method
            that the model cannot give, a model without next tokens, or without logits at each
            position, or one in which edited patterns do not reach the output.
    """
    chosen = _check_budgets(budgets)
    batches = read_again(model, inputs, attention_mask, column, max_length)
    others = read_calibration(model, calibration, batches, column, max_length)
    judge: Judge
    if metric == "loss":
        judge = NextTokenLoss(read=read)
        judge.check(model, batches.shortest)
        judged: dict[str, Any] = {"readout": judge}
    else:
        judge = metric_of(model, metric, read, batches.shortest)
        judged = {"metric": metric, "read": read}
        if run_few_tokens(model).output.ndim != 3:
            raise InfoFlowError(
                "the model gives one output for a sequence, and edges are counted on paths to "
                "states with logits: expected a model with logits at each position; what single "
                "heads do is measured by measure_mechanisms"
            )
    given = methods_of(model)
    asked = given if methods is None else methods
    names = [
        name
        for method in asked
        for name in ([f"{CHANCE} {i}" for i in range(draws)] if method == CHANCE else [method])
    ]
    if not names:
        raise InfoFlowError(
            f"methods are {methods!r} with draws = {draws}: expected a method that chooses edges, "
            "or at least one draw of chance; leave methods out for all that the model can give"
        )
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
    kept = KeptNumbers(identify(model, settings, inputs=batches, calibration=others), resume, after)
    rounds = Rounds(model, batches, others, kept, batch_size, progress)
    patterns = [mean.float() for mean in rounds.find_means("patterns").patterns]

    def measure(name: str, some: tuple[float, ...]) -> InterventionResult:
        def make(plain: Pass) -> Iterable[Edit]:
            return _keep_edges(EdgeScores(plain, judge, patterns, others, seed), name, some)

        return rounds.measure(name, EditsOfPass(make, rows=1, through_hooks=True, **judged))

    none = measure("none", ())
    bare = none.bare if metric == "loss" else torch.zeros_like(none.bare)
    n_edges = _count_edges(model, batches, batch_size, judge)
    return EdgeBudgetResult(
        metric=metric,
        methods=tuple(names),
        budgets=chosen,
        kept=_count_kept(chosen, n_edges),
        n_edges=n_edges,
        losses=torch.stack([bare + measure(name, chosen).lost.T for name in names]),
        none=bare + none.lost[:, 0],
        bare=bare,
        n_tokens=torch.cat([judge.states(b).sum(dim=1) for b in batches.batches(batch_size)]),
        record=RunRecord.from_model(model, settings, seed),
    )


def _check_budgets(budgets: Sequence[float]) -> tuple[float, ...]:
    """Check budgets and put them in rising order.

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


def _count_kept(
    budgets: Sequence[float], n_edges: Int[Tensor, " sequence"]
) -> Int[Tensor, "budget sequence"]:
    """Count the edges of each sequence that are kept."""
    # a share keeps one edge at least, but no more than there are
    wanted = [
        (budget * n_edges).round().clamp(min=1).long() if budget < 1
        else torch.full_like(n_edges, int(budget))
        for budget in budgets
    ]  # fmt: skip
    return torch.stack(wanted).minimum(n_edges)


def _count_edges(
    model: nn.Module, batches: Batches, batch_size: int, judge: Judge
) -> Int[Tensor, " sequence"]:
    """Count the edges of each sequence on paths to the states that are read."""
    counts = []
    for batch in batches.batches(batch_size):
        seen = run(model, batch, Needs.of(model, scores=True, pattern=True))
        edges = open_edges(seen, judge.states(batch))
        # each head of a layer has all edges between the open positions
        each = [seen.pattern(i).shape[1] * keys.sum(dim=(1, 2)) for i, keys in enumerate(edges)]
        counts.append(torch.stack(each).sum(dim=0))
    return torch.cat(counts)


def _keep_edges(scores: EdgeScores, name: str, budgets: Sequence[float]) -> Iterable[Edit]:
    """Make an edit for each budget, with edges in the order of a method; without budgets none."""
    # without budgets no edge is kept, so that scores, which may cost passes, are not asked for
    method: Any = CHANCE if not budgets or name.startswith(CHANCE) else name
    indices = scores.plain.indices.tolist()
    # by method and sequence, so that the order of equal scores is the same in any batch
    seeds = [derive_seed("edge budget", scores.seed, name, index) for index in indices]
    places, n_edges = rank_edges(scores.compute(method), scores.edges, seeds)
    counts = _count_kept(budgets, n_edges) if budgets else 0 * n_edges[None]
    for budget, kept in zip(budgets or (0,), counts, strict=True):
        edited = {
            pattern_hook(scores.model, i): partial(_keep_first, place, kept, scores.means[i])
            for i, place in enumerate(places)
        }
        yield Edit(str(budget), edited)


def _keep_first(
    places: Int[Tensor, "batch head query key"],
    kept: Int[Tensor, " batch"],
    mean: Float[Tensor, "head longest longest"],
    pattern: Float[Tensor, "batch head query key"],
) -> Float[Tensor, "batch head query key"]:
    """Keep the first edges; and those of keys that are not open, whose place is -1."""
    stays = (places < kept[:, None, None, None]).to(pattern.device).expand_as(pattern)
    return fill_with_mean(pattern, stays, mean)
