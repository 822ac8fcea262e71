"""Splitting the margin between two keys of a query over what wrote the query's and keys' states."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from infoflow_lens.foundation.display import panel, quote
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import mpl, pd
from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.foundation.settings import Count, checked
from infoflow_lens.hooks.model.call import HookFunction, NamedHook, call
from infoflow_lens.hooks.model.inputs import Batch, Inputs, read_inputs, read_one
from infoflow_lens.hooks.model.points import check_one_device, hook_points, layer_count, takes_model
from infoflow_lens.hooks.model.semantics import attention_hooks, hook_semantics
from infoflow_lens.hooks.model.texts import readable_tokens
from infoflow_lens.hooks.passes.ranking import rank_keys
from infoflow_lens.hooks.passes.view import Pass, pad_and_join
from infoflow_lens.hooks.result import LabelledArray, Result
from infoflow_lens.hooks.shares import HeldNorms, Writers, differentiate, write_nothing

STRONGEST = 6  # key parts of each line that :class:`WhyAll` names, unless more are asked for
_SMALL = 1e-3  # of the size of the pieces, below which what is left over is not said [chosen]
_SHOWN = 12  # parts in a picture; the others are summed


@dataclass(frozen=True, eq=False, kw_only=True)
class Why(Result):
    """Why a head prefers one key to another, in one input.

    The margin is the first key's score minus the second's, before the softmax. While the statistics
    of norms are held, a query and a key are linear in their states, a score is linear in either,
    and each state is a sum of what wrote it. So the margin is the sum of the pieces: of what a part
    of the query makes of the same part of both keys, at the first key minus at the second.

    Attributes:
        pieces: float64 [query_part, key_part].
        query_parts: names of the parts of the query: "token embedding", "positional embedding",
            "head 0.3" (layer 0, head 3), "MLP 0", and "constants", what biases of norms and
            projections make; "embedding" where tokens and positions are not told apart.
        key_parts: of the keys.
        margin: the difference of the two scores that the model shows.
        added: what the model adds to it whatever the states are, such as ALiBi.
        layer, head, query: whose scores these are; the query is a position from 0.
        keys: positions of the first and the second key.
        sinks: positions that most queries of the head choose first, and that are no second key
            unless they were asked for.
        tokens: of the query, the first and the second key, as one reads them.
    """

    small: ClassVar[bool] = True

    pieces: Float[Tensor, "query_part key_part"]
    query_parts: tuple[str, ...]
    key_parts: tuple[str, ...]
    margin: float
    layer: int
    head: int
    query: int
    keys: tuple[int, int]
    tokens: tuple[str, str, str]
    added: float = 0.0
    sinks: tuple[int, ...] = ()

    @property
    def distance(self) -> float:
        """The margin minus the pieces and what is added to scores.

        It is 0 up to rounding where scores are sums of products. Otherwise it is what the model
        does with these sums (a soft cap, say), or the effect of parts of earlier layers that the
        model does not show.
        """
        return self.margin - self.added - float(self.pieces.sum())

    def by_key(self) -> LabelledArray:
        """Return what each part of the keys adds to the margin: why this key, [key_part]."""
        return self._sum_pieces("by_key", 0, "key_part", self.key_parts)

    def by_query(self) -> LabelledArray:
        """Return the same for each part of the query, what the head looks for, [query_part]."""
        return self._sum_pieces("by_query", 1, "query_part", self.query_parts)

    def _sum_pieces(self, name: str, axis: int, dim: str, names: tuple[str, ...]) -> LabelledArray:
        return LabelledArray(name, self.pieces.sum(dim=axis), (dim,), {dim: names})

    def table(self, by: str = "key") -> "pd.DataFrame":
        """Return a row for each part, the largest first: its name, value, and share of the margin.

        Shares add up to 1 where the margin is all of parts: see `added` and `distance`.

        Args:
            by: "key" or "query".

        Raises:
            InfoFlowError: for anything else.
        """
        if by not in ("key", "query"):
            raise InfoFlowError(f"by is {by!r}: expected 'key' or 'query'")
        found = self.by_key() if by == "key" else self.by_query()
        values = found.values
        assert isinstance(values, Tensor)
        order = values.abs().argsort(descending=True, stable=True)
        # not of the sum of the parts, which ALiBi or a soft cap makes another number
        share = values / (self.margin or torch.nan)
        columns = {
            "part": [found.places(f"{by}_part")[i] for i in order.tolist()],
            "value": values[order].numpy(),
            "share": share[order].numpy(),
        }
        return pd.DataFrame(columns)

    def summary(self) -> str:
        """Say in a sentence what is preferred to what, and what speaks most for and against it."""
        query, one, other = map(quote, self.tokens)
        parts = self.table().set_index("part")["value"]
        # keys may be given in the order in which the head does not prefer them
        is_preferred = self.margin >= 0
        goal = "it" if is_preferred else one
        said = [f"none speaks for {goal}"]
        if parts.max() > 0:
            said = [f"{parts.idxmax()} speaks most for {goal} ({parts.max():+.3g})"]
        if parts.min() < 0:
            said.append(f"{parts.idxmin()} most against it ({parts.min():+.3g})")
        sentence = (
            f"head {self.layer}.{self.head} at {query} ({self.query}) "
            f"{'prefers' if is_preferred else 'scores'} {one} ({self.keys[0]}) "
            f"{'to' if is_preferred else 'below'} {other} ({self.keys[1]}) by "
            f"{abs(self.margin):.3g} in attention score: of the parts of the keys {', '.join(said)}"
        )
        left = [sink for sink in self.sinks if sink not in self.keys]
        if left:
            places = ", ".join(map(str, left))
            sentence += f"; position {places}, to which most of its queries look, is left out"
        if abs(self.added) > _SMALL * abs(self.margin):
            sentence += f"; the model itself adds {self.added:+.3g}, whatever the states are"
        if abs(self.distance) > _SMALL * float(self.pieces.abs().sum()):
            sentence += (
                f"; {self.distance:+.3g} is left over, which is no sum of products of these parts: "
                "a soft cap, or a part of an earlier layer that is not shown"
            )
        return sentence

    def plot(self, *args: Any, **where: Any) -> "mpl.Figure":
        """Return a heat map of the pieces: the strongest parts, and the sum of the others.

        Arguments are those of :meth:`array`; with any the array is shown as it is.
        """
        if args or where:
            return super().plot(*args, **where)
        rows, query_parts = _strongest(self.pieces, self.query_parts)
        columns, key_parts = _strongest(rows.T, self.key_parts)
        coords = {"query_part": query_parts, "key_part": key_parts}
        grouped = LabelledArray("pieces", columns.T, ("query_part", "key_part"), coords)
        figure = grouped.plot(self.summary())
        for axes in figure.axes[:1]:
            axes.tick_params(axis="x", rotation=90)
        return figure

    def _say(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        facts = {"": self.summary(), "margin": self.margin}
        more = "more: .table(), .table('query'), .to_frame(), .plot(), .save(path)"
        return panel(type(self).__name__, facts, self.notes, more, self.table().head(_SHOWN))


def _strongest(
    values: Float[Tensor, "part other"], names: tuple[str, ...]
) -> tuple[Tensor, tuple[str, ...]]:
    """Return the strongest rows in their order, and the sum of the others."""
    if len(names) <= _SHOWN:
        return values, names
    kept = values.abs().sum(dim=1).topk(_SHOWN).indices.sort().values
    left = torch.ones(len(names), dtype=torch.bool)
    left[kept] = False
    rows = torch.cat([values[kept], values[left].sum(dim=0, keepdim=True)])
    return rows, (*(names[i] for i in kept.tolist()), "the others")


@dataclass(frozen=True, eq=False, kw_only=True)
class WhyAll(Result):
    """For every head and query, why the first key is preferred to the second: the strongest parts.

    All are tuples with a tensor for each layer, since layers differ in heads. Queries that see
    fewer than two keys, and positions that a shorter input lacks, have -1 and NaN.

    Attributes:
        keys: int64 [sample, head, query, 2], positions of the key with the largest score and of the
            next one that is no sink; -1 for none.
        margins: float64 [sample, head, query], the difference of their scores; NaN for none.
        parts: int64 [sample, head, query, strongest], the parts of the keys that add most to the
            margin or take most from it, the largest size first, as places in `part_names`; -1 for
            none. There are 6 unless `strongest` says otherwise.
        values: float64 [sample, head, query, strongest], what these add (see :meth:`Why.by_key`);
            0 for none.
        rest: float64 [sample, head, query], what all other parts add together, and what is no sum
            of products of parts (ALiBi, a soft cap); with `values` they sum to the margin. NaN for
            none.
        part_names: names of the parts of all layers, as in :class:`Why`.
    """

    keys: tuple[Int[Tensor, "sample _head query rank"], ...]
    margins: tuple[Float[Tensor, "sample _head query"], ...]
    parts: tuple[Int[Tensor, "sample _head query strongest"], ...]
    values: tuple[Float[Tensor, "sample _head query strongest"], ...]
    rest: tuple[Float[Tensor, "sample _head query"], ...]
    part_names: tuple[str, ...]

    def of(self, layer: int, head: int, query: int, sample: int = 0) -> dict[str, Any] | None:
        """Return one line as plain values; None where the query sees fewer than two keys.

        Returns:
            "keys" (two positions), "margin", "parts" (pairs of a name and a value, the strongest
            first) and "rest".
        """
        place = (sample, head, query)
        keys = self.keys[layer][place].tolist()
        if min(keys) < 0:
            return None
        numbers, values = self.parts[layer][place].tolist(), self.values[layer][place].tolist()
        pairs = zip(numbers, values, strict=True)
        return {
            "keys": keys,
            "margin": float(self.margins[layer][place]),
            "parts": [(self.part_names[i], value) for i, value in pairs if i >= 0],
            "rest": float(self.rest[layer][place]),
        }


CONSTANTS = "constants"  # the part of a query or key that biases alone make


@dataclass(frozen=True)
class Side:
    """The queries or the keys of a layer in one input.

    Attributes:
        made: [1, pos, head, d_head], or [1, pos, width] where heads are not told apart, in the
            graph.
        constants: of the same shape, what biases alone make of them.
    """

    made: Tensor
    constants: Tensor

    def place(self, head: int, n_heads: int) -> tuple[int, ...]:
        """Find the place of a head behind the position; groups of heads may share one."""
        return (head * self.made.shape[2] // n_heads,) if self.made.ndim == 4 else ()


@dataclass(frozen=True)
class LayerScores:
    """The scores of one layer in one input, as a function of what wrote queries and keys.

    Attributes:
        layer: the layer.
        open_scores: [head, query, key], -inf for closed keys.
        scores: the same as the model shows them, in the graph.
        added: [head, query, key], what stands in scores of queries and keys that are 0.
        q, k: queries and keys.
        writers: of the whole pass.
        parts: names of what wrote the stream before the layer, and of the constants.
    """

    layer: int
    open_scores: Float[Tensor, "head query key"]
    scores: Float[Tensor, "head query key"]
    added: Float[Tensor, "head query key"]
    q: Side
    k: Side
    writers: Writers
    parts: tuple[str, ...]
    _known: dict[tuple[int, ...], Tensor] = field(default_factory=dict, repr=False)

    @torch.enable_grad()
    def parts_of(self, side: Side, head: int, at: int) -> Float[Tensor, "part d_head"]:
        """Split the query or the key of a head at a position over its parts."""
        place: Any = (0, at, *side.place(head, len(self.scores)))
        vector = side.made[place]
        one_each = torch.eye(len(vector), dtype=vector.dtype, device=vector.device)
        written = self.writers.shares(vector, one_each, self.layer).sum(dim=-1).T
        return torch.cat([written, side.constants[place].double()[None]])

    @torch.enable_grad()
    def pieces(
        self, head: int, query: int, keys: tuple[int, int]
    ) -> Float[Tensor, "query_part key_part"]:
        """Split the first key's score minus the second's over parts of the query and the keys."""
        margin = self.scores[head, query, keys[0]] - self.scores[head, query, keys[1]]
        by_query = differentiate(
            margin[None], [self.q.made], margin.new_ones(1, 1), create_graph=True
        )[0]
        # the margin is linear in the query, so that this depends on the keys alone, linearly
        by_query = by_query[_index(0, 0, query, *self.q.place(head, len(self.scores)))]
        of_query = self.parts_of(self.q, head, query)
        (of_keys,) = differentiate(by_query, [self.k.made], of_query.to(by_query.dtype))
        found = torch.zeros(len(self.parts), len(self.parts), dtype=torch.float64)
        # the second key's score is subtracted, so its derivatives have the sign already
        for key in keys:
            weights = of_keys[
                _index(slice(None), 0, key, *self.k.place(head, len(self.scores)))
            ].double()
            found = found + (weights @ self.parts_of(self.k, head, key).T).cpu()
        return found

    @torch.enable_grad()
    def lines(self, keys: Int[Tensor, "head query 2"]) -> Float[Tensor, "head query part"]:
        """Split, for every head and query, the first key's score minus the second's.

        Over the parts of the keys alone; keys must be positions.
        """
        n_heads, n_pos, _ = self.scores.shape
        made, at = self.k.made, keys.to(self.scores.device)
        picked = self.scores.gather(-1, at)
        margins = picked[..., 0] - picked[..., 1]
        each = torch.eye(n_pos, dtype=margins.dtype, device=margins.device)
        by_place: dict[tuple[int, ...], list[int]] = {}
        for head in range(n_heads):
            by_place.setdefault(self.k.place(head, n_heads), []).append(head)
        by_part: dict[int, Tensor] = {}
        # heads with keys of their own are differentiated at once, as none reads those of another
        for heads in zip_longest(*by_place.values()):
            chosen = [head for head in heads if head is not None]
            (weights,) = differentiate(margins[chosen].sum(0), [made], each)  # [query, pos, ...]
            for head in chosen:
                place = self.k.place(head, n_heads)
                of_head = weights[_index(slice(None), 0, slice(None), *place)].double()
                of_keys = self._keys_of_parts(place)  # [part, pos, d_head]
                by_part[head] = torch.einsum("qkd,pkd->qp", of_head, of_keys)
        return torch.stack([by_part[head] for head in range(n_heads)])

    def _keys_of_parts(self, place: tuple[int, ...]) -> Float[Tensor, "part pos d_head"]:
        """Split all keys of a head, or of the group that shares them, over their parts."""
        if place not in self._known:
            vectors = self.k.made[_index(0, slice(None), *place)]
            # a key depends on its own position alone, so that all positions go at once
            n_pos, width = vectors.shape
            each = torch.eye(width, dtype=vectors.dtype, device=vectors.device)
            weights = each[:, None].expand(-1, n_pos, -1)
            written = self.writers.shares(vectors, weights, self.layer)[..., :n_pos]
            constants = self.k.constants[_index(0, slice(None), *place)].double()
            self._known[place] = torch.cat([written.permute(1, 2, 0), constants[None]])
        return self._known[place]


@torch.enable_grad()
def score_layers(model: nn.Module, batch: Batch, layers: Sequence[int]) -> list[LayerScores]:
    """Run one input three times, up to the last of some layers, and read how these make scores.

    The passes are the model's own, whose writers are cut; one in which nothing is written, whose
    queries and keys are what biases make; and one with queries and keys of 0, whose scores are what
    the model adds to them (ALiBi).

    Args:
        model: a model with hook points, in evaluation mode.
        batch: one sequence.
        layers: in order.

    Raises:
        InfoFlowError: if a layer shows no scores, queries or keys.
    """
    writers, held = Writers(model, layers[-1]), HeldNorms()
    sides = [
        name for layer in layers for side in ("q", "k") for name in _points(model, layer, side)
    ]
    scores = attention_hooks(model, layers)
    activations: dict[str, Tensor] = {}

    def keeper(name: str) -> HookFunction:
        def hook_fn(activation: Tensor, hook: Any) -> Tensor:
            # a copy goes on, on which scores depend even where the hook sees a view
            activations[name] = activation.clone()
            return activations[name]

        return hook_fn

    with held:
        cut = [*writers.cut(held), *((name, keeper(name)) for name in sides)]
        own = call(model, batch, scores, edit=cut, keep_graph=True).activations
    chosen = {
        (layer, side): _find_point(model, layer, side, activations)
        for layer in layers
        for side in "qk"
    }
    used = list(chosen.values())
    nothing: list[NamedHook] = [*writers.pin(), *((name, write_nothing) for name in used)]
    with torch.no_grad():
        with HeldNorms(held.statistics):
            silent = call(model, batch, [*used, *scores], edit=list(writers.silence())).activations
        bare = call(model, batch, scores, edit=nothing).activations
    for layer, point in zip(layers, scores, strict=True):
        has_both = all(bool(activations[chosen[layer, side]].any()) for side in "qk")
        if has_both and bare[point].equal(own[point]):
            raise InfoFlowError(
                f"the scores of layer {layer} of the {type(model).__name__} do not depend on what "
                "it shows as queries and keys, so they cannot be split: expected the queries and "
                "keys of which it makes its scores"
            )
    seen = Pass(model, {name: activation.detach() for name, activation in own.items()})
    found = []
    for layer, point in zip(layers, scores, strict=True):
        q, k = (Side(activations[chosen[layer, s]], silent[chosen[layer, s]]) for s in "qk")
        shown, added = (_as_scores(model, layer, run[point][0]) for run in (own, bare))
        names = (*writers.names(layer), CONSTANTS)
        open_scores = seen.scores(layer)[0]
        found.append(LayerScores(layer, open_scores, shown, added, q, k, writers, names))
    return found


def _points(model: nn.Module, layer: int, side: str) -> list[str]:
    """Hook points of queries or keys, that behind their rotation first."""
    tried = (f"blocks.{layer}.attn.hook_{kind}{side}" for kind in ("rot_", ""))
    return [name for name in tried if name in hook_points(model)]


def _find_point(model: nn.Module, layer: int, side: str, activations: dict[str, Tensor]) -> str:
    """Find the hook point that showed queries or keys, as close to their product as any."""
    for name in _points(model, layer, side):
        if name in activations:
            return name
    raise InfoFlowError(
        f"attention layer {layer} of the {type(model).__name__} shows no "
        f"{'queries' if side == 'q' else 'keys'}, so its scores cannot be split: expected "
        "attention whose product of queries and keys can be seen"
    )


def _as_scores(model: nn.Module, layer: int, attention: Tensor) -> Float[Tensor, "head query key"]:
    """Return scores, or where the pattern stands in their place, its logarithm."""
    if hook_semantics(model).scores[layer] == "scores":
        return attention
    # closed keys have no logarithm, and no derivative that is not NaN
    is_open = attention > 0
    return attention.where(is_open, 1).log().masked_fill(~is_open, -torch.inf)


def _index(*places: Any) -> Any:
    """Return an index of several axes."""
    return places


_SINK = 0.5  # of the queries whose first choice is one position, for which it is a sink [chosen]
_FEWEST = 4  # queries that must be there for it [chosen]


@takes_model
@checked
def measure_why(
    model: nn.Module,
    inputs: Inputs,
    layer: int,
    head: int,
    query: int = -1,
    keys: tuple[int, int] | None = None,
) -> Why:
    """Say why a head prefers one key to another: :func:`infoflow_lens.why`, of a model in memory.

    Args:
        model: any Transformer.
        inputs: one sequence: a text, token ids [1, pos] or vectors [1, pos, d_token].
        layer: of the head, from 0, or from -1 backwards.
        head: from 0.
        query: its position, from 0, or from -1 backwards.
        keys: two positions; default, those of the largest score and of the next one that is no
            sink.

    Raises:
        InfoFlowError: for several sequences, places that are not there, keys that the query does
            not see, and layers whose queries, keys or scores are not shown.
    """
    check_one_device(model)
    layer = place(layer, layer_count(model), "layer", "layers")
    batches = read_one(model, inputs)
    rows = list(batches.rows)
    with eval_mode(model):
        (found,) = score_layers(model, batches.whole(), [layer])
        n_heads, n_pos = found.scores.shape[:2]
        head = place(head, n_heads, "head", "heads")
        query = place(query, n_pos, "query", "positions")
        # special tokens on which a head rests are no choice of its own
        sinks = find_sinks(found.open_scores, special_positions(model, rows[0]))
        chosen = _chosen(found, sinks, head, query, keys)
        pieces = found.pieces(head, query, chosen)
    row, added = (x[head, query].double() for x in (found.scores.detach(), found.added))
    names = (*readable_tokens(model, rows)[0], "CLS")
    config = {"probe": "why", "layer": layer, "head": head, "query": query, "keys": list(chosen)}
    return Why(
        # behind the tokens stands CLS, where the model has one
        pieces=pieces,
        query_parts=found.parts,
        key_parts=found.parts,
        margin=float(row[chosen[0]] - row[chosen[1]]),
        added=float(added[chosen[0]] - added[chosen[1]]),
        layer=layer,
        head=head,
        query=query,
        keys=chosen,
        sinks=tuple(sinks[head].nonzero().flatten().tolist()),
        tokens=(names[query], names[chosen[0]], names[chosen[1]]),
        record=RunRecord.from_model(model, config),
    )


@takes_model
@checked
def measure_why_all(model: nn.Module, inputs: Inputs, strongest: Count = STRONGEST) -> WhyAll:
    """Measure why the first key, for every head and query; see :func:`infoflow_lens.why_all`.

    Args:
        model: any Transformer.
        inputs: sequences, as for :func:`run_probes`; each is run alone.
        strongest: how many parts of the keys each line has by name.

    Raises:
        InfoFlowError: for layers whose queries, keys or scores are not shown.
    """
    check_one_device(model)
    found, layers = [], range(layer_count(model))
    names: tuple[str, ...] = ()
    batches = read_inputs(model, inputs)
    for index, row in enumerate(batches.rows):
        # each text alone: parts are tokens and heads of one sequence
        with eval_mode(model):
            scored = score_layers(model, batches.part(index, index + 1).whole(), layers)
            names = scored[-1].parts
            special = special_positions(model, row)
            found.append([_lines(layer, special, names, strongest) for layer in scored])
    # texts and layers differ in length: filled up with what means none
    by_field: dict[str, Any] = {
        field: tuple(
            pad_and_join([lines[layer][field][None].cpu() for lines in found], axes, fill)
            for layer in layers
        )
        for field, axes, fill in (
            ("keys", (2,), -1),
            ("margins", (2,), torch.nan),
            ("parts", (2,), -1),
            ("values", (2,), 0.0),
            ("rest", (2,), torch.nan),
        )
    }
    record = RunRecord.from_model(model, {"probe": "why_all", "strongest": strongest})
    return WhyAll(**by_field, part_names=names, record=record)


def place(asked: int, n: int, name: str, what: str) -> int:
    """Return a place from 0.

    Raises:
        InfoFlowError: for one that is not there.
    """
    if not -n <= asked < n:
        raise InfoFlowError(
            f"{name} is {asked}, but there are {n} {what}: expected 0 to {n - 1}, or -1 to -{n} "
            "from the last backwards"
        )
    return asked % n


def special_positions(model: nn.Module, row: Tensor) -> Bool[Tensor, " pos"]:
    """Find the positions that may be a sink: the first, and those of the tokenizer's own tokens."""
    tokenizer = getattr(model, "tokenizer", None)
    ids = torch.tensor(getattr(tokenizer, "all_special_ids", []), dtype=torch.int64)
    found = torch.isin(row.cpu(), ids) if row.ndim == 1 else torch.zeros(len(row), dtype=torch.bool)
    found[0] = True
    return found


def find_sinks(
    scores: Float[Tensor, "head query key"], special: Bool[Tensor, " pos"]
) -> Bool[Tensor, "head key"]:
    """Find the sink of each head: a special position that most queries choose first.

    Args:
        scores: -inf for closed keys.
        special: positions that may be a sink.
    """
    has_choice = (scores[0] > -torch.inf).sum(dim=-1) > 1
    first = scores[:, has_choice].argmax(dim=-1)
    share = torch.nn.functional.one_hot(first, scores.shape[-1]).float().mean(dim=1)
    may_be = pad(special, (0, scores.shape[-1] - len(special))).to(scores.device)
    return (share > _SINK) & may_be & (int(has_choice.sum()) >= _FEWEST)


def _two_best(
    scores: Float[Tensor, "head query key"], sinks: Bool[Tensor, "head key"]
) -> Int[Tensor, "head query 2"]:
    """Choose for each query the key of the largest score, and the next one that is no sink.

    Where no other is open, the next one; -1 where there is none.
    """
    ranked = rank_keys(scores, (1, 2)) if scores.shape[-1] > 1 else None
    if ranked is None:
        return torch.full((*scores.shape[:2], 2), -1)
    two = ranked.positions.long()
    others = scores.masked_fill(sinks[:, None], -torch.inf)
    # the first choice stays, also where it is a sink, and is no second one
    others = others.scatter(-1, two[..., :1].clamp(min=0), -torch.inf)
    second = rank_keys(others, (1,)).positions.long()
    return torch.cat([two[..., :1], second.where(second >= 0, two[..., 1:])], dim=-1)


def _chosen(
    layer: LayerScores,
    sinks: Bool[Tensor, "head key"],
    head: int,
    query: int,
    keys: tuple[int, int] | None,
) -> tuple[int, int]:
    """Return the two keys.

    Raises:
        InfoFlowError: if the query does not see two keys, or not these.
    """
    row = layer.open_scores[head, query]
    open_ = (row > -torch.inf).nonzero().flatten().tolist()
    if len(open_) < 2:
        raise InfoFlowError(
            f"the query at position {query} has {len(open_)} keys in layer {layer.layer}: expected "
            "at least two to choose from; ask for a later query"
        )
    if keys is None:
        first, second = _two_best(layer.open_scores, sinks)[head, query].tolist()
        return first, second
    one, other = (place(key, len(row), "keys", "positions") for key in keys)
    unseen = [key for key in (one, other) if key not in open_]
    if unseen or one == other:
        why = f"the query does not see key {unseen[0]}" if unseen else "they are the same key"
        raise InfoFlowError(
            f"keys are {one} and {other} for the query at position {query}, but {why}: expected "
            f"two of {', '.join(map(str, open_[:20]))}{', ...' if len(open_) > 20 else ''}"
        )
    return one, other


def _lines(
    layer: LayerScores, special: Bool[Tensor, " pos"], names: Sequence[str], strongest: int
) -> dict[str, Any]:
    """Return the lines of all heads and queries of a layer, with parts numbered by their names."""
    scores = layer.open_scores
    chosen = _two_best(scores, find_sinks(scores, special)).to(scores.device)
    none = (chosen < 0).any(dim=-1)
    at = chosen.clamp(min=0)
    by_part = layer.lines(at)
    picked = scores.gather(-1, at).double()
    margins = picked[..., 0] - picked[..., 1]
    n_shown = min(strongest, len(layer.parts))
    order = by_part.abs().argsort(dim=-1, descending=True, stable=True)[..., :n_shown]
    values = by_part.gather(-1, order)
    numbers = torch.tensor([names.index(name) for name in layer.parts], device=order.device)
    # lower layers have fewer parts, and are filled up to the width of the highest
    missing = (0, min(strongest, len(names)) - n_shown)
    return {
        "keys": chosen.masked_fill(none[..., None], -1),
        "margins": margins.masked_fill(none, torch.nan),
        "parts": pad(numbers[order], missing, value=-1).masked_fill(none[..., None], -1),
        "values": pad(values, missing).masked_fill(none[..., None], 0),
        # with what the model adds whatever the states are, and what is no sum of products
        "rest": (margins - values.sum(-1)).masked_fill(none, torch.nan),
    }
