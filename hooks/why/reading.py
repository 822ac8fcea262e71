"""How a layer makes scores of the residual stream while the scale of its norm is held.

Then queries and keys are linear in the stream, and a score is linear in either. Weights say how;
what they leave open (centring, offsets of gains, pairs of rotary features, the factor of the
scores) is found once by running the model, and compared with the scores that it shows.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.hooks.model.call import without_user_hooks
from infoflow_lens.hooks.model.inputs import example_input
from infoflow_lens.hooks.model.points import found_once, layer_count
from infoflow_lens.hooks.model.semantics import attention_hook, hook_semantics
from infoflow_lens.hooks.passes.run import run
from infoflow_lens.hooks.passes.view import Needs, Pass

Gain = Literal["none", "weight", "one plus weight"]
_ROTATIONS = tuple(product(("first half", "every other", "whole"), ("halves", "adjacent")))
_LINEAR = 1e-4  # how far queries, keys and scores may lie from those of a reading, in float32


@dataclass(frozen=True)
class Reading:
    """What the weights of a layer leave open.

    Attributes:
        centred: whether its norm takes the mean off, as a layer norm does and an RMS norm does not.
        gain: what the norm multiplies by.
        rotation: which columns of the tables of cosines and sines are the angles, and which
            features are a pair; None without rotary embeddings.
        factor: of the scores, such as 1 / sqrt(d_head).
    """

    centred: bool = False
    gain: Gain = "none"
    rotation: tuple[str, str] | None = None
    factor: float = 1.0


class Layer:
    """One layer in a pass, of its first sequence, in float64.

    Attributes:
        stream: [pos, d_model], the residual stream that enters it.
        has_norm: whether a norm stands before it.
        scale: [pos, 1], what the norm multiplies by beside its gain, as queries and keys show it.
        queries: [pos, head, d_head], before rotation.
        keys: [pos, head, d_head], those of groups for each of their heads.
        scores: [head, query, key], -inf for keys that a query may not see.
        W_Q, W_K: [head, d_model, d_head].
    """

    def __init__(self, seen: Pass, layer: int, reading: Reading) -> None:
        self.seen, self.layer = seen, layer
        blocks: Any = seen.model.blocks
        self.block, self.attn = blocks[layer], blocks[layer].attn
        self.stream = exact(seen.state(layer, "resid_pre")[0])
        self.scores = exact(seen.scores(layer)[0])
        n_heads = len(self.scores)
        self.W_Q, self.W_K = (self._of_heads(name, n_heads) for name in ("W_Q", "W_K"))
        self.queries, self.keys = (
            self._split(name, n_heads) for name in ("attn.hook_q", "attn.hook_k")
        )
        norm = getattr(self.block, "ln1", None)
        self.has_norm = norm is not None and not isinstance(norm, nn.Identity)
        self._hold(reading)

    def read_as(self, reading: Reading) -> "Layer":
        """The same layer with another reading."""
        other = copy.copy(self)
        other._hold(reading)
        return other

    def _hold(self, reading: Reading) -> None:
        """Find the scale of the norm, position by position."""
        self.reading, self.scale = reading, torch.ones_like(self.stream[:, :1])
        if self.has_norm:
            made, shown = self._queries_and_keys()
            size = made.square().sum(dim=1, keepdim=True)
            self.scale = torch.where(size > 0, (made * shown).sum(dim=1, keepdim=True) / size, 1)

    @staticmethod
    def points(model: nn.Module, layer: int) -> tuple[str, ...]:
        """The hook points that are read, of those that the model has."""
        known: Any = model.hook_dict
        names = ("hook_resid_pre", "attn.hook_q", "attn.hook_k", *_TABLES)
        points = [f"blocks.{layer}.{name}" for name in names]
        return (*(name for name in points if name in known), attention_hook(model, layer))

    def normed(
        self, parts: Float[Tensor, "*part pos d_model"], at: Int[Tensor, " pos"] | None = None
    ) -> Float[Tensor, "*part pos d_model"]:
        """What the norm makes of parts of the stream, without its bias.

        Args:
            parts: of the stream.
            at: their positions; default, all.
        """
        if not self.has_norm:
            return parts
        if self.reading.centred:
            parts = parts - parts.mean(dim=-1, keepdim=True)
        gain = self._gain(self.reading.gain)[0]
        scaled = parts * (self.scale if at is None else self.scale[at])
        return scaled if gain is None else scaled * gain

    @property
    def norm_bias(self) -> Float[Tensor, " d_model"] | None:
        """The bias of the norm."""
        return self._gain(self.reading.gain)[1] if self.has_norm else None

    def bias(self, name: str) -> Float[Tensor, "head d_head"] | None:
        """b_Q or b_K."""
        found = getattr(self.attn, name, None)
        return _for_each_head(exact(found), len(self.W_Q)) if isinstance(found, Tensor) else None

    def rotated(
        self, vectors: Float[Tensor, "*any pos d_head"], at: Int[Tensor, " pos"]
    ) -> Float[Tensor, "*any pos d_head"]:
        """Parts of queries or keys as the rotary embedding turns them at these positions."""
        if self.reading.rotation is None:
            return vectors
        take, pairing = self.reading.rotation
        tables = self.tables()
        assert tables is not None
        cos, sin = (_taken(table, take)[at] for table in tables)
        n = cos.shape[-1]
        if pairing == "halves":
            one, other = vectors[..., :n], vectors[..., n : 2 * n]
            turned = torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)
        else:
            one, other = vectors[..., : 2 * n : 2], vectors[..., 1 : 2 * n : 2]
            both = torch.stack([one * cos - other * sin, other * cos + one * sin], dim=-1)
            turned = both.flatten(-2)
        return torch.cat([turned, vectors[..., 2 * n :]], dim=-1)

    def tables(self) -> tuple[Float[Tensor, "pos angle"], Float[Tensor, "pos angle"]] | None:
        """Cosines and sines by position, as the model has them; None if it shows none."""
        n_pos = len(self.stream)
        cos, sin = getattr(self.attn, "rotary_cos", None), getattr(self.attn, "rotary_sin", None)
        if isinstance(cos, Tensor) and isinstance(sin, Tensor):  # TransformerLens's own attention
            return exact(cos[:n_pos]), exact(sin[:n_pos])
        shown = [self._shown(name) for name in _TABLES]
        if shown[0] is not None and shown[1] is not None:
            return shown[0], shown[1]
        behind = getattr(self.attn, "original_component", None)
        both = getattr(behind, "embed_positions", None)  # of GPT-J and CodeGen
        if not isinstance(both, Tensor):
            return None
        half = both.shape[-1] // 2
        return exact(both[:n_pos, half:]), exact(both[:n_pos, :half])

    def _shown(self, name: str) -> Tensor | None:
        point = f"blocks.{self.layer}.{name}"
        return None if self.seen.lacks([point]) else exact(self.seen.activation(point)[0])

    def _of_heads(self, name: str, n_heads: int) -> Tensor:
        found = getattr(self.attn, name, None)
        if not isinstance(found, Tensor) or found.ndim != 3:
            raise refusal(self.seen.model, self.layer, f"it has no {name}")
        return _for_each_head(exact(found), n_heads)

    def _split(self, name: str, n_heads: int) -> Tensor:
        found = self._shown(name)
        if found is None:
            raise refusal(self.seen.model, self.layer, f"{name} does not fire")
        d_head = self.W_Q.shape[-1]
        return _for_each_head(found.reshape(len(found), -1, d_head), n_heads, 1)

    def _gain(self, kind: Gain) -> tuple[Tensor | None, Tensor | None]:
        """What the norm multiplies by and adds."""
        weight, bias = (getattr(self.block.ln1, name, None) for name in ("w", "b"))
        if kind == "none" or not isinstance(weight, Tensor):
            return None, None
        gain = exact(weight) + (kind == "one plus weight")
        return gain, exact(bias) if isinstance(bias, Tensor) else None

    def apart(self) -> float:
        """How far its queries and keys lie from those of the reading, as a share of their size."""
        return _apart(*self._queries_and_keys())

    def _queries_and_keys(self) -> tuple[Float[Tensor, "pos any"], Float[Tensor, "pos any"]]:
        """Those of the normed stream and those that the model shows, without biases, together."""
        normed, made, shown = self.normed(self.stream), [], []
        for weight, name, vectors in (
            (self.W_Q, "b_Q", self.queries),
            (self.W_K, "b_K", self.keys),
        ):
            made.append(torch.einsum("pm,hmd->phd", normed, weight).flatten(1))
            for bias in (self.bias(name), self._through(self.norm_bias, weight)):
                vectors = vectors if bias is None else vectors - bias
            shown.append(vectors.flatten(1))
        return torch.cat(made, dim=1), torch.cat(shown, dim=1)

    @staticmethod
    def _through(bias: Tensor | None, weight: Tensor) -> Tensor | None:
        return None if bias is None else torch.einsum("m,hmd->hd", bias, weight)

    def products(self) -> Float[Tensor, "head query key"]:
        """Products of the queries and keys that the model shows, rotated, without the factor."""
        every = torch.arange(len(self.stream), device=self.stream.device)
        turned = (self.rotated(x.transpose(0, 1), every) for x in (self.queries, self.keys))
        return torch.einsum("hqd,hkd->hqk", *turned)


_TABLES = ("attn.hook_cos", "attn.hook_sin")


def exact(values: Tensor) -> Tensor:
    """In float64, on a device that has it."""
    values = values.detach()
    return (values.cpu() if values.device.type == "mps" else values).double()


def _for_each_head(values: Tensor, n_heads: int, axis: int = 0) -> Tensor:
    return values.repeat_interleave(n_heads // values.shape[axis], dim=axis)


def _taken(table: Tensor, take: str) -> Tensor:
    if take == "whole":
        return table
    return table[..., ::2] if take == "every other" else table[..., : table.shape[-1] // 2]


def _apart(made: Tensor, shown: Tensor) -> float:
    size = float(shown.norm())
    return float((made - shown).norm()) / size if size else float(made.norm() > 0)


@found_once
def readings(model: nn.Module) -> tuple[Reading, ...]:
    """How each layer makes scores, found once by running the model.

    Raises:
        InfoFlowError: if a layer does so in another way, with what stands in between.
    """
    n_layers = layer_count(model)
    points = [name for layer in range(n_layers) for name in Layer.points(model, layer)]
    tokens = example_input(model, n_sequences=1)
    with eval_mode(model), without_user_hooks(model):
        seen = run(model, tokens, Needs(tuple(dict.fromkeys(points))))
        return tuple(_reading(seen, layer) for layer in range(n_layers))


def _reading(seen: Pass, layer: int) -> Reading:
    half = next(seen.model.parameters()).dtype in (torch.float16, torch.bfloat16)
    bar = 0.05 if half else _LINEAR
    shown = Layer(seen, layer, Reading())
    kinds: tuple[Gain, ...] = ("none", "weight", "one plus weight")
    tried = [shown]
    if shown.has_norm:
        tried = [shown.read_as(Reading(*kind)) for kind in product((True, False), kinds)]
    apart = [candidate.apart() for candidate in tried]
    nearest = tried[apart.index(min(apart))]
    if not min(apart) <= bar:
        raise refusal(
            seen.model,
            layer,
            "queries and keys are not linear in the residual stream while the norm's scale is held",
        )
    best = min(_scored(nearest), key=lambda pair: pair[0])
    if not best[0] <= bar:
        raise refusal(seen.model, layer, "scores are not products of these queries and keys")
    return best[1]


def _scored(layer: Layer) -> Iterator[tuple[float, Reading]]:
    """Each reading of the rotation, and how far the scores lie from it."""
    tables, d_head = layer.tables(), layer.W_Q.shape[-1]
    seen = layer.scores > -torch.inf
    by_weight = hook_semantics(layer.seen.model).scores[layer.layer] != "scores"
    shown = _compared(layer.scores, seen, by_weight)
    for rotation in (None, *(_ROTATIONS if tables is not None else ())):
        if rotation is not None and tables is not None:
            n_pairs = _taken(tables[0], rotation[0]).shape[-1]
            if 2 * n_pairs > d_head:
                continue
        kind = layer.reading
        turned = layer.read_as(Reading(kind.centred, kind.gain, rotation))
        made = _compared(turned.products(), seen, by_weight)
        square = float(made.square().sum())
        factor = float((made * shown).sum()) / square if square else 1.0
        yield _apart(factor * made, shown), Reading(kind.centred, kind.gain, rotation, factor)


def _compared(scores: Tensor, seen: Tensor, by_weight: bool) -> Tensor:
    """Scores of open keys; of logarithms of weights, what does not depend on their sum."""
    open_ = scores.masked_fill(~seen, 0)
    if by_weight:
        means = open_.sum(dim=-1, keepdim=True) / seen.sum(dim=-1, keepdim=True).clamp(min=1)
        open_ = (open_ - means).masked_fill(~seen, 0)
    return open_


def refusal(model: nn.Module, layer: int, reason: str) -> InfoFlowError:
    """Why scores of this model cannot be split, with what is known to stand in the way."""
    causes = ", ".join(_causes(model, layer))
    return InfoFlowError(
        f"{type(model).__name__} cannot be asked why a head prefers a key: in layer {layer} "
        f"{reason}{f' (the model has {causes})' if causes else ''}. Expected scores that are sums "
        "of products of what wrote the residual stream; PatternsProbe shows the scores themselves"
    )


def _causes(model: nn.Module, layer: int) -> Iterator[str]:
    blocks: Any = model.blocks
    attn = getattr(blocks[layer], "attn", None)
    behind = getattr(attn, "original_component", None)
    cfg: Any = getattr(model, "cfg", None)
    config: Any = getattr(getattr(model, "original_model", None), "config", None)
    if getattr(cfg, "use_qk_norm", False) or getattr(attn, "q_norm", None) is not None:
        yield "norms of queries and keys"
    cap = getattr(behind, "attn_logit_softcapping", None) or getattr(
        cfg, "attn_scores_soft_cap", None
    )
    if cap is not None and cap > 0:
        yield "a soft cap on its scores"
    alibi = getattr(config, "alibi", False) or "bloom" in str(getattr(config, "model_type", ""))
    if alibi or getattr(cfg, "positional_embedding_type", None) == "alibi":
        yield "ALiBi"
    if getattr(cfg, "positional_embedding_type", None) == "shortformer":
        yield "positions that are added to queries and keys alone"
    if getattr(cfg, "clip_qkv", None) is not None:
        yield "clipped queries and keys"
    if hook_semantics(model).adds is False:
        yield "norms behind the sums"
    if hasattr(blocks[layer], "ln1_post"):
        yield "norms on what attention adds"
