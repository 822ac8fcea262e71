"""Attributions of the field, from weights of a plain model of transformers, patterns, and states.

They stand beside the library's own measures in `benchmarks.field`, and compute without these. A
layer makes y_i = x_i + sum_j T_ij + b of its input x, where T_ij is what query i takes from key j
by all heads, and then its MLP. One text at a time; arrays are [layer, query, key or source].
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.hooks.model.call import call
from infoflow_lens.hooks.model.points import layer_count

Vectors = Float[Tensor, "source pos d"]


@dataclass(frozen=True)
class Norm:
    """LayerNorm or RMSNorm: ``weight * (x - mean) / scale + bias``."""

    module: nn.Module

    @property
    def centers(self) -> bool:
        """Say whether the mean is taken off."""
        return isinstance(self.module, nn.LayerNorm)

    def linear(self, parts: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """Apply it without its scale, which is the same for all parts of a sum, and its bias."""
        weight: Any = self.module.weight
        return weight * (parts - parts.mean(-1, keepdim=True) if self.centers else parts)

    def decompose(self, parts: Vectors) -> Vectors:
        """Apply it to the parts of a sum, with the scale of the sum; the bias is shared out."""
        scaled = self.linear(parts) / self.scale(parts.sum(0))
        return share(scaled, getattr(self.module, "bias", None))

    def scale(self, whole: Float[Tensor, "pos d"]) -> Float[Tensor, "pos 1"]:
        """Return what it divides a state by."""
        moved = whole - whole.mean(-1, keepdim=True) if self.centers else whole
        epsilon: Any = self.module.eps if self.centers else self.module.variance_epsilon
        return (moved.square().mean(-1, keepdim=True) + epsilon).sqrt()


class Block(NamedTuple):
    """The weights of a layer, as x @ weight + bias; biases may be None.

    Attributes:
        before: whether norms read what enters attention and MLP; else they stand behind the sums.
        norms: of attention, and of the MLP.
        value, output, up, down: weight and bias; values that heads share are repeated.
        gate: the weight of what multiplies the MLP's hidden features (SwiGLU), or None.
        activation: of the gate, or of the hidden features.
    """

    before: bool
    norms: tuple[Norm, Norm]
    value: tuple[Tensor, Tensor | None]
    output: tuple[Tensor, Tensor | None]
    up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]
    gate: Tensor | None
    activation: Callable[[Tensor], Tensor]


def _numbers(linear: Any) -> tuple[Tensor, Tensor | None]:
    weight = linear.weight.detach()
    bias = None if linear.bias is None else linear.bias.detach()
    return (weight.T if isinstance(linear, nn.Linear) else weight), bias  # GPT-2's are not turned


def _modules(plain: nn.Module, kind: str) -> Any:
    """Return the modules of a kind, in their order."""
    return [module for module in plain.modules() if type(module).__name__ == kind]


def read_blocks(plain: nn.Module) -> list[Block]:
    """Read the layers of a Llama, GPT-2, BERT or ALBERT.

    Raises:
        InfoFlowError: for a model of another kind.
    """
    config: Any = plain.config
    found = []
    for block in _modules(plain, "LlamaDecoderLayer"):
        attention, mlp = block.self_attn, block.mlp
        weight, bias = _numbers(attention.v_proj)
        d_head = config.hidden_size // config.num_attention_heads
        # grouped values are repeated, so that all models have one value a head below
        repeats = config.num_attention_heads // config.num_key_value_heads
        weight = weight.unflatten(1, (-1, d_head)).repeat_interleave(repeats, dim=1).flatten(1)
        norms = Norm(block.input_layernorm), Norm(block.post_attention_layernorm)
        found.append(Block(True, norms, (weight, bias), _numbers(attention.o_proj),
                           _numbers(mlp.up_proj), _numbers(mlp.down_proj),
                           _numbers(mlp.gate_proj)[0], mlp.act_fn))  # fmt: skip
    for block in _modules(plain, "GPT2Block"):
        width = config.n_embd
        weight, bias = _numbers(block.attn.c_attn)
        # GPT-2 keeps queries, keys and values in one matrix
        value = weight[:, 2 * width :], None if bias is None else bias[2 * width :]
        found.append(Block(True, (Norm(block.ln_1), Norm(block.ln_2)), value,
                           _numbers(block.attn.c_proj), _numbers(block.mlp.c_fc),
                           _numbers(block.mlp.c_proj), None, block.mlp.act))  # fmt: skip
    for block in _modules(plain, "BertLayer"):
        out = block.attention.output
        found.append(Block(False, (Norm(out.LayerNorm), Norm(block.output.LayerNorm)),
                           _numbers(block.attention.self.value), _numbers(out.dense),
                           _numbers(block.intermediate.dense), _numbers(block.output.dense), None,
                           block.intermediate.intermediate_act_fn))  # fmt: skip
    for block in _modules(plain, "AlbertLayer"):
        attention = block.attention
        norms = Norm(attention.LayerNorm), Norm(block.full_layer_layer_norm)
        found.append(Block(False, norms, _numbers(attention.value), _numbers(attention.dense),
                           _numbers(block.ffn), _numbers(block.ffn_output), None,
                           block.activation))  # fmt: skip
    if not found:
        raise InfoFlowError(
            f"{type(plain).__name__} has layers of another kind: expected a Llama, GPT-2, BERT or "
            "ALBERT of transformers"
        )
    return found * (config.num_hidden_layers // len(found))  # ALBERT shares its layers


class Reading(NamedTuple):
    """What one pass of a text showed: patterns, and what enters each layer."""

    patterns: list[Float[Tensor, "head query key"]]
    states: list[Float[Tensor, "pos d"]]


def read_text(opened: nn.Module, tokens: Int[Tensor, "1 pos"]) -> Reading:
    """Read patterns and states of one text, off a model that `load_any` or `open_model` opened."""
    layers = range(layer_count(opened))
    patterns = [f"blocks.{layer}.attn.hook_pattern" for layer in layers]
    states = [f"blocks.{layer}.hook_resid_pre" for layer in layers]
    seen = call(opened, tokens, [*patterns, *states]).activations
    return Reading([seen[p][0] for p in patterns], [seen[s][0] for s in states])


def share(parts: Vectors, bias: Tensor | None) -> Vectors:
    """Share a bias out among the parts of a sum, by their products with it (DecompX, AbsDot)."""
    if bias is None:
        return parts
    # a part gets the more of the bias, the more it points along or against it
    weights = (parts @ bias).abs()
    return parts + (weights / (weights.sum(0) + 1e-12))[..., None] * bias


@torch.no_grad()
def decompose(
    blocks: Sequence[Block],
    patterns: Sequence[Float[Tensor, "head query key"]],
    start: Float[Tensor, "pos d"],
) -> Iterator[Vectors]:
    """Yield what each layer's outgoing state takes from each token, as vectors that sum to it.

    DecompX (Modarressi et al. 2023): patterns and the scales of norms are held, an activation is
    the line through the origin that gives its value here, biases are shared out. Gated MLPs, which
    the paper does not have, hold their gate.
    """
    # [source, pos, d]: at the start each position holds its own token alone
    parts = torch.diag_embed(start.T).permute(1, 2, 0)
    for block, pattern in zip(blocks, patterns, strict=True):
        read = block.norms[0].decompose(parts) if block.before else parts
        values = (read @ block.value[0]).unflatten(-1, (len(pattern), -1))
        # patterns are held, so that each source passes through them by itself
        heads = torch.einsum("hqk,skhd->sqhd", pattern, values).flatten(2)
        bias = block.output[1]
        if block.value[1] is not None:
            # rows of a pattern sum to 1, so a value's bias comes out of every head whole
            bias = block.value[1] @ block.output[0] + (0 if bias is None else bias)
        parts = share(parts + heads @ block.output[0], bias)
        parts = parts if block.before else block.norms[0].decompose(parts)
        read = block.norms[1].decompose(parts) if block.before else parts
        hidden = share(read @ block.up[0], block.up[1])
        if block.gate is None:
            whole = hidden.sum(0)
            # the line through the origin: its slope is the same for all parts, so they still sum up
            hidden = hidden * torch.where(whole == 0, 0, block.activation(whole) / whole)
        else:
            # the gate of the whole state, under which the parts stay a sum
            hidden = hidden * block.activation(read.sum(0) @ block.gate)
        parts = parts + share(hidden @ block.down[0], block.down[1])
        parts = parts if block.before else block.norms[1].decompose(parts)
        yield parts


class Edges(NamedTuple):
    """What is taken in each layer, [layer, query, key], and by which a logit grows."""

    norms: Tensor
    globenc: Tensor
    alti: Tensor
    logit: Float[Tensor, "layer key"] | None


@torch.no_grad()
def measure_edges(
    blocks: Sequence[Block],
    patterns: Sequence[Float[Tensor, "head query key"]],
    states: Sequence[Float[Tensor, "pos d"]],
    towards: Float[Tensor, " d"] | None = None,
) -> Edges:
    """Measure what each query takes from each key, by three measures of the field.

    - norms: |T_ij|, the norm-based analysis of Kobayashi et al. (2020), heads together.
    - globenc: |LN2(LN1(T_ij + [i = j] x_i))|, GlobEnc (Modarressi et al. 2022); where norms stand
      before the parts, no norm reads the sum, and it is |T_ij + [i = j] x_i|.
    - alti: max(0, |y|_1 - |y - t_ij|_1), with t_ij the same vector, behind LN1 where that reads the
      sum, and y the state there (Ferrando et al. 2022).

    Rows of the last two sum to 1.

    Args:
        blocks: the layers.
        patterns: of each.
        states: what enters each layer.
        towards: how the last state's features make a logit, its norm's scale held; for `logit`.
    """
    found: list[list[Tensor]] = [[], [], [], []]
    for block, pattern, x in zip(blocks, patterns, states, strict=True):
        # a state as its only part, which takes all of the norm's bias
        read = block.norms[0].decompose(x[None])[0] if block.before else x
        weight, bias = block.value
        values = (read @ weight + (0 if bias is None else bias)).unflatten(-1, (len(pattern), -1))
        output = block.output[0].unflatten(0, (len(pattern), -1))
        # T_ij of all heads together, [query, key, d_model]
        taken = torch.einsum("hqk,khd,hdm->qkm", pattern, values, output)
        found[0].append(taken.norm(dim=-1))
        if towards is not None:
            found[3].append(taken[-1] @ towards)
        # the residual stream is what a query takes from itself
        with_own = taken + torch.diag_embed(x.T).permute(1, 2, 0)
        bias = block.output[1]
        whole = with_own.sum(1) + (0 if bias is None else bias)
        if block.before:
            found[1].append(_rows(with_own.norm(dim=-1)))
        else:
            first, second = block.norms
            found[1].append(_rows(second.linear(first.linear(with_own)).norm(dim=-1)))
            with_own = first.linear(with_own) / first.scale(whole)[:, None]
            whole = first.decompose(whole[None])[0]
        # how much farther from the sum one would be without the part
        near = whole.abs().sum(-1, keepdim=True) - (whole[:, None] - with_own).abs().sum(-1)
        found[2].append(_rows(near.clamp(min=0)))
    norms, globenc, alti, logit = found
    by_logit = torch.stack(logit) if logit else None
    return Edges(torch.stack(norms), torch.stack(globenc), torch.stack(alti), by_logit)


def _rows(sizes: Float[Tensor, "query key"]) -> Float[Tensor, "query key"]:
    """Return rows that sum to 1; one of zeros keeps to itself."""
    total = sizes.sum(-1, keepdim=True)
    return torch.where(total > 0, sizes / total, torch.eye(len(sizes)).to(sizes))


def roll_out(edges: Float[Tensor, "layer query key"]) -> Float[Tensor, "layer query source"]:
    """Return the products of the layers so far."""
    held = [edges[0]]
    for layer in edges[1:]:
        held.append(layer @ held[-1])
    return torch.stack(held)


def alti_logit(edges: Edges) -> Float[Tensor, " source"]:
    """Return what each token adds to a logit by all layers' heads: ALTI-Logit.

    What a layer's heads add from a key is passed on to tokens by the ALTI of the layers below.
    Source: Ferrando et al. (2023).
    """
    if edges.logit is None:
        raise InfoFlowError("edges have no logit: expected those of `measure_edges` with towards=")
    below = roll_out(edges.alti)[:-1]
    return edges.logit[0] + torch.einsum("lk,lks->s", edges.logit[1:], below)


class Integrated(NamedTuple):
    """Integrated gradients.

    Attributes:
        parts: [output, pos], signed; of each output they sum to its change from the reference.
        error: [output], how far from it, over its size.
    """

    parts: Float[Tensor, "output pos"]
    error: Float[Tensor, " output"]


def integrate_gradients(
    function: Callable[[Float[Tensor, "row pos d"]], Float[Tensor, "row output"]],
    start: Float[Tensor, "pos d"],
    reference: Float[Tensor, "pos d"],
    steps: int,
) -> Integrated:
    """Integrate gradients on the line from a reference (Sundararajan et al. 2017).

    Args:
        function: the outputs of rows, each row for itself.
        start: what enters.
        reference: where the line begins.
        steps: points of Gauss and Legendre's rule.
    """
    nodes, weights = (
        torch.tensor(one, dtype=start.dtype) for one in np.polynomial.legendre.leggauss(steps)
    )
    moved = start - reference
    # the rule's points lie in -1 to 1, ours on the way from 0 to 1
    rows = (reference + (nodes[:, None, None] + 1) / 2 * moved).requires_grad_()
    with torch.enable_grad():
        values = function(rows)
        # rows do not meet in the function, so that a sum gives each its own gradient
        slopes = [
            torch.autograd.grad(values[:, output].sum(), rows, retain_graph=True)[0]
            for output in range(values.shape[1])
        ]
    # half the weights, for the rule's way from -1 to 1 is twice as long
    parts = torch.stack([torch.einsum("r,rpd,pd->p", weights / 2, s, moved) for s in slopes])
    with torch.no_grad():
        ends = function(torch.stack([reference, start]))
    change = ends[1] - ends[0]
    return Integrated(parts, (parts.sum(1) - change).abs() / change.abs().clamp(min=1e-30))
