"""The models: transformers' GPT-2, so that what is saved loads like any other model."""

from typing import TYPE_CHECKING, cast

import torch

from infoflow_lens.foundation.modules import SeededRandom, derive_seed
from infoflow_lens.studies.language_model.config import LanguageModelConfig
from infoflow_lens.studies.language_model.tokens import END_OF_TEXT_ID

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel


def build_language_model(config: LanguageModelConfig) -> "GPT2LMHeadModel":
    """Return a model with initial weights, which depend on the config alone.

    GPT-2's format has no block without an MLP. The blocks of an attention-only model have one of
    width 1 whose weights are zero and are not trained: it adds exactly nothing. Embedding and
    unembedding are two matrices, as a model without MLPs can hardly do bigrams with one.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = GPT2Config(
        vocab_size=config.vocabulary,
        n_positions=config.n_context,
        n_embd=config.d_model,
        n_layer=config.n_layers,
        n_head=config.n_heads,
        # GPT-2 has an MLP in every block; one of zeros adds nothing
        n_inner=1 if config.attention_only else 4 * config.d_model,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        architectures=["GPT2LMHeadModel"],
    )
    settings._attn_implementation = "sdpa"
    # from a generator of their own, whatever was drawn before
    with SeededRandom(derive_seed("weights", config.seed)):
        model = GPT2LMHeadModel(settings)
    if config.attention_only:
        for block in model.transformer.h:
            for parameter in cast("torch.nn.Module", block.mlp).parameters():
                torch.nn.init.zeros_(parameter)
            block.mlp.requires_grad_(False)
            block.ln_2.requires_grad_(False)  # only the MLP reads it
    return model
