"""Many models of one architecture in one pass: their weights stacked, a seed before all else.

The read-out at CLS of hosted models over vector tokens, in the same operations, batched. It is a
second way to the numbers of `VectorTransformer.forward_readout`, for training alone: it has no
hook points. (``torch.func.vmap`` over the hosted modules gives the same numbers with no code of its
own, and takes longer: see ``benchmarks/README.md``.)
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.models.blocks import Attention, LayerNorm
from infoflow_lens.models.host import VectorTransformer

Weights = Mapping[str, Float[Tensor, "seed ..."]]  # by the names of the models' parameters


def check_stackable(models: Sequence[object]) -> None:
    """Refuse models that cannot be computed together.

    Raises:
        InfoFlowError: unless all are models over vector tokens of one architecture, precision and
            device, without hooks and with all their parameters to be trained.
    """
    for index, model in enumerate(models):
        what = f"models[{index}]"
        if not isinstance(model, VectorTransformer):
            raise InfoFlowError(
                f"{what} is a {type(model).__name__}: expected a model of build_model; train "
                "others one by one, with train"
            )
        first = models[0]
        # what all models share is read off the first
        assert isinstance(first, VectorTransformer)
        for attribute, ours, theirs in (
            ("architecture", model.architecture, first.architecture),
            ("attention", _patterns(model), _patterns(first)),
            ("precision", model.cfg.dtype, first.cfg.dtype),
            ("device", model.cfg.device, first.cfg.device),
        ):
            if ours != theirs:
                raise InfoFlowError(
                    f"{what} has another {attribute} than models[0]: {ours} and {theirs}; expected "
                    "the same in all"
                )
        hooked = [name for name, point in model.hook_dict.items() if point.has_hooks()]
        if hooked:
            raise InfoFlowError(
                f"{what} has hooks on {', '.join(hooked)}, which would not run: expected none; "
                "take them off with reset_hooks(including_permanent=True), or use train"
            )
        # weights of all models take part in one step, so none can stand still
        fixed = [name for name, p in model.named_parameters() if not p.requires_grad]
        if fixed:
            raise InfoFlowError(
                f"{what} has fixed parameters ({', '.join(fixed)}): expected all to be trained; "
                "set their requires_grad_(True), or use train"
            )


def _patterns(model: VectorTransformer) -> list[str]:
    return [getattr(block.attn.hook_pattern, "kind", "softmax") for block in model.blocks]


def compute_readouts(
    model: VectorTransformer, weights: Weights, x: Float[Tensor, "seed batch pos d_token"]
) -> Float[Tensor, "seed batch d_output"]:
    """Compute the output at CLS (eq 2) of models with these weights; the last block runs at CLS.

    Args:
        model: one of the models, for all that is no weight.
        weights: of all models.
        x: sequences of each model.
    """
    embed = model.embed
    if hasattr(embed, "W_hidden"):
        x = _affine(x, weights["embed.W_hidden"], weights["embed.b_hidden"])
        x = embed.hidden_fn(x)
    tokens = _affine(x, weights["embed.W_E"], weights["embed.b_E"])
    # one CLS vector a seed, behind the tokens of each of its sequences
    cls = weights["embed.W_cls"][:, None].expand(-1, tokens.shape[1], -1, -1)
    residual = torch.cat([tokens, cls], dim=2)
    if "pos_embed.W_pos" in weights:
        residual = residual + weights["pos_embed.W_pos"][:, None]
    last = len(model.blocks) - 1
    for index, block in enumerate(model.blocks):
        name = f"blocks.{index}"
        keys = _normalize(residual, weights, f"{name}.ln1", block.ln1)
        # only CLS is read, so the last block runs there alone
        if index == last:
            residual, queries = residual[:, :, -1:], keys[:, :, -1:]
        else:
            queries = keys
        # no query attends to CLS, as in eq 1 of the InfoFlow paper
        if not block.attn.last_is_key:
            keys = keys[:, :, :-1]
        residual = residual + _attention(queries, keys, weights, f"{name}.attn", block.attn)
        if not model.cfg.attn_only:
            hidden = _normalize(residual, weights, f"{name}.ln2", block.ln2)
            hidden = _affine(hidden, weights[f"{name}.mlp.W_in"], weights[f"{name}.mlp.b_in"])
            hidden = block.mlp.act_fn(hidden)
            residual = residual + _affine(
                hidden, weights[f"{name}.mlp.W_out"], weights[f"{name}.mlp.b_out"]
            )
    if model.cfg.normalization_type is not None:
        residual = _normalize(residual, weights, "ln_final", model.ln_final)
    return _affine(residual, weights["unembed.W_U"], weights["unembed.b_U"])[:, :, 0]


def _affine(
    x: Float[Tensor, "seed batch pos m"],
    weight: Float[Tensor, "seed m n"],
    bias: Float[Tensor, "seed n"],
) -> Float[Tensor, "seed batch pos n"]:
    # batch and positions as one axis: one matrix product a seed, the bias in it
    product = torch.baddbmm(bias[:, None], x.flatten(1, 2), weight)
    return product.view(*x.shape[:3], weight.shape[-1])


def _normalize(x: Tensor, weights: Weights, name: str, norm: torch.nn.Module) -> Tensor:
    """Apply the layer norm, where the model has it."""
    if not isinstance(norm, LayerNorm):
        return x
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()
    w, b = (weights[f"{name}.{part}"][:, None, None] for part in "wb")
    return centred / scale * w + b


def _attention(
    queries: Float[Tensor, "seed batch query d_model"],
    keys: Float[Tensor, "seed batch key d_model"],
    weights: Weights,
    name: str,
    attention: Attention,
) -> Float[Tensor, "seed batch query d_model"]:
    """Compute what the heads of a layer write.

    Where there is one query a sequence, keys and values are never made: its scores are products of
    the states with W_K q, and its z are W_V of a mean of the states, which are the same numbers to
    rounding for a share of 1 / d_head of the work.
    """
    if queries.shape[2] == 1:
        z = _read_once(queries, keys, weights, name, attention)
    else:
        q, k, v = (
            _project(x, weights, name, part)
            for x, part in ((queries, "Q"), (keys, "K"), (keys, "V"))
        )
        z = _pattern((q / attention.attn_scale) @ k.transpose(-2, -1), attention) @ v
    # [seed, batch, query, head d_head], the heads beside each other as W_O reads them
    z = z.transpose(2, 3).flatten(3)
    return _affine(z, weights[f"{name}.W_O"].flatten(1, 2), weights[f"{name}.b_O"])


def _read_once(
    query: Float[Tensor, "seed batch 1 d_model"],
    states: Float[Tensor, "seed batch key d_model"],
    weights: Weights,
    name: str,
    attention: Attention,
) -> Float[Tensor, "seed batch head 1 d_head"]:
    """Compute what the heads read for one query of each sequence."""
    q = _project(query, weights, name, "Q")[:, :, :, 0] / attention.attn_scale
    w_k, b_k, w_v, b_v = (weights[f"{name}.{part}"] for part in ("W_K", "b_K", "W_V", "b_V"))
    # W_K q, once a sequence, in the place of W_K x for every key
    asked = torch.einsum("sbhe,shde->sbhd", q, w_k)
    # the keys' bias adds a constant to a query's scores, which ReLU does not ignore
    constant = torch.einsum("sbhe,she->sbh", q, b_k)[..., None]
    pattern = _pattern(asked @ states.transpose(-2, -1) + constant, attention)
    read = torch.einsum("sbhd,shde->sbhe", pattern @ states, w_v)
    # rows of ReLU attention need not sum to 1, and scale the values' bias
    return (read + pattern.sum(-1, keepdim=True) * b_v[:, None])[:, :, :, None]


def _project(
    x: Float[Tensor, "seed batch pos d_model"], weights: Weights, name: str, part: str
) -> Float[Tensor, "seed batch head pos d_head"]:
    """Compute queries, keys or values of all heads."""
    weight, bias = weights[f"{name}.W_{part}"], weights[f"{name}.b_{part}"]
    # [seed, d_model, head d_head]: one product for all heads
    flat = weight.transpose(1, 2).flatten(2)
    return _affine(x, flat, bias.flatten(1)).unflatten(-1, bias.shape[1:]).transpose(2, 3)


def _pattern(
    scores: Float[Tensor, "seed batch head *query key"], attention: Attention
) -> Float[Tensor, "seed batch head *query key"]:
    """Return attention weights."""
    # a plain hook point stands for a softmax, others bring their own function
    pattern_of = getattr(attention.hook_pattern, "pattern", None)
    if pattern_of is None:
        return functional.softmax(scores, dim=-1)
    pattern: Tensor = pattern_of(scores) + 0 * scores  # a hard maximum has a gradient, of zero
    return pattern
