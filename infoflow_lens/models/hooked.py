"""The hosted Transformer: one implementation for TransformerLens 3 and 4.

TransformerLens 4 has no HookedTransformer; it keeps what that is made of, HookedRootModule and
HookPoint, for modules of one's own. These are such modules. They have HookedTransformer's hook
points, in its order of firing, its parameters, in its order (a seed and an optimiser's state go by
it), and its operations, so that every number has the same bits; ``tests/reference/frozen.py`` keeps
those of TransformerLens 3.9. Where HookedTransformer exists, a :class:`HookedModel` is one, with a
HookedTransformerConfig; where it does not, it is a HookedRootModule with a TransformerBridgeConfig.

Beyond HookedTransformer, layers have head counts of their own, keys can be hidden from all queries,
and `cfg` follows the tensors in device and precision.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformer_lens import ActivationCache, FactoredMatrix, HookedRootModule
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import (
    get_offset_position_ids,
    init_kaiming_normal_,
    init_kaiming_uniform_,
    init_xavier_normal_,
    init_xavier_uniform_,
    repeat_along_head_dimension,
)
from transformer_lens.utilities.activation_functions import SUPPORTED_ACTIVATIONS

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.names import check_known

HAS_HOOKED_TRANSFORMER = importlib.util.find_spec("transformer_lens.HookedTransformer") is not None
"""Whether the installed TransformerLens is of version 3."""

if TYPE_CHECKING:
    _Base = HookedRootModule
elif HAS_HOOKED_TRANSFORMER:
    _Base = importlib.import_module("transformer_lens").HookedTransformer
else:
    _Base = HookedRootModule

# TransformerLens knows its activations from this table; the theory's own are missing there.
SUPPORTED_ACTIVATIONS.setdefault("tanh", torch.tanh)
SUPPORTED_ACTIVATIONS.setdefault("square", torch.square)

_INITIALISATIONS: dict[str, Callable[[Tensor, float], Any]] = {
    "gpt2": lambda weight, spread: nn.init.normal_(weight, std=spread),
    "xavier_uniform": lambda weight, gain: init_xavier_uniform_(weight, gain=gain),
    "xavier_normal": lambda weight, gain: init_xavier_normal_(weight, gain=gain),
    "kaiming_uniform": lambda weight, gain: init_kaiming_uniform_(weight, gain=gain),
    "kaiming_normal": lambda weight, gain: init_kaiming_normal_(weight, gain=gain),
}


def hooked_config(**settings: Any) -> Any:
    """The config of TransformerLens that goes with a hosted model.

    A HookedTransformerConfig where it exists, else a TransformerBridgeConfig, which has the same
    names; with both, sizes are those of the first layer.
    """
    name = "HookedTransformerConfig" if HAS_HOOKED_TRANSFORMER else "TransformerBridgeConfig"
    config = getattr(importlib.import_module("transformer_lens"), name)(**settings)
    if config.use_attn_scale and config.attn_scale == -1.0:
        config.attn_scale = np.sqrt(config.d_head)  # which version 4 leaves to its adapters
    return config


class MixedHeadsCache(ActivationCache):
    """A cache of layers with different head counts: methods that assume one count are refused."""

    def stack_head_results(self, *args: Any, **kwargs: Any) -> Any:
        """Refused.

        Raises:
            InfoFlowError: always.
        """
        model: Any = self.model
        raise InfoFlowError(
            "stack_head_results takes the number of heads from cfg.n_heads for every layer, but "
            f"this model's layers have {model.heads_of_layers}: expected equal counts; "
            "stack layer by layer from hook_z and W_O"
        )


class TokenEmbed(nn.Module):
    """Token ids [batch, pos] to vectors [batch, pos, d_model]."""

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.W_E = nn.Parameter(torch.empty(cfg.d_vocab, cfg.d_model))

    def forward(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """The row of each token."""
        return self.W_E[tokens, :]


class PositionalEmbed(nn.Module):
    """A trained vector for each position."""

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.W_pos = nn.Parameter(torch.empty(cfg.n_ctx, cfg.d_model))

    def forward(
        self, n: int, length: int, attention_mask: Int[Tensor, "batch pos"] | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """For `n` sequences; with a mask, positions count from the first token that is seen."""
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
        """Outputs at every position."""
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
        """Two layers with the activation between."""
        before = self.hook_pre(_affine(x, self.W_in, self.b_in))
        return _affine(self.hook_post(self.act_fn(before)), self.W_out, self.b_out)


def _affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Product and sum as one operation, as HookedTransformer has them."""
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

    @property
    def QK(self) -> FactoredMatrix:
        """W_Q W_K^T of each head."""
        return FactoredMatrix(self.W_Q, self.W_K.transpose(-2, -1))

    @property
    def OV(self) -> FactoredMatrix:
        """W_V W_O of each head."""
        return FactoredMatrix(self.W_V, self.W_O)

    def forward(
        self,
        query_input: Float[Tensor, "batch query *head d_model"],
        key_input: Float[Tensor, "batch key *head d_model"],
        value_input: Float[Tensor, "batch key *head d_model"],
        attention_mask: Int[Tensor, "batch key"] | None = None,
    ) -> Float[Tensor, "batch query d_model"]:
        """What the heads write; inputs may have one vector a head (``use_split_qkv_input``)."""
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
        """Which keys no query sees, to be broadcast over [batch, head, query, key]."""
        hidden = None
        if not self.last_is_key:
            hidden = torch.arange(n_keys, device=device) == n_keys - 1
        if attention_mask is not None:
            padding = ~attention_mask.to(device).bool()[:, None, None, :]
            hidden = padding if hidden is None else hidden | padding
        return hidden

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Earlier versions of TransformerLens kept the causal mask of n_ctx positions."""
        name = f"{prefix}mask"
        if name in state_dict and state_dict[name].shape != self.mask.shape:
            state_dict = {**state_dict, name: self.mask}
        super()._load_from_state_dict(state_dict, prefix, *args)


def _project(
    x: Float[Tensor, "batch pos *head d_model"],
    weight: Float[Tensor, "head d_model d_head"],
    bias: Float[Tensor, "head d_head"],
) -> Float[Tensor, "batch pos head d_head"]:
    """Queries, keys or values of all heads."""
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
        """The residual stream after the block."""
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

    def at_the_last_position(
        self, residual: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch 1 d_model"]:
        """The residual stream after the block at the last position, computed for it alone."""
        keys = self.ln1(residual)
        read = residual[:, -1:]
        read = read + self.attn(keys[:, -1:], keys, keys)
        return read if self.cfg.attn_only else read + self.mlp(self.ln2(read))


def _normalization(cfg: Any) -> nn.Module:
    return nn.Identity() if cfg.normalization_type is None else LayerNorm(cfg)


def _part(module: str, name: str, what: str) -> property:
    """A parameter of the model, as an attribute of it."""
    return property(lambda model: getattr(getattr(model, module), name), doc=f"{name} {what}.")


def _of_all_layers(part: str, name: str, shape: str) -> property:
    """A parameter of all blocks, stacked; reading it raises an InfoFlowError where it cannot be."""

    def stacked(model: Any) -> Tensor:
        if part == "mlp" and model.cfg.attn_only:
            raise InfoFlowError(
                f"the model is attention-only and has no {name}: expected a model with d_mlp"
            )
        tensors = [getattr(getattr(block, part), name) for block in model.blocks]
        if len({tensor.shape for tensor in tensors}) > 1:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise InfoFlowError(
                f"{name} has a shape of its own in each layer ({shapes}) and cannot be stacked: "
                f"read it layer by layer, as model.blocks[layer].{part}.{name}"
            )
        return torch.stack(tensors)

    return property(stacked, doc=f"{name} of all layers, {shape}.")


def _setter(flag: str, doc: str) -> Callable[[Any, bool], None]:
    """A method that sets a flag of the config."""

    def set_flag(model: Any, value: bool) -> None:
        setattr(model.cfg, flag, value)

    set_flag.__doc__ = doc
    return set_flag


_ARGUMENTS = ("return_type", "start_at_layer", "stop_at_layer", "attention_mask", "past_kv_cache")
# HookedTransformer's forward takes them; they are about text, or about other kinds of positions
_ABOUT_TEXT = ("loss_per_token", "prepend_bos", "padding_side", "tokens", "shortformer_pos_embed")
# Hook points that fire where a flag of the config asks for them
_FLAGS = {
    "attn.hook_result": "use_attn_result",
    "hook_q_input": "use_split_qkv_input",
    "hook_k_input": "use_split_qkv_input",
    "hook_v_input": "use_split_qkv_input",
    "hook_mlp_in": "use_hook_mlp_in",
    "hook_attn_in": "use_attn_in",
}


class HookedModel(_Base):
    """A Transformer with hook points, of which layers may have different numbers of heads.

    What HookedTransformer offers beside loading and text works on it: run_with_cache,
    run_with_hooks, hooks, partial runs, stacked weights, the methods of ActivationCache, patching.

    Args:
        cfg: see :func:`hooked_config`.
        embed: input to [batch, pos, d_model].
        attention: an :class:`Attention` for each layer.
    """

    reads_vectors = False  # else hook_tokens carries the input vectors, and CLS is read
    architecture: Any
    tokenizer: Any
    blocks: Any

    def __init__(self, cfg: Any, embed: nn.Module, attention: list[Attention]) -> None:
        HookedRootModule.__init__(self)  # HookedTransformer would build its own blocks
        self.cfg = cfg
        self.tokenizer = None
        self.dataset = None
        self.embed: Any = embed
        self.hook_embed = HookPoint()  # [batch, pos, d_model]
        if cfg.positional_embedding_type == "standard":
            self.pos_embed = PositionalEmbed(cfg)
            self.hook_pos_embed = HookPoint()  # [batch, pos, d_model]
        if cfg.use_hook_tokens:
            self.hook_tokens = HookPoint()
        self.blocks = nn.ModuleList([Block(cfg, attn) for attn in attention])
        if cfg.normalization_type is not None:
            self.ln_final = LayerNorm(cfg)
        self.unembed = Unembed(cfg)
        self.setup()

    # Running

    def check_input(self, x: Tensor, attention_mask: Tensor | None = None) -> None:
        """Refuse what is no batch of this model's tokens.

        Raises:
            InfoFlowError: with what was expected.
        """
        raise NotImplementedError

    def forward(
        self,
        input: Tensor,
        return_type: str | None = "logits",
        *,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        attention_mask: Int[Tensor, "batch pos"] | None = None,
        past_kv_cache: Any = None,
        **ignored: Any,
    ) -> Tensor | None:
        """Run the model.

        Args:
            input: vector tokens [batch, pos, d_token]; or token ids [batch, pos], [pos] for one
                sequence; with `start_at_layer`, the residual stream that enters that layer.
            return_type: "logits", or None for nothing.
            start_at_layer: first layer to run, as in TransformerLens.
            stop_at_layer: layer before which to stop; then the residual stream is returned.
            attention_mask: of token ids, 0 for padding, which is no key for any query; positions
                count from the first token. With `start_at_layer`, give it again.
            past_kv_cache: None; earlier positions depend on later ones.
            ignored: arguments of TransformerLens that are about text.

        Returns:
            For vector tokens the output read at CLS, [batch, d_output] (eq 2); for token ids the
            logits of all positions, [batch, pos, d_output].

        Raises:
            InfoFlowError: for input of a wrong kind, shape or precision, a loss as return type, a
                mask over vector tokens, or an unknown argument.
        """
        if return_type not in ("logits", None):
            raise InfoFlowError(
                f"return_type is {return_type!r}: a hosted model has no next-token loss; expected "
                "'logits', which you compare with the target, or None"
            )
        if past_kv_cache is not None:
            raise InfoFlowError(
                "past_kv_cache is given, but the model is bidirectional: earlier positions depend "
                "on later ones; expected None, and the whole sequence"
            )
        if attention_mask is not None:
            if self.reads_vectors:
                raise InfoFlowError(
                    "attention_mask is given, but vector tokens take no attention_mask: every "
                    f"sequence has {self.architecture.n_tokens} tokens; leave it out"
                )
            attention_mask = attention_mask.to(self.unembed.W_U.device)
        check_known(ignored, (*_ARGUMENTS, *_ABOUT_TEXT), "forward", "argument")
        residual = self.embedded(input, attention_mask) if start_at_layer is None else input
        residual = self.run_layers(residual, start_at_layer, stop_at_layer, attention_mask)
        if stop_at_layer is not None:
            return residual
        output = self.read_out(residual)
        if return_type is None:
            return None
        return output[:, -1] if self.reads_vectors else output

    def forward_readout(self, x: Tensor) -> Float[Tensor, "batch d_output"]:
        """The output at the last position alone, computed faster: the last block runs only there.

        Its numbers are those of ``model(x)`` for vector tokens, read at CLS (eq 2), and those of
        ``model(x)[:, -1]`` for token ids. Hooks of the last block see a single query here: probe
        ``model(x)`` instead.
        """
        residual = self.run_layers(self.embedded(x), stop=-1)
        return self.read_out(self.blocks[-1].at_the_last_position(residual))[:, 0]

    def embedded(
        self, x: Tensor, attention_mask: Tensor | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream that enters the first block."""
        if isinstance(x, Tensor) and x.ndim == 1 and not self.reads_vectors:
            x = x[None]
        self.check_input(x, attention_mask)
        x = x.to(self.embed.W_E.device)
        if self.cfg.use_hook_tokens:
            x = self.hook_tokens(x)
        embedded: Tensor = self.hook_embed(self.embed(x))
        if self.cfg.positional_embedding_type == "standard":
            positions = self.pos_embed(*embedded.shape[:2], attention_mask)
            embedded = embedded + self.hook_pos_embed(positions)
        return embedded

    def run_layers(
        self,
        residual: Float[Tensor, "batch pos d_model"],
        start: int | None = None,
        stop: int | None = None,
        attention_mask: Int[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream after the blocks from `start` up to, but not with, `stop`."""
        for block in list(self.blocks)[start:stop]:
            residual = block(residual, attention_mask)
        return residual

    def read_out(
        self, residual: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_output"]:
        """The output at every position of a residual stream that has passed all blocks."""
        if self.cfg.normalization_type is not None:
            residual = self.ln_final(residual)
        output: Tensor = self.unembed(residual)
        return output

    def run_with_cache(
        self,
        *model_args: Any,
        return_cache_object: bool = True,
        remove_batch_dim: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As in TransformerLens; with layers of different head counts, a `MixedHeadsCache`."""
        output, activations = HookedRootModule.run_with_cache(
            self, *model_args, remove_batch_dim=remove_batch_dim, **kwargs
        )
        if not return_cache_object:
            return output, activations
        mixed = len(set(self.heads_of_layers)) > 1
        cache = (MixedHeadsCache if mixed else ActivationCache)(
            activations, self, has_batch_dim=not remove_batch_dim
        )
        return output, cache

    def check_hooks_to_add(
        self,
        hook_point: HookPoint,
        hook_point_name: str,
        hook: Any,
        dir: Any = "fwd",
        is_permanent: bool = False,
        prepend: bool = False,
    ) -> None:
        """Refuse hooks that would never fire.

        Raises:
            InfoFlowError: for a hook point whose flag is not set.
        """
        for ending, flag in _FLAGS.items():
            if hook_point_name.endswith(ending) and not getattr(self.cfg, flag):
                raise InfoFlowError(
                    f"{hook_point_name} does not fire while cfg.{flag} is False: call "
                    f"model.set_{flag}(True) first"
                )

    # Device, precision, weights

    def to(self, *args: Any, print_details: bool = False, **kwargs: Any) -> Any:
        """As ``nn.Module.to``; HookedTransformer's `print_details` is taken, and prints nothing."""
        return nn.Module.to(self, *args, **kwargs)

    def cuda(self, device: int | torch.device | None = None) -> Any:
        """As ``nn.Module.cuda``."""
        return nn.Module.cuda(self, device)

    def cpu(self) -> Any:
        """As ``nn.Module.cpu``."""
        return nn.Module.cpu(self)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Whatever moves the tensors (to, cuda, double, ...) moves the config with them."""
        nn.Module._apply(self, *args, **kwargs)
        weight = self.unembed.W_U
        self.cfg.device, self.cfg.dtype = str(weight.device), weight.dtype
        return self

    def init_weights(self) -> None:
        """Draw all weight matrices, in the order of the parameters; biases stay 0."""
        draw = _INITIALISATIONS[self.cfg.init_mode]
        for name, parameter in self.named_parameters():
            if "W_" in name:
                draw(parameter, self.cfg.initializer_range)

    set_use_attn_result = _setter(
        "use_attn_result", "Whether ``hook_result`` fires with what each head writes."
    )
    set_use_split_qkv_input = _setter(
        "use_split_qkv_input",
        "Whether queries, keys and values of each head have inputs of their own, with hooks.",
    )
    set_use_attn_in = _setter(
        "use_attn_in", "Whether each head has an input of its own, with a hook."
    )

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Whether ``hook_mlp_in`` fires.

        Raises:
            InfoFlowError: for an attention-only model.
        """
        if self.cfg.attn_only and use_hook_mlp_in:
            raise InfoFlowError(
                "the model is attention-only and has no hook_mlp_in: expected a model with d_mlp"
            )
        self.cfg.use_hook_mlp_in = use_hook_mlp_in

    # What ActivationCache and the tools of TransformerLens read from a model

    @property
    def heads_of_layers(self) -> tuple[int, ...]:
        """The number of heads of each layer."""
        return tuple(block.attn.W_Q.shape[0] for block in self.blocks)

    @property
    def n_params_total(self) -> int:
        """The number of all parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    W_E = _part(
        "embed", "W_E", "of the embedding, [d_vocab, d_model]; of vectors, [d_token, d_model]"
    )
    W_pos = _part("pos_embed", "W_pos", "of the positions, [n_ctx, d_model]")
    W_U = _part("unembed", "W_U", "of the read-out, [d_model, d_output]")
    b_U = _part("unembed", "b_U", "of the read-out, [d_output]")
    W_Q = _of_all_layers("attn", "W_Q", "[layer, head, d_model, d_head]")
    W_K = _of_all_layers("attn", "W_K", "[layer, head, d_model, d_head]")
    W_V = _of_all_layers("attn", "W_V", "[layer, head, d_model, d_head]")
    W_O = _of_all_layers("attn", "W_O", "[layer, head, d_head, d_model]")
    b_Q = _of_all_layers("attn", "b_Q", "[layer, head, d_head]")
    b_K = _of_all_layers("attn", "b_K", "[layer, head, d_head]")
    b_V = _of_all_layers("attn", "b_V", "[layer, head, d_head]")
    b_O = _of_all_layers("attn", "b_O", "[layer, d_model]")
    W_in = _of_all_layers("mlp", "W_in", "[layer, d_model, d_mlp]")
    b_in = _of_all_layers("mlp", "b_in", "[layer, d_mlp]")
    W_out = _of_all_layers("mlp", "W_out", "[layer, d_mlp, d_model]")
    b_out = _of_all_layers("mlp", "b_out", "[layer, d_model]")

    @property
    def W_E_pos(self) -> Float[Tensor, "n d_model"]:
        """Rows of W_E, then of W_pos."""
        return torch.cat([self.W_E, self.W_pos])

    @property
    def QK(self) -> FactoredMatrix:
        """W_Q W_K^T of each layer and head."""
        return FactoredMatrix(self.W_Q, self.W_K.transpose(-2, -1))

    @property
    def OV(self) -> FactoredMatrix:
        """W_V W_O of each layer and head."""
        return FactoredMatrix(self.W_V, self.W_O)

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Float[Tensor, " d_model"]:
        """The sum of the biases that blocks before `layer` write to the residual stream.

        Args:
            layer: from 0 to the number of layers.
            mlp_input: count the attention of `layer` itself, too.
            include_mlp_biases: whether those of feed-forward networks count.
        """
        total = torch.zeros_like(self.unembed.W_U[:, 0])
        for block in list(self.blocks)[:layer]:
            total = total + block.attn.b_O
            if include_mlp_biases and not self.cfg.attn_only:
                total = total + block.mlp.b_out
        return total + self.blocks[layer].attn.b_O if mlp_input else total

    def all_head_labels(self) -> list[str]:
        """L0H0, L0H1, ..., with the heads that each layer has."""
        return [
            f"L{layer}H{head}"
            for layer, heads in enumerate(self.heads_of_layers)
            for head in range(heads)
        ]

    def tokens_to_residual_directions(
        self, tokens: int | Int[Tensor, "..."]
    ) -> Float[Tensor, "... d_model"]:
        """Columns of W_U: directions that outputs are read from.

        Args:
            tokens: numbers of outputs; a single one gives a vector, whatever its shape.

        Raises:
            InfoFlowError: for words; hosted models have no tokenizer.
        """
        if isinstance(tokens, str):
            self.to_single_token(tokens)
        if isinstance(tokens, Tensor) and tokens.numel() > 1:
            return self.W_U[:, tokens].movedim(0, -1)
        return self.W_U[:, int(tokens)]

    def to_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Refused.

        Raises:
            InfoFlowError: always.
        """
        raise InfoFlowError(
            "the model has no tokenizer: expected vectors or token ids as a task gives them, no "
            "text"
        )

    def to_single_token(self, *args: Any, **kwargs: Any) -> Any:
        """Refused.

        Raises:
            InfoFlowError: always.
        """
        raise InfoFlowError("the model has no tokenizer: expected the number of an output, no text")
