"""Small random models of all the types of transformers that have attention over tokens.

``build(kind)`` makes one of a type, such as "gpt2", by the config's own defaults and the sizes
below, where the config knows them: two layers, four heads. Its matrices are four times as large as
drawn, so that attention is far from uniform.
"""

import torch
import transformers

from tests.reference.copies import copied

SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "ffn_dim", "d_ff", "inner_dim", "dff"), 48),
    **dict.fromkeys(("ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("max_target_positions",), 64),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 101),
    **dict.fromkeys(("head_dim", "kv_lora_rank", "q_lora_rank", "v_head_dim", "d_kv"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "sliding_window"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "embedding_size": 16,
    "hidden_size_per_layer_input": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "multi_query": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# what single types need otherwise
OWN = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16,
              "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_expand": 2,
              "mamba_chunk_size": 4},
    "bart": {"decoder_start_token_id": 1},
    "big_bird": {"attention_type": "original_full"},
    "deepseek_v2": {"num_key_value_heads": 4, "head_dim": 4},
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": 4},
    "falcon": {"new_decoder_architecture": False, "alibi": False, "parallel_attn": True},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
                  "mamba_d_state": 8, "mamba_chunk_size": 4},
    "flaubert": {"emb_dim": 32, "n_words": 101},
    "funnel": {"block_sizes": [1, 1], "d_inner": 48, "d_head": 8},
    "gemma3n_text": {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0],
                     "layer_types": ["sliding_attention", "full_attention"], "laurel_rank": 4,
                     "intermediate_size": [48, 48]},
    "gemma4_text": {"num_kv_shared_layers": 0,
                    "layer_types": ["sliding_attention", "full_attention"]},
    "glm4_moe_lite": {"num_key_value_heads": 4, "head_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4,
                         "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8,
                         "mamba_expand": 2, "mamba_chunk_size": 4, "shared_intermediate_size": 16},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_period": 2,
              "expert_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4,
              "use_mamba_kernels": False},
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1]},
    "longformer": {"attention_window": [4, 4]},
    "mobilebert": {"intra_bottleneck_size": 32, "true_hidden_size": 32,
                   "num_feedforward_networks": 2},
    "modernbert": {"layer_types": ["full_attention", "sliding_attention"], "local_attention": 4},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": 3,
                   "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 8,
                   "chunk_size": 4},
    "qwen2_moe": {"shared_expert_intermediate_size": 16},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"],
                     "linear_num_value_heads": 2, "linear_num_key_heads": 2,
                     "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"],
                   "linear_num_value_heads": 2, "linear_num_key_heads": 2,
                   "linear_key_head_dim": 8, "linear_value_head_dim": 8,
                   "shared_expert_intermediate_size": 16},
    "recurrent_gemma": {"lru_width": 32, "block_types": ["recurrent", "attention"],
                        "attention_window_size": 4},
    "squeezebert": {"embedding_size": 32, "q_groups": 2, "k_groups": 2, "v_groups": 2,
                    "post_attention_groups": 1, "intermediate_groups": 2, "output_groups": 2},
    "t5": {"decoder_start_token_id": 0},
    "vit": {"image_size": 8, "patch_size": 4},
    "whisper": {"num_mel_bins": 8, "max_source_positions": 6, "decoder_start_token_id": 1},
    "xlm": {"emb_dim": 32, "n_words": 101},
    "xlnet": {"d_inner": 48},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "mamba_ngroups": 1, "n_mamba_heads": 4,
               "mamba_d_state": 8, "mamba_headdim": 16, "num_mem_blocks": 1, "chunk_size": 4},
}  # fmt: skip
_CAUSAL = """
gpt2 gpt_neo gptj gpt_neox opt bloom codegen falcon mpt llama mistral mixtral qwen2 qwen3 qwen3_moe
gemma gemma2 gemma3_text gpt_oss phi phi3 cohere cohere2 olmo olmo2 olmo3 starcoder2 stablelm
gpt_bigcode granite glm glm4 deepseek_v2 deepseek_v3 xglm biogpt persimmon smollm3 ernie4_5 exaone4
nemotron openai-gpt ctrl qwen2_moe olmoe granitemoe helium arcee jamba lfm2 gemma4_text gemma3n_text
diffllama seed_oss bitnet recurrent_gemma qwen3_next bamba zamba2 apertus doge minimax phimoe
hunyuan_v1_dense qwen3_5_text granitemoehybrid nemotron_h afmoe laguna granite_swa deepseek_v4
falcon_h1
"""
_ENCODERS = """
bert albert roberta distilbert electra modernbert xlnet deberta deberta-v2 mpnet roformer esm
nystromformer mobilebert squeezebert camembert xlm-roberta bert-generation data2vec-text funnel xlm
flaubert convbert longformer big_bird ernie megatron-bert ibert layoutlm rembert nomic_bert
clip_text_model eurobert fnet
"""
CAUSAL, ENCODERS = _CAUSAL.split(), _ENCODERS.split()
KINDS = CAUSAL + ENCODERS


@copied
def build(kind, attn_implementation="eager", auto=None, **settings):
    """A model of a type, in evaluation mode.

    Args:
        kind: the type, as transformers calls it.
        attn_implementation: as transformers calls it; it raises ValueError where it has none.
        auto: the classes to try, by name; default, with a language head, then without.
        settings: of the config, beside those above.
    """
    config_class = transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind]
    names = {*config_class().to_dict(), *getattr(config_class, "attribute_map", {})}
    sizes = {name: value for name, value in SIZES.items() if name in names}
    config = config_class(**(sizes | OWN.get(kind, {}) | settings))
    if len(getattr(config, "layer_types", None) or ()) > 2:
        config.layer_types = config.layer_types[:2]
    if kind in ENCODERS and getattr(config, "is_decoder", None):
        config.is_decoder = False
    head = "AutoModelForMaskedLM" if kind in ENCODERS else "AutoModelForCausalLM"
    error = None
    for name in auto or (head, "AutoModel"):
        try:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                made = getattr(transformers, name).from_config(
                    config, attn_implementation=attn_implementation
                )
            break
        except (ValueError, KeyError) as raised:
            error = raised
    else:
        raise error
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim > 1 and "norm" not in name.lower():
                parameter.mul_(4)
            parameter.requires_grad_(False)
    return made.eval()


def tokens(n_pos=7):
    """Ids [2, n_pos]."""
    return torch.randint(3, 100, (2, n_pos), generator=torch.Generator().manual_seed(1))


def masks(ids):
    """What a call takes beside the ids, by where padding stands."""
    right, left = torch.ones_like(ids), torch.ones_like(ids)
    right[1, -3:] = 0
    left[1, :3] = 0
    return {"none": {}, "right": {"attention_mask": right}, "left": {"attention_mask": left}}
