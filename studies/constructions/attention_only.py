"""The attention-only networks of Chen & Zou 2024 (eq 2) as data, and their hosting.

In the paper's notation the columns of H are positions and **the column is the destination**: S[src,
dest] = relu(H^T W_QK H), H += (1/m) sum_i W_V,i H S_i, logits = W_O H[:, n-1]. So W_QK acts on
source and destination, in this order, which is the reverse of query and key. A column holds, from
the top: token rows (one-hot), position rows (one-hot), padding.

Matrices come in factors, W_QK = key query^T and W_V = write read^T, which is what a
HookedTransformer holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.models.architecture import AttentionKind, TokenArchitecture
from infoflow_lens.models.hooked import HookedModel
from infoflow_lens.models.host import zero_model

_LARGEST_IN_FLOAT32 = 2.0**22  # sums of a few such integers are exact
_LARGEST_SQUARE_IN_FLOAT64 = 2**52  # u.x - |u|^2 / 2 is then exact, halves included


@dataclass(frozen=True, eq=False)
class Head:
    """One head in factors.

    Attributes:
        key: [d_model, rank], what the source shows.
        query: [d_model, rank], what the destination asks; the score is their inner product.
        read: [d_model, rank], what is read at the source.
        write: [d_model, rank], where it is written at the destination.
    """

    key: Float[Tensor, "d_model score_rank"]
    query: Float[Tensor, "d_model score_rank"]
    read: Float[Tensor, "d_model value_rank"]
    write: Float[Tensor, "d_model value_rank"]

    @property
    def qk(self) -> Float[Tensor, "d_model d_model"]:
        """W_QK of the paper, source by destination."""
        return self.key @ self.query.T

    @property
    def v(self) -> Float[Tensor, "d_model d_model"]:
        """W_V of the paper."""
        return self.write @ self.read.T


@dataclass(frozen=True)
class Rows:
    """Where things stand in a column: tokens, then positions, then padding.

    Attributes:
        d_vocab: d, the number of token rows.
        n_tokens: n, the number of position rows.
        padding: rows behind.
    """

    d_vocab: int
    n_tokens: int
    padding: int = 0

    @property
    def d_model(self) -> int:
        """d', all rows."""
        return self.d_vocab + self.n_tokens + self.padding

    @property
    def tokens(self) -> range:
        """Rows 0 .. d - 1."""
        return range(self.d_vocab)

    @property
    def positions(self) -> range:
        """Rows P .. P + n - 1."""
        return range(self.d_vocab, self.d_vocab + self.n_tokens)

    @property
    def rest(self) -> range:
        """Rows R .. d' - 1, the padding."""
        return range(self.d_vocab + self.n_tokens, self.d_model)

    @property
    def last_position(self) -> int:
        """Row P + n - 1, which is 1 at the response sign."""
        return self.positions[-1]

    def units(self, rows: Sequence[int]) -> Float[Tensor, "d_model row"]:
        """Return unit vectors, a column for each of `rows`."""
        units = torch.zeros(self.d_model, len(rows))
        units[list(rows), torch.arange(len(rows))] = 1
        return units

    def vector(self, rows: Sequence[int], values: Sequence[float]) -> Float[Tensor, "d_model 1"]:
        """Return a column with `values` at `rows`; where a row comes twice, their sum."""
        given = torch.tensor([*map(float, values)], dtype=torch.float64)
        column = torch.zeros(self.d_model, 1, dtype=torch.float64)
        column[:, 0].index_add_(0, torch.tensor(list(rows)), given)
        default = torch.get_default_dtype()  # which the other columns have
        # float64 only where the default type would round
        exact = bool((given.to(default).double() == given).all())
        return column.to(default) if exact else column

    def score_positions(
        self, alpha: Float[Tensor, "source destination"]
    ) -> tuple[Float[Tensor, "d_model pos"], Float[Tensor, "d_model pos"]]:
        """Return key and query of the score alpha[src, dest], by one-hot positions (Lemma 1)."""
        places = self.units(self.positions)
        # rank i shows source i, which destination j weighs by alpha[i, j]
        return places, places @ alpha.T.to(places)


@dataclass(frozen=True, eq=False)
class AttentionOnly:
    """An attention-only network of the paper.

    Attributes:
        rows: the layout of a column.
        layers: the heads of every layer; each layer averages over its own.
        classifier: W_O, [label, d_model], read at the last position.
        attention: "relu" as in the paper, or "softmax" (its Sec. 16).
    """

    rows: Rows
    layers: tuple[tuple[Head, ...], ...]
    classifier: Float[Tensor, "label d_model"]
    attention: AttentionKind = "relu"

    def columns(self, x: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch d_model pos"]:
        """Return H^(0) of token ids (eq 3): one-hot token, one-hot position, zeros."""
        token = torch.nn.functional.one_hot(x, self.rows.d_vocab).to(self.classifier.dtype)
        position = torch.eye(self.rows.n_tokens).to(token).expand(len(x), -1, -1)
        padding = token.new_zeros(*x.shape, self.rows.padding)
        return torch.cat([token, position, padding], dim=-1).transpose(1, 2)

    def host(self) -> HookedModel:
        """Host the same function as a model whose ``logits[:, -1]`` is the paper's o.

        In float32, or in float64 where entries beyond 2^22 would be rounded. Layers with fewer
        heads than the largest have heads of zero weights on top, which move nothing: a
        HookedTransformer has one number of heads.
        """
        heads = [head for layer in self.layers for head in layer]
        # heads of one size, as the hosted model has them; smaller factors are filled with zeros
        d_head = max(max(head.key.shape[1], head.read.shape[1]) for head in heads)
        architecture = TokenArchitecture.from_layers(
            len(self.layers),
            max(map(len, self.layers)),
            d_head=d_head,
            d_model=self.rows.d_model,
            n_tokens=self.rows.n_tokens,
            d_vocab=self.rows.d_vocab,
            d_output=len(self.classifier),
            attention=self.attention,
        )
        model: Any = zero_model(architecture)
        # integers beyond 2^24 are not exact in float32
        entries = [self.classifier, *(part for head in heads for part in (head.read, head.write))]
        if max(float(part.abs().max()) for part in entries) >= _LARGEST_IN_FLOAT32:
            model.to(torch.float64, print_details=False)
        with torch.no_grad():
            model.embed.W_E.copy_(self.rows.units(self.rows.tokens).T)
            model.pos_embed.W_pos.copy_(self.rows.units(self.rows.positions).T)
            model.unembed.W_U.copy_(self.classifier.T)
            for block, layer in zip(model.blocks, self.layers, strict=True):
                for index, head in enumerate(layer):
                    scores, values = head.key.shape[1], head.read.shape[1]
                    block.attn.W_K[index, :, :scores] = head.key
                    block.attn.W_Q[index, :, :scores] = head.query
                    block.attn.W_V[index, :, :values] = head.read
                    # the paper takes the mean over heads, a hosted model their sum
                    block.attn.W_O[index, :values] = head.write.T / len(layer)
        hosted: HookedModel = model
        return hosted


def nearest_code_classifier(
    rows: Rows, codes: Float[Tensor, "label code"], at: Sequence[int]
) -> Float[Tensor, "label d_model"]:
    """Make a classifier that finds the nearest of distinct codes: u.x - |u|^2 / 2.

    Exact for inputs that are codes, with margin |u - u'|^2 / 2. The bias sits on the position row
    of the response sign, which must be 1 there.

    Args:
        rows: the layout.
        codes: u, integers, one for each label.
        at: the rows that hold the code of the input.

    Raises:
        InfoFlowError: for codes with |u|^2 beyond 2^52, whose logits float64 would round.
    """
    largest = max(sum(int(entry) ** 2 for entry in code) for code in codes.tolist())
    if largest > _LARGEST_SQUARE_IN_FLOAT64:
        raise InfoFlowError(
            f"the longest code has |u|^2 of about 2^{largest.bit_length() - 1}: float64 compares "
            "codes exactly up to 2^52 only; expected shorter templates"
        )
    classifier = torch.zeros(len(codes), rows.d_model, dtype=torch.float64)
    classifier[:, list(at)] = codes.double()
    classifier[:, rows.last_position] = -codes.double().square().sum(dim=1) / 2
    return classifier
