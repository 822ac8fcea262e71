"""One forward pass as probes see it: checked, padding moved away, everything worked out once."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError, refuse_names
from infoflow_lens.hooks.model.call import check_positions
from infoflow_lens.hooks.model.inputs import Batch, check_accepts_padding, depends_on_length
from infoflow_lens.hooks.model.points import (
    hook_name,
    layer_count,
    layer_of,
    layers_with_attention,
    pattern_hook,
    reads_vectors,
    scores_hook,
    token_hook,
)
from infoflow_lens.hooks.model.semantics import (
    attention_hooks,
    find_keys_in_use,
    hook_semantics,
    state_hooks,
    state_sum,
    visibility,
)
from infoflow_lens.hooks.passes.ranking import Ranked, mark_places, rank_keys

_QUERY_BY_KEY = ("hook_attn_scores", "hook_pattern")  # [batch, head, query, key]


@dataclass(frozen=True)
class Needs:
    """What a probe reads of every pass.

    Attributes:
        points: hook points.
        ranks: the deepest rank that it needs, by the positions that it leaves out.
    """

    points: tuple[str, ...]
    ranks: Mapping[tuple[int, ...], int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        scores: bool = False,
        pattern: bool = False,
        states: Sequence[str] = (),
        tokens: bool = False,
        ranks: Sequence[int] = (),
        without: Sequence[int] = (),
        points: Sequence[str] = (),
        layers: Sequence[int] | None = None,
    ) -> "Needs":
        """Name what :class:`Pass` needs to answer these questions.

        Args:
            model: a TransformerLens model.
            scores, pattern: for ``Pass.scores`` and ``Pass.pattern``.
            states: for ``Pass.state``: "post_attention", "resid_post", "resid_pre", "head".
            tokens: for ``Pass.embedding``.
            ranks, without: for ``Pass.ranked``.
            points: further hook points, for ``Pass.activation``.
            layers: which layers; default, every one.

        Raises:
            InfoFlowError: if the model lacks a hook point.
        """
        names = [token_hook(model)] if tokens else []
        layers = range(layer_count(model)) if layers is None else layers
        names += attention_hooks(model, layers) if scores or ranks else []
        for layer in layers:
            names += [pattern_hook(model, layer)] if pattern else []
            for state in states:
                names += _state_points(model, layer, state)
        names += [hook_name(model, point) for point in points]
        depths = {tuple(without): max(ranks)} if ranks else {}
        return cls(tuple(dict.fromkeys(names)), depths)

    def __or__(self, other: "Needs") -> "Needs":
        """Return the needs of both."""
        keys = {**self.ranks, **other.ranks}
        depths = {k: max(self.ranks.get(k, 0), other.ranks.get(k, 0)) for k in keys}
        return Needs(tuple(dict.fromkeys((*self.points, *other.points))), depths)


def _state_points(model: nn.Module, layer: int, state: str) -> tuple[str, ...]:
    """Hook points whose sum is a state of a layer."""
    if state == "head":
        return (hook_name(model, f"blocks.{layer}.attn.hook_z"),)
    if state == "resid_pre":
        return (hook_name(model, f"blocks.{layer}.hook_resid_pre"),)
    return state_hooks(model, layer, state)


_BY_SEQUENCE = ("hook_resid_pre", "hook_resid_post", "hook_attn_out", "hook_attn_scores",
                "hook_pattern")  # fmt: skip


def _check_are_its_own(model: nn.Module, activations: Mapping[str, Tensor], n: int) -> None:
    """Refuse activations of more or fewer sequences than were given.

    Raises:
        InfoFlowError: naming the hook point.
    """
    for name, activation in activations.items():
        if name.endswith(_BY_SEQUENCE) and len(activation) != n:
            raise InfoFlowError(
                f"{name} shows {len(activation)} sequences in a pass of {n}: expected those of the "
                f"pass; {type(model).__name__} mixes passes of two threads, so run it in one at a "
                "time, or give each thread a copy"
            )


@refuse_names(counted="renumber")
class Pass:
    """One complete forward pass.

    Positions count the real tokens of each sequence from 0, wherever padding stood: what a padded
    batch shows of a sequence is what the sequence alone would. Everything is worked out when it is
    first asked for, and once, however many probes ask: padding is moved away, activations are
    checked for NaN and infinity, keys are ranked.

    Attributes:
        model: the model that made it.
        n_layers: the number of its attention layers.
        indices: int [batch], which sequences of all these are, counted from 0.
        held_out: bool [batch], which are for evaluation.
        turns: int [batch], by which held-out sequences are dealt to blocks in turn.
        lengths: int [batch], real tokens of each sequence; None if nothing is padded.
        tokens: token ids [batch, pos] or vector tokens; None where hooks alone saw the pass.
        columns: what else the model read for each token, by name.
        output: what the call of the model returned; None where it ended before, or is not known.
    """

    def __init__(
        self,
        model: nn.Module,
        activations: Mapping[str, Tensor],
        *,
        tokens: Tensor | None = None,
        mask: Bool[Tensor, "batch pos"] | None = None,
        columns: Mapping[str, Tensor] | None = None,
        needs: Needs | None = None,
        output: Any = None,
    ) -> None:
        """Look at a pass.

        Args:
            model: the model that made it.
            activations: by hook point.
            tokens: what the model read.
            mask: which positions are real; None for all.
            columns: what else the model read, by name; see :class:`Batch`.
            needs: of all probes that will look, so that keys are ranked once and deep enough.
            output: what the call returned.

        Raises:
            InfoFlowError: if tokens attend to what the mask calls padding, or what the model gives
                for a position depends on the length of its batch; and for NaN or infinity.
        """
        self.model, self._raw, self._output = model, activations, output
        self.n_layers = layer_count(model)
        shapes = [part.shape for part in (*activations.values(), tokens) if part is not None]
        n = shapes[0][0] if shapes else 0
        if tokens is not None:
            _check_are_its_own(model, activations, len(tokens))
            check_positions(model, activations, tokens)
        # one probe may count its sequences otherwise; see renumber()
        self.indices = self.turns = torch.arange(n)
        self.held_out = torch.zeros(n, dtype=torch.bool)
        self._depths = {} if needs is None else needs.ranks
        self._made: dict[Any, Any] = {}
        self.lengths: Int[Tensor, " batch"] | None = None
        self._order: Int[Tensor, "batch pos"] | None = None
        self._size = 0 if mask is None else mask.shape[1]
        self._check_finite(mask)  # first: NaN would pass for weight on padding
        if mask is not None:
            _check_padding_is_right(model, activations, mask)
            self.lengths = mask.sum(dim=1).cpu()
            # a stable order keeps tokens in theirs, and puts padding behind them
            self._order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
            self._order = self._order[:, : int(self.lengths.max())]
            # padded on the right already: cutting is enough
            self._in_place = bool((self._order.cpu() == torch.arange(self._order.shape[1])).all())
        self.tokens = None if tokens is None else self._move_padding(tokens)
        self.columns = {
            name: self._move_padding(values) for name, values in (columns or {}).items()
        }

    def __len__(self) -> int:
        return len(self.held_out)

    def renumber(
        self,
        indices: Int[Tensor, " batch"],
        held_out: Bool[Tensor, " batch"],
        turns: Int[Tensor, " batch"],
    ) -> "Pass":
        """Return the same pass with a probe's numbers of its sequences; results are shared."""
        renumbered = copy.copy(self)
        renumbered.indices, renumbered.held_out, renumbered.turns = indices, held_out, turns
        return renumbered

    @property
    def batch(self) -> Batch | None:
        """The sequences that the model read, padded on the right; None where hooks saw the pass."""
        return None if self.tokens is None else Batch(self.tokens, self.lengths, self.columns)

    @property
    def output(self) -> Any:
        """What the call returned; of an output by position, padding is moved away."""
        is_by_position = isinstance(self._output, Tensor) and self._output.ndim > 2
        return self._move_padding(self._output) if is_by_position else self._output

    def lacks(self, points: Sequence[str]) -> tuple[str, ...]:
        """Return the hook points among these that did not fire."""
        return tuple(name for name in points if name not in self._raw)

    @property
    def first(self) -> int:
        """The index of its first sequence, for errors."""
        return int(self.indices[0])

    def lengths_of(self, n_pos: int) -> Int[Tensor, " batch"]:
        """Return the positions of each sequence, `n_pos` where nothing is padding."""
        return torch.full((len(self),), n_pos) if self.lengths is None else self.lengths

    def places(self, asked: Sequence[int], n_pos: int) -> Bool[Tensor, "batch pos"]:
        """Mark positions, from 0 on, or from -1 backwards from the end of each sequence."""
        return mark_places(asked, self.lengths_of(n_pos), n_pos)

    def is_real(self, n_pos: int) -> Bool[Tensor, "batch pos"]:
        """Mark which of the first `n_pos` positions are no padding."""
        if self.lengths is None:
            return torch.ones(len(self), n_pos, dtype=torch.bool)
        return torch.arange(n_pos) < self.lengths[:, None]

    def visible(self, layer: int) -> Bool[Tensor, "sequence query key"]:
        """Mark the keys that each query may see in a layer, False on padding (model device).

        The axis `sequence` has length 1 where all sequences see alike, as they do without padding.
        """
        return self._cache(("visible", layer), lambda: self._visible(layer))

    def activation(self, name: str) -> Tensor:
        """Return the activation of a hook point, positions on axis 1; padding holds anything.

        Raises:
            InfoFlowError: if it did not fire, or no probe said that it needs it.
        """
        return self._cache(
            ("activation", name), lambda: self._move_padding(self._find_activation(name))
        )

    def embedding(self) -> Float[Tensor, "batch pos d_token"]:
        """Return the tokens as vectors: vector tokens themselves, or the embeddings of ids."""
        return self.activation(token_hook(self.model))

    def pattern(self, layer: int) -> Float[Tensor, "batch head query key"]:
        """Return the attention pattern, 0 for padding; of no heads where a layer has no attention.

        Raises:
            InfoFlowError: for attention over other keys than this pass has.
        """
        return self._cache(("pattern", layer), lambda: self._pattern(layer))

    def scores(self, layer: int) -> Float[Tensor, "batch head query key"]:
        """Return the attention scores, -inf for keys that a query may not see.

        Where a model shows the pattern in their place they are its logarithm: a softmax keeps the
        order, and the logarithm of its weights differs from the scores by a constant in each row.
        Keys whose weight is 0 have no rank there.

        Raises:
            InfoFlowError: for attention over other keys than this pass has.
        """
        return self._cache(("scores", layer), lambda: self._scores(layer))

    def ranked(self, layer: int, ranks: Sequence[int], without: Sequence[int] = ()) -> Ranked:
        """Rank keys by their scores, [batch, head, query, rank]; see :func:`rank_keys`.

        Args:
            layer: the layer.
            ranks: which k; 1 is the argmax.
            without: key positions that are never ranked, from 0 on or from -1 backwards.
        """
        chosen, left_out = tuple(ranks), tuple(without)
        # as deep as any probe of the pass asks, so that all of them share one ranking
        deepest = max(self._depths.get(left_out, 0), *chosen)
        every = self._cache(
            ("ranked", layer, left_out, deepest),
            lambda: self._rank(layer, left_out, range(1, deepest + 1)),
        )
        if chosen == tuple(range(1, deepest + 1)):
            return every
        columns = [rank - 1 for rank in chosen]
        return Ranked(*(part[..., columns] for part in every))

    def state(self, layer: int, point: str = "post_attention") -> Float[Tensor, "batch pos *d"]:
        """Return a state of a layer; padding holds anything.

        Args:
            layer: the layer.
            point: "post_attention" (x'_l of eq 1), "resid_post", "resid_pre", or "head", every
                head's own output [batch, pos, head, d_head].
        """
        return self._cache(("state", layer, point), lambda: self._state(layer, point))

    # Reductions for probes, which leave padding out

    def sum_over_queries(self, values: Tensor, first: int = 0) -> Tensor:
        """Return the sum over the real queries of each sequence, as :meth:`mean_over_queries`."""
        return sum_over(values, self.is_real(first + values.shape[2])[:, first:], 2)

    def mean_over_queries(self, values: Tensor, first: int = 0) -> Tensor:
        """Return the mean over each sequence's real queries, [batch, head, ...]; NaN without any.

        Args:
            values: [batch, head, query, ...], such as a pattern; padding may hold anything.
            first: the position of the first query, where `values` begin later.
        """
        return mean_over(values, self.is_real(first + values.shape[2])[:, first:], 2)

    def count_queries(self, values: Tensor, first: int = 0) -> Int[Tensor, " batch"]:
        """Count the real queries of each sequence in values [batch, head, query, ...], as above."""
        return self.is_real(first + values.shape[2])[:, first:].sum(dim=1)

    def sum_over_positions(self, values: Tensor, first: int = 0) -> Tensor:
        """Return the sum over the real positions of values [batch, pos, ...], as above."""
        return sum_over(values, self.is_real(first + values.shape[1])[:, first:], 1)

    def mean_over_positions(self, values: Tensor, first: int = 0) -> Tensor:
        """Return the mean over the real positions of values [batch, pos, ...], as above."""
        return mean_over(values, self.is_real(first + values.shape[1])[:, first:], 1)

    # How it is made

    def _cache(self, key: Any, make: Any) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _find_activation(self, name: str) -> Tensor:
        if name not in self._raw:
            raise InfoFlowError(
                f"{name} was not collected: expected a hook point that the probe's needs() names"
            )
        return self._raw[name]

    def _move_padding(self, activation: Tensor) -> Tensor:
        """Move padding behind the real tokens of each sequence."""
        if self._order is None or activation.ndim < 2 or activation.shape[1] != self._size:
            return activation
        if self._in_place:
            return activation[:, : self._order.shape[1]]
        return _along(activation, self._order.to(activation.device), 1)

    def _attention(self, name: str, fill: float | int) -> Float[Tensor, "batch head query key"]:
        activation = self._find_activation(name)
        # keys of a cache are no positions of this pass
        if activation.shape[-1] != activation.shape[-2]:
            raise InfoFlowError(
                f"{name} has {activation.shape[-1]} keys for {activation.shape[-2]} positions: "
                "expected one pass over whole sequences; run without past_kv_cache, or, of a model "
                "of transformers, with use_cache=False"
            )
        if self._order is None:
            return activation
        if activation.shape[-1] != self._size:
            raise InfoFlowError(
                f"{name} has {activation.shape[-1]} positions, the attention_mask of the call "
                f"{self._size}: expected the same; a wrapper around forward that changes the input "
                "must be taken off"
            )
        order, longest = self._order.to(activation.device), self._order.shape[1]
        # both axes are positions: queries and keys move together
        if self._in_place:
            activation = activation[:, :, :longest, :longest]
        else:
            activation = _along(_along(activation, order, 2), order, 3)
        real = self.is_real(longest).to(activation.device)
        both = real[:, None, :, None] & real[:, None, None, :]
        return activation.masked_fill(~both, fill)

    def _stand_in(self, layer: int) -> int | None:
        """Find a layer with attention to take the sizes from; None where the layer has its own."""
        layers = self._cache("attending", lambda: layers_with_attention(self.model))
        return None if layer in layers or not layers else layers[0]

    def _pattern(self, layer: int) -> Float[Tensor, "batch head query key"]:
        if (other := self._stand_in(layer)) is not None:
            return self.pattern(other)[:, :0]
        return self._attention(pattern_hook(self.model, layer), 0)

    def _read_scores(self, layer: int) -> Float[Tensor, "batch head query key"]:
        """Return scores as the model shows them, masked as it masks, -inf for padding."""
        return self._attention(scores_hook(self.model, layer), -torch.inf)

    def _shows_weights(self, layer: int) -> bool:
        """Say whether the pattern stands in the place of scores; keys of weight 0 are closed."""
        shown = self._cache("shown", lambda: hook_semantics(self.model).scores)
        return bool(shown[layer] != "scores")

    def _scores(self, layer: int) -> Float[Tensor, "batch head query key"]:
        if (other := self._stand_in(layer)) is not None:
            return self.scores(other)[:, :0]
        if self._shows_weights(layer):
            return self.pattern(layer).float().log()
        scores = self._read_scores(layer)
        if visibility(self.model, scores.shape[-1]) is None:  # closed keys have -inf
            return scores
        return scores.masked_fill(~self.visible(layer)[:, None], -torch.inf)

    def _visible(self, layer: int) -> Bool[Tensor, "sequence query key"]:
        by_weight = self._shows_weights(layer)
        attention = self.pattern(layer) if by_weight else self._read_scores(layer)
        n_pos = attention.shape[-1]
        known = visibility(self.model, n_pos)
        if known is None:  # the call itself says which keys it has closed, in each sequence
            keys = (attention > (0 if by_weight else -torch.inf)).any(dim=1)
        else:
            keys = known[layer][None, :n_pos, :n_pos].to(attention.device)
        if self.lengths is None:
            return keys[:1] if bool((keys == keys[:1]).all()) else keys
        real = self.is_real(n_pos).to(attention.device)
        return keys & real[:, :, None] & real[:, None, :]

    def _rank(self, layer: int, without: tuple[int, ...], ranks: range) -> Ranked:
        if (other := self._stand_in(layer)) is not None:
            return Ranked(*(part[:, :0] for part in self._rank(other, without, ranks)))
        by_weight, visible = self._shows_weights(layer), None
        scores = self.pattern(layer) if by_weight else self._read_scores(layer)
        # no mask where closed keys have weight 0, or -inf as in TransformerLens's own attention
        if not by_weight and visibility(self.model, scores.shape[-1]) is not None:
            visible = self.visible(layer)
        if without:
            left_out = self.places(without, scores.shape[-1]).to(scores.device)
            scores = scores.masked_fill(left_out[:, None, None], 0 if by_weight else -torch.inf)
        return rank_keys(scores, ranks, visible, are_weights=by_weight)

    def _state(self, layer: int, point: str) -> Tensor:
        names = _state_points(self.model, layer, point)
        return state_sum({name: self.activation(name) for name in names}, names)

    def _check_finite(self, mask: Bool[Tensor, "batch pos"] | None) -> None:
        """Refuse NaN and infinity in all that was caught, waiting for the device once.

        Raises:
            InfoFlowError: naming the hook point.
        """
        names = [n for n, part in self._raw.items() if part.is_floating_point() and part.numel()]
        if not names:
            return
        # a sum is not finite if a part is not: one number for each, read from the device at once
        doubts = [self._doubt(name, mask).flatten() for name in names]
        if torch.cat(doubts).isfinite().all():
            return
        # a sum may overflow although no part has: look at the parts
        for name, doubt in zip(names, doubts, strict=True):
            if not doubt.isfinite() and not self._doubt(name, mask, exactly=True).isfinite():
                what = "NaN" if doubt.isnan() else "infinity"
                raise InfoFlowError(
                    f"{name} holds {what}: expected numbers; look for bad weights or inputs, or "
                    "run in float32"
                )

    def _doubt(
        self, name: str, mask: Bool[Tensor, "batch pos"] | None, exactly: bool = False
    ) -> Float[Tensor, ""]:
        """Return a number that is finite only if the activation is, at all real positions.

        Masked scores are -inf, so of scores it is the largest that must be finite. Of others it is
        the sum, which is quicker than a look at each and may overflow, or exactly the largest size.
        """
        activation, scores = self._raw[name], name.endswith("hook_attn_scores")
        axis = 2 if name.endswith(_QUERY_BY_KEY) else 1
        if mask is not None and activation.ndim > axis and activation.shape[axis] == mask.shape[1]:
            shape = [1] * activation.ndim
            shape[0], shape[axis] = mask.shape
            padding = ~mask.to(activation.device).view(shape)
            # padding may hold anything, and takes the value that moves neither a sum nor a maximum
            activation = activation.masked_fill(padding, -torch.inf if scores else 0)
        if scores:
            return activation.amax().float()
        return activation.abs().amax().float() if exactly else activation.sum(dtype=torch.float32)


def _along(activation: Tensor, index: Tensor, axis: int) -> Tensor:
    """Gather positions along an axis, for every sequence its own."""
    shape = [1] * activation.ndim
    shape[0], shape[axis] = index.shape
    size = list(activation.shape)
    size[axis] = index.shape[1]
    return activation.gather(axis, index.view(shape).expand(size))


def _check_padding_is_right(
    model: nn.Module, activations: Mapping[str, Tensor], mask: Bool[Tensor, "batch pos"]
) -> None:
    """Refuse passes in which padding changed what real positions show.

    Raises:
        InfoFlowError: if real queries attended to padding, positions depend on the length, or an
            opened model mixes padding in before it masks it.
    """
    # rotary embeddings of another length would rotate real tokens otherwise
    if depends_on_length(model):
        raise InfoFlowError(
            f"{type(model).__name__} has rotary embeddings that depend on the longest sequence of "
            "a batch, so a padded batch is not what its sequences alone give: expected sequences "
            "of one length together; run_probes takes care of that"
        )
    if not getattr(model, "takes_padding", True):
        check_accepts_padding(model, mask.sum(dim=1))
    # a mask that the model ignores shows as weight on padding
    for name, by_weight, seen in _attention_shown(model, activations):
        if seen.shape[-1] != mask.shape[1]:
            continue
        mask = mask.to(seen.device)
        to_padding = mask[:, :, None] & ~mask[:, None, :]
        if (find_keys_in_use(model, seen, by_weight) & to_padding).any():
            raise InfoFlowError(
                f"{name}: tokens attend to padding, so the model ignores the attention_mask (a "
                "bidirectional HookedTransformer does): expected masked keys; run sequences of one "
                "length together, without padding"
            )


def _attention_shown(
    model: nn.Module, activations: Mapping[str, Tensor]
) -> Iterator[tuple[str, bool, Tensor]]:
    """Yield the scores and patterns among activations, and which are patterns."""
    carried = hook_semantics(model).scores
    for name, seen in activations.items():
        if name.endswith(_QUERY_BY_KEY):
            is_pattern = carried[layer_of(name) or 0] != "scores" or name.endswith("hook_pattern")
            yield name, is_pattern, seen


def check_no_padding(model: nn.Module, activations: Mapping[str, Tensor]) -> None:
    """Refuse passes whose attention differs from that of whole sequences, as with padding.

    For passes of which the arguments of the call are not known: activations alone cannot tell where
    padding stands.

    Raises:
        InfoFlowError: naming the hook point.
    """
    if reads_vectors(model):  # vectors have no padding; CLS is closed
        return
    cut: Tensor | None = None
    for name, by_weight, seen in _attention_shown(model, activations):
        # attention of cross-layers or caches has other keys
        layer, n_pos = layer_of(name) or 0, seen.shape[-1]
        if seen.shape[-2] != n_pos:
            continue
        found = find_keys_in_use(model, seen, by_weight)
        known = visibility(model, n_pos)
        may_see = None if known is None else known[layer][:n_pos, :n_pos].to(found.device)
        # a query that attends to nothing it should, or to what it should not see, shows a mask
        if cut is None:  # one layer tells
            beyond = may_see is not None and (found & ~may_see).any()
            if beyond or not found.any(dim=1).all():
                raise InfoFlowError(_LIKE_PADDING.format(name))
        if may_see is None or not by_weight:
            return
        # a place that nobody looks across, where the model could, divides two texts or hides
        # padding
        here = ~_find_crossings(found) & _find_crossings(may_see)
        cut = here if cut is None else cut & here  # weights underflow, but not in every layer
    if cut is not None and cut.any():
        raise InfoFlowError(_LIKE_PADDING.format("every layer"))


_LIKE_PADDING = (
    "{}: some positions are seen by no query or by none behind them, or see more than others do, "
    "as with padding and an attention_mask, and activations alone do not tell which these are: "
    "expected sequences without padding, or the attention_mask; use attach() or run_probes() for "
    "padded ones"
)


def _find_crossings(attended: Bool[Tensor, "*batch query key"]) -> Bool[Tensor, "*batch place"]:
    """Say whether some query at or behind each place (but the first) attends to a key before it.

    Where a model lets padding on the left attend to itself, as GPT-Neo does, no query of the tokens
    attends to it.
    """
    n_pos = attended.shape[-1]
    place = torch.arange(n_pos, device=attended.device)
    last = torch.where(attended, place[:, None], -1).amax(dim=-2)  # the last query of each key
    return last.cummax(dim=-1).values[..., :-1] >= place[1:]


def pad_and_join(parts: list[Tensor], axes: tuple[int, ...], value: float | int) -> Tensor:
    """Join tensors on axis 0, after filling up those that are shorter on `axes` with `value`."""
    sizes = [max(part.shape[axis] for part in parts) for axis in axes]
    filled = []
    for part in parts:
        missing = [size - part.shape[axis] for axis, size in zip(axes, sizes, strict=True)]
        if any(missing):
            padding = [0] * (2 * part.ndim)  # pairs, the last axis first
            for axis, amount in zip(axes, missing, strict=True):
                padding[2 * (part.ndim - 1 - axis % part.ndim) + 1] = amount
            part = torch.nn.functional.pad(part, padding, value=value)
        filled.append(part)
    return torch.cat(filled)


def sum_over(values: Tensor, real: Bool[Tensor, "batch pos"], axis: int) -> Tensor:
    """Return the sum over the real positions of each sequence, in float32 or more.

    Args:
        values: [batch, ...] with positions on `axis`; padding may hold anything, also NaN.
        real: which positions are no padding.
        axis: that of positions, counted from 0.
    """
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    shape = [1] * values.ndim
    shape[0], shape[axis] = real.shape
    return torch.where(real.to(values.device).view(shape), wide, 0).sum(dim=axis)


def mean_over(values: Tensor, real: Bool[Tensor, "batch pos"], axis: int) -> Tensor:
    """Return the mean over the real positions of each sequence; NaN where it has none."""
    total = sum_over(values, real, axis)
    count = real.sum(dim=1).to(values.device)
    return total / count.view(-1, *[1] * (total.ndim - 1))
