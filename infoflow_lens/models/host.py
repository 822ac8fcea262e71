"""Models over vector tokens, and over token ids: made, saved and loaded.

TransformerLens's facilities work on a hosted model (caching, hooks, patching, partial runs, dtypes,
state dicts); what differs is the input, [batch, pos, d_token] real vectors, the CLS token that the
model appends, and the number of heads, which may change from layer to layer. So read head counts
from tensors, never from ``cfg.n_heads``; where they differ, what takes the heads of all layers from
one number is refused. What the models are made of is in :mod:`infoflow_lens.models.hooked`.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformer_lens.utilities.activation_functions import SUPPORTED_ACTIVATIONS

from infoflow_lens.foundation.documents import (
    header_of_tensors,
    kind_by_digest,
    kind_of_tensors,
)
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import (
    add_digest,
    atomic_paths,
    name_file_in_errors,
    user_path,
    writable_folder,
)
from infoflow_lens.foundation.modules import SeededRandom
from infoflow_lens.foundation.record import attention_kinds, fingerprint
from infoflow_lens.foundation.saving import SPOILED
from infoflow_lens.foundation.sequences import check_token_ids, check_vectors
from infoflow_lens.foundation.settings import Count, Seed, checked
from infoflow_lens.models.architecture import (
    Architecture,
    AttentionKind,
    TokenArchitecture,
    TokenInit,
)
from infoflow_lens.models.attention import set_attention
from infoflow_lens.models.blocks import Attention, TokenEmbed
from infoflow_lens.models.hooked import HookedModel, make_config
from infoflow_lens.models.pretrained import read_shapes

__all__ = [
    "TokenTransformer",
    "VectorTransformer",
    "build_model",
    "build_token_model",
    "load_model",
    "save_model",
    "zero_model",
]


class VectorEmbed(nn.Module):
    """Encodes vector tokens and appends the CLS token.

    Takes [batch, pos, d_token], returns [batch, pos + 1, d_model].
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        d_input = architecture.d_token
        self.hidden_fn = SUPPORTED_ACTIVATIONS[architecture.act_fn]
        if architecture.d_encoder is not None:
            self.W_hidden = nn.Parameter(torch.empty(d_input, architecture.d_encoder))
            self.b_hidden = nn.Parameter(torch.zeros(architecture.d_encoder))
            d_input = architecture.d_encoder
        self.W_E = nn.Parameter(torch.empty(d_input, architecture.d_model))
        self.b_E = nn.Parameter(torch.zeros(architecture.d_model))
        self.W_cls = nn.Parameter(torch.empty(1, architecture.d_model))

    def forward(self, x: Float[Tensor, "batch pos d_token"]) -> Float[Tensor, "batch all d_model"]:
        """Encode tokens and put CLS behind them."""
        if hasattr(self, "W_hidden"):
            x = self.hidden_fn(x @ self.W_hidden + self.b_hidden)
        tokens = x @ self.W_E + self.b_E
        cls = self.W_cls.expand(x.shape[0], 1, -1)
        return torch.cat([tokens, cls], dim=1)


class VectorTransformer(HookedModel):
    """A hooked Transformer that reads vector tokens and answers at its CLS token.

    ``model(x)`` takes [batch, pos, d_token] with pos = T and returns [batch, d_output]. In hooks
    and caches the position axis has length T + 1: tokens 0 .. T - 1, then CLS. ``hook_tokens``
    carries the input vectors; ``hook_embed`` the encoded tokens and CLS. Build one with
    :func:`build_model`.
    """

    reads_vectors = True

    def __init__(self, architecture: Architecture) -> None:
        beta = architecture.attn_scale
        with_positions = architecture.positional_embedding == "learned"
        cfg = make_config(
            n_layers=architecture.n_layers,
            d_model=architecture.d_model,
            n_ctx=architecture.n_tokens + 1,
            n_heads=architecture.n_heads[0],
            d_head=architecture.head_dimensions[0],
            d_mlp=architecture.d_mlp or None,
            attn_only=architecture.d_mlp == 0,
            act_fn=architecture.act_fn,
            d_vocab=1,  # no vocabulary: tokens are vectors
            d_vocab_out=architecture.d_output,
            normalization_type=None if architecture.normalization == "none" else "LN",
            # TransformerLens divides where the paper multiplies by beta; -1: by the root of d_head
            attn_scale=-1.0 if beta is None else 1 / beta,
            attention_dir="bidirectional",
            positional_embedding_type="standard" if with_positions else "none",
            use_hook_tokens=True,
            init_mode=architecture.init_mode,
            device="cpu",
        )
        # layers may differ in heads, which the config of TransformerLens cannot say
        sizes = zip(architecture.n_heads, architecture.head_dimensions, strict=True)
        attention = [
            Attention(
                cfg,
                heads,
                d_head,
                np.sqrt(d_head) if beta is None else 1 / beta,
                last_is_key=architecture.cls_is_key,
            )
            for heads, d_head in sizes
        ]
        super().__init__(cfg, VectorEmbed(architecture), attention)
        self.architecture = architecture
        set_attention(self, architecture.attention)

    def check_input(self, x: Tensor, attention_mask: Tensor | None = None) -> None:
        """Refuse what is no batch of this model's tokens.

        Raises:
            InfoFlowError: for a wrong shape or precision.
        """
        sizes = self.architecture
        check_vectors(x, sizes.n_tokens, sizes.d_token, "the model", self.embed.W_E.dtype)


class TokenTransformer(HookedModel):
    """An attention-only hooked Transformer over token ids, read at its last position.

    ``model(x)`` takes [batch, pos] and returns logits [batch, pos, d_output], of which
    ``model(x)[:, -1]`` counts. Biases are zero and fixed; the other weights wait to be
    set. Build one with :func:`build_token_model`.
    """

    def __init__(self, architecture: TokenArchitecture) -> None:
        cfg = make_config(
            n_layers=architecture.n_layers,
            n_heads=architecture.n_heads[0],
            d_head=architecture.d_head,
            d_model=architecture.d_model,
            n_ctx=architecture.n_tokens,
            d_vocab=architecture.d_vocab,
            d_vocab_out=architecture.d_output,
            attn_only=True,
            normalization_type=None,
            attention_dir="bidirectional",
            positional_embedding_type="standard",
            use_attn_scale=False,
            device="cpu",
        )
        attention = [
            Attention(cfg, heads, architecture.d_head, attn_scale=1.0)
            for heads in architecture.n_heads
        ]
        super().__init__(cfg, TokenEmbed(cfg), attention)
        self.architecture = architecture
        # the paper's models have no biases; a bridge expects the parameters to be there
        for name, parameter in self.named_parameters():
            if "b_" in name:
                parameter.requires_grad_(False)
        set_attention(self, architecture.attention)

    def check_input(self, x: Tensor, attention_mask: Tensor | None = None) -> None:
        """Refuse what is no batch of this model's token ids.

        Raises:
            InfoFlowError: for text, floats, too many tokens, or a mask of another shape.
        """
        check_token_ids(x, "the model", longest=self.architecture.n_tokens)
        if attention_mask is not None and attention_mask.shape != x.shape:
            raise InfoFlowError(
                f"attention_mask has shape {tuple(attention_mask.shape)}: expected that of the "
                f"tokens, {tuple(x.shape)}"
            )


_HOSTS: Mapping[Any, Any] = {
    Architecture: VectorTransformer,
    TokenArchitecture: TokenTransformer,
}


@checked
def build_model(
    architecture: Architecture, seed: Seed = 0, device: str | torch.device = "cpu"
) -> VectorTransformer:
    """Return a freshly initialised model; the same seed gives the same weights.

    The global random state is left as it was.

    Raises:
        InfoFlowError: for what is no Architecture, or a seed out of range.
    """
    if not isinstance(architecture, Architecture):
        raise InfoFlowError(
            f"architecture is a {type(architecture).__name__}: expected an Architecture; make one "
            "of heads and sizes, or load a model by name with load_any"
        )
    with SeededRandom(seed):
        model = VectorTransformer(architecture)
        model.init_weights()
    return model.to(device)


def zero_model(architecture: Architecture | TokenArchitecture) -> HookedModel:
    """Return a model whose weights are all zero, for weights that are set by hand."""
    model: HookedModel = _HOSTS[type(architecture)](architecture)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


@checked
def build_token_model(
    *,
    n_layers: Count,
    n_heads: Count | tuple[Count, ...],
    d_head: Count,
    d_model: Count,
    n_tokens: Count,
    d_vocab: Count,
    d_output: Count,
    attention: AttentionKind = "relu",
    init: TokenInit = "random",
    one_hot: bool = False,
    seed: Seed = 0,
    device: str | torch.device = "cpu",
) -> TokenTransformer:
    """Return a new attention-only model over token ids, as in eq 2 of Chen & Zou 2024.

    It is bidirectional, without normalization, biases or a factor on the scores, gives logits
    [batch, pos, d_output] and is read at the last position. The same seed gives the same weights;
    the global random state is left as it was.

    Args:
        n_layers: L.
        n_heads: heads of every layer, or one number for each.
        d_head: dimension of queries, keys and values; `d_model` in the paper.
        d_model: d'.
        n_tokens: n.
        d_vocab: d.
        d_output: C, the number of labels.
        attention: "relu" (the paper's), "softmax" or "hardmax".
        init: "random" for TransformerLens's own, normal with deviation 0.8 / sqrt(d_model).
            "chen_zou" for the paper's (Sec. 9.1), which trains W_QK and W_V whole: W_QK and the
            classifier uniform on [0, 1), W_V the identity [the paper: "a value of 1"]. There W_Q
            holds W_QK^T, and W_K, the identity, and W_O, the 1 / m of eq 2, are fixed. It needs
            ``d_head = d_model`` and implies `one_hot`.
        one_hot: tokens and positions enter as fixed one-hot columns (eq 3), tokens first, as in the
            constructions; else their embeddings are trained. Needs ``d_model >= d_vocab +
            n_tokens``.
        seed: of the weights.
        device: where to put the model.

    Raises:
        InfoFlowError: for sizes below 1 or that do not fit each other, or an unknown choice.
    """
    architecture = TokenArchitecture.from_layers(
        n_layers,
        n_heads,
        d_head=d_head,
        d_model=d_model,
        n_tokens=n_tokens,
        d_vocab=d_vocab,
        d_output=d_output,
        attention=attention,
    )
    if init == "chen_zou" and d_head != d_model:
        raise InfoFlowError(
            f"d_head is {d_head} and d_model {d_model} with init 'chen_zou', which has whole "
            f"matrices W_QK and W_V: expected d_head {d_model}, or init 'random'"
        )
    one_hot = one_hot or init == "chen_zou"
    if one_hot and d_model < d_vocab + n_tokens:
        raise InfoFlowError(
            f"d_model is {d_model}: one-hot tokens and positions need d_vocab + n_tokens = "
            f"{d_vocab + n_tokens}; raise d_model, or train the embeddings (init 'random' and "
            "one_hot False)"
        )
    # weights come from a generator of their own, so other draws do not change them
    with SeededRandom(seed):
        model = TokenTransformer(architecture)
        model.init_weights()
        if one_hot:
            _enter_as_one_hot(model)
        if init == "chen_zou":
            _initialise_as_chen_zou(model)
    return model.to(device)


def _fix(parameter: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)
    parameter.requires_grad_(False)


def _enter_as_one_hot(model: TokenTransformer) -> None:
    sizes = model.architecture
    units = torch.eye(sizes.d_model)
    _fix(model.embed.W_E, units[: sizes.d_vocab])
    _fix(model.pos_embed.W_pos, units[sizes.d_vocab : sizes.d_vocab + sizes.n_tokens])


def _initialise_as_chen_zou(model: TokenTransformer) -> None:
    identity = torch.eye(model.architecture.d_model)
    for block, heads in zip(model.blocks, model.architecture.n_heads, strict=True):
        nn.init.uniform_(block.attn.W_Q)
        _fix(block.attn.W_K, identity)
        with torch.no_grad():
            block.attn.W_V.copy_(identity)
        _fix(block.attn.W_O, identity / heads)
    nn.init.uniform_(model.unembed.W_U)


_ARCHITECTURE = kind_by_digest("architecture of a saved model")
_WEIGHTS = kind_of_tensors(_ARCHITECTURE, ("model ",), "architecture.json")


def save_model(
    model: VectorTransformer | TokenTransformer,
    folder: str | os.PathLike[str],
    *,
    overwrite: bool = False,
) -> None:
    """Write ``architecture.json`` and ``model.safetensors`` to `folder`.

    Of a model over token ids it keeps, too, which parameters are fixed.

    Args:
        model: a model of ours.
        folder: made if it is not there; an earlier model of ours in it is replaced.
        overwrite: whether other files of these names may be replaced, too, such as the weights of
            a model of transformers.

    Raises:
        InfoFlowError: if the folder cannot be written or holds another model, or the model is none
            of ours.
    """
    if not isinstance(model, (VectorTransformer, TokenTransformer)):
        raise InfoFlowError(
            f"model is a {type(model).__name__}: expected one of build_model, build_token_model or "
            "build_construction; of others save the state_dict"
        )
    settings = _as_it_is(model).to_dict()
    if isinstance(model, TokenTransformer):
        fixed = [name for name, p in model.named_parameters() if not p.requires_grad]
        settings["fixed"] = fixed
    path = writable_folder(folder)
    weights = _WEIGHTS.check(path / "model.safetensors", overwrite=overwrite)
    described = _ARCHITECTURE.check(path / "architecture.json", overwrite=overwrite)
    state = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    with atomic_paths([weights, described]) as (held, text), name_file_in_errors(weights):
        save_file(state, held, metadata=header_of_tensors("model", fingerprint(state)))
        text.write_text(add_digest(settings), encoding="utf-8")


def _as_it_is(model: VectorTransformer | TokenTransformer) -> Architecture | TokenArchitecture:
    """Return the architecture, with the attention that `set_attention` may have changed since."""
    kinds: set[Any] = {*attention_kinds(model)}
    if len(kinds) > 1:
        raise InfoFlowError(
            f"the layers have different attention ({', '.join(sorted(kinds))}): expected one kind "
            "in all; set it with set_attention"
        )
    return dataclasses.replace(model.architecture, attention=kinds.pop())


def load_model(
    folder: str | os.PathLike[str], device: str | torch.device = "cpu"
) -> VectorTransformer | TokenTransformer:
    """Return the model that :func:`save_model` wrote to `folder`.

    Raises:
        InfoFlowError: if the folder holds no such model.
    """
    if not isinstance(folder, (str, os.PathLike)):
        raise InfoFlowError(
            f"folder is a {type(folder).__name__}: expected a folder that save_model wrote; a "
            "model in memory is hosted by load_any(model)"
        )
    path = user_path(folder)
    missing = [n for n in ("architecture.json", "model.safetensors") if not (path / n).is_file()]
    if missing:
        raise InfoFlowError(
            f"{str(folder)!r} is no saved model ({' and '.join(missing)} missing): "
            "expected a folder written by save_model"
        )
    # all that may be wrong with a file from elsewhere is said of the folder
    try:
        settings = json.loads((path / "architecture.json").read_text(encoding="utf-8"))
        _check_shapes(settings, path)
        model = _model_of(settings)
        state = load_file(path / "model.safetensors", device=str(device))
        # loading would cast the weights to the model's precision, so the model takes theirs first
        model.to(device, state["embed.W_E"].dtype)
        model.load_state_dict(state)
    except SPOILED as error:
        if isinstance(error, InfoFlowError):
            raise
        raise InfoFlowError(
            f"the model in {str(folder)!r} cannot be read ({error}): expected a folder written by "
            "save_model"
        ) from error
    return model


def _check_shapes(settings: dict[str, Any], folder: Path) -> None:
    """Refuse sizes that are not those of the weights, before memory is taken for them.

    Raises:
        InfoFlowError: with the first weight that differs.
    """
    stored = read_shapes([folder / "model.safetensors"])
    n_stored = sum(name.endswith(".attn.W_Q") for name in stored)
    heads = settings.get("n_heads")
    # layers are counted first: a twin of a million of them takes memory even without numbers
    if isinstance(heads, (list, tuple)) and len(heads) != n_stored:
        raise InfoFlowError(
            f"architecture.json in {str(folder)!r} says {len(heads)} layers, model.safetensors "
            f"holds {n_stored}: expected a folder written by save_model"
        )
    with torch.device("meta"):  # where tensors have sizes, and no numbers
        twin = _model_of(settings)
    expected = {name: tuple(value.shape) for name, value in twin.state_dict().items()}
    # either of the two may have a weight that the other lacks
    for name in (*expected, *stored):
        if stored.get(name) != expected.get(name):
            raise InfoFlowError(
                f"architecture.json in {str(folder)!r} gives {name} the shape "
                f"{expected.get(name)}, model.safetensors {stored.get(name)}: expected a folder "
                "written by save_model"
            )


def _model_of(settings: dict[str, Any]) -> VectorTransformer | TokenTransformer:
    """Return a model of the sizes that were saved, with weights of any value."""
    kind = settings.get("kind")
    for architecture, host in _HOSTS.items():
        if architecture.kind == kind:
            fixed = settings.get("fixed")
            left_out = ("fixed", "digest")
            sizes = {name: value for name, value in settings.items() if name not in left_out}
            model: VectorTransformer | TokenTransformer = host(architecture.from_dict(sizes))
            for name, parameter in model.named_parameters():
                if fixed is not None:
                    parameter.requires_grad_(name not in fixed)
            return model
    raise InfoFlowError(
        f"the saved model is of kind {kind!r}: expected 'token', or none for vector tokens"
    )
