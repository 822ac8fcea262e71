"""What hosted models are made of: HookedTransformer's parts, for TransformerLens 3 and 4.

Hook points, parameters, their order and every operation are HookedTransformer's, so that all
numbers have the same bits; beyond it, keys can be hidden from all queries.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import get_offset_position_ids, repeat_along_head_dimension
from transformer_lens.utilities.activation_functions import SUPPORTED_ACTIVATIONS

# TransformerLens knows its activations from this table; the theory's own are missing there.
SUPPORTED_ACTIVATIONS.setdefault("tanh", torch.tanh)
SUPPORTED_ACTIVATIONS.setdefault("square", torch.square)


class TokenEmbed(nn.Module):
    """Token ids [batch, pos] to vectors [batch, pos, d_model]."""

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.W_E = nn.Parameter(torch.empty(cfg.d_vocab, cfg.d_model))

    def forward(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """Return the row of each token."""
        return self.W_E[tokens, :]


class PositionalEmbed(nn.Module):
    """A trained vector for each position."""

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.W_pos = nn.Parameter(torch.empty(cfg.n_ctx, cfg.d_model))

    def forward(
        self, n: int, length: int, attention_mask: Int[Tensor, "batch pos"] | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """Embed positions of `n` sequences; with a mask, they count from the first token seen."""
        if attention_mask is None:
            return self.W_pos[:length].repeat(n, 1, 1)
        positions = self.W_pos[get_offset_position_ids(0, attention_mask)]
        return torch.where(attention_mask.bool().unsqueeze(-1), positions, 0)


class Unembed(nn.Module):
    """The read-out."""

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.W_U = nn.Parameter(torch.empty(cfg.d_model, cfg.d_vocab_out))
        self.b_U = nn.Parameter(torch.zeros(cfg.d_vocab_out))
        self.hook_in = HookPoint()  # [batch, pos, d_model]
        self.hook_out = HookPoint()  # [batch, pos, d_output]

    def forward(
        self, residual: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_output"]:
        """Return outputs at every position."""
        residual = self.hook_in(residual)
        # a contiguous transpose: the matrix product's order of summation hangs on the layout
        output: Tensor = self.hook_out(
            functional.linear(residual, self.W_U.T.contiguous(), self.b_U)
        )
        return output


class LayerNorm(nn.Module):
    """Layer norm in float32, or in float64 for a model of that precision."""

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.eps = cfg.eps
        self.w = nn.Parameter(torch.ones(cfg.d_model))
        self.b = nn.Parameter(torch.zeros(cfg.d_model))
        self.hook_scale = HookPoint()  # [batch, pos, 1]
        self.hook_normalized = HookPoint()  # [batch, pos, d_model]

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Centre, scale, and map by w and b."""
        if x.dtype not in (torch.float32, torch.float64):
            x = x.to(torch.float32)
        x = x - x.mean(-1, keepdim=True)
        scale = self.hook_scale((x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt())
        normalized: Tensor = self.hook_normalized(x / scale)
        return normalized.to(self.w.dtype) * self.w + self.b


class MLP(nn.Module):
    """The feed-forward network of a block."""

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.act_fn = SUPPORTED_ACTIVATIONS[cfg.act_fn]
        self.W_in = nn.Parameter(torch.empty(cfg.d_model, cfg.d_mlp))
        self.b_in = nn.Parameter(torch.zeros(cfg.d_mlp))
        self.W_out = nn.Parameter(torch.empty(cfg.d_mlp, cfg.d_model))
        self.b_out = nn.Parameter(torch.zeros(cfg.d_model))
        self.hook_pre = HookPoint()  # [batch, pos, d_mlp]
        self.hook_post = HookPoint()  # [batch, pos, d_mlp]

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Return two layers with the activation between."""
        before = self.hook_pre(_affine(x, self.W_in, self.b_in))
        return _affine(self.hook_post(self.act_fn(before)), self.W_out, self.b_out)


def _affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Multiply and add in one operation, as HookedTransformer does."""
    flat = torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight)
    return flat.view(*x.shape[:-1], weight.shape[-1])


class Attention(nn.Module):
    """Multi-head attention, bidirectional.

    Args:
        cfg: of the model; its flags are read as they are at each pass.
        n_heads: of this layer.
        d_head: of this layer.
        attn_scale: what scores are divided by.
        last_is_key: whether the last position, CLS, can be attended to. In eq 1 of the InfoFlow
            paper it cannot.
    """

    mask: Tensor
    IGNORE: Tensor

    def __init__(
        self, cfg: Any, n_heads: int, d_head: int, attn_scale: float, last_is_key: bool = True
    ) -> None:
        super().__init__()
        self.cfg = cfg
        self.attn_scale = attn_scale
        self.last_is_key = last_is_key
        d_model = cfg.d_model
        # HookedTransformer registers them in this order
        self.W_Q = nn.Parameter(torch.empty(n_heads, d_model, d_head))
        self.W_O = nn.Parameter(torch.empty(n_heads, d_head, d_model))
        self.b_Q = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_O = nn.Parameter(torch.zeros(d_model))
        self.W_K = nn.Parameter(torch.empty(n_heads, d_model, d_head))
        self.W_V = nn.Parameter(torch.empty(n_heads, d_model, d_head))
        self.b_K = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_V = nn.Parameter(torch.zeros(n_heads, d_head))
        # unused here; the state dict of HookedTransformer has them
        self.register_buffer("mask", torch.empty((0, 0), dtype=torch.bool))
        self.register_buffer("IGNORE", torch.tensor(-torch.inf))
        self.hook_k = HookPoint()  # [batch, pos, head, d_head]
        self.hook_q = HookPoint()  # [batch, pos, head, d_head]
        self.hook_v = HookPoint()  # [batch, pos, head, d_head]
        self.hook_z = HookPoint()  # [batch, pos, head, d_head]
        self.hook_attn_scores: HookPoint = HookPoint()  # [batch, head, query, key]
        self.hook_pattern: HookPoint = HookPoint()  # [batch, head, query, key]
        self.hook_result = HookPoint()  # [batch, pos, head, d_model]

    def forward(
        self,
        query_input: Float[Tensor, "batch query *head d_model"],
        key_input: Float[Tensor, "batch key *head d_model"],
        value_input: Float[Tensor, "batch key *head d_model"],
        attention_mask: Int[Tensor, "batch key"] | None = None,
    ) -> Float[Tensor, "batch query d_model"]:
        """Return what heads write; inputs may have one vector a head (``use_split_qkv_input``)."""
        q = self.hook_q(_project(query_input, self.W_Q, self.b_Q))
        k = self.hook_k(_project(key_input, self.W_K, self.b_K))
        v = self.hook_v(_project(value_input, self.W_V, self.b_V))
        scores = q.permute(0, 2, 1, 3) @ k.permute(0, 2, 3, 1) / self.attn_scale
        hidden = self._hidden_keys(scores.shape[-1], scores.device, attention_mask)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        scores = self.hook_attn_scores(scores)
        pattern = functional.softmax(scores, dim=-1)
        # a query without keys attends to nothing
        pattern = torch.where(torch.isnan(pattern), torch.zeros_like(pattern), pattern)
        pattern = self.hook_pattern(pattern).to(v.dtype)
        z = self.hook_z((pattern @ v.permute(0, 2, 1, 3)).permute(0, 2, 1, 3))
        n_heads, d_head, d_model = self.W_O.shape
        if self.cfg.use_attn_result:
            result = self.hook_result((z.unsqueeze(-1) * self.W_O).sum(-2))
            written: Tensor = result.sum(-2) + self.b_O
            return written
        w = self.W_O.permute(2, 0, 1).reshape(d_model, n_heads * d_head).contiguous()
        return functional.linear(z.reshape(*z.shape[:2], n_heads * d_head), w, self.b_O)

    def _hidden_keys(
        self, n_keys: int, device: torch.device, attention_mask: Tensor | None
    ) -> Bool[Tensor, "..."] | None:
        """Mark the keys that no query sees, to be broadcast over [batch, head, query, key]."""
        hidden = None
        if not self.last_is_key:
            hidden = torch.arange(n_keys, device=device) == n_keys - 1
        if attention_mask is not None:
            padding = ~attention_mask.to(device).bool()[:, None, None, :]
            hidden = padding if hidden is None else hidden | padding
        return hidden

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Leave out the causal mask that earlier versions of TransformerLens kept."""
        name = f"{prefix}mask"
        if name in state_dict and state_dict[name].shape != self.mask.shape:
            state_dict = {**state_dict, name: self.mask}
        super()._load_from_state_dict(state_dict, prefix, *args)


def _project(
    x: Float[Tensor, "batch pos *head d_model"],
    weight: Float[Tensor, "head d_model d_head"],
    bias: Float[Tensor, "head d_head"],
) -> Float[Tensor, "batch pos head d_head"]:
    """Return queries, keys or values of all heads."""
    if x.ndim == 4:  # an input for each head
        return torch.einsum("bphm,hmd->bphd", x, weight) + bias
    n_heads, d_model, d_head = weight.shape
    flat = weight.permute(0, 2, 1).reshape(n_heads * d_head, d_model)
    return functional.linear(x, flat, bias.reshape(-1)).reshape(*x.shape[:2], n_heads, d_head)


class Block(nn.Module):
    """Attention, and after it the feed-forward network, if the model has any."""

    hook_out_is_single_residual_stream = True  # TransformerLens 4 asks before it reads a stream

    def __init__(self, cfg: Any, attn: Attention) -> None:
        super().__init__()
        self.cfg = cfg
        self.normalization_type = cfg.normalization_type
        self.ln1 = _normalization(cfg)
        if not cfg.attn_only:
            self.ln2 = _normalization(cfg)
        self.attn = attn
        if not cfg.attn_only:
            self.mlp = MLP(cfg)
        # these four, where the flags of the config ask for them
        self.hook_attn_in = HookPoint()  # [batch, pos, head, d_model]
        self.hook_q_input = HookPoint()  # [batch, pos, head, d_model]
        self.hook_k_input = HookPoint()  # [batch, pos, head, d_model]
        self.hook_v_input = HookPoint()  # [batch, pos, head, d_model]
        self.hook_mlp_in = HookPoint()  # [batch, pos, d_model]
        self.hook_attn_out = HookPoint()  # [batch, pos, d_model]
        self.hook_mlp_out = HookPoint()  # [batch, pos, d_model]
        self.hook_resid_pre = HookPoint()  # [batch, pos, d_model]
        if not cfg.attn_only:
            self.hook_resid_mid = HookPoint()  # [batch, pos, d_model]
        self.hook_resid_post = HookPoint()  # [batch, pos, d_model]

    def forward(
        self,
        resid_pre: Float[Tensor, "batch pos d_model"],
        attention_mask: Int[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the residual stream after the block."""
        resid_pre = self.hook_resid_pre(resid_pre)
        query, key, value = (self.ln1(x) for x in self._attention_inputs(resid_pre))
        resid = resid_pre + self.hook_attn_out(self.attn(query, key, value, attention_mask))
        if not self.cfg.attn_only:
            resid = self.hook_resid_mid(resid)
            mlp_in = self.hook_mlp_in(resid.clone()) if self.cfg.use_hook_mlp_in else resid
            resid = resid + self.hook_mlp_out(self.mlp(self.ln2(mlp_in)))
        resid_post: Tensor = self.hook_resid_post(resid)
        return resid_post

    def _attention_inputs(self, resid_pre: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n_heads, x = self.attn.W_Q.shape[0], resid_pre
        if self.cfg.use_attn_in:
            x = self.hook_attn_in(repeat_along_head_dimension(resid_pre, n_heads))
        if not self.cfg.use_split_qkv_input:
            return x, x, x
        hooks = (self.hook_q_input, self.hook_k_input, self.hook_v_input)
        query, key, value = (
            hook(repeat_along_head_dimension(resid_pre, n_heads)) for hook in hooks
        )
        return query, key, value

    def run_last_position(
        self, residual: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch 1 d_model"]:
        """Return the residual stream after the block at the last position, and run it alone."""
        # all positions are keys here, and the last one alone is a query
        keys = self.ln1(residual)
        read = residual[:, -1:]
        read = read + self.attn(keys[:, -1:], keys, keys)
        return read if self.cfg.attn_only else read + self.mlp(self.ln2(read))


def _normalization(cfg: Any) -> nn.Module:
    return nn.Identity() if cfg.normalization_type is None else LayerNorm(cfg)
