"""Comparisons: what a target needs, and what a model can make (Sec. 5.3, App. D).

A target that retrieves tokens compares tuples of tokens. Its *number of comparisons* grows as a
power of T, its *order*; the length of the tuples is its *dimension*. A model compares by attention,
T keys a head and query, and inside what a state already holds, |I|^dimension tuples.

Marks in docstrings: [stated] by the paper, [derived] from its proofs, [chosen] where it is silent,
[flag] where the argument has a defect that a reader must know.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import MinLen
from jaxtyping import Bool, Float, Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import Count as Number
from infoflow_lens.foundation.settings import Positions, Remedy, check_by_layer, checked, settings

Count = Literal["paper", "unordered", "proved"]
Heads = Annotated[tuple[Number, ...], MinLen(1), Remedy("one for each layer")]

Score = Callable[[Float[Tensor, "*batch arity d_token"]], Float[Tensor, "*batch"]]

# what fits in the processor's cache, which halves the time
_SEQUENCES_AT_ONCE = 256
_MOST_SCORES_AT_ONCE = 2**19
_MOST_SCORES_INSIDE = 2**21
_LARGE = 10**15  # a T at which lower powers of T vanish
_MOST_DIGITS = 4000  # of a count: Python writes no integer of more than 4300


@settings
class Part:
    """A part of a score that is a sum, or an increasing function of one.

    Attributes:
        places: the places of a tuple that it looks at.
        score: the part itself, from tokens [..., len(places), d_token]; None if it is not known.
    """

    places: Positions
    score: Score | None = None


def sum_of_parts(
    parts: Sequence[Part], places: Sequence[int], x: Float[Tensor, "*batch place d_token"]
) -> Float[Tensor, "*batch"]:
    """Add up the known parts of a score for the tokens at these places."""
    at = {place: number for number, place in enumerate(places)}
    known = [p.score(x[..., [at[k] for k in p.places], :]) for p in parts if p.score is not None]
    return torch.stack(known).sum(dim=0)


@settings
class Component:
    """One thing that a target retrieves: the tuple of tokens with the largest score.

    Attributes:
        arity: length of the tuples.
        score: from tokens [..., arity, d_token] to scores [...].
        symmetric: whether the order in a tuple does not matter.
        positions: the positions that it looks at; None for all.
        extremum: "max" for the tuple with the largest score, "min" for the smallest.
        rank: 1 for the best, k for the k-th best; above 1 for arity 1 only.
        tuples: the tuples that are compared, where they are not all of an arity; None for all.
        distinct: whether the positions of a tuple must differ; as in the papers they may repeat.
        parts: parts that the score is made of, as far as they are known; None to ask it. What is
            declared is checked on samples (:func:`infoflow_lens.theory.score_graph.graph_of`).

    Raises:
        InfoFlowError: for values out of range.
    """

    arity: Number
    score: Score
    symmetric: bool = False
    positions: Positions | None = None
    extremum: Literal["max", "min"] = "max"
    rank: Number = 1
    tuples: tuple[tuple[int, ...], ...] | None = None
    distinct: bool = False
    parts: tuple[Part, ...] | None = None

    def __post_init__(self) -> None:
        if not callable(self.score):
            raise InfoFlowError(
                f"score is {self.score!r}: expected a function from tokens [..., arity, d_token] "
                "to scores [...]"
            )
        if self.rank > 1 and self.arity > 1:
            raise InfoFlowError(
                f"rank is {self.rank} for tuples of {self.arity} tokens: expected rank 1; the k-th "
                "best is known for single tokens only"
            )
        if self.tuples is not None:
            self._check_tuples(self.tuples)
        elif self.positions is not None:
            self._check_positions(len(self.positions))
        known = {place for part in self.parts or () for place in part.places}
        if known and max(known) >= self.arity:
            raise InfoFlowError(
                f"parts holds place {max(known)} of tuples of {self.arity} tokens: expected places "
                f"0 to {self.arity - 1}"
            )

    def _check_tuples(self, tuples: tuple[tuple[int, ...], ...]) -> None:
        if any(len(row) != self.arity for row in tuples):
            raise InfoFlowError(
                f"tuples have lengths {sorted({len(row) for row in tuples})}: expected the arity, "
                f"{self.arity}"
            )
        if not tuples:
            raise InfoFlowError("tuples is (): expected at least one tuple, or None for all")
        if self.positions is not None:
            raise InfoFlowError(
                "tuples and positions are both given: expected one of them; list the tuples of "
                "these positions alone"
            )
        if self.rank > 1:
            raise InfoFlowError(
                f"rank is {self.rank} of listed tuples: expected rank 1; give positions in the "
                "place of tuples"
            )
        repeated = next((row for row in tuples if len(set(row)) < len(row)), None)
        if self.distinct and repeated is not None:
            raise InfoFlowError(
                f"tuples hold {repeated}, and distinct is True: expected different positions in a "
                "tuple; leave it out"
            )

    def _check_positions(self, n: int) -> None:
        if self.rank > n:
            raise InfoFlowError(
                f"rank is {self.rank} among {n} positions: expected at most {n}; lower the rank, "
                "or let it look at more positions"
            )
        if self.distinct and self.arity > n:
            raise InfoFlowError(
                f"a tuple has {self.arity} different tokens among {n} positions: expected at least "
                f"{self.arity} positions; let it look at more, or leave distinct out"
            )

    def preference(self, x: Float[Tensor, "*batch arity d_token"]) -> Float[Tensor, "*batch"]:
        """Return what is maximised: the score, or minus it."""
        return self.score(x) if self.extremum == "max" else -self.score(x)

    def inside(self, n_tokens: int) -> Bool[Tensor, " pos"]:
        """Mark the positions of T that it looks at."""
        inside = torch.full((n_tokens,), self.positions is None)
        inside[list(self.positions or ())] = True
        return inside

    def n_tuples(self, n_tokens: int, ordered: bool) -> int:
        """Count the tuples that it compares among T tokens."""
        if self.tuples is not None:
            return len(self.tuples)
        n = n_tokens if self.positions is None else len(self.positions)
        if self.rank > 1:
            return math.comb(n, min(self.rank, n - self.rank + 1))
        if self.distinct:
            return math.perm(n, self.arity) if ordered else math.comb(n, self.arity)
        return int(n**self.arity) if ordered else math.comb(n + self.arity - 1, self.arity)


def tuple_indices(n: int, arity: int, symmetric: bool) -> Int[Tensor, "tuple arity"]:
    """List the tuples over n positions in lexicographic order; non-decreasing ones if symmetric."""
    if arity == 1:
        return torch.arange(n)[:, None]
    if symmetric:
        return torch.combinations(torch.arange(n), arity, with_replacement=True)
    return torch.cartesian_prod(*[torch.arange(n)] * arity)


def component_tuples(n_tokens: int, component: Component) -> Int[Tensor, "tuple arity"]:
    """Return the tuples that a component compares."""
    if component.tuples is not None:
        return torch.tensor(component.tuples)
    n = n_tokens if component.positions is None else len(component.positions)
    tuples = tuple_indices(n, component.arity, component.symmetric)
    if component.distinct:
        tuples = tuples[all_different(tuples)]
    return tuples if component.positions is None else torch.tensor(component.positions)[tuples]


def all_different(tuples: Int[Tensor, "*batch arity"]) -> Bool[Tensor, "*batch"]:
    """Say of each tuple whether no position repeats."""
    ordered = tuples.sort(dim=-1).values
    return (ordered[..., 1:] != ordered[..., :-1]).all(dim=-1)


def best_tuples(
    x: Float[Tensor, "batch pos d_token"], component: Component
) -> tuple[Int[Tensor, "batch arity"], Float[Tensor, " batch"]]:
    """Find for each sequence the tuple of positions that a component retrieves, and its preference.

    Ties go to the first tuple in lexicographic order [chosen]. Tuples are scored in chunks, so that
    triples of 128 tokens need no [batch, 128, 128, 128] tensor.
    """
    if len(x) > _SEQUENCES_AT_ONCE:
        found = [best_tuples(some, component) for some in x.split(_SEQUENCES_AT_ONCE)]
        return torch.cat([chosen for chosen, _ in found]), torch.cat([best for _, best in found])
    tuples = component_tuples(x.shape[1], component).to(x.device)
    if component.rank > 1:
        scores = component.preference(x[:, tuples])
        order = scores.argsort(dim=1, descending=True, stable=True)[:, component.rank - 1]
        return tuples[order], scores.gather(1, order[:, None])[:, 0]
    best = torch.full((len(x),), -torch.inf, dtype=x.dtype, device=x.device)
    chosen = torch.zeros(len(x), component.arity, dtype=torch.int64, device=x.device)
    for part in tuples.split(max(1, _MOST_SCORES_AT_ONCE // max(1, len(x) * component.arity))):
        scores = component.preference(x[:, part])
        value, index = scores.max(dim=1)
        # strictly above, so that of equal tuples the first stays
        better = value > best
        best = torch.where(better, value, best)
        chosen = torch.where(better[:, None], part[index], chosen)
    return chosen, best


def best_inside(
    x: Float[Tensor, "batch pos d_token"],
    sets: Bool[Tensor, "batch holder pos"],
    component: Component,
) -> Float[Tensor, "batch holder"]:
    """Find for each holder the largest score of a tuple inside its set; -inf for an empty one."""
    if component.tuples is not None:
        tuples = component_tuples(x.shape[1], component)
        held = sets[:, :, tuples].all(dim=-1)
        scores = component.preference(x[:, tuples])
        return scores[:, None].expand_as(held).masked_fill(~held, -torch.inf).amax(dim=-1)
    sets = sets & component.inside(x.shape[1])
    sizes = sets.sum(dim=-1)
    width = max(1, int(sizes.max()))
    # members first, in order; short sets repeat their first member, which changes no maximum
    order = (~sets).to(torch.uint8).argsort(dim=-1, stable=True)[..., :width]
    index = torch.where(torch.arange(width) < sizes.unsqueeze(-1), order, order[..., :1])
    tuples = tuple_indices(width, component.arity, component.symmetric)
    best = torch.full(sizes.shape, -torch.inf, dtype=x.dtype)
    sequences = torch.arange(len(x))[:, None, None, None]
    chunk = max(1, _MOST_SCORES_INSIDE // (sizes.numel() * component.arity))
    for part in tuples.split(chunk):
        # [batch, holder, tuple, arity]
        positions = index[:, :, part]
        scores = component.preference(x[sequences, positions])
        if component.distinct:
            scores = scores.masked_fill(~all_different(positions), -torch.inf)
        best = torch.maximum(best, scores.amax(dim=-1))
    return best.masked_fill(sizes == 0, -torch.inf)


def pair_scores(
    component: Component, x: Float[Tensor, "batch pos d_token"], reverse: bool
) -> Float[Tensor, "batch query key"]:
    """Return the preference of every pair of tokens, -inf outside the component's positions."""
    n_tokens = x.shape[1]
    queries = x.unsqueeze(2).expand(-1, -1, n_tokens, -1)
    keys = x.unsqueeze(1).expand(-1, n_tokens, -1, -1)
    pair = [keys, queries] if reverse else [queries, keys]
    scores = component.preference(torch.stack(pair, dim=-2))
    if component.distinct:
        scores = scores.masked_fill(torch.eye(n_tokens, dtype=torch.bool), -torch.inf)
    inside = component.inside(n_tokens)
    return scores.masked_fill(~(inside[:, None] & inside), -torch.inf)


def common_positions(
    component: Component,
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the positions that all listed tuples have, and the other positions of each."""
    assert component.tuples is not None
    # a single tuple would share all, and leave nothing for tokens to read
    common = set.intersection(*map(set, component.tuples)) if len(component.tuples) > 1 else set()
    rests = tuple(tuple(p for p in row if p not in common) for row in component.tuples)
    return tuple(sorted(common)), rests


def tuple_holders(n_tokens: int, rests: Sequence[Sequence[int]]) -> list[int]:
    """Return a token for each tuple, one of its last where that is free [chosen].

    Where there are more tuples than tokens, tokens hold several.
    """
    used: set[int] = set()
    holders = []
    for rest in rests:
        if len(used) == n_tokens:
            used = set()
        free = next((p for p in sorted(rest, reverse=True) if p not in used), None)
        if free is None:
            free = next(p for p in range(n_tokens) if p not in used)
        used.add(free)
        holders.append(free)
    return holders


# What targets need


@dataclass(frozen=True)
class Flag:
    """A limit of the argument that a reader must know.

    Attributes:
        text: in words, with its mark.
        counts: the counts that it concerns.
    """

    text: str
    counts: tuple[Count, ...] = ("paper", "unordered", "proved")


@dataclass(frozen=True)
class ComparisonProfile:
    """How much a target compares (Def. 2), as functions of T.

    Attributes:
        name: of the target.
        dimension: beta_1, the smallest tuple length that serves with polynomial trees.
        order: beta', the smallest growth exponent at that dimension; never above `dimension`.
        n_trees: trees of the construction, one for each retrieved tuple, and the natural K of
            eq (5).
        paper: the number that the paper's estimate uses. For D-retrieval that is its lower bound,
            D(T - D) [stated]; for targets over tuples the ordered upper bound, T^arity - 1 a tree.
        unordered: upper bound by trees over unordered tuples [derived].
        proved: lower bound [stated for D-retrieval, derived for the others].
        flags: limits of these counts.
    """

    name: str
    dimension: int
    order: int
    n_trees: int
    paper: Callable[[int], int]
    unordered: Callable[[int], int]
    proved: Callable[[int], int]
    flags: tuple[Flag, ...] = ()

    @checked
    def number(self, n_tokens: Number, count: Count) -> int:
        """Return the number of comparisons at T by the chosen count; never below 0.

        Raises:
            InfoFlowError: for T below 1, T below the dimension, counts of more than 4000 digits,
                or an unknown count.
        """
        if self.dimension > n_tokens:
            raise InfoFlowError(
                f"{self.name} compares tuples of {self.dimension} tokens, but T is {n_tokens}: "
                f"expected at least {self.dimension} tokens"
            )
        # C(T, k) is at most (e T / k)^k, which is known before it is computed
        k = max(1, min(self.order, n_tokens - self.order + 1))
        digits = k * (math.log10(n_tokens) - math.log10(k) + math.log10(math.e))
        if digits > _MOST_DIGITS:
            raise InfoFlowError(
                f"{self.name} makes about 10^{digits:.0f} comparisons at T = {n_tokens} and order "
                f"{self.order}: expected at most 10^{_MOST_DIGITS}; ask for a smaller T or order"
            )
        return self._number(n_tokens, count)

    def _number(self, n_tokens: int, count: Count) -> int:
        functions = {"paper": self.paper, "unordered": self.unordered, "proved": self.proved}
        return max(0, functions[count](n_tokens))

    def flags_for(self, count: Count) -> tuple[str, ...]:
        """Return the limits that concern a count."""
        return tuple(flag.text for flag in self.flags if count in flag.counts)

    def growth(self, count: Count) -> int:
        """Return p in number(T) ~ c T^p for large T: the order, or less where less is proved."""
        if count != "proved":
            return self.order
        number, larger = (self._number(n, count) for n in (_LARGE, 10 * _LARGE))
        return round(math.log10(larger) - math.log10(number)) if number else 0

    def leading_coefficient(self, count: Count) -> float:
        """Return c in number(T) ~ c T^p for large T, p the :meth:`growth`."""
        return self._number(_LARGE, count) / _LARGE ** self.growth(count)


def d_retrieval_profile(n_components: int, n_different: int | None = None) -> ComparisonProfile:
    """Count for F0(max_t f_1, .., max_t f_D): between D(T - D) and D(T - 1) comparisons [stated].

    Args:
        n_components: D.
        n_different: how many of the f_i differ, which the lower bound counts; default, all.
    """
    d = n_components
    m = d if n_different is None else n_different
    return ComparisonProfile(
        name="d_retrieval",
        dimension=1,
        order=1,
        n_trees=d,
        paper=lambda t: d * (t - d),
        unordered=lambda t: d * (t - 1),
        proved=lambda t: m * (t - m),
        flags=(
            Flag(
                "[flag] the lower bound D(T - D) uses |I_F| = D; two components can share their "
                "token, so it holds on a set of inputs of positive measure, which is all that the "
                "proof needs",
                ("paper", "proved"),
            ),
        ),
    )


_ORDERED_FLAG = Flag(
    "[flag] the paper counts ordered tuples; a score may take the larger of both orders, so trees "
    "over unordered tuples need fewer comparisons",
    ("paper",),
)


def _tuple_profile(name: str, arity: int, n_trees: int = 1, *flags: Flag) -> ComparisonProfile:
    """Return a target of D best tuples: a tree for each, over ordered or unordered tuples.

    Below lie C(T, arity) leaves that distinct positions need, less one for each of the at most
    D arity retrieved tokens [derived].
    """
    return ComparisonProfile(
        name=name,
        dimension=arity,
        order=arity,
        n_trees=n_trees,
        paper=lambda t: n_trees * (t**arity - 1),
        unordered=lambda t: n_trees * (math.comb(t + arity - 1, arity) - 1),
        proved=lambda t: math.comb(t, arity) - n_trees * arity,
        flags=(_ORDERED_FLAG, *flags),
    )


def depth_separation_profile() -> ComparisonProfile:
    """Count for min ||x(s) + x(t)||^2 (Thm 1): C(T,2) - 2 to T^2 - 1 comparisons [derived]."""
    return _tuple_profile("depth_separation", 2)


def intrinsic_dimension_profile(n_components: int) -> ComparisonProfile:
    """Count for sum_i max_{s,t} x(s)^T A_i x(t) (eqs 6, 58): D trees of T^2 leaves [stated]."""
    return _tuple_profile(
        "intrinsic_dimension",
        2,
        n_components,
        Flag(
            "[flag] that h_1 >= D is the paper's estimate from the ordered count; unordered "
            "trees give only h_1 >= D/2, and the proved lower bound only h_1 >= 1",
            ("paper", "unordered"),
        ),
    )


def triangle_center_profile() -> ComparisonProfile:
    """Count for min ||x(t1) + x(t2) + x(t3)||^2 (eqs 7, 59): C(T,3) - 3 to T^3 - 1 [derived]."""
    return _tuple_profile(
        "triangle_center",
        3,
        1,
        Flag(
            "[flag] the paper's review prints argmax ||sum x||^2; the target needs the argmin, "
            "so trees compare by -||sum x||^2"
        ),
    )


def kth_largest_profile(depth: int) -> ComparisonProfile:
    """Return the k-th largest of T numbers, `depth` from the nearer end (Thm 2) [derived].

    The k-th largest number is the largest minimum of a k-subset, so a tree over the C(T, k)
    subsets retrieves it; counted from the smallest, T - k + 1 takes the place of k. Every token
    can be the one, so every token is in some leaf: at least ceil(T / depth) leaves.

    Args:
        depth: min(k, T - k + 1).
    """
    return ComparisonProfile(
        name="kth_largest",
        dimension=depth,
        order=depth,
        n_trees=1,
        paper=lambda t: math.comb(t, depth) - 1,
        unordered=lambda t: math.comb(t, depth) - 1,
        proved=lambda t: -(-t // depth) - 1,
        flags=(
            Flag(
                "[flag] the paper gives no number of comparisons for the k-th largest; the count "
                "is that of the tree over subsets",
                ("paper", "unordered"),
            ),
            Flag("[flag] the lower bound is only that every token is compared", ("proved",)),
        ),
    )


def context_profile(name: str, block: int, query: int, dimension: int) -> ComparisonProfile:
    """Profile a query that is looked up among a context's pairs: a tuple for each pair [derived].

    Args:
        name: of the target.
        block: tokens of a pair in the context.
        query: tokens behind the context.
        dimension: tokens of a compared tuple (question, answer and query).
    """

    def comparisons(t: int) -> int:
        return (t - query) // block - 1

    return ComparisonProfile(
        name=name,
        dimension=dimension,
        order=1,
        n_trees=1,
        paper=comparisons,
        unordered=comparisons,
        proved=comparisons,
        flags=(
            Flag(
                "[flag] the paper counts no comparisons for this task; its tree has one leaf for "
                "each pair of the context"
            ),
        ),
    )


def components_profile(
    name: str, components: Sequence[Component], *flags: Flag
) -> ComparisonProfile:
    """Return the counts of any target that retrieves components, arities mixed [derived].

    A tree for each component, over the tuples that it compares: that is the upper bound, ordered
    ("paper") and unordered. The dimension and the order are those of the component with the longest
    tuples. Below it is only proved that every token which can matter is in some leaf, since a score
    of pairs may split into scores of single tokens: ``max(a, b)`` of sums does.

    Raises:
        InfoFlowError: for no components.
    """
    if not components:
        raise InfoFlowError(f"{name} has no components: expected at least one")
    sizes = [min(c.rank, 10**6) if c.rank > 1 else c.arity for c in components]
    growing = [
        size
        for size, c in zip(sizes, components, strict=True)
        if c.positions is None and c.tuples is None
    ]
    most = sum(c.arity for c in components)

    def count_reachable(t: int) -> int:
        """Count the positions that some component can retrieve."""
        if growing:
            return t
        held: set[int] = set()
        for c in components:
            held.update(p for row in c.tuples or (c.positions or (),) for p in row)
        return len(held)

    return ComparisonProfile(
        name=name,
        dimension=max(sizes),
        order=max(growing, default=0),
        n_trees=len(components),
        paper=lambda t: sum(c.n_tuples(t, ordered=True) - 1 for c in components),
        unordered=lambda t: sum(c.n_tuples(t, ordered=False) - 1 for c in components),
        proved=lambda t: -(-count_reachable(t) // max(sizes)) - most,
        flags=(
            Flag(
                "[flag] of scores of one's own it is proved only that every token is compared; a "
                "score of pairs may split into scores of single tokens",
                ("proved",),
            ),
            *flags,
        ),
    )


# What models can make


@checked
def growth_sizes(n_heads: Heads, n_tokens: Number) -> list[tuple[int, int]]:
    """Return the largest sets (token, CLS) after every layer, by max-position retrieval (Sec. 4).

    ``m_tok(l) <= (1 + h_l) m_tok(l-1)`` from 1, ``m_cls(l) <= m_cls(l-1) + h_l m_tok(l-1)`` from 0,
    both at most T [derived]. That CLS attends in hidden layers, too, is the safe bound [chosen].

    Args:
        n_heads: h_1 .. h_L.
        n_tokens: T.
    """
    sizes, token, cls = [], 1, 0
    for heads in n_heads:
        # CLS reads tokens as they were before this layer, so it goes first
        cls = min(n_tokens, cls + heads * token)
        token = min(n_tokens, (1 + heads) * token)
        sizes.append((token, cls))
    return sizes


@checked
def model_comparisons(
    n_heads: Heads,
    n_tokens: Number,
    sizes: Sequence[tuple[int, int]] | int,
    dimension: Number,
    trees: Number = 1,
    roles: Sequence[int] | int = 1,
) -> int:
    """Count the comparisons that a model can make, eq (5).

    Every position of a hidden layer, and CLS alone in the last one (nothing else is read; [derived,
    forced by eq 2]), compares h_l T keys by attention (the paper's bound; T - 1 a head is exact)
    and ``trees * |I|^dimension`` tuples inside what it holds.

    Args:
        n_heads: h_1 .. h_L.
        n_tokens: T.
        sizes: (token, CLS) sizes after every layer, as `growth_sizes` gives them, or one |I| for
            every state.
        dimension: beta_1 of the target.
        trees: K. 1 is the literal reading of eq (5); the number of trees removes its contradiction
            with one-head global aggregation [chosen; not proved sound in general].
        roles: r, the scores that a head chooses from by what its query is, for all layers or each.
            1 is the paper's form. A head with r roles compares T keys for a query, as any other
            does, but of r scores: what counting asks of heads it then asks of heads times roles
            [derived, measured; beyond the paper].

    Returns:
        The number, exactly; nothing of size T is allocated.
    """
    by_layer = [(sizes, sizes)] * len(n_heads) if isinstance(sizes, int) else list(sizes)
    if len(by_layer) != len(n_heads):
        raise InfoFlowError(
            f"sizes has {len(by_layer)} entries for {len(n_heads)} layers: give one for each"
        )
    total = 0
    many = check_by_layer(roles, "roles", len(n_heads))
    for layer, (heads, (token, cls)) in enumerate(zip(n_heads, by_layer, strict=True)):
        heads = heads * many[layer]
        # in the last layer CLS alone is read
        if layer < len(n_heads) - 1:
            total += n_tokens * (heads * n_tokens + trees * token**dimension)
        total += heads * n_tokens + trees * cls**dimension
    return total


def least_information(
    profile: ComparisonProfile,
    n_heads: Heads,
    n_tokens: int,
    count: Count = "paper",
    trees: int = 1,
) -> tuple[int, bool]:
    """Find the smallest |I| by which eq (5) reaches the target's number of comparisons (step 1).

    Solved exactly for the given heads, with every state holding |I| tokens [derived].

    Returns:
        The size, at most T, and whether it is *saturated*: no |I| up to T is enough.
    """
    needed = profile.number(n_tokens, count)
    by_attention = model_comparisons(n_heads, n_tokens, 0, profile.dimension, trees)
    # tokens and CLS of every hidden layer, and CLS of the last
    states = (len(n_heads) - 1) * (n_tokens + 1) + 1
    missing = max(0, needed - by_attention)
    size = root_ceiling(-(-missing // (trees * states)), profile.dimension)
    return min(size, n_tokens), size > n_tokens


def root_ceiling(value: int, degree: int) -> int:
    """Return the smallest integer whose power reaches `value`; exact also for large integers."""
    return least(lambda root: root**degree >= value, 0)


def least(reaches: Callable[[int], bool], start: int) -> int:
    """Find the least integer from `start` on that `reaches`, which all larger ones then do too."""
    if reaches(start):
        return start
    low, step = start, 1
    # double the step until it reaches, then halve the interval
    while not reaches(low + step):
        low, step = low + step, 2 * step
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high
