"""Idealised patterns, and a model in which they take the place of its heads' own.

InfoFlow's three mechanisms (Yu, Jiang, Bao, Li 2026, Sec. 4) are such patterns.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import Count, check
from infoflow_lens.hooks.interventions.edits import check_head, split_heads
from infoflow_lens.hooks.model.call import NamedHook, catch
from infoflow_lens.hooks.model.points import (
    has_own_attention,
    pattern_hook,
    scores_hook,
    takes_model,
)
from infoflow_lens.hooks.model.semantics import visibility
from infoflow_lens.hooks.passes.view import Needs, Pass
from infoflow_lens.hooks.probe import Probe
from infoflow_lens.hooks.result import Result
from infoflow_lens.hooks.states import summed

Ideal = Literal["own_position", "global", "specific_position", "max_position", "top_k"]

# From what needs nothing of the input to what needs most of it [chosen]: a head that may look
# anywhere evenly, or by position, does not compare tokens; a hard maximum does.
IDEALS: tuple[Ideal, ...] = get_args(Ideal)
SOFT = "soft"  # the mechanism of a head that no ideal replaces

Heads = Mapping[tuple[int, int], Ideal]


# The ideals of the theory by the names that results of single heads use, and "top_k"
_NAMES = {
    "own_position": "own",
    "global": "even",
    "specific_position": "position",
    "max_position": "largest",
}


def name_ideal(ideal: str, k: int) -> str:
    """Give an ideal of IDEALS the name that it has in HEAD_IDEALS: "own", "top 4"."""
    return f"top {k}" if ideal == "top_k" else _NAMES.get(ideal, ideal)


def ideal_pattern(
    pattern: Float[Tensor, "*batch query key"],
    visible: Bool[Tensor, "*#batch query key"],
    ideal: str,
    mean: Float[Tensor, "*head longest longest"] | None = None,
    k: int = 4,
) -> Float[Tensor, "*batch query key"]:
    """Idealise patterns; every row keeps its sum (1 for a softmax without sinks).

    Args:
        pattern: of one head or several.
        visible: the keys that each query may see.
        ideal: of IDEALS or HEAD_IDEALS: "own" or "own_position", all weight on the query's own
            position, or none where it is no key; "previous"; "sink", on the first; "even" or
            "global", evenly on all visible keys; "position", "specific_position" or "offset", a
            mean pattern, even where that has nothing; "largest" or "max_position", all on the
            largest, the lowest of equals; "gated", on the largest but the first, which keeps its
            weight; "top_k" or "top 4", the k largest as they are, rescaled, with all keys that
            equal the k-th.
        mean: the mean pattern.
        k: for "top_k".

    Raises:
        InfoFlowError: for sequences longer than those of the mean pattern.
    """
    name = name_ideal(ideal, k)
    n_query, n_key = pattern.shape[-2:]
    total = pattern.sum(dim=-1, keepdim=True)
    if name.startswith("top "):
        least = pattern.topk(min(int(name[4:]), n_key), dim=-1).values[..., -1:]
        return rescale(pattern * (pattern >= least), total)
    if name == "largest":
        largest = pattern.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(pattern).scatter_(-1, largest, total)
    if name == "gated":
        # below every weight, so that neither closed keys nor the first one are chosen
        others = pattern.masked_fill(~visible, -1.0)
        others[..., 0] = -1.0
        best = others.max(dim=-1, keepdim=True)
        made = torch.zeros_like(pattern)
        # where the first is the only key that is seen, it has the whole row
        made[..., :1] = torch.where(best.values < 0, total, pattern[..., :1])
        rest = (total - made[..., :1]).clamp(min=0)
        return made.scatter_add_(-1, best.indices, rest)
    if name in ("position", "offset"):
        assert mean is not None
        if n_query > mean.shape[-2]:
            raise InfoFlowError(
                f"the mean patterns are of at most {mean.shape[-2]} positions, this sequence has "
                f"{n_query}: expected sequences no longer than those that were measured"
            )
        made = mean[..., :n_query, :n_key].to(pattern.device)
    else:
        made = _simple(name, pattern)
    made = made * visible
    if name != "own":  # such as of a query that no other sequence has
        none = made.sum(dim=-1, keepdim=True) <= 0
        made = torch.where(none, visible.to(made), made)
    return rescale(made, total.to(made)).to(pattern)


def _simple(name: str, pattern: Float[Tensor, "*batch query key"]) -> Float[Tensor, "query key"]:
    """Make a pattern that is the same for all sequences, before closed keys are taken off."""
    n_query, n_key = pattern.shape[-2:]
    keys = torch.arange(n_key, device=pattern.device)
    query = torch.arange(n_query, device=pattern.device)[:, None]
    at = {"own": query, "previous": (query - 1).clamp(min=0), "sink": query * 0}
    if name == "even":
        return torch.ones(n_query, n_key, device=pattern.device, dtype=pattern.dtype)
    return (keys == at[name]).to(pattern.dtype)


def mean_without(
    mean: Float[Tensor, "*head longest longest"],
    n: Float[Tensor, " longest"],
    pattern: Float[Tensor, "*batch query key"],
) -> Float[Tensor, "*batch query key"]:
    """Take these patterns out of the mean of `n` for each query; 0 where nothing is left."""
    n_query, n_key = pattern.shape[-2:]
    wide = torch.promote_types(pattern.dtype, torch.float32)
    n = n[:n_query, None].to(pattern.device, wide)
    others = (mean[..., :n_query, :n_key].to(n) * n - pattern) / (n - 1).clamp(min=1)
    return others.clamp(min=0).masked_fill(n <= 1, 0)


def rescale(
    kept: Float[Tensor, "*#batch query key"], total: Float[Tensor, "*#batch query one"]
) -> Float[Tensor, "*batch query key"]:
    """Scale rows of weights, none below 0, to the sums that they are to have.

    Rows of zeros stay so, and rows that have their sum already stay bit-identical.

    Args:
        kept: the rows.
        total: the sums.
    """
    remaining = kept.sum(dim=-1, keepdim=True)
    remaining = remaining.masked_fill(remaining == 0, 1)
    factor = total / remaining
    # of rows with next to no weight the factor overflows: their weights are divided first
    return torch.where(factor.isinf(), kept / remaining * total, kept * factor)


def fill_with_mean(
    pattern: Float[Tensor, "batch head query key"],
    kept: Bool[Tensor, "batch head query key"],
    mean: Float[Tensor, "head longest longest"],
) -> Float[Tensor, "batch head query key"]:
    """Keep some weights of a pattern, and put the mean pattern on the other keys.

    It is scaled to what the other keys had of the row, so every row keeps its sum. Where the mean
    has nothing there, they share it evenly.

    Args:
        pattern: of all heads of a layer.
        kept: the weights that stay, and those of keys that a query does not see.
        mean: the mean pattern.
    """
    n_query, n_key = pattern.shape[-2:]
    own = pattern.float()
    left = own.masked_fill(kept, 0).sum(dim=-1, keepdim=True)
    rest = mean[:, :n_query, :n_key].to(own).masked_fill(kept, 0)
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, (~kept).to(own))
    return torch.where(kept, pattern, rescale(rest, left).to(pattern))


def edits_of_patterns(
    model: nn.Module, layers: Iterable[int], edit: Callable[[int, "SeenKeys", Tensor], Tensor]
) -> list[NamedHook]:
    """Make hooks that put ``edit(layer, seeing, pattern)`` in the place of patterns."""
    hooks: list[NamedHook] = []
    for layer in layers:
        seeing = SeenKeys(model, layer)

        def hook_fn(activation: Tensor, hook: Any, at: int = layer, by: Any = seeing) -> Tensor:
            return edit(at, by, activation)

        hooks += [*seeing.hooks, (pattern_hook(model, layer), hook_fn)]
    return hooks


class SeenKeys:
    """Which keys the queries of a layer see, asked while its pattern passes.

    They are known by structure, or read off scores that are -inf elsewhere. Padding stands at one
    end of a sequence: no query has weight on it, but those of padding, which see all keys alike.

    Attributes:
        hooks: to be put on the model, before the one that asks.
    """

    def __init__(self, model: nn.Module, layer: int) -> None:
        self._model, self._layer = model, layer
        self._scores: Tensor | None = None
        self.hooks: list[NamedHook] = []
        if has_own_attention(model):
            self.hooks = [(scores_hook(model, layer), self._see)]

    def _see(self, activation: Tensor, hook: Any) -> None:
        self._scores = activation.detach()

    def visible(
        self, pattern: Float[Tensor, "batch head query key"]
    ) -> Bool[Tensor, "batch head query key"]:
        """Mark the keys that are seen in the pass whose pattern this is."""
        scores, self._scores = self._scores, None
        if scores is not None:
            return scores > -torch.inf
        known = visibility(self._model, pattern.shape[-1])
        assert known is not None
        keys = known[self._layer][: pattern.shape[-2], : pattern.shape[-1]]
        seen = (pattern > 0).any(dim=1)
        # a query with weight on a key that the model closes to tokens is padding
        of_padding = (seen & ~keys).any(dim=2)
        read = (seen & ~of_padding[:, :, None]).any(dim=1).to(torch.uint8)
        # what is not read between tokens that are is no padding, but has too little weight
        real = (read.cummax(dim=1).values & read.flip(1).cummax(dim=1).values.flip(1)).bool()
        return (keys & real[:, None])[:, None].expand_as(pattern)


@takes_model
@contextmanager
def substituted(
    model: nn.Module,
    heads: Heads,
    mean_patterns: Sequence[Float[Tensor, "_head query key"]] | None = None,
    k: int = 4,
) -> Iterator[None]:
    """Replace the patterns of some heads of a model by idealised ones, while the block lasts.

    Args:
        model: any Transformer whose pattern, when edited, reaches the output.
        heads: (layer, head) and what takes the place of its pattern; see :func:`ideal_pattern`.
        mean_patterns: for every layer the mean patterns, as `MechanismsResult.mean_patterns` has
            them; needed for "specific_position".
        k: for "top_k".

    Raises:
        InfoFlowError: for unknown layers, heads or ideals, or missing mean patterns.
    """
    # the heads of each layer, from the weights
    n_heads = [int(block.attn.W_O.shape[0]) for block in model.blocks]  # type: ignore[union-attr]
    k = check(k, Count, "k")
    groups: dict[int, dict[str, list[int]]] = {}
    for (layer, head), ideal in heads.items():
        check_head(n_heads, layer, head)
        if check(ideal, Ideal, "ideal") == "specific_position" and mean_patterns is None:
            raise InfoFlowError(
                "'specific_position' needs the mean patterns: give mean_patterns, as "
                "measure_mechanisms(...).mean_patterns"
            )
        groups.setdefault(layer, {}).setdefault(name_ideal(ideal, k), []).append(head)

    def replace(layer: int, seeing: SeenKeys, pattern: Tensor) -> Tensor:
        visible, edited = seeing.visible(pattern), pattern.clone()
        for ideal, some in groups[layer].items():  # all heads of an ideal at once
            mean = None if mean_patterns is None else mean_patterns[layer][some]
            edited[:, some] = ideal_pattern(pattern[:, some], visible[:, some], ideal, mean)
        return edited

    with catch(model, (), edits_of_patterns(model, groups, replace)):
        yield


@dataclass(frozen=True, eq=False, kw_only=True)
class MeanPatterns(Result):
    """What heads do on the average of some sequences, position by position.

    Attributes:
        patterns: for every layer float64 [head, query, key], the mean pattern of each query, over
            the sequences that have it.
        outputs: for every layer float64 [pos, head, d_head], the mean of z, as the patterns.
        n: float64 [query], over how many sequences.
    """

    patterns: tuple[Float[Tensor, "_head query key"], ...]
    outputs: tuple[Float[Tensor, "query _head _d_head"], ...]
    n: Float[Tensor, " query"]

    @property
    def n_pos(self) -> int:
        """The length of the longest sequence."""
        return len(self.n)

    def mean_outputs(self) -> tuple[Float[Tensor, "_head _d_head"], ...]:
        """Compute the mean z of each head over all positions of all sequences."""
        # position means count by how many sequences they are of, which makes it the mean over all
        weight = self.n / self.n.sum().clamp(min=1)
        return tuple(torch.einsum("qhd,q->hd", output, weight) for output in self.outputs)

    @property
    def sink(self) -> tuple[Float[Tensor, " _head"], ...]:
        """The mean weight of each head on position 0, over the queries behind it."""
        weight = self.n[1:] / self.n[1:].sum().clamp(min=1)
        return tuple(pattern[:, 1:, 0] @ weight for pattern in self.patterns)


class MeanPatternsProbe(Probe[MeanPatterns]):
    """The mean pattern and the mean z of every head, by position.

    They take the place of a head's own where its mechanism is asked for
    (:class:`~infoflow_lens.hooks.HeadIdeals`). Give other sequences than those that are judged by
    them, none shorter than the longest of these.

    Args:
        what: "patterns", "outputs" or "both"; what is not asked for has a last axis of length 0.
    """

    reads = ("pattern",)
    patterns, outputs, n = summed(), summed(), summed()

    what: Literal["both", "patterns", "outputs"] = "both"

    def needs(self, model: nn.Module) -> Needs:
        """Read patterns, and z where it is asked for."""
        states = [] if self.what == "patterns" else ["head"]
        return Needs.of(model, pattern=True, states=states)

    def update(self, seen: Pass) -> Mapping[str, Any]:
        """Sum over the sequences of a pass; padding counts nowhere."""
        patterns, outputs = [], []
        real = seen.is_real(seen.pattern(0).shape[2])
        for layer in range(seen.n_layers):
            pattern = seen.pattern(layer)
            n_heads, n_query = pattern.shape[1:3]
            if self.what == "outputs":
                patterns.append(torch.zeros(n_heads, n_query, 0, dtype=torch.float64))
            else:
                weight = real.to(pattern.device, torch.float64)
                patterns.append(torch.einsum("bhqk,bq->hqk", pattern.double(), weight))
            if self.what == "patterns":
                outputs.append(torch.zeros(n_query, n_heads, 0, dtype=torch.float64))
            else:
                z = split_heads(seen.state(layer, "head"), n_heads).double()[:, :n_query]
                outputs.append(z.masked_fill(~real[:, :, None, None].to(z.device), 0).sum(dim=0))
        return {"patterns": patterns, "outputs": outputs, "n": real.double().sum(dim=0)}

    def compute(self) -> MeanPatterns:
        """Divide the sums."""
        n = self.n.clamp(min=1)
        return self.make_result(
            MeanPatterns,
            patterns=tuple((sums / n[:, None].to(sums.device)).cpu() for sums in self.patterns),
            outputs=tuple((sums / n[:, None, None].to(sums.device)).cpu() for sums in self.outputs),
            n=self.n,
        )
