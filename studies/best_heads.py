"""First-layer heads found by search: the least error that such heads were found to reach.

Beyond both papers. A gap that D best pairs owe to D heads is only as sure as the fewer heads that
it is held against, so these are sought for. A head is hard: every token retrieves one other. Its
score is bilinear, ``(x B + b) . y`` for a query x and a key y, as behind a linear encoder; with
several roles, as behind a hidden layer, the query's token decides by which of several such scores.

* [derived] One score serves two matrices: by A_1 + c A_2^T a token finds its partner under A_1 from
  one side of the best pair, and its partner under A_2 from the other side.
* [measured] The number is the error of the best heads that a search of stated length found, on
  sequences that it has not seen. Other heads may do better: it bounds the least error of such heads
  from above, and that of others, such as soft ones, not at all.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

import torch
from annotated_types import Ge
from jaxtyping import Float, Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.foundation.settings import Count, Seed, checked
from infoflow_lens.theory.comparison import Component, best_tuples, pair_scores
from infoflow_lens.theory.jobs import choose_roles, roles_of
from infoflow_lens.theory.routing import interval, nmse_of
from infoflow_lens.theory.schedule import reference_tokens

_KEPT, _CHILDREN = 8, 4  # sets of heads that are improved, and tries of each in a round
_JUDGED, _JUDGED_TOKENS = 8000, 2**16  # sequences to judge by, and tokens in them, at most
_REFERENCE = 256  # tokens that tell which role a query is good for
_NOTHING = 1e-9  # an NMSE below which there is nothing left to search for
_SHARES = (1.0, 0.5, 2.0, -0.5, -1.0, -2.0)  # c in A_1 + c A_2^T
_AT_ONCE = 2**21  # scores

Choose: TypeAlias = Callable[[Tensor], Tensor]  # from sequences to chosen keys


@dataclass(frozen=True)
class BestHeads:
    """The best first-layer heads that a search found, and what they leave [measured].

    Attributes:
        n_heads: h_1.
        roles: scores that each head chooses from by its query's token.
        nmse: mean squared error over the variance of the target, on sequences apart from those of
            the search, by the best affine function of the value that is reached and of its parts.
        low, high: interval of 95%, by resampling these sequences.
        held: share of them in which CLS holds the best pair of every component.
        budget: sets of heads that were tried.
        n: sequences that they were tried on.
        scores: those of the heads; None where the heads of `measure_routing` were the best.
    """

    n_heads: int
    roles: int
    nmse: float
    low: float
    high: float
    held: float
    budget: int
    n: int
    scores: "HeadScores | None" = field(repr=False, compare=False)


@checked
def best_heads(
    task: Any,
    n_heads: Count,
    *,
    roles: Count = 1,
    budget: Annotated[int, Ge(64)] = 3000,
    n: Annotated[int, Ge(32)] = 1500,
    seed: Seed = 0,
) -> BestHeads:
    """Search for the best `n_heads` hard heads of the first of two layers on a task of pairs.

    CLS then takes for each component the largest score of a pair that some token holds, as in
    :func:`~infoflow_lens.theory.routing.measure_routing`. The search begins at the components' own
    scores, at sums of two of them, and at random ones; with several roles also at the best heads of
    one, which a search of the same length finds first. It keeps the best, and changes these at
    random, in steps that grow with success and shrink without. Of the sets that are left, of those
    that it began with and, with several roles, of those of `measure_routing`, other sequences
    choose the best set, and others again judge it.

    Args:
        task: a target whose components are pairs of tokens, such as ``intrinsic_dimension``.
        n_heads: h_1.
        roles: scores that each head chooses from; 1 for heads behind a linear encoder.
        budget: sets of heads to try, about; twice as many with several roles.
        n: sequences to try them on.
        seed: of sequences and search.

    Raises:
        InfoFlowError: for components that are not pairs of all tokens, or values out of range.
    """
    components = tuple(getattr(task, "components", ()))
    if not components:
        raise InfoFlowError(
            f"task is {task!r:.80}, which has no components: expected a target of pairs, such as "
            'load_task("intrinsic_dimension")'
        )
    for index, component in enumerate(components):
        if component.arity != 2 or component.tuples is not None:
            listed = ", tuples of its own" if component.tuples is not None else ""
            raise InfoFlowError(
                f"component {index} has arity {component.arity}{listed}: expected pairs of all "
                "tokens, which a head of the first layer can retrieve"
            )
    seen = _Sequences(task, n, derive_seed("heads, search", seed))
    search = _Search(seen, n_heads, roles, budget, seed)
    last = search.run()

    n_judged = max(100, min(_JUDGED, _JUDGED_TOKENS // seen.x.shape[1]))
    others = _Sequences(task, n_judged // 4, derive_seed("heads, choice", seed))
    choices: list[Choose] = [last.chosen]
    # where the search leaves an error, the construction of the theory stands in, too
    if roles > 1 and search.least > _NOTHING:
        choices.append(lambda x: _route(task, n_heads, x, seed))
    readouts, errors = [], []
    for choose in choices:
        readouts.append(_fit(seen.parts(choose), seen.y))
        errors.append(nmse_of(others.parts(choose) @ readouts[-1], others.y))
    # chosen on other sequences than those of the search, and judged on others again
    found = int(torch.cat(errors).argmin())
    # errors of the search's sets come first, then that of routing
    scores = None if found == len(last.forms) else last.select(torch.tensor([found]))
    judge = _Sequences(task, n_judged, derive_seed("heads, judge", seed))
    parts = judge.parts(choices[-1] if scores is None else scores.chosen)[0]
    output = parts @ torch.cat(readouts)[found]
    low, high = interval(output, judge.y, seed)
    return BestHeads(
        n_heads=n_heads,
        roles=roles,
        nmse=float(nmse_of(output, judge.y)),
        low=low,
        high=high,
        held=judge.rate(parts),
        budget=search.tried,
        n=n,
        scores=scores,
    )


@dataclass(frozen=True)
class HeadScores:
    """Several sets of heads, each head with its roles.

    Attributes:
        forms: of every role B and, below it, b.
        gates: a query takes the role with the largest ``(x, 1) G (x, 1)``.
    """

    forms: Float[Tensor, "set head role d_token+1 d_token"]
    gates: Float[Tensor, "set head role d_token+1 d_token+1"]

    def select(self, rows: Tensor) -> "HeadScores":
        """Select some of the sets."""
        return HeadScores(self.forms[rows], self.gates[rows])

    def join(self, others: "HeadScores") -> "HeadScores":
        """Return these sets, and then others."""
        return HeadScores(
            torch.cat([self.forms, others.forms]), torch.cat([self.gates, others.gates])
        )

    def where(self, better: Float[Tensor, " set"], others: "HeadScores") -> "HeadScores":
        """Put others in the place of some of these sets."""
        rows = better[:, None, None, None, None]
        return HeadScores(
            torch.where(rows, others.forms, self.forms), torch.where(rows, others.gates, self.gates)
        )

    def chosen(self, x: Float[Tensor, "batch pos d_token"]) -> Int[Tensor, "set head batch pos"]:
        """Return the key of each query's largest score."""
        n_sets, n_heads, n_roles = self.forms.shape[:3]
        tokens = _append_one(x.flatten(0, 1))
        queries = tokens @ self.forms.flatten(0, 2)  # [set head role, token, d_token]
        queries = queries.unflatten(0, (n_sets * n_heads, n_roles))
        if n_roles > 1:
            # a gate's quadratic form is linear in all products of two entries of (x, 1)
            products = (tokens[:, :, None] * tokens[:, None]).flatten(1)
            gates = self.gates.flatten(0, 2).flatten(1) @ products.T
            # [set head, 1, token, 1]: of a head's roles the one that the query's token takes
            role = gates.unflatten(0, (-1, n_roles)).argmax(dim=1)[:, None, :, None]
            queries = queries.gather(1, role.expand(-1, -1, -1, x.shape[-1]))
        # one query a head is left: [set head, batch, pos, d_token]
        by_query = queries[:, 0].unflatten(1, x.shape[:2])
        return (by_query @ x.mT).argmax(dim=-1).unflatten(0, (n_sets, n_heads))


class _Sequences:
    """Sequences of a task, and what CLS reaches on them with chosen keys."""

    def __init__(self, task: Any, n: int, seed: int) -> None:
        self.task, self.components = task, tuple(task.components)
        self.x, y = task.sample(n, seed)
        self.y = y.double()
        n_tokens = self.x.shape[1]
        # parts of the sequences, of which the scores of all pairs are at most _AT_ONCE
        self.rows = torch.arange(n).split(max(1, _AT_ONCE // n_tokens**2))
        # scores of a pair in its better order: a query that holds both tokens takes either
        self.pairs = torch.empty(len(self.components), n, n_tokens, n_tokens)
        for index, component in enumerate(self.components):
            for part in self.rows:
                scores = pair_scores(component, self.x[part], reverse=False)
                self.pairs[index, part] = torch.maximum(scores, scores.mT)
        # pairs that a component does not allow are -inf, and are not the worst ones
        least = self.pairs.masked_fill(self.pairs == -torch.inf, torch.inf).amin(dim=(2, 3))
        # a token with itself, which needs no head; where that is no pair, the worst one
        alone = self.pairs.diagonal(dim1=2, dim2=3).amax(dim=2)
        self.alone = torch.maximum(alone, least)

    def parts(self, choose: Choose) -> Float[Tensor, "set batch part"]:
        """Return the best score of each component that a token holds, the value, and one."""
        return torch.cat([self._parts(choose(self.x[rows]), rows) for rows in self.rows], dim=1)

    def _parts(
        self, chosen: Int[Tensor, "set head some pos"], rows: Int[Tensor, " some"]
    ) -> Float[Tensor, "set some part"]:
        # a query holds its own token and its heads' choices: [set, 1 + head, some, pos]
        own = torch.arange(chosen.shape[-1]).expand_as(chosen[:, :1])
        held = torch.cat([own, chosen], dim=1)
        first, second = torch.combinations(torch.arange(held.shape[1]), 2).T
        # every pair of tokens that a query holds, as an index of the scores of all pairs
        at = (held[:, first] * chosen.shape[-1] + held[:, second]).transpose(1, 2).flatten(2)
        best = []
        for component, pairs, alone in zip(self.components, self.pairs, self.alone, strict=True):
            # [set, some, all pairs], of which CLS finds the best one that some query holds
            scores = pairs[rows].flatten(1).expand(len(at), -1, -1)
            reached = torch.maximum(scores.gather(2, at).amax(dim=2), alone[rows])
            # pairs are preferred by the largest number, the target is made of the scores
            best.append(reached if component.extremum == "max" else -reached)
        values = torch.stack(best, dim=-1)
        outer = self.task.outer_function(values.flatten(0, 1)).unflatten(0, values.shape[:2])
        return torch.cat([values, outer, torch.ones_like(values[..., :1])], dim=-1).double()

    def rate(self, parts: Float[Tensor, "batch part"]) -> float:
        """Return the share of the sequences in which these parts are the best of all pairs."""
        whole = torch.ones(len(parts), dtype=torch.bool)
        for index, component in enumerate(self.components):
            reached = parts[:, index] if component.extremum == "max" else -parts[:, index]
            best = best_tuples(self.x, component)[1].double()
            # up to rounding, since other operations have computed the best of all pairs
            whole &= reached >= best - 1e-6 * best.abs()
        return float(whole.double().mean())


class _Search:
    """Local search over the scores of heads."""

    def __init__(
        self, sequences: _Sequences, n_heads: int, roles: int, budget: int, seed: int
    ) -> None:
        self.sequences, self.budget, self.tried, self.least = sequences, budget, 0, math.inf
        self.n_heads, self.roles, self.seed = n_heads, roles, seed
        self.generator = torch.Generator().manual_seed(derive_seed("heads, tries", seed, roles))
        n, n_tokens, _ = sequences.x.shape
        # so many sets that the scores of all their heads are about _AT_ONCE
        self.at_once = max(1, _AT_ONCE // (min(n, len(sequences.rows[0])) * n_tokens**2 * n_heads))

    def run(self) -> HeadScores:
        """Return the best sets of heads to begin with, and those that were found."""
        starts = self._starts()
        if self.roles > 1:
            # heads of several roles begin with what heads of one role have reached
            alone = _Search(self.sequences, self.n_heads, 1, self.budget, self.seed)
            starts = self._expand_roles(alone.run()).join(starts)
            self.tried = alone.tried
        # what the starts leave of the budget, for three stages of as many rounds
        rounds = max(0, self.budget - len(starts.forms)) // (3 * _CHILDREN * _KEPT)
        errors = self._errors(starts)
        order = errors.argsort()[:_KEPT]
        starts, heads, errors = starts.select(order), starts.select(order), errors[order]
        steps = torch.full((len(errors),), 0.5)
        # from stage to stage fewer sets with more children each: as many tries a round
        for kept in (_KEPT, _KEPT // 2, _KEPT // 4):
            order = errors.argsort()[:kept]
            heads, errors, steps = heads.select(order), errors[order], steps[order]
            n_children = _CHILDREN * _KEPT // kept
            for _ in range(rounds):
                if errors.min() < _NOTHING:
                    break
                tries = self._change(heads, steps, n_children)
                found = self._errors(tries).view(len(errors), n_children)
                least, child = found.min(dim=1)
                better = least < errors
                first = torch.arange(len(errors)) * n_children
                heads = heads.where(better, tries.select(first + child))
                errors = torch.where(better, least, errors)
                # longer steps after a success, shorter ones after a failure
                steps = (steps * torch.where(better, 1.3, 0.85)).clamp(0.005, 1.0)
        self.least = float(errors.min())
        # starts stay in the choice: what was searched may fit these sequences alone
        return starts.join(heads)

    def _errors(self, heads: HeadScores) -> Float[Tensor, " set"]:
        """Return the NMSE of sets of heads, each by its best readout, on the search's sequences."""
        self.tried += len(heads.forms)
        found = []
        for some in torch.arange(len(heads.forms)).split(self.at_once):
            parts = self.sequences.parts(heads.select(some).chosen)
            found.append(nmse_of(parts @ _fit(parts, self.sequences.y), self.sequences.y))
        return torch.cat(found)

    def _starts(self) -> HeadScores:
        """Draw different scores of components for all heads and roles; and sums, at random."""
        sides = _sides(self.sequences.components, self.sequences.x)
        n_scores = self.n_heads * self.roles
        # each way to give all scores different sides, as far as an eighth of the budget goes
        several = itertools.combinations(range(len(sides)), min(n_scores, len(sides)))
        different = [
            torch.tensor(some)[torch.arange(n_scores) % len(some)]
            for some in itertools.islice(several, self.budget // 8)
        ]
        forms = torch.cat([sides, _sums(sides)])
        n_sets = max(_KEPT, self.budget // 8)
        drawn = torch.randint(len(forms), (n_sets, n_scores), generator=self.generator)
        known = forms[torch.cat([torch.stack(different), drawn])]
        known = known.unflatten(1, (self.n_heads, self.roles))
        random = torch.randn(known.shape, generator=self.generator, dtype=torch.float32)
        random[..., -1, :] = 0  # keys alone tell nothing at first
        by_chance = (
            torch.rand(known.shape[:3], generator=self.generator, dtype=torch.float32) < 0.125
        )
        # sets of different sides stay whole
        by_chance[: len(different)] = False
        forms = torch.where(by_chance[..., None, None], _unit(random), known)
        return HeadScores(forms, self._gates(forms))

    def _expand_roles(self, heads: HeadScores) -> HeadScores:
        """Return the same heads with their one score in every role."""
        forms = heads.forms.expand(-1, -1, self.roles, -1, -1).contiguous()
        # with one score in all roles any gates do; random ones let roles part later
        gates = torch.randn(
            (*forms.shape[:3], *heads.gates.shape[3:]),
            generator=self.generator,
            dtype=torch.float32,
        )
        return HeadScores(forms, gates)

    def _gates(
        self, forms: Float[Tensor, "set head role d_token+1 d_token"]
    ) -> Float[Tensor, "set head role d_token+1 d_token+1"]:
        """Let queries take the role in which |x B| is largest, by what other tokens have there."""
        # (x, 1) F F^T (x, 1)^T is the squared size of a query
        squares = forms @ forms.mT
        tokens = _append_one(self.sequences.x.flatten(0, 1)[:500])
        sizes = (tokens @ forms).square().sum(dim=-1)
        deviation = sizes.std(dim=-1).clamp(min=1e-6)
        gates = squares / deviation[..., None, None]
        # (size - mean) / deviation, as a quadratic form of (x, 1)
        gates[..., -1, -1] -= sizes.mean(dim=-1) / deviation
        return gates

    def _change(self, heads: HeadScores, steps: Float[Tensor, " set"], times: int) -> HeadScores:
        """Repeat each set several times, with about half of its scores changed, at least one."""
        forms = heads.forms.repeat_interleave(times, dim=0)
        gates = heads.gates.repeat_interleave(times, dim=0)
        step = steps.repeat_interleave(times)[:, None, None, None, None]
        shape = forms.shape[:3]
        changed = torch.rand(shape, generator=self.generator, dtype=torch.float32).flatten(1) < 0.5
        one = torch.randint(changed.shape[1], (len(forms), 1), generator=self.generator)
        rows = changed.scatter(1, one, True).view(shape)[..., None, None]
        noise = torch.randn(forms.shape, generator=self.generator, dtype=torch.float32)
        # noise of about norm 1, as forms have it, times the step
        moved = _unit(forms + step * noise / forms[0, 0, 0].numel() ** 0.5)
        forms = torch.where(rows, moved, forms)
        if self.roles > 1:
            noise = torch.randn(gates.shape, generator=self.generator, dtype=torch.float32)
            gates = torch.where(rows, gates + step * noise, gates)
        return HeadScores(forms, gates)


def _fit(
    parts: Float[Tensor, "set batch part"], y: Float[Tensor, "batch d_output"]
) -> Float[Tensor, "set part d_output"]:
    """Fit the best linear readouts of parts, which may depend on one another."""
    gram = parts.mT @ parts
    # so small that it moves only what the parts leave open
    ridge = 1e-12 * gram.diagonal(dim1=-2, dim2=-1).mean(dim=-1)
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype)
    solved: Tensor = torch.linalg.solve(gram + ridge[:, None, None] * eye, parts.mT @ y)
    return solved


def _route(
    task: Any, n_heads: int, x: Float[Tensor, "batch pos d_token"], seed: int
) -> Int[Tensor, "set head batch pos"]:
    """Make one set: the heads of `measure_routing`, by components' scores in their best roles."""
    components = tuple(task.components)
    known = roles_of(components, range(len(components)))
    order = choose_roles(components, known, x, reference_tokens(task, seed)[:_REFERENCE])
    partners = [pair_scores(components[c], x, reverse).argmax(dim=-1) for c, reverse in known]
    chosen = torch.stack(partners, dim=-1).gather(2, order)
    # heads beyond the number of roles repeat the last one
    heads = torch.arange(n_heads).clamp(max=len(known) - 1)
    return chosen[..., heads].permute(2, 0, 1)[None]


def _sides(
    components: tuple[Component, ...], x: Float[Tensor, "batch pos d_token"]
) -> Float[Tensor, "side d_token+1 d_token"]:
    """Give the bilinear parts of the components' scores, for a query on either side of the pair."""
    matrices: list[Tensor] = []
    for component in components:
        matrix = _unit(_bilinear_part(component, x.shape[-1]))
        matrices += [matrix] if component.symmetric else [matrix, matrix.T]
    # b, a row of zeros below each matrix: keys alone score nothing
    return torch.nn.functional.pad(torch.stack(matrices), (0, 0, 0, 1))


def _sums(sides: Float[Tensor, "side row d_token"]) -> Float[Tensor, "sum row d_token"]:
    """Return sums of two sides with several shares; none of a single side."""
    first, second = torch.combinations(torch.arange(len(sides))).T
    shares = torch.tensor(_SHARES)[:, None, None, None]
    return _unit(sides[first] + shares * sides[second]).flatten(0, 1)


def _bilinear_part(component: Component, d_token: int) -> Float[Tensor, "d_token d_token"]:
    """Compute what depends on both tokens of a pair together, at the unit vectors."""
    units = torch.cat([torch.eye(d_token), torch.zeros(1, d_token)])
    # [first token, second token, d_token], the zero token last of both
    first = units[:, None].expand(-1, d_token + 1, -1)
    values = component.preference(torch.stack([first, first.transpose(0, 1)], dim=-2))
    # less what either token does alone; the last row and column hold the zero token
    both = values - values[:, -1:] - values[-1:] + values[-1, -1]
    return both[:-1, :-1]


def _unit(forms: Tensor) -> Tensor:
    """Scale to norm 1: a hard head is the same for every positive multiple of its score."""
    return forms / forms.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-12)


def _append_one(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d+1"]:
    return torch.cat([x, torch.ones_like(x[..., :1])], dim=-1)
