"""Ideal patterns that take the place of a head's own, of two families of equal standing.

*Fixed* patterns do not look at the tokens: the mean by position, the mean by offset (with the
weight of position 0 apart), and simple ones. *Max* patterns go to the largest key: alone, or with
the weight that the query leaves on position 0, its sink, as it is ("gated"). Every row keeps its
sum. InfoFlow's mechanisms (Yu, Jiang, Bao, Li 2026, Sec. 4) are such patterns.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Annotated, Literal, TypeAlias, get_args

import torch
from annotated_types import MinLen
from jaxtyping import Bool, Float
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import Distinct, Index, check
from infoflow_lens.hooks.interventions.edits import (
    Edit,
    check_head,
    edit_head,
    edit_head_output,
    heads_of,
    split_heads,
)
from infoflow_lens.hooks.interventions.means import MeanPatterns
from infoflow_lens.hooks.interventions.probe import Intervention
from infoflow_lens.hooks.mechanisms.ideals import ideal_pattern, rescaled
from infoflow_lens.hooks.passes.view import Pass

HeadIdeal: TypeAlias = Literal[
    "position", "offset", "own", "previous", "sink", "even", "gated", "largest",
    "top 2", "top 4", "top 8", "ablated",
]  # fmt: skip
HEAD_IDEALS: tuple[HeadIdeal, ...] = get_args(HeadIdeal)
PATTERN_IDEALS = tuple(ideal for ideal in HEAD_IDEALS if ideal != "ablated")
OF_MEANS: tuple[HeadIdeal, ...] = ("ablated", "position", "offset")
SIMPLE: tuple[HeadIdeal, ...] = ("own", "previous", "sink", "even")
TOPS: dict[HeadIdeal, int] = {"top 2": 2, "top 4": 4, "top 8": 8}

Pattern: TypeAlias = Float[Tensor, "batch head query key"]
Visible: TypeAlias = Bool[Tensor, "_sequence _head query key"]
Ideals = Annotated[tuple[HeadIdeal, ...], MinLen(1), Distinct()]
Heads = Annotated[tuple[tuple[Index, Index], ...], MinLen(1), Distinct()]
_Assignments = Annotated[dict[str, dict[tuple[Index, Index], HeadIdeal]], MinLen(1)]


@dataclass(frozen=True)
class LayerMeans:
    """The means of a layer, for sequences of which each may be left out of them.

    Args:
        pattern: float [head, query, key].
        output: float [query, head, d_head].
        n: float [query], over how many sequences.
        leaves_out: whether the sequences that are judged are among these.
    """

    pattern: Float[Tensor, "head query key"]
    output: Float[Tensor, "query head d_head"]
    n: Float[Tensor, " query"]
    leaves_out: bool

    @classmethod
    def select(cls, means: MeanPatterns, layer: int, leaves_out: bool) -> "LayerMeans":
        """Take those of a layer."""
        return cls(means.patterns[layer], means.outputs[layer], means.n, leaves_out)

    @cached_property
    def _offsets(self) -> tuple[Tensor, Tensor]:
        """Sum weights and count keys by offset, position 0 apart; float64."""
        sums = self.pattern * self.n[:, None]
        sums = sums * (torch.arange(sums.shape[-1]) > 0)
        return sum_by_offset(sums), self._counts(self.n)

    def _counts(self, n: Float[Tensor, "*batch query"]) -> Float[Tensor, "*batch offset"]:
        """Count the keys at each offset, of queries that so many sequences have."""
        behind_first = torch.arange(self.pattern.shape[-1], device=n.device) > 0
        return sum_by_offset(n[..., None] * behind_first)

    def position_mean(self, pattern: Pattern, heads: Sequence[int]) -> Pattern:
        """Take the mean pattern by position."""
        n_query, n_key = pattern.shape[-2:]
        mean = self.pattern[heads, :n_query, :n_key].to(pattern.device)
        if not self.leaves_out:
            return mean.expand(pattern.shape)
        n = self.n[:n_query, None].to(pattern.device)
        return ((mean * n - pattern) / (n - 1).clamp(min=1)).clamp(min=0)

    def offset_mean(
        self,
        pattern: Pattern,
        heads: Sequence[int],
        visible: Visible,
    ) -> Pattern:
        """Take the mean by the distance of query and key; position 0 has its own mean."""
        n_query, n_key = pattern.shape[-2:]
        sums, counts = (part.to(pattern.device) for part in self._offsets)
        sums = sums[heads]
        if self.leaves_out:
            own = pattern.double() * (torch.arange(n_key, device=pattern.device) > 0)
            longest = self.pattern.shape[-1]
            size = (longest - n_key, longest - n_query)
            mine = sum_by_offset(torch.nn.functional.pad(own, (0, size[0], 0, size[1])))
            real = pattern.sum(dim=-1) > 0  # the patterns of padding are empty
            once = torch.nn.functional.pad(real.double(), (0, size[1]))
            sums, counts = sums - mine, counts - self._counts(once)
        mean = (sums / counts.clamp(min=1)).clamp(min=0)
        place = torch.arange(n_query)[:, None] - torch.arange(n_key) + self.pattern.shape[-1] - 1
        made = mean[..., place.to(pattern.device)] * visible
        made[..., 0] = 0
        sink = self.position_mean(pattern, heads)[..., :1]
        total = pattern.double().sum(dim=-1, keepdim=True)
        rest = rescaled(made, (total - sink).clamp(min=0))
        rest[..., :1] = total - rest[..., 1:].sum(dim=-1, keepdim=True)
        return rest

    def output_mean(
        self,
        z: Float[Tensor, "batch pos head d_head"],
        heads: Sequence[int],
        real: Bool[Tensor, "batch pos"],
    ) -> Float[Tensor, "batch pos head d_head"]:
        """Take the mean z by position; of all positions at one that no other sequence has.

        Args:
            z: of these heads in the plain pass, for what is left out of the mean.
            heads: which they are.
            real: which positions are no padding.
        """
        mean = self.output[: z.shape[1], heads].to(z.device)
        if not self.leaves_out:
            return mean.expand(z.shape)
        n = self.n[: z.shape[1], None, None].to(z.device)
        own = z.masked_fill(~real.to(z.device)[:, :, None, None], 0).double()
        total = (self.output[:, heads] * self.n[:, None, None]).sum(dim=0).to(z.device)
        count = self.n.sum().to(z.device) - real.to(z.device).sum(dim=1)
        everywhere = (total - own.sum(dim=1)) / count.clamp(min=1)[:, None, None]
        return torch.where(n > 1, (mean * n - own) / (n - 1).clamp(min=1), everywhere[:, None])


def sum_by_offset(values: Float[Tensor, "... query key"]) -> Float[Tensor, "... offset"]:
    """Sum over all pairs of one distance query - key, from 1 - n_key on."""
    n_query, n_key = values.shape[-2:]
    place = torch.arange(n_query)[:, None] - torch.arange(n_key) + n_key - 1
    sums = values.new_zeros(*values.shape[:-2], n_query + n_key - 1)
    return sums.index_add_(-1, place.flatten().to(values.device), values.flatten(-2))


def make_ideal(
    ideal: HeadIdeal,
    pattern: Pattern,
    visible: Visible,
    means: LayerMeans | None,
    heads: Sequence[int],
    own: Pattern | None = None,
) -> Pattern:
    """Idealise the patterns of some heads of a layer.

    Args:
        ideal: which; all but "ablated", which is of outputs.
        pattern: of these heads.
        visible: the keys that each query may see.
        means: of the layer.
        heads: which heads they are.
        own: their patterns in the plain pass, if `pattern` is of another, for what is left out of
            means.
    """
    if ideal in TOPS:
        return ideal_pattern(pattern, visible, "top_k", k=TOPS[ideal])
    if ideal == "largest":
        return ideal_pattern(pattern, visible, "max_position")
    total = pattern.sum(dim=-1, keepdim=True)
    if ideal == "gated":
        others = pattern.masked_fill(~visible, -1.0)
        others[..., 0] = -1.0
        best = others.max(dim=-1, keepdim=True)
        made = torch.zeros_like(pattern)
        made[..., :1] = torch.where(best.values < 0, total, pattern[..., :1])
        rest = (total - made[..., :1]).clamp(min=0)
        return made.scatter_add_(-1, best.indices, rest)
    if ideal in ("position", "offset"):
        assert means is not None
        own = pattern if own is None else own
        if ideal == "position":
            made = means.position_mean(own, heads) * visible
        else:
            made = means.offset_mean(own, heads, visible)
    else:
        made = _simple(ideal, pattern) * visible
    none = made.sum(dim=-1, keepdim=True) <= 0  # such as of a query that no other sequence has
    made = torch.where(none, visible.to(made), made)
    return rescaled(made, total.to(made)).to(pattern)


def _simple(ideal: HeadIdeal, pattern: Pattern) -> Float[Tensor, "query key"]:
    """Make a pattern that is the same for all sequences, before closed keys are taken off."""
    n_query, n_key = pattern.shape[-2:]
    keys = torch.arange(n_key, device=pattern.device)
    query = torch.arange(n_query, device=pattern.device)[:, None]
    at = {"own": query, "previous": (query - 1).clamp(min=0), "sink": query * 0}
    if ideal == "even":
        return torch.ones(n_query, n_key, device=pattern.device, dtype=pattern.dtype)
    return (keys == at[ideal]).to(pattern.dtype)


class HeadIdeals(Intervention):
    """What the output loses when the pattern of one head is replaced by an ideal one.

    Each edit is one head and one ideal, ``layer.head ideal``. "ablated" puts the head's output z to
    its mean by position, which says what the head is worth; the damage of an ideal over this is its
    share: 0 where the ideal is all that the head does.

    Args:
        means: of other sequences (:class:`~infoflow_lens.hooks.MeanPatternsProbe`), or of these;
            None where no ideal is a mean.
        ideals: which, of HEAD_IDEALS.
        heads: (layer, head); default, all.
        leaves_out: whether the sequences are among those of the means, so that each is judged by
            the means of all others.
    """

    reads = ("scores", "pattern", "head")

    means: MeanPatterns | None = None
    ideals: Ideals = ("ablated", "position", "offset", "gated", "largest")
    heads: Heads | None = None
    _: KW_ONLY
    leaves_out: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_means(self.means)

    def edits(self, plain: Pass) -> Iterable[Edit]:
        """Make one for each head and ideal."""
        layers = _layers(plain, self.means, self.leaves_out, self.ideals)
        for layer, head in heads_of(plain) if self.heads is None else self.heads:
            for ideal in self.ideals:
                yield head_edit(plain, layer, head, ideal, layers)


def _check_means(means: object) -> None:
    """Refuse what is no mean patterns.

    Raises:
        InfoFlowError: naming what was given.
    """
    if not isinstance(means, (MeanPatterns, type(None))):
        raise InfoFlowError(
            f"means is {means!r}: expected MeanPatterns, as MeanPatternsProbe gives them, or None"
        )


def _layers(
    plain: Pass, means: MeanPatterns | None, leaves_out: bool, ideals: Sequence[HeadIdeal]
) -> list[LayerMeans | None]:
    """Select the means of each layer.

    Raises:
        InfoFlowError: for ideals that are means without any, or means of shorter sequences.
    """
    needed = [ideal for ideal in OF_MEANS if ideal in ideals]
    if means is None:
        if needed:
            raise InfoFlowError(
                f"the ideals {', '.join(map(repr, needed))} are means, and there are none: "
                "expected means=, as run_probes(model, texts, [MeanPatternsProbe()]) gives them"
            )
        return [None] * plain.n_layers
    check_means(means, plain.pattern(0).shape[-1] if needed else 0, plain.n_layers)
    return [LayerMeans.select(means, i, leaves_out) for i in range(plain.n_layers)]


def check_means(means: MeanPatterns, n_pos: int, n_layers: int) -> None:
    """Refuse means of shorter sequences, or of another model.

    Raises:
        InfoFlowError: naming what differs.
    """
    if means.n_pos < n_pos:
        raise InfoFlowError(
            f"means are of at most {means.n_pos} positions, and a sequence has {n_pos}: expected "
            "means of sequences that are as long; give longer ones, or cut the inputs by max_length"
        )
    if len(means.patterns) != n_layers:
        raise InfoFlowError(
            f"means are of {len(means.patterns)} layers, the model has {n_layers}: expected "
            "means of this model"
        )


def head_edit(
    plain: Pass, layer: int, head: int, ideal: HeadIdeal, layers: Sequence[LayerMeans | None]
) -> Edit:
    """Make the edit that replaces one head's pattern, or output, by an ideal one.

    Raises:
        InfoFlowError: for a head that is not there.
    """
    check_head(plain, layer, head)
    name, means = f"{layer}.{head} {ideal}", layers[layer]
    if ideal == "ablated":

        def ablate(z: Tensor) -> Tensor:
            assert means is not None
            n_heads = plain.pattern(layer).shape[1]
            own = split_heads(plain.state(layer, "head"), n_heads)[:, :, [head]]
            return means.output_mean(own, [head], plain.is_real(own.shape[1]))[:, :, 0]

        return edit_head_output(plain, layer, head, ablate, name)
    visible = plain.visible(layer)[:, None]

    def replace(pattern: Tensor) -> Tensor:
        own = plain.pattern(layer)[:, [head]]
        return make_ideal(ideal, pattern[:, None], visible, means, [head], own)[:, 0]

    return edit_head(plain, layer, head, replace, name)


class AllHeads(Intervention):
    """What the output loses when many heads are replaced at once, each by its ideal.

    Args:
        assignments: by name, for (layer, head) an ideal; heads that are not named stay as they are.
        means, leaves_out: as of :class:`HeadIdeals`.
    """

    reads = ("scores", "pattern", "head")

    means: MeanPatterns | None
    assignments: Mapping[str, Mapping[tuple[int, int], HeadIdeal]]
    _: KW_ONLY
    leaves_out: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_means(self.means)
        known = check(self.assignments, _Assignments, "assignments")
        self.assignments = {str(name): dict(heads) for name, heads in known.items()}

    def edits(self, plain: Pass) -> Iterable[Edit]:
        """Make one for each assignment."""
        used = [ideal for heads in self.assignments.values() for ideal in heads.values()]
        layers = _layers(plain, self.means, self.leaves_out, used)
        for name, heads in self.assignments.items():
            each = [
                head_edit(plain, layer, head, ideal, layers)
                for (layer, head), ideal in heads.items()
            ]
            yield Edit.join(name, each)
