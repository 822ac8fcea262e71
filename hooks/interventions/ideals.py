"""Ideal patterns that take the place of a head's own, of two families of equal standing.

*Fixed* patterns do not look at the tokens: the mean by position, the mean by offset (with the
weight of position 0 apart), and simple ones. *Max* patterns go to the largest key: alone, or with
the weight that the query leaves on position 0, its sink, as it is ("gated"). Every row keeps its
sum. InfoFlow's mechanisms (Yu, Jiang, Bao, Li 2026, Sec. 4) are such patterns.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from typing import Annotated, Any, Literal, TypeAlias, get_args

import torch
from annotated_types import MinLen, Predicate
from jaxtyping import Bool, Float
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import Distinct, Index, check
from infoflow_lens.hooks.interventions.edits import (
    Edit,
    check_head,
    count_heads,
    heads_of,
    split_heads,
)
from infoflow_lens.hooks.interventions.patterns import (
    MeanPatterns,
    ideal_pattern,
    mean_without,
    rescale,
)
from infoflow_lens.hooks.interventions.probe import Intervention
from infoflow_lens.hooks.model.points import hook_name, pattern_hook
from infoflow_lens.hooks.passes.view import Needs, Pass

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
Head: TypeAlias = tuple[int, int]
_TopK = Annotated[str, Predicate(re.compile("top [1-9][0-9]*").fullmatch)]
_Assignments = Annotated[dict[str, dict[tuple[Index, Index], HeadIdeal | _TopK]], MinLen(1)]


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
        # means of a position times how many have it are sums again, to be added up by offset
        sums = self.pattern * self.n[:, None]
        sums = sums * (torch.arange(sums.shape[-1]) > 0)
        return sum_by_offset(sums), self._counts(self.n)

    def _counts(self, n: Float[Tensor, "*batch query"]) -> Float[Tensor, "*batch offset"]:
        """Count the keys at each offset, of queries that so many sequences have."""
        keys = torch.arange(self.pattern.shape[-1], device=n.device)
        queries = torch.arange(n.shape[-1], device=n.device)[:, None]
        # a sequence has both where it has the later one: shorter ones have no keys further on
        return sum_by_offset(n[..., torch.maximum(queries, keys)] * (keys > 0))

    def position_mean(self, pattern: Pattern, heads: Sequence[int]) -> Pattern:
        """Take the mean pattern by position."""
        n_query, n_key = pattern.shape[-2:]
        mean = self.pattern[heads, :n_query, :n_key].to(pattern.device)
        if not self.leaves_out:
            return mean.expand(pattern.shape)
        return mean_without(mean, self.n, pattern.double())

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
            # padded to the longest, so that an offset has the same place as in the sums of all
            size = (longest - n_key, longest - n_query)
            mine = sum_by_offset(torch.nn.functional.pad(own, (0, size[0], 0, size[1])))
            real = visible.any(dim=-1)  # those of padding see nothing
            once = torch.nn.functional.pad(real.double(), (0, size[1]))
            sums, counts = sums - mine, counts - self._counts(once)
        # [head, offset], or [batch, head, offset] where each sequence is left out of it;
        # rounding may give less than 0
        mean = (sums / counts.clamp(min=1)).clamp(min=0)
        # the smallest offset, 1 - n_key of the longest, has place 0
        place = torch.arange(n_query)[:, None] - torch.arange(n_key) + self.pattern.shape[-1] - 1
        made = mean[..., place.to(pattern.device)] * visible
        made[..., 0] = 0
        sink = self.position_mean(pattern, heads)[..., :1]
        total = pattern.double().sum(dim=-1, keepdim=True)
        rest = rescale(made, (total - sink).clamp(min=0))
        # position 0 takes what is left, so that a row keeps its sum where no other key is visible
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
        # over all positions of all other sequences, [batch, head, d_head]
        everywhere = (total - own.sum(dim=1)) / count.clamp(min=1)[:, None, None]
        return torch.where(n > 1, (mean * n - own) / (n - 1).clamp(min=1), everywhere[:, None])


def sum_by_offset(values: Float[Tensor, "... query key"]) -> Float[Tensor, "... offset"]:
    """Sum over all pairs of one distance query - key, from 1 - n_key on."""
    n_query, n_key = values.shape[-2:]
    place = torch.arange(n_query)[:, None] - torch.arange(n_key) + n_key - 1
    sums = values.new_zeros(*values.shape[:-2], n_query + n_key - 1)
    return sums.index_add_(-1, place.flatten().to(values.device), values.flatten(-2))


def make_ideal(
    ideal: str,
    pattern: Pattern,
    visible: Visible,
    means: LayerMeans | None,
    heads: Sequence[int],
    own: Pattern,
) -> Pattern:
    """Make the ideal patterns of some heads of a layer.

    Args:
        ideal: its name; "ablated" replaces outputs, and is none of these.
        pattern: the patterns of these heads in this pass.
        visible: the keys that each query may see.
        means: the mean patterns of the layer; None where the ideal is no mean.
        heads: the numbers of these heads.
        own: their patterns in the plain pass, which are in the means and are taken out of them.
    """
    mean = None
    if ideal in ("position", "offset"):
        assert means is not None
        is_offset = ideal == "offset"
        mean = (
            means.offset_mean(own, heads, visible) if is_offset else means.position_mean(own, heads)
        )
    return ideal_pattern(pattern, visible, ideal, mean)


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
                name = f"{layer}.{head} {ideal}"
                yield replace_heads(plain, name, {(layer, head): ideal}, layers)


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
    plain: Pass, means: MeanPatterns | None, leaves_out: bool, ideals: Sequence[str]
) -> list[LayerMeans | None]:
    """Select the means of each layer.

    Raises:
        InfoFlowError: for ideals that are means without any, or means of shorter sequences.
    """
    needed = [ideal for ideal in OF_MEANS if ideal in ideals]
    if means is None:
        if needed:
            raise InfoFlowError(
                f"the ideals {', '.join(map(repr, needed))} need mean patterns, and none are "
                "given: expected means=, as run_probes(model, texts, [MeanPatternsProbe()]) gives "
                "them"
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


def replace_heads(
    plain: Pass,
    name: str,
    heads: Mapping[Head, str],
    means: Sequence[LayerMeans | None],
) -> Edit:
    """Make the edit that replaces the patterns, or outputs, of some heads by ideal ones.

    Args:
        plain: the plain pass.
        name: of the edit.
        heads: for (layer, head) an ideal.
        means: of each layer.

    Raises:
        InfoFlowError: for a head that is not there.
    """
    n_heads, by_layer = count_heads(plain), dict[int, dict[str, list[int]]]()
    for (layer, head), ideal in heads.items():
        check_head(n_heads, layer, head)
        by_layer.setdefault(layer, {}).setdefault(ideal, []).append(head)
    at: dict[str, Any] = {}
    for layer, groups in by_layer.items():
        ablated = groups.pop("ablated", [])
        if groups:
            at[pattern_hook(plain.model, layer)] = partial(
                _replace_patterns, plain, layer, groups, means[layer]
            )
        if ablated:
            point = hook_name(plain.model, f"blocks.{layer}.attn.hook_z")
            at[point] = partial(_ablate, plain, layer, ablated, means[layer])
    return Edit(name, at)


def _replace_patterns(
    plain: Pass,
    layer: int,
    groups: Mapping[str, list[int]],
    means: LayerMeans | None,
    pattern: Pattern,
) -> Pattern:
    """Put ideal patterns in the place of those of some heads of a layer."""
    visible, edited = plain.visible(layer)[:, None], pattern.clone()
    for ideal, heads in groups.items():  # all heads of an ideal at once
        own = plain.pattern(layer)[:, heads]
        edited[:, heads] = make_ideal(ideal, pattern[:, heads], visible, means, heads, own)
    return edited


def _ablate(
    plain: Pass, layer: int, heads: list[int], means: LayerMeans | None, z: Tensor
) -> Tensor:
    """Put the outputs of some heads of a layer to their mean."""
    assert means is not None
    n_heads = plain.pattern(layer).shape[1]
    edited = split_heads(z, n_heads).clone()
    own = split_heads(plain.state(layer, "head"), n_heads)[:, :, heads]
    mean = means.output_mean(own, heads, plain.is_real(own.shape[1]))
    edited[:, :, heads] = mean.to(edited)
    return edited.view(z.shape)


class AllHeads(Intervention):
    """What the output loses when many heads are replaced at once, each by its ideal.

    Args:
        assignments: by name, for (layer, head) an ideal, "top 3" and the like among them; heads
            that are not named stay as they are.
        means, leaves_out: as of :class:`HeadIdeals`.
    """

    reads = ("scores", "pattern")

    means: MeanPatterns | None
    assignments: Mapping[str, Mapping[Head, str]]
    _: KW_ONLY
    leaves_out: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_means(self.means)
        known = check(self.assignments, _Assignments, "assignments")
        self.assignments = {str(name): dict(heads) for name, heads in known.items()}

    @property
    def _ideals(self) -> list[str]:
        return [ideal for heads in self.assignments.values() for ideal in heads.values()]

    def _plain_needs(self, model: nn.Module) -> Needs:
        states = ["head"] if "ablated" in self._ideals else []
        return super()._plain_needs(model) | Needs.of(model, states=states)

    def edits(self, plain: Pass) -> Iterable[Edit]:
        """Make one for each assignment."""
        layers = _layers(plain, self.means, self.leaves_out, self._ideals)
        for name, heads in self.assignments.items():
            yield replace_heads(plain, name, heads, layers)
