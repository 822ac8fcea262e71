"""The config of an attention-only model over token ids, in the terms of Chen & Zou 2024."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.names import nearest
from infoflow_lens.models.attention import ATTENTION_KINDS, AttentionKind

TokenInit = Literal["random", "chen_zou"]
TOKEN_INITS: tuple[TokenInit, ...] = get_args(TokenInit)


@dataclass(frozen=True, kw_only=True)
class TokenArchitecture:
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
        InfoFlowError: for a size below 1, or an unknown kind of attention.
    """

    n_heads: tuple[int, ...]
    d_head: int
    d_model: int
    n_tokens: int
    d_vocab: int
    d_output: int
    attention: AttentionKind = "relu"

    def __post_init__(self) -> None:
        heads = tuple(self.n_heads) if isinstance(self.n_heads, (tuple, list)) else (self.n_heads,)
        if not heads or not all(map(_is_size, heads)):
            raise InfoFlowError(
                f"n_heads is {self.n_heads!r}: expected integers of at least 1, one for each layer"
            )
        object.__setattr__(self, "n_heads", heads)
        for name in ("d_head", "d_model", "n_tokens", "d_vocab", "d_output"):
            if not _is_size(value := getattr(self, name)):
                raise InfoFlowError(f"{name} is {value!r}: expected an integer of at least 1")
        if self.attention not in ATTENTION_KINDS:
            raise InfoFlowError(
                f"attention is {self.attention!r}{nearest(self.attention, ATTENTION_KINDS)}"
            )

    @classmethod
    def of_layers(
        cls, n_layers: int, n_heads: int | tuple[int, ...] | list[int], **sizes: Any
    ) -> TokenArchitecture:
        """With `n_heads` in each of `n_layers`, or one number for each layer.

        Raises:
            InfoFlowError: if there are not `n_layers` numbers; and see the class.
        """
        if not _is_size(n_layers):
            raise InfoFlowError(f"n_layers is {n_layers!r}: expected an integer of at least 1")
        heads = tuple(n_heads) if isinstance(n_heads, (tuple, list)) else (n_heads,) * n_layers
        if len(heads) != n_layers:
            raise InfoFlowError(
                f"n_heads has {len(heads)} entries for {n_layers} layers: give one number, or one "
                "for each layer"
            )
        return cls(n_heads=heads, **sizes)

    @property
    def n_layers(self) -> int:
        """L, the number of attention layers."""
        return len(self.n_heads)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-compatible values, and ``kind``, which a vector model has not."""
        return {"kind": "token", **asdict(self), "n_heads": list(self.n_heads)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TokenArchitecture:
        """The inverse of :meth:`to_dict`.

        Raises:
            InfoFlowError: for a name that is no field.
        """
        known = {field.name for field in fields(cls)}
        given = {name: value for name, value in values.items() if name != "kind"}
        if unknown := sorted(set(given) - known):
            raise InfoFlowError(
                f"unknown architecture fields {unknown}: expected some of {sorted(known)}"
            )
        return cls(**given)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
