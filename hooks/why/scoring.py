"""How layers make scores of queries and keys, and these of what wrote the stream."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.hooks.model.call import HookFunction, NamedHook, call
from infoflow_lens.hooks.model.inputs import Batch
from infoflow_lens.hooks.model.points import hook_points
from infoflow_lens.hooks.model.semantics import attention_hooks, hook_semantics
from infoflow_lens.hooks.passes.view import Pass
from infoflow_lens.hooks.shares.norms import HeldNorms
from infoflow_lens.hooks.shares.writers import Writers, differentiate, write_nothing

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
        cut = [*writers.cut(), *((name, keeper(name)) for name in sides)]
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
        found.append(
            LayerScores(
                layer,
                seen.scores(layer)[0],
                _as_scores(model, layer, own[point][0]),
                _as_scores(model, layer, bare[point][0]),
                q,
                k,
                writers,
                (*writers.names(layer), CONSTANTS),
            )
        )
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
    """Scores, or where the pattern stands in their place, its logarithm."""
    if hook_semantics(model).scores[layer] == "scores":
        return attention
    # closed keys have no logarithm, and no derivative that is not NaN
    is_open = attention > 0
    return attention.where(is_open, 1).log().masked_fill(~is_open, -torch.inf)


def _index(*places: Any) -> Any:
    """Return an index of several axes."""
    return places
