"""The hosted model, written out: eqs 1-2 with the paper's loops as einsums."""

import torch
from einops import einsum, rearrange
from torch import Tensor

ACTIVATIONS = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "square": torch.square,
}


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def forward(architecture, state: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    """The output, and the residual stream after attention and after the block, layer by layer."""
    act = ACTIVATIONS[architecture.act_fn]
    if architecture.d_encoder is not None:
        x = act(x @ state["embed.W_hidden"] + state["embed.b_hidden"])
    tokens = einsum(x, state["embed.W_E"], "b t d, d e -> b t e") + state["embed.b_E"]
    cls = state["embed.W_cls"].expand(len(x), 1, -1)
    resid = torch.cat([tokens, cls], dim=1)
    if architecture.positional_embedding == "learned":
        resid = resid + state["pos_embed.W_pos"]
    n_keys = resid.shape[1] if architecture.cls_is_key else resid.shape[1] - 1
    out = {}
    for layer, d_head in enumerate(architecture.head_dimensions):

        def weight(name, layer=layer):
            return state[f"blocks.{layer}.{name}"]

        read = resid
        if architecture.normalization == "LN":
            read = layer_norm(resid, weight("ln1.w"), weight("ln1.b"))
        keys = read[:, :n_keys]
        q = einsum(read, weight("attn.W_Q"), "b t e, h e n -> b h t n")
        k = einsum(keys, weight("attn.W_K"), "b s e, h e n -> b h s n")
        v = einsum(keys, weight("attn.W_V"), "b s e, h e n -> b h s n")
        q = q + rearrange(weight("attn.b_Q"), "h n -> h 1 n")
        k = k + rearrange(weight("attn.b_K"), "h n -> h 1 n")
        v = v + rearrange(weight("attn.b_V"), "h n -> h 1 n")
        beta = architecture.attn_scale or d_head**-0.5
        pattern = torch.softmax(beta * einsum(q, k, "b h t n, b h s n -> b h t s"), dim=-1)
        z = einsum(pattern, v, "b h t s, b h s n -> b h t n")
        resid = resid + einsum(z, weight("attn.W_O"), "b h t n, h n e -> b t e")
        resid = resid + weight("attn.b_O")
        out[f"post_attention.{layer}"] = resid
        if architecture.d_mlp:
            read = resid
            if architecture.normalization == "LN":
                read = layer_norm(resid, weight("ln2.w"), weight("ln2.b"))
            hidden = act(read @ weight("mlp.W_in") + weight("mlp.b_in"))
            resid = resid + hidden @ weight("mlp.W_out") + weight("mlp.b_out")
        out[f"resid_post.{layer}"] = resid
    cls = resid[:, -1]
    if architecture.normalization == "LN":
        cls = layer_norm(cls, state["ln_final.w"], state["ln_final.b"])
    out["output"] = cls @ state["unembed.W_U"] + state["unembed.b_U"]
    return out
