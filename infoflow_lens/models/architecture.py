"""The configs of hosted models, in the terms of the papers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from annotated_types import MinLen

from infoflow_lens.foundation.errors import InfoFlowError, refuse_names
from infoflow_lens.foundation.naming import check_known
from infoflow_lens.foundation.settings import (
    Count,
    Index,
    Positive,
    Remedy,
    check_fields,
    checked,
    plain,
)

ActivationName = Literal["tanh", "relu", "gelu", "square"]
PositionalEmbedding = Literal["none", "learned"]
Normalization = Literal["none", "LN"]
AttentionKind = Literal["softmax", "relu", "hardmax"]
InitMode = Literal["gpt2", "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal"]
TokenInit = Literal["random", "chen_zou"]

ByLayer = Annotated[tuple[Count, ...], MinLen(1), Remedy("one for each layer")]


ArchitectureT = TypeVar("ArchitectureT", bound="_OfLayers")


class _OfLayers:
    """What architectures share: checked fields, a number of heads for each layer, JSON."""

    kind: ClassVar[str | None] = None  # what saved models of this architecture say
    n_heads: tuple[int, ...]

    def __post_init__(self) -> None:
        if isinstance(plain(self.n_heads), int):  # of a single layer
            object.__setattr__(self, "n_heads", (self.n_heads,))
        check_fields(self)

    @property
    def n_layers(self) -> int:
        """L, the number of attention layers."""
        return len(self.n_heads)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-compatible values, and the ``kind``, if there is one."""
        kind = {} if self.kind is None else {"kind": self.kind}
        values = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()  # type: ignore[call-overload]
        }
        return {**kind, **values}

    @classmethod
    def from_dict(cls: type[ArchitectureT], values: Mapping[str, Any]) -> ArchitectureT:
        """Return the inverse of :meth:`to_dict`.

        Raises:
            InfoFlowError: for a name that is no field, or a field that is missing.
        """
        given = {name: value for name, value in values.items() if name != "kind"}
        known = {item.name: item.default for item in fields(cls)}  # type: ignore[arg-type]
        check_known(given, known, "the architecture", "field")
        if missing := [name for name in known if known[name] is MISSING and name not in given]:
            raise InfoFlowError(f"the architecture lacks {', '.join(missing)}: expected all sizes")
        return cls(**given)


@dataclass(frozen=True)
class Architecture(_OfLayers):
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
        act_fn: activation of feed-forward networks and encoder. The theory assumes a sigmoidal
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
        InfoFlowError: for a value that its annotation does not allow, heads that do not divide
            `d_model` while `d_head` is not given, or a `d_head` of another number of layers.
    """

    n_heads: ByLayer
    d_model: Count
    d_token: Count
    n_tokens: Count
    d_head: ByLayer | None = None
    d_mlp: Index = 64
    d_output: Count = 1
    d_encoder: Count | None = None
    act_fn: ActivationName = "gelu"
    positional_embedding: PositionalEmbedding = "none"
    normalization: Normalization = "none"
    attn_scale: Positive | None = None
    cls_is_key: bool = False
    attention: AttentionKind = "softmax"
    init_mode: InitMode = "gpt2"

    def __post_init__(self) -> None:
        super().__post_init__()
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
                f"(n_heads {self.n_heads}): expected one for each layer, or None"
            )

    @property
    def head_dimensions(self) -> tuple[int, ...]:
        """n_l, the per-head dimension of every layer."""
        return self.d_head or tuple(self.d_model // heads for heads in self.n_heads)


@refuse_names(of_layers="from_layers")
@dataclass(frozen=True, kw_only=True)
class TokenArchitecture(_OfLayers):
    """An attention-only Transformer over token ids, read at the last position (eq 2).

    Bidirectional, without normalization, biases or a factor on the scores.

    Attributes:
        n_heads: heads of every layer; its length is the number of layers.
        d_head: dimension of queries, keys and values of a head; the paper's is `d_model`.
        d_model: d', the width of the residual stream.
        n_tokens: n, the largest number of tokens.
        d_vocab: d, the number of token ids.
        d_output: C, the number of labels.
        attention: how scores become a pattern, "relu" (the paper's), "softmax" or "hardmax".

    Raises:
        InfoFlowError: for a value that its annotation does not allow.
    """

    kind: ClassVar[str | None] = "token"

    n_heads: ByLayer
    d_head: Count
    d_model: Count
    n_tokens: Count
    d_vocab: Count
    d_output: Count
    attention: AttentionKind = "relu"

    @classmethod
    @checked
    def from_layers(
        cls, n_layers: Count, n_heads: Count | tuple[Count, ...], **sizes: Any
    ) -> TokenArchitecture:
        """Make one with `n_heads` in each of `n_layers`, or one number for each layer.

        Raises:
            InfoFlowError: if there are not `n_layers` numbers; and see the class.
        """
        heads = n_heads if isinstance(n_heads, tuple) else (n_heads,) * n_layers
        if len(heads) != n_layers:
            raise InfoFlowError(
                f"n_heads has {len(heads)} entries for {n_layers} layers: expected one number, or "
                "one for each layer"
            )
        return cls(n_heads=heads, **sizes)
