"""Jobs: what one head does in a layer, for the queries of tokens or for that of CLS.

A job knows how it moves information sets on given inputs, how it is said in words, and what it asks
of the model.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.theory.comparison import (
    Component,
    Score,
    best_inside,
    common_positions,
    least,
    pair_scores,
    tuple_holders,
)
from infoflow_lens.theory.rules import GlobalAggregation, MaxPosition, Rule, SpecificPositions

Role = tuple[int, bool]  # component, and whether the query's token comes second

_MOST_SCORES_AT_ONCE = 2**16  # fits in the processor's cache, which halves the time


def roles_of(components: Sequence[Component], indices: Sequence[int]) -> list[Role]:
    """List the roles of a routed head: both sides of each component, one if order is nothing.

    Raises:
        InfoFlowError: for components that are not pairs.
    """
    roles: list[Role] = []
    for index in indices:
        if components[index].arity != 2:
            raise InfoFlowError(
                f"component {index} has arity {components[index].arity}: expected 2, since a role "
                "is the score of the query's token with another"
            )
        roles += (
            [(index, False)] if components[index].symmetric else [(index, False), (index, True)]
        )
    return roles


def attainable(
    component: Component,
    reverse: bool,
    x: Float[Tensor, "*batch d_token"],
    reference: Float[Tensor, "sample d_token"],
    n_keys: int,
) -> Float[Tensor, "*batch"]:
    """Return the score that a query can hope for: what the best of `n_keys` random tokens gives it.

    The upper 1/n_keys quantile of its scores with the reference tokens.
    """
    queries = x.flatten(0, -2)
    # the last of the best 1 / n_keys of the reference tokens
    rank = min(len(reference), max(1, round(len(reference) / n_keys)))
    parts = []
    for part in queries.split(max(1, _MOST_SCORES_AT_ONCE // len(reference))):
        first = part[:, None].expand(-1, len(reference), -1)
        second = reference[None].expand(len(part), -1, -1)
        pair = [second, first] if reverse else [first, second]
        scores = component.preference(torch.stack(pair, dim=-2))
        parts.append(scores.topk(rank, dim=1).values[:, -1])
    return torch.cat(parts).view(x.shape[:-1])


def choose_roles(
    components: Sequence[Component],
    roles: Sequence[Role],
    x: Float[Tensor, "batch pos d_token"],
    reference: Float[Tensor, "sample d_token"],
) -> Int[Tensor, "batch pos choice"]:
    """Order the roles for every token from best to worst, as indices, by the token alone.

    A role is good for a token if few reference tokens could reach a higher score in it; beyond all
    of them, the distance to the best of them in standard deviations decides.
    """
    ranks = []
    for component, reverse in roles:
        given = components[component]
        pool = attainable(given, reverse, reference, reference, x.shape[1])
        own = attainable(given, reverse, x, reference, x.shape[1])
        ordered = pool.sort().values
        higher = 1 - torch.searchsorted(ordered, own.contiguous()).to(x.dtype) / len(pool)
        # ranks tie above the whole pool; there the distance to it decides
        beyond = (own - ordered[-1]) / pool.std().clamp(min=1e-12)
        ranks.append(higher - torch.where(higher <= 0, beyond, torch.zeros_like(beyond)) / 1e6)
    return torch.stack(ranks, dim=-1).argsort(dim=-1, stable=True)


_MOST_CANDIDATES = 2**22  # numbers of candidates for a message at a time


@dataclass
class Progress:
    """A schedule on a batch: what states hold, and how far adaptive searches have come.

    Attributes:
        components: what jobs retrieve.
        x: the inputs.
        sets: what tokens and CLS, the last, hold before the layer that is run.
        sees: bool [query, key], for tokens.
        reference: tokens by which routed heads know what is a good score.
        reached: for every adaptive search the score that each query has come to; for every message
            the positions [batch, pos, size] that each token holds by it.
        reached_next: the same after the layer that is run.
        roles: for every choice of components the roles of all tokens, from best to worst.
    """

    components: Sequence[Component]
    x: Float[Tensor, "batch pos d_token"]
    sets: Bool[Tensor, "batch query pos"]
    sees: Bool[Tensor, "pos key"]
    reference: Float[Tensor, "sample d_token"] | None = None
    reached: dict["Job", Tensor] = field(default_factory=dict)
    reached_next: dict["Job", Tensor] = field(default_factory=dict)
    roles: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    @property
    def n_tokens(self) -> int:
        """T."""
        return self.x.shape[1]

    def queries(self, for_tokens: bool) -> slice:
        """Return the positions of tokens, or that of CLS."""
        return slice(0, self.n_tokens) if for_tokens else slice(self.n_tokens, None)

    def best_seen(
        self, scores: Float[Tensor, "batch query key"] | Float[Tensor, "batch 1 key"]
    ) -> Int[Tensor, "batch query"]:
        """Return the best key that each token sees."""
        each = scores.expand(-1, self.n_tokens, -1)
        return each.masked_fill(~self.sees, -torch.inf).argmax(dim=-1)


@dataclass(frozen=True)
class Job(ABC):
    """What one head does in a layer.

    Attributes:
        mechanism: "max-position retrieval", "fixed positions" or "global aggregation".
        is_adaptive: whether what is looked for depends on what was found before.
        first_in_words: whether sentences begin with it.
    """

    mechanism: ClassVar[str] = "max-position retrieval"
    is_adaptive: ClassVar[bool] = False
    first_in_words: ClassVar[bool] = False

    @property
    def uses(self) -> tuple[int, ...]:
        """Indices of the components that it asks for: its fields `component` or `components`."""
        one = (self.component,) if hasattr(self, "component") else ()
        return getattr(self, "components", one)

    @property
    def roles(self) -> int:
        """Scores that the head chooses from, by what its query is."""
        return 1

    def gain(self, n_tokens: int) -> int:
        """Count the sets that a query gains."""
        return 1

    def check(self, n_components: int, for_tokens: bool) -> None:
        """Refuse components that are not there, and queries that cannot have the job.

        Raises:
            InfoFlowError: naming them.
        """
        for index in self.uses:
            if not 0 <= index < n_components:
                known = f"0 to {n_components - 1}" if n_components else "a target with components"
                raise InfoFlowError(f"a head retrieves component {index}: expected {known}")

    @abstractmethod
    def rule(self, run: Progress, for_tokens: bool) -> Rule:
        """Make the rule by which the head moves sets on these inputs."""

    @abstractmethod
    def describe(self) -> tuple[str, str]:
        """Say in words what it does, and to what; jobs that do the same are said together."""


class Retrieval(Job):
    """A head that moves the set of one position to a query, rule (1)."""

    @abstractmethod
    def chosen(self, run: Progress, for_tokens: bool) -> Int[Tensor, "batch query"]:
        """Return the key of each query; -1 for none."""

    def rule(self, run: Progress, for_tokens: bool) -> Rule:
        """See :meth:`Job.rule`."""
        # queries that are not this job's retrieve nothing
        keys = torch.full((len(run.x), 1, run.n_tokens + 1), -1)
        keys[:, 0, run.queries(for_tokens)] = self.chosen(run, for_tokens)
        return MaxPosition(keys)


@dataclass(frozen=True)
class Max(Retrieval):
    """A head that retrieves by a component's score, rule (1).

    For tokens the score of (t, s) is that of the pair of their own tokens, for arity 2; otherwise,
    and for CLS, it is the largest score of a tuple inside what position s holds. Across two
    positions a score may look at one tuple only, chosen beforehand [chosen, needed: with arbitrary
    scores the abstract model beats its own counting bound].

    Attributes:
        component: its index.
        reverse: for pairs at tokens, whether the query's token comes second in the pair.
    """

    component: int
    reverse: bool = False
    first_in_words: ClassVar[bool] = True

    def chosen(self, run: Progress, for_tokens: bool) -> Int[Tensor, "batch query"]:
        """Return the best partner of each token, or the position that holds the best tuple."""
        component, held = run.components[self.component], run.sets[:, : run.n_tokens]
        if for_tokens and component.arity == 2:
            return run.best_seen(pair_scores(component, run.x, self.reverse))
        # across two positions: the listed tuple that both together hold
        if component.tuples is not None and not for_tokens:
            held = held | run.sets[:, run.n_tokens :]
        best = best_inside(run.x, held, component)
        if for_tokens:
            return run.best_seen(best[:, None])
        return best.argmax(dim=-1, keepdim=True)

    def describe(self) -> tuple[str, str]:
        """See :meth:`Job.describe`."""
        side = " (as its second token)" if self.reverse else ""
        return "retrieve by score", f"{self.component + 1}{side}"


@dataclass(frozen=True)
class Routed(Retrieval):
    """A token head with several roles: which pair score it retrieves by, the query's token decides.

    A role is a component and a side of it. Every query takes the role for which its own token is
    good, by the share of tokens that could reach a higher score in that role; see
    :mod:`infoflow_lens.theory.routing` [derived and measured; beyond the paper].

    Attributes:
        components: indices of the components, of arity 2.
        choice: 0 for the best role of a query, 1 for its second best, and so on.
    """

    components: tuple[int, ...]
    choice: int = 0

    @property
    def roles(self) -> int:
        """The number of components, each of which is a role."""
        return len(self.components)

    def check(self, n_components: int, for_tokens: bool) -> None:
        """See :meth:`Job.check`."""
        super().check(n_components, for_tokens)
        if not for_tokens:
            raise InfoFlowError(
                "a routed job stands at CLS: expected it at tokens, whose own content chooses the "
                "role"
            )

    def chosen(self, run: Progress, for_tokens: bool) -> Int[Tensor, "batch query"]:
        """Return the best partner of each token, in the role that its own token takes."""
        if run.reference is None:
            raise InfoFlowError(
                "a routed head needs tokens to compare with: pass `reference`, a sample of them"
            )
        roles = roles_of(run.components, self.components)
        # heads that share these components share the order of roles, which is dear to compute
        if self.components not in run.roles:
            run.roles[self.components] = choose_roles(run.components, roles, run.x, run.reference)
        role_index = run.roles[self.components][..., self.choice]
        chosen = torch.full(role_index.shape, -1)
        for number, (component, reverse) in enumerate(roles):
            best = run.best_seen(pair_scores(run.components[component], run.x, reverse))
            chosen = torch.where(role_index == number, best, chosen)
        return chosen

    def describe(self) -> tuple[str, str]:
        """See :meth:`Job.describe`."""
        choice = "the best" if self.choice == 0 else f"choice {self.choice + 1}"
        names = ", ".join(str(i + 1) for i in self.components)
        return f"retrieve by {choice} of scores {names} for the query (routed)", ""


@dataclass(frozen=True)
class Next(Retrieval):
    """A head of adaptive retrieval: the best token that scores below all that the query has found.

    What is looked for depends on what earlier layers found, which rule (1) allows: its score may
    look at all that the query holds. A token's search begins below itself, that of CLS at the top
    [derived; beyond the paper]. [flag] Such a score jumps at the score of what was found, which no
    continuous score does.

    Attributes:
        component: its index, of arity 1.
        from_below: whether to go from the worst token upwards.
    """

    component: int
    from_below: bool = False
    is_adaptive: ClassVar[bool] = True

    def chosen(self, run: Progress, for_tokens: bool) -> Int[Tensor, "batch query"]:
        """Return the next token below what each query has found; -1 where there is none."""
        component, queries = run.components[self.component], run.queries(for_tokens)
        scores = component.preference(run.x[:, :, None])
        # other positions come last, from either end
        outside = ~component.inside(run.n_tokens)
        scores = scores.masked_fill(outside, torch.inf if self.from_below else -torch.inf)
        scores = -scores if self.from_below else scores
        # [batch, T + 1]: how far each search has come: a token's to itself, that of CLS above all
        top = torch.full((len(scores), 1), torch.inf)
        reached = run.reached.get(self, torch.cat([scores, top], dim=1))
        # all queries of a layer see what the layers before have found, and not each other's finds
        after = run.reached_next.setdefault(self, reached.clone())
        # strictly, so that no query finds the same token twice
        below = scores[:, None] < reached[:, queries, None]
        if for_tokens:
            below = below & run.sees
        best, at = scores[:, None].expand_as(below).masked_fill(~below, -torch.inf).max(dim=-1)
        nothing = best == -torch.inf
        # a found token passes on how far it came itself, so that two runs of ranks join to one
        after[:, queries] = torch.where(nothing, reached[:, queries], reached.gather(1, at))
        return torch.where(nothing, -1, at)

    def describe(self) -> tuple[str, str]:
        """See :meth:`Job.describe`."""
        way = "from the worst up" if self.from_below else "from the best down"
        return f"retrieve the next token by score {self.component + 1}, {way} (adaptive)", ""


@dataclass(frozen=True)
class Message(Retrieval):
    """A head that retrieves the best token for a place of a tuple, with what that token holds.

    The places of a score whose graph is a tree are eliminated from its leaves on: every token, as
    the candidate for the `parent` of a place, retrieves the best candidate for that place, which
    holds the best ones for the places below. CLS, without a parent, retrieves the best for the
    root. Each is one head [derived; beyond the paper]: the largest score of two states.

    Attributes:
        component: its index.
        place: what is retrieved.
        parent: the place of the query's token; None for CLS.
        score: of tokens at the place, at all below it in order, and at the parent.
        needs: messages that a candidate must hold, and the order in which the score asks for what
            each of them carries.
    """

    component: int
    place: int
    parent: int | None
    score: Score
    needs: tuple[tuple["Message", tuple[int, ...]], ...] = ()
    first_in_words: ClassVar[bool] = True

    @property
    def size(self) -> int:
        """The number of tokens that it carries."""
        return 1 + sum(need.size for need, _ in self.needs)

    def chosen(self, run: Progress, for_tokens: bool) -> Int[Tensor, "batch query"]:
        """Return the best candidate for each token, or for CLS."""
        batch, n, d = run.x.shape
        component, everywhere = run.components[self.component], torch.arange(n)
        # a candidate, then what it carries for the places below, in the order that the score asks
        parts = [everywhere.expand(batch, n)[..., None]]
        parts += [run.reached[need][..., list(order)] for need, order in self.needs]
        # [batch, candidate, size] positions, and their tokens [batch, candidate, size, d_token]
        carried = torch.cat(parts, dim=-1)
        below = run.x[torch.arange(batch)[:, None, None], carried]
        inside = component.inside(n)
        if not for_tokens:
            return self.score(below).masked_fill(~inside, -torch.inf).argmax(dim=1, keepdim=True)
        seen, chosen = run.sees & inside, []
        # distinct places are all joined, so a tree of them is one pair: its two tokens must differ
        if component.distinct:
            seen = seen & ~torch.eye(n, dtype=torch.bool)
        # a few queries at a time, since every one is paired with every candidate
        at_once = max(1, _MOST_CANDIDATES // (batch * n * (component.arity + 1) * d))
        for queries in everywhere.split(at_once):
            own = run.x[:, queries, None, None].expand(-1, -1, n, 1, d)
            given = below[:, None].expand(-1, len(queries), -1, -1, -1)
            # the parent's token comes last, as the score asks for it
            scores = self.score(torch.cat([given, own], dim=-2))
            chosen.append(scores.masked_fill(~seen[queries], -torch.inf).argmax(dim=-1))
        keys = torch.cat(chosen, dim=1)
        run.reached_next[self] = carried.gather(1, keys[..., None].expand(-1, -1, self.size))
        return keys

    def describe(self) -> tuple[str, str]:
        """See :meth:`Job.describe`."""
        most = f" with the {self.size - 1} that it holds" if self.size > 1 else ""
        given = "" if self.parent is None else f" for each token as its place {self.parent + 1}"
        return (
            f"retrieve by score {self.component + 1} the best place {self.place + 1}{most}{given}",
            "",
        )


class FixedReads(Job):
    """A head that reads fixed positions, rule (3)."""

    mechanism: ClassVar[str] = "fixed positions"

    @abstractmethod
    def reads(self, run: Progress, for_tokens: bool) -> Bool[Tensor, "pos key"]:
        """Mark the keys that each query reads."""

    def rule(self, run: Progress, for_tokens: bool) -> Rule:
        """See :meth:`Job.rule`."""
        return SpecificPositions(self.reads(run, for_tokens))


@dataclass(frozen=True)
class Specific(FixedReads):
    """A head of tokens that reads fixed positions, rule (3): together all tuples of an arity.

    Attributes:
        arity: length of the tuples, each of which is held by some token afterwards.
    """

    arity: int

    def gain(self, n_tokens: int) -> int:
        """Return the size of a block, in which the query lies itself."""
        return cover_size(n_tokens, self.arity)

    def check(self, n_components: int, for_tokens: bool) -> None:
        """See :meth:`Job.check`."""
        if not for_tokens:
            raise InfoFlowError(
                "a layer gives CLS a fixed-position job: expected such a job at tokens alone"
            )

    def reads(self, run: Progress, for_tokens: bool) -> Bool[Tensor, "pos key"]:
        """Return the blocks of a cover."""
        return cover(run.n_tokens, self.arity)

    def describe(self) -> tuple[str, str]:
        """See :meth:`Job.describe`."""
        return f"hold all {self.arity}-tuples by position", ""


@dataclass(frozen=True)
class ReadTuples(FixedReads):
    """A head that reads fixed positions, rule (3), for a component whose tuples are listed.

    At tokens, each listed tuple is held by some token afterwards, but for the positions that all
    tuples share; CLS reads those.

    Attributes:
        component: its index.
    """

    component: int

    def reads(self, run: Progress, for_tokens: bool) -> Bool[Tensor, "pos key"]:
        """Return the listed tuples at tokens, what they share at CLS."""
        n = run.n_tokens
        reads = torch.zeros(n + 1, n + 1, dtype=torch.bool)
        common, rests = common_positions(run.components[self.component])
        if not for_tokens:
            reads[n, list(common)] = True
            return reads
        for holder, rest in zip(tuple_holders(n, rests), rests, strict=True):
            reads[holder, list(rest)] = True
        return reads

    def describe(self) -> tuple[str, str]:
        """See :meth:`Job.describe`."""
        return f"read the tuples of score {self.component + 1} by position", ""


@dataclass(frozen=True)
class ReadPositions(FixedReads):
    """A head of CLS that reads fixed positions, rule (3).

    Attributes:
        positions: what it reads.
    """

    positions: Sequence[int]

    def gain(self, n_tokens: int) -> int:
        """Count the positions that are read."""
        return len(self.positions)

    def reads(self, run: Progress, for_tokens: bool) -> Bool[Tensor, "pos key"]:
        """Return the positions, read by CLS."""
        reads = torch.zeros(run.n_tokens + 1, run.n_tokens + 1, dtype=torch.bool)
        reads[run.n_tokens, list(self.positions)] = True
        return reads

    def describe(self) -> tuple[str, str]:
        """See :meth:`Job.describe`."""
        if len(self.positions) > 8:
            return f"read {len(self.positions)} fixed positions", ""
        return "read positions " + ", ".join(map(str, self.positions)), ""


@dataclass(frozen=True)
class Global(Job):
    """A head that aggregates everything, rule (2)."""

    mechanism: ClassVar[str] = "global aggregation"

    def gain(self, n_tokens: int) -> int:
        """Count all tokens, since all are read."""
        return n_tokens

    def rule(self, run: Progress, for_tokens: bool) -> Rule:
        """See :meth:`Job.rule`."""
        is_cls = torch.arange(run.n_tokens + 1) == run.n_tokens
        return GlobalAggregation(~is_cls if for_tokens else is_cls)

    def describe(self) -> tuple[str, str]:
        """See :meth:`Job.describe`."""
        return "aggregate everything", ""


# Covers: every tuple inside what one token reads by position


def cover_groups(n_tokens: int, arity: int) -> int:
    """Return g, the most groups of which all C(g, arity) unions of `arity` fit on T tokens."""
    if not 1 <= arity <= n_tokens:
        raise InfoFlowError(f"tuples of {arity} tokens, but T is {n_tokens}: expected 1 to T")
    if arity == 1:
        return n_tokens
    return min(n_tokens, least(lambda groups: math.comb(groups + 1, arity) > n_tokens, arity))


def cover_size(n_tokens: int, arity: int) -> int:
    """Return positions in a block of the cover: ``arity * ceil(T / g)``, at most T [derived].

    About sqrt(2 T) for pairs and 1.65 T^(2/3) for triples.
    """
    groups = cover_groups(n_tokens, arity)
    return min(n_tokens, arity * -(-n_tokens // groups))


def cover(n_tokens: int, arity: int) -> Bool[Tensor, "pos key"]:
    """Find fixed reads of T tokens and CLS by which some token reads every tuple of `arity`.

    Tokens are split into g groups; each block, a union of `arity` groups, is given to a token that
    lies in it where a matching allows, so that its own residual adds nothing.
    """
    groups = np.array_split(np.arange(n_tokens), cover_groups(n_tokens, arity))
    unions = torch.combinations(torch.arange(len(groups)), arity).tolist()
    blocks = np.zeros((len(unions), n_tokens), dtype=bool)
    for row, union in enumerate(unions):
        blocks[row, np.concatenate([groups[g] for g in union])] = True
    holder = maximum_bipartite_matching(csr_array(blocks), perm_type="column")
    # a block that the matching left (-1) goes to a free token, although that lies outside of it
    free = iter(sorted(set(range(n_tokens)) - set(holder.tolist())))
    holder = [token if token >= 0 else next(free) for token in holder.tolist()]
    reads = torch.zeros(n_tokens + 1, n_tokens + 1, dtype=torch.bool)
    for row, token in enumerate(holder):
        reads[token, :n_tokens] = torch.from_numpy(blocks[row])
    return reads
