"""The hosted models, made of TransformerLens 3's own blocks: HookedTransformer itself.

A HookedTransformer has one number of heads, reads token ids and lets every position be a key. Here
its blocks are replaced, one by one, by blocks with configs of their own, and its embedding by the
hosted model's; every operation between is TransformerLens's. For TransformerLens 3 alone.
"""

import dataclasses
import math
import warnings

import torch
from torch import nn

from infoflow_lens.models.attention import set_attention
from infoflow_lens.models.host import TokenTransformer, VectorEmbed, VectorTransformer

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.components import Attention, TransformerBlock


class _ClsQueryAttention(Attention):
    def calculate_attention_scores(self, q, k):
        scores = super().calculate_attention_scores(q, k)
        n_keys = scores.shape[-1]
        is_cls = torch.arange(n_keys, device=scores.device) == n_keys - 1
        return scores.masked_fill(is_cls, -torch.inf)


class _Twin(HookedTransformer):
    def __init__(self, architecture, **settings):
        cfg = HookedTransformerConfig(
            n_layers=architecture.n_layers,
            d_model=architecture.d_model,
            n_heads=architecture.n_heads[0],
            attention_dir="bidirectional",
            positional_embedding_type="standard",
            init_weights=False,
            device="cpu",
            **settings,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            super().__init__(cfg)
        self.architecture = architecture

    def replace_blocks(self, d_heads, attn_scale, attention):
        for layer, (heads, d_head) in enumerate(
            zip(self.architecture.n_heads, d_heads, strict=True)
        ):
            cfg = dataclasses.replace(
                self.cfg, n_heads=heads, d_head=d_head, attn_scale=attn_scale(d_head)
            )
            self.blocks[layer] = TransformerBlock(cfg, layer)
            self.blocks[layer].attn = attention(cfg, "global", layer)

    def to(self, device_or_dtype, print_details=False):
        """With the configs of the blocks, which TransformerLens's layer norms look into."""
        super().to(device_or_dtype, print_details=False)
        for module in self.modules():
            if hasattr(module, "cfg"):
                module.cfg.dtype = self.cfg.dtype
        return self

    def forward_readout(self, x):
        residual, *_ = self.input_to_embed(x)
        *blocks, last = self.blocks
        for block in blocks:
            residual = block(residual)
        keys = last.ln1(residual)
        read = residual[:, -1:]
        read = read + last.attn(query_input=keys[:, -1:], key_input=keys, value_input=keys)
        if not self.cfg.attn_only:
            read = read + last.mlp(last.ln2(read))
        if self.cfg.normalization_type is not None:
            read = self.ln_final(read)
        return self.unembed(read)[:, 0]


class _VectorTwin(_Twin):
    reads_vectors = True

    def __init__(self, architecture):
        super().__init__(
            architecture,
            n_ctx=architecture.n_tokens + 1,
            d_head=architecture.head_dimensions[0],
            d_mlp=architecture.d_mlp or None,
            attn_only=architecture.d_mlp == 0,
            act_fn=architecture.act_fn,
            d_vocab=1,
            d_vocab_out=architecture.d_output,
            normalization_type=None if architecture.normalization == "none" else "LN",
            use_hook_tokens=True,
            init_mode=architecture.init_mode,
        )
        self.embed = VectorEmbed(architecture)
        if architecture.positional_embedding == "none":
            del self.pos_embed, self.hook_pos_embed
        beta = architecture.attn_scale
        self.replace_blocks(
            architecture.head_dimensions,
            lambda d_head: math.sqrt(d_head) if beta is None else 1 / beta,
            Attention if architecture.cls_is_key else _ClsQueryAttention,
        )

    def input_to_embed(self, input, **_):
        tokens = self.hook_tokens(input)
        residual = self.hook_embed(self.embed(tokens))
        if self.architecture.positional_embedding == "learned":
            positions = self.pos_embed.W_pos.repeat(residual.shape[0], 1, 1)
            residual = residual + self.hook_pos_embed(positions)
        return residual, tokens, None, None

    def forward(self, input, **kwargs):
        return super().forward(input, **kwargs)[:, -1]


class _TokenTwin(_Twin):
    def __init__(self, architecture):
        super().__init__(
            architecture,
            n_ctx=architecture.n_tokens,
            d_head=architecture.d_head,
            d_vocab=architecture.d_vocab,
            d_vocab_out=architecture.d_output,
            attn_only=True,
            normalization_type=None,
            use_attn_scale=False,
        )
        d_heads = [architecture.d_head] * architecture.n_layers
        self.replace_blocks(d_heads, lambda _: 1.0, Attention)


def twin_of(model: VectorTransformer | TokenTransformer, seed: int | None = None) -> nn.Module:
    """A HookedTransformer of the same function, with the same weights.

    Args:
        model: a hosted model.
        seed: for weights that HookedTransformer draws, instead of those of `model`.
    """
    kind = _VectorTwin if isinstance(model, VectorTransformer) else _TokenTwin
    with torch.random.fork_rng(devices=[]):
        twin = kind(model.architecture)
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            twin.init_weights()
    set_attention(twin, model.architecture.attention)
    if seed is None:
        twin.load_state_dict(model.state_dict())
    for name, parameter in model.named_parameters():
        twin.get_parameter(name).requires_grad_(parameter.requires_grad)
    return twin.train(model.training)
