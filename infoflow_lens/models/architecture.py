"""The config of a hosted model, in the terms of the papers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.theory.shapes import shape_of

ActivationName = Literal["tanh", "relu", "gelu", "square"]
PositionalEmbedding = Literal["none", "learned"]
Normalization = Literal["none", "LN"]
AttentionName = Literal["softmax", "relu", "hardmax"]
InitMode = Literal["gpt2", "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "act_fn": ("tanh", "relu", "gelu", "square"),
    "positional_embedding": ("none", "learned"),
    "normalization": ("none", "LN"),
    "attention": ("softmax", "relu", "hardmax"),
    "init_mode": (
        "gpt2",
        "xavier_uniform",
        "xavier_normal",
        "kaiming_uniform",
        "kaiming_normal",
    ),
}


@dataclass(frozen=True)
class Architecture:
    """A Transformer over vector tokens that is read at a CLS token (Sec. 3, eqs 1-2).

    Attributes:
        n_heads: heads of every layer, h_1 .. h_L; its length is the number of layers.
        d_model: width of the residual stream, E in the paper.
        d_token: dimension of an input token, d.
        n_tokens: number of input tokens, T; the CLS token comes on top as position T.
        d_head: per-head dimension n_l of every layer; default, ``d_model / n_heads[l]``.
        d_mlp: hidden width of the feed-forward networks; 0 for an attention-only model.
        d_output: dimension of the output read at CLS.
        d_encoder: hidden width of a two-layer encoder; None for a linear one.
        act_fn: activation of feed-forward networks and encoder. The theory asks for a sigmoidal
            one (tanh); "square" makes exact products, as x y = ((x + y)^2 - (x - y)^2) / 4.
        positional_embedding: "learned" adds a trained vector a position; "none" leaves the
            model permutation-invariant.
        normalization: "none" (the theory's model) or "LN".
        attn_scale: beta, the factor on q.k before the softmax; default ``1 / sqrt(d_head)``.
        cls_is_key: whether positions may attend to CLS. In eq 1 they may not.
        attention: how scores become a pattern, "softmax" (the papers'), "relu" or "hardmax"; see
            :mod:`infoflow_lens.models.attention`.
        init_mode: TransformerLens's name of the weight initialisation.

    Raises:
        InfoFlowError: for a size below 1, heads that do not divide `d_model` while `d_head` is
            not given, an unknown choice, or a tuple of the wrong length.
    """

    n_heads: tuple[int, ...]
    d_model: int
    d_token: int
    n_tokens: int
    d_head: tuple[int, ...] | None = None
    d_mlp: int = 64
    d_output: int = 1
    d_encoder: int | None = None
    act_fn: ActivationName = "gelu"
    positional_embedding: PositionalEmbedding = "none"
    normalization: Normalization = "none"
    attn_scale: float | None = None
    cls_is_key: bool = False
    attention: AttentionName = "softmax"
    init_mode: InitMode = "gpt2"

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_heads", _as_tuple("n_heads", self.n_heads))
        if self.d_head is not None:
            object.__setattr__(self, "d_head", _as_tuple("d_head", self.d_head))
        for name in ("d_model", "d_token", "n_tokens", "d_output", "d_encoder", "d_mlp"):
            value, least = getattr(self, name), 0 if name == "d_mlp" else 1
            if value is None and name == "d_encoder":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InfoFlowError(f"{name} is {value!r}: expected an integer of at least {least}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise InfoFlowError(
                    f"{name} is {getattr(self, name)!r}: expected one of {', '.join(choices)}"
                )
        if self.attn_scale is not None and not 0 < self.attn_scale < math.inf:
            raise InfoFlowError(
                f"attn_scale is {self.attn_scale!r}: expected a positive number (beta), or None "
                "for 1 / sqrt(d_head)"
            )
        if self.d_head is None:
            for layer, heads in enumerate(self.n_heads):
                if self.d_model % heads:
                    raise InfoFlowError(
                        f"n_heads[{layer}] is {heads}, which does not divide d_model "
                        f"{self.d_model}: choose a divisor, or give d_head for every layer"
                    )
        elif len(self.d_head) != len(self.n_heads):
            raise InfoFlowError(
                f"d_head has {len(self.d_head)} entries for {len(self.n_heads)} layers "
                f"(n_heads {self.n_heads}): give one for each layer, or None"
            )

    @property
    def n_layers(self) -> int:
        """L, the number of attention layers."""
        return len(self.n_heads)

    @property
    def head_dimensions(self) -> tuple[int, ...]:
        """n_l, the per-head dimension of every layer."""
        return self.d_head or tuple(self.d_model // heads for heads in self.n_heads)

    @classmethod
    def like(cls, model: Any, *, d_token: int, n_tokens: int, **settings: Any) -> Architecture:
        """Heads, widths and positions of another model, over vector tokens: to be trained.

        Masks are not kept: tokens see all tokens, and CLS is read. The theory asks about the model
        as it is; see :func:`infoflow_lens.theory.shapes.shape_of`.

        Args:
            model: what `shape_of` takes: a config or model of TransformerLens or Hugging Face, or a
                folder with a config.
            d_token, n_tokens: of the tokens.
            settings: other fields, in place of the model's.

        Raises:
            InfoFlowError: for what tells no sizes, or layers of several widths.
        """
        shape = shape_of(model)
        if len(set(shape.d_model)) > 1:
            raise InfoFlowError(
                f"the layers of {shape.source} have widths {shape.d_model}: expected one width"
            )
        width = shape.d_model[0]
        own = {
            "n_heads": shape.n_heads,
            "d_model": width,
            "d_head": shape.d_head,
            "d_mlp": 4 * width if shape.has_mlp else 0,
            "positional_embedding": "learned" if shape.positional else "none",
        }
        return cls(d_token=d_token, n_tokens=n_tokens, **{**own, **settings})

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-compatible values."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(self).items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Architecture:
        """The inverse of :meth:`to_dict`.

        Raises:
            InfoFlowError: for a name that is no field.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise InfoFlowError(
                f"unknown architecture fields {unknown}: expected some of {sorted(known)}"
            )
        return cls(**values)


def _as_tuple(name: str, value: Any) -> tuple[int, ...]:
    entries = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not entries or any(
        not isinstance(entry, int) or isinstance(entry, bool) or entry < 1 for entry in entries
    ):
        raise InfoFlowError(
            f"{name} is {value!r}: expected integers of at least 1, one for each layer"
        )
    return entries
